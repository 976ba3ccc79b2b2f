//! One NIC's part of a data thread: takes work, posts slices, polls completions.
//!
//! [`Driver::step`] is the loop's body. Once warm it takes no lock, allocates nothing and makes no
//! system call but the doorbell. What it cannot decide by itself (connecting, moving queue pairs,
//! where stranded work goes) it reports to the control side, and it goes on with the rest.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rerail_verbs::{Completion, RdmaOpcode, RemoteAddress, Sge, WorkRequest};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use super::config::RdmaConfig;
use super::endpoint::CloseCause;
use super::inbox::{EndpointKey, Inbox, Order, Report};
use super::link::{Flight, Lane, Link};
use super::nic::Nic;
use super::slab::Slab;
use super::slice::Slice;
use super::transfer::Transfer;
use crate::TransferError;
use crate::machine::Time;
use crate::machine::verdict::{RequestFault, Verdict, verdict};

mod check;
mod doubt;
mod openings;
mod settle;

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
    /// Lane at which posting starts, so that none is always last.
    rotation: usize,
    links: Slab<Box<Link>>,
    link_keys: HashMap<EndpointKey, u64>,
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
            rotation: 0,
            links: Slab::with_capacity(config.endpoints_max),
            link_keys: HashMap::new(),
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
        busy |= self.take_work(now);
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
            .filter(|flight| !flight.is_probe())
            .map(|flight| (flight.transfer, flight.slice))
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
                gate,
            } => {
                let lane = self.lane(&rail);
                // An endpoint may serve several rails: a segment that was opened again, under a
                // record that has changed, has rails of its own between the same NICs.
                if let Some(key) = self.link_keys.get(&endpoint).copied() {
                    let link = self.links.get_mut(key);
                    if link.is_some_and(|link| link.pairs.is_some()) {
                        self.lanes[lane].link = Some(key);
                        self.lanes[lane].asked = false;
                    } else {
                        // It has broken meanwhile.
                        rail.suspend(now);
                        self.strand(lane);
                    }
                    return;
                }
                let mut link = Box::new(Link::new(endpoint, pairs, gate, now));
                link.opening = self.openings.seen();
                if let Ok(key) = self.links.insert(link) {
                    self.link_keys.insert(endpoint, key);
                    self.lanes[lane].link = Some(key);
                    self.lanes[lane].asked = false;
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
            Order::Unfence(endpoint, cause) => self.unfence(endpoint, &cause, now),
            Order::Strand(rail) => {
                let lane = self.lane(&rail);
                self.strand(lane);
            }
        }
    }

    fn lane(&mut self, rail: &Arc<super::rail::Rail>) -> usize {
        if let Some(slot) = rail.slot() {
            return slot;
        }
        let slot = self.lanes.len();
        rail.set_slot(slot);
        self.lanes.push(Lane {
            rail: Arc::clone(rail),
            pending: VecDeque::new(),
            link: None,
            asked: false,
        });
        slot
    }

    fn take_work(&mut self, now: Time) -> bool {
        for taken in 0..TAKE_MAX {
            let Some(work) = self.inbox.work.pop() else {
                return taken > 0;
            };
            let lane = self.lane(&work.rail);
            // Work that was routed here while the rail broke goes back at once.
            if self.lanes[lane].link.is_none() && !work.rail.is_usable(now) {
                self.unsent.push_back(Report::Stranded(work.dequeue()));
            } else {
                self.lanes[lane].pending.push_back(work);
            }
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
                    self.break_all(&error.to_string(), now);
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
        let bytes = u64::from(flight.slice.length);
        self.in_flight_bytes -= bytes;
        let Some(link) = self.links.get_mut(flight.link) else {
            return;
        };
        link.came_back(flight.queue, bytes, now);
        let rail = &self.lanes[flight.lane].rail;
        let verdict = verdict(completion.status);
        if verdict == Verdict::Done {
            rail.moved(bytes);
            if !link.proved {
                link.proved = true;
                rail.proved();
            }
            self.pace.completed_bytes += bytes;
            let key = flight.link;
            if self.doubts_reads {
                self.believe_or_doubt(flight, now);
            } else {
                flight.transfer.complete(flight.slice);
            }
            self.settle_if_drained(key);
        } else {
            rail.abandoned(bytes);
            // A length error is not held against the request: lost packets on soft-RoCE cause it
            // as well (its retransmissions are not exact), and so do ends that disagree on the MTU.
            let mut cause = CloseCause::Broken(format!("{} of {bytes} bytes", completion.status));
            if let Verdict::Request(RequestFault::RemoteKey | RequestFault::LocalKey) = verdict
                && !flight.is_probe()
            {
                let error = request_error(&flight, rail, completion);
                cause = CloseCause::BadRequest(error.to_string());
                flight.transfer.fail(error);
            }
            let Flight {
                transfer,
                slice,
                link: key,
                ..
            } = flight;
            if slice.length > 0 {
                link.abandoned.push((transfer, slice));
            }
            self.break_link_for(key, cause, now);
            self.settle_if_drained(key);
        }
    }

    fn post(&mut self, now: Time) -> bool {
        if !self.nic.is_gate_open() {
            return false;
        }
        let mut busy = false;
        let lanes = self.lanes.len();
        self.rotation = self.rotation.wrapping_add(1);
        for step in 0..lanes {
            let lane = (self.rotation.wrapping_add(step)) % lanes;
            if self.lanes[lane].pending.is_empty() {
                continue;
            }
            if let Some(key) = self.lanes[lane].link {
                while self.post_batch(lane, key, now) {
                    busy = true;
                }
            } else if !self.lanes[lane].asked {
                self.lanes[lane].asked = true;
                let rail = Arc::clone(&self.lanes[lane].rail);
                self.unsent.push_back(Report::Connect(rail));
            }
        }
        busy
    }

    /// Posts up to [`BATCH_MAX`] slices on one queue pair. False when there was no room or work.
    fn post_batch(&mut self, lane_index: usize, key: u64, now: Time) -> bool {
        let Some(link) = self.links.get_mut(key) else {
            return false;
        };
        let Some(pairs) = link.open_pairs() else {
            return false;
        };
        let queue = link.next_queue;
        link.next_queue = (queue + 1) % link.queues.len();
        let lane = &mut self.lanes[lane_index];
        self.batch.clear();
        while self.batch.len() < BATCH_MAX {
            let full = link.queues[queue].in_flight >= link.queues[queue].depth
                || link.in_flight_bytes >= self.window_bytes
                || self.in_flight_bytes >= self.pace.window_bytes()
                || self.flights.room() == 0;
            let Some(work) = lane.pending.front().filter(|_| !full) else {
                break;
            };
            let Some(slice) = work.transfer.claim() else {
                if let Some(done) = lane.pending.pop_front() {
                    drop(done.dequeue());
                }
                continue;
            };
            let transfer = Arc::clone(&work.transfer);
            let peer_nic = lane.rail.peer_nic().index;
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
                transfer,
                slice,
                lane: lane_index,
                link: key,
                queue,
            };
            match self.flights.insert(flight) {
                Ok(wr_id) => {
                    request.wr_id = wr_id;
                    self.batch.push(request);
                }
                Err(flight) => {
                    flight.transfer.unclaim(slice);
                    break;
                }
            }
            let bytes = u64::from(slice.length);
            link.posted(queue, bytes, now);
            lane.rail.posted(bytes);
            self.in_flight_bytes += bytes;
        }
        if self.batch.is_empty() {
            return false;
        }
        match pairs.0[queue].post(&self.batch) {
            Ok(()) => true,
            Err(error) => {
                let cause = (!error.is_queue_full()).then(|| error.to_string());
                self.take_back(error.posted + error.in_doubt, now);
                if let Some(cause) = cause {
                    self.break_link(key, &cause, now);
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
            let bytes = u64::from(flight.slice.length);
            self.in_flight_bytes -= bytes;
            if let Some(link) = self.links.get_mut(flight.link) {
                link.came_back(flight.queue, bytes, now);
                self.lanes[flight.lane].rail.abandoned(bytes);
            }
            flight.transfer.unclaim(flight.slice);
            // It may have been taken off its lane as fully claimed: nobody else would find it.
            let told = matches!(
                self.unsent.back(),
                Some(Report::Stranded(last)) if Arc::ptr_eq(last, &flight.transfer)
            );
            if !told && flight.transfer.has_work() {
                self.unsent.push_back(Report::Stranded(flight.transfer));
            }
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

/// The error of a request that is itself at fault.
fn request_error(
    flight: &Flight,
    rail: &super::rail::Rail,
    completion: &Completion,
) -> TransferError {
    let spec = flight.transfer.spec();
    let offset = flight.slice.offset;
    if completion.status == rerail_verbs::WcStatus::RemAccessErr {
        TransferError::RemoteAccess {
            peer: rail.segment().to_owned(),
            rail: rail.to_string(),
            addr: spec.remote.addr() + offset,
            length: flight.slice.length,
        }
    } else {
        TransferError::Refused {
            rail: rail.to_string(),
            addr: spec.local.addr() + offset,
            length: flight.slice.length,
            cause: completion.status.to_string(),
        }
    }
}
