//! Which rails a transfer is offered to.
//!
//! A transfer is offered to the rails on which parts of it end first, at most one of each local
//! NIC, and each takes slices as it has room. NICs far from the buffer, and the peer's NICs far
//! from its own, are taken only while no near one can be used. Only rails that are proved are
//! offered anything; a transfer that finds none waits here. The task of the router also carries out
//! what the rail machine wants done ([`keeper`](super::keeper)) and what data threads report.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam::queue::SegQueue;
use rerail_verbs::{RemoteAddress, WcStatus};
use tokio::sync::{Notify, mpsc};

use super::clock::Clock;
use super::connector::Connector;
use super::events::RdmaEvents;
use super::inbox::{Order, Probe, Report, Work};
use super::keeper::{Command, RailKeeper};
use super::nic::Nic;
use super::nics::{Nics, Seat};
use super::rail::{Peer, PeerNic, Rail, RailState, RailTable};
use super::transfer::{Transfer, TransferSpec};
use crate::TransferError;
use crate::machine::ids::LocalNic;
use crate::machine::rail::{Candidate, LocalGate, NoPath, ProbeKind, choose, share_of};

/// How often transfers without a rail are looked at for their time limits.
const RETRY_EVERY: Duration = Duration::from_millis(5);

/// How long a transfer waits for the proof of the rails that were tried first, before others of the
/// same NICs are tried as well.
const WIDEN_AFTER: Duration = Duration::from_millis(250);

/// Parts that a transfer is dealt out in at most, when its rails are chosen.
const PARTS_MAX: u64 = 32;

/// Reports that are taken in a row before timers are looked at.
const ROW_MAX: usize = 256;

