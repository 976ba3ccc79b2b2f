//! Which rails a transfer is offered to.
//!
//! A transfer is offered to one connected rail of each local NIC that is worth it, and each takes
//! slices as it has room. Rails that are not connected are connected meanwhile. NICs far from the
//! buffer, and the peer's NICs far from its own, are taken only while no near one can be used. Thin
//! on purpose: shares and proof of rails are the rail machine's.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam::queue::SegQueue;
use tokio::sync::{Notify, mpsc};

use super::connector::Connector;
use super::data_thread::Clock;
use super::events::RdmaEvents;
use super::inbox::{Inbox, Report, Work};
use super::near::NicSet;
use super::nic::Nic;
use super::rail::{Peer, Rail, RailState};
use super::transfer::Transfer;
use crate::TransferError;
use crate::machine::Time;
use crate::machine::ids::LocalNic;
use crate::machine::rail::LocalGate;

/// How often transfers without a rail are offered again.
const RETRY_EVERY: std::time::Duration = std::time::Duration::from_millis(5);

/// Local NICs that a transfer is offered to as long as none of its rails is connected.
const UNCONNECTED_MAX: usize = 2;

/// Offers transfers to rails. Shared by all threads that submit.
pub struct Router {
    nics: Vec<Arc<Nic>>,
    inboxes: Vec<Arc<Inbox>>,
    connector: Connector,
    clock: Clock,
    /// Transfers without a usable rail. Not bounded by itself: each live transfer is in it at most
    /// a few times, and the engine bounds those.
    parked: SegQueue<Arc<Transfer>>,
    parked_new: Notify,
    /// Where to begin among equals.
    turn: AtomicUsize,
    events: OnceLock<Arc<dyn RdmaEvents>>,
}

impl Router {
    /// A router over NICs and their inboxes, which belong together by position.
    pub fn new(
        nics: Vec<Arc<Nic>>,
        inboxes: Vec<Arc<Inbox>>,
        connector: Connector,
        clock: Clock,
    ) -> Self {
        Self {
            nics,
            inboxes,
            connector,
            clock,
            parked: SegQueue::new(),
            parked_new: Notify::new(),
            turn: AtomicUsize::new(0),
            events: OnceLock::new(),
        }
    }

    /// Tells `events` of the rails from now on. Only the first call counts.
    pub fn set_events(&self, events: Arc<dyn RdmaEvents>) {
        let _ = self.events.set(events);
    }

    /// The observer closed or opened the gate of a local NIC. From any thread; never blocks.
    pub fn local_gate(&self, local: LocalNic, gate: LocalGate) {
        tracing::debug!(nic = local.0, ?gate, "local gate");
    }

    /// The record of a peer says that its NIC is up, or not. From any thread; never blocks.
    pub fn peer_nic(&self, peer: &Arc<Peer>, nic_index: u32, up: bool) {
        tracing::debug!(
            segment = peer.segment(),
            nic_index,
            up,
            "gate of a peer's NIC"
        );
    }

    /// A peer's record is withdrawn or superseded. From any thread; never blocks.
    pub fn peer_gone(&self, peer: &Peer) {
        tracing::debug!(segment = peer.segment(), "peer gone");
    }

    /// Forgets the rails to a peer. From any thread; never blocks.
    pub fn forget_peer(&self, peer: &Peer) {
        tracing::debug!(segment = peer.segment(), "peer forgotten");
    }

    /// Offers a transfer to rails, or parks it until one can be used. Never blocks.
    pub fn route(&self, transfer: Arc<Transfer>) {
        if !transfer.has_work() {
            return;
        }
        let now = self.clock.now();
        let peer = &transfer.spec().peer;
        if peer.rails().is_empty() {
            transfer.fail(TransferError::NoPath {
                peer: peer.segment().to_owned(),
                cause: "it has no RDMA device".into(),
            });
            return;
        }
        if fail_if_restarted(&transfer) {
            return;
        }
        if !self.offer(&transfer, now) {
            self.parked.push(transfer);
            self.parked_new.notify_one();
        }
    }

