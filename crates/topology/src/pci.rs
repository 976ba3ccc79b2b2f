//! Places in the PCI tree, and how far they are from each other.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

/// Where a function hangs: the host bridge, then every bridge on the way, then the function.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PciPath(Vec<String>);

impl PciPath {
    /// From the parts of a resolved sysfs path below `/sys/devices`, such as `pci0000:b2`,
    /// `0000:b2:03.1`, `0000:bb:00.0`; `None` without a function.
    pub fn new(parts: Vec<String>) -> Option<Self> {
        (parts.len() >= 2).then_some(Self(parts))
    }

    /// The function's own address, such as `0000:bb:00.0`.
    pub fn bdf(&self) -> &str {
        // Never empty, see `new`.
        self.0.last().map_or("", String::as_str)
    }

    /// Its directory in sysfs.
    pub fn sysfs(&self) -> PathBuf {
        let mut path = PathBuf::from("/sys/devices");
        path.extend(&self.0);
        path
    }

    fn common_parts(&self, other: &Self) -> usize {
        let pairs = self.0.iter().zip(&other.0);
        pairs.take_while(|(left, right)| left == right).count()
    }
}

impl fmt::Display for PciPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.bdf())
    }
}

/// How far a NIC and a GPU are from each other, ordered from near to far. The letters in brackets
/// are those of `nvidia-smi topo -m`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distance {
    /// Below one PCIe switch, or functions of one card (PIX).
    SameSwitch,
    /// Below one root port, several switches apart (PXB).
    SameRootPort,
    /// Below one host bridge (PHB).
    SameHostBridge,
    /// In one NUMA node (NODE).
    SameNode,
    /// Across the interconnect between sockets, or nothing is known (SYS).
    Other,
}

impl Distance {
    /// The word of `nvidia-smi topo -m`.
    pub fn word(self) -> &'static str {
        match self {
            Self::SameSwitch => "PIX",
            Self::SameRootPort => "PXB",
            Self::SameHostBridge => "PHB",
            Self::SameNode => "NODE",
            Self::Other => "SYS",
        }
    }

    /// The distance of two devices by path and NUMA node, as far as these are known.
    pub fn between(left: Place<'_>, right: Place<'_>) -> Self {
        let known = left.pci.zip(right.pci).map(|(left, right)| {
            let common = left.common_parts(right);
            let rest = left.0.len().max(right.0.len()) - common;
            match common {
                0 => None,
                1 => Some(Self::SameHostBridge),
                // One card: its functions differ in the last part alone.
                2 if rest <= 1 => Some(Self::SameSwitch),
                2 => Some(Self::SameRootPort),
                // Below the switch's upstream port there is a downstream port, then the device.
                _ if rest <= 2 => Some(Self::SameSwitch),
                _ => Some(Self::SameRootPort),
            }
        });
        if let Some(Some(distance)) = known {
            return distance;
        }
        match (left.numa_node, right.numa_node) {
            (Some(left), Some(right)) if left == right => Self::SameNode,
            _ => Self::Other,
        }
    }
}

/// What is known of where a device is.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Place in the PCI tree.
    pub pci: Option<&'a PciPath>,
    /// NUMA node; `None` where it is not known.
    pub numa_node: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> PciPath {
        PciPath::new(text.split('/').map(str::to_owned).collect()).expect("a path")
    }

    fn distance(left: &str, right: &str, nodes: (Option<u32>, Option<u32>)) -> Distance {
        let (left, right) = (path(left), path(right));
        let left = Place {
            pci: Some(&left),
            numa_node: nodes.0,
        };
        let right = Place {
            pci: Some(&right),
            numa_node: nodes.1,
        };
        assert_eq!(
            Distance::between(left, right),
            Distance::between(right, left)
        );
        Distance::between(left, right)
    }

    #[test]
    fn distances_follow_the_tree_and_then_the_node() {
        let near = (Some(0), Some(0));
        let gpu = "pci0:b2/b2:03.1/b9:00.0/ba:01.0/bc:00.0";
        let cases = [
            (
                "pci0:b2/b2:03.1/b9:00.0/ba:00.0/bb:00.0",
                Distance::SameSwitch,
            ),
            (
                "pci0:b2/b2:03.1/b9:00.0/ba:02.0/c0:00.0/c1:00.0/c2:00.0",
                Distance::SameRootPort,
            ),
            (
                "pci0:b2/b2:03.1/b8:00.0/b7:02.0/c0:00.0",
                Distance::SameRootPort,
            ),
            ("pci0:b2/b2:05.1/d0:00.0", Distance::SameHostBridge),
            ("pci0:40/40:05.1/41:00.0", Distance::SameNode),
        ];
        for (nic, expected) in cases {
            assert_eq!(distance(gpu, nic, near), expected, "{nic}");
        }
        let far = "pci0:40/40:05.1/41:00.0";
        assert_eq!(distance(gpu, far, (Some(0), Some(1))), Distance::Other);
        assert_eq!(
            distance(gpu, far, (None, None)),
            Distance::Other,
            "unknown is not equal"
        );
        let functions = ("pci0:0/0:01.0/1:00.0", "pci0:0/0:01.0/1:00.1");
        assert_eq!(
            distance(functions.0, functions.1, near),
            Distance::SameSwitch
        );
    }
}