/// Offers transfers to rails. Shared by all threads that submit.
pub struct Router {
    nics: Nics,
    connector: Connector,
    keeper: Arc<RailKeeper>,
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
    /// A router over the own NICs.
    pub fn new(nics: Nics, connector: Connector, keeper: Arc<RailKeeper>, clock: Clock) -> Self {
        Self {
            nics,
            connector,
            keeper,
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

    /// The observer closed or opened the gate of a local NIC: its rails are out of use when this
    /// returns, or are about to be proved. From any thread; never blocks.
    pub fn local_gate(&self, local: LocalNic, gate: LocalGate) {
        self.keeper.local_gate(local, gate);
    }

    /// The record of a peer says that its NIC is up, or not. From any thread; never blocks.
    pub fn peer_nic(&self, peer: &Arc<Peer>, nic_index: u32, up: bool) {
        self.keeper.peer_nic(peer.id(), nic_index, up);
    }

    /// A peer's record is withdrawn or superseded. From any thread; never blocks.
    pub fn peer_gone(&self, peer: &Peer) {
        peer.set_gone();
        self.keeper.peer_gone(peer.id());
    }

    /// A peer is another process now. From any thread; never blocks.
    pub fn peer_restarted(&self, peer: &Peer) {
        peer.set_restarted();
        self.peer_gone(peer);
    }

    /// Forgets the rails to a peer. From any thread; never blocks.
    pub fn forget_peer(&self, peer: &Peer) {
        self.keeper.forget(peer.id());
    }

    /// Takes a peer's rails in.
    pub(super) fn declare(&self, peer: &Arc<Peer>) {
        self.keeper.declare(peer);
    }

    /// A local NIC's port has another speed, and all else as before. Never blocks.
    pub(super) fn local_port(&self, local: LocalNic) {
        self.keeper.local_port(local);
    }

    /// There is one more local NIC, whose gate is closed: from it, too, a rail leads to each NIC of
    /// each peer. Never blocks.
    pub(super) fn nic_added(&self, local: LocalNic) {
        self.keeper.nic_added(local);
    }

    /// A peer has these NICs now, of which the first are those that it had before. Those of `down`
    /// are withdrawn among the new ones. From any thread; never blocks.
    pub(super) fn peer_grown(&self, peer: &Arc<Peer>, nics: &[PeerNic], down: &[u32]) {
        self.keeper.peer_grown(peer, nics, down);
    }

    /// Offers a transfer to rails, or parks it until one can be used. Never blocks.
    pub fn route(&self, transfer: Arc<Transfer>) {
        if !transfer.has_work() {
            return;
        }
        let now = self.clock.now();
        let spec = transfer.spec();
        spec.peer.used(now, &spec.remote);
        if spec.peer.table().is_empty() {
            return no_path(&transfer, "it has no RDMA device");
        }
        if fail_if_over(&transfer) || transfer.fail_if_outdated() || self.offer(&transfer) {
            return;
        }
        if let Some(reason) = self.keeper.no_path(&spec.peer) {
            return no_path(&transfer, &reason.to_string());
        }
        self.parked.push(transfer);
        self.parked_new.notify_one();
    }

    /// Offers a transfer to the rails on which its parts end first. True if one has it.
    fn offer(&self, transfer: &Arc<Transfer>) -> bool {
        let spec = transfer.spec();
        let peer = &spec.peer;
        let slice_bytes = u64::from(spec.slicing.slice_bytes).max(1);
        let unclaimed = transfer.unclaimed_bytes().max(1);
        let parts = unclaimed.div_ceil(slice_bytes).clamp(1, PARTS_MAX);
        let part_bytes = unclaimed.div_ceil(parts);
        let rails = peer.table();
        let mut shares = self.usable(transfer, &rails, part_bytes);
        if shares.len() < self.nics.len() {
            self.want_more(spec, false);
        }
        if !shares.is_empty() {
            peer.waits_no_more();
        }
        let candidates: Vec<_> = shares.iter().map(|share| share.candidate).collect();
        for _ in 0..parts {
            let load = |rail| {
                let share = shares.iter().find(|share| share.candidate.rail == rail);
                share.map_or(0, |share| share.rail.load_bytes() + share.bytes)
            };
            let Some(chosen) = choose(&candidates, part_bytes, load, |_| 0) else {
                break;
            };
            if let Some(share) = shares
                .iter_mut()
                .find(|share| share.candidate.rail == chosen)
            {
                share.bytes += part_bytes;
            }
        }
        let mut offered = false;
        for share in shares.iter().filter(|share| share.bytes > 0) {
            let local = share.candidate.rail.local.0 as usize;
            let Some(work) = Work::queue(transfer, share.rail, share.bytes) else {
                // The NIC has it already.
                offered = true;
                continue;
            };
            let Some(seat) = self.nics.seat(local) else {
                drop(work.dequeue());
                continue;
            };
            match seat.inbox.submit(work) {
                Ok(()) => offered = true,
                Err(work) => drop(work.dequeue()),
            }
        }
        offered
    }

    /// The best usable rail of each local NIC near the buffer, with nothing given to it; those of
    /// the other NICs where no near one has any.
    fn usable<'r>(&self, transfer: &Transfer, rails: &'r RailTable, bytes: u64) -> Vec<Share<'r>> {
        // A rail that has not been measured yet is taken to be as good as the best that has.
        let usable = rails.iter().filter(|rail| rail.is_usable());
        let measured = usable.filter_map(|rail| rail.measured_bytes_per_s()).max();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let near = transfer.spec().local.nics();
        let count = self.nics.len();
        let mut best = Vec::with_capacity(count);
        for is_near in [true, false] {
            for step in 0..count {
                let local = turn.wrapping_add(step) % count;
                let nic = self.nics.get(local);
                let is_open = nic.is_some_and(|nic| nic.is_gate_open());
                if near.contains(local) != is_near || !is_open {
                    continue;
                }
                let own = rails.of_local(local);
                best.extend(best_of(own, local, transfer, bytes, measured));
            }
            if !best.is_empty() {
                break;
            }
        }
        best
    }

    /// Has one rail of each local NIC near the buffer connected and proved that has none which
    /// works; of the other NICs where no near one leads anywhere. `wider` asks for one more of
    /// every NIC, also where one is being proved already.
    fn want_more(&self, spec: &TransferSpec, wider: bool) {
        let (near, near_peer) = (spec.local.nics(), spec.remote.nics());
        let rails = spec.peer.table();
        let leads_on = |(local, nic): (usize, &Arc<Nic>)| {
            let own = rails.of_local(local);
            near.contains(local)
                && nic.is_gate_open()
                && own.iter().any(|rail| rail.state() != RailState::Down)
        };
        let near_only = self.nics.iter().enumerate().any(leads_on);
        for (local, nic) in self.nics.iter().enumerate() {
            let own = rails.of_local(local);
            let is_proving = |rail: &Arc<Rail>| {
                rail.is_usable() || rail.is_wanted() && rail.state() != RailState::Down
            };
            let is_served = near_only && !near.contains(local) || own.iter().any(is_proving);
            if !nic.is_gate_open() || !wider && is_served {
                continue;
            }
            let rest = in_order(own, local).filter(|rail| !rail.is_wanted());
            // Of equals the first.
            let next = rest.min_by_key(|rail| {
                (
                    rail.state() == RailState::Down,
                    !near_peer.contains(rail.peer_position()),
                    !rail.is_same_subnet(),
                )
            });
            if let Some(next) = next {
                self.keeper.want(&spec.peer, next);
            }
        }
    }

