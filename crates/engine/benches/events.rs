//! How long news of an own port takes: from the event to the gate, to the endpoints, to the store
//! and to a peer's knowledge of it. Real time, simulated NICs: the event comes through an eventfd.
//!
//! `cargo xtask bench events`. The store is `memory://`, so that its round trip is nothing.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rerail_engine::{Engine, EngineConfig, Event, Events, MemoryOptions, Request, Subscriber};
use rerail_transport::machine::Time;
use rerail_verbs::HostMemory;
use rerail_verbs::sim::{FabricOptions, NicOptions, PortId, RealTimeFabric};

/// Ports that fail, one after the other.
const ROUNDS: usize = 100;
/// Rounds that are not counted.
const WARM_UP: usize = 5;
/// How long one may take before the benchmark gives up.
const LIMIT: Duration = Duration::from_secs(30);

/// The events with the time at which each was told.
#[derive(Default)]
struct Log(Mutex<Vec<(Instant, Event)>>);

impl Subscriber for Log {
    fn event(&self, _at: Time, event: &Event) {
        let mut log = self.0.lock().expect("whole");
        log.push((Instant::now(), event.clone()));
    }
}

impl Log {
    fn clear(&self) {
        self.0.lock().expect("whole").clear();
    }

    /// When the first event that is `wanted` was told.
    fn first(&self, wanted: impl Fn(&Event) -> bool) -> Option<Instant> {
        let log = self.0.lock().expect("whole");
        log.iter()
            .find(|(_, event)| wanted(event))
            .map(|(at, _)| *at)
    }

    /// The generation of the record without the port: the first one after the gate was closed.
    fn generation(&self) -> Option<u64> {
        let log = self.0.lock().expect("whole");
        let mut after = log
            .iter()
            .skip_while(|(_, event)| !matches!(event, Event::GateClosed { .. }));
        after.find_map(|(_, event)| match event {
            Event::Edited { generation } => Some(*generation),
            _ => None,
        })
    }

    fn wait(&self, what: &str, wanted: impl Fn(&Event) -> bool) -> Instant {
        self.wait_for(what, || self.first(&wanted))
    }

    fn wait_for<T>(&self, what: &str, found: impl Fn() -> Option<T>) -> T {
        let begin = Instant::now();
        loop {
            if let Some(found) = found() {
                return found;
            }
            assert!(begin.elapsed() < LIMIT, "never: {what}");
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

fn engine(fabric: &RealTimeFabric, name: &str, host: u8) -> (Engine, Arc<Log>, PortId) {
    let node = fabric.add_node(name);
    // One, since the last rail to a peer is tried again however often it fails.
    let address = IpAddr::from([10, 0, 0, host]);
    let nic = fabric.add_nic(node, &NicOptions::ethernet("sim0", address));
    let lookup =
        |variable: &str| (variable == "MC_TCP_BIND_ADDRESS").then(|| "127.0.0.1".to_owned());
    let config = EngineConfig::with_settings("memory://bench-events", name, &lookup);
    let mut config = config.expect("valid");
    let log = Arc::new(Log::default());
    config.events = Events::new(Arc::clone(&log) as Arc<dyn Subscriber>);
    let devices = fabric.devices_of(fabric.add_process(node));
    let engine = Engine::start(config, &devices).expect("an engine starts");
    let port = PortId { nic, port: 1 };
    (engine, log, port)
}

fn main() {
    let fabric = RealTimeFabric::start(FabricOptions::card(1)).expect("a thread");
    let (own, log, port) = engine(&fabric, "own", 1);
    let (peer, peer_log, _) = engine(&fabric, "peer", 2);
    let memory = |engine: &Engine| {
        let memory = HostMemory::allocate(1 << 20).expect("memory");
        let options = MemoryOptions::default();
        engine.register(&memory, options).expect("registered");
        memory
    };
    let (target, source) = (memory(&own), memory(&peer));
    // The peer follows the owner's record, and has a connection to its NIC.
    let segment = peer.open_segment(own.name()).expect("it is there");
    let mut batch = peer.allocate_batch(1);
    let mut write = || {
        let write = Request::write(&segment, source.addr(), target.addr(), 1 << 20);
        batch.submit(&[write]).expect("submitted");
        batch.wait(LIMIT).expect("moved");
        batch.clear().expect("finished");
    };
    let steps = [
        "gate closed",
        "endpoints cut",
        "record stored",
        "peer's cache",
        "peer's rail left",
    ];
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); steps.len()];
    for round in 0..WARM_UP + ROUNDS {
        let begin = Instant::now();
        let is_up = || {
            let rails = peer.rails(&segment);
            let up = rerail_engine::RailState::Up;
            rails.iter().any(|rail| rail.state == up)
        };
        while !is_up() {
            write();
            assert!(begin.elapsed() < LIMIT, "the port's rail is never up");
        }
        log.clear();
        peer_log.clear();
        let failed = Instant::now();
        fabric.port_down(port);
        let gate = log.wait(steps[0], |event| matches!(event, Event::GateClosed { .. }));
        let cut = log.wait(steps[1], |event| {
            matches!(event, Event::EndpointsCut { .. })
        });
        let generation = log.wait_for("the record is edited", || log.generation());
        let stored = log.wait(steps[2], |event| {
            matches!(event, Event::Published { generation: stored } if *stored >= generation)
        });
        // The peer acknowledges what it has taken in.
        let known = log.wait(steps[3], |event| {
            matches!(event, Event::PeerTold { generation: told, .. } if *told >= generation)
        });
        let left = peer_log.wait(steps[4], |event| {
            matches!(event, Event::Rail { to: "down", .. })
        });
        let told = [gate, cut, stored, known, left];
        if round >= WARM_UP {
            for (times, at) in times.iter_mut().zip(told) {
                times.push(at.saturating_duration_since(failed));
            }
        }
        fabric.port_up(port);
    }
    println!("from the event, {ROUNDS} rounds:       p50        p99");
    for (step, mut times) in steps.iter().zip(times) {
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e3;
        println!("{step:24} {:9.3} ms {:9.3} ms", at(50), at(99));
    }
}
