//! What must hold of rails, and the reports that they answer.

mod properties;
mod scenarios;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::*;
use crate::machine::drive;

pub(super) fn rail(local: u32, peer: u64, nic: u32) -> RailId {
    RailId::new(LocalNic(local), PeerId(peer), nic)
}

pub(super) const OPEN: LocalGate = LocalGate::Open {
    endpoints_kept: false,
};

/// Rails with a fabric that connects and answers probes at once, where it works.
pub(super) struct Rig {
    pub(super) rails: Rails,
    pub(super) now: Time,
    /// What a connection (first) and a probe (second) end with, if not well.
    pub(super) broken: BTreeMap<RailId, (bool, WcStatus)>,
    pub(super) silent: bool,
    /// Of which kind the faults of connections are.
    pub(super) fault: ConnectFault,
    /// Rails whose handshakes are never answered.
    pub(super) mute: BTreeSet<RailId>,
    pub(super) log: Vec<(Time, Action)>,
}

impl Rig {
    /// `locals` local NICs, each with a rail to NIC 0 of each of `peers` peers, all wanted.
    pub(super) fn new(locals: u32, peers: u64) -> Self {
        let mut rig = Self {
            rails: Rails::new(RailConfig::default(), 5),
            now: Time::from_millis(100_000),
            broken: BTreeMap::new(),
            silent: false,
            fault: ConnectFault::NoAnswer,
            mute: BTreeSet::new(),
            log: Vec::new(),
        };
        for local in 0..locals {
            rig.input(Input::LocalGate {
                local: LocalNic(local),
                gate: OPEN,
            });
            for peer in 0..peers {
                let rail = rail(local, peer, 0);
                rig.input(Input::Declare {
                    rail,
                    traits: RailTraits {
                        same_subnet: true,
                        speed_mbps: 100_000,
                    },
                });
                rig.input(Input::Wanted { rail });
            }
        }
        rig
    }

    pub(super) fn input(&mut self, input: Input) {
        self.rails.handle(self.now, input);
        self.settle();
    }

    pub(super) fn settle(&mut self) {
        for _ in 0..1_000 {
            let mut actions = Vec::new();
            drive(&mut self.rails, self.now, |action| actions.push(action));
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.log.push((self.now, action.clone()));
                if !self.silent {
                    self.answer(action);
                }
            }
        }
        panic!("the rails do not come to rest");
    }

    pub(super) fn answer(&mut self, action: Action) {
        match action {
            Action::Connect { rail } if self.mute.contains(&rail) => {}
            Action::Connect { rail } => {
                let refused = self.broken.get(&rail).is_some_and(|(refused, _)| *refused);
                let reason = "refused".to_owned();
                let input = if refused {
                    Input::ConnectFailed {
                        rail,
                        reason,
                        fault: self.fault,
                    }
                } else {
                    Input::Connected { rail }
                };
                self.rails.handle(self.now, input);
            }
            Action::Probe { rail, probe, .. } => {
                let status = self
                    .broken
                    .get(&rail)
                    .map_or(WcStatus::Success, |(_, status)| *status);
                let input = Input::ProbeDone {
                    rail,
                    probe,
                    status,
                };
                self.rails.handle(self.now, input);
            }
            _ => {}
        }
    }

    pub(super) fn advance(&mut self, by: Duration) {
        let until = self.now + by;
        while let Some(due) = self.rails.next_timeout().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.settle();
        }
        self.now = until;
        self.settle();
    }

    pub(super) fn fail(&mut self, rail: RailId, status: WcStatus) {
        self.input(Input::Completion { rail, status });
    }

    pub(super) fn gate(&mut self, local: u32, gate: LocalGate) {
        self.input(Input::LocalGate {
            local: LocalNic(local),
            gate,
        });
    }

    pub(super) fn state(&self, rail: RailId) -> RailState {
        self.rails.state(rail).expect("the rail is declared")
    }

    pub(super) fn connects(&self, rail: RailId) -> usize {
        let connect = |(_, action): &&(Time, Action)| *action == Action::Connect { rail };
        self.log.iter().filter(connect).count()
    }

    pub(super) fn usable(&self, peer: u64) -> usize {
        match self.rails.path(PeerId(peer)) {
            Path::Usable(candidates) => candidates.len(),
            _ => 0,
        }
    }
}
