//! Open devices.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::backend;
use crate::completion_queue::CompletionQueue;
use crate::control::ControlThread;
use crate::error::{BackendResult, Errno};
use crate::objects::ObjectTable;
use crate::owned::Owned;
use crate::protection_domain::ProtectionDomain;
use crate::{AsyncEvent, DeviceAttr, GidEntry, PortAttr, VerbsError, fork};

/// An open device (`struct ibv_context`).
///
/// Clones share it; it is closed by its control thread when the last clone and the last object
/// made from it are gone. Every method but [`control`](Self::control), [`name`](Self::name),
/// [`async_fd`](Self::async_fd) and [`next_event`](Self::next_event) calls a verb on the caller's
/// thread, and firmware may hang there: run them through [`control`](Self::control) where that
/// matters.
#[derive(Clone, Debug)]
pub struct Context {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    raw: Owned<backend::Context>,
    name: Arc<str>,
    objects: Arc<ObjectTable>,
    control: ControlThread,
}

impl Context {
    /// Opens `device` on a control thread of its own.
    pub(crate) fn open(
        name: &Arc<str>,
        device: &backend::Device,
        limit: Duration,
        begins: impl FnOnce(&ControlThread),
    ) -> Result<Self, VerbsError> {
        let control = device.control(name)?;
        begins(&control);
        fork::watch();
        let opener = control.clone();
        let device = device.clone();
        let submitted = control.submit(move || match device.open() {
            // Owned at once: when nobody waits any more, it is closed.
            Ok(raw) => Ok(Owned::new(raw, &opener)),
            Err(errno) => {
                opener.destroy(backend::Doomed::NotOpened);
                Err(errno)
            }
        });
        let pending = submitted.inspect_err(|_| control.destroy(backend::Doomed::NotOpened))?;
        let raw = pending
            .wait_timeout(limit)?
            .map_err(|errno| verb_error("ibv_open_device", name, None, errno))?;
        Ok(Self {
            inner: Arc::new(Inner {
                raw,
                name: Arc::clone(name),
                objects: Arc::default(),
                control,
            }),
        })
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The thread on which slow verbs should run.
    pub fn control(&self) -> &ControlThread {
        &self.inner.control
    }

    /// Limits of the device (`ibv_query_device`).
    pub fn device_attr(&self) -> Result<DeviceAttr, VerbsError> {
        fork::check()?;
        self.wrap("ibv_query_device", None, self.inner.raw.device_attr())
    }

    /// State of a port (`ibv_query_port`), read afresh. Ports are numbered from 1.
    pub fn port_attr(&self, port: u32) -> Result<PortAttr, VerbsError> {
        fork::check()?;
        self.wrap("ibv_query_port", Some(port), self.inner.raw.port_attr(port))
    }

    /// A port's GID table (`ibv_query_gid_table`), read afresh: the rows that are in use, by
    /// index. Holes are ordinary and have no row.
    pub fn gid_table(&self, port: u32) -> Result<Vec<GidEntry>, VerbsError> {
        fork::check()?;
        self.wrap(
            "ibv_query_gid_table",
            Some(port),
            self.inner.raw.gid_table(port),
        )
    }

    /// An entry of a port's P_Key table (`ibv_query_pkey`) in host byte order.
    pub fn pkey(&self, port: u32, index: u16) -> Result<u16, VerbsError> {
        fork::check()?;
        self.wrap(
            "ibv_query_pkey",
            Some(port),
            self.inner.raw.pkey(port, index),
        )
    }

    /// Makes a protection domain (`ibv_alloc_pd`).
    pub fn alloc_pd(&self) -> Result<ProtectionDomain, VerbsError> {
        fork::check()?;
        let raw = self.wrap("ibv_alloc_pd", None, self.inner.raw.alloc_pd())?;
        Ok(ProtectionDomain::new(self, raw))
    }

    /// Makes a completion queue of at least `entries` entries (`ibv_create_cq`).
    pub fn create_cq(&self, entries: u32) -> Result<CompletionQueue, VerbsError> {
        fork::check()?;
        let raw = self.wrap("ibv_create_cq", None, self.inner.raw.create_cq(entries))?;
        Ok(CompletionQueue::new(self, raw))
    }

    /// The descriptor that is readable while events wait, for use with poll or epoll; `None` when
    /// the backend has none. It does not block, and nothing but
    /// [`next_event`](Self::next_event) may read it.
    pub fn async_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.raw.async_fd()
    }

    /// Takes the next asynchronous event (`ibv_get_async_event`), if one waits. Never blocks.
    ///
    /// The event is acknowledged before it is returned, and names the object that it is about by
    /// our identity: nothing that is done with it can hold up a destruction. `EIO` means that the
    /// device is gone.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        fork::check()?;
        let event = self.inner.raw.next_event(&self.inner.objects);
        self.wrap("ibv_get_async_event", None, event)
    }

    /// True when both are the same opening of a device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn objects(&self) -> &Arc<ObjectTable> {
        &self.inner.objects
    }

    /// Adds to a backend's error what it was about.
    pub(crate) fn wrap<T>(
        &self,
        verb: &'static str,
        port: Option<u32>,
        result: BackendResult<T>,
    ) -> Result<T, VerbsError> {
        result.map_err(|errno| self.error(verb, port, errno))
    }

    pub(crate) fn error(&self, verb: &'static str, port: Option<u32>, errno: Errno) -> VerbsError {
        verb_error(verb, &self.inner.name, port, errno)
    }

    /// An error when `other`, an object called `what`, is not of this context.
    pub(crate) fn require_same(&self, other: &Self, what: &'static str) -> Result<(), VerbsError> {
        if self.is_same(other) {
            Ok(())
        } else {
            Err(VerbsError::ForeignObject {
                what,
                device: Arc::clone(&self.inner.name),
            })
        }
    }
}

fn verb_error(
    verb: &'static str,
    device: &Arc<str>,
    port: Option<u32>,
    errno: Errno,
) -> VerbsError {
    VerbsError::Verb {
        verb,
        device: Arc::clone(device),
        port,
        errno: errno.0,
    }
}
