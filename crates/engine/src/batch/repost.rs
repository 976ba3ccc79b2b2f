//! The second chance of a request that the peer refused: it may have registered its memory anew,
//! so that our keys are of yesterday (report M04).
//!
//! Once only, towards the same process only, and only if the peer's record still covers the bytes.
//! The whole request is posted again: writing or reading the same bytes twice changes nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rerail_transport::TransferError;
use rerail_transport::machine::peers::Trouble;
use rerail_transport::rdma::slice::RefusedKey;
use rerail_transport::rdma::{OnFinished, Span, TransferSpec};

use super::{Shared, Task};
use crate::segment::Segment;

/// Looks for newer keys and posts the request again, or ends it. Called on whatever thread ended
/// the first attempt; the work is done on the control runtime.
pub(super) fn begin(batch: Arc<Shared>, index: usize) {
    let runtime = batch.own.runtime.clone();
    // Dropped in any case: by a runtime that takes no work any more as well.
    let pending = Pending {
        batch,
        index,
        reposted: false,
    };
    if let Some(runtime) = runtime {
        runtime.spawn(pending.run());
    }
}

/// A request between two attempts. It ends when this is dropped without another attempt.
struct Pending {
    batch: Arc<Shared>,
    index: usize,
    reposted: bool,
}

/// What the first attempt went by.
struct First {
    segment: Segment,
    spec: TransferSpec,
    revision: u64,
    /// The keys that were refused; none over TCP.
    refused: Vec<RefusedKey>,
}

impl First {
    /// Whether what is offered differs from what was refused. Over TCP there are no keys: a newer
    /// record says that something has changed.
    fn differs_from(&self, (span, revision): &(Span, u64)) -> bool {
        if self.refused.is_empty() {
            return *revision > self.revision;
        }
        let mut refused = self.refused.iter();
        refused.any(|refused| span.key(refused.offset, refused.nic) != Some(refused.key))
    }
}

impl Pending {
    async fn run(mut self) {
        let Some(first) = self.first() else {
            return;
        };
        let (peers, clock) = (self.batch.own.peers.clone(), self.batch.own.clock);
        let segment = &first.segment;
        let (addr, length) = (first.spec.remote.addr(), first.spec.length);
        let present = || segment.present_span(addr, length);
        // Other keys have come meanwhile, over a subscription for example.
        let known = present().filter(|_| !first.refused.is_empty());
        let mut newer = known.filter(|found| first.differs_from(found));
        if newer.is_none() {
            let life = segment.life();
            let asked = life.refreshes();
            peers.trouble(life.name(), Trouble::RemoteAccess);
            let holds = || life.refreshes() > asked || life.failure().is_some();
            let limit = clock.instant(first.spec.cut_off).into();
            // Whatever comes of it, the record at hand decides.
            let _ = tokio::time::timeout_at(limit, life.news.wait_async(holds)).await;
            newer = present().filter(|found| first.differs_from(found));
        }
        if let Some((remote, revision)) = newer
            && clock.now() < first.spec.cut_off
        {
            self.reposted = self.repost(first, remote, revision);
        }
    }

    fn first(&self) -> Option<First> {
        let entries = self.batch.entries();
        let entry = entries.get(self.index)?;
        Some(First {
            segment: entry.segment.clone(),
            spec: entry.transfer.spec().clone(),
            revision: entry.revision,
            refused: entry.transfer.refused_keys(),
        })
    }

    /// False if it may not, or cannot.
    fn repost(&self, first: First, remote: Span, revision: u64) -> bool {
        let Some(engine) = self.batch.own.engine() else {
            return false;
        };
        let First { segment, spec, .. } = first;
        let mut entries = self.batch.entries();
        let is_over =
            self.batch.cancelled.load(Ordering::Acquire) || segment.life().failure().is_some();
        let Some(entry) = entries.get_mut(self.index).filter(|_| !is_over) else {
            return false;
        };
        tracing::info!(
            peer = segment.name(),
            "refused, and posted again by a newer record"
        );
        let spec = TransferSpec { remote, ..spec };
        let on_finished = Arc::clone(&entry.task) as Arc<dyn OnFinished>;
        entry.revision = revision;
        entry.transfer = engine.launch(&segment, &entry.memory, spec, on_finished, &entry.tether);
        true
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.reposted {
            return;
        }
        let mut entries = self.batch.entries();
        let Some(entry) = entries.get_mut(self.index) else {
            return;
        };
        entry.ended = if self.batch.cancelled.load(Ordering::Acquire) {
            Some(TransferError::Canceled)
        } else {
            entry.segment.life().failure()
        };
        let task: Arc<Task> = Arc::clone(&entry.task);
        drop(entries);
        task.end(Some(&self.batch), true);
    }
}
