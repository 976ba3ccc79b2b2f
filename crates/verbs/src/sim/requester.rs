//! The sending half of a queue pair: bursts, acknowledgements, time-outs, repetition.
//!
//! Go-back-N as in the InfiniBand specification, in units of bursts. Divergences: a READ is asked
//! for burst by burst instead of all at once, so that what is on the way stays bounded; a demand
//! for repetition does not count as a retry, only the timer does.

use std::time::Duration;

use super::agenda::Due;
use super::core::Core;
use super::memory::{gather, scatter};
use super::node::PortId;
use super::options::OwnPortFailure;
use super::packet::{Address, Body, Nak, PSN_MASK, Packet, Target, psn_ahead};
use super::queue_pair::{Peer, QueuePair};
use super::rule::{WorkVerdict, WorkView};
use super::slab::Handle;
use super::trace::trace;
use crate::{AccessFlags, LinkLayer, QpState, RdmaOpcode, WcStatus};

/// What a queue pair does next.
enum Step {
    /// Nothing until something happens.
    Wait,
    /// The oldest work fails.
    Fail(WcStatus, u32),
    Send(Packet),
}

impl Core {
    /// Sends as much as the window, the fences and the limit of READs allow.
    pub(super) fn pump(&mut self, handle: Handle) {
        loop {
            match self.next_step(handle) {
                Step::Wait => break,
                Step::Fail(status, vendor_err) => {
                    self.fail_oldest(handle, status, vendor_err);
                    return;
                }
                Step::Send(packet) => self.send(packet),
            }
        }
        let waiting = self
            .pairs
            .get(handle)
            .is_some_and(|pair| pair.send.in_flight > 0 && pair.send.deadline.is_none());
        if waiting {
            self.arm(handle);
        }
    }

    fn next_step(&mut self, handle: Handle) -> Step {
        let Some(pair) = self.pairs.get(handle) else {
            return Step::Wait;
        };
        let (Some(peer), Some(rts)) = (pair.peer, pair.rts) else {
            return Step::Wait;
        };
        let send = &pair.send;
        let (index, burst) = send.next;
        let window_full = send.in_flight >= self.options.window_bursts.max(1);
        let Some(work) = send.queue.get(index) else {
            return Step::Wait;
        };
        if pair.state != QpState::ReadyToSend || window_full {
            return Step::Wait;
        }
        let read = work.request.opcode == RdmaOpcode::Read;
        if !work.started {
            let fenced = work.request.fence && send.reads > 0;
            let reads_full = read && send.reads >= u32::from(rts.max_rd_atomic.max(1));
            if fenced || reads_full {
                return Step::Wait;
            }
        }
        // Errors wait until the work is the oldest, so that completions keep their order.
        let fail = |status, vendor_err| {
            if index == 0 {
                Step::Fail(status, vendor_err)
            } else {
                Step::Wait
            }
        };
        let own_fault = self.own_fault(pair.at(), &peer);
        if own_fault && self.options.own_port_failure == OwnPortFailure::LocQpOpErr {
            return Step::Fail(WcStatus::LocQpOpErr, 0);
        }
        let (nic, pd) = (pair.nic, pair.pd);
        let request = work.request;
        let longest = self
            .port(pair.at())
            .map_or(u32::MAX, |port| port.max_msg_bytes);
        if request.bytes() > u64::from(longest) {
            return fail(WcStatus::LocLenErr, 0);
        }
        let access = if read {
            AccessFlags::LOCAL_WRITE
        } else {
            AccessFlags::empty()
        };
        // soft-RoCE reports a wrong local key as LOC_QP_OP_ERR; this is what cards say.
        let Some(pieces) = self.local_pieces(nic, pd, request.sges(), access) else {
            return fail(WcStatus::LocProtErr, 0);
        };
        if !work.started {
            let view = WorkView {
                nic,
                qp_num: pair.number,
                wr_id: request.wr_id,
                opcode: request.opcode,
                bytes: request.bytes(),
                now: self.now,
            };
            // A verdict of failure is kept until the work is the oldest.
            let verdict = match work.verdict {
                WorkVerdict::Pass => self.judge_work(&view),
                earlier => earlier,
            };
            if let WorkVerdict::Fail(status, vendor_err) = verdict {
                if let Some(pair) = self.pairs.get_mut(handle) {
                    pair.send.queue[index].verdict = verdict;
                }
                return fail(status, vendor_err);
            }
            if let Some(pair) = self.pairs.get_mut(handle) {
                let work = &mut pair.send.queue[index];
                work.verdict = verdict;
                work.started = true;
                pair.send.reads += u32::from(read);
            }
        }
        let packets_per_burst = self.options.packets_per_burst;
        let Some(pair) = self.pairs.get_mut(handle) else {
            return Step::Wait;
        };
        let burst_bytes = pair.burst_bytes(packets_per_burst);
        let skip = u64::from(burst) * u64::from(burst_bytes);
        let length = (request.bytes() - skip).min(u64::from(burst_bytes)) as u32;
        let target = Target {
            addr: request.remote.addr,
            rkey: request.remote.rkey,
            length: request.bytes(),
        };
        let body = if read {
            Body::ReadRequest {
                target,
                skip,
                length,
                in_flight: pair.send.reads,
            }
        } else {
            let mut payload = vec![0; length as usize];
            gather(&pieces, skip, &mut payload);
            Body::Write {
                target,
                skip,
                payload,
            }
        };
        let send = &mut pair.send;
        let psn = send.next_psn;
        send.next_psn = (psn + 1) & PSN_MASK;
        send.in_flight += 1;
        send.next = if burst + 1 == send.queue[index].bursts {
            (index + 1, 0)
        } else {
            (index, burst + 1)
        };
        match self.packet(handle, psn, body) {
            Some(packet) => Step::Send(packet),
            None => Step::Wait,
        }
    }

