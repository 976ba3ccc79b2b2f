//! One NIC's part of a data thread: takes work, posts slices, polls completions.
//!
//! [`Driver::step`] is the loop's body. Once warm it takes no lock (but for transfers of which a
//! part was refused), allocates nothing and makes no system call but the doorbell. What it cannot
//! decide by itself (connecting, moving queue pairs, where stranded work goes) it reports to the
//! control side, and it goes on with the rest.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rerail_verbs::{Completion, RdmaOpcode, RemoteAddress, Sge, WcStatus, WorkRequest};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use super::config::RdmaConfig;
use super::endpoint::CloseCause;
use super::inbox::{EndpointKey, Inbox, Order, Report};
use super::link::{Cargo, Flight, Lane, Link, WorkKeys};
use super::nic::Nic;
use super::slab::Slab;
use super::slice::Slice;
use super::transfer::Transfer;
use crate::TransferError;
use crate::machine::Time;
use crate::machine::ids::PeerId;
use crate::machine::verdict::{Verdict, verdict};

mod check;
mod doubt;
mod mistake;
mod openings;
mod probe;
mod settle;
#[cfg(test)]
mod tests;

use check::Pace;
use doubt::doubts_reads;
use openings::Openings;

/// Work requests in one post.
const BATCH_MAX: usize = 16;

/// Completions taken at once.
const POLL_MAX: usize = 64;

/// Polls in one step, so that posting is not starved by a fast peer.
const POLLS_PER_STEP_MAX: usize = 8;

/// Orders and work taken in one step.
const TAKE_MAX: usize = 64;

/// What a step found.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Activity {
    /// Nothing in flight: only what reaches the inbox can give it something to do.
    Idle,
    /// Nothing to do until something completes.
    Waiting,
    /// Something was done.
    Busy,
}

/// The machinery of one NIC.
pub struct Driver {
    nic: Arc<Nic>,
    openings: Openings,
    inbox: Arc<Inbox>,
    window_bytes: u64,
    progress_timeout: Duration,
    lanes: Vec<Lane>,
    /// Lanes that may be used for other rails.
    free_lanes: VecDeque<usize>,
    /// Lane at which posting starts, so that none is always last.
    rotation: usize,
    links: Slab<Box<Link>>,
    link_keys: BTreeMap<EndpointKey, u64>,
    flights: Slab<Flight>,
    in_flight_bytes: u64,
    pace: Pace,
    /// The device's successful READs need proof.
    doubts_reads: bool,
    batch: Vec<WorkRequest>,
    keys: Vec<u64>,
    completions: [Completion; POLL_MAX],
    unsent: VecDeque<Report>,
    reports: mpsc::Sender<Report>,
}

impl Driver {
    /// A driver for `nic` that is fed by `inbox` and reports to `reports`.
    pub fn new(
        nic: Arc<Nic>,
        inbox: Arc<Inbox>,
        reports: mpsc::Sender<Report>,
        config: &RdmaConfig,
        now: Time,
    ) -> Self {
        let flights_max = config.cqe_max.min(nic.attr().max_cqe);
        Self {
            doubts_reads: doubts_reads(nic.attr().vendor_id),
            openings: Openings::new(&nic),
            nic,
            inbox,
            window_bytes: config.window_bytes,
            progress_timeout: config.progress_timeout,
            lanes: Vec::new(),
            free_lanes: VecDeque::new(),
            rotation: 0,
            links: Slab::with_capacity(config.endpoints_max),
            link_keys: BTreeMap::new(),
            flights: Slab::with_capacity(flights_max),
            in_flight_bytes: 0,
            pace: Pace::new(now),
            batch: Vec::with_capacity(BATCH_MAX),
            keys: Vec::with_capacity(flights_max as usize),
            completions: [Completion::EMPTY; POLL_MAX],
            unsent: VecDeque::new(),
            reports,
        }
    }

    /// One round.
    pub fn step(&mut self, now: Time) -> Activity {
        let mut busy = self.take_orders(now);
        busy |= self.poll(now);
        busy |= self.take_work();
        busy |= self.post(now);
        self.check(now);
        self.send_reports();
        if busy {
            Activity::Busy
        } else if self.flights.is_empty() && self.unsent.is_empty() {
            Activity::Idle
        } else {
            Activity::Waiting
        }
    }

