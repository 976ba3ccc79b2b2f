//! What can go wrong in an engine.

use rerail_metadata::MetadataError;
use rerail_metadata::descriptor::DocumentError;
use rerail_transport::{TransferError, TransportError};

/// An operation of the engine that failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// An argument cannot be used.
    #[error("{what}: {reason}")]
    Invalid {
        /// The argument.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// Local bytes that are not registered, or not in one registration.
    #[error("{length} bytes at {addr:#x} are not registered memory; {nearest}")]
    NotRegistered {
        /// First address.
        addr: u64,
        /// Bytes.
        length: u64,
        /// The registration next to it, in words.
        nearest: String,
    },
    /// Remote bytes that the peer does not offer.
    #[error("{segment} does not offer {length} bytes at {addr:#x}; {nearest}")]
    NotOffered {
        /// The segment.
        segment: String,
        /// First address.
        addr: u64,
        /// Bytes.
        length: u64,
        /// The buffer next to it, in words.
        nearest: String,
    },
    /// Memory that overlaps other registered memory.
    #[error("{length} bytes at {addr:#x} overlap registered memory: {other}")]
    Overlap {
        /// First address.
        addr: u64,
        /// Bytes.
        length: u64,
        /// What it overlaps, in words.
        other: String,
    },
    /// Something still uses memory that is to be unregistered: own transfers, which can be waited
    /// for, or cancelled and then waited for; or a device that has not deregistered it. The memory
    /// stays mapped and its range taken meanwhile; unregistering it again goes on waiting.
    #[error("the memory at {addr:#x} is still held by {owner}: unregister it again later")]
    StillOwnedByHardware {
        /// First address of the registration.
        addr: u64,
        /// How many transfers, or which device.
        owner: String,
    },
    /// A batch has no room for so many requests.
    #[error("{requests} requests do not fit a batch of {capacity} that has {submitted}")]
    TooManyRequests {
        /// Requests that were to be submitted.
        requests: usize,
        /// Size of the batch.
        capacity: usize,
        /// Requests that it has.
        submitted: usize,
    },
    /// The batch still has unfinished transfers.
    #[error("{unfinished} transfers of the batch are not finished")]
    BatchBusy {
        /// Transfers.
        unfinished: usize,
    },
    /// No transport of this engine speaks the segment's protocol.
    #[error("{segment} speaks {protocol}, and this engine {available}")]
    NoTransport {
        /// The segment.
        segment: String,
        /// What it speaks.
        protocol: String,
        /// What this engine speaks.
        available: String,
    },
    /// A peer could not be asked, or gave no usable answer.
    #[error("{peer} cannot be asked for its {what}: {reason}")]
    Peer {
        /// Name of the peer.
        peer: String,
        /// What was asked for.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// A transfer failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A transport could not do what was asked.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The metadata store could not do what was asked.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// A record is malformed.
    #[error("the record of {segment} cannot be used: {cause}")]
    Record {
        /// The segment.
        segment: String,
        /// What is wrong.
        cause: DocumentError,
    },
    /// A server of this engine could not listen.
    #[error("{what}: {reason}")]
    Listen {
        /// The server.
        what: &'static str,
        /// The system's error: a port or address in use, or one that is not of this machine.
        kind: std::io::ErrorKind,
        /// The range of ports, and the system's words.
        reason: String,
    },
    /// The operating system refused something.
    #[error("{what}: {reason}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's words.
        reason: String,
    },
    /// It took too long.
    #[error("{what} took longer than {limit_ms} ms")]
    Timeout {
        /// What.
        what: &'static str,
        /// The limit.
        limit_ms: u64,
    },
}

impl EngineError {
    /// True when the same call may succeed later without anyone's doing.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::StillOwnedByHardware { .. }
            | Self::BatchBusy { .. }
            | Self::Peer { .. }
            | Self::Timeout { .. } => true,
            Self::Transfer(error) => error.is_retryable(),
            Self::Transport(error) => error.is_retryable(),
            Self::Metadata(error) => error.is_retryable(),
            Self::Invalid { .. }
            | Self::NotRegistered { .. }
            | Self::NotOffered { .. }
            | Self::Overlap { .. }
            | Self::TooManyRequests { .. }
            | Self::NoTransport { .. }
            | Self::Record { .. }
            | Self::Listen { .. }
            | Self::System { .. } => false,
        }
    }
}

/// Outcome of an operation of the engine.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;
