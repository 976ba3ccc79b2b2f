//! Engines over simulated NICs in real time: what holds over RDMA, and through faults.
#![cfg(feature = "sim")]

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{LIMIT, Rig, registered};
use rerail_engine::{Engine, EngineError, MemoryOptions, RailState, Request, Result, Segment};
use rerail_verbs::HostMemory;
use rerail_verbs::sim::WorkVerdict;

/// Two hosts with `rails` NICs each, all in one subnet.
fn rig(seed: u64, rails: u8) -> Rig {
    Rig::in_one_subnet(seed, rails)
}

fn engine(rig: &Rig, host: usize) -> Engine {
    rig.start(host, "any", &[]).engine
}

fn engine_with(rig: &Rig, host: usize, settings: &[(&str, &str)]) -> Engine {
    rig.start(host, "any", settings).engine
}

fn pattern(length: usize, round: u8) -> Vec<u8> {
    (0..length)
        .map(|index| (index * 7 + index / 251) as u8 ^ round)
        .collect()
}

/// Writes a pattern from `own` to `peer`, reads it back into other memory, and compares.
fn there_and_back(own: &Engine, peer: &Engine, length: usize, rounds: u8) {
    let target = registered(peer, length as u64);
    let source = registered(own, 2 * length as u64);
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    let sink = source.addr() + length as u64;
    let mut batch = own.allocate_batch(1);
    for round in 0..rounds {
        let pattern = pattern(length, round);
        source.copy_in(0, &pattern).expect("inside");
        for request in [
            Request::write(&segment, source.addr(), target.addr(), length as u64),
            Request::read(&segment, sink, target.addr(), length as u64),
        ] {
            batch.submit(&[request]).expect("submitted");
            batch.wait(LIMIT).expect("moved");
            batch.clear().expect("finished");
        }
        let mut back = vec![0; length];
        source.copy_out(length, &mut back).expect("inside");
        assert!(back == pattern, "round {round}");
    }
    own.unregister(source.addr()).expect("nothing uses it");
    peer.unregister(target.addr()).expect("nothing uses it");
}

#[test]
fn bytes_go_there_and_back_over_two_rails() {
    let rig = rig(1, 2);
    there_and_back(&engine(&rig, 0), &engine(&rig, 1), (1 << 20) + 4099, 3);
}

#[test]
fn a_segment_that_is_opened_again_shares_the_connections() {
    let rig = rig(7, 2);
    let (own, peer) = (engine(&rig, 0), engine(&rig, 1));
    for _ in 0..4 {
        there_and_back(&own, &peer, 500_000, 1);
    }
}

#[test]
fn a_revoked_peer_may_connect_anew() {
    for bound in [None, Some(("MC_RDMA_BIND_ADDRESS", "192.0.2.1"))] {
        let rig = rig(12, 2);
        let settings: Vec<_> = bound.into_iter().collect();
        let (own, peer) = (engine_with(&rig, 0, &settings), engine(&rig, 1));
        there_and_back(&own, &peer, 500_000, 1);
        let record = own.descriptor();
        let server = record.nic_path_server_name();
        assert!(peer.revoke(server).expect("they stop") > 0);
        there_and_back(&own, &peer, 500_000, 1);
        // A segment that is open here is known by its name, whatever its NIC paths begin with.
        let segment = peer.open_segment(own.name()).expect("it is there");
        assert!(peer.revoke(own.name()).expect("they stop") > 0);
        drop(segment);
        there_and_back(&own, &peer, 500_000, 1);
        assert_eq!(peer.revoke("nobody").expect("nothing to do"), 0);
    }
}

#[test]
fn a_peer_that_only_its_record_ties_to_its_connections_is_revoked_by_its_segments_name() {
    let rig = rig(13, 1).meeting_in("engine-sim-revoked");
    let bound = [("MC_RDMA_BIND_ADDRESS", "192.0.2.1")];
    let (own, peer) = (rig.start(0, "own", &bound), rig.start(1, "peer", &[]));
    there_and_back(&own.engine, &peer.engine, 500_000, 1);
    // A target opens no segment of its initiators.
    assert!(peer.engine.revoke("own").expect("they stop") > 0);
    assert_eq!(peer.engine.revoke("nobody").expect("nothing to do"), 0);
    there_and_back(&own.engine, &peer.engine, 500_000, 1);
}

#[test]
fn nic_paths_may_have_a_server_name_of_their_own_at_both_ends() {
    let rig = rig(11, 2);
    let bound =
        |host: usize, address| engine_with(&rig, host, &[("MC_RDMA_BIND_ADDRESS", address)]);
    let (own, peer) = (bound(0, "192.0.2.1"), bound(1, "192.0.2.2"));
    let record = peer.descriptor();
    let server = record.rdma_server_name.expect("it differs from the name");
    assert!(server.starts_with("192.0.2.2:"), "{server}");
    assert!(
        !record.name.contains("192.0.2.2"),
        "the segment keeps its name"
    );
    there_and_back(&own, &peer, 500_000, 2);
    there_and_back(&peer, &own, 500_000, 2);
    // The other way, once one is cut, leads to a path that the peer was registered with.
    rig.fabric.port_down(rig.port(1, 0));
    there_and_back(&own, &peer, 500_000, 2);
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    let used = own.rails(&segment).into_iter().map(|rail| rail.peer);
    let used: BTreeSet<String> = used.collect();
    let registered = record.devices.iter();
    let registered = registered.map(|device| format!("{server}@{}", device.name));
    assert_eq!(used, registered.collect());
}

