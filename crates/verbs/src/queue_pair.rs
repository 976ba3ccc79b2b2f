//! Reliable connected queue pairs.

use std::sync::Arc;

use crate::backend;
use crate::completion_queue::CompletionQueue;
use crate::objects::Registration;
use crate::owned::Owned;
use crate::protection_domain::ProtectionDomain;
use crate::{
    InitAttr, ObjectId, PostError, QpAttr, QpCapacity, RtrAttr, RtsAttr, VerbsError, WorkRequest,
    fork,
};

/// A reliable connected queue pair (`struct ibv_qp`). Clones share it.
///
/// Dropping the last clone destroys it from any state. Work in flight is cut off without a
/// completion then, and some of it may still arrive: see [`to_error`](Self::to_error).
///
/// The transitions call `ibv_modify_qp` on the caller's thread; run them through
/// [`Context::control`](crate::Context::control) where a hang matters.
#[derive(Clone, Debug)]
pub struct QueuePair {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    raw: Owned<(backend::QueuePair, Registration)>,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    pd: ProtectionDomain,
}

impl QueuePair {
    pub(crate) fn new(
        pd: &ProtectionDomain,
        send_cq: &CompletionQueue,
        recv_cq: &CompletionQueue,
        raw: backend::QueuePair,
    ) -> Self {
        let context = pd.context();
        let registration = context.objects().insert(raw.event_key());
        Self {
            inner: Arc::new(Inner {
                raw: Owned::new((raw, registration), context.control()),
                send_cq: send_cq.clone(),
                recv_cq: recv_cq.clone(),
                pd: pd.clone(),
            }),
        }
    }

    /// Identity in [`AsyncEvent`](crate::AsyncEvent)s. Never used again, unlike the number.
    pub fn id(&self) -> ObjectId {
        self.inner.raw.1.id()
    }

    /// Number of the queue pair on its port, 24 bits, which the peer needs.
    pub fn qp_num(&self) -> u32 {
        self.raw().qp_num()
    }

    /// Sizes that were granted, which may be more than was asked for.
    pub fn capacity(&self) -> QpCapacity {
        self.raw().capacity()
    }

    /// Where completions of posted work arrive.
    pub fn send_cq(&self) -> &CompletionQueue {
        &self.inner.send_cq
    }

    /// Where completions of receives arrive.
    pub fn recv_cq(&self) -> &CompletionQueue {
        &self.inner.recv_cq
    }

    /// The protection domain of the pair.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// RESET → INIT: binds the pair to a port.
    pub fn to_init(&self, attr: &InitAttr) -> Result<(), VerbsError> {
        fork::check()?;
        self.wrap(
            "ibv_modify_qp(INIT)",
            Some(attr.port),
            self.raw().to_init(attr),
        )
    }

    /// INIT → RTR: names the peer. May take a second while the kernel resolves a neighbour.
    ///
    /// `ENODATA` or `EINVAL` with an index whose row is gone, `ETIMEDOUT` for a neighbour that
    /// does not answer, `ENETUNREACH` for one that cannot be routed to.
    pub fn to_rtr(&self, attr: &RtrAttr) -> Result<(), VerbsError> {
        fork::check()?;
        self.wrap(
            "ibv_modify_qp(RTR)",
            Some(attr.path.port),
            self.raw().to_rtr(attr),
        )
    }

    /// RTR → RTS: work can be posted.
    pub fn to_rts(&self, attr: &RtsAttr) -> Result<(), VerbsError> {
        fork::check()?;
        self.wrap("ibv_modify_qp(RTS)", None, self.raw().to_rts(attr))
    }

    /// Any state → ERR: everything outstanding completes as flushed.
    ///
    /// Packets that are on the wire may still be carried out by the peer, even after the pair is
    /// drained and destroyed; only the peer's pair in ERR or time puts an end to that.
    pub fn to_error(&self) -> Result<(), VerbsError> {
        fork::check()?;
        self.wrap("ibv_modify_qp(ERR)", None, self.raw().to_error())
    }

    /// Any state → RESET: everything outstanding vanishes without a completion.
    pub fn to_reset(&self) -> Result<(), VerbsError> {
        fork::check()?;
        self.wrap("ibv_modify_qp(RESET)", None, self.raw().to_reset())
    }

    /// What the device knows of the pair (`ibv_query_qp`).
    pub fn query(&self) -> Result<QpAttr, VerbsError> {
        fork::check()?;
        self.wrap("ibv_query_qp", None, self.raw().query())
    }

    /// Posts requests in order (`ibv_post_send`), as many as there is room for.
    ///
    /// Posting is safe: a key or address that names no live region makes the request fail, and
    /// only [`HostMemory`](crate::HostMemory), never a Rust slice, can be registered. Allocates
    /// nothing; the only system call is the doorbell of drivers that ring it through the kernel.
    pub fn post(&self, requests: &[WorkRequest]) -> Result<(), PostError> {
        fork::check().map_err(|cause| PostError {
            posted: 0,
            in_doubt: 0,
            cause,
        })?;
        self.raw().post(requests).map_err(|refusal| PostError {
            posted: refusal.posted,
            in_doubt: refusal.in_doubt,
            cause: self
                .inner
                .pd
                .context()
                .error("ibv_post_send", None, refusal.errno),
        })
    }

    fn raw(&self) -> &backend::QueuePair {
        &self.inner.raw.0
    }

    fn wrap<T>(
        &self,
        verb: &'static str,
        port: Option<u32>,
        result: crate::error::BackendResult<T>,
    ) -> Result<T, VerbsError> {
        self.inner.pd.context().wrap(verb, port, result)
    }
}
