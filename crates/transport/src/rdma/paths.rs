//! Which own GID a connection begins with, and how long its packets may be.
//!
//! What one connection finds out the next one uses: pairs of GIDs that cannot reach each other, and
//! long packets that do not get through. Both are kept between a local NIC and a peer's NIC, and
//! expire, so that nothing is held against a way for good. Pure decisions: the verbs are called in
//! [`pairs`](super::pairs), and endpoints tell what became of them.
//!
//! The side that opens a connection is bound to the GID that it has sent; the other one chooses
//! last, and may try several within one handshake. So the opener goes through its own GIDs from
//! one handshake to the next, and leaves the peer's to the peer.

use std::collections::HashMap;
use std::time::Duration;

use rerail_topology::gid::{Affinity, GidClass, PAIRS_MAX, PortTable, Ranking, order_for_peer};
use rerail_verbs::{Gid, LinkLayer, Mtu};

use crate::machine::Time;

/// Every Ethernet that carries IPv6 carries this path MTU: an interface's MTU is 1280 at least.
pub(super) const MTU_SAFE: Mtu = Mtu::Mtu1024;

/// How long something is held against a way.
const LEARNT: Duration = Duration::from_secs(60);

/// A pair that has worked is given up only after so many connections in a row that did not: what is
/// broken is mostly the way, and other GIDs take the same one.
const STRIKES_PROVED: u32 = 3;

/// Connections in a row on which long packets seem to be lost, until shorter ones are used. A
/// failure of the port looks the same once.
const STRIKES_LONG: u32 = 2;

/// How soon after one another those have to be. Connections that fail further apart failed for
/// what happened then.
const STRIKES_WITHIN: Duration = Duration::from_secs(10);

/// Ways that are remembered. Peers name theirs, so that the number needs a bound; when it is
/// reached everything is learnt again.
const WAYS_MAX: usize = 4096;

/// Leading bits from which two addresses count as one subnet where the prefix length is not known.
const SUBNET_BITS_IPV4: u8 = 24;
const SUBNET_BITS_IPV6: u8 = 64;

/// A way: number of the local NIC, and the peer's NIC path.
pub(super) type Way = (u32, String);

/// A row of the own GID table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Row {
    /// Its index.
    pub(super) index: u32,
    /// Its address.
    pub(super) gid: Gid,
}

/// What is known for a new connection.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Advice {
    /// The peer's GID by its message or its record.
    pub(super) toward: Option<Gid>,
    /// Whether the peer chooses its GID for ours. C++ peers have one, whatever we come with.
    pub(super) peer_chooses: bool,
    /// Own GIDs that have not led to it lately.
    pub(super) avoid: Vec<Gid>,
    /// The own GID of the last connection.
    pub(super) last: Option<Gid>,
    /// Upper bound of the path MTU.
    pub(super) mtu_max: Option<Mtu>,
}

/// How sure it is that long packets are lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Doubt {
    /// They are, or the ends disagree about the MTU.
    Sure,
    /// They may be.
    Likely,
}

/// What connections have found out, by way.
#[derive(Debug, Default)]
pub(super) struct Paths {
    ways: HashMap<Way, Learnt>,
}

#[derive(Debug, Default)]
struct Learnt {
    /// The peer's GID for which the GIDs below hold.
    toward: Option<Gid>,
    /// Own GIDs that did not lead to it, each with the time until which it is avoided.
    failed: Vec<(Gid, Time)>,
    last: Option<Gid>,
    proved: Option<Gid>,
    strikes: u32,
    short_until: Option<Time>,
    strikes_long: u32,
    /// When the last of them was.
    struck_at: Option<Time>,
}

impl Paths {
    /// What a new connection towards `toward` is to know.
    pub(super) fn advice(&mut self, now: Time, way: &Way, toward: Option<Gid>) -> Advice {
        let mut advice = Advice {
            toward,
            ..Advice::default()
        };
        let Some(learnt) = self.ways.get_mut(way) else {
            return advice;
        };
        learnt.failed.retain(|(_, until)| now < *until);
        learnt.short_until = learnt.short_until.filter(|until| now < *until);
        if learnt.toward == toward {
            advice.avoid = learnt.failed.iter().map(|(gid, _)| *gid).collect();
            advice.last = learnt.last;
        }
        advice.mtu_max = learnt.short_until.map(|_| MTU_SAFE);
        advice
    }

    /// A connection towards `toward` begins with `gid`.
    pub(super) fn chosen(&mut self, way: &Way, toward: Option<Gid>, gid: Gid) {
        let learnt = self.learnt(way);
        if learnt.toward != toward {
            *learnt = Learnt {
                toward,
                short_until: learnt.short_until,
                strikes_long: learnt.strikes_long,
                struck_at: learnt.struck_at,
                ..Learnt::default()
            };
        }
        if learnt.failed.iter().any(|(failed, _)| *failed == gid) {
            // None is left: they are gone through once more.
            learnt.failed.clear();
        }
        learnt.last = Some(gid);
    }

