//! What reaches the observers' thread from others, and how it is woken.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam::queue::SegQueue;
use rerail_verbs::VerbsError;
use rustix::event::{EventfdFlags, eventfd};

use crate::TransportError;
use crate::machine::ids::LocalNic;
use crate::machine::observer::{self, ReadId};
use crate::rdma::memory::Registered;
use crate::rdma::nics::NICS_MAX;

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
    /// A NIC was taken in that was not there at the start, and so were those before it.
    Appeared(LocalNic),
    /// The devices of the machine were looked at, or could not be; those of these NICs are gone.
    Looked { gone: Vec<LocalNic> },
}

/// All NICs, a bit each.
pub(super) const ALL: u64 = u64::MAX;

/// That of one NIC.
pub(super) fn bit(nic: LocalNic) -> u64 {
    const { assert!(NICS_MAX <= u64::BITS as usize) }
    1_u64.checked_shl(nic.0).unwrap_or(0)
}

pub(super) struct Shared {
    /// Bounded by what is under way: a reading and an opening a NIC at once, a look at the devices
    /// in all, and a NIC appears once.
    pub(super) mail: SegQueue<Mail>,
    /// NICs whose ports may differ, a bit each: however often that is said, they are read once.
    hints: AtomicU64,
    pub(super) wake: OwnedFd,
    pub(super) stop: AtomicBool,
}

impl Shared {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            mail: SegQueue::new(),
            hints: AtomicU64::new(0),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stop: AtomicBool::new(false),
        })
    }

    pub(super) fn send(&self, mail: Mail) {
        self.mail.push(mail);
        self.wake();
    }

    /// Something suggests that a NIC's port, or all, may differ.
    pub(super) fn hint(&self, local: Option<LocalNic>) {
        self.hints
            .fetch_or(local.map_or(ALL, bit), Ordering::AcqRel);
        self.wake();
    }

    /// The NICs of which that was said since this was last asked.
    pub(super) fn take_hints(&self) -> u64 {
        self.hints.swap(0, Ordering::AcqRel)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_kept_once_a_nic_however_many_there_are() {
        let shared = Shared::new().expect("a descriptor");
        for _ in 0..1_000 {
            shared.hint(Some(LocalNic(3)));
            shared.hint(Some(LocalNic(63)));
        }
        assert_eq!(shared.take_hints(), 1 << 3 | 1 << 63);
        assert_eq!(shared.take_hints(), 0, "they are taken once");
        shared.hint(Some(LocalNic(3)));
        shared.hint(None);
        assert_eq!(shared.take_hints(), ALL);
        // A NIC that is none of ours has no port to read.
        shared.hint(Some(LocalNic(u32::MAX)));
        assert_eq!(shared.take_hints(), 0);
    }
}
