//! The control thread of a context: every verb but post and poll, and every destruction.
//!
//! Firmware may hang for a minute in modify, create, destroy or query. All of that happens on one
//! thread per open context, so that a hang costs that device and nothing else. Deliberately not
//! here: any decision. [`ControlThread::stuck_for`] says how long the verb in progress has taken;
//! what follows from it is the caller's affair.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, RecvTimeoutError, TryRecvError};
use crossbeam::queue::{ArrayQueue, SegQueue};

use crate::backend::Doomed;
use crate::{VerbsError, fork};

/// Most jobs that may wait in each of a control thread's two queues.
pub const JOBS_MAX: usize = 1024;

/// How long letting go of a region may rightly take: its pages are unpinned one by one.
const UNPIN_LIMIT_NS: u64 = 600 * 1_000_000_000;

type Job = Box<dyn FnOnce() + Send>;

/// Handle to the thread that runs a context's slow verbs.
///
/// There is one thread per open context. It opens the device, runs the closures that are handed to
/// it, destroys what is dropped, and closes the device when the last object is gone. Clones are
/// cheap and do not keep the context open.
///
/// Order: urgent jobs first, then destructions, then ordinary jobs. So an ordinary job runs after
/// the destruction of everything that was dropped before it was submitted: an empty one is a
/// barrier.
#[derive(Clone)]
pub struct ControlThread {
    shared: Arc<Shared>,
}

struct Shared {
    device: Arc<str>,
    urgent: ArrayQueue<Job>,
    jobs: ArrayQueue<Job>,
    /// Not bounded by itself: each live object gets here once, so the device's limits bound it.
    doomed: SegQueue<Doomed>,
    /// `None` for a backend that has no threads: see [`Without`].
    thread: Option<OnceLock<Thread>>,
    without: Without,
    started: Instant,
    /// Nanoseconds after `started` at which the verb in progress began, plus one; 0 when idle.
    busy_since_ns: AtomicU64,
    /// How many nanoseconds the job in progress may rightly take.
    allowed_ns: AtomicU64,
    /// The device is closed: nothing is taken any more.
    closed: AtomicBool,
    /// And what had been taken is dropped.
    finished: AtomicBool,
    failed_destructions: AtomicUsize,
    quarantined_bytes: AtomicU64,
}

/// What happens where there is no thread.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Without {
    /// Jobs and destructions wait for their turn; else they run at once, on the caller.
    turns: bool,
}

impl ControlThread {
    /// Starts the thread of one context of `device`.
    #[cfg(any(test, feature = "ibv", feature = "sim"))]
    pub(crate) fn spawn(device: &Arc<str>) -> Result<Self, VerbsError> {
        let control = Self::new(device, Some(OnceLock::new()), Without::default());
        let shared = Arc::clone(&control.shared);
        // Linux shows the first 15 characters.
        let spawned = std::thread::Builder::new()
            .name(format!("ctl-{device}"))
            .spawn(move || shared.run());
        match spawned {
            Ok(handle) => {
                if let Some(slot) = &control.shared.thread {
                    // Nothing else sets the slot.
                    let _ = slot.set(handle.thread().clone());
                }
                Ok(control)
            }
            Err(error) => Err(VerbsError::Thread {
                device: Arc::clone(device),
                errno: error.raw_os_error().unwrap_or(0),
            }),
        }
    }

