//! What this engine knows of its peers: the driver of the [`Peers`] machine.
//!
//! Segments that are open are of interest. Their records come over subscriptions, by the store's
//! watch, and by reading; whatever the way, the machine says which are taken in. What a record
//! means is carried out here: rails hear of NICs that came or went, and requests to a process that
//! is no more end.
//!
//! Opening a segment always reads its record, since who was told "it is registered" must find the
//! memory. A store that is away does not hinder it for a peer that is known.
//!
//! Deliberately not here: which record is newer and when one is read (the machine), how a record
//! is read ([`Directory`]), and what a request does after a refused access ([`crate::batch`]).

mod life;
mod listening;
mod watching;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rerail_metadata::descriptor::InstanceId;
use rerail_metadata::{MetadataStore, WatchKind};
use rerail_transport::TransferError;
use rerail_transport::event::{Event, Events};
use rerail_transport::machine::Machine;
use rerail_transport::machine::peers::{
    Action, Fetched, Input, NicChange, Parting, PeerRecord, Peers, PeersConfig, Trouble,
};
use rerail_transport::rdma::{Clock, RdmaTransport};
use rerail_transport::rpc::Standing;
use tokio::sync::{Notify, Semaphore};

pub(crate) use life::{FoundReach, Life, Offered, Reach, ReachKey};
use listening::Listening;

use crate::directory::Directory;
use crate::publication::Publication;
use crate::segment::Route;
use crate::{EngineError, Result};

/// Peers of interest at most.
const PEERS_MAX: usize = 65_536;
/// Records that are read at once.
const READS_MAX: usize = 64;
/// How often peers that nobody uses are looked for.
const SWEEP: Duration = Duration::from_secs(15);
/// How long a peer is remembered after it was opened, though nobody uses it.
const REMEMBERED: Duration = Duration::from_secs(60);

/// The view. Clones share it.
#[derive(Clone)]
pub(crate) struct PeerView {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Clock,
    directory: Directory,
    own: Publication,
    /// Weak, because it asks us for records.
    rails: OnceLock<Weak<RdmaTransport>>,
    state: Mutex<State>,
    telling: Mutex<()>,
    /// The store's watch is followed.
    watching: AtomicBool,
    /// There is something to do.
    touched: Notify,
    reads: Semaphore,
}

struct State {
    clock: Clock,
    events: Events,
    machine: Peers,
    opened: BTreeMap<String, Opened>,
    /// Not bounded by itself: the machine has one reading, subscription and question at a time for
    /// each peer.
    todo: VecDeque<Todo>,
}

/// A name of interest.
struct Opened {
    life: Option<Arc<Life>>,
    /// When it was opened last.
    at: Instant,
}

/// What is to be done without the lock, in order.
enum Todo {
    Fetch { ticket: u64, name: String },
    Subscribe { name: String },
    Unsubscribe { name: String },
    Acknowledge { name: String, taken: Standing },
    AskAlive { name: String },
    Parted(Arc<Life>),
    Nics(Arc<Life>, Vec<(String, NicChange)>),
}

impl PeerView {
    /// Knows nobody yet.
    pub(crate) fn new(clock: Clock, directory: Directory, own: Publication) -> Self {
        let tells = directory
            .store()
            .is_some_and(|(store, _)| matches!(store.capabilities().watch, WatchKind::Events));
        let config = PeersConfig {
            has_watch: tells,
            ..PeersConfig::default()
        };
        Self {
            shared: Arc::new(Shared {
                clock,
                directory,
                rails: OnceLock::new(),
                state: Mutex::new(State {
                    clock,
                    events: own.events().clone(),
                    machine: Peers::new(config, rand::random()),
                    opened: BTreeMap::new(),
                    todo: VecDeque::new(),
                }),
                own,
                telling: Mutex::new(()),
                watching: AtomicBool::new(false),
                touched: Notify::new(),
                reads: Semaphore::new(READS_MAX),
            }),
        }
    }

