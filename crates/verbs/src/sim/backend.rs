//! The handles that stand for the fabric's objects behind the public API.
//!
//! Each call locks the fabric. Verbs take their time first; posting, polling and taking events do
//! not.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::core::Core;
use super::fabric::{Caller, Fabric};
use super::node::{NicId, PortId, ProcessId};
use super::options::VerbTime;
use super::slab::Handle;
use crate::control::ControlThread;
use crate::error::{BackendResult, Errno, PostRefusal};
use crate::objects::ObjectTable;
use crate::{
    AccessFlags, AsyncEvent, Completion, DeviceAttr, DeviceList, GidEntry, HostMemory, InitAttr,
    PortAttr, QpAttr, QpCapacity, RtrAttr, RtsAttr, VerbsError, WorkRequest,
};

/// An adapter for one process.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    fabric: Fabric,
    process: ProcessId,
    nic: NicId,
}

impl Device {
    pub(super) fn new(fabric: Fabric, process: ProcessId, nic: NicId) -> Self {
        Self {
            fabric,
            process,
            nic,
        }
    }

    /// In virtual time everything stays on the caller's thread; in real time a verb may take its
    /// time, and has a thread as on a real device.
    pub(crate) fn control(&self, name: &Arc<str>) -> Result<ControlThread, VerbsError> {
        if !self.fabric.is_virtual() {
            return ControlThread::spawn(name);
        }
        Ok(match self.fabric.verb_time() {
            VerbTime::Advance | VerbTime::Charge => ControlThread::inline(name),
            VerbTime::Turns => ControlThread::in_turns(name),
        })
    }

    pub(crate) fn relist(&self) -> DeviceList {
        self.fabric.devices_of(self.process)
    }

    pub(crate) fn open(&self) -> BackendResult<Context> {
        let event_fd = if self.fabric.is_virtual() {
            None
        } else {
            Some(Arc::new(event_fd()?))
        };
        let (nic, process) = (self.nic, self.process);
        let fd = event_fd.clone();
        let handle = self.fabric.verb(
            Caller::Process(process),
            |core| core.open_delay(nic),
            |core| core.open(process, nic, fd),
        )?;
        Ok(Context {
            fabric: self.fabric.clone(),
            handle,
            nic,
            event_fd,
        })
    }
}

fn event_fd() -> BackendResult<OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
        .map_err(|errno| Errno(errno.raw_os_error()))
}

/// An open adapter.
#[derive(Debug)]
pub(crate) struct Context {
    fabric: Fabric,
    handle: Handle,
    nic: NicId,
    event_fd: Option<Arc<OwnedFd>>,
}

impl Context {
    /// A verb that asks or makes something.
    fn verb<T>(&self, run: impl FnOnce(&mut Core) -> BackendResult<T>) -> BackendResult<T> {
        let handle = self.handle;
        self.fabric.verb(
            Caller::Context(handle),
            |core| core.verb_delay(handle),
            |core| {
                core.live_context(handle)?;
                run(core)
            },
        )
    }

    fn at(&self, port: u32) -> PortId {
        self.nic.port(port)
    }

    pub(crate) fn device_attr(&self) -> BackendResult<DeviceAttr> {
        self.verb(|core| Ok(core.nics[self.nic.0].limits.clone()))
    }

    pub(crate) fn port_attr(&self, port: u32) -> BackendResult<PortAttr> {
        self.verb(|core| core.query_port(self.at(port)))
    }

    pub(crate) fn gid_table(&self, port: u32) -> BackendResult<Vec<GidEntry>> {
        self.verb(|core| core.query_gids(self.at(port)))
    }

    pub(crate) fn pkey(&self, port: u32, index: u16) -> BackendResult<u16> {
        self.verb(|core| core.query_pkey(self.at(port), index))
    }

    pub(crate) fn alloc_pd(&self) -> BackendResult<ProtectionDomain> {
        let handle = self.verb(|core| core.alloc_pd(self.handle))?;
        Ok(ProtectionDomain {
            fabric: self.fabric.clone(),
            context: self.handle,
            handle,
        })
    }

    pub(crate) fn create_cq(&self, entries: u32) -> BackendResult<CompletionQueue> {
        let handle = self.verb(|core| core.create_cq(self.handle, entries))?;
        Ok(CompletionQueue {
            fabric: self.fabric.clone(),
            context: self.handle,
            handle,
        })
    }

    pub(crate) fn async_fd(&self) -> Option<BorrowedFd<'_>> {
        self.event_fd.as_deref().map(AsFd::as_fd)
    }

    pub(crate) fn next_event(&self, objects: &ObjectTable) -> BackendResult<Option<AsyncEvent>> {
        self.fabric.enter(self.handle, |core| {
            let Some(taken) = core.take_event(self.handle)? else {
                return Ok(None);
            };
            let event = taken.event.to_raw().resolve(objects);
            core.acknowledge(self.handle, taken);
            Ok(Some(event))
        })
    }

    pub(crate) fn destroy(self) -> BackendResult<()> {
        let handle = self.handle;
        self.fabric.verb(
            Caller::Context(handle),
            |core| core.verb_delay(handle),
            |core| core.close(handle),
        );
        Ok(())
    }
}

/// A protection domain.
#[derive(Debug)]
pub(crate) struct ProtectionDomain {
    fabric: Fabric,
    context: Handle,
    handle: Handle,
}

