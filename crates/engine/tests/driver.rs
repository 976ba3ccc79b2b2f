//! What the RDMA driver owes a request whatever the device does, over simulated NICs.
#![cfg(feature = "sim")]

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rerail_engine::{Batch, Engine, EngineConfig, MemoryOptions, Request};
use rerail_verbs::HostMemory;
use rerail_verbs::sim::{FabricOptions, NicOptions, RealTimeFabric};

/// Two engines with one NIC each, changed by `change`, and the settings of the first.
fn engines(
    fabric: &RealTimeFabric,
    change: impl Fn(&mut NicOptions),
    settings: &[(&str, &str)],
) -> (Engine, Engine) {
    let engine = |host: u8, settings: &[(&str, &str)]| {
        let node = fabric.add_node(&format!("host{host}"));
        let mut options = NicOptions::ethernet("sim0", IpAddr::from([10, 0, 0, host + 1]));
        change(&mut options);
        fabric.add_nic(node, &options);
        let lookup = |variable: &str| {
            let all = settings
                .iter()
                .chain(&[("MC_TCP_BIND_ADDRESS", "127.0.0.1")]);
            let mut found = all.filter(|(name, _)| *name == variable);
            found.next().map(|(_, value)| (*value).to_owned())
        };
        let config = EngineConfig::with_settings("P2PHANDSHAKE", "any", &lookup);
        let process = fabric.add_process(node);
        let devices = fabric.devices_of(process);
        Engine::start(config.expect("settings are valid"), &devices).expect("an engine starts")
    };
    (engine(0, settings), engine(1, &[]))
}

fn registered(engine: &Engine, length: usize) -> HostMemory {
    let memory = HostMemory::allocate(length).expect("memory");
    engine
        .register(&memory, MemoryOptions::default())
        .expect("memory can be registered");
    memory
}

fn settled(batch: &Batch, limit: Duration) -> bool {
    let begin = Instant::now();
    while batch.unfinished() > 0 {
        if begin.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

#[test]
fn reads_are_finished_on_devices_whose_reads_need_proof() {
    let fabric = RealTimeFabric::start(FabricOptions::soft_roce(11)).expect("a thread");
    let (own, peer) = engines(&fabric, |nic| nic.limits.vendor_id = 0x00ff_ffff, &[]);
    let (sink, source) = (registered(&own, 300_000), registered(&peer, 300_000));
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    for length in [1, 4096, 300_000_usize] {
        let pattern: Vec<u8> = (0..length).map(|at| (at * 31 + length) as u8).collect();
        source.copy_in(0, &pattern).expect("inside");
        let batch = own.allocate_batch(1);
        let read = Request::read(&segment, sink.addr(), source.addr(), length as u64);
        batch.submit(&[read]).expect("submitted");
        batch.wait(Duration::from_secs(30)).expect("read");
        let mut bytes = vec![0; length];
        sink.copy_out(0, &mut bytes).expect("inside");
        assert!(bytes == pattern, "{length} bytes");
    }
}

#[test]
fn a_request_whose_post_is_refused_ends_by_its_deadline() {
    // The simulated provider refuses work of more than 1 GiB, which the port says that it carries.
    let length = (1 << 30) + 1;
    let fabric = RealTimeFabric::start(FabricOptions::card(12)).expect("a thread");
    let settings = [
        ("MC_SLICE_SIZE", "1073741824"),
        ("MC_TRANSFER_TIMEOUT", "5"),
    ];
    let longest = |nic: &mut NicOptions| nic.ports[0].max_msg_bytes = u32::MAX;
    let (own, peer) = engines(&fabric, longest, &settings);
    let (source, target) = (registered(&own, length), registered(&peer, length));
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    let batch = own.allocate_batch(1);
    let write = Request::write(&segment, source.addr(), target.addr(), length as u64);
    batch.submit(&[write]).expect("submitted");
    assert!(
        settled(&batch, Duration::from_secs(20)),
        "the request was lost"
    );
    batch
        .wait(Duration::ZERO)
        .expect_err("it cannot have been done");
}
