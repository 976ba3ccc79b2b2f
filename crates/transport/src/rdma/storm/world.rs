//! The world: fabric, nodes, store and messages, and their common virtual time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng};
use rerail_verbs::Gid;
use rerail_verbs::sim::{Fabric, FabricOptions, FaultGuard, NicId, NicOptions, NodeId, VerbTime};
use tokio::sync::oneshot;

use super::blame::Blame;
use super::coverage::Coverage;
use super::failure::Cut;
use super::ledger::{Ledger, Life, TransferId};
use super::link::{Answer, Message};
use super::node::{Node, name, subscriber};
use super::plan::{End, Exclusive};
use super::rivals::RIVALS;
use super::store::{Errand, Store};
use super::turns::Hand;
use crate::machine::observer::{self, PortReading, ReadFailure, ReadId};
use crate::machine::peers;
use crate::machine::publisher;
use crate::machine::{Machine, Time};
use crate::rdma::SignalError;

pub(super) const WIRE: Duration = Duration::from_micros(50);
const SETUP: Duration = Duration::from_secs(4);
/// Within this time after the last fault all must be well: the longest back-off of a rail, twice.
const HEALED_WITHIN: Duration = Duration::from_secs(90);
/// And so much longer where a name had two processes: each reads its record back within 36 s, the
/// older one perhaps only after the younger has written it again.
const NAMES_SETTLED: Duration = Duration::from_secs(80);
/// How often data threads look at their limits.
const TICK: Duration = Duration::from_millis(10);
const CHECKED_EACH: Duration = Duration::from_millis(20);
/// Memory is looked at each time that so many checks have been made.
const MEMORY_EACH: u64 = 5;
/// One in so many seeds has visitors that die.
const VISITED_EACH: u64 = 4;
/// The time that a transfer between healthy nodes has.
const ANSWERED_WITHIN: Duration = Duration::from_secs(4);
/// Within this time every transfer has ended, whatever had happened to it.
const OUTLIVED: Duration = Duration::from_secs(40);
/// Within this time no memory of an earlier transfer is watched any more.
const RESTED: Duration = Duration::from_secs(120);
/// Steps at one instant.
const STILL_MAX: usize = 10_000;
const TRACE_MAX: usize = 400_000;

/// What is drawn for what: faults and work each have draws of their own, so that a fault can be
/// left out of a storm that is otherwise the same.
#[derive(Clone, Copy)]
pub(super) enum Draws {
    /// By the number of the fault.
    Fault,
    /// By the number of the check at which it is asked for.
    Work,
    /// Of the transfers at the end.
    End,
    /// Of names that two have and of the store that is slow, by the number of the fault.
    Rivalry,
}

pub(super) fn draws(seed: u64, of: Draws, number: u64) -> SmallRng {
    let base: u64 = SmallRng::seed_from_u64(seed).random();
    SmallRng::seed_from_u64(base ^ (of as u64 + 1) << 60 ^ number)
}

/// Something that will happen at a node.
pub(super) enum Coming {
    Observer(u32, observer::Input),
    Reading {
        nic: u32,
        epoch: u32,
        read: ReadId,
        /// When it was read.
        at: Time,
        result: Result<PortReading, ReadFailure>,
    },
    Reopen {
        nic: u32,
        epoch: u32,
    },
    StoreRequest(Errand),
    /// A record is to be read; since when it is asked for.
    Fetch(u64, String, Time),
    /// What the store said to what was asked for then.
    Answered(Time, Box<Self>),
    Publisher(publisher::Input),
    Peers(peers::Input),
    Message(Life, Message),
    /// An own message is on its way now, to that process or whoever has its name.
    Leaves(Life, Message),
    /// The time of a transfer that was refused is over.
    AskedLongEnough(TransferId),
}

/// A host, which outlives its processes.
pub(super) struct Host {
    pub(super) id: NodeId,
    /// Those that it has or had; NICs only come.
    pub(super) nics: Vec<NicId>,
    /// Numbers of those that are pulled out.
    pub(super) out: BTreeSet<usize>,
    pub(super) lives: u32,
    pub(super) node: Option<Node>,
    /// An older process, which does not know that another has its name.
    pub(super) ghost: Option<Node>,
    /// What came for frozen processes.
    pub(super) deferred: Vec<(u32, Coming)>,
    /// Addresses of its NICs now.
    pub(super) addresses: Vec<u8>,
}

