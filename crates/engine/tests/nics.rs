//! Own NICs that change while bytes move, over simulated NICs in real time.
#![cfg(feature = "sim")]

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rerail_engine::{Engine, EngineConfig, Event, Events, MemoryOptions, Request, Segment};
use rerail_engine::{RailState, Subscriber};
use rerail_transport::machine::Time;
use rerail_verbs::sim::{FabricOptions, NicId, NicOptions, NodeId, PortId, RealTimeFabric};
use rerail_verbs::{AsyncEventKind, Gid, HostMemory};

const LIMIT: Duration = Duration::from_secs(30);

/// Keeps every event.
#[derive(Default)]
struct Log(Mutex<Vec<Event>>);

impl Subscriber for Log {
    fn event(&self, _at: Time, event: &Event) {
        self.0.lock().expect("whole").push(event.clone());
    }
}

impl Log {
    fn count(&self, what: impl Fn(&Event) -> bool) -> usize {
        let events = self.0.lock().expect("whole");
        events.iter().filter(|event| what(event)).count()
    }
}

struct Host {
    node: NodeId,
    nics: Vec<NicId>,
}

struct Rig {
    fabric: RealTimeFabric,
    hosts: Vec<Host>,
}

/// Two hosts with two NICs each. Rail `n` of host `h` has the address 10.`n`.0.`h + 1`.
fn rig(seed: u64) -> Rig {
    let fabric = RealTimeFabric::start(FabricOptions::card(seed)).expect("a thread");
    let hosts = (0..2_u8).map(|host| {
        let node = fabric.add_node(&format!("host{host}"));
        let nics = (0..2_u8).map(|rail| {
            let options = NicOptions::ethernet(&format!("sim{rail}"), address(rail, host + 1));
            fabric.add_nic(node, &options)
        });
        Host {
            node,
            nics: nics.collect(),
        }
    });
    let hosts = hosts.collect();
    Rig { fabric, hosts }
}

fn address(rail: u8, last: u8) -> IpAddr {
    IpAddr::from([10, rail, 0, last])
}

impl Rig {
    fn engine(&self, host: usize) -> (Engine, Arc<Log>) {
        let lookup =
            |variable: &str| (variable == "MC_TCP_BIND_ADDRESS").then(|| "127.0.0.1".to_owned());
        let mut config =
            EngineConfig::with_settings("P2PHANDSHAKE", "any", &lookup).expect("valid");
        let log = Arc::new(Log::default());
        config.events = Events::new(Arc::clone(&log) as Arc<dyn Subscriber>);
        let process = self.fabric.add_process(self.hosts[host].node);
        let devices = self.fabric.devices_of(process);
        let engine = Engine::start(config, &devices).expect("an engine starts");
        (engine, log)
    }

    fn port(&self, host: usize, rail: usize) -> PortId {
        PortId {
            nic: self.hosts[host].nics[rail],
            port: 1,
        }
    }
}

/// Two engines with memory, and a way to move it.
struct Pair {
    own: Engine,
    own_log: Arc<Log>,
    peer: Engine,
    peer_log: Arc<Log>,
    segment: Segment,
    source: HostMemory,
    target: HostMemory,
}

impl Pair {
    fn new(rig: &Rig) -> Self {
        let ((own, own_log), (peer, peer_log)) = (rig.engine(0), rig.engine(1));
        let memory = |engine: &Engine| {
            let memory = HostMemory::allocate(1 << 20).expect("memory");
            let options = MemoryOptions::default();
            engine.register(&memory, options).expect("registered");
            memory
        };
        let (source, target) = (memory(&own), memory(&peer));
        let segment = own.open_segment(peer.name()).expect("the peer is there");
        Self {
            own,
            own_log,
            peer,
            peer_log,
            segment,
            source,
            target,
        }
    }

    /// Writes until `done`. No write may fail.
    fn write_until(&self, what: &str, mut done: impl FnMut() -> bool) {
        let begin = Instant::now();
        let mut batch = self.own.allocate_batch(4);
        while !done() {
            assert!(begin.elapsed() < LIMIT, "waited in vain until {what}");
            let (from, to) = (self.source.addr(), self.target.addr());
            let write = Request::write(&self.segment, from, to, 1 << 20);
            batch.submit(&vec![write; 4]).expect("submitted");
            batch.wait(LIMIT).expect("nothing fails");
            batch.clear().expect("finished");
        }
    }

