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
        // So that it is known when they are destroyed, whoever asks. Who has the lock now asks by
        // itself, or the next one does.
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
    /// Bytes of regions that it had refused to deregister before those of this registration.
    refused_before: u64,
    /// A job behind the destruction of all regions, once one was submitted.
    barrier: Option<Pending<()>>,
    /// It has refused to let go: hardware may reach the memory until the context is closed.
    refuses: bool,
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
                refused_before: 0,
                barrier: None,
                refuses: false,
            });
        }
    }

    /// The regions are about to be handed to the control threads.
    pub(super) fn gives_up(&self) {
        for holder in self.lock().iter_mut() {
            holder.refused_before = holder.control.quarantined_bytes();
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
        let mut devices = match self.devices.try_lock() {
            Ok(devices) => devices,
            Err(TryLockError::Poisoned(devices)) => devices.into_inner(),
            // Somebody waits for it.
            Err(TryLockError::WouldBlock) => return true,
        };
        Self::set_barriers(&mut devices);
        devices.retain_mut(|holder| {
            let answer = holder.barrier.as_ref().and_then(Pending::try_take);
            holder.still_holds(answer)
        });
        !devices.is_empty()
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
    fn holds_after(&mut self, wait: Duration) -> bool {
        // What has refused lets go when it is closed, which nobody waits for here.
        let asked = self.barrier.as_ref().filter(|_| !self.refuses);
        let answer = asked.map(|barrier| barrier.wait_timeout(wait));
        self.still_holds(answer)
    }

    /// What the barrier's answer means, if there is one.
    fn still_holds(&mut self, answer: Option<Result<(), VerbsError>>) -> bool {
        if self.control.is_closed() {
            return false;
        }
        match answer {
            _ if self.refuses => true,
            Some(Ok(())) => {
                // Another's region at the same time counts too: rather too long than too short.
                self.refuses = self.control.quarantined_bytes() > self.refused_before;
                self.refuses
            }
            // A device is closed once everything of it is gone.
            Some(Err(VerbsError::JobLost { .. } | VerbsError::ControlClosed { .. })) => false,
            Some(Err(_)) | None => true,
        }
    }
}

/// Which devices hold a registration that was given up. A device that hangs holds it until it
/// answers or is closed, and one that refuses to deregister it until it is closed; what was not
/// registered with it is not concerned.
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
        devices.retain_mut(|holder| holder.holds_after(left()));
        if devices.is_empty() {
            return Ok(());
        }
        Err(devices.iter().map(|holder| holder.nic.clone()).collect())
    }
}
