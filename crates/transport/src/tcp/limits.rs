//! Bounds of a TCP client, and the version it speaks.

use std::time::Duration;

use super::flow::Pace;
use crate::TransportError;
use crate::settings::Settings;

/// Bounds of a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ClientLimits {
    /// Connections to one peer, 1..=16 (`TCP_LANES_PER_PEER`, 4; its older name
    /// `TCP_MAX_CONNECTIONS_PER_PEER` counts where the new one is not set).
    pub lanes_max: usize,
    /// Requests that may wait for a lane of one peer, 1..=65 535
    /// (`TCP_MAX_QUEUED_TRANSFERS_PER_PEER`, 1 024).
    pub queue_max: usize,
    /// Until a connection stands, all addresses of the host together
    /// (`HANDSHAKE_CONNECT_TIMEOUT`, 5 s).
    pub connect: Duration,
    /// Until a status comes, once there is nothing more to send (`TCP_STATUS_TIMEOUT_SEC`, 30 s).
    pub status: Duration,
    /// How bytes flow (`TCP_SLICE_SIZE`).
    pub pace: Pace,
    /// How long a lane stays without work. 60 s.
    pub idle: Duration,
    /// Longest wait for the peer to close after a WRITE was given up. 2 s.
    pub fence_max: Duration,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self {
            lanes_max: 4,
            queue_max: 1_024,
            connect: Duration::from_secs(5),
            status: Duration::from_secs(30),
            pace: Pace::default(),
            idle: Duration::from_secs(60),
            fence_max: Duration::from_secs(2),
        }
    }
}

impl ClientLimits {
    /// The defaults, with what is set.
    ///
    /// # Errors
    ///
    /// [`TransportError::Setting`] for a value that does not parse or is out of range.
    pub fn from_settings(settings: &Settings<'_>) -> Result<Self, TransportError> {
        let default = Self::default();
        let lanes = match settings.number("TCP_LANES_PER_PEER", 1..=16)? {
            Some(lanes) => Some(lanes),
            None => settings.number("TCP_MAX_CONNECTIONS_PER_PEER", 1..=16)?,
        };
        let queue = settings.number("TCP_MAX_QUEUED_TRANSFERS_PER_PEER", 1..=65_535)?;
        let connect_s = settings.number("HANDSHAKE_CONNECT_TIMEOUT", 1..=3_599)?;
        let status_s = settings.number("TCP_STATUS_TIMEOUT_SEC", 1..=86_400)?;
        Ok(Self {
            lanes_max: lanes.unwrap_or(default.lanes_max),
            queue_max: queue.unwrap_or(default.queue_max),
            connect: connect_s.map_or(default.connect, Duration::from_secs),
            status: status_s.map_or(default.status, Duration::from_secs),
            pace: Pace::from_settings(settings)?,
            ..default
        })
    }
}

/// Version of the protocol.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Version {
    /// No statuses: a WRITE is finished when its bytes have left.
    V1,
    /// With statuses: a WRITE is finished when its bytes are in the peer's memory.
    V2,
}

impl Version {
    /// The highest version that we speak: `TCP_PROTO`, 1 or 2; 2 when it is not set.
    ///
    /// # Errors
    ///
    /// [`TransportError::Setting`] for any other value.
    pub fn from_settings(settings: &Settings<'_>) -> Result<Self, TransportError> {
        Ok(match settings.number("TCP_PROTO", 1..=2)? {
            Some(1) => Self::V1,
            _ => Self::V2,
        })
    }

    /// The version to speak with a peer whose record says `tcp_proto_version`.
    #[must_use]
    pub fn towards(self, tcp_proto_version: u64) -> Self {
        if tcp_proto_version >= 2 {
            self
        } else {
            Self::V1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<T>(
        name: &str,
        value: &str,
        read: impl Fn(&Settings<'_>) -> Result<T, TransportError>,
    ) -> Result<T, TransportError> {
        let lookup = |variable: &str| (variable == name).then(|| value.to_owned());
        read(&Settings::new(&lookup))
    }

    #[test]
    fn limits_come_from_the_names_that_users_know() {
        let limits = |name, value| with(name, value, ClientLimits::from_settings).expect("valid");
        assert_eq!(limits("MC_TCP_LANES_PER_PEER", "16").lanes_max, 16);
        assert_eq!(limits("MC_TCP_MAX_CONNECTIONS_PER_PEER", "2").lanes_max, 2);
        assert_eq!(limits("MC_TCP_SLICE_SIZE", "4096").pace.chunk_bytes, 4096);
        let status = limits("RERAIL_TCP_STATUS_TIMEOUT_SEC", "3").status;
        assert_eq!(status, Duration::from_secs(3));
        let queue_max = limits("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535").queue_max;
        assert_eq!(queue_max, 65_535);
    }

    #[test]
    fn u10_limits_are_read_strictly() {
        for (name, value) in [
            ("MC_TCP_LANES_PER_PEER", "0"),
            ("MC_TCP_LANES_PER_PEER", "17"),
            ("MC_TCP_LANES_PER_PEER", "4 "),
            ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65536"),
            ("MC_TCP_STATUS_TIMEOUT_SEC", "0"),
            ("MC_TCP_STATUS_TIMEOUT_SEC", "-1"),
            ("MC_TCP_SLICE_SIZE", "0"),
            ("MC_TCP_SLICE_SIZE", "64k"),
        ] {
            let error = with(name, value, ClientLimits::from_settings).expect_err("strict");
            let text = error.to_string();
            assert!(text.contains(name) && text.contains(value), "{text}");
        }
        assert!(with("MC_TCP_PROTO", "3", Version::from_settings).is_err());
    }

    #[test]
    fn version_2_needs_both_sides() {
        let own = |value| with("MC_TCP_PROTO", value, Version::from_settings).expect("valid");
        assert_eq!(own("2").towards(2), Version::V2);
        assert_eq!(own("2").towards(7), Version::V2);
        assert_eq!(own("2").towards(1), Version::V1);
        assert_eq!(own("2").towards(0), Version::V1);
        assert_eq!(own("1").towards(2), Version::V1);
    }
}
