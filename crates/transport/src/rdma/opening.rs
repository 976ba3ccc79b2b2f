//! One opening of a device, and all that is made once for it.

use std::time::Duration;

use rerail_verbs::{
    AccessFlags, CompletionQueue, Context, ControlThread, Device, DeviceAttr, HostMemory,
    MemoryRegion, Pending, ProtectionDomain, VerbsError,
};

use super::config::RdmaConfig;
use crate::TransportError;

/// How long registering memory may take whatever its size: pinning a terabyte takes minutes.
pub(super) const REGISTER_MAX: Duration = Duration::from_secs(600);

/// How long registering the smallest memory may take.
const REGISTER_MIN: Duration = Duration::from_secs(5);

/// Bytes that even a slow machine pins in a second, pages that are touched first included.
const PINNED_BYTES_PER_S_MIN: u64 = 64 << 20;

/// How long opening a device may take, and each verb after it.
const OPEN_LIMIT: Duration = Duration::from_secs(60);

/// Bytes that probes read to: the largest path MTU.
const SCRATCH_BYTES: usize = 4096;

/// An open device. A NIC has one at a time; one that died lives on until its last queue pair and
/// region are gone.
#[derive(Debug)]
pub struct Opening {
    number: u32,
    attr: DeviceAttr,
    /// Where probes read to: nobody looks at it.
    scratch: MemoryRegion,
    // Dropped in this order, though verbs would keep it right in any.
    cq: CompletionQueue,
    pd: ProtectionDomain,
    context: Context,
}

impl Opening {
    /// Opens `device` as number `number` of its openings, and says first on which thread. Blocks;
    /// verbs run on the context's control thread.
    pub(super) fn new(
        device: &Device,
        number: u32,
        config: &RdmaConfig,
        begins: impl FnOnce(&ControlThread),
    ) -> Result<Self, TransportError> {
        let context = device.open_shown(begins)?;
        let for_job = context.clone();
        let cqe_max = config.cqe_max;
        let pending = context.control().submit(move || {
            let attr = for_job.device_attr()?;
            let pd = for_job.alloc_pd()?;
            let cq = for_job.create_cq(cqe_max.min(attr.max_cqe))?;
            let memory = HostMemory::allocate(SCRATCH_BYTES);
            let memory = memory.map_err(|error| TransportError::Device {
                device: for_job.name().to_owned(),
                reason: format!("no memory for probes: {error}"),
            })?;
            let scratch = pd.register(&memory, 0, SCRATCH_BYTES, AccessFlags::LOCAL_WRITE)?;
            Ok::<_, TransportError>((attr, pd, cq, scratch))
        })?;
        let (attr, pd, cq, scratch) = pending.wait_timeout(OPEN_LIMIT)??;
        Ok(Self {
            number,
            attr,
            scratch,
            cq,
            pd,
            context,
        })
    }

    /// Number among the openings of a NIC's device: later ones have higher ones.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Limits of the device.
    pub fn attr(&self) -> &DeviceAttr {
        &self.attr
    }

    /// The open device.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The protection domain of all regions and queue pairs.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Where all completions arrive.
    pub fn cq(&self) -> &CompletionQueue {
        &self.cq
    }

    /// Memory of its own that probes read to, one path MTU long.
    pub fn scratch(&self) -> &MemoryRegion {
        &self.scratch
    }

    /// Has `length` bytes of `memory` from `offset` registered on the control thread, which gives
    /// the region to `taken` there. Does not wait for it.
    pub(super) fn register<T, F>(
        &self,
        (memory, offset, length): (&HostMemory, usize, usize),
        access: AccessFlags,
        taken: F,
    ) -> Result<Pending<Result<T, VerbsError>>, VerbsError>
    where
        T: Send + 'static,
        F: FnOnce(MemoryRegion) -> T + Send + 'static,
    {
        let (pd, memory) = (self.pd.clone(), memory.clone());
        let control = self.context.control().clone();
        self.context.control().submit(move || {
            control.allow(register_limit(length));
            pd.register(&memory, offset, length, access).map(taken)
        })
    }
}

/// How long registering so many bytes may rightly take, before the device counts as hung.
fn register_limit(bytes: usize) -> Duration {
    let for_bytes = Duration::from_secs(bytes as u64 / PINNED_BYTES_PER_S_MIN);
    (REGISTER_MIN + for_bytes).min(REGISTER_MAX)
}
