//! Reliable connected queue pairs: states, rules of transition, posting and the end of work.

use std::collections::VecDeque;
use std::time::Duration;

use super::agenda::Due;
use super::completion_queue::Entry;
use super::core::Core;
use super::event::Element;
use super::node::{NicId, PortId};
use super::packet::Address;
use super::rule::{PostVerdict, WorkVerdict, WorkView};
use super::slab::Handle;
use super::trace::trace;
use crate::error::{Errno, PostRefusal};
use crate::{
    AccessFlags, Completion, Gid, InitAttr, LinkLayer, QpAttr, QpCapacity, QpState, RdmaOpcode,
    RtrAttr, RtsAttr, WcOpcode, WcStatus, WorkRequest,
};

/// Queue pair numbers and packet numbers have 24 bits.
const BITS_24: u32 = 0x00ff_ffff;

#[derive(Debug)]
pub(super) struct QueuePair {
    pub(super) context: Handle,
    pub(super) nic: NicId,
    pub(super) pd: Handle,
    pub(super) send_cq: Handle,
    pub(super) recv_cq: Handle,
    pub(super) number: u32,
    capacity: QpCapacity,
    pub(super) state: QpState,
    /// Valid from INIT on.
    pub(super) port: u32,
    pub(super) pkey_index: u16,
    pub(super) access: AccessFlags,
    /// From RTR on.
    pub(super) peer: Option<Peer>,
    /// From RTS on.
    pub(super) rts: Option<RtsAttr>,
    pub(super) send: SendQueue,
    /// Packet number that the responder expects next.
    pub(super) expected_psn: u32,
    /// The responder has asked for the packet that is missing, and does so once.
    pub(super) nak_sent: bool,
    /// A packet has arrived since RTR.
    pub(super) established: bool,
}

/// The row of the own GID table that a queue pair sends with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OwnRow {
    /// Its index.
    pub index: u32,
    /// What stood there when the queue pair was connected. It sends with this until it is moved to
    /// RESET or destroyed, whatever becomes of the row.
    pub gid: Gid,
    /// When that was, since the fabric's beginning.
    pub since: Duration,
}

/// The way to the peer, and the row of the own table that it was made with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    pub(super) rtr: RtrAttr,
    pub(super) own_gid: Gid,
    /// When it was made.
    pub(super) since: Duration,
}

/// Work that was posted and has not ended, oldest first.
#[derive(Debug, Default)]
pub(super) struct SendQueue {
    pub(super) queue: VecDeque<Work>,
    /// Places taken, those of unpolled completions included where they count.
    pub(super) occupied: u32,
    /// Next burst to send: index in `queue`, and number of the burst within that work.
    pub(super) next: (usize, u32),
    pub(super) next_psn: u32,
    /// Bursts of the oldest work that are acknowledged.
    pub(super) acked: u32,
    /// Packet number of the oldest burst that is not acknowledged.
    pub(super) unacked_psn: u32,
    /// Bursts that were sent and are not acknowledged.
    pub(super) in_flight: u32,
    /// READs that were begun and have not ended.
    pub(super) reads: u32,
    /// A repetition asked for by the responder is under way: further demands are ignored.
    pub(super) repeating: bool,
    pub(super) retries: u32,
    /// When the acknowledgement timer runs out.
    pub(super) deadline: Option<Duration>,
    /// When the agenda next looks at the timer.
    pub(super) timer_at: Option<Duration>,
    pub(super) flush_entered: bool,
    /// Work that ended without a completion since the last one.
    silent: u32,
    /// Completions may not come before this, so that one that is held back holds back the rest.
    not_before: Duration,
}

#[derive(Debug)]
pub(super) struct Work {
    pub(super) request: WorkRequest,
    /// At least 1: even nothing is sent in a packet.
    pub(super) bursts: u32,
    pub(super) started: bool,
    pub(super) verdict: WorkVerdict,
}

impl QueuePair {
    /// Bytes of a burst.
    pub(super) fn burst_bytes(&self, packets_per_burst: u32) -> u32 {
        let mtu = self.peer.map_or(1024, |peer| peer.rtr.path_mtu.bytes());
        mtu * packets_per_burst.max(1)
    }

    pub(super) fn at(&self) -> PortId {
        PortId {
            nic: self.nic,
            port: self.port,
        }
    }
}

