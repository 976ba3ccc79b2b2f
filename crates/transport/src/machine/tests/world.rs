//! Nodes, a store and the wires between them. Everything takes a fixed time, nothing is random but
//! the machines' own jitter, which comes from seeds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use rerail_metadata::Version;
use rerail_metadata::descriptor::{
    InstanceId, LocationNics, Protocol, RerailMember, SegmentDescriptor,
};
use rerail_topology::gid::GidPolicy;
use rerail_verbs::{
    AsyncEvent, AsyncEventKind, EventSubject, Gid, GidEntry, GidType, LinkLayer, Mtu, Netdev,
    PhysState, PortAttr, PortState, WcStatus,
};

use crate::machine::flow::{learnt_to_rails, observed_to_rails, observed_to_record};
use crate::machine::ids::{LocalNic, PeerId, RailId};
use crate::machine::observer::{self, Observer, ObserverConfig, PortReading, ReadId};
use crate::machine::peers::{self, Fetched, PeerRecord, Peers, PeersConfig};
use crate::machine::publisher::{
    self, Acceptance, Edit, LocalRecord, PublishOrder, Publisher, PublisherConfig, StoreAnswer,
    StoreFailure, StoreRequest, StoredRecord, SubscriberId,
};
use crate::machine::rail::{self, RailConfig, RailState, RailTraits, Rails};
use crate::machine::{Machine, Time, drive};

const WIRE: Duration = Duration::from_micros(50);
const VERB: Duration = Duration::from_micros(300);
const STORE: Duration = Duration::from_millis(2);

/// A node's name stands for its number: "n0", "n1" …
pub(super) fn name(node: usize) -> String {
    format!("n{node}")
}

fn number(name: &str) -> Option<usize> {
    name.strip_prefix('n')?.parse().ok()
}

fn nic_name(nic: u32) -> String {
    format!("mlx5_{nic}")
}

fn nic_number(name: &str) -> Option<u32> {
    name.strip_prefix("mlx5_")?.parse().ok()
}

/// Something that will happen at a node. `life` tells a restarted node from what it was.
#[derive(Clone, Debug)]
enum Coming {
    Observer(u32, observer::Input),
    Reads(u32, ReadId),
    Publisher(publisher::Input),
    StoreRequest(u64, StoreRequest),
    Peers(peers::Input),
    Fetch(u64, String),
    Rails(rail::Input),
    Connects(RailId),
    Probes(RailId, u64),
}

pub(super) struct Node {
    pub(super) observers: Vec<Observer>,
    pub(super) publisher: Publisher,
    pub(super) peers: Peers,
    pub(super) rails: Rails,
    /// What the device would answer, by NIC.
    pub(super) ports: Vec<PortReading>,
    /// Which node and life each peer is.
    of_peer: BTreeMap<PeerId, (usize, u32)>,
    /// GIDs at both ends when an endpoint was connected.
    endpoints: BTreeMap<RailId, (Gid, Gid)>,
    /// Peers that ended because somebody else has their name.
    pub(super) retired: Vec<(Time, PeerId)>,
    life: u32,
    gates: BTreeSet<LocalNic>,
}

impl Node {
    /// The GID that a NIC really has, if its port is up.
    fn live_gid(&self, nic: u32) -> Option<Gid> {
        let port = self.ports.get(nic as usize)?;
        let up = port.attr.state.is_active();
        let facts = self.observers.get(nic as usize)?.facts(1)?;
        let used = facts.gid.as_ref()?.gid;
        (up && port.gids.iter().any(|row| row.gid == used)).then_some(used)
    }
}

pub(super) struct World {
    pub(super) now: Time,
    pub(super) nodes: Vec<Node>,
    coming: BTreeMap<(Time, u64), (usize, u32, Coming)>,
    order: u64,
    store: BTreeMap<String, (u64, Arc<SegmentDescriptor>)>,
    /// Versions and generations written under each name, in order.
    pub(super) written: BTreeMap<String, Vec<(InstanceId, u64)>>,
    pub(super) store_away: bool,
    versions: u64,
    nics: u32,
}

