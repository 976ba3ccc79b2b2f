//! Names that two have, and a store that is slow: faults of the layer above the fabric.
//!
//! An older process that is frozen, or does not reach the store, does not know that another has
//! its name, and goes on with its work once it is awake. Another engine, of which there is nothing
//! but its record, writes over the record of a node. Whatever happens, the younger of two keeps
//! its record, and the older finds out and stops.
//!
//! One seed in two has them; in the others nothing is drawn for them.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use rand::rngs::SmallRng;
use rerail_metadata::descriptor::InstanceId;

use super::fault::Fault;
use super::ledger::Life;
use super::link::{life_of_instance, lock};
use super::node::{Node, name};
use super::plan::{End, Exclusive};
use super::store::{Errand, Told, member, peer_record};
use super::world::{Coming, Draws, WIRE, World, draws};
use crate::machine::peers::{self, PeersConfig};
use crate::machine::publisher::{self, PublisherConfig, StoreAnswer, StoreFailure};
use crate::machine::seen::{Named as _, words};
use crate::machine::{Machine as _, Time};

words! {
    /// What the store says, and what of it comes after its time.
    pub(super) enum Says {
        Written = "written",
        Found = "found",
        NotFound = "not found",
        Conflict = "conflict",
        Failed = "failed",
        LateAnswer = "late answer",
        LateRecord = "late record",
        LateChange = "late change",
    }
}

/// Numbers of these faults begin here.
pub(super) const RIVALS: u32 = 10_000;
/// One seed in so many has them.
const RIVALS_EACH: u64 = 2;
/// One in so many has engines whose clock is ahead instead of a store that is slow.
const AHEAD_EACH: u64 = 8;
/// One in so many of the moments at which another fault is made.
const MADE_EACH: u32 = 6;
/// When the user of a process that has lost its name ends it.
const NOTICED: Duration = Duration::from_secs(2);
/// What the store takes always.
const ANSWER: Duration = Duration::from_millis(1);
const TOLD: Duration = Duration::from_millis(2);
/// The shortest that a slow store takes longer.
const SLOW_MIN: Duration = Duration::from_millis(200);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

impl World {
    pub(super) fn has_rivals(&self) -> bool {
        self.seed.is_multiple_of(RIVALS_EACH)
    }

    /// Whether another engine may have a clock that is ahead. What such a one said is never taken
    /// for old, so that nothing may be late then.
    fn has_clock_ahead(&self) -> bool {
        self.seed.is_multiple_of(AHEAD_EACH)
    }

    /// Makes one of these faults, now and then.
    pub(super) fn make_rivalry(&mut self, number: u32) {
        let mut rng = draws(self.seed, Draws::Rivalry, number.into());
        let host = rng.random_range(0..self.hosts.len());
        if !rng.random_ratio(1, MADE_EACH) {
            return;
        }
        let kind = match rng.random_range(0..5) {
            0 | 1 if self.start_second(host, &mut rng) => Fault::SameNameTwice,
            2 | 3 if !self.has_clock_ahead() && self.slow_down_store(&mut rng) => Fault::SlowStore,
            4 if self.write_foreign(host, &mut rng) => Fault::ForeignRecord,
            _ => return,
        };
        self.coverage.count("fault", &kind);
        let kind = kind.name();
        self.say(host, format_args!("fault {number}: {kind}"));
        self.made.push(number);
    }

    /// Starts a process under the name of one that lives on, and does not know.
    fn start_second(&mut self, host: usize, rng: &mut SmallRng) -> bool {
        let is_cut_off = rng.random_bool(0.5);
        let span = ms(rng.random_range(200..6_000));
        let of = &mut self.hosts[host];
        let is_its = |record: &_| {
            member(record).is_some_and(|it| life_of_instance(it.instance).1 != u32::MAX)
        };
        let is_foreign = self
            .store
            .record(&name(host))
            .is_some_and(|record| !is_its(record));
        if is_foreign || of.ghost.is_some() || of.node.as_ref().is_none_or(|node| node.frozen) {
            return false;
        }
        let Some(mut older) = of.node.take() else {
            return false;
        };
        let (life, process) = (older.life, older.process);
        (older.has_no_store, older.frozen) = (is_cut_off, !is_cut_off);
        of.ghost = Some(older);
        if !is_cut_off {
            self.fabric.freeze(process);
        }
        self.start(host);
        self.until(span, End::Awake(life));
        true
    }

