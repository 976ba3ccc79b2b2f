//! How peers learn: over subscriptions, by the store and after trouble; and what ends with a peer.
#![cfg(feature = "sim")]

mod common;

use std::io::Read as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{LIMIT, Log, Rig, registered, subscribed, until};
use rerail_engine::{
    Batch, Engine, EngineConfig, EngineError, Event, Events, MemoryOptions, Request, Result,
    Segment, Subscriber, Transport,
};
use rerail_metadata::descriptor::{JsonForm, RpcMeta};
use rerail_metadata::memory::{MemoryFaults, MemoryStore};
use rerail_metadata::{KeySpace, MetadataStore};
use rerail_transport::TransferError;
use rerail_transport::rdma::Offer;
use rerail_transport::rpc::{ConnectionMessage, HostPort, RpcClient};
use rerail_verbs::sim::ProcessId;
use rerail_verbs::{DeviceList, HostMemory};

/// Hosts with `rails` NICs each, and a store of their own.
fn rig(name: &str, seed: u64, rails: u8) -> Rig {
    Rig::in_one_subnet(seed, rails).meeting_in(&format!("engine-peers-{name}"))
}

fn engine(rig: &Rig, host: usize, name: &str) -> Engine {
    rig.start(host, name, &[]).engine
}

fn engine_with(
    rig: &Rig,
    host: usize,
    name: &str,
    change: impl FnOnce(&mut EngineConfig),
) -> (Engine, ProcessId) {
    let running = rig.try_start(host, name, &[], change);
    let running = running.expect("an engine starts");
    (running.engine, running.process)
}

fn faults(rig: &Rig) -> MemoryFaults {
    rig.store().faults()
}

fn config(metadata: &str, name: &str) -> EngineConfig {
    common::config(metadata, name, &[]).expect("settings are valid")
}

fn tcp_engine(metadata: &str, name: &str) -> Engine {
    let mut config = config(metadata, name);
    config.transport = Transport::Tcp;
    Engine::start(config, &DeviceList::default()).expect("an engine starts without devices")
}

fn submit(own: &Engine, segment: &Segment, from: &HostMemory, to: u64) -> Result<Batch> {
    let batch = own.allocate_batch(1);
    let mut request = Request::write(segment, from.addr(), to, from.length() as u64);
    request.timeout = Some(LIMIT);
    batch.submit(&[request])?;
    Ok(batch)
}

fn write(own: &Engine, segment: &Segment, from: &HostMemory, to: &HostMemory) -> Result<()> {
    submit(own, segment, from, to.addr())?.wait(2 * LIMIT)
}

/// An engine over TCP whose events are remembered.
fn logged_tcp(metadata: &str, name: &str) -> (Engine, Arc<Log>) {
    let log = Arc::new(Log::default());
    let mut config = config(metadata, name);
    config.transport = Transport::Tcp;
    config.events = Events::new(Arc::clone(&log) as Arc<dyn Subscriber>);
    let engine = Engine::start(config, &DeviceList::default());
    (engine.expect("an engine starts"), log)
}

fn is_told(generation: u64) -> impl Fn(&Event) -> bool {
    move |event| matches!(event, Event::PeerTold { generation: told, .. } if *told >= generation)
}

#[test]
fn a_subscriber_is_told_of_an_edit_without_any_store() {
    let (owner, log) = logged_tcp("P2PHANDSHAKE", "a");
    let reader = tcp_engine("P2PHANDSHAKE", "b");
    let segment = reader.open_segment(owner.name()).expect("it is there");
    let generation = || owner.descriptor().rerail.expect("it has one").generation;
    until("the first record is acknowledged", || {
        log.first(is_told(generation())).is_some()
    });
    let mut took = Vec::new();
    let (mut held, source) = (Vec::new(), registered(&reader, 4096));
    for _ in 0..20 {
        let begin = Instant::now();
        let memory = registered(&owner, 4096);
        let generation = generation();
        until("an edit is acknowledged", || {
            log.first(is_told(generation)).is_some()
        });
        let told = log.first(is_told(generation)).expect("told");
        took.push(told.saturating_duration_since(begin));
        // The segment that is open follows: nothing was read again.
        write(&reader, &segment, &source, &memory).expect("it reaches the new memory");
        held.push(memory);
    }
    took.sort();
    // The median, since a test host under load stops everything now and then.
    assert!(took[10] < Duration::from_millis(100), "{took:?}");
}