    /// Bytes that own NIC `rail` has moved.
    fn bytes(&self, rail: usize) -> u64 {
        let name = format!("sim{rail}");
        let rails = self.own.rails(&self.segment);
        let of_nic = rails.iter().filter(|rail| rail.local == name);
        of_nic.map(|rail| rail.bytes).sum()
    }

    fn both_up(&self) -> bool {
        let rails = self.own.rails(&self.segment);
        let up = |name: &str| {
            let of_nic = |rail: &&rerail_engine::RailStats| rail.local == name;
            rails
                .iter()
                .filter(of_nic)
                .any(|rail| rail.state == RailState::Up)
        };
        up("sim0") && up("sim1")
    }
}

/// Names of the NICs in a record's matrix.
fn published(engine: &Engine) -> Vec<String> {
    let record = engine.descriptor();
    let all = record.priority_matrix.values();
    all.flat_map(|nics| nics.preferred.iter().chain(&nics.available))
        .cloned()
        .collect()
}

fn generation(engine: &Engine) -> u64 {
    engine.descriptor().rerail.expect("ours").generation
}

#[test]
fn an_own_port_that_fails_is_withdrawn_and_carries_traffic_again_once_it_is_back() {
    let rig = rig(1);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let cut = |event: &Event| matches!(event, Event::EndpointsCut { nic, .. } if nic == "sim1");
    rig.fabric.port_down(rig.port(0, 1));
    pair.write_until("the endpoints are cut", || pair.own_log.count(cut) > 0);
    assert_eq!(published(&pair.own), ["sim0"]);
    let before = pair.bytes(1);
    rig.fabric.port_up(rig.port(0, 1));
    pair.write_until("the rail carries bytes", || pair.bytes(1) > before);
    assert_eq!(published(&pair.own), ["sim0", "sim1"]);
    let closed = |event: &Event| matches!(event, Event::GateClosed { nic, .. } if nic == "sim0");
    assert_eq!(
        pair.own_log.count(closed),
        0,
        "the other NIC is not touched"
    );
}

#[test]
fn a_peers_port_that_fails_costs_no_transfer_and_is_used_again() {
    let rig = rig(2);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let opened = |event: &Event| matches!(event, Event::GateOpened { nic } if nic == "sim0");
    let before = pair.peer_log.count(opened);
    rig.fabric.port_down(rig.port(1, 0));
    pair.write_until("it is withdrawn", || published(&pair.peer) == ["sim1"]);
    rig.fabric.port_up(rig.port(1, 0));
    pair.write_until("its gate is open", || pair.peer_log.count(opened) > before);
    let used = pair.bytes(0);
    pair.write_until("the rail carries bytes", || pair.bytes(0) > used);
}

#[test]
fn a_renumbered_port_is_published_with_its_new_gid_and_used_again() {
    for host in [0, 1] {
        let rig = rig(3);
        let pair = Pair::new(&rig);
        pair.write_until("both rails are up", || pair.both_up());
        let engine = if host == 0 { &pair.own } else { &pair.peer };
        let before = generation(engine);
        let port = rig.port(host, 0);
        let old = address(0, host as u8 + 1);
        assert!(rig.fabric.delete_address(port, old));
        assert!(rig.fabric.add_address(port, address(0, 11)));
        let new = Gid::from_ip(address(0, 11));
        let renumbered = || engine.descriptor().devices[0].gid == new;
        pair.write_until("the new GID is published", renumbered);
        assert!(generation(engine) > before);
        let used = pair.bytes(0);
        pair.write_until("the rail carries bytes", || pair.bytes(0) > used);
    }
}

