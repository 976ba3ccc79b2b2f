//! What an endpoint says, and what it does not say any more.

use std::sync::atomic::Ordering;

use super::*;
use crate::rdma::RdmaConfig;
use crate::rdma::rig::{Finish, stuck};
use crate::rdma::slice::{Keys, Piece, Span};
use crate::rdma::transfer::TransferSpec;

const HOUR: Duration = Duration::from_secs(3_600);

/// Settings with which nothing is given up for the time that it takes.
fn patient() -> RdmaConfig {
    let mut config = RdmaConfig::default();
    let limits = &mut config.limits;
    (limits.connect, limits.to_error, limits.fence) = (HOUR, HOUR, HOUR);
    config
}

fn is_closing(transport: &RdmaTransport) -> bool {
    let table = transport.connector().table();
    !table.closing.is_empty()
}

fn closes(rig: &Rig) -> usize {
    let carried = rig.wire.carried.lock().expect("whole");
    let closes = carried.iter().filter(|offer| offer.qp_nums.is_empty());
    closes.count()
}

#[test]
fn what_an_endpoint_has_not_said_when_it_closes_is_never_said() {
    let rig = rig(60, 1);
    let (a, b) = (
        rig.transport_with(0, "a1", patient()),
        rig.transport(1, "b1"),
    );
    let permits = a.connector().permits("host1");
    let both = permits.handshakes.acquire_many(2);
    let both = rig.runtime.block_on(both).expect("never closed");
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let (transfer, finish) = Move::all(&a, &peer, &source, &target).write();
    wait_until("it waits to ask", || Arc::strong_count(&permits) == 2);
    // It stays in the course of closing, and the next one does not come as far as to ask.
    let (_control, held) = stuck(&a.nics()[0]);
    a.connector().close_all(None, "a test");
    wait_until("it is closing", || is_closing(&a));
    drop(both);
    wait_until("nobody waits to say anything", || {
        Arc::strong_count(&permits) == 1
    });
    assert_eq!(rig.asks(), 0);
    drop(held);
    finish.wait().expect("the next one asks");
    assert!(transfer.is_finished());
}

#[test]
fn an_endpoint_that_closes_before_it_has_acknowledged_does_not_acknowledge() {
    let rig = rig(63, 1);
    let (a, b) = (
        rig.transport_with(0, "a1", patient()),
        rig.transport(1, "b1"),
    );
    let permits = a.connector().permits("host1");
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let (_control, held) = stuck(&b.nics()[0]);
    let (_transfer, finish) = Move::all(&a, &peer, &source, &target).write();
    wait_until("it has asked", || rig.asks() == 1);
    // Whoever comes next, once the answer is there, waits.
    let waiting = Arc::clone(&permits);
    let both = rig.runtime.spawn(async move {
        let both = waiting.handshakes.acquire_many(2).await;
        both.expect("never closed").forget();
    });
    drop(held);
    wait_until("the answer is there", || both.is_finished());
    wait_until("it waits to acknowledge", || {
        Arc::strong_count(&permits) == 2
    });
    let (_control, held) = stuck(&a.nics()[0]);
    a.connector().close_all(None, "a test");
    wait_until("it is closing", || is_closing(&a));
    let acknowledged = || {
        let carried = rig.wire.carried.lock().expect("whole");
        let own = |offer: &&Offer| offer.local_path.starts_with("host0");
        carried
            .iter()
            .filter(own)
            .any(|offer| offer.ready_ack == Some(true))
    };
    permits.handshakes.add_permits(2);
    wait_until("the peer is told", || closes(&rig) > 0);
    wait_until("nobody waits to say anything", || {
        Arc::strong_count(&permits) == 1
    });
    assert!(!acknowledged());
    drop(held);
    finish.wait().expect("the next one asks");
    assert!(acknowledged());
}

#[test]
fn closes_reach_a_cpp_peer_before_the_next_request_of_the_same_way() {
    let rig = rig(64, 1);
    rig.wire.is_cpp.store(true, Ordering::SeqCst);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    let permits = a.connector().permits("host1");
    let all = permits.closes.acquire_many(CLOSES_PER_SERVER_MAX as u32);
    let _all = rig.runtime.block_on(all).expect("never closed");
    let before = rig.wire.carried.lock().expect("whole").len();
    a.connector().close_all(None, "a test");
    wait_until("it is closed and asked for again", || {
        let carried = rig.wire.carried.lock().expect("whole");
        let own = |offer: &&Offer| offer.local_path.starts_with("host0");
        carried.iter().skip(before).filter(own).count() >= 2
    });
    let carried = rig.wire.carried.lock().expect("whole");
    let own = |offer: &&Offer| offer.local_path.starts_with("host0");
    let first = carried
        .iter()
        .skip(before)
        .find(own)
        .expect("it said something");
    assert!(first.qp_nums.is_empty(), "{first:?}");
}

