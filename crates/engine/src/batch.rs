//! Batches: requests that are submitted and waited for together.

mod repost;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rerail_transport::TransferError;
use rerail_transport::rdma::{OnFinished, Transfer};
use rerail_verbs::HostMemory;

use crate::engine::{Engine, ForBatches};
use crate::event::Event;
use crate::memory::RegionUse;
use crate::peers::Life;
use crate::segment::Segment;
use crate::tcp::Tether;
use crate::{EngineError, Result};

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// From the segment to local memory.
    Read,
    /// From local memory to the segment.
    Write,
}

/// What is to be moved.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which way.
    pub operation: Operation,
    /// First local address, in one registration.
    pub local_addr: u64,
    /// The far end.
    pub segment: Segment,
    /// First address in the segment's address space.
    pub remote_addr: u64,
    /// Bytes.
    pub length: u64,
    /// Time limit; `None` for the engine's own. A transfer fails at its limit only, or when
    /// no path to the peer can exist.
    pub timeout: Option<Duration>,
}

impl Request {
    /// Writes local memory to the segment.
    pub fn write(segment: &Segment, local_addr: u64, remote_addr: u64, length: u64) -> Self {
        Self {
            operation: Operation::Write,
            local_addr,
            segment: segment.clone(),
            remote_addr,
            length,
            timeout: None,
        }
    }

    /// Reads the segment into local memory.
    pub fn read(segment: &Segment, local_addr: u64, remote_addr: u64, length: u64) -> Self {
        Self {
            operation: Operation::Read,
            ..Self::write(segment, local_addr, remote_addr, length)
        }
    }
}

/// How a request stands.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Status {
    /// On its way.
    Running,
    /// All bytes have arrived.
    Completed,
    /// It is over and failed.
    Failed(TransferError),
}

impl Status {
    /// True once it is over.
    pub fn is_finished(&self) -> bool {
        !matches!(self, Self::Running)
    }
}

/// A number of requests.
///
/// A batch that is dropped cancels what is unfinished; memory stays registered and mapped until
/// hardware has let go of it (report X15).
#[must_use = "a batch that is dropped cancels its transfers"]
pub struct Batch {
    engine: Engine,
    capacity: usize,
    shared: Arc<Shared>,
}

/// What the transfers of a batch share.
pub(crate) struct Shared {
    own: ForBatches,
    unfinished: AtomicUsize,
    failed: AtomicUsize,
    /// Nothing is posted again.
    cancelled: AtomicBool,
    finished: Event,
    entries: Mutex<Vec<Entry>>,
    /// Lives of peers that end its requests, each once.
    bound: Mutex<Vec<Weak<Life>>>,
}

impl Batch {
    pub(crate) fn new(engine: Engine, capacity: usize) -> Self {
        let shared = Shared {
            own: engine.for_batches(),
            unfinished: AtomicUsize::new(0),
            failed: AtomicUsize::new(0),
            cancelled: AtomicBool::new(false),
            finished: Event::default(),
            entries: Mutex::default(),
            bound: Mutex::default(),
        };
        Self {
            engine,
            capacity,
            shared: Arc::new(shared),
        }
    }

    /// Submits requests: all, or none. Returns at once.
    ///
    /// # Errors
    ///
    /// There is no room for them, or one of them names memory that is not registered or not
    /// offered; nothing is submitted then.
    pub fn submit(&self, requests: &[Request]) -> Result<()> {
        let mut entries = self.shared.entries();
        if entries.len() + requests.len() > self.capacity {
            return Err(EngineError::TooManyRequests {
                requests: requests.len(),
                capacity: self.capacity,
                submitted: entries.len(),
            });
        }
        let prepared = requests
            .iter()
            .map(|request| self.engine.prepare(request))
            .collect::<Result<Vec<_>>>()?;
        // Before any can finish.
        self.shared
            .unfinished
            .fetch_add(prepared.len(), Ordering::AcqRel);
        for (request, (spec, in_use, revision)) in requests.iter().zip(prepared) {
            let memory = in_use.region().memory.clone();
            let task = Arc::new(Task {
                batch: Arc::downgrade(&self.shared),
                index: entries.len(),
                in_use: Mutex::new(Some(in_use)),
                submitted: Instant::now(),
                took_ns: AtomicU64::new(0),
                reposted: AtomicBool::new(false),
            });
            let on_finished = Arc::clone(&task) as Arc<dyn OnFinished>;
            let tether = Arc::default();
            let segment = &request.segment;
            // Before it starts: a life that ends from now on finds it.
            self.shared.bind(segment.life());
            let transfer = self
                .engine
                .launch(segment, &memory, spec, on_finished, &tether);
            entries.push(Entry {
                transfer,
                task,
                tether,
                segment: segment.clone(),
                memory,
                revision,
                ended: None,
            });
        }
        Ok(())
    }

    /// Requests that were submitted.
    pub fn len(&self) -> usize {
        self.shared.entries().len()
    }

    /// True while nothing was submitted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Requests that are not finished.
    pub fn unfinished(&self) -> usize {
        self.shared.unfinished.load(Ordering::Acquire)
    }

    /// How request number `index` stands, counted in the order of submission; `None` past the end.
    pub fn status(&self, index: usize) -> Option<Status> {
        self.shared.entries().get(index).map(Entry::status)
    }

    /// When request number `index` was finished, and how long it took; `None` before.
    pub fn finished_at(&self, index: usize) -> Option<(Instant, Duration)> {
        let entries = self.shared.entries();
        let task = &entries.get(index)?.task;
        let took_ns = task.took_ns.load(Ordering::Acquire);
        let took = Duration::from_nanos(took_ns);
        (took_ns > 0).then(|| (task.submitted + took, took))
    }

