//! Peers and the rails that lead to them.
//!
//! Rails are shared between the threads that submit, post and connect, so that all of it is
//! atomics: a snapshot of what the rail machine has decided, which its driver
//! ([`keeper`](super::keeper)) stores, and counters of the data thread. Deliberately not here: any
//! decision.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption, Guard};
use rerail_verbs::{Gid, RemoteAddress};

pub use crate::machine::rail::RailState;

use super::paths::MTU_SAFE;
use super::slice::{Keys, Span};
use crate::machine::Time;
use crate::machine::ids::{LocalNic, PeerId, RailId};
use crate::machine::rail::{ProbeKind, RailTraits, nominal_bytes_per_s};

/// So often in a row the end of a connection that the peer builds anew is followed at once.
const REBUILT_MAX: u32 = 3;

/// How long no memory of a peer is probed after a key of it was refused: it may not be meant to be
/// read.
const MEMORY_REFUSED: Duration = Duration::from_secs(60);

/// The same where it is not known whether it was: longer than until a rail is tried again.
const MEMORY_DOUBTED: Duration = Duration::from_secs(3);

/// A NIC of a peer, as its record describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerNic {
    /// Position in the record's `devices[]`, and so in every `rkey[]`.
    pub index: u32,
    /// NIC path: the peer's server name, `@`, the device's name.
    pub path: String,
    /// GID in the record.
    pub gid: Gid,
    /// LID in the record.
    pub lid: u16,
}

/// A peer: one segment of one instance, with all rails that lead to it.
#[derive(Debug)]
pub struct Peer {
    shared: Arc<Shared>,
    /// Replaced whole when either side has one more NIC.
    rails: ArcSwap<RailTable>,
    /// Held while that is done.
    growing: Mutex<()>,
}

/// All rails to a peer: by local NIC, and then by peer NIC.
#[derive(Debug)]
pub struct RailTable {
    nics: Vec<PeerNic>,
    rails: Vec<Arc<Rail>>,
}

impl RailTable {
    /// The rails that begin at the local NIC of a position; none if it is not known here.
    pub(super) fn of_local(&self, local: usize) -> &[Arc<Rail>] {
        let per_nic = self.nics.len();
        let first = local.saturating_mul(per_nic);
        let own = self.rails.get(first..first.saturating_add(per_nic));
        own.unwrap_or_default()
    }

    /// Local NICs that it has rails from.
    fn locals(&self) -> usize {
        self.rails.len().checked_div(self.nics.len()).unwrap_or(0)
    }
}

impl Deref for RailTable {
    type Target = [Arc<Rail>];

    fn deref(&self) -> &Self::Target {
        &self.rails
    }
}

/// What all rails to a peer share.
#[derive(Debug)]
struct Shared {
    id: PeerId,
    segment: String,
    server: String,
    instance: Option<String>,
    restarted: AtomicBool,
    gone: AtomicBool,
    /// Nanoseconds of the time at which it was last sent to.
    used_at: AtomicU64,
    /// Nanoseconds of the time at which further rails are tried, while work waits for one; else 0.
    widen_at: AtomicU64,
    /// Memory that probes read.
    memory: ArcSwapOption<ProbedMemory>,
    /// Nanoseconds of the time before which no memory is probed.
    memory_refused_until: AtomicU64,
}

/// A part of a peer's registered memory.
#[derive(Debug)]
struct ProbedMemory {
    addr: u64,
    length: u64,
    rkeys: Arc<Keys>,
}

/// What a peer is made of.
#[derive(Clone, Debug)]
pub struct PeerSpec {
    /// A number that no other peer of this engine has or had.
    pub id: PeerId,
    /// Name of its segment, for errors.
    pub segment: String,
    /// Server name, in front of the `@` of its NIC paths: whom to ask for connections.
    pub server: String,
    /// Its instance, if it is a Rerail peer.
    pub instance: Option<String>,
    /// Its NICs.
    pub nics: Vec<PeerNic>,
}

impl Peer {
    /// A peer with one rail from each of `locals` (names of the own NICs, in order) to each of its
    /// NICs.
    pub fn new(spec: PeerSpec, locals: &[String]) -> Arc<Self> {
        let shared = Arc::new(Shared {
            id: spec.id,
            segment: spec.segment,
            server: spec.server,
            instance: spec.instance,
            restarted: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            used_at: AtomicU64::new(0),
            widen_at: AtomicU64::new(0),
            memory: ArcSwapOption::empty(),
            memory_refused_until: AtomicU64::new(0),
        });
        let peer = Arc::new(Self {
            shared,
            rails: ArcSwap::from_pointee(RailTable {
                nics: Vec::new(),
                rails: Vec::new(),
            }),
            growing: Mutex::new(()),
        });
        peer.grow(locals, &spec.nics);
        peer
    }

