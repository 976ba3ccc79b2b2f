//! What is known of network interfaces.

use std::fmt;

use rerail_verbs::{Gid, Netdev};

use crate::Subnet;

/// Names that overlay and bridge interfaces begin with, for interfaces whose kind is not known.
const OVERLAY_NAMES: &[&str] = &["vxlan", "flannel", "cni", "cali", "docker", "br-", "tunl"];

/// The kind of a network interface: `DEVTYPE` of its `uevent` in sysfs, or netlink's link kind.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum NetdevKind {
    /// A network card, or a kind without special meaning such as `veth`.
    Plain,
    /// A bond or team of several interfaces.
    Bond,
    /// An 802.1Q VLAN.
    Vlan,
    /// A macvlan or ipvlan.
    Macvlan,
    /// A bridge.
    Bridge,
    /// A tunnel: vxlan, geneve, GRE, IP in IP, WireGuard.
    Tunnel,
    /// Nothing says what it is; its name has to do.
    #[default]
    Unknown,
}

impl NetdevKind {
    /// From the kernel's word for it. A word that is not known stays [`Unknown`](Self::Unknown).
    pub fn from_kernel(word: &str) -> Self {
        match word {
            "bond" | "team" => Self::Bond,
            "vlan" => Self::Vlan,
            "macvlan" | "macvtap" | "ipvlan" => Self::Macvlan,
            "bridge" | "openvswitch" => Self::Bridge,
            "vxlan" | "geneve" | "gre" | "gretap" | "ip6gre" | "ip6gretap" | "ipip" | "ip6tnl"
            | "sit" | "erspan" | "wireguard" | "tun" | "gtp" | "bareudp" => Self::Tunnel,
            "veth" | "dummy" | "physical" | "ether" | "ethernet" | "device" | "ipoib" => {
                Self::Plain
            }
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for NetdevKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Bond => "bond",
            Self::Vlan => "vlan",
            Self::Macvlan => "macvlan",
            Self::Bridge => "bridge",
            Self::Tunnel => "tunnel",
            Self::Unknown => "unknown",
        })
    }
}

/// What is known of one network interface.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NetdevFacts {
    /// Interface index; 0 when only the name is known.
    pub index: u32,
    /// Interface name; empty when only the index is known.
    pub name: String,
    /// Its kind.
    pub kind: NetdevKind,
    /// Whether it is up; `None` where nothing says.
    pub up: Option<bool>,
    /// Its addresses; `None` where they cannot be read, which is not the same as having none.
    pub addresses: Option<Vec<Subnet>>,
}

impl NetdevFacts {
    /// Facts of an interface of which only the name is known.
    pub fn named(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Whether these are the facts of that interface: by name where both have one, else by index.
    pub fn is_of(&self, netdev: &Netdev) -> bool {
        if netdev.name.is_empty() || self.name.is_empty() {
            netdev.index != 0 && netdev.index == self.index
        } else {
            netdev.name == self.name
        }
    }

    /// The interface's address with these bytes, with its prefix.
    pub fn address(&self, gid: &Gid) -> Option<Subnet> {
        let wanted = gid.to_ip();
        let addresses = self.addresses.as_deref().unwrap_or_default();
        addresses
            .iter()
            .find(|subnet| subnet.address() == wanted)
            .copied()
    }
}

/// Whether an interface belongs to an overlay or is a bridge, whose addresses the fabric does not
/// route: by kind where it is known, else by name.
pub(crate) fn is_overlay(name: &str, facts: Option<&NetdevFacts>) -> bool {
    match facts.map(|facts| &facts.kind) {
        Some(NetdevKind::Bridge | NetdevKind::Tunnel) => true,
        Some(NetdevKind::Unknown) | None => {
            OVERLAY_NAMES.iter().any(|start| name.starts_with(start)) || name.contains(".vxlan")
        }
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_decides_and_the_name_only_without_it() {
        for name in [
            "flannel.1",
            "cni0",
            "cali123",
            "docker0",
            "br-3f",
            "tunl0",
            "vxlan7",
        ] {
            assert!(is_overlay(name, None), "{name}");
        }
        assert!(!is_overlay("eth0", None));
        assert!(!is_overlay("br0x", None));
        let mut facts = NetdevFacts::named("docker0");
        facts.kind = NetdevKind::Plain;
        assert!(!is_overlay("docker0", Some(&facts)));
        facts.kind = NetdevKind::from_kernel("vxlan");
        assert!(is_overlay("fabric0", Some(&facts)));
        assert_eq!(NetdevKind::from_kernel("no such"), NetdevKind::Unknown);
    }
}
