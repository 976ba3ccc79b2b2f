//! The observer: from a NIC's events to the truth about its ports (design §3).
//!
//! One observer watches one context. An event is a hint that something may differ; what is true is
//! what a query returns, compared with what is published. The driver reads the context's event
//! channel to EAGAIN, turns each event into a value, **acknowledges it**, and only then gives it to
//! the observer: destroying a queue pair blocks on unacknowledged events, so no action of this
//! machine may be carried out before.
//!
//! # The way of one event
//!
//! `GID_CHANGE` on port 1 → [`Action::ReadPort`] at once → the driver queries state, GIDs and
//! P_Keys and answers with [`Input::PortRead`] → the reading is compared with what is published →
//! [`Action::Report`] with one of four [`Outcome`]s, and what follows from it: for another GID
//! [`Action::CloseGate`], [`Action::CutEndpoints`], [`Action::Publish`], [`Action::HalfOpen`], in
//! this order. `PORT_ERR` closes the gate before anything is asked, and its port comes back
//! through half-open whatever it reads afterwards.
//!
//! Deliberately not here: the verbs, acknowledging, the record's form and generation (the
//! publisher), proving a rail (rails), and the choice of GIDs for a certain peer.

mod event;
mod facts;
mod gid;
mod io;
mod port;
#[cfg(test)]
pub(crate) mod states;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rerail_topology::gid::{GidPolicy, HysteresisTimes};
use rerail_verbs::{AsyncEvent, AsyncEventKind};

pub use event::DeathCause;
pub use facts::{Changes, FailReason, Outcome, PortFacts, PortReading, ReadFailure};
pub use gid::NoGid;
pub use io::{Action, CloseCause, Counters, CutCause, Input, ReadId};

use self::event::{Meaning, meaning};
use self::gid::PortGids;
use self::port::PortWatch;
use super::backoff::Backoff;
use super::time::earliest;
use super::{Machine, Time};

/// Times and limits of an observer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ObserverConfig {
    /// Events within this time after a first one cause one more reading. 20 ms.
    pub coalesce: Duration,
    /// How often a port that is not healthy is read. 1 s.
    pub recheck: Duration,
    /// How often a healthy port is read, so that a lost event is found. 10 s.
    pub recheck_healthy: Duration,
    /// How often a reading that failed is tried again before the port counts as failed. 3.
    pub read_retries: u32,
    /// Wait before such a try. 5 ms.
    pub read_retry_wait: Duration,
    /// How long a reading may take before the context counts as dead. 1 s.
    pub verb_timeout: Duration,
    /// How steady the choice of a GID is (`settle_ms`, `downgrade_hold_ms`).
    pub hysteresis: HysteresisTimes,
    /// Index of the P_Key in use. 0.
    pub pkey_index: u16,
    /// First wait before a dead context is opened again. 250 ms.
    pub reopen_backoff_min: Duration,
    /// Longest wait before a dead context is opened again. 30 s.
    pub reopen_backoff_max: Duration,
}

impl Default for ObserverConfig {
    fn default() -> Self {
        Self {
            coalesce: Duration::from_millis(20),
            recheck: Duration::from_millis(1_000),
            recheck_healthy: Duration::from_secs(10),
            read_retries: 3,
            read_retry_wait: Duration::from_millis(5),
            verb_timeout: Duration::from_millis(1_000),
            hysteresis: HysteresisTimes::default(),
            pkey_index: 0,
            reopen_backoff_min: Duration::from_millis(250),
            reopen_backoff_max: Duration::from_secs(30),
        }
    }
}

#[derive(Clone, Debug)]
enum ContextState {
    Alive,
    /// Waiting to open it again.
    Waiting {
        until: Time,
    },
    /// Being opened.
    Opening,
}

/// Watches one context. See the [module](self).
#[derive(Clone, Debug)]
pub struct Observer {
    config: ObserverConfig,
    ports: BTreeMap<u32, PortWatch>,
    epoch: u32,
    state: ContextState,
    reopen: Backoff,
    rng: SmallRng,
    counters: Counters,
    out: VecDeque<Action>,
}

impl Observer {
    /// An observer of `ports` of the device, whose context is open; each port is read at once.
    pub fn new(
        now: Time,
        config: ObserverConfig,
        device: &str,
        policy: &GidPolicy,
        ports: impl IntoIterator<Item = u32>,
        seed: u64,
    ) -> Self {
        let mut observer = Self {
            config,
            ports: BTreeMap::new(),
            epoch: 0,
            state: ContextState::Alive,
            reopen: Backoff::new(config.reopen_backoff_min, config.reopen_backoff_max),
            rng: SmallRng::seed_from_u64(seed),
            counters: Counters::default(),
            out: VecDeque::new(),
        };
        for port in ports {
            let gid = PortGids::new(device, port, policy, config.hysteresis);
            let mut watch = PortWatch::new(port, gid);
            watch.reopened(now, &mut observer.out);
            observer.ports.insert(port, watch);
        }
        observer
    }

    /// Names the context that is open or being opened; goes up with each re-opening.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Whether the context is open.
    pub fn is_alive(&self) -> bool {
        matches!(self.state, ContextState::Alive)
    }

    /// What was published last of a port; `None` if nothing was, or the port is not watched.
    pub fn facts(&self, port: u32) -> Option<&PortFacts> {
        self.ports.get(&port).and_then(PortWatch::published)
    }

    /// Whether the gate of a port is open, at least for probes.
    pub fn gate_open(&self, port: u32) -> bool {
        self.ports.get(&port).is_some_and(PortWatch::gate_open)
    }

