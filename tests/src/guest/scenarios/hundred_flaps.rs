//! After a hundred flaps of a port, under traffic, both processes hold what they held before:
//! descriptors and threads, up to a few that come and go, no more queue pairs than rails need, and
//! as much memory, but for what an allocator keeps.

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
    limit: Duration::from_secs(900),
    body,
};

const FLAPS: usize = 100;
/// Frequent flaps are damped, for a minute at most.
const BACK_WITHIN: Duration = Duration::from_secs(90);
/// Until what was cut is gone at both ends.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);
/// Two queue pairs at both ends of each of the four rails. How many of the rails are connected
/// before the first flap depends on the traffic; what leaks over a hundred flaps is more than all.
const QUEUE_PAIRS_MAX: usize = 16;
/// Descriptors and threads that come and go with the pool of blocking threads and connections to
/// the store.
const SLACK: usize = 4;
/// What an allocator may keep.
const MEMORY_GROWTH_MAX_KIB: u64 = 16 << 10;

/// What processes hold.
#[derive(Clone, Debug)]
struct Held {
    queue_pairs: usize,
    descriptors: Vec<usize>,
    threads: Vec<usize>,
}

fn body() -> Result<()> {
    let mut traffic = Traffic::start(&Plan::both_rails(600))?;
    let pids = [traffic.initiator_pid(), traffic.target.process().pid()];
    sleep(Duration::from_secs(5));
    let (before, memory_before) = (held(&pids)?, memory_kib(&pids)?);
    let mark = traffic.own_log.mark()?;
    for _ in 0..FLAPS {
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
        })?;
    let begin = Instant::now();
    let after = loop {
        let now = held(&pids)?;
        let within = |now: &[usize], before: &[usize]| {
            now.iter().zip(before).all(|(now, before)| *now <= before + SLACK)
        };
        let same = within(&now.descriptors, &before.descriptors)
            && within(&now.threads, &before.threads);
        if same && now.queue_pairs <= QUEUE_PAIRS_MAX {
            break now;
        }
        ensure!(
            begin.elapsed() < SETTLED_WITHIN,
            "held before: {before:?}, and after: {now:?}"
        );
        sleep(Duration::from_millis(500));
    };
    let memory = memory_kib(&pids)?;
    println!("before {before:?}, resident KiB {memory_before:?}");
    println!("after {after:?}, resident KiB {memory:?}");
    for (before, after) in memory_before.iter().zip(&memory) {
        ensure!(
            *after <= before + MEMORY_GROWTH_MAX_KIB,
            "resident memory grew from {before} to {after} KiB"
        );
    }
    traffic.stop_initiator()?;
    Ok(())
}

fn held(pids: &[u32]) -> Result<Held> {
    let count = |pid: &u32, what: &str| -> Result<usize> {
        let dir = format!("/proc/{pid}/{what}");
        Ok(fs::read_dir(&dir).context(dir)?.count())
    };
    let all = |what: &str| pids.iter().map(|pid| count(pid, what)).collect::<Result<_>>();
    let shown: Value = serde_json::from_str(&run("rdma", "-j resource show qp")?)?;
    let shown = shown.as_array().context("`rdma resource show` shows no list")?;
    // The kernel names the thread that made a queue pair, which is the device's control thread.
    let own = |pair: &&Value| {
        let thread = pair["pid"].as_u64().unwrap_or_default();
        pids.iter().any(|pid| fs::exists(format!("/proc/{pid}/task/{thread}")).unwrap_or(false))
    };
    let queue_pairs = shown.iter().filter(own).count();
    ensure!(queue_pairs > 0, "none of these is {pids:?}'s: {shown:?}");
    Ok(Held {
        queue_pairs,
        descriptors: all("fd")?,
        threads: all("task")?,
    })
}

fn memory_kib(pids: &[u32]) -> Result<Vec<u64>> {
    let resident = |pid: &u32| -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        kib.context("no VmRSS")
    };
    pids.iter().map(resident).collect()
}
