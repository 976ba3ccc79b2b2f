//! How a half-open rail is proved: connect, then two probes, a bounded number at once per NIC.

use rerail_verbs::WcStatus;

use super::Rails;
use super::health::Proof;
use super::io::{Action, ProbeKind, RailCause, RailState};
use crate::machine::Time;
use crate::machine::ids::{LocalNic, RailId};
use crate::machine::verdict::{RequestFault, Verdict, verdict};

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
        rail.proof = Proof::Waiting;
        self.tickets += 1;
        self.waiting.insert((id.local, self.tickets, id));
        self.start_proofs(now, id.local);
    }

    /// Ends a proof, whichever way it went, and gives its place to the next.
    pub(super) fn end_proof(&mut self, now: Time, id: RailId) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        match std::mem::replace(&mut rail.proof, Proof::None) {
            Proof::None => return,
            Proof::Waiting => self.waiting.retain(|(.., other)| *other != id),
            Proof::Connecting { .. } | Proof::Probing { .. } => {
                if let Some(running) = self.running.get_mut(&id.local) {
                    *running = running.saturating_sub(1);
                }
            }
        }
        self.start_proofs(now, id.local);
    }

    fn start_proofs(&mut self, now: Time, local: LocalNic) {
        while self.proofs_running(local) < self.config.proofs_per_nic_max {
            let first = (
                local,
                0,
                RailId::new(LocalNic(0), crate::machine::ids::PeerId(0), 0),
            );
            let next = self.waiting.range(first..).next().copied();
            let Some(next) = next.filter(|(of, ..)| *of == local) else {
                return;
            };
            self.waiting.remove(&next);
            let id = next.2;
            let Some(rail) = self.rails.get_mut(&id) else {
                continue;
            };
            *self.running.entry(local).or_default() += 1;
            if rail.connected {
                self.probe(now, id, ProbeKind::ZeroLengthRead);
            } else {
                rail.proof = Proof::Connecting {
                    until: now + self.config.connect_timeout,
                };
                self.out.push_back(Action::Connect { rail: id });
            }
            self.refile(id);
        }
    }

    fn probe(&mut self, now: Time, id: RailId, kind: ProbeKind) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        self.probes += 1;
        rail.proof = Proof::Probing {
            probe: self.probes,
            kind,
            until: now + self.config.probe_timeout,
        };
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
            (_, Proof::Connecting { .. }) => self.probe(now, id, ProbeKind::ZeroLengthRead),
            // The peer has connected to us: that is good news, but for a pair that fails again and
            // again, else a peer without a back-off of its own would drive ours.
            (RailState::Down, _) if open && rail.backoff.attempts() <= 1 => {
                rail.retry_at = now;
                self.refile(id);
            }
            _ => {}
        }
    }

    pub(super) fn connect_failed(&mut self, now: Time, id: RailId, reason: String) {
        if let Some(rail) = self.rails.get_mut(&id)
            && matches!(rail.proof, Proof::Connecting { .. })
        {
            self.lose(now, id, RailCause::Connect { reason }, false);
        }
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