    /// Carries out what data threads report and what the rails need, and offers parked transfers
    /// again, until the transport is closed.
    pub async fn run(self: Arc<Self>, mut reports: mpsc::Receiver<Report>) {
        let mut retry_at = self.clock.now();
        let mut taken = Vec::with_capacity(ROW_MAX);
        loop {
            let waiting = !self.parked.is_empty();
            let due = self.keeper.next_due();
            let due = if waiting { due.min(retry_at) } else { due };
            tokio::select! {
                // All that is due is done after each of these, whichever it was.
                biased;
                count = reports.recv_many(&mut taken, ROW_MAX) => {
                    if count == 0 {
                        break;
                    }
                    taken.drain(..).for_each(|report| self.take(report));
                }
                () = self.keeper.touched() => {}
                () = self.clock.sleep_until(due) => {}
                () = self.parked_new.notified(), if !waiting => {}
            }
            let now = self.clock.now();
            if waiting && now >= retry_at {
                retry_at = now + RETRY_EVERY;
                self.retry();
            }
            self.keeper.tick();
            for command in self.keeper.take_commands() {
                self.carry_out(command);
            }
        }
        while let Some(transfer) = self.parked.pop() {
            transfer.fail(TransferError::Closed);
        }
    }

    fn take(&self, report: Report) {
        match report {
            Report::ProbeDone {
                rail,
                probe,
                status,
            } if Rail::is_to_nowhere(rail) => self.connector.probed(probe, status),
            Report::ProbeDone {
                rail,
                probe,
                status,
            } => self.keeper.probe_done(rail, probe, status),
            Report::Progress { rail, bytes, took } => self.keeper.progress(rail, bytes, took),
            Report::Broken { endpoint, cause } => self.connector.broken(endpoint, cause),
            Report::Drained { endpoint, leftover } => self.connector.drained(endpoint, leftover),
            Report::Stranded(transfer) => self.route(transfer),
        }
    }

    fn carry_out(&self, command: Command) {
        match command {
            Command::Connect(rail, binding) => self.connector.want(&rail, binding),
            Command::Drop {
                rail,
                binding,
                forgotten,
                unproved,
            } => self.connector.release(&rail, binding, forgotten, unproved),
            Command::Probe { rail, probe, kind } => self.probe(rail, probe, kind),
            Command::Usable(peer) => {
                for seat in self.nics.seats() {
                    // A NIC that has no time to share its work is busy enough.
                    drop(seat.inbox.order(Order::Share(peer)));
                }
                self.retry();
            }
            Command::Changed(change) => {
                if let Some(events) = self.events.get() {
                    events.rail_state(&change);
                }
            }
            Command::Fence(change) => {
                if let Some(events) = self.events.get() {
                    events.fence(&change);
                }
            }
            Command::RecheckLocal(local) => {
                if let Some(events) = self.events.get() {
                    events.recheck_local(local);
                }
            }
            Command::RefreshPeer(segment) => {
                if let Some(events) = self.events.get() {
                    events.refresh_peer(&segment);
                }
            }
        }
    }

    fn probe(&self, rail: Arc<Rail>, probe: u64, kind: ProbeKind) {
        let local = rail.id().local.0 as usize;
        let Some(Seat { nic, inbox }) = self.nics.seat(local) else {
            return;
        };
        let wanted = match kind {
            ProbeKind::ZeroLengthRead => 0,
            ProbeKind::FullMtuRead => nic.facts().map_or(0, |facts| facts.mtu.bytes()),
        };
        let (remote, length) = match rail.probed_memory(wanted) {
            Some(found) => found,
            // A READ of no bytes needs no key, though soft-RoCE looks it up when it repeats one.
            None if kind == ProbeKind::ZeroLengthRead => (RemoteAddress { addr: 0, rkey: 0 }, 0),
            None => {
                // No memory of the peer is known: the first probe has to do.
                return self.keeper.probe_done(rail.id(), probe, WcStatus::Success);
            }
        };
        let order = Order::Probe(Probe {
            rail,
            probe,
            remote,
            length,
        });
        if let Err(Order::Probe(order)) = inbox.order(order) {
            // The machine gives the probe up in its time.
            tracing::debug!(rail = %order.rail, "the data thread is too far behind to probe");
        }
    }

