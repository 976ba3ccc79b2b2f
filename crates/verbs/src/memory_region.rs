//! Memory that a device may read and write.

use std::sync::Arc;

use crate::HostMemory;
use crate::backend;
use crate::owned::Owned;
use crate::protection_domain::ProtectionDomain;

/// A registered region (`struct ibv_mr`). Clones share it.
///
/// It keeps its memory mapped. When the last clone is dropped, the control thread deregisters it,
/// and only then lets go of the memory; if the device refuses, the memory stays mapped for ever
/// and is counted by [`quarantined_bytes`](crate::ControlThread::quarantined_bytes).
#[derive(Clone, Debug)]
pub struct MemoryRegion {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    raw: Owned<(backend::MemoryRegion, Option<HostMemory>)>,
    addr: u64,
    length: usize,
    pd: ProtectionDomain,
}

impl MemoryRegion {
    pub(crate) fn new(
        pd: &ProtectionDomain,
        raw: backend::MemoryRegion,
        addr: u64,
        length: usize,
        memory: Option<HostMemory>,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                raw: Owned::new((raw, memory), pd.context().control()),
                addr,
                length,
                pd: pd.clone(),
            }),
        }
    }

    /// Key for local pieces of work requests.
    pub fn lkey(&self) -> u32 {
        self.inner.raw.0.lkey()
    }

    /// Key for peers.
    pub fn rkey(&self) -> u32 {
        self.inner.raw.0.rkey()
    }

    /// Address by which work requests name the first byte: that in this process, or the iova.
    pub fn addr(&self) -> u64 {
        self.inner.addr
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.inner.length
    }

    /// The memory; `None` for a dma-buf.
    pub fn memory(&self) -> Option<&HostMemory> {
        self.inner.raw.1.as_ref()
    }

    /// The protection domain of the region.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.inner.pd
    }
}
