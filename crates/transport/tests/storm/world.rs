//! The world: fabric, nodes, store and messages, and their common virtual time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng};
use rerail_transport::machine::ids::{EndpointId, LocalNic};
use rerail_transport::machine::observer::{self, PortReading, ReadFailure, ReadId};
use rerail_transport::machine::peers;
use rerail_transport::machine::publisher::{self, StoreRequest};
use rerail_transport::machine::rail::RailState;
use rerail_transport::machine::{Machine, Time};
use rerail_verbs::sim::{Fabric, FabricOptions, FaultGuard, NicId, NicOptions, NodeId, VerbTime};
use rerail_verbs::{Completion, Gid};

use super::coverage::Coverage;
use super::ledger::{Ledger, Life};
use super::link::Message;
use super::node::{Node, name, subscriber};
use super::plan::{End, Exclusive};
use super::store::{Store, Told, peer_record};

pub(crate) const WIRE: Duration = Duration::from_micros(50);
const SETUP: Duration = Duration::from_secs(4);
const STORM: Duration = Duration::from_secs(20);
/// Within this time after the last fault all must be well: the longest back-off of a rail, twice.
const HEALED_WITHIN: Duration = Duration::from_secs(90);
const CHECKED_EACH: Duration = Duration::from_millis(20);
/// More than this waiting somewhere is a leak.
const QUEUE_MAX: usize = 20_000;
/// Steps at one instant.
const STILL_MAX: usize = 10_000;
const TRACE_MAX: usize = 400_000;
/// Lines that a failure shows; `RERAIL_SIM_LINES` asks for more.
const TAIL: u64 = 60;

/// Something that will happen at a node.
pub(crate) enum Coming {
    Observer(u32, observer::Input),
    Reading {
        nic: u32,
        epoch: u32,
        read: ReadId,
        result: Result<PortReading, ReadFailure>,
    },
    Reopen {
        nic: u32,
        epoch: u32,
    },
    ContextClosed(LocalNic),
    Ready(EndpointId),
    JoinFailed(EndpointId, String),
    InError(EndpointId),
    Destroyed(EndpointId),
    StoreRequest(u64, StoreRequest),
    Fetch(u64, String),
    Publisher(publisher::Input),
    Peers(peers::Input),
    Message(Life, Message),
    /// An own message is on its way now.
    Leaves(usize, Message),
}

/// A host, which outlives its processes.
pub(crate) struct Host {
    pub(crate) id: NodeId,
    pub(crate) nics: Vec<NicId>,
    pub(crate) lives: u32,
    pub(crate) node: Option<Node>,
    /// What came for a frozen process.
    deferred: Vec<(u32, Coming)>,
    /// Addresses of its NICs now.
    pub(crate) addresses: Vec<u8>,
}

pub(crate) struct World {
    pub(crate) fabric: Fabric,
    pub(crate) now: Time,
    pub(crate) rng: SmallRng,
    pub(crate) hosts: Vec<Host>,
    pub(crate) store: Store,
    pub(crate) ledger: Ledger,
    pub(crate) coverage: Coverage,
    pub(crate) muted: BTreeSet<(usize, usize)>,
    pub(crate) exclusive: BTreeSet<Exclusive>,
    /// How long messages take at most.
    pub(crate) slow_messages: Duration,
    /// When the last message from one host to another arrives.
    arrivals: BTreeMap<(usize, usize), Time>,
    pub(crate) guards: BTreeMap<u64, FaultGuard>,
    pub(crate) ends: BTreeMap<(Time, u64), End>,
    pub(crate) faults_on: bool,
    coming: BTreeMap<(Time, u64), (usize, u32, Coming)>,
    pub(crate) order: u64,
    seed: u64,
    trace: Vec<String>,
    checked_at: Time,
}

/// What a storm leaves behind.
pub(crate) struct Run {
    pub(crate) coverage: Coverage,
    pub(crate) trace: Vec<String>,
    pub(crate) fabric: u64,
}

impl World {
    /// A whole storm from one seed. Panics when something is wrong.
    pub(crate) fn storm(seed: u64) -> Run {
        let mut world = Self::new(seed);
        world.run(SETUP);
        world.faults_on = true;
        let until = world.now + STORM;
        while world.now < until {
            let pause = world.rng.random_range(20..600);
            world.run(Duration::from_millis(pause));
            world.make_fault();
        }
        world.faults_on = false;
        world.end_all_faults();
        world.heal();
        world.all_pairs_transfer();
        world.leave_nothing();
        let world = std::mem::ManuallyDrop::new(world);
        Run {
            coverage: world.coverage.clone(),
            trace: world.trace.clone(),
            fabric: world.fabric.trace_digest(),
        }
    }

