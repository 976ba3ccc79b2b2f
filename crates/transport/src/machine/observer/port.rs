//! One port: when it is read, and what its readings lead to.

use std::collections::VecDeque;

use rerail_verbs::{Gid, LinkLayer};

use super::facts::{compare, is_down};
use super::gid::{Choice, PortGids};
use super::{
    Action, Changes, CloseCause, CutCause, FailReason, ObserverConfig, Outcome, PortFacts,
    PortReading, ReadFailure, ReadId,
};
use crate::machine::Time;
use crate::machine::time::earliest;

/// Where the reading of a port stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Nothing is asked.
    Idle,
    /// A reading is out.
    Reading { number: u64, since: Time },
    /// A reading failed and is asked again at a time.
    Retry { at: Time },
    /// The context is dead: there is nothing to ask.
    Dead,
}

/// What is known and done about one port of a context.
#[derive(Clone, Debug)]
pub(super) struct PortWatch {
    port: u32,
    gid: PortGids,
    published: Option<PortFacts>,
    gate_open: bool,
    phase: Phase,
    /// Failed attempts of the reading that is under way.
    attempts: u32,
    reads: u64,
    /// Something may have changed since the last reading was asked.
    dirty: bool,
    /// A sticky event came after the last reading was asked: it cannot re-open the gate.
    sticky_unread: bool,
    /// Until then an event does not cause a reading of its own.
    quiet_until: Time,
    recheck_at: Time,
    failed: bool,
}

impl PortWatch {
    pub(super) fn new(port: u32, gid: PortGids) -> Self {
        Self {
            port,
            gid,
            published: None,
            gate_open: false,
            phase: Phase::Idle,
            attempts: 0,
            reads: 0,
            dirty: false,
            sticky_unread: false,
            quiet_until: Time::ZERO,
            recheck_at: Time::ZERO,
            failed: false,
        }
    }

    pub(super) fn number(&self) -> u32 {
        self.port
    }

    pub(super) fn published(&self) -> Option<&PortFacts> {
        self.published.as_ref()
    }

    pub(super) fn gate_open(&self) -> bool {
        self.gate_open
    }

    fn go(&mut self, to: Phase) {
        #[cfg(test)]
        crate::machine::seen::follows_on(&self.phase, &to);
        self.phase = to;
    }

    /// Closes the gate if it is open. Nothing is asked before this.
    pub(super) fn close_gate(&mut self, cause: CloseCause, out: &mut VecDeque<Action>) {
        self.sticky_unread = true;
        if self.gate_open {
            self.gate_open = false;
            out.push_back(Action::CloseGate {
                port: self.port,
                cause,
            });
        }
    }

    /// Something may have changed. Read at once, or once more when the quiet time is over.
    /// Returns whether the hint was folded into another reading.
    pub(super) fn hint(
        &mut self,
        now: Time,
        cfg: &ObserverConfig,
        out: &mut VecDeque<Action>,
    ) -> bool {
        let leading = self.phase == Phase::Idle && now >= self.quiet_until;
        if leading {
            self.quiet_until = now + cfg.coalesce;
            self.start_read(now, out);
        } else if self.phase != Phase::Dead {
            self.dirty = true;
        }
        !leading
    }

    fn start_read(&mut self, now: Time, out: &mut VecDeque<Action>) {
        self.reads += 1;
        self.dirty = false;
        self.sticky_unread = false;
        let number = self.reads;
        self.go(Phase::Reading { number, since: now });
        out.push_back(Action::ReadPort(ReadId {
            port: self.port,
            number: self.reads,
        }));
    }

    pub(super) fn next_timeout(&self, cfg: &ObserverConfig) -> Option<Time> {
        match self.phase {
            Phase::Dead => None,
            Phase::Reading { since, .. } => Some(since + cfg.verb_timeout),
            Phase::Retry { at } => Some(at),
            Phase::Idle => earliest(
                Some(self.recheck_at),
                self.dirty.then_some(self.quiet_until),
            ),
        }
    }

    /// Acts on what is due; returns whether a reading did not come back in time.
    pub(super) fn handle_timeout(
        &mut self,
        now: Time,
        cfg: &ObserverConfig,
        out: &mut VecDeque<Action>,
    ) -> bool {
        match self.phase {
            Phase::Dead => {}
            Phase::Reading { since, .. } => return now >= since + cfg.verb_timeout,
            Phase::Retry { at } if now >= at => self.start_read(now, out),
            Phase::Retry { .. } => {}
            Phase::Idle if self.dirty && now >= self.quiet_until => {
                self.quiet_until = now + cfg.coalesce;
                self.start_read(now, out);
            }
            Phase::Idle if now >= self.recheck_at => self.start_read(now, out),
            Phase::Idle => {}
        }
        false
    }

    /// The context died: nothing is asked until it is open again.
    pub(super) fn context_dead(&mut self) {
        self.go(Phase::Dead);
        self.dirty = false;
        self.attempts = 0;
        self.gid.port_down();
    }

    /// Cuts what used the port, and takes it out of the record.
    pub(super) fn withdraw(&mut self, cause: CutCause, out: &mut VecDeque<Action>) {
        let mut facts = match &self.published {
            Some(facts) if !facts.up => return,
            Some(facts) => facts.clone(),
            None => PortFacts::unknown(),
        };
        if facts.up {
            out.push_back(Action::CutEndpoints {
                port: self.port,
                cause,
            });
        }
        facts.up = false;
        self.publish(facts, Vec::new(), out);
    }

