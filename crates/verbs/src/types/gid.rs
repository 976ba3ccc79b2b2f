//! GIDs and rows of a port's GID table.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A 128-bit global identifier in network byte order (`union ibv_gid`).
///
/// `Display` and serde use sysfs' form, eight groups of four hex digits. The form of Mooncake's
/// wire, sixteen two-digit bytes, is [`Gid::to_wire`]. [`FromStr`] reads both, and IP literals.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Gid(pub [u8; 16]);

/// How far an address of a GID reaches.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum GidScope {
    /// IPv4 other than 169.254/16, IPv6 global or unique-local. Private ranges are ordinary.
    Global,
    /// fe80::/10 or 169.254/16.
    LinkLocal,
}

impl Gid {
    /// The all-zero GID of an empty slot.
    pub const NULL: Self = Self([0; 16]);

    /// The IPv4-mapped GID of `address`, `::ffff:a.b.c.d`.
    pub fn from_ipv4(address: Ipv4Addr) -> Self {
        Self(address.to_ipv6_mapped().octets())
    }

    /// The GID with the bytes of `address`; an IPv4 address becomes its mapped form.
    pub fn from_ip(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self::from_ipv4(v4),
            IpAddr::V6(v6) => Self(v6.octets()),
        }
    }

    /// True for all zero bytes, and for fe80::/64 with interface id zero, the form in which an
    /// InfiniBand port shows an empty slot.
    pub fn is_null(&self) -> bool {
        const EMPTY_INFINIBAND: u128 = 0xfe80 << 112;
        matches!(u128::from_be_bytes(self.0), 0 | EMPTY_INFINIBAND)
    }

    /// The address as IPv6, whatever it means.
    pub fn to_ipv6(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.0)
    }

    /// The IPv4 address of an IPv4-mapped GID. The multicast form `ff0e::ffff:a.b.c.d` counts too.
    pub fn to_ipv4(&self) -> Option<Ipv4Addr> {
        const MAPPED: u128 = 0xffff;
        const MULTICAST: u128 = 0xff0e << 80 | MAPPED;
        let bits = u128::from_be_bytes(self.0);
        // The address is the lowest 32 bits.
        matches!(bits >> 32, MAPPED | MULTICAST).then(|| Ipv4Addr::from_bits(bits as u32))
    }

    /// The address as an IP address: IPv4 where it is mapped, else IPv6.
    pub fn to_ip(&self) -> IpAddr {
        self.to_ipv4()
            .map_or_else(|| IpAddr::V6(self.to_ipv6()), IpAddr::V4)
    }

    /// How far the address reaches.
    pub fn scope(&self) -> GidScope {
        let link_local = match self.to_ipv4() {
            Some(v4) => v4.is_link_local(),
            None => self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80,
        };
        if link_local {
            GidScope::LinkLocal
        } else {
            GidScope::Global
        }
    }

    /// The text form of Mooncake's wire: sixteen two-digit lower-case hex bytes joined by `:`.
    pub fn to_wire(&self) -> String {
        let mut text = String::with_capacity(47);
        for (index, byte) in self.0.iter().enumerate() {
            if index > 0 {
                text.push(':');
            }
            let _ = fmt::Write::write_fmt(&mut text, format_args!("{byte:02x}"));
        }
        text
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for group in 0..8 {
            if group > 0 {
                f.write_str(":")?;
            }
            write!(f, "{:02x}{:02x}", self.0[2 * group], self.0[2 * group + 1])?;
        }
        Ok(())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// A text that is no GID.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{text:?} is not a GID: expected 16 two-digit hex bytes, 8 four-digit groups, or an IP address"
)]
pub struct GidParseError {
    /// The offending text, cut to 64 characters.
    pub text: String,
}

impl FromStr for Gid {
    type Err = GidParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || GidParseError {
            text: text.chars().take(64).collect(),
        };
        if text.len() == 47 {
            let mut bytes = [0_u8; 16];
            let mut parts = text.split(':');
            for byte in &mut bytes {
                let part = parts.next().ok_or_else(error)?;
                if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                    return Err(error());
                }
                *byte = u8::from_str_radix(part, 16).map_err(|_| error())?;
            }
            return if parts.next().is_none() {
                Ok(Self(bytes))
            } else {
                Err(error())
            };
        }
        // Sysfs' form, of which a scan of a machine reads thousands.
        if let Some(gid) = parse_groups(text) {
            return Ok(gid);
        }
        text.parse::<IpAddr>()
            .map(Self::from_ip)
            .map_err(|_| error())
    }
}

