//! Whether all is well: what nodes say compared with what is there, in the fabric's own words.

use rerail_metadata::descriptor::{DeviceState, SegmentDescriptor};
use rerail_verbs::{Gid, GidType};

use super::link::lock;
use super::node::{Port, config, name, nic_number};
use super::store::member;
use super::world::{Host, World};
use crate::machine::rail::RailState;

impl World {
    /// Why all is not well yet; `None` if it is.
    pub(super) fn ailment(&self) -> Option<String> {
        for (at, host) in self.hosts.iter().enumerate() {
            let Some(node) = &host.node else {
                return Some(format!("n{at} is not running"));
            };
            if host.ghost.is_some() {
                return Some(format!("an older process of n{at} is there"));
            }
            // Not over with the fault that began it, and perhaps not noticed yet.
            let mut nics = host.nics.iter();
            if let Some(nic) = nics.position(|id| !self.fabric.hangs_for(*id).is_zero()) {
                return Some(format!("NIC {nic} of n{at} hangs"));
            }
            let truth = lock(&node.publisher).descriptor().clone();
            if self.store.record(&name(at)) != Some(&truth) {
                return Some(format!("the store's record of n{at} is not its own"));
            }
            let untrue = (0..host.nics.len()).find_map(|nic| self.untrue(at, nic, &truth));
            if let Some(untrue) = untrue {
                return Some(format!("n{at} says of its NIC {untrue}"));
            }
            for (to, other) in self.hosts.iter().enumerate().filter(|(to, _)| *to != at) {
                let there = other.node.as_ref();
                let there = there.map(|other| lock(&other.publisher).descriptor().clone());
                let Some(there) = there else {
                    return Some(format!("n{to} is not running"));
                };
                if node.peers.descriptor(&name(to)) != Some(&there) {
                    return Some(format!("n{at} does not know n{to} as it is"));
                }
                let peer = node.peers.peer(&name(to));
                let Some(known) = peer.and_then(|peer| node.known.get(&peer)) else {
                    return Some(format!("n{at} has no peer n{to}"));
                };
                let rails = known.peer.rails();
                if rails.len() != node.ports.len() * there.devices.len() {
                    return Some(format!("n{at} has {} rails to n{to}", rails.len()));
                }
                for rail in rails.iter() {
                    let own = nic_number(rail.local_name());
                    let far = rail.peer_nic();
                    let far = far.path.split_once('@');
                    let far = far.map_or(usize::MAX, |(_, nic)| nic_number(nic));
                    // One whose NIC was pulled out stays down.
                    let is_there = !host.out.contains(&own) && !other.out.contains(&far);
                    if is_there != (rail.state() == RailState::Up) {
                        let state = rail.state();
                        return Some(format!("n{at}: {rail} is {state:?}"));
                    }
                }
            }
            let registrations = &node.parts.registrations;
            let given_up = registrations.quarantined_bytes();
            let quarantined = given_up + node.connector.quarantined_bytes();
            // What a device has refused to destroy is there until it is closed.
            let mut controls = node.ports.iter().flat_map(|port| &port.controls);
            let refused = controls.any(|control| control.thread.failed_destructions() > 0);
            if quarantined > 0 && !refused {
                return Some(format!("n{at} has {quarantined} bytes quarantined"));
            }
            // One for each pair of NICs, whichever end opened it.
            let others = self.hosts.iter().enumerate().filter(|(to, _)| *to != at);
            let others: usize = others.map(|(_, other)| other.plugged()).sum();
            let (pairs, ends) = (host.plugged() * others, node.connector.endpoints());
            if ends != pairs {
                return Some(format!("n{at} has {ends} ends for {pairs} pairs of NICs"));
            }
        }
        self.left_over()
    }