#[test]
fn a_peer_that_is_killed_and_started_again_ends_its_requests() {
    let rig = rig("restart", 1, 1);
    let own = engine(&rig, 0, "own");
    let (peer, process) = engine_with(&rig, 1, "peer", |_| {});
    let (source, target) = (registered(&own, 1 << 20), registered(&peer, 1 << 20));
    let segment = own.open_segment("peer").expect("it is there");
    write(&own, &segment, &source, &target).expect("connected");
    // Killed: its record stays, and nobody answers.
    faults(&rig).outage(true);
    rig.fabric.kill_process(process);
    let addr = target.addr();
    drop(peer);
    faults(&rig).outage(false);
    let waiting = submit(&own, &segment, &source, addr).expect("submitted");
    std::thread::sleep(Duration::from_millis(2_500));
    assert_eq!(waiting.unfinished(), 1, "the peer may still come back");

    let begin = Instant::now();
    let again = engine(&rig, 1, "peer");
    let instance = again.descriptor().rerail.expect("it has one").instance;
    let error = waiting.wait(LIMIT).expect_err("its process is gone");
    let took = begin.elapsed();
    assert!(
        matches!(
            error,
            EngineError::Transfer(TransferError::PeerRestarted { .. })
        ),
        "{error}"
    );
    assert!(took < LIMIT / 2, "long before its time limit: {took:?}");
    // Requests by the old segment fail at once, and the new process is found.
    let late = submit(&own, &segment, &source, addr).expect("submitted");
    let error = late.wait(LIMIT).expect_err("of the old process");
    assert!(
        matches!(
            error,
            EngineError::Transfer(TransferError::PeerRestarted { .. })
        ),
        "{error}"
    );
    let target = registered(&again, 1 << 20);
    let segment = own.open_segment("peer").expect("it is there");
    let found = segment.descriptor().rerail.as_ref().expect("it has one");
    assert_eq!(found.instance, instance);
    write(&own, &segment, &source, &target).expect("written");
}

#[test]
fn over_tcp_a_peer_that_is_started_again_ends_its_requests() {
    let url = "memory://engine-peers-tcp-restart";
    let own = tcp_engine(url, "own");
    let peer = tcp_engine(url, "peer");
    let (source, target) = (registered(&own, 4096), registered(&peer, 4096));
    let segment = own.open_segment("peer").expect("it is there");
    write(&own, &segment, &source, &target).expect("written");
    drop(peer);
    let again = tcp_engine(url, "peer");
    until("the new process is seen", || {
        let late = submit(&own, &segment, &source, target.addr()).expect("submitted");
        let ended = late.wait(LIMIT);
        matches!(
            ended,
            Err(EngineError::Transfer(TransferError::PeerRestarted { .. }))
        )
    });
    let target = registered(&again, 4096);
    let segment = own.open_segment("peer").expect("it is there");
    write(&own, &segment, &source, &target).expect("written");
}

#[test]
fn a_cpp_peer_at_another_rpc_port_is_another_process() {
    let url = "memory://engine-peers-cpp";
    let (own, peer) = (tcp_engine(url, "own"), tcp_engine(url, "peer"));
    let (source, target) = (registered(&own, 4096), registered(&peer, 4096));
    let store = MemoryStore::shared("engine-peers-cpp", Duration::from_secs(3));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let keys = KeySpace::default();
    let put = |key: String, text: String| {
        let put = store.put(&key, text.into(), None);
        runtime.block_on(put).expect("stored");
    };
    let locate = |port| {
        let text = RpcMeta::new("127.0.0.1", port).to_json(JsonForm::Line);
        let text = String::from_utf8(text).expect("JSON");
        put(keys.rpc_meta("cpp"), text);
    };
    // Its record as a C++ engine would write it.
    let publish = || {
        let mut record = peer.descriptor();
        (record.name, record.rerail) = ("cpp".into(), None);
        let text = String::from_utf8(record.to_json(JsonForm::Line)).expect("JSON");
        put(keys.segment("cpp"), text);
    };
    locate(20_001);
    publish();
    let segment = own.open_segment("cpp").expect("it is there");
    write(&own, &segment, &source, &target).expect("written");
    // The same process says something new: nothing ends, and it is followed.
    let more = registered(&peer, 4096);
    publish();
    until("the open segment follows", || {
        let batch = submit(&own, &segment, &source, more.addr());
        batch.is_ok_and(|batch| batch.wait(LIMIT).is_ok())
    });
    write(&own, &segment, &source, &target).expect("written");
    locate(20_002);
    until("another process is seen", || {
        let late = submit(&own, &segment, &source, target.addr()).expect("submitted");
        matches!(
            late.wait(LIMIT),
            Err(EngineError::Transfer(TransferError::PeerRestarted { .. }))
        )
    });
    let segment = own.open_segment("cpp").expect("it is there");
    write(&own, &segment, &source, &target).expect("written");
}

