//! GPUs in `sys/bus/pci/devices`, by class and vendor.
//!
//! Names and UUIDs come from the driver's files in `proc` where it has them. Deliberately not here:
//! the driver's library ([`driver`](super::driver)).

use serde::Serialize;

use super::nic::numa_node;
use super::root::{Root, is_bdf, pci_path};
use crate::{PciPath, Place};

const DEVICES: &str = "sys/bus/pci/devices";
/// VGA, 3D, other display, and processing accelerators: AMD's are in the last two.
const CLASSES: &[u32] = &[0x0300, 0x0302, 0x0380, 0x1200];
const CLASS_VGA: u32 = 0x0300;

/// Who made a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum GpuVendor {
    /// 10de.
    Nvidia,
    /// 1002.
    Amd,
    /// 8086.
    Intel,
}

impl GpuVendor {
    /// What locations in its memory begin with.
    pub fn location_prefix(self) -> &'static str {
        match self {
            Self::Nvidia => "cuda",
            Self::Amd => "hip",
            Self::Intel => "xpu",
        }
    }
}

/// One GPU. Its identity is its PCI address; `cuda:N` depends on who counts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gpu {
    /// Place in the PCI tree.
    pub pci: PciPath,
    /// Who made it.
    pub vendor: GpuVendor,
    /// NUMA node; `None` where it is not known.
    pub numa_node: Option<u32>,
    /// Model, where the driver says.
    pub model: Option<String>,
    /// UUID, where the driver says.
    pub uuid: Option<String>,
    /// Place in the list that the driver's library gives this process; `None` where it was not
    /// asked, or does not list the GPU.
    pub driver_index: Option<u32>,
}

impl Gpu {
    /// Where it is, to measure distances.
    pub fn place(&self) -> Place<'_> {
        Place {
            pci: Some(&self.pci),
            numa_node: self.numa_node,
        }
    }
}

/// The GPUs by PCI address.
pub(super) fn scan(root: &Root, warnings: &mut Vec<String>) -> Vec<Gpu> {
    let names = root.list(DEVICES).unwrap_or_else(|error| {
        warnings.push(format!("cannot list {DEVICES}: {error}"));
        Vec::new()
    });
    let functions = names.iter().filter(|name| is_bdf(name));
    functions.filter_map(|bdf| scan_gpu(root, bdf)).collect()
}

fn scan_gpu(root: &Root, bdf: &str) -> Option<Gpu> {
    let base = format!("{DEVICES}/{bdf}");
    // A class has three bytes; the last is the programming interface.
    let class = hex(&root.read(format!("{base}/class")).ok()?)? >> 8;
    let vendor = match hex(&root.read(format!("{base}/vendor")).ok()?)? {
        0x10de => GpuVendor::Nvidia,
        0x1002 => GpuVendor::Amd,
        0x8086 => GpuVendor::Intel,
        // A board's management controller also shows a display.
        _ => return None,
    };
    let resolved = root.resolve(&base)?;
    let path = pci_path(&resolved);
    // A processor's own graphics sit on the root bus and have no memory of their own.
    let built_in = vendor == GpuVendor::Intel && class == CLASS_VGA && path.len() == 2;
    if !CLASSES.contains(&class) || built_in {
        return None;
    }
    let pci = PciPath::new(path)?;
    let facts = root.read(format!("proc/driver/nvidia/gpus/{bdf}/information"));
    let fact = |name: &str| {
        let lines = facts.as_ref().ok()?.lines();
        let mut pairs = lines.filter_map(|line| line.split_once(':'));
        let (_, value) = pairs.find(|(key, _)| key.trim() == name)?;
        Some(value.trim().to_owned()).filter(|value| !value.is_empty())
    };
    Some(Gpu {
        vendor,
        numa_node: numa_node(root, &pci.sysfs()),
        model: fact("Model"),
        uuid: fact("GPU UUID"),
        driver_index: None,
        pci,
    })
}

fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// What the driver's library lists, in its order; all in the given order where it was not asked.
/// It shows a process in a container the GPUs that it may use, where `sysfs` shows all.
pub(crate) fn listed(gpus: Vec<&Gpu>) -> Vec<&Gpu> {
    if gpus.iter().all(|gpu| gpu.driver_index.is_none()) {
        return gpus;
    }
    let mut listed: Vec<_> = gpus
        .into_iter()
        .filter(|gpu| gpu.driver_index.is_some())
        .collect();
    listed.sort_by_key(|gpu| gpu.driver_index);
    listed
}

/// The order in which CUDA counts: `visible` is the text of `CUDA_VISIBLE_DEVICES`, numbers by PCI
/// address or (the start of) UUIDs. Like CUDA, the first entry that names nothing ends the list.
pub(crate) fn visible<'g>(gpus: &[&'g Gpu], visible: &str) -> Vec<&'g Gpu> {
    let named = |entry: &str| {
        if let Ok(number) = entry.parse::<usize>() {
            return gpus.get(number).copied();
        }
        let mut found = gpus.iter().filter(|gpu| {
            let uuid = gpu.uuid.as_deref().unwrap_or_default();
            entry.starts_with("GPU-") && uuid.starts_with(entry)
        });
        let first = found.next().copied();
        first.filter(|_| found.next().is_none())
    };
    visible
        .split(',')
        .map_while(|entry| named(entry.trim()))
        .collect()
}