    /// A control "thread" that runs jobs and destructions at once on whoever hands them over: for
    /// a backend whose verbs cannot hang and that must stay on one thread.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn inline(device: &Arc<str>) -> Self {
        Self::new(device, None, Without::default())
    }

    /// A control "thread" whose jobs and destructions wait for [`turn`](Self::turn): for a driver
    /// that steps many simulated threads.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn in_turns(device: &Arc<str>) -> Self {
        Self::new(device, None, Without { turns: true })
    }

    /// True for a handle to the same thread, and so to the same opening of a device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Runs the next job or destruction of a context in virtual time with
    /// [`VerbTime::Turns`](crate::sim::VerbTime::Turns). False if nothing waits, or if the thread
    /// runs by itself.
    #[cfg(any(test, feature = "sim"))]
    pub fn turn(&self) -> bool {
        self.shared.turn()
    }

    #[cfg(any(test, feature = "ibv", feature = "sim"))]
    fn new(device: &Arc<str>, thread: Option<OnceLock<Thread>>, without: Without) -> Self {
        Self {
            shared: Arc::new(Shared {
                device: Arc::clone(device),
                urgent: ArrayQueue::new(JOBS_MAX),
                jobs: ArrayQueue::new(JOBS_MAX),
                doomed: SegQueue::new(),
                thread,
                without,
                started: Instant::now(),
                busy_since_ns: AtomicU64::new(0),
                allowed_ns: AtomicU64::new(0),
                closed: AtomicBool::new(false),
                finished: AtomicBool::new(false),
                failed_destructions: AtomicUsize::new(0),
                quarantined_bytes: AtomicU64::new(0),
            }),
        }
    }

    /// Hands over `job` and returns the promise of its result. Never blocks.
    ///
    /// Fails when [`JOBS_MAX`] jobs wait already, or the context is closed.
    pub fn submit<T, F>(&self, job: F) -> Result<Pending<T>, VerbsError>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (pending, job) = self.promise(job);
        self.enqueue(&self.shared.jobs, job)?;
        Ok(pending)
    }

    /// Like [`submit`](Self::submit), ahead of destructions and of everything that was submitted
    /// as not urgent: for moving queue pairs to the error state.
    pub fn submit_urgent<T, F>(&self, job: F) -> Result<Pending<T>, VerbsError>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (pending, job) = self.promise(job);
        self.enqueue(&self.shared.urgent, job)?;
        Ok(pending)
    }

    /// Hands over `job` without a promise: the job itself tells whom it concerns, for example
    /// through an asynchronous channel. Fails like [`submit`](Self::submit).
    pub fn execute<F>(&self, job: F) -> Result<(), VerbsError>
    where
        F: FnOnce() + Send + 'static,
    {
        self.enqueue(&self.shared.jobs, Box::new(job))
    }

    /// How long the job or destruction in progress has been running; `None` when idle.
    ///
    /// RTR towards a neighbour that the kernel has to resolve takes a second in the ordinary
    /// course of things.
    pub fn stuck_for(&self) -> Option<Duration> {
        let since = self
            .shared
            .busy_since_ns
            .load(Ordering::Acquire)
            .checked_sub(1)?;
        Some(
            self.shared
                .started
                .elapsed()
                .saturating_sub(Duration::from_nanos(since)),
        )
    }

    /// Says, from within a job, that the job may rightly take this long: pinning memory takes
    /// minutes, RTR towards a neighbour that does not answer a second.
    pub fn allow(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.shared.allowed_ns.store(nanos, Ordering::Release);
    }

    /// True if the job or destruction in progress has been running for longer than `limit`, and
    /// for longer than it has said it may.
    pub fn is_overdue(&self, limit: Duration) -> bool {
        let allowed = Duration::from_nanos(self.shared.allowed_ns.load(Ordering::Acquire));
        self.stuck_for()
            .is_some_and(|running| running > limit.max(allowed))
    }

    /// Jobs and destructions that wait.
    pub fn waiting(&self) -> usize {
        self.shared.urgent.len() + self.shared.jobs.len() + self.shared.doomed.len()
    }

    /// Objects that the device refused to destroy. They are leaked.
    pub fn failed_destructions(&self) -> usize {
        self.shared.failed_destructions.load(Ordering::Relaxed)
    }

    /// Bytes of host memory whose region the device refused to deregister: they stay mapped for
    /// ever, since hardware may still reach them.
    pub fn quarantined_bytes(&self) -> u64 {
        self.shared.quarantined_bytes.load(Ordering::Relaxed)
    }

    /// True once the device is closed and the thread has nothing left to do.
    pub fn is_closed(&self) -> bool {
        self.shared.finished.load(Ordering::Acquire)
    }

    /// Waits until the device is closed, which happens after the last of the context's objects
    /// was dropped. False when it is still open after `limit`.
    pub fn wait_closed(&self, limit: Duration) -> bool {
        let begin = Instant::now();
        loop {
            if self.is_closed() {
                return true;
            }
            let Some(left) = limit.checked_sub(begin.elapsed()) else {
                return false;
            };
            std::thread::sleep(left.min(Duration::from_millis(1)));
        }
    }

    /// Hands an object over for destruction. Never blocks on the thread, never fails.
    pub(crate) fn destroy(&self, doomed: Doomed) {
        if self.shared.runs_at_once() {
            self.shared.run_doomed(doomed);
            return;
        }
        self.shared.doomed.push(doomed);
        self.shared.wake();
    }

    fn promise<T, F>(&self, job: F) -> (Pending<T>, Job)
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (answer, receiver) = channel::bounded(1);
        let pending = Pending {
            shared: Arc::clone(&self.shared),
            receiver,
        };
        let job = move || {
            // The caller may have stopped waiting; the result is dropped then.
            let _ = answer.send(job());
        };
        (pending, Box::new(job))
    }

    fn enqueue(&self, queue: &ArrayQueue<Job>, job: Job) -> Result<(), VerbsError> {
        fork::check()?;
        let closed = || VerbsError::ControlClosed {
            device: Arc::clone(&self.shared.device),
        };
        if self.shared.closed.load(Ordering::SeqCst) {
            return Err(closed());
        }
        if self.shared.runs_at_once() {
            self.shared.run_job(job);
            return Ok(());
        }
        queue.push(job).map_err(|_| VerbsError::ControlBusy {
            device: Arc::clone(&self.shared.device),
            jobs_max: JOBS_MAX,
        })?;
        fence(Ordering::SeqCst);
        if self.shared.closed.load(Ordering::SeqCst) {
            // The thread ended between the two looks. It sets the flag before it empties the
            // queues, and the fences order that, so that either it or this drops the job.
            self.shared.drop_jobs();
            return Err(closed());
        }
        self.shared.wake();
        Ok(())
    }
}

