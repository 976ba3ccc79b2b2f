//! How long control verbs take.

use std::time::Duration;

use super::core::Core;
use super::node::{NicId, ProcessId};
use super::slab::Handle;
use super::trace::trace;
use crate::{QpState, RtrAttr};

impl Core {
    /// Every control verb on the adapter waits so long from now on: firmware that hangs.
    pub(super) fn hang_control(&mut self, nic: NicId, how_long: Duration) {
        self.nics[nic.0].hangs_until = self.now.saturating_add(how_long);
        trace!(self, "{} hangs", self.nic_name(nic));
    }

    /// Adds to the time that the context's verbs should have taken.
    pub(super) fn charge(&mut self, context: Handle, delay: Duration) {
        if let Some(context) = self.contexts.get_mut(context) {
            context.verb_time += delay;
        }
    }

    pub(super) fn take_verb_time(&mut self, process: ProcessId, nic: NicId) -> Duration {
        let wanted = self
            .contexts
            .handles(|context| context.process == process && context.nic == nic);
        let mut sum = Duration::ZERO;
        for handle in wanted {
            if let Some(context) = self.contexts.get_mut(handle) {
                sum += std::mem::take(&mut context.verb_time);
            }
        }
        sum
    }

    /// How long a verb of the context waits before it is carried out. A dead context's verbs
    /// fail at once.
    pub(super) fn verb_delay(&self, context: Handle) -> Duration {
        let Some(context) = self.contexts.get(context).filter(|context| !context.dead) else {
            return Duration::ZERO;
        };
        let until = self.nics[context.nic.0].hangs_until;
        until.saturating_sub(self.now)
    }

    pub(super) fn open_delay(&self, nic: NicId) -> Duration {
        self.nics[nic.0].hangs_until.saturating_sub(self.now)
    }

    pub(super) fn pair_delay(&self, pair: Handle) -> Duration {
        let context = self.pairs.get(pair).map(|pair| pair.context);
        context.map_or(Duration::ZERO, |context| self.verb_delay(context))
    }

    /// How long RTR takes: a second while the kernel resolves the neighbour, whether it answers
    /// or not; nothing when the attributes are refused out of hand.
    pub(super) fn rtr_delay(&mut self, pair: Handle, attr: &RtrAttr) -> Duration {
        let hang = self.pair_delay(pair);
        let Ok(at) = self.pair(pair).map(|pair| pair.at()) else {
            return hang;
        };
        if self.check_rtr(pair, attr).is_err() {
            return hang;
        }
        let (min, max) = (self.options.rtr_min, self.options.rtr_max);
        let own = match self.unresolved(at, attr) {
            Some(_) => self.options.neighbour_resolution,
            None => self.rng.between(min, max),
        };
        hang.saturating_add(own)
    }

    /// How long destroying a pair takes: seconds on soft-RoCE while it is retransmitting, unless it
    /// was moved to ERR first.
    pub(super) fn destroy_delay(&self, pair: Handle) -> Duration {
        let hang = self.pair_delay(pair);
        let retransmitting = self
            .pairs
            .get(pair)
            .is_some_and(|pair| pair.state == QpState::ReadyToSend && pair.send.retries > 0);
        if retransmitting {
            hang.saturating_add(self.options.destroy_while_retransmitting)
        } else {
            hang
        }
    }
}