impl Core {
    pub(super) fn create_pair(
        &mut self,
        pd: Handle,
        send_cq: Handle,
        recv_cq: Handle,
        capacity: QpCapacity,
    ) -> Result<(Handle, u32), Errno> {
        let context = self.pds.get(pd).ok_or(Errno(libc::EIO))?.context;
        let nic = self.live_context(context)?.nic;
        let queues = [send_cq, recv_cq];
        if queues.iter().any(|queue| self.queues.get(*queue).is_none()) {
            return Err(Errno(libc::EINVAL));
        }
        let device = &mut self.nics[nic.0];
        let limits = &device.limits;
        let wr_max = capacity.send_wr_max.max(capacity.recv_wr_max);
        let sge_max = capacity.send_sge_max.max(capacity.recv_sge_max);
        if capacity.send_wr_max == 0 || wr_max > limits.max_qp_wr || sge_max > limits.max_sge {
            return Err(Errno(libc::EINVAL));
        }
        if device.pairs.len() >= limits.max_qp as usize {
            return Err(Errno(libc::ENOMEM));
        }
        let number = device.qp_numbers.take();
        let pair = self.pairs.insert(QueuePair {
            context,
            nic,
            pd,
            send_cq,
            recv_cq,
            number,
            capacity,
            state: QpState::Reset,
            port: 0,
            pkey_index: 0,
            access: AccessFlags::empty(),
            peer: None,
            rts: None,
            send: SendQueue::default(),
            expected_psn: 0,
            nak_sent: false,
            established: false,
        });
        self.nics[nic.0].pairs.insert(number, pair);
        trace!(self, "qp {number} on {}", self.nic_name(nic));
        Ok((pair, number))
    }

    pub(super) fn pair(&self, handle: Handle) -> Result<&QueuePair, Errno> {
        self.pairs.get(handle).ok_or(Errno(libc::EIO))
    }

    /// A pair that verbs may change.
    fn live_pair(&mut self, handle: Handle) -> Result<&mut QueuePair, Errno> {
        let context = self.pair(handle)?.context;
        self.live_context(context)?;
        self.pairs.get_mut(handle).ok_or(Errno(libc::EIO))
    }

    /// RESET → INIT, and INIT → INIT.
    pub(super) fn modify_to_init(&mut self, handle: Handle, attr: &InitAttr) -> Result<(), Errno> {
        let pair = self.live_pair(handle)?;
        if !matches!(pair.state, QpState::Reset | QpState::Init) {
            return Err(Errno(libc::EINVAL));
        }
        let at = PortId {
            nic: pair.nic,
            port: attr.port,
        };
        let pkeys = self.port(at).ok_or(Errno(libc::EINVAL))?.pkeys.len();
        if usize::from(attr.pkey_index) >= pkeys {
            return Err(Errno(libc::EINVAL));
        }
        let pair = self.live_pair(handle)?;
        pair.state = QpState::Init;
        pair.port = attr.port;
        pair.pkey_index = attr.pkey_index;
        pair.access = attr.access;
        trace!(self, "{} INIT", self.pair_name(handle));
        Ok(())
    }

    /// INIT → RTR, after the neighbour was resolved ([`Core::rtr_delay`]).
    ///
    /// As on soft-RoCE: `ENODATA` for an index without a row, `EINVAL` for a null GID or one of
    /// another family than the own, `ETIMEDOUT` for a neighbour that cannot be reached. A
    /// neighbour that is known is not asked again. InfiniBand asks nobody.
    pub(super) fn modify_to_rtr(&mut self, handle: Handle, attr: &RtrAttr) -> Result<(), Errno> {
        self.live_pair(handle)?;
        let own = self.check_rtr(handle, attr)?;
        let at = self.pair(handle)?.at();
        if let Some(neighbour) = self.unresolved(at, attr) {
            let reachable = self.is_up(at) && self.route(at, Address::Gid(neighbour)).is_some();
            trace!(self, "neighbour {neighbour}: {reachable}");
            if !reachable {
                return Err(Errno(libc::ETIMEDOUT));
            }
            self.neighbours.insert((at, neighbour));
        }
        if let Some(port) = self.port_mut(at) {
            port.gids.acquire(attr.path.sgid_index);
        }
        let since = self.now;
        let pair = self.live_pair(handle)?;
        pair.state = QpState::ReadyToReceive;
        pair.expected_psn = attr.rq_psn;
        pair.nak_sent = false;
        pair.established = false;
        pair.peer = Some(Peer {
            rtr: *attr,
            own_gid: own,
            since,
        });
        trace!(
            self,
            "{} RTR to qp {} at {} lid {}",
            self.pair_name(handle),
            attr.dest_qp_num,
            attr.path.dgid,
            attr.path.dlid
        );
        Ok(())
    }

