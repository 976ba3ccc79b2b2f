//! The observers' driver: one thread that reads and acknowledges the events of all contexts.
//!
//! The thread waits for the contexts' event channels, for the kernel's link and address notices,
//! and for its timers. It hands what it learns to one [`Observer`] a NIC and carries out what that
//! decides: the gate first, then the endpoints, then the record, and at last the way back.
//!
//! Ports are read in the control runtime's pool of blocking threads, not on the NIC's control
//! thread: moving a queue pair to RTR towards a neighbour that does not answer takes a second
//! there, and news must not wait behind it. Whether the control thread hangs is looked at from
//! outside ([`ControlThread::is_overdue`](rerail_verbs::ControlThread::is_overdue)).
//!
//! Deliberately not here: what an event means ([`observer`]), and the
//! record.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rerail_verbs::Gid;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use tokio::runtime;

use super::clock::Clock;
use super::config::RdmaConfig;
use super::connector::Connector;
use super::data_threads::DataThreads;
use super::memory::{Registered, Registrations};
use super::nic::{Nic, PortFacts};
use super::nics::Nics;
use super::opening::Opening;
use super::paths::Row;
use super::router::Router;
use super::tries::AllTries;
use crate::TransportError;
use crate::event::{Event, Events};
use crate::machine::ids::LocalNic;
use crate::machine::observer::{
    self, Action, CloseCause, DeathCause, Input, Observer, ObserverConfig, Outcome, PortReading,
    ReadId,
};
use crate::machine::rail::LocalGate;
use crate::machine::{Machine, Time, drive};

mod finder;
mod hints;
mod mail;
mod patience;
mod read;
#[cfg(test)]
mod tests;

pub(super) use finder::Finder;
use hints::Hints;
use mail::{ALL, LookUnderWay, Mail, Shared, bit};
use patience::Patience;
pub(super) use read::{failure, read_port};

/// Events taken from one context before the others have their turn.
const EVENTS_MAX: usize = 64;

/// Longest sleep: then it is looked at whether control threads hang.
const SLEEP_MAX: Duration = Duration::from_millis(250);

/// How often it is looked whether there are other devices, though nothing says so.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How soon after another look, when something says so: a device appears bit by bit.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A thread that wakes so much later than it wanted to did not get to run.
const GAP: Duration = Duration::from_millis(500);

/// How long others may take then to do what was theirs to do.
const CATCH_UP: Duration = Duration::from_millis(100);

/// A verb that has run longer than it rightly may is taken for hung.
pub(super) const VERB_LIMIT: Duration = Duration::from_secs(1);

/// Who is told what becomes of the own NICs.
pub trait NicListener: Send + Sync {
    /// A port differs from what was told before: for the record. `gids` are those that peers may
    /// use, best first; none while the port is down.
    fn port(&self, local: LocalNic, facts: observer::PortFacts, gids: Vec<Gid>);

    /// A device was opened, again or late, and all memory registered with it: it has new keys.
    fn rekeyed(&self, local: LocalNic);

    /// A NIC that was not there at the start is about to be taken in, as one that is down. Memory
    /// that is registered from now on may have a key for it. Called for one NIC at a time and under
    /// a lock: must be quick, and ask no device.
    ///
    /// # Errors
    ///
    /// The record has no room for it, as [`check_room`](Self::check_room) says; nothing is changed.
    fn adding(&self, local: LocalNic, name: &str) -> Result<(), String> {
        let _ = (local, name);
        Ok(())
    }

    /// Whether the record would have room for one more NIC, with the keys of all memory. Asked
    /// before that is registered with it, so that this is not in vain.
    ///
    /// # Errors
    ///
    /// The sizes, and what can be done.
    fn check_room(&self, name: &str) -> Result<(), String> {
        let _ = name;
        Ok(())
    }

    /// There are more own NICs than before. Called without a lock, by several threads at once, and
    /// for a NIC whose port may have been read already; may take its time.
    fn added(&self, nics: &Nics) {
        let _ = nics;
    }
}

/// The running thread. Stops and is waited for when dropped.
pub(super) struct Watch {
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
}

