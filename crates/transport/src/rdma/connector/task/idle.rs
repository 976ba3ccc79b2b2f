//! Whether the peer of an end that nothing is posted on is still there.
//!
//! Of an end that a peer has opened, and that no rail of ours uses, nobody hears when the peer's
//! process or host dies: RDMA tells a target nothing. So such an end is probed now and then, by a
//! READ of no bytes, as rails are: it needs no key, every peer's device answers it, a stopped
//! process's too, and where it is not answered the queue pair breaks and the end is closed as
//! always. One end of a NIC is probed at a time. The data thread has the queue pairs only as long.
//!
//! soft-RoCE looks the key of a READ up that it repeats, though it reads nothing. There a lost
//! packet of a probe costs the connection of a peer that lives: it is made anew.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use rerail_verbs::{RemoteAddress, WcStatus};
use tokio::sync::OwnedSemaphorePermit;

use super::{EndpointTask, Mail, Order};
use crate::machine::Time;
use crate::rdma::inbox::Probe;

/// How long a probe may take, and wait before it is posted. One in flight ends sooner by itself:
/// this is for a NIC whose gate is closed.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// The right to probe an end of a NIC.
pub(in crate::rdma::connector) type Turn = OwnedSemaphorePermit;

/// What is known of an end that nothing is posted on.
#[derive(Default)]
pub(super) struct Idle {
    /// When it is to be probed.
    due: Option<Time>,
    /// A turn is waited for.
    asks: bool,
    /// It is being probed, until then at most.
    turn: Option<(Turn, Time)>,
    /// The data thread has the queue pairs for the probe only.
    pub(super) is_lent: bool,
    /// Drains that the data thread will report because it gave the queue pairs back.
    given_back: u32,
}

impl Idle {
    /// It is being closed: nothing is probed any more.
    pub(super) fn end(&mut self) -> Self {
        Self {
            given_back: self.given_back,
            ..Self::default()
        }
    }

    /// Whether a drain that is reported is that of an end which goes on.
    pub(super) fn was_only_lent(&mut self) -> bool {
        let only_lent = self.given_back > 0;
        self.given_back = self.given_back.saturating_sub(1);
        only_lent
    }
}

impl EndpointTask {
    /// When [`look_after`](Self::look_after) is next to be called.
    pub(super) fn idle_due(&self) -> Option<Time> {
        match &self.idle.turn {
            Some((_, until)) => Some(*until),
            None => self.idle.due.filter(|_| !self.idle.asks),
        }
    }

    /// Leaves the peer alone for a while, which differs from end to end.
    pub(super) fn leave_alone(&mut self) {
        let shared = &self.connector.shared;
        let longest = shared.config.limits.idle;
        let shorter = self.connector.chance().random_range(0.0..0.25);
        self.idle.due = Some(shared.clock.now() + longest.mul_f64(1.0 - shorter));
    }

    /// Asks for a turn to probe the peer, if it is time to and nothing else would tell.
    pub(super) async fn look_after(&mut self, now: Time) {
        if self.idle_due().is_none_or(|due| now < due) {
            return;
        }
        if self.idle.turn.is_some() {
            return self.end_turn(false).await;
        }
        self.leave_alone();
        if !self.machine.is_connected() || !self.rails.is_empty() {
            return;
        }
        self.idle.asks = true;
        let (turns, mailbox) = (self.connector.turns(&self.nic), self.mailbox.clone());
        self.connector.shared.tasks.spawn(async move {
            // Never closed.
            if let Ok(turn) = turns.acquire_owned().await {
                let _ = mailbox.send(Mail::Turn(turn));
            }
        });
    }

    /// It is its turn.
    pub(super) async fn take_turn(&mut self, now: Time, turn: Turn) {
        self.idle.asks = false;
        let is_idle = self.machine.is_connected() && self.rails.is_empty();
        let (Some(pairs), Some(rail)) = (&self.pairs, self.connector.probing_rail(&self.nic))
        else {
            return;
        };
        // Nothing is posted through a closed gate, and others would wait.
        if !is_idle || !self.nic.is_gate_open() {
            return;
        }
        let attach = Order::Attach {
            endpoint: self.key,
            rail: Arc::clone(&rail),
            pairs: Arc::clone(pairs),
            gate: Arc::clone(&self.gate),
        };
        self.idle.turn = Some((turn, now + PROBE_LIMIT));
        self.idle.is_lent |= !self.attached;
        self.attached = true;
        self.order(attach).await;
        self.order(Order::Probe(Probe {
            rail,
            probe: self.key,
            remote: RemoteAddress { addr: 0, rkey: 0 },
            length: 0,
        }))
        .await;
    }

    /// Its probe came back. That of one that failed has broken the queue pair, which the data
    /// thread reports by itself.
    pub(super) async fn probed(&mut self, status: WcStatus) {
        if self.idle.turn.is_some() {
            self.end_turn(status == WcStatus::Success).await;
        }
    }

    /// Makes room for the next end of the NIC. The data thread gives the queue pairs back, unless
    /// something may be in flight on them.
    async fn end_turn(&mut self, has_come_back: bool) {
        let turn = self.idle.turn.take();
        if let Some(rail) = self.connector.probing_rail(&self.nic) {
            self.order(Order::Unlink(rail)).await;
        }
        if self.idle.is_lent && has_come_back && self.machine.is_connected() {
            self.idle.is_lent = false;
            self.attached = false;
            self.idle.given_back += 1;
            self.order(Order::AwaitDrain(self.key)).await;
        }
        self.leave_alone();
        drop(turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_drain_of_queue_pairs_that_were_only_lent_is_told_from_that_of_the_end() {
        let mut idle = Idle {
            given_back: 2,
            ..Idle::default()
        };
        assert!(idle.was_only_lent());
        // Its report may still be under way when the end begins to close.
        idle = idle.end();
        assert!(idle.was_only_lent());
        assert!(!idle.was_only_lent(), "this one ends it");
    }
}
