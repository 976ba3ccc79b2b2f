//! Who is blamed when errors of the path spread: the local NIC if they spread over its peers, the
//! peer's NIC if they spread over the local ones. One rail's errors alone blame nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::machine::Time;
use crate::machine::ids::{LocalNic, PeerId, PeerNic, RailId};

/// Errors within this time of each other belong together.
pub(super) const WINDOW: Duration = Duration::from_secs(2);
/// Rails whose errors are remembered at most; beyond that the oldest are forgotten.
pub(super) const ERRORS_MAX: usize = 1_024;
/// Peers that must fail over one local NIC and no other.
const PEERS_MIN: usize = 3;
/// Local NICs that must fail towards one peer's NIC.
const LOCALS_MIN: usize = 2;

/// Who it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Culprit {
    Local(LocalNic),
    Peer(PeerNic),
}

/// Recent errors of the path.
#[derive(Clone, Debug, Default)]
pub(super) struct Blame {
    errors: BTreeMap<RailId, Time>,
}

impl Blame {
    /// Counts an error of a rail; `peers` is the number of peers that the local NIC has rails to.
    pub(super) fn error(&mut self, now: Time, rail: RailId, peers: usize) -> Option<Culprit> {
        self.errors
            .retain(|_, at| now.saturating_since(*at) <= WINDOW);
        if self.errors.len() >= ERRORS_MAX
            && let Some(oldest) = self
                .errors
                .iter()
                .min_by_key(|(_, at)| **at)
                .map(|(id, _)| *id)
        {
            self.errors.remove(&oldest);
        }
        self.errors.insert(rail, now);

        let locals: BTreeSet<LocalNic> = self
            .errors
            .keys()
            .filter(|other| other.peer == rail.peer)
            .map(|other| other.local)
            .collect();
        if locals.len() >= LOCALS_MIN {
            self.errors.retain(|other, _| other.peer != rail.peer);
            return Some(Culprit::Peer(rail.peer));
        }
        let failing: BTreeSet<PeerId> = self
            .errors
            .keys()
            .filter(|other| other.local == rail.local)
            .map(|other| other.peer.peer)
            .collect();
        // A peer that fails over other NICs as well says nothing about this one.
        let only_here = failing.iter().filter(|peer| {
            self.errors
                .range(RailId::range_of(**peer))
                .all(|(other, _)| other.local == rail.local)
        });
        let enough = PEERS_MIN.min(peers).max(2);
        if only_here.count() >= enough {
            self.errors.retain(|other, _| other.local != rail.local);
            return Some(Culprit::Local(rail.local));
        }
        None
    }

    pub(super) fn forget_peer(&mut self, peer: PeerId) {
        self.errors.retain(|rail, _| rail.peer.peer != peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(local: u32, peer: u64, nic: u32) -> RailId {
        RailId::new(LocalNic(local), PeerId(peer), nic)
    }

    #[test]
    fn many_peers_point_to_the_local_nic() {
        let mut blame = Blame::default();
        let now = Time::from_millis(10);
        assert_eq!(blame.error(now, rail(0, 1, 0), 5), None);
        assert_eq!(
            blame.error(now, rail(0, 1, 1), 5),
            None,
            "the same peer again"
        );
        assert_eq!(blame.error(now, rail(0, 2, 0), 5), None);
        let culprit = blame.error(now, rail(0, 3, 0), 5);
        assert_eq!(culprit, Some(Culprit::Local(LocalNic(0))));
    }

    #[test]
    fn many_local_nics_point_to_the_peer() {
        let mut blame = Blame::default();
        let now = Time::from_millis(10);
        assert_eq!(blame.error(now, rail(0, 1, 0), 5), None);
        let culprit = blame.error(now, rail(1, 1, 0), 5);
        assert_eq!(culprit, Some(Culprit::Peer(rail(1, 1, 0).peer)));
    }

    #[test]
    fn errors_far_apart_point_nowhere_and_memory_is_bounded() {
        let mut blame = Blame::default();
        let mut now = Time::ZERO;
        for peer in 0..10 {
            now += Duration::from_secs(3);
            assert_eq!(blame.error(now, rail(0, peer, 0), 10), None);
        }
        for nic in 0..3_000 {
            blame.error(now, rail(0, 1, nic), 10);
        }
        assert!(blame.errors.len() <= ERRORS_MAX);
    }
}
