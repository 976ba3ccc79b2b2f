//! What goes into an endpoint and what comes out.

use std::time::Duration;

use rerail_verbs::{AsyncEventKind, Gid, Mtu, WcStatus};

use super::super::signaling::SignalError;

/// Begin of the reason when queue pairs cannot be connected for the addresses of their ends. The
/// peer reads it: with another GID of its own it may be possible.
pub const UNREACHABLE: &str = "these GIDs cannot reach each other";

/// What a C++ peer says then.
const UNREACHABLE_CPP: &str = "modify QP to RTR";

/// A request of the peer that waits for an answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Token(pub u64);

/// Content of a Connection message (reference 3.4), whichever way it goes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Offer {
    /// The sender's NIC path.
    pub local_path: String,
    /// The receiver's NIC path, as the sender knows it.
    pub peer_path: String,
    /// The sender's GID; old peers leave it out.
    pub gid: Option<Gid>,
    /// The sender's LID.
    pub lid: u16,
    /// The sender's queue pairs; they pair by position. None at all asks the receiver to close.
    pub qp_nums: Vec<u32>,
    /// Absent from peers that do not acknowledge; false in the first message, true in the
    /// acknowledgement.
    pub ready_ack: Option<bool>,
    /// First packet number that the sender will use; absent from C++ peers, who use 0.
    pub psn: Option<u32>,
    /// The sender's path MTU; absent from C++ peers.
    pub path_mtu: Option<Mtu>,
    /// Reads that the sender can serve at once on each queue pair; absent from C++ peers.
    pub rd_atomic: Option<u8>,
    /// The sender's instance; absent from C++ peers.
    pub instance: Option<String>,
    /// The instance that the sender believes the receiver to be.
    pub peer_instance: Option<String>,
}

/// The own ends of a connection: queue pairs in INIT.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LocalEnds {
    /// GID that the queue pairs use.
    pub gid: Option<Gid>,
    /// LID of the port.
    pub lid: u16,
    /// Numbers of the queue pairs.
    pub qp_nums: Vec<u32>,
    /// First packet number to be sent, 24 bits.
    pub psn: u32,
    /// Largest path MTU of the port, cut to the setting.
    pub path_mtu: Option<Mtu>,
    /// Reads that each queue pair can serve at once.
    pub rd_atomic: u8,
}

/// The peer's ends of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerEnds {
    /// GID to send to.
    pub gid: Gid,
    /// LID to send to; 0 on Ethernet.
    pub lid: u16,
    /// Numbers of the queue pairs, as many as our own.
    pub qp_nums: Vec<u32>,
    /// First packet number that it sends, if it says. C++ peers begin at 0, and take it that we do.
    pub psn: Option<u32>,
    /// Its path MTU, if it says.
    pub path_mtu: Option<Mtu>,
    /// Reads that it can serve at once, if it says.
    pub rd_atomic: Option<u8>,
    /// Its instance, if it is a Rerail peer.
    pub instance: Option<String>,
    /// It takes part in the exchange of ready acknowledgements.
    pub ready_ack: bool,
}

/// Why an endpoint is closed.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum CloseCause {
    /// Something at our end failed: creating or moving queue pairs.
    Local(String),
    /// The peer refused, in its words.
    Refused(String),
    /// The peer could not be asked.
    NoAnswer(String),
    /// The peer's message does not fit ours.
    Mismatch(String),
    /// It took too long.
    Timeout(&'static str),
    /// Work on it failed with this status.
    Failed {
        /// The first completion that was not a success.
        status: WcStatus,
        /// Bytes of the request.
        bytes: u64,
    },
    /// Work on it made no progress for this time.
    Stalled(Duration),
    /// Work on it had to be stopped: its transfer ran out of time.
    CutOff,
    /// The device reported this for one of its queue pairs.
    Event(AsyncEventKind),
    /// It cannot be used, for a reason in words.
    Broken(String),
    /// A request was itself at fault, such as one with a key that is no longer valid. That breaks
    /// the queue pair, and says nothing against the rail.
    BadRequest {
        /// Its status.
        status: WcStatus,
        /// The error that it ended with, in words.
        reason: String,
    },
    /// The peer is another process than the one that was meant.
    PeerRestarted(String),
    /// The peer asked for it.
    PeerClosed,
    /// The peer has made new queue pairs.
    PeerRebuilt,
    /// The local NIC, the peer's NIC or the engine goes away.
    Withdrawn(String),
}