/// What the thread works on.
pub(super) struct Parts {
    pub(super) nics: Nics,
    pub(super) wanted: Vec<String>,
    pub(super) threads: Arc<DataThreads>,
    pub(super) tries: Arc<AllTries>,
    pub(super) registrations: Arc<Registrations>,
    pub(super) config: RdmaConfig,
    pub(super) clock: Clock,
    pub(super) connector: Connector,
    pub(super) router: Arc<Router>,
    pub(super) runtime: runtime::Handle,
    pub(super) listener: Arc<dyn NicListener>,
    pub(super) events: Events,
}

impl Watch {
    /// Starts the thread, whose first act is to read every port.
    pub(super) fn start(parts: Parts) -> Result<Self, TransportError> {
        let failed = |error: std::io::Error| TransportError::Thread {
            reason: error.to_string(),
        };
        let shared = Arc::new(Shared::new().map_err(failed)?);
        let mut watcher = Watcher::new(parts, Arc::clone(&shared));
        let handle = std::thread::Builder::new()
            .name("observer".into())
            .spawn(move || watcher.run())
            .map_err(failed)?;
        Ok(Self {
            shared,
            handle: Some(handle),
        })
    }

    /// Has a NIC's port read, or all: something suggests that it differs.
    pub(super) fn hint(&self, local: Option<LocalNic>) {
        self.shared.hint(local);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(handle) = self.handle.take()
            && handle.join().is_err()
        {
            tracing::error!("the observer's thread panicked");
        }
    }
}

struct Entry {
    nic: Arc<Nic>,
    /// The device whose events are read; `None` while it is dead.
    opening: Option<Arc<Opening>>,
    observer: Observer,
    /// Set while a thread of the pool reads the port. One that hangs is never joined by another.
    reading: Arc<AtomicBool>,
    /// What is known of a device that could not be opened again.
    patience: Option<Patience>,
    /// The opening that waits until there is room for all memory, of which the observer is not
    /// told: it would try again soon, however much that costs.
    waiting: Option<u32>,
}

impl Entry {
    fn new(nic: &Arc<Nic>, config: &RdmaConfig, now: Time) -> Self {
        let observing = ObserverConfig {
            pkey_index: config.pkey_index,
            ..ObserverConfig::default()
        };
        let (device, port, seed) = (nic.device(), nic.port(), rand::random());
        Self {
            nic: Arc::clone(nic),
            opening: nic.opening(),
            observer: Observer::new(now, observing, device, &config.gids, [port], seed),
            reading: Arc::default(),
            patience: None,
            waiting: None,
        }
    }
}

struct Watcher {
    parts: Parts,
    shared: Arc<Shared>,
    entries: Vec<Entry>,
    hints: Hints,
    finder: Arc<Finder>,
    /// It looks.
    looking: bool,
    look_at: Time,
    /// News of devices came when it began to look, or since.
    look_again: bool,
}

impl Watcher {
    fn new(parts: Parts, shared: Arc<Shared>) -> Self {
        let now = parts.clock.now();
        let entry = |nic: &Arc<Nic>| Entry::new(nic, &parts.config, now);
        Self {
            entries: parts.nics.iter().map(entry).collect(),
            hints: Hints::open(),
            finder: Arc::new(Finder::new(&parts)),
            looking: false,
            look_at: now + LOOK_EVERY,
            look_again: false,
            parts,
            shared,
        }
    }

    fn run(&mut self) {
        let mut due = self.parts.clock.now();
        while !self.shared.stop.load(Ordering::Acquire) {
            if self.parts.clock.now() > due + GAP {
                // This process was stopped: whoever works for it has to catch up before anybody is
                // said to be late.
                std::thread::sleep(CATCH_UP);
            }
            due = self.step(self.parts.clock.now());
            self.wait(due);
        }
    }

    /// One round. Returns when the next is due at the latest.
    fn step(&mut self, now: Time) -> Time {
        let mut due = now + SLEEP_MAX;
        if self.hints.take(now) {
            self.hint(now, ALL);
        }
        let news = self.hints.take_device(now);
        due = due.min(self.look(now, news));
        while let Some(mail) = self.shared.mail.pop() {
            self.read_mail(now, mail);
        }
        self.hint(now, self.shared.take_hints());
        for index in 0..self.entries.len() {
            self.take_events(now, index);
            self.check_control(now, index);
            self.reopen_waiting(now, index);
            self.drive(now, index);
            let next = self.entries[index].observer.next_timeout();
            due = due.min(next.unwrap_or(due));
        }
        due.min(self.hints.next_timeout().unwrap_or(due))
    }

