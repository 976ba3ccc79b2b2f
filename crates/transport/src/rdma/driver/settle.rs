//! What becomes of work whose endpoint is gone.
//!
//! Order of events: the link breaks (nothing is posted any more, waiting work is stranded), its
//! queue pairs go to ERR, by an error of their own or by the control thread, everything posted
//! comes back. Only then are abandoned slices given back to be posted elsewhere; until the endpoint
//! is fenced at the far end too, each transfer with an abandoned WRITE is held, so that it cannot
//! be reported finished.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rerail_verbs::RdmaOpcode;

use super::super::endpoint::CloseCause;
use super::super::inbox::{EndpointKey, Leftover, Report};
use super::super::link::Cargo;
use super::super::transfer::Transfer;
use super::Driver;
use crate::TransferError;
use crate::machine::Time;

impl Driver {
    /// Stops posting on a link, for a reason that the control side does not know yet.
    pub(super) fn break_link(&mut self, key: u64, cause: &str) {
        self.break_link_for(key, CloseCause::Broken(cause.to_owned()));
    }

    /// The same for a cause of any kind.
    pub(super) fn break_link_for(&mut self, key: u64, cause: CloseCause) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        if link.pairs.is_none() {
            return;
        }
        let endpoint = link.endpoint;
        self.detach(key);
        self.unsent.push_back(Report::Broken { endpoint, cause });
    }

    /// Breaks every link: the completion queue is gone.
    pub(super) fn break_all(&mut self, cause: &str, opening: u32) {
        let mut keys = std::mem::take(&mut self.keys);
        self.links.keys_into(&mut keys);
        for key in &keys {
            let link = self.links.get_mut(*key);
            if link.is_some_and(|link| link.opening == opening) {
                self.break_link(*key, cause);
            }
        }
        self.keys = keys;
    }

    /// Stops posting on a link and strands what waited for it.
    pub(super) fn detach(&mut self, key: u64) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        if link.pairs.take().is_none() {
            return;
        }
        for lane in 0..self.lanes.len() {
            // A newer endpoint may have taken a rail over.
            if self.lanes[lane].link() == Some(key) {
                // Before the work is stranded, so that none of it comes back here.
                self.lanes[lane].set_link(None);
                self.strand(lane);
            }
        }
    }

    /// Gives the work that waits for a rail back to the control side.
    pub(super) fn strand(&mut self, lane: usize) {
        let lane = &mut self.lanes[lane];
        while let Some(work) = lane.pending.pop_front() {
            let transfer = work.dequeue();
            if transfer.has_work() {
                self.unsent.push_back(Report::Stranded(transfer));
            }
        }
    }

    pub(super) fn await_drain(&mut self, endpoint: EndpointKey) {
        let Some(key) = self.link_keys.get(&endpoint).copied() else {
            let leftover = Leftover::default();
            self.unsent
                .push_back(Report::Drained { endpoint, leftover });
            return;
        };
        self.detach(key);
        self.settle_if_drained(key);
    }

    /// Takes everything that is still in flight on a destroyed endpoint for come back.
    pub(super) fn give_up(&mut self, endpoint: EndpointKey, now: Time) {
        let Some(key) = self.link_keys.get(&endpoint).copied() else {
            return;
        };
        self.detach(key);
        let mut keys = std::mem::take(&mut self.keys);
        self.flights.keys_into(&mut keys);
        for wr_id in &keys {
            let of_link = self
                .flights
                .get_mut(*wr_id)
                .is_some_and(|flight| flight.link == key);
            if !of_link {
                continue;
            }
            let Some(flight) = self.flights.remove(*wr_id) else {
                continue;
            };
            let bytes = flight.bytes();
            self.in_flight_bytes -= bytes;
            let lane = &mut self.lanes[flight.lane];
            lane.came_back(0, now);
            lane.rail.abandoned(bytes);
            if let Some(link) = self.links.get_mut(key) {
                link.came_back(flight.queue, bytes, now);
                if let Cargo::Slice(transfer, slice) = flight.cargo {
                    link.abandoned.push((transfer, slice));
                }
            }
        }
        self.keys = keys;
        self.settle_if_drained(key);
    }

    /// Ends everything that is in flight on an endpoint that cannot be stopped: it must not be
    /// posted elsewhere, since it may still be carried out. How much that is stands in
    /// `quarantined_bytes` before the first transfer ends.
    pub(super) fn unfence(
        &mut self,
        endpoint: EndpointKey,
        cause: &str,
        quarantined_bytes: &AtomicU64,
        now: Time,
    ) {
        let Some(key) = self.link_keys.get(&endpoint).copied() else {
            return;
        };
        if let Some(link) = self.links.get_mut(key) {
            quarantined_bytes.store(link.in_flight_bytes, Ordering::Release);
        }
        let in_flight = self.flights.iter().filter(|(_, flight)| flight.link == key);
        for transfer in in_flight.filter_map(|(_, flight)| flight.transfer()) {
            transfer.unfence(cause);
        }
        if let Some(link) = self.links.get_mut(key) {
            for (transfer, _) in &link.abandoned {
                transfer.unfence(cause);
            }
        }
        self.give_up(endpoint, now);
    }

    /// Gives a link's abandoned slices back once its local fence is complete: nothing is posted any
    /// more, and all that was has come back. What came back with an error shows that its queue pair
    /// is in ERR, so that this need not wait for the control thread, which may hang.
    pub(super) fn settle_if_drained(&mut self, key: u64) {
        let drained = self
            .links
            .get_mut(key)
            .is_some_and(|link| link.pairs.is_none() && link.in_flight == 0);
        if !drained {
            return;
        }
        let Some(mut link) = self.links.remove(key) else {
            return;
        };
        self.link_keys.remove(&link.endpoint);
        link.abandon_doubtful();
        let mut leftover = Leftover::default();
        let mut stranded: Option<Arc<Transfer>> = None;
        for (transfer, slice) in link.abandoned {
            if transfer.spec().opcode == RdmaOpcode::Write {
                // Before the slice is given back: its transfer cannot be finished until then.
                transfer.hold();
                leftover.held.push(Arc::clone(&transfer));
            }
            if transfer.error().is_none() {
                leftover.rerouted_bytes += u64::from(slice.length);
            }
            transfer.give_back(slice);
            let repeated = stranded
                .as_ref()
                .is_some_and(|last| Arc::ptr_eq(last, &transfer));
            if !repeated && transfer.has_work() {
                self.unsent
                    .push_back(Report::Stranded(Arc::clone(&transfer)));
                stranded = Some(transfer);
            }
        }
        self.unsent.push_back(Report::Drained {
            endpoint: link.endpoint,
            leftover,
        });
    }
}

/// Ends what a report would have asked for, once nobody hears it.
pub(super) fn end(report: Report) {
    match report {
        Report::Stranded(transfer) => {
            transfer.fail(TransferError::Closed);
        }
        Report::Drained { leftover, .. } => {
            for transfer in leftover.held {
                transfer.release();
            }
        }
        Report::ProbeDone { .. } | Report::Progress { .. } | Report::Broken { .. } => {}
    }
}
