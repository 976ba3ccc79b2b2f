//! What must hold of an observer, and the reports that it answers.

mod flaps;
mod properties;
mod readings;
mod sequences;

use std::collections::BTreeMap;
use std::time::Duration;

use rerail_verbs::{
    AsyncEvent, AsyncEventKind, EventSubject, Gid, GidEntry, GidType, LinkLayer, Mtu, Netdev,
    PhysState, PortAttr, PortState,
};

use super::*;
use crate::machine::drive;

pub(super) fn row(index: u32, gid: &str) -> GidEntry {
    GidEntry {
        index,
        gid: gid.parse().expect("a GID literal"),
        gid_type: GidType::RoceV2,
        netdev: Some(Netdev {
            index: 0,
            name: "ens1".into(),
        }),
    }
}

pub(super) const GLOBAL: &str = "10.50.1.2";
pub(super) const LINK_LOCAL: &str = "fe80::200:11ff:fe22:1";

pub(super) fn reading(rows: &[GidEntry]) -> PortReading {
    PortReading {
        attr: PortAttr {
            state: PortState::Active,
            phys_state: PhysState::LinkUp,
            link_layer: LinkLayer::Ethernet,
            max_mtu: Some(Mtu::Mtu4096),
            active_mtu: Some(Mtu::Mtu1024),
            lid: 0,
            sm_lid: 0,
            gid_tbl_len: 16,
            pkey_tbl_len: 1,
            max_msg_bytes: 1 << 30,
            active_width: 2,
            active_speed: 32,
        },
        gids: rows.to_vec(),
        unreadable: Vec::new(),
        netdevs: Vec::new(),
        pkeys: vec![0xffff],
    }
}

/// An observer with a device that answers readings at once, or keeps them.
pub(super) struct Rig {
    pub(super) observer: Observer,
    pub(super) now: Time,
    pub(super) ports: BTreeMap<u32, Result<PortReading, ReadFailure>>,
    pub(super) answers: bool,
    pub(super) unanswered: Vec<ReadId>,
    pub(super) log: Vec<(Time, Action)>,
}

impl Rig {
    pub(super) fn new(ports: &[u32]) -> Self {
        let now = Time::from_millis(1);
        let healthy = reading(&[row(1, LINK_LOCAL), row(3, GLOBAL)]);
        let mut rig = Self {
            observer: Observer::new(
                now,
                ObserverConfig::default(),
                "mlx5_0",
                &GidPolicy::default(),
                ports.iter().copied(),
                11,
            ),
            now,
            ports: ports
                .iter()
                .map(|port| (*port, Ok(healthy.clone())))
                .collect(),
            answers: true,
            unanswered: Vec::new(),
            log: Vec::new(),
        };
        rig.settle();
        rig.log.clear();
        rig
    }

    /// Carries out actions until none is left.
    pub(super) fn settle(&mut self) {
        loop {
            let mut actions = Vec::new();
            drive(&mut self.observer, self.now, |action| actions.push(action));
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.log.push((self.now, action.clone()));
                match action {
                    Action::ReadPort(read) if self.answers => self.answer(read),
                    Action::ReadPort(read) => self.unanswered.push(read),
                    _ => {}
                }
            }
        }
    }

    pub(super) fn answer(&mut self, read: ReadId) {
        let result = self.ports[&read.port].clone();
        let epoch = self.observer.epoch();
        self.observer.handle(
            self.now,
            Input::PortRead {
                epoch,
                read,
                result,
            },
        );
    }

    pub(super) fn advance(&mut self, by: Duration) {
        let until = self.now + by;
        while let Some(due) = self.observer.next_timeout().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.settle();
        }
        self.now = until;
        self.settle();
    }

    pub(super) fn event(&mut self, kind: AsyncEventKind, port: u32) {
        self.subject_event(kind, EventSubject::Port(port));
    }

    pub(super) fn subject_event(&mut self, kind: AsyncEventKind, subject: EventSubject) {
        let event = AsyncEvent { kind, subject };
        let epoch = self.observer.epoch();
        self.observer
            .handle(self.now, Input::Event { epoch, event });
        self.settle();
    }

    pub(super) fn set(&mut self, port: u32, change: impl FnOnce(&mut PortReading)) {
        if let Some(Ok(reading)) = self.ports.get_mut(&port) {
            change(reading);
        }
    }

    pub(super) fn set_rows(&mut self, port: u32, rows: &[GidEntry]) {
        self.set(port, |reading| reading.gids = rows.to_vec());
    }

    pub(super) fn set_state(&mut self, port: u32, state: PortState) {
        self.set(port, |reading| reading.attr.state = state);
    }

    pub(super) fn take(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.log)
            .into_iter()
            .map(|(_, action)| action)
            .collect()
    }

    /// The actions since the last call, as words without their fields.
    pub(super) fn words(&mut self) -> Vec<&'static str> {
        self.take().iter().map(word).collect()
    }

    pub(super) fn gid(&self, port: u32) -> Option<(u32, Gid)> {
        let selection = self.observer.facts(port)?.gid.as_ref()?;
        Some((selection.index, selection.gid))
    }
}

pub(super) fn word(action: &Action) -> &'static str {
    match action {
        Action::ReadPort(_) => "read",
        Action::Report { outcome, .. } => match outcome {
            Outcome::Unchanged => "unchanged",
            Outcome::Moved => "moved",
            Outcome::Changed(_) => "changed",
            Outcome::Failed { .. } => "failed",
        },
        Action::CloseGate { .. } => "close",
        Action::CutEndpoints { .. } => "cut",
        Action::Publish { .. } => "publish",
        Action::ReplaceLazily { .. } => "replace-lazily",
        Action::HalfOpen { .. } => "half-open",
        Action::EndpointEvent { .. } => "endpoint",
        Action::ReleaseContext { .. } => "release",
        Action::Reopen { .. } => "reopen",
    }
}
