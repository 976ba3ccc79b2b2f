use std::sync::atomic::AtomicUsize;

use super::super::rail::{Peer, PeerSpec};
use super::super::slice::Piece;
use super::*;
use crate::machine::ids::PeerId;

#[derive(Default)]
struct Count(AtomicUsize);

impl OnFinished for Count {
    fn finished(&self, _transfer: &Transfer) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn span(addr: u64, pieces: &[u64]) -> Span {
    let mut next = addr;
    let pieces: Vec<Piece> = pieces
        .iter()
        .map(|length| {
            let piece = Piece::new(next, *length, [7]);
            next += length;
            piece
        })
        .collect();
    Span::new(addr, next - addr, pieces).expect("pieces without a gap")
}

fn transfer(length: u64, local: &[u64], remote: &[u64]) -> (Arc<Transfer>, Arc<Count>) {
    let count = Arc::new(Count::default());
    let spec = TransferSpec {
        peer: Peer::new(
            PeerSpec {
                id: PeerId(1),
                segment: "peer".into(),
                server: "host:1".into(),
                instance: None,
                nics: Vec::new(),
            },
            &[],
        ),
        opcode: RdmaOpcode::Write,
        local: span(1 << 20, local),
        remote: span(1 << 30, remote),
        length,
        slicing: Slicing {
            slice_bytes: 100,
            fragment_bytes: 25,
        },
        cut_off: Time::from_millis(1_000),
        limit: Duration::from_secs(3),
    };
    (Transfer::new(spec, count.clone()), count)
}

fn finished(count: &Count) -> usize {
    count.0.load(Ordering::SeqCst)
}

#[test]
fn slices_cover_the_request_once_and_stop_at_every_seam() {
    let (transfer, count) = transfer(450, &[150, 300], &[30, 420]);
    let mut slices = Vec::new();
    while let Some(slice) = transfer.claim() {
        slices.push((slice.offset, slice.length));
    }
    assert_eq!(
        slices,
        [
            (0, 30),
            (30, 100),
            (130, 20),
            (150, 100),
            (250, 100),
            (350, 100)
        ]
    );
    for (offset, length) in slices {
        assert_eq!(finished(&count), 0);
        transfer.complete(Slice { offset, length });
    }
    assert_eq!(finished(&count), 1);
    assert_eq!(transfer.transferred_bytes(), 450);
    assert!(transfer.error().is_none());
}

#[test]
fn a_slice_that_comes_back_is_claimed_again() {
    let (transfer, count) = transfer(200, &[200], &[200]);
    let first = transfer.claim().expect("work");
    let second = transfer.claim().expect("work");
    assert!(!transfer.has_work());
    transfer.give_back(first);
    assert!(transfer.has_work());
    assert_eq!(transfer.claim(), Some(first));
    transfer.complete(second);
    transfer.complete(first);
    assert_eq!(finished(&count), 1);
    assert_eq!(transfer.retried_slices(), 1);
}

#[test]
fn x01_a_failed_transfer_finishes_only_when_all_that_was_posted_has_come_back() {
    let (transfer, count) = transfer(300, &[300], &[300]);
    let first = transfer.claim().expect("work");
    let second = transfer.claim().expect("work");
    assert!(transfer.fail(TransferError::Canceled));
    assert!(
        !transfer.fail(TransferError::Canceled),
        "the first cause is kept"
    );
    assert!(transfer.claim().is_none());
    transfer.give_back(first);
    assert_eq!(finished(&count), 0);
    transfer.complete(second);
    assert_eq!(finished(&count), 1);
    assert_eq!(transfer.transferred_bytes(), 100);
}

#[test]
fn one_that_has_failed_does_not_begin_again_because_its_keys_change_later() {
    let (early, _) = transfer(100, &[100], &[100]);
    let (failed, _) = transfer(100, &[100], &[100]);
    for transfer in [&early, &failed] {
        transfer.claim().expect("something to move");
    }
    failed.fail(TransferError::Canceled);
    for transfer in [&early, &failed] {
        let (addr, length, keys) = transfer.spec().remote.at(0).expect("inside");
        let keys = Arc::clone(keys);
        Piece::carry_over(&[Piece { addr, length, keys }], &mut []);
        assert!(transfer.fail_if_outdated());
    }
    assert!(early.is_outdated() && !failed.is_outdated());
    let error = failed.error();
    assert!(matches!(error, Some(TransferError::Canceled)), "{error:?}");
}

#[test]
fn a_fence_holds_the_report_back_though_all_bytes_arrived() {
    let (transfer, count) = transfer(100, &[100], &[100]);
    let slice = transfer.claim().expect("work");
    transfer.hold();
    transfer.give_back(slice);
    let again = transfer.claim().expect("work");
    transfer.complete(again);
    assert_eq!(finished(&count), 0);
    transfer.release();
    assert_eq!(finished(&count), 1);
}

#[test]
fn a_transfer_of_nothing_is_finished_at_once() {
    let (transfer, count) = transfer(0, &[10], &[10]);
    assert_eq!(finished(&count), 1);
    assert!(transfer.claim().is_none());
    assert!(!transfer.fail(TransferError::Canceled));
    assert_eq!(finished(&count), 1);
}

#[test]
fn threads_that_claim_give_back_and_fail_end_every_byte_once() {
    for round in 0..50_u64 {
        let (transfer, count) = transfer(20_000, &[7_000, 13_000], &[20_000]);
        std::thread::scope(|scope| {
            for worker in 0..4_u64 {
                let transfer = &transfer;
                scope.spawn(move || {
                    let mut turn = worker;
                    while let Some(slice) = transfer.claim() {
                        turn += 1;
                        if turn % 3 == 0 {
                            transfer.hold();
                            transfer.give_back(slice);
                            transfer.release();
                        } else {
                            transfer.complete(slice);
                        }
                        if round % 2 == 1 && turn == 40 {
                            transfer.fail(TransferError::Canceled);
                        }
                    }
                });
            }
        });
        // A worker may leave while another still holds a slice that it then gives back.
        while let Some(slice) = transfer.claim() {
            transfer.complete(slice);
        }
        assert_eq!(finished(&count), 1, "round {round}");
        assert!(transfer.is_finished());
        if transfer.error().is_none() {
            assert_eq!(transfer.transferred_bytes(), 20_000);
        }
    }
}

#[test]
fn x10_a_transfer_that_nobody_works_on_fails_at_its_time() {
    let (transfer, count) = transfer(100, &[100], &[100]);
    assert!(!transfer.check_cut_off(Time::from_millis(999)));
    assert!(transfer.check_cut_off(Time::from_millis(1_000)));
    assert_eq!(finished(&count), 1);
    assert!(matches!(
        transfer.error(),
        Some(TransferError::Deadline { .. })
    ));
}

#[test]
fn x18_slices_are_made_one_by_one_however_long_the_request_is() {
    const SLICES: u64 = 877_952;
    let (transfer, count) = transfer(SLICES * 100, &[SLICES * 100], &[SLICES * 100]);
    // As deep as queues are.
    let posted: Vec<_> = (0..256).filter_map(|_| transfer.claim()).collect();
    assert_eq!(posted.len(), 256);
    assert!(transfer.returned.is_empty(), "nothing waits as a slice");
    assert_eq!(transfer.unclaimed_bytes(), (SLICES - 256) * 100);
    posted
        .into_iter()
        .for_each(|slice| transfer.complete(slice));
    let mut claimed = 256;
    while let Some(slice) = transfer.claim() {
        assert_eq!(finished(&count), 0);
        transfer.complete(slice);
        claimed += 1;
    }
    assert_eq!((claimed, finished(&count)), (SLICES, 1));
}

#[test]
fn a_slice_that_ends_twice_in_place_of_another_shows() {
    let (transfer, count) = transfer(200, &[200], &[200]);
    let (first, second) = (transfer.claim(), transfer.claim());
    let (first, _) = (first.expect("work"), second.expect("work"));
    transfer.complete(first);
    transfer.complete(first);
    assert_eq!(finished(&count), 1, "by the number of bytes");
    assert_eq!(transfer.first_amiss(), Some(0));
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "100 of 0 that are open end")]
fn a_slice_that_ends_behind_the_end_does_not_pass() {
    let (transfer, _count) = transfer(100, &[100], &[100]);
    let slice = transfer.claim().expect("work");
    transfer.complete(slice);
    assert_eq!(transfer.first_amiss(), None);
    transfer.complete(slice);
}
