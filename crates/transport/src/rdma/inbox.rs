//! What reaches a data thread, and what it reports.
//!
//! Every queue is bounded and lock-free. Deliberately not here: any waiting; who finds a queue
//! full decides for itself.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use rerail_verbs::{QueuePair, RemoteAddress, WcStatus};

use super::endpoint::CloseCause;
use super::rail::Rail;
use super::slice::Moment;
use super::transfer::Transfer;
use crate::machine::ids::{PeerId, RailId};

/// Transfers that may wait for a data thread, per NIC.
pub const WORK_MAX: usize = 4096;

/// Orders that may wait for a data thread, per NIC.
pub const ORDERS_MAX: usize = 1024;

/// A transfer that a NIC is to work on, over this rail.
#[derive(Debug)]
pub struct Work {
    /// The transfer.
    pub transfer: Arc<Transfer>,
    /// The rail, which starts at the NIC.
    pub rail: Arc<Rail>,
    /// Bytes that the rail is expected to move of it, for the choice of rails.
    pub share_bytes: u64,
}

impl Work {
    /// Puts work into a rail's account until [`dequeue`](Self::dequeue). `None` if the rail's NIC
    /// has the transfer already.
    pub fn queue(transfer: &Arc<Transfer>, rail: &Arc<Rail>, share_bytes: u64) -> Option<Self> {
        if !transfer.begin_offer(rail.id().local) {
            return None;
        }
        rail.queued(share_bytes);
        Some(Self {
            transfer: Arc::clone(transfer),
            rail: Arc::clone(rail),
            share_bytes,
        })
    }

    /// The transfer, which the rail no longer has to work on. Whoever had a reason to offer it to
    /// this NIC meanwhile has not: if there is something to claim by now, it is to be offered.
    pub fn dequeue(self) -> Arc<Transfer> {
        self.take_off();
        self.transfer
    }

    /// Takes it off the rail's account. Once, when it is dropped next.
    pub(super) fn take_off(&self) {
        self.rail.dequeued(self.share_bytes);
        self.transfer.end_offer(self.rail.id().local);
    }
}

/// Names an endpoint between control and data thread; never used again within an engine.
pub type EndpointKey = u64;

/// Queue pairs of a connected endpoint, shared by its owner and the data thread.
#[derive(Debug)]
pub struct Pairs(pub Vec<QueuePair>);

/// What the control side wants of a data thread.
#[derive(Debug)]
pub enum Order {
    /// Work for the rail may be posted on these.
    Attach {
        /// The endpoint.
        endpoint: EndpointKey,
        /// Its rail.
        rail: Arc<Rail>,
        /// Its queue pairs, in RTS.
        pairs: Arc<Pairs>,
        /// When it began to be made. The peer's end of it is of the device as it was when the keys
        /// were published that were told before, or later.
        began: Moment,
        /// Closed by the control side to stop posting without waiting for the thread.
        gate: Arc<AtomicBool>,
    },
    /// Nothing is to be posted on the endpoint any more.
    Detach(EndpointKey),
    /// The endpoint's queue pairs are in ERR: report once all has come back.
    AwaitDrain(EndpointKey),
    /// The endpoint's queue pairs are destroyed: nothing will come back any more.
    GiveUp(EndpointKey),
    /// The endpoint's queue pairs could not be stopped in time: what is in flight on it ends as
    /// unfenced.
    Unfence {
        /// The endpoint.
        endpoint: EndpointKey,
        /// Why they were to be stopped.
        cause: String,
        /// Takes how many bytes are in flight, before the first transfer ends.
        quarantined_bytes: Arc<AtomicU64>,
    },
    /// The rail does not use its endpoint any more.
    Unlink(Arc<Rail>),
    /// Probe the rail.
    Probe(Probe),
    /// One more rail leads to the peer: report what waits for it, so that it can be shared.
    Share(PeerId),
}

/// A READ of the engine's own, on each queue pair of a rail's endpoint.
#[derive(Debug)]
pub struct Probe {
    /// The rail.
    pub rail: Arc<Rail>,
    /// Names the probe in [`Report::ProbeDone`].
    pub probe: u64,
    /// From where. Without bytes, address and key may be 0.
    pub remote: RemoteAddress,
    /// Bytes, at most those of the NIC's scratch region.
    pub length: u32,
}

/// What an endpoint had not done when it was drained.
#[derive(Debug, Default)]
pub struct Leftover {
    /// Transfers whose abandoned writes may still be on the wire. Each is held once, and is to be
    /// released when the endpoint is fenced at both ends.
    pub held: Vec<Arc<Transfer>>,
    /// Bytes that go over other rails instead: of slices whose transfers have not failed.
    pub rerouted_bytes: u64,
}

/// What a data thread wants of the control side.
#[derive(Debug)]
pub enum Report {
    /// A probe came back from all queue pairs, or from one with an error.
    ProbeDone {
        /// The rail.
        rail: RailId,
        /// Which probe.
        probe: u64,
        /// Success, or the first status that is none.
        status: WcStatus,
    },
    /// What a rail moved in a time in which it was never without work.
    Progress {
        /// The rail.
        rail: RailId,
        /// Bytes that arrived.
        bytes: u64,
        /// How long it took.
        took: Duration,
    },
    /// An endpoint is broken; nothing more is posted on it.
    Broken {
        /// The endpoint.
        endpoint: EndpointKey,
        /// Why.
        cause: CloseCause,
    },
    /// All that was posted on the endpoint has come back, or was given up.
    Drained {
        /// The endpoint.
        endpoint: EndpointKey,
        /// What it had not done.
        leftover: Leftover,
    },
    /// A transfer that has slices to claim and no rail here.
    Stranded(Arc<Transfer>),
}

/// The queues of one NIC.
#[derive(Debug)]
pub struct Inbox {
    pub(super) work: ArrayQueue<Work>,
    pub(super) orders: ArrayQueue<Order>,
    wake: Arc<Wake>,
}

impl Inbox {
    /// Empty queues in front of the thread that `wake` wakes.
    pub fn new(wake: Arc<Wake>) -> Self {
        Self {
            work: ArrayQueue::new(WORK_MAX),
            orders: ArrayQueue::new(ORDERS_MAX),
            wake,
        }
    }

    /// Hands work over, or gives it back when [`WORK_MAX`] transfers wait.
    pub fn submit(&self, work: Work) -> Result<(), Work> {
        self.work.push(work)?;
        self.wake.wake();
        Ok(())
    }

    /// Hands an order over, or gives it back when [`ORDERS_MAX`] wait.
    pub fn order(&self, order: Order) -> Result<(), Order> {
        self.orders.push(order)?;
        self.wake.wake();
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.work.is_empty() && self.orders.is_empty()
    }
}

/// Wakes a data thread that has parked.
#[derive(Debug, Default)]
pub struct Wake {
    parked: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Wake {
    /// Wakes the thread if it has parked. What is to be found must be in a queue by now.
    pub fn wake(&self) {
        // Orders the push before the look at the mark, as `park` orders the mark before the look
        // at the queues: one of the two sees the other.
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::Relaxed)
            && self.parked.swap(false, Ordering::AcqRel)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Parks the calling thread, the one that is woken, unless `is_idle` says otherwise.
    pub(super) fn park(&self, limit: std::time::Duration, is_idle: impl Fn() -> bool) {
        self.thread.get_or_init(std::thread::current);
        self.parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if is_idle() {
            std::thread::park_timeout(limit);
        }
        self.parked.store(false, Ordering::Relaxed);
    }
}
