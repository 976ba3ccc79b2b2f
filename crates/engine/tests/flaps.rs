//! A thousand flaps of the only rail, and nothing is left of them: neither in the fabric, nor in
//! the process. Alone in its program, since it counts what the whole process holds.
#![cfg(feature = "sim")]

mod common;

use std::alloc::System;

use common::{Pair, Rig, until};
use rerail_engine::Event;
use rerail_verbs::sim::FabricStats;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const FLAPS: usize = 1_000;
/// After which everything has its lasting size, but for histories that fill up to their bounds.
const WARM: usize = 50;
/// Blocks of memory that come and go with the threads and connections that rest for a while.
const BLOCKS_MAX: usize = 100;
/// Bytes that the histories may take until they are full, in both engines and in the fabric.
const BYTES_MAX: usize = 256 << 10;
/// The runtimes' pools of blocking threads have bounds of their own, and shrink with time.
const THREADS_MAX: usize = 8;

/// What the process holds.
#[derive(Debug)]
struct Held {
    blocks: usize,
    bytes: usize,
    threads: usize,
}

fn held() -> Held {
    let stats = ALLOCATOR.stats();
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let threads = status
        .lines()
        .find_map(|line| line.strip_prefix("Threads:"));
    Held {
        blocks: stats.allocations.saturating_sub(stats.deallocations),
        bytes: stats
            .bytes_allocated
            .saturating_sub(stats.bytes_deallocated),
        threads: threads.expect("Threads").trim().parse().expect("a number"),
    }
}

#[test]
fn a_thousand_flaps_leave_objects_queues_and_memory_where_they_were() {
    // The only rail: no damping holds it down.
    let rig = Rig::new(7, 1);
    let pair = Pair::new(&rig);
    let port = rig.port(0, 0);
    let gates = |opened: bool| {
        let is = move |event: &Event| match event {
            Event::GateOpened { nic } => opened && nic == "sim0",
            Event::GateClosed { nic, .. } => !opened && nic == "sim0",
            _ => false,
        };
        pair.own_log.count(is)
    };
    let at_rest = || {
        pair.write_until("the rail is up", || pair.is_up(0));
        until("nothing is in flight", || {
            let stats = rig.fabric.stats();
            stats.work_requests == 0 && stats.packets == 0 && stats.events == 0
        });
        pair.own_log.forget();
        pair.peer_log.forget();
    };
    let mut before = None;
    for flap in 0..WARM + FLAPS {
        if flap == WARM {
            at_rest();
            before = Some((rig.fabric.stats(), held()));
        }
        pair.own_log.forget();
        pair.peer_log.forget();
        rig.fabric.port_down(port);
        until("its gate is closed", || gates(false) > 0);
        rig.fabric.port_up(port);
        until("its gate is open", || gates(true) > 0);
        let mut once = 0;
        pair.write_until("one batch is written", || {
            once += 1;
            once > 1
        });
    }
    at_rest();
    let (stats, before) = before.expect("it was warm");
    until("objects and queues are where they were", || {
        let now = rig.fabric.stats();
        let same = |of: &FabricStats| {
            (
                of.contexts,
                of.pds,
                of.regions,
                of.completion_queues,
                of.queue_pairs,
                of.completions,
                of.rules,
            )
        };
        same(&now) == same(&stats)
    });
    // Threads and connections that rest for a while end in their time.
    let grew = |of: fn(&Held) -> usize| of(&held()).saturating_sub(of(&before));
    until("no more memory or threads are held", || {
        grew(|held| held.blocks) <= BLOCKS_MAX
            && grew(|held| held.bytes) <= BYTES_MAX
            && grew(|held| held.threads) <= THREADS_MAX
    });
    println!("{FLAPS} flaps: {before:?}, and then {:?}", held());
}
