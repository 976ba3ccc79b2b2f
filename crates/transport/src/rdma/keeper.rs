//! The driver of the rail machine.
//!
//! There is one [`Rails`] machine an engine, under a lock that is held for its decisions only. What
//! it decides about a rail's state is stored in the rail's atomics before the lock is released, so
//! that a closed gate holds once the call has returned; data threads and the choice of rails read
//! those and never take the lock. What else it wants done waits as commands for the router's
//! task, which carries them out one by one.
//!
//! Each time that a rail is connected it gets a new *binding*. What an endpoint says about a rail
//! counts only under the rail's present binding: a late word of an endpoint that was given up says
//! nothing about the next one.
//!
//! Deliberately not here: endpoints (the connector's), and which rails a transfer takes (the
//! router's).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rerail_verbs::{Gid, LinkLayer, WcStatus};
use tokio::sync::Notify;

use super::clock::Clock;
use super::endpoint::{CloseCause, is_same};
use super::events::{FenceChange, RailChange};
use super::nic::{Nic, PortFacts};
use super::nics::Nics;
use super::rail::{Peer, PeerNic, Rail};
use crate::machine::ids::{LocalNic, PeerId, RailId};
use crate::machine::rail::{
    Action, ConnectFault, Input, LocalGate, NoPath, Path, ProbeKind, RailCause, RailConfig,
    RailState, RailTraits, Rails,
};
use crate::machine::verdict::{RequestFault, Verdict, verdict};
use crate::machine::{Machine, Time, drive, ids};

/// How often peers that are gone or idle are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// How long after its last transfer a peer's rails that do not work are left alone.
const IDLE_AFTER: Duration = Duration::from_secs(30);

/// Names one connection of a rail: from the wish for it to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Binding(u64);

impl Binding {
    pub(super) const NONE: Self = Self(0);
}

/// What is to be done for the rails, in this order.
#[derive(Debug)]
pub(super) enum Command {
    /// Connect the rail.
    Connect(Arc<Rail>, Binding),
    /// Give its endpoint up. `forgotten` if that is only because nobody uses the rail any more.
    Drop {
        rail: Arc<Rail>,
        binding: Binding,
        forgotten: bool,
        /// The probe that it did not pass, if that is why.
        unproved: Option<ProbeKind>,
    },
    /// Probe it.
    Probe {
        rail: Arc<Rail>,
        probe: u64,
        kind: ProbeKind,
    },
    /// Work for the peer may go over one more rail.
    Usable(PeerId),
    /// A rail has another state.
    Changed(RailChange),
    /// An endpoint is being given up.
    Fence(FenceChange),
    /// A local NIC is to be read again.
    RecheckLocal(LocalNic),
    /// The record of this segment is to be read again.
    RefreshPeer(String),
}

/// The rails of an engine. See the module.
#[derive(Debug)]
pub struct RailKeeper {
    clock: Clock,
    nics: Nics,
    book: Mutex<Book>,
    touched: Notify,
}

#[derive(Debug)]
struct Book {
    machine: Rails,
    rails: BTreeMap<RailId, Entry>,
    peers: BTreeMap<PeerId, Weak<Peer>>,
    /// The rails between a local NIC and a peer's NIC path, for endpoints that the peer opens.
    places: HashMap<(LocalNic, String), Vec<RailId>>,
    last_binding: u64,
    commands: VecDeque<Command>,
    next_sweep: Time,
    /// The peer that is being forgotten: its rails are not news.
    forgetting: Option<PeerId>,
}

#[derive(Debug)]
struct Entry {
    rail: Arc<Rail>,
    binding: Binding,
}

impl RailKeeper {
    /// No rails yet; the gates of `nics` are as they are. `seed` decides the jitter of back-offs.
    pub fn new(clock: Clock, nics: Nics, config: RailConfig, seed: u64) -> Self {
        let now = clock.now();
        let mut machine = Rails::new(config, seed);
        for nic in nics.iter() {
            let local = nic.index();
            let endpoints_kept = false;
            let gate = if nic.is_gate_open() {
                LocalGate::Open { endpoints_kept }
            } else {
                LocalGate::Closed
            };
            machine.handle(now, Input::LocalGate { local, gate });
        }
        Self {
            clock,
            nics,
            book: Mutex::new(Book {
                machine,
                rails: BTreeMap::new(),
                peers: BTreeMap::new(),
                places: HashMap::new(),
                last_binding: 0,
                commands: VecDeque::new(),
                next_sweep: now + SWEEP_EVERY,
                forgetting: None,
            }),
            touched: Notify::new(),
        }
    }