    /// Has the devices of the machine looked at, when it is time or there are `news` of them.
    /// Returns when it is next.
    fn look(&mut self, now: Time, news: bool) -> Time {
        if news {
            self.look_at = now;
            let patience = self.entries.iter_mut().map(|entry| &mut entry.patience);
            // It may be another device by now, which has room.
            patience.flatten().for_each(|patience| patience.hurry(now));
        }
        if now >= self.look_at && !self.looking {
            let (finder, shared) = (Arc::clone(&self.finder), Arc::clone(&self.shared));
            (self.looking, self.look_again) = (true, false);
            let runtime = self.parts.runtime.clone();
            // Listing devices takes its time, and what is done with each may hang.
            self.parts.runtime.spawn_blocking(move || {
                let mut look = LookUnderWay::new(&shared);
                let looked = finder.look();
                look.gone = looked.gone;
                for attempt in looked.attempts {
                    let shared = Arc::clone(&shared);
                    let taken = move |nic: Arc<Nic>| shared.send(Mail::Appeared(nic.index()));
                    runtime.spawn_blocking(move || attempt.run(taken));
                }
            });
        }
        // Though it looks just now: a device appears bit by bit.
        self.look_again |= news;
        if self.looking {
            now + SLEEP_MAX
        } else {
            self.look_at
        }
    }

    fn wait(&self, due: Time) {
        let left = due.saturating_since(self.parts.clock.now());
        let openings = self
            .entries
            .iter()
            .filter_map(|entry| entry.opening.as_ref());
        let channels = openings.filter_map(|opening| opening.context().async_fd());
        let fds = [self.shared.wake.as_fd()]
            .into_iter()
            .chain(self.hints.fds())
            .chain(channels);
        let mut fds: Vec<_> = fds
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let limit = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        // An interrupted wait is as good as a short one.
        let _ = poll(&mut fds, Some(&limit));
        let mut counter = [0_u8; 8];
        // Empty when nobody woke it.
        let _ = rustix::io::read(&self.shared.wake, &mut counter);
    }

    /// Has the ports of these NICs read, a bit each.
    fn hint(&mut self, now: Time, nics: u64) {
        for entry in &mut self.entries {
            if nics & bit(entry.nic.index()) != 0 {
                entry.observer.handle(now, Input::Hint { port: None });
            }
        }
    }

    fn read_mail(&mut self, now: Time, mail: Mail) {
        match mail {
            Mail::Reopened {
                nic,
                epoch,
                registered,
                result,
            } => self.reopened(now, nic, epoch, registered, result),
            Mail::Appeared(local) => self.appeared(now, local),
            Mail::Looked { gone } => {
                let waiting = self
                    .entries
                    .iter_mut()
                    .filter(|entry| entry.waiting.is_some());
                for entry in waiting.filter(|entry| gone.contains(&entry.nic.index())) {
                    // It is known of a device that is not there any more. The next try finds that
                    // out, and from then on the observer waits for another.
                    entry.patience = None;
                }
                self.looking = false;
                let wait = if std::mem::take(&mut self.look_again) {
                    LOOK_AGAIN
                } else {
                    LOOK_EVERY
                };
                self.look_at = now + wait;
            }
            Mail::Read {
                nic,
                epoch,
                read,
                result,
            } => {
                let rows = result.as_ref().ok().and_then(rows_of);
                let longest = result.as_ref().ok().map(|read| read.attr.max_msg_bytes);
                let result = result.map_err(|error| failure(&error));
                let input = Input::PortRead {
                    epoch,
                    read,
                    result,
                };
                if let Some(entry) = self.entries.get_mut(nic) {
                    if let Some(longest) = longest
                        && epoch == entry.observer.epoch()
                    {
                        // Before its gate is opened for what the reading says.
                        entry.nic.set_max_msg_bytes(longest);
                    }
                    entry.observer.handle(now, input);
                    let local = entry.nic.index();
                    // What the observer closes for this reading is closed first.
                    self.drive(now, nic);
                    if let Some(rows) = rows {
                        self.parts.connector.table_read(local, &rows);
                    }
                }
            }
        }
    }

