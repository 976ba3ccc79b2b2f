//! Segments of peers.

use std::fmt;
use std::sync::Arc;

use rerail_metadata::descriptor::{Buffer, SegmentDescriptor};
use rerail_transport::rdma::{Peer, Piece, Span};

use crate::tcp::TcpPeer;
use crate::{EngineError, Result};

/// A peer's segment as its record described it when it was opened. Clones share it.
///
/// Requests are bound to the peer's instance: after a restart of the peer its addresses mean
/// nothing, and the segment has to be opened again.
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
    descriptor: SegmentDescriptor,
    peer: Arc<Peer>,
    route: Route,
    buffers: Vec<Piece>,
}

impl Segment {
    pub(crate) fn new(descriptor: SegmentDescriptor, peer: Arc<Peer>, route: Route) -> Self {
        let mut buffers: Vec<Piece> = descriptor
            .buffers
            .iter()
            .filter(|buffer| matches!(route, Route::Tcp(_)) || !buffer.rkey.is_empty())
            .map(|buffer| {
                let keys = buffer.rkey.iter().copied();
                Piece::new(buffer.addr, buffer.length, keys)
            })
            .collect();
        buffers.sort_by_key(|piece| piece.addr);
        Self {
            shared: Arc::new(Shared {
                descriptor,
                peer,
                route,
                buffers,
            }),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared.descriptor.name
    }

    /// Its record.
    pub fn descriptor(&self) -> &SegmentDescriptor {
        &self.shared.descriptor
    }

    /// The memory that it offers, in the order of its record.
    pub fn buffers(&self) -> &[Buffer] {
        &self.shared.descriptor.buffers
    }

    pub(crate) fn peer(&self) -> &Arc<Peer> {
        &self.shared.peer
    }

    pub(crate) fn route(&self) -> &Route {
        &self.shared.route
    }

    /// The far end of a transfer: covered to the last byte by what is offered.
    pub(crate) fn span(&self, addr: u64, length: u64) -> Result<Span> {
        Span::new(addr, length, self.shared.buffers.iter().cloned()).ok_or_else(|| {
            let buffers = &self.shared.buffers;
            let after = buffers.partition_point(|piece| piece.addr <= addr);
            let nearest = after
                .checked_sub(1)
                .or_else(|| (after < buffers.len()).then_some(0));
            EngineError::NotOffered {
                segment: self.name().to_owned(),
                addr,
                length,
                nearest: match nearest.and_then(|index| buffers.get(index)) {
                    Some(piece) => {
                        format!("nearest are {} bytes at {:#x}", piece.length, piece.addr)
                    }
                    None => "it offers nothing".into(),
                },
            }
        })
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment")
            .field("name", &self.name())
            .field("buffers", &self.shared.buffers.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use rerail_metadata::descriptor::Protocol;
    use rerail_transport::machine::ids::PeerId;
    use rerail_transport::rdma::PeerSpec;

    use super::*;

    #[test]
    fn r09_bytes_that_are_not_offered_name_the_nearest_buffer() {
        let mut descriptor = SegmentDescriptor::new("peer", Protocol::rdma());
        for (addr, length) in [(0x9000, 0x1000), (0x1000, 0x1000), (0x2000, 0x1000)] {
            descriptor.buffers.push(Buffer {
                name: "*".into(),
                addr,
                length,
                rkey: vec![1],
                lkey: vec![1],
                ..Buffer::default()
            });
        }
        let peer = Peer::new(
            PeerSpec {
                id: PeerId(1),
                segment: "peer".into(),
                server: "peer".into(),
                instance: None,
                nics: Vec::new(),
            },
            &[],
        );
        let segment = Segment::new(descriptor, peer, Route::Rdma);
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
}
