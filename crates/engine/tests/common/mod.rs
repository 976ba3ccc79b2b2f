//! Hosts with simulated NICs, engines on them, and bytes that move between two of them.
//!
//! Deliberately not here: what is particular to one test program, such as broken peers.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rerail_engine::{
    Engine, EngineConfig, Event, Events, MemoryOptions, RailState, RailStats, Request, Result,
    Segment, Subscriber,
};
use rerail_metadata::memory::MemoryStore;
use rerail_transport::machine::Time;
use rerail_transport::rpc::{Frame, MessageType};
use rerail_verbs::HostMemory;
use rerail_verbs::sim::{
    FabricOptions, NicId, NicOptions, NodeId, PortId, ProcessId, RealTimeFabric,
};

/// A time within which everything happens on a host under load.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// Bytes of each write of a [`Pair`].
pub(crate) const LENGTH: u64 = 1 << 20;

/// Keeps every event, with its time.
#[derive(Default)]
pub(crate) struct Log(Mutex<Vec<(Instant, Event)>>);

impl Subscriber for Log {
    fn event(&self, _at: Time, event: &Event) {
        let entry = (Instant::now(), event.clone());
        self.0.lock().expect("whole").push(entry);
    }
}

impl Log {
    /// How many events are such.
    pub(crate) fn count(&self, is: impl Fn(&Event) -> bool) -> usize {
        let log = self.0.lock().expect("whole");
        log.iter().filter(|(_, event)| is(event)).count()
    }

    /// Forgets the events that came so far, and lets go of what they held.
    pub(crate) fn forget(&self) {
        drop(std::mem::take(&mut *self.0.lock().expect("whole")));
    }

    /// What events were, each in the place of its first.
    pub(crate) fn steps(&self, step: impl Fn(&Event) -> Option<&'static str>) -> Vec<&'static str> {
        let log = self.0.lock().expect("whole");
        let mut steps = Vec::new();
        for step in log.iter().filter_map(|(_, event)| step(event)) {
            if !steps.contains(&step) {
                steps.push(step);
            }
        }
        steps
    }

    /// When the first such event came.
    pub(crate) fn first(&self, is: impl Fn(&Event) -> bool) -> Option<Instant> {
        let log = self.0.lock().expect("whole");
        let found = log.iter().find(|(_, event)| is(event));
        found.map(|(at, _)| *at)
    }
}

/// A host of the fabric.
pub(crate) struct Host {
    pub(crate) node: NodeId,
    pub(crate) nics: Vec<NicId>,
}

/// Two hosts. Rail `n` of host `h` is the NIC `sim<n>` with the address 10.`n`.0.`h + 1`.
pub(crate) struct Rig {
    pub(crate) fabric: RealTimeFabric,
    pub(crate) hosts: Vec<Host>,
    /// Where engines meet.
    pub(crate) metadata: String,
}

/// An engine in a process of its own.
pub(crate) struct Running {
    pub(crate) engine: Engine,
    pub(crate) log: Arc<Log>,
    pub(crate) process: ProcessId,
}

/// An address on a rail.
pub(crate) fn address(rail: u8, last: u8) -> IpAddr {
    IpAddr::from([10, rail, 0, last])
}

impl Rig {
    /// With `rails` NICs a host, a subnet for each rail. Engines ask each other for their records.
    pub(crate) fn new(seed: u64, rails: u8) -> Self {
        Self::with(seed, rails, |host, rail| {
            NicOptions::ethernet(&format!("sim{rail}"), address(rail, host + 1))
        })
    }

    /// The same with all NICs in one subnet, in which each reaches each.
    pub(crate) fn in_one_subnet(seed: u64, rails: u8) -> Self {
        Self::with(seed, rails, |host, rail| {
            let address = IpAddr::from([10, 0, host, rail + 1]);
            NicOptions::ethernet(&format!("sim{rail}"), address)
        })
    }