    /// Transfers that wait for a rail.
    #[cfg(test)]
    pub(super) fn parked(&self) -> usize {
        self.parked.len()
    }

    /// Offers each parked transfer again.
    fn retry(&self) {
        let now = self.clock.now();
        let mut pathless: Option<(u64, Option<NoPath>)> = None;
        for _ in 0..self.parked.len() {
            let Some(transfer) = self.parked.pop() else {
                return;
            };
            if transfer.check_cut_off(now) || !transfer.has_work() || fail_if_over(&transfer) {
                continue;
            }
            if transfer.fail_if_outdated() || self.offer(&transfer) || transfer.fail_if_refused() {
                continue;
            }
            let peer = &transfer.spec().peer;
            peer.used(now, &transfer.spec().remote);
            // Most that wait have the same peer.
            let id = peer.id();
            let known = pathless.filter(|(known, _)| *known == id.0);
            let (_, reason) = known.unwrap_or_else(|| (id.0, self.keeper.no_path(peer)));
            pathless = Some((id.0, reason));
            if let Some(reason) = reason {
                no_path(&transfer, &reason.to_string());
                continue;
            }
            if peer.waits_too_long(now, WIDEN_AFTER) {
                self.want_more(transfer.spec(), true);
            }
            self.parked.push(transfer);
        }
    }
}

/// What a rail is to move of a transfer.
struct Share<'p> {
    candidate: Candidate,
    rail: &'p Arc<Rail>,
    bytes: u64,
}

/// The rail of one local NIC on which `bytes` end first: of those to NICs near the peer's memory,
/// or of all where none of those is usable.
fn best_of<'p>(
    own: &'p [Arc<Rail>],
    local: usize,
    transfer: &Transfer,
    bytes: u64,
    measured: Option<u64>,
) -> Option<Share<'p>> {
    let remote = &transfer.spec().remote;
    for is_near in [true, false] {
        let usable = in_order(own, local).filter(|rail| {
            let position = rail.peer_position();
            // A NIC that was added after the keys were told has none of them.
            remote.nics().contains(position) == is_near
                && rail.is_usable()
                && remote.has_keys(position)
                && !transfer.avoids(position)
        });
        let candidates: Vec<_> = usable.map(|rail| candidate(rail, measured)).collect();
        let find = |id| own.iter().find(|rail| rail.id() == id);
        let load = |id| find(id).map_or(0, |rail| rail.load_bytes());
        let Some(chosen) = choose(&candidates, bytes, load, |_| 0) else {
            continue;
        };
        let candidate = candidates.into_iter().find(|found| found.rail == chosen)?;
        return Some(Share {
            candidate,
            rail: find(chosen)?,
            bytes: 0,
        });
    }
    None
}

/// A rail as one to choose; `measured` is the rate of one that has not been measured.
fn candidate(rail: &Rail, measured: Option<u64>) -> Candidate {
    let rate = rail.measured_bytes_per_s().or(measured);
    let rate = rate.unwrap_or_else(|| rail.nominal_bytes_per_s());
    Candidate {
        rail: rail.id(),
        bytes_per_s: share_of(rail.state(), rate),
        same_subnet: rail.is_same_subnet(),
    }
}

/// The rails of one local NIC, that to the peer's NIC at the own position first, so that two equal
/// hosts pair their NICs.
fn in_order(rails: &[Arc<Rail>], local: usize) -> impl Iterator<Item = &Arc<Rail>> {
    let first = if rails.is_empty() {
        0
    } else {
        local % rails.len()
    };
    rails[first..].iter().chain(&rails[..first])
}

/// Ends a transfer to a process that is no more, or not expected back. True if it is such a one.
fn fail_if_over(transfer: &Transfer) -> bool {
    let peer = &transfer.spec().peer;
    let is_over = peer.is_restarted() || peer.is_gone();
    if is_over {
        no_path(transfer, &NoPath::PeerGone.to_string());
    }
    is_over
}

/// Ends a transfer that has no way to go.
fn no_path(transfer: &Transfer, cause: &str) {
    let peer = &transfer.spec().peer;
    if peer.is_restarted() {
        // It may have become known only now, and says more.
        let peer = peer.segment().to_owned();
        transfer.fail(TransferError::PeerRestarted { peer });
        return;
    }
    let peer = peer.segment().to_owned();
    let cause = cause.to_owned();
    transfer.fail(TransferError::NoPath { peer, cause });
}
