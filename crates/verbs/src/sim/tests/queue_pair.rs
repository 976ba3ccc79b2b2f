//! States, rules and ends of queue pairs, with the figures that were measured on soft-RoCE.

use std::time::Duration;

use super::support::{Connected, Host, MS, address, connect, init, options, rtr, rts};
use crate::sim::{Fabric, FabricOptions};
use crate::{
    AsyncEventKind, Completion, Gid, Mtu, QpInit, QpState, RtrAttr, VerbsError, WcStatus,
    WorkRequest,
};

fn errno<T: std::fmt::Debug>(result: Result<T, VerbsError>) -> i32 {
    result.expect_err("refused").errno().expect("an errno")
}

/// How long `run` takes on the fabric's clock.
fn timed<T>(fabric: &Fabric, run: impl FnOnce() -> T) -> (Duration, T) {
    let begin = fabric.now();
    let result = run();
    (fabric.now() - begin, result)
}

#[test]
fn states_follow_one_another_and_no_other_way() {
    let fabric = Fabric::new(options());
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let (pair, peer) = (a.pair(), b.pair());
    let state = || pair.query().expect("a query").state;
    let attr = rtr(&a, &b, peer.qp_num());
    assert_eq!(state(), QpState::Reset);
    assert_eq!(errno(pair.to_rtr(&attr)), libc::EINVAL);
    assert_eq!(errno(pair.to_rts(&rts(6))), libc::EINVAL);
    pair.to_init(&init()).expect("INIT");
    pair.to_init(&init()).expect("INIT again");
    assert_eq!(errno(pair.to_rts(&rts(6))), libc::EINVAL);
    pair.to_rtr(&attr).expect("RTR");
    assert_eq!(errno(pair.to_rtr(&attr)), libc::EINVAL);
    assert_eq!(errno(pair.to_init(&init())), libc::EINVAL);
    pair.to_rts(&rts(6)).expect("RTS");
    assert_eq!(errno(pair.to_rts(&rts(6))), libc::EINVAL);
    assert_eq!(state(), QpState::ReadyToSend);
    // ERR from anywhere, RESET from anywhere, and then the whole way again.
    pair.to_error().expect("ERR");
    assert_eq!(errno(pair.to_init(&init())), libc::EINVAL);
    pair.to_reset().expect("RESET");
    for steps in 0..4 {
        if steps > 0 {
            pair.to_init(&init()).expect("INIT");
        }
        if steps > 1 {
            pair.to_rtr(&attr).expect("RTR");
        }
        if steps > 2 {
            pair.to_rts(&rts(6)).expect("RTS");
        }
        pair.to_error().expect("ERR");
        assert_eq!(state(), QpState::Error);
        pair.to_reset().expect("RESET");
        assert_eq!(state(), QpState::Reset);
    }
}

#[test]
fn attributes_out_of_range_are_refused() {
    let fabric = Fabric::new(options());
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let (pair, peer) = (a.pair(), b.pair());
    for wrong in [0, 2] {
        let attr = crate::InitAttr {
            port: wrong,
            ..init()
        };
        assert_eq!(errno(pair.to_init(&attr)), libc::EINVAL);
    }
    let attr = crate::InitAttr {
        pkey_index: 1,
        ..init()
    };
    assert_eq!(errno(pair.to_init(&attr)), libc::EINVAL);
    pair.to_init(&init()).expect("INIT");
    let good = rtr(&a, &b, peer.qp_num());
    type Spoil = fn(&mut RtrAttr);
    let wrong: [(Spoil, i32); 6] = [
        (|attr| attr.dest_qp_num = 1 << 24, libc::EINVAL),
        (|attr| attr.rq_psn = 1 << 24, libc::EINVAL),
        (|attr| attr.path.sgid_index = 5, libc::ENODATA),
        (|attr| attr.path.sgid_index = 1_024, libc::EINVAL),
        (|attr| attr.path.sgid_index = 0, libc::EINVAL),
        (|attr| attr.path.dgid = Gid::NULL, libc::EINVAL),
    ];
    for (number, (spoil, expected)) in wrong.into_iter().enumerate() {
        let mut attr = good;
        spoil(&mut attr);
        let (took, result) = timed(&fabric, || pair.to_rtr(&attr));
        assert_eq!(errno(result), expected, "case {number}");
        assert_eq!(took, Duration::ZERO, "case {number}: nobody is asked");
    }
    pair.to_rtr(&good).expect("RTR");
    let mut attr = rts(8);
    assert_eq!(errno(pair.to_rts(&attr)), libc::EINVAL);
    attr = rts(6);
    attr.timeout = 32;
    assert_eq!(errno(pair.to_rts(&attr)), libc::EINVAL);
}

