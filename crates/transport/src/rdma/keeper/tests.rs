//! Rails of two transports over simulated NICs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rerail_verbs::sim::{LinkOptions, WorkVerdict};
use rerail_verbs::{RdmaOpcode, WcStatus};

use super::super::events::{FenceStep, RdmaEvents};
use super::super::inbox::Work;
use super::super::rig::{Finish, KIB, LIMIT, Move, peer_of, registered, rig, wait_until};
use super::super::slice::{Keys, Piece, Span};
use super::super::transfer::TransferSpec;
use super::*;
use crate::TransferError;

fn rail_of(peer: &Peer, local: u32, nic: u32) -> Arc<Rail> {
    let rails = peer.rails();
    let is_wanted = |rail: &&Arc<Rail>| rail.id().local.0 == local && rail.id().peer.nic == nic;
    rails.iter().find(is_wanted).cloned().expect("declared")
}

fn bytes(rail: &Rail) -> u64 {
    rail.stats().bytes
}

#[test]
fn a_blocked_path_is_proved_by_probes_before_user_work_goes_there() {
    let rig = rig(1, 2);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    // What the first NIC sends is lost, and nobody says so.
    let blocked = rig
        .fabric
        .block(&[rig.port(0, 0)], &[rig.port(1, 0), rig.port(1, 1)]);
    let user_work = Arc::new(AtomicU64::new(0));
    let (count, first) = (Arc::clone(&user_work), rig.hosts[0].1[0]);
    let watched = rig.fabric.on_work(move |work| {
        if work.nic == first && work.opcode == RdmaOpcode::Write {
            count.fetch_add(1, Ordering::SeqCst);
        }
        WorkVerdict::Pass
    });
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 256 * KIB), registered(&b, 256 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    let rail = rail_of(&peer, 0, 0);
    for _ in 0..10 {
        write.run().expect("moved over the other NIC");
    }
    wait_until("its probes fail", || rail.stats().errors > 1);
    assert_eq!(user_work.load(Ordering::SeqCst), 0);
    drop(blocked);
    // Proved again by the engine alone.
    wait_until("the rail is back", || rail.is_usable());
    assert_eq!(user_work.load(Ordering::SeqCst), 0);
    wait_until("it carries work", || {
        write.run().expect("moved");
        user_work.load(Ordering::SeqCst) > 0
    });
    drop(watched);
}

#[test]
fn work_that_has_no_proved_rail_waits_and_says_why_at_its_end() {
    let rig = rig(2, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let blocked = rig.fabric.block(&[rig.port(0, 0)], &[rig.port(1, 0)]);
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move {
        time: Duration::from_millis(1_500),
        ..Move::all(&a, &peer, &source, &target)
    };
    let (transfer, finish) = write.write();
    let error = finish.wait().expect_err("nothing gets through");
    assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("host1@sim0"), "{text}");
    assert!(!text.contains("none"), "{text}");
    assert_eq!(transfer.retried_slices(), 0, "it was never posted");
    drop(blocked);
    let patient = Move::all(&a, &peer, &source, &target);
    patient
        .run()
        .expect("the last path is tried again and again");
}

