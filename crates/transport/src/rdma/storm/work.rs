//! Transfers, as the engine's users and its batches make them: each is reported exactly once.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use rand::rngs::SmallRng;
use rerail_metadata::descriptor::{Buffer, SegmentDescriptor};
use rerail_verbs::RdmaOpcode;

use super::coverage::Luck;
use super::ledger::{Flight, SLOT_BYTES, TransferId};
use super::link::Finish;
use super::node::{Job, Node, config, name};
use super::store::member;
use super::world::{Coming, Draws, World, draws};
use crate::TransferError;
use crate::machine::Machine;
use crate::machine::ids::PeerId;
use crate::machine::peers::{self, Trouble};
use crate::machine::seen::Named;
use crate::rdma::slice::{Keys, Piece, RefusedKey, Span};
use crate::rdma::transfer::{Transfer, TransferSpec};

/// The memory that a record offers: all of a node's is one buffer.
pub(super) fn offered(record: &SegmentDescriptor) -> Vec<Piece> {
    let buffers = record.buffers.iter().take(1);
    let piece = |buffer: &Buffer| Piece {
        addr: buffer.addr,
        length: buffer.length,
        keys: Keys::of_peer(
            buffer
                .rkey
                .iter()
                .map(|key| Some(*key).filter(|key| *key != 0)),
        ),
    };
    buffers.map(piece).collect()
}

/// The far end of a transfer, with the keys of the peer's record.
fn remote(offered: &[Piece], flight: &Flight) -> Option<Span> {
    let addr = offered.first()?.addr + (flight.remote_slot * SLOT_BYTES) as u64;
    Span::new(addr, flight.bytes as u64, offered.iter().cloned())
}

impl World {
    /// A transfer's last byte has ended, and all its fences are through.
    pub(super) fn finished(&mut self, host: usize, id: TransferId) {
        let now = self.now;
        let Some(node) = self.node(host) else {
            return;
        };
        let job = node.jobs.get_mut(&id).expect("it is finished once");
        assert!(job.transfer.is_finished());
        let amiss = job.transfer.first_amiss();
        assert_eq!(amiss, None, "{id:?}: a byte that has not ended once");
        let error = job.transfer.error().cloned();
        let is_refused = matches!(error, Some(TransferError::RemoteAccess { .. }));
        let is_over = job.reposted && !job.transfer.is_outdated();
        if !is_refused || is_over {
            return self.report(host, id, error);
        }
        // As `engine::batch::repost`: once more, by the peer's record of now or a newer one.
        job.asks = true;
        let (peer, cut_off) = (job.peer, job.transfer.spec().cut_off);
        if self.repost(host, id, false) {
            return;
        }
        let Some(node) = self.node(host) else {
            return;
        };
        if let Some(known) = node.known.get(&peer) {
            let name = name(known.life.0);
            let trouble = Trouble::RemoteAccess;
            node.peers
                .handle(now, peers::Input::Trouble { name, trouble });
            self.at(host, cut_off.max(now), Coming::AskedLongEnough(id));
        } else {
            // Its life is over, which says more.
            let peer = format!("{peer:?}");
            self.report(host, id, Some(TransferError::PeerRestarted { peer }));
        }
    }

    /// A peer's record was read after trouble: what was refused goes by it.
    pub(super) fn refreshed(&mut self, host: usize, peer: PeerId) {
        let Some(node) = self.node(host) else {
            return;
        };
        let asking = node.jobs.iter();
        let asking = asking.filter(|(_, job)| job.peer == peer && job.asks);
        let asking: Vec<_> = asking.map(|(id, _)| *id).collect();
        for id in asking {
            self.asked_long_enough(host, id);
        }
    }

    /// The record at hand decides about a transfer that was refused, if that is not done yet.
    pub(super) fn asked_long_enough(&mut self, host: usize, id: TransferId) {
        let job = self.node(host).and_then(|node| node.jobs.get(&id));
        let Some(job) = job.filter(|job| job.asks) else {
            return;
        };
        let error = job.transfer.error().cloned();
        if !self.repost(host, id, true) {
            self.report(host, id, error);
        }
    }