impl fmt::Debug for ControlThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlThread")
            .field("device", &self.shared.device)
            .field("waiting", &self.waiting())
            .field("stuck_for", &self.stuck_for())
            .field("closed", &self.is_closed())
            .finish()
    }
}

impl Shared {
    fn wake(&self) {
        // Before the slot is set the thread has not parked for the last time: `spawn` wakes it.
        if let Some(thread) = self.thread.as_ref().and_then(OnceLock::get) {
            thread.unpark();
        }
    }

    /// Body of the thread.
    #[cfg(any(test, feature = "ibv", feature = "sim"))]
    fn run(&self) {
        if let Some(slot) = &self.thread {
            let _ = slot.set(std::thread::current());
        }
        while self.step() {
            if self.is_idle() {
                std::thread::park();
            }
        }
        self.finish();
    }

    #[cfg(any(test, feature = "ibv", feature = "sim"))]
    fn is_idle(&self) -> bool {
        self.urgent.is_empty() && self.doomed.is_empty() && self.jobs.is_empty()
    }

    fn runs_at_once(&self) -> bool {
        self.thread.is_none() && !self.without.turns
    }

    /// The device is closed.
    fn finish(&self) {
        self.closed.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.drop_jobs();
        self.finished.store(true, Ordering::SeqCst);
    }

    /// Runs the next job or destruction on the caller, where that is how it is done.
    #[cfg(any(test, feature = "sim"))]
    fn turn(&self) -> bool {
        let runs = self.without.turns && !self.is_idle();
        if runs && !self.step() {
            self.finish();
        }
        runs
    }

    /// Runs the next job or destruction, if there is one. False once the device is closed.
    #[cfg(any(test, feature = "ibv", feature = "sim"))]
    fn step(&self) -> bool {
        if let Some(job) = self.urgent.pop() {
            self.run_job(job);
        } else if let Some(doomed) = self.doomed.pop() {
            return self.run_doomed(doomed);
        } else if let Some(job) = self.jobs.pop() {
            self.run_job(job);
        }
        true
    }

