//! What the rails are told, and what they want done.

use std::time::Duration;

use rerail_verbs::{AsyncEventKind, WcStatus};

use crate::machine::ids::{LocalNic, PeerId, PeerNic, RailId};

/// State of a rail.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum RailState {
    /// Proved; carries user work.
    Up,
    /// Works, but badly: carries a smaller share.
    Suspect,
    /// Carries nothing until its back-off ends or good news comes.
    Down,
    /// Being proved by the engine's own probes; carries no user work.
    HalfOpen,
}

impl RailState {
    /// In a word, as it is printed.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Suspect => "suspect",
            Self::Down => "down",
            Self::HalfOpen => "half-open",
        }
    }
}

/// Whether a local NIC's port may be used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LocalGate {
    /// At least for probes.
    Open {
        /// Whether endpoints lived through the time that it was closed.
        endpoints_kept: bool,
    },
    /// Not now, but it is expected back.
    Closed,
    /// Its context is dead; whether it can be opened again is not known.
    Dead,
}

/// Why a rail is where it is.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RailCause {
    /// A completion.
    #[error("a completion said {0}")]
    Completion(WcStatus),
    /// Nothing completed in time.
    #[error("nothing completed in time")]
    NoProgress,
    /// The device reported an event of the queue pair.
    #[error("the device reported {0} for the queue pair")]
    QueuePairEvent(AsyncEventKind),
    /// The peer closed its end.
    #[error("the peer closed its end")]
    PeerClosed,
    /// Our own end was closed for a reason that says nothing against the rail: to be made anew with
    /// another address, or because work on it had to be stopped at its deadline.
    #[error("its own end was closed")]
    Closed,
    /// Something at the near end failed, such as a post to the queue pair.
    #[error("{reason}")]
    Local {
        /// What, in words.
        reason: String,
    },
    /// No connection could be made.
    #[error("no connection: {reason}")]
    Connect {
        /// The handshake's error in words.
        reason: String,
    },
    /// A probe failed.
    #[error("a probe failed: {0}")]
    Probe(WcStatus),
    /// A probe or a handshake did not end in time.
    #[error("a probe or a handshake did not end in time")]
    ProofTimeout,
    /// The local port is down or its context is dead.
    #[error("the local port is not usable")]
    LocalPort,
    /// The peer withdrew its NIC.
    #[error("the peer withdrew its NIC")]
    PeerNic,
    /// Errors over many peers point to the local NIC.
    #[error("errors over several peers point to the local NIC")]
    LocalBlamed,
    /// Errors over many local NICs point to the peer's NIC.
    #[error("errors over several local NICs point to the peer's NIC")]
    PeerBlamed,
    /// Much slower than it should be, with the link up.
    #[error("much slower than measured before")]
    Slow,
    /// The rail was proved, or a time of suspicion is over.
    #[error("it was proved")]
    Proved,
    /// A back-off is over, or good news came.
    #[error("it is tried again")]
    Retry,
}

/// What kept a connection from being made.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ConnectFault {
    /// The peer answered, and refused: it is there, and asking it again is cheap.
    Refused,
    /// The peer's control side does not answer.
    NoAnswer,
    /// Anything else: queue pairs cannot be made or moved, or ends do not fit. Trying again may
    /// hold the device's control thread for a second each time.
    Other,
}

/// The engine's own probes, in this order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum ProbeKind {
    /// A READ of no bytes: needs no key, works towards every implementation.
    ZeroLengthRead,
    /// A READ of one full path MTU: finds ends that disagree on it. A driver that has no memory of
    /// the peer to read from answers with success.
    FullMtuRead,
}

/// What is fixed about a rail when it is declared.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RailTraits {
    /// Whether both GIDs lie in one subnet.
    pub same_subnet: bool,
    /// The smaller of both ports' speeds in Mbit/s; 0 when not known.
    pub speed_mbps: u32,
}

