//! The handle to a fabric: making hosts and adapters, and moving time.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::backend;
use super::core::{Core, FabricStats};
use super::node::{NicId, NodeId, PortId, ProcessId};
use super::options::{FabricOptions, NicOptions, VerbTime};
use super::queue_pair::OwnRow;
use super::slab::Handle;
use crate::{Device, DeviceList, GidEntry, PortAttr, backend as seam};

/// A simulated RDMA network. Clones share it.
///
/// Made with [`Fabric::new`] it lives in virtual time: nothing happens but by
/// [`advance_to`](Self::advance_to), [`step`](Self::step) and the verbs that take time, and the
/// same seed and calls give the same [`trace`](Self::trace). Made with
/// [`RealTimeFabric`](super::RealTimeFabric) it follows the clock.
///
/// All methods may be called from any thread.
#[derive(Clone)]
pub struct Fabric {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    state: Mutex<State>,
    /// The state changed in a way that somebody may wait for.
    changed: Condvar,
    /// When real time began; `None` in virtual time.
    started: Option<Instant>,
}

/// Whose verb it is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Caller {
    /// A process that has not opened the device yet.
    Process(ProcessId),
    Context(Handle),
}

impl Caller {
    fn is_frozen(self, core: &Core) -> bool {
        match self {
            Self::Process(process) => core.processes[process.0].frozen,
            Self::Context(context) => core
                .contexts
                .get(context)
                .is_some_and(|context| core.processes[context.process.0].frozen),
        }
    }

    fn is_alive(self, core: &Core) -> bool {
        match self {
            Self::Process(process) => !core.processes[process.0].dead,
            Self::Context(context) => core
                .contexts
                .get(context)
                .is_some_and(|context| !context.dead),
        }
    }
}

/// What the lock protects.
pub(super) struct State {
    pub(super) core: Core,
    /// Until when the thread that drives real time sleeps; `None` while it does not.
    pub(super) driver_sleeps_until: Option<Duration>,
    /// That thread is to end.
    pub(super) stopped: bool,
}

impl Fabric {
    /// A fabric in virtual time.
    pub fn new(options: FabricOptions) -> Self {
        Self::with_start(options, None)
    }