#[test]
fn the_first_rtr_towards_a_neighbour_takes_a_second_and_later_ones_milliseconds() {
    let fabric = Fabric::new(options());
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let peer = b.pair();
    let connected = || {
        let pair = a.pair();
        pair.to_init(&init()).expect("INIT");
        let attr = rtr(&a, &b, peer.qp_num());
        timed(&fabric, || pair.to_rtr(&attr).expect("RTR")).0
    };
    assert_eq!(connected(), 1_000 * MS);
    let later = connected();
    assert!((MS..=8 * MS).contains(&later), "{later:?}");
    // After a change of the own adapter, or of the peer's, it has to be asked again.
    fabric.port_down(a.port());
    fabric.port_up(a.port());
    assert_eq!(connected(), 1_000 * MS);
    fabric.delete_address(b.port(), address(2));
    fabric.add_address(b.port(), address(2));
    assert_eq!(connected(), 1_000 * MS);
    assert!(connected() <= 8 * MS);
}

#[test]
fn a_neighbour_that_does_not_answer_times_out_after_a_second() {
    let fabric = Fabric::new(options());
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let peer = b.pair();
    let attr = rtr(&a, &b, peer.qp_num());
    let pair = a.pair();
    pair.to_init(&init()).expect("INIT");
    let refused = |attr: &RtrAttr, why: &str| {
        let (took, result) = timed(&fabric, || pair.to_rtr(attr));
        assert_eq!(errno(result), libc::ETIMEDOUT, "{why}");
        assert_eq!(took, 1_000 * MS, "{why}");
    };
    let mut nobody = attr;
    nobody.path.dgid = Gid::from_ip(address(250));
    refused(&nobody, "no such host");
    fabric.port_down(b.port());
    refused(&attr, "the peer's port is down");
    fabric.port_up(b.port());
    let cut = fabric.partition(&[a.port()], &[b.port()]);
    refused(&attr, "there is no way");
    drop(cut);
    fabric.port_down(a.port());
    refused(&attr, "the own port is down");
    fabric.port_up(a.port());
    // The pair is as it was, and can still be connected.
    pair.to_rtr(&attr).expect("RTR");
}

#[test]
fn a_neighbour_that_is_known_is_not_asked_though_it_is_gone() {
    let two = Connected::new(options());
    let cut = two.fabric.partition(&[two.a.port()], &[two.b.port()]);
    let pair = two.a.pair();
    connect(&two.a, &pair, &two.b, two.pair_b.qp_num(), 6).expect("connected to nobody");
    drop(cut);
}

#[test]
fn retries_end_after_the_timeout_times_their_number() {
    let two = Connected::with_retries(options(), 6);
    two.pair_b.to_error().expect("ERR");
    two.post(&[two.write(1, 8), two.write(2, 8)]);
    let begin = two.fabric.now();
    let done = two.a.completions(2);
    // 7 × 67.1 ms; measured on soft-RoCE: 0.47 s.
    assert_eq!((done[0].0 - begin).as_millis(), 469);
    assert_eq!(done[0].1.status, WcStatus::RetryExcErr);
    assert_eq!(done[1].1.status, WcStatus::WrFlushErr);
    assert!(done[1].0 - done[0].0 < MS);
    let state = two.pair_a.query().expect("a query").state;
    assert_eq!(state, QpState::Error);
}

#[test]
fn seven_retries_never_end_on_soft_roce_and_do_on_cards() {
    let two = Connected::with_retries(options(), 7);
    two.pair_b.to_error().expect("ERR");
    two.post(&[two.write(1, 8)]);
    two.fabric.advance(Duration::from_secs(3_600));
    assert_eq!(two.a.poll(), [], "no completion, ever");
    assert!(two.fabric.stats().due <= 2, "and no heap of timers");

    let two = Connected::with_retries(FabricOptions::card(7), 7);
    two.pair_b.to_error().expect("ERR");
    two.post(&[two.write(1, 8)]);
    assert_eq!(two.a.statuses(1), [WcStatus::RetryExcErr]);
}