/// What the rails are told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Input {
    /// A rail may be used; it starts half-open. For one that exists only its traits change.
    Declare {
        /// The rail.
        rail: RailId,
        /// What it is like.
        traits: RailTraits,
    },
    /// There is work for a rail: connect and prove it, and keep it so.
    Wanted {
        /// The rail.
        rail: RailId,
    },
    /// There has been no work for a rail for a while: it is not connected or proved any more until
    /// it is wanted again. One that works stays as it is.
    Unwanted {
        /// The rail.
        rail: RailId,
    },
    /// A peer is forgotten with all its rails.
    ForgetPeer {
        /// The peer.
        peer: PeerId,
    },
    /// The peer's record is withdrawn or superseded: it is not expected back.
    PeerGone {
        /// The peer.
        peer: PeerId,
    },
    /// The observer closed or opened a port.
    LocalGate {
        /// The port.
        local: LocalNic,
        /// What it is now.
        gate: LocalGate,
    },
    /// The peer's record says that its NIC is up or not. Up again counts as good news. Told after
    /// the peer's first rail is declared; until then its NICs count as up.
    PeerNicGate {
        /// The NIC.
        nic: PeerNic,
        /// Whether it may be used.
        up: bool,
    },
    /// [`Action::Connect`] succeeded, or the peer connected to us.
    Connected {
        /// The rail.
        rail: RailId,
    },
    /// [`Action::Connect`] failed.
    ConnectFailed {
        /// The rail.
        rail: RailId,
        /// Why, in words.
        reason: String,
        /// Of which kind it was.
        fault: ConnectFault,
    },
    /// [`Action::Probe`] ended.
    ProbeDone {
        /// The rail.
        rail: RailId,
        /// Which probe.
        probe: u64,
        /// Its completion's status.
        status: WcStatus,
    },
    /// A completion of user work that is not a success. Successes are told in bulk as `Progress`.
    Completion {
        /// The rail.
        rail: RailId,
        /// The status.
        status: WcStatus,
    },
    /// The rail's endpoint is gone for another reason.
    EndpointLost {
        /// The rail.
        rail: RailId,
        /// Why: [`RailCause::Completion`], [`RailCause::NoProgress`],
        /// [`RailCause::QueuePairEvent`], [`RailCause::PeerClosed`], [`RailCause::Closed`] or
        /// [`RailCause::Local`].
        cause: RailCause,
    },
    /// What a rail moved in a time in which it was never without work.
    Progress {
        /// The rail.
        rail: RailId,
        /// Bytes completed.
        bytes: u64,
        /// How long it took.
        took: Duration,
    },
    /// A rail is found much slower than it should be (a hook for grey-rail detection).
    Slow {
        /// The rail.
        rail: RailId,
    },
}

/// What the rails want done, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Make a new endpoint and connect it; answer `Connected` or `ConnectFailed`.
    Connect {
        /// The rail.
        rail: RailId,
    },
    /// Post a probe of the engine's own; answer `ProbeDone`.
    Probe {
        /// The rail.
        rail: RailId,
        /// Names the probe.
        probe: u64,
        /// What to post.
        kind: ProbeKind,
    },
    /// The rail's endpoint must not be used any more: move it to ERR, drain and drop it, or give
    /// up its handshake. Endpoints are one-shot; nothing is said if there is none.
    DropEndpoint {
        /// The rail.
        rail: RailId,
    },
    /// A rail changed its state.
    State {
        /// The rail.
        rail: RailId,
        /// Before.
        from: RailState,
        /// Now.
        to: RailState,
        /// Why.
        cause: RailCause,
        /// What took it down first since it last worked for a while: not the last of many errors.
        first_cause: Option<RailCause>,
    },
    /// Errors point to the local NIC: ask its observer to read it.
    RecheckLocal {
        /// The NIC.
        local: LocalNic,
    },
    /// Errors point to the peer: ask for its record, within the peer's own cool-down.
    RefreshPeer {
        /// The peer.
        peer: PeerId,
    },
}