    /// A packet of the pair towards its peer.
    pub(super) fn packet(&self, handle: Handle, psn: u32, body: Body) -> Option<Packet> {
        let pair = self.pairs.get(handle)?;
        let peer = pair.peer?;
        let (source, destination) = self.addresses(pair, &peer)?;
        let pkeys = &self.port(pair.at())?.pkeys;
        Some(Packet {
            from: pair.at(),
            source,
            destination,
            dest_qp_num: peer.rtr.dest_qp_num,
            // An entry that is gone matches nobody's.
            pkey: pkeys
                .get(usize::from(pair.pkey_index))
                .copied()
                .unwrap_or(0),
            psn,
            mtu: peer.rtr.path_mtu,
            body,
        })
    }

    /// The own address and the peer's, as packets name them.
    pub(super) fn addresses(&self, pair: &QueuePair, peer: &Peer) -> Option<(Address, Address)> {
        let port = self.port(pair.at())?;
        Some(if port.link_layer == LinkLayer::InfiniBand {
            (Address::Lid(port.lid), Address::Lid(peer.rtr.path.dlid))
        } else {
            (Address::Gid(peer.own_gid), Address::Gid(peer.rtr.path.dgid))
        })
    }

    /// True when the pair's port is down or the row that it was made with is gone.
    fn own_fault(&self, at: PortId, peer: &Peer) -> bool {
        let row = self
            .port(at)
            .and_then(|port| port.gids.gid(peer.rtr.path.sgid_index));
        !self.is_up(at) || row != Some(peer.own_gid)
    }

    /// Starts the acknowledgement timer: 4.096 µs × 2^timeout after the last packet has left.
    fn arm(&mut self, handle: Handle) {
        let Some(pair) = self.pairs.get(handle) else {
            return;
        };
        let leaves = self
            .port(pair.at())
            .map_or(self.now, |port| port.busy_until);
        let timeout = pair.rts.map_or(0, |rts| rts.timeout);
        let deadline = (timeout > 0)
            .then(|| self.now.max(leaves) + Duration::from_nanos(4_096) * (1 << timeout));
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        let send = &mut pair.send;
        send.deadline = deadline;
        if let Some(deadline) = deadline
            && send.timer_at.is_none_or(|at| deadline < at)
        {
            send.timer_at = Some(deadline);
            self.agenda.push(deadline, Due::Timer(handle));
        }
    }

    /// The agenda looks at a pair's timer: one entry a pair, moved on while there is progress.
    pub(super) fn timer(&mut self, handle: Handle) {
        let now = self.now;
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        let send = &mut pair.send;
        if send.timer_at != Some(now) {
            return;
        }
        send.timer_at = None;
        let Some(deadline) = send.deadline else {
            return;
        };
        if deadline > now {
            send.timer_at = Some(deadline);
            self.agenda.push(deadline, Due::Timer(handle));
            return;
        }
        send.deadline = None;
        let retry_cnt = pair.rts.map_or(0, |rts| rts.retry_cnt);
        let for_ever = retry_cnt == 7 && self.options.retry_seven_is_infinite;
        if !for_ever && pair.send.retries >= u32::from(retry_cnt) {
            trace!(self, "{} gives up", self.pair_name(handle));
            self.fail_oldest(handle, WcStatus::RetryExcErr, 0);
            return;
        }
        pair.send.retries = pair.send.retries.saturating_add(1);
        trace!(self, "{} times out", self.pair_name(handle));
        self.go_back(handle);
    }

