//! The seam between the safe API and what carries it out.
//!
//! One enum per object, one variant per backend that is compiled in; without any the enums have
//! no value, and all above compiles just the same. To add a backend, add a variant to each enum
//! and to [`dispatch!`], and give the backend's handles the methods that are called here. Each
//! call is one `match`, and the data path is batch-shaped, so that is one per batch.
//!
//! What a backend must keep:
//!
//! - A handle is used only while it is alive: the safe layer destroys it once, after everything
//!   that was made from it, through [`Doomed`].
//! - All handles are `Send + Sync`, and every method may be called from any thread.
//! - [`QueuePair::event_key`] and [`CompletionQueue::event_key`] name a live object, unlike any
//!   other of the same context; a key may be used again after the object was destroyed.
//! - `next_event` acknowledges the event before it returns, and resolves keys before that.
//!
//! Deliberately not here: checks of arguments (the safe layer has done them), names for errors
//! (it adds them), and anything about threads.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::control::ControlThread;
#[cfg(all(feature = "ibv", feature = "sim"))]
use crate::error::Errno;
use crate::error::{BackendResult, PostRefusal};
#[cfg(feature = "ibv")]
use crate::ibv;
use crate::objects::{ObjectTable, Registration};
#[cfg(feature = "sim")]
use crate::sim::backend as sim;
use crate::{
    AccessFlags, AsyncEvent, Completion, DeviceAttr, DeviceList, GidEntry, HostMemory, InitAttr,
    PortAttr, QpAttr, QpCapacity, RtrAttr, RtsAttr, VerbsError, WorkRequest,
};

macro_rules! dispatch {
    ($handle:expr, $backend:pat => $call:expr) => {
        match $handle {
            #[cfg(feature = "ibv")]
            Self::Ibv($backend) => $call,
            #[cfg(feature = "sim")]
            Self::Sim($backend) => $call,
        }
    };
}

/// A device that is not open.
#[derive(Clone, Debug)]
pub(crate) enum Device {
    #[cfg(feature = "ibv")]
    Ibv(ibv::Device),
    #[cfg(feature = "sim")]
    Sim(sim::Device),
}

/// An open device.
#[derive(Debug)]
pub(crate) enum Context {
    #[cfg(feature = "ibv")]
    Ibv(ibv::Context),
    #[cfg(feature = "sim")]
    Sim(sim::Context),
}

/// A protection domain.
#[derive(Debug)]
pub(crate) enum ProtectionDomain {
    #[cfg(feature = "ibv")]
    Ibv(ibv::ProtectionDomain),
    #[cfg(feature = "sim")]
    Sim(sim::ProtectionDomain),
}

/// A registered region.
#[derive(Debug)]
pub(crate) enum MemoryRegion {
    #[cfg(feature = "ibv")]
    Ibv(ibv::MemoryRegion),
    #[cfg(feature = "sim")]
    Sim(sim::MemoryRegion),
}

/// A completion queue.
#[derive(Debug)]
pub(crate) enum CompletionQueue {
    #[cfg(feature = "ibv")]
    Ibv(ibv::CompletionQueue),
    #[cfg(feature = "sim")]
    Sim(sim::CompletionQueue),
}

/// A reliable connected queue pair.
#[derive(Debug)]
pub(crate) enum QueuePair {
    #[cfg(feature = "ibv")]
    Ibv(ibv::QueuePair),
    #[cfg(feature = "sim")]
    Sim(sim::QueuePair),
}

impl Device {
    /// Starts what will run the slow verbs of a context of this device.
    pub(crate) fn control(&self, name: &Arc<str>) -> Result<ControlThread, VerbsError> {
        match *self {
            #[cfg(feature = "ibv")]
            Self::Ibv(_) => ControlThread::spawn(name),
            #[cfg(feature = "sim")]
            Self::Sim(ref device) => device.control(name),
        }
    }

    pub(crate) fn open(&self) -> BackendResult<Context> {
        match *self {
            #[cfg(feature = "ibv")]
            Self::Ibv(ref device) => device.open().map(Context::Ibv),
            #[cfg(feature = "sim")]
            Self::Sim(ref device) => device.open().map(Context::Sim),
        }
    }

    pub(crate) fn relist(&self) -> Result<DeviceList, VerbsError> {
        match *self {
            #[cfg(feature = "ibv")]
            Self::Ibv(_) => ibv::devices(),
            #[cfg(feature = "sim")]
            Self::Sim(ref device) => Ok(device.relist()),
        }
    }
}