    /// With `rails` NICs a host, each as `nic` says for its host and rail.
    pub(crate) fn with(seed: u64, rails: u8, nic: impl Fn(u8, u8) -> NicOptions) -> Self {
        let fabric = RealTimeFabric::start(FabricOptions::card(seed)).expect("a thread");
        let hosts = (0..2_u8).map(|host| {
            let node = fabric.add_node(&format!("host{host}"));
            let nics = (0..rails).map(|rail| fabric.add_nic(node, &nic(host, rail)));
            let nics = nics.collect();
            Host { node, nics }
        });
        let hosts = hosts.collect();
        Self {
            fabric,
            hosts,
            metadata: "P2PHANDSHAKE".into(),
        }
    }

    /// Gives a host one more NIC, on a rail of its own.
    pub(crate) fn add_nic(&mut self, host: usize) {
        let Host { node, nics } = &mut self.hosts[host];
        let rail = nics.len() as u8;
        let address = address(rail, host as u8 + 1);
        let options = NicOptions::ethernet(&format!("sim{rail}"), address);
        nics.push(self.fabric.add_nic(*node, &options));
    }

    /// Engines that start from now on meet in a store of this name, which nobody else has.
    pub(crate) fn meeting_in(self, store: &str) -> Self {
        Self {
            metadata: format!("memory://{store}"),
            ..self
        }
    }

    /// The store.
    pub(crate) fn store(&self) -> MemoryStore {
        let name = self.metadata.trim_start_matches("memory://");
        MemoryStore::shared(name, Duration::from_secs(3))
    }

    /// Starts an engine.
    pub(crate) fn start(&self, host: usize, name: &str, settings: &[(&str, &str)]) -> Running {
        self.try_start(host, name, settings, |_| {})
            .expect("an engine starts")
    }

    /// Starts an engine whose settings are changed by `change` at last.
    pub(crate) fn try_start(
        &self,
        host: usize,
        name: &str,
        settings: &[(&str, &str)],
        change: impl FnOnce(&mut EngineConfig),
    ) -> Result<Running> {
        let mut config = config(&self.metadata, name, settings)?;
        let log = Arc::new(Log::default());
        config.events = Events::new(Arc::clone(&log) as Arc<dyn Subscriber>);
        change(&mut config);
        let process = self.fabric.add_process(self.hosts[host].node);
        let devices = self.fabric.devices_of(process);
        Ok(Running {
            engine: Engine::start(config, &devices)?,
            log,
            process,
        })
    }

    /// The port of a host's rail.
    pub(crate) fn port(&self, host: usize, rail: usize) -> PortId {
        PortId {
            nic: self.hosts[host].nics[rail],
            port: 1,
        }
    }
}

/// Settings on loopback.
pub(crate) fn config(
    metadata: &str,
    name: &str,
    settings: &[(&str, &str)],
) -> Result<EngineConfig> {
    let lookup = |variable: &str| {
        let set = settings.iter().find(|(name, _)| *name == variable);
        let set = set.map(|(_, value)| (*value).to_owned());
        set.or_else(|| (variable == "MC_TCP_BIND_ADDRESS").then(|| "127.0.0.1".to_owned()))
    };
    EngineConfig::with_settings(metadata, name, &lookup)
}

/// Registers new memory.
pub(crate) fn registered(engine: &Engine, length: u64) -> HostMemory {
    let memory = HostMemory::allocate(length as usize).expect("memory");
    engine
        .register(&memory, MemoryOptions::default())
        .expect("memory can be registered");
    memory
}

/// A subscription by hand, which takes nothing and says nothing.
pub(crate) fn subscribed(owner: &Engine) -> TcpStream {
    let mut stream = TcpStream::connect(owner.rpc_address()).expect("it listens");
    let text = format!("{{\"instance\":\"{}\"}}", "5".repeat(32));
    let frame = Frame::typed(MessageType::Subscribe, text).encode();
    stream.write_all(&frame).expect("sent");
    stream.read_exact(&mut [0]).expect("it is told");
    stream
}

/// Waits until `holds`.
pub(crate) fn until(what: &str, holds: impl FnMut() -> bool) {
    until_within(LIMIT, what, holds);
}

/// Waits until `holds`, for something that takes its time.
pub(crate) fn until_within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < limit, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Two engines with memory, and a way to move it.
pub(crate) struct Pair {
    pub(crate) own: Engine,
    pub(crate) own_log: Arc<Log>,
    pub(crate) peer: Engine,
    pub(crate) peer_log: Arc<Log>,
    pub(crate) segment: Segment,
    pub(crate) source: HostMemory,
    pub(crate) target: HostMemory,
}

impl Pair {
    pub(crate) fn new(rig: &Rig) -> Self {
        Self::with_settings(rig, &[])
    }