impl World {
    /// `nodes` nodes of `nics` NICs each, started together and given a second to find each other.
    pub(super) fn new(nodes: usize, nics: u32) -> Self {
        let mut world = Self {
            now: Time::from_millis(1),
            nodes: Vec::new(),
            coming: BTreeMap::new(),
            order: 0,
            store: BTreeMap::new(),
            written: BTreeMap::new(),
            store_away: false,
            versions: 0,
            nics,
        };
        for node in 0..nodes {
            let started = world.start(node, 0);
            world.nodes.push(started);
        }
        for node in 0..nodes {
            world.settle(node);
        }
        for node in 0..nodes {
            world.open_all(node);
        }
        world.run(Duration::from_secs(2));
        world
    }

    fn start(&self, node: usize, life: u32) -> Node {
        let names: Vec<String> = (0..self.nics).map(nic_name).collect();
        let base = SegmentDescriptor::new(name(node), Protocol::rdma());
        let features = vec![peers::PUSH_FEATURE.to_owned()];
        let mut record = LocalRecord::new(base, features, names.clone(), PublishOrder::Fixed);
        let nics = LocationNics {
            preferred: names,
            available: Vec::new(),
        };
        let matrix = BTreeMap::from([("cpu:0".to_owned(), nics)]);
        record
            .apply(Edit::Matrix(matrix))
            .expect("a matrix can be set");
        let mut instance = [0; 16];
        instance[0] = node as u8;
        instance[1] = life as u8 + 1;
        let seed = (node as u64) << 8 | u64::from(life);
        let observer = |nic: u32| {
            let config = ObserverConfig::default();
            let policy = GidPolicy::default();
            Observer::new(
                self.now,
                config,
                &nic_name(nic),
                &policy,
                [1],
                seed + u64::from(nic),
            )
        };
        let port = |nic: u32| port_reading(&format!("10.{node}.{nic}.{}", life + 1));
        Node {
            observers: (0..self.nics).map(observer).collect(),
            publisher: Publisher::new(
                self.now,
                PublisherConfig::default(),
                InstanceId(instance),
                record,
                seed,
            ),
            peers: Peers::new(PeersConfig::default(), seed),
            rails: Rails::new(RailConfig::default(), seed),
            ports: (0..self.nics).map(port).collect(),
            of_peer: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            retired: Vec::new(),
            life,
            gates: BTreeSet::new(),
        }
    }

    fn open_all(&mut self, node: usize) {
        for other in 0..self.nodes.len() {
            if other != node {
                let input = peers::Input::Open { name: name(other) };
                self.nodes[node].peers.handle(self.now, input);
            }
        }
        self.settle(node);
    }

    /// Kills a node and starts it again under the same name.
    pub(super) fn restart(&mut self, node: usize) {
        let life = self.nodes[node].life + 1;
        self.nodes[node] = self.start(node, life);
        self.settle(node);
        self.open_all(node);
        for other in 0..self.nodes.len() {
            if other != node {
                let input = peers::Input::SubscriptionLost { name: name(node) };
                self.later(WIRE, other, Coming::Peers(input));
            }
        }
    }

    fn later(&mut self, after: Duration, node: usize, coming: Coming) {
        self.order += 1;
        let life = self.nodes[node].life;
        self.coming
            .insert((self.now + after, self.order), (node, life, coming));
    }

    pub(super) fn event(&mut self, node: usize, nic: u32, kind: AsyncEventKind) {
        let event = AsyncEvent {
            kind,
            subject: EventSubject::Port(1),
        };
        let epoch = self.nodes[node].observers[nic as usize].epoch();
        let input = observer::Input::Event { epoch, event };
        self.later(Duration::ZERO, node, Coming::Observer(nic, input));
    }

