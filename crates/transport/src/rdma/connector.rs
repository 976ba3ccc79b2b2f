//! Which endpoint a rail, a peer's request or a report of a data thread belongs to.
//!
//! There is at most one endpoint at a time between a local NIC and a peer's NIC; the next one is
//! made as soon as the last begins to close. Each endpoint is a task around an [`Endpoint`]
//! machine. Everything here runs on the control runtime and is never waited for by a data thread.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rerail_verbs::{AsyncEventKind, ObjectId, WcStatus};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::clock::Clock;
use super::config::RdmaConfig;
use super::endpoint::{CLOSED, CloseCause, Endpoint, Input, Offer, Parties, is_same};
use super::inbox::{EndpointKey, Inbox, Leftover, Order};
use super::keeper::{Binding, RailKeeper};
use super::nic::Nic;
use super::nics::{Nics, Seat};
use super::opening::Opening;
use super::outside::{Outside, Tasks};
use super::paths::{Paths, Row, Way};
use super::rail::Rail;
use super::signaling::Signaling;
use crate::machine::ids::LocalNic;
use crate::machine::rail::ProbeKind;

mod ends;
mod revoke;
mod task;

use ends::{Ends, Proof};
use task::{EndpointTask, Mail};

/// Handshakes with one server at once: C++ servers take them one after the other.
const HANDSHAKES_PER_SERVER_MAX: usize = 2;

/// Requests to close that are under way to one Rerail server at once. It answers them when its
/// queue pairs have stopped. They must not wait for handshakes, which a slow device may hold up.
const CLOSES_PER_SERVER_MAX: usize = 4;

/// Endpoints of a NIC that a peer has asked for and not acknowledged yet. Anybody can send such
/// requests, and each has queue pairs for as long as ten seconds.
const HALF_OPEN_PER_NIC_MAX: usize = 64;

/// What a peer is told that asks us to close an end of which it is not known whether its queue
/// pairs have stopped. It must not take that for an answer, and waits for its packets' lifetime.
const NOT_STOPPED: &str = "it is not known whether these queue pairs have stopped";

/// Who may connect, beyond what this module can see by itself.
pub trait Admission: Send + Sync + 'static {
    /// Whether a peer's first Connection message for an own NIC may be answered.
    ///
    /// # Errors
    ///
    /// The reason to refuse it, in words for the peer.
    fn admit(&self, nic: LocalNic, offer: &Offer) -> Result<(), String>;
}

/// Who we are to peers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The text before the `@` of our NIC paths.
    pub server: String,
    /// Our instance, told to Rerail peers.
    pub instance: Option<String>,
}

impl Identity {
    /// NIC path of one of our NICs.
    pub fn path(&self, nic: &Nic) -> String {
        format!("{}@{}", self.server, nic.name())
    }
}

/// All endpoints of an engine.
#[derive(Clone)]
pub struct Connector {
    shared: Arc<Shared>,
}

struct Shared {
    config: RdmaConfig,
    clock: Clock,
    identity: Identity,
    nics: Nics,
    keeper: Arc<RailKeeper>,
    signaling: Arc<dyn Signaling>,
    tasks: Tasks,
    /// Chooses packet numbers.
    chance: Mutex<SmallRng>,
    admission: OnceLock<Arc<dyn Admission>>,
    unfenced: AtomicU64,
    table: Mutex<Table>,
    paths: Mutex<Paths>,
    /// By NIC: for the ends that nothing is posted on.
    probing: Mutex<BTreeMap<u32, Probing>>,
}

/// What probes the ends of a NIC that no rail uses.
#[derive(Clone)]
struct Probing {
    /// One permit: the right to use the rail.
    turns: Arc<Semaphore>,
    /// A rail that leads nowhere: the data thread's place for the end that is probed.
    rail: Option<Arc<Rail>>,
}

