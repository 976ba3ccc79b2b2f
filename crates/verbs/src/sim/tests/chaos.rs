//! Many seeds, everything at once: what must hold whatever happens.

use std::time::Duration;

use super::support::{Connected, MS, connect, options};
use crate::sim::rng::Rng;
use crate::sim::{FabricOptions, LinkOptions, PacketVerdict};
use crate::{RdmaOpcode, WcStatus, WorkRequest};

const PIECE_BYTES: usize = 9_000;
const PIECES: usize = 50;
/// B's pieces lie behind A's in offset, so that reads have a place of their own.
const READS_AT: usize = PIECES * PIECE_BYTES;

fn piece(byte: u8) -> Vec<u8> {
    vec![byte; PIECE_BYTES]
}

/// Posts pieces with a pattern of their round while packets are lost, doubled and delayed, ports
/// flap and pairs fail; after each failure both ends are connected anew.
///
/// Each piece must end exactly once and in order, and a success means that its bytes are there.
/// Returns how many pieces succeeded and how many did not.
fn run(seed: u64, card: bool) -> (usize, usize) {
    let base = if card {
        FabricOptions::card(seed)
    } else {
        options()
    };
    let two = Connected::new(FabricOptions {
        seed,
        packets_per_burst: 1 + (seed % 3) as u32,
        window_bursts: 1 + (seed % 5) as u32,
        ..base
    });
    let mut rng = Rng::new(seed ^ 0xabcd);
    let link = LinkOptions {
        loss: 0.03,
        jitter_max: Duration::from_micros(20),
        ..LinkOptions::default()
    };
    let lossy = [&two.a, &two.b].map(|host| two.fabric.degrade(host.port(), link.clone()));
    let mut chance = Rng::new(seed ^ 0x1234);
    let rule = two.fabric.on_packet(move |_| match chance.next_u64() % 40 {
        0 => PacketVerdict::Duplicate,
        1 => PacketVerdict::Delay(Duration::from_micros(300)),
        _ => PacketVerdict::Pass,
    });
    let mut counts = (0, 0);
    for round in 0..12_u8 {
        let byte = |index: usize| round * 17 + index as u8 + 1;
        for index in 0..PIECES {
            let (at, read_at) = (index * PIECE_BYTES, READS_AT + index * PIECE_BYTES);
            two.a
                .memory
                .copy_in(at, &piece(byte(index)))
                .expect("inside");
            two.b
                .memory
                .copy_in(read_at, &piece(byte(index)))
                .expect("inside");
        }
        let batch: Vec<_> = (0..PIECES)
            .map(|index| {
                let write = rng.chance(0.6);
                let (opcode, skip) = if write {
                    (RdmaOpcode::Write, 0)
                } else {
                    (RdmaOpcode::Read, READS_AT)
                };
                let at = skip + index * PIECE_BYTES;
                let pieces = [
                    two.a.local(at, 1_000),
                    two.a.local(at + 1_000, PIECE_BYTES - 1_000),
                ];
                let mut work = WorkRequest::new(opcode, index as u64, &pieces, two.b.remote(at));
                work.fence = rng.chance(0.1);
                work
            })
            .collect();
        two.post(&batch);
        let mut ended = Vec::new();
        let mut failed = false;
        let mut quiet = 0;
        while ended.len() < PIECES {
            match rng.next_u64() % 200 {
                0 => two.fabric.port_down(two.a.port()),
                1 => two.fabric.port_down(two.b.port()),
                2 => two.pair_a.to_error().expect("ERR"),
                _ => {}
            }
            if rng.chance(0.3) {
                two.fabric.port_up(two.a.port());
                two.fabric.port_up(two.b.port());
            }
            two.fabric.advance(rng.between(Duration::ZERO, MS));
            for done in two.a.poll() {
                assert_eq!(done.wr_id, ended.len() as u64, "seed {seed}: order");
                let index = ended.len();
                let at = index * PIECE_BYTES;
                if done.status != WcStatus::Success {
                    failed = true;
                } else {
                    assert!(!failed, "seed {seed}: success after a failure");
                    let (host, at) = match batch[index].opcode {
                        RdmaOpcode::Write => (&two.b, at),
                        RdmaOpcode::Read => (&two.a, READS_AT + at),
                    };
                    assert!(
                        host.bytes(at, PIECE_BYTES) == piece(byte(index)),
                        "seed {seed}"
                    );
                }
                ended.push(done.status);
            }
            quiet += 1;
            assert!(quiet < 20_000, "seed {seed}: no end");
        }
        let succeeded = ended
            .iter()
            .filter(|status| **status == WcStatus::Success)
            .count();
        counts = (counts.0 + succeeded, counts.1 + PIECES - succeeded);
        two.fabric.port_up(two.a.port());
        two.fabric.port_up(two.b.port());
        if failed {
            two.pair_a.to_reset().expect("RESET");
            two.pair_b.to_reset().expect("RESET");
            // Until nothing of the old connection is on the way: packet numbers are the same.
            two.fabric.advance(5_000 * MS);
            let numbers = (two.pair_a.qp_num(), two.pair_b.qp_num());
            connect(&two.a, &two.pair_a, &two.b, numbers.1, 6).expect("connected");
            connect(&two.b, &two.pair_b, &two.a, numbers.0, 6).expect("connected");
        }
        assert_eq!(two.a.poll(), [], "seed {seed}: nothing ends twice");
        let _ = (two.a.events(), two.b.events());
    }
    drop((lossy, rule));
    two.fabric.advance(5_000 * MS);
    let left = two.fabric.stats();
    assert_eq!(
        (
            left.packets,
            left.work_requests,
            left.completions,
            left.due,
            left.rules
        ),
        (0, 0, 0, 0, 0),
        "seed {seed}"
    );
    counts
}

#[test]
fn whatever_happens_work_ends_once_in_order_and_success_means_bytes() {
    let (mut succeeded, mut failed) = (0, 0);
    for seed in 0..40 {
        let counts = run(seed, seed % 2 == 1);
        succeeded += counts.0;
        failed += counts.1;
    }
    // Both must be common for the test to mean anything.
    assert!(
        succeeded > 5_000 && failed > 2_000,
        "{succeeded} and {failed}"
    );
}