#[test]
fn an_engine_transfers_to_itself_over_its_nics() {
    let rig = rig(2, 2);
    let engine = engine(&rig, 0);
    there_and_back(&engine, &engine, 300_001, 2);
}

#[test]
fn r12_transfers_cross_the_seams_of_split_registrations() {
    let rig = rig(3, 1);
    let own = engine_with(&rig, 0, &[("MC_MAX_MR_SIZE", "8192")]);
    let peer = engine_with(&rig, 1, &[("MC_MAX_MR_SIZE", "12288")]);
    there_and_back(&own, &peer, 100_000, 1);
}

#[test]
fn unequal_queue_pair_counts_are_refused_and_name_the_setting() {
    let rig = rig(4, 1);
    let own = engine_with(&rig, 0, &[("MC_NUM_QP_PER_EP", "3")]);
    let peer = engine(&rig, 1);
    let (source, target) = (registered(&own, 4096), registered(&peer, 4096));
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    let batch = own.allocate_batch(1);
    let mut request = Request::write(&segment, source.addr(), target.addr(), 4096);
    request.timeout = Some(Duration::from_secs(1));
    batch.submit(&[request]).expect("submitted");
    let error = batch.wait(LIMIT).expect_err("no connection is possible");
    assert!(matches!(error, EngineError::Transfer(_)), "{error}");
    assert!(error.to_string().contains("MC_NUM_QP_PER_EP"), "{error}");
    there_and_back(&engine(&rig, 0), &peer, 4096, 1);
}

#[test]
fn h09_ends_of_different_mtu_agree_on_the_smaller() {
    for small in [0, 1] {
        let rig = rig(11, 1);
        rig.fabric.set_netdev_mtu(rig.port(small, 0), 1500);
        // Whole slices, whose packets a receiver of smaller ones would refuse.
        there_and_back(&engine(&rig, 0), &engine(&rig, 1), 1 << 20, 1);
    }
}

#[test]
fn h03_both_sides_open_at_once() {
    let rig = rig(5, 1);
    for _ in 0..10 {
        let (left, right) = (engine(&rig, 0), engine(&rig, 1));
        std::thread::scope(|scope| {
            scope.spawn(|| there_and_back(&left, &right, 65_536, 2));
            scope.spawn(|| there_and_back(&right, &left, 65_536, 2));
        });
    }
}

#[test]
fn a_port_that_goes_down_costs_time_and_no_transfer() {
    const LENGTH: u64 = 4 << 20;
    let rig = rig(6, 2);
    let (own, peer) = (engine(&rig, 0), engine(&rig, 1));
    let (source, target) = (registered(&own, 4 << 20), registered(&peer, 4 << 20));
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    // Writes until `done`, and says how many slices were posted again.
    let move_until = |done: &(dyn Fn() -> bool + Sync)| {
        let mut batch = own.allocate_batch(4);
        let mut retried = 0;
        while !done() {
            let write = Request::write(&segment, source.addr(), target.addr(), LENGTH);
            batch.submit(&vec![write; 4]).expect("submitted");
            batch.wait(LIMIT).expect("nothing fails");
            retried += batch.retried_slices();
            batch.clear().expect("finished");
        }
        retried
    };
    let both_up = || {
        let rails = own.rails(&segment);
        let up = rails.iter().filter(|rail| rail.state == RailState::Up);
        up.count() >= 2
    };
    let moved = || -> u64 { own.rails(&segment).iter().map(|rail| rail.bytes).sum() };
    let begin = Instant::now();
    move_until(&|| both_up() || begin.elapsed() > LIMIT);
    assert!(both_up(), "both local NICs are in use");
    let (before, failed) = (moved(), AtomicBool::new(false));
    let after = || failed.load(Ordering::Acquire) && moved() > before + 16 * LENGTH;
    let retried: u64 = std::thread::scope(|scope| {
        // Two, so that there is always work under way.
        let movers = [(); 2].map(|()| scope.spawn(|| move_until(&after)));
        // What rail 0 takes from now on stays under way, until the port fails.
        let lost = rig.fabric.block(&[rig.port(0, 0)], &[rig.port(1, 0)]);
        while moved() < before + 8 * LENGTH && begin.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        rig.fabric.port_down(rig.port(1, 0));
        lost.undo();
        failed.store(true, Ordering::Release);
        movers
            .map(|mover| mover.join().expect("moved"))
            .iter()
            .sum()
    });
    assert!(retried > 0, "work was cut off");
    rig.fabric.port_up(rig.port(1, 0));
    let more = moved() + LENGTH;
    move_until(&|| moved() > more);
}

