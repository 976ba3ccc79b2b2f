//! Devices and ports that appear while the engine runs.
//!
//! Looking lists the devices of the machine, which is cheap, and takes in each wanted port that is
//! not among the own NICs: the device is opened, all memory registered with it, and it is entered
//! in the own record as one that is down. From then on it is a NIC like any other: its observer
//! reads the port, says that it is up, and opens its gate.
//!
//! Deliberately not here: when it is looked (the observers' thread), and NICs that died, which are
//! opened again one by one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rerail_verbs::Device;

use super::{NicListener, Parts};
use crate::TransportError;
use crate::machine::Time;
use crate::rdma::clock::Clock;
use crate::rdma::config::RdmaConfig;
use crate::rdma::data_threads::DataThreads;
use crate::rdma::memory::Registrations;
use crate::rdma::nic::{Nic, PortWish};
use crate::rdma::nics::{NICS_MAX, Nics};
use crate::rdma::open;
use crate::rdma::router::Router;

/// First wait before a port that could not be taken in is tried again. It is doubled each time.
const AGAIN_MIN: Duration = Duration::from_secs(1);

/// Longest such wait.
const AGAIN_MAX: Duration = Duration::from_secs(60);

/// Looks for NICs, and takes them in.
pub(in crate::rdma) struct Finder {
    nics: Nics,
    wanted: Vec<String>,
    threads: Arc<DataThreads>,
    registrations: Arc<Registrations>,
    router: Arc<Router>,
    listener: Arc<dyn NicListener>,
    config: RdmaConfig,
    clock: Clock,
    /// Ports that could not be taken in; none of devices that are not there.
    failed: HashMap<(String, u32), Failed>,
    /// It was said that there are too many.
    is_full: bool,
}

struct Failed {
    wait: Duration,
    not_before: Time,
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
            config: parts.config.clone(),
            clock: parts.clock,
            failed: HashMap::new(),
            is_full: false,
        }
    }

    /// Takes in what is wanted and was not there before; tells of each by `taken`. Blocks, as long
    /// as opening a device and registering all memory takes.
    pub(in crate::rdma) fn look(&mut self, taken: impl Fn(Arc<Nic>)) {
        let Some(any) = self.nics.get(0) else {
            return;
        };
        let devices = match any.relist() {
            Ok(devices) => devices,
            Err(error) => {
                tracing::debug!(%error, "the devices cannot be listed");
                return;
            }
        };
        self.failed
            .retain(|(name, _), _| devices.find(name).is_some());
        for (device, port) in open::missing(&devices, &self.wanted, &self.nics) {
            if self.nics.len() >= NICS_MAX {
                if !std::mem::replace(&mut self.is_full, true) {
                    let device = device.name();
                    tracing::error!(device, port, NICS_MAX, "not taken in: there are too many");
                }
                return;
            }
            let key = (device.name().to_owned(), port);
            let now = self.clock.now();
            let failed = self.failed.get(&key);
            if failed.is_some_and(|failed| now < failed.not_before) {
                continue;
            }
            match self.take_in(&device, port) {
                Ok(nic) => {
                    self.failed.remove(&key);
                    tracing::info!(nic = nic.name(), port, "a NIC is taken in");
                    taken(nic);
                }
                Err(error) => self.fail(key, &error),
            }
        }
    }

    fn fail(&mut self, key: (String, u32), error: &TransportError) {
        let (device, port) = (&key.0, key.1);
        let before = self.failed.get(&key).map(|failed| failed.wait);
        let wait = match before {
            None => {
                tracing::warn!(device, port, %error, "a new device is not taken in yet");
                AGAIN_MIN
            }
            Some(before) => {
                tracing::debug!(device, port, %error, "a new device is not taken in yet");
                (before * 2).min(AGAIN_MAX)
            }
        };
        let not_before = self.clock.now() + wait;
        self.failed.insert(key, Failed { wait, not_before });
    }

    fn take_in(&self, device: &Device, port: u32) -> Result<Arc<Nic>, TransportError> {
        let (local, name) = open::next(self.nics.iter(), device.name(), port);
        let nic = Nic::open(local, device, port, &name, &self.config, PortWish::Any)?;
        // Until peers were told of it.
        nic.set_gate(false);
        let nic = Arc::new(nic);
        let opening = nic.open_device()?;
        self.registrations.register_all(&nic, &opening, || {
            let inbox = self.threads.serve(&nic)?;
            self.listener.adding(local, nic.name());
            self.nics.push(Arc::clone(&nic), inbox)
        })?;
        self.router.nic_added(local);
        self.listener.added(&self.nics);
        self.listener.rekeyed(local);
        Ok(nic)
    }
}