    /// Tells `rails` of NICs and peers that come and go. Only the first call counts.
    pub(crate) fn set_rails(&self, rails: &Arc<RdmaTransport>) {
        let _ = self.shared.rails.set(Arc::downgrade(rails));
    }

    /// The peer that has a name: its record is read afresh, unless only the store cannot be asked
    /// and the peer is known.
    pub(crate) async fn open(&self, name: &str) -> Result<Arc<Life>> {
        let ticket = self.begin(name)?;
        let read = self.read(name).await;
        if let Some(ticket) = ticket {
            let result = fetched(&read);
            self.feed(Input::Fetched { ticket, result });
        }
        let name = name.to_owned();
        match read {
            Ok(record) => {
                self.feed(Input::WatchPut {
                    name: name.clone(),
                    record,
                });
                self.life(&name).ok_or_else(|| EngineError::Peer {
                    peer: name,
                    what: "record",
                    reason: "it is one of a process that has been replaced".into(),
                })
            }
            Err(error) => {
                let known = self.life(&name);
                let is_missing = matches!(&error, EngineError::Metadata(e) if e.is_not_found());
                if is_missing {
                    self.feed(Input::WatchDelete { name: name.clone() });
                }
                let store_only = match &error {
                    EngineError::Metadata(error) => error.is_retryable(),
                    _ => false,
                };
                // One that tells its record itself is there, whatever the store has lost.
                let told = is_missing && self.state().machine.is_subscribed(&name);
                match known.filter(|_| store_only || told) {
                    Some(life) => {
                        tracing::debug!(%error, name, "opened by the record at hand");
                        Ok(life)
                    }
                    None => Err(error),
                }
            }
        }
    }

    /// Work towards a peer failed in a way that a stale record would explain. Never blocks.
    pub(crate) fn trouble(&self, name: &str, trouble: Trouble) {
        let name = name.to_owned();
        self.feed(Input::Trouble { name, trouble });
    }

    /// The peer that has a name now, if it is known.
    pub(crate) fn life(&self, name: &str) -> Option<Arc<Life>> {
        self.state().opened.get(name)?.life.clone()
    }

