//! Which pairs of own rail and peer's rail a transfer should use, best first.
//!
//! Deliberately not here: how much work each pair gets, and what to do when one fails: callers go
//! on to the next pair, so that no choice of the operator's can pin work to a dead rail.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use rerail_verbs::Gid;

use crate::{Location, Matrix, SettingError, Subnet};

const MAP_VARIABLE: &str = "NIC_PEER_AFFINITY";
const MAP_SWITCH: &str = "ENABLE_HCA_PEER_AFFINITY";
const OWN_NAME_SWITCH: &str = "ENABLE_DEST_DEVICE_AFFINITY";

/// State of a rail, ordered from good to bad.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum RailState {
    /// It works.
    Up,
    /// It comes back and is not proved yet.
    Recovering,
    /// It does not work: never selected.
    Down,
}

/// What is known of an own rail or of one of a peer's `devices[]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RailFacts {
    /// Name in the matrix and in `devices[]`.
    pub name: String,
    /// Its GID.
    pub gid: Gid,
    /// The GID's address with its prefix, where it is known.
    pub subnet: Option<Subnet>,
    /// Its state.
    pub state: RailState,
    /// Mbit/s; 0 where it is not known.
    pub speed_mbps: u32,
}

/// One end of a transfer.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// Where the memory is.
    pub location: &'a Location,
    /// The published matrix.
    pub matrix: &'a Matrix,
    /// The published `devices[]`, in its order. Rails are found by name, never by position in the
    /// matrix: a withdrawn rail leaves the matrix and stays here.
    pub devices: &'a [RailFacts],
}

/// The operator's wishes about which of a peer's rails an own rail should use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum PeerAffinity {
    /// None.
    #[default]
    None,
    /// The peer's rail of the own rail's name, where it is in the peer's entry: for fabrics with a
    /// switch for each rail (`MC_ENABLE_DEST_DEVICE_AFFINITY`).
    SameName,
    /// For memory of devices, certain rails of the peer's preferred ones (`MC_NIC_PEER_AFFINITY`).
    Map(BTreeMap<String, Vec<String>>),
}

impl PeerAffinity {
    /// `RERAIL_…` wins over `MC_…` for `NIC_PEER_AFFINITY` with its switch
    /// `ENABLE_HCA_PEER_AFFINITY` (0, 1, true, false), and `ENABLE_DEST_DEVICE_AFFINITY`, which in
    /// its `MC_` form counts as on whenever it is set.
    ///
    /// # Errors
    ///
    /// A value that does not parse, and both at once, since they contradict each other.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, SettingError> {
        let find = |name: &str| {
            let names = [format!("RERAIL_{name}"), format!("MC_{name}")];
            names
                .into_iter()
                .find_map(|name| Some((lookup(&name)?, name)))
        };
        let same_name = match find(OWN_NAME_SWITCH) {
            Some((_, name)) if name.starts_with("MC_") => true,
            Some((text, name)) => parse_switch(&name, &text)?,
            None => false,
        };
        let by_map = match find(MAP_SWITCH) {
            Some((text, name)) => parse_switch(&name, &text)?,
            None => false,
        };
        if same_name && by_map {
            let expected = format!("that or {MAP_SWITCH}, not both");
            return Err(SettingError::new(OWN_NAME_SWITCH, "on", expected));
        }
        if same_name {
            return Ok(Self::SameName);
        }
        if !by_map {
            return Ok(Self::None);
        }
        let (text, name) = find(MAP_VARIABLE).unwrap_or((String::new(), MAP_VARIABLE.to_owned()));
        let map = parse_map(&text);
        map.map(Self::Map).ok_or_else(|| {
            SettingError::new(
                name,
                &text,
                "LOCAL=PEER[,PEER…][;LOCAL=PEER…] with device names",
            )
        })
    }
}

fn parse_switch(name: &str, text: &str) -> Result<bool, SettingError> {
    match &*text.to_ascii_lowercase() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(SettingError::new(name, text, "0, 1, true or false")),
    }
}

fn parse_map(text: &str) -> Option<BTreeMap<String, Vec<String>>> {
    let mut map = BTreeMap::new();
    for part in text
        .split(';')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let (local, peers) = part.split_once('=')?;
        let peers: Vec<_> = peers
            .split(',')
            .map(|peer| peer.trim().to_owned())
            .collect();
        let local = local.trim().to_owned();
        let empty = local.is_empty() || peers.iter().any(String::is_empty);
        if empty || map.insert(local, peers).is_some() {
            return None;
        }
    }
    (!map.is_empty()).then_some(map)
}