    /// Ends what nobody will work on any more: its thread ends. Memory of work in flight stays
    /// pinned by its regions until the device has let go of it.
    pub fn shut_down(&mut self) {
        let mut keys = std::mem::take(&mut self.keys);
        self.flights.keys_into(&mut keys);
        let flights = keys.iter().filter_map(|wr_id| self.flights.remove(*wr_id));
        let mut open: Vec<_> = flights
            .filter_map(|flight| match flight.cargo {
                Cargo::Slice(transfer, slice) => Some((transfer, slice)),
                Cargo::Proof | Cargo::Probe(_) => None,
            })
            .collect();
        self.links.keys_into(&mut keys);
        for key in &keys {
            if let Some(mut link) = self.links.remove(*key) {
                link.abandon_doubtful();
                open.append(&mut link.abandoned);
            }
        }
        for (transfer, slice) in open {
            transfer.fail(TransferError::Closed);
            transfer.give_back(slice);
        }
        while let Some(work) = self.inbox.work.pop() {
            work.dequeue().fail(TransferError::Closed);
        }
        for lane in &mut self.lanes {
            for work in lane.pending.drain(..) {
                work.dequeue().fail(TransferError::Closed);
            }
        }
        self.unsent.drain(..).for_each(settle::end);
    }

    /// Work requests that are posted and have not come back.
    #[cfg(test)]
    pub(super) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Whether it has posted something of this transfer that has not come back, or whose fence is
    /// not begun.
    #[cfg(test)]
    pub(super) fn has_posted(&self, transfer: &Arc<Transfer>) -> bool {
        let mut flights = self.flights.iter();
        let mut links = self.links.iter();
        let is_it = |other: &Arc<Transfer>| Arc::ptr_eq(other, transfer);
        flights.any(|(_, flight)| flight.transfer().is_some_and(is_it))
            || links.any(|(_, link)| link.unfinished().any(is_it))
    }

    /// Work that waits for room on its rail.
    #[cfg(test)]
    pub(super) fn pending(&self) -> usize {
        let pending = self.lanes.iter().map(|lane| lane.pending.len());
        pending.sum()
    }

    /// Reports that wait to be sent, or to be heard.
    #[cfg(test)]
    pub(super) fn reports(&self) -> usize {
        self.unsent.len() + self.reports.max_capacity() - self.reports.capacity()
    }

    /// True when nothing waits in the queues in front of it.
    pub fn is_inbox_empty(&self) -> bool {
        self.inbox.is_empty()
    }

    fn take_orders(&mut self, now: Time) -> bool {
        for taken in 0..TAKE_MAX {
            let Some(order) = self.inbox.orders.pop() else {
                return taken > 0;
            };
            self.obey(order, now);
        }
        true
    }

    fn obey(&mut self, order: Order, now: Time) {
        match order {
            Order::Attach {
                endpoint,
                rail,
                pairs,
                began,
                gate,
            } => {
                let lane = self.lane(&rail);
                // An endpoint may serve several rails: a segment that was opened again, under a
                // record that has changed, has rails of its own between the same NICs.
                if let Some(key) = self.link_keys.get(&endpoint).copied() {
                    // One that has broken meanwhile is reported, or has been.
                    let link = self.links.get_mut(key);
                    if link.is_some_and(|link| link.pairs.is_some()) {
                        self.lanes[lane].set_link(Some(key));
                    }
                    return;
                }
                let mut link = Box::new(Link::new(endpoint, pairs, began, gate, now));
                link.opening = self.openings.seen();
                if let Ok(key) = self.links.insert(link) {
                    self.link_keys.insert(endpoint, key);
                    self.lanes[lane].set_link(Some(key));
                } else {
                    let cause = "more endpoints than MC_MAX_EP_PER_CTX allows".into();
                    let cause = CloseCause::Broken(cause);
                    self.unsent.push_back(Report::Broken { endpoint, cause });
                }
            }
            Order::Detach(endpoint) => {
                if let Some(key) = self.link_keys.get(&endpoint).copied() {
                    self.detach(key);
                }
            }
            Order::AwaitDrain(endpoint) => self.await_drain(endpoint),
            Order::GiveUp(endpoint) => self.give_up(endpoint, now),
            Order::Unfence {
                endpoint,
                cause,
                quarantined_bytes,
            } => self.unfence(endpoint, &cause, &quarantined_bytes, now),
            Order::Unlink(rail) => {
                let lane = self.lane(&rail);
                self.lanes[lane].set_link(None);
                self.strand(lane);
            }
            Order::Probe(order) => self.take_probe(order),
            Order::Share(peer) => self.share(peer),
        }
    }

