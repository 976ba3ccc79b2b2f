//! Locations of memory: the keys of a matrix, and what a buffer's owner may say.

use std::fmt;
use std::str::FromStr;

/// Most regions that a `segments:` location may have.
const REGIONS_MAX: usize = 4_096;

/// Where memory lies.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Location {
    /// `*`: anywhere, or not known.
    Any,
    /// `cpu:N`: host memory of NUMA node N.
    Cpu(u32),
    /// `cuda:N` and other makers' prefixes: memory of a device.
    Device {
        /// The prefix, such as `cuda`.
        prefix: String,
        /// The device's number among those of its prefix.
        number: u32,
    },
    /// `segments:PAGE:N0,N1,…`: equal regions, each of a NUMA node.
    Segments {
        /// Bytes of a page; regions are whole pages.
        page_bytes: u64,
        /// NUMA node of each region; never empty.
        nodes: Vec<u32>,
    },
}

impl Location {
    /// The location of the byte at `offset` in a buffer of `length` bytes: of a segmented buffer
    /// that region's node (`min(offset / (length / N), N − 1)`), else the location itself.
    pub fn at(&self, offset: u64, length: u64) -> Self {
        let Self::Segments { nodes, .. } = self else {
            return self.clone();
        };
        let last = nodes.len().saturating_sub(1);
        let region_bytes = (length / nodes.len().max(1) as u64).max(1);
        let region = usize::try_from(offset / region_bytes).map_or(last, |region| region.min(last));
        nodes.get(region).map_or(Self::Any, |node| Self::Cpu(*node))
    }

    /// Whether it is memory of a device.
    pub fn is_device(&self) -> bool {
        matches!(self, Self::Device { .. })
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Cpu(node) => write!(f, "cpu:{node}"),
            Self::Device { prefix, number } => write!(f, "{prefix}:{number}"),
            Self::Segments { page_bytes, nodes } => {
                write!(f, "segments:{page_bytes}:")?;
                for (at, node) in nodes.iter().enumerate() {
                    write!(f, "{}{node}", if at == 0 { "" } else { "," })?;
                }
                Ok(())
            }
        }
    }
}

/// A text that is no location.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{text:?} is not a location: expected *, cpu:N, cuda:N (or another maker's prefix), or \
     segments:PAGE:N0,N1,…"
)]
pub struct LocationParseError {
    /// The offending text, cut to 64 characters.
    pub text: String,
}

impl FromStr for Location {
    type Err = LocationParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| LocationParseError {
            text: text.chars().take(64).collect(),
        })
    }
}

fn parse(text: &str) -> Option<Location> {
    if text == "*" {
        return Some(Location::Any);
    }
    let (prefix, rest) = text.split_once(':')?;
    if prefix == "segments" {
        let (page, nodes) = rest.split_once(':')?;
        let page_bytes = number(page)?;
        let nodes: Vec<u32> = nodes
            .split(',')
            .take(REGIONS_MAX + 1)
            .map(|node| u32::try_from(number(node)?).ok())
            .collect::<Option<_>>()?;
        let sound = page_bytes.is_power_of_two() && nodes.len() <= REGIONS_MAX;
        return sound.then_some(Location::Segments { page_bytes, nodes });
    }
    let number = u32::try_from(number(rest)?).ok()?;
    if prefix == "cpu" {
        return Some(Location::Cpu(number));
    }
    let word = !prefix.is_empty()
        && prefix
            .bytes()
            .all(|letter| letter.is_ascii_lowercase() || letter == b'_');
    word.then(|| Location::Device {
        prefix: prefix.to_owned(),
        number,
    })
}

/// Digits only: Rust's integers also take a sign.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_survives_the_round_trip() {
        for text in [
            "*",
            "cpu:0",
            "cuda:15",
            "hip:3",
            "npu:1",
            "segments:4096:0,1,0",
        ] {
            let location: Location = text.parse().expect(text);
            assert_eq!(location.to_string(), text);
        }
        for text in [
            "",
            "cpu",
            "cpu:",
            "cpu:-1",
            "cpu:+1",
            "cpu:4294967296",
            ":0",
            "CPU:0",
            "segments:4096:",
            "segments:0:1",
            "segments:4096:1,x",
        ] {
            assert!(text.parse::<Location>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_segmented_buffer_knows_the_node_of_each_byte() {
        let location: Location = "segments:4096:0,1,3".parse().expect("a location");
        let node = |offset| location.at(offset, 300).to_string();
        assert_eq!(
            [node(0), node(99), node(100), node(299), node(9_000)].concat(),
            "cpu:0cpu:0cpu:1cpu:3cpu:3"
        );
        assert_eq!(location.at(5, 0), Location::Cpu(3), "a buffer of no bytes");
        assert_eq!(location.at(0, 1), Location::Cpu(0));
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_survived(text: String, offset: u64, length: u64) {
            if let Ok(location) = text.parse::<Location>() {
                proptest::prop_assert_eq!(location.to_string().parse(), Ok(location.clone()));
                let _ = location.at(offset, length);
            }
        }
    }
}
