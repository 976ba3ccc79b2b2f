//! One seed, one run.

use std::time::Duration;

use super::support::{Connected, MEMORY_BYTES, MS, address, options};
use crate::HostMemory;
use crate::sim::{EventOptions, FabricOptions, LinkOptions};

/// A busy second with every kind of chance.
fn run(seed: u64, trace_lines_max: usize) -> (String, u64, Vec<String>) {
    let two = Connected::new(FabricOptions {
        seed,
        trace_lines_max,
        events: EventOptions {
            loss: 0.2,
            duplicate: 0.2,
            delay_max: 20 * MS,
            reorder_kinds: true,
            ..EventOptions::faultless()
        },
        ..options()
    });
    let link = LinkOptions {
        loss: 0.1,
        jitter_max: Duration::from_micros(30),
        ..LinkOptions::default()
    };
    let _lossy = [&two.a, &two.b].map(|host| two.fabric.degrade(host.port(), link.clone()));
    let mut seen = Vec::new();
    for round in 0..50 {
        let _ = two
            .pair_a
            .post(&[two.write(round, 200_000), two.read(round, 5_000)]);
        match round % 10 {
            3 => two.fabric.port_down(two.b.port()),
            4 => two.fabric.port_up(two.b.port()),
            6 => assert!(two.fabric.add_address(two.b.port(), address(99))),
            8 => assert!(two.fabric.delete_address(two.b.port(), address(99))),
            _ => {}
        }
        two.fabric.advance(20 * MS);
        for done in two.a.poll() {
            seen.push(format!("{} {}", done.wr_id, done.status));
        }
        for event in two.b.events() {
            seen.push(event.to_string());
        }
    }
    (two.fabric.trace(), two.fabric.trace_digest(), seen)
}

#[test]
fn two_runs_with_one_seed_have_equal_traces() {
    let one = run(1, 1 << 20);
    // Memory of the second run lies elsewhere, as it does in another process.
    let _shift = HostMemory::allocate(MEMORY_BYTES).expect("memory");
    let other = run(1, 1 << 20);
    assert!(one.0.lines().count() > 1_000);
    for (line, (left, right)) in one.0.lines().zip(other.0.lines()).enumerate() {
        assert_eq!(left, right, "line {line}");
    }
    assert_eq!(one, other);
}

#[test]
fn another_seed_is_another_run() {
    assert_ne!(run(1, 1 << 20).1, run(2, 1 << 20).1);
}

#[test]
fn tracing_changes_nothing() {
    let (text, _, seen) = run(1, 0);
    assert_eq!(text, "");
    assert_eq!(seen, run(1, 100).2);
    let (kept, digest, _) = run(1, 100);
    assert_eq!(kept.lines().count(), 100);
    assert_eq!(
        digest,
        run(1, 1 << 20).1,
        "the digest covers what is no longer kept"
    );
}