    /// Takes a peer's rails in. They are connected once they are wanted.
    pub(super) fn declare(&self, peer: &Arc<Peer>) {
        self.book().declare(self.clock.now(), peer, &self.nics);
        self.touched.notify_one();
    }

    /// There is work for a rail of `peer`. One that was forgotten is taken in again.
    pub(super) fn want(&self, peer: &Arc<Peer>, rail: &Rail) {
        if rail.set_wanted(true) {
            return;
        }
        let now = self.clock.now();
        let mut book = self.book();
        if !book.peers.contains_key(&peer.id()) {
            book.declare(now, peer, &self.nics);
            rail.set_wanted(true);
        }
        book.apply(now, Input::Wanted { rail: rail.id() });
        drop(book);
        self.touched.notify_one();
    }

    /// A local NIC's gate was closed or opened.
    pub(super) fn local_gate(&self, local: LocalNic, gate: LocalGate) {
        let mut book = self.book();
        if let LocalGate::Open { .. } = gate
            && let Some(nic) = self.nics.at(local)
        {
            // It may have come back with another address, or another speed.
            book.declare_again(self.clock.now(), nic);
        }
        book.apply(self.clock.now(), Input::LocalGate { local, gate });
        drop(book);
        self.touched.notify_one();
    }

    /// What becomes of an endpoint is told in turn with what it does to rails.
    pub(super) fn tell_fence(&self, change: FenceChange) {
        self.book().commands.push_back(Command::Fence(change));
        self.touched.notify_one();
    }

    /// A local NIC's port has another speed, and all else as before.
    pub(super) fn local_port(&self, local: LocalNic) {
        if let Some(nic) = self.nics.at(local) {
            self.book().declare_again(self.clock.now(), nic);
            self.touched.notify_one();
        }
    }

    /// There is one more local NIC, whose gate is closed.
    pub(super) fn nic_added(&self, local: LocalNic) {
        let now = self.clock.now();
        let mut book = self.book();
        let gate = LocalGate::Closed;
        book.apply(now, Input::LocalGate { local, gate });
        let peers: Vec<_> = book.peers.values().filter_map(Weak::upgrade).collect();
        let names = self.nics.names();
        for peer in peers {
            // Those that are not known here are completed when they are declared.
            let new = peer.grow(&names, &[]);
            book.declare_rails(now, &new, &self.nics);
        }
        drop(book);
        self.touched.notify_one();
    }

    /// A peer has these NICs now, the first of which it had before, perhaps with other addresses;
    /// of the new ones those of `down` are withdrawn.
    pub(super) fn peer_grown(&self, peer: &Arc<Peer>, nics: &[PeerNic], down: &[u32]) {
        let now = self.clock.now();
        let mut book = self.book();
        for rail in peer.readdress(nics) {
            // One that is not known here is told when it is declared.
            if let Some(nic) = self.nics.at(rail.id().local)
                && book.rails.contains_key(&rail.id())
            {
                book.set_traits(now, &rail, nic);
            }
        }
        let new = peer.grow(&self.nics.names(), nics);
        if new.is_empty() || !book.peers.contains_key(&peer.id()) {
            return;
        }
        book.declare_rails(now, &new, &self.nics);
        for nic in down {
            let (peer, nic) = (peer.id(), *nic);
            let nic = ids::PeerNic { peer, nic };
            book.apply(now, Input::PeerNicGate { nic, up: false });
        }
        // Each local NIC has a rail to another one already, and so would not ask for these: the two
        // at one position belong together.
        let locals = self.nics.len().max(1);
        for rail in &new {
            let (local, at) = (rail.id().local.0 as usize, rail.peer_position());
            if at % locals == local && !rail.set_wanted(true) {
                book.apply(now, Input::Wanted { rail: rail.id() });
            }
        }
        drop(book);
        self.touched.notify_one();
    }

