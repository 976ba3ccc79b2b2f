//! Faults: what is broken, and when it is put right.

use std::net::IpAddr;
use std::time::Duration;

use crate::TransferError;
use crate::machine::Machine;
use crate::machine::peers;
use crate::machine::publisher;
use crate::machine::seen::Named as _;
use rand::Rng as _;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rerail_verbs::sim::{
    EventOptions, FaultGuard, LinkOptions, NicId, PacketVerdict, PortId, PostVerdict, WorkVerdict,
};
use rerail_verbs::{AsyncEventKind, WcStatus};
use rustix::io::Errno;

use super::fault::Fault;
use super::ledger::{Life, TransferId};
use super::link::lock;
use super::node::{Node, name, nic_name};
use super::world::{Coming, World};

/// A fault of which there is one at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Exclusive {
    Link(PortId),
    /// Readings of the port fail.
    Reading(NicId),
    Events,
    Messages,
    Store,
}

/// The end of a fault.
pub(super) enum End {
    PortUp(PortId),
    Guard(u64),
    Free(Exclusive),
    Reset {
        host: usize,
        nic: usize,
    },
    /// A device dies, and is reset some time later.
    Dies {
        host: usize,
        nic: usize,
    },
    /// A peer is of interest again.
    Open {
        host: usize,
        peer: usize,
    },
    Plug {
        host: usize,
        nic: usize,
    },
    StoreBack,
    StoreSpeaks,
    StoreRemembers,
    Start(usize),
    Thaw(usize),
    Speak(usize, usize),
    Mtu(PortId),
    Pkeys(PortId),
    Address {
        host: usize,
        nic: usize,
    },
    AddressAt {
        host: usize,
        nic: usize,
        filler: IpAddr,
    },
    /// A process that has lost its name is awake again, or sees the store again.
    Awake(Life),
    /// The user of a process that has lost its name for good ends it.
    Over(Life),
    StoreFast,
}

/// Divides by any number of NICs that a host may have.
const NICS_LCM: usize = 60;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

impl World {
    pub(super) fn until(&mut self, after: Duration, end: End) {
        self.order += 1;
        self.ends.insert((self.now + after, self.order), end);
    }

    fn guard(&mut self, after: Duration, guard: FaultGuard) {
        self.order += 1;
        let id = self.order;
        self.guards.insert(id, guard);
        self.until(after, End::Guard(id));
    }

    /// What becomes of the next `count` work requests of a NIC.
    fn judge_first(&self, count: u32, nic: NicId, verdict: WorkVerdict) -> FaultGuard {
        let mut left = count;
        self.fabric.on_work(move |work| {
            if left > 0 && work.nic == nic {
                left -= 1;
                verdict
            } else {
                WorkVerdict::Pass
            }
        })
    }

    /// One of these at a time: a guard puts back what it found.
    fn degrade(&mut self, span: Duration, port: PortId, link: LinkOptions) -> bool {
        if !self.exclusive.insert(Exclusive::Link(port)) {
            return false;
        }
        let guard = self.fabric.degrade(port, link);
        self.guard(span, guard);
        self.until(span, End::Free(Exclusive::Link(port)));
        true
    }

    pub(super) fn address(&self, host: usize, nic: usize) -> IpAddr {
        let last = self.hosts[host].addresses[nic];
        IpAddr::from([10, host as u8, nic as u8, last])
    }