    /// Takes care of all NICs up to one. News of them may come in any order.
    fn appeared(&mut self, now: Time, last: LocalNic) {
        for number in self.entries.len()..=last.0 as usize {
            let Some(nic) = self.parts.nics.get(number) else {
                return;
            };
            let added = Event::NicAdded {
                nic: nic.name().to_owned(),
            };
            self.entries.push(Entry::new(nic, &self.parts.config, now));
            self.parts.events.tell(now, &added);
        }
    }

    fn reopened(
        &mut self,
        now: Time,
        nic: usize,
        epoch: u32,
        registered: Registered,
        result: Result<(), TransportError>,
    ) {
        let Some(entry) = self.entries.get_mut(nic) else {
            return;
        };
        let name = entry.nic.name();
        match result {
            Ok(()) => {
                entry.opening = entry.nic.opening();
                entry.patience = None;
                tracing::info!(nic = name, "the device is open again");
                self.parts.listener.rekeyed(entry.nic.index());
                let nic = name.to_owned();
                self.parts.events.tell(now, &Event::ContextReopened { nic });
                entry.observer.handle(now, Input::Reopened { epoch });
            }
            Err(error) => {
                let before = entry.patience.as_ref();
                let (patience, is_news) = Patience::after(before, now, &error, registered);
                if is_news {
                    tracing::warn!(nic = name, %error, "the device cannot be opened again yet");
                } else {
                    tracing::debug!(nic = name, %error, "the device cannot be opened again yet");
                }
                if patience.wants_room() {
                    entry.waiting = Some(epoch);
                    let left_out = Event::NicLeftOut {
                        nic: name.to_owned(),
                        cause: error.to_string(),
                    };
                    if is_news {
                        self.parts.events.tell(now, &left_out);
                    }
                } else {
                    entry.observer.handle(now, Input::ReopenFailed { epoch });
                }
                entry.patience = Some(patience);
            }
        }
    }

    /// Opens a device again that had no room, once it may have.
    fn reopen_waiting(&mut self, now: Time, index: usize) {
        let entry = &mut self.entries[index];
        let registered = || self.parts.registrations.registered();
        let is_over = |patience: &Patience| patience.is_over(now, registered);
        if let Some(epoch) = entry.waiting
            && entry.patience.as_ref().is_none_or(is_over)
        {
            entry.waiting = None;
            reopen_in_pool(&self.parts, &self.shared, &entry.nic, epoch);
        }
    }

    /// Reads a context's event channel until it is empty. What is taken is acknowledged.
    fn take_events(&mut self, now: Time, index: usize) {
        for _ in 0..EVENTS_MAX {
            let entry = &mut self.entries[index];
            let Some(opening) = &entry.opening else {
                return;
            };
            let epoch = entry.observer.epoch();
            let event = match opening.context().next_event() {
                Ok(None) => return,
                Ok(Some(event)) => event,
                Err(error) => {
                    let errno = failure(&error).errno;
                    let input = Input::ChannelFailed { epoch, errno };
                    entry.observer.handle(now, input);
                    return;
                }
            };
            let seen = Event::Seen {
                nic: entry.nic.name().to_owned(),
                kind: event.kind.to_string(),
                subject: event.subject.to_string(),
            };
            entry.observer.handle(now, Input::Event { epoch, event });
            // Bad news takes effect before anybody is told of it.
            self.drive(now, index);
            self.parts.events.tell(now, &seen);
        }
    }

    fn check_control(&mut self, now: Time, index: usize) {
        let entry = &mut self.entries[index];
        let control = entry
            .opening
            .as_ref()
            .map(|opening| opening.context().control());
        if control.is_some_and(|control| control.is_overdue(VERB_LIMIT)) {
            let epoch = entry.observer.epoch();
            let verb = "a verb of the control thread";
            entry.observer.handle(now, Input::VerbHung { epoch, verb });
        }
    }