    /// Changes what a port answers, and raises the event.
    pub(super) fn set_gid(&mut self, node: usize, nic: u32, gid: &str) {
        self.nodes[node].ports[nic as usize].gids = vec![gid_row(gid)];
        self.break_endpoints(node, nic);
        self.event(node, nic, AsyncEventKind::GidChange);
    }

    pub(super) fn set_up(&mut self, node: usize, nic: u32, up: bool) {
        let port = &mut self.nodes[node].ports[nic as usize];
        port.attr.state = if up {
            PortState::Active
        } else {
            PortState::Down
        };
        if up {
            self.event(node, nic, AsyncEventKind::PortActive);
        } else {
            self.break_endpoints(node, nic);
            self.event(node, nic, AsyncEventKind::PortErr);
        }
    }

    /// Endpoints over a NIC whose address or link is gone complete with an error at their peers.
    fn break_endpoints(&mut self, node: usize, nic: u32) {
        for other in 0..self.nodes.len() {
            let ids: Vec<_> = self.nodes[other].endpoints.keys().copied().collect();
            for rail in ids {
                let far = self.nodes[other]
                    .of_peer
                    .get(&rail.peer.peer)
                    .map(|(node, _)| *node);
                if far == Some(node) && rail.peer.nic == nic {
                    let status = WcStatus::RetryExcErr;
                    let input = rail::Input::Completion { rail, status };
                    self.later(Duration::from_millis(100), other, Coming::Rails(input));
                }
            }
        }
    }

    pub(super) fn run(&mut self, span: Duration) {
        let until = self.now + span;
        loop {
            let coming = self.coming.keys().next().map(|(at, _)| *at);
            let timeouts = (0..self.nodes.len()).filter_map(|node| self.next_timeout(node));
            let next = timeouts.chain(coming).min().filter(|at| *at <= until);
            let Some(next) = next else {
                self.now = until;
                return;
            };
            self.now = self.now.max(next);
            while let Some(entry) = self.coming.first_entry() {
                if entry.key().0 > self.now {
                    break;
                }
                let (node, life, coming) = entry.remove();
                if self.nodes[node].life == life {
                    self.happen(node, coming);
                    self.settle(node);
                }
            }
            for node in 0..self.nodes.len() {
                self.settle(node);
            }
            self.check();
        }
    }

    fn next_timeout(&self, node: usize) -> Option<Time> {
        let node = &self.nodes[node];
        let observers = node.observers.iter().filter_map(Machine::next_timeout);
        let others = [
            node.publisher.next_timeout(),
            node.peers.next_timeout(),
            node.rails.next_timeout(),
        ];
        observers.chain(others.into_iter().flatten()).min()
    }

    /// What must hold at every step.
    fn check(&self) {
        for node in &self.nodes {
            for peer in node.of_peer.keys() {
                if let rail::Path::Usable(candidates) = node.rails.path(*peer) {
                    for candidate in candidates {
                        let local = candidate.rail.local;
                        assert!(node.gates.contains(&local), "work through a closed gate");
                    }
                }
            }
        }
        for written in self.written.values() {
            let ordered = written
                .windows(2)
                .all(|pair| pair[0].0 != pair[1].0 || pair[0].1 <= pair[1].1);
            assert!(ordered, "a state that was overtaken was written");
        }
    }

