//! Peers and the rails that lead to them.
//!
//! Thin on purpose: whether a rail may be used is a mark with a back-off here. Rails are shared
//! between the threads that submit, post and connect, so that all of it is atomics.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rerail_verbs::Gid;

use crate::machine::Time;
use crate::machine::backoff::Backoff;
use crate::machine::ids::{LocalNic, PeerId, RailId};

/// Shortest and longest back-off of a rail that failed (design §6).
const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// How long a data thread keeps a rail from work by itself. The control side answers its report
/// within milliseconds; were the answer lost, the rail must not be.
const SUSPENSION: Duration = Duration::from_secs(1);

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
    id: PeerId,
    segment: String,
    server: String,
    instance: Option<String>,
    restarted: Arc<AtomicBool>,
    nics: Vec<PeerNic>,
    rails: Vec<Arc<Rail>>,
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
        let restarted = Arc::new(AtomicBool::new(false));
        let mut rails = Vec::with_capacity(locals.len() * spec.nics.len());
        for (local, name) in locals.iter().enumerate() {
            for nic in &spec.nics {
                let id = RailId::new(LocalNic(local as u32), spec.id, nic.index);
                rails.push(Arc::new(Rail::new(id, name, nic, &spec, &restarted)));
            }
        }
        Arc::new(Self {
            id: spec.id,
            segment: spec.segment,
            server: spec.server,
            instance: spec.instance,
            restarted,
            nics: spec.nics,
            rails,
        })
    }

    /// True if it is what `spec` describes, whatever its number: its rails can be used on.
    pub fn is_same(&self, spec: &PeerSpec) -> bool {
        self.segment == spec.segment
            && self.server == spec.server
            && self.instance == spec.instance
            && self.nics == spec.nics
    }

    /// Its number.
    pub fn id(&self) -> PeerId {
        self.id
    }

    /// Name of its segment.
    pub fn segment(&self) -> &str {
        &self.segment
    }

    /// Server name of its NIC paths.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Its instance, if it is a Rerail peer.
    pub fn instance(&self) -> Option<&str> {
        self.instance.as_deref()
    }

    /// True once another process has answered in its place: its addresses mean nothing any more.
    pub fn is_restarted(&self) -> bool {
        self.restarted.load(Ordering::Acquire)
    }

    /// All rails to it, by local NIC and then by peer NIC.
    pub fn rails(&self) -> &[Arc<Rail>] {
        &self.rails
    }
}

/// How a rail stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum RailState {
    /// Not connected, and nothing speaks against it.
    Idle,
    /// Being connected.
    Connecting,
    /// Connected.
    Up,
    /// Not used until its back-off ends.
    Down,
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
    /// Endpoints that broke, and connections that failed.
    pub errors: u64,
    /// State.
    pub state: RailState,
}

/// A local NIC and a peer's NIC.
pub struct Rail {
    id: RailId,
    local_name: String,
    nic: PeerNic,
    server: String,
    segment: String,
    instance: Option<String>,
    /// Shared by all rails to the peer.
    peer_restarted: Arc<AtomicBool>,
    state: AtomicU8,
    /// Nanoseconds of the time before which the rail is not to be used.
    down_until: AtomicU64,
    in_flight_bytes: AtomicU64,
    queued_bytes: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    /// Position in the data thread's list; `u32::MAX` before it knows the rail.
    slot: AtomicU32,
    trouble: Mutex<Trouble>,
}

struct Trouble {
    backoff: Backoff,
    rng: SmallRng,
    last: Option<String>,
}

impl Rail {
    fn new(
        id: RailId,
        local_name: &str,
        nic: &PeerNic,
        peer: &PeerSpec,
        peer_restarted: &Arc<AtomicBool>,
    ) -> Self {
        // Jitter has to differ between rails, and to repeat under a seed.
        let seed = peer.id.0.rotate_left(32) ^ u64::from(nic.index) << 16 ^ u64::from(id.local.0);
        Self {
            id,
            local_name: local_name.to_owned(),
            nic: nic.clone(),
            server: peer.server.clone(),
            segment: peer.segment.clone(),
            instance: peer.instance.clone(),
            peer_restarted: Arc::clone(peer_restarted),
            state: AtomicU8::new(RailState::Idle as u8),
            down_until: AtomicU64::new(0),
            in_flight_bytes: AtomicU64::new(0),
            queued_bytes: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            slot: AtomicU32::new(u32::MAX),
            trouble: Mutex::new(Trouble {
                backoff: Backoff::new(BACKOFF.0, BACKOFF.1),
                rng: SmallRng::seed_from_u64(seed),
                last: None,
            }),
        }
    }

    /// Its two ends.
    pub fn id(&self) -> RailId {
        self.id
    }

    /// The far end.
    pub fn peer_nic(&self) -> &PeerNic {
        &self.nic
    }

    /// The peer's server name.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The peer's segment.
    pub fn segment(&self) -> &str {
        &self.segment
    }

