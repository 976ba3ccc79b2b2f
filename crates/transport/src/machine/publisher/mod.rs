//! The publisher: the one writer of this engine's record (design §4).
//!
//! It owns the [`LocalRecord`]. Registrations of memory and changes of NICs are both [`Edit`]s of
//! it, so that none is lost; each one that changes anything makes a new generation. The latest
//! state is written until it is stored: a state that is overtaken before its turn is never
//! written, and no two requests to the store are ever out at once, so that order is kept.
//!
//! # Who may use what when
//!
//! *Bad news* needs nothing of this: gates are closed and endpoints cut before the edit arrives
//! here, and peers are told while the store is written. *Good news* goes by audience: a peer that
//! has acknowledged the generation may connect over a NIC that came back at once, everyone else
//! when the record is stored ([`Publisher::accepts`]). A store that is away cuts nothing.
//!
//! # Whose name it is
//!
//! Writing is conditional: the record must be absent or ours. At its first write a new instance
//! takes over what an earlier one left. Whoever finds a *later* instance in its own place
//! afterwards stops for good ([`Action::Superseded`]); one that finds an *earlier* instance writes
//! its own record again, and the other will find out. So of two live instances under one name the
//! older stops, and a dead one whose clock was ahead stops nobody.
//!
//! Deliberately not here: the store, encodings, timestamps, leases, connections to subscribers,
//! and what this engine knows of its peers ([`peers`](crate::machine::peers)).

mod io;
mod local;
#[cfg(test)]
pub(crate) mod states;
mod subscribers;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rerail_metadata::Version;
use rerail_metadata::descriptor::{InstanceId, SegmentDescriptor};

pub use io::{Action, Input, StoreAnswer, StoreFailure, StoreRequest, StoredRecord, SubscriberId};
pub use local::{Edit, EditError, KeyPair, LocalRecord, PublishOrder};
pub use subscribers::SUBSCRIBERS_MAX;

use self::subscribers::Subscribers;
use super::backoff::Backoff;
use super::ids::LocalNic;
use super::time::earliest;
use super::{Machine, Time};

/// Times and limits of a publisher.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PublisherConfig {
    /// Whether there is a store. Without one (`P2PHANDSHAKE`) the record is what peers ask for.
    pub has_store: bool,
    /// First wait after a failed write. 100 ms.
    pub backoff_min: Duration,
    /// Longest wait after a failed write. 5 s.
    pub backoff_max: Duration,
    /// How often the own record is read back; each time within ± a fifth. 30 s.
    pub read_back: Duration,
    /// How long a request to the store may be out before it is given up. 10 s.
    pub store_timeout: Duration,
    /// How often a subscriber is told the current generation. 1 s.
    pub heartbeat: Duration,
    /// How long a subscriber may leave a record unacknowledged. 5 s.
    pub acknowledge_timeout: Duration,
    /// Records under way to one subscriber at most; later ones are overtaken by the latest. 4.
    pub pushes_in_flight_max: u32,
}

impl Default for PublisherConfig {
    fn default() -> Self {
        Self {
            has_store: true,
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            read_back: Duration::from_secs(30),
            store_timeout: Duration::from_secs(10),
            heartbeat: Duration::from_secs(1),
            acknowledge_timeout: Duration::from_secs(5),
            pushes_in_flight_max: 4,
        }
    }
}

/// Whether a connection over a NIC may be accepted from somebody.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Acceptance {
    /// It may.
    Yes,
    /// Not before the peer has acknowledged that generation, or it is stored. Refuse with a reason
    /// that may be tried again.
    NotYet {
        /// The generation that says that the NIC is back.
        generation: u64,
    },
    /// The NIC is withdrawn. Refuse with that reason.
    Withdrawn,
    /// Another instance has the name, or this engine leaves.
    Closed,
}

/// Where the record in the store stands.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Stored {
    /// Not known: read before the next write.
    Unknown,
    /// There is none.
    Absent,
    /// Ours, or one that is to be taken over, with this version.
    At(Version),
}

/// The request that is out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Errand {
    Read,
    Write { generation: u64 },
    Delete,
    RpcMeta,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Working,
    Leaving,
    Over,
}

