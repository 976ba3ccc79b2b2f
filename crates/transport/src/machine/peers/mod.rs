//! What this engine knows of its peers, and how it learns (design §4).
//!
//! A peer's record reaches us in three ways, each enough alone: over a *subscription* to the peer
//! itself (Rerail peers only), by the *store's watch* or conditional polling, and by a *refresh
//! after trouble*, of that peer only and within its own cool-down. Whatever the way, a record is
//! taken in only if it is newer than what is known: generations never go back, and an instance
//! that was seen to be replaced by a later one is never accepted again. That an *earlier* one has
//! the name is believed of the store only, asked since the later one was taken in, and not while
//! that one speaks to us: of two that live, the later writes its record again.
//!
//! Requests are bound to a [`PeerId`], one for each life of a peer. When another process takes the
//! name, [`Action::Retired`] ends them: addresses and keys may be equal by chance, so nothing is
//! replayed.
//!
//! An outage of the store drops nobody. "Not found" several times does, if the peer shows no sign
//! of life either.
//!
//! Deliberately not here: the store, connections, encodings, and what a changed NIC means for
//! rails and endpoints.

mod entry;
mod io;
#[cfg(test)]
pub(crate) mod states;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rerail_metadata::descriptor::{InstanceId, SegmentDescriptor};

pub use io::{Action, Fetched, Input, NicChange, Parting, PeerRecord, Refreshed, Trouble};

use self::entry::{Entry, Fetch, Judgement, Known, Subscription};
use super::backoff::Backoff;
use super::ids::PeerId;
use super::time::earliest;
use super::{Machine, Time};

/// The feature by which a peer says that it takes subscriptions.
pub const PUSH_FEATURE: &str = "push/1";

/// Times and limits of the view.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PeersConfig {
    /// Whether the store tells of changes. Where it does not, records are polled.
    pub has_watch: bool,
    /// How often a record is polled then, if its owner is not subscribed to. 5 s.
    pub poll: Duration,
    /// Least time between two readings of one peer's record for trouble. 1 s.
    pub cooldown: Duration,
    /// First wait after a reading that failed. 250 ms.
    pub backoff_min: Duration,
    /// Longest wait after a reading that failed. 30 s.
    pub backoff_max: Duration,
    /// How long a reading may be out, and a subscription be asked for. 10 s.
    pub answer_timeout: Duration,
    /// "Not found" in a row after which a peer without a sign of life is dropped. 3.
    pub missing_max: u32,
    /// Silence after which a subscription counts as lost. 3 s.
    pub heartbeat_lost: Duration,
    /// How long a heartbeat may speak of a generation that does not come, before the record is
    /// read. 500 ms.
    pub behind: Duration,
}

impl Default for PeersConfig {
    fn default() -> Self {
        Self {
            has_watch: true,
            poll: Duration::from_secs(5),
            cooldown: Duration::from_secs(1),
            backoff_min: Duration::from_millis(250),
            backoff_max: Duration::from_secs(30),
            answer_timeout: Duration::from_secs(10),
            missing_max: 3,
            heartbeat_lost: Duration::from_secs(3),
            behind: Duration::from_millis(500),
        }
    }
}

/// The view of all peers. See the [module](self).
#[derive(Clone, Debug)]
pub struct Peers {
    config: PeersConfig,
    entries: BTreeMap<String, Entry>,
    tickets: BTreeMap<u64, String>,
    next_ticket: u64,
    next_peer: u64,
    ignored: u64,
    rng: SmallRng,
    out: VecDeque<Action>,
}

impl Peers {
    /// Knows nobody yet.
    pub fn new(config: PeersConfig, seed: u64) -> Self {
        Self {
            config,
            entries: BTreeMap::new(),
            tickets: BTreeMap::new(),
            next_ticket: 0,
            next_peer: 0,
            ignored: 0,
            rng: SmallRng::seed_from_u64(seed),
            out: VecDeque::new(),
        }
    }