#[test]
fn without_a_timeout_nothing_is_repeated() {
    let fabric = Fabric::new(options());
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let (pair, peer) = (a.pair(), b.pair());
    pair.to_init(&init()).expect("INIT");
    pair.to_rtr(&rtr(&a, &b, peer.qp_num())).expect("RTR");
    let mut attr = rts(6);
    attr.timeout = 0;
    pair.to_rts(&attr).expect("RTS");
    let write = WorkRequest::write(1, a.local(0, 8), b.remote(0));
    pair.post(&[write]).expect("posted");
    fabric.advance(Duration::from_secs(60));
    assert_eq!(a.poll(), []);
    assert!(!fabric.step(), "nothing is due");
}

#[test]
fn work_through_an_own_port_that_is_down_fails_at_once() {
    type Break = fn(&Connected);
    let down: Break = |two| two.fabric.port_down(two.a.port());
    let gone: Break = |two| assert!(two.fabric.delete_address(two.a.port(), address(1)));
    for cut in [down, gone] {
        for retry_cnt in [6, 7] {
            let two = Connected::with_retries(options(), retry_cnt);
            cut(&two);
            let begin = two.fabric.now();
            two.post(&[two.write(1, 8), two.write(2, 8)]);
            let done = two.a.completions(2);
            assert_eq!(done[0].1.status, WcStatus::LocQpOpErr);
            assert_eq!(done[0].0, begin, "at once");
            assert_eq!(done[1].1.status, WcStatus::WrFlushErr);
        }
        let two = Connected::new(FabricOptions::card(7));
        cut(&two);
        two.post(&[two.write(1, 8)]);
        assert_eq!(
            two.a.statuses(1),
            [WcStatus::RetryExcErr],
            "cards keep trying"
        );
    }
}

#[test]
fn a_queue_takes_what_it_holds_and_says_how_much_that_was() {
    let fabric = Fabric::new(options());
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let (pair, peer) = (a.pair_sized(8), b.pair());
    let batch: Vec<_> = (0..12)
        .map(|wr_id| WorkRequest::write(wr_id, a.local(0, 8), b.remote(0)))
        .collect();
    let refused = pair.post(&batch).expect_err("RESET");
    assert_eq!((refused.posted, refused.errno()), (0, Some(libc::EINVAL)));
    connect(&a, &pair, &b, peer.qp_num(), 6).expect("connected");
    connect(&b, &peer, &a, pair.qp_num(), 6).expect("connected");
    let refused = pair.post(&batch).expect_err("too many");
    assert_eq!((refused.posted, refused.errno()), (8, Some(libc::ENOMEM)));
    assert_eq!(a.statuses(8), [WcStatus::Success; 8]);
    pair.post(&batch[8..]).expect("there is room again");
    assert_eq!(a.statuses(4), [WcStatus::Success; 4]);
}

#[test]
fn on_cards_only_a_polled_completion_frees_its_place_and_those_before_it() {
    let fabric = Fabric::new(FabricOptions::card(7));
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let (pair, peer) = (a.pair_sized(4), b.pair());
    connect(&a, &pair, &b, peer.qp_num(), 6).expect("connected");
    connect(&b, &peer, &a, pair.qp_num(), 6).expect("connected");
    let mut silent = WorkRequest::write(0, a.local(0, 8), b.remote(0));
    silent.signaled = false;
    let loud = WorkRequest::write(1, a.local(0, 8), b.remote(0));
    pair.post(&[silent, silent, loud, silent]).expect("posted");
    fabric.advance(100 * MS);
    assert_eq!(fabric.stats().work_requests, 0, "all is done");
    assert_eq!(pair.post(&[loud]).expect_err("full").posted, 0);
    assert_eq!(a.poll().len(), 1);
    let refused = pair.post(&[loud; 4]).expect_err("one is still silent");
    assert_eq!(refused.posted, 3);
}

