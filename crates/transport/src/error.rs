//! Errors of the transports.

use std::time::Duration;

use rerail_topology::SettingError;
use rerail_verbs::VerbsError;

/// Where users set the time limit of transfers.
const TIMEOUT_VARIABLE: &str = "MC_TRANSFER_TIMEOUT";

/// Why a transfer failed. It is reported only once no work of the transfer can touch memory any
/// more.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The deadline passed.
    #[error(
        "not finished within its time limit of {} s ({TIMEOUT_VARIABLE}, or the request's own) \
         towards {peer}; last trouble: {cause}",
        .limit.as_secs_f64()
    )]
    Deadline {
        /// The time limit.
        limit: Duration,
        /// Name of the peer's segment.
        peer: String,
        /// The last thing that went wrong on a rail to it.
        cause: String,
    },
    /// The peer's key does not allow the access: its memory was unregistered, or registered again.
    #[error("{peer} refused access to {length} bytes at {addr:#x} over {rail}: refresh its record")]
    RemoteAccess {
        /// Name of the peer's segment.
        peer: String,
        /// The rail: own device and peer's NIC path.
        rail: String,
        /// First remote address of the slice.
        addr: u64,
        /// Bytes of the slice.
        length: u32,
    },
    /// A work request was refused by the local device: a local key that does not cover the bytes,
    /// or a length that does not fit.
    #[error("{rail} refused {length} bytes at {addr:#x}: {cause}")]
    Refused {
        /// The rail: own device and peer's NIC path.
        rail: String,
        /// First local address of the slice.
        addr: u64,
        /// Bytes of the slice.
        length: u32,
        /// The completion's status.
        cause: String,
    },
    /// No rail to the peer can exist: it has no device that any local NIC may talk to.
    #[error("no rail leads to {peer}: {cause}")]
    NoPath {
        /// Name of the peer's segment.
        peer: String,
        /// Why not.
        cause: String,
    },
    /// The peer is another process under the same name now: its addresses mean nothing.
    #[error("{peer} was restarted since the request was made; open it again")]
    PeerRestarted {
        /// Name of the peer's segment.
        peer: String,
    },
    /// It failed, and its queue pairs could not be stopped: it may still be carried out.
    #[error(
        "given up without a fence towards {peer}: memory at both ends may still be read and \
         written, and must not be reused; {cause}"
    )]
    Unfenced {
        /// Name of the peer's segment.
        peer: String,
        /// Why it failed.
        cause: String,
    },
    /// The owner gave it up.
    #[error("cancelled")]
    Canceled,
    /// The engine was closed.
    #[error("the engine was closed")]
    Closed,
}

impl TransferError {
    /// True when the same request, made again after the peer's record was refreshed, may succeed.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Deadline { .. } | Self::RemoteAccess { .. } | Self::NoPath { .. } => true,
            Self::Refused { .. }
            | Self::PeerRestarted { .. }
            | Self::Unfenced { .. }
            | Self::Canceled
            | Self::Closed => false,
        }
    }
}

/// Why a transport could not do what was asked.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A verb failed.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// A setting has a value that is not allowed.
    #[error("{variable}={value}: expected {expected}")]
    Setting {
        /// Name of the variable.
        variable: String,
        /// Its value.
        value: String,
        /// What is allowed.
        expected: String,
    },
    /// A device that was asked for does not exist.
    #[error("there is no RDMA device {device}; there are: {available}")]
    UnknownDevice {
        /// The name asked for.
        device: String,
        /// The names there are, or why there are none.
        available: String,
    },
    /// A device cannot be used.
    #[error("{device} cannot be used: {reason}")]
    Device {
        /// Name of the device.
        device: String,
        /// Why.
        reason: String,
    },
    /// A device cannot hold all memory that is registered, and is left out.
    #[error(
        "{nic} cannot hold the {bytes} bytes in {regions} registrations that there are, and is \
         left out until there are fewer: {error}; raise its limits or unregister memory"
    )]
    NoRoomForMemory {
        /// Name of the NIC.
        nic: String,
        /// Bytes that are registered.
        bytes: u64,
        /// Registrations that they are in.
        regions: usize,
        /// What the device said.
        error: VerbsError,
    },
    /// The own record would not fit the store with one more NIC in it, which is left out.
    #[error(
        "{nic} is left out until less memory is registered, since the own record would not fit \
         its store with it: {reason}"
    )]
    NoRoomInRecord {
        /// Name of the NIC.
        nic: String,
        /// Sizes, and what can be done.
        reason: String,
    },
    /// A port cannot be used.
    #[error("{device} port {port} cannot be used: {reason}")]
    Port {
        /// Name of the device.
        device: String,
        /// The port, from 1.
        port: u32,
        /// Why not.
        reason: String,
    },
    /// A connection could not be made.
    #[error("no connection from {local} to {peer}: {reason}")]
    Connection {
        /// Own NIC path.
        local: String,
        /// The peer's NIC path.
        peer: String,
        /// The cause, a refusal in the peer's own words.
        reason: String,
    },
    /// Connections of a peer did not stop in time.
    #[error(
        "connections of {peer} over {nics} have not stopped within {limit_ms} ms, as when a device \
         hangs: what {peer} has sent may still reach memory here, which must not be reused; revoke \
         again, or reset the device"
    )]
    NotRevoked {
        /// Server name of the peer's NIC paths.
        peer: String,
        /// Own NICs, separated by commas.
        nics: String,
        /// How long it was waited for.
        limit_ms: u64,
    },
    /// No thread could be started.
    #[error("a data thread could not be started: {reason}")]
    Thread {
        /// The system's words.
        reason: String,
    },
    /// The transport is being closed.
    #[error("the transport is closed")]
    Closed,
}

impl From<SettingError> for TransportError {
    fn from(error: SettingError) -> Self {
        Self::Setting {
            variable: error.variable,
            value: error.value,
            expected: error.expected,
        }
    }
}

impl TransportError {
    /// True when the same call can succeed later without anything else being changed.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Verbs(error) => error.is_retryable(),
            Self::Device { .. }
            | Self::NoRoomForMemory { .. }
            | Self::NoRoomInRecord { .. }
            | Self::Port { .. }
            | Self::Connection { .. }
            | Self::NotRevoked { .. }
            | Self::Thread { .. } => true,
            Self::Setting { .. } | Self::UnknownDevice { .. } | Self::Closed => false,
        }
    }
}