    /// What a record says of a NIC that is not so; `None` if all of it is.
    fn untrue(&self, host: usize, nic: usize, record: &SegmentDescriptor) -> Option<String> {
        let of = &self.hosts[host];
        let (attr, rows) = self.fabric.port(of.nics[nic].port(1)).expect("its port");
        let is_it = |name: &str| nic_number(name) == nic;
        let said = record.devices.iter().find(|device| is_it(&device.name));
        let mut more = member(record)
            .into_iter()
            .flat_map(|member| &member.devices);
        let more = more.find(|device| is_it(&device.name));
        let (Some(said), Some(more)) = (said, more) else {
            // It was not there when the process began.
            let is_out = of.out.contains(&nic);
            return (!is_out).then(|| format!("{nic} nothing at all"));
        };
        let is_usable = !of.out.contains(&nic) && attr.state.is_active();
        let mut near = record.priority_matrix.values();
        let is_near = near.any(|nics| nics.preferred.iter().any(|name| is_it(name)));
        if is_near != is_usable || (more.state == DeviceState::Up) != is_usable {
            let state = &more.state;
            return Some(format!("{nic}: {state:?}, in the matrix: {is_near}"));
        }
        // One that is gone keeps the last text of its address.
        if !is_usable {
            return None;
        }
        let is_row = |gid: &Gid| {
            let mut rows = rows.iter();
            rows.any(|row| row.gid == *gid && row.gid_type == GidType::RoceV2)
        };
        let best = Gid::from_ip(self.address(host, nic));
        if said.gid != best || !is_row(&best) || !more.gids.iter().all(is_row) {
            let (gid, gids) = (said.gid, &more.gids);
            return Some(format!("{nic}: {gid} of {gids:?}, and it has {rows:?}"));
        }
        let mtu = attr.active_mtu.map_or(0, |mtu| mtu.bytes());
        if (said.lid, more.mtu) != (attr.lid, mtu) {
            let (lid, said) = (said.lid, more.mtu);
            return Some(format!("{nic}: LID {lid}, MTU {said} instead of {mtu}"));
        }
        None
    }

    /// What is there and belongs to nothing that is in use, in nodes and in the fabric; `None` if
    /// there is no such thing.
    fn left_over(&self) -> Option<String> {
        let nodes = || self.hosts.iter().filter_map(|host| host.node.as_ref());
        for port in nodes().flat_map(|node| &node.ports) {
            if let Some(left) = left_at(port) {
                return Some(left);
            }
        }
        let plugged = self.hosts.iter().map(Host::plugged).sum::<usize>();
        let ends = nodes()
            .map(|node| node.connector.endpoints())
            .sum::<usize>();
        // Those that an adapter refused to stop stay until it is closed.
        let controls = nodes().flat_map(|node| node.ports.iter().flat_map(|port| &port.controls));
        let refused = controls.map(|control| control.thread.failed_destructions());
        let pairs = ends * config().qp_per_endpoint as usize + refused.sum::<usize>();
        let stats = self.fabric.stats();
        let there = [
            ("contexts", stats.contexts, plugged),
            ("protection domains", stats.pds, plugged),
            ("completion queues", stats.completion_queues, plugged),
            // The node's memory, and what probes read to.
            ("regions", stats.regions, 2 * plugged),
            ("queue pairs", stats.queue_pairs, pairs),
        ];
        let mut there = there.into_iter();
        let wrong = there.find(|(_, there, wanted)| there != wanted);
        wrong.map(|(what, there, wanted)| format!("{there} {what} in the fabric, not {wanted}"))
    }
}

/// What is left at a NIC of openings that are over, or in quarantine.
fn left_at(port: &Port) -> Option<String> {
    let name = port.nic.name();
    let present = port.nic.opening();
    for control in &port.controls {
        let thread = &control.thread;
        let bytes = thread.quarantined_bytes();
        if bytes > 0 {
            return Some(format!("{name}: {bytes} bytes are in quarantine"));
        }
        let mut present = present.iter();
        if !present.any(|opening| opening.context().control().is_same(thread)) {
            return Some(format!(
                "{name}: the thread of an earlier opening is not closed"
            ));
        }
    }
    None
}
