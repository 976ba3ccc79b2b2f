//! The ranking of one port's table.

use std::cmp::Ordering;

use rerail_verbs::{Gid, GidEntry, GidScope, GidType, LinkLayer, Netdev};

use super::GidPolicy;
use super::reason::{Family, GidClass, Liveness, NetdevRole, Reason, RowFacts, Verdict};
use crate::netdev::is_overlay;
use crate::{NetdevFacts, Subnet};

/// A slot that could not be read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct UnreadableRow {
    /// Index in the port's table.
    pub index: u32,
    /// The cause in words.
    pub reason: String,
}

/// A port's GID table with what is known of the interfaces behind it. Order means nothing.
#[derive(Clone, Copy, Debug)]
pub struct PortTable<'a> {
    /// Name of the device.
    pub device: &'a str,
    /// Port, from 1.
    pub port: u32,
    /// Link layer of the port. Where it is not said, rows of a RoCE type make it Ethernet.
    pub link_layer: LinkLayer,
    /// Slots in the table, empty ones included; `None` where it is not known.
    pub table_len: Option<u32>,
    /// The rows in use.
    pub entries: &'a [GidEntry],
    /// Slots that could not be read, empty ones excluded.
    pub unreadable: &'a [UnreadableRow],
    /// Facts of interfaces. One that is missing is known by name only.
    pub netdevs: &'a [NetdevFacts],
}

impl<'a> PortTable<'a> {
    /// The facts of a row's interface.
    pub fn facts(&self, netdev: &Netdev) -> Option<&'a NetdevFacts> {
        self.netdevs.iter().find(|facts| facts.is_of(netdev))
    }

    /// The name of a row's interface, from its facts where the row has only its number.
    pub fn name_of<'n>(&self, netdev: &'n Netdev) -> &'n str
    where
        'a: 'n,
    {
        match self.facts(netdev) {
            Some(facts) if netdev.name.is_empty() => &facts.name,
            _ => &netdev.name,
        }
    }

    fn is_infiniband(&self) -> bool {
        match self.link_layer {
            LinkLayer::InfiniBand => true,
            LinkLayer::Ethernet => false,
            _ => !self
                .entries
                .iter()
                .any(|entry| matches!(entry.gid_type, GidType::RoceV1 | GidType::RoceV2)),
        }
    }
}

/// A row of the table with its place in the ranking.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RankedRow {
    /// Index in the port's table.
    pub index: u32,
    /// The address; null for a row that could not be read.
    pub gid: Gid,
    /// Position in [`PortTable::entries`]; `None` for a row that could not be read.
    pub entry: Option<usize>,
    /// How good it is, or would be if it were accepted; `None` for a row without content.
    pub class: Option<GidClass>,
    /// Place among the accepted rows, 0 for the choice; `None` if rejected.
    pub rank: Option<u32>,
    /// Why.
    pub reason: Reason,
}

impl RankedRow {
    /// Whether the row may be used.
    pub fn is_accepted(&self) -> bool {
        self.reason.verdict == Verdict::Accepted
    }
}

/// Why a port has no GID to use.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GidError {
    /// Every row was rejected, or there is none.
    #[error(
        "{device} port {port}: none of {rows} GID rows is usable; see the reason of each with \
         `rerail gids`, and give the interface an address"
    )]
    NoneUsable {
        /// Name of the device.
        device: String,
        /// Port.
        port: u32,
        /// Rows that were looked at.
        rows: usize,
    },
    /// The operator's lists leave no row.
    #[error(
        "{device} port {port}: no GID row matches the configured {lists}; correct the list, or \
         give the interface a matching address"
    )]
    ListMatchesNothing {
        /// Name of the device.
        device: String,
        /// Port.
        port: u32,
        /// The lists in words.
        lists: String,
    },
    /// The operator's index lies outside the table.
    #[error(
        "{device} port {port}: GID index {index} is configured but the table has {table_len} \
         slots; choose a smaller one or none"
    )]
    IndexOutOfRange {
        /// Name of the device.
        device: String,
        /// Port.
        port: u32,
        /// The operator's index.
        index: u32,
        /// Slots in the table.
        table_len: u32,
    },
    /// The operator's index is empty or cannot be read.
    #[error(
        "{device} port {port}: GID index {index} is configured but {what}; choose another or none"
    )]
    IndexUnusable {
        /// Name of the device.
        device: String,
        /// Port.
        port: u32,
        /// The operator's index.
        index: u32,
        /// What is wrong with it.
        what: String,
    },
}

