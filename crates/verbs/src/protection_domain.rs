//! Protection domains: where memory is registered and queue pairs are made.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::backend;
use crate::completion_queue::CompletionQueue;
use crate::context::Context;
use crate::error::Errno;
use crate::memory_region::MemoryRegion;
use crate::owned::Owned;
use crate::queue_pair::QueuePair;
use crate::{AccessFlags, HostMemory, OutOfBounds, QpCapacity, VerbsError, fork};

/// A protection domain (`struct ibv_pd`). Clones share it.
///
/// Regions and queue pairs work together only within one domain. The methods call verbs on the
/// caller's thread; see [`Context`].
#[derive(Clone, Debug)]
pub struct ProtectionDomain {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    raw: Owned<backend::ProtectionDomain>,
    context: Context,
}

/// What a queue pair is made of.
#[derive(Clone, Copy, Debug)]
pub struct QpInit<'a> {
    /// Where completions of posted work arrive.
    pub send_cq: &'a CompletionQueue,
    /// Where completions of receives arrive. May be the same queue.
    pub recv_cq: &'a CompletionQueue,
    /// Sizes of the queues.
    pub capacity: QpCapacity,
}

impl ProtectionDomain {
    pub(crate) fn new(context: &Context, raw: backend::ProtectionDomain) -> Self {
        Self {
            inner: Arc::new(Inner {
                raw: Owned::new(raw, context.control()),
                context: context.clone(),
            }),
        }
    }

    /// The context of the domain.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Registers `length` bytes of `memory` from `offset` (`ibv_reg_mr`). Work requests name them
    /// by their addresses in this process.
    ///
    /// Remote write and remote atomic access need local write access as well. `length` 0 is
    /// `EINVAL`.
    pub fn register(
        &self,
        memory: &HostMemory,
        offset: usize,
        length: usize,
        access: AccessFlags,
    ) -> Result<MemoryRegion, VerbsError> {
        let iova = memory.addr().wrapping_add(offset as u64);
        self.register_with_iova(memory, offset, length, iova, access)
    }

    /// Like [`register`](Self::register), but work requests name the first byte by the address
    /// `iova` (`ibv_reg_mr_iova`). Devices want `iova` to have the same offset within a page as
    /// the memory.
    pub fn register_with_iova(
        &self,
        memory: &HostMemory,
        offset: usize,
        length: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<MemoryRegion, VerbsError> {
        const VERB: &str = "ibv_reg_mr_iova2";
        fork::check()?;
        let inside = offset
            .checked_add(length)
            .is_some_and(|end| end <= memory.length());
        if !inside {
            return Err(VerbsError::OutOfBounds(OutOfBounds {
                offset,
                length,
                memory_bytes: memory.length(),
            }));
        }
        self.check_range(VERB, length, iova)?;
        let access = known(access);
        let addr = memory.addr() + offset as u64;
        let context = self.context();
        let raw = context.wrap(
            VERB,
            None,
            self.inner.raw.register(memory, addr, length, iova, access),
        )?;
        Ok(MemoryRegion::new(
            self,
            raw,
            iova,
            length,
            Some(memory.clone()),
        ))
    }

    /// Registers `length` bytes from `offset` of a dma-buf (`ibv_reg_dmabuf_mr`), such as the
    /// memory of a GPU. Work requests name the first byte by the address `iova`. The kernel keeps
    /// the buffer; `fd` may be closed afterwards.
    pub fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<MemoryRegion, VerbsError> {
        const VERB: &str = "ibv_reg_dmabuf_mr";
        fork::check()?;
        self.check_range(VERB, length, iova)?;
        let access = known(access);
        let raw = self
            .inner
            .raw
            .register_dmabuf(fd, offset, length, iova, access);
        let raw = self.context().wrap(VERB, None, raw)?;
        Ok(MemoryRegion::new(self, raw, iova, length, None))
    }

    /// Makes a reliable connected queue pair (`ibv_create_qp`) in state RESET. Only requests that
    /// ask for it make a completion.
    pub fn create_qp(&self, init: QpInit<'_>) -> Result<QueuePair, VerbsError> {
        fork::check()?;
        let context = self.context();
        context.require_same(init.send_cq.context(), "the send completion queue")?;
        context.require_same(init.recv_cq.context(), "the receive completion queue")?;
        let raw = self
            .inner
            .raw
            .create_qp(init.send_cq.raw(), init.recv_cq.raw(), init.capacity);
        let raw = context.wrap("ibv_create_qp", None, raw)?;
        Ok(QueuePair::new(self, init.send_cq, init.recv_cq, raw))
    }

    fn check_range(&self, verb: &'static str, length: usize, iova: u64) -> Result<(), VerbsError> {
        if length == 0 || iova.checked_add(length as u64).is_none() {
            return Err(self.context().error(verb, None, Errno(libc::EINVAL)));
        }
        Ok(())
    }
}

/// The flags without any that this crate does not know: some change what a region's address means.
fn known(access: AccessFlags) -> AccessFlags {
    AccessFlags::from_bits_truncate(access.bits())
}
