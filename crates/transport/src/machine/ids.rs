//! How machines name what they decide about. Numbers only: names belong to errors and logs, which
//! the driver writes.

use std::fmt;

/// A local NIC's port: its position in the own record's `devices[]`, fixed while the process lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LocalNic(pub u32);

/// A peer: one (segment, instance). A peer that restarts is another peer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PeerId(pub u64);

/// A peer's NIC: a number that the driver gives its **name**, for as long as the peer lives. Not
/// its position in `devices[]`, which an owner may reorder.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PeerNic {
    /// The peer.
    pub peer: PeerId,
    /// The driver's number for the NIC's name.
    pub nic: u32,
}

/// A rail: a local NIC's port and a peer's NIC. Ordered by peer first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RailId {
    /// The far end.
    pub peer: PeerNic,
    /// The near end.
    pub local: LocalNic,
}

impl RailId {
    /// The rail between a local NIC and NIC number `nic` of `peer`.
    pub fn new(local: LocalNic, peer: PeerId, nic: u32) -> Self {
        Self {
            peer: PeerNic { peer, nic },
            local,
        }
    }

    /// All rails of a peer lie in this range.
    pub(crate) fn range_of(peer: PeerId) -> std::ops::RangeInclusive<Self> {
        Self::new(LocalNic(0), peer, 0)..=Self::new(LocalNic(u32::MAX), peer, u32::MAX)
    }
}

impl fmt::Display for RailId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peer, local } = self;
        write!(f, "nic {} - peer {} nic {}", local.0, peer.peer.0, peer.nic)
    }
}

/// A registered memory region of this engine. Never reused within a process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RegionId(pub u64);