#[test]
fn a_pair_that_always_fails_does_not_hold_the_other_up() {
    let rig = rig(3, 2);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    *rig.wire.refusal.lock().expect("whole") = Some(("host0@sim0", "withdrawn"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    for _ in 0..200 {
        write.run().expect("moved");
    }
    let (bad, good) = (rail_of(&peer, 0, 0), rail_of(&peer, 1, 1));
    assert_eq!(bytes(&bad), 0);
    assert!(good.is_usable() && bytes(&good) > 0);
    *rig.wire.refusal.lock().expect("whole") = None;
    // However often it was refused.
    wait_until("it is used again", || {
        write.run().expect("moved");
        bytes(&bad) > 0
    });
}

#[test]
fn a_local_gate_takes_its_rails_out_when_the_call_returns_and_brings_them_back() {
    let rig = rig(4, 2);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    let (first, second) = (rail_of(&peer, 0, 0), rail_of(&peer, 1, 1));
    write.run().expect("moved");
    wait_until("both are up", || first.is_usable() && second.is_usable());
    a.router().local_gate(LocalNic(0), LocalGate::Closed);
    assert_eq!(first.state(), RailState::Down);
    let before = bytes(&first);
    for _ in 0..20 {
        write.run().expect("moved over the other");
    }
    assert_eq!(bytes(&first), before);
    let endpoint = first.endpoint();
    let endpoints_kept = true;
    a.router()
        .local_gate(LocalNic(0), LocalGate::Open { endpoints_kept });
    wait_until("it is back", || first.is_usable());
    assert_eq!(first.endpoint(), endpoint, "it lived, and was probed only");

    a.router().local_gate(LocalNic(0), LocalGate::Closed);
    a.connector().close_all(Some(0), "its address changed");
    let endpoints_kept = false;
    a.router()
        .local_gate(LocalNic(0), LocalGate::Open { endpoints_kept });
    wait_until("it is back over another endpoint", || {
        first.is_usable() && first.endpoint() != endpoint
    });
}

#[test]
fn what_a_peers_record_says_of_its_nics_counts_at_once() {
    let rig = rig(5, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    let rail = rail_of(&peer, 0, 0);
    write.run().expect("moved");
    a.peer_nic(&peer, 0, false);
    assert_eq!(rail.state(), RailState::Down);
    wait_until("its endpoint is closed", || a.connector().endpoints() == 0);
    let (_, waiting) = write.write();
    a.peer_nic(&peer, 0, true);
    waiting.wait().expect("it goes on when the NIC is back");
    a.peer_gone(&peer);
    let error = write.run().expect_err("it is not expected back");
    assert!(matches!(error, TransferError::NoPath { .. }), "{error}");
}

#[test]
fn a_long_transfer_is_shared_with_a_rail_that_is_proved_later() {
    let rig = rig(6, 2);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    *rig.wire.refusal.lock().expect("whole") = Some(("host0@sim1", "later"));
    let slow = LinkOptions {
        bits_per_s: 50_000_000,
        ..LinkOptions::default()
    };
    let slow = rig.fabric.degrade(rig.port(0, 0), slow);
    let peer = peer_of(&a, 1, &b);
    let length = 16 * 1024 * KIB;
    let (source, target) = (registered(&a, length), registered(&b, length));
    let (_, finish) = Move::all(&a, &peer, &source, &target).write();
    let of_nic = |local: u32| -> u64 { (0..2).map(|nic| bytes(&rail_of(&peer, local, nic))).sum() };
    wait_until("it is under way", || of_nic(0) > 0);
    *rig.wire.refusal.lock().expect("whole") = None;
    finish.wait().expect("moved");
    assert!(of_nic(1) > 0, "the rest goes where it ends first");
    drop(slow);
}

#[test]
fn a_peers_own_connection_is_used_and_proved_first() {
    let rig = rig(7, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let (to_b, to_a) = (peer_of(&a, 1, &b), peer_of(&b, 1, &a));
    let (at_a, at_b) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    Move::all(&b, &to_a, &at_b, &at_a).run().expect("moved");
    let asked = rig.asks();
    Move::all(&a, &to_b, &at_a, &at_b).run().expect("moved");
    assert_eq!(rig.asks(), asked, "over the endpoint that there is");
    assert_eq!(a.connector().endpoints(), 1);
}

#[test]
fn peers_that_nobody_uses_any_more_leave_nothing_behind() {
    let rig = rig(8, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let (source, target) = (registered(&a, 4 * KIB), registered(&b, 4 * KIB));
    let begin = Instant::now();
    let mut gone: Vec<Weak<Rail>> = Vec::new();
    let mut id = 0;
    // The places of the first are used for later ones.
    while gone.is_empty() || gone[0].upgrade().is_some() {
        assert!(begin.elapsed() < LIMIT, "the first rail is still there");
        id += 1;
        let peer = peer_of(&a, id, &b);
        let write = Move::all(&a, &peer, &source, &target);
        write.run().expect("moved");
        gone.push(Arc::downgrade(&rail_of(&peer, 0, 0)));
        drop(peer);
        std::thread::sleep(Duration::from_millis(20));
    }
    wait_until("the last endpoint is closed", || {
        a.connector().endpoints() == 0
    });
}

#[test]
fn a_forgotten_peer_that_is_used_again_begins_anew() {
    let rig = rig(9, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 4 * KIB), registered(&b, 4 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    write.run().expect("moved");
    a.forget_peer(&peer);
    wait_until("its endpoint is closed", || a.connector().endpoints() == 0);
    write.run().expect("moved");
    // While another peer shares its endpoint, that stays.
    let again = peer_of(&a, 2, &b);
    Move::all(&a, &again, &source, &target)
        .run()
        .expect("moved");
    let asked = rig.asks();
    a.forget_peer(&peer);
    Move::all(&a, &again, &source, &target)
        .run()
        .expect("moved");
    assert_eq!(rig.asks(), asked);
    assert!(rail_of(&again, 0, 0).is_usable());
}

#[derive(Default)]
struct Log(
    Mutex<Vec<RailChange>>,
    Mutex<Vec<FenceChange>>,
    Mutex<Vec<String>>,
);

impl RdmaEvents for Log {
    fn refresh_peer(&self, segment: &str) {
        self.2.lock().expect("whole").push(segment.to_owned());
    }

    fn rail_state(&self, change: &RailChange) {
        self.0.lock().expect("whole").push(change.clone());
    }

    fn fence(&self, change: &FenceChange) {
        self.1.lock().expect("whole").push(change.clone());
    }
}

#[test]
fn changes_of_rails_are_told_with_names_and_causes() {
    let rig = rig(10, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let log = Arc::new(Log::default());
    a.set_events(log.clone());
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    a.router().local_gate(LocalNic(0), LocalGate::Closed);
    let seen = |to: RailState, cause: RailCause| {
        let log = log.0.lock().expect("whole");
        let seen = |change: &RailChange| {
            (&*change.local, &*change.peer, &*change.segment) == ("sim0", "host1@sim0", "host1")
                && change.to == to
                && change.cause == cause
        };
        log.iter().any(seen)
    };
    wait_until("it is told that the rail came up", || {
        seen(RailState::Up, RailCause::Proved)
    });
    wait_until("it is told that the rail went down", || {
        seen(RailState::Down, RailCause::LocalPort)
    });
}

#[test]
fn m04_a_key_that_is_refused_and_may_be_late_has_the_peers_record_read_again() {
    let rig = rig(14, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let log = Arc::new(Log::default());
    a.set_events(log.clone());
    let asked = || log.2.lock().expect("whole").clone();
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let (first, finish) = Move::all(&a, &peer, &source, &target).write();
    finish.wait().expect("moved");
    let (addr, length, keys) = first.spec().remote.at(0).expect("inside");
    // Told after the connection was made.
    let keys = Keys::of_peer([keys.get(0)].into_iter());
    let remote = Span::new(addr, length, [Piece { addr, length, keys }]);
    let spec = TransferSpec {
        remote: remote.expect("registered"),
        ..first.spec().clone()
    };
    let (own, mut left) = (rig.hosts[0].1[0], 1);
    let _failing = rig.fabric.on_work(move |work| {
        if left > 0 && work.nic == own && work.opcode == RdmaOpcode::Write {
            left -= 1;
            return WorkVerdict::Fail(WcStatus::RemAccessErr, 0);
        }
        WorkVerdict::Pass
    });
    assert_eq!(asked(), [""; 0]);
    let finish = Arc::new(Finish::default());
    a.submit(spec, finish.clone());
    finish.wait().expect("over the next connection");
    wait_until("the record is to be read", || asked() == ["host1"]);
}

#[test]
fn a_fence_is_told_from_its_begin_to_its_end_with_what_goes_over_other_rails() {
    let rig = rig(41, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let log = Arc::new(Log::default());
    a.set_events(log.clone());
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    write.run().expect("moved");
    assert!(
        log.1.lock().expect("whole").is_empty(),
        "nothing was given up"
    );
    // The next WRITE fails, and is all that its endpoint has not done.
    let (nic, mut left) = (rig.hosts[0].1[0], 1);
    let failing = rig.fabric.on_work(move |work| {
        if left > 0 && work.nic == nic && work.opcode == RdmaOpcode::Write {
            left -= 1;
            return WorkVerdict::Fail(WcStatus::RetryExcErr, 0);
        }
        WorkVerdict::Pass
    });
    write.run().expect("moved over the next connection");
    drop(failing);
    let status = WcStatus::RetryExcErr;
    let bytes = 64 * KIB;
    let cause = CloseCause::Failed { status, bytes };
    let steps = [
        FenceStep::Started { cause },
        FenceStep::Rerouted { bytes },
        FenceStep::Ended { complete: true },
    ];
    let told = || {
        let told = log.1.lock().expect("whole").clone();
        let own = |change: &FenceChange| (&*change.local, &*change.peer) == ("sim0", "host1@sim0");
        assert!(told.iter().all(own), "{told:?}");
        told.into_iter()
            .map(|change| change.step)
            .collect::<Vec<_>>()
    };
    wait_until("its end is told", || told().len() == 3);
    assert_eq!(told(), steps);
}

#[test]
fn a_transfer_is_in_a_nics_queue_once_however_often_it_is_offered() {
    let rig = rig(11, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    // Nothing is posted, so that what is offered here is offered by the test alone.
    a.router().local_gate(LocalNic(0), LocalGate::Closed);
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 4 * KIB), registered(&b, 4 * KIB));
    let (transfer, finish) = Move::all(&a, &peer, &source, &target).write();
    let rail = rail_of(&peer, 0, 0);
    let work = Work::queue(&transfer, &rail, 10).expect("the first");
    assert!(Work::queue(&transfer, &rail, 10).is_none());
    assert_eq!(rail.load_bytes(), 10);
    drop(work.dequeue());
    assert_eq!(rail.load_bytes(), 0);
    let work = Work::queue(&transfer, &rail, 10).expect("it had left the queue");
    drop(work.dequeue());
    let endpoints_kept = false;
    a.router()
        .local_gate(LocalNic(0), LocalGate::Open { endpoints_kept });
    finish.wait().expect("moved");
}

#[test]
fn a_peers_nic_that_gets_its_address_late_is_preferred_by_the_nic_in_its_subnet() {
    let rig = rig(40, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (local, gid) = (a.nics()[0].facts().expect("usable").gid.gid, Gid::NULL);
    let known = PeerNic::clone(&rail_of(&peer, 0, 0).peer_nic());
    // It is told of before its port was read.
    let late = |gid| {
        let (index, path) = (1, "host1@late0".to_owned());
        let lid = 0;
        [
            known.clone(),
            PeerNic {
                index,
                path,
                gid,
                lid,
            },
        ]
    };
    a.peer_grown(&peer, &late(gid), &[1]);
    let rail = rail_of(&peer, 0, 1);
    assert!(!rail.is_same_subnet(), "it has no address");
    a.peer_grown(&peer, &late(local), &[]);
    assert!(rail.is_same_subnet());
    assert_eq!(rail.peer_nic().gid, local);
    // A local NIC that comes later finds the address, too.
    let of_table = peer.grow(&["sim0".to_owned(), "sim1".to_owned()], &[]);
    let gids: Vec<_> = of_table.iter().map(|rail| rail.peer_nic().gid).collect();
    assert_eq!(gids, [known.gid, local]);
    // Renumbered into another subnet.
    let elsewhere = Gid::from_ip(std::net::IpAddr::from([10, 9, 9, 9]));
    a.peer_grown(&peer, &late(elsewhere), &[]);
    assert!(!rail.is_same_subnet());
    // On InfiniBand it may be the LID alone that moves.
    let mut moved = late(elsewhere);
    moved[1].lid = 7;
    a.peer_grown(&peer, &moved, &[]);
    assert_eq!(rail.peer_nic().lid, 7);
}