    /// Breaks something. What is drawn for it is its own, so that others do not depend on it.
    pub(super) fn make_fault(&mut self, number: u32, mut rng: SmallRng) {
        let host = rng.random_range(0..self.hosts.len());
        // As many draws whether or not a NIC has come.
        let nic = rng.random_range(0..NICS_LCM) % self.hosts[host].nics.len();
        let id = self.hosts[host].nics[nic];
        let port = id.port(1);
        let other = (host + rng.random_range(1..self.hosts.len())) % self.hosts.len();
        let far = &self.hosts[other].nics;
        let far = far[rng.random_range(0..NICS_LCM) % far.len()];
        let span = ms(rng.random_range(5..3_000));
        let kind = match rng.random_range(0..45) {
            0..3 => {
                self.fabric.port_down(port);
                self.until(span, End::PortUp(port));
                // Work reaches the data threads as their gate closes.
                for read in [false, true] {
                    self.submit_one(host, other, read, ms(3_000), &mut rng);
                }
                Fault::PortFlap
            }
            3..5 => {
                self.fabric.delete_address(port, self.address(host, nic));
                let last = &mut self.hosts[host].addresses[nic];
                *last = last.wrapping_add(1).max(1);
                let pause = ms(rng.random_range(0..40));
                self.until(pause, End::Address { host, nic });
                Fault::Renumber
            }
            5 => {
                let address = self.address(host, nic);
                self.fabric.delete_address(port, address);
                let filler = IpAddr::from([172, 16, host as u8, rng.random_range(1..250)]);
                self.fabric.add_address(port, filler);
                self.until(ms(3), End::AddressAt { host, nic, filler });
                Fault::GidMoves
            }
            6 => {
                let link = LinkOptions {
                    loss: 0.05,
                    ..LinkOptions::default()
                };
                if !self.degrade(span, port, link) {
                    return;
                }
                Fault::Loss
            }
            7 => {
                let egress_delay = ms(rng.random_range(1..1_200));
                let link = LinkOptions {
                    egress_delay,
                    ..LinkOptions::default()
                };
                if !self.degrade(span, port, link) {
                    return;
                }
                Fault::SlowWire
            }
            8 | 9 => {
                let guard = self.fabric.partition(&[port], &[far.port(1)]);
                self.guard(span, guard);
                Fault::Partition
            }
            10 => {
                self.fabric.drop_events(id, rng.random_range(1..4));
                Fault::LostEvents
            }
            11 => {
                let events = EventOptions {
                    loss: 0.2,
                    duplicate: 0.3,
                    delay_max: ms(30),
                    reorder_kinds: true,
                    ..EventOptions::faultless()
                };
                if !self.exclusive.insert(Exclusive::Events) {
                    return;
                }
                let guard = self.fabric.disturb_events(events);
                self.guard(span, guard);
                self.until(span, End::Free(Exclusive::Events));
                Fault::DisturbedEvents
            }
            12 => {
                self.fabric
                    .hang_control(id, ms(rng.random_range(200..5_000)));
                Fault::HungVerbs
            }
            13 => {
                self.fabric.kill_device(id);
                self.until(span, End::Reset { host, nic });
                Fault::DeadDevice
            }
            14 => {
                let guard = self.judge_first(1, id, WorkVerdict::LoseCompletion);
                self.guard(span, guard);
                Fault::LostCompletion
            }
            15 => {
                let statuses = [
                    WcStatus::RemAccessErr,
                    WcStatus::LocQpOpErr,
                    WcStatus::RemOpErr,
                    WcStatus::RetryExcErr,
                    WcStatus::LocLenErr,
                    WcStatus::LocProtErr,
                    WcStatus::LocAccessErr,
                ];
                let status = *statuses.choose(&mut rng).expect("one");
                let guard = self.judge_first(1, id, WorkVerdict::Fail(status, 0));
                self.guard(span, guard);
                self.blame.failed(host, status);
                Fault::FailedWork
            }
            16 => {
                let mut count = 0_u32;
                let guard = self.fabric.on_packet(move |_| {
                    count = count.wrapping_add(1);
                    match count % 17 {
                        0 => PacketVerdict::Delay(Duration::from_millis(700)),
                        5 => PacketVerdict::Duplicate,
                        _ => PacketVerdict::Pass,
                    }
                });
                self.guard(span, guard);
                Fault::LatePackets
            }
            17 => {
                self.store.away = true;
                self.until(span, End::StoreBack);
                Fault::StoreOutage
            }
            18 => {
                self.store.empty();
                self.tell_all(&peers::Input::WatchResync);
                self.tell_publishers(&publisher::Input::StoreReconnected);
                Fault::StoreEmptied
            }
            19 => {
                self.store.silent = true;
                self.until(span, End::StoreSpeaks);
                Fault::StoreForgetsToTell
            }
            20 => {
                self.store.forgets_answers = true;
                self.until(span, End::StoreRemembers);
                Fault::StoreLosesAnAnswer
            }
            21 => {
                if self.hosts[host].node.is_none() {
                    return;
                }
                self.kill(host);
                self.until(span, End::Start(host));
                Fault::Killed
            }
            22 => {
                let Some(node) = self.node(host).filter(|node| !node.frozen) else {
                    return;
                };
                node.frozen = true;
                let process = node.process;
                self.fabric.freeze(process);
                self.until(span, End::Thaw(host));
                Fault::Frozen
            }
            23 => {
                let now = self.now;
                let Some(node) = self.node(host).filter(|node| !node.frozen) else {
                    return;
                };
                lock(&node.publisher).handle(now, publisher::Input::Leave);
                self.settle(host);
                // It goes when the store has let it; should the store be away, it is ended.
                self.until(span + ms(500), End::Start(host));
                Fault::Left
            }
            24 => {
                self.muted.insert((host, other));
                self.until(span, End::Speak(host, other));
                Fault::SilentMessages
            }
            25 => {
                self.fabric.set_netdev_mtu(port, 1_500);
                self.until(span, End::Mtu(port));
                Fault::Mtu
            }
            26 => {
                self.fabric.set_pkeys(port, &[0x8001]);
                self.until(span, End::Pkeys(port));
                Fault::Pkeys
            }
            27 => {
                let Some(node) = self.hosts[host].node.as_ref().filter(|node| !node.frozen) else {
                    return;
                };
                let path = format!("{}@{}", name(host), nic_name(nic as u32));
                let numbers = node.outbox.pairs(&path);
                let Some(number) = numbers.choose(&mut rng).copied() else {
                    return;
                };
                self.fabric.break_queue_pair(id, number);
                Fault::BrokenQueuePair
            }
            30 | 31 => {
                // Together with a slow wire: work lands long after its sender has given it up,
                // at a peer that has not heard of it.
                if !self.exclusive.insert(Exclusive::Messages) {
                    return;
                }
                self.slow_messages = ms(rng.random_range(10..900));
                self.until(span, End::Free(Exclusive::Messages));
                Fault::SlowMessages
            }
            32 | 33 => {
                // Both at once: what is given up lands late, at a peer that has not heard of it.
                if !self.exclusive.insert(Exclusive::Messages) {
                    return;
                }
                self.slow_messages = ms(rng.random_range(600..1_500));
                self.until(ms(3_000), End::Free(Exclusive::Messages));
                let egress_delay = ms(rng.random_range(400..1_500));
                let link = LinkOptions {
                    egress_delay,
                    ..LinkOptions::default()
                };
                self.degrade(ms(3_000), port, link);
                Fault::LateWork
            }
            34..37 => {
                // The far end begins to close, and its queue pairs stop later: what the near end
                // has given up by then still lands there.
                let egress_delay = ms(rng.random_range(300..1_200));
                let link = LinkOptions {
                    egress_delay,
                    ..LinkOptions::default()
                };
                if !self.degrade(ms(2_500), port, link) {
                    return;
                }
                self.fabric
                    .hang_control(far, ms(rng.random_range(400..2_500)));
                for _ in 0..4 {
                    let deadline = ms(rng.random_range(400..1_500));
                    self.submit_one(host, other, false, deadline, &mut rng);
                }
                let guard = self.judge_first(1, far, WorkVerdict::Fail(WcStatus::RetryExcErr, 0));
                self.guard(ms(100), guard);
                self.submit_one(other, host, false, ms(2_000), &mut rng);
                Fault::LateClose
            }
            29 => {
                // Only its own transfers would fail by that, and it has none. A registration that
                // hangs is not for here.
                let mut hangs = self.hosts[host].nics.iter();
                let hangs = hangs.any(|id| !self.fabric.hangs_for(*id).is_zero());
                let node = self.hosts[host].node.as_mut();
                let idle = |node: &&mut Node| !node.frozen && !hangs && node.jobs.is_empty();
                let Some(edits) = node.filter(idle).and_then(Node::register_anew) else {
                    return;
                };
                for edit in edits {
                    self.edit(host, edit);
                }
                self.settle(host);
                self.blame.registered_anew(host);
                Fault::RegisteredAnew
            }
            37 => {
                if !self.exclusive.insert(Exclusive::Reading(id)) {
                    return;
                }
                // Most of them are read when they are tried again.
                let span = ms(*[6, 12, span.as_millis() as u64]
                    .choose(&mut rng)
                    .expect("one"));
                self.until(span, End::Free(Exclusive::Reading(id)));
                self.fabric
                    .raise_event(id, AsyncEventKind::GidChange, Some(1));
                if rng.random_bool(0.3) {
                    let after = ms(rng.random_range(1..8));
                    self.until(after, End::Dies { host, nic });
                    self.until(after + ms(500), End::Reset { host, nic });
                }
                Fault::UnreadablePort
            }
            38 => {
                // What is asked of it would end with it.
                let now = self.now;
                let (segment, node) = (name(other), self.node(host));
                let Some(node) = node.filter(|node| !node.frozen) else {
                    return;
                };
                let Some(peer) = node.peers.peer(&segment) else {
                    return;
                };
                if node.jobs.values().any(|job| job.peer == peer) {
                    return;
                }
                let close = peers::Input::Close { name: segment };
                node.peers.handle(now, close);
                self.settle(host);
                self.until(span, End::Open { host, peer: other });
                Fault::PeerClosed
            }
            44 => {
                // From some request on for a while: the queue is full, or the request is wrong, or
                // the doorbell fails.
                let mut left = rng.random_range(0..12);
                let errno = *[Errno::NOMEM, Errno::INVAL].choose(&mut rng).expect("one");
                let is_doubt = rng.random_bool(0.3);
                let guard = self.fabric.on_post(move |work| {
                    if work.nic != id {
                        return PostVerdict::Pass;
                    }
                    if left > 0 {
                        left -= 1;
                        return PostVerdict::Pass;
                    }
                    if is_doubt {
                        PostVerdict::Doubt(Errno::IO.raw_os_error())
                    } else {
                        PostVerdict::Refuse(errno.raw_os_error())
                    }
                });
                self.guard(ms(rng.random_range(1..200)), guard);
                Fault::RefusedPosts
            }
            43 => {
                // What is given up meanwhile is not known to be safe.
                let guard = self.judge_first(4, id, WorkVerdict::LoseCompletion);
                self.guard(ms(1_000), guard);
                let guard = self.fabric.refuse_to_stop(id);
                self.guard(ms(6_000), guard);
                for _ in 0..4 {
                    let deadline = ms(rng.random_range(400..900));
                    self.submit_one(host, other, false, deadline, &mut rng);
                }
                Fault::PairsDoNotStop
            }
            39 => {
                // At most one more for each host: rails grow with the square.
                let host_of = &self.hosts[host];
                if host_of.nics.len() > self.nics_at_start {
                    return;
                }
                self.add_nic(host);
                self.tell_of_devices(host, &mut rng);
                Fault::NicComes
            }
            40 => {
                if !self.pull_out(host, nic) {
                    return;
                }
                Fault::NicGoes
            }
            41 => {
                if !self.pull_out(host, nic) {
                    return;
                }
                self.until(span, End::Plug { host, nic });
                Fault::NicGoesAndComesBack
            }
            28 => {
                let kinds = [
                    (AsyncEventKind::SmChange, Some(1)),
                    (AsyncEventKind::GidChange, Some(1)),
                    (AsyncEventKind::ClientReregister, Some(1)),
                    (AsyncEventKind::Other(77), Some(1)),
                    (AsyncEventKind::PortErr, Some(1)),
                    // The device is given up, and works on.
                    (AsyncEventKind::DeviceFatal, None),
                    (AsyncEventKind::CqErr, None),
                ];
                let (kind, port) = *kinds.choose(&mut rng).expect("one");
                self.fabric.raise_event(id, kind, port);
                Fault::EventWithoutACause
            }
            _ => {
                let Some(node) = self.hosts[host].node.as_mut().filter(|node| !node.frozen) else {
                    return;
                };
                let running: Vec<TransferId> = node.jobs.keys().copied().collect();
                let Some(transfer) = running.choose(&mut rng).copied() else {
                    return;
                };
                node.jobs[&transfer].transfer.fail(TransferError::Canceled);
                self.settle(host);
                Fault::Cancelled
            }
        };
        self.coverage.count("fault", &kind);
        let kind = kind.name();
        self.say(
            host,
            format_args!("fault {number}: {kind} on NIC {nic}, for {span:?}"),
        );
        self.made.push(number);
    }