/// The publisher. See the [module](self).
#[derive(Clone, Debug)]
pub struct Publisher {
    config: PublisherConfig,
    instance: InstanceId,
    record: LocalRecord,
    generation: u64,
    rendered: Arc<SegmentDescriptor>,
    /// Generation in which each NIC last became usable.
    back_since: BTreeMap<LocalNic, u64>,
    subscribers: Subscribers,
    phase: Phase,
    stored: Stored,
    stored_generation: u64,
    /// Latest generation that was ever in the store: a store that lost it does not untell it.
    announced: u64,
    /// Whether a record of ours was ever stored: from then on a later instance supersedes us.
    was_stored: bool,
    rpc_meta_due: bool,
    read_due: bool,
    errand: Option<(u64, Errand, Time)>,
    tickets: u64,
    wait_until: Option<Time>,
    read_back_at: Time,
    backoff: Backoff,
    rng: SmallRng,
    out: VecDeque<Action>,
}

impl Publisher {
    /// A publisher that writes its first generation at once. `instance` must be new in each
    /// process.
    pub fn new(
        now: Time,
        config: PublisherConfig,
        instance: InstanceId,
        record: LocalRecord,
        seed: u64,
    ) -> Self {
        let rendered = Arc::new(record.render(instance, 1));
        let mut publisher = Self {
            config,
            instance,
            record,
            generation: 1,
            rendered,
            back_since: BTreeMap::new(),
            subscribers: Subscribers::default(),
            phase: Phase::Working,
            stored: Stored::Absent,
            stored_generation: 0,
            announced: 0,
            was_stored: false,
            rpc_meta_due: true,
            read_due: false,
            errand: None,
            tickets: 0,
            wait_until: None,
            read_back_at: now,
            backoff: Backoff::new(config.backoff_min, config.backoff_max),
            rng: SmallRng::seed_from_u64(seed),
            out: VecDeque::new(),
        };
        publisher.plan_read_back(now);
        publisher.advance(now);
        publisher
    }

    /// The instance that publishes.
    pub fn instance(&self) -> InstanceId {
        self.instance
    }

    /// The current generation. Never goes back.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The latest generation that is known to be in the store now; 0 if it has none of ours.
    pub fn stored_generation(&self) -> u64 {
        self.stored_generation
    }

    /// The current record, whether it is stored or not: what a peer that asks is told.
    pub fn descriptor(&self) -> &Arc<SegmentDescriptor> {
        &self.rendered
    }

    /// The same at the [largest](LocalRecord::render_largest) that it becomes.
    pub fn largest(&self, more: Option<&str>) -> SegmentDescriptor {
        self.record.render_largest(self.instance, more)
    }

    /// Subscribers that are being told.
    pub fn subscribers(&self) -> usize {
        self.subscribers.len()
    }

    /// Whether a connection over a local NIC may be accepted, from a subscriber or from anybody.
    pub fn accepts(&self, local: LocalNic, from: Option<SubscriberId>) -> Acceptance {
        if self.phase != Phase::Working {
            return Acceptance::Closed;
        }
        if !self.record.is_healthy(local) {
            return Acceptance::Withdrawn;
        }
        let generation = self.back_since.get(&local).copied().unwrap_or(1);
        let acknowledged = from
            .and_then(|id| self.subscribers.acknowledged(id))
            .unwrap_or(0);
        if generation <= self.announced.max(acknowledged) {
            Acceptance::Yes
        } else {
            Acceptance::NotYet { generation }
        }
    }

    fn go(&mut self, to: Phase) {
        #[cfg(test)]
        super::seen::follows_on(&self.phase, &to);
        self.phase = to;
    }

    fn set_stored(&mut self, to: Stored) {
        #[cfg(test)]
        super::seen::follows_on(&self.stored, &to);
        self.stored = to;
    }

    fn edit(&mut self, now: Time, edit: Edit) {
        let port = match &edit {
            Edit::Port { local, .. } => Some(*local),
            _ => None,
        };
        let was_healthy = port.is_some_and(|local| self.record.is_healthy(local));
        match self.record.apply(edit) {
            Err(error) => self.out.push_back(Action::EditRefused(error)),
            Ok(false) => {}
            Ok(true) => {
                self.generation += 1;
                if let Some(local) = port
                    && !was_healthy
                    && self.record.is_healthy(local)
                {
                    self.back_since.insert(local, self.generation);
                }
                self.rendered = Arc::new(self.record.render(self.instance, self.generation));
                self.push(now);
                // News shorten a long wait: what failed was another state.
                let soon = now + self.config.backoff_min;
                self.wait_until = self.wait_until.map(|until| until.min(soon));
            }
        }
    }