    /// An older process runs again, or reaches the store again.
    pub(super) fn wake_ghost(&mut self, life: Life) {
        if !self.is_ghost(life) {
            return;
        }
        self.as_ghost(life.0, |world| {
            world.thaw(life.0);
            let now = world.now;
            let Some(node) = world.node(life.0).filter(|node| node.has_no_store) else {
                return;
            };
            node.has_no_store = false;
            let input = publisher::Input::StoreReconnected;
            lock(&node.publisher).handle(now, input);
            node.peers.handle(now, peers::Input::WatchResync);
            world.say(life.0, format_args!("life {} reaches the store", life.1));
        });
    }

    /// Another has the name for good. As the engine, a process tells nobody any more and accepts
    /// nothing, goes on with what it has, and is ended by its user.
    pub(super) fn superseded(&mut self, life: Life, by: Option<InstanceId>) {
        let by = by.map(life_of_instance);
        self.say(
            life.0,
            format_args!("life {} is superseded by {by:?}", life.1),
        );
        let name = name(life.0);
        for other in 0..self.hosts.len() {
            let listens = |node: &Node| node.subscribed.get(&life.0) == Some(&life);
            let lost = || Coming::Peers(peers::Input::SubscriptionLost { name: name.clone() });
            self.later_each(other, WIRE, listens, lost);
        }
        self.until(NOTICED, End::Over(life));
    }

    /// Ends a process that has lost its name; one that nobody has replaced is started again.
    pub(super) fn end_superseded(&mut self, life: Life) {
        let host = life.0;
        if self.is_ghost(life) {
            self.as_ghost(host, |world| world.kill(host));
        } else if self.living(life).is_some() {
            self.kill(host);
            self.start(host);
        }
    }

    /// The store takes its time, up to longer than anybody waits for it.
    fn slow_down_store(&mut self, rng: &mut SmallRng) -> bool {
        let most = if rng.random_bool(0.5) { 2_000 } else { 15_000 };
        let most = ms(rng.random_range(400..most));
        let span = ms(rng.random_range(500..5_000));
        if !self.exclusive.insert(Exclusive::Store) {
            return false;
        }
        self.slow_store = most;
        self.until(span, End::StoreFast);
        true
    }

    /// What one way to the store or back takes longer now.
    pub(super) fn store_pause(&mut self) -> Duration {
        if self.slow_store.is_zero() {
            return Duration::ZERO;
        }
        let range = SLOW_MIN.as_micros() as u64..=self.slow_store.as_micros() as u64;
        Duration::from_micros(self.rng.random_range(range))
    }

    /// The record of another engine is written over that of a node: of one that began to start
    /// earlier or later, of one whose clock is ahead, or of one that does not say who it is.
    fn write_foreign(&mut self, host: usize, rng: &mut SmallRng) -> bool {
        let kind = rng.random_range(0..7);
        let (mark, generation) = (rng.random_range(1..=u8::MAX), rng.random_range(1..200));
        let present = self.hosts[host].node.as_ref().map(|node| node.life.1 as u8);
        let life = self.hosts[host].node.as_ref().map(|node| node.life);
        // One that never stored anything takes over whatever it finds, of whomever, and the other
        // engine is not there to write its record again.
        let has_stored = self.hosts[host].ghost.is_none()
            && life.is_some_and(|life| self.stored.contains(&life));
        let (Some(present), true) = (present, has_stored && !self.store.away) else {
            return false;
        };
        let Some(record) = self.store.record(&name(host)) else {
            return false;
        };
        // Nor is another one whose record this would be written over.
        let of = member(record).map(|member| life_of_instance(member.instance));
        if of != life {
            return false;
        }
        let mut foreign = (**record).clone();
        // Behind the instance of the life before, behind that of the present one, or far ahead.
        let first = match kind {
            0..3 => present,
            _ if self.has_clock_ahead() => u8::MAX,
            _ => present + 1,
        };
        let Some(member) = foreign.rerail.as_mut() else {
            return false;
        };
        let mut bytes = [0; 16];
        (bytes[0], bytes[1], bytes[2], bytes[3]) = (first, host as u8, 1, mark);
        (member.instance, member.generation) = (InstanceId(bytes), generation);
        if kind == 6 {
            foreign.rerail = None;
        }
        let by = foreign.rerail.as_ref().map(|member| member.instance);
        self.say(
            host,
            format_args!("a record of {by:?} is written over its own"),
        );
        let told = self.store.put(&name(host), Arc::new(foreign));
        self.tell_watchers(&told);
        true
    }