impl CloseCause {
    /// Whether the addresses of the ends kept it from being connected: others may do.
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::Local(reason) => reason.starts_with(UNREACHABLE),
            Self::Refused(reason) => {
                reason.starts_with(UNREACHABLE) || reason.contains(UNREACHABLE_CPP)
            }
            _ => false,
        }
    }
}

impl std::fmt::Display for CloseCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Local(reason) => write!(f, "local error: {reason}"),
            Self::Refused(reason) => write!(f, "the peer refused: {reason}"),
            Self::NoAnswer(reason) => f.write_str(reason),
            Self::Failed { status, bytes } => write!(f, "{status} of {bytes} bytes"),
            Self::Stalled(time) => write!(f, "nothing completed for {} ms", time.as_millis()),
            Self::Event(kind) => write!(f, "the device reported {kind}"),
            Self::CutOff => f.write_str("a transfer on it ran out of time"),
            Self::BadRequest { reason, .. } => write!(f, "a request was at fault: {reason}"),
            Self::Mismatch(reason) | Self::Broken(reason) | Self::Withdrawn(reason) => {
                f.write_str(reason)
            }
            Self::PeerRestarted(reason) => write!(f, "the peer was restarted: {reason}"),
            Self::Timeout(what) => f.write_str(what),
            Self::PeerClosed => f.write_str("the peer closed the connection"),
            Self::PeerRebuilt => f.write_str("the peer built its end anew"),
        }
    }
}

/// What can happen to an endpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Input {
    /// Somebody has work for the peer.
    Open,
    /// Outcome of [`Action::Prepare`].
    Prepared(Result<LocalEnds, String>),
    /// [`Action::Raise`] is about to succeed with this GID of ours, whatever was prepared. Only an
    /// end that has not named its GID yet may say so.
    Uses(Gid),
    /// Outcome of [`Action::Raise`].
    Raised(Result<(), String>),
    /// Outcome of [`Action::Ask`]: the peer's answer, or its refusal, or why none came.
    Replied(Result<Offer, SignalError>),
    /// Outcome of [`Action::Acknowledge`].
    Acknowledged(Result<(), SignalError>),
    /// The peer sent a Connection message. Each is answered, refused or passed on, once.
    Requested(Token, Offer),
    /// It is to be closed.
    Close(CloseCause),
    /// Outcome of [`Action::ToError`]: all queue pairs are in ERR.
    InError,
    /// The data thread has had a completion for everything that it had posted.
    Drained,
    /// Outcome of [`Action::Destroy`].
    Destroyed,
    /// The peer has confirmed that its end is in ERR or gone.
    PeerClosed,
}

/// What an endpoint wants done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Make queue pairs and move them to INIT.
    Prepare,
    /// Move the queue pairs to RTS towards these.
    Raise(PeerEnds),
    /// Send the first Connection message.
    Ask(Offer),
    /// Send the ready acknowledgement.
    Acknowledge(Offer),
    /// Answer the peer's request.
    Answer(Token, Offer),
    /// Refuse the peer's request with this reason.
    Refuse(Token, String),
    /// The request is for another endpoint between the same NICs: this one is being closed.
    PassOn(Token, Offer),
    /// Hand the queue pairs to the data thread: work may be posted.
    Attach,
    /// Tell the data thread to post no more; it collects what comes back.
    Detach,
    /// Move all queue pairs to ERR.
    ToError,
    /// Ask the peer to move its end to ERR.
    TellPeer(Offer),
    /// The queue pairs are in ERR: the data thread reports once all has come back.
    AwaitDrain,
    /// Destroy the queue pairs.
    Destroy,
    /// The queue pairs are destroyed and nothing more will come back: the data thread gives up
    /// what it still waits for.
    GiveUp,
    /// Nothing of this endpoint can reach memory any more, at either end.
    Fenced,
    /// Its queue pairs could not be stopped in time: what it still has in flight may read and
    /// write memory at any later time. The text says why it was closed.
    Unfenced(String),
    /// It is over.
    Closed(CloseCause),
}