impl Context {
    pub(crate) fn device_attr(&self) -> BackendResult<DeviceAttr> {
        dispatch!(*self, ref context => context.device_attr())
    }

    pub(crate) fn port_attr(&self, port: u32) -> BackendResult<PortAttr> {
        dispatch!(*self, ref context => context.port_attr(port))
    }

    pub(crate) fn gid_table(&self, port: u32) -> BackendResult<Vec<GidEntry>> {
        dispatch!(*self, ref context => context.gid_table(port))
    }

    pub(crate) fn pkey(&self, port: u32, index: u16) -> BackendResult<u16> {
        dispatch!(*self, ref context => context.pkey(port, index))
    }

    pub(crate) fn alloc_pd(&self) -> BackendResult<ProtectionDomain> {
        match *self {
            #[cfg(feature = "ibv")]
            Self::Ibv(ref context) => context.alloc_pd().map(ProtectionDomain::Ibv),
            #[cfg(feature = "sim")]
            Self::Sim(ref context) => context.alloc_pd().map(ProtectionDomain::Sim),
        }
    }

    pub(crate) fn create_cq(&self, entries: u32) -> BackendResult<CompletionQueue> {
        match *self {
            #[cfg(feature = "ibv")]
            Self::Ibv(ref context) => context.create_cq(entries).map(CompletionQueue::Ibv),
            #[cfg(feature = "sim")]
            Self::Sim(ref context) => context.create_cq(entries).map(CompletionQueue::Sim),
        }
    }

    pub(crate) fn async_fd(&self) -> Option<BorrowedFd<'_>> {
        dispatch!(*self, ref context => context.async_fd())
    }

    pub(crate) fn next_event(&self, objects: &ObjectTable) -> BackendResult<Option<AsyncEvent>> {
        dispatch!(*self, ref context => context.next_event(objects))
    }

    fn destroy(self) -> BackendResult<()> {
        dispatch!(self, context => context.destroy())
    }
}

impl ProtectionDomain {
    /// `addr` is the first byte in this process, `iova` the address by which work requests name
    /// it. The safe layer has checked that the bytes lie inside `memory`, and keeps that until the
    /// region is destroyed.
    pub(crate) fn register(
        &self,
        memory: &HostMemory,
        addr: u64,
        length: usize,
        iova: u64,
        access: AccessFlags,
    ) -> BackendResult<MemoryRegion> {
        match *self {
            #[cfg(feature = "ibv")]
            Self::Ibv(ref pd) => pd
                .register(memory, addr, length, iova, access)
                .map(MemoryRegion::Ibv),
            #[cfg(feature = "sim")]
            Self::Sim(ref pd) => pd
                .register(memory, addr, length, iova, access)
                .map(MemoryRegion::Sim),
        }
    }

    pub(crate) fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        iova: u64,
        access: AccessFlags,
    ) -> BackendResult<MemoryRegion> {
        match *self {
            #[cfg(feature = "ibv")]
            Self::Ibv(ref pd) => pd
                .register_dmabuf(fd, offset, length, iova, access)
                .map(MemoryRegion::Ibv),
            #[cfg(feature = "sim")]
            Self::Sim(ref pd) => pd
                .register_dmabuf(fd, offset, length, iova, access)
                .map(MemoryRegion::Sim),
        }
    }

    /// The queues belong to the same context, which the safe layer has checked.
    pub(crate) fn create_qp(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        capacity: QpCapacity,
    ) -> BackendResult<QueuePair> {
        match (self, send_cq, recv_cq) {
            #[cfg(feature = "ibv")]
            (Self::Ibv(pd), CompletionQueue::Ibv(send_cq), CompletionQueue::Ibv(recv_cq)) => {
                pd.create_qp(send_cq, recv_cq, capacity).map(QueuePair::Ibv)
            }
            #[cfg(feature = "sim")]
            (Self::Sim(pd), CompletionQueue::Sim(send_cq), CompletionQueue::Sim(recv_cq)) => {
                pd.create_qp(send_cq, recv_cq, capacity).map(QueuePair::Sim)
            }
            // Objects of two backends are never of one context.
            #[cfg(all(feature = "ibv", feature = "sim"))]
            _ => Err(Errno(libc::EINVAL)),
            #[cfg(not(any(feature = "ibv", feature = "sim")))]
            (pd, ..) => match *pd {},
        }
    }

    fn destroy(self) -> BackendResult<()> {
        dispatch!(self, pd => pd.destroy())
    }
}

