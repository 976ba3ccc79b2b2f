//! Which of several proved rails a slice takes: the one on which it ends first.
//!
//! A pure function over a snapshot, so that a data thread can call it with its own queue depths
//! and without a lock.

use super::Rails;
use super::io::{LocalGate, RailState, RailTraits};
use crate::machine::ids::{LocalNic, PeerId, RailId};

/// A rail that carries user work, as it was when the snapshot was made.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Candidate {
    /// The rail.
    pub rail: RailId,
    /// Bytes a second that it is given: measured, else the ports' speed; a quarter if suspect.
    pub bytes_per_s: u64,
    /// Whether both GIDs lie in one subnet.
    pub same_subnet: bool,
}

/// Why there is no path to a peer, and none is expected.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoPath {
    /// Its record is withdrawn or superseded.
    #[error("the peer's record is withdrawn or superseded")]
    PeerGone,
    /// No rail to it was ever declared.
    #[error("the peer has no NIC that a local NIC can reach")]
    NoRails,
    /// The context of every local NIC that has a rail to it is dead.
    #[error("every local NIC that reaches the peer is dead")]
    LocalNicsDead,
}

/// What can be said about the way to a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Path {
    /// These rails carry work.
    Usable(Vec<Candidate>),
    /// None does now, one is expected: wait, within the transfer's deadline.
    Expected {
        /// A rail that nobody has wanted yet: say [`Input::Wanted`](super::Input::Wanted).
        want: Option<RailId>,
    },
    /// None does, and none is expected: the transfer fails.
    None(NoPath),
}

/// A rail in another subnet costs this many times more; it is taken when the near ones are full.
const OTHER_SUBNET_FACTOR: u128 = 4;
/// What a step of distance between buffer and NIC adds to the cost, in quarters.
const DISTANCE_QUARTERS: u128 = 1;

/// The candidate on which `bytes` more end first.
///
/// `queued_bytes` says what a rail has still to move; `distance` how far a local NIC is from the
/// buffer, 0 for the nearest. A tie goes to the first candidate.
pub fn choose(
    candidates: &[Candidate],
    bytes: u64,
    queued_bytes: impl Fn(RailId) -> u64,
    distance: impl Fn(LocalNic) -> u32,
) -> Option<RailId> {
    let cost = |candidate: &Candidate| {
        let load = u128::from(queued_bytes(candidate.rail)) + u128::from(bytes.max(1));
        let nanos = load * 1_000_000_000 / u128::from(candidate.bytes_per_s.max(1));
        let subnet = if candidate.same_subnet {
            1
        } else {
            OTHER_SUBNET_FACTOR
        };
        let steps = u128::from(distance(candidate.rail.local).min(64));
        nanos * subnet * (4 + DISTANCE_QUARTERS * steps) / 4
    };
    candidates
        .iter()
        .min_by_key(|candidate| cost(candidate))
        .map(|candidate| candidate.rail)
}

/// The rate that a rail in `state` is given, of the rate `bytes_per_s` that it can do.
pub fn share_of(state: RailState, bytes_per_s: u64) -> u64 {
    match state {
        RailState::Suspect => (bytes_per_s / SUSPECT_DIVISOR).max(1),
        _ => bytes_per_s,
    }
}

/// The rate of the slower of both ports, in bytes a second.
pub(crate) fn nominal_bytes_per_s(traits: RailTraits) -> u64 {
    match traits.speed_mbps {
        0 => UNKNOWN_BYTES_PER_S,
        mbps => u64::from(mbps) * 125_000,
    }
}

/// What a suspect rail's share is divided by.
const SUSPECT_DIVISOR: u64 = 4;
/// Assumed where neither a measurement nor a speed is known: 1 Gbit/s.
const UNKNOWN_BYTES_PER_S: u64 = 125_000_000;

impl Rails {
    /// The way to a peer as it is now.
    pub fn path(&self, peer: PeerId) -> Path {
        if self.is_gone(peer) {
            return Path::None(NoPath::PeerGone);
        }
        let mut usable = Vec::new();
        let mut want = None;
        let (mut any, mut alive) = (false, false);
        for (id, rail) in self.rails.range(RailId::range_of(peer)) {
            any = true;
            let gate = self.locals.get(&id.local);
            // A gate that was never told of is closed, and expected to open.
            alive |= gate != Some(&LocalGate::Dead);
            if rail.is_usable() {
                let nominal = nominal_bytes_per_s(rail.traits);
                let full = rail.rate.bytes_per_s().unwrap_or(nominal);
                usable.push(Candidate {
                    rail: *id,
                    bytes_per_s: share_of(rail.state, full),
                    same_subnet: rail.traits.same_subnet,
                });
            } else if !rail.wanted && self.gates_open(*id) {
                want = want.or(Some(*id));
            }
        }
        match (usable.is_empty(), any, alive) {
            (false, ..) => Path::Usable(usable),
            (true, false, _) => Path::None(NoPath::NoRails),
            (true, true, false) => Path::None(NoPath::LocalNicsDead),
            (true, true, true) => Path::Expected { want },
        }
    }
}
