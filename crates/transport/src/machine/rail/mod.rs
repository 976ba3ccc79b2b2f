//! Rails: pairs of a local NIC's port and a peer's NIC, and whether they carry work (design §6).
//!
//! # The way of one rail
//!
//! A rail is declared `HalfOpen`. When it is wanted, [`Action::Connect`] asks for an endpoint, then
//! two probes of the engine's own prove it: a READ of no bytes, then one of a full path MTU. Only
//! then it is `Up` and carries user work. An error takes it `Down`; a back-off with jitter, or good
//! news from the observer or the peer, makes it `HalfOpen` again. `Suspect` is a rail that works
//! badly: it keeps a quarter of its share for at most a minute.
//!
//! Rules that hold always:
//!
//! * user work never proves a rail, and never passes a closed gate;
//! * handshakes and probes under way over one local NIC are bounded, and rails that failed less
//!   often go first, so that dead peers hold up nobody;
//! * blame, suspicion and damping expire within a minute and never take the last usable rail of a
//!   peer: only an error of its own, or a closed gate, does;
//! * a pair that fails again and again is tried at most once per back-off, and says what took it
//!   down *first*.
//!
//! Deliberately not here: endpoints and their handshakes, queue depths, the slices themselves, and
//! the tuning of grey-rail detection ([`Input::Slow`] is its hook).

mod blame;
mod choice;
mod health;
mod io;
mod proof;
#[cfg(test)]
pub(crate) mod states;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rerail_verbs::WcStatus;

pub(crate) use choice::nominal_bytes_per_s;
pub use choice::{Candidate, NoPath, Path, choose, share_of};
pub use io::{Action, ConnectFault, Input, LocalGate, ProbeKind, RailCause, RailState, RailTraits};

use self::blame::{Blame, Culprit};
use self::health::{Proof, Rail, Step};
use super::backoff::Backoff;
use super::ids::{LocalNic, PeerId, PeerNic, RailId};
use super::verdict::{Verdict, verdict};
use super::{Machine, Time};

/// Times and limits of the rails.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RailConfig {
    /// First back-off of a rail. 250 ms.
    pub backoff_min: Duration,
    /// Longest back-off of a rail. 30 s.
    pub backoff_max: Duration,
    /// How often one rail of a peer is tried at least while none of its rails works. 1 s.
    pub last_path_retry: Duration,
    /// Longest wait after a handshake that the peer refused. 1 s: it answers, so asking is cheap,
    /// and a NIC that it had withdrawn is to carry work again within 3 s of its return, even if
    /// nobody tells us of it. Such refusals do not make later waits longer either. The same holds
    /// for a peer that does not answer while another rail to it works.
    pub refused_wait_max: Duration,
    /// How long a rail must work before its past is forgotten. 10 s.
    pub stable_after: Duration,
    /// How long a rail stays suspect. 60 s.
    pub suspect_for: Duration,
    /// How long a handshake may take before it is given up. 10 s.
    pub connect_timeout: Duration,
    /// How long a probe may take. 1 s.
    pub probe_timeout: Duration,
    /// Handshakes under way over one local NIC at most. 64: a dead peer holds one for its whole
    /// time-out.
    pub connects_per_nic_max: usize,
    /// Probes under way over one local NIC at most. 8.
    pub probes_per_nic_max: usize,
    /// Endpoints lost to faults of single requests, or closed by the peer, that are replaced
    /// without a back-off until the rail has worked for [`RailConfig::stable_after`]. 3.
    pub free_reconnects: u32,
}

impl Default for RailConfig {
    fn default() -> Self {
        Self {
            backoff_min: Duration::from_millis(250),
            backoff_max: Duration::from_secs(30),
            last_path_retry: Duration::from_secs(1),
            refused_wait_max: Duration::from_secs(1),
            stable_after: Duration::from_secs(10),
            suspect_for: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(10),
            probe_timeout: Duration::from_secs(1),
            connects_per_nic_max: 64,
            probes_per_nic_max: 8,
            free_reconnects: 3,
        }
    }
}

/// What is known of a peer as a whole.
#[derive(Clone, Debug, Default)]
struct Peer {
    gone: bool,
    /// When one of its rails may be tried out of turn because none works.
    last_path_at: Time,
}

