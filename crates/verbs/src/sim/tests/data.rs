//! Bytes, keys, order and loss: what becomes of posted work while nothing is taken away.

use std::time::Duration;

use super::support::{Connected, Host, MS, connect, init, options, rtr, rts};
use crate::sim::{
    Fabric, FabricOptions, LinkOptions, NicOptions, PacketKind, PacketVerdict, PostVerdict,
    WorkVerdict,
};
use crate::{
    AccessFlags, AsyncEventKind, InitAttr, Mtu, QpInit, RdmaOpcode, RemoteAddress, WcStatus,
    WorkRequest,
};

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length)
        .map(|index| ((index * 31 + (index >> 8) * 7 + seed) % 251) as u8)
        .collect()
}

#[test]
fn bytes_are_in_place_before_the_completion() {
    let two = Connected::new(options());
    two.a.fill(1);
    two.post(&[two.write(5, 300_000)]);
    while two.fabric.step() {
        let done = two.a.poll();
        if let Some(done) = done.first() {
            assert_eq!((done.wr_id, done.status), (5, WcStatus::Success));
            assert_eq!(two.b.bytes(0, 300_000), vec![1; 300_000]);
            return;
        }
    }
    panic!("the write did not complete");
}

#[test]
fn a_large_transfer_keeps_few_packets_on_the_way() {
    let two = Connected::new(options());
    let window = options().window_bursts as usize;
    two.post(&[two.write(1, 1 << 20), two.read(2, 1 << 20)]);
    let mut most = 0;
    while two.fabric.step() {
        most = most.max(two.fabric.stats().packets);
    }
    assert_eq!(two.a.statuses(2), [WcStatus::Success; 2]);
    // Each burst on the way is a request or its answer.
    assert!((2..=window).contains(&most), "{most}");
}

#[test]
fn a_link_takes_its_time() {
    let two = Connected::new(options());
    let link = LinkOptions {
        bits_per_s: 1_000_000_000,
        latency: 5 * MS,
        ..LinkOptions::default()
    };
    let _slow = two.fabric.degrade(two.a.port(), link);
    let begin = two.fabric.now();
    two.post(&[two.write(1, 1 << 20)]);
    let took = two.a.completions(1)[0].0 - begin;
    // 8.4 ms for the bits and 5 ms to arrive; what the window makes it wait comes on top.
    assert!(took > 13 * MS && took < 25 * MS, "{took:?}");
}

#[test]
fn unsignalled_work_makes_no_completion() {
    let two = Connected::new(options());
    let mut silent = two.write(1, 8);
    silent.signaled = false;
    two.post(&[silent, two.write(2, 8)]);
    let done = two.a.completions(1);
    assert_eq!(done.len(), 1);
    assert_eq!(done[0].1.wr_id, 2);
    assert_eq!(two.fabric.stats().work_requests, 0);
}

#[test]
fn lost_doubled_and_overtaken_packets_change_nothing() {
    for packets_per_burst in [1, 16] {
        let two = Connected::new(FabricOptions {
            packets_per_burst,
            ..options()
        });
        let link = LinkOptions {
            loss: 0.05,
            jitter_max: Duration::from_micros(50),
            ..LinkOptions::default()
        };
        let _lossy = [&two.a, &two.b].map(|host| two.fabric.degrade(host.port(), link.clone()));
        let mut count = 0_u32;
        let _rule = two.fabric.on_packet(move |_| {
            count += 1;
            match count % 7 {
                0 => PacketVerdict::Duplicate,
                3 => PacketVerdict::Delay(Duration::from_micros(200)),
                _ => PacketVerdict::Pass,
            }
        });
        for round in 0..20_usize {
            let bytes = pattern(100_000, round);
            two.a.memory.copy_in(0, &bytes).expect("inside");
            let back = WorkRequest::read(2, two.a.local(500_000, 100_000), two.b.remote(0));
            two.post(&[two.write(1, 100_000), back]);
            assert_eq!(two.a.statuses(2), [WcStatus::Success; 2], "round {round}");
            assert_eq!(two.b.bytes(0, 100_000), bytes, "round {round}");
            assert_eq!(two.a.bytes(500_000, 100_000), bytes, "round {round}");
        }
    }
}