    fn happen(&mut self, node: usize, coming: Coming) {
        let now = self.now;
        match coming {
            Coming::Observer(nic, input) => {
                self.nodes[node].observers[nic as usize].handle(now, input)
            }
            Coming::Reads(nic, read) => {
                let reading = self.nodes[node].ports[nic as usize].clone();
                let epoch = self.nodes[node].observers[nic as usize].epoch();
                let result = Ok(reading);
                let input = observer::Input::PortRead {
                    epoch,
                    read,
                    result,
                };
                self.nodes[node].observers[nic as usize].handle(now, input);
            }
            Coming::Publisher(input) => self.nodes[node].publisher.handle(now, input),
            Coming::StoreRequest(ticket, request) => {
                let answer = self.store(node, request);
                let input = publisher::Input::Store { ticket, answer };
                self.nodes[node].publisher.handle(now, input);
            }
            Coming::Peers(input) => self.nodes[node].peers.handle(now, input),
            Coming::Fetch(ticket, of) => {
                let result = match self.store.get(&of) {
                    _ if self.store_away => Fetched::Unavailable,
                    Some((_, descriptor)) => Fetched::Found(record(descriptor)),
                    None => Fetched::NotFound,
                };
                let input = peers::Input::Fetched { ticket, result };
                self.nodes[node].peers.handle(now, input);
            }
            Coming::Rails(input) => self.nodes[node].rails.handle(now, input),
            Coming::Connects(rail) => {
                let input = match self.connect(node, rail) {
                    Ok(gids) => {
                        self.nodes[node].endpoints.insert(rail, gids);
                        rail::Input::Connected { rail }
                    }
                    Err(reason) => rail::Input::ConnectFailed {
                        rail,
                        reason,
                        fault: rail::ConnectFault::Other,
                    },
                };
                self.nodes[node].rails.handle(now, input);
            }
            Coming::Probes(rail, probe) => {
                let there = self.nodes[node].endpoints.get(&rail).copied();
                let works = there.is_some_and(|gids| self.ends(node, rail) == Some(gids));
                let status = if works {
                    WcStatus::Success
                } else {
                    WcStatus::RetryExcErr
                };
                let input = rail::Input::ProbeDone {
                    rail,
                    probe,
                    status,
                };
                self.nodes[node].rails.handle(now, input);
            }
        }
    }

    /// The GIDs that a connection over a rail would use now, if both ends are there.
    fn ends(&self, node: usize, rail: RailId) -> Option<(Gid, Gid)> {
        let (far, life) = *self.nodes[node].of_peer.get(&rail.peer.peer)?;
        let far = self.nodes.get(far).filter(|far| far.life == life)?;
        Some((
            self.nodes[node].live_gid(rail.local.0)?,
            far.live_gid(rail.peer.nic)?,
        ))
    }

    fn connect(&self, node: usize, rail: RailId) -> Result<(Gid, Gid), String> {
        let ends = self.ends(node, rail).ok_or("no answer")?;
        let (far, _) = self.nodes[node].of_peer[&rail.peer.peer];
        let told = self.nodes[node]
            .peers
            .descriptor(&name(far))
            .ok_or("not known")?;
        if told
            .devices
            .get(rail.peer.nic as usize)
            .map(|device| device.gid)
            != Some(ends.1)
        {
            return Err("connected to an address that is not there any more".to_owned());
        }
        let subscriber = Some(SubscriberId(subscription(node, self.nodes[node].life)));
        match self.nodes[far]
            .publisher
            .accepts(LocalNic(rail.peer.nic), subscriber)
        {
            Acceptance::Yes => Ok(ends),
            other => Err(format!("refused: {other:?}")),
        }
    }

    fn store(&mut self, node: usize, request: StoreRequest) -> StoreAnswer {
        if self.store_away {
            return StoreAnswer::Failed(StoreFailure::Failed("no answer".to_owned()));
        }
        let key = name(node);
        let current = self.store.get(&key).map(|(version, _)| *version);
        let is_at = |expected: &Version| expected.as_counter() == current;
        match request {
            StoreRequest::RpcMeta => StoreAnswer::Written(None),
            StoreRequest::Read => match self.store.get(&key) {
                None => StoreAnswer::Failed(StoreFailure::NotFound),
                Some((version, descriptor)) => StoreAnswer::Found(StoredRecord {
                    version: Version::from_counter(*version),
                    identity: member(descriptor).map(|member| (member.instance, member.generation)),
                }),
            },
            StoreRequest::Create(descriptor) if current.is_none() => self.write(key, descriptor),
            StoreRequest::Swap(expected, descriptor) if is_at(&expected) => {
                self.write(key, descriptor)
            }
            StoreRequest::Delete(expected) if is_at(&expected) => {
                self.store.remove(&key);
                StoreAnswer::Written(None)
            }
            _ => StoreAnswer::Failed(StoreFailure::Conflict),
        }
    }

