//! Endpoints of two transports over simulated NICs.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rerail_verbs::RdmaOpcode;
use rerail_verbs::sim::{FaultGuard, LinkOptions, NicId, WorkVerdict};

use super::super::rig::{KIB, LIMIT, Move, Rig, peer_of, registered, rig, wait_until};
use super::super::transport::RdmaTransport;
use super::*;
use crate::TransferError;

mod closes;
mod idle;
mod messages;
mod paths;
mod probes;
mod revoke;

/// What was said first to connect.
fn first_asked(rig: &Rig) -> Offer {
    let carried = rig.wire.carried.lock().expect("whole");
    let asked = carried.iter().find(|offer| offer.ready_ack == Some(false));
    asked.expect("it connected").clone()
}

/// A request to close what was asked for so: it says the packet number again.
fn close_of(offer: &Offer) -> Offer {
    Offer {
        qp_nums: Vec::new(),
        ready_ack: None,
        ..offer.clone()
    }
}

#[test]
fn a_connection_that_the_peer_closes_is_made_again_and_no_transfer_fails() {
    let rig = rig(1, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(5),
        key_error: 0,
    };
    write.run().expect("moved");
    let asked = rig.asks();
    b.connector().close_all(None, "a test");
    wait_until("connected again, unasked", || rig.asks() > asked);
    let begin = Instant::now();
    write.run().expect("moved again");
    assert!(begin.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_peer_that_says_no_packet_numbers_gets_packets_from_number_0_on() {
    let rig = rig(10, 1);
    rig.wire.is_cpp.store(true, Ordering::SeqCst);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(5),
        key_error: 0,
    };
    write.run().expect("moved");
}

#[test]
fn a_rail_is_blamed_once_for_a_connection_that_fails() {
    let rig = rig(2, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    *rig.wire.refusal.lock().expect("whole") = Some(("", "not today"));
    let write = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(1),
        key_error: 0,
    };
    let error = write.run().expect_err("no connection");
    assert!(error.to_string().contains("not today"), "{error}");
    let (errors, asks) = (peer.rails()[0].stats().errors, rig.asks());
    assert!(errors > 0 && errors <= asks, "{errors} of {asks}");
}

#[test]
fn a_request_with_a_bad_key_fails_alone_and_its_rail_is_not_blamed() {
    let rig = rig(3, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let good = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(5),
        key_error: 0,
    };
    let bad = Move {
        key_error: 0x1234_5600,
        ..good
    };
    good.run().expect("moved");
    for _ in 0..4 {
        let error = bad.run().expect_err("no such key");
        assert!(
            matches!(error, TransferError::RemoteAccess { .. }),
            "{error}"
        );
        good.run().expect("the others go on");
    }
    let stats = peer.rails()[0].stats();
    assert_eq!(stats.errors, 0, "{:?}", peer.rails()[0].last_trouble());
}

#[test]
fn work_for_an_instance_that_is_no_more_never_reaches_the_next_one() {
    let rig = rig(4, 1);
    let (a, old) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let stale = peer_of(&a, 1, &old);
    let source = registered(&a, 64 * KIB);
    drop(old);
    let b = rig.transport(1, "b2");
    let target = registered(&b, 64 * KIB);
    let to_stale = Move {
        own: &a,
        peer: &stale,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(5),
        key_error: 0,
    };
    let peer = peer_of(&a, 2, &b);
    let to_b = Move {
        peer: &peer,
        ..to_stale
    };
    // Connected between the same NICs already, so that there is something to mistake.
    to_b.run().expect("moved");
    let error = to_stale.run().expect_err("that process is gone");
    assert!(
        matches!(error, TransferError::PeerRestarted { .. }),
        "{error}"
    );
    let begin = Instant::now();
    to_b.run().expect("the younger is not disturbed");
    assert!(begin.elapsed() < Duration::from_secs(1));
    assert_eq!(peer.rails()[0].stats().errors, 0);
}

fn request(from: &str, to: &str, qp_num: u32) -> Offer {
    Offer {
        local_path: from.to_owned(),
        peer_path: to.to_owned(),
        gid: Some(rerail_verbs::Gid::from_ip(IpAddr::from([10, 0, 0, 1]))),
        qp_nums: vec![qp_num, qp_num + 1],
        ready_ack: Some(false),
        ..Offer::default()
    }
}

#[test]
fn strangers_get_a_bounded_number_of_endpoints() {
    let rig = rig(5, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let path = b.identity().path(&b.nics()[0]);
    let accept = |offer: Offer| rig.runtime.block_on(b.connector().accept(offer));
    for wrong in ["", "@", "host0", "@sim0", "host0@"] {
        let reason = accept(request(wrong, &path, 1)).expect_err("no NIC path");
        assert!(reason.contains("server@device"), "{reason}");
    }
    assert_eq!(b.connector().endpoints(), 0);
    let answers = (0..70).map(|stranger| {
        let from = format!("stranger{stranger}@sim0");
        accept(request(&from, &path, 1000 + 2 * stranger))
    });
    let refused: Vec<String> = answers.filter_map(Result::err).collect();
    assert_eq!(refused.len(), 70 - HALF_OPEN_PER_NIC_MAX, "{refused:?}");
    assert!(refused[0].contains("acknowledgement"), "{refused:?}");

    // One that acknowledges makes room.
    let ack = Offer {
        ready_ack: Some(true),
        ..request("stranger0@sim0", &path, 1000)
    };
    accept(ack).expect("acknowledged");
    accept(request("late@sim0", &path, 3000)).expect("there is room");
    drop(a);
}

#[test]
fn who_means_an_earlier_process_takes_no_place() {
    let rig = rig(36, 1);
    let b = rig.transport(1, "b1");
    let path = b.identity().path(&b.nics()[0]);
    let accept = |offer: Offer| rig.runtime.block_on(b.connector().accept(offer));
    for stranger in 0..2 * HALF_OPEN_PER_NIC_MAX as u32 {
        let from = format!("stranger{stranger}@sim0");
        let earlier = Offer {
            peer_instance: Some("b0".to_owned()),
            ..request(&from, &path, 1000 + 2 * stranger)
        };
        let reason = accept(earlier).expect_err("it is not that one");
        assert!(reason.contains("b1"), "{reason}");
    }
    wait_until("nothing is left of them", || b.connector().endpoints() == 0);
    accept(request("late@sim0", &path, 3000)).expect("there is room");
}

#[test]
fn x04_ends_of_a_process_that_died_unread_go_when_its_successor_speaks_on_any_nic() {
    let rig = rig(35, 2);
    // Nobody acknowledges, and none is given up for that.
    let mut config = super::super::RdmaConfig::default();
    config.limits.connect = Duration::from_secs(3_600);
    let b = rig.transport_with(1, "b1", config);
    let accept = |offer: Offer| {
        let answer = rig.runtime.block_on(b.connector().accept(offer));
        answer.expect("accepted").psn
    };
    let of = |instance: &str, nic: usize, server: &str, qp_num: u32| Offer {
        instance: Some(instance.to_owned()),
        ..request(
            &format!("{server}@sim{nic}"),
            &b.identity().path(&b.nics()[nic]),
            qp_num,
        )
    };
    let numbered = |instance: u8| format!("{instance:032x}");
    let dead = || of(&numbered(5), 0, "host0", 100);
    let other = || of(&numbered(5), 0, "other", 200);
    let (of_dead, of_other) = (accept(dead()), accept(other()));
    // An earlier one that is late takes nothing away: the same end answers once more.
    accept(of(&numbered(4), 1, "host0", 300));
    assert_eq!(accept(dead()), of_dead);
    // Nor does one of which it is not known whether it is later.
    let unordered = || of("b", 0, "plain", 500);
    let of_unordered = accept(unordered());
    accept(of("c", 1, "plain", 600));
    assert_eq!(accept(unordered()), of_unordered);
    assert_eq!(b.connector().endpoints(), 5);
    let of_successor = accept(of(&numbered(6), 1, "host0", 400));
    wait_until("its predecessors' ends are gone", || {
        b.connector().endpoints() == 4
    });
    assert_eq!(accept(of(&numbered(6), 1, "host0", 400)), of_successor);
    assert_eq!(accept(other()), of_other, "another server's");
    assert_ne!(accept(dead()), of_dead);
}

#[test]
fn permits_for_servers_that_nobody_talks_to_are_forgotten() {
    let rig = rig(6, 1);
    let a = rig.transport(0, "a1");
    let held = a.connector().permits("held");
    for server in 0..100 {
        drop(a.connector().permits(&format!("server{server}")));
    }
    assert!(a.connector().table().permits.len() <= 2);
    assert!(Arc::ptr_eq(&held, &a.connector().permits("held")));
}

/// What becomes of a write that runs out of time once its way is blocked and its NIC is at fault,
/// and the transport that it was made with.
fn write_with_fault<T>(
    rig: &Rig,
    fault: impl FnOnce(NicId) -> T,
) -> (TransferError, RdmaTransport) {
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    write.run().expect("moved");
    assert_eq!(a.quarantined_bytes(), 0);
    let lost = rig.fabric.block(&[rig.port(0, 0)], &[rig.port(1, 0)]);
    let _fault = fault(rig.hosts[0].1[0]);
    let late = Move {
        time: Duration::from_millis(100),
        ..write
    };
    let begin = Instant::now();
    let error = late.run().expect_err("nothing gets through");
    assert!(begin.elapsed() < Duration::from_millis(3_500));
    // What the error says is counted by now.
    let is_unfenced = matches!(error, TransferError::Unfenced { .. });
    let expected = if is_unfenced { 64 * KIB } else { 0 };
    assert_eq!(a.quarantined_bytes(), expected, "{error}");
    drop(lost);
    drop(source);
    (error, a)
}

/// No write but the first completes.
fn lose_writes(rig: &Rig) -> FaultGuard {
    let mut writes = 0;
    rig.fabric.on_work(move |work| {
        writes += u32::from(work.opcode == RdmaOpcode::Write);
        if writes > 1 {
            WorkVerdict::LoseCompletion
        } else {
            WorkVerdict::Pass
        }
    })
}

/// Longer than an endpoint waits for its device, by much.
const HANGS_LONG: Duration = Duration::from_secs(4);

#[test]
fn a_control_thread_that_hangs_ends_transfers_as_unfenced_whose_work_does_not_come_back() {
    let rig = rig(7, 1);
    let _silent = lose_writes(&rig);
    let (error, a) = write_with_fault(&rig, |nic| rig.fabric.hang_control(nic, HANGS_LONG));
    assert!(matches!(error, TransferError::Unfenced { .. }), "{error}");
    assert_eq!(a.connector().unfenced(), 1);
    wait_until("the device answers", || a.quarantined_bytes() == 0);
}

#[test]
fn a_device_that_refuses_to_stop_ends_transfers_as_unfenced_whose_work_does_not_come_back() {
    let rig = rig(52, 1);
    let _silent = lose_writes(&rig);
    let (error, a) = write_with_fault(&rig, |nic| rig.fabric.refuse_to_stop(nic));
    assert!(matches!(error, TransferError::Unfenced { .. }), "{error}");
    assert_eq!(a.connector().unfenced(), 1);
    wait_until("the memory is let go of", || {
        a.quarantined_bytes() == 64 * KIB
    });
    // What could not be destroyed is there until its device is closed.
    a.nics()[0].release();
    wait_until("the device is closed", || a.quarantined_bytes() == 0);
}

#[test]
fn work_that_came_back_with_an_error_is_fenced_though_the_control_thread_hangs() {
    let rig = rig(9, 1);
    let (error, a) = write_with_fault(&rig, |nic| rig.fabric.hang_control(nic, HANGS_LONG));
    assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
    assert_eq!(a.connector().unfenced(), 0);
}

#[test]
fn memory_may_be_reused_once_a_transfer_is_reported_finished() {
    let rig = rig(8, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(5),
        key_error: 0,
    };
    write.run().expect("moved");
    let ones = vec![1; 64 * KIB as usize];
    let twos = vec![2; 64 * KIB as usize];
    source.memory().copy_in(0, &ones).expect("inside");
    // The packets are long on their way, and nobody tells the peer to stop listening to them: a
    // new connection would have it give its end up.
    rig.wire.loses_closes.store(true, Ordering::SeqCst);
    *rig.wire.refusal.lock().expect("whole") = Some(("host0", "not now"));
    let latency = Duration::from_millis(600);
    let slow = rig.fabric.degrade(
        rig.port(0, 0),
        LinkOptions {
            latency,
            ..LinkOptions::default()
        },
    );
    let cut_off = Move {
        time: Duration::from_millis(100),
        ..write
    };
    let error = cut_off.run().expect_err("it runs out of time");
    assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
    target.memory().copy_in(0, &twos).expect("inside");
    std::thread::sleep(latency + Duration::from_millis(100));
    let mut found = vec![0; 64 * KIB as usize];
    target.memory().copy_out(0, &mut found).expect("inside");
    assert!(found == twos, "bytes of a finished transfer came late");
    drop(slow);
}

#[test]
fn a_cpp_peer_is_told_of_a_cut_by_a_request_without_queue_pairs() {
    let rig = rig(10, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let path = b.identity().path(&b.nics()[0]);
    let accept = |offer: Offer| rig.runtime.block_on(b.connector().accept(offer));
    // Neither has an instance: one acknowledges, the other is too old for that.
    let old = Offer {
        ready_ack: None,
        ..request("cpp-old@mlx5_0", &path, 2000)
    };
    accept(old).expect("an endpoint");
    accept(request("cpp@mlx5_0", &path, 1000)).expect("an endpoint");
    let acknowledgement = Offer {
        ready_ack: Some(true),
        ..request("cpp@mlx5_0", &path, 1000)
    };
    accept(acknowledgement).expect("acknowledged");
    b.connector().close_all(None, "its GID has changed");
    let told = |peer: &str| {
        let carried = rig.wire.carried.lock().expect("whole");
        carried.iter().any(|offer| {
            offer.peer_path == peer && offer.local_path == path && offer.qp_nums.is_empty()
        })
    };
    wait_until("both are told", || {
        told("cpp@mlx5_0") && told("cpp-old@mlx5_0")
    });
    drop(a);
}

/// Refuses everybody, with a reason.
struct Nobody;

impl Admission for Nobody {
    fn admit(&self, nic: LocalNic, offer: &Offer) -> Result<(), String> {
        Err(format!(
            "{} of NIC {} is not back yet",
            offer.peer_path, nic.0
        ))
    }
}

#[test]
fn whom_the_engine_does_not_admit_is_refused_in_its_words() {
    let rig = rig(11, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let path = b.identity().path(&b.nics()[0]);
    let accept = |offer: Offer| rig.runtime.block_on(b.connector().accept(offer));
    accept(request("host0@sim0", &path, 1000)).expect("nobody objects");
    b.connector().set_admission(Arc::new(Nobody));
    let refused = accept(request("host9@sim0", &path, 1000)).expect_err("not admitted");
    assert_eq!(refused, format!("{path} of NIC 0 is not back yet"));
    // What was admitted before goes on.
    let acknowledgement = Offer {
        ready_ack: Some(true),
        ..request("host0@sim0", &path, 1000)
    };
    accept(acknowledgement).expect("acknowledged");
    drop(a);
}

#[test]
fn a_close_for_an_endpoint_that_is_closing_is_answered_once_its_queue_pairs_have_stopped() {
    const HANGS: Duration = Duration::from_millis(700);
    let rig = rig(12, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, KIB), registered(&b, KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    let close = close_of(&first_asked(&rig));
    // Whatever `b` says to `a` is lost, so that `a` does not begin to close by itself.
    rig.wire.loses_closes.store(true, Ordering::SeqCst);
    let begin = Instant::now();
    rig.fabric.hang_control(rig.hosts[1].1[0], HANGS);
    assert_eq!(b.connector().close_all(Some(0), "its port failed"), 1);
    let place = (0, a.identity().path(&a.nics()[0]));
    wait_until("it begins to close", || {
        b.connector().table().closing.contains_key(&place)
    });
    let answer = rig.runtime.block_on(b.connector().accept(close));
    assert_eq!(answer.expect_err("a close is refused"), CLOSED);
    assert!(
        begin.elapsed() >= HANGS,
        "its queue pairs were not in ERR yet"
    );
}