#[test]
fn error_flushes_everything_unsignalled_work_too_and_what_is_posted_later() {
    let two = Connected::new(options());
    let mut batch: Vec<_> = (0..10).map(|wr_id| two.write(wr_id, 8)).collect();
    for request in &mut batch {
        request.signaled = false;
    }
    let _cut = two.fabric.partition(&[two.a.port()], &[two.b.port()]);
    two.post(&batch);
    let (took, ()) = timed(&two.fabric, || {
        two.pair_a.to_error().expect("ERR");
        let done = two.a.completions(10);
        let ids: Vec<_> = done.iter().map(|(_, done)| done.wr_id).collect();
        assert_eq!(ids, (0..10).collect::<Vec<_>>());
        assert!(
            done.iter()
                .all(|(_, done)| done.status == WcStatus::WrFlushErr)
        );
    });
    assert!(took < MS, "{took:?}");
    two.post(&[two.write(77, 8)]);
    let done = two.a.completions(1);
    assert_eq!(
        (done[0].1.wr_id, done[0].1.status),
        (77, WcStatus::WrFlushErr)
    );
}

#[test]
fn reset_and_destruction_swallow_outstanding_work() {
    let two = Connected::new(options());
    let _cut = two.fabric.partition(&[two.a.port()], &[two.b.port()]);
    two.post(&[two.write(1, 8)]);
    two.pair_a.to_reset().expect("RESET");
    two.fabric.advance(Duration::from_secs(10));
    assert_eq!(two.a.poll(), []);
    connect(&two.a, &two.pair_a, &two.b, two.pair_b.qp_num(), 6).expect("connected");
    two.post(&[two.write(2, 8)]);
    let Connected {
        fabric, a, pair_a, ..
    } = two;
    drop(pair_a);
    fabric.advance(Duration::from_secs(10));
    assert_eq!(a.poll(), []);
}

#[test]
fn completions_of_a_destroyed_pair_stay_on_soft_roce_and_go_on_cards() {
    for (options, left) in [(options(), 1), (FabricOptions::card(7), 0)] {
        let two = Connected::new(options);
        two.post(&[two.write(1, 8)]);
        two.fabric.advance(100 * MS);
        let Connected { a, pair_a, .. } = two;
        drop(pair_a);
        assert_eq!(a.poll().len(), left);
    }
}

#[test]
fn destroying_takes_seconds_while_retransmitting_unless_in_error() {
    for (error_first, expected) in [(false, 2_200), (true, 0)] {
        let two = Connected::with_retries(options(), 7);
        two.pair_b.to_error().expect("ERR");
        two.post(&[two.write(1, 8)]);
        two.fabric.advance(500 * MS);
        if error_first {
            two.pair_a.to_error().expect("ERR");
        }
        let Connected { fabric, pair_a, .. } = two;
        let (took, ()) = timed(&fabric, || drop(pair_a));
        assert_eq!(took.as_millis(), expected, "error first: {error_first}");
    }
}

#[test]
fn numbers_of_queue_pairs_are_dense_and_come_again() {
    let fabric = Fabric::new(options());
    let host = Host::new(&fabric, 1);
    let mut pairs: Vec<_> = (0..4).map(|_| host.pair()).collect();
    let numbers: Vec<_> = pairs.iter().map(|pair| pair.qp_num()).collect();
    assert_eq!(numbers, [17, 18, 19, 20]);
    let id = pairs[1].id();
    drop(pairs.remove(1));
    let again = host.pair();
    assert_eq!(again.qp_num(), 18);
    assert_ne!(again.id(), id, "the identity is new");

    let fabric = Fabric::new(FabricOptions {
        recycle_qp_nums: false,
        ..options()
    });
    let host = Host::new(&fabric, 1);
    let first = host.pair().qp_num();
    assert_ne!(host.pair().qp_num(), first);
}

#[test]
fn keys_come_again_only_if_the_options_say_so() {
    for recycle_keys in [true, false] {
        let fabric = Fabric::new(FabricOptions {
            recycle_keys,
            ..options()
        });
        let host = Host::new(&fabric, 1);
        let key = || {
            let access = crate::AccessFlags::LOCAL_WRITE;
            let region = host.pd.register(&host.memory, 0, 64, access);
            region.expect("a region").rkey()
        };
        assert_eq!(key() == key(), recycle_keys);
    }
}

