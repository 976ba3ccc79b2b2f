//! The second chance of a request that the peer refused: it may have registered its memory anew,
//! so that our keys are of yesterday (report M04).
//!
//! Once only, and without a refusal each time that the record has other keys; towards the same
//! process only, and only if the peer's record still covers the bytes. The whole request is posted
//! again, since what has moved may be in other memory: writing or reading the same bytes twice
//! changes nothing.

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
        is_late: false,
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
    /// It could have been posted again, had there been time.
    is_late: bool,
}

/// What the first attempt went by.
struct First {
    segment: Segment,
    spec: TransferSpec,
    revision: u64,
    /// The keys that were refused; none over TCP.
    refused: Vec<RefusedKey>,
    /// Nothing was refused: the record has other keys.
    outdated: bool,
}

impl First {
    /// Whether what is offered has other keys than those that it failed for.
    fn has_other_keys(&self, (span, _): &(Span, u64)) -> bool {
        let mut refused = self.refused.iter();
        let differs =
            refused.any(|refused| span.key(refused.offset, refused.nic) != Some(refused.key));
        differs || self.outdated && !span.is_superseded()
    }

    /// Whether there is a later record than it went by.
    fn has_later_record(&self, (_, revision): &(Span, u64)) -> bool {
        *revision > self.revision
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
        let mut newer = present().filter(|found| first.has_other_keys(found));
        if newer.is_none() {
            let life = segment.life();
            let asked = life.refreshes();
            peers.trouble(life.name(), Trouble::RemoteAccess);
            let holds = || life.refreshes() > asked || life.failure().is_some();
            let limit = clock.instant(first.spec.cut_off).into();
            // Whatever comes of it, the record at hand decides.
            let _ = tokio::time::timeout_at(limit, life.news.wait_async(holds)).await;
            // It need not be the key that was wrong: a NIC that refuses may be withdrawn by now.
            newer = present()
                .filter(|found| first.has_other_keys(found) || first.has_later_record(found));
        }
        let Some((remote, revision)) = newer else {
            return;
        };
        if clock.now() < first.spec.cut_off {
            self.reposted = self.repost(first, remote, revision);
        } else {
            self.is_late = true;
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
            outdated: entry.transfer.is_outdated(),
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
            outdated = first.outdated,
            "posted again by another record"
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
            let late = self.is_late.then(|| entry.transfer.time_is_over());
            entry.segment.life().failure().or(late)
        };
        let task: Arc<Task> = Arc::clone(&entry.task);
        drop(entries);
        task.end(Some(&self.batch), true);
    }
}