    /// A peer's record says that its NIC is up or not.
    pub(super) fn peer_nic(&self, peer: PeerId, nic: u32, up: bool) {
        let nic = ids::PeerNic { peer, nic };
        self.apply(Input::PeerNicGate { nic, up });
    }

    /// A peer's record is withdrawn or superseded.
    pub(super) fn peer_gone(&self, peer: PeerId) {
        self.apply(Input::PeerGone { peer });
    }

    /// A peer is not used any more.
    pub(super) fn forget(&self, peer: PeerId) {
        self.book().forget(self.clock.now(), peer);
        self.touched.notify_one();
    }

    /// Why there is no way to a peer, and none is expected; `None` if there is or may be one.
    pub(super) fn no_path(&self, peer: &Arc<Peer>) -> Option<NoPath> {
        let mut book = self.book();
        if !book.peers.contains_key(&peer.id()) {
            book.declare(self.clock.now(), peer, &self.nics);
        }
        match book.machine.path(peer.id()) {
            Path::None(reason) => Some(reason),
            Path::Usable(_) | Path::Expected { .. } => None,
        }
    }

    /// An endpoint of the peer's own wish is connected: the rails that it may serve, with new
    /// bindings. Those that have an endpoint are left out.
    pub(super) fn opened(
        &self,
        local: LocalNic,
        peer_path: &str,
        instance: Option<&String>,
    ) -> Vec<(Arc<Rail>, Binding)> {
        let mut book = self.book();
        let place = (local, peer_path.to_owned());
        let ids = book.places.get(&place).cloned().unwrap_or_default();
        let mut found = Vec::new();
        for id in ids {
            let binding = Binding(book.last_binding + 1);
            if let Some(entry) = book.rails.get_mut(&id)
                && entry.binding == Binding::NONE
                && is_same(
                    &instance.cloned(),
                    &entry.rail.instance().map(str::to_owned),
                )
            {
                entry.binding = binding;
                found.push((Arc::clone(&entry.rail), binding));
                book.last_binding = binding.0;
            }
        }
        found
    }

    /// A rail's endpoint is connected, and the data thread has its queue pairs.
    pub(super) fn connected(&self, rail: &Rail, binding: Binding) {
        let mut book = self.book();
        if book.is_current(rail, binding) {
            book.apply(self.clock.now(), Input::Connected { rail: rail.id() });
        }
        drop(book);
        self.touched.notify_one();
    }

    /// A rail's endpoint closes, or could not be connected.
    pub(super) fn lost(
        &self,
        rail: &Rail,
        binding: Binding,
        cause: &CloseCause,
        was_connected: bool,
    ) {
        let now = self.clock.now();
        let id = rail.id();
        let mut book = self.book();
        if !book.is_current(rail, binding) {
            return;
        }
        if let Some(entry) = book.rails.get_mut(&id) {
            entry.binding = Binding::NONE;
        }
        if let CloseCause::PeerRestarted(_) = cause {
            rail.peer_restarted();
            let peer = id.peer.peer;
            book.apply(now, Input::PeerGone { peer });
        }
        book.apply(now, lost_input(id, cause, was_connected));
        if let CloseCause::Failed { status, .. } = cause
            && verdict(*status) == Verdict::Request(RequestFault::RemoteKey)
        {
            // Its record may be late. A request that fails by it asks by itself.
            let segment = rail.segment().to_owned();
            book.commands.push_back(Command::RefreshPeer(segment));
        }
        drop(book);
        self.touched.notify_one();
    }

    /// A rail's work belongs to another process than the one that has answered.
    pub(super) fn peer_restarted(&self, rail: &Rail) {
        rail.peer_restarted();
        self.peer_gone(rail.id().peer.peer);
    }

    /// A probe came back.
    pub(super) fn probe_done(&self, rail: RailId, probe: u64, status: WcStatus) {
        let now = self.clock.now();
        let mut book = self.book();
        if status == WcStatus::RemAccessErr
            && let Some(entry) = book.rails.get(&rail)
        {
            entry.rail.refuse_memory(now);
        }
        let done = Input::ProbeDone {
            rail,
            probe,
            status,
        };
        book.apply(now, done);
        drop(book);
        self.touched.notify_one();
    }