    /// What has been counted.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    fn go(&mut self, to: ContextState) {
        #[cfg(test)]
        super::seen::follows_on(&self.state, &to);
        self.state = to;
    }

    fn event(&mut self, now: Time, event: AsyncEvent) {
        self.counters.events += 1;
        match meaning(event) {
            Meaning::Port { port, close } => {
                if matches!(event.kind, AsyncEventKind::Other(_)) {
                    self.counters.unknown_kinds += 1;
                }
                // Only that port: an event for one port says nothing of its neighbour.
                match self.ports.get_mut(&port) {
                    None => self.counters.foreign += 1,
                    Some(watch) => {
                        if close {
                            watch.close_gate(CloseCause::Event(event.kind), &mut self.out);
                        }
                        if watch.hint(now, &self.config, &mut self.out) {
                            self.counters.coalesced += 1;
                        }
                    }
                }
            }
            Meaning::AllPorts { close, known } => {
                self.counters.unknown_kinds += u64::from(!known);
                if close {
                    for watch in self.ports.values_mut() {
                        watch.close_gate(CloseCause::Event(event.kind), &mut self.out);
                    }
                }
                self.hint(now, None);
            }
            Meaning::QueuePair(queue_pair) => self.out.push_back(Action::EndpointEvent {
                queue_pair,
                kind: event.kind,
            }),
            Meaning::ForeignQueuePair => self.counters.foreign += 1,
            Meaning::ContextDead(cause) => self.die(now, cause),
            Meaning::Nothing => {}
        }
    }

    fn hint(&mut self, now: Time, port: Option<u32>) {
        for watch in self.ports.values_mut() {
            if port.is_none_or(|port| port == watch.number())
                && watch.hint(now, &self.config, &mut self.out)
            {
                self.counters.coalesced += 1;
            }
        }
    }

    /// All gates first, then the cuts and the record, then the context itself.
    fn die(&mut self, now: Time, cause: DeathCause) {
        for watch in self.ports.values_mut() {
            watch.close_gate(CloseCause::ContextDead(cause.clone()), &mut self.out);
        }
        for watch in self.ports.values_mut() {
            watch.context_dead();
            watch.withdraw(CutCause::ContextDead(cause.clone()), &mut self.out);
        }
        self.out.push_back(Action::ReleaseContext { cause });
        self.epoch = self.epoch.wrapping_add(1);
        self.wait_to_reopen(now);
    }

    fn wait_to_reopen(&mut self, now: Time) {
        let until = now + self.reopen.next_wait(&mut self.rng);
        self.go(ContextState::Waiting { until });
    }

    /// Whether an input is of the context as it is; counts it as stale if not.
    fn current(&mut self, epoch: u32, alive: bool) -> bool {
        let state = if alive {
            self.is_alive()
        } else {
            matches!(self.state, ContextState::Opening)
        };
        let current = state && epoch == self.epoch;
        self.counters.stale += u64::from(!current);
        current
    }
}

impl Machine for Observer {
    type Input = Input;
    type Action = Action;

    fn handle(&mut self, now: Time, input: Input) {
        match input {
            Input::Event { epoch, event } => {
                if self.current(epoch, true) {
                    self.event(now, event);
                }
            }
            Input::PortRead {
                epoch,
                read,
                result,
            } => {
                if !self.current(epoch, true) {
                    return;
                }
                let waited = self.ports.get_mut(&read.port).is_some_and(|watch| {
                    watch.handle_reading(now, read.number, result, &self.config, &mut self.out)
                });
                self.counters.stale += u64::from(!waited);
                if waited && self.ports.values().any(PortWatch::gate_open) {
                    // The device works: the next death starts a back-off of its own.
                    self.reopen.reset();
                }
            }
            Input::Hint { port } => self.hint(now, port),
            Input::ChannelFailed { epoch, errno } => {
                if self.current(epoch, true) {
                    self.die(now, DeathCause::Channel { errno });
                }
            }
            Input::VerbHung { epoch, verb } => {
                if self.current(epoch, true) {
                    self.die(now, DeathCause::VerbHung { verb });
                }
            }
            Input::Reopened { epoch } => {
                if self.current(epoch, false) {
                    self.go(ContextState::Alive);
                    for watch in self.ports.values_mut() {
                        watch.reopened(now, &mut self.out);
                    }
                }
            }
            Input::ReopenFailed { epoch } => {
                if self.current(epoch, false) {
                    self.epoch = self.epoch.wrapping_add(1);
                    self.wait_to_reopen(now);
                }
            }
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        match self.state {
            ContextState::Opening => {}
            ContextState::Waiting { until } => {
                if now >= until {
                    self.go(ContextState::Opening);
                    self.out.push_back(Action::Reopen { epoch: self.epoch });
                }
            }
            ContextState::Alive => {
                let mut hung = false;
                for watch in self.ports.values_mut() {
                    hung |= watch.handle_timeout(now, &self.config, &mut self.out);
                }
                if hung {
                    let verb = "ibv_query_port";
                    self.die(now, DeathCause::VerbHung { verb });
                }
            }
        }
    }

    fn poll(&mut self) -> Option<Action> {
        self.out.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        match self.state {
            ContextState::Opening => None,
            ContextState::Waiting { until } => Some(until),
            ContextState::Alive => self.ports.values().fold(None, |next, watch| {
                earliest(next, watch.next_timeout(&self.config))
            }),
        }
    }
}
