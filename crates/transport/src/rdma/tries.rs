//! Threads that a device's openings have, and which of them hang.
//!
//! Opening a device, and whatever is done with it before it is used, may hang in its firmware; the
//! thread is then lost until the device answers. So a device whose last opening came to nothing and
//! hangs still is not tried again, nor is one of which several openings hang, and there is a bound
//! on those of all devices together. Deliberately not here: when something is tried.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rerail_verbs::ControlThread;

use crate::TransportError;

/// How long a verb may take before its thread counts as one that hangs.
const HUNG_AFTER: Duration = Duration::from_secs(1);

/// Openings of one port of a device that may hang: one that was in use, and a try after it.
const HUNG_MAX: usize = 2;

/// Ports that were never taken in, and hang since a try, at most: no other is tried beyond them.
const HUNG_STRANGERS_MAX: usize = 16;

/// Openings of one port of a device that are not closed yet.
#[derive(Debug, Default)]
pub(super) struct Tries {
    /// One of its openings was used once.
    taken_in: AtomicBool,
    open: Mutex<Vec<Try>>,
}

#[derive(Debug)]
struct Try {
    control: ControlThread,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Not taken in: it is under way, or came to nothing.
    Tried,
    /// Taken in, and perhaps given up since.
    Used,
}

impl Tries {
    /// Whether it makes sense to open `device` once more.
    ///
    /// # Errors
    ///
    /// An earlier opening hangs.
    pub(super) fn check(&self, device: &str) -> Result<(), TransportError> {
        let refused = |reason: String| TransportError::Device {
            device: device.to_owned(),
            reason,
        };
        let hung = self.hung();
        if hung.contains(&State::Tried) {
            let reason = "the last try to open it hangs still; it is tried again once the device \
                          answers: see the kernel's log, and reset it";
            return Err(refused(reason.to_owned()));
        }
        if hung.len() >= HUNG_MAX {
            return Err(refused(format!(
                "{} threads hang in it since it was opened before; it is tried again once it \
                 answers: see the kernel's log, and reset it",
                hung.len()
            )));
        }
        Ok(())
    }

    /// An opening begins on a thread of its own.
    pub(super) fn begin(&self, control: &ControlThread) {
        let (control, state) = (control.clone(), State::Tried);
        self.lock().push(Try { control, state });
    }

    /// An opening is used from now on.
    pub(super) fn set_used(&self, control: &ControlThread) {
        self.taken_in.store(true, Ordering::Release);
        let mut open = self.lock();
        let found = open.iter_mut().find(|known| known.control.is_same(control));
        if let Some(known) = found {
            known.state = State::Used;
        }
    }

    /// The device is not there. One that comes in its place is another, of the same name.
    pub(super) fn device_went(&self) {
        for known in self.lock().iter_mut() {
            known.state = State::Used;
        }
    }

    /// Bytes of regions that the device refused to deregister, of openings that are not closed.
    fn quarantined_bytes(&self) -> u64 {
        let open = self.lock();
        let open = open.iter().filter(|known| !known.control.is_closed());
        open.map(|known| known.control.quarantined_bytes()).sum()
    }

    /// Threads of all openings that are not known to be closed.
    #[cfg(test)]
    pub(super) fn controls(&self) -> Vec<ControlThread> {
        let open = self.lock();
        open.iter().map(|known| known.control.clone()).collect()
    }

