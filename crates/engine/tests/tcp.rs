//! Two engines in one process over TCP, as a user programs them.

use std::time::Duration;

use rerail_engine::{
    Engine, EngineConfig, EngineError, MemoryOptions, Notification, Request, Status, Transport,
};
use rerail_verbs::{DeviceList, HostMemory};

const LIMIT: Duration = Duration::from_secs(20);

fn engine(metadata: &str, name: &str) -> Engine {
    engine_at("127.0.0.1", metadata, name)
}

fn engine_at(host: &str, metadata: &str, name: &str) -> Engine {
    let settings = |variable: &str| (variable == "MC_TCP_BIND_ADDRESS").then(|| host.to_owned());
    let mut config =
        EngineConfig::with_settings(metadata, name, &settings).expect("settings are valid");
    config.transport = Transport::Tcp;
    Engine::start(config, &DeviceList::default()).expect("an engine starts without devices")
}

fn registered(engine: &Engine, length: usize) -> HostMemory {
    let memory = HostMemory::allocate(length).expect("memory");
    engine
        .register(&memory, MemoryOptions::default())
        .expect("memory can be registered");
    memory
}

fn bytes(memory: &HostMemory, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    memory.copy_out(offset, &mut bytes).expect("inside");
    bytes
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|index| (index * 7 + index / 251) as u8)
        .collect()
}

/// Writes a pattern from `own` to `peer` and reads it back into other memory.
fn there_and_back(own: &Engine, peer: &Engine) {
    const LENGTH: usize = (3 << 20) + 17;
    let target = registered(peer, LENGTH);
    let source = registered(own, 2 * LENGTH);
    source.copy_in(0, &pattern(LENGTH)).expect("inside");
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    let buffers = segment.buffers();
    let at = |buffer: &&rerail_metadata::descriptor::Buffer| buffer.addr == target.addr();
    let buffer = buffers.iter().find(at).expect("the memory is published");
    assert_eq!(buffer.length, LENGTH as u64);

    let mut batch = own.allocate_batch(2);
    let length = LENGTH as u64;
    let write = Request::write(&segment, source.addr(), target.addr(), length);
    batch.submit(&[write]).expect("submitted");
    batch.wait(LIMIT).expect("written");
    assert!(
        bytes(&target, 0, LENGTH) == pattern(LENGTH),
        "the target has the bytes"
    );

    let read = Request::read(&segment, source.addr() + length, target.addr(), length);
    batch.submit(&[read]).expect("submitted");
    batch.wait(LIMIT).expect("read");
    assert!(
        bytes(&source, LENGTH, LENGTH) == pattern(LENGTH),
        "they come back"
    );
    assert_eq!(batch.transferred_bytes(), 2 * length);
    assert!(matches!(batch.status(1), Some(Status::Completed)));
    batch.clear().expect("finished");
    own.unregister(source.addr()).expect("nothing uses it");
    peer.unregister(target.addr()).expect("nothing uses it");
}

#[test]
fn bytes_go_there_and_back_without_a_store() {
    there_and_back(&engine("P2PHANDSHAKE", "a"), &engine("P2PHANDSHAKE", "b"));
}

#[test]
fn bytes_go_there_and_back_by_name_in_a_store() {
    let url = "memory://engine-tcp-by-name";
    there_and_back(&engine(url, "a"), &engine(url, "b"));
}

#[test]
fn bytes_go_there_and_back_over_ipv6() {
    for metadata in ["P2PHANDSHAKE", "memory://engine-tcp-ipv6"] {
        let (own, peer) = (
            engine_at("::1", metadata, "a"),
            engine_at("::1", metadata, "b"),
        );
        assert_eq!(peer.descriptor().tcp_data_host.as_deref(), Some("::1"));
        assert!(
            peer.rpc_address().starts_with("[::1]:"),
            "{}",
            peer.rpc_address()
        );
        there_and_back(&own, &peer);
    }
}

#[test]
fn an_engine_transfers_to_itself() {
    let engine = engine("P2PHANDSHAKE", "a");
    there_and_back(&engine, &engine);
}

#[test]
fn r09_bytes_past_the_end_are_refused_before_anything_is_submitted() {
    let (own, peer) = (engine("P2PHANDSHAKE", "a"), engine("P2PHANDSHAKE", "b"));
    let (source, target) = (registered(&own, 4096), registered(&peer, 4096));
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    let batch = own.allocate_batch(2);
    let good = Request::write(&segment, source.addr(), target.addr(), 4096);
    let local = Request::write(&segment, source.addr() + 1, target.addr(), 4096);
    let remote = Request::write(&segment, source.addr(), target.addr() + 1, 4096);
    let error = batch.submit(&[good.clone(), local]).expect_err("local");
    assert!(
        matches!(error, EngineError::NotRegistered { .. }),
        "{error}"
    );
    let error = batch.submit(&[good.clone(), remote]).expect_err("remote");
    assert!(matches!(error, EngineError::NotOffered { .. }), "{error}");
    assert!(batch.is_empty());
    let many = [good.clone(), good.clone(), good.clone()];
    let error = batch.submit(&many).expect_err("no room");
    assert!(
        matches!(error, EngineError::TooManyRequests { .. }),
        "{error}"
    );
    batch.submit(&[good]).expect("still usable");
    batch.wait(LIMIT).expect("written");
}

#[test]
fn memory_that_the_peer_unregistered_is_refused_and_the_engine_works_on() {
    let (own, peer) = (engine("P2PHANDSHAKE", "a"), engine("P2PHANDSHAKE", "b"));
    let (source, gone) = (registered(&own, 4096), registered(&peer, 4096));
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    peer.unregister(gone.addr()).expect("registered");
    let batch = own.allocate_batch(1);
    let stale = Request::write(&segment, source.addr(), gone.addr(), 4096);
    batch.submit(&[stale]).expect("submitted");
    let error = batch.wait(LIMIT).expect_err("not registered any more");
    assert!(error.is_retryable(), "{error}");
    assert_eq!(bytes(&gone, 0, 8), [0; 8], "nothing was written");
    there_and_back(&own, &peer);
}

#[test]
fn x15_a_dropped_batch_lets_go_of_its_memory() {
    let (own, peer) = (engine("P2PHANDSHAKE", "a"), engine("P2PHANDSHAKE", "b"));
    let (source, target) = (registered(&own, 64 << 20), registered(&peer, 64 << 20));
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    let batch = own.allocate_batch(1);
    let whole = Request::write(&segment, source.addr(), target.addr(), 64 << 20);
    batch.submit(&[whole]).expect("submitted");
    drop(batch);
    let begin = std::time::Instant::now();
    while let Err(error) = own.unregister(source.addr()) {
        assert!(error.is_retryable(), "{error}");
        assert!(begin.elapsed() < LIMIT, "the cancelled transfer never ends");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_notification_arrives_and_a_peer_that_is_gone_does_not_answer() {
    let (own, peer) = (engine("P2PHANDSHAKE", "a"), engine("P2PHANDSHAKE", "b"));
    let notification = Notification {
        name: own.name().to_owned(),
        message: "data is there".into(),
    };
    own.notify(peer.name(), &notification).expect("taken");
    assert!(peer.wait_notification(LIMIT));
    assert_eq!(peer.take_notifications(), [notification]);
    assert!(peer.take_notifications().is_empty());
    own.probe(peer.name()).expect("alive");
    let name = peer.name().to_owned();
    drop(peer);
    let error = own.probe(&name).expect_err("gone");
    assert!(error.is_retryable(), "{error}");
    assert!(own.open_segment(&name).is_err());
}