impl Host {
    /// NICs that are plugged in.
    pub(super) fn plugged(&self) -> usize {
        self.nics.len() - self.out.len()
    }

    /// The process that has its name, and one that had.
    pub(super) fn processes(&self) -> impl Iterator<Item = &Node> {
        self.node.iter().chain(&self.ghost)
    }
}

/// A Connection message that is not answered.
pub(super) struct Exchange {
    pub(super) from: Life,
    /// Who is meant: a process of a host.
    pub(super) to: Life,
    pub(super) answer: oneshot::Sender<Answer>,
}

pub(super) struct World {
    pub(super) fabric: Fabric,
    pub(super) now: Time,
    /// The hand of all nodes' clocks, always at `now`.
    pub(super) hand: &'static Hand,
    /// For how long this and that takes.
    pub(super) rng: SmallRng,
    pub(super) hosts: Vec<Host>,
    pub(super) store: Store,
    pub(super) ledger: Ledger,
    pub(super) blame: Blame,
    pub(super) coverage: Coverage,
    /// NICs of each host.
    pub(super) nics_at_start: usize,
    pub(super) muted: BTreeSet<(usize, usize)>,
    pub(super) exclusive: BTreeSet<Exclusive>,
    pub(super) exchanges: BTreeMap<u64, Exchange>,
    /// How long messages take at most.
    pub(super) slow_messages: Duration,
    /// When the last message from one host to another arrives.
    arrivals: BTreeMap<(usize, usize), Time>,
    /// How long the store takes at most for each of its ways, beside what it always takes.
    pub(super) slow_store: Duration,
    /// When the last that a process was told of changes in the store arrives.
    pub(super) told: BTreeMap<Life, Time>,
    /// Processes that know that a record of theirs is stored, or was.
    pub(super) stored: BTreeSet<Life>,
    pub(super) guards: BTreeMap<u64, FaultGuard>,
    pub(super) ends: BTreeMap<(Time, u64), End>,
    pub(super) faults_on: bool,
    pub(super) coming: BTreeMap<(Time, u64), (usize, u32, Coming)>,
    pub(super) order: u64,
    pub(super) seed: u64,
    trace: Vec<String>,
    /// Faults that were made.
    pub(super) made: Vec<u32>,
    checked_at: Time,
    pub(super) checks: u64,
}

/// What a storm leaves behind.
pub(super) struct Run {
    pub(super) coverage: Coverage,
    pub(super) trace: Vec<String>,
    pub(super) fabric: u64,
}

impl World {
    /// A storm from one seed, or a part of it. Panics when something is wrong.
    pub(super) fn storm(seed: u64, cut: &Cut) -> Run {
        super::coverage::keep_notes();
        let mut world = Self::new(seed);
        world.run(SETUP);
        // Healing takes longer with them.
        if seed.is_multiple_of(VISITED_EACH) {
            world.have_visitors();
        }
        world.faults_on = true;
        let until = world.now + cut.span;
        for number in 0.. {
            let mut rng = draws(seed, Draws::Fault, number.into());
            let pause = Duration::from_millis(rng.random_range(20..600));
            let left = until.saturating_since(world.now);
            world.run(pause.min(left));
            if pause >= left {
                break;
            }
            if cut.makes(number) {
                world.make_fault(number, rng);
            }
            if world.has_rivals() && cut.makes(RIVALS + number) {
                world.make_rivalry(RIVALS + number);
            }
        }
        world.faults_on = false;
        world.end_all_faults();
        world.heal();
        world.all_pairs_transfer();
        world.leave_nothing();
        world.coverage.take_in();
        Run {
            fabric: world.fabric.trace_digest(),
            coverage: std::mem::take(&mut world.coverage),
            trace: std::mem::take(&mut world.trace),
        }
    }

    fn new(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let base = if rng.random_bool(0.5) {
            FabricOptions::card(seed)
        } else {
            FabricOptions::soft_roce(seed)
        };
        // Few of many, or many of few: rails grow with the square of both.
        let nodes = rng.random_range(2..=6);
        let nics = rng.random_range(1..=(12 / nodes as u8).min(4));
        Self::of(seed, rng, base, nodes, nics)
    }