    /// Makes the rails that are missing: from each of `locals` to each of `nics`, both in order,
    /// of which those that are known already are the first. Fewer than are known mean nothing: no
    /// rail goes. Returns the new ones.
    pub(super) fn grow(&self, locals: &[String], nics: &[PeerNic]) -> Vec<Arc<Rail>> {
        // It guards nothing that could be broken.
        let _one_at_a_time = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.rails.load_full();
        let (known_locals, known_nics) = (known.locals(), known.nics.len());
        let nics = if nics.len() > known_nics {
            nics
        } else {
            &known.nics
        };
        if locals.len() <= known_locals && nics.len() == known_nics {
            return Vec::new();
        }
        let count = locals.len().max(known_locals);
        let mut rails = Vec::with_capacity(count * nics.len());
        let mut new = Vec::new();
        for local in 0..count {
            let known = known.of_local(local);
            let name = known.first().map(|rail| rail.local_name());
            let name = locals.get(local).map_or(name, |name| Some(name));
            for (at, nic) in nics.iter().enumerate() {
                let rail = known.get(at).cloned().unwrap_or_else(|| {
                    let id = RailId::new(LocalNic(local as u32), self.shared.id, nic.index);
                    let name = name.unwrap_or_default();
                    let rail = Arc::new(Rail::new(id, name, nic, &self.shared));
                    new.push(Arc::clone(&rail));
                    rail
                });
                rails.push(rail);
            }
        }
        let nics = nics.to_vec();
        // What probes read has no keys for new NICs.
        self.shared.memory.store(None);
        self.rails.store(Arc::new(RailTable { nics, rails }));
        new
    }

    /// Takes in the addresses that these NICs have now, where they differ: a NIC that was taken in
    /// late was told of before it had one, and any may be renumbered. Returns the rails to those.
    pub(super) fn readdress(&self, nics: &[PeerNic]) -> Vec<Arc<Rail>> {
        // It guards nothing that could be broken.
        let _one_at_a_time = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.rails.load_full();
        let moved = |known: &PeerNic, nic: &PeerNic| {
            known.path == nic.path && (known.gid, known.lid) != (nic.gid, nic.lid)
        };
        let mut all = known.nics.clone();
        let mut rails = Vec::new();
        let pairs = all.iter_mut().zip(nics).enumerate();
        for (at, (known_nic, nic)) in pairs.filter(|(_, (known, nic))| moved(known, nic)) {
            known_nic.clone_from(nic);
            for local in 0..known.locals() {
                if let Some(rail) = known.of_local(local).get(at) {
                    rail.set_peer_nic(nic);
                    rails.push(Arc::clone(rail));
                }
            }
        }
        if !rails.is_empty() {
            let (nics, rails) = (all, known.rails.clone());
            self.rails.store(Arc::new(RailTable { nics, rails }));
        }
        rails
    }

    /// Its number.
    pub fn id(&self) -> PeerId {
        self.shared.id
    }

    /// Name of its segment.
    pub fn segment(&self) -> &str {
        &self.shared.segment
    }

    /// Server name of its NIC paths.
    pub fn server(&self) -> &str {
        &self.shared.server
    }

    /// Its instance, if it is a Rerail peer.
    pub fn instance(&self) -> Option<&str> {
        self.shared.instance.as_deref()
    }

    /// True once another process has answered in its place: its addresses mean nothing any more.
    pub fn is_restarted(&self) -> bool {
        self.shared.restarted.load(Ordering::Acquire)
    }

    /// True once its record is withdrawn or superseded.
    pub fn is_gone(&self) -> bool {
        self.shared.gone.load(Ordering::Acquire)
    }

    /// All rails to it as they are now, by local NIC and then by peer NIC.
    pub fn rails(&self) -> Arc<RailTable> {
        self.rails.load_full()
    }

    /// The same, for a short look.
    pub(super) fn table(&self) -> Guard<Arc<RailTable>> {
        self.rails.load()
    }

    pub(super) fn set_restarted(&self) {
        self.shared.restarted.store(true, Ordering::Release);
    }

