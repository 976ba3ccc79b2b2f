//! NICs and their ports in `sys/class/infiniband`.
//!
//! Almost all of a scan is system calls: three for each slot of each GID table. NICs are therefore
//! read side by side, so that a server with many of them is not scanned by one processor alone.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rerail_verbs::{Gid, GidEntry, GidType, LinkLayer, Netdev, PhysState, PortState};
use rustix::fs::{Mode, OFlags};

use super::root::{AttributeDir, Root, pci_path};
use crate::gid::{PortTable, UnreadableRow};
use crate::{DeviceFilter, NetdevFacts, PciPath, Place};

pub(super) const CLASS: &str = "sys/class/infiniband";
const VERBS_CLASS: &str = "sys/class/infiniband_verbs";
/// Most ports of a NIC that are looked at; verbs numbers them with 8 bits.
const PORTS_MAX: usize = 255;
/// Most threads that read NICs at once; the calling one is one of them.
const READERS_MAX: usize = 8;
/// What the kernel takes off an interface's MTU for RoCE's headers before it rounds down
/// (`iboe_get_mtu` in the kernel's `ib_addr.h`).
const ROCE_OVERHEAD_BYTES: u32 = 96;

/// One port of a NIC.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NicPort {
    /// Number, from 1.
    pub number: u32,
    /// Logical state.
    pub state: PortState,
    /// Physical state.
    pub phys_state: PhysState,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Rate in Mbit/s; 0 where it is not known.
    pub rate_mbps: u32,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Path MTU in bytes that the port's interface allows; `None` on InfiniBand, where sysfs does
    /// not say.
    pub mtu_bytes: Option<u32>,
    /// Slots in the GID table.
    pub gid_table_len: u32,
    /// GID rows in use.
    pub gids: Vec<GidEntry>,
    /// GID rows that could not be read.
    pub unreadable_gids: Vec<UnreadableRow>,
}

impl NicPort {
    /// Whether traffic can flow: the port is active and has a GID row.
    pub fn is_usable(&self) -> bool {
        self.state.is_active() && !self.gids.is_empty()
    }

    /// The port's GID table, to be ranked.
    pub fn table<'a>(&'a self, device: &'a str, netdevs: &'a [NetdevFacts]) -> PortTable<'a> {
        PortTable {
            device,
            port: self.number,
            link_layer: self.link_layer,
            table_len: Some(self.gid_table_len),
            entries: &self.gids,
            unreadable: &self.unreadable_gids,
            netdevs,
        }
    }
}

/// One NIC (RDMA device).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Nic {
    /// Name, such as `mlx5_0`.
    pub name: String,
    /// Its place in the PCI tree; `None` for a software device or where it is hidden.
    pub pci: Option<PciPath>,
    /// NUMA node; `None` where it is not known.
    pub numa_node: Option<u32>,
    /// Its `uverbs` node, such as `uverbs0`.
    pub uverbs: Option<String>,
    /// Why it cannot be opened; `None` if it can, or if nothing speaks against it and it was not
    /// tried because the operator chose other devices.
    pub closed_because: Option<String>,
    /// PCI address of the physical function that it is a virtual function of.
    pub physical_function: Option<String>,
    /// All ports, by number.
    pub ports: Vec<NicPort>,
}

impl Nic {
    /// Whether it can be opened and has a usable port.
    pub fn is_usable(&self) -> bool {
        self.closed_because.is_none() && self.ports.iter().any(NicPort::is_usable)
    }

    /// Where it is, to measure distances.
    pub fn place(&self) -> Place<'_> {
        Place {
            pci: self.pci.as_ref(),
            numa_node: self.numa_node,
        }
    }

    /// Its ports that are usable; none if it cannot be opened.
    pub fn usable_ports(&self) -> impl Iterator<Item = &NicPort> {
        let open = self.closed_because.is_none();
        self.ports
            .iter()
            .filter(move |port| open && port.is_usable())
    }

    /// The port of that number.
    pub fn port(&self, number: u32) -> Option<&NicPort> {
        self.ports.iter().find(|port| port.number == number)
    }
}

