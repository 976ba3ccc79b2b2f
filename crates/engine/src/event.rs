//! Something that is waited for by threads and by tasks.
//!
//! Who signals takes a lock and makes a system call only if somebody waits: a data thread that
//! finishes a batch nobody waits for does neither.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// An event count: waiting is for a condition that the caller looks at.
#[derive(Debug, Default)]
pub(crate) struct Event {
    waiting: AtomicUsize,
    wakers: Mutex<Wakers>,
    signal: Condvar,
}

/// Tasks that wait, each in a slot of its own, however often it is polled.
#[derive(Debug, Default)]
struct Wakers {
    slots: BTreeMap<u64, Waker>,
    next: u64,
}

impl Event {
    /// Wakes all who wait. What they wait for must hold by now.
    pub(crate) fn signal(&self) {
        // With the fence in `register`: either this sees the waiter, or the waiter the condition.
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::Relaxed) > 0 {
            let wakers = std::mem::take(&mut self.lock().slots);
            self.signal.notify_all();
            wakers.into_values().for_each(Waker::wake);
        }
    }

    /// Blocks until `holds`, at most `limit`. True if it does.
    pub(crate) fn wait(&self, limit: Duration, holds: impl Fn() -> bool) -> bool {
        if holds() {
            return true;
        }
        let begin = Instant::now();
        self.register();
        let mut guard = self.lock();
        while !holds() {
            let Some(left) = limit.checked_sub(begin.elapsed()) else {
                break;
            };
            let woken = self.signal.wait_timeout(guard, left);
            guard = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(guard);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        holds()
    }

    /// Waits until `holds`.
    pub(crate) async fn wait_async(&self, holds: impl Fn() -> bool) {
        if holds() {
            return;
        }
        let registered = Registered::new(self);
        poll_fn(|context| {
            // Registered under the lock before the look: a signal after the look finds the waker.
            let waker = context.waker().clone();
            self.lock().slots.insert(registered.slot, waker);
            fence(Ordering::SeqCst);
            if holds() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    fn register(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, Wakers> {
        // A map of wakers is whole whatever panicked.
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a task as waiting until it is done or dropped.
struct Registered<'a> {
    event: &'a Event,
    slot: u64,
}

impl<'a> Registered<'a> {
    fn new(event: &'a Event) -> Self {
        event.register();
        let mut wakers = event.lock();
        let slot = wakers.next;
        wakers.next += 1;
        Self { event, slot }
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.event.lock().slots.remove(&self.slot);
        self.event.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_signal_between_look_and_sleep_is_not_lost() {
        for _ in 0..2_000 {
            let event = Event::default();
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    done.store(true, Ordering::Release);
                    event.signal();
                });
                let holds = || done.load(Ordering::Acquire);
                assert!(event.wait(Duration::from_secs(10), holds));
            });
        }
    }

    #[test]
    fn a_task_has_one_waker_however_often_it_is_polled_and_none_once_dropped() {
        let event = Event::default();
        let mut context = std::task::Context::from_waker(Waker::noop());
        let (mut first, mut second) = (
            Box::pin(event.wait_async(|| false)),
            Box::pin(event.wait_async(|| false)),
        );
        for _ in 0..100 {
            assert!(first.as_mut().poll(&mut context).is_pending());
            assert!(second.as_mut().poll(&mut context).is_pending());
        }
        assert_eq!(event.lock().slots.len(), 2);
        drop(first);
        assert_eq!(event.lock().slots.len(), 1);
        drop(second);
        assert_eq!(event.lock().slots.len(), 0);
        assert_eq!(event.waiting.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn waiting_ends_at_its_limit() {
        let event = Event::default();
        assert!(!event.wait(Duration::from_millis(5), || false));
        assert_eq!(event.waiting.load(Ordering::Relaxed), 0);
    }
}