#[derive(Default)]
struct Table {
    last_key: EndpointKey,
    /// The endpoints in use between a local NIC and a peer's NIC path: mostly one, and one more per
    /// instance of a peer that was restarted.
    current: BTreeMap<(u32, String), Vec<Current>>,
    /// Those that begin to close and are not fenced yet: a peer's request to close is answered by
    /// them, once their queue pairs are in ERR.
    closing: HashMap<(u32, String), Vec<(EndpointKey, Mailbox)>>,
    /// Those that may take in what a peer sends, whether their endpoints are still there or not.
    ends: Ends,
    /// All endpoints, those that are closing included.
    by_key: HashMap<EndpointKey, Mailbox>,
    /// Those that a peer has asked for and that are not connected, with their NIC.
    half_open: HashMap<EndpointKey, u32>,
    /// By server name; dead once no message uses them.
    permits: HashMap<String, Weak<Permits>>,
}

/// The right to send messages to one server.
struct Permits {
    handshakes: Semaphore,
    closes: Semaphore,
}

struct Current {
    key: EndpointKey,
    peer_instance: Option<String>,
    mailbox: Mailbox,
}

impl Table {
    fn current(&self, place: &(u32, String), peer_instance: &Option<String>) -> Option<&Current> {
        let mut here = self.current.get(place)?.iter();
        here.find(|current| is_same(&current.peer_instance, peer_instance))
    }

    /// The endpoint that is closing and that a request to close is about: the one that has heard
    /// its packet number. C++ peers say none; theirs is about the latest, if no other is in use.
    fn closing_for(&self, place: &(u32, String), psn: Option<u32>) -> Option<Mailbox> {
        let here = self.closing.get(place)?;
        let found = match psn {
            Some(psn) => here
                .iter()
                .find(|(key, _)| self.ends.peer_psn(*key) == Some(psn)),
            None => here.last().filter(|_| !self.current.contains_key(place)),
        };
        found.map(|(_, mailbox)| mailbox.clone())
    }
}

/// Not bounded by itself: holds at most an outcome per action of the machine, a report per order,
/// the peer's requests, whose number the RPC server bounds, and what came of the NIC's table and
/// queue pairs since the task last ran, which waits for nothing but room at a data thread. The
/// storm has seen four, and asserts that there are never more than 64.
type Mailbox = mpsc::UnboundedSender<Mail>;

/// The answer to a peer's request.
type Answer = Result<Offer, String>;

impl Connector {
    /// No endpoints yet. `keeper` is told what becomes of the rails' connections.
    pub(super) fn new(
        config: RdmaConfig,
        outside: Outside,
        identity: Identity,
        nics: Nics,
        keeper: Arc<RailKeeper>,
        signaling: Arc<dyn Signaling>,
    ) -> Self {
        let Outside { clock, tasks, seed } = outside;
        Self {
            shared: Arc::new(Shared {
                config,
                clock,
                identity,
                nics,
                keeper,
                signaling,
                tasks,
                chance: Mutex::new(SmallRng::seed_from_u64(seed)),
                admission: OnceLock::new(),
                unfenced: AtomicU64::new(0),
                table: Mutex::default(),
                paths: Mutex::default(),
                probing: Mutex::default(),
            }),
        }
    }

    /// Asks `admission` about peers that want to connect from now on. Only the first call counts.
    pub fn set_admission(&self, admission: Arc<dyn Admission>) {
        let _ = self.shared.admission.set(admission);
    }

    /// Endpoints that are open or not yet fenced.
    pub fn endpoints(&self) -> usize {
        self.table().by_key.len()
    }

    /// Endpoints whose queue pairs could not be stopped in time, since the start.
    pub fn unfenced(&self) -> u64 {
        self.shared.unfenced.load(Ordering::Relaxed)
    }

    /// Bytes of transfers that have ended as unfenced and that a device may still read or write:
    /// those in flight on queue pairs of which it is not known that they have stopped.
    pub fn quarantined_bytes(&self) -> u64 {
        self.table().ends.quarantined_bytes()
    }

    fn count_unfenced(&self) {
        self.shared.unfenced.fetch_add(1, Ordering::Relaxed);
    }