    fn push(&mut self, now: Time) {
        let (generation, rendered) = (self.generation, Arc::clone(&self.rendered));
        self.subscribers
            .push(now, generation, &rendered, &self.config, &mut self.out);
    }

    fn plan_read_back(&mut self, now: Time) {
        let nanos = u64::try_from(self.config.read_back.as_nanos()).unwrap_or(u64::MAX);
        let nanos = self.rng.random_range(nanos / 5 * 4..=nanos / 5 * 6);
        self.read_back_at = now + Duration::from_nanos(nanos);
    }

    /// Sends the next request to the store, if one is due and none is out.
    fn advance(&mut self, now: Time) {
        if self.phase == Phase::Over || self.errand.is_some() {
            return;
        }
        if !self.config.has_store {
            self.advance_without_store();
            return;
        }
        if self.wait_until.is_some_and(|until| until > now) {
            return;
        }
        self.wait_until = None;
        let dirty = self.stored_generation < self.generation;
        let leaving = self.phase == Phase::Leaving;
        let (errand, request) = match &self.stored {
            Stored::Unknown => (Errand::Read, StoreRequest::Read),
            Stored::At(version) if leaving => {
                (Errand::Delete, StoreRequest::Delete(version.clone()))
            }
            Stored::Absent if leaving => {
                self.over(Action::Left);
                return;
            }
            // The location first: whoever finds the segment then finds its owner.
            _ if self.rpc_meta_due => (Errand::RpcMeta, StoreRequest::RpcMeta),
            _ if self.read_due => (Errand::Read, StoreRequest::Read),
            Stored::Absent => {
                let generation = self.generation;
                let request = StoreRequest::Create(Arc::clone(&self.rendered));
                (Errand::Write { generation }, request)
            }
            Stored::At(version) if dirty => {
                let generation = self.generation;
                let request = StoreRequest::Swap(version.clone(), Arc::clone(&self.rendered));
                (Errand::Write { generation }, request)
            }
            Stored::At(_) => return,
        };
        self.tickets += 1;
        self.errand = Some((self.tickets, errand, now + self.config.store_timeout));
        self.out.push_back(Action::Store {
            ticket: self.tickets,
            request,
        });
    }

    fn advance_without_store(&mut self) {
        if self.phase == Phase::Leaving {
            self.over(Action::Left);
        } else if self.stored_generation < self.generation {
            self.written(self.generation);
        }
    }

    /// Says the last thing. What was to be said before and is not said yet is only in the way.
    fn over(&mut self, last: Action) {
        self.go(Phase::Over);
        self.errand = None;
        self.out.clear();
        self.out.push_back(last);
    }

    fn answered(&mut self, now: Time, ticket: u64, answer: StoreAnswer) {
        let Some((_, errand, _)) = self.errand.filter(|(waited, ..)| *waited == ticket) else {
            // An answer to a request that was given up. What it did is found by reading.
            self.set_stored(Stored::Unknown);
            return;
        };
        self.errand = None;
        #[cfg(test)]
        super::seen::follows_on(&errand, &states::Ending::from(&answer));
        match (errand, answer) {
            (Errand::Write { generation }, StoreAnswer::Written(version)) => {
                self.set_stored(version.map_or(Stored::Unknown, Stored::At));
                self.written(generation);
            }
            (Errand::Delete, StoreAnswer::Written(_)) => self.over(Action::Left),
            (Errand::Delete, StoreAnswer::Failed(StoreFailure::NotFound)) => {
                self.over(Action::Left);
            }
            (Errand::RpcMeta, StoreAnswer::Written(_)) => self.rpc_meta_due = false,
            (Errand::Read, StoreAnswer::Found(record)) => self.found(now, record),
            (Errand::Read, StoreAnswer::Failed(StoreFailure::NotFound)) => {
                self.read_due = false;
                self.plan_read_back(now);
                if self.was_stored {
                    // The store has lost it, and the location likely with it.
                    self.rpc_meta_due = true;
                }
                self.set_stored(Stored::Absent);
                self.stored_generation = 0;
            }
            (
                Errand::Write { .. } | Errand::Delete,
                StoreAnswer::Failed(StoreFailure::Conflict),
            ) => {
                // Somebody was there before: look who, at once the first time.
                self.set_stored(Stored::Unknown);
                let wait = self.backoff.next_wait(&mut self.rng);
                self.wait_until = (self.backoff.attempts() > 1).then(|| now + wait);
            }
            (_, StoreAnswer::Failed(failure)) => self.trouble(now, failure),
            (_, _) => {
                let failure = StoreFailure::Failed("an answer of another kind".into());
                self.trouble(now, failure);
            }
        }
    }