    /// A rail moved `bytes` in a time in which it was never without work.
    pub(super) fn progress(&self, rail: RailId, bytes: u64, took: Duration) {
        let mut book = self.book();
        book.apply(self.clock.now(), Input::Progress { rail, bytes, took });
        if let Some(rate) = book.machine.measured_rate(rail)
            && let Some(entry) = book.rails.get(&rail)
        {
            entry.rail.set_measured(rate);
        }
    }

    /// When [`tick`](Self::tick) is next to be called.
    pub(super) fn next_due(&self) -> Time {
        let book = self.book();
        let due = book.machine.next_timeout();
        due.map_or(book.next_sweep, |due| due.min(book.next_sweep))
    }

    /// Lets the machine act on its timers, and forgets peers that nobody uses.
    pub(super) fn tick(&self) {
        let now = self.clock.now();
        let mut book = self.book();
        book.settle(now);
        if now >= book.next_sweep {
            book.next_sweep = now + SWEEP_EVERY;
            book.sweep(now);
        }
    }

    /// How much is to be done.
    #[cfg(test)]
    pub(super) fn commands(&self) -> usize {
        self.book().commands.len()
    }

    /// What is to be done, oldest first.
    pub(super) fn take_commands(&self) -> VecDeque<Command> {
        std::mem::take(&mut self.book().commands)
    }

    /// Waits until there may be something to do. For one task.
    pub(super) async fn touched(&self) {
        self.touched.notified().await;
    }

    fn apply(&self, input: Input) {
        self.book().apply(self.clock.now(), input);
        self.touched.notify_one();
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // No code that can panic half-way runs under the lock, so a poisoned one is whole.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn apply(&mut self, now: Time, input: Input) {
        self.machine.handle(now, input);
        while let Some(action) = self.machine.poll() {
            self.act(action);
        }
    }

    fn settle(&mut self, now: Time) {
        let mut actions = Vec::new();
        drive(&mut self.machine, now, |action| actions.push(action));
        actions.into_iter().for_each(|action| self.act(action));
    }

    fn act(&mut self, action: Action) {
        #[cfg(test)]
        crate::machine::seen::happened("rail order", &action);
        match action {
            Action::Connect { rail } => {
                self.last_binding += 1;
                let binding = Binding(self.last_binding);
                if let Some(entry) = self.rails.get_mut(&rail) {
                    entry.binding = binding;
                    let rail = Arc::clone(&entry.rail);
                    self.commands.push_back(Command::Connect(rail, binding));
                }
            }
            Action::DropEndpoint { rail } => {
                let forgotten = self.forgetting == Some(rail.peer.peer);
                if let Some(entry) = self.rails.get_mut(&rail)
                    && entry.binding != Binding::NONE
                {
                    let binding = std::mem::replace(&mut entry.binding, Binding::NONE);
                    let rail = Arc::clone(&entry.rail);
                    self.commands.push_back(Command::Drop {
                        rail,
                        binding,
                        forgotten,
                        unproved: None,
                    });
                }
            }
            Action::Probe { rail, probe, kind } => {
                if let Some(entry) = self.rails.get(&rail) {
                    let rail = Arc::clone(&entry.rail);
                    rail.set_unproved(Some(kind));
                    self.commands
                        .push_back(Command::Probe { rail, probe, kind });
                }
            }
            Action::State {
                rail,
                from,
                to,
                cause,
                first_cause,
            } => self.changed(rail, from, to, cause, first_cause),
            Action::RecheckLocal { local } => {
                self.commands.push_back(Command::RecheckLocal(local));
            }
            Action::RefreshPeer { peer } => {
                let mut rails = self.rails.range(RailId::range_of(peer));
                if let Some((_, entry)) = rails.next() {
                    let segment = entry.rail.segment().to_owned();
                    self.commands.push_back(Command::RefreshPeer(segment));
                }
            }
        }
    }

