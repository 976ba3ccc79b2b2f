//! Segments of peers.

use std::fmt;
use std::sync::Arc;

use rerail_metadata::descriptor::{Buffer, SegmentDescriptor};
use rerail_transport::rdma::{Peer, Span};

use crate::peers::{Life, Offered, Reach};
use crate::tcp::TcpPeer;
use crate::{EngineError, Result};

/// A peer's segment, of the process that had its name when it was opened. Clones share it.
///
/// Requests are bound to that process: after a restart of the peer its addresses mean nothing,
/// requests end with [`PeerRestarted`](rerail_transport::TransferError::PeerRestarted), and the
/// segment has to be opened again. While the process lives, requests follow its record: memory
/// that it registers anew at the same address is reached by its new keys.
#[derive(Clone)]
pub struct Segment {
    shared: Arc<Shared>,
}

/// How a segment is reached.
pub(crate) enum Route {
    /// Over the rails of its peer.
    Rdma,
    /// Over connections to its data port.
    Tcp(TcpPeer),
}

struct Shared {
    /// When it was opened.
    descriptor: Arc<SegmentDescriptor>,
    /// The same, by address.
    opened: Arc<Offered>,
    life: Arc<Life>,
    reach: Arc<Reach>,
}

impl Segment {
    pub(crate) fn new(
        descriptor: Arc<SegmentDescriptor>,
        life: Arc<Life>,
        reach: Arc<Reach>,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                descriptor,
                opened: reach.offered(),
                life,
                reach,
            }),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared.descriptor.name
    }

    /// Its record, as it was when the segment was opened.
    pub fn descriptor(&self) -> &SegmentDescriptor {
        &self.shared.descriptor
    }

    /// The memory that it offered then, in the order of its record.
    pub fn buffers(&self) -> &[Buffer] {
        &self.shared.descriptor.buffers
    }

    pub(crate) fn life(&self) -> &Arc<Life> {
        &self.shared.life
    }

    pub(crate) fn peer(&self) -> &Arc<Peer> {
        self.shared.reach.peer()
    }

    pub(crate) fn route(&self) -> &Route {
        self.shared.reach.route()
    }

    /// The far end of a transfer, covered to the last byte by what is offered now, or was when the
    /// segment was opened; with the revision of the record that says so.
    pub(crate) fn span(&self, addr: u64, length: u64) -> Result<(Span, u64)> {
        let opened = &self.shared.opened;
        if let Some(found) = self.present_span(addr, length) {
            return Ok(found);
        }
        // What the present record lacks is asked for once more before it is refused.
        if let Some(span) = Span::new(addr, length, opened.buffers.iter().cloned()) {
            return Ok((span.near(opened.near(addr)), opened.revision));
        }
        let buffers = &opened.buffers;
        let after = buffers.partition_point(|piece| piece.addr <= addr);
        let nearest = after
            .checked_sub(1)
            .or_else(|| (after < buffers.len()).then_some(0));
        Err(EngineError::NotOffered {
            segment: self.name().to_owned(),
            addr,
            length,
            nearest: match nearest.and_then(|index| buffers.get(index)) {
                Some(piece) => {
                    format!("nearest are {} bytes at {:#x}", piece.length, piece.addr)
                }
                None => "it offers nothing".into(),
            },
        })
    }

    /// The same by what is offered now only.
    pub(crate) fn present_span(&self, addr: u64, length: u64) -> Option<(Span, u64)> {
        let present = self.shared.reach.offered();
        let span = Span::new(addr, length, present.buffers.iter().cloned())?;
        Some((span.near(present.near(addr)), present.revision))
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment")
            .field("name", &self.name())
            .field("buffers", &self.buffers().len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use rerail_metadata::descriptor::{Device, InstanceId, Protocol, RerailMember};
    use rerail_transport::machine::ids::PeerId;
    use rerail_transport::rdma::PeerSpec;
    use rerail_verbs::Gid;

    use super::*;
    use crate::peers::ReachKey;

    fn descriptor(nics: &[&str], buffers: &[(u64, u64, &[u32])]) -> Arc<SegmentDescriptor> {
        let mut descriptor = SegmentDescriptor::new("peer", Protocol::rdma());
        for name in nics {
            descriptor.devices.push(Device::new(*name, 0, Gid::NULL));
        }
        for (addr, length, rkey) in buffers {
            descriptor.buffers.push(Buffer {
                name: "*".into(),
                addr: *addr,
                length: *length,
                rkey: rkey.to_vec(),
                lkey: rkey.to_vec(),
                ..Buffer::default()
            });
        }
        Arc::new(descriptor)
    }

    fn segment(descriptor: &Arc<SegmentDescriptor>) -> Segment {
        let life = Life::new(Arc::clone(descriptor));
        let key = ReachKey::rdma(descriptor);
        let found = life.reach(key, descriptor, || {
            let spec = PeerSpec {
                id: PeerId(1),
                segment: "peer".into(),
                server: "peer".into(),
                instance: None,
                nics: Vec::new(),
            };
            (Peer::new(spec, &[]), Route::Rdma)
        });
        Segment::new(Arc::clone(descriptor), life, found.reach)
    }

    #[test]
    fn r09_bytes_that_are_not_offered_name_the_nearest_buffer() {
        let buffers: [(u64, u64, &[u32]); 3] = [
            (0x9000, 0x1000, &[1]),
            (0x1000, 0x1000, &[1]),
            (0x2000, 0x1000, &[1]),
        ];
        let segment = segment(&descriptor(&["a"], &buffers));
        assert!(
            segment.span(0x1000, 0x2000).is_ok(),
            "across the seam of two chunks"
        );
        for (addr, length) in [(0x2fff, 2), (0xfff, 2), (0x3000, 1), (0x9000, u64::MAX)] {
            let error = segment.span(addr, length).expect_err("not offered");
            assert!(
                error.to_string().contains("nearest are 4096 bytes"),
                "{error}"
            );
        }
    }

    #[test]
    fn keys_follow_the_present_record_by_the_names_of_nics() {
        let segment = segment(&descriptor(&["a", "b"], &[(0x1000, 0x1000, &[10, 20])]));
        let keys = || {
            let (span, revision) = segment.span(0x1000, 16).expect("offered");
            let (.., keys) = span.at(0).expect("inside");
            let keys = [0, 1].map(|nic| keys.get(nic).expect("there is one"));
            (keys, revision)
        };
        assert_eq!(keys(), ([10, 20], 0));
        let (waiting, _) = segment.span(0x1000, 16).expect("offered");
        // Registered anew, and published in another order.
        let healthy_first = descriptor(&["b", "a"], &[(0x1000, 0x1000, &[21, 11])]);
        segment.life().take(healthy_first, &[]);
        assert_eq!(keys(), ([11, 21], 1));
        assert!(waiting.is_superseded(), "requests have to begin again");
        // One device was opened again.
        let (waiting, _) = segment.span(0x1000, 16).expect("offered");
        let reopened = descriptor(&["a", "b"], &[(0x1000, 0x1000, &[11, 22])]);
        segment.life().take(reopened, &[]);
        assert_eq!(keys(), ([11, 22], 2));
        let keys_of_waiting = [0, 1].map(|nic| waiting.key(0, nic));
        assert_eq!(keys_of_waiting, [Some(11), Some(22)], "requests follow it");
        // A record that lacks a NIC says nothing of keys for it.
        let other = descriptor(&["b"], &[(0x1000, 0x1000, &[99])]);
        segment.life().take(other, &[]);
        assert_eq!(keys(), ([11, 22], 2));
        // Memory that is gone is named as it was: requests to it ask for the record once more.
        segment.life().take(descriptor(&["a", "b"], &[]), &[]);
        assert_eq!(keys(), ([10, 20], 0));
        assert!(segment.present_span(0x1000, 16).is_none());
    }

    #[test]
    fn a_nic_that_a_peer_adds_gets_a_place_and_its_keys_once_they_are_told() {
        let of = |nics: &[&str], keys: &[u32], tells| {
            let mut descriptor = SegmentDescriptor::clone(&descriptor(nics, &[(0x1000, 16, keys)]));
            let member = RerailMember::new(InstanceId([7; 16]));
            descriptor.rerail = Some(member).filter(|_| tells);
            Arc::new(descriptor)
        };
        let segment = segment(&of(&["a"], &[10], true));
        let keys = || {
            let (span, _) = segment.span(0x1000, 16).expect("offered");
            let (.., keys) = span.at(0).expect("inside");
            [0, 1].map(|nic| keys.get(nic))
        };
        assert_eq!(keys(), [Some(10), None]);
        segment.life().take(of(&["a", "b"], &[10, 0], true), &[]);
        assert_eq!(keys(), [Some(10), None], "it is being taken in");
        assert_eq!(segment.life().down(), ["a", "b"]);
        segment.life().take(of(&["b", "a"], &[20, 10], true), &[]);
        assert_eq!(keys(), [Some(10), Some(20)]);
        // A C++ engine's record that has other NICs is not about the same way.
        let plain = super::tests::segment(&of(&["a"], &[10], false));
        plain.life().take(of(&["a", "b"], &[10, 20], false), &[]);
        let (span, _) = plain.span(0x1000, 16).expect("offered");
        let (.., keys) = span.at(0).expect("inside");
        assert_eq!(keys.get(1), None);
    }
}