    /// Sends everything again that is not acknowledged.
    fn go_back(&mut self, handle: Handle) {
        if let Some(pair) = self.pairs.get_mut(handle) {
            let send = &mut pair.send;
            send.next = (0, send.acked);
            send.next_psn = send.unacked_psn;
            send.in_flight = 0;
        }
        self.pump(handle);
    }

    /// A repetition that the responder asked for, or that a gap shows to be needed.
    fn repeat(&mut self, handle: Handle) {
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        if !std::mem::replace(&mut pair.send.repeating, true) {
            trace!(self, "{} repeats", self.pair_name(handle));
            self.go_back(handle);
        }
    }

    /// An answer of the peer's responder.
    pub(super) fn answer(&mut self, handle: Handle, packet: &Packet) {
        let Some(pair) = self.pairs.get(handle) else {
            return;
        };
        let awaited = psn_ahead(packet.psn, pair.send.unacked_psn)
            .filter(|ahead| *ahead < pair.send.in_flight);
        let Some(ahead) = awaited.filter(|_| pair.state == QpState::ReadyToSend) else {
            return;
        };
        // Whatever comes in answers all before it; an acknowledgement its own packet too.
        let acknowledged = match packet.body {
            Body::Ack => ahead + 1,
            _ => ahead,
        };
        for _ in 0..acknowledged {
            if self.oldest_is_read(handle) {
                // Its bytes were overtaken, so they are lost.
                return self.repeat(handle);
            }
            self.advance(handle);
        }
        match &packet.body {
            Body::ReadResponse { payload } => self.take_read(handle, packet, payload),
            Body::Nak(Nak::Sequence) => self.repeat(handle),
            Body::Nak(Nak::InvalidRequest) => {
                self.fail_oldest(handle, WcStatus::RemInvReqErr, 0);
            }
            Body::Nak(Nak::RemoteAccess) => {
                self.fail_oldest(handle, WcStatus::RemAccessErr, 0);
            }
            Body::Ack | Body::Write { .. } | Body::ReadRequest { .. } => {}
        }
        self.progress(handle);
    }

    /// Restarts the timer, or stops it, and sends on.
    fn progress(&mut self, handle: Handle) {
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        if pair.state != QpState::ReadyToSend {
            return;
        }
        pair.send.deadline = None;
        self.pump(handle);
    }

    fn oldest_is_read(&self, handle: Handle) -> bool {
        self.pairs
            .get(handle)
            .and_then(|pair| pair.send.queue.front())
            .is_some_and(|work| work.request.opcode == RdmaOpcode::Read)
    }

    /// The oldest burst is answered.
    fn advance(&mut self, handle: Handle) {
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        let send = &mut pair.send;
        send.acked += 1;
        send.unacked_psn = (send.unacked_psn + 1) & PSN_MASK;
        send.in_flight -= 1;
        send.retries = 0;
        send.repeating = false;
        let done = send
            .queue
            .front()
            .is_some_and(|work| send.acked == work.bursts);
        if done {
            self.end_oldest(handle, WcStatus::Success, 0);
        }
    }

    /// Bytes of a READ: they are in place before the work completes.
    ///
    /// A peer whose packets are longer than the own path MTU is a length error here; one whose
    /// packets are shorter goes unnoticed, as on soft-RoCE.
    fn take_read(&mut self, handle: Handle, packet: &Packet, payload: &[u8]) {
        let Some(pair) = self.pairs.get(handle) else {
            return;
        };
        let Some(work) = pair.send.queue.front() else {
            return;
        };
        let own_mtu = pair.peer.map_or(0, |peer| peer.rtr.path_mtu.bytes());
        let longest = (payload.len() as u32).min(packet.mtu.bytes());
        let request = work.request;
        if request.opcode != RdmaOpcode::Read {
            return;
        }
        let burst_bytes = u64::from(pair.burst_bytes(self.options.packets_per_burst));
        let skip = u64::from(pair.send.acked) * burst_bytes;
        let expected = (request.bytes() - skip).min(burst_bytes);
        if longest > own_mtu || payload.len() as u64 != expected {
            return self.fail_oldest(handle, WcStatus::LocLenErr, 0);
        }
        let pieces = self.local_pieces(pair.nic, pair.pd, request.sges(), AccessFlags::LOCAL_WRITE);
        match pieces {
            Some(pieces) => {
                scatter(&pieces, skip, payload);
                self.advance(handle);
            }
            None => self.fail_oldest(handle, WcStatus::LocProtErr, 0),
        }
    }
}