    fn write(&mut self, key: String, descriptor: Arc<SegmentDescriptor>) -> StoreAnswer {
        self.versions += 1;
        if let Some(member) = member(&descriptor) {
            let written = self.written.entry(key.clone()).or_default();
            written.push((member.instance, member.generation));
        }
        self.store
            .insert(key.clone(), (self.versions, Arc::clone(&descriptor)));
        for node in 0..self.nodes.len() {
            let put = peers::Input::WatchPut {
                name: key.clone(),
                record: record(&descriptor),
            };
            self.later(STORE, node, Coming::Peers(put));
        }
        StoreAnswer::Written(Some(Version::from_counter(self.versions)))
    }

    /// Carries out everything that a node's machines want.
    fn settle(&mut self, node: usize) {
        loop {
            let mut quiet = true;
            for nic in 0..self.nics {
                let mut actions = Vec::new();
                let observer = &mut self.nodes[node].observers[nic as usize];
                drive(observer, self.now, |action| actions.push(action));
                quiet &= actions.is_empty();
                for action in actions {
                    self.observed(node, nic, &action);
                }
            }
            let mut actions = Vec::new();
            drive(&mut self.nodes[node].publisher, self.now, |action| {
                actions.push(action)
            });
            quiet &= actions.is_empty();
            for action in actions {
                self.published(node, action);
            }
            let mut actions = Vec::new();
            drive(&mut self.nodes[node].peers, self.now, |action| {
                actions.push(action)
            });
            quiet &= actions.is_empty();
            for action in actions {
                self.learnt(node, action);
            }
            let mut actions = Vec::new();
            drive(&mut self.nodes[node].rails, self.now, |action| {
                actions.push(action)
            });
            quiet &= actions.is_empty();
            for action in actions {
                self.railed(node, action);
            }
            if quiet {
                return;
            }
        }
    }

    fn observed(&mut self, node: usize, nic: u32, action: &observer::Action) {
        let now = self.now;
        let local = LocalNic(nic);
        match action {
            observer::Action::ReadPort(read) => self.later(VERB, node, Coming::Reads(nic, *read)),
            observer::Action::CloseGate { .. } => {
                self.nodes[node].gates.remove(&local);
            }
            observer::Action::Reopen { epoch } => {
                let reopened = observer::Input::Reopened { epoch: *epoch };
                self.later(10 * VERB, node, Coming::Observer(nic, reopened));
            }
            observer::Action::HalfOpen { .. } => {
                self.nodes[node].gates.insert(local);
            }
            observer::Action::CutEndpoints { .. } => {
                self.nodes[node]
                    .endpoints
                    .retain(|rail, _| rail.local != local);
            }
            _ => {}
        }
        let node = &mut self.nodes[node];
        if let Some(input) = observed_to_rails(action, |_| Some(local)) {
            node.rails.handle(now, input);
        }
        if let Some(edit) = observed_to_record(action, |_| Some(local)) {
            node.publisher.handle(now, publisher::Input::Edit(edit));
        }
    }

    fn published(&mut self, node: usize, action: publisher::Action) {
        match action {
            publisher::Action::Store { ticket, request } => {
                self.later(STORE, node, Coming::StoreRequest(ticket, request));
            }
            publisher::Action::Push {
                subscriber,
                descriptor,
                ..
            } => {
                let input = peers::Input::Pushed {
                    name: name(node),
                    record: record(&descriptor),
                };
                self.tell_subscriber(subscriber, input);
            }
            publisher::Action::Heartbeat {
                subscriber,
                generation,
            } => {
                let input = peers::Input::Heartbeat {
                    name: name(node),
                    instance: self.nodes[node].publisher.instance(),
                    generation,
                };
                self.tell_subscriber(subscriber, input);
            }
            _ => {}
        }
    }

