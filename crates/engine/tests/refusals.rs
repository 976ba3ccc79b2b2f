//! Requests that peers refuse, or that go by keys of yesterday, over simulated NICs in real time.
#![cfg(feature = "sim")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use common::{LIMIT, Pair, Rig, generation, registered, subscribed, until};
use rerail_engine::{Batch, EngineError, Event, MemoryOptions, Request};
use rerail_transport::TransferError;
use rerail_verbs::WcStatus;
use rerail_verbs::sim::{FaultGuard, NicId, WorkVerdict};

/// Bytes of the requests here: more than a probe has.
const BYTES: u64 = 16 << 10;

fn submitted(pair: &Pair) -> Batch {
    let batch = pair.own.allocate_batch(1);
    let (from, to) = (pair.source.addr(), pair.target.addr());
    let mut write = Request::write(&pair.segment, from, to, BYTES);
    write.timeout = Some(2 * LIMIT);
    batch.submit(&[write]).expect("submitted");
    batch
}

/// From now on, requests' work on the NIC fails so, `times` times.
fn failing(rig: &Rig, on: NicId, status: WcStatus, times: u32) -> (Arc<AtomicU32>, FaultGuard) {
    let failed = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&failed);
    let guard = rig.fabric.on_work(move |work| {
        let is_meant = work.nic == on && work.bytes >= BYTES;
        if is_meant && count.load(Ordering::Relaxed) < times {
            count.fetch_add(1, Ordering::Relaxed);
            return WorkVerdict::Fail(status, 0);
        }
        WorkVerdict::Pass
    });
    (failed, guard)
}

#[track_caller]
fn assert_refused(batch: &Batch) {
    let error = batch.wait(2 * LIMIT).expect_err("it is refused");
    let refused = matches!(
        error,
        EngineError::Transfer(TransferError::RemoteAccess { .. })
    );
    assert!(refused, "{error}");
}

/// Whether the reader has taken in what the peer says now.
fn is_known(pair: &Pair) -> bool {
    let said = generation(&pair.peer);
    let taken =
        |event: &Event| matches!(event, Event::PeerTold { generation, .. } if *generation >= said);
    pair.peer_log.count(taken) > 0
}

#[test]
fn m04_a_refused_request_has_a_second_chance_by_a_later_record_though_the_key_is_the_same() {
    let rig = Rig::new(70, 1).meeting_in("engine-refusals-later");
    // One place for subscribers, which is taken: only trouble tells of a later record.
    let peer = rig.try_start(1, "peer", &[], |config| {
        config.rpc_server.subscriptions_max = 1;
    });
    let peer = peer.expect("an engine starts");
    let _taken = subscribed(&peer.engine);
    let pair = Pair::of(rig.start(0, "own", &[]), peer);
    pair.write_until("the rail is up", || pair.is_up(0));
    rig.store().faults().lose_watches(true);
    let nic = rig.hosts[0].nics[0];
    // As long as the record is the same, it has been wrong.
    let (failed, guard) = failing(&rig, nic, WcStatus::RemAccessErr, 1);
    assert_refused(&submitted(&pair));
    assert_eq!(failed.load(Ordering::Relaxed), 1);
    guard.undo();
    pair.write_until("the rail is up again", || pair.is_up(0));
    // The reader may have read the later record already, after the trouble of before.
    let mut others = Vec::new();
    let mut tries = |times: u32| {
        others.push(registered(&pair.peer, 4096));
        let (failed, guard) = failing(&rig, nic, WcStatus::RemAccessErr, times);
        let batch = submitted(&pair);
        until("it has ended", || batch.unfinished() == 0);
        guard.undo();
        pair.write_until("the rail is up again", || pair.is_up(0));
        let failed = failed.load(Ordering::Relaxed);
        (batch, failed)
    };
    until("it arrives by the later record", || {
        let (batch, failed) = tries(1);
        assert_eq!(failed, 1);
        batch.wait(2 * LIMIT).is_ok()
    });
    until("it is refused twice", || {
        let (batch, failed) = tries(u32::MAX);
        assert_refused(&batch);
        assert!(
            failed <= 2,
            "one chance, and not as many as there are records"
        );
        failed == 2
    });
}

#[test]
fn m04_a_request_that_comes_to_nothing_follows_memory_that_is_registered_anew_several_times() {
    let rig = Rig::new(71, 1);
    let pair = Pair::new(&rig);
    pair.write_until("the rail is up", || pair.is_up(0));
    let refused =
        |event: &Event| matches!(event, Event::Rail { cause, .. } if cause.contains("REM_ACCESS"));
    // It is tried again and again, and comes to nothing.
    let nic = rig.hosts[0].nics[0];
    let (failed, breaking) = failing(&rig, nic, WcStatus::RetryExcErr, u32::MAX);
    let batch = submitted(&pair);
    let key = || {
        let record = pair.peer.descriptor();
        let mut buffers = record.buffers.iter();
        let found = buffers.find(|buffer| buffer.addr == pair.target.addr());
        found.map(|buffer| buffer.rkey.clone())
    };
    let mut others = Vec::new();
    for _ in 0..3 {
        let before = key();
        pair.peer
            .unregister(pair.target.addr())
            .expect("nothing uses it");
        // Something else first, so that the key differs.
        others.push(registered(&pair.peer, 4096));
        pair.peer
            .register(&pair.target, MemoryOptions::default())
            .expect("registered anew");
        assert_ne!(key(), before, "another key");
        until("the reader knows", || is_known(&pair));
        // One may have begun before.
        let so_far = failed.load(Ordering::Relaxed);
        until("it is tried by the new key", || {
            failed.load(Ordering::Relaxed) > so_far + 1 || batch.unfinished() == 0
        });
    }
    breaking.undo();
    batch.wait(2 * LIMIT).expect("by the last keys");
    assert_eq!(pair.own_log.count(refused), 0, "the last key was right");
}

#[test]
fn what_all_nics_that_are_left_refuse_fails_and_does_not_wait_for_its_time_to_be_over() {
    let rig = Rig::new(72, 2);
    let pair = Pair::new(&rig);
    pair.write_until("both rails are up", || pair.both_up());
    // One NIC of the peer refuses it, and what goes to the other does not arrive.
    let was_refused = Arc::new(AtomicBool::new(false));
    let refused = Arc::clone(&was_refused);
    let _failing = rig.fabric.on_work(move |work| {
        if work.bytes < BYTES {
            return WorkVerdict::Pass;
        }
        let again = refused.swap(true, Ordering::Relaxed);
        let status = if again {
            WcStatus::RetryExcErr
        } else {
            WcStatus::RemAccessErr
        };
        WorkVerdict::Fail(status, 0)
    });
    // Not with an error that says that its time is over.
    assert_refused(&submitted(&pair));
    assert!(was_refused.load(Ordering::Relaxed));
}
