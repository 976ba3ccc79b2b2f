//! What a test does to a fabric while it runs.

use std::net::IpAddr;
use std::time::Duration;

use super::event::Element;
use super::fabric::Fabric;
use super::link::Partition;
use super::node::{NicId, PortId, ProcessId};
use super::options::{EventOptions, LinkOptions};
use super::rule::{
    EventVerdict, EventView, PacketVerdict, PacketView, PostVerdict, Rule, WorkVerdict, WorkView,
};
use crate::{AsyncEventKind, Gid};

/// A fault in force. Dropping it ends the fault.
#[derive(Debug)]
#[must_use = "the fault ends when its guard is dropped"]
pub struct FaultGuard {
    fabric: Fabric,
    undo: Option<Undo>,
}

#[derive(Debug)]
enum Undo {
    Rule(u64),
    Partition(u64),
    Link(PortId, LinkOptions),
    Events(EventOptions),
    Stopping(NicId),
    Deregistering(NicId),
}

impl FaultGuard {
    /// Leaves the fault in force for good.
    pub fn keep(mut self) {
        self.undo = None;
    }

    /// Ends the fault.
    pub fn undo(self) {}
}

impl Drop for FaultGuard {
    fn drop(&mut self) {
        let Some(undo) = self.undo.take() else {
            return;
        };
        self.fabric.with(|core| match undo {
            Undo::Rule(id) => core.rules.remove(id),
            Undo::Partition(id) => core.partitions.retain(|partition| partition.id != id),
            Undo::Link(at, link) => {
                core.set_link(at, link);
            }
            Undo::Events(events) => core.options.events = events,
            Undo::Stopping(nic) => core.set_refuses_to_stop(nic, false),
            Undo::Deregistering(nic) => core.set_refuses_to_deregister(nic, false),
        });
    }
}

/// Faults that are there until they are undone.
impl Fabric {
    /// Judges every packet that leaves a port, while the guard lives.
    pub fn on_packet(
        &self,
        judge: impl FnMut(&PacketView) -> PacketVerdict + Send + 'static,
    ) -> FaultGuard {
        self.add_rule(Rule::Packet(Box::new(judge)))
    }

    /// Judges every work request that is posted and that there is room for, while the guard lives.
    pub fn on_post(
        &self,
        judge: impl FnMut(&WorkView) -> PostVerdict + Send + 'static,
    ) -> FaultGuard {
        self.add_rule(Rule::Post(Box::new(judge)))
    }

    /// Refuses work that is posted on an adapter with an error number, once so many more requests
    /// were taken, while the guard lives: a call that goes beyond them is taken in part.
    pub fn refuse_posts(&self, nic: NicId, after: u32, errno: i32) -> FaultGuard {
        let mut left = after;
        self.on_post(move |work| {
            if work.nic != nic {
                return PostVerdict::Pass;
            }
            let Some(rest) = left.checked_sub(1) else {
                return PostVerdict::Refuse(errno);
            };
            left = rest;
            PostVerdict::Pass
        })
    }

    /// Judges every work request that a device begins with, while the guard lives.
    pub fn on_work(
        &self,
        judge: impl FnMut(&WorkView) -> WorkVerdict + Send + 'static,
    ) -> FaultGuard {
        self.add_rule(Rule::Work(Box::new(judge)))
    }

    /// Judges every event for every context, while the guard lives.
    pub fn on_event(
        &self,
        judge: impl FnMut(&EventView) -> EventVerdict + Send + 'static,
    ) -> FaultGuard {
        self.add_rule(Rule::Event(Box::new(judge)))
    }

    /// Cuts two groups of ports off from each other, both ways. Packets on their way are lost.
    pub fn partition(&self, one: &[PortId], other: &[PortId]) -> FaultGuard {
        self.add_partition(one, other, true)
    }

