//! The receiving half of a queue pair: what an adapter does by itself, whatever its process does.

use super::core::Core;
use super::event::Element;
use super::node::PortId;
use super::packet::{Body, Nak, PSN_MASK, Packet, Target, psn_ahead};
use super::slab::Handle;
use super::trace::trace;
use crate::{AccessFlags, AsyncEventKind, QpState};

impl Core {
    /// A packet is at its port. It goes to whichever pair has its number *now*: if the number was
    /// given out again, the addresses agree and the packet number is the expected one, then a
    /// packet from a dead connection is taken for one of the new, as in the real protocol.
    pub(super) fn receive(&mut self, number: u64, to: PortId, packet: &Packet) {
        let handle = self.nics[to.nic.0].pairs.get(&packet.dest_qp_num).copied();
        let taker = handle.filter(|handle| self.takes(*handle, to, packet));
        let Some(handle) = taker else {
            trace!(self, "#{number} lost: no pair takes it");
            return;
        };
        trace!(self, "#{number} arrives");
        match packet.body {
            Body::Write { .. } | Body::ReadRequest { .. } => self.serve(handle, packet),
            Body::ReadResponse { .. } | Body::Ack | Body::Nak(_) => self.answer(handle, packet),
        }
    }

    /// State, port, addresses and P_Key agree.
    fn takes(&self, handle: Handle, to: PortId, packet: &Packet) -> bool {
        let Some(pair) = self.pairs.get(handle) else {
            return false;
        };
        let ready = matches!(
            pair.state,
            QpState::ReadyToReceive | QpState::ReadyToSend | QpState::SendQueueDrain
        );
        let Some((own, theirs)) = pair.peer.and_then(|peer| self.addresses(pair, &peer)) else {
            return false;
        };
        let own_pkey = self.port(to).and_then(|port| {
            let index = usize::from(pair.pkey_index);
            port.pkeys.get(index).copied()
        });
        // The upper bit tells members with full rights from those with few.
        let same_pkey = own_pkey.is_some_and(|own| own & 0x7fff == packet.pkey & 0x7fff)
            && packet.pkey & 0x7fff != 0;
        ready
            && pair.at() == to
            && packet.source == theirs
            && packet.destination == own
            && same_pkey
    }

    /// Carries out a request, or refuses it.
    fn serve(&mut self, handle: Handle, packet: &Packet) {
        let comm_est = self.options.comm_est_events;
        let Some(pair) = self.pairs.get_mut(handle) else {
            return;
        };
        let nic = pair.nic;
        let first = !std::mem::replace(&mut pair.established, true);
        let announce = first && comm_est && pair.state == QpState::ReadyToReceive;
        let expected = pair.expected_psn;
        if announce {
            self.raise(nic, AsyncEventKind::CommEst, Element::QueuePair(handle));
        }
        let duplicate = match psn_ahead(packet.psn, expected) {
            Some(0) => false,
            None => true,
            Some(_) => {
                let Some(pair) = self.pairs.get_mut(handle) else {
                    return;
                };
                if !std::mem::replace(&mut pair.nak_sent, true) {
                    self.reply(handle, expected, Body::Nak(Nak::Sequence));
                }
                return;
            }
        };
        let outcome = match &packet.body {
            // Its bytes are there, and what came after may have changed them since.
            Body::Write { .. } if duplicate => {
                let last = expected.wrapping_sub(1) & PSN_MASK;
                return self.reply(handle, last, Body::Ack);
            }
            Body::Write {
                target,
                skip,
                payload,
            } => self.serve_write(handle, packet, target, *skip, payload),
            Body::ReadRequest {
                target,
                skip,
                length,
                in_flight,
            } => self.serve_read(handle, target, *skip, *length, *in_flight),
            Body::ReadResponse { .. } | Body::Ack | Body::Nak(_) => return,
        };
        if !duplicate && let Some(pair) = self.pairs.get_mut(handle) {
            pair.nak_sent = false;
            if outcome.is_ok() {
                pair.expected_psn = (expected + 1) & PSN_MASK;
            }
        }
        match outcome {
            Ok(body) => self.reply(handle, packet.psn, body),
            Err(nak) => self.refuse(handle, packet.psn, nak),
        }
    }

    fn serve_write(
        &mut self,
        handle: Handle,
        packet: &Packet,
        target: &Target,
        skip: u64,
        payload: &[u8],
    ) -> Result<Body, Nak> {
        let pair = self.pairs.get(handle).ok_or(Nak::InvalidRequest)?;
        let own_mtu = pair.peer.map_or(0, |peer| peer.rtr.path_mtu.bytes());
        let sent_mtu = packet.mtu.bytes();
        // Each packet but the last must fill the path MTU, and none exceed it.
        let fits = if target.length > u64::from(sent_mtu.min(own_mtu)) {
            sent_mtu == own_mtu
        } else {
            true
        };
        if !fits || !pair.access.contains(AccessFlags::REMOTE_WRITE) {
            return Err(Nak::InvalidRequest);
        }
        if target.length > 0 {
            let range = (target.addr, target.length);
            let access = AccessFlags::REMOTE_WRITE;
            let piece = self
                .remote_piece(pair.nic, pair.pd, target.rkey, range, access)
                .ok_or(Nak::RemoteAccess)?;
            piece.copy_in(skip as usize, payload);
        }
        Ok(Body::Ack)
    }

    fn serve_read(
        &mut self,
        handle: Handle,
        target: &Target,
        skip: u64,
        length: u32,
        in_flight: u32,
    ) -> Result<Body, Nak> {
        let pair = self.pairs.get(handle).ok_or(Nak::InvalidRequest)?;
        let served_max = pair
            .peer
            .map_or(0, |peer| u32::from(peer.rtr.max_dest_rd_atomic));
        if in_flight > served_max || !pair.access.contains(AccessFlags::REMOTE_READ) {
            return Err(Nak::InvalidRequest);
        }
        let mut payload = vec![0; length as usize];
        if target.length > 0 {
            let range = (target.addr, target.length);
            let access = AccessFlags::REMOTE_READ;
            let piece = self
                .remote_piece(pair.nic, pair.pd, target.rkey, range, access)
                .ok_or(Nak::RemoteAccess)?;
            piece.copy_out(skip as usize, &mut payload);
        }
        Ok(Body::ReadResponse { payload })
    }

    fn reply(&mut self, handle: Handle, psn: u32, body: Body) {
        if let Some(packet) = self.packet(handle, psn, body) {
            self.send(packet);
        }
    }

    /// Refuses for good: the pair goes to ERR, on cards with an event.
    fn refuse(&mut self, handle: Handle, psn: u32, nak: Nak) {
        self.reply(handle, psn, Body::Nak(nak));
        let kind = match nak {
            Nak::RemoteAccess => AsyncEventKind::QpAccessErr,
            Nak::Sequence | Nak::InvalidRequest => AsyncEventKind::QpReqErr,
        };
        let nic = self.pairs.get(handle).map(|pair| pair.nic);
        if let Some(nic) = nic.filter(|_| self.options.responder_events) {
            self.raise(nic, kind, Element::QueuePair(handle));
        }
        self.enter_error(handle);
    }
}
