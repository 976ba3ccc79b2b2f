//! How a half-open rail is proved: connect, then two probes, each with a bounded number of places
//! per NIC.

use std::time::Duration;

use rerail_verbs::WcStatus;

use super::Rails;
use super::health::{Proof, Step};
use super::io::{Action, ConnectFault, ProbeKind, RailCause, RailState};
use crate::machine::Time;
use crate::machine::ids::{LocalNic, PeerId, RailId};
use crate::machine::verdict::{RequestFault, Verdict, verdict};

/// Failed attempts in a row from which a rail counts as failing again and again.
const OFTEN: u32 = 3;

impl Rails {
    /// Makes a rail half-open. Its endpoint, if it has one, is kept and probed.
    pub(super) fn half_open(&mut self, now: Time, id: RailId, cause: RailCause) {
        self.set_state(id, RailState::HalfOpen, cause);
        if let Some(rail) = self.rails.get_mut(&id) {
            rail.up_since = None;
            if rail.wanted {
                self.queue_proof(now, id);
            }
        }
    }

    pub(super) fn queue_proof(&mut self, now: Time, id: RailId) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        if rail.proof != Proof::None {
            return;
        }
        rail.set_proof(Proof::Waiting);
        self.tickets += 1;
        let step = if rail.connected {
            Step::Probe
        } else {
            Step::Connect
        };
        let attempts = rail.backoff.attempts();
        self.waiting
            .insert((id.local, step, attempts, self.tickets, id));
        self.start_proofs(now, id.local);
    }

    /// Ends a proof, whichever way it went, and gives its place to the next.
    pub(super) fn end_proof(&mut self, now: Time, id: RailId) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        match rail.set_proof(Proof::None) {
            Proof::None => return,
            Proof::Waiting => self.waiting.retain(|(.., other)| *other != id),
            running => {
                if let Some(step) = running.step()
                    && let Some(count) = self.running.get_mut(&(id.local, step))
                {
                    *count = count.saturating_sub(1);
                }
            }
        }
        self.start_proofs(now, id.local);
    }

    fn start_proofs(&mut self, now: Time, local: LocalNic) {
        for (step, places) in [
            (Step::Connect, self.config.connects_per_nic_max),
            (Step::Probe, self.config.probes_per_nic_max),
        ] {
            while self.running.get(&(local, step)).copied().unwrap_or(0) < places {
                let nobody = RailId::new(LocalNic(0), PeerId(0), 0);
                let next = self
                    .waiting
                    .range((local, step, 0, 0, nobody)..)
                    .next()
                    .copied();
                let Some(next) = next.filter(|next| (next.0, next.1) == (local, step)) else {
                    break;
                };
                // Whoever fails again and again leaves a quarter of the places to the others.
                let running = self.running.get(&(local, step)).copied().unwrap_or(0);
                if next.2 >= OFTEN && running >= places - places / 4 {
                    break;
                }
                self.waiting.remove(&next);
                *self.running.entry((local, step)).or_default() += 1;
                self.start(now, next.4, step);
            }
        }
    }

    fn start(&mut self, now: Time, id: RailId, step: Step) {
        match step {
            Step::Probe => self.probe(now, id, ProbeKind::ZeroLengthRead),
            Step::Connect => {
                if let Some(rail) = self.rails.get_mut(&id) {
                    let until = now + self.config.connect_timeout;
                    rail.set_proof(Proof::Connecting { until });
                    self.out.push_back(Action::Connect { rail: id });
                    self.refile(id);
                }
            }
        }
    }

    fn probe(&mut self, now: Time, id: RailId, kind: ProbeKind) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        self.probes += 1;
        rail.set_proof(Proof::Probing {
            probe: self.probes,
            kind,
            until: now + self.config.probe_timeout,
        });
        self.out.push_back(Action::Probe {
            rail: id,
            probe: self.probes,
            kind,
        });
        self.refile(id);
    }

    pub(super) fn connected(&mut self, now: Time, id: RailId) {
        let open = self.gates_open(id);
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        rail.connected = true;
        match (rail.state, rail.proof) {
            // The handshake's place is free for the next; the probes have others.
            (_, Proof::Connecting { .. } | Proof::Waiting) => {
                self.end_proof(now, id);
                self.queue_proof(now, id);
            }
            // The peer has connected to us: that is good news, but for a pair that fails again and
            // again, else a peer without a back-off of its own would drive ours.
            (RailState::Down, _) if open && rail.backoff.attempts() <= 1 => {
                rail.retry_at = now;
                self.refile(id);
            }
            _ => {}
        }
    }

    pub(super) fn connect_failed(
        &mut self,
        now: Time,
        id: RailId,
        reason: String,
        fault: ConnectFault,
    ) {
        let Some(rail) = self.rails.get(&id) else {
            return;
        };
        if !matches!(rail.proof, Proof::Connecting { .. }) {
            return;
        }
        // Without another rail the last-path rule bounds the wait, once for the whole peer.
        let cheap = match fault {
            ConnectFault::Refused => true,
            ConnectFault::NoAnswer => self.has_other_usable(id),
            ConnectFault::Other => false,
        };
        let wait_max = if cheap {
            self.config.refused_wait_max
        } else {
            Duration::MAX
        };
        self.lose_within(now, id, RailCause::Connect { reason }, false, wait_max);
    }

    pub(super) fn probe_done(&mut self, now: Time, id: RailId, probe: u64, status: WcStatus) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        let Proof::Probing {
            probe: waited,
            kind,
            ..
        } = rail.proof
        else {
            return;
        };
        if waited != probe {
            return;
        }
        match (verdict(status), kind) {
            (Verdict::Done, ProbeKind::ZeroLengthRead) => {
                self.probe(now, id, ProbeKind::FullMtuRead);
            }
            (Verdict::Done, ProbeKind::FullMtuRead) => {
                rail.up_since = Some(now);
                self.end_proof(now, id);
                self.set_state(id, RailState::Up, RailCause::Proved);
                self.refile_peer(id.peer.peer);
            }
            (Verdict::Request(RequestFault::RemoteKey), _) => {
                // The key that was probed with is stale: that is the record's fault.
                self.out
                    .push_back(Action::RefreshPeer { peer: id.peer.peer });
                self.lose(now, id, RailCause::Probe(status), true);
            }
            (Verdict::Path, _) => self.path_error(now, id, RailCause::Probe(status)),
            _ => self.lose(now, id, RailCause::Probe(status), false),
        }
    }
}