    /// Nodes that run, with so many NICs each.
    pub(super) fn of(
        seed: u64,
        rng: SmallRng,
        base: FabricOptions,
        nodes: usize,
        nics: u8,
    ) -> Self {
        let fabric = Fabric::new(FabricOptions {
            verb_time: VerbTime::Turns,
            packets_per_burst: 4,
            ..base
        });
        let mut world = Self {
            fabric,
            now: Time::ZERO,
            hand: Hand::leaked(),
            rng,
            hosts: Vec::new(),
            store: Store::default(),
            ledger: Ledger::default(),
            blame: Blame::default(),
            coverage: Coverage::default(),
            nics_at_start: nics.into(),
            muted: BTreeSet::new(),
            exclusive: BTreeSet::new(),
            exchanges: BTreeMap::new(),
            slow_messages: Duration::ZERO,
            arrivals: BTreeMap::new(),
            slow_store: Duration::ZERO,
            told: BTreeMap::new(),
            stored: BTreeSet::new(),
            guards: BTreeMap::new(),
            ends: BTreeMap::new(),
            faults_on: false,
            coming: BTreeMap::new(),
            order: 0,
            seed,
            trace: Vec::new(),
            made: Vec::new(),
            checked_at: Time::ZERO,
            checks: 0,
        };
        for host in 0..nodes {
            let id = world.fabric.add_node(&name(host));
            world.hosts.push(Host {
                id,
                nics: Vec::new(),
                out: BTreeSet::new(),
                lives: 0,
                node: None,
                ghost: None,
                deferred: Vec::new(),
                addresses: Vec::new(),
            });
            for _ in 0..nics {
                world.add_nic(host);
            }
        }
        for host in 0..nodes {
            world.start(host);
        }
        world
    }

    /// Puts one more NIC into a host.
    pub(super) fn add_nic(&mut self, host: usize) {
        let of = &mut self.hosts[host];
        let nic = of.nics.len() as u8;
        let address = std::net::IpAddr::from([10, host as u8, nic, 1]);
        let mut options = NicOptions::ethernet(&super::node::nic_name(nic.into()), address);
        let mut link_local = Gid::NULL.0;
        (link_local[0], link_local[1], link_local[15]) = (0xfe, 0x80, 1);
        (link_local[13], link_local[14]) = (host as u8, nic);
        options.ports[0].link_local = Some(Gid(link_local));
        of.nics.push(self.fabric.add_nic(of.id, &options));
        of.addresses.push(1);
    }

    /// Starts a process on a host that has none.
    pub(super) fn start(&mut self, host: usize) {
        let life = (host, self.hosts[host].lives);
        self.hosts[host].lives += 1;
        let seed = self.seed.wrapping_mul(31) ^ (life.0 as u64) << 16 ^ u64::from(life.1) << 8;
        let of = &self.hosts[host];
        let node = Node::start(self.hand, &self.fabric, of.id, &of.nics, life, seed);
        self.ledger.born(life, &node.memory);
        self.hosts[host].node = Some(node);
        self.say(host, format_args!("starts, life {}", life.1));
        for other in (0..self.hosts.len()).filter(|other| *other != host) {
            let open = peers::Input::Open { name: name(other) };
            let now = self.now;
            if let Some(node) = self.node(host) {
                node.peers.handle(now, open);
            }
        }
        self.settle(host);
    }