    pub(super) fn set_gone(&self) {
        self.shared.gone.store(true, Ordering::Release);
    }

    /// Notes that there is work for it, and which of its memory probes may read.
    pub(super) fn used(&self, now: Time, remote: &Span) {
        let shared = &self.shared;
        shared.used_at.store(now.as_nanos(), Ordering::Relaxed);
        if shared.memory.load().is_none()
            && now.as_nanos() >= shared.memory_refused_until.load(Ordering::Relaxed)
            && let Some((addr, length, rkeys)) = remote.at(0)
            && !rkeys.is_superseded()
        {
            shared.memory.store(Some(Arc::new(ProbedMemory {
                addr,
                length,
                rkeys: Arc::clone(rkeys),
            })));
        }
    }

    /// Called while work waits for a rail: true once every `patience`.
    pub(super) fn waits_too_long(&self, now: Time, patience: Duration) -> bool {
        let widen_at = &self.shared.widen_at;
        let due = widen_at.load(Ordering::Relaxed);
        let is_over = due != 0 && now.as_nanos() >= due;
        if due == 0 || is_over {
            widen_at.store((now + patience).as_nanos(), Ordering::Relaxed);
        }
        is_over
    }

    /// There is a rail for its work.
    pub(super) fn waits_no_more(&self) {
        self.shared.widen_at.store(0, Ordering::Relaxed);
    }

    /// When there was last work for it.
    pub(super) fn used_at(&self) -> Time {
        Time::from_nanos(self.shared.used_at.load(Ordering::Relaxed))
    }
}

/// What a rail has done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RailStats {
    /// Name of the local NIC.
    pub local: String,
    /// NIC path of the peer.
    pub peer: String,
    /// Bytes moved.
    pub bytes: u64,
    /// Endpoints that broke, connections and probes that failed.
    pub errors: u64,
    /// State.
    pub state: RailState,
}

/// A local NIC and a peer's NIC.
pub struct Rail {
    id: RailId,
    local_name: String,
    /// Its path and position stay; its address is replaced when the peer's record has another.
    nic: ArcSwap<PeerNic>,
    peer: Arc<Shared>,
    /// What the machine says. Written by its driver only.
    state: AtomicU8,
    /// The data thread has a link for it. Written by the data thread only.
    linked: AtomicBool,
    /// The machine was told that there is work for it.
    wanted: AtomicBool,
    /// Measured rate; 0 before it is known.
    bytes_per_s: AtomicU64,
    /// Rate of the ports.
    nominal_bytes_per_s: AtomicU64,
    same_subnet: AtomicBool,
    /// The endpoint that it was last bound to. Written by the connector only.
    endpoint: AtomicU64,
    /// The probe that its present connection has not passed yet. Written by the keeper only.
    unproved: AtomicU8,
    /// Its present connection has moved more at once than the shortest path MTU in use.
    moved_long: AtomicBool,
    /// How often in a row the peer built its end anew before there was a connection.
    rebuilt: AtomicU32,
    in_flight_bytes: AtomicU64,
    queued_bytes: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    /// Position in the data thread's list; `u32::MAX` before it knows the rail.
    slot: AtomicU32,
    trouble: Mutex<Option<String>>,
}

/// The peer of rails that lead nowhere. Engines count theirs from 1.
const NOBODY: PeerId = PeerId(u64::MAX);

impl Rail {
    /// A rail that stands for ends which no rail uses; `locals` are the names of the own NICs.
    pub(super) fn to_nowhere(local: LocalNic, locals: &[String]) -> Option<Arc<Self>> {
        let nic = PeerNic {
            index: 0,
            path: "whoever opened it".to_owned(),
            gid: Gid::NULL,
            lid: 0,
        };
        let spec = PeerSpec {
            id: NOBODY,
            segment: String::new(),
            server: String::new(),
            instance: None,
            nics: vec![nic],
        };
        let peer = Peer::new(spec, locals);
        peer.table().of_local(local.0 as usize).first().cloned()
    }

    /// Whether a rail of that number leads nowhere.
    pub(super) fn is_to_nowhere(id: RailId) -> bool {
        id.peer.peer == NOBODY
    }

