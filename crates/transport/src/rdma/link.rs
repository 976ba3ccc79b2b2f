//! A data thread's view of connected endpoints and of the rails that have work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rerail_verbs::WorkRequest;

use super::inbox::{EndpointKey, Pairs, Probe, Work};
use super::rail::Rail;
use super::slice::{Moment, Slice};
use super::transfer::Transfer;
use crate::machine::Time;

/// A rail and the transfers that wait for room on it.
pub(super) struct Lane {
    pub(super) rail: Arc<Rail>,
    pub(super) pending: VecDeque<Work>,
    /// Key of the link on which its work is posted.
    link: Option<u64>,
    /// The probe that is to be posted, or is in flight.
    pub(super) probe: Option<LaneProbe>,
    /// Work requests in flight, on whatever link.
    in_flight: u32,
    meter: Meter,
    /// Nobody can name the rail any more: the place may be used for another.
    pub(super) is_free: bool,
}

/// A probe of a lane.
pub(super) struct LaneProbe {
    pub(super) order: Probe,
    /// Queue pairs that it has not come back from; 0 before it is posted.
    pub(super) left: u32,
}

/// Measures what a rail moves while it has work.
#[derive(Default)]
struct Meter {
    bytes: u64,
    busy: Duration,
    /// Since when it has work.
    since: Option<Time>,
}

impl Lane {
    pub(super) fn new(rail: Arc<Rail>) -> Self {
        Self {
            rail,
            pending: VecDeque::new(),
            link: None,
            probe: None,
            in_flight: 0,
            meter: Meter::default(),
            is_free: false,
        }
    }

    pub(super) fn link(&self) -> Option<u64> {
        self.link
    }

    /// Sets the link on which work is posted, and tells those who choose rails.
    pub(super) fn set_link(&mut self, link: Option<u64>) {
        self.link = link;
        self.rail.set_linked(link.is_some());
        if link.is_none() {
            // Whoever hears of the link's end needs no answer.
            self.probe = None;
        }
    }

    /// A work request of it is in flight.
    pub(super) fn posted(&mut self, now: Time) {
        if self.in_flight == 0 {
            self.meter.since = Some(now);
        }
        self.in_flight += 1;
    }

    /// A work request of it came back, having moved `bytes`.
    pub(super) fn came_back(&mut self, bytes: u64, now: Time) {
        self.in_flight -= 1;
        self.meter.bytes += bytes;
        if self.in_flight == 0 {
            self.meter.stop(now);
        }
    }

    /// Bytes moved and the time that took, once there was work for `enough`.
    pub(super) fn sample(&mut self, enough: Duration, now: Time) -> Option<(u64, Duration)> {
        if self.in_flight > 0 {
            self.meter.stop(now);
            self.meter.since = Some(now);
        }
        let Meter { bytes, busy, .. } = self.meter;
        if bytes == 0 || busy < enough {
            return None;
        }
        self.meter.bytes = 0;
        self.meter.busy = Duration::ZERO;
        Some((bytes, busy))
    }

    /// True once nobody else holds the rail, and nothing of it is left here.
    pub(super) fn is_abandoned(&self) -> bool {
        self.link.is_none()
            && self.in_flight == 0
            && self.pending.is_empty()
            && Arc::strong_count(&self.rail) == 1
    }
}

impl Meter {
    fn stop(&mut self, now: Time) {
        if let Some(since) = self.since.take() {
            self.busy += now.saturating_since(since);
        }
    }
}

/// A work request in flight.
pub(super) struct Flight {
    pub(super) cargo: Cargo,
    /// Position of the lane that it came from.
    pub(super) lane: usize,
    /// Key of its link.
    pub(super) link: u64,
    /// Position of its queue pair in the link.
    pub(super) queue: usize,
    /// The keys that it was posted with.
    pub(super) keys: WorkKeys,
}

/// Keys of a work request.
#[derive(Clone, Copy, Default)]
pub(super) struct WorkKeys {
    pub(super) local: u32,
    pub(super) remote: u32,
}

impl WorkKeys {
    /// Of a request that moves a slice.
    pub(super) fn of(request: &WorkRequest) -> Self {
        Self {
            local: request.sges().first().map_or(0, |sge| sge.lkey),
            remote: request.remote.rkey,
        }
    }
}

/// What a work request is for.
pub(super) enum Cargo {
    /// Bytes of a transfer.
    Slice(Arc<Transfer>, Slice),
    /// Nothing: its success proves the READ before it (module `driver::doubt`).
    Proof,
    /// The probe of its lane's rail with this number.
    Probe(u64),
}

impl Flight {
    /// Bytes of transfers in it.
    pub(super) fn bytes(&self) -> u64 {
        match &self.cargo {
            Cargo::Slice(_, slice) => u64::from(slice.length),
            Cargo::Proof | Cargo::Probe(_) => 0,
        }
    }

    /// The transfer that it moves bytes of.
    pub(super) fn transfer(&self) -> Option<&Arc<Transfer>> {
        match &self.cargo {
            Cargo::Slice(transfer, _) => Some(transfer),
            Cargo::Proof | Cargo::Probe(_) => None,
        }
    }
}