    fn run_job(&self, job: Job) {
        self.timed(|| {
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                // The promise is broken by the drop of its sender; the thread lives on.
                tracing::error!(device = %self.device, "a job of the control thread panicked");
            }
        });
    }

    /// Destroys an object. False when it was the context itself.
    fn run_doomed(&self, doomed: Doomed) -> bool {
        let last = doomed.is_last();
        let name = doomed.name();
        let memory_bytes = doomed.memory_bytes();
        let destroy = || {
            if memory_bytes > 0 {
                self.allowed_ns.store(UNPIN_LIMIT_NS, Ordering::Release);
            }
            doomed.destroy()
        };
        if let Err(errno) = self.timed(destroy) {
            self.failed_destructions.fetch_add(1, Ordering::Relaxed);
            self.quarantined_bytes
                .fetch_add(memory_bytes, Ordering::Relaxed);
            tracing::error!(
                device = %self.device, object = name, errno = errno.0, memory_bytes,
                "the device refused to destroy an object; it is leaked"
            );
        }
        if last && self.runs_at_once() {
            self.finish();
        }
        !last
    }

    fn timed<T>(&self, run: impl FnOnce() -> T) -> T {
        let now = self.started.elapsed().as_nanos() as u64;
        // An inline "thread" may destroy something while it runs a job: the outer mark stays.
        let outer = self.busy_since_ns.swap(now + 1, Ordering::AcqRel);
        if outer != 0 {
            self.busy_since_ns.store(outer, Ordering::Release);
        }
        let result = run();
        self.busy_since_ns.store(outer, Ordering::Release);
        self.allowed_ns.store(0, Ordering::Release);
        result
    }

    fn drop_jobs(&self) {
        while self.urgent.pop().is_some() || self.jobs.pop().is_some() {}
    }
}

/// The promise of a job's result. Dropping it does not stop the job.
#[must_use = "the result of the job is lost"]
pub struct Pending<T> {
    shared: Arc<Shared>,
    receiver: Receiver<T>,
}