    /// Ends a process at once.
    pub(super) fn kill(&mut self, host: usize) {
        let Some(mut node) = self.hosts[host].node.take() else {
            return;
        };
        if node.frozen {
            self.fabric.thaw(node.process);
            node.frozen = false;
        }
        self.fabric.kill_process(node.process);
        self.say(host, format_args!("dies"));
        self.ledger.died(self.now, node.life);
        let life = node.life;
        self.hosts[host].deferred.retain(|(of, _)| *of != life.1);
        node.end();
        // Of two of a name, each has connections of its own.
        let other = self.hosts[host].ghost.as_ref().map(|other| other.life);
        let is_older = other.is_some_and(|other| other.1 > life.1);
        let is_meant = |to: Life| {
            to.0 == host
                && if is_older {
                    to == life
                } else {
                    Some(to) != other
                }
        };
        // Who waits for an answer of it hears that the connection broke.
        self.exchanges.retain(|_, exchange| exchange.from != life);
        let waiting = self.exchanges.iter();
        let waiting = waiting.filter(|(_, exchange)| is_meant(exchange.to));
        let waiting: Vec<_> = waiting.map(|(id, exchange)| (*id, exchange.from)).collect();
        for (id, from) in waiting {
            let broken = SignalError::NoAnswer("the connection broke".to_owned());
            let reply = Message::Reply(id, Box::new(Err(broken)));
            self.for_life(from, self.now + WIRE, Coming::Message(life, reply));
        }
        // The other ends of its connections, which its host resets.
        let listens = |node: &Node| !is_older || node.subscribed.get(&host) == Some(&life);
        for other in (0..self.hosts.len()).filter(|other| *other != host) {
            let lost = || Coming::Peers(peers::Input::SubscriptionLost { name: name(host) });
            self.later_each(other, WIRE, listens, lost);
            let subscriber = subscriber(life);
            let gone = || Coming::Publisher(publisher::Input::Unsubscribed { subscriber });
            self.later_each(other, WIRE, |_| true, gone);
        }
    }

    pub(super) fn node(&mut self, host: usize) -> Option<&mut Node> {
        self.hosts[host].node.as_mut()
    }

    /// The process of that life, if it is still there.
    pub(super) fn living(&mut self, life: Life) -> Option<&mut Node> {
        let of = &mut self.hosts[life.0];
        let mut processes = of.node.iter_mut().chain(&mut of.ghost);
        processes.find(|node| node.life == life)
    }

    /// Whether that process lives, and another has its name.
    pub(super) fn is_ghost(&self, life: Life) -> bool {
        let ghost = self.hosts[life.0].ghost.as_ref();
        ghost.is_some_and(|ghost| ghost.life == life)
    }

    /// Does something with the older process of a host in the place of the younger.
    pub(super) fn as_ghost(&mut self, host: usize, act: impl FnOnce(&mut Self)) {
        let swap = |of: &mut Host| std::mem::swap(&mut of.node, &mut of.ghost);
        swap(&mut self.hosts[host]);
        act(self);
        swap(&mut self.hosts[host]);
    }

    /// A line of the trace: of the host's process that acts, whose number stands after the host's.
    pub(super) fn say(&mut self, host: usize, what: std::fmt::Arguments<'_>) {
        if self.trace.len() < TRACE_MAX {
            let node = self.hosts.get(host).and_then(|host| host.node.as_ref());
            let life = node.map_or(String::new(), |node| format!("/{}", node.life.1));
            self.trace
                .push(format!("{} n{host}{life} {what}", self.now));
        }
    }

    /// Takes in what a node's endpoints noted.
    pub(super) fn take_notes(&mut self, host: usize) {
        for note in super::coverage::take_notes() {
            let (number, way, order) = (note.endpoint, note.way, note.order);
            self.say(host, format_args!("endpoint {number} {way}: {order}"));
        }
    }

    /// For the process that is there now.
    pub(super) fn later(&mut self, host: usize, after: Duration, coming: Coming) {
        self.at(host, self.now + after, coming);
    }

    pub(super) fn at(&mut self, host: usize, at: Time, coming: Coming) {
        if let Some(life) = self.hosts[host].node.as_ref().map(|node| node.life) {
            self.for_life(life, at, coming);
        }
    }

    pub(super) fn for_life(&mut self, life: Life, at: Time, coming: Coming) {
        self.order += 1;
        self.coming
            .insert((at, self.order), (life.0, life.1, coming));
    }

    /// For those of a host's processes that are there now.
    pub(super) fn later_each(
        &mut self,
        host: usize,
        after: Duration,
        which: impl Fn(&Node) -> bool,
        coming: impl Fn() -> Coming,
    ) {
        let those = self.hosts[host].processes().filter(|node| which(node));
        let those: Vec<_> = those.map(|node| node.life).collect();
        for life in those {
            self.for_life(life, self.now + after, coming());
        }
    }

