//! Virtual time, and tasks that run in turns on whoever lets them.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use crate::machine::Time;

/// Polls of one node's tasks at one instant; more means that they wake each other for ever.
const POLLS_MAX: usize = 100_000;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The hand of a clock in virtual time, and who sleeps by it. One for each world.
#[derive(Debug, Default)]
pub(in crate::rdma) struct Hand {
    nanos: AtomicU64,
    sleepers: Mutex<Sleepers>,
}

#[derive(Debug, Default)]
struct Sleepers {
    wakers: BTreeMap<(Time, u64), Waker>,
    last: u64,
}

impl Hand {
    /// Clocks are copied about, and their hand with them: a few words for each world.
    pub(super) fn leaked() -> &'static Self {
        Box::leak(Box::default())
    }

    pub(in crate::rdma) fn now(&self) -> Time {
        Time::from_nanos(self.nanos.load(Ordering::Relaxed))
    }

    /// Moves on, and wakes who has slept until then, in the order of their times.
    pub(super) fn move_to(&self, now: Time) {
        self.nanos.store(now.as_nanos(), Ordering::Relaxed);
        loop {
            let mut sleepers = lock(&self.sleepers);
            let first = sleepers.wakers.first_entry();
            let Some(due) = first.filter(|first| first.key().0 <= now) else {
                return;
            };
            let waker = due.remove();
            drop(sleepers);
            waker.wake();
        }
    }

    /// When somebody wakes next.
    pub(super) fn next_due(&self) -> Option<Time> {
        let sleepers = lock(&self.sleepers);
        sleepers.wakers.keys().next().map(|(due, _)| *due)
    }

    /// How many sleep.
    pub(super) fn sleepers(&self) -> usize {
        lock(&self.sleepers).wakers.len()
    }

    pub(in crate::rdma) fn sleep_until(&'static self, due: Time) -> impl Future<Output = ()> {
        Sleep {
            hand: self,
            due,
            place: None,
        }
    }
}

struct Sleep {
    hand: &'static Hand,
    due: Time,
    place: Option<(Time, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.hand.now() >= self.due {
            return Poll::Ready(());
        }
        let mut sleepers = lock(&self.hand.sleepers);
        let place = self.place.unwrap_or_else(|| {
            sleepers.last += 1;
            (self.due, sleepers.last)
        });
        sleepers.wakers.insert(place, context.waker().clone());
        drop(sleepers);
        self.place = Some(place);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            drop(lock(&self.hand.sleepers).wakers.remove(&place));
        }
    }
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The tasks of one process. They run when [`run`](Self::run) is called, in the order in which they
/// were woken, each until it waits.
#[derive(Clone, Default)]
pub(in crate::rdma) struct Turns(Arc<Inner>);

#[derive(Default)]
struct Inner {
    tasks: Mutex<BTreeMap<u64, (Task, Arc<Woken>)>>,
    ready: Arc<Mutex<VecDeque<u64>>>,
    last: AtomicU64,
    is_over: AtomicBool,
}

struct Woken {
    task: u64,
    is_ready: AtomicBool,
    ready: Arc<Mutex<VecDeque<u64>>>,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        if !self.is_ready.swap(true, Ordering::Relaxed) {
            lock(&self.ready).push_back(self.task);
        }
    }
}

impl Turns {
    pub(in crate::rdma) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if self.0.is_over.load(Ordering::Relaxed) {
            return;
        }
        let number = self.0.last.fetch_add(1, Ordering::Relaxed);
        let woken = Arc::new(Woken {
            task: number,
            is_ready: AtomicBool::new(false),
            ready: Arc::clone(&self.0.ready),
        });
        lock(&self.0.tasks).insert(number, (Box::pin(task), Arc::clone(&woken)));
        woken.wake();
    }

    /// Runs all that can run. False if nothing could.
    pub(super) fn run(&self) -> bool {
        for polled in 0..POLLS_MAX {
            let next = lock(&self.0.ready).pop_front();
            let Some(number) = next else {
                return polled > 0;
            };
            // Out of the map, since it may spawn others meanwhile.
            let Some((mut task, woken)) = lock(&self.0.tasks).remove(&number) else {
                continue;
            };
            woken.is_ready.store(false, Ordering::Relaxed);
            let waker = Waker::from(Arc::clone(&woken));
            let polled = task.as_mut().poll(&mut Context::from_waker(&waker));
            if polled.is_pending() {
                lock(&self.0.tasks).insert(number, (task, woken));
            }
        }
        panic!("a node's tasks never rest");
    }

    /// Tasks that have not ended.
    pub(super) fn tasks(&self) -> usize {
        lock(&self.0.tasks).len()
    }

    /// Ends all tasks where they stand, as the end of their process does.
    pub(super) fn end(&self) {
        self.0.is_over.store(true, Ordering::Relaxed);
        let tasks = std::mem::take(&mut *lock(&self.0.tasks));
        drop(tasks);
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns").finish_non_exhaustive()
    }
}