/// A write of `length` bytes from the first byte of each to the other.
fn write(own: &Engine, segment: &Segment, from: &HostMemory, to: &HostMemory) -> Result<()> {
    let batch = own.allocate_batch(1);
    let mut request = Request::write(segment, from.addr(), to.addr(), from.length() as u64);
    request.timeout = Some(Duration::from_secs(5));
    batch.submit(&[request])?;
    batch.wait(LIMIT)
}

#[test]
fn when_unregister_returns_the_nics_have_let_go_and_no_peer_can_write() {
    let rig = rig(8, 1);
    let (own, peer) = (engine(&rig, 0), engine(&rig, 1));
    let (source, target) = (registered(&own, 4096), registered(&peer, 4096));
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    write(&own, &segment, &source, &target).expect("registered");
    source.copy_in(0, &[7; 4096]).expect("inside");
    rig.fabric
        .hang_control(rig.hosts[1].nics[0], Duration::from_millis(500));
    peer.unregister(target.addr()).expect("within its limit");
    assert!(write(&own, &segment, &source, &target).is_err());
    let mut bytes = [0; 4096];
    target.copy_out(0, &mut bytes).expect("inside");
    assert!(bytes == [0; 4096], "nothing arrived after it returned");
}

#[test]
fn a_nic_that_hangs_holds_memory_is_named_and_unregister_can_be_called_again() {
    let rig = rig(9, 2);
    let engine = engine(&rig, 0);
    let memory = registered(&engine, 4096);
    rig.fabric
        .hang_control(rig.hosts[0].nics[1], Duration::from_secs(2));
    let error = engine.unregister(memory.addr()).expect_err("it hangs");
    assert!(
        matches!(&error, EngineError::StillOwnedByHardware { owner, .. } if owner.contains("sim1")),
        "{error}"
    );
    assert!(error.is_retryable());
    assert_eq!(engine.quarantined_bytes(), 4096);
    let again = engine.register(&memory, MemoryOptions::default());
    assert!(matches!(again, Err(EngineError::Overlap { .. })));
    let begin = Instant::now();
    while let Err(error) = engine.unregister(memory.addr()) {
        assert!(error.is_retryable(), "{error}");
        assert!(begin.elapsed() < LIMIT, "it never lets go");
    }
    assert_eq!(engine.quarantined_bytes(), 0);
    engine
        .register(&memory, MemoryOptions::default())
        .expect("free again");
}

#[test]
fn memory_of_an_unfenced_write_is_counted_until_its_device_answers() {
    const LENGTH: u64 = 64 << 10;
    let rig = rig(41, 1);
    let (own, peer) = (engine(&rig, 0), engine(&rig, 1));
    let (source, target) = (registered(&own, LENGTH), registered(&peer, LENGTH));
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    write(&own, &segment, &source, &target).expect("connected");
    assert_eq!(own.quarantined_bytes(), 0);
    let nic = rig.hosts[0].nics[0];
    // What is posted from now on never comes back, not even with an error.
    let _silent = rig.fabric.on_work(move |work| {
        if work.nic == nic {
            WorkVerdict::LoseCompletion
        } else {
            WorkVerdict::Pass
        }
    });
    rig.fabric.hang_control(nic, Duration::from_secs(8));
    let batch = own.allocate_batch(1);
    let mut request = Request::write(&segment, source.addr(), target.addr(), LENGTH);
    request.timeout = Some(Duration::from_millis(100));
    batch.submit(&[request]).expect("submitted");
    let error = batch.wait(LIMIT).expect_err("it cannot be fenced");
    assert!(error.to_string().contains("fence"), "{error}");
    assert_eq!(own.quarantined_bytes(), LENGTH);
    assert_eq!(peer.quarantined_bytes(), 0);
    // Given up as well, it counts once more; and it must not be freed.
    let error = own.unregister(source.addr()).expect_err("the device hangs");
    assert!(
        matches!(error, EngineError::StillOwnedByHardware { .. }),
        "{error}"
    );
    assert_eq!(own.quarantined_bytes(), 2 * LENGTH);
    let begin = Instant::now();
    while own.quarantined_bytes() > 0 {
        assert!(begin.elapsed() < LIMIT, "it never lets go");
        std::thread::sleep(Duration::from_millis(5));
    }
    own.unregister(source.addr()).expect("it has let go");
}

#[test]
fn requests_are_submitted_while_nics_pin_other_memory() {
    let rig = rig(10, 1);
    let (own, peer) = (engine(&rig, 0), engine(&rig, 1));
    let (source, target) = (registered(&own, 4096), registered(&peer, 4096));
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    write(&own, &segment, &source, &target).expect("connected");
    rig.fabric
        .hang_control(rig.hosts[0].nics[0], Duration::from_secs(3));
    std::thread::scope(|scope| {
        let registering = scope.spawn(|| registered(&own, 8192));
        let mut written = 0;
        // Long enough that the registration is under way, whoever runs first.
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(500) {
            write(&own, &segment, &source, &target).expect("written");
            written += 1;
        }
        assert!(!registering.is_finished(), "it hangs, and writes go on");
        assert!(written > 0);
        registering.join().expect("registered in the end");
    });
}