    fn lane(&mut self, rail: &Arc<super::rail::Rail>) -> usize {
        if let Some(slot) = rail.slot() {
            return slot;
        }
        let lane = Lane::new(Arc::clone(rail));
        // The oldest first: a free lane holds the rail that it had until it is used again.
        let slot = match self.free_lanes.pop_front() {
            Some(slot) => {
                self.lanes[slot] = lane;
                slot
            }
            None => {
                self.lanes.push(lane);
                self.lanes.len() - 1
            }
        };
        rail.set_slot(slot);
        slot
    }

    /// Reports what waits for a peer and is more than a slice: another rail may take a part.
    fn share(&mut self, peer: PeerId) {
        for lane in &self.lanes {
            if lane.rail.id().peer.peer != peer {
                continue;
            }
            for work in &lane.pending {
                let slice = u64::from(work.transfer.spec().slicing.slice_bytes);
                if work.transfer.unclaimed_bytes() > slice {
                    let transfer = Arc::clone(&work.transfer);
                    self.unsent.push_back(Report::Stranded(transfer));
                }
            }
        }
    }

    fn take_work(&mut self) -> bool {
        for taken in 0..TAKE_MAX {
            let Some(work) = self.inbox.work.pop() else {
                return taken > 0;
            };
            let lane = self.lane(&work.rail);
            // Work that was routed here while the rail broke is stranded when it would be posted.
            self.lanes[lane].pending.push_back(work);
        }
        true
    }

    fn poll(&mut self, now: Time) -> bool {
        if self.nic.openings() != self.openings.seen() {
            self.openings.renew(&self.nic);
        }
        let mut busy = false;
        self.pace.queue_empty = true;
        for index in 0..self.openings.count() {
            busy |= self.poll_queue(index, now);
        }
        busy
    }

    /// Takes what has completed on the completion queue of an opening of the device.
    fn poll_queue(&mut self, index: usize, now: Time) -> bool {
        let mut busy = false;
        for _ in 0..POLLS_PER_STEP_MAX {
            let Some(cq) = self.openings.cq(index) else {
                return busy;
            };
            let count = match cq.poll(&mut self.completions) {
                Ok(count) => count,
                Err(error) => {
                    self.break_all(&error.to_string(), self.openings.number(index));
                    return busy;
                }
            };
            for index in 0..count {
                let completion = self.completions[index];
                self.complete(&completion, now);
            }
            busy |= count > 0;
            if count < POLL_MAX {
                return busy;
            }
        }
        // More may be waiting.
        self.pace.queue_empty = false;
        busy
    }

    fn complete(&mut self, completion: &Completion, now: Time) {
        // A stale identifier belongs to a queue pair that was given up.
        let Some(flight) = self.flights.remove(completion.wr_id) else {
            return;
        };
        let bytes = flight.bytes();
        let key = flight.link;
        let done = verdict(completion.status) == Verdict::Done;
        self.in_flight_bytes -= bytes;
        let lane = &mut self.lanes[flight.lane];
        lane.came_back(if done { bytes } else { 0 }, now);
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        link.came_back(flight.queue, bytes, now);
        if done {
            lane.rail.moved(bytes);
            self.pace.completed_bytes += bytes;
            self.succeeded(flight, now);
        } else {
            lane.rail.abandoned(bytes);
            self.failed(flight, completion.status);
        }
        self.settle_if_drained(key);
    }

    fn succeeded(&mut self, flight: Flight, now: Time) {
        if let Cargo::Probe(probe) = flight.cargo {
            self.probe_came_back(flight.lane, probe);
        }
        if self.doubts_reads {
            self.believe_or_doubt(flight, now);
        } else if let Cargo::Slice(transfer, slice) = flight.cargo {
            transfer.complete(slice);
        }
    }