    fn drive(&mut self, now: Time, index: usize) {
        let Self {
            parts,
            shared,
            entries,
            ..
        } = self;
        let Entry {
            nic,
            opening,
            observer,
            reading,
            ..
        } = &mut entries[index];
        let epoch = observer.epoch();
        let mut actions = Vec::new();
        drive(observer, now, |action| actions.push(action));
        for action in actions {
            match action {
                Action::ReadPort(read) => {
                    // One that hangs shows as a reading that takes too long.
                    if let Some(opening) = opening.as_ref()
                        && !reading.swap(true, Ordering::AcqRel)
                    {
                        let job = (epoch, read, Arc::clone(reading));
                        read_in_pool(parts, shared, nic, opening, job);
                    }
                }
                Action::ReleaseContext { cause } => {
                    *opening = None;
                    release(parts, nic, now, &cause);
                }
                Action::Reopen { epoch } if reading.load(Ordering::Acquire) => {
                    let device = nic.device().to_owned();
                    let reason = "a thread that read its port hangs in it".to_owned();
                    shared.send(Mail::Reopened {
                        nic: nic.index().0 as usize,
                        epoch,
                        registered: Registered::default(),
                        result: Err(TransportError::Device { device, reason }),
                    });
                }
                Action::Reopen { epoch } => reopen_in_pool(parts, shared, nic, epoch),
                Action::HalfOpen { .. } => {
                    // A GID that only moved to another row is not published, and used all the same.
                    if let Some(found) = observer.facts(nic.port()) {
                        adopt(parts, nic, found);
                    }
                    act(parts, nic, now, action);
                }
                action => act(parts, nic, now, action),
            }
        }
    }
}

/// Carries out what the observer of `nic` wants.
pub(super) fn act(parts: &Parts, nic: &Arc<Nic>, now: Time, action: Action) {
    let name = nic.name();
    match action {
        // They need more than this has.
        Action::ReadPort(_) | Action::ReleaseContext { .. } | Action::Reopen { .. } => {}
        Action::Report { outcome, .. } => report(parts, name, now, &outcome),
        Action::CloseGate { cause, .. } => {
            nic.set_gate(false);
            let (gate, cause) = match cause {
                CloseCause::ContextDead(cause) => (LocalGate::Dead, cause.to_string()),
                CloseCause::Event(kind) => (LocalGate::Closed, kind.to_string()),
                CloseCause::Outcome => (LocalGate::Closed, "the port was read".to_owned()),
            };
            parts.router.local_gate(nic.index(), gate);
            tracing::warn!(nic = name, %cause, "gate closed");
            let nic = name.to_owned();
            parts.events.tell(now, &Event::GateClosed { nic, cause });
        }
        Action::CutEndpoints { cause, .. } => {
            let cause = cut_cause(cause);
            let endpoints = parts.connector.close_all(Some(nic.index().0), &cause);
            let cut = Event::EndpointsCut {
                nic: name.to_owned(),
                endpoints,
                cause,
            };
            parts.events.tell(now, &cut);
        }
        Action::Publish { facts, gids, .. } => {
            let mtu_max = parts.config.mtu_max;
            if let Some(facts) = PortFacts::of(&facts, &gids, mtu_max).filter(|_| facts.up) {
                nic.set_facts(facts);
            }
            if !facts.up && nic.is_gate_open() {
                // The first that is learnt of a port that was usable when it was opened.
                shut(parts, nic, LocalGate::Closed, "the port is down");
            }
            parts.listener.port(nic.index(), facts, gids);
        }
        Action::ReplaceLazily { changes, .. } => {
            tracing::info!(nic = name, ?changes, "connections made from now on use it");
            // A rail's share of the work goes by what its port says until its rate is measured.
            parts.router.local_port(nic.index());
        }
        Action::HalfOpen { endpoints_kept, .. } => {
            nic.set_gate(true);
            let gate = LocalGate::Open { endpoints_kept };
            parts.router.local_gate(nic.index(), gate);
            tracing::info!(nic = name, endpoints_kept, "gate open");
            let nic = name.to_owned();
            parts.events.tell(now, &Event::GateOpened { nic });
        }
        Action::EndpointEvent { queue_pair, kind } => {
            parts
                .connector
                .queue_pair_event(nic.index(), queue_pair, kind);
        }
    }
}

/// Has endpoints that are made from now on use what was found.
pub(super) fn adopt(parts: &Parts, nic: &Nic, found: &observer::PortFacts) {
    let gids = nic
        .facts()
        .map_or_else(Vec::new, |facts| facts.gids.clone());
    if let Some(facts) = PortFacts::of(found, &gids, parts.config.mtu_max) {
        nic.set_facts(facts);
    }
}