    fn known(&self, name: &str) -> Option<&Known> {
        self.entries
            .get(name)
            .and_then(|entry| entry.known.as_ref())
    }

    /// The peer that has a name now.
    pub fn peer(&self, name: &str) -> Option<PeerId> {
        self.known(name).map(|known| known.peer)
    }

    /// The record of a name, as it was taken in last.
    pub fn descriptor(&self, name: &str) -> Option<&Arc<SegmentDescriptor>> {
        self.known(name).map(|known| &known.descriptor)
    }

    /// Whether the store tells of changes. Some stores show only by an answer what they can do.
    pub fn has_watch(&self) -> bool {
        self.config.has_watch
    }

    /// Changes that: records are polled, or not any more, after their next reading.
    pub fn set_has_watch(&mut self, has_watch: bool) {
        self.config.has_watch = has_watch;
    }

    /// Whether the peer itself tells its record at the moment.
    pub fn is_subscribed(&self, name: &str) -> bool {
        let entry = self.entries.get(name);
        entry.is_some_and(|entry| matches!(entry.subscription, Subscription::Up { .. }))
    }

    /// Records that were not taken in: older, of a retired instance, or of another name.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    fn fetch(&mut self, now: Time, name: &str) {
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        match entry.fetch {
            Fetch::Out { .. } => entry.again = true,
            Fetch::Idle | Fetch::At(_) => {
                self.next_ticket += 1;
                let ticket = self.next_ticket;
                let until = now + self.config.answer_timeout;
                entry.set_fetch(Fetch::Out { ticket, until });
                entry.cooldown_until = now + self.config.cooldown;
                self.tickets.insert(ticket, name.to_owned());
                self.out.push_back(Action::Fetch {
                    ticket,
                    name: name.to_owned(),
                });
            }
        }
    }

    /// Reads soon: at once, or when the cool-down is over.
    fn doubt(&mut self, now: Time, name: &str) {
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        match entry.fetch {
            Fetch::Out { .. } => entry.again = true,
            Fetch::Idle | Fetch::At(_) if now >= entry.cooldown_until => self.fetch(now, name),
            Fetch::Idle => entry.set_fetch(Fetch::At(entry.cooldown_until)),
            Fetch::At(at) => entry.set_fetch(Fetch::At(at.min(entry.cooldown_until))),
        }
    }

    /// Reads at that time, if not before.
    fn read_by(&mut self, at: Time, name: &str) {
        if let Some(entry) = self.entries.get_mut(name) {
            match entry.fetch {
                Fetch::Out { .. } => entry.again = true,
                Fetch::Idle => entry.set_fetch(Fetch::At(at)),
                Fetch::At(earlier) => entry.set_fetch(Fetch::At(earlier.min(at))),
            }
        }
    }

    /// Takes a record in if it is newer; returns whether it was. With the ticket of the reading
    /// that brought it.
    fn learn(&mut self, now: Time, name: &str, record: PeerRecord, ticket: Option<u64>) -> bool {
        let Some(entry) = self.entries.get_mut(name) else {
            return false;
        };
        if record.descriptor.name != name {
            self.ignored += 1;
            return false;
        }
        let speaks_until = entry.spoke_at.map(|at| at + self.config.heartbeat_lost);
        let speaks_until = speaks_until.filter(|until| *until > now);
        let judgement = entry.judge(&record);
        #[cfg(test)]
        super::seen::happened("judgement", &judgement);
        match judgement {
            Judgement::Retired => {
                self.ignored += 1;
                return false;
            }
            Judgement::Old => {
                let older = record.descriptor.rerail.as_ref().is_some_and(|member| {
                    entry
                        .known
                        .as_ref()
                        .is_some_and(|known| member.generation < known.generation())
                });
                self.ignored += u64::from(older);
                return false;
            }
            Judgement::Newer => {}
            // It will find its record overwritten, and write it again.
            Judgement::Earlier if let Some(until) = speaks_until => {
                self.ignored += 1;
                self.read_by(until, name);
                return false;
            }
            // What says so may be late itself, except a reading that was asked for since.
            Judgement::Earlier | Judgement::Doubtful
                if ticket.is_none_or(|ticket| ticket <= entry.asked_before) =>
            {
                self.ignored += 1;
                if ticket.is_some() {
                    entry.again = true;
                } else {
                    self.doubt(now, name);
                }
                return false;
            }
            Judgement::Other | Judgement::Earlier | Judgement::Doubtful => {
                self.part(name, Parting::Replaced);
            }
        }
        let asked_before = self.next_ticket;
        let Some(entry) = self.entries.get_mut(name) else {
            return false;
        };
        let peer = match &entry.known {
            Some(known) => known.peer,
            None => {
                entry.asked_before = asked_before;
                self.next_peer += 1;
                PeerId(self.next_peer)
            }
        };
        let descriptor = Arc::clone(&record.descriptor);
        let nics = entry.take(peer, record);
        self.out.push_back(Action::Updated {
            name: name.to_owned(),
            peer,
            descriptor,
            nics,
        });
        self.subscribe(now, name);
        true
    }

    /// Ends what is known of a name.
    fn part(&mut self, name: &str, parting: Parting) {
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        if let Some(peer) = entry.part() {
            entry.asked_before = self.next_ticket;
            self.out.push_back(Action::Retired {
                name: name.to_owned(),
                peer,
                parting,
            });
        }
        let had = entry.subscription;
        entry.set_subscription(Subscription::None);
        entry.subscribe_backoff.reset();
        if matches!(had, Subscription::Asked { .. } | Subscription::Up { .. }) {
            self.out.push_back(Action::Unsubscribe {
                name: name.to_owned(),
            });
        }
    }

    fn subscribe(&mut self, now: Time, name: &str) {
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        let Some(known) = &entry.known else {
            return;
        };
        let takes = known.descriptor.rerail.as_ref();
        if entry.subscription == Subscription::None
            && takes.is_some_and(|member| member.has_feature(PUSH_FEATURE))
        {
            let until = now + self.config.answer_timeout;
            let descriptor = Arc::clone(&known.descriptor);
            entry.set_subscription(Subscription::Asked { until });
            self.out.push_back(Action::Subscribe {
                name: name.to_owned(),
                descriptor,
            });
        }
    }

    fn subscription_lost(&mut self, now: Time, name: &str) {
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        if matches!(
            entry.subscription,
            Subscription::Asked { .. } | Subscription::Up { .. }
        ) {
            let at = now + entry.subscribe_backoff.next_wait(&mut self.rng);
            entry.set_subscription(Subscription::Retry { at });
            entry.spoke_at = None;
            // The peer may have been restarted, or gone.
            self.doubt(now, name);
        }
    }

    fn fetched(&mut self, now: Time, ticket: u64, result: Fetched) {
        let Some(name) = self.tickets.remove(&ticket) else {
            return;
        };
        let Some(entry) = self.entries.get_mut(&name) else {
            return;
        };
        if !matches!(entry.fetch, Fetch::Out { ticket: out, .. } if out == ticket) {
            return;
        }
        entry.set_fetch(Fetch::Idle);
        let outcome = match result {
            Fetched::Found(record) if record.descriptor.name == name => {
                entry.missing = 0;
                entry.fetch_backoff.reset();
                if self.learn(now, &name, record, Some(ticket)) {
                    Refreshed::Newer
                } else {
                    Refreshed::Same
                }
            }
            Fetched::NotFound => {
                self.not_found(now, &name);
                Refreshed::NotFound
            }
            Fetched::Unavailable | Fetched::Found(_) => {
                // The record at hand is kept: it is needed most when the store is away.
                let at = now + entry.fetch_backoff.next_wait(&mut self.rng);
                entry.set_fetch(Fetch::At(at));
                Refreshed::Unavailable
            }
        };
        #[cfg(test)]
        super::seen::happened("reading", &outcome);
        let Some(entry) = self.entries.get_mut(&name) else {
            return;
        };
        let polls =
            !self.config.has_watch && !matches!(entry.subscription, Subscription::Up { .. });
        entry.poll_at = polls.then(|| now + self.config.poll);
        let again = std::mem::take(&mut entry.again);
        if again {
            entry.set_fetch(match entry.fetch {
                Fetch::At(at) => Fetch::At(at.max(entry.cooldown_until)),
                _ => Fetch::At(entry.cooldown_until),
            });
        }
        // A reading that was under way when trouble came may be older than the trouble: unless it
        // brought something new, the question is answered by the next.
        if (!again || outcome == Refreshed::Newer) && std::mem::take(&mut entry.asked) {
            self.out.push_back(Action::Refreshed { name, outcome });
        }
    }

    fn not_found(&mut self, now: Time, name: &str) {
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        if entry.missing == 0 {
            entry.missing_since = now;
        }
        entry.missing = entry.missing.saturating_add(1);
        let alive = entry.alive_at.is_some_and(|at| at >= entry.missing_since);
        if alive {
            // It is there, whatever the store says: its owner will write the record again.
            entry.missing = 0;
        }
        let at = now
            + entry
                .fetch_backoff
                .next_wait(&mut self.rng)
                .max(self.config.cooldown);
        entry.set_fetch(Fetch::At(at));
        if entry.missing >= self.config.missing_max {
            // Its instance is not retired: a store that lost the record gets it again.
            self.part(name, Parting::Withdrawn);
        } else if entry.known.is_some() {
            self.out.push_back(Action::AskAlive {
                name: name.to_owned(),
            });
        }
    }

    fn heartbeat(&mut self, now: Time, name: &str, instance: InstanceId, generation: u64) {
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        if let Subscription::Up { heard_at } = &mut entry.subscription {
            *heard_at = now;
        }
        let Some(known) = &entry.known else {
            return;
        };
        if known.instance() == Some(instance) {
            (entry.alive_at, entry.spoke_at) = (Some(now), Some(now));
            if generation > known.generation() {
                entry.behind_since.get_or_insert(now);
            } else {
                entry.behind_since = None;
            }
        } else if !entry.is_retired(instance) {
            self.doubt(now, name);
        }
    }

    fn entry_due(&mut self, now: Time, name: &str) {
        let config = self.config;
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        match entry.fetch {
            Fetch::At(at) if at <= now => self.fetch(now, name),
            Fetch::Out { ticket, until } if until <= now => {
                self.fetched(now, ticket, Fetched::Unavailable);
            }
            Fetch::Idle if entry.poll_at.is_some_and(|at| at <= now) => {
                entry.poll_at = None;
                self.fetch(now, name);
            }
            _ => {}
        }
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        if entry
            .behind_since
            .is_some_and(|since| since + config.behind <= now)
        {
            entry.behind_since = None;
            self.doubt(now, name);
        }
        let Some(entry) = self.entries.get_mut(name) else {
            return;
        };
        match entry.subscription {
            Subscription::Asked { until } if until <= now => {
                self.out.push_back(Action::Unsubscribe {
                    name: name.to_owned(),
                });
                self.subscription_lost(now, name);
            }
            Subscription::Up { heard_at } if heard_at + config.heartbeat_lost <= now => {
                self.out.push_back(Action::Unsubscribe {
                    name: name.to_owned(),
                });
                self.subscription_lost(now, name);
            }
            Subscription::Retry { at } if at <= now => {
                entry.set_subscription(Subscription::None);
                self.subscribe(now, name);
            }
            _ => {}
        }
    }

    fn entry_timeout(&self, entry: &Entry) -> Option<Time> {
        entry.next_timeout(self.config.heartbeat_lost, self.config.behind)
    }
}

