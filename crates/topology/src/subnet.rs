//! An IP address with the length of its network's prefix.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use rerail_verbs::Gid;

/// An address and its prefix length, such as `10.62.1.5/16`: the address of an interface, or a
/// network. IPv4-mapped IPv6 networks are kept as IPv4.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subnet {
    address: IpAddr,
    prefix_bits: u8,
}

impl Subnet {
    /// `prefix_bits` is at most 32 for IPv4 and 128 for IPv6; `None` where it is longer.
    pub fn new(address: IpAddr, prefix_bits: u8) -> Option<Self> {
        let (address, prefix_bits) = match address {
            IpAddr::V6(v6) => match v6.to_ipv4_mapped() {
                Some(v4) if (96..=128).contains(&prefix_bits) => (v4.into(), prefix_bits - 96),
                _ => (address, prefix_bits),
            },
            IpAddr::V4(_) => (address, prefix_bits),
        };
        (prefix_bits <= address_bits(address)).then_some(Self {
            address,
            prefix_bits,
        })
    }

    /// The address, host bits included.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// How many leading bits name the network.
    pub fn prefix_bits(&self) -> u8 {
        self.prefix_bits
    }

    /// Whether the network holds the address. Families never mix.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4()
            && common_prefix_bits(self.address, address) >= self.prefix_bits
    }

    /// Whether the network holds the address that the GID stands for.
    pub fn contains_gid(&self, gid: &Gid) -> bool {
        self.contains(gid.to_ip())
    }
}

fn address_bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// How many leading bits two addresses share; 0 for different families.
pub(crate) fn common_prefix_bits(left: IpAddr, right: IpAddr) -> u8 {
    let bits = match (left, right) {
        (IpAddr::V4(left), IpAddr::V4(right)) => (left.to_bits() ^ right.to_bits()).leading_zeros(),
        (IpAddr::V6(left), IpAddr::V6(right)) => v6_bits(left, right),
        _ => 0,
    };
    // At most 128.
    bits as u8
}

fn v6_bits(left: Ipv6Addr, right: Ipv6Addr) -> u32 {
    (left.to_bits() ^ right.to_bits()).leading_zeros()
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix_bits)
    }
}

impl fmt::Debug for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Subnet({self})")
    }
}

/// A text that is no subnet.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?} is not a subnet: expected ADDRESS/BITS such as 10.62.0.0/16 or fd00:1::/64")]
pub struct SubnetParseError {
    /// The offending text, cut to 64 characters.
    pub text: String,
}

impl FromStr for Subnet {
    type Err = SubnetParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = || {
            let (address, bits) = text.split_once('/')?;
            // Rust's integers take a sign, which no prefix length has.
            if bits.is_empty() || !bits.bytes().all(|digit| digit.is_ascii_digit()) {
                return None;
            }
            Self::new(address.parse().ok()?, bits.parse().ok()?)
        };
        parsed().ok_or_else(|| SubnetParseError {
            text: text.chars().take(64).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subnet_holds_its_own_addresses_and_no_other_family() {
        let subnet: Subnet = "10.62.1.5/16".parse().expect("a subnet");
        assert!(subnet.contains("10.62.255.1".parse().expect("an address")));
        assert!(!subnet.contains("10.63.0.1".parse().expect("an address")));
        assert!(!subnet.contains("::1".parse().expect("an address")));
        let all: Subnet = "0.0.0.0/0".parse().expect("a subnet");
        assert!(all.contains("255.1.1.1".parse().expect("an address")));
        let mapped: Subnet = "::ffff:10.62.0.0/112".parse().expect("a subnet");
        assert_eq!(mapped.to_string(), "10.62.0.0/16");
    }

    #[test]
    fn broken_texts_are_errors() {
        for text in [
            "",
            "10.0.0.0",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "fd00::/129",
            "x/8",
            "/8",
            "1.2.3.4/",
        ] {
            assert!(text.parse::<Subnet>().is_err(), "{text}");
        }
    }
}