#[test]
fn a_write_that_arrives_twice_is_carried_out_once() {
    let two = Connected::new(options());
    two.a.fill(1);
    // The acknowledgement of the first is lost, so that the write is sent again.
    let mut lost = false;
    let _rule = two.fabric.on_packet(move |packet| {
        if packet.kind == PacketKind::Ack && !lost {
            lost = true;
            return PacketVerdict::Drop;
        }
        PacketVerdict::Pass
    });
    two.post(&[two.write(1, 64)]);
    two.fabric.advance(MS);
    assert_eq!(two.b.bytes(0, 64), [1; 64]);
    two.b.fill(2);
    assert_eq!(two.a.statuses(1), [WcStatus::Success]);
    assert_eq!(
        two.b.bytes(0, 64),
        [2; 64],
        "the repetition is only acknowledged"
    );
}

#[test]
fn a_lost_answer_to_a_read_is_asked_for_again() {
    let two = Connected::new(options());
    two.b.fill(3);
    let mut responses = 0;
    let _rule = two.fabric.on_packet(move |packet| {
        if packet.kind == PacketKind::ReadResponse {
            responses += 1;
            if responses == 2 {
                return PacketVerdict::Drop;
            }
        }
        PacketVerdict::Pass
    });
    let begin = two.fabric.now();
    two.post(&[two.read(1, 300_000), two.write(2, 8)]);
    let done = two.a.completions(2);
    assert_eq!(two.a.bytes(0, 300_000), vec![3; 300_000]);
    assert!(
        done.iter()
            .all(|(_, done)| done.status == WcStatus::Success)
    );
    assert!(
        done[1].0 - begin < 10 * MS,
        "the gap shows, no time-out is needed"
    );
}

#[test]
fn a_fence_waits_for_reads_and_reads_for_their_limit() {
    let two = Connected::new(options());
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let log = seen.clone();
    let _rule = two.fabric.on_work(move |work| {
        log.lock().expect("whole").push((work.now, work.wr_id));
        WorkVerdict::Pass
    });
    let mut fenced = two.write(9, 8);
    fenced.fence = true;
    let mut batch: Vec<_> = (0..5).map(|wr_id| two.read(wr_id, 8)).collect();
    batch.push(fenced);
    two.post(&batch);
    assert_eq!(two.a.statuses(6), [WcStatus::Success; 6]);
    let seen = seen.lock().expect("whole").clone();
    let begin = seen[0].0;
    // Four at once by `max_rd_atomic`, the fifth after the first, the write after all.
    assert!(seen[..4].iter().all(|(at, _)| *at == begin));
    assert!(seen[4].0 > begin);
    assert!(seen[5].0 > seen[4].0);
    assert_eq!(seen[5].1, 9);
}

#[test]
fn reads_past_the_peers_depth_are_invalid() {
    let fabric = Fabric::new(options());
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let (pair_a, pair_b) = (a.pair(), b.pair());
    connect(&a, &pair_a, &b, pair_b.qp_num(), 6).expect("connected");
    pair_b.to_init(&init()).expect("INIT");
    let mut shallow = rtr(&b, &a, pair_a.qp_num());
    shallow.max_dest_rd_atomic = 2;
    pair_b.to_rtr(&shallow).expect("RTR");
    let batch: Vec<_> = (0..3)
        .map(|wr_id| WorkRequest::read(wr_id, a.local(0, 8), b.remote(0)))
        .collect();
    pair_a.post(&batch[..2]).expect("posted");
    assert_eq!(a.statuses(2), [WcStatus::Success; 2]);
    pair_a.post(&batch).expect("posted");
    let statuses = a.statuses(3);
    assert!(statuses.contains(&WcStatus::RemInvReqErr), "{statuses:?}");
}

