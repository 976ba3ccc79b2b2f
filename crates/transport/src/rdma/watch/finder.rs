//! Devices and ports that appear while the engine runs.
//!
//! Looking lists the devices of the machine, which is cheap, and has each wanted port taken in that
//! is not among the own NICs: the device is opened, all memory registered with it, and it is
//! entered in the own record as one that is down. From then on it is a NIC like any other: its
//! observer reads the port, says that it is up, and opens its gate.
//!
//! Any of this may hang in a device, so that each is taken in by a thread of the pool of its own:
//! one at most for a device, and none while an earlier one hangs.
//!
//! Deliberately not here: when it is looked (the observers' thread), and NICs that died, which are
//! opened again one by one.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rerail_verbs::{Device, DeviceList};

use super::patience::Patience;
use super::{NicListener, Parts};
use crate::TransportError;
use crate::event::{Event, Events};
use crate::machine::ids::LocalNic;
use crate::rdma::clock::Clock;
use crate::rdma::config::RdmaConfig;
use crate::rdma::data_threads::DataThreads;
use crate::rdma::memory::Registrations;
use crate::rdma::nic::{Nic, Place, PortWish};
use crate::rdma::nics::{NICS_MAX, Nics};
use crate::rdma::open;
use crate::rdma::router::Router;
use crate::rdma::tries::AllTries;

/// Devices that are taken in side by side.
const AT_ONCE_MAX: usize = 8;

/// A device's name and a port of it.
type Key = (String, u32);

/// Looks for NICs, and takes them in.
pub(in crate::rdma) struct Finder {
    nics: Nics,
    wanted: Vec<String>,
    threads: Arc<DataThreads>,
    registrations: Arc<Registrations>,
    router: Arc<Router>,
    listener: Arc<dyn NicListener>,
    events: Events,
    config: RdmaConfig,
    clock: Clock,
    tries: Arc<AllTries>,
    book: Mutex<Book>,
}

#[derive(Default)]
struct Book {
    /// Ports that could not be taken in; none of devices that are not there.
    failed: HashMap<Key, Patience>,
    /// Devices that are being taken in.
    busy: HashSet<String>,
    /// It was said that there are too many.
    is_full: bool,
}

impl Finder {
    pub(in crate::rdma) fn new(parts: &Parts) -> Self {
        Self {
            nics: parts.nics.clone(),
            wanted: parts.wanted.clone(),
            threads: Arc::clone(&parts.threads),
            registrations: Arc::clone(&parts.registrations),
            router: Arc::clone(&parts.router),
            listener: Arc::clone(&parts.listener),
            events: parts.events.clone(),
            config: parts.config.clone(),
            clock: parts.clock,
            tries: Arc::clone(&parts.tries),
            book: Mutex::default(),
        }
    }

    /// What there is, and is not there any more. Blocks as long as listing the devices takes.
    pub(in crate::rdma) fn look(self: &Arc<Self>) -> Looked {
        let Some(any) = self.nics.get(0) else {
            return Looked::default();
        };
        let devices = match any.relist() {
            Ok(devices) => devices,
            Err(error) => {
                tracing::debug!(%error, "the devices cannot be listed");
                return Looked::default();
            }
        };
        let is_there = |name: &str| devices.find(name).is_some();
        self.tries.retain(is_there);
        let mut book = self.book();
        book.failed.retain(|(name, _), _| is_there(name));
        let due = self.due(&mut book, &devices);
        let busy = due.iter().map(|(device, _)| device.name().to_owned());
        book.busy.extend(busy);
        let attempt = |(device, port)| Attempt {
            finder: Arc::clone(self),
            device,
            port,
        };
        let gone = self.nics.iter().filter(|nic| !is_there(nic.device()));
        Looked {
            attempts: due.into_iter().map(attempt).collect(),
            gone: gone.map(|nic| nic.index()).collect(),
        }
    }

    /// What is to be tried now: one port of a device.
    fn due(&self, book: &mut Book, devices: &DeviceList) -> Vec<(Device, u32)> {
        let now = self.clock.now();
        let registered = || self.registrations.registered();
        let mut due: Vec<(Device, u32)> = Vec::new();
        for (device, port) in open::missing(devices, &self.wanted, &self.nics) {
            let under_way = book.busy.len() + due.len();
            if self.nics.len() + under_way >= NICS_MAX {
                if under_way == 0 && !std::mem::replace(&mut book.is_full, true) {
                    let device = device.name();
                    tracing::error!(device, port, NICS_MAX, "not taken in: there are too many");
                }
                break;
            }
            let name = device.name();
            let is_busy = book.busy.contains(name) || due.iter().any(|(due, _)| due.name() == name);
            let waits = book.failed.get(&(name.to_owned(), port));
            if is_busy || waits.is_some_and(|waits| !waits.is_over(now, registered)) {
                continue;
            }
            if under_way >= AT_ONCE_MAX {
                break;
            }
            due.push((device, port));
        }
        due
    }