    /// What those are that hang.
    fn hung(&self) -> Vec<State> {
        let mut open = self.lock();
        open.retain(|known| !known.control.is_closed());
        let hangs = |known: &&Try| match known.state {
            // Whatever it may rightly take, another try would only join it.
            State::Tried => known
                .control
                .stuck_for()
                .is_some_and(|time| time > HUNG_AFTER),
            State::Used => known.control.is_overdue(HUNG_AFTER),
        };
        open.iter().filter(hangs).map(|known| known.state).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Try>> {
        // A list of handles is whole whatever panicked.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same of all ports that are tried, by device and port.
#[derive(Debug, Default)]
pub(super) struct AllTries {
    by_port: Mutex<HashMap<(String, u32), Arc<Tries>>>,
}

impl AllTries {
    /// Those of a port.
    pub(super) fn of(&self, device: &str, port: u32) -> Arc<Tries> {
        let key = (device.to_owned(), port);
        Arc::clone(self.lock().entry(key).or_default())
    }

    /// Threads of the openings of ports that were not taken in.
    #[cfg(test)]
    pub(super) fn of_strangers(&self) -> Vec<ControlThread> {
        let all = self.lock();
        let strangers = all
            .values()
            .filter(|tries| !tries.taken_in.load(Ordering::Acquire));
        strangers.flat_map(|tries| tries.controls()).collect()
    }

    /// Whether one more port of `device` may be tried that was not taken in before.
    ///
    /// # Errors
    ///
    /// Too many of those hang since they were tried.
    pub(super) fn check_strangers(&self, device: &str) -> Result<(), TransportError> {
        let all: Vec<_> = self.lock().values().cloned().collect();
        let strangers = all
            .iter()
            .filter(|tries| !tries.taken_in.load(Ordering::Acquire));
        let hung = strangers.filter(|tries| !tries.hung().is_empty()).count();
        if hung < HUNG_STRANGERS_MAX {
            return Ok(());
        }
        Err(TransportError::Device {
            device: device.to_owned(),
            reason: format!(
                "{hung} ports of new devices hang since they were opened; it is tried once they \
                 answer: see the kernel's log, and reset them"
            ),
        })
    }

    /// Bytes of regions that devices refused to deregister and that are not closed.
    pub(super) fn quarantined_bytes(&self) -> u64 {
        let all = self.lock();
        all.values().map(|tries| tries.quarantined_bytes()).sum()
    }

    /// Forgets the devices that are not there, but for what hangs of them.
    pub(super) fn retain(&self, is_there: impl Fn(&str) -> bool) {
        self.lock().retain(|(device, _), tries| {
            if is_there(device) {
                return true;
            }
            let hangs = !tries.hung().is_empty();
            tries.device_went();
            // A NIC that was taken in knows its own.
            hangs || Arc::strong_count(tries) > 1
        });
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(String, u32), Arc<Tries>>> {
        // Entries are made whole.
        self.by_port.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use rerail_verbs::sim::{FabricOptions, NicOptions, RealTimeFabric};

    use super::super::rig::wait_until;
    use super::*;

    /// What waits in a test for a try that hangs.
    fn is_refused(tries: &Tries) -> bool {
        tries.check("sim0").is_err()
    }

    #[test]
    fn a_device_is_not_tried_while_the_last_try_hangs_and_is_once_that_has_ended() {
        const HANG: Duration = Duration::from_secs(5);
        let fabric = RealTimeFabric::start(FabricOptions::card(1)).expect("a thread");
        let node = fabric.add_node("host");
        let address = std::net::IpAddr::from([10, 0, 0, 1]);
        let nic = fabric.add_nic(node, &NicOptions::ethernet("sim0", address));
        let devices = fabric.devices_of(fabric.add_process(node));
        let device = devices.find("sim0").expect("added");
        let all = AllTries::default();
        let tries = all.of("sim0", 1);
        // One that is used hangs in a verb.
        let used = device
            .open_shown(|control| tries.begin(control))
            .expect("open");
        tries.set_used(used.control());
        fabric.hang_control(nic, HANG);
        let context = used.clone();
        used.control()
            .execute(move || drop(context.device_attr()))
            .expect("room");
        wait_until("it hangs", || used.control().is_overdue(HUNG_AFTER));
        assert!(!is_refused(&tries), "one try after it is right");
        let late = device.clone();
        let shown = Arc::clone(&tries);
        let opening = std::thread::spawn(move || {
            let opened = late.open_shown(|control| shown.begin(control));
            opened.map(drop)
        });
        wait_until("it hangs, too", || is_refused(&tries));
        // Whatever the engine knows of it: it is not forgotten while it hangs.
        all.retain(|_| false);
        assert!(Arc::ptr_eq(&tries, &all.of("sim0", 1)));
        assert!(
            is_refused(&tries),
            "two hang, though the device may be another"
        );
        opening.join().expect("no panic").expect("it opens at last");
        wait_until("nothing hangs", || !is_refused(&tries));
        assert!(all.check_strangers("sim0").is_ok());
    }

    /// Openings of one device, for tests in which it hangs when they want.
    struct Openings {
        _fabric: RealTimeFabric,
        device: rerail_verbs::Device,
        contexts: Vec<rerail_verbs::Context>,
        /// What each that hangs waits for.
        answers: Vec<std::sync::mpsc::Sender<()>>,
    }

    impl Openings {
        fn new() -> Self {
            let fabric = RealTimeFabric::start(FabricOptions::card(2)).expect("a thread");
            let node = fabric.add_node("host");
            let address = std::net::IpAddr::from([10, 0, 0, 1]);
            fabric.add_nic(node, &NicOptions::ethernet("sim0", address));
            let devices = fabric.devices_of(fabric.add_process(node));
            Self {
                _fabric: fabric,
                device: devices.find("sim0").expect("added").clone(),
                contexts: Vec::new(),
                answers: Vec::new(),
            }
        }

        /// One that was only tried, and hangs.
        fn hang(&mut self, tries: &Tries) -> ControlThread {
            let opened = self.device.open_shown(|control| tries.begin(control));
            let context = opened.expect("open");
            let (answer, waits) = std::sync::mpsc::channel();
            let control = context.control().clone();
            control
                .execute(move || {
                    let _ = waits.recv();
                })
                .expect("room for it");
            self.contexts.push(context);
            self.answers.push(answer);
            control
        }
    }

    #[test]
    fn devices_that_were_never_taken_in_and_hang_are_bounded_together() {
        let mut openings = Openings::new();
        let all = AllTries::default();
        let hang = |openings: &mut Openings, nth: usize| {
            let name = format!("sim{nth}");
            let tries = all.of(&name, 1);
            openings.hang(&tries);
            (name, tries)
        };
        let but_one = (1..HUNG_STRANGERS_MAX).map(|nth| hang(&mut openings, nth));
        for (name, tries) in but_one.collect::<Vec<_>>() {
            wait_until("it hangs", || tries.check(&name).is_err());
        }
        assert!(all.check_strangers("new").is_ok());
        hang(&mut openings, 0);
        wait_until("all hang", || all.check_strangers("new").is_err());
        let error = all.check_strangers("new").expect_err("enough threads hang");
        assert!(
            error.to_string().contains("16 ports of new devices"),
            "{error}"
        );
        openings.answers.pop();
        wait_until("one has answered", || all.check_strangers("new").is_ok());
    }

    #[test]
    fn a_device_that_comes_in_place_of_one_that_hangs_is_tried_and_no_third() {
        let mut openings = Openings::new();
        let tries = Tries::default();
        openings.hang(&tries);
        wait_until("it hangs", || is_refused(&tries));
        tries.device_went();
        assert!(!is_refused(&tries), "the next is another device");
        let second = openings.hang(&tries);
        tries.set_used(&second);
        wait_until("two hang", || is_refused(&tries));
        let error = tries.check("sim0").expect_err("two hang");
        assert!(error.to_string().contains("2 threads hang"), "{error}");
        openings.answers.pop();
        wait_until("one hangs", || !is_refused(&tries));
    }

    #[test]
    fn tries_are_forgotten_with_their_device_unless_a_nic_has_them() {
        let all = AllTries::default();
        let of_nic = all.of("sim0", 1);
        drop(all.of("sim1", 1));
        all.retain(|_| true);
        assert_eq!(all.lock().len(), 2);
        all.retain(|_| false);
        assert!(Arc::ptr_eq(&of_nic, &all.of("sim0", 1)));
        assert_eq!(all.lock().len(), 1);
    }
}