    /// Loses what goes from one group of ports to another; the way back stays open.
    pub fn block(&self, from: &[PortId], to: &[PortId]) -> FaultGuard {
        self.add_partition(from, to, false)
    }

    /// Replaces a port's link: bandwidth, latency, loss.
    pub fn degrade(&self, at: PortId, link: LinkOptions) -> FaultGuard {
        let before = self.with(|core| core.set_link(at, link));
        self.guard(Undo::Link(at, before))
    }

    /// Replaces the faults of all event queues.
    pub fn disturb_events(&self, events: EventOptions) -> FaultGuard {
        let before = self.with(|core| std::mem::replace(&mut core.options.events, events));
        self.guard(Undo::Events(before))
    }

    /// Refuses with `EIO` to move queue pairs of an adapter to ERR and to destroy them, as firmware
    /// may that lost track of them. They go on working until their context is closed or dies. RESET
    /// is not refused.
    pub fn refuse_to_stop(&self, nic: NicId) -> FaultGuard {
        self.with(|core| core.set_refuses_to_stop(nic, true));
        self.guard(Undo::Stopping(nic))
    }

    /// Refuses with `EIO` to deregister memory of an adapter: it can be read and written by peers
    /// that know its key until its context is closed or dies.
    pub fn refuse_to_deregister(&self, nic: NicId) -> FaultGuard {
        self.with(|core| core.set_refuses_to_deregister(nic, true));
        self.guard(Undo::Deregistering(nic))
    }

    fn add_rule(&self, rule: Rule) -> FaultGuard {
        let id = self.with(|core| core.rules.add(rule));
        self.guard(Undo::Rule(id))
    }

    fn add_partition(&self, from: &[PortId], to: &[PortId], both_ways: bool) -> FaultGuard {
        let id = self.with(|core| {
            let id = core.next_partition;
            core.next_partition += 1;
            core.partitions.push(Partition {
                id,
                from: from.to_vec(),
                to: to.to_vec(),
                both_ways,
            });
            id
        });
        self.guard(Undo::Partition(id))
    }

    fn guard(&self, undo: Undo) -> FaultGuard {
        FaultGuard {
            fabric: self.clone(),
            undo: Some(undo),
        }
    }
}

/// Things that happen once. Calls that name a port panic when the adapter has no such port.
impl Fabric {
    /// Takes a port down, as `ip link set … down`: `PORT_ERR`. Packets that have not left it are
    /// purged, those on the wire arrive. IPv6 addresses that are not link-local vanish.
    pub fn port_down(&self, at: PortId) {
        self.with(|core| core.set_port(at, false));
    }

    /// Brings a port up: `PORT_ACTIVE`, on soft-RoCE twice.
    pub fn port_up(&self, at: PortId) {
        self.with(|core| core.set_port(at, true));
    }

    /// Adds an address to a port's interface: a row at the first free index, and `GID_CHANGE`.
    /// Another host that has the address loses it in practice: packets come here from now on. False
    /// when the table is full.
    pub fn add_address(&self, at: PortId, address: IpAddr) -> bool {
        self.add_gid(at, Gid::from_ip(address), None)
    }

    /// Adds a row of an interface over the port, such as a VLAN or an overlay; `None` is the port's
    /// own interface.
    pub fn add_gid(&self, at: PortId, gid: Gid, netdev: Option<&str>) -> bool {
        self.with(|core| core.add_gid(at, gid, netdev))
    }

    /// Deletes an address: its row becomes a hole, later rows keep their index, and `GID_CHANGE`.
    /// False when the port does not have it.
    pub fn delete_address(&self, at: PortId, address: IpAddr) -> bool {
        self.with(|core| core.delete_gid(at, Gid::from_ip(address)))
    }

    /// Gives an InfiniBand port another LID: `LID_CHANGE`.
    pub fn set_lid(&self, at: PortId, lid: u16) {
        self.with(|core| core.set_lid(at, lid));
    }

