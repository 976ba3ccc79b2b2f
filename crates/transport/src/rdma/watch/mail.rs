//! What reaches the observers' thread from others, and how it is woken.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crossbeam::queue::SegQueue;
use rerail_verbs::VerbsError;
use rustix::event::{EventfdFlags, eventfd};

use crate::TransportError;
use crate::machine::ids::LocalNic;
use crate::machine::observer::{self, ReadId};
use crate::rdma::memory::Registered;

/// What reaches the thread from others.
pub(super) enum Mail {
    /// A port was read.
    Read {
        nic: usize,
        epoch: u32,
        read: ReadId,
        result: Result<observer::PortReading, VerbsError>,
    },
    /// A device was opened again, with all memory registered, or was not.
    Reopened {
        nic: usize,
        epoch: u32,
        /// When it was begun.
        registered: Registered,
        result: Result<(), TransportError>,
    },
    /// Something suggests that a port, or all, may differ.
    Hint(Option<LocalNic>),
    /// A NIC was taken in that was not there at the start, and so were those before it.
    Appeared(LocalNic),
    /// The devices of the machine were looked at, or could not be; those of these NICs are gone.
    Looked { gone: Vec<LocalNic> },
}

pub(super) struct Shared {
    /// Not bounded by itself: a reading that is out a port, and hints, which are made one by one
    /// for errors.
    pub(super) mail: SegQueue<Mail>,
    pub(super) wake: OwnedFd,
    pub(super) stop: AtomicBool,
}

impl Shared {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            mail: SegQueue::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stop: AtomicBool::new(false),
        })
    }

    pub(super) fn send(&self, mail: Mail) {
        self.mail.push(mail);
        self.wake();
    }

    pub(super) fn wake(&self) {
        // It fails only when it is full of wakes that are not taken yet.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

/// Tells that it was looked at the devices, however that ends.
pub(super) struct LookUnderWay {
    shared: Arc<Shared>,
    pub(super) gone: Vec<LocalNic>,
}

impl LookUnderWay {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            gone: Vec::new(),
        }
    }
}

impl Drop for LookUnderWay {
    fn drop(&mut self) {
        let gone = std::mem::take(&mut self.gone);
        self.shared.send(Mail::Looked { gone });
    }
}