    fn failed(&mut self, flight: Flight, status: WcStatus) {
        let (key, bytes) = (flight.link, flight.bytes());
        // A length error is not held against the request: lost packets on soft-RoCE cause it as
        // well (its retransmissions are not exact), and so do ends that disagree on the MTU.
        let mut cause = CloseCause::Failed { status, bytes };
        match flight.cargo {
            Cargo::Slice(transfer, slice) => {
                let posted = (flight.lane, key, flight.keys);
                if let Some(error) = self.mistake(&transfer, slice, posted, status) {
                    let reason = error.to_string();
                    cause = CloseCause::BadRequest { status, reason };
                    transfer.fail(error);
                }
                if let Some(link) = self.links.get_mut(key) {
                    link.abandoned.push((transfer, slice));
                }
            }
            Cargo::Probe(probe) => self.probe_failed(flight.lane, probe, status),
            Cargo::Proof => {}
        }
        self.break_link_for(key, cause);
    }

    fn post(&mut self, now: Time) -> bool {
        let is_gate_open = self.nic.is_gate_open();
        let mut busy = false;
        let lanes = self.lanes.len();
        self.rotation = self.rotation.wrapping_add(1);
        for step in 0..lanes {
            let index = (self.rotation.wrapping_add(step)) % lanes;
            let lane = &self.lanes[index];
            let has_probe = lane.probe.as_ref().is_some_and(|probe| probe.left == 0);
            if has_probe && is_gate_open {
                busy |= self.post_probe(index, now);
            }
            let lane = &self.lanes[index];
            if lane.pending.is_empty() {
                continue;
            }
            match lane.link().filter(|_| lane.rail.is_proved()) {
                Some(key) if is_gate_open => {
                    while self.post_batch(index, key, now) {
                        busy = true;
                    }
                }
                Some(_) => {}
                // Whoever routed it here did not know yet.
                None => self.strand(index),
            }
        }
        busy
    }

    /// Posts up to [`BATCH_MAX`] slices on one queue pair. False when there was no room or work.
    fn post_batch(&mut self, lane_index: usize, key: u64, now: Time) -> bool {
        let Some(link) = self.links.get_mut(key) else {
            return false;
        };
        let Some(pairs) = link.open_pairs().filter(|_| self.nic.is_gate_open()) else {
            return false;
        };
        let queue = link.next_queue;
        link.next_queue = (queue + 1) % link.queues.len();
        let lane = &mut self.lanes[lane_index];
        self.batch.clear();
        while self.batch.len() < BATCH_MAX {
            let full = link.queues[queue].is_full
                || link.queues[queue].in_flight >= link.queues[queue].depth
                || link.in_flight_bytes >= self.window_bytes
                || self.in_flight_bytes >= self.pace.window_bytes()
                || self.flights.room() == 0;
            let Some(work) = lane.pending.front().filter(|_| !full) else {
                break;
            };
            if work.transfer.avoids(lane.rail.peer_position()) {
                if let Some(work) = lane.pending.pop_front() {
                    self.unsent.push_back(Report::Stranded(work.dequeue()));
                }
                continue;
            }
            let Some(slice) = work.transfer.claim() else {
                if let Some(done) = lane.pending.pop_front() {
                    let transfer = done.dequeue();
                    if transfer.has_work() {
                        self.unsent.push_back(Report::Stranded(transfer));
                    }
                }
                continue;
            };
            let transfer = Arc::clone(&work.transfer);
            let own = transfer.spec().local.at(slice.offset);
            let own = own.and_then(|(_, _, keys)| keys.get(self.nic.index().0 as usize));
            if own.is_none() {
                // The device died: other NICs still have keys.
                transfer.unclaim(slice);
                if let Some(work) = lane.pending.pop_front() {
                    self.unsent.push_back(Report::Stranded(work.dequeue()));
                }
                continue;
            }
            if transfer.fail_if_outdated() {
                transfer.unclaim(slice);
                continue;
            }
            let peer_nic = lane.rail.id().peer.nic;
            let Some(mut request) = work_request(&transfer, slice, self.nic.index().0, peer_nic)
            else {
                let error = TransferError::NoPath {
                    peer: lane.rail.segment().to_owned(),
                    cause: format!("no key for {} is known", lane.rail),
                };
                transfer.fail(error);
                transfer.unclaim(slice);
                continue;
            };
            let flight = Flight {
                cargo: Cargo::Slice(transfer, slice),
                lane: lane_index,
                link: key,
                queue,
                keys: WorkKeys::of(&request),
            };
            match self.flights.insert(flight) {
                Ok(wr_id) => {
                    request.wr_id = wr_id;
                    self.batch.push(request);
                }
                Err(flight) => {
                    if let Some(transfer) = flight.transfer() {
                        transfer.unclaim(slice);
                    }
                    break;
                }
            }
            let bytes = u64::from(slice.length);
            link.posted(queue, bytes, now);
            lane.posted(now);
            lane.rail.posted(bytes);
            self.in_flight_bytes += bytes;
        }
        if self.batch.is_empty() {
            return false;
        }
        let posted = pairs.0[queue].post(&self.batch);
        #[cfg(test)]
        self.note_posted(lane_index, key, &pairs.0[queue]);
        match posted {
            Ok(()) => true,
            Err(error) => {
                self.take_back(error.posted + error.in_doubt, now);
                let link = self.links.get_mut(key);
                let queue = link.map(|link| &mut link.queues[queue]);
                // One with nothing in it that has no room never will have.
                match queue.filter(|queue| error.is_queue_full() && queue.in_flight > 0) {
                    Some(queue) => queue.is_full = true,
                    None => self.break_link(key, &error.to_string()),
                }
                false
            }
        }
    }