    /// Connects a rail, or binds it to the endpoint that the peer has opened. What becomes of it is
    /// told under `binding`.
    pub(super) fn want(&self, rail: &Arc<Rail>, binding: Binding) {
        let local = rail.id().local.0;
        let Some(seat) = self.shared.nics.seat(local as usize) else {
            return;
        };
        let nic = &seat.nic;
        let mut table = self.table();
        let peer_nic = rail.peer_nic();
        let place = (local, peer_nic.path.clone());
        let instance = rail.instance().map(str::to_owned);
        if let Some(current) = table.current(&place, &instance) {
            rail.set_endpoint(current.key);
            let bind = Mail::Bind(Arc::clone(rail), binding);
            if current.mailbox.send(bind).is_ok() {
                return;
            }
        }
        let opening = match nic.open_device() {
            Ok(opening) => opening,
            Err(error) => {
                drop(table);
                let cause = CloseCause::Local(error.to_string());
                self.shared.keeper.lost(rail, binding, &cause, false);
                return;
            }
        };
        let parties = Parties {
            local_path: self.shared.identity.path(nic),
            peer_path: peer_nic.path.clone(),
            instance: self.shared.identity.instance.clone(),
            peer_instance: instance,
            fallback: Some((peer_nic.gid, peer_nic.lid)),
        };
        let mailbox = self.spawn(&mut table, seat, opening, parties);
        rail.set_endpoint(table.last_key);
        // The task has only just been made: it is there.
        let _ = mailbox.send(Mail::Bind(Arc::clone(rail), binding));
        let _ = mailbox.send(Mail::Input(Input::Open));
    }

    /// Gives the endpoint of a rail's binding up. If the rail is only `forgotten`, one that serves
    /// other rails or the peer stays. `unproved` is the probe that it did not pass, if that is why.
    pub(super) fn release(
        &self,
        rail: &Arc<Rail>,
        binding: Binding,
        forgotten: bool,
        unproved: Option<ProbeKind>,
    ) {
        let mail = Mail::Release {
            rail: Arc::clone(rail),
            binding,
            forgotten,
            unproved,
        };
        // One that is gone needs no closing.
        drop(self.send(rail.endpoint(), mail));
    }

    /// Takes a peer's Connection message and returns the answer, or the reason to refuse.
    pub async fn accept(&self, offer: Offer) -> Answer {
        let limit = self.shared.config.limits.connect;
        let (answer, answered) = oneshot::channel();
        self.deliver(offer, answer);
        match self.shared.clock.within(limit, answered).await {
            Some(Ok(answer)) => answer,
            Some(Err(_)) => Err("the endpoint is gone".into()),
            None => Err(format!("no answer within {} s", limit.as_secs())),
        }
    }

