//! Which devices hold memory that was given up.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rerail_verbs::{ControlThread, Pending, VerbsError};

use super::super::opening::Opening;

/// What outlives a registration: who was asked to hold it.
#[derive(Debug, Default)]
pub(super) struct Trace(pub(super) Arc<Holding>);

impl Drop for Trace {
    fn drop(&mut self) {
        self.0.gone.store(true, Ordering::Release);
        // So that it is known when they are destroyed, whoever asks. One that has the lock waits
        // for just that.
        if let Ok(mut devices) = self.0.devices.try_lock() {
            Holding::set_barriers(&mut devices);
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Holding {
    /// The registration is gone: its regions were handed to the control threads.
    gone: AtomicBool,
    devices: Mutex<Vec<Holder>>,
}

#[derive(Debug)]
struct Holder {
    nic: String,
    control: ControlThread,
    /// A job behind the destruction of all regions, once one was submitted.
    barrier: Option<Pending<()>>,
}

impl Holding {
    pub(super) fn asked(&self, nic: &str, opening: &Opening) {
        let control = opening.context().control();
        let mut devices = self.lock();
        devices.retain(|holder| !holder.control.is_closed());
        // By its thread, which no other opening has: a device that went and one that came in its
        // place may have the same name, and openings of the same number.
        if !devices.iter().any(|holder| holder.control.is_same(control)) {
            devices.push(Holder {
                nic: nic.to_owned(),
                control: control.clone(),
                barrier: None,
            });
        }
    }

    /// Has each device tell once it comes to the end of what it has to do by now.
    fn set_barriers(devices: &mut [Holder]) {
        for holder in devices.iter_mut().filter(|holder| holder.barrier.is_none()) {
            // One that takes no job now is asked again the next time.
            holder.barrier = holder.control.submit(|| ()).ok();
        }
    }

    /// Whether a device holds what was given up, as far as is known. Never blocks.
    pub(super) fn is_held(&self) -> bool {
        if !self.gone.load(Ordering::Acquire) {
            return true;
        }
        match self.devices.try_lock() {
            Ok(mut devices) => {
                Self::set_barriers(&mut devices);
                devices.retain(|holder| holder.holds_after(Duration::ZERO));
                !devices.is_empty()
            }
            Err(TryLockError::Poisoned(devices)) => !devices.into_inner().is_empty(),
            // Somebody waits for it.
            Err(TryLockError::WouldBlock) => true,
        }
    }

    /// Names of the NICs that were asked to hold it and have not been found to let go.
    #[cfg(test)]
    pub(super) fn nics(&self) -> Vec<String> {
        self.lock()
            .iter()
            .map(|holder| holder.nic.clone())
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Holder>> {
        // A list of handles is whole whatever panicked.
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Holder {
    /// Whether the device holds it still after so much time, if it does not let go before.
    fn holds_after(&self, wait: Duration) -> bool {
        if self.control.is_closed() {
            return false;
        }
        match self
            .barrier
            .as_ref()
            .map(|barrier| barrier.wait_timeout(wait))
        {
            Some(Ok(())) => false,
            // A device is closed once everything of it is gone.
            Some(Err(VerbsError::JobLost { .. } | VerbsError::ControlClosed { .. })) => false,
            Some(Err(_)) | None => true,
        }
    }
}

/// Which devices hold a registration that was given up. A device that hangs holds it until it
/// answers or is closed; what was not registered with it is not concerned.
#[derive(Clone, Debug)]
pub struct Holders(pub(super) Arc<Holding>);

/// Nobody holds it.
impl Default for Holders {
    fn default() -> Self {
        Self(Arc::new(Holding {
            gone: AtomicBool::new(true),
            devices: Mutex::default(),
        }))
    }
}

impl Holders {
    /// Waits until no device holds it any more, at most `limit`, after its last clone was dropped.
    ///
    /// # Errors
    ///
    /// The names of the NICs whose devices have not let go of it. It can be asked again.
    pub fn wait_gone(&self, limit: Duration) -> Result<(), Vec<String>> {
        let begin = Instant::now();
        let left = || limit.saturating_sub(begin.elapsed());
        while !self.0.gone.load(Ordering::Acquire) {
            if left().is_zero() {
                return Err(self
                    .0
                    .lock()
                    .iter()
                    .map(|holder| holder.nic.clone())
                    .collect());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut devices = self.0.lock();
        // All at once, since devices work side by side.
        Holding::set_barriers(&mut devices);
        devices.retain(|holder| holder.holds_after(left()));
        if devices.is_empty() {
            return Ok(());
        }
        Err(devices.iter().map(|holder| holder.nic.clone()).collect())
    }
}