    fn offer(&self, transfer: &Arc<Transfer>, now: Time) -> bool {
        let spec = transfer.spec();
        let slice_bytes = u64::from(spec.slicing.slice_bytes).max(1);
        let slices = usize::try_from(spec.length.div_ceil(slice_bytes)).unwrap_or(usize::MAX);
        let rails = spec.peer.rails();
        // Rails come by local NIC, and each NIC has as many: one to each of the peer's NICs.
        let per_nic = (rails.len() / self.nics.len().max(1)).max(1);
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut best: [Option<&Arc<Rail>>; NICS_MAX] = [None; NICS_MAX];
        let mut count = 0;
        let (near, near_peer) = (spec.local.nics(), spec.remote.nics());
        for wanted_near in [true, false] {
            for step in 0..self.nics.len() {
                let local = (turn.wrapping_add(step)) % self.nics.len();
                let passed_over = near.contains(local) != wanted_near
                    || !self.nics[local].is_gate_open()
                    || count == NICS_MAX;
                if passed_over {
                    continue;
                }
                let own = rails.get(local * per_nic..(local + 1) * per_nic);
                if let Some(rail) = own.and_then(|own| best_of(own, local, near_peer, now)) {
                    best[count] = Some(rail);
                    count += 1;
                }
            }
            // Far NICs only where no near one leads to the peer.
            if count > 0 {
                break;
            }
        }
        let best = &mut best[..count];
        let is_up =
            |rail: &Option<&Arc<Rail>>| rail.is_some_and(|rail| rail.state(now) == RailState::Up);
        best.sort_by_key(|rail| {
            (
                !is_up(rail),
                rail.map_or(u64::MAX, |rail| rail.load_bytes()),
            )
        });
        let up = best.iter().filter(|rail| is_up(rail)).count();
        let wanted = if up > 0 {
            up.min(slices)
        } else {
            count.min(UNCONNECTED_MAX)
        };
        let mut offered = false;
        for (position, rail) in best.iter().enumerate() {
            let Some(rail) = rail else {
                continue;
            };
            if position < wanted {
                let share_bytes = spec.length / wanted as u64;
                let work = Work::queue(transfer, rail, share_bytes);
                match self.inboxes[rail.id().local.0 as usize].submit(work) {
                    Ok(()) => offered = true,
                    Err(work) => drop(work.dequeue()),
                }
            }
            if rail.begin_connect(now) {
                self.connector.want(rail);
            }
        }
        offered
    }

    /// Carries out what data threads report, and offers parked transfers again, until the
    /// transport is closed.
    pub async fn run(self: Arc<Self>, mut reports: mpsc::Receiver<Report>) {
        let mut retry = tokio::time::interval(RETRY_EVERY);
        retry.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let waiting = !self.parked.is_empty();
            tokio::select! {
                report = reports.recv() => match report {
                    Some(report) => self.take(report),
                    None => break,
                },
                _ = retry.tick(), if waiting => self.retry(),
                () = self.parked_new.notified(), if !waiting => {}
            }
        }
        while let Some(transfer) = self.parked.pop() {
            transfer.fail(TransferError::Closed);
        }
    }

    fn take(&self, report: Report) {
        match report {
            Report::Connect(rail) => self.connector.want(&rail),
            Report::Broken { endpoint, cause } => self.connector.broken(endpoint, cause),
            Report::Drained { endpoint, held } => self.connector.drained(endpoint, held),
            Report::Stranded(transfer) => self.route(transfer),
        }
    }

    fn retry(&self) {
        let now = self.clock.now();
        for _ in 0..self.parked.len() {
            let Some(transfer) = self.parked.pop() else {
                return;
            };
            if transfer.check_cut_off(now) || !transfer.has_work() || fail_if_restarted(&transfer) {
                continue;
            }
            if !self.offer(&transfer, now) {
                self.parked.push(transfer);
            }
        }
    }
}

/// Ends a transfer to a process that is no more. True if it is such a one.
fn fail_if_restarted(transfer: &Transfer) -> bool {
    let peer = &transfer.spec().peer;
    if peer.is_restarted() {
        let peer = peer.segment().to_owned();
        transfer.fail(TransferError::PeerRestarted { peer });
    }
    peer.is_restarted()
}

/// Local NICs that one transfer is spread over at most.
const NICS_MAX: usize = 32;

/// The best usable rail of one local NIC: to a NIC near the peer's memory before others, connected
/// before not, little load before much, and among equals the peer's NIC at the own position, so
/// that two equal hosts pair their NICs.
fn best_of(rails: &[Arc<Rail>], local: usize, near: NicSet, now: Time) -> Option<&Arc<Rail>> {
    let count = rails.len();
    let usable = rails
        .iter()
        .enumerate()
        .filter(|(_, rail)| rail.is_usable(now));
    let best = usable.min_by_key(|(position, rail)| {
        let distance = (position + count - local % count) % count;
        (
            !near.contains(*position),
            rail.state(now) != RailState::Up,
            rail.load_bytes(),
            distance,
        )
    });
    best.map(|(_, rail)| rail)
}