    pub(super) fn with_start(options: FabricOptions, started: Option<Instant>) -> Self {
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    core: Core::new(options),
                    driver_sleeps_until: None,
                    stopped: false,
                }),
                changed: Condvar::new(),
                started,
            }),
        }
    }

    /// Adds a host.
    pub fn add_node(&self, name: &str) -> NodeId {
        self.with(|core| core.add_node(name))
    }

    /// Adds a process on a host; see [`device_of`](Self::device_of).
    pub fn add_process(&self, node: NodeId) -> ProcessId {
        self.with(|core| core.add_process(node))
    }

    /// Adds an adapter to a host.
    pub fn add_nic(&self, node: NodeId, options: &NicOptions) -> NicId {
        self.with(|core| core.add_nic(node, options))
    }

    /// The adapter, for a new process of its host.
    pub fn device(&self, nic: NicId) -> Device {
        let process = self.with(|core| core.add_process(core.nics[nic.0].node));
        self.device_of(process, nic)
    }

    /// The adapter, for a process that can be frozen and killed.
    ///
    /// # Panics
    ///
    /// When process and adapter belong to different hosts.
    pub fn device_of(&self, process: ProcessId, nic: NicId) -> Device {
        let (name, guid) = self.with(|core| {
            let device = &core.nics[nic.0];
            assert_eq!(
                core.processes[process.0].node, device.node,
                "process and adapter belong to different hosts"
            );
            (Arc::from(device.name.as_str()), device.limits.node_guid)
        });
        let backend = backend::Device::new(self.clone(), process, nic);
        Device::new(name, guid, seam::Device::Sim(backend))
    }

    /// What a process finds when it lists its devices: its host's adapters that are plugged in.
    pub fn devices_of(&self, process: ProcessId) -> DeviceList {
        let nics: Vec<NicId> = self.with(|core| {
            let node = core.processes[process.0].node;
            let found = core.nics.iter().enumerate();
            found
                .filter(|(_, nic)| nic.node == node && nic.plugged)
                .map(|(index, _)| NicId(index))
                .collect()
        });
        let reason = nics
            .is_empty()
            .then(|| "the simulated host has no adapter plugged in".to_owned());
        let devices = nics.into_iter().map(|nic| self.device_of(process, nic));
        DeviceList::new(devices.collect(), reason)
    }

    /// Time since the fabric's beginning.
    pub fn now(&self) -> Duration {
        self.with(|core| core.now)
    }

    /// When something will happen by itself, if nothing is called before.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.with(|core| core.next_deadline())
    }

    /// Does the next thing that is due, whenever that is, at its own time. False when nothing is.
    /// In real time this does nothing.
    pub fn step(&self) -> bool {
        self.is_virtual() && self.with(|core| core.step_until(Duration::MAX))
    }

    /// Does everything that is due by `at`, in order, and leaves the clock there. The clock never
    /// goes back. In real time this does nothing.
    pub fn advance_to(&self, at: Duration) {
        if self.is_virtual() {
            self.with(|core| core.advance_to(at));
        }
    }

    /// Lets `how_long` pass; see [`advance_to`](Self::advance_to).
    pub fn advance(&self, how_long: Duration) {
        if self.is_virtual() {
            self.with(|core| core.advance_to(core.now.saturating_add(how_long)));
        }
    }

    /// The last lines of the trace: one decision a line, with the time in nanoseconds.
    pub fn trace(&self) -> String {
        self.with(|core| core.trace.text())
    }

    /// A number that stands for the whole trace, lines that are no longer kept included.
    pub fn trace_digest(&self) -> u64 {
        self.with(|core| core.trace.digest())
    }

    /// How much there is of everything.
    pub fn stats(&self) -> FabricStats {
        self.with(|core| core.stats())
    }

    /// A port and the rows of its GID table as they are, whatever any process has read of them:
    /// what the words of processes are compared with. `None` if the adapter has no such port.
    pub fn port(&self, at: PortId) -> Option<(PortAttr, Vec<GidEntry>)> {
        self.with(|core| Some((core.query_port(at).ok()?, core.query_gids(at).ok()?)))
    }

    /// Takes the time that verbs of the process on the adapter should have taken since the last
    /// call; see [`VerbTime::Charge`].
    pub fn take_verb_time(&self, process: ProcessId, nic: NicId) -> Duration {
        self.with(|core| core.take_verb_time(process, nic))
    }

    /// The row of the adapter's GID table that its queue pair of that number sends with; `None`
    /// when there is no such queue pair, or it is not connected.
    pub fn own_row(&self, nic: NicId, qp_num: u32) -> Option<OwnRow> {
        self.with(|core| core.own_row(nic, qp_num))
    }

    /// How long a control verb on the adapter would hang if it were called now.
    pub fn hangs_for(&self, nic: NicId) -> Duration {
        self.with(|core| core.open_delay(nic))
    }

    pub(super) fn verb_time(&self) -> VerbTime {
        self.with(|core| core.options.verb_time)
    }

    pub(super) fn is_virtual(&self) -> bool {
        self.shared.started.is_none()
    }

    /// Calls `run` with the core at the present time.
    pub(super) fn with<T>(&self, run: impl FnOnce(&mut Core) -> T) -> T {
        let mut state = self.shared.lock();
        let result = run(&mut state.core);
        self.shared.hurry_driver(&state);
        result
    }

    /// Like [`with`](Self::with) for a call of the context's process. In real time a frozen
    /// process waits here until it is thawed.
    pub(super) fn enter<T>(&self, context: Handle, run: impl FnOnce(&mut Core) -> T) -> T {
        let mut state = self.shared.lock();
        while !self.is_virtual() && Caller::Context(context).is_frozen(&state.core) {
            state = self.shared.wait(state, None);
        }
        let result = run(&mut state.core);
        self.shared.hurry_driver(&state);
        result
    }

    /// Lets a verb take the time that `delay` says, and then carries it out.
    ///
    /// A verb of a context that dies meanwhile is carried out at once, and fails; one of a process
    /// that is frozen meanwhile waits until it is thawed.
    pub(super) fn verb<T>(
        &self,
        caller: Caller,
        delay: impl FnOnce(&mut Core) -> Duration,
        run: impl FnOnce(&mut Core) -> T,
    ) -> T {
        let mut state = self.shared.lock();
        while !self.is_virtual() && caller.is_frozen(&state.core) {
            state = self.shared.wait(state, None);
        }
        let delay = delay(&mut state.core);
        let until = state.core.now.saturating_add(delay);
        if !self.is_virtual() {
            loop {
                if caller.is_frozen(&state.core) {
                    state = self.shared.wait(state, None);
                } else if state.core.now < until && caller.is_alive(&state.core) {
                    state = self.shared.wait(state, Some(until));
                } else {
                    break;
                }
            }
        } else if state.core.options.verb_time == VerbTime::Advance {
            state.core.advance_to(until);
        } else if let Caller::Context(context) = caller {
            state.core.charge(context, delay);
        }
        let result = run(&mut state.core);
        self.shared.hurry_driver(&state);
        result
    }

    /// Tells those who wait in real time that something has changed for them.
    pub(super) fn announce(&self) {
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// The lock, with everything done that is due in real time.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock is the model's complaint about its user; the state is whole.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.catch_up(&mut state);
        state
    }

    /// Gives the lock away until something changes or the fabric's time is `until`.
    pub(super) fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        until: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        let mut state = match until {
            None => self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let left = until.saturating_sub(state.core.now);
                self.changed
                    .wait_timeout(state, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
        };
        self.catch_up(&mut state);
        state
    }

    fn catch_up(&self, state: &mut State) {
        if let Some(started) = self.started {
            state.core.advance_to(started.elapsed());
        }
    }

    /// Wakes the driving thread when it would sleep past something that is due.
    fn hurry_driver(&self, state: &State) {
        let late = match (state.driver_sleeps_until, state.core.next_deadline()) {
            (Some(until), Some(due)) => due < until,
            _ => false,
        };
        if late {
            self.changed.notify_all();
        }
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric")
            .field("virtual", &self.is_virtual())
            .finish_non_exhaustive()
    }
}