    /// What can be said of a transition to RTR before the neighbour is asked: the own GID.
    pub(super) fn check_rtr(&self, handle: Handle, attr: &RtrAttr) -> Result<Gid, Errno> {
        let pair = self.pair(handle)?;
        let invalid = Errno(libc::EINVAL);
        let port = self.port(pair.at()).ok_or(invalid)?;
        let path = &attr.path;
        if pair.state != QpState::Init
            || path.port != pair.port
            || attr.dest_qp_num > BITS_24
            || attr.rq_psn > BITS_24
            || u32::from(attr.max_dest_rd_atomic) > self.nics[pair.nic.0].limits.max_qp_rd_atom
            || path.sgid_index >= port.gids.length()
        {
            return Err(invalid);
        }
        let own = port.gids.gid(path.sgid_index).ok_or(Errno(libc::ENODATA))?;
        if port.link_layer == LinkLayer::InfiniBand {
            return if path.dlid == 0 {
                Err(invalid)
            } else {
                Ok(own)
            };
        }
        let same_family = own.to_ipv4().is_some() == path.dgid.to_ipv4().is_some();
        if path.dgid.is_null() || !same_family {
            return Err(invalid);
        }
        Ok(own)
    }

    /// The neighbour that has to be resolved before RTR, if there is one.
    pub(super) fn unresolved(&self, at: PortId, attr: &RtrAttr) -> Option<Gid> {
        let infiniband = self.port(at)?.link_layer == LinkLayer::InfiniBand;
        let known = self.neighbours.contains(&(at, attr.path.dgid));
        (!infiniband && !known).then_some(attr.path.dgid)
    }

    /// RTR → RTS.
    pub(super) fn modify_to_rts(&mut self, handle: Handle, attr: &RtsAttr) -> Result<(), Errno> {
        let nic = self.live_pair(handle)?.nic;
        let rd_atomic_max = self.nics[nic.0].limits.max_qp_init_rd_atom;
        let pair = self.live_pair(handle)?;
        if pair.state != QpState::ReadyToReceive
            || attr.timeout > 31
            || attr.retry_cnt > 7
            || attr.rnr_retry > 7
            || attr.sq_psn > BITS_24
            || u32::from(attr.max_rd_atomic) > rd_atomic_max
        {
            return Err(Errno(libc::EINVAL));
        }
        pair.state = QpState::ReadyToSend;
        pair.rts = Some(*attr);
        pair.send.next_psn = attr.sq_psn;
        pair.send.unacked_psn = attr.sq_psn;
        trace!(self, "{} RTS", self.pair_name(handle));
        Ok(())
    }

    /// Any state → ERR: what is outstanding will be flushed. Packets on their way go on.
    pub(super) fn modify_to_error(&mut self, handle: Handle) -> Result<(), Errno> {
        self.live_pair(handle)?;
        self.check_stops(handle)?;
        self.enter_error(handle);
        Ok(())
    }

    /// Any state → RESET: what is outstanding vanishes without a completion.
    pub(super) fn modify_to_reset(&mut self, handle: Handle) -> Result<(), Errno> {
        self.live_pair(handle)?;
        self.release_gid(handle);
        let pair = self.live_pair(handle)?;
        pair.state = QpState::Reset;
        pair.port = 0;
        pair.rts = None;
        pair.send = SendQueue {
            timer_at: pair.send.timer_at,
            flush_entered: pair.send.flush_entered,
            ..SendQueue::default()
        };
        trace!(self, "{} RESET", self.pair_name(handle));
        Ok(())
    }

    pub(super) fn query_pair(&self, handle: Handle) -> Result<QpAttr, Errno> {
        let pair = self.pair(handle)?;
        self.live_context(pair.context)?;
        let rtr = pair.peer.map(|peer| peer.rtr);
        Ok(QpAttr {
            state: pair.state,
            port: pair.port,
            path_mtu: rtr.map(|rtr| rtr.path_mtu),
            dest_qp_num: rtr.map_or(0, |rtr| rtr.dest_qp_num),
            rq_psn: pair.expected_psn,
            sq_psn: pair.send.next_psn,
            dgid: rtr.map_or(Gid::NULL, |rtr| rtr.path.dgid),
            sgid_index: rtr.map_or(0, |rtr| rtr.path.sgid_index),
            timeout: pair.rts.map_or(0, |rts| rts.timeout),
            retry_cnt: pair.rts.map_or(0, |rts| rts.retry_cnt),
            rnr_retry: pair.rts.map_or(0, |rts| rts.rnr_retry),
            max_rd_atomic: pair.rts.map_or(0, |rts| rts.max_rd_atomic),
            max_dest_rd_atomic: rtr.map_or(0, |rtr| rtr.max_dest_rd_atomic),
            capacity: pair.capacity,
        })
    }

