//! Own NICs that change while bytes move, over simulated NICs in real time.
#![cfg(feature = "sim")]

mod common;

use std::time::{Duration, Instant};

use common::{LIMIT, Pair, Rig, Running, address, generation, published, until};
use rerail_engine::{Engine, Event, MemoryOptions, Request};
use rerail_metadata::descriptor::JsonForm;
use rerail_verbs::{AsyncEventKind, Gid, HostMemory};

#[test]
fn an_own_port_that_fails_is_withdrawn_and_carries_traffic_again_once_it_is_back() {
    let rig = Rig::new(1, 2);
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
    let rig = Rig::new(2, 2);
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
        let rig = Rig::new(3, 2);
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
    let rig = Rig::new(8, 2);
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
    let rig = Rig::new(4, 2);
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
    let rig = Rig::new(5, 2);
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
fn transfers_that_wait_while_the_peers_device_is_opened_again_go_by_its_new_keys() {
    let rig = Rig::new(8, 1);
    let pair = Pair::new(&rig);
    pair.write_until("the rail is up", || pair.is_up(0));
    let keys = || {
        let record = pair.peer.descriptor();
        let buffers = record.buffers.iter();
        buffers
            .map(|buffer| buffer.rkey.clone())
            .collect::<Vec<_>>()
    };
    let nic = rig.hosts[1].nics[0];
    let refused =
        |event: &Event| matches!(event, Event::Rail { cause, .. } if cause.contains("REM_ACCESS"));
    // Refused twice, each of them would have failed.
    for _ in 0..3 {
        let before = keys();
        rig.fabric.kill_device(nic);
        until("it is withdrawn", || published(&pair.peer).is_empty());
        let (from, to) = (pair.source.addr(), pair.target.addr());
        let write = Request::write(&pair.segment, from, to, 4096);
        let batch = pair.own.allocate_batch(4);
        batch.submit(&vec![write; 4]).expect("submitted");
        rig.fabric.reset_device(nic);
        batch.wait(LIMIT).expect("nothing fails");
        assert_ne!(keys(), before, "it has other keys");
    }
    assert_eq!(pair.own_log.count(refused), 0, "nobody used an old key");
}

#[test]
fn a_device_that_is_pulled_out_and_put_back_is_taken_in_again() {
    let rig = Rig::new(6, 2);
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
    const BYTES: u64 = 32 << 20;
    let rig = Rig::new(7, 2);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    // How long the other NIC takes by itself, several times: the host may be busy.
    let alone = || {
        [(); 3].map(|()| {
            let (begin, used) = (Instant::now(), pair.bytes(0));
            pair.write_until("bytes are moved", || pair.bytes(0) > used + BYTES);
            begin.elapsed()
        })
    };
    rig.fabric.port_down(rig.port(0, 1));
    pair.write_until("it is withdrawn", || published(&pair.own) == ["sim0"]);
    let without_fault = alone();
    rig.fabric.port_up(rig.port(0, 1));
    pair.write_until("both rails are up", || pair.both_up());
    rig.fabric
        .hang_control(rig.hosts[0].nics[1], Duration::from_secs(60));
    // Makes the device's control thread do something, which then hangs.
    rig.fabric.port_down(rig.port(0, 1));
    let released =
        |event: &Event| matches!(event, Event::ContextReleased { nic, .. } if nic == "sim1");
    pair.write_until("it is given up", || pair.own_log.count(released) > 0);
    let meanwhile = alone();
    assert!(
        meanwhile.iter().min() < without_fault.iter().max().map(|time| *time * 2).as_ref(),
        "{meanwhile:?} is more than {without_fault:?}"
    );
}

/// An engine that may use these devices.
fn with_devices(rig: &Rig, devices: &[&str]) -> Running {
    let started = rig.try_start(0, "own", &[], |config| {
        config.devices = devices.iter().map(|name| (*name).to_owned()).collect();
    });
    started.expect("an engine starts")
}

fn names(engine: &Engine) -> Vec<String> {
    let record = engine.descriptor();
    let devices = record.devices.iter();
    devices.map(|device| device.name.clone()).collect()
}

#[test]
fn a_nic_that_did_not_exist_at_the_start_carries_bytes_at_either_end() {
    let mut rig = Rig::new(9, 1);
    let pair = Pair::new(&rig);
    pair.write_until("the rail is up", || pair.bytes(0) > 0);
    rig.add_nic(0);
    pair.write_until("the own new NIC carries bytes", || pair.bytes(1) > 0);
    let is_told = |event: &Event| matches!(event, Event::NicAdded { nic } if nic == "sim1");
    assert_eq!(pair.own_log.count(is_told), 1);
    // Registered with both, and not opened again: the segment that is open learns of it.
    rig.add_nic(1);
    pair.write_until("the peer's new NIC carries bytes", || {
        pair.bytes_to(1, 1) > 0
    });
    for engine in [&pair.own, &pair.peer] {
        assert_eq!(names(engine), ["sim0", "sim1"]);
        assert_eq!(published(engine), ["sim0", "sim1"]);
        for buffer in &engine.descriptor().buffers {
            assert_eq!(buffer.rkey.len(), 2);
            assert!(buffer.rkey.iter().all(|key| *key != 0), "{buffer:?}");
        }
    }
    // Like any other from then on.
    rig.fabric.port_down(rig.port(1, 1));
    pair.write_until("it is withdrawn", || published(&pair.peer) == ["sim0"]);
    rig.fabric.port_up(rig.port(1, 1));
    let before = pair.bytes_to(1, 1);
    pair.write_until("it carries bytes again", || pair.bytes_to(1, 1) > before);
    let late = HostMemory::allocate(4096).expect("memory");
    let options = MemoryOptions::default();
    pair.own.register(&late, options).expect("registered");
    pair.own.unregister(late.addr()).expect("nothing uses it");
}

#[test]
fn only_nics_that_are_wanted_are_taken_in_and_the_others_need_not_be_there() {
    let mut rig = Rig::new(10, 1);
    let wanted = ["sim2", "sim0"];
    let pair = Pair::of(with_devices(&rig, &wanted), rig.start(1, "peer", &[]));
    assert_eq!(names(&pair.own), ["sim0"]);
    rig.add_nic(0);
    rig.add_nic(0);
    let own = || {
        let rails = pair.own.rails(&pair.segment);
        let own = rails.iter().filter(|rail| rail.local == "sim2");
        own.map(|rail| rail.bytes).sum::<u64>()
    };
    pair.write_until("the wanted one carries bytes", || own() > 0);
    assert_eq!(names(&pair.own), ["sim0", "sim2"]);
}

#[test]
fn a_named_nic_that_is_down_at_the_start_is_taken_in_once_it_works() {
    let rig = Rig::new(11, 2);
    rig.fabric.port_down(rig.port(0, 0));
    let own = with_devices(&rig, &["sim0", "sim1"]);
    let pair = Pair::of(own, rig.start(1, "peer", &[]));
    // Behind the one that works.
    assert_eq!(names(&pair.own), ["sim1", "sim0"]);
    assert_eq!(published(&pair.own), ["sim1"]);
    rig.fabric.port_up(rig.port(0, 0));
    pair.write_until("it carries bytes", || pair.bytes(0) > 0);
    assert_eq!(published(&pair.own), ["sim1", "sim0"]);
}

#[test]
fn memory_under_a_device_that_hangs_is_named_by_unregister_and_no_other_is_held_up() {
    let rig = Rig::new(12, 2);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let memory = || HostMemory::allocate(1 << 16).expect("memory");
    let register = |memory: &HostMemory| {
        let options = MemoryOptions::default();
        pair.own.register(memory, options).expect("registered");
    };
    let held = memory();
    register(&held);
    // Not longer than the last wait below.
    rig.fabric
        .hang_control(rig.hosts[0].nics[1], Duration::from_secs(20));
    rig.fabric.port_down(rig.port(0, 1));
    let released =
        |event: &Event| matches!(event, Event::ContextReleased { nic, .. } if nic == "sim1");
    pair.write_until("it is given up", || pair.own_log.count(released) > 0);
    let free = memory();
    register(&free);
    pair.own
        .unregister(free.addr())
        .expect("no device hangs that had it");
    for _ in 0..2 {
        let error = pair.own.unregister(held.addr()).expect_err("sim1 has it");
        assert!(error.is_retryable());
        let error = error.to_string();
        assert!(error.contains("sim1") && !error.contains("sim0"), "{error}");
        let error = pair.own.register(&held, MemoryOptions::default());
        let error = error.expect_err("it is taken").to_string();
        assert!(error.contains("has not let go of"), "{error}");
    }
    pair.write_until("the device lets go of it", || {
        pair.own.unregister(held.addr()).is_ok()
    });
    register(&held);
}

#[test]
fn a_nic_for_which_the_record_has_no_room_is_left_out_until_less_memory_is_registered() {
    const SPARE: usize = 100;
    let mut rig = Rig::new(13, 1).meeting_in("no room for a nic");
    let own = rig.start(0, "own", &[]);
    let memory: Vec<_> = (0..40)
        .map(|_| HostMemory::allocate(4096).expect("memory"))
        .collect();
    let options = MemoryOptions::default();
    own.engine
        .register_batch(&memory, options)
        .expect("registered");
    let record = own.engine.descriptor().to_json(JsonForm::Line).len();
    rig.store().faults().limit_values(Some(record + SPARE));
    let stored = |is: u64| {
        own.log
            .count(|event| matches!(event, Event::Published { generation } if *generation == is))
    };
    let left_out = |event: &Event| {
        matches!(event, Event::NicLeftOut { nic, cause }
            if nic == "sim1" && cause.contains(&format!("the limit is {}", record + SPARE)))
    };
    rig.add_nic(0);
    until("it is left out", || own.log.count(left_out) > 0);
    // What changes meanwhile is stored.
    let before = generation(&own.engine);
    rig.fabric.port_down(rig.port(0, 0));
    until("it is withdrawn", || generation(&own.engine) > before);
    until("that is stored", || stored(generation(&own.engine)) > 0);
    rig.fabric.port_up(rig.port(0, 0));
    assert_eq!(names(&own.engine), ["sim0"]);
    for memory in &memory[..30] {
        own.engine
            .unregister(memory.addr())
            .expect("nothing uses it");
    }
    until("it is taken in", || names(&own.engine) == ["sim0", "sim1"]);
    until("both are up", || published(&own.engine) == ["sim0", "sim1"]);
    until("that is stored", || stored(generation(&own.engine)) > 0);
    for buffer in &own.engine.descriptor().buffers {
        assert!(buffer.rkey.iter().all(|key| *key != 0), "{buffer:?}");
    }
    assert_eq!(own.log.count(left_out), 1, "told once");
}