    fn new(id: RailId, local_name: &str, nic: &PeerNic, peer: &Arc<Shared>) -> Self {
        Self {
            id,
            local_name: local_name.to_owned(),
            nic: ArcSwap::from_pointee(nic.clone()),
            peer: Arc::clone(peer),
            state: AtomicU8::new(to_u8(RailState::HalfOpen)),
            linked: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            bytes_per_s: AtomicU64::new(0),
            nominal_bytes_per_s: AtomicU64::new(0),
            same_subnet: AtomicBool::new(false),
            endpoint: AtomicU64::new(0),
            unproved: AtomicU8::new(0),
            moved_long: AtomicBool::new(false),
            rebuilt: AtomicU32::new(0),
            in_flight_bytes: AtomicU64::new(0),
            queued_bytes: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            slot: AtomicU32::new(u32::MAX),
            trouble: Mutex::new(None),
        }
    }

    /// Its two ends.
    pub fn id(&self) -> RailId {
        self.id
    }

    /// Name of the local NIC.
    pub fn local_name(&self) -> &str {
        &self.local_name
    }

    /// The far end, as the peer's record has it now.
    pub fn peer_nic(&self) -> Arc<PeerNic> {
        self.nic.load_full()
    }

    /// Position of the far end among the peer's NICs.
    pub fn peer_position(&self) -> usize {
        self.id.peer.nic as usize
    }

    fn set_peer_nic(&self, nic: &PeerNic) {
        self.nic.store(Arc::new(nic.clone()));
    }

    /// The peer's server name.
    pub fn server(&self) -> &str {
        &self.peer.server
    }

    /// The peer's segment.
    pub fn segment(&self) -> &str {
        &self.peer.segment
    }

    /// The peer's instance.
    pub fn instance(&self) -> Option<&str> {
        self.peer.instance.as_deref()
    }

    /// Its state, as the machine has decided.
    pub fn state(&self) -> RailState {
        from_u8(self.state.load(Ordering::Acquire))
    }

    /// True if the machine has proved it: it may carry user work.
    pub fn is_proved(&self) -> bool {
        matches!(self.state(), RailState::Up | RailState::Suspect)
    }

    /// True if work that is given to it now can be posted.
    pub fn is_usable(&self) -> bool {
        self.is_proved() && self.linked.load(Ordering::Acquire)
    }

    /// Bytes that it was given and has not moved.
    pub fn load_bytes(&self) -> u64 {
        self.in_flight_bytes.load(Ordering::Relaxed) + self.queued_bytes.load(Ordering::Relaxed)
    }

    /// Its state, with what it has moved.
    pub fn stats(&self) -> RailStats {
        RailStats {
            local: self.local_name.clone(),
            peer: self.nic.load().path.clone(),
            bytes: self.bytes.load(Ordering::Relaxed),
            errors: self.errors.load(Ordering::Relaxed),
            state: self.state(),
        }
    }

    /// The last thing that went wrong on it, in words.
    pub fn last_trouble(&self) -> Option<String> {
        self.trouble().clone()
    }

    pub(super) fn set_state(&self, state: RailState) {
        self.state.store(to_u8(state), Ordering::Release);
    }

