//! Reports of users, each with what must hold (`crates/transport/tests/REPORTS.md`), in whole
//! engines over simulated NICs.
#![cfg(feature = "sim")]

mod common;

use std::time::Duration;

use common::{LENGTH, LIMIT, Pair, Rig, generation, registered, until, until_within};
use rerail_engine::{Event, Request};
use rerail_metadata::{KeySpace, MetadataStore};
use rerail_verbs::AsyncEventKind;
use rerail_verbs::sim::{NicOptions, WorkVerdict};

fn is_seen(wanted: AsyncEventKind) -> impl Fn(&Event) -> bool {
    move |event| matches!(event, Event::Seen { kind, .. } if *kind == wanted.to_string())
}

/// A gate that closes, endpoints that are cut, a device that is given up.
fn is_bad_news(event: &Event) -> bool {
    matches!(
        event,
        Event::GateClosed { .. } | Event::EndpointsCut { .. } | Event::ContextReleased { .. }
    )
}

#[test]
fn e03_every_event_of_a_burst_is_taken_and_the_port_that_is_back_behind_them_is_used() {
    /// More than are taken of one device in one go.
    const BURST: usize = 200;
    let rig = Rig::new(1, 2);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let (nic, port) = (rig.hosts[0].nics[1], rig.port(0, 1));
    rig.fabric.port_down(port);
    pair.write_until("it is withdrawn", || pair.own_log.count(is_bad_news) > 0);
    let sm_change = is_seen(AsyncEventKind::SmChange);
    for _ in 0..BURST {
        rig.fabric
            .raise_event(nic, AsyncEventKind::SmChange, Some(1));
    }
    rig.fabric.port_up(port);
    let used = pair.bytes(1);
    pair.write_until("the rail carries bytes", || pair.bytes(1) > used);
    assert_eq!(pair.own_log.count(sm_change), BURST, "none is left behind");
    assert!(pair.own_log.count(is_seen(AsyncEventKind::PortActive)) > 0);
}

#[test]
fn e17_a_broken_queue_pair_costs_its_endpoint_only() {
    let rig = Rig::new(2, 2);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let before = generation(&pair.own);
    let broken = (0..1 << 16).find(|number| {
        let nic = rig.hosts[0].nics[0];
        rig.fabric.break_queue_pair(nic, *number)
    });
    assert!(broken.is_some(), "there are queue pairs");
    let is_down = |event: &Event| matches!(event, Event::Rail { local, to, .. } if local == "sim0" && *to == "down");
    pair.write_until("the event is seen, and its rail left", || {
        pair.own_log.count(is_seen(AsyncEventKind::QpFatal)) > 0 && pair.own_log.count(is_down) > 0
    });
    let used = pair.bytes(0);
    pair.write_until("the rail carries bytes again", || {
        pair.is_up(0) && pair.bytes(0) > used
    });
    let is_other = |event: &Event| matches!(event, Event::Rail { local, to, .. } if local == "sim1" && *to == "down");
    assert_eq!(pair.own_log.count(is_other), 0, "the other rail stays");
    assert_eq!(pair.own_log.count(is_bad_news), 0, "its NIC is not touched");
    assert_eq!(generation(&pair.own), before, "nothing is published");
    // The control thread still does what it is told.
    pair.own
        .unregister(pair.source.addr())
        .expect("nothing uses it");
}

#[test]
fn x01_work_that_is_cut_off_arrives_over_the_other_rail_once_and_whole() {
    const WHOLE: u64 = 8 << 20;
    let rig = Rig::new(3, 2);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let (source, target) = (registered(&pair.own, WHOLE), registered(&pair.peer, WHOLE));
    let pattern: Vec<u8> = (0..WHOLE).map(|at| (at * 7 + at / 4099) as u8).collect();
    source.copy_in(0, &pattern).expect("inside");
    let segment = pair
        .own
        .open_segment(pair.peer.name())
        .expect("it is there");
    let before = generation(&pair.own);
    // What rail 0 takes stays on its way until the port fails.
    let lost = rig.fabric.block(&[rig.port(0, 0)], &[rig.port(1, 0)]);
    let batch = pair.own.allocate_batch(1);
    let write = Request::write(&segment, source.addr(), target.addr(), WHOLE);
    batch.submit(&[write]).expect("submitted");
    until("the other rail has done what it can", || {
        batch.transferred_bytes() > WHOLE / 2
    });
    rig.fabric.port_down(rig.port(0, 0));
    batch.wait(LIMIT).expect("nothing fails");
    assert!(batch.retried_slices() > 0, "work was cut off");
    let mut found = vec![0; WHOLE as usize];
    target.copy_out(0, &mut found).expect("inside");
    assert!(found == pattern, "not all bytes arrived");
    until("nothing is in flight", || {
        rig.fabric.stats().work_requests == 0
    });
    assert_eq!(batch.transferred_bytes(), WHOLE, "each slice counts once");
    lost.undo();
    // Each step is told, and bad news takes effect before anybody hears of it.
    let step = |event: &Event| match event {
        Event::GateClosed { nic, .. } if nic == "sim0" => Some("gate closed"),
        Event::Seen { nic, .. } if nic == "sim0" => Some("event seen"),
        Event::EndpointsCut { nic, .. } if nic == "sim0" => Some("endpoints cut"),
        Event::Edited { generation } if *generation > before => Some("record edited"),
        Event::FenceStarted { local, .. } if local == "sim0" => Some("fence started"),
        Event::Rerouted {
            local, bytes: 1.., ..
        } if local == "sim0" => Some("rerouted"),
        Event::FenceEnded {
            local,
            complete: true,
            ..
        } if local == "sim0" => Some("fence ended"),
        _ => None,
    };
    // Two threads tell: the one that sees the event, and the one that fences.
    let threads: [&[_]; 2] = [
        &["gate closed", "event seen"],
        &["gate closed", "endpoints cut", "record edited"],
    ];
    let fence: &[_] = &["fence started", "rerouted", "fence ended"];
    for expected in threads.into_iter().chain([fence]) {
        let told = || {
            let mut told = pair.own_log.steps(step);
            told.retain(|step| expected.contains(step));
            told
        };
        until("all is told", || told().len() == expected.len());
        assert_eq!(told(), expected);
    }
}