impl ProtectionDomain {
    pub(crate) fn register(
        &self,
        memory: &HostMemory,
        addr: u64,
        length: usize,
        iova: u64,
        access: AccessFlags,
    ) -> BackendResult<MemoryRegion> {
        let (handle, key) = self.fabric.verb(
            Caller::Context(self.context),
            |core| core.verb_delay(self.context),
            |core| core.register(self.handle, memory, addr, length, iova, access),
        )?;
        Ok(MemoryRegion {
            fabric: self.fabric.clone(),
            context: self.context,
            handle,
            key,
        })
    }

    /// There is no device memory in the simulator.
    pub(crate) fn register_dmabuf(
        &self,
        _fd: BorrowedFd<'_>,
        _offset: u64,
        _length: usize,
        _iova: u64,
        _access: AccessFlags,
    ) -> BackendResult<MemoryRegion> {
        Err(Errno(libc::EOPNOTSUPP))
    }

    pub(crate) fn create_qp(
        &self,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        capacity: QpCapacity,
    ) -> BackendResult<QueuePair> {
        let (handle, number) = self.fabric.verb(
            Caller::Context(self.context),
            |core| core.verb_delay(self.context),
            |core| core.create_pair(self.handle, send_cq.handle, recv_cq.handle, capacity),
        )?;
        Ok(QueuePair {
            fabric: self.fabric.clone(),
            context: self.context,
            handle,
            number,
            capacity,
        })
    }

    pub(crate) fn destroy(self) -> BackendResult<()> {
        self.fabric.verb(
            Caller::Context(self.context),
            |core| core.verb_delay(self.context),
            |core| core.dealloc_pd(self.handle),
        )
    }
}

/// A registered region.
#[derive(Debug)]
pub(crate) struct MemoryRegion {
    fabric: Fabric,
    context: Handle,
    handle: Handle,
    key: u32,
}

impl MemoryRegion {
    pub(crate) fn lkey(&self) -> u32 {
        self.key
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.key
    }

    pub(crate) fn destroy(self) -> BackendResult<()> {
        self.fabric.verb(
            Caller::Context(self.context),
            |core| core.verb_delay(self.context),
            |core| core.deregister(self.handle),
        )
    }
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    fabric: Fabric,
    context: Handle,
    handle: Handle,
}

impl CompletionQueue {
    pub(crate) fn event_key(&self) -> u64 {
        // Above the keys of queue pairs.
        COMPLETION_QUEUE_KEYS | u64::from(self.handle.index)
    }

    pub(crate) fn poll(&self, completions: &mut [Completion]) -> BackendResult<usize> {
        self.fabric
            .enter(self.context, |core| core.poll(self.handle, completions))
    }

    pub(crate) fn destroy(self) -> BackendResult<()> {
        self.fabric.verb(
            Caller::Context(self.context),
            |core| core.verb_delay(self.context),
            |core| core.destroy_cq(self.handle),
        )
    }
}

/// Tells the event keys of completion queues from those of queue pairs, which share a table.
pub(super) const COMPLETION_QUEUE_KEYS: u64 = 1 << 32;

/// A queue pair.
#[derive(Debug)]
pub(crate) struct QueuePair {
    fabric: Fabric,
    context: Handle,
    handle: Handle,
    number: u32,
    capacity: QpCapacity,
}

impl QueuePair {
    pub(crate) fn event_key(&self) -> u64 {
        u64::from(self.handle.index)
    }

    pub(crate) fn qp_num(&self) -> u32 {
        self.number
    }

    pub(crate) fn capacity(&self) -> QpCapacity {
        self.capacity
    }

    fn verb<T>(&self, run: impl FnOnce(&mut Core) -> BackendResult<T>) -> BackendResult<T> {
        self.fabric.verb(
            Caller::Context(self.context),
            |core| core.verb_delay(self.context),
            run,
        )
    }

    pub(crate) fn to_init(&self, attr: &InitAttr) -> BackendResult<()> {
        self.verb(|core| core.modify_to_init(self.handle, attr))
    }

    pub(crate) fn to_rtr(&self, attr: &RtrAttr) -> BackendResult<()> {
        self.fabric.verb(
            Caller::Context(self.context),
            |core| core.rtr_delay(self.handle, attr),
            |core| core.modify_to_rtr(self.handle, attr),
        )
    }

    pub(crate) fn to_rts(&self, attr: &RtsAttr) -> BackendResult<()> {
        self.verb(|core| core.modify_to_rts(self.handle, attr))
    }

    pub(crate) fn to_error(&self) -> BackendResult<()> {
        self.verb(|core| core.modify_to_error(self.handle))
    }

    pub(crate) fn to_reset(&self) -> BackendResult<()> {
        self.verb(|core| core.modify_to_reset(self.handle))
    }

    pub(crate) fn query(&self) -> BackendResult<QpAttr> {
        self.verb(|core| core.query_pair(self.handle))
    }

    pub(crate) fn post(&self, requests: &[WorkRequest]) -> Result<(), PostRefusal> {
        self.fabric
            .enter(self.context, |core| core.post(self.handle, requests))
    }

    pub(crate) fn destroy(self) -> BackendResult<()> {
        self.fabric.verb(
            Caller::Context(self.context),
            |core| core.destroy_delay(self.handle),
            |core| {
                core.check_stops(self.handle)?;
                core.destroy_pair(self.handle);
                Ok(())
            },
        )
    }
}