    /// Undoes the requests of the batch from `first` on, which were not posted.
    fn take_back(&mut self, first: usize, now: Time) {
        for index in first..self.batch.len() {
            let Some(flight) = self.flights.remove(self.batch[index].wr_id) else {
                continue;
            };
            let bytes = flight.bytes();
            self.in_flight_bytes -= bytes;
            let lane = &mut self.lanes[flight.lane];
            lane.came_back(0, now);
            lane.rail.abandoned(bytes);
            if let Some(link) = self.links.get_mut(flight.link) {
                link.came_back(flight.queue, bytes, now);
            }
            let Cargo::Slice(transfer, slice) = flight.cargo else {
                continue;
            };
            transfer.unclaim(slice);
            // It may have been taken off its lane as fully claimed: nobody else would find it.
            let told = matches!(
                self.unsent.back(),
                Some(Report::Stranded(last)) if Arc::ptr_eq(last, &transfer)
            );
            if !told && transfer.has_work() {
                self.unsent.push_back(Report::Stranded(transfer));
            }
        }
    }

    /// Tells the storm that something was posted, or that it was tried.
    #[cfg(test)]
    fn note_posted(&mut self, lane: usize, key: u64, pair: &rerail_verbs::QueuePair) {
        let rail = self.lanes[lane].rail.id();
        if let Some(link) = self.links.get_mut(key) {
            super::storm::note_posted(super::storm::Posted {
                rail,
                is_gate_open: link.is_gate_open(),
                qp_num: pair.qp_num(),
            });
        }
    }

    fn send_reports(&mut self) {
        while let Some(report) = self.unsent.pop_front() {
            match self.reports.try_send(report) {
                Ok(()) => {}
                Err(TrySendError::Full(report)) => {
                    self.unsent.push_front(report);
                    return;
                }
                // The engine is going away: nobody will find another rail.
                Err(TrySendError::Closed(report)) => settle::end(report),
            }
        }
    }
}

/// The request of a slice, without its identifier. `None` when one end has no key for its NIC.
fn work_request(
    transfer: &Transfer,
    slice: Slice,
    local_nic: u32,
    peer_nic: u32,
) -> Option<WorkRequest> {
    let spec = transfer.spec();
    let (addr, _, lkeys) = spec.local.at(slice.offset)?;
    let (remote, _, rkeys) = spec.remote.at(slice.offset)?;
    let local = Sge {
        addr,
        length: slice.length,
        lkey: lkeys.get(local_nic as usize)?,
    };
    let remote = RemoteAddress {
        addr: remote,
        rkey: rkeys.get(peer_nic as usize)?,
    };
    Some(match spec.opcode {
        RdmaOpcode::Read => WorkRequest::read(0, local, remote),
        _ => WorkRequest::write(0, local, remote),
    })
}