impl Machine for Peers {
    type Input = Input;
    type Action = Action;

    fn handle(&mut self, now: Time, input: Input) {
        match input {
            Input::Open { name } => {
                if !self.entries.contains_key(&name) {
                    let backoff = Backoff::new(self.config.backoff_min, self.config.backoff_max);
                    self.entries
                        .insert(name.clone(), Entry::new(backoff, backoff));
                    self.fetch(now, &name);
                }
            }
            Input::Close { name } => {
                self.part(&name, Parting::Closed);
                self.entries.remove(&name);
                self.tickets.retain(|_, of| *of != name);
            }
            Input::Fetched { ticket, result } => self.fetched(now, ticket, result),
            Input::WatchPut { name, record } => {
                if let Some(entry) = self.entries.get_mut(&name) {
                    entry.missing = 0;
                }
                self.learn(now, &name, record, None);
            }
            Input::WatchDelete { name } => self.doubt(now, &name),
            Input::WatchResync => {
                // Not all in one instant: a store that has just come back has enough to do.
                let spread = u64::try_from(self.config.cooldown.as_nanos()).unwrap_or(u64::MAX);
                for entry in self.entries.values_mut() {
                    let at = now + Duration::from_nanos(self.rng.random_range(0..=spread));
                    match entry.fetch {
                        Fetch::Out { .. } => entry.again = true,
                        Fetch::At(earlier) => entry.set_fetch(Fetch::At(earlier.min(at))),
                        Fetch::Idle => entry.set_fetch(Fetch::At(at)),
                    }
                }
            }
            Input::Subscribed { name } => {
                if let Some(entry) = self.entries.get_mut(&name)
                    && matches!(entry.subscription, Subscription::Asked { .. })
                {
                    entry.set_subscription(Subscription::Up { heard_at: now });
                    entry.subscribe_backoff.reset();
                    entry.poll_at = None;
                }
            }
            Input::SubscriptionLost { name } => self.subscription_lost(now, &name),
            Input::Pushed { name, record } => {
                if let Some(entry) = self.entries.get_mut(&name)
                    && let Subscription::Up { heard_at } = &mut entry.subscription
                {
                    *heard_at = now;
                    entry.alive_at = Some(now);
                } else {
                    self.ignored += 1;
                    return;
                }
                let by = record
                    .descriptor
                    .rerail
                    .as_ref()
                    .map(|member| member.instance);
                self.learn(now, &name, record, None);
                if let Some(entry) = self.entries.get_mut(&name)
                    && entry.known.as_ref().and_then(Known::instance) == by
                {
                    entry.spoke_at = Some(now);
                }
                // Whatever was pushed: acknowledged is what is taken in.
                if let Some(known) = self.known(&name)
                    && let Some(instance) = known.instance()
                {
                    let generation = known.generation();
                    self.out.push_back(Action::Acknowledge {
                        name,
                        instance,
                        generation,
                    });
                }
            }
            Input::Heartbeat {
                name,
                instance,
                generation,
            } => self.heartbeat(now, &name, instance, generation),
            Input::Trouble { name, trouble } => {
                if let Some(entry) = self.entries.get_mut(&name) {
                    // Only a refused access waits for the answer.
                    entry.asked |= trouble == Trouble::RemoteAccess;
                    self.doubt(now, &name);
                }
            }
            Input::Alive { name } => {
                if let Some(entry) = self.entries.get_mut(&name) {
                    entry.alive_at = Some(now);
                }
            }
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        let is_due = |(name, entry): (&String, &Entry)| {
            self.entry_timeout(entry)
                .is_some_and(|due| due <= now)
                .then(|| name.clone())
        };
        let due: Vec<_> = self.entries.iter().filter_map(is_due).collect();
        for name in due {
            self.entry_due(now, &name);
        }
    }

    fn poll(&mut self) -> Option<Action> {
        self.out.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        let each = self.entries.values().map(|entry| self.entry_timeout(entry));
        each.fold(None, earliest)
    }
}