    /// Pulls a NIC out, if another is left.
    fn pull_out(&mut self, host: usize, nic: usize) -> bool {
        let of = &mut self.hosts[host];
        if of.plugged() < 2 || !of.out.insert(nic) {
            return false;
        }
        self.fabric.unplug(of.nics[nic]);
        true
    }

    /// The kernel tells of a device that has come, or nobody hears it.
    fn tell_of_devices(&mut self, host: usize, rng: &mut SmallRng) {
        let now = self.now;
        let is_heard = rng.random_bool(0.5);
        if let Some(node) = self.node(host).filter(|_| is_heard) {
            node.look_at = now;
        }
    }

    fn tell_all(&mut self, input: &peers::Input) {
        for host in 0..self.hosts.len() {
            let coming = || Coming::Peers(input.clone());
            self.later_each(host, ms(3), |node| !node.has_no_store, coming);
        }
    }

    fn tell_publishers(&mut self, input: &publisher::Input) {
        for host in 0..self.hosts.len() {
            let coming = || Coming::Publisher(input.clone());
            self.later_each(host, ms(3), |node| !node.has_no_store, coming);
        }
    }

    pub(super) fn end_fault(&mut self, end: End) {
        match end {
            End::PortUp(port) => self.fabric.port_up(port),
            End::Guard(id) => {
                self.guards.remove(&id);
            }
            End::Free(fault) => {
                self.exclusive.remove(&fault);
                if fault == Exclusive::Messages {
                    self.slow_messages = Duration::ZERO;
                }
            }
            End::Reset { host, nic } => self.fabric.reset_device(self.hosts[host].nics[nic]),
            End::Dies { host, nic } => self.fabric.kill_device(self.hosts[host].nics[nic]),
            End::Open { host, peer } => {
                let open = peers::Input::Open { name: name(peer) };
                self.later(host, Duration::ZERO, Coming::Peers(open));
            }
            End::Plug { host, nic } => {
                let of = &mut self.hosts[host];
                of.out.remove(&nic);
                self.fabric.plug(of.nics[nic]);
            }
            End::StoreBack => {
                self.store.away = false;
                self.tell_all(&peers::Input::WatchResync);
                self.tell_publishers(&publisher::Input::StoreReconnected);
            }
            End::StoreSpeaks => {
                self.store.silent = false;
                self.tell_all(&peers::Input::WatchResync);
            }
            End::StoreRemembers => self.store.forgets_answers = false,
            End::Start(host) => {
                self.kill(host);
                self.start(host);
            }
            End::Thaw(host) => self.thaw(host),
            End::Awake(life) => self.wake_ghost(life),
            End::Over(life) => self.end_superseded(life),
            End::StoreFast => {
                self.exclusive.remove(&Exclusive::Store);
                self.slow_store = Duration::ZERO;
            }
            End::Speak(host, other) => {
                self.muted.remove(&(host, other));
                // What was lost meanwhile shows as a connection that broke.
                let lost = peers::Input::SubscriptionLost { name: name(host) };
                self.later(other, ms(1), Coming::Peers(lost));
                let lost = peers::Input::SubscriptionLost { name: name(other) };
                self.later(host, ms(1), Coming::Peers(lost));
            }
            End::Mtu(port) => self.fabric.set_netdev_mtu(port, 4_200),
            End::Pkeys(port) => self.fabric.set_pkeys(port, &[0xffff]),
            End::Address { host, nic } => {
                let port = self.hosts[host].nics[nic].port(1);
                let address = self.address(host, nic);
                self.fabric.add_address(port, address);
            }
            End::AddressAt { host, nic, filler } => {
                let port = self.hosts[host].nics[nic].port(1);
                let address = self.address(host, nic);
                self.fabric.add_address(port, address);
                self.fabric.delete_address(port, filler);
            }
        }
    }

    /// From here on nothing is broken any more.
    pub(super) fn end_all_faults(&mut self) {
        for (_, end) in std::mem::take(&mut self.ends) {
            self.end_fault(end);
        }
        self.say(0, format_args!("all faults end"));
    }
}