    /// Posts a refused transfer again if the record has other keys by now, or ends it if there is
    /// no time for that any more. False if neither.
    fn repost(&mut self, host: usize, id: TransferId, asked: bool) -> bool {
        let now = self.now;
        let Some(node) = self.node(host) else {
            return false;
        };
        let Some(job) = node.jobs.get_mut(&id) else {
            return false;
        };
        let spec = job.transfer.spec();
        let known = node.known.get(&job.peer);
        let found = known.and_then(|known| remote(&known.offered, &job.flight));
        let generation = node.generations.get(&job.peer);
        let (refused, outdated) = (job.transfer.refused_keys(), job.transfer.is_outdated());
        let is_newer = |found: &Span| {
            let mut refused = refused.iter();
            let differs =
                refused.any(|refused| found.key(refused.offset, refused.nic) != Some(refused.key));
            let is_later = asked && generation > Some(&job.generation);
            differs || is_later || outdated && !found.is_superseded()
        };
        let Some(remote) = found.filter(is_newer) else {
            return false;
        };
        if now >= spec.cut_off {
            let late = job.transfer.time_is_over();
            self.report(host, id, Some(late));
            return true;
        }
        (job.reposted, job.asks) = (job.reposted || !outdated, false);
        let spec = TransferSpec {
            remote,
            ..spec.clone()
        };
        let finish = Finish(id, node.outbox.clone());
        job.transfer = Transfer::new(spec, Arc::new(finish));
        node.router.route(Arc::clone(&job.transfer));
        self.coverage.count("transfer", &Luck::Reposted);
        true
    }

    /// Whether the keys that were refused were those of the record at hand, and that was late.
    fn had_late_record(&mut self, host: usize, job: &Job) -> bool {
        let node = self.node(host);
        let known = node.and_then(|node| node.known.get(&job.peer));
        let offered = known.and_then(|known| remote(&known.offered, &job.flight));
        // Of one that is gone nobody has heard the last keys.
        let Some(peer) = self.living(job.flight.to) else {
            return true;
        };
        let present = peer.registered.keys();
        let is_late = |refused: &RefusedKey| {
            let key = |span: &Span| span.key(refused.offset, refused.nic);
            let present = present[0].rkeys.get(refused.nic as usize);
            let is_of_record = offered.as_ref().and_then(key) == Some(refused.key);
            key(&job.transfer.spec().remote) != Some(refused.key)
                || is_of_record && present != Some(&refused.key)
        };
        let mut refused = job.transfer.refused_keys().into_iter();
        refused.any(|refused| is_late(&refused))
    }

    pub(super) fn report(&mut self, host: usize, id: TransferId, error: Option<TransferError>) {
        let now = self.now;
        let Some(node) = self.node(host) else {
            return;
        };
        let own = node.life;
        let job = node.jobs.remove(&id).expect("it is reported once");
        if node.due.iter().any(|due| due.transfer == id) {
            let is_restarted = matches!(error, Some(TransferError::PeerRestarted { .. }));
            assert!(
                is_restarted,
                "{id:?}: its peer was restarted, and {error:?}"
            );
        }
        if let Some(error) = &error
            && !self.had_late_record(host, &job)
        {
            self.blame.check(host, job.flight.to.0, error);
        }
        let is_fenced = !matches!(error, Some(TransferError::Unfenced { .. }));
        let how = error.as_ref().map_or(Luck::Success.name(), Named::name);
        if error.is_none() {
            assert_eq!(job.transfer.transferred_bytes(), job.flight.bytes as u64);
        }
        if job.transfer.retried_slices() > 0 {
            self.coverage.count("transfer", &Luck::Retried);
        }
        self.say(host, format_args!("reports {id:?}: {how}"));
        if !self.faults_on && !matches!(error, None | Some(TransferError::Canceled)) {
            self.coverage.count("transfer", &Luck::Late);
        }
        match &error {
            None => self.coverage.count("transfer", &Luck::Success),
            Some(error) => self.coverage.count("end", error),
        }
        let reuse = self.rng.random_bool(0.5);
        let success = error.is_none();
        self.ledger.report(now, own, id, success, is_fenced, reuse);
    }

