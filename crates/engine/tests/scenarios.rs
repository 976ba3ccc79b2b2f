//! What an engine must live through, a test for each, over simulated NICs.
#![cfg(feature = "sim")]

mod common;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::{LENGTH, LIMIT, Pair, Rig, address, generation, published, registered, until};
use rerail_engine::{EngineError, Event, Request};
use rerail_metadata::descriptor::SegmentDescriptor;
use rerail_metadata::{KeySpace, MetadataStore, WatchEvent};
use rerail_transport::TransferError;
use rerail_verbs::sim::EventVerdict;
use rerail_verbs::{AsyncEventKind, Gid};

/// What must happen soon is tried so often. A test host under load stops everything now and then,
/// so that one of the tries has to be in time, and none may fail.
const TRIES: usize = 4;

fn is_outcome(wanted: &'static str) -> impl Fn(&Event) -> bool {
    move |event| matches!(event, Event::PortRead { outcome, .. } if *outcome == wanted)
}

#[test]
fn the_same_address_at_another_index_is_used_there_and_not_published() {
    let rig = Rig::new(1, 2);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let before = generation(&pair.own);
    let (port, address) = (rig.port(0, 0), address(0, 1));
    // Nobody hears of it before it is over. While queue pairs use it, the old row stays a hole.
    let unheard = rig.fabric.on_event(|_| EventVerdict::Drop);
    assert!(rig.fabric.delete_address(port, address));
    assert!(rig.fabric.add_address(port, address));
    unheard.undo();
    let nic = rig.hosts[0].nics[0];
    rig.fabric
        .raise_event(nic, AsyncEventKind::GidChange, Some(1));
    let is_cut = |event: &Event| matches!(event, Event::EndpointsCut { nic, .. } if nic == "sim0");
    pair.write_until("its endpoints are cut", || pair.own_log.count(is_cut) > 0);
    assert_eq!(pair.own_log.count(is_outcome("moved")), 1);
    let used = pair.bytes(0);
    pair.write_until("the rail carries bytes", || {
        pair.is_up(0) && pair.bytes(0) > used
    });
    assert_eq!(generation(&pair.own), before, "nothing is published");
    let begun =
        |event: &Event| matches!(event, Event::FenceStarted { local, .. } if local == "sim0");
    let ended = |event: &Event| matches!(event, Event::FenceEnded { complete: true, .. });
    until("what was cut is fenced, and told", || {
        pair.own_log.count(ended) > 0 && pair.own_log.count(begun) == pair.own_log.count(ended)
    });
}

#[test]
fn both_ends_lose_a_rail_in_the_same_instant() {
    let rig = Rig::new(2, 2);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let ends = [rig.port(0, 1), rig.port(1, 1)];
    for _ in 0..3 {
        ends.into_iter().for_each(|port| rig.fabric.port_down(port));
        pair.write_until("both have withdrawn it", || {
            published(&pair.own) == ["sim0"] && published(&pair.peer) == ["sim0"]
        });
        ends.into_iter().for_each(|port| rig.fabric.port_up(port));
        let used = pair.bytes(1);
        pair.write_until("the rail carries bytes", || {
            pair.is_up(1) && pair.bytes(1) > used
        });
        assert_eq!(published(&pair.own), ["sim0", "sim1"]);
    }
}

/// What is written under a key of the rig's store from now on, with the time of its arrival.
fn writes(rig: &Rig, key: String) -> mpsc::Receiver<(Instant, SegmentDescriptor)> {
    let (writes, seen) = mpsc::channel();
    let store = rig.store();
    let (ready, is_ready) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let mut watch = store.watch(&key).await.expect("a watch");
            while let Some(event) = watch.next().await {
                let going = match event {
                    WatchEvent::Put(record) => {
                        let record = SegmentDescriptor::from_json(&record.value);
                        writes
                            .send((Instant::now(), record.expect("a record")))
                            .is_ok()
                    }
                    WatchEvent::Resync => {
                        // Only the first is waited for.
                        let _ = ready.send(());
                        true
                    }
                    _ => true,
                };
                if !going {
                    return;
                }
            }
        });
    });
    is_ready.recv_timeout(LIMIT).expect("the watch is in force");
    seen
}

#[test]
fn e24_a_store_that_is_down_through_two_renumberings_costs_nothing_and_gets_the_last_state_only() {
    let rig = Rig::new(3, 1).meeting_in("engine-scenarios-renumbered");
    let pair = Pair::new(&rig);
    pair.write_until("the rail is up", || pair.is_up(0));
    let seen = writes(&rig, KeySpace::default().segment("peer"));
    let faults = rig.store().faults();
    faults.outage(true);
    let port = rig.port(1, 0);
    for (old, new) in [(2, 12), (12, 13)] {
        assert!(rig.fabric.delete_address(port, address(0, old)));
        assert!(rig.fabric.add_address(port, address(0, new)));
        let gid = Gid::from_ip(address(0, new));
        pair.write_until("the only rail has its new address", || {
            pair.peer.descriptor().devices[0].gid == gid
        });
        let used = pair.bytes(0);
        pair.write_until("the rail carries bytes", || pair.bytes(0) > used);
    }
    let last = Gid::from_ip(address(0, 13));
    faults.outage(false);
    let (_, first) = seen.recv_timeout(LIMIT).expect("it is written");
    assert_eq!(first.devices[0].gid, last, "an overtaken state was written");
    let is_stored = |event: &Event| matches!(event, Event::Published { generation: stored } if *stored == generation(&pair.peer));
    pair.write_until("the last state is stored", || {
        pair.peer_log.count(is_stored) > 0
    });
    for (_, later) in seen.try_iter() {
        assert_eq!(later.devices[0].gid, last, "an overtaken state was written");
    }
}