/// All rails of an engine. See the [module](self).
#[derive(Clone, Debug)]
pub struct Rails {
    config: RailConfig,
    rails: BTreeMap<RailId, Rail>,
    locals: BTreeMap<LocalNic, LocalGate>,
    peers: BTreeMap<PeerId, Peer>,
    withdrawn: BTreeSet<PeerNic>,
    blame: Blame,
    /// Rails by their next time-out.
    timers: BTreeSet<(Time, RailId)>,
    /// Handshakes and probes under way, by local NIC.
    running: BTreeMap<(LocalNic, Step), usize>,
    /// Rails that wait for a place, in their order: by failed attempts, then by their coming.
    waiting: BTreeSet<(LocalNic, Step, u32, u64, RailId)>,
    tickets: u64,
    probes: u64,
    rng: SmallRng,
    out: VecDeque<Action>,
}

impl Rails {
    /// No rails yet. Gates are closed until [`Input::LocalGate`] opens them.
    pub fn new(config: RailConfig, seed: u64) -> Self {
        Self {
            config,
            rails: BTreeMap::new(),
            locals: BTreeMap::new(),
            peers: BTreeMap::new(),
            withdrawn: BTreeSet::new(),
            blame: Blame::default(),
            timers: BTreeSet::new(),
            running: BTreeMap::new(),
            waiting: BTreeSet::new(),
            tickets: 0,
            probes: 0,
            rng: SmallRng::seed_from_u64(seed),
            out: VecDeque::new(),
        }
    }

    /// State of a rail; `None` if it was not declared.
    pub fn state(&self, rail: RailId) -> Option<RailState> {
        self.rails.get(&rail).map(|rail| rail.state)
    }

    /// The measured rate of a rail in bytes a second, for progress deadlines.
    pub fn measured_rate(&self, rail: RailId) -> Option<u64> {
        self.rails
            .get(&rail)
            .and_then(|rail| rail.rate.bytes_per_s())
    }

    /// Handshakes and probes under way over a local NIC.
    pub fn proofs_running(&self, local: LocalNic) -> (usize, usize) {
        let running = |step| self.running.get(&(local, step)).copied().unwrap_or(0);
        (running(Step::Connect), running(Step::Probe))
    }

    fn is_gone(&self, peer: PeerId) -> bool {
        self.peers.get(&peer).is_some_and(|peer| peer.gone)
    }

    /// Whether both ends of a rail may be used, and its peer is there.
    fn gates_open(&self, id: RailId) -> bool {
        matches!(self.locals.get(&id.local), Some(LocalGate::Open { .. }))
            && !self.withdrawn.contains(&id.peer)
            && !self.is_gone(id.peer.peer)
    }

    /// Whether another rail of the same peer carries work.
    fn has_other_usable(&self, id: RailId) -> bool {
        self.rails
            .range(RailId::range_of(id.peer.peer))
            .any(|(other, rail)| *other != id && rail.is_usable())
    }