    /// Carries out what the machine wants, for ever.
    pub(crate) async fn run(self) {
        self.watch_if_told();
        let mut listening = HashMap::new();
        let mut sweep = tokio::time::interval(SWEEP);
        loop {
            while let Some(todo) = self.next() {
                self.carry_out(todo, &mut listening);
            }
            let due = self.state().machine.next_timeout();
            let sleep = async {
                match due {
                    Some(due) => {
                        let due = self.shared.clock.instant(due);
                        tokio::time::sleep_until(due.into()).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.shared.touched.notified() => {}
                () = sleep => {
                    let now = self.shared.clock.now();
                    let mut state = self.state();
                    state.machine.handle_timeout(now);
                    state.settle(None);
                }
                _ = sweep.tick() => self.sweep(&mut self.state(), REMEMBERED),
            }
        }
    }

    fn next(&self) -> Option<Todo> {
        self.state().todo.pop_front()
    }

    fn carry_out(&self, todo: Todo, listening: &mut HashMap<String, Listening>) {
        match todo {
            Todo::Fetch { ticket, name } => {
                let view = self.clone();
                tokio::spawn(async move {
                    // Never closed.
                    let _place = view.shared.reads.acquire().await;
                    let result = fetched(&view.read(&name).await);
                    view.feed(Input::Fetched { ticket, result });
                });
            }
            Todo::Subscribe { name } => {
                let task = Listening::start(self.clone(), name.clone());
                listening.insert(name, task);
            }
            Todo::Unsubscribe { name } => {
                listening.remove(&name);
            }
            Todo::Acknowledge { name, taken } => {
                if let Some(listening) = listening.get(&name) {
                    listening.acknowledge(taken);
                }
            }
            Todo::AskAlive { name } => {
                let view = self.clone();
                tokio::spawn(async move {
                    match view.shared.directory.probe(&name).await {
                        Ok(()) => view.feed(Input::Alive { name }),
                        Err(error) => tracing::debug!(%error, "no sign of life"),
                    }
                });
            }
            Todo::Parted(life) => self.part(&life),
            Todo::Nics(life, changes) => self.tell_rails(&life, &changes),
        }
    }

    /// Ends what is bound to a life that is over.
    fn part(&self, life: &Life) {
        // First, so that requests end with this reason.
        life.end();
        let failure = life.failure();
        let is_gone = failure.is_some();
        let is_restarted = matches!(failure, Some(TransferError::PeerRestarted { .. }));
        for reach in life.reaches() {
            match (reach.route(), self.rails()) {
                (Route::Rdma, Some(rails)) if is_restarted => rails.peer_restarted(reach.peer()),
                (Route::Rdma, Some(rails)) if is_gone => rails.peer_gone(reach.peer()),
                (Route::Rdma, Some(rails)) => rails.forget_peer(reach.peer()),
                (Route::Tcp(peer), _) if is_gone => peer.close(),
                // Its connections end by themselves when they are idle.
                (Route::Tcp(_) | Route::Rdma, _) => {}
            }
        }
    }

    /// Tells the rails which NICs of a peer came or went.
    fn tell_rails(&self, life: &Life, changes: &[(String, NicChange)]) {
        let Some(rails) = self.rails() else {
            return;
        };
        let _in_order = self.telling();
        let down = life.down();
        for reach in life.reaches() {
            if let Route::Rdma = reach.route() {
                let down: Vec<u32> = down.iter().filter_map(|name| reach.nic(name)).collect();
                rails.peer_grown(reach.peer(), &reach.nics(), &down);
            }
            for (name, change) in changes {
                let Some(nic) = reach.nic(name) else {
                    continue;
                };
                tracing::debug!(peer = life.name(), nic = name, ?change, "a peer's NIC");
                let peer = reach.peer();
                match change {
                    NicChange::Up => rails.peer_nic(peer, nic, true),
                    NicChange::Down => rails.peer_nic(peer, nic, false),
                    // What uses its old address is cut, and the new one tried at once.
                    NicChange::Moved => {
                        rails.peer_nic(peer, nic, false);
                        rails.peer_nic(peer, nic, true);
                    }
                }
            }
        }
    }

    /// Held while rails are told what stands in a record: what was read of it must not be told
    /// after something newer.
    fn telling(&self) -> MutexGuard<'_, ()> {
        // It guards nothing that could be broken.
        let telling = self.shared.telling.lock();
        telling.unwrap_or_else(PoisonError::into_inner)
    }

    fn rails(&self) -> Option<Arc<RdmaTransport>> {
        self.shared.rails.get().and_then(Weak::upgrade)
    }

    /// Tells the rails of a new way which of the peer's NICs are withdrawn, and which ways nobody
    /// uses any more.
    pub(crate) fn reached(&self, life: &Life, found: FoundReach) -> Arc<Reach> {
        let FoundReach {
            reach,
            is_new,
            unused,
        } = found;
        if let Some(rails) = self.rails() {
            if let Route::Rdma = reach.route()
                && is_new
            {
                let _in_order = self.telling();
                // As they are now: a NIC may have come back since the way was made.
                let down = life.down();
                let down: Vec<u32> = down.iter().filter_map(|name| reach.nic(name)).collect();
                // The record may have got more NICs since the rails were made.
                rails.peer_grown(reach.peer(), &reach.nics(), &down);
                for nic in down {
                    rails.peer_nic(reach.peer(), nic, false);
                }
            }
            for reach in unused {
                rails.forget_peer(reach.peer());
            }
        }
        reach
    }

    /// Makes a name one of interest. The ticket is that of its first reading, which is the
    /// caller's to make.
    fn begin(&self, name: &str) -> Result<Option<u64>> {
        let now = self.shared.clock.now();
        let mut state = self.state();
        if let Some(opened) = state.opened.get_mut(name) {
            opened.at = Instant::now();
            return Ok(None);
        }
        if state.opened.len() >= PEERS_MAX {
            self.sweep(&mut state, Duration::ZERO);
            if state.opened.len() >= PEERS_MAX {
                return Err(EngineError::Invalid {
                    what: "segment",
                    reason: format!("{PEERS_MAX} others are open"),
                });
            }
        }
        let opened = Opened {
            life: None,
            at: Instant::now(),
        };
        state.opened.insert(name.to_owned(), opened);
        let open = Input::Open {
            name: name.to_owned(),
        };
        state.machine.handle(now, open);
        let ticket = state.settle(Some(name));
        drop(state);
        self.shared.touched.notify_one();
        Ok(ticket)
    }

    /// Forgets peers that nobody uses and nobody has opened for `remembered`.
    fn sweep(&self, state: &mut State, remembered: Duration) {
        let idle = |(name, opened): (&String, &Opened)| {
            let used = opened
                .life
                .as_ref()
                .is_some_and(|life| Arc::strong_count(life) > 1);
            (!used && opened.at.elapsed() >= remembered).then(|| name.clone())
        };
        let idle: Vec<String> = state.opened.iter().filter_map(idle).collect();
        let now = self.shared.clock.now();
        for name in idle {
            state
                .machine
                .handle(now, Input::Close { name: name.clone() });
            state.settle(None);
            state.opened.remove(&name);
        }
    }

    /// A peer's record and its location.
    async fn read(&self, name: &str) -> Result<PeerRecord> {
        let own = self.shared.own.descriptor();
        let read = self.shared.directory.record(name, &own).await;
        // A server over HTTP shows by its first answer what it can do.
        self.watch_if_told();
        read
    }

    /// Follows the store's watch from now on, if the store tells of changes.
    fn watch_if_told(&self) {
        if let Some((store, keys)) = self.shared.directory.store()
            && self.is_told(store.as_ref())
            && !self.shared.watching.swap(true, Ordering::AcqRel)
        {
            tokio::spawn(self.clone().watch(Arc::clone(store), keys.clone()));
        }
    }

    /// Whether a store tells of changes. Where it does not, the machine polls.
    fn is_told(&self, store: &dyn MetadataStore) -> bool {
        let told = matches!(store.capabilities().watch, WatchKind::Events);
        self.state().machine.set_has_watch(told);
        told
    }

    fn feed(&self, input: Input) {
        let now = self.shared.clock.now();
        let mut state = self.state();
        state.machine.handle(now, input);
        state.settle(None);
        drop(state);
        self.shared.touched.notify_one();
    }

    fn is_of_interest(&self, name: &str) -> bool {
        self.state().opened.contains_key(name)
    }

    fn directory(&self) -> &Directory {
        &self.shared.directory
    }

    fn own_instance(&self) -> InstanceId {
        self.shared.own.instance()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The machine does not panic half-way; a poisoned one is whole.
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes the machine's actions: lives change at once, the rest is to be done. The ticket of a
    /// reading of the peer called `own` is returned, which its caller makes.
    fn settle(&mut self, own: Option<&str>) -> Option<u64> {
        let mut ticket_of_own = None;
        while let Some(action) = self.machine.poll() {
            let todo = match action {
                Action::Fetch { ticket, name } if own == Some(name.as_str()) => {
                    ticket_of_own = Some(ticket);
                    continue;
                }
                Action::Fetch { ticket, name } => Todo::Fetch { ticket, name },
                Action::Subscribe { name, .. } => Todo::Subscribe { name },
                Action::Unsubscribe { name } => Todo::Unsubscribe { name },
                Action::AskAlive { name } => Todo::AskAlive { name },
                Action::Acknowledge {
                    name,
                    instance,
                    generation,
                } => Todo::Acknowledge {
                    name,
                    taken: Standing {
                        instance,
                        generation,
                    },
                },
                Action::Retired { name, parting, .. } => {
                    let opened = self.opened.get_mut(&name);
                    let Some(life) = opened.and_then(|opened| opened.life.take()) else {
                        continue;
                    };
                    let why = match parting {
                        Parting::Replaced => Some("replaced"),
                        Parting::Withdrawn => Some("withdrawn"),
                        Parting::Closed => None,
                    };
                    if let Some(why) = why {
                        tracing::warn!(name, why, "a peer is gone");
                        let peer = name.clone();
                        let parted = Event::PeerParted { peer, why };
                        self.events.tell(self.clock.now(), &parted);
                    }
                    life.part(parting);
                    Todo::Parted(life)
                }
                Action::Updated {
                    name,
                    descriptor,
                    nics,
                    ..
                } => {
                    let Some(opened) = self.opened.get_mut(&name) else {
                        continue;
                    };
                    let member = descriptor.rerail.as_ref();
                    let record = Event::PeerRecord {
                        peer: name.clone(),
                        instance: member.map(|member| member.instance.to_string()),
                        generation: member.map_or(0, |member| member.generation),
                    };
                    self.events.tell(self.clock.now(), &record);
                    let life = opened
                        .life
                        .get_or_insert_with(|| Life::new(Arc::clone(&descriptor)));
                    life.take(descriptor, &nics);
                    Todo::Nics(Arc::clone(life), nics)
                }
                Action::Refreshed { name, outcome } => {
                    tracing::debug!(name, ?outcome, "a record was asked for after trouble");
                    if let Some(life) = self.opened.get(&name).and_then(|o| o.life.as_ref()) {
                        life.refreshed();
                    }
                    continue;
                }
            };
            self.todo.push_back(todo);
        }
        ticket_of_own
    }
}

/// What the machine is told of a reading.
fn fetched(read: &Result<PeerRecord>) -> Fetched {
    match read {
        Ok(record) => Fetched::Found(record.clone()),
        Err(EngineError::Metadata(error)) if error.is_not_found() => Fetched::NotFound,
        Err(error) => {
            tracing::debug!(%error, "a record cannot be read");
            Fetched::Unavailable
        }
    }
}

#[cfg(test)]
mod tests {
    use rerail_metadata::descriptor::{JsonForm, Protocol, SegmentDescriptor};
    use rerail_metadata::{KeySpace, MemoryStore};
    use rerail_transport::machine::publisher::{LocalRecord, PublishOrder};
    use rerail_transport::rpc::RpcClient;

    use super::*;
    use crate::shy::Shy;

    #[tokio::test]
    async fn a_store_that_shows_late_that_it_tells_of_changes_is_watched() {
        let store = MemoryStore::new("s");
        let keys = KeySpace::default();
        let shy = Arc::new(Shy::new(store.client("reader")));
        let directory = Directory::new(Some((shy, keys.clone())), RpcClient::default());
        let clock = Clock::start();
        let base = SegmentDescriptor::new("own", Protocol::tcp());
        let record = LocalRecord::new(base, Vec::new(), [], PublishOrder::Fixed);
        let own = Publication::new(clock, InstanceId([1; 16]), record, None, Events::default());
        let view = PeerView::new(clock, directory, own);
        tokio::spawn(view.clone().run());
        let put = async |port: u16| {
            let mut record = SegmentDescriptor::new("peer", Protocol::tcp());
            record.tcp_data_port = port;
            let text = record.to_json(JsonForm::Line);
            let key = keys.segment("peer");
            let put = store.put(&key, text.into(), None);
            put.await.expect("stored");
        };
        put(1).await;
        assert!(!view.state().machine.has_watch());
        let life = view.open("peer").await.expect("it is there");
        assert!(view.state().machine.has_watch());
        assert_eq!(life.descriptor().tcp_data_port, 1);
        put(2).await;
        let is_new = || life.descriptor().tcp_data_port == 2;
        let told = tokio::time::timeout(Duration::from_secs(20), life.news.wait_async(is_new));
        told.await.expect("it is told");
    }
}
