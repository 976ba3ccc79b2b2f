//! Posting, completing and failing.

use super::{Endpoint, Fabric, MEMORY_BYTES, Side, completions, connect, connected, create_pair};
use crate::{
    AccessFlags, Completion, HostMemory, QpState, RemoteAddress, Sge, WcOpcode, WcStatus,
    WorkRequest,
};

/// Bytes that differ from place to place and from seed to seed.
fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length)
        .map(|index| ((index * 31 + (index >> 8) * 7 + seed * 101) % 251) as u8)
        .collect()
}

/// Bytes move in both directions, whatever their number and place, and nothing beside them.
pub(super) fn writes_and_reads_move_every_byte(fabric: &dyn Fabric) {
    let (initiator, target) = connected(fabric);
    let sizes = [1, 7, 64, 1023, 4096, 4097, 65_536, 100_003];
    for (seed, length) in sizes.into_iter().enumerate() {
        let (from, to) = (13 + seed, 29 + 3 * seed);
        let bytes = pattern(seed, length);
        initiator.memory.copy_in(from, &bytes).expect("inside");
        target.memory.copy_in(to - 1, &[0xee]).expect("inside");
        target.memory.copy_in(to + length, &[0xee]).expect("inside");
        let wr_id = 0xfeed_0000_0000 + seed as u64;
        let write = WorkRequest::write(wr_id, initiator.local(from, length), target.remote(to));
        initiator.pair.post(&[write]).expect("posted");
        let done = completions(fabric, &initiator.queue, 1)[0];
        assert_eq!(
            (done.wr_id, done.status),
            (wr_id, WcStatus::Success),
            "{length} bytes"
        );
        assert_eq!(done.opcode, WcOpcode::RdmaWrite);
        assert_eq!(done.qp_num, initiator.pair.qp_num());
        assert_eq!(target.bytes(to, length), bytes, "{length} bytes written");
        assert_eq!(target.bytes(to - 1, 1), [0xee], "the byte before");
        assert_eq!(target.bytes(to + length, 1), [0xee], "the byte after");

        let back = MEMORY_BYTES / 2 + seed;
        let read = WorkRequest::read(wr_id + 1, initiator.local(back, length), target.remote(to));
        initiator.pair.post(&[read]).expect("posted");
        let done = completions(fabric, &initiator.queue, 1)[0];
        assert_eq!((done.wr_id, done.status), (wr_id + 1, WcStatus::Success));
        assert_eq!(done.opcode, WcOpcode::RdmaRead);
        assert_eq!(initiator.bytes(back, length), bytes, "{length} bytes read");
    }
    initiator.close();
    target.close();
}

/// A batch longer than what a backend hands to its device at once is still one batch.
pub(super) fn batches_of_any_length_complete_in_order(fabric: &dyn Fabric) {
    let (initiator, target) = connected(fabric);
    let bytes = pattern(5, 64 * 100);
    initiator.memory.copy_in(0, &bytes).expect("inside");
    for count in [0_usize, 1, 15, 16, 17, 33, 64] {
        target
            .memory
            .copy_in(0, &vec![0; bytes.len()])
            .expect("inside");
        let batch: Vec<_> = (0..count)
            .map(|index| {
                let pieces = [
                    initiator.local(100 * index, 60),
                    initiator.local(100 * index + 60, 40),
                ];
                let mut request = WorkRequest::new(
                    crate::RdmaOpcode::Write,
                    index as u64,
                    &pieces,
                    target.remote(100 * index),
                );
                // Of unsignalled work, the last one's completion tells.
                request.signaled = index % 2 == 0 || index + 1 == count;
                request
            })
            .collect();
        initiator.pair.post(&batch).expect("posted");
        let signaled: Vec<u64> = batch
            .iter()
            .filter(|request| request.signaled)
            .map(|request| request.wr_id)
            .collect();
        let done = completions(fabric, &initiator.queue, signaled.len());
        let ids: Vec<u64> = done.iter().map(|completion| completion.wr_id).collect();
        assert_eq!(ids, signaled, "a batch of {count}");
        assert!(
            done.iter()
                .all(|completion| completion.status == WcStatus::Success)
        );
        assert_eq!(target.bytes(0, 100 * count), bytes[..100 * count]);
    }
    initiator.close();
    target.close();
}

/// A READ of nothing proves the connection and needs no memory at either end.
pub(super) fn a_zero_length_read_needs_no_key(fabric: &dyn Fabric) {
    let (initiator, target) = connected(fabric);
    initiator
        .pair
        .post(&[WorkRequest::zero_length_read(9)])
        .expect("posted");
    let done = completions(fabric, &initiator.queue, 1)[0];
    assert_eq!((done.wr_id, done.status), (9, WcStatus::Success));
    initiator.close();
    target.close();
}

