//! Own rows for a certain peer: which pair of GIDs to try first, and which next.
//!
//! Deliberately not here: what makes an attempt fail, and when to try again.

use std::cmp::Reverse;
use std::fmt;

use rerail_verbs::Gid;

use super::rank::{PortTable, RankedRow, Ranking};
use crate::subnet::common_prefix_bits;

/// Most pairs that one connection attempt tries.
pub const PAIRS_MAX: usize = 4;

/// How well an own row suits a peer's GID, ordered from good to bad: first the family, then the
/// subnet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Affinity {
    /// One is IPv4 and the other is not: such a pair cannot carry RoCE v2, and is tried last.
    pub other_family: bool,
    /// Leading bits in common; all of them where the own prefix holds the peer, none where it is
    /// known and does not.
    common_bits: Reverse<u8>,
}

impl Affinity {
    /// Leading bits in common; 128 where the own prefix is known and holds the peer, 0 where it is
    /// known and does not.
    pub fn common_bits(&self) -> u8 {
        self.common_bits.0
    }

    /// Whether both are known to be in one subnet.
    pub fn is_same_subnet(&self) -> bool {
        self.common_bits() == SAME_SUBNET_BITS
    }
}

impl fmt::Display for Affinity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.other_family {
            f.write_str("not the peer's family")
        } else if self.is_same_subnet() {
            f.write_str("in the peer's subnet")
        } else if self.common_bits() == 0 {
            f.write_str("the peer's family, another subnet")
        } else {
            write!(f, "{} leading bits like the peer", self.common_bits())
        }
    }
}

/// Stands for "in one subnet", which beats every guess from common bits.
const SAME_SUBNET_BITS: u8 = 128;

/// An own row and a GID of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CandidatePair {
    /// Index of the own row.
    pub local_index: u32,
    /// Its address.
    pub local: Gid,
    /// The peer's address.
    pub peer: Gid,
}

/// The accepted rows, best first for that peer: same family, then same subnet (by prefix length
/// where it is known, else by the longest common prefix), then the order of the ranking.
pub fn order_for_peer<'r>(
    table: &PortTable<'_>,
    ranking: &'r Ranking,
    peer: &Gid,
) -> Vec<(Affinity, &'r RankedRow)> {
    let accepted = ranking.accepted().iter();
    let mut rows: Vec<_> = accepted
        .map(|row| (affinity(table, row, peer), row))
        .collect();
    // Stable, so that the order of the ranking decides between equals.
    rows.sort_by_key(|(affinity, _)| *affinity);
    rows
}

/// The pairs to try with a peer that has these GIDs, best first, without those that were tried:
/// together at most [`PAIRS_MAX`]. Null GIDs of the peer are passed over.
pub fn candidate_pairs(
    table: &PortTable<'_>,
    ranking: &Ranking,
    peer_gids: &[Gid],
    tried: &[CandidatePair],
) -> Vec<CandidatePair> {
    let mut pairs = Vec::new();
    for (order, peer) in peer_gids.iter().enumerate() {
        if peer.is_null() || peer_gids[..order].contains(peer) {
            continue;
        }
        for (affinity, row) in order_for_peer(table, ranking, peer) {
            pairs.push((affinity, row.rank, order, row, *peer));
        }
    }
    pairs.sort_by_key(|(affinity, rank, order, ..)| (*affinity, *rank, *order));
    let pairs = pairs.into_iter().map(|(.., row, peer)| CandidatePair {
        local_index: row.index,
        local: row.gid,
        peer,
    });
    pairs
        .filter(|pair| !tried.contains(pair))
        .take(PAIRS_MAX.saturating_sub(tried.len()))
        .collect()
}

fn affinity(table: &PortTable<'_>, row: &RankedRow, peer: &Gid) -> Affinity {
    let own = row.gid.to_ip();
    let other = peer.to_ip();
    let entry = row.entry.and_then(|position| table.entries.get(position));
    let netdev = entry.and_then(|entry| entry.netdev.as_ref());
    let facts = netdev.and_then(|netdev| table.facts(netdev));
    let common_bits = match facts.and_then(|facts| facts.address(&row.gid)) {
        Some(subnet) if subnet.contains(other) => SAME_SUBNET_BITS,
        Some(_) => 0,
        None => common_prefix_bits(own, other).min(SAME_SUBNET_BITS - 1),
    };
    Affinity {
        other_family: own.is_ipv4() != other.is_ipv4(),
        common_bits: Reverse(common_bits),
    }
}