    /// A message to a process, or to whoever has its name when it arrives. It leaves after some
    /// time, if the process is still there to send it.
    pub(super) fn send(&mut self, from: Life, to: Life, after: Duration, message: Message) {
        self.for_life(from, self.now + after, Coming::Leaves(to, message));
    }

    pub(super) fn leaves(&mut self, from: Life, meant: Life, message: Message) {
        let to = meant.0;
        if self.muted.contains(&(from.0, to)) {
            return;
        }
        self.order += 1;
        let life = if self.is_ghost(meant) {
            meant.1
        } else {
            let node = self.hosts[to].node.as_ref();
            node.map_or(u32::MAX, |node| node.life.1)
        };
        let coming = Coming::Message(from, message);
        let slow = self.slow_messages.as_micros() as u64;
        let late = Duration::from_micros(self.rng.random_range(0..=slow));
        let mut at = self.now + WIRE + late;
        // Subscriptions are connections, which keep the order; exchanges overtake each other.
        if matches!(
            &coming,
            Coming::Message(_, Message::ToPublisher(_) | Message::ToPeers(_))
        ) {
            let last = self.arrivals.entry((from.0, to)).or_default();
            *last = at.max(*last);
            at = *last;
        }
        self.coming.insert((at, self.order), (to, life, coming));
    }

    /// Lets time pass.
    pub(super) fn run(&mut self, span: Duration) {
        let until = self.now + span;
        let mut still = 0;
        while let Some(next) = self.next().filter(|next| *next <= until) {
            still = if next > self.now { 0 } else { still + 1 };
            assert!(still < STILL_MAX, "time stands still");
            self.move_to(self.now.max(next));
            self.step();
        }
        self.move_to(until);
    }

    fn move_to(&mut self, now: Time) {
        self.now = now;
        self.fabric.advance_to(now.as_duration());
        self.hand.move_to(now);
    }

    fn next(&self) -> Option<Time> {
        let coming = self.coming.keys().next().map(|(at, _)| *at);
        let ends = self.ends.keys().next().map(|(at, _)| *at);
        let fabric = self.fabric.next_deadline();
        let fabric = fabric.map(|at| Time::ZERO + at);
        let awake = || {
            let all = self.hosts.iter().flat_map(Host::processes);
            all.filter(|node| !node.frozen)
        };
        let timeouts = awake().filter_map(Node::next_timeout);
        let controls = awake().flat_map(|node| {
            let controls = node.ports.iter().flat_map(|port| &port.controls);
            controls.filter_map(|control| control.due())
        });
        // Data threads look at their limits.
        let tick = TICK.as_nanos() as u64;
        let tick = Time::from_nanos((self.now.as_nanos() / tick + 1) * tick);
        let others = self.hand.next_due().into_iter().chain([tick]);
        let timeouts = timeouts.chain(coming).chain(ends).chain(fabric);
        timeouts.chain(controls).chain(others).min()
    }

    fn step(&mut self) {
        while let Some(entry) = self.ends.first_entry() {
            if entry.key().0 > self.now {
                break;
            }
            let end = entry.remove();
            self.end_fault(end);
        }
        while let Some(entry) = self.coming.first_entry() {
            if entry.key().0 > self.now {
                break;
            }
            let (host, life, coming) = entry.remove();
            self.arrive(host, life, coming);
        }
        for host in 0..self.hosts.len() {
            self.settle(host);
            self.as_ghost(host, |world| world.settle(host));
        }
        if self.now.saturating_since(self.checked_at) >= CHECKED_EACH {
            self.checked_at = self.now;
            self.checks += 1;
            if self.checks.is_multiple_of(MEMORY_EACH) {
                self.ledger.check(self.now);
            }
            self.submit();
            self.want_all();
            self.check_bounds();
            self.check_due();
        }
    }

