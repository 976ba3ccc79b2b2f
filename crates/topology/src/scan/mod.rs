//! What the machine has, read from sysfs below a root that may be a copy of one.
//!
//! A fault in one slot, port or NIC becomes a warning, or a row of its own, and never hides the
//! others. Empty GID slots are no faults. Deliberately not here: what to make of it
//! ([`Matrix`](crate::Matrix), [`rank`](crate::gid::rank)), and opening devices for use.

mod driver;
mod gpu;
mod netdevs;
mod nic;
mod root;

use std::path::Path;

use rerail_verbs::GidEntry;

pub use gpu::{Gpu, GpuVendor};
pub use nic::{Nic, NicPort};
pub(crate) use {
    gpu::{listed, visible},
    nic::natural,
};

use crate::{DeviceFilter, NetdevFacts, TopologyError};
use root::Root;

/// Everything found below one root.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scan {
    /// NICs, usable or not, by name.
    pub nics: Vec<Nic>,
    /// GPUs by PCI address.
    pub gpus: Vec<Gpu>,
    /// Network interfaces by name.
    pub netdevs: Vec<NetdevFacts>,
    /// NUMA nodes, ascending; node 0 alone where the kernel knows none.
    pub nodes: Vec<u32>,
    /// Faults that hid something, in words.
    pub warnings: Vec<String>,
}

impl Scan {
    /// Reads `sys`, `dev` and `proc` below `root`, which stands for `/`. With feature `nvml`, and
    /// only for `/` itself, NVIDIA's library is asked which GPUs this process may use and in which
    /// order; where it is absent, `sysfs` has to do.
    ///
    /// # Errors
    ///
    /// Only if `root` itself is not there; a machine without any RDMA is no error.
    pub fn read(root: &Path) -> Result<Self, TopologyError> {
        Self::read_for(root, &DeviceFilter::default())
    }

    /// As [`read`](Self::read), but the nodes of devices that `filter` does not name are not
    /// opened: whether they could be is judged by their mode bits alone.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn read_for(root: &Path, filter: &DeviceFilter) -> Result<Self, TopologyError> {
        let root = Root::new(root).map_err(|source| TopologyError::Read {
            path: root.to_owned(),
            source,
        })?;
        let mut warnings = Vec::new();
        let nics = nic::scan(&root, filter, &mut warnings);
        let mut gpus = gpu::scan(&root, &mut warnings);
        if root.is_this_machine() {
            driver::ask(&mut gpus, &mut warnings);
        }
        Ok(Self {
            nics,
            gpus,
            netdevs: netdevs::scan(&root),
            nodes: nodes(&root),
            warnings,
        })
    }

    /// What is known of the interfaces that the rows of a device's GID table are of, read below
    /// `root`, which stands for `/`. Nothing for a device that `sysfs` does not have, such as a
    /// simulated one: its interfaces are not those of this machine.
    pub fn netdevs_of(root: &Path, device: &str, rows: &[GidEntry]) -> Vec<NetdevFacts> {
        let Ok(root) = Root::new(root) else {
            return Vec::new();
        };
        if root.resolve(format!("{}/{device}", nic::CLASS)).is_none() {
            return Vec::new();
        }
        netdevs::scan_some(&root, |facts| {
            let mut netdevs = rows.iter().filter_map(|row| row.netdev.as_ref());
            netdevs.any(|netdev| facts.is_of(netdev))
        })
    }

    /// GPUs with the location of each; numbers count per maker, from 0. `cuda_visible` is the text
    /// of `CUDA_VISIBLE_DEVICES`, if it is set: what it hides has no location.
    pub fn gpu_locations(&self, cuda_visible: Option<&str>) -> Vec<(String, &Gpu)> {
        crate::matrix::numbered(&self.gpus, cuda_visible)
    }

    /// The NIC of that name.
    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.name == name)
    }
}

fn nodes(root: &Root) -> Vec<u32> {
    let names = root.list("sys/devices/system/node").unwrap_or_default();
    let numbers = names.iter().filter_map(|name| name.strip_prefix("node"));
    let mut nodes: Vec<u32> = numbers.filter_map(|number| number.parse().ok()).collect();
    nodes.sort_unstable();
    if nodes.is_empty() {
        nodes.push(0);
    }
    nodes
}
