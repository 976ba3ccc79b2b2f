//! What speaks for and against a row, as values; words are made when they are printed.

use std::fmt;

use rerail_verbs::{GidScope, GidType};

/// How good a row is. Lower is better, and a class is never crossed by anything else.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum GidClass {
    /// 0: an interface of its own, global scope. Every row of an InfiniBand port.
    NetdevGlobal,
    /// 1: no interface in sight, global scope: the interface may be in another namespace.
    Global,
    /// 2: an interface, link-local.
    NetdevLinkLocal,
    /// 3: no interface in sight, link-local.
    LinkLocal,
    /// 4: an interface of an overlay or a bridge, global scope.
    OverlayGlobal,
    /// 5: an interface of an overlay or a bridge, link-local.
    OverlayLinkLocal,
    /// 5½: the type of the row cannot be read or is not known.
    UnknownType,
    /// 6: RoCE v1, which two hosts rarely share; only where no RoCE v2 row is usable.
    RoceV1,
}

impl GidClass {
    /// The number of the class; 5.5 for rows of unknown type.
    pub fn number(self) -> f64 {
        match self {
            Self::NetdevGlobal => 0.0,
            Self::Global => 1.0,
            Self::NetdevLinkLocal => 2.0,
            Self::LinkLocal => 3.0,
            Self::OverlayGlobal => 4.0,
            Self::OverlayLinkLocal => 5.0,
            Self::UnknownType => 5.5,
            Self::RoceV1 => 6.0,
        }
    }
}

impl fmt::Display for GidClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.number())
    }
}

/// Family of an address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Family {
    /// An IPv4-mapped GID.
    Ipv4,
    /// Any other.
    Ipv6,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        })
    }
}

/// What a row's interface is to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NetdevRole {
    /// None is named: it belongs to another namespace, or cannot be read.
    None,
    /// An ordinary interface.
    Ordinary,
    /// An overlay or a bridge.
    Overlay,
}

/// Whether a row's address can still be used, ordered from good to bad.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Liveness {
    /// The interface has the address, or nothing speaks against it.
    Live,
    /// The interface is down.
    NetdevDown,
    /// The interface no longer has the address.
    AddressGone,
}

/// What was found out about a row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RowFacts {
    /// Type of the row.
    pub gid_type: GidType,
    /// What its interface is to it.
    pub netdev: NetdevRole,
    /// How far its address reaches.
    pub scope: GidScope,
    /// Family of its address.
    pub family: Family,
    /// Whether its address can still be used.
    pub liveness: Liveness,
    /// Whether the port is InfiniBand, where none of the above counts.
    pub infiniband: bool,
}

/// Whether a row may be used, and why not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Verdict {
    /// It may.
    Accepted,
    /// It could not be read.
    Unreadable,
    /// The slot is empty: all zero, or fe80:: with a zero interface id.
    Null,
    /// The operator chose another index.
    NotConfiguredIndex {
        /// The operator's.
        configured: u32,
    },
    /// It is outside the operator's subnets.
    OutsideSubnets,
    /// It is not on one of the operator's interfaces.
    OutsideNetdevs,
    /// It is RoCE v1, and a RoCE v2 row is usable.
    V1BesideV2,
}

/// Why a row stands where it stands. `Display` gives the words.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Reason {
    /// Whether it may be used.
    pub verdict: Verdict,
    /// What was found out about it; `None` for a row without content.
    pub facts: Option<RowFacts>,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.verdict {
            Verdict::Accepted => {}
            Verdict::Unreadable => f.write_str("rejected: cannot be read")?,
            Verdict::Null => f.write_str("rejected: empty slot")?,
            Verdict::NotConfiguredIndex { configured } => {
                write!(f, "rejected: index {configured} is configured; otherwise ")?;
            }
            Verdict::OutsideSubnets => {
                f.write_str("rejected: outside the configured subnets; otherwise ")?;
            }
            Verdict::OutsideNetdevs => {
                f.write_str("rejected: not on a configured interface; otherwise ")?;
            }
            Verdict::V1BesideV2 => {
                f.write_str("rejected: RoCE v1, and a RoCE v2 row is usable; ")?;
            }
        }
        self.facts.map_or(Ok(()), |facts| facts.fmt(f))
    }
}

impl fmt::Display for RowFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.infiniband {
            return f.write_str("InfiniBand port: any row in use serves");
        }
        match self.gid_type {
            GidType::RoceV2 => f.write_str("RoCE v2")?,
            GidType::RoceV1 | GidType::InfiniBand => f.write_str("RoCE v1")?,
            _ => f.write_str("type unknown, which is not taken for v1 or v2")?,
        }
        let scope = match self.scope {
            GidScope::Global => "global",
            _ => "link-local",
        };
        write!(f, ", {scope} {}", self.family)?;
        f.write_str(match self.netdev {
            NetdevRole::None => ", no interface in sight",
            NetdevRole::Ordinary => ", interface in sight",
            NetdevRole::Overlay => ", interface of an overlay or a bridge",
        })?;
        f.write_str(match self.liveness {
            Liveness::Live => "",
            Liveness::NetdevDown => ", which is down",
            Liveness::AddressGone => ", which no longer has this address",
        })
    }
}