    fn tell_subscriber(&mut self, subscriber: SubscriberId, input: peers::Input) {
        let (node, life) = ((subscriber.0 >> 32) as usize, subscriber.0 as u32);
        if self.nodes[node].life == life {
            self.later(WIRE, node, Coming::Peers(input));
        }
    }

    fn learnt(&mut self, node: usize, action: peers::Action) {
        let now = self.now;
        match action {
            peers::Action::Fetch { ticket, name } => {
                self.later(STORE, node, Coming::Fetch(ticket, name));
            }
            peers::Action::Subscribe { name, descriptor } => {
                let far = number(&name).expect("a node's name");
                let there = self.nodes[far].publisher.instance();
                if member(&descriptor).map(|member| member.instance) == Some(there) {
                    let subscriber = SubscriberId(subscription(node, self.nodes[node].life));
                    let subscribed = publisher::Input::Subscribed { subscriber };
                    self.later(WIRE, node, Coming::Peers(peers::Input::Subscribed { name }));
                    self.later(WIRE, far, Coming::Publisher(subscribed));
                } else {
                    let lost = peers::Input::SubscriptionLost { name };
                    self.later(WIRE, node, Coming::Peers(lost));
                }
            }
            peers::Action::Acknowledge {
                name, generation, ..
            } => {
                let far = number(&name).expect("a node's name");
                let acknowledged = publisher::Input::Acknowledged {
                    subscriber: SubscriberId(subscription(node, self.nodes[node].life)),
                    generation,
                };
                self.later(WIRE, far, Coming::Publisher(acknowledged));
            }
            peers::Action::Retired { peer, .. } => {
                let node = &mut self.nodes[node];
                node.retired.push((now, peer));
                node.rails.handle(now, rail::Input::PeerGone { peer });
                node.rails.handle(now, rail::Input::ForgetPeer { peer });
                node.of_peer.remove(&peer);
                node.endpoints.retain(|rail, _| rail.peer.peer != peer);
            }
            peers::Action::Updated {
                name, peer, nics, ..
            } => {
                let far = number(&name).expect("a node's name");
                let life = self.nodes[far].life;
                let known = self.nodes[node].of_peer.insert(peer, (far, life)).is_some();
                for rail in self.all_rails(peer).filter(|_| !known) {
                    let traits = RailTraits {
                        same_subnet: true,
                        speed_mbps: 100_000,
                    };
                    let rails = &mut self.nodes[node].rails;
                    // Down until the record says otherwise, just below.
                    rails.handle(now, rail::Input::Declare { rail, traits });
                    rails.handle(
                        now,
                        rail::Input::PeerNicGate {
                            nic: rail.peer,
                            up: false,
                        },
                    );
                    rails.handle(now, rail::Input::Wanted { rail });
                }
                for input in learnt_to_rails(peer, &nics, nic_number) {
                    self.nodes[node].rails.handle(now, input);
                }
            }
            _ => {}
        }
    }

    fn all_rails(&self, peer: PeerId) -> impl Iterator<Item = RailId> + use<> {
        let nics = self.nics;
        (0..nics).flat_map(move |local| {
            (0..nics).map(move |nic| RailId::new(LocalNic(local), peer, nic))
        })
    }

