//! Engines and a store that is late, goes away, and comes back empty: nothing is lost, and
//! transfers do not notice.
#![cfg(all(feature = "http", feature = "server"))]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rerail_engine::{Engine, EngineConfig, MemoryOptions, Request, Segment, Transport};
use rerail_metadata::server::{MetadataServer, ServerOptions};
use rerail_verbs::{DeviceList, HostMemory};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

/// Longest time until something is as it should be. The machine may be busy, and own records are
/// looked after each 30 s at the latest.
const LIMIT: Duration = Duration::from_secs(100);
const LENGTH: usize = 256 << 10;

/// A place for a store: connections are refused until it runs, and nobody else gets the port.
struct Place {
    runtime: Runtime,
    address: SocketAddr,
    bound: Option<TcpSocket>,
}

impl Place {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let bound = Self::bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        let address = bound.local_addr().expect("an address");
        Self {
            runtime,
            address,
            bound: Some(bound),
        }
    }

    fn bind(address: SocketAddr) -> std::io::Result<TcpSocket> {
        let socket = TcpSocket::new_v4()?;
        // As servers do, so that closed connections do not keep the port.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(socket)
    }

    fn url(&self) -> String {
        format!("http://{}/metadata", self.address)
    }

    /// Starts a store, with nothing in it.
    fn serve(&mut self) {
        let _guard = self.runtime.enter();
        let socket = self.bound.take().expect("not running");
        let listener = socket.listen(128).expect("listens");
        let server = MetadataServer::open(ServerOptions::default()).expect("opened");
        self.runtime
            .spawn(server.serve(listener, std::future::pending()));
    }

    /// Kills the store: its connections are cut, and what it had is gone.
    fn kill(self) -> Self {
        let address = self.address;
        self.runtime.shutdown_timeout(LIMIT);
        let mut place = Self::new();
        let started = Instant::now();
        // Another test may have the port for a moment, as the local end of a connection.
        let bound = loop {
            match Self::bind(address) {
                Ok(bound) => break bound,
                Err(error) => assert!(started.elapsed() < LIMIT, "{address}: {error}"),
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        place.bound = Some(bound);
        place.address = address;
        place
    }
}

fn engine(url: &str, name: &str) -> Engine {
    let settings =
        |variable: &str| (variable == "MC_TCP_BIND_ADDRESS").then(|| "127.0.0.1".to_owned());
    let mut config = EngineConfig::with_settings(url, name, &settings).expect("settings are valid");
    config.transport = Transport::Tcp;
    Engine::start(config, &DeviceList::default()).expect("stores may be away")
}

fn registered(engine: &Engine, length: usize) -> HostMemory {
    let memory = HostMemory::allocate(length).expect("memory");
    engine
        .register(&memory, MemoryOptions::default())
        .expect("registered");
    memory
}

/// Opens a peer's segment once it and its buffer can be found.
fn opened(engine: &Engine, name: &str) -> Segment {
    let started = Instant::now();
    loop {
        let trouble = match engine.open_segment(name) {
            Ok(segment) if !segment.buffers().is_empty() => return segment,
            Ok(_) => "no buffers".to_owned(),
            Err(error) => error.to_string(),
        };
        assert!(started.elapsed() < LIMIT, "{name}: {trouble}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Writes to the segment's first buffer and reads it back.
fn there_and_back(engine: &Engine, segment: &Segment, memory: &HostMemory, seed: u8) {
    let half = LENGTH / 2;
    let pattern: Vec<u8> = (0..half).map(|at| (at / 7) as u8 ^ seed).collect();
    memory.copy_in(0, &pattern).expect("inside");
    memory.copy_in(half, &vec![0; half]).expect("inside");
    let to = segment.buffers()[0].addr;
    let batch = engine.allocate_batch(2);
    let write = Request::write(segment, memory.addr(), to, half as u64);
    batch.submit(&[write]).expect("submitted");
    batch.wait(LIMIT).expect("written");
    let read = Request::read(segment, memory.addr() + half as u64, to, half as u64);
    batch.submit(&[read]).expect("submitted");
    batch.wait(LIMIT).expect("read");
    let mut bytes = vec![0; half];
    memory.copy_out(half, &mut bytes).expect("inside");
    assert!(bytes == pattern, "other bytes came back");
}

#[test]
fn m01_m23_a_late_store_and_one_restarted_empty_get_every_record_and_transfers_go_on() {
    let mut place = Place::new();
    let url = place.url();
    // Before there is a store.
    let (a, b) = (engine(&url, "a"), engine(&url, "b"));
    let full = std::env::var_os("RERAIL_FULL").is_some_and(|value| value == "1");
    std::thread::sleep(Duration::from_secs(if full { 20 } else { 1 }));
    place.serve();
    let _target = registered(&b, LENGTH);
    let source = registered(&a, LENGTH);
    let segment = opened(&a, "b");
    there_and_back(&a, &segment, &source, 1);

    // Without it, what is known stays in use.
    let mut place = place.kill();
    for seed in 2..20 {
        there_and_back(&a, &segment, &source, seed);
    }
    // Changes meanwhile are not lost.
    let late = registered(&a, LENGTH);
    place.serve();
    there_and_back(&a, &segment, &source, 20);
    let third = engine(&url, "c");
    let own = registered(&third, LENGTH);
    there_and_back(&third, &opened(&third, "b"), &own, 21);
    let started = Instant::now();
    loop {
        let segment = opened(&third, "a");
        if segment
            .buffers()
            .iter()
            .any(|buffer| buffer.addr == late.addr())
        {
            there_and_back(&third, &segment, &own, 22);
            break;
        }
        assert!(
            started.elapsed() < LIMIT,
            "the latest change of a is missing"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}