    /// The context is open again, as new: all is read before anything may be used.
    pub(super) fn reopened(&mut self, now: Time, out: &mut VecDeque<Action>) {
        self.quiet_until = now;
        self.start_read(now, out);
    }

    /// Takes in a reading; returns whether it is one that was waited for.
    pub(super) fn handle_reading(
        &mut self,
        now: Time,
        number: u64,
        result: Result<PortReading, ReadFailure>,
        cfg: &ObserverConfig,
        out: &mut VecDeque<Action>,
    ) -> bool {
        if !matches!(self.phase, Phase::Reading { number: waited, .. } if waited == number) {
            return false;
        }
        let settle = match result {
            Err(failure) if self.attempts < cfg.read_retries => {
                tracing::debug!(port = self.port, %failure, "reading a port again");
                self.attempts += 1;
                let at = now + cfg.read_retry_wait;
                self.go(Phase::Retry { at });
                return true;
            }
            Err(failure) => {
                self.conclude_failed(FailReason::Unreadable(failure), out);
                None
            }
            Ok(reading) => self.conclude(now, &reading, cfg, out),
        };
        self.go(Phase::Idle);
        self.attempts = 0;
        let healthy = self.gate_open && !self.failed;
        let recheck = if healthy {
            cfg.recheck_healthy
        } else {
            cfg.recheck
        };
        self.recheck_at = settle.map_or(now + recheck, |at| at.min(now + recheck));
        true
    }

    /// Returns when the port must be read again for its GID's sake.
    fn conclude(
        &mut self,
        now: Time,
        reading: &PortReading,
        cfg: &ObserverConfig,
        out: &mut VecDeque<Action>,
    ) -> Option<Time> {
        if is_down(reading.attr.state) {
            self.conclude_down(reading, out);
            return None;
        }
        if self.sticky_unread {
            // The reading may be older than the bad news, so it proves nothing good. The next one
            // is asked already: the event that brought the news made the port dirty.
            return None;
        }
        let Choice { gid, gids, settle } = self.gid.choose(now, reading);
        let gid = match gid {
            Ok(gid) => gid,
            Err(reason) => {
                self.conclude_failed(reason.into(), out);
                return settle;
            }
        };
        let found = PortFacts::of(reading, Some(gid), cfg.pkey_index);
        if found.link_layer == LinkLayer::InfiniBand
            && found.pkey.is_none_or(|key| key & 0x7fff == 0)
        {
            let index = cfg.pkey_index;
            self.conclude_failed(FailReason::NoPkey { index }, out);
            return settle;
        }
        self.failed = false;
        self.conclude_up(found, gids, out);
        settle
    }

    fn conclude_up(&mut self, found: PortFacts, gids: Vec<Gid>, out: &mut VecDeque<Action>) {
        let (changes, moved) = compare(self.published.as_ref(), &found);
        let outcome = match (changes.is_empty(), moved) {
            (true, false) => Outcome::Unchanged,
            (true, true) => Outcome::Moved,
            (false, _) => Outcome::Changed(changes),
        };
        self.report(outcome, out);
        let cuts = moved || changes.cuts();
        if cuts {
            self.close_gate(CloseCause::Outcome, out);
            self.sticky_unread = false;
            // A port that was down has been cut when it went down.
            if self.published.as_ref().is_some_and(|old| old.up) {
                let cause = if changes.is_empty() {
                    CutCause::Moved
                } else {
                    CutCause::Changed(changes)
                };
                out.push_back(Action::CutEndpoints {
                    port: self.port,
                    cause,
                });
            }
        }
        if changes.is_empty() {
            self.published = Some(found);
        } else {
            self.publish(found, gids, out);
        }
        if !cuts && !changes.is_empty() {
            out.push_back(Action::ReplaceLazily {
                port: self.port,
                changes,
            });
        }
        if !self.gate_open {
            self.gate_open = true;
            out.push_back(Action::HalfOpen {
                port: self.port,
                endpoints_kept: !cuts,
            });
        }
    }

    fn conclude_down(&mut self, reading: &PortReading, out: &mut VecDeque<Action>) {
        self.gid.port_down();
        self.failed = false;
        match &self.published {
            None => {
                // The values of a port that is down are no promise, but its link layer is known.
                let mut facts = PortFacts::unknown();
                facts.link_layer = reading.attr.link_layer;
                self.report(Outcome::Changed(Changes::FIRST), out);
                self.publish(facts, Vec::new(), out);
            }
            Some(facts) if facts.up => {
                self.report(Outcome::Changed(Changes::STATE), out);
                self.close_gate(CloseCause::Outcome, out);
                self.withdraw(CutCause::Changed(Changes::STATE), out);
            }
            Some(_) => self.report(Outcome::Unchanged, out),
        }
    }

    fn conclude_failed(&mut self, reason: FailReason, out: &mut VecDeque<Action>) {
        let outcome = Outcome::Failed {
            reason: reason.clone(),
            repeated: self.failed,
        };
        self.failed = true;
        self.report(outcome, out);
        self.close_gate(CloseCause::Outcome, out);
        self.withdraw(CutCause::Failed(reason), out);
    }

    fn report(&self, outcome: Outcome, out: &mut VecDeque<Action>) {
        out.push_back(Action::Report {
            port: self.port,
            outcome,
        });
    }

    fn publish(&mut self, facts: PortFacts, gids: Vec<Gid>, out: &mut VecDeque<Action>) {
        self.published = Some(facts.clone());
        out.push_back(Action::Publish {
            port: self.port,
            facts,
            gids,
        });
    }
}