    /// The peer's instance.
    pub fn instance(&self) -> Option<&str> {
        self.instance.as_deref()
    }

    /// True if work may be given to it at `now`.
    pub fn is_usable(&self, now: Time) -> bool {
        self.down_until() <= now
    }

    /// When its back-off ends.
    pub fn down_until(&self) -> Time {
        Time::from_nanos(self.down_until.load(Ordering::Acquire))
    }

    /// Bytes that it was given and has not moved.
    pub fn load_bytes(&self) -> u64 {
        self.in_flight_bytes.load(Ordering::Relaxed) + self.queued_bytes.load(Ordering::Relaxed)
    }

    /// State at `now`.
    pub fn state(&self, now: Time) -> RailState {
        let state = self.state.load(Ordering::Acquire);
        if state == RailState::Up as u8 {
            RailState::Up
        } else if !self.is_usable(now) {
            RailState::Down
        } else if state == RailState::Connecting as u8 {
            RailState::Connecting
        } else {
            RailState::Idle
        }
    }

    /// State at `now`, with what it has moved.
    pub fn stats(&self, now: Time) -> RailStats {
        RailStats {
            local: self.local_name.clone(),
            peer: self.nic.path.clone(),
            bytes: self.bytes.load(Ordering::Relaxed),
            errors: self.errors.load(Ordering::Relaxed),
            state: self.state(now),
        }
    }

    /// The last thing that went wrong on it, in words.
    pub fn last_trouble(&self) -> Option<String> {
        self.trouble().last.clone()
    }

    /// Keeps new work away at once, until [`failed`](Self::failed) says for how long.
    pub(super) fn suspend(&self, now: Time) {
        self.state.store(RailState::Down as u8, Ordering::Release);
        let until = now + SUSPENSION;
        self.down_until.store(until.as_nanos(), Ordering::Release);
    }

    /// An endpoint of it broke or could not be connected: no work until the back-off ends.
    pub(super) fn failed(&self, now: Time, cause: String) {
        let mut trouble = self.trouble();
        let Trouble { backoff, rng, .. } = &mut *trouble;
        let until = now + backoff.next_wait(rng);
        tracing::warn!(rail = %self, %cause, attempts = backoff.attempts(), "rail down");
        trouble.last = Some(cause);
        self.errors.fetch_add(1, Ordering::Relaxed);
        self.state.store(RailState::Down as u8, Ordering::Release);
        self.down_until.store(until.as_nanos(), Ordering::Release);
    }

    /// Another process answered in its peer's place: nothing goes to the peer any more.
    pub(super) fn peer_restarted(&self, now: Time, cause: String) {
        self.peer_restarted.store(true, Ordering::Release);
        self.failed(now, cause);
    }

    /// Marks that somebody connects it. False when it is being connected already, connected, or
    /// down.
    pub(super) fn begin_connect(&self, now: Time) -> bool {
        let connecting = RailState::Connecting as u8;
        self.state(now) == RailState::Idle
            && self.state.swap(connecting, Ordering::AcqRel) != connecting
    }

    /// An endpoint of it is connected. The back-off is forgotten only by
    /// [`moved`](Self::moved): a connection that breaks at once is no success (report X06).
    pub(super) fn connected(&self) {
        self.state.store(RailState::Up as u8, Ordering::Release);
        self.down_until.store(0, Ordering::Release);
    }

    /// Its endpoint was closed without blame: it may be connected again at once.
    pub(super) fn closed(&self) {
        self.state.store(RailState::Idle as u8, Ordering::Release);
        self.down_until.store(0, Ordering::Release);
    }

    /// Work completes on it: errors of the past no longer count.
    pub(super) fn proved(&self) {
        self.trouble().backoff.reset();
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

    fn trouble(&self) -> std::sync::MutexGuard<'_, Trouble> {
        // Nothing under the lock can panic half-way, so a poisoned one is whole.
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} - {}", self.local_name, self.nic.path)
    }
}

impl fmt::Debug for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x06_reconnecting_backs_off_until_work_completes() {
        let spec = PeerSpec {
            id: PeerId(1),
            segment: "seg".into(),
            server: "host:1".into(),
            instance: None,
            nics: vec![PeerNic {
                index: 0,
                path: "host:1@rxe0".into(),
                gid: Gid::NULL,
                lid: 0,
            }],
        };
        let peer = Peer::new(spec, &["rxe1".into()]);
        let rail = &peer.rails()[0];
        let mut waits = Vec::new();
        for _ in 0..6 {
            rail.connected();
            rail.failed(Time::ZERO, "length error".into());
            waits.push(rail.down_until().as_duration());
        }
        assert!(waits[0] <= Duration::from_millis(250), "{waits:?}");
        assert!(waits[5] >= Duration::from_secs(4), "{waits:?}");
        rail.proved();
        rail.failed(Time::ZERO, "again".into());
        assert!(rail.down_until() <= Time::from_millis(250));
        assert_eq!(rail.stats(Time::ZERO).errors, 7);
    }
}