    fn new(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let base = if rng.random_bool(0.5) {
            FabricOptions::card(seed)
        } else {
            FabricOptions::soft_roce(seed)
        };
        let fabric = Fabric::new(FabricOptions {
            verb_time: VerbTime::Charge,
            packets_per_burst: 4,
            ..base
        });
        // Few of many, or many of few: rails grow with the square of both.
        let nodes = rng.random_range(2..=6);
        let nics = rng.random_range(1..=(12 / nodes as u8).min(4));
        let mut world = Self {
            fabric,
            now: Time::ZERO,
            rng,
            hosts: Vec::new(),
            store: Store::default(),
            ledger: Ledger::default(),
            coverage: Coverage::default(),
            muted: BTreeSet::new(),
            exclusive: BTreeSet::new(),
            slow_messages: Duration::ZERO,
            arrivals: BTreeMap::new(),
            guards: BTreeMap::new(),
            ends: BTreeMap::new(),
            faults_on: false,
            coming: BTreeMap::new(),
            order: 0,
            seed,
            trace: Vec::new(),
            checked_at: Time::ZERO,
        };
        for host in 0..nodes {
            let id = world.fabric.add_node(&name(host));
            let nics = (0..nics).map(|nic| {
                let address = std::net::IpAddr::from([10, host as u8, nic, 1]);
                let mut options = NicOptions::ethernet(&super::node::nic_name(nic.into()), address);
                let mut link_local = Gid::NULL.0;
                (link_local[0], link_local[1], link_local[15]) = (0xfe, 0x80, 1);
                (link_local[13], link_local[14]) = (host as u8, nic);
                options.ports[0].link_local = Some(Gid(link_local));
                world.fabric.add_nic(id, &options)
            });
            let nics: Vec<_> = nics.collect();
            let addresses = vec![1; nics.len()];
            world.hosts.push(Host {
                id,
                nics,
                lives: 0,
                node: None,
                deferred: Vec::new(),
                addresses,
            });
        }
        for host in 0..nodes {
            world.start(host);
        }
        world
    }

    /// Starts a process on a host that has none.
    pub(crate) fn start(&mut self, host: usize) {
        let life = (host, self.hosts[host].lives);
        self.hosts[host].lives += 1;
        let seed = self.seed.wrapping_mul(31) ^ (life.0 as u64) << 16 ^ u64::from(life.1) << 8;
        let of = &self.hosts[host];
        let node = Node::start(self.now, &self.fabric, of.id, &of.nics, life, seed);
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
    pub(crate) fn kill(&mut self, host: usize) {
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
        self.hosts[host].deferred.clear();
        let life = node.life;
        drop(node);
        // The other ends of its connections, which its host resets.
        for other in (0..self.hosts.len()).filter(|other| *other != host) {
            let lost = peers::Input::SubscriptionLost { name: name(host) };
            self.later(other, WIRE, Coming::Peers(lost));
            let subscriber = subscriber(life);
            let gone = publisher::Input::Unsubscribed { subscriber };
            self.later(other, WIRE, Coming::Publisher(gone));
        }
    }

    pub(crate) fn node(&mut self, host: usize) -> Option<&mut Node> {
        self.hosts[host].node.as_mut()
    }

    /// The process of that life, if it is still there.
    pub(crate) fn living(&mut self, life: Life) -> Option<&mut Node> {
        self.node(life.0).filter(|node| node.life == life)
    }

    pub(crate) fn say(&mut self, host: usize, what: std::fmt::Arguments<'_>) {
        if self.trace.len() < TRACE_MAX {
            self.trace.push(format!("{} n{host} {what}", self.now));
        }
    }

    /// For the process that is there now.
    pub(crate) fn later(&mut self, host: usize, after: Duration, coming: Coming) {
        self.at(host, self.now + after, coming);
    }

    pub(crate) fn at(&mut self, host: usize, at: Time, coming: Coming) {
        let Some(life) = self.hosts[host].node.as_ref().map(|node| node.life.1) else {
            return;
        };
        self.order += 1;
        self.coming.insert((at, self.order), (host, life, coming));
    }

    /// A message to whoever is at the other host when it arrives. It leaves after some time, if the
    /// process is still there to send it.
    pub(crate) fn send(&mut self, from: Life, to: usize, after: Duration, message: Message) {
        self.order += 1;
        let coming = Coming::Leaves(to, message);
        self.coming
            .insert((self.now + after, self.order), (from.0, from.1, coming));
    }

    pub(crate) fn leaves(&mut self, from: Life, to: usize, message: Message) {
        if self.muted.contains(&(from.0, to)) {
            return;
        }
        self.order += 1;
        let node = self.hosts[to].node.as_ref();
        let life = node.map_or(u32::MAX, |node| node.life.1);
        let coming = Coming::Message(from, message);
        let slow = self.slow_messages.as_micros() as u64;
        let late = Duration::from_micros(self.rng.random_range(0..=slow));
        // Messages between two hosts keep their order.
        let last = self.arrivals.entry((from.0, to)).or_default();
        *last = (self.now + WIRE + late).max(*last);
        let at = *last;
        self.coming.insert((at, self.order), (to, life, coming));
    }

    /// Lets time pass.
    pub(crate) fn run(&mut self, span: Duration) {
        let until = self.now + span;
        let mut still = 0;
        while let Some(next) = self.next().filter(|next| *next <= until) {
            still = if next > self.now { 0 } else { still + 1 };
            assert!(still < STILL_MAX, "time stands still");
            self.now = self.now.max(next);
            self.fabric.advance_to(self.now.as_duration());
            self.step();
        }
        self.now = until;
        self.fabric.advance_to(self.now.as_duration());
    }

    fn next(&self) -> Option<Time> {
        let coming = self.coming.keys().next().map(|(at, _)| *at);
        let ends = self.ends.keys().next().map(|(at, _)| *at);
        let fabric = self.fabric.next_deadline();
        let fabric = fabric.map(|at| Time::ZERO + at);
        let awake = self.hosts.iter().filter_map(|host| host.node.as_ref());
        let timeouts = awake
            .filter(|node| !node.frozen)
            .filter_map(Node::next_timeout);
        timeouts.chain(coming).chain(ends).chain(fabric).min()
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
            self.look(host);
            self.settle(host);
        }
        if self.now.saturating_since(self.checked_at) >= CHECKED_EACH {
            self.checked_at = self.now;
            self.ledger.check(self.now);
            self.submit();
            self.check_bounds();
        }
    }