/// Closes a NIC to everything.
pub(super) fn shut(parts: &Parts, nic: &Nic, gate: LocalGate, cause: &str) {
    nic.set_gate(false);
    parts.router.local_gate(nic.index(), gate);
    parts.connector.close_all(Some(nic.index().0), cause);
}

/// Has nothing use a dead device any more, and its regions go, without waiting for it.
pub(super) fn let_go(parts: &Parts, nic: &Nic, cause: &DeathCause) {
    nic.set_gate(false);
    // Its queue pairs stop first: ahead of what each endpoint asks of the device, of which there
    // may be more than it takes at a time, and of the regions.
    nic.release();
    shut(parts, nic, LocalGate::Dead, &cause.to_string());
    parts.registrations.release(nic);
}

/// A device is dead.
fn release(parts: &Parts, nic: &Arc<Nic>, now: Time, cause: &DeathCause) {
    tracing::error!(nic = nic.name(), %cause, "the device is given up");
    let_go(parts, nic, cause);
    let released = Event::ContextReleased {
        nic: nic.name().to_owned(),
        cause: cause.to_string(),
    };
    parts.events.tell(now, &released);
}

fn reopen_in_pool(parts: &Parts, shared: &Arc<Shared>, nic: &Arc<Nic>, epoch: u32) {
    let (registrations, config) = (Arc::clone(&parts.registrations), parts.config.clone());
    let (nic, shared) = (Arc::clone(nic), Arc::clone(shared));
    parts.runtime.spawn_blocking(move || {
        let registered = registrations.registered();
        let result = nic.reopen(&config).and_then(|opening| {
            let taken = || {
                nic.install(Arc::clone(&opening));
                Ok(())
            };
            registrations.register_all(&nic, &opening, taken)
        });
        shared.send(Mail::Reopened {
            nic: nic.index().0 as usize,
            epoch,
            registered,
            result,
        });
    });
}

fn read_in_pool(
    parts: &Parts,
    shared: &Arc<Shared>,
    nic: &Nic,
    opening: &Opening,
    (epoch, read, reading): (u32, ReadId, Arc<AtomicBool>),
) {
    let (context, shared) = (opening.context().clone(), Arc::clone(shared));
    let (index, pkey_index) = (nic.index().0 as usize, parts.config.pkey_index);
    parts.runtime.spawn_blocking(move || {
        let result = read_port(&context, read.port, pkey_index);
        reading.store(false, Ordering::Release);
        shared.send(Mail::Read {
            nic: index,
            epoch,
            read,
            result,
        });
    });
}

/// The rows of a table that was read whole. One that was not says nothing of what is missing.
pub(super) fn rows_of(reading: &PortReading) -> Option<Arc<[Row]>> {
    let rows = reading.gids.iter().map(|entry| Row {
        index: entry.index,
        gid: entry.gid,
    });
    reading.unreadable.is_empty().then(|| rows.collect())
}

fn report(parts: &Parts, nic: &str, now: Time, outcome: &Outcome) {
    let (outcome, detail) = match outcome {
        Outcome::Unchanged => ("unchanged", String::new()),
        Outcome::Moved => ("moved", String::new()),
        Outcome::Changed(changes) => ("changed", format!("{changes:?}")),
        Outcome::Failed { reason, repeated } => {
            if *repeated {
                tracing::debug!(nic, %reason, "the port is not usable still");
            } else {
                tracing::error!(nic, %reason, "the port is not usable");
            }
            ("failed", reason.to_string())
        }
    };
    tracing::debug!(nic, outcome, detail, "port read");
    let read = Event::PortRead {
        nic: nic.to_owned(),
        outcome,
        detail,
    };
    parts.events.tell(now, &read);
}

fn cut_cause(cause: observer::CutCause) -> String {
    match cause {
        observer::CutCause::Moved => "its GID stands at another index".to_owned(),
        observer::CutCause::Changed(changes) => format!("its port changed: {changes:?}"),
        observer::CutCause::Failed(reason) => reason.to_string(),
        observer::CutCause::ContextDead(cause) => cause.to_string(),
    }
}