    fn changed(
        &mut self,
        id: RailId,
        from: RailState,
        to: RailState,
        cause: RailCause,
        first_cause: Option<RailCause>,
    ) {
        let Some(entry) = self.rails.get(&id) else {
            return;
        };
        let rail = &entry.rail;
        rail.set_state(to);
        if self.forgetting == Some(id.peer.peer) {
            return;
        }
        match to {
            RailState::Down => {
                // The machine has its endpoint dropped first.
                let dropped = self
                    .commands
                    .iter_mut()
                    .rev()
                    .find_map(|command| match command {
                        Command::Drop {
                            rail: of, unproved, ..
                        } if Arc::ptr_eq(of, rail) => Some(unproved),
                        _ => None,
                    });
                if let Some(unproved) = dropped.filter(|_| is_silence(&cause)) {
                    *unproved = rail.unproved();
                }
                let first = rail.went_down(cause.to_string(), is_error(&cause));
                // A rail that stays down says so once.
                if carries_work(from) || first {
                    tracing::warn!(%rail, %cause, "rail down");
                } else {
                    tracing::debug!(%rail, %cause, "rail still down");
                }
            }
            RailState::Up => {
                rail.set_unproved(None);
                tracing::info!(%rail, "rail up");
            }
            RailState::Suspect => tracing::warn!(%rail, %cause, "rail suspect"),
            RailState::HalfOpen => tracing::debug!(%rail, %cause, "rail half-open"),
        }
        if carries_work(to) && !carries_work(from) {
            self.commands.push_back(Command::Usable(id.peer.peer));
        }
        self.commands.push_back(Command::Changed(RailChange {
            local: rail.local_name().to_owned(),
            peer: rail.peer_nic().path.clone(),
            segment: rail.segment().to_owned(),
            from,
            to,
            cause,
            first_cause,
        }));
    }

    fn declare(&mut self, now: Time, peer: &Arc<Peer>, nics: &Nics) {
        self.peers.insert(peer.id(), Arc::downgrade(peer));
        // NICs may have been added since its rails were made.
        peer.grow(&nics.names(), &[]);
        self.declare_rails(now, &peer.rails(), nics);
    }

    fn declare_rails(&mut self, now: Time, rails: &[Arc<Rail>], nics: &Nics) {
        for rail in rails {
            let id = rail.id();
            let Some(nic) = nics.at(id.local) else {
                continue;
            };
            let entry = Entry {
                rail: Arc::clone(rail),
                binding: Binding::NONE,
            };
            self.rails.insert(id, entry);
            let place = (id.local, rail.peer_nic().path.clone());
            self.places.entry(place).or_default().push(id);
            rail.set_wanted(false);
            self.set_traits(now, rail, nic);
            if let Some(state) = self.machine.state(id) {
                rail.set_state(state);
            }
        }
    }

    /// Tells what the rails of a local NIC are like after its port was read again.
    fn declare_again(&mut self, now: Time, nic: &Nic) {
        let of_nic = self.rails.values().map(|entry| &entry.rail);
        let of_nic = of_nic.filter(|rail| rail.id().local == nic.index());
        for rail in of_nic.cloned().collect::<Vec<_>>() {
            self.set_traits(now, &rail, nic);
        }
    }

    fn set_traits(&mut self, now: Time, rail: &Rail, nic: &Nic) {
        // A port that was never usable has neither address nor speed.
        let facts = nic.facts();
        let facts = facts.as_deref();
        let traits = RailTraits {
            same_subnet: facts.is_some_and(|facts| is_same_subnet(facts, &rail.peer_nic())),
            speed_mbps: facts.map_or(0, |facts| facts.speed_mbps),
        };
        rail.set_traits(traits);
        let rail = rail.id();
        self.apply(now, Input::Declare { rail, traits });
    }

