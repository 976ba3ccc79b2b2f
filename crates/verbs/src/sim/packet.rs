//! What travels between ports.

use std::time::Duration;

use super::node::PortId;
use super::rule::PacketKind;
use crate::{Gid, Mtu};

/// Packet numbers have 24 bits.
pub(super) const PSN_MASK: u32 = 0x00ff_ffff;

/// How far `psn` is ahead of `base`, in packet numbers; the upper half of the range is behind it.
pub(super) fn psn_ahead(psn: u32, base: u32) -> Option<u32> {
    let ahead = psn.wrapping_sub(base) & PSN_MASK;
    (ahead <= PSN_MASK / 2).then_some(ahead)
}

/// An end of a way through the network.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Address {
    Gid(Gid),
    Lid(u16),
}

impl Address {
    pub(super) fn gid(self) -> Option<Gid> {
        match self {
            Self::Gid(gid) => Some(gid),
            Self::Lid(_) => None,
        }
    }
}

/// The peer's memory that a whole message is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Target {
    pub(super) addr: u64,
    pub(super) rkey: u32,
    pub(super) length: u64,
}

/// Why a responder refuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Nak {
    /// A packet is missing before this one.
    Sequence,
    /// The message is malformed or not allowed on the queue pair.
    InvalidRequest,
    /// The key does not allow the access.
    RemoteAccess,
}

#[derive(Debug)]
pub(super) enum Body {
    /// Bytes of a WRITE, from `skip` on.
    Write {
        target: Target,
        skip: u64,
        payload: Vec<u8>,
    },
    /// Asks for `length` bytes, from `skip` on.
    ReadRequest {
        target: Target,
        skip: u64,
        length: u32,
        /// READs that the requester has begun and not finished.
        in_flight: u32,
    },
    ReadResponse {
        payload: Vec<u8>,
    },
    Ack,
    Nak(Nak),
}

impl Body {
    pub(super) fn kind(&self) -> PacketKind {
        match self {
            Self::Write { .. } => PacketKind::Write,
            Self::ReadRequest { .. } => PacketKind::ReadRequest,
            Self::ReadResponse { .. } => PacketKind::ReadResponse,
            Self::Ack => PacketKind::Ack,
            Self::Nak(_) => PacketKind::Nak,
        }
    }

    pub(super) fn payload_bytes(&self) -> u32 {
        match self {
            Self::Write { payload, .. } | Self::ReadResponse { payload } => payload.len() as u32,
            _ => 0,
        }
    }
}

/// A packet, or a burst of packets of one message that travel as one.
///
/// As in the real protocol it names only the queue pair that it goes to: whoever has that number
/// and the right addresses when it arrives takes it for its own.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) from: PortId,
    pub(super) source: Address,
    pub(super) destination: Address,
    pub(super) dest_qp_num: u32,
    pub(super) pkey: u16,
    pub(super) psn: u32,
    /// Payload of each packet but the last of the message.
    pub(super) mtu: Mtu,
    pub(super) body: Body,
}

/// A packet that has been handed to a port.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) packet: std::sync::Arc<Packet>,
    pub(super) to: PortId,
    /// When it leaves the port; until then taking the port down purges it.
    pub(super) departs: Duration,
    /// False for a packet whose life ends on the way.
    pub(super) arrives: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_numbers_wrap() {
        assert_eq!(psn_ahead(2, PSN_MASK), Some(3));
        assert_eq!(psn_ahead(7, 7), Some(0));
        assert_eq!(psn_ahead(6, 7), None);
        assert_eq!(psn_ahead(PSN_MASK, 2), None);
    }
}