#[test]
fn access_needs_region_and_queue_pair_to_allow_it() {
    let local_only = AccessFlags::LOCAL_WRITE;
    for (in_region, status) in [
        (true, WcStatus::RemAccessErr),
        (false, WcStatus::RemInvReqErr),
    ] {
        for opcode in [RdmaOpcode::Write, RdmaOpcode::Read] {
            let fabric = Fabric::new(options());
            let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
            let (pair_a, pair_b) = (a.pair(), b.pair());
            connect(&a, &pair_a, &b, pair_b.qp_num(), 6).expect("connected");
            let access = if in_region { init().access } else { local_only };
            let attr = InitAttr { access, ..init() };
            pair_b.to_init(&attr).expect("INIT");
            pair_b.to_rtr(&rtr(&b, &a, pair_a.qp_num())).expect("RTR");
            let closed =
                b.pd.register(&b.memory, 0, 4_096, local_only)
                    .expect("region");
            let place = RemoteAddress {
                addr: closed.addr(),
                rkey: if in_region {
                    closed.rkey()
                } else {
                    b.region.rkey()
                },
            };
            let work = WorkRequest::new(opcode, 1, &[a.local(0, 8)], place);
            pair_a.post(&[work]).expect("posted");
            assert_eq!(a.statuses(1), [status], "{opcode:?}");
        }
    }
}

#[test]
fn a_region_of_another_domain_is_out_of_reach() {
    let two = Connected::new(options());
    let other = two.b.context.alloc_pd().expect("a domain");
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    let region = other
        .register(&two.b.memory, 0, 4_096, access)
        .expect("a region");
    let place = RemoteAddress {
        addr: region.addr(),
        rkey: region.rkey(),
    };
    two.post(&[WorkRequest::write(1, two.a.local(0, 8), place)]);
    assert_eq!(two.a.statuses(1), [WcStatus::RemAccessErr]);
}

#[test]
fn deregistering_in_the_middle_ends_a_transfer_at_either_end() {
    for remote in [true, false] {
        let Connected {
            fabric,
            mut a,
            mut b,
            pair_a,
            pair_b,
        } = Connected::new(FabricOptions {
            window_bursts: 2,
            ..options()
        });
        let write = WorkRequest::write(1, a.local(0, 1 << 20), b.remote(0));
        pair_a.post(&[write]).expect("posted");
        for _ in 0..8 {
            fabric.step();
        }
        let host = if remote { &mut b } else { &mut a };
        let access = AccessFlags::LOCAL_WRITE;
        let other = host
            .pd
            .register(&host.memory, 0, 1, access)
            .expect("a region");
        drop(std::mem::replace(&mut host.region, other));
        let expected = if remote {
            WcStatus::RemAccessErr
        } else {
            WcStatus::LocProtErr
        };
        assert_eq!(a.statuses(1), [expected]);
        drop((pair_a, pair_b));
    }
}

#[test]
fn ends_that_disagree_about_the_mtu_get_length_errors() {
    for (length, write, read) in [
        (1_000, WcStatus::Success, WcStatus::Success),
        (4_000, WcStatus::RemInvReqErr, WcStatus::LocLenErr),
    ] {
        for (opcode, expected) in [(RdmaOpcode::Write, write), (RdmaOpcode::Read, read)] {
            let fabric = Fabric::new(options());
            let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
            let (pair_a, pair_b) = (a.pair(), b.pair());
            for pair in [&pair_a, &pair_b] {
                pair.to_init(&init()).expect("INIT");
            }
            let mut attr = rtr(&a, &b, pair_b.qp_num());
            // The reader's packets are the shorter ones, the writer's the longer ones.
            let (small, large) = (Mtu::Mtu1024, Mtu::Mtu4096);
            let reads = opcode == RdmaOpcode::Read;
            attr.path_mtu = if reads { small } else { large };
            pair_a.to_rtr(&attr).expect("RTR");
            pair_a.to_rts(&rts(6)).expect("RTS");
            let mut attr = rtr(&b, &a, pair_a.qp_num());
            attr.path_mtu = if reads { large } else { small };
            pair_b.to_rtr(&attr).expect("RTR");
            let work = WorkRequest::new(opcode, 1, &[a.local(0, length)], b.remote(0));
            pair_a.post(&[work]).expect("posted");
            assert_eq!(a.statuses(1), [expected], "{opcode:?} of {length}");
        }
    }
}