#[test]
fn e21_a_lid_that_changes_is_published_and_used_at_either_end() {
    let lid = |host: u8, rail: u8| 100 * u16::from(host + 1) + u16::from(rail);
    let rig = Rig::with(11, 2, |host, rail| {
        NicOptions::infiniband(&format!("sim{rail}"), lid(host, rail))
    });
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    for (host, engine, log, new) in [
        (1, &pair.peer, &pair.peer_log, 391),
        (0, &pair.own, &pair.own_log, 392),
    ] {
        assert_eq!(engine.descriptor().devices[0].lid, lid(host, 0));
        let generation_before = generation(engine);
        rig.fabric.set_lid(rig.port(host.into(), 0), new);
        let is_cut =
            |event: &Event| matches!(event, Event::EndpointsCut { nic, .. } if nic == "sim0");
        pair.write_until("its endpoints are cut", || log.count(is_cut) > 0);
        pair.write_until("its record has the new one", || {
            engine.descriptor().devices[0].lid == new
        });
        assert!(generation(engine) > generation_before);
        // Nothing carries bytes there by the old one: the fabric knows it no more.
        let before = pair.bytes_to(0, 0);
        pair.write_until("the rail carries bytes", || {
            pair.is_up(0) && pair.bytes_to(0, 0) > before
        });
    }
}

#[test]
fn x04_queue_pairs_to_peers_that_died_go_without_anybody_connecting_anew() {
    const PEERS: usize = 6;
    let rig = Rig::new(4, 1).meeting_in("engine-reports-x04");
    let own = rig.start(0, "own", &[]);
    let source = registered(&own.engine, LENGTH);
    let names: Vec<_> = (0..PEERS).map(|peer| format!("peer{peer}")).collect();
    let peers: Vec<_> = names.iter().map(|name| rig.start(1, name, &[])).collect();
    for (name, peer) in names.iter().zip(&peers) {
        let target = registered(&peer.engine, LENGTH);
        let segment = own.engine.open_segment(name).expect("it is there");
        let batch = own.engine.allocate_batch(1);
        let write = Request::write(&segment, source.addr(), target.addr(), LENGTH);
        batch.submit(&[write]).expect("submitted");
        batch.wait(LIMIT).expect("written");
    }
    assert!(rig.fabric.stats().queue_pairs >= 4 * PEERS, "both ends");
    // Killed: none says a word, and their records go with their leases.
    let faults = rig.store().faults();
    faults.outage(true);
    std::thread::scope(|scope| {
        for peer in peers {
            rig.fabric.kill_process(peer.process);
            scope.spawn(|| drop(peer.engine));
        }
    });
    faults.outage(false);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (store, keys) = (rig.store(), KeySpace::default());
    for name in &names {
        for key in [keys.segment(name), keys.rpc_meta(name)] {
            runtime.block_on(store.delete(&key)).expect("deleted");
        }
    }
    // The store was away for a while, which has its readings come with back-off.
    until_within(4 * LIMIT, "no queue pair is left", || {
        rig.fabric.stats().queue_pairs == 0
    });
}

#[test]
fn x15_a_batch_that_is_dropped_lets_go_of_its_memory_once_nothing_is_in_flight() {
    let rig = Rig::new(5, 1);
    let pair = Pair::new(&rig);
    pair.write_until("the rail is up", || pair.is_up(0));
    // Nothing gets through, so that all of it is in flight.
    let lost = rig.fabric.partition(&[rig.port(0, 0)], &[rig.port(1, 0)]);
    let batch = pair.own.allocate_batch(1);
    let (from, to) = (pair.source.addr(), pair.target.addr());
    let write = Request::write(&pair.segment, from, to, LENGTH);
    batch.submit(&[write]).expect("submitted");
    until("it is in flight", || rig.fabric.stats().work_requests > 0);
    drop(batch);
    until("its memory is let go of", || {
        let gone = pair.own.unregister(from);
        assert!(
            gone.as_ref().err().is_none_or(|error| error.is_retryable()),
            "{gone:?}"
        );
        gone.is_ok()
    });
    assert_eq!(rig.fabric.stats().work_requests, 0, "and not before");
    lost.undo();
}

#[test]
fn x20_no_more_is_posted_than_queues_are_deep_however_late_it_completes() {
    /// Both queue pairs of the rail, full, and a probe on each.
    const MOST: usize = 2 * 16 + 2;
    let rig = Rig::new(6, 1);
    let pair = Pair::with_settings(&rig, &[("MC_MAX_WR", "16"), ("MC_SLICE_SIZE", "4096")]);
    let slow = rig
        .fabric
        .on_work(|_| WorkVerdict::CompleteAfter(Duration::from_millis(10)));
    let (mut rounds, mut most) = (0, 0);
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| {
            pair.write_until("some are written", || {
                rounds += 1;
                rounds > 2
            })
        });
        while !moving.is_finished() {
            most = most.max(rig.fabric.stats().send_places);
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    slow.undo();
    assert!((1..=MOST).contains(&most), "{most} places were taken");
    println!("at most {most} places were taken");
    let is_down = |event: &Event| matches!(event, Event::Rail { to, .. } if *to == "down");
    assert_eq!(pair.own_log.count(is_down), 0, "no queue overflowed");
}
