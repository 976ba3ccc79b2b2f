//! Which data thread serves which NIC.
//!
//! With few cores one serves several: a soft-RoCE device works on the same cores. A NIC that is
//! taken in later gets a thread of its own as long as there are cores for it, and else joins the
//! thread with the fewest NICs.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc;

use super::clock::Clock;
use super::config::RdmaConfig;
use super::data_thread::DataThread;
use super::driver::Driver;
use super::inbox::{Inbox, Report, Wake};
use super::nic::Nic;
use crate::TransportError;

/// A driver, and what reaches it.
#[cfg(test)]
type Served = (Driver, Arc<Inbox>);

/// The data threads of an engine.
pub(super) struct DataThreads {
    config: RdmaConfig,
    clock: Clock,
    threads_max: usize,
    /// `None` once they are stopped.
    running: Mutex<Option<Running>>,
    /// Drivers that were to be served and whose owner steps them: where it is there, no thread is
    /// ever started.
    #[cfg(test)]
    stepped: Option<Mutex<Vec<Served>>>,
}

struct Running {
    reports: mpsc::Sender<Report>,
    /// With the number of NICs that each serves.
    threads: Vec<(DataThread, usize)>,
}

impl DataThreads {
    /// None yet. They report to `reports`.
    pub(super) fn new(config: RdmaConfig, clock: Clock, reports: mpsc::Sender<Report>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = Vec::new();
        Self {
            config,
            clock,
            threads_max: (cores / 2).max(1),
            running: Mutex::new(Some(Running { reports, threads })),
            #[cfg(test)]
            stepped: None,
        }
    }

    /// Without threads: drivers are [taken](Self::take_drivers) by who steps them.
    #[cfg(test)]
    pub(super) fn in_turns(
        config: RdmaConfig,
        clock: Clock,
        reports: mpsc::Sender<Report>,
    ) -> Self {
        Self {
            stepped: Some(Mutex::default()),
            ..Self::new(config, clock, reports)
        }
    }

    /// The drivers of NICs that are served since this was last called, with their inboxes.
    #[cfg(test)]
    pub(super) fn take_drivers(&self) -> Vec<Served> {
        let stepped = self.stepped.iter();
        let stepped = stepped.map(|one| one.lock().unwrap_or_else(PoisonError::into_inner));
        stepped
            .flat_map(|mut one| std::mem::take(&mut *one))
            .collect()
    }

    /// Has a thread serve one more NIC. What is put into the inbox reaches it.
    ///
    /// # Errors
    ///
    /// A thread cannot be started, or they are stopped.
    pub(super) fn serve(&self, nic: &Arc<Nic>) -> Result<Arc<Inbox>, TransportError> {
        let mut running = self.lock();
        let Running { reports, threads } = running.as_mut().ok_or(TransportError::Closed)?;
        let driver = |wake: &Arc<Wake>| {
            let inbox = Arc::new(Inbox::new(Arc::clone(wake)));
            let (nic, inbox_of_driver) = (Arc::clone(nic), Arc::clone(&inbox));
            let (reports, now) = (reports.clone(), self.clock.now());
            let driver = Driver::new(nic, inbox_of_driver, reports, &self.config, now);
            (driver, inbox)
        };
        #[cfg(test)]
        if let Some(stepped) = &self.stepped {
            let (driver, inbox) = driver(&Arc::default());
            let mut stepped = stepped.lock().unwrap_or_else(PoisonError::into_inner);
            stepped.push((driver, Arc::clone(&inbox)));
            return Ok(inbox);
        }
        if threads.len() < self.threads_max {
            let wake = Arc::default();
            let (driver, inbox) = driver(&wake);
            let thread = DataThread::start(nic.name(), vec![driver], wake, self.clock)?;
            threads.push((thread, 1));
            return Ok(inbox);
        }
        let fewest = threads.iter_mut().min_by_key(|(_, nics)| *nics);
        let (thread, nics) = fewest.ok_or(TransportError::Closed)?;
        let (driver, inbox) = driver(thread.wake());
        if !thread.add(driver) {
            return Err(TransportError::Thread {
                reason: "too many NICs wait for a data thread".into(),
            });
        }
        *nics += 1;
        Ok(inbox)
    }

    /// Stops them and waits for them.
    pub(super) fn stop(&self) {
        let running = self.lock().take();
        drop(running);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Running>> {
        // A list of handles is whole whatever panicked.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