    /// `EIO` while the adapter refuses to stop pairs one by one; not in a context that died.
    pub(super) fn check_stops(&self, handle: Handle) -> Result<(), Errno> {
        let Some(pair) = self.pairs.get(handle) else {
            return Ok(());
        };
        let lives = self.live_context(pair.context).is_ok();
        if lives && self.nics[pair.nic.0].refuses_to_stop > 0 {
            return Err(Errno(libc::EIO));
        }
        Ok(())
    }

    /// Destroys a pair from any state. Outstanding work vanishes; what was sent stays on its way.
    ///
    /// # Panics
    ///
    /// When an event about it was taken and not acknowledged.
    pub(super) fn destroy_pair(&mut self, handle: Handle) {
        let Some(pair) = self.pairs.get(handle) else {
            return;
        };
        let context = pair.context;
        self.forget_events(context, Element::QueuePair(handle));
        self.release_gid(handle);
        trace!(self, "{} destroyed", self.pair_name(handle));
        let Some(pair) = self.pairs.remove(handle) else {
            return;
        };
        let recycle = self.options.recycle_qp_nums;
        let device = &mut self.nics[pair.nic.0];
        device.pairs.remove(&pair.number);
        if recycle {
            device.qp_numbers.give_back(pair.number);
        }
        self.agenda.retain(|due| match due {
            Due::Timer(pair) | Due::Flush(pair) => *pair != handle,
            _ => true,
        });
        if !self.options.completions_survive_destroy
            && let Some(queue) = self.queues.get_mut(pair.send_cq)
        {
            queue.entries.retain(|entry| entry.pair != handle);
        }
    }

    /// The row of the own GID table that a pair was connected with, and when.
    pub(super) fn own_row(&self, nic: NicId, qp_num: u32) -> Option<OwnRow> {
        let handle = self.nics[nic.0].pairs.get(&qp_num)?;
        let peer = self.pairs.get(*handle)?.peer?;
        Some(OwnRow {
            index: peer.rtr.path.sgid_index,
            gid: peer.own_gid,
            since: peer.since,
        })
    }

    /// Posts work in order, as much as there is room for and as fault rules let pass.
    ///
    /// In ERR work is accepted and flushed; before RTS it is `EINVAL`.
    pub(super) fn post(
        &mut self,
        handle: Handle,
        requests: &[WorkRequest],
    ) -> Result<(), PostRefusal> {
        let refuse = |posted, errno| PostRefusal {
            posted,
            in_doubt: 0,
            errno,
        };
        let pair = self.live_pair(handle).map_err(|errno| refuse(0, errno))?;
        let state = pair.state;
        if !matches!(state, QpState::ReadyToSend | QpState::Error) {
            return Err(refuse(0, Errno(libc::EINVAL)));
        }
        let mut result = Ok(());
        for (posted, request) in requests.iter().enumerate() {
            match self.take_in(handle, request) {
                Ok(PostVerdict::Doubt(errno)) if result.is_ok() => {
                    result = Err(PostRefusal {
                        posted,
                        in_doubt: requests.len() - posted,
                        errno: Errno(errno),
                    });
                }
                Ok(_) => {}
                Err(errno) => {
                    result = result.and(Err(refuse(posted, errno)));
                    break;
                }
            }
        }
        if state == QpState::Error {
            self.enter_flush(handle);
        } else {
            self.pump(handle);
        }
        result
    }

    /// Puts one request into the send queue, and tells what the rules say of it.
    fn take_in(&mut self, handle: Handle, request: &WorkRequest) -> Result<PostVerdict, Errno> {
        let (now, packets_per_burst) = (self.now, self.options.packets_per_burst);
        let pair = self.pair(handle)?;
        if request.sges().len() > pair.capacity.send_sge_max as usize || request.bytes() > 1 << 30 {
            return Err(Errno(libc::EINVAL));
        }
        if pair.send.occupied == pair.capacity.send_wr_max {
            return Err(Errno(libc::ENOMEM));
        }
        let burst_bytes = u64::from(pair.burst_bytes(packets_per_burst));
        let view = WorkView {
            nic: pair.nic,
            qp_num: pair.number,
            wr_id: request.wr_id,
            opcode: request.opcode,
            bytes: request.bytes(),
            now,
        };
        let verdict = self.judge_post(&view);
        if let PostVerdict::Refuse(errno) = verdict {
            trace!(self, "{} refuses work: {errno}", self.pair_name(handle));
            return Err(Errno(errno));
        }
        let pair = self.live_pair(handle)?;
        pair.send.occupied += 1;
        pair.send.queue.push_back(Work {
            request: *request,
            bursts: request.bytes().div_ceil(burst_bytes).max(1) as u32,
            started: false,
            verdict: WorkVerdict::Pass,
        });
        Ok(verdict)
    }