/// A pair of rails, as positions in the two `devices`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RailPair {
    /// Position in the own `devices`.
    pub local: usize,
    /// Position in the peer's `devices`.
    pub peer: usize,
    /// Pairs of one tier are equally good and share the work; 0 is the best.
    pub tier: u32,
}

/// All pairs that can be used, best first: rails that are up before rails that recover, the
/// operator's affinity, one family and one subnet, near the own memory, near the peer's memory,
/// fast; names decide the rest, so that the order of `devices` and of the matrix does not count.
///
/// A rail is used only if it is in both the matrix and `devices`, and not down. A location that the
/// matrix does not know counts as `*`.
pub fn select(own: End<'_>, peer: End<'_>, affinity: &PeerAffinity) -> Vec<RailPair> {
    let peers = usable(peer);
    let mut pairs = Vec::new();
    for (local, local_preferred) in usable(own) {
        let left = &own.devices[local];
        for (peer_at, peer_preferred) in &peers {
            let right = &peer.devices[*peer_at];
            let wanted = match affinity {
                PeerAffinity::None => false,
                PeerAffinity::SameName => left.name == right.name,
                PeerAffinity::Map(map) => {
                    let mapped = map.get(&left.name);
                    peer.location.is_device()
                        && *peer_preferred
                        && mapped.is_some_and(|peers| peers.contains(&right.name))
                }
            };
            let key = Key {
                state: left.state.max(right.state),
                unwanted: !wanted,
                apart: apart(left, right),
                far: !local_preferred,
                far_at_peer: !peer_preferred,
                speed: Reverse(slower(left.speed_mbps, right.speed_mbps)),
            };
            pairs.push((key, &left.name, &right.name, local, *peer_at));
        }
    }
    pairs.sort_unstable();
    let mut tier = 0;
    let mut last = None;
    let tiered = pairs.into_iter().map(|(key, _, _, local, peer)| {
        tier += u32::from(last.is_some_and(|last| last != key));
        last = Some(key);
        RailPair { local, peer, tier }
    });
    tiered.collect()
}

/// What orders pairs, most important first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    state: RailState,
    unwanted: bool,
    apart: Apart,
    far: bool,
    far_at_peer: bool,
    speed: Reverse<u32>,
}

/// How far two addresses are from each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Apart {
    /// In one subnet, or nothing speaks against it.
    No,
    /// In different subnets: a router may or may not join them.
    OtherSubnet,
    /// Of different families: they cannot talk.
    OtherFamily,
}

fn apart(left: &RailFacts, right: &RailFacts) -> Apart {
    if left.gid.to_ipv4().is_some() != right.gid.to_ipv4().is_some() {
        return Apart::OtherFamily;
    }
    let outside = |of: &RailFacts, other: &RailFacts| {
        let subnet = of.subnet.as_ref();
        subnet.is_some_and(|subnet| !subnet.contains_gid(&other.gid))
    };
    if outside(left, right) || outside(right, left) {
        Apart::OtherSubnet
    } else {
        Apart::No
    }
}

/// The speed of a pair; a speed that is not known does not slow it.
fn slower(left: u32, right: u32) -> u32 {
    match (left, right) {
        (0, speed) | (speed, 0) => speed,
        (left, right) => left.min(right),
    }
}

/// Positions of the rails that can be used, each with whether it is near the memory.
fn usable(end: End<'_>) -> Vec<(usize, bool)> {
    let known = end.matrix.entry(&end.location.to_string());
    let known = known.filter(|entry| entry.names().next().is_some());
    let Some(entry) = known.or_else(|| end.matrix.entry("*")) else {
        return Vec::new();
    };
    let preferred: BTreeSet<&str> = entry.preferred.iter().map(String::as_str).collect();
    let all: BTreeSet<&str> = entry.names().collect();
    let mut seen = BTreeSet::new();
    let rails = end.devices.iter().enumerate().filter(|(_, rail)| {
        // Of two devices with one name only the first can be meant.
        rail.state != RailState::Down && all.contains(&*rail.name) && seen.insert(&rail.name)
    });
    // Without a preferred rail that is left, the others are as near as any can be.
    let rails: Vec<_> = rails
        .map(|(at, rail)| (at, preferred.contains(&*rail.name)))
        .collect();
    let none_near = !rails.iter().any(|(_, near)| *near);
    rails
        .into_iter()
        .map(|(at, near)| (at, near || none_near))
        .collect()
}

#[cfg(test)]
mod tests;