    fn arrive(&mut self, host: usize, life: u32, coming: Coming) {
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
                if let Coming::Message(from, Message::Connect(hello)) = coming {
                    let reason = "connection refused".to_owned();
                    let refuse = Message::Refuse {
                        endpoint: hello.endpoint,
                        reason,
                    };
                    self.leaves((host, life), from.0, refuse);
                }
            }
        }
    }

    pub(crate) fn thaw(&mut self, host: usize) {
        let Some(node) = self.hosts[host].node.as_mut().filter(|node| node.frozen) else {
            return;
        };
        node.frozen = false;
        let process = node.process;
        self.fabric.thaw(process);
        self.say(host, format_args!("thaws"));
        for (life, coming) in std::mem::take(&mut self.hosts[host].deferred) {
            self.arrive(host, life, coming);
        }
    }

    /// Takes events and completions from a node's NICs.
    fn look(&mut self, host: usize) {
        let Some(node) = self.hosts[host].node.as_ref().filter(|node| !node.frozen) else {
            return;
        };
        let mut inputs = Vec::new();
        let mut completions = Vec::new();
        for (nic, (of, observer)) in (0..).zip(node.nics.iter().zip(&node.observers)) {
            let Some(open) = &of.open else { continue };
            let epoch = observer.epoch();
            loop {
                match open.context.next_event() {
                    Ok(Some(event)) => inputs.push((nic, observer::Input::Event { epoch, event })),
                    Ok(None) => break,
                    Err(error) => {
                        let errno = error.errno().unwrap_or(5);
                        inputs.push((nic, observer::Input::ChannelFailed { epoch, errno }));
                        break;
                    }
                }
            }
            let mut found = [Completion::EMPTY; 64];
            while let Ok(count @ 1..) = open.queue.poll(&mut found) {
                completions.extend_from_slice(&found[..count]);
            }
        }
        for completion in completions {
            self.completed(host, completion);
        }
        for (nic, input) in inputs {
            let now = self.now;
            if let Some(node) = self.node(host) {
                node.observers[nic as usize].handle(now, input);
            }
        }
    }

    /// A request to the store, and what watchers see of it.
    pub(crate) fn ask_store(&mut self, host: usize, ticket: u64, request: StoreRequest) {
        let (answer, told) = self.store.request(&name(host), request);
        let input = publisher::Input::Store { ticket, answer };
        self.later(host, Duration::from_millis(1), Coming::Publisher(input));
        if self.store.silent {
            return;
        }
        for other in 0..self.hosts.len() {
            let input = match &told {
                None => return,
                Some(Told::Put(name, record)) => peers::Input::WatchPut {
                    name: name.clone(),
                    record: peer_record(record),
                },
                Some(Told::Delete(name)) => peers::Input::WatchDelete { name: name.clone() },
            };
            self.later(other, Duration::from_millis(2), Coming::Peers(input));
        }
    }

    fn check_bounds(&self) {
        let waiting = self.coming.len() + self.ends.len();
        assert!(waiting < QUEUE_MAX, "{waiting} things wait");
        for node in self.hosts.iter().filter_map(|host| host.node.as_ref()) {
            let rails = node.of_peer.len() * node.nics.len() * 4;
            let ends = node.endpoints.len();
            // Each rail has one, and for some time those that are being fenced.
            assert!(ends < 64 + 16 * rails, "{ends} endpoints for {rails} rails");
            for endpoint in node.endpoints.values() {
                assert!(endpoint.outstanding.len() <= super::link::DEPTH);
            }
        }
    }

    /// Why all is not well yet; `None` if it is.
    fn ailment(&self) -> Option<String> {
        for (at, host) in self.hosts.iter().enumerate() {
            let Some(node) = &host.node else {
                return Some(format!("n{at} is not running"));
            };
            let truth = node.publisher.descriptor();
            if self.store.record(&name(at)) != Some(truth) {
                return Some(format!("the store's record of n{at} is not its own"));
            }
            if node.fences.quarantined_bytes() > 0 {
                return Some(format!("n{at} has memory in quarantine"));
            }
            for (to, other) in self.hosts.iter().enumerate().filter(|(to, _)| *to != at) {
                let there = other
                    .node
                    .as_ref()
                    .map(|other| other.publisher.descriptor());
                if node.peers.descriptor(&name(to)) != there {
                    return Some(format!("n{at} does not know n{to} as it is"));
                }
                let Some(peer) = node.peers.peer(&name(to)) else {
                    return Some(format!("n{at} has no peer n{to}"));
                };
                for rail in node.all_rails(peer) {
                    if node.rails.state(rail) != Some(RailState::Up) {
                        let state = node.rails.state(rail);
                        return Some(format!("n{at}: {rail} to n{to} is {state:?}"));
                    }
                }
            }
            let rails = (self.hosts.len() - 1) * node.nics.len() * node.nics.len();
            if node.endpoints.len() != rails {
                let ends = node.endpoints.len();
                return Some(format!("n{at} has {ends} ends for {rails} rails"));
            }
            // A passive end that is gone is found by use; one too many would never be.
            for (life, endpoint) in node.passives.keys() {
                let owner = self.hosts[life.0].node.as_ref();
                let owner = owner.filter(|owner| owner.life == *life);
                if !owner.is_some_and(|owner| owner.endpoints.contains_key(endpoint)) {
                    return Some(format!("n{at} keeps a stale end of {life:?}"));
                }
            }
        }
        None
    }

    fn heal(&mut self) {
        let start = self.now;
        while let Some(ailment) = self.ailment() {
            let spent = self.now.saturating_since(start);
            assert!(spent < HEALED_WITHIN, "not well after {spent:?}: {ailment}");
            self.run(Duration::from_millis(100));
        }
        let spent = self.now.saturating_since(start);
        self.say(0, format_args!("healed after {spent:?}"));
    }

    fn all_pairs_transfer(&mut self) {
        self.run(Duration::from_secs(40));
        assert_eq!(self.ledger.open(), 0, "transfers outlived their deadline");
        let before = self.ledger.reported;
        let mut asked = 0;
        for from in 0..self.hosts.len() {
            for to in (0..self.hosts.len()).filter(|to| *to != from) {
                for read in [false, true] {
                    asked += u64::from(self.submit_one(from, to, read, true));
                }
            }
        }
        assert!(asked > 0);
        self.run(Duration::from_secs(5));
        assert_eq!(self.ledger.reported - before, asked, "every pair transfers");
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
            eprintln!(
                "seed {}, the last of {} lines:",
                self.seed,
                self.trace.len()
            );
            let tail = super::variable("RERAIL_SIM_LINES").unwrap_or(TAIL);
            let tail = usize::try_from(tail).unwrap_or(usize::MAX);
            for line in &self.trace[self.trace.len().saturating_sub(tail)..] {
                eprintln!("  {line}");
            }
        }
    }
}