#[test]
fn m30_without_a_store_transfers_go_on_and_known_peers_are_opened() {
    let rig = rig("outage", 2, 2);
    let (own, peer) = (engine(&rig, 0, "own"), engine(&rig, 1, "peer"));
    let (source, target) = (registered(&own, 1 << 20), registered(&peer, 1 << 20));
    let segment = own.open_segment("peer").expect("it is there");
    write(&own, &segment, &source, &target).expect("connected");
    faults(&rig).outage(true);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(1_500) {
        write(&own, &segment, &source, &target).expect("written");
    }
    let segment = own.open_segment("peer").expect("it is known");
    write(&own, &segment, &source, &target).expect("written");
    // What is registered meanwhile works for peers that are told.
    let late = registered(&peer, 1 << 20);
    until("the new memory is reached", || {
        let batch = submit(&own, &segment, &source, late.addr());
        batch.is_ok_and(|batch| batch.wait(LIMIT).is_ok())
    });
    let unknown = own.open_segment("nobody").expect_err("it is not known");
    assert!(unknown.is_retryable(), "{unknown}");
    faults(&rig).outage(false);
}

#[test]
fn m01_a_store_that_is_restarted_empty_or_loses_leases_gets_the_records_again() {
    let rig = rig("empty", 3, 1);
    let own = engine(&rig, 0, "own");
    let store = rig.store();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let keys = KeySpace::default();
    let there = |key: &str| runtime.block_on(store.get(key)).is_ok();
    let both = || there(&keys.segment("own")) && there(&keys.rpc_meta("own"));
    registered(&own, 4096);
    assert!(both());
    faults(&rig).lose_all_leases();
    assert!(!both(), "they are tied to the lease");
    until("the records are there again", both);
    drop(own);
    assert!(!there(&keys.segment("own")) && !there(&keys.rpc_meta("own")));
}

#[test]
fn m04_memory_that_is_registered_anew_is_reached_by_its_new_key() {
    let rig = rig("rekey", 4, 1);
    let own = engine(&rig, 0, "own");
    // One place for subscribers, which is taken: only trouble tells of new keys.
    let (peer, _) = engine_with(&rig, 1, "peer", |config| {
        config.rpc_server.subscriptions_max = 1;
    });
    let _taken = subscribed(&peer);
    let (source, target) = (registered(&own, 300_000), registered(&peer, 300_000));
    source.copy_in(0, &[7; 300_000]).expect("inside");
    let segment = own.open_segment("peer").expect("it is there");
    write(&own, &segment, &source, &target).expect("connected");
    faults(&rig).lose_watches(true);
    for round in 0..3 {
        let stale = peer.descriptor();
        peer.unregister(target.addr()).expect("nothing uses it");
        target.copy_in(0, &[0; 300_000]).expect("inside");
        // Something else first, so that the key differs.
        registered(&peer, 4096);
        peer.register(&target, MemoryOptions::default())
            .expect("registered anew");
        let key = |of: &rerail_metadata::descriptor::SegmentDescriptor| {
            let mut buffers = of.buffers.iter();
            let found = buffers.find(|buffer| buffer.addr == target.addr());
            found.map(|buffer| buffer.rkey.clone())
        };
        assert_ne!(key(&stale), key(&peer.descriptor()), "another key");
        let batch = submit(&own, &segment, &source, target.addr()).expect("submitted");
        batch
            .wait(LIMIT)
            .unwrap_or_else(|error| panic!("round {round}: {error}"));
        let mut bytes = vec![0; 300_000];
        target.copy_out(0, &mut bytes).expect("inside");
        assert!(bytes.iter().all(|byte| *byte == 7), "round {round}");
    }
    // What is really gone is refused for good, and soon.
    peer.unregister(target.addr()).expect("nothing uses it");
    let begin = Instant::now();
    let error = write(&own, &segment, &source, &target).expect_err("not registered any more");
    assert!(
        matches!(
            error,
            EngineError::Transfer(TransferError::RemoteAccess { .. })
        ),
        "{error}"
    );
    assert!(begin.elapsed() < LIMIT / 2, "long before its time limit");
}