#[test]
fn a_completion_queue_that_is_overrun_says_so_once_and_then_fails() {
    let fabric = Fabric::new(options());
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let peer = b.pair();
    let small = a.context.create_cq(4).expect("a queue");
    let pair =
        a.pd.create_qp(QpInit {
            send_cq: &small,
            recv_cq: &small,
            capacity: peer.capacity(),
        })
        .expect("a pair");
    connect(&a, &pair, &b, peer.qp_num(), 6).expect("connected");
    connect(&b, &peer, &a, pair.qp_num(), 6).expect("connected");
    let batch: Vec<_> = (0..6)
        .map(|wr_id| WorkRequest::write(wr_id, a.local(0, 8), b.remote(0)))
        .collect();
    pair.post(&batch).expect("posted");
    fabric.advance(100 * MS);
    assert_eq!(a.events(), [AsyncEventKind::CqErr]);
    let mut found = [Completion::EMPTY; 8];
    assert_eq!(small.poll(&mut found).expect("what came before"), 4);
    assert_eq!(errno(small.poll(&mut found)), libc::EIO);
}

#[test]
fn limits_of_the_adapter_are_kept() {
    let fabric = Fabric::new(options());
    let node = fabric.add_node("small");
    let mut nic = crate::sim::NicOptions::ethernet("nic", address(1));
    nic.limits.max_qp = 2;
    nic.limits.max_mr = 2;
    nic.limits.max_pd = 1;
    nic.limits.max_cq = 1;
    nic.limits.max_mr_bytes = 1 << 20;
    let nic = fabric.add_nic(node, &nic);
    let host = Host::on(&fabric, fabric.add_process(node), nic);
    assert_eq!(errno(host.context.alloc_pd()), libc::ENOMEM);
    assert_eq!(errno(host.context.create_cq(8)), libc::ENOMEM);
    let access = crate::AccessFlags::LOCAL_WRITE;
    let second = host.pd.register(&host.memory, 0, 64, access).expect("room");
    let third = host.pd.register(&host.memory, 0, 64, access);
    assert_eq!(errno(third), libc::ENOMEM);
    drop(second);
    let (one, _two) = (host.pair(), host.pair());
    let init = QpInit {
        send_cq: &host.queue,
        recv_cq: &host.queue,
        capacity: one.capacity(),
    };
    assert_eq!(errno(host.pd.create_qp(init)), libc::ENOMEM);
    let long = crate::HostMemory::allocate(2 << 20).expect("memory");
    let long = host.pd.register(&long, 0, 2 << 20, access);
    assert_eq!(errno(long), libc::EINVAL);
}

#[test]
fn a_path_mtu_is_what_both_ends_carry() {
    let fabric = Fabric::new(options());
    let host = Host::new(&fabric, 1);
    for (bytes, mtu) in [
        (9_000, Some(Mtu::Mtu4096)),
        (4_200, Some(Mtu::Mtu4096)),
        (1_500, Some(Mtu::Mtu1024)),
        (300, None),
    ] {
        fabric.set_netdev_mtu(host.port(), bytes);
        let attr = host.context.port_attr(1).expect("the port");
        assert_eq!(attr.active_mtu, mtu, "{bytes}");
        assert_eq!(attr.max_mtu, Some(Mtu::Mtu4096));
    }
}

#[test]
fn the_row_that_a_pair_sends_with_is_that_of_its_connection() {
    let fabric = Fabric::new(options());
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let (pair, far) = (a.pair(), b.pair());
    let number = pair.qp_num();
    assert_eq!(fabric.own_row(a.nic, number), None, "not connected");
    fabric.advance(Duration::from_millis(3));
    connect(&a, &pair, &b, far.qp_num(), 6).expect("connected");
    let row = fabric.own_row(a.nic, number).expect("connected");
    let address = row.gid.to_ipv4().expect("that of the host");
    assert_eq!(row.index, a.gid_index());
    assert!(row.since >= Duration::from_millis(3));
    assert!(fabric.delete_address(a.port(), address.into()));
    let later = fabric.own_row(a.nic, number);
    assert_eq!(later, Some(row), "whatever becomes of the table");
    pair.to_reset().expect("RESET");
    assert_eq!(fabric.own_row(a.nic, number), None);
}