    /// Notes why it went down, and counts it if it is an error of its own. True for the first.
    pub(super) fn went_down(&self, cause: String, is_error: bool) -> bool {
        *self.trouble() = Some(cause);
        is_error && self.errors.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Another process answered in its peer's place: nothing goes to the peer any more.
    pub(super) fn peer_restarted(&self) {
        self.peer.restarted.store(true, Ordering::Release);
    }

    pub(super) fn set_linked(&self, linked: bool) {
        self.linked.store(linked, Ordering::Release);
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Sets whether there is work for it, and returns whether there was.
    pub(super) fn set_wanted(&self, wanted: bool) -> bool {
        self.wanted.swap(wanted, Ordering::Relaxed)
    }

    pub(super) fn set_traits(&self, traits: RailTraits) {
        let nominal = nominal_bytes_per_s(traits);
        self.nominal_bytes_per_s.store(nominal, Ordering::Relaxed);
        self.same_subnet
            .store(traits.same_subnet, Ordering::Relaxed);
    }

    pub(super) fn is_same_subnet(&self) -> bool {
        self.same_subnet.load(Ordering::Relaxed)
    }

    pub(super) fn set_measured(&self, bytes_per_s: u64) {
        self.bytes_per_s.store(bytes_per_s, Ordering::Relaxed);
    }

    /// The measured rate.
    pub(super) fn measured_bytes_per_s(&self) -> Option<u64> {
        Some(self.bytes_per_s.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// The rate of the ports.
    pub(super) fn nominal_bytes_per_s(&self) -> u64 {
        self.nominal_bytes_per_s.load(Ordering::Relaxed)
    }

    /// Sets the probe that its connection is to pass; `None` once it has.
    pub(super) fn set_unproved(&self, probe: Option<ProbeKind>) {
        let probe = match probe {
            None => 0,
            Some(ProbeKind::ZeroLengthRead) => 1,
            Some(ProbeKind::FullMtuRead) => 2,
        };
        self.unproved.store(probe, Ordering::Release);
    }

    /// The probe that its connection has not passed.
    pub(super) fn unproved(&self) -> Option<ProbeKind> {
        match self.unproved.load(Ordering::Acquire) {
            0 => None,
            1 => Some(ProbeKind::ZeroLengthRead),
            _ => Some(ProbeKind::FullMtuRead),
        }
    }

    /// A new connection carries its work from now on.
    pub(super) fn begins(&self) {
        self.rebuilt.store(0, Ordering::Relaxed);
        self.set_unproved(Some(ProbeKind::ZeroLengthRead));
        self.moved_long.store(false, Ordering::Relaxed);
    }

    /// The peer has built its end anew before there was a connection: whether another is asked for
    /// at once. Mostly the peer is about to connect it itself; two processes of one name each do,
    /// and for ever.
    pub(super) fn follows_rebuilding(&self) -> bool {
        let follows = self.rebuilt.fetch_add(1, Ordering::Relaxed) < REBUILT_MAX;
        if !follows {
            // From the next time on that it is tried.
            self.rebuilt.store(0, Ordering::Relaxed);
        }
        follows
    }

    /// Whether long packets have got through on its connection.
    pub(super) fn has_moved_long(&self) -> bool {
        self.moved_long.load(Ordering::Relaxed)
    }

    pub(super) fn set_endpoint(&self, endpoint: u64) {
        self.endpoint.store(endpoint, Ordering::Release);
    }

    pub(super) fn endpoint(&self) -> u64 {
        self.endpoint.load(Ordering::Acquire)
    }

    /// Memory of the peer that a probe of at most `length` bytes may read, and how much of it.
    pub(super) fn probed_memory(&self, length: u32) -> Option<(RemoteAddress, u32)> {
        let memory = self.peer.memory.load_full()?;
        if memory.rkeys.is_superseded() {
            // Whoever moves something next knows the keys of now.
            self.peer.memory.store(None);
            return None;
        }
        let rkey = memory.rkeys.get(self.peer_position())?;
        let length = u64::from(length).min(memory.length) as u32;
        let addr = memory.addr;
        Some((RemoteAddress { addr, rkey }, length))
    }

    /// A key of the peer's memory was refused.
    pub(super) fn refuse_memory(&self, now: Time) {
        self.leave_memory(now + MEMORY_REFUSED);
    }

    /// A key of the peer's memory may have been refused.
    pub(super) fn doubt_memory(&self, now: Time) {
        self.leave_memory(now + MEMORY_DOUBTED);
    }

    fn leave_memory(&self, until: Time) {
        let known = &self.peer.memory_refused_until;
        known.fetch_max(until.as_nanos(), Ordering::Relaxed);
        self.peer.memory.store(None);
    }

    pub(super) fn queued(&self, bytes: u64) {
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn dequeued(&self, bytes: u64) {
        self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn posted(&self, bytes: u64) {
        self.in_flight_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn moved(&self, bytes: u64) {
        self.in_flight_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if bytes > u64::from(MTU_SAFE.bytes()) && !self.has_moved_long() {
            self.moved_long.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn abandoned(&self, bytes: u64) {
        self.in_flight_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn slot(&self) -> Option<usize> {
        let slot = self.slot.load(Ordering::Relaxed);
        (slot != u32::MAX).then_some(slot as usize)
    }

    pub(super) fn set_slot(&self, slot: usize) {
        self.slot.store(slot as u32, Ordering::Relaxed);
    }

    fn trouble(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        // Nothing under the lock can panic half-way, so a poisoned one is whole.
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn to_u8(state: RailState) -> u8 {
    match state {
        RailState::Up => 0,
        RailState::Suspect => 1,
        RailState::Down => 2,
        RailState::HalfOpen => 3,
    }
}

fn from_u8(state: u8) -> RailState {
    match state {
        0 => RailState::Up,
        1 => RailState::Suspect,
        2 => RailState::Down,
        _ => RailState::HalfOpen,
    }
}

impl fmt::Display for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} - {}", self.local_name, self.nic.load().path)
    }
}

impl fmt::Debug for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