    /// Finds or makes the endpoint that a peer's request is for.
    fn deliver(&self, offer: Offer, answer: oneshot::Sender<Answer>) {
        let identity = &self.shared.identity;
        if !is_nic_path(&offer.local_path) {
            let reason = format!("{:?} is no NIC path: it is server@device", offer.local_path);
            return refuse(&offer, answer, reason);
        }
        let mut seats = self.shared.nics.seats();
        let Some(seat) = seats.find(|seat| identity.path(&seat.nic) == offer.peer_path) else {
            let reason = format!("there is no NIC {} here", offer.peer_path);
            return refuse(&offer, answer, reason);
        };
        let nic = &seat.nic;
        let mut table = self.table();
        let place = (nic.index().0, offer.local_path.clone());
        let instance = offer.instance.clone();
        let mut mail = Mail::Request(offer, answer);
        if let Mail::Request(offer, _) = &mail
            && offer.qp_nums.is_empty()
            && let Some(mailbox) = table.closing_for(&place, offer.psn)
        {
            match mailbox.send(mail) {
                Ok(()) => return,
                Err(mpsc::error::SendError(back)) => mail = back,
            }
        }
        let is_unproved = |table: &Table, mail: &Mail| match mail {
            Mail::Request(offer, _) if offer.qp_nums.is_empty() => {
                table.ends.is_unproved(&place, offer.psn)
            }
            _ => false,
        };
        // The endpoint in use would say that earlier ones are closed. Of a peer that names no
        // packet number it is the one that is meant.
        let names_one = matches!(&mail, Mail::Request(offer, _) if offer.psn.is_some());
        let is_current = !(names_one && is_unproved(&table, &mail));
        if let Some(current) = table.current(&place, &instance).filter(|_| is_current) {
            match current.mailbox.send(mail) {
                Ok(()) => return,
                Err(mpsc::error::SendError(back)) => mail = back,
            }
        }
        let unproved = is_unproved(&table, &mail);
        let Mail::Request(offer, answer) = mail else {
            return;
        };
        if unproved {
            let reason = format!("{} does not answer: {NOT_STOPPED}", nic.name());
            return refuse(&offer, answer, reason);
        }
        if offer.qp_nums.is_empty() {
            // There is nothing to close: whatever there was is in ERR or destroyed.
            return refuse(&offer, answer, CLOSED.into());
        }
        if offer.ready_ack == Some(true) {
            let reason = "ready acknowledgement for an endpoint that is not connected";
            return refuse(&offer, answer, reason.into());
        }
        let Some(opening) = nic.opening().filter(|_| nic.is_gate_open()) else {
            return refuse(&offer, answer, format!("{} is withdrawn", nic.name()));
        };
        let admission = self.shared.admission.get();
        if let Some(Err(reason)) = admission.map(|of| of.admit(nic.index(), &offer)) {
            return refuse(&offer, answer, reason);
        }
        if table.by_key.len() >= self.shared.config.endpoints_max as usize {
            return refuse(&offer, answer, "too many endpoints".into());
        }
        let of_nic = table.half_open.values().filter(|of| **of == nic.index().0);
        if of_nic.count() >= HALF_OPEN_PER_NIC_MAX {
            let reason = format!(
                "{HALF_OPEN_PER_NIC_MAX} connections of {} wait for acknowledgement: try again",
                nic.name()
            );
            return refuse(&offer, answer, reason);
        }
        // Whoever speaks for the path now is not the process of these any more.
        for older in table.current.get(&place).into_iter().flatten() {
            // One that is gone needs no closing.
            let _ = older
                .mailbox
                .send(Mail::Input(Input::Close(CloseCause::PeerRebuilt)));
        }
        let parties = Parties {
            local_path: identity.path(nic),
            peer_path: offer.local_path.clone(),
            instance: identity.instance.clone(),
            peer_instance: offer.instance.clone(),
            fallback: None,
        };
        let mailbox = self.spawn(&mut table, seat, opening, parties);
        let key = table.last_key;
        table.half_open.insert(key, nic.index().0);
        let _ = mailbox.send(Mail::Request(offer, answer));
    }

    /// A data thread's report that an endpoint broke.
    pub(super) fn broken(&self, endpoint: EndpointKey, cause: CloseCause) {
        self.send(endpoint, Mail::Input(Input::Close(cause)));
    }

    /// A data thread's report that an endpoint is drained.
    pub(super) fn drained(&self, endpoint: EndpointKey, leftover: Leftover) {
        if let Some(Mail::Drained(leftover)) = self.send(endpoint, Mail::Drained(leftover)) {
            // The endpoint is fenced and gone.
            leftover.held.iter().for_each(|held| held.release());
        }
    }

    /// Closes all endpoints of a local NIC, or of all NICs. Returns how many.
    pub fn close_all(&self, nic: Option<u32>, reason: &str) -> usize {
        let table = self.table();
        let here = table.current.iter();
        let here = here.filter(|((local, _), _)| nic.is_none_or(|nic| nic == *local));
        let close = |current: &Current| {
            let cause = CloseCause::Withdrawn(reason.to_owned());
            // One that is gone needs no closing.
            let close = Mail::Input(Input::Close(cause));
            current.mailbox.send(close).is_ok()
        };
        let here = here.flat_map(|(_, here)| here);
        here.map(close).filter(|closing| *closing).count()
    }