/// A key that names no region of the peer: the work fails, what is behind it flushes.
pub(super) fn a_wrong_remote_key_is_an_access_error(fabric: &dyn Fabric) {
    let (initiator, target) = connected(fabric);
    let place = target.remote(0);
    let wrong = RemoteAddress {
        rkey: place.rkey ^ 0x5a00,
        ..place
    };
    let batch = [
        WorkRequest::write(1, initiator.local(0, 100), wrong),
        WorkRequest::write(2, initiator.local(0, 100), place),
    ];
    initiator.pair.post(&batch).expect("posted");
    let done = completions(fabric, &initiator.queue, 2);
    assert_eq!((done[0].wr_id, done[0].status), (1, WcStatus::RemAccessErr));
    assert_eq!((done[1].wr_id, done[1].status), (2, WcStatus::WrFlushErr));
    let state = initiator.pair.query().expect("a query").state;
    assert_eq!(state, QpState::Error);
    initiator.close();
    target.close();
}

/// A local key that names no region: nothing is sent.
pub(super) fn a_wrong_local_key_is_a_protection_error(fabric: &dyn Fabric) {
    let (initiator, target) = connected(fabric);
    let piece = initiator.local(0, 100);
    let wrong = Sge {
        lkey: piece.lkey ^ 0x5a00,
        ..piece
    };
    target.memory.copy_in(0, &[7; 100]).expect("inside");
    initiator
        .pair
        .post(&[WorkRequest::write(1, wrong, target.remote(0))])
        .expect("posted");
    let done = completions(fabric, &initiator.queue, 1)[0];
    assert!(
        // soft-RoCE says that its queue pair failed; cards say that protection did.
        matches!(done.status, WcStatus::LocProtErr | WcStatus::LocQpOpErr),
        "{done:?}"
    );
    assert_eq!(target.bytes(0, 100), [7; 100]);
    initiator.close();
    target.close();
}

/// A region ends where it ends, though the memory goes on.
pub(super) fn bytes_past_a_region_are_out_of_reach(fabric: &dyn Fabric) {
    let (initiator, target) = connected(fabric);
    let small = target
        .pd
        .register(
            &target.memory,
            0,
            4096,
            AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
        )
        .expect("a region");
    target.memory.copy_in(0, &[3; 8192]).expect("inside");
    let place = RemoteAddress {
        addr: small.addr() + 4000,
        rkey: small.rkey(),
    };
    initiator
        .pair
        .post(&[WorkRequest::write(1, initiator.local(0, 97), place)])
        .expect("posted");
    let done = completions(fabric, &initiator.queue, 1)[0];
    assert_eq!(done.status, WcStatus::RemAccessErr);
    assert_eq!(target.bytes(4096, 4096), [3; 4096]);
    drop(small);
    initiator.close();
    target.close();
}

/// Without an answer the first request ends by its retries, and the others flush.
pub(super) fn a_peer_that_is_silent_ends_the_retries(fabric: &dyn Fabric) {
    let initiator = Endpoint::open(fabric, Side::Initiator);
    let target = Endpoint::open(fabric, Side::Target);
    initiator.to_init();
    // The target's pair stays in RESET: packets for it are dropped.
    initiator.connect_to(&target);
    let batch: Vec<_> = (0..3)
        .map(|wr_id| WorkRequest::write(wr_id, initiator.local(0, 8), target.remote(0)))
        .collect();
    initiator.pair.post(&batch).expect("posted");
    let done = completions(fabric, &initiator.queue, 3);
    let statuses: Vec<_> = done.iter().map(|completion| completion.status).collect();
    assert_eq!(
        statuses,
        [
            WcStatus::RetryExcErr,
            WcStatus::WrFlushErr,
            WcStatus::WrFlushErr
        ]
    );
    initiator.close();
    target.close();
}

/// Moving to ERR completes all that is outstanding, unsignalled work included.
pub(super) fn error_state_flushes_what_is_outstanding(fabric: &dyn Fabric) {
    let initiator = Endpoint::open(fabric, Side::Initiator);
    let target = Endpoint::open(fabric, Side::Target);
    initiator.to_init();
    initiator.connect_to(&target);
    let batch: Vec<_> = (0..20)
        .map(|wr_id| {
            let mut request = WorkRequest::write(wr_id, initiator.local(0, 8), target.remote(0));
            request.signaled = wr_id % 3 == 0;
            request
        })
        .collect();
    initiator.pair.post(&batch).expect("posted");
    initiator.pair.to_error().expect("to ERR");
    let done = completions(fabric, &initiator.queue, 20);
    let ids: Vec<_> = done.iter().map(|completion| completion.wr_id).collect();
    assert_eq!(ids, (0..20).collect::<Vec<_>>());
    assert!(
        done.iter()
            .all(|completion| completion.status == WcStatus::WrFlushErr),
        "{done:?}"
    );
    // Back to RESET and to life.
    initiator.pair.to_reset().expect("to RESET");
    assert_eq!(
        initiator.pair.query().expect("a query").state,
        QpState::Reset
    );
    connect(&initiator, &target);
    assert_eq!(
        initiator.pair.query().expect("a query").state,
        QpState::ReadyToSend
    );
    initiator
        .pair
        .post(&[WorkRequest::zero_length_read(77)])
        .expect("posted");
    let done = completions(fabric, &initiator.queue, 1)[0];
    assert_eq!((done.wr_id, done.status), (77, WcStatus::Success));
    initiator.close();
    target.close();
}