#[test]
fn a_peer_that_is_killed_and_started_again_ends_its_requests_within_a_second_of_its_record() {
    let rig = Rig::new(4, 1).meeting_in("engine-scenarios-restart");
    let own = rig.start(0, "own", &[]).engine;
    let source = registered(&own, LENGTH);
    let faults = rig.store().faults();
    let mut running = Some(rig.start(1, "peer", &[]));
    let mut took = Vec::new();
    for _ in 0..TRIES {
        let peer = running.take().expect("it runs");
        let target = registered(&peer.engine, LENGTH);
        let segment = own.open_segment("peer").expect("it is there");
        let write = Request::write(&segment, source.addr(), target.addr(), LENGTH);
        let batch = own.allocate_batch(1);
        batch
            .submit(std::slice::from_ref(&write))
            .expect("submitted");
        batch.wait(LIMIT).expect("written");
        // Killed: its record stays, and nobody answers.
        faults.outage(true);
        rig.fabric.kill_process(peer.process);
        drop(peer.engine);
        faults.outage(false);
        let waiting = own.allocate_batch(1);
        waiting.submit(&[write]).expect("submitted");
        let seen = writes(&rig, KeySpace::default().segment("peer"));
        let ended = std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                let error = waiting.wait(2 * LIMIT).expect_err("its process is gone");
                (Instant::now(), error)
            });
            running = Some(rig.start(1, "peer", &[]));
            ended.join().expect("it ended")
        });
        let (at, error) = ended;
        assert!(
            matches!(
                error,
                EngineError::Transfer(TransferError::PeerRestarted { .. })
            ),
            "{error}"
        );
        let (known, _) = seen.recv_timeout(LIMIT).expect("the new record is written");
        took.push(at.saturating_duration_since(known));
    }
    assert!(
        took.iter().min() < Some(&Duration::from_secs(1)),
        "{took:?}"
    );
}

#[test]
fn a_rail_on_which_nothing_completes_and_no_event_comes_is_left_in_time() {
    let mut stalls = Vec::new();
    for seed in 0..TRIES as u64 {
        // A rail that was left has to earn its share of the work again, so that each try has new
        // ones.
        let rig = Rig::new(50 + seed, 2);
        // Whatever is on its way stays there for long: no error tells of it.
        let pair = Pair::with_settings(&rig, &[("MC_QP_TIMEOUT", "20")]);
        pair.write_until("both rails are up", || pair.both_up());
        let silence = rig.fabric.partition(&[rig.port(0, 0)], &[rig.port(1, 0)]);
        let begin = Instant::now();
        // A rail that has no work has nothing to be left for: then the try says nothing.
        let longest = pair.write_until("the rail is left", || {
            !pair.is_up(0) || begin.elapsed() > LIMIT / 3
        });
        stalls.extend((!pair.is_up(0)).then_some(longest));
        silence.undo();
    }
    assert!(!stalls.is_empty(), "the rail was never left");
    let limit = Duration::from_millis(1_500);
    assert!(stalls.iter().min() < Some(&limit), "{stalls:?}");
}

#[test]
fn an_unrelated_row_moves_nothing() {
    let rig = Rig::new(6, 2);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    let (port, nic) = (rig.port(0, 0), rig.hosts[0].nics[0]);
    let before = generation(&pair.own);
    let read = pair.own_log.count(is_outcome("unchanged"));
    // Another address comes and goes, each time with events.
    for last in 200..210 {
        assert!(rig.fabric.add_address(port, address(9, last)));
        assert!(rig.fabric.delete_address(port, address(9, last)));
    }
    assert!(rig.fabric.add_address(port, address(9, 200)));
    rig.fabric
        .raise_event(nic, AsyncEventKind::GidChange, Some(1));
    pair.write_until("the port is read", || {
        pair.own_log.count(is_outcome("unchanged")) > read
    });
    let is_cut =
        |event: &Event| matches!(event, Event::EndpointsCut { .. } | Event::GateClosed { .. });
    assert_eq!(pair.own_log.count(is_cut), 0);
    assert_eq!(
        pair.own.descriptor().devices[0].gid,
        Gid::from_ip(address(0, 1))
    );
    assert!(
        generation(&pair.own) - before <= 1,
        "at most the list of GIDs"
    );
}
