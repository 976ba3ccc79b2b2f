//! What a peer may still do once it is revoked.

use std::collections::BTreeSet;

use super::*;
use crate::rdma::rig::{hold, stuck};

fn named(server: &str) -> BTreeSet<String> {
    BTreeSet::from([server.to_owned()])
}

const REVOKED_WITHIN: Duration = Duration::from_secs(20);

#[test]
fn nothing_that_a_revoked_peer_has_on_the_wire_reaches_memory_that_is_used_again() {
    // What is on the wire arrives when the queue pairs have stopped; or before, while they cannot
    // be stopped yet.
    for (latency_ms, hangs_ms) in [(600, 0), (300, 1_500)] {
        let latency = Duration::from_millis(latency_ms);
        let rig = rig(17, 1);
        let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
        let peer = peer_of(&a, 1, &b);
        let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
        let write = Move::all(&a, &peer, &source, &target);
        write.run().expect("moved");
        let ones = vec![1; 64 * KIB as usize];
        let twos = vec![2; 64 * KIB as usize];
        source.memory().copy_in(0, &ones).expect("inside");
        *rig.wire.refusal.lock().expect("whole") = Some(("host0", "not now"));
        let slow = rig.fabric.degrade(
            rig.port(0, 0),
            LinkOptions {
                latency,
                ..LinkOptions::default()
            },
        );
        let (_, finish) = write.write();
        wait_until("it is on the wire", || rig.fabric.stats().packets > 0);
        rig.fabric
            .hang_control(rig.hosts[1].1[0], Duration::from_millis(hangs_ms));
        let servers = named("host0");
        let revoked = b.connector().revoke(&servers, REVOKED_WITHIN);
        let count = rig.runtime.block_on(revoked).expect("they stop");
        assert_eq!(count, 1);
        target.memory().copy_in(0, &twos).expect("inside");
        std::thread::sleep(latency + Duration::from_millis(200));
        let mut found = vec![0; 64 * KIB as usize];
        target.memory().copy_out(0, &mut found).expect("inside");
        assert!(found == twos, "bytes came late: {latency_ms}, {hangs_ms}");
        drop(slow);
        // The peer connects anew, and goes on.
        *rig.wire.refusal.lock().expect("whole") = None;
        finish.wait().expect("moved over a new connection");
        target.memory().copy_out(0, &mut found).expect("inside");
        assert!(found == ones, "by the transfer that was under way");
        write.run().expect("moved");
    }
}

#[test]
fn who_has_no_connection_is_revoked_at_once_and_others_keep_theirs() {
    let rig = rig(18, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, KIB), registered(&b, KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    for stranger in ["nobody", "", "host", "host0@sim0"] {
        let servers = named(stranger);
        let revoked = b.connector().revoke(&servers, Duration::ZERO);
        assert_eq!(rig.runtime.block_on(revoked).expect("nothing to do"), 0);
    }
    let asks = rig.asks();
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    assert_eq!((rig.asks(), b.connector().endpoints()), (asks, 1));
}

#[test]
fn an_end_that_may_be_connected_before_it_finds_that_it_is_revoked_is_waited_for() {
    let rig = rig(49, 1);
    let b = rig.transport(1, "b1");
    let path = b.identity().path(&b.nics()[0]);
    // Its queue pairs are about to be made.
    let (control, free_control) = stuck(&b.nics()[0]);
    let (answer, _answered) = oneshot::channel();
    b.connector()
        .deliver(request("host0@sim0", &path, 1000), answer);
    // The only thread that it could learn on that they are made, or that it is to close.
    let (said, hears) = std::sync::mpsc::channel();
    let (free_runtime, held) = std::sync::mpsc::channel();
    rig.runtime.spawn(async move {
        said.send(()).expect("somebody waits");
        hold(&held);
    });
    hears.recv().expect("it is held");
    drop(free_control);
    let made = control.submit(|| ()).expect("room");
    made.wait_timeout(LIMIT)
        .expect("what was asked before is done");
    let revoke = |limit| {
        let servers = named("host0");
        let revoked = b.connector().revoke(&servers, limit);
        rig.runtime.block_on(revoked)
    };
    revoke(Duration::ZERO).expect_err("it is about to be connected");
    drop(free_runtime);
    revoke(REVOKED_WITHIN).expect("it finds that it is closed");
    assert!(
        !b.connector()
            .table()
            .current
            .contains_key(&(0, "host0@sim0".into()))
    );
}

#[test]
fn a_device_that_hangs_is_named_and_revoking_again_goes_on_waiting() {
    const HANGS: Duration = Duration::from_secs(6);
    let rig = rig(19, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, KIB), registered(&b, KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    *rig.wire.refusal.lock().expect("whole") = Some(("host0", "not now"));
    let begin = Instant::now();
    rig.fabric.hang_control(rig.hosts[1].1[0], HANGS);
    let revoke = |limit| {
        let servers = named("host0");
        let revoked = b.connector().revoke(&servers, limit);
        rig.runtime.block_on(revoked)
    };
    let error = revoke(Duration::from_millis(50)).expect_err("they cannot stop");
    let text = error.to_string();
    assert!(text.contains("host0") && text.contains("sim0"), "{text}");
    assert!(error.is_retryable());
    let again = revoke(Duration::ZERO);
    assert!(begin.elapsed() >= HANGS || again.is_err(), "it is closing");
    // Its endpoint is given up meanwhile, which proves nothing.
    wait_until("it has ended", || b.connector().endpoints() == 0);
    if begin.elapsed() < HANGS {
        assert!(revoke(Duration::ZERO).is_err() || begin.elapsed() >= HANGS);
    }
    revoke(REVOKED_WITHIN).expect("the device answers in the end");
    assert!(begin.elapsed() >= HANGS, "it hung still");
}

#[test]
fn ends_in_a_device_that_hangs_count_for_a_revocation_however_many_there_are() {
    const MANY: u64 = 3000;
    let rig = rig(42, 1);
    let b = rig.transport(1, "b1");
    let opening = b.nics()[0].opening().expect("open");
    // Each has ended without proof; some of them have stopped since.
    let proofs: Vec<_> = (0..MANY)
        .map(|key| {
            let (path, proof) = (format!("host{key}@sim0"), Proof::new(&opening));
            let mut table = b.connector().table();
            let key = 1_000_000 + key;
            table.ends.begin(key, (0, &path), Some(7), proof.clone());
            table.ends.forget(key);
            proof
        })
        .collect();
    let revoke = |server: &str| {
        let servers = named(server);
        let revoked = b.connector().revoke(&servers, Duration::ZERO);
        rig.runtime.block_on(revoked)
    };
    for server in ["host0", "host1500", "host2999"] {
        let error = revoke(server).expect_err("nobody knows that its queue pairs have stopped");
        assert!(error.to_string().contains("over sim0"), "{error}");
    }
    // In ERR, but what we had posted on it has not come back.
    proofs[0].give();
    revoke("host0").expect_err("something of ours may be under way");
    proofs[0].drained();
    assert_eq!(revoke("host0").expect("it has stopped"), 0);
    assert_eq!(revoke("host3000").expect("there is none"), 0);
}
