//! A fabric that follows the clock: for programs with real threads.
//!
//! The core is the same. Whoever calls it brings it up to now first, so that a thread that polls
//! sees packets when they arrive; one more thread does what is due while nobody calls.

use std::ops::Deref;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::fabric::{Fabric, Shared};
use super::options::FabricOptions;

/// Shortest sleep of the driving thread. What is due is done at its own time of the fabric even
/// when the thread comes late, answers to it included, so that a short sleep would gain nothing.
const SLEEP_MIN: Duration = Duration::from_micros(200);

/// Longest sleep of the driving thread while nothing is due.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// A [`Fabric`] in real time, with the thread that drives it. Dropping it ends the thread;
/// clones of the fabric then move on only while they are called.
///
/// Contexts have an [`async_fd`](crate::Context::async_fd), verbs take their time on their
/// [control threads](crate::ControlThread), and calls of a frozen process wait. The same seed does
/// not give the same trace here: the order of calls comes from the threads.
#[derive(Debug)]
pub struct RealTimeFabric {
    fabric: Fabric,
    driver: Option<JoinHandle<()>>,
}

impl RealTimeFabric {
    /// Starts a fabric whose time begins now. Fails when no thread can be started.
    pub fn start(options: FabricOptions) -> std::io::Result<Self> {
        let fabric = Fabric::with_start(options, Some(Instant::now()));
        let shared = fabric.shared.clone();
        let driver = std::thread::Builder::new()
            .name("sim-fabric".to_owned())
            .spawn(move || drive(&shared))?;
        Ok(Self {
            fabric,
            driver: Some(driver),
        })
    }
}

impl Deref for RealTimeFabric {
    type Target = Fabric;

    fn deref(&self) -> &Fabric {
        &self.fabric
    }
}

impl Drop for RealTimeFabric {
    fn drop(&mut self) {
        self.fabric.shared.lock().stopped = true;
        self.fabric.announce();
        if let Some(driver) = self.driver.take() {
            // It can only have ended by a complaint of the model, which was printed.
            let _ = driver.join();
        }
    }
}

/// Body of the thread: taking the lock and waiting both bring the core up to now.
fn drive(shared: &Shared) {
    let mut state = shared.lock();
    while !state.stopped {
        let (soon, idle) = (state.core.now + SLEEP_MIN, state.core.now + SLEEP_MAX);
        let due = state.core.next_deadline().unwrap_or(idle);
        let until = due.clamp(soon, idle);
        state.driver_sleeps_until = Some(until);
        state = shared.wait(state, Some(until));
        state.driver_sleeps_until = None;
    }
}