    /// Bytes that have arrived.
    pub fn transferred_bytes(&self) -> u64 {
        let entries = self.shared.entries();
        entries
            .iter()
            .map(|entry| entry.transfer.transferred_bytes())
            .sum()
    }

    /// Slices that had to be posted again, because their connection broke.
    pub fn retried_slices(&self) -> u64 {
        let entries = self.shared.entries();
        entries
            .iter()
            .map(|entry| entry.transfer.retried_slices())
            .sum()
    }

    /// Waits until all requests are finished, without burning a core.
    ///
    /// # Errors
    ///
    /// The first failed request's error; [`EngineError::Timeout`] if some are unfinished after
    /// `limit`, which goes on as before.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let holds = || self.unfinished() == 0;
        if !self.shared.finished.wait(limit, holds) {
            return Err(EngineError::Timeout {
                what: "the batch",
                limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
            });
        }
        self.outcome()
    }

    /// Waits until all requests are finished. Errors as in [`wait`](Self::wait).
    pub async fn finished(&self) -> Result<()> {
        let holds = || self.unfinished() == 0;
        self.shared.finished.wait_async(holds).await;
        self.outcome()
    }

    /// Gives up what is unfinished. It still counts as unfinished until nothing of it can touch
    /// memory any more: wait for that before the memory is used again.
    pub fn cancel(&self) {
        self.shared.cancelled.store(true, Ordering::Release);
        for entry in &*self.shared.entries() {
            entry.give_up(TransferError::Canceled);
        }
    }

    /// Empties a finished batch, to be used again.
    ///
    /// # Errors
    ///
    /// [`EngineError::BatchBusy`] while requests are unfinished.
    pub fn clear(&mut self) -> Result<()> {
        let unfinished = self.unfinished();
        if unfinished > 0 {
            return Err(EngineError::BatchBusy { unfinished });
        }
        self.shared.entries().clear();
        self.shared.failed.store(0, Ordering::Release);
        self.shared.cancelled.store(false, Ordering::Release);
        Ok(())
    }

    fn outcome(&self) -> Result<()> {
        if self.shared.failed.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let entries = self.shared.entries();
        let error = entries.iter().find_map(|entry| entry.error().cloned());
        error.map_or(Ok(()), |error| Err(error.into()))
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.unfinished() > 0 {
            self.cancel();
        }
    }
}

impl Shared {
    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        // A list of requests is whole whatever panicked.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has requests end with a peer's life.
    fn bind(self: &Arc<Self>, life: &Arc<Life>) {
        // A list of lives is whole whatever panicked.
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |known: &Weak<Life>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(life));
        if !bound.iter().any(is_same) {
            bound.retain(|life| life.strong_count() > 0);
            bound.push(Arc::downgrade(life));
            life.bind(self);
        }
    }

    /// Ends the requests to a peer whose life is over.
    pub(crate) fn fail_all_to(&self, life: &Life, failure: &TransferError) {
        for entry in &*self.entries() {
            if std::ptr::eq(Arc::as_ptr(entry.segment.life()), life) {
                entry.give_up(failure.clone());
            }
        }
    }
}

/// A request of a batch.
struct Task {
    /// Gone when the batch was dropped. The batch has its tasks, so that this must not have it.
    batch: Weak<Shared>,
    /// Position in the batch.
    index: usize,
    /// Taken when it is finished; contended by nobody.
    in_use: Mutex<Option<RegionUse>>,
    submitted: Instant,
    /// Nanoseconds from submission until finished; 0 before.
    took_ns: AtomicU64,
    /// It has had its second chance.
    reposted: AtomicBool,
}

struct Entry {
    /// The last attempt.
    transfer: Arc<Transfer>,
    task: Arc<Task>,
    tether: Arc<Tether>,
    segment: Segment,
    memory: HostMemory,
    /// Of the record that the attempt goes by.
    revision: u64,
    /// Why it ended between two attempts.
    ended: Option<TransferError>,
}

impl Entry {
    /// Fails it if it is not finished, and ends what is under way.
    fn give_up(&self, error: TransferError) {
        self.transfer.fail(error);
        self.tether.give_up();
    }

    /// Why it failed. That it is not fenced outweighs what failed first: its owner must not take
    /// the far end's memory for untouched.
    fn error(&self) -> Option<&TransferError> {
        let error = self.transfer.error()?;
        Some(
            self.tether
                .unfenced
                .get()
                .or(self.ended.as_ref())
                .unwrap_or(error),
        )
    }

    fn status(&self) -> Status {
        if self.task.took_ns.load(Ordering::Acquire) == 0 {
            return Status::Running;
        }
        match self.error() {
            None => Status::Completed,
            Some(error) => Status::Failed(error.clone()),
        }
    }
}

impl OnFinished for Task {
    fn finished(&self, transfer: &Transfer) {
        let refused = matches!(transfer.error(), Some(TransferError::RemoteAccess { .. }));
        // Once; and as often as the peer's record has other keys.
        let again =
            refused && (transfer.is_outdated() || !self.reposted.swap(true, Ordering::AcqRel));
        match self.batch.upgrade() {
            Some(batch) if again => repost::begin(batch, self.index),
            batch => self.end(batch.as_deref(), transfer.error().is_some()),
        }
    }
}

impl Task {
    /// The request is over.
    fn end(&self, batch: Option<&Shared>, failed: bool) {
        let took = u64::try_from(self.submitted.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.took_ns.store(took.max(1), Ordering::Release);
        let in_use = self.in_use.lock().map(|mut in_use| in_use.take());
        drop(in_use);
        let Some(batch) = batch else {
            return;
        };
        if failed {
            batch.failed.fetch_add(1, Ordering::AcqRel);
        }
        if batch.unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
            batch.finished.signal();
        }
    }
}
