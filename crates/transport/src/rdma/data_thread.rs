//! The thread that posts and polls, for one NIC or several.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::queue::ArrayQueue;

use super::clock::Clock;
use super::driver::{Activity, Driver};
use super::inbox::Wake;
use crate::TransportError;

/// Longest sleep of a parked thread: its drivers look at their limits then.
const PARK_LIMIT: Duration = Duration::from_millis(20);

/// Nap between looks at a completion queue that stays empty with work in flight.
const NAP: Duration = Duration::from_micros(20);

/// How long to spin and to yield before sleeping, while work is in flight.
///
/// With few cores a spinning thread takes the time of those it waits for: a soft-RoCE device works
/// on the same cores.
#[derive(Clone, Copy, Debug)]
struct Patience {
    spins: u32,
    yields: u32,
}

impl Patience {
    fn for_cores(cores: usize) -> Self {
        if cores >= 8 {
            Self {
                spins: 100_000,
                yields: 1_000,
            }
        } else {
            Self {
                spins: 0,
                yields: 50,
            }
        }
    }
}

/// Drivers that wait for a data thread to take them.
const NEWCOMERS_MAX: usize = 64;

/// A running data thread. Stops and is waited for when dropped.
pub struct DataThread {
    stop: Arc<AtomicBool>,
    wake: Arc<Wake>,
    newcomers: Arc<ArrayQueue<Driver>>,
    handle: Option<JoinHandle<()>>,
}

impl DataThread {
    /// Starts a thread that serves `drivers`, whose inboxes wake it through `wake`.
    pub fn start(
        name: &str,
        drivers: Vec<Driver>,
        wake: Arc<Wake>,
        clock: Clock,
    ) -> Result<Self, TransportError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, woken) = (Arc::clone(&stop), Arc::clone(&wake));
        let newcomers = Arc::new(ArrayQueue::new(NEWCOMERS_MAX));
        let come = Arc::clone(&newcomers);
        let handle = std::thread::Builder::new()
            .name(format!("data-{name}"))
            .spawn(move || run(drivers, &come, &woken, &stopped, clock))
            .map_err(|error| TransportError::Thread {
                reason: error.to_string(),
            })?;
        Ok(Self {
            stop,
            wake,
            newcomers,
            handle: Some(handle),
        })
    }

    /// What wakes it.
    pub(super) fn wake(&self) -> &Arc<Wake> {
        &self.wake
    }

    /// Has it serve one more driver, whose inbox wakes it. False if too many wait to be taken.
    pub(super) fn add(&self, driver: Driver) -> bool {
        let added = self.newcomers.push(driver).is_ok();
        self.wake.wake();
        added
    }
}

impl Drop for DataThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.wake.wake();
        if let Some(handle) = self.handle.take()
            && handle.join().is_err()
        {
            tracing::error!("a data thread panicked");
        }
    }
}

fn run(
    mut drivers: Vec<Driver>,
    newcomers: &ArrayQueue<Driver>,
    wake: &Wake,
    stop: &AtomicBool,
    clock: Clock,
) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let patience = Patience::for_cores(cores);
    let mut quiet: u32 = 0;
    while !stop.load(Ordering::Acquire) {
        while let Some(driver) = newcomers.pop() {
            drivers.push(driver);
        }
        let now = clock.now();
        let steps = drivers.iter_mut().map(|driver| driver.step(now));
        match steps.max().unwrap_or(Activity::Idle) {
            Activity::Busy => quiet = 0,
            Activity::Waiting if quiet < patience.spins => {
                quiet += 1;
                std::hint::spin_loop();
            }
            Activity::Waiting if quiet < patience.spins + patience.yields => {
                quiet += 1;
                std::thread::yield_now();
            }
            Activity::Waiting => std::thread::sleep(NAP),
            Activity::Idle => {
                quiet = 0;
                let is_idle = || {
                    drivers.iter().all(Driver::is_inbox_empty)
                        && newcomers.is_empty()
                        && !stop.load(Ordering::Acquire)
                };
                wake.park(PARK_LIMIT, is_idle);
            }
        }
    }
    drivers.iter_mut().for_each(Driver::shut_down);
}
