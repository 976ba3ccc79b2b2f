//! One opening of a device, and all that is made once for it.

use std::time::Duration;

use rerail_verbs::{
    AccessFlags, CompletionQueue, Context, Device, DeviceAttr, HostMemory, MemoryRegion,
    ProtectionDomain, VerbsError,
};

use super::config::RdmaConfig;
use crate::TransportError;

/// How long registering memory may take: pinning a terabyte takes minutes.
const REGISTER_LIMIT: Duration = Duration::from_secs(600);

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
    /// Opens `device` for the `number`th time. Blocks; verbs run on the context's control thread.
    pub(super) fn new(
        device: &Device,
        number: u32,
        config: &RdmaConfig,
    ) -> Result<Self, TransportError> {
        let context = device.open()?;
        let opened = context.clone();
        let cqe_max = config.cqe_max;
        let pending = context.control().submit(move || {
            let attr = opened.device_attr()?;
            let pd = opened.alloc_pd()?;
            let cq = opened.create_cq(cqe_max.min(attr.max_cqe))?;
            let memory = HostMemory::allocate(SCRATCH_BYTES);
            let memory = memory.map_err(|error| TransportError::Device {
                device: opened.name().to_owned(),
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

    /// Counts the openings of a NIC's device, from 0.
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

    /// Registers `length` bytes of `memory` from `offset` on the control thread. Blocks.
    pub(super) fn register(
        &self,
        memory: &HostMemory,
        offset: usize,
        length: usize,
        access: AccessFlags,
    ) -> Result<MemoryRegion, VerbsError> {
        let (pd, memory) = (self.pd.clone(), memory.clone());
        let control = self.context.control().clone();
        let pending = self.context.control().submit(move || {
            control.allow(REGISTER_LIMIT);
            pd.register(&memory, offset, length, access)
        })?;
        pending.wait_timeout(REGISTER_LIMIT)?
    }
}