/// Eight groups of exactly four hex digits.
fn parse_groups(text: &str) -> Option<Gid> {
    if text.len() != 39 {
        return None;
    }
    let mut bits = 0_u128;
    for (at, letter) in text.bytes().enumerate() {
        if at % 5 == 4 {
            if letter != b':' {
                return None;
            }
        } else {
            let digit = char::from(letter).to_digit(16)?;
            bits = bits << 4 | u128::from(digit);
        }
    }
    Some(Gid(bits.to_be_bytes()))
}

impl Serialize for Gid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Gid {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The type of a GID table's row (`enum ibv_gid_type`, and sysfs' `gid_attrs/types`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum GidType {
    /// An InfiniBand port's GID.
    InfiniBand,
    /// RoCE version 1: Ethernet frames without IP.
    RoceV1,
    /// RoCE version 2: UDP over IP.
    RoceV2,
    /// The type could not be read, or is a number that is not known. Never taken for v1 or v2.
    Other(u32),
}

impl GidType {
    /// A type that could not be read.
    pub const UNKNOWN: Self = Self::Other(u32::MAX);

    /// From `ibv_gid_entry.gid_type`.
    pub fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::InfiniBand,
            1 => Self::RoceV1,
            2 => Self::RoceV2,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for GidType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InfiniBand => f.write_str("IB"),
            Self::RoceV1 => f.write_str("RoCE v1"),
            Self::RoceV2 => f.write_str("RoCE v2"),
            Self::Other(u32::MAX) => f.write_str("unknown"),
            Self::Other(number) => write!(f, "unknown ({number})"),
        }
    }
}

/// A network interface that a GID belongs to.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Netdev {
    /// Interface index in the device's network namespace; 0 when only the name is known.
    pub index: u32,
    /// Interface name such as `eth0`; empty when only the index is known.
    pub name: String,
}

/// One row of a port's GID table (`struct ibv_gid_entry`). Empty slots have no row.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GidEntry {
    /// Index in the port's table.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// The row's type.
    pub gid_type: GidType,
    /// The interface that the row belongs to, where the kernel says.
    pub netdev: Option<Netdev>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_text_forms_and_ip_literals_are_read() {
        let gid = Gid::from_ipv4(Ipv4Addr::new(10, 14, 1, 2));
        assert_eq!(
            gid.to_wire(),
            "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:0e:01:02"
        );
        assert_eq!(gid.to_string(), "0000:0000:0000:0000:0000:ffff:0a0e:0102");
        for text in [
            gid.to_wire(),
            gid.to_string(),
            "10.14.1.2".into(),
            "::ffff:10.14.1.2".into(),
        ] {
            assert_eq!(text.parse::<Gid>(), Ok(gid), "{text}");
        }
    }

    #[test]
    fn the_quick_way_for_sysfs_form_says_what_the_parser_of_addresses_says() {
        let good = "fe80:0000:0000:00A0:0200:11ff:fe22:00c4";
        let mut texts = vec![good.to_owned()];
        for at in 0..good.len() {
            for letter in [":", "0", "F", "g", " ", "+", "."] {
                let mut text = good.to_owned();
                text.replace_range(at..=at, letter);
                texts.push(text);
            }
        }
        for text in texts {
            let slow = text.parse::<IpAddr>().ok().map(Gid::from_ip);
            assert_eq!(text.parse::<Gid>().ok(), slow, "{text}");
        }
    }

    #[test]
    fn broken_texts_are_errors() {
        for text in [
            "",
            "fe80",
            "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:0e:01:0",
            "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:0e:01:+2",
            "0:000:00:00:00:00:00:00:00:00:ff:ff:0a:0e:01:02",
        ] {
            assert!(text.parse::<Gid>().is_err(), "{text}");
        }
    }

    #[test]
    fn scope_and_null_follow_the_address() {
        let gid = |text: &str| text.parse::<Gid>().expect("a valid literal");
        assert_eq!(gid("169.254.3.4").scope(), GidScope::LinkLocal);
        assert_eq!(gid("fe80::1").scope(), GidScope::LinkLocal);
        assert_eq!(gid("10.0.0.1").scope(), GidScope::Global);
        assert_eq!(gid("fd00::1").scope(), GidScope::Global);
        assert!(gid("fe80::").is_null());
        assert!(Gid::NULL.is_null());
        assert!(!gid("fe80::1").is_null());
        assert!(!gid("fe80:0:0:1::").is_null());
    }
}