#[test]
fn a_silent_change_of_mtu_loses_long_packets_only() {
    let two = Connected::new(options());
    let _ = two.a.events();
    two.fabric.set_netdev_mtu(two.b.port(), 1_500);
    assert_eq!(two.b.events(), [], "nobody is told");
    let mtu = two.b.context.port_attr(1).expect("the port").active_mtu;
    assert_eq!(mtu, Some(Mtu::Mtu1024));
    two.post(&[two.write(1, 1_000)]);
    assert_eq!(two.a.statuses(1), [WcStatus::Success]);
    two.post(&[two.write(2, 4_096)]);
    assert_eq!(two.a.statuses(1), [WcStatus::RetryExcErr]);
}

#[test]
fn a_stranger_with_the_right_numbers_is_not_heard() {
    let two = Connected::new(options());
    let c = Host::new(&two.fabric, 3);
    c.fill(9);
    let pair = c.pair();
    connect(&c, &pair, &two.b, two.pair_b.qp_num(), 6).expect("connected");
    let write = WorkRequest::write(1, c.local(0, 64), two.b.remote(0));
    pair.post(&[write]).expect("posted");
    assert_eq!(c.statuses(1), [WcStatus::RetryExcErr]);
    assert_eq!(two.b.bytes(0, 64), [0; 64]);
}

#[test]
fn infiniband_is_addressed_by_lid() {
    let fabric = Fabric::new(options());
    let a = Host::with_nic(&fabric, &NicOptions::infiniband("mlx5_0", 11));
    let b = Host::with_nic(&fabric, &NicOptions::infiniband("mlx5_1", 12));
    let two = Connected::between(a, b, 6);
    two.a.fill(7);
    two.post(&[two.write(1, 100_000)]);
    assert_eq!(two.a.statuses(1), [WcStatus::Success]);
    assert_eq!(two.b.bytes(0, 100_000), vec![7; 100_000]);
    let _ = two.b.events();
    two.fabric.set_lid(two.b.port(), 391);
    assert_eq!(two.b.events(), [AsyncEventKind::LidChange]);
    assert_eq!(two.b.context.port_attr(1).expect("the port").lid, 391);
    two.post(&[two.write(2, 8)]);
    assert_eq!(
        two.a.statuses(1),
        [WcStatus::RetryExcErr],
        "the old LID leads nowhere"
    );
}

#[test]
fn ports_without_a_common_pkey_do_not_hear_each_other() {
    let two = Connected::new(options());
    let _ = two.b.events();
    two.fabric.set_pkeys(two.b.port(), &[0x8001, 0xffff]);
    assert_eq!(two.b.events(), [AsyncEventKind::PkeyChange]);
    assert_eq!(two.b.context.pkey(1, 1).expect("an entry"), 0xffff);
    assert!(two.b.context.pkey(1, 2).is_err());
    two.post(&[two.write(1, 8)]);
    assert_eq!(two.a.statuses(1), [WcStatus::RetryExcErr]);
}

#[test]
fn a_rule_fails_delays_or_loses_completions() {
    let two = Connected::new(options());
    let rule = two.fabric.on_work(|work| match work.wr_id {
        1 => WorkVerdict::CompleteAfter(Duration::from_millis(50)),
        2 => WorkVerdict::LoseCompletion,
        4 => WorkVerdict::Fail(WcStatus::RetryExcErr, 0x81),
        _ => WorkVerdict::Pass,
    });
    let begin = two.fabric.now();
    two.post(&[two.write(1, 8), two.write(2, 8), two.write(3, 8)]);
    let done = two.a.completions(2);
    let ids: Vec<_> = done.iter().map(|(_, done)| done.wr_id).collect();
    assert_eq!(ids, [1, 3], "in order, without the lost one");
    assert!(done[0].0 - begin >= 50 * MS);
    two.post(&[two.write(3, 8), two.write(4, 8), two.write(5, 8)]);
    let done = two.a.completions(3);
    assert_eq!(done[0].1.status, WcStatus::Success);
    assert_eq!(
        (done[1].1.status, done[1].1.vendor_err),
        (WcStatus::RetryExcErr, 0x81)
    );
    assert_eq!(done[2].1.status, WcStatus::WrFlushErr);
    assert_eq!(two.fabric.stats().rules, 1);
    rule.undo();
    assert_eq!(two.fabric.stats().rules, 0);
}