    pub(super) fn arrive(&mut self, host: usize, life: u32, coming: Coming) {
        if self.is_ghost((host, life)) {
            return self.as_ghost(host, |world| world.arrive(host, life, coming));
        }
        let coming = match coming {
            // Once it is under way, the store has it whatever becomes of its sender.
            Coming::StoreRequest(errand) if errand.is_slow => {
                return self.ask_store((host, life), errand);
            }
            coming => coming,
        };
        match self.hosts[host].node.as_ref() {
            Some(node) if node.life.1 == life && node.frozen => {
                self.hosts[host].deferred.push((life, coming));
            }
            Some(node) if node.life.1 == life => {
                self.happen(host, coming);
                self.settle(host);
            }
            _ => {
                // The host answers for a process that is not there.
                if let Coming::Message(from, Message::Ask(id, _)) = coming {
                    let refused = SignalError::NoAnswer("connection refused".to_owned());
                    let reply = Message::Reply(id, Box::new(Err(refused)));
                    self.leaves((host, life), from, reply);
                }
            }
        }
    }

    pub(super) fn thaw(&mut self, host: usize) {
        let Some(node) = self.hosts[host].node.as_mut().filter(|node| node.frozen) else {
            return;
        };
        node.frozen = false;
        let (process, life) = (node.process, node.life.1);
        self.fabric.thaw(process);
        self.say(host, format_args!("thaws"));
        let all = std::mem::take(&mut self.hosts[host].deferred);
        let is_its = |(of, _): &(u32, Coming)| *of == life;
        let (own, others) = all.into_iter().partition::<Vec<_>, _>(is_its);
        self.hosts[host].deferred = others;
        for (life, coming) in own {
            self.arrive(host, life, coming);
        }
    }

    /// All rails are wanted all the time, as if there were work for each.
    fn want_all(&self) {
        let all = self.hosts.iter().flat_map(Host::processes);
        for node in all.filter(|node| !node.frozen) {
            for known in node.known.values() {
                for rail in known.peer.rails().iter() {
                    node.keeper.want(&known.peer, rail);
                }
            }
        }
    }

    pub(super) fn heal(&mut self) {
        let start = self.now;
        let names = if self.has_rivals() {
            NAMES_SETTLED
        } else {
            Duration::ZERO
        };
        let within = HEALED_WITHIN + names;
        while let Some(ailment) = self.ailment() {
            let spent = self.now.saturating_since(start);
            assert!(spent < within, "not well after {spent:?}: {ailment}");
            self.run(Duration::from_millis(100));
        }
        let spent = self.now.saturating_since(start);
        self.say(0, format_args!("healed after {spent:?}"));
    }

    fn all_pairs_transfer(&mut self) {
        let until = self.now + OUTLIVED;
        while self.ledger.open() > 0 {
            let open = self.ledger.open();
            assert!(self.now < until, "{open} transfers outlive their deadline");
            self.run(Duration::from_millis(200));
        }
        // Memory of unfenced transfers is left alone for a while; then there is room for all.
        let (pairs, until) = (self.hosts.len() * (self.hosts.len() - 1), self.now + RESTED);
        while !self.ledger.has_room(4 * (self.hosts.len() - 1)) {
            assert!(self.now < until, "memory rests for ever");
            self.run(Duration::from_millis(200));
        }
        let before = self.ledger.reported;
        self.ledger.failed_since_healed = 0;
        let mut asked = 0;
        let mut rng = draws(self.seed, Draws::End, 0);
        for from in 0..self.hosts.len() {
            for to in (0..self.hosts.len()).filter(|to| *to != from) {
                for read in [false, true] {
                    asked += u64::from(self.submit_one(from, to, read, ANSWERED_WITHIN, &mut rng));
                }
            }
        }
        assert_eq!(
            asked,
            2 * pairs as u64,
            "each pair is asked to write and to read"
        );
        self.run(Duration::from_secs(5));
        assert_eq!(self.ledger.reported - before, asked, "every pair transfers");
        assert_eq!(self.ledger.failed_since_healed, 0, "and without an error");
    }

    fn leave_nothing(&mut self) {
        for host in 0..self.hosts.len() {
            self.kill(host);
        }
        self.coming.clear();
        self.fabric.advance(Duration::from_secs(10));
        let left = self.fabric.stats();
        let objects = [
            left.contexts,
            left.pds,
            left.regions,
            left.queue_pairs,
            left.packets,
        ];
        assert_eq!(objects, [0; 5], "something outlived every process");
        assert_eq!(left.rules, 0, "a fault is still in force");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            super::failure::left(&mut self.trace, &mut self.made);
        }
    }
}
