//! Protection domains and memory regions.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::raw::c_int;
use std::ptr::NonNull;

use super::completion_queue::CompletionQueue;
use super::ffi;
use super::queue_pair::QueuePair;
use crate::error::BackendResult;
use crate::{AccessFlags, HostMemory, QpCapacity};

/// `struct ibv_pd`.
#[derive(Debug)]
pub(crate) struct ProtectionDomain {
    raw: NonNull<ffi::ibv_pd>,
}

// SAFETY: libibverbs allows every function on a domain from any thread at any time.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as for `Send`.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(super) fn new(raw: NonNull<ffi::ibv_pd>) -> Self {
        Self { raw }
    }

    pub(crate) fn register(
        &self,
        _memory: &HostMemory,
        addr: u64,
        length: usize,
        iova: u64,
        access: AccessFlags,
    ) -> BackendResult<MemoryRegion> {
        ffi::clear_errno();
        // The header's `ibv_reg_mr` comes down to this call when an optional flag such as relaxed
        // ordering is given; it drops the flags that the kernel does not know.
        //
        // SAFETY: the domain is alive. The range is mapped memory that Rust never has references
        // to, and stays mapped until the region is destroyed.
        let region = unsafe {
            ffi::ibv_reg_mr_iova2(
                self.raw.as_ptr(),
                addr as *mut _,
                length,
                iova,
                access.bits(),
            )
        };
        NonNull::new(region)
            .map(MemoryRegion::new)
            .ok_or_else(ffi::last_errno)
    }

    pub(crate) fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        iova: u64,
        access: AccessFlags,
    ) -> BackendResult<MemoryRegion> {
        ffi::clear_errno();
        // SAFETY: the domain is alive and the descriptor open; the kernel checks the range and
        // holds the buffer. It is memory of its exporter, not of this process.
        let region = unsafe {
            ffi::ibv_reg_dmabuf_mr(
                self.raw.as_ptr(),
                offset,
                length,
                iova,
                fd.as_raw_fd(),
                access.bits() as c_int,
            )
        };
        NonNull::new(region)
            .map(MemoryRegion::new)
            .ok_or_else(ffi::last_errno)
    }

    pub(crate) fn create_qp(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        capacity: QpCapacity,
    ) -> BackendResult<QueuePair> {
        QueuePair::create(self.raw, send_cq.raw(), recv_cq.raw(), capacity)
    }

    pub(crate) fn destroy(self) -> BackendResult<()> {
        // SAFETY: the domain is alive, and the safe layer has destroyed all that was made from it.
        // Where the device refused that, the kernel refuses this too.
        ffi::check(unsafe { ffi::ibv_dealloc_pd(self.raw.as_ptr()) })
    }
}

/// `struct ibv_mr`.
#[derive(Debug)]
pub(crate) struct MemoryRegion {
    raw: NonNull<ffi::ibv_mr>,
}

// SAFETY: a region is not written after it was made; it may be destroyed on any thread.
unsafe impl Send for MemoryRegion {}
// SAFETY: as for `Send`.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    fn new(raw: NonNull<ffi::ibv_mr>) -> Self {
        Self { raw }
    }

    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: the region is alive, and the field never written after it was made.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: as in `lkey`.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    pub(crate) fn destroy(self) -> BackendResult<()> {
        // SAFETY: the region is alive, and destroyed once.
        ffi::check(unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) })
    }
}