#[test]
fn a_request_to_close_does_not_wait_for_handshakes() {
    let rig = rig(61, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    assert_eq!(closes(&rig), 0);
    let permits = a.connector().permits("host1");
    let both = permits.handshakes.acquire_many(2);
    let _both = rig.runtime.block_on(both).expect("never closed");
    a.connector().close_all(None, "a test");
    wait_until("the peer is told", || closes(&rig) > 0);
    let carried = rig.wire.carried.lock().expect("whole");
    let by_a = |offer: &&Offer| offer.qp_nums.is_empty() && offer.local_path.starts_with("host0");
    assert!(carried.iter().any(|offer| by_a(&offer)), "{carried:?}");
}

#[test]
fn an_endpoint_that_is_closing_waits_for_no_answer_to_what_it_asked() {
    let rig = rig(65, 1);
    let (a, b) = (
        rig.transport_with(0, "a1", patient()),
        rig.transport(1, "b1"),
    );
    let permits = a.connector().permits("host1");
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    rig.wire.is_silent.store(true, Ordering::SeqCst);
    let (_transfer, finish) = Move::all(&a, &peer, &source, &target).write();
    wait_until("it has asked", || rig.asks() == 1);
    assert!(permits.handshakes.available_permits() < HANDSHAKES_PER_SERVER_MAX);
    // It does not come to an end.
    let (_control, held) = stuck(&a.nics()[0]);
    a.connector().close_all(None, "a test");
    wait_until("others may connect", || {
        permits.handshakes.available_permits() == HANDSHAKES_PER_SERVER_MAX
    });
    assert!(is_closing(&a));
    rig.wire.is_silent.store(false, Ordering::SeqCst);
    drop(held);
    finish.wait().expect("moved at last");
}

#[test]
fn a_key_that_was_told_while_a_connection_was_being_made_is_judged_by_the_next_one() {
    let rig = rig(66, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let (_control, held) = stuck(&b.nics()[0]);
    let good = Move::all(&a, &peer, &source, &target);
    let (_first, first_finish) = good.write();
    wait_until("it has asked", || rig.asks() == 1);
    let wrong = |told_now: bool| {
        let keys = target.keys().into_iter().map(|chunk| {
            let keys = chunk.rkeys.iter().map(|key| key ^ 0x1234_5600);
            if told_now {
                let keys = Keys::of_peer(keys.map(Some).collect::<Vec<_>>().into_iter());
                let (addr, length) = (chunk.addr, chunk.length);
                Piece { addr, length, keys }
            } else {
                Piece::new(chunk.addr, chunk.length, keys)
            }
        });
        let remote = Span::new(target.memory().addr(), 64 * KIB, keys).expect("registered");
        let good = good.write().0;
        let spec = TransferSpec {
            remote,
            ..good.spec().clone()
        };
        let finish = Arc::new(Finish::default());
        (a.submit(spec, finish.clone()), finish)
    };
    let (late, late_finish) = wrong(true);
    drop(held);
    first_finish.wait().expect("moved");
    let is_refused = |finish: &Finish| {
        let error = finish.wait().expect_err("no such key");
        assert!(
            matches!(error, TransferError::RemoteAccess { .. }),
            "{error}"
        );
    };
    is_refused(&late_finish);
    assert_eq!(
        late.retried_slices(),
        1,
        "once, and not as often as it is refused"
    );
    let (known, known_finish) = wrong(false);
    is_refused(&known_finish);
    assert_eq!(known.retried_slices(), 0);
}

#[test]
fn an_endpoint_that_is_over_waits_for_no_answer() {
    let rig = rig(62, 1);
    let (a, b) = (
        rig.transport_with(0, "a1", patient()),
        rig.transport(1, "b1"),
    );
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    rig.wire.is_silent.store(true, Ordering::SeqCst);
    let (_transfer, finish) = Move::all(&a, &peer, &source, &target).write();
    // Two that wait would keep all others from asking.
    for asked in 1..=4 {
        wait_until("the next one asks", || rig.asks() >= asked);
        a.connector().close_all(None, "a test");
    }
    rig.wire.is_silent.store(false, Ordering::SeqCst);
    a.connector().close_all(None, "a test");
    finish.wait().expect("moved at last");
}
