//! Which GID of a port is used: topology's ranking and hysteresis, as the observer needs them.
//!
//! Deliberately not here: how rows are ranked and how long a choice stays
//! ([`rerail_topology::gid`]), and which GID suits a certain peer (connecting re-ranks for its
//! pair).

use rerail_topology::gid::{
    GidPolicy, Hysteresis, HysteresisTimes, PortTable, Selection, Steady, rank,
};
use rerail_verbs::Gid;

use super::PortReading;
use crate::machine::Time;

/// Why a port that is up has no GID.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoGid {
    /// No row can be used.
    #[error("no GID is usable: {reason}")]
    NoneUsable {
        /// The ranking's words.
        reason: String,
    },
    /// The only rows are of a worse class than the one that was published; its return is waited
    /// for.
    #[error("only GIDs worse than the published one are there; one of them is taken at {until}")]
    Held {
        /// When the worse class will be taken.
        until: Time,
    },
}

/// What a reading means for the GID in use.
pub(super) struct Choice {
    /// The row in use, or why there is none now.
    pub(super) gid: Result<Selection, NoGid>,
    /// All usable GIDs, best first.
    pub(super) gids: Vec<Gid>,
    /// When the port must be read again because a wait ends.
    pub(super) settle: Option<Time>,
}

/// The GID in use of one port.
#[derive(Clone, Debug)]
pub(super) struct PortGids {
    device: String,
    port: u32,
    policy: GidPolicy,
    hysteresis: Hysteresis,
}

impl PortGids {
    pub(super) fn new(device: &str, port: u32, policy: &GidPolicy, times: HysteresisTimes) -> Self {
        Self {
            device: device.to_owned(),
            port,
            policy: policy.clone(),
            hysteresis: Hysteresis::new(times),
        }
    }

    /// The port is not active: GIDs come and go meanwhile, and no wait runs.
    pub(super) fn port_down(&mut self) {
        self.hysteresis.port_down();
    }

    /// Chooses from the reading of an active port.
    pub(super) fn choose(&mut self, now: Time, reading: &PortReading) -> Choice {
        let table = PortTable {
            device: &self.device,
            port: self.port,
            link_layer: reading.attr.link_layer,
            table_len: Some(reading.attr.gid_tbl_len),
            entries: &reading.gids,
            unreadable: &reading.unreadable,
            netdevs: &reading.netdevs,
        };
        let ranking = rank(&table, &self.policy);
        let steady = self.hysteresis.handle(now.as_duration(), &table, &ranking);
        let none_usable = || NoGid::NoneUsable {
            reason: match ranking.selected() {
                Ok(_) => "none is left".to_owned(),
                Err(error) => error.to_string(),
            },
        };
        let gid = match steady {
            Steady::Held { until } => Err(NoGid::Held {
                until: Time::ZERO + until,
            }),
            Steady::Unusable => Err(none_usable()),
            _ => self.hysteresis.in_use().cloned().ok_or_else(none_usable),
        };
        Choice {
            gid,
            gids: ranking.accepted().iter().map(|row| row.gid).collect(),
            settle: self.hysteresis.next_timeout().map(|at| Time::ZERO + at),
        }
    }
}

/// Whether two selections are one row at one place.
pub(super) fn same_place(left: &Selection, right: &Selection) -> bool {
    left.index == right.index && left.gid_type == right.gid_type && left.netdev == right.netdev
}