    /// The GID table of a NIC was read. Endpoints whose own row, other than the port's choice, does
    /// not hold their GID any more are closed; those on the port's choice follow the observer.
    pub(super) fn table_read(&self, local: LocalNic, rows: &Arc<[Row]>) {
        let table = self.table();
        let here = table.current.iter().filter(|((nic, _), _)| *nic == local.0);
        for current in here.flat_map(|(_, here)| here) {
            // One that is gone needs no closing.
            let _ = current.mailbox.send(Mail::TableRead(Arc::clone(rows)));
        }
    }

    /// A device reported an event of a queue pair: the endpoint that it belongs to, and no other,
    /// is broken.
    pub fn queue_pair_event(&self, local: LocalNic, queue_pair: ObjectId, kind: AsyncEventKind) {
        let table = self.table();
        let here = table.current.iter().filter(|((nic, _), _)| *nic == local.0);
        for current in here.flat_map(|(_, here)| here) {
            // One that is gone is broken already.
            let _ = current.mailbox.send(Mail::QueuePairEvent(queue_pair, kind));
        }
    }

    /// Sends to an endpoint, or gives the mail back when it is gone.
    fn send(&self, endpoint: EndpointKey, mail: Mail) -> Option<Mail> {
        match self.table().by_key.get(&endpoint) {
            Some(mailbox) => mailbox.send(mail).err().map(|error| error.0),
            None => Some(mail),
        }
    }

    fn spawn(
        &self,
        table: &mut Table,
        seat: &Seat,
        opening: Arc<Opening>,
        parties: Parties,
    ) -> Mailbox {
        let nic = &seat.nic;
        table.last_key += 1;
        let key = table.last_key;
        let (mailbox, mail) = mpsc::unbounded_channel();
        let place = (nic.index().0, parties.peer_path.clone());
        let current = Current {
            key,
            peer_instance: parties.peer_instance.clone(),
            mailbox: mailbox.clone(),
        };
        table.current.entry(place).or_default().push(current);
        table.by_key.insert(key, mailbox.clone());
        let now = self.shared.clock.now();
        let machine = Endpoint::new(now, parties.clone(), self.shared.config.limits);
        let task = EndpointTask::new(
            self.clone(),
            key,
            (Arc::clone(nic), opening),
            Arc::clone(&seat.inbox),
            parties.peer_path,
            machine,
            mailbox.clone(),
        );
        self.shared.tasks.spawn(task.run(mail));
        mailbox
    }

    /// A first packet number, at random.
    fn packet_number(&self) -> u32 {
        self.chance().random::<u32>() & 0x00ff_ffff
    }

