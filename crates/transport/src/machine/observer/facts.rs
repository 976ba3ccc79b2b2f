//! What a port's reading says, and how two readings differ.

use rerail_topology::NetdevFacts;
use rerail_topology::gid::{Selection, UnreadableRow};
use rerail_verbs::{GidEntry, LinkLayer, Mtu, PortAttr, PortState};

use super::gid::{NoGid, same_place};

/// One complete, fresh reading of a port. A reading of which any part failed is a [`ReadFailure`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortReading {
    /// `ibv_query_port`.
    pub attr: PortAttr,
    /// The GID table's rows; empty slots have none.
    pub gids: Vec<GidEntry>,
    /// Slots of the table that hold something and could not be read.
    pub unreadable: Vec<UnreadableRow>,
    /// What is known of the interfaces behind the rows; may be empty.
    pub netdevs: Vec<NetdevFacts>,
    /// The P_Key table in host byte order, index 0 first; may be empty on Ethernet.
    pub pkeys: Vec<u16>,
}

/// A reading that failed.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[error("{query} failed with errno {errno}")]
pub struct ReadFailure {
    /// C name of the query.
    pub query: &'static str,
    /// Its errno.
    pub errno: i32,
}

/// What is known of a port, as far as peers or endpoints depend on it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PortFacts {
    /// Whether the port may be used; a port that cannot be read or has no GID may not.
    pub up: bool,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// LID; meaningful on InfiniBand only.
    pub lid: u16,
    /// The GID in use. Kept while the port is down; `None` only before the first one is known.
    pub gid: Option<Selection>,
    /// The P_Key at the index in use; `None` where the table was not given.
    pub pkey: Option<u16>,
    /// MTU in force; `None` when the device's code for it is not known.
    pub mtu: Option<Mtu>,
    /// Link speed in Mbit/s; 0 when not known.
    pub speed_mbps: u32,
}

impl PortFacts {
    /// What is known of a port that was never read with success.
    pub(super) fn unknown() -> Self {
        Self {
            up: false,
            link_layer: LinkLayer::Unspecified,
            lid: 0,
            gid: None,
            pkey: None,
            mtu: None,
            speed_mbps: 0,
        }
    }

    pub(super) fn of(reading: &PortReading, gid: Option<Selection>, pkey_index: u16) -> Self {
        Self {
            up: reading.attr.state.is_active(),
            link_layer: reading.attr.link_layer,
            lid: reading.attr.lid,
            gid,
            pkey: reading.pkeys.get(usize::from(pkey_index)).copied(),
            mtu: reading.attr.active_mtu,
            speed_mbps: reading.attr.speed_mbps(),
        }
    }
}

bitflags::bitflags! {
    /// In what a port differs from what was published.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Changes: u16 {
        /// Nothing was published before.
        const FIRST = 1;
        /// The port went up or down.
        const STATE = 1 << 1;
        /// Other GID bytes.
        const GID = 1 << 2;
        /// Another LID.
        const LID = 1 << 3;
        /// Another P_Key at the index in use.
        const PKEY = 1 << 4;
        /// A smaller MTU.
        const MTU_SMALLER = 1 << 5;
        /// A larger MTU.
        const MTU_LARGER = 1 << 6;
        /// Another speed.
        const SPEED = 1 << 7;
        /// Another link layer.
        const LINK_LAYER = 1 << 8;
    }
}

impl Changes {
    /// Changes after which endpoints work on with what they have.
    pub const LAZY: Self = Self::MTU_LARGER.union(Self::SPEED);

    /// Whether endpoints that use the old values must go.
    pub fn cuts(self) -> bool {
        !Self::LAZY.contains(self)
    }
}

/// Compares what is published with what is found on an active port: the changes, and whether the
/// same GID bytes now stand in another row.
pub(super) fn compare(published: Option<&PortFacts>, found: &PortFacts) -> (Changes, bool) {
    let Some(old) = published else {
        return (Changes::FIRST, false);
    };
    let mut changes = Changes::empty();
    changes.set(Changes::STATE, old.up != found.up);
    changes.set(Changes::LINK_LAYER, old.link_layer != found.link_layer);
    let moved = match (&old.gid, &found.gid) {
        (Some(old), Some(found)) if old.gid == found.gid => !same_place(old, found),
        (old, found) => {
            changes.set(Changes::GID, old.is_some() || found.is_some());
            false
        }
    };
    let infiniband = found.link_layer == LinkLayer::InfiniBand;
    changes.set(Changes::LID, infiniband && old.lid != found.lid);
    changes.set(Changes::PKEY, old.pkey != found.pkey);
    changes.set(Changes::MTU_SMALLER, found.mtu < old.mtu);
    changes.set(Changes::MTU_LARGER, found.mtu > old.mtu);
    changes.set(Changes::SPEED, found.speed_mbps != old.speed_mbps);
    (changes, moved)
}

/// Why a port is taken out although it did not say that it is down.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FailReason {
    /// It could not be read, several times in a row.
    #[error("the port cannot be read: {0}")]
    Unreadable(ReadFailure),
    /// It has no GID to use, or none yet.
    #[error(transparent)]
    NoGid(#[from] NoGid),
    /// The P_Key at the index in use is invalid.
    #[error("the P_Key table has no valid key at index {index}: set another P_Key index")]
    NoPkey {
        /// The index.
        index: u16,
    },
}

/// What a reading amounts to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// As published. The only outcome that keeps endpoints.
    Unchanged,
    /// The same GID bytes in another row: local endpoints are rebuilt, nothing is published.
    Moved,
    /// Something that peers or endpoints depend on differs.
    Changed(Changes),
    /// The port is not usable, and it is not known to be simply down.
    Failed {
        /// Why.
        reason: FailReason,
        /// Whether the reading before failed as well: the first is an error line, the next are not.
        repeated: bool,
    },
}

/// Whether the state is one in which nothing more is to be learnt from the port's other values.
pub(super) fn is_down(state: PortState) -> bool {
    !state.is_active()
}