/// All NICs in the order of their names. Those that `filter` does not name are not opened.
pub(super) fn scan(root: &Root, filter: &DeviceFilter, warnings: &mut Vec<String>) -> Vec<Nic> {
    let uverbs = uverbs_by_device(root);
    let mut names = root.list(CLASS).unwrap_or_else(|error| {
        warnings.push(format!("cannot list {CLASS}: {error}"));
        Vec::new()
    });
    names.sort_by(|left, right| natural(left).cmp(&natural(right)));
    let look = |name: &String| {
        let mut faults = Vec::new();
        let nic = scan_nic(root, name, filter, &uverbs, &mut faults);
        (nic, faults)
    };
    let scanned = side_by_side(&names, look).into_iter();
    let nics = scanned.map(|(nic, faults)| {
        warnings.extend(faults);
        nic
    });
    nics.collect()
}

/// `look` at every item, by several threads where there are several processors; results are in the
/// order of the items. A thread that cannot be had leaves its share to the others.
fn side_by_side<I: Sync, T: Send>(items: &[I], look: impl Fn(&I) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let take = || {
        let mut taken = Vec::new();
        while let Some((at, item)) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            items.get(at).map(|item| (at, item))
        } {
            taken.push((at, look(item)));
        }
        taken
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let readers = processors.min(READERS_MAX).min(items.len());
    let mut looked = thread::scope(|scope| {
        let helpers = (1..readers).filter_map(|_| {
            let helper = thread::Builder::new().name("scan".to_owned());
            helper.spawn_scoped(scope, take).ok()
        });
        let helpers: Vec<_> = helpers.collect();
        let mut looked = take();
        for helper in helpers {
            match helper.join() {
                Ok(more) => looked.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        looked
    });
    looked.sort_unstable_by_key(|(at, _)| *at);
    looked.into_iter().map(|(_, result)| result).collect()
}

/// Orders `mlx5_2` before `mlx5_10`.
pub(crate) fn natural(name: &str) -> (&str, u64, &str) {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem, name[stem.len()..].parse().unwrap_or(u64::MAX), name)
}

/// There is never a `/dev/infiniband/mlx5_0`: which `uverbs` node is a device's is said here.
fn uverbs_by_device(root: &Root) -> BTreeMap<String, String> {
    let nodes = root.list(VERBS_CLASS).unwrap_or_default().into_iter();
    nodes
        .filter_map(|node| {
            let device = root.read(format!("{VERBS_CLASS}/{node}/ibdev")).ok()?;
            Some((device, node))
        })
        .collect()
}

fn scan_nic(
    root: &Root,
    name: &str,
    filter: &DeviceFilter,
    uverbs: &BTreeMap<String, String>,
    warnings: &mut Vec<String>,
) -> Nic {
    let base = format!("{CLASS}/{name}");
    let device = device_directory(root, &base);
    let pci = device.and_then(|device| PciPath::new(pci_path(&device)));
    let numa_node = pci.as_ref().and_then(|pci| numa_node(root, &pci.sysfs()));
    let physical_function = pci.as_ref().and_then(|pci| {
        let function = root.resolve(pci.sysfs().join("physfn"))?;
        Some(function.file_name()?.to_str()?.to_owned())
    });
    let node = uverbs.get(name).cloned();
    let ports = AttributeDir::open(root, format!("{base}/ports")).and_then(|ports| ports.numbers());
    let ports = ports.unwrap_or_else(|error| {
        warnings.push(format!("{name}: cannot list its ports: {error}"));
        Vec::new()
    });
    let ports = ports.into_iter().take(PORTS_MAX);
    Nic {
        closed_because: why_closed(root, node.as_deref(), filter.may_name(name)),
        uverbs: node,
        ports: ports
            .filter_map(|number| scan_port(root, name, number, warnings))
            .collect(),
        name: name.to_owned(),
        pci,
        numa_node,
        physical_function,
    }
}

/// The PCI device; for a software device that of the interface it sits on.
fn device_directory(root: &Root, base: &str) -> Option<PathBuf> {
    if let Some(own) = root.resolve(format!("{base}/device")) {
        return Some(own);
    }
    let parent = root.read(format!("{base}/parent")).ok()?;
    let is_name = !parent.is_empty() && !parent.contains('/');
    is_name.then(|| root.resolve(format!("sys/class/net/{parent}/device")))?
}

/// −1 is the kernel's word for unknown, not a node.
pub(super) fn numa_node(root: &Root, device: &Path) -> Option<u32> {
    root.read(device.join("numa_node")).ok()?.parse().ok()
}

/// Why a device cannot be opened. `wanted` is whether it may be tried: what the operator filtered
/// out is only looked at.
fn why_closed(root: &Root, node: Option<&str>, wanted: bool) -> Option<String> {
    let Some(node) = node else {
        return Some(format!("no node in {VERBS_CLASS} names it"));
    };
    let path = root.join(format!("dev/infiniband/{node}"));
    let shown = format!("/dev/infiniband/{node}");
    match rustix::fs::stat(&path) {
        Err(error) => return Some(format!("{shown}: {error}")),
        // Root may open what has no permission bits at all; a container's set-up means it.
        Ok(stat) if stat.st_mode & 0o444 == 0 || stat.st_mode & 0o222 == 0 => {
            return Some(format!("{shown}: nobody may read and write it"));
        }
        Ok(_) if !wanted => return None,
        Ok(_) => {}
    }
    // Only an attempt shows what a device cgroup forbids.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let attempt = rustix::fs::open(&path, flags, Mode::empty());
    attempt.err().map(|error| format!("{shown}: {error}"))
}

fn scan_port(root: &Root, name: &str, number: u32, warnings: &mut Vec<String>) -> Option<NicPort> {
    let base = format!("{CLASS}/{name}/ports/{number}");
    let directory = match AttributeDir::open(root, &base) {
        Ok(directory) => directory,
        Err(error) => {
            warnings.push(format!("{name} port {number}: {error}"));
            return None;
        }
    };
    let state = match directory.read("state") {
        Ok(text) => PortState::from_raw(leading_number(&text).unwrap_or(u32::MAX)),
        Err(error) => {
            warnings.push(format!(
                "{name} port {number}: state cannot be read: {error}"
            ));
            PortState::Other(u32::MAX)
        }
    };
    let phys_state = directory.read("phys_state").ok();
    let link_layer = match directory.read("link_layer").as_deref() {
        Ok("Ethernet") => LinkLayer::Ethernet,
        Ok("InfiniBand") => LinkLayer::InfiniBand,
        _ => LinkLayer::Unspecified,
    };
    let mut port = NicPort {
        number,
        state,
        phys_state: PhysState::from_raw(
            phys_state
                .and_then(|text| leading_number(&text))
                .unwrap_or(u32::MAX),
        ),
        link_layer,
        rate_mbps: directory
            .read("rate")
            .map_or(0, |text| parse_rate_mbps(&text)),
        lid: directory.read("lid").map_or(0, |text| parse_lid(&text)),
        mtu_bytes: None,
        gid_table_len: 0,
        gids: Vec::new(),
        unreadable_gids: Vec::new(),
    };
    // A device without a table, such as an iWARP card, is no fault.
    if let Ok(gids) = AttributeDir::open(root, format!("{base}/gids")) {
        read_gids(root, &base, &gids, &mut port);
    }
    if link_layer == LinkLayer::Ethernet {
        port.mtu_bytes = roce_mtu(root, &port.gids);
    }
    Some(port)
}

/// Types and interfaces are read for slots in use only: in an empty slot these reads fail.
fn read_gids(root: &Root, base: &str, gids: &AttributeDir, port: &mut NicPort) {
    let types = AttributeDir::open(root, format!("{base}/gid_attrs/types")).ok();
    let ndevs = AttributeDir::open(root, format!("{base}/gid_attrs/ndevs")).ok();
    let attribute = |directory: &Option<AttributeDir>, name: &str| {
        let text = directory.as_ref()?.read(name).ok()?;
        (!text.is_empty()).then_some(text)
    };
    let indexes = match gids.numbers() {
        Ok(indexes) => indexes,
        Err(error) => {
            tracing::debug!(table = base, %error, "cannot list a GID table");
            return;
        }
    };
    port.gid_table_len = indexes.last().map_or(0, |last| last.saturating_add(1));
    let mut slot = String::new();
    for index in indexes {
        slot.clear();
        // Writing to a text cannot fail.
        let _ = write!(slot, "{index}");
        let gid = gids.read(&slot).map_err(|error| error.to_string());
        match gid.and_then(|text| text.parse::<Gid>().map_err(|error| error.to_string())) {
            Ok(gid) if gid.is_null() => {}
            Ok(gid) => port.gids.push(GidEntry {
                index,
                gid,
                gid_type: attribute(&types, &slot).map_or(GidType::UNKNOWN, |text| {
                    crate::gid::parse_gid_type(&text, port.link_layer)
                }),
                netdev: attribute(&ndevs, &slot).map(|name| Netdev { index: 0, name }),
            }),
            Err(reason) => port.unreadable_gids.push(UnreadableRow { index, reason }),
        }
    }
}

fn roce_mtu(root: &Root, gids: &[GidEntry]) -> Option<u32> {
    let netdev = gids.iter().find_map(|entry| entry.netdev.as_ref())?;
    let mtu: u32 = root
        .read(format!("sys/class/net/{}/mtu", netdev.name))
        .ok()?
        .parse()
        .ok()?;
    let payload = mtu.saturating_sub(ROCE_OVERHEAD_BYTES);
    rerail_verbs::Mtu::from_bytes(payload).map(|mtu| mtu.bytes())
}

/// `4: ACTIVE` → 4.
fn leading_number(text: &str) -> Option<u32> {
    let digits = text.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

/// `0x17e` → 382.
fn parse_lid(text: &str) -> u16 {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u16::from_str_radix(digits, 16).unwrap_or(0)
}

/// `100 Gb/sec (4X EDR)` → 100 000; `2.5 Gb/sec (1X SDR)` → 2 500.
fn parse_rate_mbps(text: &str) -> u32 {
    let number = text.split_whitespace().next().unwrap_or_default();
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let tenths = fraction
        .bytes()
        .next()
        .map_or(0, |digit| u32::from(digit.wrapping_sub(b'0')));
    let whole = whole.parse::<u32>().unwrap_or(0);
    whole
        .saturating_mul(1_000)
        .saturating_add(if tenths < 10 { tenths * 100 } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_rate_mbps("100 Gb/sec (4X EDR)"), 100_000);
        assert_eq!(parse_rate_mbps("2.5 Gb/sec (1X SDR)"), 2_500);
        assert_eq!(parse_rate_mbps(""), 0);
        assert_eq!(parse_rate_mbps("99999999999 Gb/sec"), 0);
        assert_eq!(parse_lid("0x17e"), 382);
        assert_eq!(leading_number("4: ACTIVE"), Some(4));
        assert_eq!(leading_number("-1"), None);
        assert!(natural("mlx5_2") < natural("mlx5_10"));
    }

    #[test]
    fn what_is_read_side_by_side_keeps_its_order_and_loses_nothing() {
        for count in [0, 1, 2, 7, 1_000] {
            let items: Vec<u32> = (0..count).collect();
            let doubled: Vec<u32> = items.iter().map(|item| 2 * item).collect();
            assert_eq!(side_by_side(&items, |item| 2 * item), doubled);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_attribute_is_survived(text: String) {
            let _ = (parse_rate_mbps(&text), parse_lid(&text), leading_number(&text));
            let _ = (natural(&text), super::super::root::is_bdf(&text));
            let _ = pci_path(Path::new(&text));
        }
    }
}