    fn set_state(&mut self, id: RailId, to: RailState, cause: RailCause) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        #[cfg(test)]
        super::seen::follows_on(&rail.state, &to);
        let from = std::mem::replace(&mut rail.state, to);
        if to == RailState::Down && rail.first_cause.is_none() {
            rail.first_cause = Some(cause.clone());
        }
        if from != to {
            self.out.push_back(Action::State {
                rail: id,
                from,
                to,
                cause,
                first_cause: rail.first_cause.clone(),
            });
        }
    }

    /// Takes a rail down for an error of its own. `free` asks for a next try without a back-off.
    fn lose(&mut self, now: Time, id: RailId, cause: RailCause, free: bool) {
        self.lose_within(now, id, cause, free, Duration::MAX);
    }

    /// The same, with the next try after at most `wait_max`.
    fn lose_within(
        &mut self,
        now: Time,
        id: RailId,
        cause: RailCause,
        free: bool,
        wait_max: Duration,
    ) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        if rail.state == RailState::Down {
            return;
        }
        if rail.is_usable() {
            rail.damping.flap(now);
        }
        rail.up_since = None;
        rail.request_faults += u32::from(free);
        rail.retry_at = if free && rail.request_faults <= self.config.free_reconnects {
            now
        } else {
            now + rail.backoff.next_wait_within(wait_max, &mut self.rng)
        };
        if let Some(peer) = self.peers.get_mut(&id.peer.peer) {
            peer.last_path_at = peer.last_path_at.max(now + self.config.backoff_min);
        }
        self.drop_endpoint(id);
        self.end_proof(now, id);
        self.set_state(id, RailState::Down, cause);
        self.refile_peer(id.peer.peer);
    }

    /// Takes a rail out because a gate is closed or its peer is gone. Counts as a flap, not as a
    /// failed attempt. `keep` leaves its endpoint, which then must be probed before it is used.
    fn shut(&mut self, now: Time, id: RailId, cause: RailCause, keep: bool) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        if rail.is_usable() {
            rail.damping.flap(now);
        }
        rail.up_since = None;
        rail.retry_at = now;
        let connecting = matches!(rail.proof, Proof::Connecting { .. });
        if connecting || !keep {
            self.drop_endpoint(id);
        }
        self.end_proof(now, id);
        self.set_state(id, RailState::Down, cause);
    }

    fn drop_endpoint(&mut self, id: RailId) {
        if let Some(rail) = self.rails.get_mut(&id)
            && (rail.connected || rail.proof.is_running())
        {
            rail.connected = false;
            self.out.push_back(Action::DropEndpoint { rail: id });
        }
    }

    /// Good news for the rails that `concerns`: those that may be tried now are tried.
    fn good_news(&mut self, now: Time, concerns: impl Fn(RailId) -> bool) {
        let ids: Vec<_> = self
            .rails
            .keys()
            .copied()
            .filter(|id| concerns(*id))
            .collect();
        for id in &ids {
            if let Some(rail) = self.rails.get_mut(id)
                && rail.state == RailState::Down
            {
                rail.retry_at = now;
            }
        }
        self.refile_peers(ids);
    }

    fn shut_all(
        &mut self,
        now: Time,
        cause: &RailCause,
        keep: bool,
        concerns: impl Fn(RailId) -> bool,
    ) {
        let ids: Vec<_> = self
            .rails
            .keys()
            .copied()
            .filter(|id| concerns(*id))
            .collect();
        for id in &ids {
            self.shut(now, *id, cause.clone(), keep);
        }
        self.refile_peers(ids);
    }

    /// When a rail that is down is tried again; `None` while a gate is closed.
    fn retry_due(&self, id: RailId) -> Option<Time> {
        let rail = self.rails.get(&id)?;
        if rail.state != RailState::Down || !self.gates_open(id) {
            return None;
        }
        if self.has_other_usable(id) {
            return Some(rail.retry_at.max(rail.damping.held_until()));
        }
        // No rail of the peer works: damping does not count, and the rail whose turn is next is
        // tried out of turn, so that a long back-off cannot outlive the outage by much.
        let next = self
            .rails
            .range(RailId::range_of(id.peer.peer))
            .filter(|(other, rail)| rail.state == RailState::Down && self.gates_open(**other))
            .map(|(other, rail)| (!rail.wanted, rail.retry_at, *other))
            .min();
        if next.is_some_and(|(.., next)| next == id) {
            let peer = self.peers.get(&id.peer.peer);
            let out_of_turn = peer.map_or(Time::ZERO, |peer| peer.last_path_at);
            return Some(rail.retry_at.min(out_of_turn));
        }
        Some(rail.retry_at)
    }

    fn timer(&self, id: RailId) -> Option<Time> {
        let rail = self.rails.get(&id)?;
        match rail.state {
            RailState::Down => self.retry_due(id),
            RailState::HalfOpen => match rail.proof {
                Proof::Connecting { until } | Proof::Probing { until, .. } => Some(until),
                Proof::None | Proof::Waiting => None,
            },
            RailState::Suspect => Some(rail.suspect_until),
            RailState::Up => {
                let has_past = rail.backoff.attempts() > 0
                    || rail.first_cause.is_some()
                    || rail.request_faults > 0;
                let stable = rail.up_since.map(|since| since + self.config.stable_after);
                stable.filter(|_| has_past)
            }
        }
    }

    fn refile(&mut self, id: RailId) {
        let timer = self.timer(id);
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        if rail.timer != timer {
            if let Some(old) = rail.timer {
                self.timers.remove(&(old, id));
            }
            rail.timer = timer;
            self.timers.extend(timer.map(|timer| (timer, id)));
        }
    }

    /// Whether one rail is tried out of turn depends on its neighbours, so all are filed anew.
    fn refile_peer(&mut self, peer: PeerId) {
        let ids: Vec<_> = self
            .rails
            .range(RailId::range_of(peer))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            self.refile(id);
        }
    }

    fn refile_peers(&mut self, ids: Vec<RailId>) {
        let peers: BTreeSet<_> = ids.into_iter().map(|id| id.peer.peer).collect();
        for peer in peers {
            self.refile_peer(peer);
        }
    }

    fn due(&mut self, now: Time, id: RailId) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        match rail.state {
            RailState::Down => {
                let alone = !self.has_other_usable(id);
                if alone && let Some(peer) = self.peers.get_mut(&id.peer.peer) {
                    peer.last_path_at = now + self.config.last_path_retry;
                }
                self.half_open(now, id, RailCause::Retry);
            }
            RailState::HalfOpen => self.lose(now, id, RailCause::ProofTimeout, false),
            RailState::Suspect => {
                rail.up_since = Some(now);
                self.set_state(id, RailState::Up, RailCause::Proved);
            }
            RailState::Up => {
                rail.backoff.reset();
                rail.first_cause = None;
                rail.request_faults = 0;
            }
        }
        self.refile_peer(id.peer.peer);
    }

    /// An error of the path: the rail is lost, and if such errors spread, somebody is blamed.
    fn path_error(&mut self, now: Time, id: RailId, cause: RailCause) {
        if self.state(id).is_none_or(|state| state == RailState::Down) {
            return;
        }
        self.lose(now, id, cause, false);
        let peers: BTreeSet<_> = self
            .rails
            .keys()
            .filter(|other| other.local == id.local)
            .map(|other| other.peer.peer)
            .collect();
        match self.blame.error(now, id, peers.len()) {
            None => {}
            Some(Culprit::Local(local)) => {
                self.out.push_back(Action::RecheckLocal { local });
                self.doubt(now, &RailCause::LocalBlamed, |id| id.local == local);
            }
            Some(Culprit::Peer(nic)) => {
                self.out.push_back(Action::RefreshPeer { peer: nic.peer });
                self.doubt(now, &RailCause::PeerBlamed, |id| id.peer == nic);
            }
        }
    }

    /// Rails that share what is blamed are proved before they carry on; the last usable one of a
    /// peer carries on as suspect.
    fn doubt(&mut self, now: Time, cause: &RailCause, concerns: impl Fn(RailId) -> bool) {
        let doubted =
            |(id, rail): (&RailId, &Rail)| (rail.is_usable() && concerns(*id)).then_some(*id);
        let ids: Vec<_> = self.rails.iter().filter_map(doubted).collect();
        for id in ids {
            if self.has_other_usable(id) {
                self.half_open(now, id, cause.clone());
            } else {
                self.suspect(now, id, cause.clone());
            }
            self.refile_peer(id.peer.peer);
        }
    }

    fn suspect(&mut self, now: Time, id: RailId, cause: RailCause) {
        let until = now + self.config.suspect_for;
        if let Some(rail) = self.rails.get_mut(&id)
            && rail.is_usable()
        {
            rail.suspect_until = until;
            self.set_state(id, RailState::Suspect, cause);
            self.refile(id);
        }
    }

    fn declare(&mut self, id: RailId, traits: RailTraits) {
        if let Some(rail) = self.rails.get_mut(&id) {
            rail.traits = traits;
            return;
        }
        let backoff = Backoff::new(self.config.backoff_min, self.config.backoff_max);
        let mut rail = Rail::new(traits, backoff);
        self.peers.entry(id.peer.peer).or_default();
        if !self.gates_open(id) {
            rail.state = RailState::Down;
        }
        self.rails.insert(id, rail);
        self.refile_peer(id.peer.peer);
    }

    fn wanted(&mut self, now: Time, id: RailId) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        if !std::mem::replace(&mut rail.wanted, true) && rail.state == RailState::HalfOpen {
            self.queue_proof(now, id);
        }
        self.refile_peer(id.peer.peer);
    }

    fn unwanted(&mut self, now: Time, id: RailId) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        rail.wanted = false;
        if rail.state == RailState::HalfOpen && rail.proof != Proof::None {
            if matches!(rail.proof, Proof::Connecting { .. }) {
                self.drop_endpoint(id);
            }
            self.end_proof(now, id);
        }
        self.refile_peer(id.peer.peer);
    }

    fn forget(&mut self, now: Time, peer: PeerId) {
        self.shut_all(now, &RailCause::PeerNic, false, |id| id.peer.peer == peer);
        let ids: Vec<_> = self
            .rails
            .range(RailId::range_of(peer))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            if let Some(timer) = self.rails.remove(&id).and_then(|rail| rail.timer) {
                self.timers.remove(&(timer, id));
            }
        }
        self.peers.remove(&peer);
        self.withdrawn.retain(|nic| nic.peer != peer);
        self.blame.forget_peer(peer);
    }

    fn completion(&mut self, now: Time, id: RailId, status: WcStatus) {
        let cause = RailCause::Completion(status);
        match verdict(status) {
            // A flush tells of an error that was told by another completion or by nobody yet.
            Verdict::Done | Verdict::Flushed => {}
            Verdict::Request(_) => self.lose(now, id, cause, true),
            Verdict::LocalNic => {
                if self.state(id).is_some_and(|state| state != RailState::Down) {
                    self.out.push_back(Action::RecheckLocal { local: id.local });
                }
                self.lose(now, id, cause, false);
            }
            Verdict::Peer => {
                if self.state(id).is_some_and(|state| state != RailState::Down) {
                    let peer = id.peer.peer;
                    self.out.push_back(Action::RefreshPeer { peer });
                }
                self.lose(now, id, cause, false);
            }
            Verdict::Path => self.path_error(now, id, cause),
        }
    }

    fn endpoint_lost(&mut self, now: Time, id: RailId, cause: RailCause) {
        let Some(rail) = self.rails.get_mut(&id) else {
            return;
        };
        rail.connected = false;
        if rail.state == RailState::HalfOpen && rail.proof == Proof::None {
            // The peer had connected it, and nobody here wanted it.
            return;
        }
        match cause {
            RailCause::Completion(status) if verdict(status) != Verdict::Flushed => {
                self.completion(now, id, status);
            }
            RailCause::NoProgress => self.path_error(now, id, cause),
            RailCause::PeerClosed | RailCause::Closed => self.lose(now, id, cause, true),
            _ => self.lose(now, id, cause, false),
        }
    }

    fn local_gate(&mut self, now: Time, local: LocalNic, gate: LocalGate) {
        self.locals.insert(local, gate);
        let concerns = |id: RailId| id.local == local;
        match gate {
            LocalGate::Closed => self.shut_all(now, &RailCause::LocalPort, true, concerns),
            LocalGate::Dead => self.shut_all(now, &RailCause::LocalPort, false, concerns),
            LocalGate::Open { endpoints_kept } => {
                if !endpoints_kept {
                    // The observer has had them cut already.
                    for (id, rail) in &mut self.rails {
                        if concerns(*id) && rail.state == RailState::Down {
                            rail.connected = false;
                        }
                    }
                }
                self.good_news(now, concerns);
            }
        }
    }
}