    fn chance(&self) -> MutexGuard<'_, SmallRng> {
        let chance = self.shared.chance.lock();
        chance.unwrap_or_else(PoisonError::into_inner)
    }

    /// The probe of an end came back.
    pub(super) fn probed(&self, endpoint: EndpointKey, status: WcStatus) {
        // One that is gone needs no answer.
        drop(self.send(endpoint, Mail::Probed(status)));
    }

    /// Who may probe an end of a NIC, one at a time.
    fn turns(&self, nic: &Nic) -> Arc<Semaphore> {
        self.probing(nic).turns
    }

    /// The rail that stands for the end of a NIC which is being probed.
    fn probing_rail(&self, nic: &Nic) -> Option<Arc<Rail>> {
        self.probing(nic).rail
    }

    fn probing(&self, nic: &Nic) -> Probing {
        let all = &self.shared.probing;
        // What is in the map is whole whatever panicked.
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        let make = || Probing {
            turns: Arc::new(Semaphore::new(1)),
            rail: Rail::to_nowhere(nic.index(), &self.shared.nics.names()),
        };
        all.entry(nic.index().0).or_insert_with(make).clone()
    }

    /// The endpoint is connected.
    fn opened(&self, key: EndpointKey) {
        self.table().half_open.remove(&key);
    }

    /// The queue pairs of an endpoint are about to be connected to a peer's, which begin to send
    /// at this packet number, if it says so. `proof` is given once they have stopped.
    fn raises(&self, key: EndpointKey, (nic, path): &Way, psn: Option<u32>, proof: Proof) {
        self.table().ends.begin(key, (*nic, path), psn, proof);
    }

    /// The process `instance` speaks at `peer_path`: ends of earlier ones of its server name, which
    /// may have died without a word, are closed on every NIC. Instances are UUIDv7, so that the
    /// greater one is the later one; whatever is none closes nothing.
    fn outdate(&self, peer_path: &str, instance: &str) {
        let is_ordered =
            |id: &str| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_ordered(instance) {
            return;
        }
        let server = server_of(peer_path);
        let table = self.table();
        let places = table.current.iter();
        let of_server = places.filter(|((_, path), _)| server_of(path) == server);
        for current in of_server.flat_map(|(_, here)| here) {
            let known = current.peer_instance.as_deref();
            if known.is_some_and(|known| is_ordered(known) && known < instance) {
                let close = Input::Close(CloseCause::PeerRebuilt);
                // One that is gone needs no closing.
                let _ = current.mailbox.send(Mail::Input(close));
            }
        }
    }

    /// The endpoint begins to close: the next request or rail gets another one.
    fn retire(&self, nic: &Nic, peer_path: &str, key: EndpointKey) {
        let mut table = self.table();
        let place = (nic.index().0, peer_path.to_owned());
        if let Some(mailbox) = table.by_key.get(&key).cloned() {
            let closing = table.closing.entry(place.clone()).or_default();
            closing.push((key, mailbox));
        }
        if let Some(here) = table.current.get_mut(&place) {
            here.retain(|current| current.key != key);
            if here.is_empty() {
                table.current.remove(&place);
            }
        }
    }

    /// The endpoint has ended.
    fn forget(&self, key: EndpointKey) {
        let mut table = self.table();
        table.by_key.remove(&key);
        table.half_open.remove(&key);
        table.ends.forget(key);
        table.closing.retain(|_, here| {
            here.retain(|(other, _)| *other != key);
            !here.is_empty()
        });
    }

    /// The right to send messages to a server.
    fn permits(&self, server: &str) -> Arc<Permits> {
        let mut table = self.table();
        if let Some(permits) = table.permits.get(server).and_then(Weak::upgrade) {
            return permits;
        }
        table.permits.retain(|_, idle| idle.strong_count() > 0);
        let permits = Arc::new(Permits {
            handshakes: Semaphore::new(HANDSHAKES_PER_SERVER_MAX),
            closes: Semaphore::new(CLOSES_PER_SERVER_MAX),
        });
        table
            .permits
            .insert(server.to_owned(), Arc::downgrade(&permits));
        permits
    }

    fn paths(&self) -> MutexGuard<'_, Paths> {
        // What is learnt is whole whatever panicked.
        let paths = self.shared.paths.lock();
        paths.unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // No code that can panic half-way runs under the lock, so a poisoned one is whole.
        self.shared
            .table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The server name in a NIC path.
fn server_of(path: &str) -> &str {
    path.split_once('@').map_or(path, |(server, _)| server)
}

/// Whether a path has the form `server@device`.
fn is_nic_path(path: &str) -> bool {
    path.split_once('@')
        .is_some_and(|(server, device)| !server.is_empty() && !device.is_empty())
}

fn refuse(offer: &Offer, answer: oneshot::Sender<Answer>, reason: String) {
    tracing::info!(peer = %offer.local_path, %reason, "connection refused");
    // A peer that has gone away needs no answer.
    let _ = answer.send(Err(reason));
}

/// Hands an order over; waits while the data thread is behind.
async fn order(clock: Clock, inbox: &Inbox, order: Order) {
    let mut waiting = Some(order);
    while let Some(order) = waiting.take() {
        if let Err(back) = inbox.order(order) {
            waiting = Some(back);
            clock.sleep(std::time::Duration::from_millis(1)).await;
        }
    }
}

#[cfg(test)]
mod tests;
