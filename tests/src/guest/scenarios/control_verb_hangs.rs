//! A device whose control verbs hang while its path fails, through an interposer over the real
//! library: the other rail goes on as fast as it does alone, and the device is opened again once it
//! can be.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::guest::Scenario;
use crate::guest::rig::{A1, B1, Nic};
use crate::guest::scenarios::interposer::interpose;
use crate::guest::traffic::{Plan, Traffic, is_of, is_rail};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "control_verbs_that_hang_cost_their_device_only",
    full_only: false,
    limit: Duration::from_secs(240),
    body,
};

const WITHIN: Duration = Duration::from_secs(30);
/// How long control verbs hang, at least.
const HANGS: Duration = Duration::from_secs(10);
/// Rates that are measured in a row, and over how long each.
const RATES: u32 = 16;
const RATE_OVER: Duration = Duration::from_millis(500);
/// What the other NIC must keep of its throughput. The target is 0.95, on a machine that does
/// nothing else; the emulated one shares its processors with whatever runs beside it.
const KEPT_MIN: f64 = 0.5;
/// The longest stall.
const STALL_MAX: Duration = Duration::from_millis(1_500);

fn body() -> Result<()> {
    let dir = TempDir::new()?;
    let mut plan = Plan::both_rails(60);
    let faults = interpose(dir.path(), &mut plan)?;
    let traffic = Traffic::start(&plan)?;
    let (device, hang) = (A1.device(), faults.join(format!("hang-{}", A1.device())));
    let log = &traffic.own_log;
    // What the other NIC does alone, and nothing is wrong.
    let mark = log.mark()?;
    A1.down()?;
    log.wait("rail a is down", WITHIN, mark, |event| is_rail(event, &device, "down"))?;
    let alone = median_rate(B1)?;
    let mark = log.mark()?;
    A1.up()?;
    log.wait("rail a is up", WITHIN, mark, |event| is_rail(event, &device, "up"))?;

    let mark = log.mark()?;
    std::fs::write(&hang, "")?;
    let since = Instant::now();
    // The path fails, so that the engine wants to stop queue pairs and cannot.
    A1.impair_inbound("netem loss 100%")?;
    log.wait("the device is given up", WITHIN, mark, |event| {
        is_of(event, "context_released", &device)
    })?;
    let beside = median_rate(B1)?;
    sleep(HANGS.saturating_sub(since.elapsed()));
    let mark = log.mark()?;
    std::fs::remove_file(&hang)?;
    A1.impair_inbound("netem loss 0%")?;
    log.wait("the rail is up again", WITHIN, mark, |event| is_rail(event, &device, "up"))?;
    let outcome = traffic.finish()?;
    let other = outcome.own.iter().filter(|event| is_of(event, "context_released", "rxe_b1"));
    ensure!(other.count() == 0, "the other device was given up, too");
    let kept = beside / alone;
    println!(
        "the other NIC: {:.2} MB/s alone, {:.2} MB/s beside the hanging one: {kept:.2}",
        alone / 1e6,
        beside / 1e6
    );
    ensure!(kept >= KEPT_MIN, "the other NIC kept {kept:.2} of its throughput");
    outcome.expect_flow(STALL_MAX)
}

/// Median of what a NIC sends in a second, by the counter of its interface.
fn median_rate(nic: Nic) -> Result<f64> {
    let sent = || -> Result<u64> {
        let file = format!("/sys/class/net/{}/statistics/tx_bytes", nic.name);
        let text = std::fs::read_to_string(&file).context(file)?;
        Ok(text.trim().parse()?)
    };
    let mut rates = Vec::new();
    for _ in 0..RATES {
        let (before, since) = (sent()?, Instant::now());
        sleep(RATE_OVER);
        rates.push((sent()? - before) as f64 / since.elapsed().as_secs_f64());
    }
    rates.sort_by(f64::total_cmp);
    Ok(rates[rates.len() / 2])
}