    fn attempt(&self, device: &Device, port: u32, taken: impl FnOnce(Arc<Nic>)) {
        let key = (device.name().to_owned(), port);
        let registered = self.registrations.registered();
        let Err(error) = self.take_in(device, port, taken) else {
            self.book().failed.remove(&key);
            return;
        };
        let mut book = self.book();
        let before = book.failed.get(&key);
        let (patience, is_news) = Patience::after(before, self.clock.now(), &error, registered);
        book.failed.insert(key, patience);
        drop(book);
        let device = device.name();
        if is_news {
            tracing::warn!(device, port, %error, "a new device is not taken in yet");
            let left_out = Event::NicLeftOut {
                nic: device.to_owned(),
                cause: error.to_string(),
            };
            self.events.tell(self.clock.now(), &left_out);
        } else {
            tracing::debug!(device, port, %error, "a new device is not taken in yet");
        }
    }

    fn take_in(
        &self,
        device: &Device,
        port: u32,
        taken: impl FnOnce(Arc<Nic>),
    ) -> Result<(), TransportError> {
        let tries = self.tries.of(device.name(), port);
        tries.check(device.name())?;
        self.tries.check_strangers(device.name())?;
        // No other port of the device is being taken in, so that the name will hold.
        let name = open::name(self.nics.iter(), device.name(), port);
        // Before all memory is registered in vain.
        self.check_room(&name)?;
        let place = Place::default();
        let nic = Nic::open(
            place,
            device,
            port,
            &name,
            &self.config,
            PortWish::Any,
            &tries,
        )?;
        // Until peers were told of it.
        nic.set_gate(false);
        let nic = Arc::new(nic);
        let opening = nic.open_device()?;
        // One NIC at a time, and nothing that may hang: registrations wait for it.
        self.registrations.register_all(&nic, &opening, || {
            let vacancy = self.nics.vacancy(&nic)?;
            let inbox = self.threads.serve(&nic)?;
            let adding = self.listener.adding(vacancy.number(), &name);
            adding.map_err(|reason| no_room_in_record(&name, reason))?;
            vacancy.take(Arc::clone(&nic), inbox);
            self.router.nic_added(nic.index());
            Ok(())
        })?;
        // Before all that takes its time: who watches it must not overlook that its device dies.
        let local = nic.index();
        tracing::info!(nic = nic.name(), port, "a NIC is taken in");
        taken(nic);
        self.listener.rekeyed(local);
        self.listener.added(&self.nics);
        Ok(())
    }

    fn check_room(&self, name: &str) -> Result<(), TransportError> {
        let room = self.listener.check_room(name);
        room.map_err(|reason| no_room_in_record(name, reason))
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Entries are made whole.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn no_room_in_record(name: &str, reason: String) -> TransportError {
    TransportError::NoRoomInRecord {
        nic: name.to_owned(),
        reason,
    }
}

/// What a look at the devices of the machine has found; nothing if they could not be listed.
#[derive(Default)]
pub(in crate::rdma) struct Looked {
    /// What is wanted and was not there before, each to be tried on a thread of its own.
    pub(in crate::rdma) attempts: Vec<Attempt>,
    /// Own NICs whose devices are not there. One that comes in its place is another.
    pub(in crate::rdma) gone: Vec<LocalNic>,
}

/// A port of a device that is to be taken in. Its device is not tried by others before this is
/// gone, however it ends.
pub(in crate::rdma) struct Attempt {
    finder: Arc<Finder>,
    device: Device,
    port: u32,
}

impl Attempt {
    /// Takes it in, and tells of it by `taken` once it and those of lower numbers are among the own
    /// NICs. Blocks as long as opening a device and registering all memory takes, and may hang.
    pub(in crate::rdma) fn run(self, taken: impl FnOnce(Arc<Nic>)) {
        self.finder.attempt(&self.device, self.port, taken);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.finder.book().busy.remove(self.device.name());
    }
}
