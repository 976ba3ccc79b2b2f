//! The network: who has which address, who can reach whom, and the way of a packet.
//!
//! Deliberately not here: switches. A packet that has left its port arrives after the link's
//! latency, unless it is lost; congestion exists only where packets leave.

use std::sync::Arc;
use std::time::Duration;

use super::agenda::Due;
use super::core::Core;
use super::node::PortId;
use super::packet::{Address, InFlight, Packet};
use super::port::HEADER_BYTES;
use super::rule::{PacketVerdict, PacketView};
use super::trace::trace;
use crate::{Gid, LinkLayer};

/// Two groups of ports that cannot reach each other, in both directions or only from the first to
/// the second.
#[derive(Clone, Debug)]
pub(super) struct Partition {
    pub(super) id: u64,
    pub(super) from: Vec<PortId>,
    pub(super) to: Vec<PortId>,
    pub(super) both_ways: bool,
}

impl Partition {
    fn cuts(&self, from: PortId, to: PortId) -> bool {
        let cuts = |a: PortId, b: PortId| self.from.contains(&a) && self.to.contains(&b);
        cuts(from, to) || self.both_ways && cuts(to, from)
    }
}

impl Core {
    /// The port has the address now. Whoever claims last is the one that answers, as after a
    /// gratuitous ARP.
    pub(super) fn claim(&mut self, gid: Gid, at: PortId) {
        let owners = self.directory.entry(gid).or_default();
        owners.retain(|owner| *owner != at);
        owners.push(at);
        self.forget_neighbour(gid, at);
    }

    /// The port no longer has the address, unless another row still does.
    pub(super) fn disclaim(&mut self, gid: Gid, at: PortId) {
        if self.port(at).is_some_and(|port| port.gids.contains(&gid)) {
            return;
        }
        if let Some(owners) = self.directory.get_mut(&gid) {
            owners.retain(|owner| *owner != at);
            if owners.is_empty() {
                self.directory.remove(&gid);
            }
        }
        self.forget_neighbour(gid, at);
    }

    /// Neighbours are resolved anew after a change of the port.
    pub(super) fn forget_neighbours(&mut self, at: PortId) {
        let own: Vec<Gid> = match self.port(at) {
            Some(port) => port.gids.gids().collect(),
            None => Vec::new(),
        };
        self.neighbours
            .retain(|(port, gid)| *port != at && !own.contains(gid));
    }

    fn forget_neighbour(&mut self, gid: Gid, at: PortId) {
        self.neighbours
            .retain(|(port, neighbour)| *port != at && *neighbour != gid);
    }

    pub(super) fn is_partitioned(&self, from: PortId, to: PortId) -> bool {
        self.partitions
            .iter()
            .any(|partition| partition.cuts(from, to))
    }

    /// The port that would get a packet with that destination now.
    pub(super) fn route(&self, from: PortId, destination: Address) -> Option<PortId> {
        let segment = self.port(from)?.segment;
        let reachable = |to: &PortId| {
            self.is_up(*to)
                && self.port(*to).is_some_and(|port| port.segment == segment)
                && !self.is_partitioned(from, *to)
        };
        match destination {
            Address::Gid(gid) => self
                .directory
                .get(&gid)?
                .iter()
                .rev()
                .copied()
                .find(reachable),
            Address::Lid(lid) => self.ports().find(|to| {
                let infiniband = self.port(*to).is_some_and(|port| {
                    port.link_layer == LinkLayer::InfiniBand && port.lid == lid
                });
                infiniband && reachable(to)
            }),
        }
    }

    fn ports(&self) -> impl Iterator<Item = PortId> {
        self.nics.iter().enumerate().flat_map(|(nic, device)| {
            (1..=device.ports.len() as u32).map(move |port| PortId {
                nic: super::node::NicId(nic),
                port,
            })
        })
    }

