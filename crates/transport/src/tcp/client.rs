//! Requests to peers, over a few lasting connections to each.
//!
//! A peer has at most [`ClientLimits::lanes_max`] *lanes*, tasks with a connection each, which take
//! requests from one bounded queue; a lane is started when a request finds no idle one, and ends
//! after some time without work. A request that fails is repeated, over a new connection, until its
//! deadline: READ and WRITE may be done twice.
//!
//! **The fence.** When the outcome of a request is told, none of its bytes can still reach memory
//! at either end. A connection that fails inside a WRITE is closed in our direction, and the end
//! of the peer's direction is awaited: the peer closes only after it has given up the request. A
//! connection whose end does not come within [`ClientLimits::fence_max`] is kept; the request may
//! succeed over another one meanwhile, but is reported only once that end has come. If it never
//! does, because the peer's process is frozen for example, the failure says `unfenced`.

use std::fmt;
use std::sync::Arc;

use rerail_verbs::HostMemory;
use tokio::runtime;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use super::failure::Failure;
use super::header::Opcode;
use super::lanes::{Job, Lanes};
use super::limits::{ClientLimits, Version};
use crate::rpc::HostPort;

/// One request.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to do.
    pub opcode: Opcode,
    /// Local memory: source of a WRITE, destination of a READ.
    pub memory: HostMemory,
    /// Offset in the local memory.
    pub offset: usize,
    /// Bytes.
    pub length: usize,
    /// First address in the peer's memory.
    pub remote_addr: u64,
    /// When to give up. The fence of a WRITE may take [`ClientLimits::fence_max`] longer.
    pub deadline: Instant,
}

/// What became of a request. It is told only once nothing of the request is under way.
pub type Outcome = oneshot::Receiver<Result<(), Failure>>;

/// Requests to one peer.
#[derive(Clone)]
pub struct TcpClient {
    lanes: Arc<Lanes>,
}

impl TcpClient {
    /// A client of the peer whose data port is `peer`. Connects when there is work.
    pub fn new(
        peer: HostPort,
        version: Version,
        limits: ClientLimits,
        runtime: runtime::Handle,
    ) -> Self {
        Self {
            lanes: Arc::new(Lanes::new(peer, version, limits, runtime)),
        }
    }

    /// Hands over a request. Never blocks; the receiver gets the outcome. Dropping the receiver
    /// does not end the request.
    pub fn submit(&self, request: Request) -> Outcome {
        self.hand_over(request, None)
    }

    /// As [`submit`](Self::submit); the request is given up when `cancel` becomes true.
    pub fn submit_cancellable(&self, request: Request, cancel: watch::Receiver<bool>) -> Outcome {
        self.hand_over(request, Some(cancel))
    }

    /// Gives up all requests, and takes no more: for a peer that is gone or was restarted. Every
    /// outcome is told, those of WRITEs under way after their fence.
    pub fn close(&self) {
        self.lanes.close();
    }

    /// Lanes that there are now.
    pub fn lanes(&self) -> usize {
        self.lanes.count()
    }

    fn hand_over(&self, request: Request, cancel: Option<watch::Receiver<bool>>) -> Outcome {
        let (done, outcome) = oneshot::channel();
        let (offset, length) = (request.offset, request.length);
        let end = offset.checked_add(length);
        if end.is_none_or(|end| end > request.memory.length()) {
            let _ = done.send(Err(Failure::LocalRange { offset, length }));
        } else if length == 0 {
            // The protocol has no empty request: servers reject it.
            let _ = done.send(Ok(()));
        } else {
            Lanes::add(
                &self.lanes,
                Job {
                    request,
                    cancel,
                    done,
                },
            );
        }
        outcome
    }
}

impl fmt::Debug for TcpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpClient")
            .field("peer", self.lanes.peer())
            .field("lanes", &self.lanes())
            .finish_non_exhaustive()
    }
}