/// What did not fit is known exactly: each posted request completes, and no other.
pub(super) fn x20_a_full_send_queue_says_how_much_was_posted(fabric: &dyn Fabric) {
    let initiator = Endpoint::open_sized(fabric, Side::Initiator, 4096);
    let target = Endpoint::open(fabric, Side::Target);
    initiator.to_init();
    initiator.connect_to(&target);
    let batch: Vec<_> = (0..2000)
        .map(|wr_id| WorkRequest::write(wr_id, initiator.local(0, 8), target.remote(0)))
        .collect();
    let refused = initiator
        .pair
        .post(&batch)
        .expect_err("the queue is smaller");
    assert!(refused.is_queue_full(), "{refused}");
    assert!(
        refused.posted >= 64,
        "at least what was asked for: {refused}"
    );
    initiator.pair.to_error().expect("to ERR");
    let done = completions(fabric, &initiator.queue, refused.posted);
    let ids: Vec<_> = done.iter().map(|completion| completion.wr_id).collect();
    assert_eq!(ids, (0..refused.posted as u64).collect::<Vec<_>>());
    initiator.close();
    target.close();
}

/// A pair that is not ready refuses work, or takes it and flushes it later; each request is
/// accounted for.
pub(super) fn posting_before_ready_to_send_loses_nothing(fabric: &dyn Fabric) {
    let initiator = Endpoint::open(fabric, Side::Initiator);
    initiator.to_init();
    let batch: Vec<_> = (0..20)
        .map(|wr_id| WorkRequest::write(wr_id, initiator.local(0, 8), RemoteAddress::default()))
        .collect();
    let (posted, in_doubt) = match initiator.pair.post(&batch) {
        Ok(()) => (batch.len(), 0),
        Err(refused) => {
            assert!(!refused.is_queue_full(), "{refused}");
            (refused.posted, refused.in_doubt)
        }
    };
    assert!(posted + in_doubt <= batch.len());
    initiator.pair.to_error().expect("to ERR");
    let mut done = completions(fabric, &initiator.queue, posted);
    // Of those in doubt any number may come.
    let mut more = [Completion::EMPTY; 32];
    for _ in 0..50 {
        fabric.pass_time();
        let taken = initiator.queue.poll(&mut more).expect("a poll");
        done.extend_from_slice(&more[..taken]);
    }
    assert!(
        done.len() <= posted + in_doubt,
        "{posted} + {in_doubt}: {done:?}"
    );
    assert!(
        done.iter()
            .all(|completion| completion.wr_id < (posted + in_doubt) as u64)
    );
    initiator.close();
}

/// A region with an address of its own is reached by that address only.
pub(super) fn iova_names_the_memory(fabric: &dyn Fabric) {
    let (initiator, target) = connected(fabric);
    let memory = HostMemory::allocate(16_384).expect("memory");
    let iova = 0x1000_0000;
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let region = target
        .pd
        .register_with_iova(&memory, 4096, 8192, iova, access)
        .expect("a region");
    assert_eq!(region.addr(), iova);
    let bytes = pattern(3, 5000);
    initiator.memory.copy_in(0, &bytes).expect("inside");
    let place = RemoteAddress {
        addr: iova + 100,
        rkey: region.rkey(),
    };
    initiator
        .pair
        .post(&[WorkRequest::write(1, initiator.local(0, 5000), place)])
        .expect("posted");
    let done = completions(fabric, &initiator.queue, 1)[0];
    assert_eq!(done.status, WcStatus::Success);
    let mut found = vec![0; 5000];
    memory.copy_out(4196, &mut found).expect("inside");
    assert_eq!(found, bytes);
    drop(region);
    initiator.close();
    target.close();
}

/// A pair reaches the regions of its own protection domain only, whatever key the peer has.
pub(super) fn another_domain_is_out_of_reach(fabric: &dyn Fabric) {
    let initiator = Endpoint::open(fabric, Side::Initiator);
    let mut target = Endpoint::open(fabric, Side::Target);
    let other_pd = target.context.alloc_pd().expect("a domain");
    target.pair = create_pair(&other_pd, &target.queue);
    connect(&initiator, &target);
    target.memory.copy_in(0, &[9; 64]).expect("inside");
    initiator
        .pair
        .post(&[WorkRequest::write(
            1,
            initiator.local(0, 64),
            target.remote(0),
        )])
        .expect("posted");
    let done = completions(fabric, &initiator.queue, 1)[0];
    assert_eq!(done.status, WcStatus::RemAccessErr);
    assert_eq!(target.bytes(0, 64), [9; 64]);
    initiator.close();
    drop(other_pd);
    target.close();
}
