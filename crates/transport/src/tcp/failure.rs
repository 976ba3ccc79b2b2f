//! Why a request over TCP failed.

/// Why a request failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The local range is not inside its memory.
    #[error("{length} bytes at offset {offset} do not lie inside the local memory")]
    LocalRange {
        /// Offset asked for.
        offset: usize,
        /// Bytes asked for.
        length: usize,
    },
    /// The peer says that the addresses are not inside one of its buffers.
    #[error("{peer} rejected {length} bytes at {addr:#x}: not inside one registered buffer")]
    Rejected {
        /// The peer's data port.
        peer: String,
        /// First address.
        addr: u64,
        /// Bytes.
        length: usize,
    },
    /// The deadline passed.
    #[error(
        "{peer}: not finished in time after {attempts} attempts; last trouble: {cause}{}",
        note(*.unfenced)
    )]
    Deadline {
        /// The peer's data port.
        peer: String,
        /// Connections tried.
        attempts: u32,
        /// What went wrong last.
        cause: String,
        /// The peer did not confirm that it gave up a WRITE: bytes of it may still arrive.
        unfenced: bool,
    },
    /// The owner gave the request up.
    #[error("{peer}: cancelled{}", note(*.unfenced))]
    Canceled {
        /// The peer's data port.
        peer: String,
        /// As in [`Deadline`](Self::Deadline).
        unfenced: bool,
    },
    /// Too many requests wait for the peer.
    #[error("{peer}: {queue_max} requests wait already")]
    QueueFull {
        /// The peer's data port.
        peer: String,
        /// The bound.
        queue_max: usize,
    },
    /// The client was closed before the request had begun, or while nothing of it was under way.
    #[error("the TCP client was closed")]
    Closed,
}

impl Failure {
    /// True when bytes of a WRITE may still arrive in the peer's memory.
    pub fn is_unfenced(&self) -> bool {
        matches!(
            self,
            Self::Deadline { unfenced: true, .. } | Self::Canceled { unfenced: true, .. }
        )
    }

    /// True when the same request may succeed later, after the peer's record was refreshed.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Rejected { .. } | Self::Deadline { .. } | Self::QueueFull { .. } => true,
            Self::LocalRange { .. } | Self::Canceled { .. } | Self::Closed => false,
        }
    }
}

fn note(unfenced: bool) -> &'static str {
    if unfenced {
        "; the peer did not confirm the end of a write"
    } else {
        ""
    }
}