    fn forget(&mut self, now: Time, peer: PeerId) {
        self.forgetting = Some(peer);
        self.apply(now, Input::ForgetPeer { peer });
        self.forgetting = None;
        self.peers.remove(&peer);
        let range = RailId::range_of(peer);
        let ids: Vec<_> = self.rails.range(range).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(entry) = self.rails.remove(&id) else {
                continue;
            };
            entry.rail.set_wanted(false);
            let place = (id.local, entry.rail.peer_nic().path.clone());
            if let Some(here) = self.places.get_mut(&place) {
                here.retain(|other| *other != id);
                if here.is_empty() {
                    self.places.remove(&place);
                }
            }
        }
    }

    fn sweep(&mut self, now: Time) {
        let peers: Vec<_> = self
            .peers
            .iter()
            .map(|(id, peer)| (*id, peer.upgrade()))
            .collect();
        for (id, peer) in peers {
            let Some(peer) = peer else {
                self.forget(now, id);
                continue;
            };
            let is_busy = peer.rails().iter().any(|rail| rail.load_bytes() > 0);
            if is_busy || now.saturating_since(peer.used_at()) < IDLE_AFTER {
                continue;
            }
            for rail in peer.rails().iter() {
                if rail.is_wanted() && !rail.is_proved() {
                    rail.set_wanted(false);
                    self.apply(now, Input::Unwanted { rail: rail.id() });
                }
            }
        }
    }

    fn is_current(&self, rail: &Rail, binding: Binding) -> bool {
        let entry = self.rails.get(&rail.id());
        entry.is_some_and(|entry| entry.binding == binding)
    }
}

fn carries_work(state: RailState) -> bool {
    matches!(state, RailState::Up | RailState::Suspect)
}

/// Whether a probe was not answered, or in a way that says that packets do not fit.
fn is_silence(cause: &RailCause) -> bool {
    match cause {
        RailCause::Probe(status) => matches!(
            verdict(*status),
            Verdict::Path | Verdict::Request(RequestFault::Length)
        ),
        RailCause::ProofTimeout => true,
        _ => false,
    }
}

/// Whether a cause is held against the rail in its statistics.
fn is_error(cause: &RailCause) -> bool {
    match cause {
        RailCause::Completion(status) | RailCause::Probe(status) => {
            !matches!(verdict(*status), Verdict::Request(_))
        }
        // A peer that closes or rebuilds its end has reasons of its own.
        RailCause::Closed
        | RailCause::PeerClosed
        | RailCause::LocalPort
        | RailCause::PeerNic
        | RailCause::Proved
        | RailCause::Retry => false,
        _ => true,
    }
}

/// What the end of a rail's endpoint means to the machine.
fn lost_input(rail: RailId, cause: &CloseCause, was_connected: bool) -> Input {
    if !was_connected {
        let fault = match cause {
            CloseCause::Refused(_) | CloseCause::PeerClosed | CloseCause::PeerRebuilt => {
                ConnectFault::Refused
            }
            CloseCause::NoAnswer(_) => ConnectFault::NoAnswer,
            _ => ConnectFault::Other,
        };
        let reason = cause.to_string();
        return Input::ConnectFailed {
            rail,
            reason,
            fault,
        };
    }
    let cause = match cause {
        CloseCause::Failed { status, .. } | CloseCause::BadRequest { status, .. } => {
            RailCause::Completion(*status)
        }
        CloseCause::Stalled(_) => RailCause::NoProgress,
        CloseCause::Event(kind) => RailCause::QueuePairEvent(*kind),
        CloseCause::PeerClosed | CloseCause::PeerRebuilt => RailCause::PeerClosed,
        CloseCause::CutOff | CloseCause::Withdrawn(_) | CloseCause::PeerRestarted(_) => {
            RailCause::Closed
        }
        other => RailCause::Local {
            reason: other.to_string(),
        },
    };
    Input::EndpointLost { rail, cause }
}

/// Leading bits that IPv4 addresses of one subnet have in common at least, as far as can be guessed
/// without their prefix length; of IPv6 addresses, and of InfiniBand GIDs, it is half of them.
const IPV4_SUBNET_BITS: u32 = 24;

/// Whether a local port and a peer's NIC are taken to be in one subnet. A guess only decides which
/// pair is tried first, and how a tie is broken.
fn is_same_subnet(facts: &PortFacts, peer: &PeerNic) -> bool {
    let own: Gid = facts.gid.gid;
    match (own.to_ipv4(), peer.gid.to_ipv4()) {
        (Some(own), Some(peer)) if facts.link_layer == LinkLayer::Ethernet => {
            let differing = own.to_bits() ^ peer.to_bits();
            differing.leading_zeros() >= IPV4_SUBNET_BITS
        }
        (None, None) => own.to_ipv6().segments()[..4] == peer.gid.to_ipv6().segments()[..4],
        _ => false,
    }
}

#[cfg(test)]
mod tests;
