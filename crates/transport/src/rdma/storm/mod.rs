//! A storm over whole nodes on the simulated fabric, in virtual time, from one seed.
//!
//! Nodes are the decision machines ([`crate::machine`]) with verbs objects of
//! `verbs::sim`, a store and messages between them. A safety phase makes faults and moves data all
//! the while; then the faults end, and everything must heal within a stated time.
//!
//! *Safety, at each step*: a transfer is reported as success only if the bytes match; each request
//! and slice ends exactly once; nothing is posted through a closed gate, over a GID that the
//! observer knows to be gone, or to a retired instance; generations never go back; no byte changes
//! in memory after its transfer was reported; queues stay within their bounds. *Liveness*: faults
//! off, records equal reality, rails are up, all pairs transfer, and nothing is left over.
//!
//! `cargo xtask sim --seeds N --seed S` runs it at length. A seed that fails is printed, and the
//! same seed gives the same trace, byte for byte.
//!
//! What runs is the engine's own code: the connector with its endpoints, the drivers of the data
//! threads with their transfers, the rail keeper, the router, the reading of ports, and the
//! machines. Around them is what an engine has threads and sockets for: tasks run in turns
//! ([`turns`]), control threads do one verb at a time and none while their device hangs, and
//! messages may be late, lost or overtaken. The engine's own layer (records' storage and
//! subscription, segments, batches) is a stand-in that follows it.

mod actions;
mod arrivals;
mod coverage;
mod ledger;
mod link;
mod node;
mod plan;
mod store;
mod turns;
mod work;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use coverage::Coverage;
pub(super) use turns::{Hand, Turns};
use world::World;

use super::endpoint::{Action, Endpoint};
use super::inbox::EndpointKey;

/// What an endpoint is about to do.
pub(super) fn note_action(key: EndpointKey, action: &Action) {
    coverage::note(key, "order", actions::variant(action));
    if let Action::Closed(cause) = action {
        coverage::note(key, "close", actions::variant(cause));
    }
}

/// What has become of an endpoint.
pub(super) fn note_state(key: EndpointKey, machine: &Endpoint) {
    coverage::note(key, "endpoint", machine.state_name());
}

/// Seeds that run with the other tests; `cargo xtask sim` runs more.
const SEEDS: u64 = 12;
/// Seeds from which on every transition and every fault must have occurred.
const COMPLETE_FROM: u64 = 200;

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={text}: expected a number")))
}

/// Runs seeds side by side; each has a world of its own.
fn run(first: u64, count: u64) -> (Coverage, Vec<u64>) {
    let next = AtomicU64::new(0);
    let found = Mutex::new((Coverage::default(), Vec::new()));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return;
            }
            let seed = first.wrapping_add(at);
            let run = std::panic::catch_unwind(|| World::storm(seed));
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            match run {
                Ok(run) => found.0.add(&run.coverage),
                Err(_) => {
                    eprintln!("seed {seed} failed: cargo xtask sim --seeds 1 --seed {seed}");
                    found.1.push(seed);
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn whatever_happens_nothing_is_wrong_and_everything_heals() {
    let count = variable("RERAIL_SIM_SEEDS").unwrap_or(SEEDS);
    let first = variable("RERAIL_SIM_SEED").unwrap_or(1);
    let (all, failed) = run(first, count);
    println!("{all}");
    assert!(failed.is_empty(), "failing seeds: {failed:?}");
    let missing = all.missing();
    assert!(
        count < COMPLETE_FROM || missing.is_empty(),
        "never happened in {count} seeds: {missing:?}"
    );
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_one_another() {
    let seed = variable("RERAIL_SIM_SEED").unwrap_or(7);
    let first = World::storm(seed);
    let again = World::storm(seed);
    for (at, (one, other)) in first.trace.iter().zip(&again.trace).enumerate() {
        assert_eq!(one, other, "line {at} of seed {seed}");
    }
    assert_eq!(first.trace.len(), again.trace.len());
    assert_eq!(first.fabric, again.fabric, "the fabric's own trace");
    assert_ne!(first.trace, World::storm(seed + 1).trace);
}
