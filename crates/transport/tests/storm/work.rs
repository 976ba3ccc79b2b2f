//! Transfers and probes: slices are posted, complete or are lost, and end exactly once.

use std::time::Duration;

use rand::Rng as _;
use rerail_transport::machine::Machine;
use rerail_transport::machine::fence::{self, Abandoned};
use rerail_transport::machine::ids::{EndpointId, LocalNic, PeerId, RailId, TransferId};
use rerail_transport::machine::progress;
use rerail_transport::machine::rail::{self, Path, ProbeKind, choose};
use rerail_transport::machine::transfer::{self, FailCause};
use rerail_verbs::{Completion, RdmaOpcode, RemoteAddress, Sge, WcStatus, WorkRequest};

use super::actions::variant;
use super::ledger::SLOT_BYTES;
use super::link::{DEPTH, State, Work};
use super::node::{Job, Node, REGION, SLICE_BYTES, Slice, name, nic_name};
use super::world::{Coming, World};

impl Node {
    pub(crate) fn all_rails(&self, peer: PeerId) -> impl Iterator<Item = RailId> + use<> {
        // All hosts of a world have the same number of NICs.
        let nics = self.nics.len() as u32;
        (0..nics).flat_map(move |local| {
            (0..nics).map(move |nic| RailId::new(LocalNic(local), peer, nic))
        })
    }

    pub(crate) fn lose_slice(&mut self, endpoint: EndpointId, work: Work) -> Option<fence::Input> {
        let Work::Slice {
            transfer,
            slice,
            bytes,
            opcode,
        } = work
        else {
            return None;
        };
        let slot = self.jobs.get_mut(&transfer)?.slices.get_mut(slice)?;
        if *slot != Slice::Posted(endpoint) {
            return None;
        }
        *slot = Slice::Abandoned(endpoint);
        let bytes = u64::from(bytes);
        let work = match opcode {
            RdmaOpcode::Read => Abandoned {
                read_bytes: bytes,
                write_bytes: 0,
            },
            _ => Abandoned {
                read_bytes: 0,
                write_bytes: bytes,
            },
        };
        Some(fence::Input::Abandon {
            endpoint,
            transfer,
            region: REGION,
            work,
        })
    }

    /// Takes an endpoint out of use; its rail knows, or is to be told. Its fence is yet to begin.
    pub(crate) fn retire(&mut self, endpoint: EndpointId) {
        if let Some(of) = self.endpoints.get_mut(&endpoint) {
            of.state = State::Closing;
            if self.by_rail.get(&of.rail) == Some(&endpoint) {
                self.by_rail.remove(&of.rail);
            }
        }
    }

    /// Everything that is still out on an endpoint that cannot complete any more.
    pub(crate) fn lose_all(&mut self, endpoint: EndpointId) -> Vec<fence::Input> {
        let Some(of) = self.endpoints.get_mut(&endpoint) else {
            return Vec::new();
        };
        let outstanding = std::mem::take(&mut of.outstanding);
        for id in outstanding.keys() {
            self.by_work.remove(id);
        }
        let works = outstanding.into_values();
        works
            .filter_map(|work| self.lose_slice(endpoint, work))
            .collect()
    }
}

