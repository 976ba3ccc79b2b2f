//! After a hundred flaps of a port, under traffic, both processes hold exactly what they held
//! before: verbs objects, descriptors and threads; and as much memory, but for what an allocator
//! keeps.
//!
//! "Before" is after some flaps, when whatever is made once is made. Which of the four rails are
//! connected depends on the traffic: there are exactly the queue pairs of those that are up.
//! Threads of the pool for blocking work and idle connections to the store come and go by
//! themselves, so that each count is the lowest within a window that is longer than those live
//! unused. A leak of one object in a hundred flaps is seen.

use std::collections::BTreeMap;
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::guest::Scenario;
use crate::guest::rig::{A1, run};
use crate::guest::traffic::{Plan, Traffic, is_rail};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "after_a_hundred_flaps_everything_is_where_it_was",
    full_only: true,
    limit: Duration::from_secs(1_500),
    body,
};

const FLAPS: usize = 100;
/// Flaps before the first count.
const WARM_UP: usize = 20;
/// Frequent flaps are damped, for a minute at most.
const BACK_WITHIN: Duration = Duration::from_secs(90);
/// For how long the lowest counts are looked for: an HTTP client keeps an idle connection for 90 s.
const WINDOW: Duration = Duration::from_secs(100);
/// Until what was cut is gone at both ends, and what is idle as well.
const SETTLED_WITHIN: Duration = Duration::from_secs(250);
/// What resident memory may grow by, in percent: what an allocator keeps. Measured was 1 %, all of
/// it within the first fifty flaps.
const MEMORY_GROWTH_MAX_PERCENT: u64 = 3;
/// Verbs objects as `rdma resource show` names them.
const OBJECTS: [&str; 6] = ["ctx", "pd", "cq", "qp", "mr", "srq"];

/// What a rail has: two queue pairs at each end.
const PAIRS_OF_RAIL: usize = 4;
const PAIRS: &str = "qp";
const NO_RAIL: &str = "queue pairs of no rail that is up";

/// What is held, by its name: verbs objects on all devices, descriptors and threads by process.
/// Nobody but the two has verbs objects meanwhile, except the kernel. Objects are not told apart by
/// process: the kernel does not name the one whose thread has ended.
type Held = BTreeMap<String, usize>;

fn body() -> Result<()> {
    let kernel = objects()?;
    let mut traffic = Traffic::start(&Plan::both_rails(1_400))?;
    let processes = [
        ("initiator", traffic.initiator_pid()),
        ("target", traffic.target.process().pid()),
    ];
    flap(&traffic, WARM_UP)?;
    let begin = Instant::now();
    let before = loop {
        let lowest = lowest(&traffic, &processes, &kernel)?;
        if lowest.get(NO_RAIL) == Some(&0) {
            break lowest;
        }
        ensure!(begin.elapsed() < SETTLED_WITHIN, "before the flaps: {lowest:?}");
    };
    let memory_before = memory_kib(&processes)?;
    println!("before: {before:?}, resident KiB {memory_before:?}");
    for _ in 0..FLAPS / 20 {
        flap(&traffic, 20)?;
        println!("20 flaps more, resident KiB {:?}", memory_kib(&processes)?);
    }
    let begin = Instant::now();
    let after = loop {
        let after = lowest(&traffic, &processes, &kernel)?;
        let differs = difference(&before, &after);
        if differs.is_empty() {
            break after;
        }
        println!("not yet: {differs}");
        ensure!(begin.elapsed() < SETTLED_WITHIN, "not as before: {differs}");
    };
    let memory = memory_kib(&processes)?;
    println!("after:  {after:?}, resident KiB {memory:?}");
    for (before, after) in memory_before.iter().zip(&memory) {
        ensure!(
            *after <= before + before * MEMORY_GROWTH_MAX_PERCENT / 100,
            "resident memory grew from {before} to {after} KiB"
        );
    }
    traffic.stop_initiator()
}

/// Takes `a1` down and up so many times, and waits until its rail works again.
fn flap(traffic: &Traffic, times: usize) -> Result<()> {
    let mark = traffic.own_log.mark()?;
    for _ in 0..times {
        A1.down()?;
        sleep(Duration::from_millis(100));
        A1.up()?;
        sleep(Duration::from_millis(200));
    }
    let active = traffic.own_log.mark()?;
    ensure!(active > mark, "nothing was seen of the flaps");
    traffic
        .own_log
        .wait("the rail is up again", BACK_WITHIN, active, |event| {
            is_rail(event, &A1.device(), "up")
        })
        .map(drop)
}

/// The lowest counts within a window.
fn lowest(traffic: &Traffic, processes: &[(&str, u32)], kernel: &Held) -> Result<Held> {
    let begin = Instant::now();
    let mut lowest = Held::new();
    while begin.elapsed() < WINDOW || lowest.is_empty() {
        sleep(Duration::from_millis(500));
        let Some(held) = held(traffic, processes, kernel)? else {
            continue;
        };
        for (what, count) in held {
            let low = lowest.entry(what).or_insert(count);
            *low = count.min(*low);
        }
    }
    Ok(lowest)
}

/// What is held now; nothing if a rail changed meanwhile.
fn held(traffic: &Traffic, processes: &[(&str, u32)], kernel: &Held) -> Result<Option<Held>> {
    let rails = rails_up(traffic)?;
    let mut held = objects()?;
    if rails_up(traffic)? != rails {
        return Ok(None);
    }
    for (object, count) in &mut held {
        *count -= kernel.get(object).unwrap_or(&0);
    }
    let pairs = held.remove(PAIRS).context("no count of queue pairs")?;
    let of_rails = rails * PAIRS_OF_RAIL;
    let of_none = pairs.checked_sub(of_rails);
    let of_none = of_none.with_context(|| format!("{rails} rails are up on {pairs} queue pairs"))?;
    held.insert(NO_RAIL.to_owned(), of_none);
    for (name, pid) in processes {
        for (what, dir) in [("descriptors", "fd"), ("threads", "task")] {
            let dir = format!("/proc/{pid}/{dir}");
            let count = fs::read_dir(&dir).context(dir)?.count();
            held.insert(format!("{name}'s {what}"), count);
        }
    }
    Ok(Some(held))
}

/// Verbs objects on all devices.
fn objects() -> Result<Held> {
    let count = |object: &str| -> Result<_> {
        let shown = run("rdma", &format!("-j resource show {object}"))?;
        let shown: Value = serde_json::from_str(&shown).context("`rdma resource show`")?;
        let shown = shown.as_array().context("`rdma resource show` shows no list")?;
        Ok((object.to_owned(), shown.len()))
    };
    OBJECTS.into_iter().map(count).collect()
}

/// Rails that are up by the initiator's events.
fn rails_up(traffic: &Traffic) -> Result<usize> {
    let mut states = BTreeMap::new();
    for event in traffic.own_log.all()? {
        if event["event"] == "rail" {
            let rail = (event["local"].to_string(), event["peer"].to_string());
            states.insert(rail, event["to"] == "up");
        }
    }
    Ok(states.values().filter(|up| **up).count())
}

/// What differs.
fn difference(before: &Held, after: &Held) -> String {
    let differs = before.iter().filter(|(what, count)| after.get(*what) != Some(count));
    let lines: Vec<_> = differs
        .map(|(what, count)| format!("{what} {count} -> {:?}", after.get(what)))
        .collect();
    lines.join(", ")
}

fn memory_kib(processes: &[(&str, u32)]) -> Result<Vec<u64>> {
    let resident = |(_, pid): &(&str, u32)| -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        kib.context("no VmRSS")
    };
    processes.iter().map(resident).collect()
}