    /// Hands a packet to its port. It is on its own from here: what becomes of the queue pair that
    /// sent it does not matter any more.
    ///
    /// The destination is looked up once, when the packet is handed over. Packets that are too
    /// long for an interface on the way are lost without a word, as with a silent change of MTU.
    pub(super) fn send(&mut self, packet: Packet) {
        let (from, psn, bytes) = (packet.from, packet.psn, packet.body.payload_bytes());
        let kind = packet.body.kind();
        let sourced = self.port(from).is_some_and(|port| match packet.source {
            Address::Gid(gid) => port.gids.contains(&gid),
            Address::Lid(lid) => port.lid == lid,
        });
        let route = self.route(from, packet.destination);
        let Some(to) = route.filter(|_| sourced && self.is_up(from)) else {
            trace!(
                self,
                "{kind:?} psn={psn} bytes={bytes} from {} {}: no way to {:?}",
                self.nic_name(from.nic),
                from.port,
                packet.destination
            );
            return;
        };
        let frame = bytes.min(packet.mtu.bytes()) + HEADER_BYTES;
        let fits = [from, to].into_iter().all(|at| {
            self.port(at).is_some_and(|port| {
                port.link_layer == LinkLayer::InfiniBand || frame <= port.netdev_mtu_bytes
            })
        });
        let verdict = self.judge_packet(&PacketView {
            from,
            to,
            source: packet.source.gid(),
            destination: packet.destination.gid(),
            kind,
            dest_qp_num: packet.dest_qp_num,
            psn,
            bytes,
            now: self.now,
        });
        let (now, lifetime) = (self.now, self.options.packet_lifetime);
        let Some(port) = self.port_mut(from) else {
            return;
        };
        let link = port.link.clone();
        let fits = fits && link.frame_bytes_max.is_none_or(|max| frame <= max);
        let headers = HEADER_BYTES * bytes.div_ceil(packet.mtu.bytes()).max(1);
        let bits = u64::from(bytes + headers) * 8;
        let sending_ns = u128::from(bits) * 1_000_000_000 / u128::from(link.bits_per_s.max(1));
        port.busy_until = now.max(port.busy_until) + Duration::from_nanos(sending_ns as u64);
        let departs = port.busy_until.saturating_add(link.egress_delay);
        let lost = self.rng.chance(link.loss);
        let jitter = self.rng.between(Duration::ZERO, link.jitter_max);
        if verdict == PacketVerdict::Drop || lost || !fits {
            let why = if fits { "lost" } else { "too long" };
            trace!(self, "{kind:?} psn={psn} bytes={bytes}: {why}");
            return;
        }
        let mut arrival = departs.saturating_add(link.latency + jitter);
        if let PacketVerdict::Delay(delay) = verdict {
            // Not kept in order on purpose: this is how a test reorders.
            arrival = arrival.saturating_add(delay);
        } else if let Some(port) = self.port_mut(from) {
            arrival = arrival.max(port.last_arrival);
            port.last_arrival = arrival;
        }
        let dies = departs.saturating_add(lifetime);
        let arrives = arrival <= dies;
        let copies = 1 + u32::from(verdict == PacketVerdict::Duplicate);
        let packet = Arc::new(packet);
        for _ in 0..copies {
            let number = self.next_packet;
            self.next_packet += 1;
            trace!(
                self,
                "{kind:?} #{number} psn={psn} bytes={bytes} {} {} to {} {} qp={} at {}",
                self.nic_name(from.nic),
                from.port,
                self.nic_name(to.nic),
                to.port,
                packet.dest_qp_num,
                arrival.min(dies).as_nanos()
            );
            self.packets.insert(
                number,
                InFlight {
                    packet: Arc::clone(&packet),
                    to,
                    departs,
                    arrives,
                },
            );
            self.agenda.push(arrival.min(dies), Due::Arrive(number));
        }
    }

    /// Drops the packets that have not left the port; those on the wire go on.
    pub(super) fn purge_egress(&mut self, at: PortId) {
        let now = self.now;
        let before = self.packets.len();
        self.packets
            .retain(|_, flight| flight.packet.from != at || flight.departs <= now);
        let purged = before - self.packets.len();
        let packets = &self.packets;
        self.agenda.retain(|due| match due {
            Due::Arrive(number) => packets.contains_key(number),
            _ => true,
        });
        if let Some(port) = self.port_mut(at) {
            port.busy_until = now;
        }
        if purged > 0 {
            trace!(
                self,
                "purged {purged} of {} {}",
                self.nic_name(at.nic),
                at.port
            );
        }
    }

    /// The number of a packet is due: it arrives, or its life ends.
    pub(super) fn arrive(&mut self, number: u64) {
        let Some(flight) = self.packets.remove(&number) else {
            return;
        };
        let InFlight {
            packet,
            to,
            arrives,
            ..
        } = flight;
        let owned = self.port(to).is_some_and(|port| match packet.destination {
            Address::Gid(gid) => port.gids.contains(&gid),
            Address::Lid(lid) => port.lid == lid,
        });
        let why = if !arrives {
            "its life is over"
        } else if !self.is_up(to) {
            "the port is down"
        } else if !owned {
            "the address is not there"
        } else if self.is_partitioned(packet.from, to) {
            "there is no way"
        } else {
            self.receive(number, to, &packet);
            return;
        };
        trace!(self, "#{number} lost: {why}");
    }
}