/// Something that works but that the operator should know.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// An index was configured; it is not checked against what would have been chosen.
    #[error(
        "GID index {index} is taken because it is configured; it does not follow the address when that moves"
    )]
    ExplicitIndex {
        /// The index.
        index: u32,
    },
    /// The choice has no better class than this one.
    #[error("GID index {index} is a last resort (class {class}): {reason}")]
    LastResort {
        /// The index.
        index: u32,
        /// Its class.
        class: GidClass,
        /// Why it is no better.
        reason: Reason,
    },
}

/// A port's table in order, with the choice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ranking {
    rows: Vec<RankedRow>,
    accepted: usize,
    error: Option<GidError>,
    warning: Option<Warning>,
}

impl Ranking {
    /// Accepted rows best first, then rejected rows by index.
    pub fn rows(&self) -> &[RankedRow] {
        &self.rows
    }

    /// Accepted rows, best first.
    pub fn accepted(&self) -> &[RankedRow] {
        &self.rows[..self.accepted]
    }

    /// The choice.
    ///
    /// # Errors
    ///
    /// Why no row can be used.
    pub fn selected(&self) -> Result<&RankedRow, &GidError> {
        match &self.error {
            Some(error) => Err(error),
            None => Ok(&self.rows[0]),
        }
    }

    /// What the operator should know though it works.
    pub fn warning(&self) -> Option<&Warning> {
        self.warning.as_ref()
    }
}

/// Ranks a port's table by the rules in the [module's head](super). Total, and independent of the
/// order in which rows and interfaces are given.
pub fn rank(table: &PortTable<'_>, policy: &GidPolicy) -> Ranking {
    let configured = policy.index.of(table.device, table.port);
    let infiniband = table.is_infiniband();
    let mut looks = Vec::with_capacity(table.entries.len() + table.unreadable.len());
    let mut usable_v2 = false;
    let mut netdevs = Netdevs::of(table);
    for (position, entry) in table.entries.iter().enumerate() {
        let netdev = netdevs.look_up(entry);
        let row = look_at(
            table,
            policy,
            infiniband,
            configured,
            (position, entry),
            netdev,
        );
        usable_v2 |= row.is_accepted() && entry.gid_type == GidType::RoceV2;
        looks.push(row);
    }
    if usable_v2 && !infiniband && configured.is_none() {
        for row in &mut looks {
            if row.is_accepted() && row.class == Some(GidClass::RoceV1) {
                row.reason.verdict = Verdict::V1BesideV2;
            }
        }
    }
    looks.extend(table.unreadable.iter().map(|row| RankedRow {
        index: row.index,
        gid: Gid::NULL,
        entry: None,
        class: None,
        rank: None,
        reason: Reason {
            verdict: Verdict::Unreadable,
            facts: None,
        },
    }));
    let mut rows = in_order(table, &looks);
    let accepted = rows.iter().take_while(|row| row.is_accepted()).count();
    for (rank, row) in (0..).zip(&mut rows[..accepted]) {
        row.rank = Some(rank);
    }
    let error = (accepted == 0).then(|| why_none(table, policy, configured, &rows));
    let warning = match (&error, rows.first()) {
        (None, Some(best)) => warn_of(best, configured),
        _ => None,
    };
    Ranking {
        rows,
        accepted,
        error,
        warning,
    }
}

/// Positions are put in order, since rows are long, and rows are copied once. A table that was read
/// from its first slot to its last needs no comparing: one pass counts, one places.
fn in_order(table: &PortTable<'_>, looks: &[RankedRow]) -> Vec<RankedRow> {
    let mut order: Vec<usize>;
    if looks.is_sorted_by(|left, right| left.index < right.index) {
        let mut places = [0_usize; GRADES];
        for row in looks {
            places[grade(row)] += 1;
        }
        let mut next = 0;
        for place in &mut places {
            next += std::mem::replace(place, next);
        }
        order = vec![0; looks.len()];
        for (at, row) in looks.iter().enumerate() {
            let place = &mut places[grade(row)];
            order[*place] = at;
            *place += 1;
        }
    } else {
        order = (0..looks.len()).collect();
        order.sort_unstable_by(|left, right| {
            let (left, right) = (&looks[*left], &looks[*right]);
            let key = |row: &RankedRow| (grade(row), row.index);
            let by_key = key(left).cmp(&key(right));
            // Rows that claim one index are told apart by what is in them.
            by_key.then_with(|| break_tie(table, left, right))
        });
    }
    order.into_iter().map(|at| looks[at]).collect()
}