impl MemoryRegion {
    pub(crate) fn lkey(&self) -> u32 {
        dispatch!(*self, ref region => region.lkey())
    }

    pub(crate) fn rkey(&self) -> u32 {
        dispatch!(*self, ref region => region.rkey())
    }

    fn destroy(self) -> BackendResult<()> {
        dispatch!(self, region => region.destroy())
    }
}

impl CompletionQueue {
    pub(crate) fn event_key(&self) -> u64 {
        dispatch!(*self, ref queue => queue.event_key())
    }

    pub(crate) fn poll(&self, completions: &mut [Completion]) -> BackendResult<usize> {
        dispatch!(*self, ref queue => queue.poll(completions))
    }

    fn destroy(self) -> BackendResult<()> {
        dispatch!(self, queue => queue.destroy())
    }
}

impl QueuePair {
    pub(crate) fn event_key(&self) -> u64 {
        dispatch!(*self, ref pair => pair.event_key())
    }

    pub(crate) fn qp_num(&self) -> u32 {
        dispatch!(*self, ref pair => pair.qp_num())
    }

    /// What was granted, which may be more than was asked for.
    pub(crate) fn capacity(&self) -> QpCapacity {
        dispatch!(*self, ref pair => pair.capacity())
    }

    pub(crate) fn to_init(&self, attr: &InitAttr) -> BackendResult<()> {
        dispatch!(*self, ref pair => pair.to_init(attr))
    }

    pub(crate) fn to_rtr(&self, attr: &RtrAttr) -> BackendResult<()> {
        dispatch!(*self, ref pair => pair.to_rtr(attr))
    }

    pub(crate) fn to_rts(&self, attr: &RtsAttr) -> BackendResult<()> {
        dispatch!(*self, ref pair => pair.to_rts(attr))
    }

    pub(crate) fn to_error(&self) -> BackendResult<()> {
        dispatch!(*self, ref pair => pair.to_error())
    }

    pub(crate) fn to_reset(&self) -> BackendResult<()> {
        dispatch!(*self, ref pair => pair.to_reset())
    }

    pub(crate) fn query(&self) -> BackendResult<QpAttr> {
        dispatch!(*self, ref pair => pair.query())
    }

    pub(crate) fn post(&self, requests: &[WorkRequest]) -> Result<(), PostRefusal> {
        dispatch!(*self, ref pair => pair.post(requests))
    }

    fn destroy(self) -> BackendResult<()> {
        dispatch!(self, pair => pair.destroy())
    }
}

/// An object whose last handle is gone, on its way to be destroyed.
#[derive(Debug)]
pub(crate) enum Doomed {
    /// Nothing: a device that could not be opened. Ends the control thread.
    NotOpened,
    Context(Context),
    ProtectionDomain(ProtectionDomain),
    /// A region, with the memory that it covers if that is memory of this process.
    MemoryRegion(MemoryRegion, Option<HostMemory>),
    CompletionQueue(CompletionQueue, Registration),
    QueuePair(QueuePair, Registration),
}

impl Doomed {
    /// Destroys the object: the only place where that happens. On an error it is leaked, with the
    /// memory that hardware may still reach.
    pub(crate) fn destroy(self) -> BackendResult<()> {
        match self {
            Self::NotOpened => Ok(()),
            Self::Context(context) => context.destroy(),
            Self::ProtectionDomain(pd) => pd.destroy(),
            Self::MemoryRegion(region, memory) => {
                let destroyed = region.destroy();
                if destroyed.is_err() {
                    std::mem::forget(memory);
                }
                destroyed
            }
            // The object leaves the table first: its key may be used again at once.
            Self::CompletionQueue(queue, registration) => {
                drop(registration);
                queue.destroy()
            }
            Self::QueuePair(pair, registration) => {
                drop(registration);
                pair.destroy()
            }
        }
    }

    /// True for what ends the control thread.
    pub(crate) fn is_last(&self) -> bool {
        matches!(self, Self::NotOpened | Self::Context(_))
    }

    /// What it is, for logs.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::NotOpened => "device",
            Self::Context(_) => "context",
            Self::ProtectionDomain(_) => "protection domain",
            Self::MemoryRegion(..) => "memory region",
            Self::CompletionQueue(..) => "completion queue",
            Self::QueuePair(..) => "queue pair",
        }
    }

    /// Bytes of host memory that stay mapped if it cannot be destroyed.
    pub(crate) fn memory_bytes(&self) -> u64 {
        match self {
            Self::MemoryRegion(_, Some(memory)) => memory.length() as u64,
            _ => 0,
        }
    }
}