    /// Lets a node ask for transfers now and then.
    pub(super) fn submit(&mut self) {
        if !self.faults_on {
            return;
        }
        // Whatever faults are left out, the same is asked for at the same time.
        let mut rng = draws(self.seed, Draws::Work, self.checks);
        for from in 0..self.hosts.len() {
            if !rng.random_bool(0.25) {
                continue;
            }
            let to = rng.random_range(0..self.hosts.len());
            let read = rng.random_bool(0.4);
            if to != from {
                let deadline = Duration::from_millis(rng.random_range(500..20_000));
                self.submit_one(from, to, read, deadline, &mut rng);
            }
        }
    }

    /// Asks for one transfer; false if there is nobody to ask, or no memory free.
    pub(super) fn submit_one(
        &mut self,
        from: usize,
        to: usize,
        read: bool,
        deadline: Duration,
        rng: &mut SmallRng,
    ) -> bool {
        let now = self.now;
        let bytes = rng.random_range(1..=SLOT_BYTES);
        let seed = rng.random();
        let Some(node) = self.node(from).filter(|node| !node.frozen) else {
            return false;
        };
        let Some((peer, life)) = node.to(to) else {
            return false;
        };
        let id = TransferId(node.number());
        let opcode = if read {
            RdmaOpcode::Read
        } else {
            RdmaOpcode::Write
        };
        let own = node.life;
        // Somebody else may have the name already; the requester will find out.
        let Some(flight) = self.ledger.submit(id, own, life, opcode, bytes, seed) else {
            return false;
        };
        let deadline = now + deadline;
        let Some(node) = self.node(from) else {
            return false;
        };
        let Some(known) = node.known.get(&peer) else {
            return false;
        };
        let local = node.memory.addr() + (flight.local_slot * SLOT_BYTES) as u64;
        let config = config();
        let spec = TransferSpec {
            peer: Arc::clone(&known.peer),
            opcode,
            local: Span::new(local, bytes as u64, node.registered.pieces()).expect("registered"),
            remote: remote(&known.offered, &flight).expect("its memory is all one buffer"),
            length: bytes as u64,
            slicing: config.slicing,
            cut_off: config.limits.cut_off_at(now, deadline),
            limit: deadline.saturating_since(now),
        };
        let finish = Finish(id, node.outbox.clone());
        let transfer = Transfer::new(spec, Arc::new(finish));
        let generation = node.generations.get(&peer).copied().unwrap_or(0);
        let job = Job {
            transfer: Arc::clone(&transfer),
            peer,
            flight,
            generation,
            reposted: false,
            asks: false,
        };
        let (at, there) = (job.flight.local_slot, job.flight.remote_slot);
        node.jobs.insert(id, job);
        let what = format_args!("asks {id:?}: {opcode:?} {bytes} from slot {at}, {life:?} {there}");
        self.say(from, what);
        let Some(node) = self.node(from) else {
            return false;
        };
        node.router.route(transfer);
        self.settle(from);
        true
    }
}

impl Node {
    /// Whom a transfer to that host reaches, if its record is known and offers memory.
    fn to(&self, host: usize) -> Option<(PeerId, super::ledger::Life)> {
        let peer = self.peers.peer(&name(host))?;
        let known = self.known.get(&peer)?;
        let record = self.peers.descriptor(&name(host))?;
        let is_its = member(record).map(|member| super::link::life_of_instance(member.instance));
        let offers = !record.buffers.is_empty() && is_its == Some(known.life);
        offers.then_some((peer, known.life))
    }
}