/// A row's interface: its facts if there are any, its name, and whether it is an overlay.
#[derive(Clone, Copy)]
struct NetdevLook<'t> {
    facts: Option<&'t NetdevFacts>,
    name: &'t str,
    overlay: bool,
}

/// Finds interfaces; rows of one interface mostly follow each other.
struct Netdevs<'t> {
    table: &'t PortTable<'t>,
    last: Option<(&'t Netdev, NetdevLook<'t>)>,
}

impl<'t> Netdevs<'t> {
    fn of(table: &'t PortTable<'t>) -> Self {
        Self { table, last: None }
    }

    fn look_up(&mut self, entry: &'t GidEntry) -> Option<NetdevLook<'t>> {
        let netdev = entry
            .netdev
            .as_ref()
            .filter(|netdev| !netdev.name.is_empty() || netdev.index != 0)?;
        if let Some((last, look)) = &self.last
            && *last == netdev
        {
            return Some(*look);
        }
        let facts = self.table.facts(netdev);
        let name = match facts {
            Some(facts) if netdev.name.is_empty() => &facts.name,
            _ => &netdev.name,
        };
        let look = NetdevLook {
            facts,
            name,
            overlay: is_overlay(name, facts),
        };
        self.last = Some((netdev, look));
        Some(look)
    }
}

fn look_at(
    table: &PortTable<'_>,
    policy: &GidPolicy,
    infiniband: bool,
    configured: Option<u32>,
    (position, entry): (usize, &GidEntry),
    netdev: Option<NetdevLook<'_>>,
) -> RankedRow {
    let mut row = RankedRow {
        index: entry.index,
        gid: entry.gid,
        entry: Some(position),
        class: None,
        rank: None,
        reason: Reason {
            verdict: Verdict::Null,
            facts: None,
        },
    };
    if entry.gid.is_null() {
        return row;
    }
    let facts = facts_of(infiniband, entry, netdev);
    row.class = Some(class_of(&facts));
    row.reason = Reason {
        verdict: verdict_of(table, policy, configured, entry, netdev),
        facts: Some(facts),
    };
    row
}

fn facts_of(infiniband: bool, entry: &GidEntry, netdev: Option<NetdevLook<'_>>) -> RowFacts {
    let facts = netdev.and_then(|netdev| netdev.facts);
    RowFacts {
        gid_type: entry.gid_type,
        netdev: match netdev {
            None => NetdevRole::None,
            Some(netdev) if netdev.overlay => NetdevRole::Overlay,
            Some(_) => NetdevRole::Ordinary,
        },
        scope: entry.gid.scope(),
        family: match entry.gid.to_ipv4() {
            Some(_) => Family::Ipv4,
            None => Family::Ipv6,
        },
        liveness: facts.map_or(Liveness::Live, |facts| liveness_of(facts, &entry.gid)),
        infiniband,
    }
}

fn liveness_of(facts: &NetdevFacts, gid: &Gid) -> Liveness {
    if facts.addresses.is_some() && facts.address(gid).is_none() {
        Liveness::AddressGone
    } else if facts.up == Some(false) {
        Liveness::NetdevDown
    } else {
        Liveness::Live
    }
}

fn class_of(facts: &RowFacts) -> GidClass {
    if facts.infiniband {
        return GidClass::NetdevGlobal;
    }
    match facts.gid_type {
        GidType::RoceV2 => {}
        // The kernel has one number for InfiniBand and RoCE v1; on Ethernet it means v1.
        GidType::RoceV1 | GidType::InfiniBand => return GidClass::RoceV1,
        _ => return GidClass::UnknownType,
    }
    match (facts.netdev, facts.scope) {
        (NetdevRole::Ordinary, GidScope::Global) => GidClass::NetdevGlobal,
        (NetdevRole::None, GidScope::Global) => GidClass::Global,
        (NetdevRole::Ordinary, _) => GidClass::NetdevLinkLocal,
        (NetdevRole::None, _) => GidClass::LinkLocal,
        (NetdevRole::Overlay, GidScope::Global) => GidClass::OverlayGlobal,
        (NetdevRole::Overlay, _) => GidClass::OverlayLinkLocal,
    }
}

fn verdict_of(
    table: &PortTable<'_>,
    policy: &GidPolicy,
    configured: Option<u32>,
    entry: &GidEntry,
    netdev: Option<NetdevLook<'_>>,
) -> Verdict {
    if let Some(configured) = configured {
        // An explicit index is the narrowest list; wider ones have nothing to add.
        return if entry.index == configured && !is_outside(table, configured) {
            Verdict::Accepted
        } else {
            Verdict::NotConfiguredIndex { configured }
        };
    }
    let inside = |subnet: &Subnet| subnet.contains_gid(&entry.gid);
    if !policy.subnets.is_empty() && !policy.subnets.iter().any(inside) {
        return Verdict::OutsideSubnets;
    }
    if !policy.netdevs.is_empty() {
        let name = netdev.map(|netdev| netdev.name);
        if !policy.netdevs.iter().any(|wanted| Some(&**wanted) == name) {
            return Verdict::OutsideNetdevs;
        }
    }
    Verdict::Accepted
}

/// How many values [`grade`] has.
const GRADES: usize = REJECTED + 1;
/// The last grade.
const REJECTED: usize = 8 << 3;

/// Class, then liveness, then family, as one number: all that orders rows but their index. A row of
/// InfiniBand has only that.
fn grade(row: &RankedRow) -> usize {
    if !row.is_accepted() {
        return REJECTED;
    }
    match (row.class, &row.reason.facts) {
        (Some(class), Some(facts)) if !facts.infiniband => {
            (class as usize) << 3 | (facts.liveness as usize) << 1 | facts.family as usize
        }
        _ => 0,
    }
}

fn break_tie(table: &PortTable<'_>, left: &RankedRow, right: &RankedRow) -> Ordering {
    let rest = |row: &RankedRow| {
        let entry = row.entry.and_then(|position| table.entries.get(position));
        (
            row.gid,
            entry.map(|entry| (entry.gid_type, entry.netdev.as_ref())),
        )
    };
    rest(left).cmp(&rest(right))
}

fn is_outside(table: &PortTable<'_>, index: u32) -> bool {
    table.table_len.is_some_and(|table_len| index >= table_len)
}

fn why_none(
    table: &PortTable<'_>,
    policy: &GidPolicy,
    configured: Option<u32>,
    rows: &[RankedRow],
) -> GidError {
    let device = table.device.to_owned();
    let port = table.port;
    if let Some(index) = configured {
        if let Some(table_len) = table.table_len.filter(|table_len| index >= *table_len) {
            return GidError::IndexOutOfRange {
                device,
                port,
                index,
                table_len,
            };
        }
        let unreadable = table.unreadable.iter().find(|row| row.index == index);
        let what = match unreadable {
            Some(row) => format!("cannot be read ({})", row.reason),
            None => "is empty".to_owned(),
        };
        return GidError::IndexUnusable {
            device,
            port,
            index,
            what,
        };
    }
    let excluded = rows.iter().any(|row| {
        matches!(
            row.reason.verdict,
            Verdict::OutsideSubnets | Verdict::OutsideNetdevs
        )
    });
    if excluded {
        let subnets = policy.subnets.iter().map(ToString::to_string);
        let lists = [
            ("subnets", subnets.collect::<Vec<_>>()),
            ("interfaces", policy.netdevs.clone()),
        ];
        let lists = lists.iter().filter(|(_, list)| !list.is_empty());
        let lists: Vec<_> = lists
            .map(|(what, list)| format!("{what} {}", list.join(", ")))
            .collect();
        return GidError::ListMatchesNothing {
            device,
            port,
            lists: lists.join(" and "),
        };
    }
    GidError::NoneUsable {
        device,
        port,
        rows: rows.len(),
    }
}

fn warn_of(best: &RankedRow, configured: Option<u32>) -> Option<Warning> {
    let index = best.index;
    if configured.is_some() {
        return Some(Warning::ExplicitIndex { index });
    }
    let class = best.class.filter(|class| *class > GidClass::Global)?;
    Some(Warning::LastResort {
        index,
        class,
        reason: best.reason,
    })
}