    fn written(&mut self, generation: u64) {
        self.backoff.reset();
        self.was_stored = true;
        self.announced = self.announced.max(generation);
        if self.stored_generation < generation {
            self.stored_generation = generation;
            self.out.push_back(Action::Stored { generation });
        }
    }

    fn found(&mut self, now: Time, record: StoredRecord) {
        self.read_due = false;
        self.plan_read_back(now);
        self.set_stored(Stored::At(record.version));
        match record.identity {
            // Ours; perhaps of a write whose answer was lost, perhaps rolled back by the store.
            Some((instance, generation)) if instance == self.instance => {
                self.stored_generation = self.stored_generation.min(generation);
                self.written(generation.min(self.generation));
            }
            // We have just started, and it was here before: it is taken over, or left alone.
            _ if !self.was_stored => {
                if self.phase == Phase::Leaving {
                    self.over(Action::Left);
                }
            }
            // An earlier instance: not dead after all. Ours is written again.
            Some((instance, _)) if instance < self.instance => {
                self.stored_generation = 0;
                self.rpc_meta_due = true;
            }
            identity => {
                let by = identity.map(|(instance, _)| instance);
                self.over(Action::Superseded { by });
            }
        }
    }

    fn trouble(&mut self, now: Time, failure: StoreFailure) {
        // A write that timed out may have happened.
        self.set_stored(Stored::Unknown);
        self.wait_until = Some(now + self.backoff.next_wait(&mut self.rng));
        self.out.push_back(Action::StoreTrouble {
            generation: self.generation,
            attempt: self.backoff.attempts(),
            failure,
        });
    }
}

impl Machine for Publisher {
    type Input = Input;
    type Action = Action;

    fn handle(&mut self, now: Time, input: Input) {
        if self.phase == Phase::Over {
            return;
        }
        match input {
            Input::Edit(edit) => {
                if self.phase == Phase::Working {
                    self.edit(now, edit);
                }
            }
            Input::Store { ticket, answer } => self.answered(now, ticket, answer),
            Input::StoreReconnected => {
                self.read_due = true;
                self.wait_until = None;
            }
            Input::Subscribed { subscriber } => {
                self.subscribers.add(now, subscriber, &mut self.out);
                self.push(now);
            }
            Input::Acknowledged {
                subscriber,
                generation,
            } => {
                self.subscribers
                    .acknowledge(now, subscriber, generation, &self.config);
                self.push(now);
            }
            Input::Unsubscribed { subscriber } => self.subscribers.remove(subscriber),
            Input::Leave => {
                self.go(Phase::Leaving);
                self.wait_until = None;
            }
        }
        self.advance(now);
    }

    fn handle_timeout(&mut self, now: Time) {
        if self.phase == Phase::Over {
            return;
        }
        let generation = self.generation;
        self.subscribers
            .handle_timeout(now, generation, &self.config, &mut self.out);
        if self.errand.is_some_and(|(.., until)| until <= now) {
            #[cfg(test)]
            states::timed_out(self);
            self.errand = None;
            self.trouble(
                now,
                StoreFailure::Failed("the store does not answer".into()),
            );
        }
        if self.config.has_store && self.read_back_at <= now {
            self.read_due = true;
            self.plan_read_back(now);
        }
        self.advance(now);
    }

    fn poll(&mut self) -> Option<Action> {
        self.out.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        if self.phase == Phase::Over {
            return None;
        }
        let errand = self.errand.map(|(.., until)| until);
        let store = earliest(errand, self.wait_until.filter(|_| self.errand.is_none()));
        let read_back = self.config.has_store.then_some(self.read_back_at);
        earliest(earliest(store, read_back), self.subscribers.next_timeout())
    }
}