/// A queue pair's send queue.
pub(super) struct SendQueue {
    pub(super) in_flight: u32,
    pub(super) depth: u32,
    /// The device has said so: nothing is posted on it until something comes back.
    pub(super) is_full: bool,
    /// When work last completed on it, or was posted after it had been empty.
    pub(super) progress_at: Time,
    /// The newest READ that succeeded, on devices where that needs proof.
    pub(super) doubtful: Option<(Arc<Transfer>, Slice)>,
}

/// An endpoint on which work is posted, or was until it broke.
pub(super) struct Link {
    pub(super) endpoint: EndpointKey,
    /// Number of the device's opening that it belongs to, or an earlier one.
    pub(super) opening: u32,
    /// When it began to be made.
    pub(super) began: Moment,
    /// Gone once nothing may be posted any more, so that the owner can destroy them.
    pub(super) pairs: Option<Arc<Pairs>>,
    gate: Arc<AtomicBool>,
    pub(super) queues: Vec<SendQueue>,
    pub(super) next_queue: usize,
    pub(super) in_flight: u32,
    pub(super) in_flight_bytes: u64,
    pub(super) abandoned: Vec<(Arc<Transfer>, Slice)>,
}

impl Link {
    pub(super) fn new(
        endpoint: EndpointKey,
        pairs: Arc<Pairs>,
        began: Moment,
        gate: Arc<AtomicBool>,
        now: Time,
    ) -> Self {
        let queues = pairs.0.iter().map(|pair| SendQueue {
            in_flight: 0,
            depth: pair.capacity().send_wr_max,
            is_full: false,
            progress_at: now,
            doubtful: None,
        });
        Self {
            endpoint,
            opening: 0,
            began,
            queues: queues.collect(),
            pairs: Some(pairs),
            gate,
            next_queue: 0,
            in_flight: 0,
            in_flight_bytes: 0,
            abandoned: Vec::new(),
        }
    }

    /// Its queue pairs, while its gate is open.
    pub(super) fn open_pairs(&self) -> Option<Arc<Pairs>> {
        self.pairs
            .as_ref()
            .filter(|_| self.gate.load(Ordering::Acquire))
            .cloned()
    }

    #[cfg(test)]
    pub(super) fn is_gate_open(&self) -> bool {
        self.gate.load(Ordering::Acquire)
    }

    /// Transfers with slices that have come back and are neither proved nor given back.
    #[cfg(test)]
    pub(super) fn unfinished(&self) -> impl Iterator<Item = &Arc<Transfer>> {
        let doubtful = self
            .queues
            .iter()
            .filter_map(|queue| queue.doubtful.as_ref());
        let all = self.abandoned.iter().chain(doubtful);
        all.map(|(transfer, _)| transfer)
    }

    pub(super) fn posted(&mut self, queue: usize, bytes: u64, now: Time) {
        let state = &mut self.queues[queue];
        if state.in_flight == 0 {
            state.progress_at = now;
        }
        state.in_flight += 1;
        self.in_flight += 1;
        self.in_flight_bytes += bytes;
    }

    pub(super) fn came_back(&mut self, queue: usize, bytes: u64, now: Time) {
        let state = &mut self.queues[queue];
        state.in_flight -= 1;
        state.is_full = false;
        state.progress_at = now;
        self.in_flight -= 1;
        self.in_flight_bytes -= bytes;
    }

    /// Gives up what needs proof: it is abandoned like what came back with an error.
    pub(super) fn abandon_doubtful(&mut self) {
        let doubtful = self
            .queues
            .iter_mut()
            .filter_map(|queue| queue.doubtful.take());
        self.abandoned.extend(doubtful);
    }

    /// Room on each of its queue pairs for one more request.
    pub(super) fn has_room(&self) -> bool {
        self.queues
            .iter()
            .all(|queue| queue.in_flight < queue.depth && !queue.is_full)
    }

    /// The oldest time since which a queue with work has made no progress.
    pub(super) fn stalled_since(&self) -> Option<Time> {
        let busy = self.queues.iter().filter(|queue| queue.in_flight > 0);
        busy.map(|queue| queue.progress_at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_posted_later_does_not_restart_the_wait_for_what_was_posted_before() {
        let at = Time::from_millis;
        let gate = Arc::new(AtomicBool::new(true));
        let mut link = Link::new(
            1,
            Arc::new(Pairs(Vec::new())),
            Moment::default(),
            gate,
            at(0),
        );
        link.queues.push(SendQueue {
            in_flight: 0,
            depth: 4,
            is_full: false,
            progress_at: at(0),
            doubtful: None,
        });
        assert_eq!(link.stalled_since(), None, "nothing is in flight");
        link.posted(0, 10, at(100));
        link.posted(0, 10, at(400));
        assert_eq!(link.stalled_since(), Some(at(100)));
        link.came_back(0, 10, at(500));
        assert_eq!(link.stalled_since(), Some(at(500)), "that is progress");
        link.came_back(0, 10, at(600));
        assert_eq!(link.stalled_since(), None);
    }
}
