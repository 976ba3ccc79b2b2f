//! Packets outlive the queue pair that sent them (soft-RoCE, measured: half a second and more).

use std::time::Duration;

use super::support::{Connected, MS, connect, init, options, rtr, rts};
use crate::sim::{FabricOptions, FaultGuard, LinkOptions};
use crate::{QpState, WcStatus};

/// A wire from A on which packets spend `latency`, and a port in which they spend `egress_delay`.
fn slow(two: &Connected, latency: Duration, egress_delay: Duration) -> FaultGuard {
    let link = LinkOptions {
        latency,
        egress_delay,
        ..LinkOptions::default()
    };
    two.fabric.degrade(two.a.port(), link)
}

/// A posts 64 ones and moves its pair to ERR; the flush is drained; B reuses its memory for twos.
fn abandon(two: &Connected) {
    two.a.fill(1);
    two.post(&[two.write(1, 64)]);
    two.pair_a.to_error().expect("to ERR");
    assert_eq!(two.a.statuses(1), [WcStatus::WrFlushErr], "drained");
    two.b.fill(2);
}

#[test]
fn a_write_from_a_dead_queue_pair_lands() {
    let two = Connected::new(options());
    let _slow = slow(&two, 600 * MS, Duration::ZERO);
    let begin = two.fabric.now();
    abandon(&two);
    assert!(two.fabric.now() - begin < MS, "the flush waits for nothing");
    two.fabric.advance_to(begin + 599 * MS);
    assert_eq!(two.b.bytes(0, 64), [2; 64]);
    two.fabric.advance_to(begin + 602 * MS);
    assert_eq!(two.b.bytes(0, 64), [1; 64], "the ghost has landed");
}

#[test]
fn a_write_from_a_destroyed_queue_pair_lands() {
    let two = Connected::new(options());
    let _slow = slow(&two, 600 * MS, Duration::ZERO);
    abandon(&two);
    let Connected {
        fabric, b, pair_a, ..
    } = two;
    drop(pair_a);
    fabric.advance(602 * MS);
    assert_eq!(b.bytes(0, 64), [1; 64]);
}

#[test]
fn with_the_responder_in_error_it_does_not() {
    let two = Connected::new(options());
    let _slow = slow(&two, 600 * MS, Duration::ZERO);
    abandon(&two);
    two.pair_b.to_error().expect("to ERR");
    two.fabric.advance(Duration::from_secs(3));
    assert_eq!(two.b.bytes(0, 64), [2; 64]);
}

#[test]
fn with_the_responder_destroyed_it_does_not() {
    let two = Connected::new(options());
    let _slow = slow(&two, 600 * MS, Duration::ZERO);
    abandon(&two);
    let Connected {
        fabric, b, pair_b, ..
    } = two;
    drop(pair_b);
    fabric.advance(Duration::from_secs(3));
    assert_eq!(b.bytes(0, 64), [2; 64]);
}

#[test]
fn a_write_of_a_killed_process_lands() {
    let two = Connected::new(options());
    let _slow = slow(&two, 600 * MS, Duration::ZERO);
    two.a.fill(1);
    two.post(&[two.write(1, 64)]);
    two.fabric.kill_process(two.a.process);
    assert!(two.a.context.port_attr(1).is_err(), "its objects are gone");
    two.b.fill(2);
    two.fabric.advance(602 * MS);
    assert_eq!(two.b.bytes(0, 64), [1; 64]);
}

#[test]
fn taking_the_port_down_purges_only_what_has_not_left() {
    for (latency, egress_delay, lands) in [
        (600 * MS, Duration::ZERO, true),
        (Duration::ZERO, 600 * MS, false),
    ] {
        let two = Connected::new(options());
        let _slow = slow(&two, latency, egress_delay);
        two.a.fill(1);
        two.post(&[two.write(1, 64)]);
        two.fabric.advance(MS);
        two.fabric.port_down(two.a.port());
        two.b.fill(2);
        two.fabric.advance(650 * MS);
        let expected = if lands { 1 } else { 2 };
        assert_eq!(two.b.bytes(0, 64), [expected; 64], "latency {latency:?}");
        assert_eq!(two.fabric.stats().packets, 0);
    }
}

#[test]
fn a_packets_life_ends() {
    let two = Connected::new(options());
    let lifetime = options().packet_lifetime;
    let _slow = slow(&two, lifetime + MS, Duration::ZERO);
    abandon(&two);
    two.fabric.advance(2 * lifetime);
    assert_eq!(two.b.bytes(0, 64), [2; 64]);
    assert_eq!(two.fabric.stats().packets, 0);
}

/// Numbers are used again and packets do not say which pair they come from: only a packet number
/// of one's own tells a ghost from the new connection's first packet.
#[test]
fn a_ghost_enters_a_connection_with_the_same_numbers() {
    for (psn, lands) in [(100, true), (4_711, false)] {
        let two = Connected::new(FabricOptions {
            packet_lifetime: Duration::from_secs(5),
            ..options()
        });
        let slow = slow(&two, 3_000 * MS, Duration::ZERO);
        abandon(&two);
        slow.undo();
        let Connected {
            fabric,
            a,
            b,
            pair_a,
            pair_b,
        } = two;
        let numbers = (pair_a.qp_num(), pair_b.qp_num());
        drop((pair_a, pair_b));
        let (new_a, new_b) = (a.pair(), b.pair());
        assert_eq!((new_a.qp_num(), new_b.qp_num()), numbers);
        connect(&a, &new_a, &b, new_b.qp_num(), 6).expect("connected");
        new_b.to_init(&init()).expect("INIT");
        let mut attr = rtr(&b, &a, new_a.qp_num());
        attr.rq_psn = psn;
        new_b.to_rtr(&attr).expect("RTR");
        new_b.to_rts(&rts(6)).expect("RTS");
        fabric.advance(3_000 * MS);
        let expected = if lands { 1 } else { 2 };
        assert_eq!(b.bytes(0, 64), [expected; 64], "psn {psn}");
        assert_eq!(new_b.query().expect("a query").state, QpState::ReadyToSend);
    }
}

#[test]
fn a_late_read_answer_does_not_touch_memory_that_was_given_up() {
    let two = Connected::new(options());
    let link = LinkOptions {
        latency: 600 * MS,
        ..LinkOptions::default()
    };
    let _slow = two.fabric.degrade(two.b.port(), link);
    two.b.fill(1);
    two.post(&[two.read(1, 64)]);
    two.fabric.advance(MS);
    two.pair_a.to_error().expect("to ERR");
    assert_eq!(two.a.statuses(1), [WcStatus::WrFlushErr]);
    two.a.fill(2);
    two.fabric.advance(Duration::from_secs(3));
    assert_eq!(
        two.a.bytes(0, 64),
        [2; 64],
        "the local fence holds for reads"
    );
}