#[test]
fn posts_are_refused_in_part_once_so_many_were_taken() {
    let two = Connected::new(options());
    let nic = two.a.nic;
    let rule = two.fabric.refuse_posts(nic, 3, libc::EINVAL);
    two.post(&[two.write(1, 8)]);
    let batch: Vec<_> = (2..6).map(|wr_id| two.write(wr_id, 8)).collect();
    let error = two
        .pair_a
        .post(&batch)
        .expect_err("only two more are taken");
    assert_eq!((error.posted, error.in_doubt), (2, 0));
    assert_eq!(error.errno(), Some(libc::EINVAL));
    let error = two.pair_a.post(&batch).expect_err("none is");
    assert_eq!(error.posted, 0);
    // What was taken is carried out, and the peer's adapter takes work.
    assert_eq!(two.a.statuses(3), [WcStatus::Success; 3]);
    assert!(two.a.poll().is_empty());
    rule.undo();
    two.post(&batch);
    assert_eq!(two.a.statuses(4), [WcStatus::Success; 4]);
}

#[test]
fn a_post_in_doubt_is_taken_and_named_by_nobody() {
    let two = Connected::new(options());
    let rule = two.fabric.on_post(|work| {
        if work.wr_id == 2 {
            PostVerdict::Doubt(libc::EIO)
        } else {
            PostVerdict::Pass
        }
    });
    let batch: Vec<_> = (1..4).map(|wr_id| two.write(wr_id, 8)).collect();
    let error = two.pair_a.post(&batch).expect_err("its doorbell fails");
    assert_eq!((error.posted, error.in_doubt), (1, 2));
    assert!(!error.is_queue_full());
    assert_eq!(two.a.statuses(3), [WcStatus::Success; 3]);
    rule.undo();
}

#[test]
fn a_partition_cuts_both_ways_or_one() {
    let two = Connected::new(options());
    let cut = two.fabric.partition(&[two.a.port()], &[two.b.port()]);
    two.post(&[two.write(1, 8)]);
    two.fabric.advance(100 * MS);
    assert_eq!(two.a.poll(), []);
    cut.undo();
    assert_eq!(
        two.a.statuses(1),
        [WcStatus::Success],
        "healed before the retries ran out"
    );

    two.a.fill(9);
    let deaf = two.fabric.block(&[two.b.port()], &[two.a.port()]);
    two.post(&[two.write(2, 8)]);
    two.fabric.advance(MS);
    assert_eq!(two.b.bytes(0, 8), [9; 8], "the way there is open");
    assert_eq!(
        two.a.statuses(1),
        [WcStatus::RetryExcErr],
        "the way back is not"
    );
    deaf.keep();
    assert_eq!(two.fabric.stats().rules, 1);
}

#[test]
fn two_adapters_of_one_host_and_one_adapter_with_itself_can_talk() {
    let two = Connected::new(options());
    let (one, other) = (two.a.pair(), two.a.pair());
    connect(&two.a, &one, &two.a, other.qp_num(), 6).expect("connected");
    connect(&two.a, &other, &two.a, one.qp_num(), 6).expect("connected");
    two.a.memory.copy_in(0, &[5; 64]).expect("inside");
    let write = WorkRequest::write(1, two.a.local(0, 64), two.a.remote(4_096));
    one.post(&[write]).expect("posted");
    assert_eq!(two.a.statuses(1), [WcStatus::Success]);
    assert_eq!(two.a.bytes(4_096, 64), [5; 64]);
    // A completion queue that the pairs do not share stays empty.
    let queue = two.a.context.create_cq(8).expect("a queue");
    let capacity = one.capacity();
    let init = QpInit {
        send_cq: &queue,
        recv_cq: &queue,
        capacity,
    };
    let _third = two.a.pd.create_qp(init).expect("a pair");
    assert_eq!(
        queue
            .poll(&mut [crate::Completion::EMPTY; 4])
            .expect("a poll"),
        0
    );
}