    /// The device or the peer's refused to connect `gid`.
    pub(super) fn refused(&mut self, now: Time, way: &Way, gid: Gid) {
        let learnt = self.learnt(way);
        learnt.failed.retain(|(failed, _)| *failed != gid);
        // The oldest goes: what has just been refused is what the next connection must not take.
        if learnt.failed.len() >= PAIRS_MAX {
            learnt.failed.remove(0);
        }
        learnt.failed.push((gid, now + LEARNT));
    }

    /// `gid` was connected, and nothing at all got through.
    pub(super) fn silent(&mut self, now: Time, way: &Way, gid: Gid) {
        let learnt = self.learnt(way);
        learnt.strikes += 1;
        if learnt.proved != Some(gid) || learnt.strikes >= STRIKES_PROVED {
            self.refused(now, way, gid);
        }
    }

    /// `gid` was connected, and has worked.
    pub(super) fn proved(&mut self, way: &Way, gid: Gid) {
        let learnt = self.learnt(way);
        learnt.failed.retain(|(failed, _)| *failed != gid);
        learnt.proved = Some(gid);
        learnt.strikes = 0;
    }

    /// Long packets got through.
    pub(super) fn long_passed(&mut self, way: &Way) {
        if let Some(learnt) = self.ways.get_mut(way) {
            learnt.strikes_long = 0;
        }
    }

    /// Short packets got through, and long ones did not. True if shorter ones are used from now on.
    pub(super) fn long_lost(&mut self, now: Time, way: &Way, doubt: Doubt) -> bool {
        let learnt = self.learnt(way);
        let last = learnt.struck_at.replace(now);
        if last.is_none_or(|last| now > last + STRIKES_WITHIN) {
            learnt.strikes_long = 0;
        }
        learnt.strikes_long += 1;
        if doubt == Doubt::Likely && learnt.strikes_long < STRIKES_LONG {
            return false;
        }
        learnt.strikes_long = 0;
        learnt.short_until = Some(now + LEARNT);
        true
    }

    /// Short packets do no better: long ones are tried again. False if they were in use anyway.
    pub(super) fn long_again(&mut self, way: &Way) -> bool {
        let learnt = self.ways.get_mut(way);
        learnt.is_some_and(|learnt| learnt.short_until.take().is_some())
    }

    fn learnt(&mut self, way: &Way) -> &mut Learnt {
        if self.ways.len() >= WAYS_MAX && !self.ways.contains_key(way) {
            self.ways.clear();
        }
        self.ways.entry(way.clone()).or_default()
    }
}

/// How good a row is for a peer: good ones are small.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Merit {
    other_family: bool,
    /// 0 in the peer's subnet, as far as is known or can be guessed.
    distance: u8,
    class: Option<GidClass>,
    is_not_last: bool,
    is_not_in_use: bool,
    rank: Option<u32>,
}

/// The own rows to connect with, best first and [`PAIRS_MAX`] at most: same family, then same
/// subnet, then class; among equals the one that was used last, then the port's own choice
/// `in_use`, so that addresses which come and go do not move connections. Rows that have not led
/// there lately are left out, unless all have. Empty if `in_use` is not in the table any more.
pub(super) fn rows(
    table: &PortTable<'_>,
    ranking: &Ranking,
    in_use: Gid,
    advice: &Advice,
) -> Vec<Row> {
    let accepted = ranking.accepted();
    let Some(own) = accepted.iter().find(|row| row.gid == in_use) else {
        return Vec::new();
    };
    let own = Row {
        index: own.index,
        gid: own.gid,
    };
    let toward = advice.toward.filter(|gid| !gid.is_null());
    let (LinkLayer::Ethernet, Some(toward)) = (table.link_layer, toward) else {
        return vec![own];
    };
    let mut rows: Vec<(Merit, Row)> = Vec::new();
    for (affinity, row) in order_for_peer(table, ranking, &toward) {
        let merit = Merit {
            other_family: affinity.other_family,
            distance: distance(&affinity, &row.gid),
            class: row.class,
            is_not_last: advice.last != Some(row.gid),
            is_not_in_use: row.gid != in_use,
            rank: row.rank,
        };
        // The same address may stand there as RoCE v1, too.
        if rows.iter().all(|(_, known)| known.gid != row.gid) {
            let (index, gid) = (row.index, row.gid);
            rows.push((merit, Row { index, gid }));
        }
    }
    if !advice.peer_chooses && rows.iter().any(|(merit, _)| !merit.other_family) {
        rows.retain(|(merit, _)| !merit.other_family);
    }
    rows.sort_by(|(one, _), (other, _)| one.cmp(other));
    let best = rows.into_iter().take(PAIRS_MAX).map(|(_, row)| row);
    let (avoided, left): (Vec<_>, Vec<_>) = best.partition(|row| advice.avoid.contains(&row.gid));
    if left.is_empty() { avoided } else { left }
}

fn distance(affinity: &Affinity, own: &Gid) -> u8 {
    let bits = affinity.common_bits();
    let enough = if own.to_ipv4().is_some() {
        SUBNET_BITS_IPV4
    } else {
        SUBNET_BITS_IPV6
    };
    if bits >= enough { 0 } else { 128 - bits }
}

#[cfg(test)]
mod tests;
