//! A data thread's view of connected endpoints and of the rails that have work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::inbox::{EndpointKey, Pairs, Work};
use super::rail::Rail;
use super::slice::Slice;
use super::transfer::Transfer;
use crate::machine::Time;

/// A rail and the transfers that wait for room on it.
pub(super) struct Lane {
    pub(super) rail: Arc<Rail>,
    pub(super) pending: VecDeque<Work>,
    /// Key of the link on which its work is posted.
    pub(super) link: Option<u64>,
    /// The control side was asked to connect it.
    pub(super) asked: bool,
}

/// A work request in flight.
pub(super) struct Flight {
    pub(super) transfer: Arc<Transfer>,
    pub(super) slice: Slice,
    /// Position of the lane that it came from.
    pub(super) lane: usize,
    /// Key of its link.
    pub(super) link: u64,
    /// Position of its queue pair in the link.
    pub(super) queue: usize,
}

impl Flight {
    /// A flight of no bytes beside this one, whose success proves it.
    pub(super) fn into_probe(self) -> Self {
        let slice = Slice {
            length: 0,
            ..self.slice
        };
        Self { slice, ..self }
    }

    /// True for a flight that moves no bytes of its transfer.
    pub(super) fn is_probe(&self) -> bool {
        self.slice.length == 0
    }
}

/// A queue pair's send queue.
pub(super) struct SendQueue {
    pub(super) in_flight: u32,
    pub(super) depth: u32,
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
    /// Gone once nothing may be posted any more, so that the owner can destroy them.
    pub(super) pairs: Option<Arc<Pairs>>,
    gate: Arc<AtomicBool>,
    pub(super) queues: Vec<SendQueue>,
    pub(super) next_queue: usize,
    pub(super) in_flight: u32,
    pub(super) in_flight_bytes: u64,
    /// The queue pairs are in ERR: what is abandoned is given back once all has come back.
    pub(super) in_error: bool,
    /// Some work has completed on it.
    pub(super) proved: bool,
    pub(super) abandoned: Vec<(Arc<Transfer>, Slice)>,
}

impl Link {
    pub(super) fn new(
        endpoint: EndpointKey,
        pairs: Arc<Pairs>,
        gate: Arc<AtomicBool>,
        now: Time,
    ) -> Self {
        let queues = pairs.0.iter().map(|pair| SendQueue {
            in_flight: 0,
            depth: pair.capacity().send_wr_max,
            progress_at: now,
            doubtful: None,
        });
        Self {
            endpoint,
            opening: 0,
            queues: queues.collect(),
            pairs: Some(pairs),
            gate,
            next_queue: 0,
            in_flight: 0,
            in_flight_bytes: 0,
            in_error: false,
            proved: false,
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

    /// The oldest time since which a queue with work has made no progress.
    pub(super) fn stalled_since(&self) -> Option<Time> {
        let busy = self.queues.iter().filter(|queue| queue.in_flight > 0);
        busy.map(|queue| queue.progress_at).min()
    }
}