#[test]
fn e07_a_gid_that_moves_to_another_row_is_used_there_and_not_published() {
    let rig = rig(8);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let before = generation(&pair.own);
    let (port, address) = (rig.port(0, 0), address(0, 1));
    let moved =
        |event: &Event| matches!(event, Event::PortRead { outcome, .. } if *outcome == "moved");
    // While a queue pair uses it, the old row stays a hole: the same bytes come back elsewhere.
    assert!(rig.fabric.delete_address(port, address));
    assert!(rig.fabric.add_address(port, address));
    let seen = || pair.own_log.count(moved) > 0 || generation(&pair.own) > before;
    pair.write_until("the port is read", seen);
    let used = pair.bytes(0);
    pair.write_until("the rail carries bytes", || {
        pair.bytes(0) > used + (4 << 20)
    });
    let rails = pair.own.rails(&pair.segment);
    let rtr = rails
        .iter()
        .filter(|rail| rail.local == "sim0" && rail.errors > 8);
    assert_eq!(rtr.count(), 0, "connections over the old row: {rails:?}");
}

#[test]
fn e01_events_without_a_change_cut_and_publish_nothing() {
    let rig = rig(4);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let unchanged =
        |event: &Event| matches!(event, Event::PortRead { outcome, .. } if *outcome == "unchanged");
    let (generation_before, read_before) = (generation(&pair.own), pair.own_log.count(unchanged));
    for _ in 0..40 {
        let nic = rig.hosts[0].nics[0];
        rig.fabric
            .raise_event(nic, AsyncEventKind::GidChange, Some(1));
    }
    pair.write_until("the port is read", || {
        pair.own_log.count(unchanged) > read_before
    });
    assert_eq!(generation(&pair.own), generation_before);
    let cut =
        |event: &Event| matches!(event, Event::EndpointsCut { .. } | Event::GateClosed { .. });
    assert_eq!(pair.own_log.count(cut), 0);
    let errors: u64 = pair
        .own
        .rails(&pair.segment)
        .iter()
        .map(|rail| rail.errors)
        .sum();
    assert_eq!(errors, 0);
}

#[test]
fn a_device_that_dies_is_opened_again_with_all_memory_registered() {
    let rig = rig(5);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let nic = rig.hosts[0].nics[1];
    let released =
        |event: &Event| matches!(event, Event::ContextReleased { nic, .. } if nic == "sim1");
    let reopened = |event: &Event| matches!(event, Event::ContextReopened { nic } if nic == "sim1");
    rig.fabric.kill_device(nic);
    pair.write_until("it is given up", || pair.own_log.count(released) > 0);
    assert_eq!(published(&pair.own), ["sim0"]);
    // Registered while it is dead: with the other NIC only.
    let late = HostMemory::allocate(4096).expect("memory");
    let options = MemoryOptions::default();
    pair.own.register(&late, options).expect("registered");
    rig.fabric.reset_device(nic);
    pair.write_until("it is open again", || pair.own_log.count(reopened) > 0);
    let used = pair.bytes(1);
    pair.write_until("the rail carries bytes", || pair.bytes(1) > used);
    for buffer in &pair.own.descriptor().buffers {
        assert!(buffer.rkey.iter().all(|key| *key != 0), "{buffer:?}");
    }
    pair.own.unregister(late.addr()).expect("nothing uses it");
}

#[test]
fn a_device_that_is_pulled_out_and_put_back_is_taken_in_again() {
    let rig = rig(6);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let nic = rig.hosts[0].nics[0];
    let released = |event: &Event| matches!(event, Event::ContextReleased { .. });
    let reopened = |event: &Event| matches!(event, Event::ContextReopened { .. });
    rig.fabric.unplug(nic);
    pair.write_until("it is given up", || pair.own_log.count(released) > 0);
    rig.fabric.plug(nic);
    pair.write_until("it is open again", || pair.own_log.count(reopened) > 0);
    let used = pair.bytes(0);
    pair.write_until("the rail carries bytes", || pair.bytes(0) > used);
}

#[test]
fn a_control_verb_that_hangs_costs_its_device_only() {
    let rig = rig(7);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    rig.fabric
        .hang_control(rig.hosts[0].nics[1], Duration::from_secs(60));
    // Makes the device's control thread do something, which then hangs.
    rig.fabric.port_down(rig.port(0, 1));
    let released =
        |event: &Event| matches!(event, Event::ContextReleased { nic, .. } if nic == "sim1");
    pair.write_until("it is given up", || pair.own_log.count(released) > 0);
    let used = pair.bytes(0);
    pair.write_until("the other NIC goes on", || {
        pair.bytes(0) > used + (32 << 20)
    });
}