impl World {
    /// A completion of posted work.
    pub(crate) fn completed(&mut self, host: usize, completion: Completion) {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        // Completions of queue pairs that are destroyed may survive them.
        let Some(endpoint) = node.by_work.remove(&completion.wr_id) else {
            return;
        };
        let Some(of) = node.endpoints.get_mut(&endpoint) else {
            return;
        };
        let work = of.outstanding.remove(&completion.wr_id);
        let work = work.expect("work completes once");
        let (rail, status) = (of.rail, completion.status);
        if let Some(pair) = &of.pair {
            let input = progress::Input::Completed {
                queue_pair: pair.id(),
                count: 1,
            };
            node.progress.handle(now, input);
        }
        match work {
            Work::Probe { rail, probe } => {
                node.rails.handle(
                    now,
                    rail::Input::ProbeDone {
                        rail,
                        probe,
                        status,
                    },
                );
            }
            Work::Slice {
                transfer, slice, ..
            } if status == WcStatus::Success => {
                if let Some(job) = node.jobs.get_mut(&transfer)
                    && job.slices[slice] == Slice::Posted(endpoint)
                {
                    job.slices[slice] = Slice::Done;
                }
            }
            Work::Slice { transfer, .. } => {
                if let Some(input) = node.lose_slice(endpoint, work) {
                    node.fences.handle(now, input);
                }
                node.rails
                    .handle(now, rail::Input::Completion { rail, status });
                node.transfers
                    .handle(now, transfer::Input::SliceFailed { transfer, status });
            }
        }
        self.check_drained(host, endpoint);
    }

    /// Destroys an endpoint's queue pair once all that was posted has come back.
    pub(crate) fn check_drained(&mut self, host: usize, endpoint: EndpointId) {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let Some(of) = node.endpoints.get_mut(&endpoint) else {
            return;
        };
        if !of.in_error || of.destroying || !of.outstanding.is_empty() {
            return;
        }
        of.destroying = true;
        let local = of.rail.local;
        if let Some(pair) = of.pair.take() {
            node.progress.handle(
                now,
                progress::Input::Closed {
                    queue_pair: pair.id(),
                },
            );
        }
        node.fences.handle(now, fence::Input::Drained { endpoint });
        let after = self.takes(host, local);
        self.later(host, after, Coming::Destroyed(endpoint));
    }