    /// With settings for the first engine.
    pub(crate) fn with_settings(rig: &Rig, settings: &[(&str, &str)]) -> Self {
        Self::of(rig.start(0, "own", settings), rig.start(1, "peer", &[]))
    }

    /// Of engines that run.
    pub(crate) fn of(own: Running, peer: Running) -> Self {
        let source = registered(&own.engine, LENGTH);
        let target = registered(&peer.engine, LENGTH);
        let segment = own.engine.open_segment(peer.engine.name());
        Self {
            segment: segment.expect("the peer is there"),
            own: own.engine,
            own_log: own.log,
            peer: peer.engine,
            peer_log: peer.log,
            source,
            target,
        }
    }

    /// Writes until `done`, and returns how long the longest batch took. No write may fail.
    pub(crate) fn write_until(&self, what: &str, mut done: impl FnMut() -> bool) -> Duration {
        let begin = Instant::now();
        let mut longest = Duration::ZERO;
        let mut batch = self.own.allocate_batch(4);
        while !done() {
            let in_time = begin.elapsed() < LIMIT;
            assert!(
                in_time,
                "waited in vain until {what}: longest batch {longest:?}, {:?}",
                self.own.rails(&self.segment)
            );
            let (from, to) = (self.source.addr(), self.target.addr());
            let write = Request::write(&self.segment, from, to, LENGTH);
            let submitted = Instant::now();
            batch.submit(&vec![write; 4]).expect("submitted");
            batch.wait(LIMIT).expect("nothing fails");
            longest = longest.max(submitted.elapsed());
            batch.clear().expect("finished");
        }
        longest
    }

    /// Rails that start at own NIC `rail`.
    fn rails(&self, rail: usize) -> Vec<RailStats> {
        let name = format!("sim{rail}");
        let mut rails = self.own.rails(&self.segment);
        rails.retain(|rail| rail.local == name);
        rails
    }

    /// Bytes that own NIC `rail` has moved.
    pub(crate) fn bytes(&self, rail: usize) -> u64 {
        self.rails(rail).iter().map(|rail| rail.bytes).sum()
    }

    /// Bytes that went from own NIC `rail` to the peer's NIC `peer_rail`.
    pub(crate) fn bytes_to(&self, rail: usize, peer_rail: usize) -> u64 {
        let peer = format!("@sim{peer_rail}");
        let rails = self.rails(rail);
        let found = rails.iter().find(|rail| rail.peer.ends_with(&peer));
        found.map_or(0, |rail| rail.bytes)
    }

    /// Whether own NIC `rail` can be used.
    pub(crate) fn is_up(&self, rail: usize) -> bool {
        let rails = self.rails(rail);
        rails.iter().any(|rail| rail.state == RailState::Up)
    }

    /// Whether the first two own NICs can be used.
    pub(crate) fn both_up(&self) -> bool {
        self.is_up(0) && self.is_up(1)
    }
}

/// Names of the NICs in a record's matrix.
pub(crate) fn published(engine: &Engine) -> Vec<String> {
    let record = engine.descriptor();
    let all = record.priority_matrix.values();
    all.flat_map(|nics| nics.preferred.iter().chain(&nics.available))
        .cloned()
        .collect()
}

/// Generation of an engine's record.
pub(crate) fn generation(engine: &Engine) -> u64 {
    engine.descriptor().rerail.expect("ours").generation
}