    /// The pair goes to the error state, by order or by failure.
    pub(super) fn enter_error(&mut self, handle: Handle) {
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        pair.state = QpState::Error;
        pair.send.deadline = None;
        trace!(self, "{} ERR", self.pair_name(handle));
        self.enter_flush(handle);
    }

    fn enter_flush(&mut self, handle: Handle) {
        let at = self.now + self.options.flush_delay;
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        if !pair.send.queue.is_empty() && !pair.send.flush_entered {
            pair.send.flush_entered = true;
            self.agenda.push(at, Due::Flush(handle));
        }
    }

    /// All outstanding work completes as flushed, unsignalled work too.
    pub(super) fn flush(&mut self, handle: Handle) {
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        pair.send.flush_entered = false;
        if pair.state != QpState::Error {
            return;
        }
        while self
            .pairs
            .get(handle)
            .is_some_and(|pair| !pair.send.queue.is_empty())
        {
            self.end_oldest(handle, WcStatus::WrFlushErr, 0);
        }
    }

    /// The oldest work ends with an error; the pair goes to ERR and the rest will be flushed.
    pub(super) fn fail_oldest(&mut self, handle: Handle, status: WcStatus, vendor_err: u32) {
        self.end_oldest(handle, status, vendor_err);
        self.enter_error(handle);
    }

    /// The oldest work ends. It completes if it asked for that, or on an error.
    pub(super) fn end_oldest(&mut self, handle: Handle, status: WcStatus, vendor_err: u32) {
        let by_poll = self.options.slots_freed_by_poll;
        let now = self.now;
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        let Some(work) = pair.send.queue.pop_front() else {
            return;
        };
        let send = &mut pair.send;
        send.acked = 0;
        send.next = match send.next {
            (0, _) => (0, 0),
            (work, burst) => (work - 1, burst),
        };
        let read = work.request.opcode == RdmaOpcode::Read;
        if read && work.started {
            send.reads -= 1;
        }
        if !by_poll {
            send.occupied = send.occupied.saturating_sub(1);
        }
        if status == WcStatus::Success && !work.request.signaled {
            send.silent += 1;
            return;
        }
        let slots = if by_poll { 1 + send.silent } else { 0 };
        send.silent = 0;
        let entry = Entry {
            completion: Completion {
                wr_id: work.request.wr_id,
                status,
                vendor_err,
                opcode: if read {
                    WcOpcode::RdmaRead
                } else {
                    WcOpcode::RdmaWrite
                },
                byte_len: work.request.bytes() as u32,
                qp_num: pair.number,
            },
            pair: handle,
            slots,
        };
        let queue = pair.send_cq;
        let at = match work.verdict {
            WorkVerdict::CompleteAfter(delay) => now.saturating_add(delay),
            _ => now,
        };
        let at = at.max(send.not_before);
        send.not_before = at;
        if work.verdict == WorkVerdict::LoseCompletion {
            trace!(self, "completion {} lost by rule", entry.completion.wr_id);
        } else if at > now {
            self.agenda.push(at, Due::Complete(queue, entry));
        } else {
            self.push_completion(queue, entry);
        }
    }

    /// Stops a pair of a dead adapter: it sends nothing and ends nothing.
    pub(super) fn silence(&mut self, handle: Handle) {
        if let Some(pair) = self.pairs.get_mut(handle) {
            pair.state = QpState::Error;
            pair.send.deadline = None;
            pair.send.queue.clear();
        }
    }

    fn release_gid(&mut self, handle: Handle) {
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        let at = pair.at();
        let Some(peer) = pair.peer.take() else {
            return;
        };
        if let Some(port) = self.port_mut(at) {
            port.gids.release(peer.rtr.path.sgid_index);
        }
    }

    /// `host/device:number`, for the trace.
    pub(super) fn pair_name(&self, handle: Handle) -> String {
        match self.pairs.get(handle) {
            Some(pair) => format!("{} qp {}", self.nic_name(pair.nic), pair.number),
            None => "gone".to_owned(),
        }
    }
}