    /// Posts one request, and knows it until it completes.
    pub(crate) fn post(
        &mut self,
        host: usize,
        endpoint: EndpointId,
        work: Work,
        request: WorkRequest,
    ) -> bool {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return false;
        };
        let Some(of) = node.endpoints.get_mut(&endpoint) else {
            return false;
        };
        let Some(pair) = of.pair.clone().filter(|_| of.state == State::Ready) else {
            return false;
        };
        let local = of.rail.local;
        // The gate: what was wanted before it closed is not posted after.
        if !node.gates.contains(&local) {
            return false;
        }
        let observer = &node.observers[local.0 as usize];
        assert!(observer.gate_open(1), "through a closed gate");
        let known = observer
            .facts(1)
            .and_then(|facts| facts.gid.as_ref())
            .map(|row| row.gid);
        assert_eq!(
            known,
            Some(of.gid),
            "with an address that is known to be gone"
        );
        let peer = of.rail.peer.peer;
        let (far, life) = of.to;
        assert_eq!(
            node.peers.peer(&name(far)),
            Some(peer),
            "to a retired instance"
        );
        assert_eq!(node.of_peer.get(&peer), Some(&(far, life)));
        match pair.post(&[request]) {
            Ok(()) => {
                of.outstanding.insert(request.wr_id, work);
                node.by_work.insert(request.wr_id, endpoint);
                let bytes = request.bytes() as u32;
                let posted = progress::Input::Posted {
                    queue_pair: pair.id(),
                    bytes,
                };
                node.progress.handle(now, posted);
                true
            }
            Err(error) => {
                // Only a device or process that is dead refuses what there is room for.
                assert!(
                    !error.is_queue_full(),
                    "more was posted than there is room for"
                );
                false
            }
        }
    }

    pub(crate) fn probe(&mut self, host: usize, rail: RailId, probe: u64, kind: ProbeKind) {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let id = node.number();
        let endpoint = node.by_rail.get(&rail).copied();
        let request = match kind {
            ProbeKind::ZeroLengthRead => Some(WorkRequest::zero_length_read(id)),
            ProbeKind::FullMtuRead => node
                .remote(rail, 0)
                .zip(node.local(rail.local, 0, 4_096))
                .map(|(remote, local)| WorkRequest::read(id, local, remote)),
        };
        let posted = match (endpoint, request) {
            (Some(endpoint), Some(request)) => {
                self.post(host, endpoint, Work::Probe { rail, probe }, request)
            }
            _ => false,
        };
        if !posted && let Some(node) = self.hosts[host].node.as_mut() {
            let status = WcStatus::FatalErr;
            node.rails.handle(
                now,
                rail::Input::ProbeDone {
                    rail,
                    probe,
                    status,
                },
            );
        }
    }

    /// Hands transfers whose slices have all ended to the fence.
    pub(crate) fn finish(&mut self, host: usize) -> bool {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return false;
        };
        let mut moved = false;
        for (transfer, job) in &mut node.jobs {
            if job.is_over() && !job.finishing {
                job.finishing = true;
                moved = true;
                let transfer = *transfer;
                node.transfers
                    .handle(now, transfer::Input::Ended { transfer });
                node.fences.handle(now, fence::Input::Finish { transfer });
            }
        }
        moved
    }

    pub(crate) fn report(&mut self, host: usize, transfer: TransferId, fenced: bool) {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let own = node.life;
        let job = node.jobs.remove(&transfer).expect("it is reported once");
        let success = job.failed.is_none() && fenced;
        if success {
            assert!(job.slices.iter().all(|slice| *slice == Slice::Done));
        }
        let how = match job.failed {
            None => "success".to_owned(),
            Some(cause) => variant(&cause),
        };
        self.say(
            host,
            format_args!("reports {transfer:?}: {how}, fenced {fenced}"),
        );
        if !self.faults_on
            && job
                .failed
                .is_some_and(|cause| cause != FailCause::Cancelled)
        {
            self.coverage.count("end", format!("{how} after the storm"));
        }
        self.coverage.count("end", how);
        let reuse = self.rng.random_bool(0.5);
        self.ledger
            .report(now, own, transfer, success, fenced, reuse);
    }

    /// Posts what can be posted.
    pub(crate) fn pump(&mut self, host: usize) -> bool {
        let Some(node) = self.hosts[host].node.as_ref().filter(|node| !node.frozen) else {
            return false;
        };
        let waiting: Vec<_> = node
            .jobs
            .iter()
            .filter(|(_, job)| !job.hold && job.slices.contains(&Slice::Pending))
            .map(|(transfer, _)| *transfer)
            .collect();
        let mut moved = false;
        for transfer in waiting {
            while self.pump_one(host, transfer) {
                moved = true;
            }
        }
        moved
    }

    pub(crate) fn pump_one(&mut self, host: usize, transfer: TransferId) -> bool {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return false;
        };
        let Some(job) = node.jobs.get(&transfer) else {
            return false;
        };
        let Some(slice) = job.slices.iter().position(|slice| *slice == Slice::Pending) else {
            return false;
        };
        let candidates = match node.rails.path(job.peer) {
            Path::Usable(candidates) => candidates,
            Path::Expected { want } => {
                if let Some(rail) = want {
                    node.rails.handle(now, rail::Input::Wanted { rail });
                }
                return want.is_some();
            }
            Path::None(cause) => {
                let input = transfer::Input::NoPath {
                    peer: job.peer,
                    cause,
                };
                node.transfers.handle(now, input);
                return false;
            }
        };
        let ready = |rail: RailId| {
            let endpoint = node.by_rail.get(&rail)?;
            let of = node.endpoints.get(endpoint)?;
            let room = of.state == State::Ready && of.outstanding.len() < DEPTH;
            room.then_some((*endpoint, of))
        };
        let mut usable = candidates;
        usable.retain(|candidate| ready(candidate.rail).is_some());
        let queued = |rail| ready(rail).map_or(0, |(_, of)| of.queued_bytes());
        let (at, bytes) = job.piece(slice);
        let Some(rail) = choose(&usable, bytes as u64, queued, |_| 0) else {
            return false;
        };
        let Some((endpoint, _)) = ready(rail) else {
            return false;
        };
        let local = node.local(rail.local, job.local_at + at, bytes);
        let remote = node.remote(rail, job.remote_at + at);
        let (Some(local), Some(remote)) = (local, remote) else {
            return false;
        };
        let opcode = job.opcode;
        let id = node.number();
        let request = WorkRequest::new(opcode, id, &[local], remote);
        let work = Work::Slice {
            transfer,
            slice,
            bytes: bytes as u32,
            opcode,
        };
        let posted = self.post(host, endpoint, work, request);
        if posted
            && let Some(job) = self
                .node(host)
                .and_then(|node| node.jobs.get_mut(&transfer))
        {
            job.slices[slice] = Slice::Posted(endpoint);
        }
        posted
    }

    /// Lets a node ask for transfers now and then.
    pub(crate) fn submit(&mut self) {
        if !self.faults_on {
            return;
        }
        for from in 0..self.hosts.len() {
            if !self.rng.random_bool(0.25) {
                continue;
            }
            let to = self.rng.random_range(0..self.hosts.len());
            let read = self.rng.random_bool(0.4);
            if to != from {
                self.submit_one(from, to, read, false);
            }
        }
    }

    /// Asks for one transfer; false if there is nobody to ask, or no memory free.
    pub(crate) fn submit_one(&mut self, from: usize, to: usize, read: bool, must: bool) -> bool {
        let now = self.now;
        let bytes = self.rng.random_range(1..=SLOT_BYTES);
        let seed = self.rng.random();
        let deadline = if must {
            4_000
        } else {
            self.rng.random_range(500..20_000)
        };
        let Some(node) = self.hosts[from].node.as_mut().filter(|node| !node.frozen) else {
            return false;
        };
        let Some(peer) = node.peers.peer(&name(to)) else {
            return false;
        };
        let Some(life) = node.of_peer.get(&peer).copied() else {
            return false;
        };
        let transfer = TransferId(node.number());
        let opcode = if read {
            RdmaOpcode::Read
        } else {
            RdmaOpcode::Write
        };
        let own = node.life;
        // Somebody else may have the name already; the requester will find out.
        let Some(flight) = self.ledger.submit(transfer, own, life, opcode, bytes, seed) else {
            return false;
        };
        let Some(node) = self.hosts[from].node.as_mut() else {
            return false;
        };
        let deadline = now + Duration::from_millis(deadline);
        node.jobs.insert(
            transfer,
            Job {
                peer,
                opcode,
                local_at: flight.local_slot * SLOT_BYTES,
                remote_at: flight.remote_slot * SLOT_BYTES,
                bytes,
                slices: vec![Slice::Pending; bytes.div_ceil(SLICE_BYTES)],
                hold: false,
                failed: None,
                finishing: false,
            },
        );
        node.transfers.handle(
            now,
            transfer::Input::Submitted {
                transfer,
                peer,
                deadline,
            },
        );
        self.settle(from);
        true
    }
}

impl Node {
    pub(crate) fn local(&self, local: LocalNic, at: usize, bytes: usize) -> Option<Sge> {
        let open = self.nics[local.0 as usize].open.as_ref()?;
        Some(Sge {
            addr: self.memory.addr() + at as u64,
            length: bytes as u32,
            lkey: open.region.lkey(),
        })
    }

    /// An address in the peer's memory, with the key that its record gives for the NIC.
    pub(crate) fn remote(&self, rail: RailId, at: usize) -> Option<RemoteAddress> {
        let (far, _) = self.of_peer.get(&rail.peer.peer)?;
        let record = self.peers.descriptor(&name(*far))?;
        let wanted = nic_name(rail.peer.nic);
        let nic = record
            .devices
            .iter()
            .position(|device| device.name == wanted)?;
        let buffer = record.buffers.first()?;
        Some(RemoteAddress {
            addr: buffer.addr + at as u64,
            rkey: *buffer.rkey.get(nic)?,
        })
    }
}