impl Machine for Rails {
    type Input = Input;
    type Action = Action;

    fn handle(&mut self, now: Time, input: Input) {
        match input {
            Input::Declare { rail, traits } => self.declare(rail, traits),
            Input::Wanted { rail } => self.wanted(now, rail),
            Input::Unwanted { rail } => self.unwanted(now, rail),
            Input::ForgetPeer { peer } => self.forget(now, peer),
            Input::PeerGone { peer } => {
                if let Some(entry) = self.peers.get_mut(&peer) {
                    entry.gone = true;
                    self.shut_all(now, &RailCause::PeerNic, false, |id| id.peer.peer == peer);
                }
            }
            Input::LocalGate { local, gate } => self.local_gate(now, local, gate),
            Input::PeerNicGate { nic, up: true } => {
                self.withdrawn.remove(&nic);
                self.good_news(now, |id| id.peer == nic);
            }
            Input::PeerNicGate { nic, up: false } => {
                if self.peers.contains_key(&nic.peer) {
                    self.withdrawn.insert(nic);
                    self.shut_all(now, &RailCause::PeerNic, false, |id| id.peer == nic);
                }
            }
            Input::Connected { rail } => self.connected(now, rail),
            Input::ConnectFailed {
                rail,
                reason,
                fault,
            } => self.connect_failed(now, rail, reason, fault),
            Input::ProbeDone {
                rail,
                probe,
                status,
            } => self.probe_done(now, rail, probe, status),
            Input::Completion { rail, status } => self.completion(now, rail, status),
            Input::EndpointLost { rail, cause } => self.endpoint_lost(now, rail, cause),
            Input::Progress { rail, bytes, took } => {
                if let Some(rail) = self.rails.get_mut(&rail) {
                    rail.rate.sample(bytes, took);
                }
            }
            Input::Slow { rail } => self.suspect(now, rail, RailCause::Slow),
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        // At most one turn for each rail: a rail that is due again at once waits for the next call.
        for _ in 0..self.rails.len() {
            match self.timers.first().copied() {
                Some((due, id)) if due <= now => self.due(now, id),
                _ => return,
            }
        }
    }

    fn poll(&mut self) -> Option<Action> {
        self.out.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.timers.first().map(|(due, _)| *due)
    }
}