    /// A request to the store, and what watchers see of it.
    pub(super) fn ask_store(&mut self, life: Life, errand: Errand) {
        let (now, name) = (self.now, name(life.0));
        let waited = now.saturating_since(errand.asked);
        let writer = self.living(life);
        let has_store = writer.as_ref().is_none_or(|node| !node.has_no_store);
        let is_given_up = writer.is_none() || waited >= PublisherConfig::default().store_timeout;
        let before = self.store.record(&name).and_then(|record| member(record));
        let before = before.map(|member| life_of_instance(member.instance));
        let (answer, told) = if has_store {
            self.store.request(&name, errand.request, is_given_up)
        } else {
            let away = StoreFailure::Failed("it is not reached".to_owned());
            (StoreAnswer::Failed(away), None)
        };
        let says = match &answer {
            StoreAnswer::Written(_) => Says::Written,
            StoreAnswer::Found(_) => Says::Found,
            StoreAnswer::Failed(StoreFailure::NotFound) => Says::NotFound,
            StoreAnswer::Failed(StoreFailure::Conflict) => Says::Conflict,
            StoreAnswer::Failed(StoreFailure::Failed(_)) => Says::Failed,
        };
        let kind = says.name();
        let what = format_args!("life {}: the store says {kind} after {waited:?}", life.1);
        self.say(life.0, what);
        self.coverage.count("store says", &says);
        if let (Some(Told::Put(..)), Some(before)) = (&told, before) {
            // A first write takes over whatever is there.
            assert!(
                before.1 <= life.1 || before.1 == u32::MAX || !self.stored.contains(&life),
                "{life:?} has written over the record of {before:?}, which came later"
            );
        }
        let ticket = errand.ticket;
        let input = publisher::Input::Store { ticket, answer };
        let after = ANSWER + self.store_pause();
        let answer = Coming::Answered(errand.asked, Box::new(Coming::Publisher(input)));
        self.for_life(life, now + after, answer);
        if let Some(told) = &told {
            self.tell_watchers(told);
        }
    }

    fn tell_watchers(&mut self, told: &Told) {
        if self.store.silent {
            return;
        }
        let watchers = self.hosts.iter().flat_map(|host| host.processes());
        let watchers = watchers.filter(|node| !node.has_no_store);
        let watchers: Vec<_> = watchers.map(|node| node.life).collect();
        for watcher in watchers {
            let input = match told {
                Told::Put(name, record) => peers::Input::WatchPut {
                    name: name.clone(),
                    record: peer_record(record),
                },
                Told::Delete(name) => peers::Input::WatchDelete { name: name.clone() },
            };
            let at = self.now + TOLD + self.store_pause();
            // They come in order, however late.
            let last = self.told.entry(watcher).or_default();
            *last = at.max(*last);
            let at = *last;
            let told = Coming::Answered(self.now, Box::new(Coming::Peers(input)));
            self.for_life(watcher, at, told);
        }
    }

    /// Carries what the store said to a node.
    pub(super) fn answered(&mut self, host: usize, asked: Time, coming: Coming) {
        let pause = self.store_pause();
        let answer = Coming::Answered(asked, Box::new(coming));
        if pause.is_zero() {
            self.happen(host, answer);
        } else {
            self.later(host, pause, answer);
        }
    }

    fn note(&mut self, says: Says) {
        self.coverage.count("store says", &says);
    }

    /// Counts what comes after its time.
    pub(super) fn note_late(&mut self, asked: Time, coming: &Coming) {
        let took = self.now.saturating_since(asked);
        let is_late = took >= PublisherConfig::default().store_timeout;
        let is_late_read = took >= PeersConfig::default().answer_timeout;
        match coming {
            Coming::Publisher(_) if is_late => self.note(Says::LateAnswer),
            Coming::Peers(peers::Input::Fetched { .. }) if is_late_read => {
                self.note(Says::LateRecord);
            }
            Coming::Peers(peers::Input::WatchPut { .. }) if took >= SLOW_MIN => {
                self.note(Says::LateChange);
            }
            _ => {}
        }
    }
}