    /// Replaces a port's P_Key table: `PKEY_CHANGE`.
    pub fn set_pkeys(&self, at: PortId, pkeys: &[u16]) {
        self.with(|core| core.set_pkeys(at, pkeys.to_vec()));
    }

    /// Changes the MTU of a port's interface. There is no event, and packets that are too long are
    /// lost.
    pub fn set_netdev_mtu(&self, at: PortId, bytes: u32) {
        self.with(|core| core.set_netdev_mtu(at, bytes));
    }

    /// Changes the speed that a port reports, in verbs codes: `DEVICE_SPEED_CHANGE`.
    pub fn set_speed(&self, at: PortId, active_width: u8, active_speed: u32) {
        self.with(|core| core.set_speed(at, active_width, active_speed));
    }

    /// Changes the longest message that a port reports, as other firmware may: there is no event.
    pub fn set_max_msg_bytes(&self, at: PortId, bytes: u32) {
        self.with(|core| core.set_max_msg_bytes(at, bytes));
    }

    /// Raises an event that nothing has caused, such as `SM_CHANGE` or one of an unknown kind:
    /// about a port, or about the device.
    pub fn raise_event(&self, nic: NicId, kind: AsyncEventKind, port: Option<u32>) {
        let element = port.map_or(Element::Device, Element::Port);
        self.with(|core| core.raise(nic, kind, element));
    }

    /// Breaks one queue pair: `QP_FATAL`, and the error state. False when there is none of that
    /// number.
    pub fn break_queue_pair(&self, nic: NicId, qp_num: u32) -> bool {
        self.with(|core| {
            let Some(pair) = core.nics[nic.0].pairs.get(&qp_num).copied() else {
                return false;
            };
            core.enter_error(pair);
            core.raise(nic, AsyncEventKind::QpFatal, Element::QueuePair(pair));
            true
        })
    }

    /// Loses the next `count` events of each context that is open on the adapter.
    pub fn drop_events(&self, nic: NicId, count: u32) {
        self.with(|core| {
            for handle in core.contexts.handles(|context| context.nic == nic) {
                if let Some(context) = core.contexts.get_mut(handle) {
                    context.events.drop_next += count;
                }
            }
        });
    }

    /// Every control verb on the adapter hangs for `how_long` from now. Posting and polling go on.
    pub fn hang_control(&self, nic: NicId, how_long: Duration) {
        self.with(|core| core.hang_control(nic, how_long));
    }

    /// Kills a device: `DEVICE_FATAL`, and `EIO` from every call on contexts that are open. It
    /// cannot be opened until it is reset. What it had sent arrives.
    pub fn kill_device(&self, nic: NicId) {
        self.with(|core| core.kill_nic(nic));
        self.announce();
    }

    /// Resets a device: contexts that are open die, new ones work.
    pub fn reset_device(&self, nic: NicId) {
        self.with(|core| core.reset_nic(nic));
        self.announce();
    }

    /// Pulls an adapter out: it dies and leaves the list of devices.
    pub fn unplug(&self, nic: NicId) {
        self.with(|core| core.set_plugged(nic, false));
        self.announce();
    }

    /// Puts an adapter back.
    pub fn plug(&self, nic: NicId) {
        self.with(|core| core.set_plugged(nic, true));
        self.announce();
    }

    /// Stops a process. Its adapters go on answering its peers. In virtual time a call of a frozen
    /// process panics; in real time it waits until the process is thawed.
    pub fn freeze(&self, process: ProcessId) {
        self.with(|core| core.set_frozen(process, true));
    }

    /// Lets a frozen process run again.
    pub fn thaw(&self, process: ProcessId) {
        self.with(|core| core.set_frozen(process, false));
        self.announce();
    }

    /// Ends a process: all its objects are gone at once, what it had sent arrives. Calls on what is
    /// left of its objects are `EIO`.
    pub fn kill_process(&self, process: ProcessId) {
        self.with(|core| core.kill_process(process));
        self.announce();
    }
}