    fn railed(&mut self, node: usize, action: rail::Action) {
        match action {
            rail::Action::Connect { rail } => self.later(4 * WIRE, node, Coming::Connects(rail)),
            rail::Action::Probe { rail, probe, .. } => {
                self.later(2 * WIRE, node, Coming::Probes(rail, probe));
            }
            rail::Action::DropEndpoint { rail } => {
                self.nodes[node].endpoints.remove(&rail);
            }
            rail::Action::State {
                rail,
                to: RailState::Up,
                ..
            } => {
                let proved = Edit::Proved { local: rail.local };
                let publisher = &mut self.nodes[node].publisher;
                publisher.handle(self.now, publisher::Input::Edit(proved));
            }
            rail::Action::RecheckLocal { local } => {
                let hint = observer::Input::Hint { port: None };
                self.later(Duration::ZERO, node, Coming::Observer(local.0, hint));
            }
            rail::Action::RefreshPeer { peer } => {
                if let Some((far, _)) = self.nodes[node].of_peer.get(&peer) {
                    let trouble = peers::Input::Trouble {
                        name: name(*far),
                        trouble: peers::Trouble::Connection,
                    };
                    self.later(Duration::ZERO, node, Coming::Peers(trouble));
                }
            }
            rail::Action::State { .. } => {}
        }
    }

    /// States of all rails from one node to another, in the order of their ids.
    pub(super) fn rails(&self, node: usize, to: usize) -> Vec<RailState> {
        let Some(peer) = self.nodes[node].peers.peer(&name(to)) else {
            return Vec::new();
        };
        let node = &self.nodes[node];
        self.all_rails(peer)
            .filter_map(|rail| node.rails.state(rail))
            .collect()
    }

    /// Whether every node knows every other as it is, and all rails are up.
    pub(super) fn is_healed(&self) -> bool {
        let pairs = (0..self.nodes.len()).flat_map(|node| {
            (0..self.nodes.len())
                .filter(move |to| *to != node)
                .map(move |to| (node, to))
        });
        let mut pairs = pairs;
        pairs.all(|(node, to)| {
            let truth = self.nodes[to].publisher.descriptor();
            let known = self.nodes[node].peers.descriptor(&name(to));
            let states = self.rails(node, to);
            known.is_some_and(|known| known == truth)
                && self
                    .store
                    .get(&name(to))
                    .is_some_and(|(_, stored)| stored == truth)
                && states.len() == (self.nics * self.nics) as usize
                && states.iter().all(|state| *state == RailState::Up)
        })
    }

    /// Lets time pass until all is well; how long it took.
    pub(super) fn heal(&mut self, within: Duration) -> Duration {
        let start = self.now;
        while !self.is_healed() {
            let spent = self.now.saturating_since(start);
            assert!(
                spent < within,
                "not healed after {spent:?}: {:?}",
                self.rails(0, 1)
            );
            self.run(Duration::from_millis(10));
        }
        self.now.saturating_since(start)
    }
}

/// A subscriber's id says who it is: node and life.
fn subscription(node: usize, life: u32) -> u64 {
    (node as u64) << 32 | u64::from(life)
}

fn record(descriptor: &Arc<SegmentDescriptor>) -> PeerRecord {
    PeerRecord {
        descriptor: Arc::clone(descriptor),
        rpc: None,
    }
}

fn member(descriptor: &SegmentDescriptor) -> Option<&RerailMember> {
    descriptor.rerail.as_ref()
}

fn gid_row(gid: &str) -> GidEntry {
    GidEntry {
        index: 3,
        gid: gid.parse().expect("a GID literal"),
        gid_type: GidType::RoceV2,
        netdev: Some(Netdev {
            index: 0,
            name: "ens1".into(),
        }),
    }
}

fn port_reading(gid: &str) -> PortReading {
    PortReading {
        attr: PortAttr {
            state: PortState::Active,
            phys_state: PhysState::LinkUp,
            link_layer: LinkLayer::Ethernet,
            max_mtu: Some(Mtu::Mtu4096),
            active_mtu: Some(Mtu::Mtu4096),
            lid: 0,
            sm_lid: 0,
            gid_tbl_len: 16,
            pkey_tbl_len: 1,
            max_msg_bytes: 1 << 30,
            active_width: 2,
            active_speed: 32,
        },
        gids: vec![gid_row(gid)],
        unreadable: Vec::new(),
        netdevs: Vec::new(),
        pkeys: vec![0xffff],
    }
}