#[test]
fn a_withdrawn_record_ends_requests_that_have_no_other_way() {
    let rig = rig("withdrawn", 5, 1);
    let own = engine(&rig, 0, "own");
    let (peer, process) = engine_with(&rig, 1, "peer", |_| {});
    let (source, target) = (registered(&own, 4096), registered(&peer, 4096));
    let segment = own.open_segment("peer").expect("it is there");
    write(&own, &segment, &source, &target).expect("connected");
    rig.fabric.kill_process(process);
    drop(peer);
    let waiting = submit(&own, &segment, &source, target.addr()).expect("submitted");
    let error = waiting.wait(LIMIT).expect_err("nobody is there");
    assert!(
        matches!(error, EngineError::Transfer(TransferError::NoPath { .. })),
        "{error}"
    );
}

#[test]
fn a_handshake_on_a_withdrawn_nic_is_refused_with_a_reason_until_it_is_back() {
    let rig = rig("handshake", 6, 2);
    let peer = engine(&rig, 1, "peer");
    let place = HostPort::parse(peer.rpc_address()).expect("an address");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let client = RpcClient::default();
    // As a C++ engine asks, which goes by indexes and may pick a NIC that is withdrawn.
    let ask = |nic: &str, qp_num: u32| {
        let message = ConnectionMessage::offer(Offer {
            local_path: format!("stranger{qp_num}@mlx5_0"),
            peer_path: format!("peer@{nic}"),
            gid: "::ffff:10.0.0.1".parse().ok(),
            qp_nums: vec![qp_num, qp_num + 1],
            ready_ack: Some(false),
            ..Offer::default()
        });
        let answer = runtime.block_on(client.connection(&place, &message));
        answer.map_err(|error| error.to_string())
    };
    until("the NIC has been read", || ask("sim1", 100).is_ok());
    rig.fabric.port_down(rig.port(1, 1));
    // Before that is known the port itself may say no.
    until("it is refused because the NIC is withdrawn", || {
        ask("sim1", 200).is_err_and(|reason| reason.contains("withdrawn"))
    });
    ask("sim0", 300).expect("the other one is not");
    rig.fabric.port_up(rig.port(1, 1));
    until("the NIC is back", || ask("sim1", 400).is_ok());
}

#[test]
fn a_frozen_subscriber_holds_up_nobody_and_is_given_up() {
    let (owner, log) = logged_tcp("P2PHANDSHAKE", "a");
    let mut frozen = subscribed(&owner);
    let reader = tcp_engine("P2PHANDSHAKE", "b");
    let segment = reader.open_segment(owner.name()).expect("it is there");
    let source = registered(&reader, 4096);
    let mut held = Vec::new();
    for _ in 0..50 {
        let memory = registered(&owner, 4096);
        write(&reader, &segment, &source, &memory)
            .or_else(|_| {
                // The record may still be on its way.
                let segment = reader.open_segment(owner.name())?;
                write(&reader, &segment, &source, &memory)
            })
            .expect("written");
        held.push(memory);
    }
    let generation = owner.descriptor().rerail.expect("it has one").generation;
    until("the other subscriber has everything", || {
        log.first(is_told(generation)).is_some()
    });
    frozen
        .set_read_timeout(Some(LIMIT))
        .expect("a time limit can be set");
    frozen
        .read_to_end(&mut Vec::new())
        .expect("it is closed, since it acknowledges nothing");
}

#[test]
fn an_engine_subscribes_only_to_peers_that_take_subscriptions_and_survives_their_end() {
    let (own, name) = {
        let own = tcp_engine("P2PHANDSHAKE", "a");
        let peer = tcp_engine("P2PHANDSHAKE", "b");
        let listed = peer.descriptor().rerail.expect("it has one").features;
        assert_eq!(listed, ["push/1"]);
        own.open_segment(peer.name()).expect("it is there");
        (own, peer.name().to_owned())
    };
    assert!(own.open_segment(&name).is_err(), "it has left");
    let next = tcp_engine("P2PHANDSHAKE", "c");
    own.open_segment(next.name()).expect("it is there");
}