impl<T> Pending<T> {
    /// Waits for the result, at most `limit`. After `NoAnswer` it can be asked again.
    ///
    /// In virtual time nobody else would run it, so that the caller does, after what came before.
    pub fn wait_timeout(&self, limit: Duration) -> Result<T, VerbsError> {
        #[cfg(any(test, feature = "sim"))]
        while self.receiver.is_empty() && self.shared.turn() {}
        self.receiver
            .recv_timeout(limit)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => VerbsError::NoAnswer {
                    device: Arc::clone(&self.shared.device),
                    waited: limit,
                },
                RecvTimeoutError::Disconnected => self.lost(),
            })
    }

    /// The result, if it is there. Never blocks.
    pub fn try_take(&self) -> Option<Result<T, VerbsError>> {
        match self.receiver.try_recv() {
            Ok(result) => Some(Ok(result)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(self.lost())),
        }
    }

    fn lost(&self) -> VerbsError {
        VerbsError::JobLost {
            device: Arc::clone(&self.shared.device),
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending")
            .field("device", &self.shared.device)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn thread() -> ControlThread {
        ControlThread::spawn(&Arc::from("test0")).expect("a thread can be started")
    }

    #[test]
    fn jobs_run_in_order_and_answer() {
        let control = thread();
        let first = control.submit(|| 1).expect("there is room");
        let second = control
            .submit(|| std::thread::current().name().map(str::to_owned))
            .expect("there is room");
        assert_eq!(first.wait_timeout(LIMIT).expect("an answer"), 1);
        let name = second.wait_timeout(LIMIT).expect("an answer");
        assert_eq!(name.as_deref(), Some("ctl-test0"));
        control.destroy(Doomed::NotOpened);
        assert!(control.wait_closed(LIMIT));
        assert!(matches!(
            control.submit(|| ()),
            Err(VerbsError::ControlClosed { .. })
        ));
    }

    #[test]
    fn a_hanging_job_shows_and_blocks_nobody_else() {
        let control = thread();
        let (release, hang) = channel::bounded::<()>(0);
        let (begun, begins) = channel::bounded(1);
        let job = move || begun.send(()).is_ok() && hang.recv().is_ok();
        let hanging = control.submit(job).expect("room");
        begins.recv_timeout(LIMIT).expect("the job begins");
        assert!(matches!(
            hanging.wait_timeout(Duration::from_millis(30)),
            Err(VerbsError::NoAnswer { .. })
        ));
        assert!(control.stuck_for().expect("it is busy") >= Duration::from_millis(20));
        // Jobs are bounded, destructions are never refused.
        let refused = (0..=JOBS_MAX)
            .filter(|_| control.execute(|| ()).is_err())
            .count();
        assert_eq!(refused, 1);
        let urgent = control.submit_urgent(|| 5).expect("a queue of its own");
        control.destroy(Doomed::NotOpened);
        assert!(!control.is_closed());
        release.send(()).expect("the job waits");
        assert!(hanging.wait_timeout(LIMIT).expect("an answer"));
        assert_eq!(urgent.wait_timeout(LIMIT).expect("an answer"), 5);
        assert!(control.wait_closed(LIMIT));
        assert_eq!(control.stuck_for(), None);
        assert_eq!(control.waiting(), 0);
    }

    #[test]
    fn a_job_is_overdue_only_beyond_what_it_may_take() {
        let control = thread();
        let (release, hang) = channel::bounded::<()>(0);
        let (begun, begins) = channel::bounded(1);
        let own = control.clone();
        let job = move || {
            own.allow(Duration::from_secs(3600));
            begun.send(()).is_ok() && hang.recv().is_ok()
        };
        let long = control.submit(job).expect("room");
        begins.recv().expect("it runs");
        assert!(!control.is_overdue(Duration::ZERO));
        release.send(()).expect("it waits");
        assert!(long.wait_timeout(LIMIT).expect("an answer"));

        let (release, hang) = channel::bounded::<()>(0);
        let (begun, begins) = channel::bounded(1);
        let job = move || begun.send(()).is_ok() && hang.recv().is_ok();
        let hanging = control.submit(job).expect("room");
        begins.recv().expect("it runs");
        assert!(
            control.is_overdue(Duration::ZERO),
            "the allowance was the other job's"
        );
        release.send(()).expect("it waits");
        assert!(hanging.wait_timeout(LIMIT).expect("an answer"));
        control.destroy(Doomed::NotOpened);
        assert!(control.wait_closed(LIMIT));
    }

    #[test]
    fn a_panicking_job_breaks_its_promise_only() {
        let control = thread();
        let broken = control.submit(|| panic!("on purpose")).expect("room");
        let whole = control.submit(|| 7).expect("room");
        assert!(matches!(
            broken.wait_timeout(LIMIT),
            Err(VerbsError::JobLost { .. })
        ));
        assert_eq!(whole.wait_timeout(LIMIT).expect("an answer"), 7);
        control.destroy(Doomed::NotOpened);
        assert!(control.wait_closed(LIMIT));
    }

    #[test]
    fn without_a_thread_everything_happens_at_once() {
        let control = ControlThread::inline(&Arc::from("sim0"));
        let caller = std::thread::current().id();
        let ran_on = control
            .submit(|| std::thread::current().id())
            .expect("open");
        assert_eq!(ran_on.try_take().expect("at once").expect("whole"), caller);
        control.destroy(Doomed::NotOpened);
        assert!(control.is_closed());
    }

    #[test]
    fn in_turns_each_thing_waits_for_its_turn_and_a_waiter_takes_those_before_its_own() {
        let control = ControlThread::in_turns(&Arc::from("sim0"));
        let (order, ran) = channel::unbounded();
        for name in ["first", "second"] {
            let order = order.clone();
            let job = move || order.send(name).expect("it is read");
            control.execute(job).expect("room");
        }
        let urgent = control.submit_urgent(move || order.send("urgent").is_ok());
        assert!(ran.is_empty() && control.waiting() == 3);
        assert!(control.turn());
        assert_eq!(ran.try_recv(), Ok("urgent"), "ahead of the others");
        assert!(matches!(urgent.expect("room").try_take(), Some(Ok(true))));
        let last = control.submit(|| 4).expect("room");
        assert_eq!(last.wait_timeout(LIMIT).expect("it waits for itself"), 4);
        assert_eq!(ran.try_iter().collect::<Vec<_>>(), ["first", "second"]);
        control.destroy(Doomed::NotOpened);
        assert!(!control.is_closed());
        assert!(control.turn() && control.is_closed() && !control.turn());
        let refused = control.execute(|| ());
        assert!(matches!(refused, Err(VerbsError::ControlClosed { .. })));
    }
}
