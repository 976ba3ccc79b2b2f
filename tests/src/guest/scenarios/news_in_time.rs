//! How long news of a port that fails takes on real verbs: until the gate is closed, the endpoints
//! are cut, the record is stored, and a subscribed peer has taken it in.
//!
//! The port goes down by a write to sysfs, so that no program has to start between the reading of
//! the clock and the event. `cargo xtask bench events` measures the same without a kernel.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::guest::Scenario;
use crate::guest::rig::{A0, Nic};
use crate::guest::traffic::{Plan, Traffic, is_of, time_ms};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "news_of_a_port_is_told_in_time",
    full_only: true,
    limit: Duration::from_secs(400),
    body,
};

const ROUNDS: usize = 30;
const WITHIN: Duration = Duration::from_secs(20);
/// Bit of an interface's flags.
const IFF_UP: u32 = 1;
/// What the medians may be at most on processors that are emulated and shared, the first from the
/// event on: the kernel tells of it tens of milliseconds after the interface was taken down. The
/// targets for a machine of one's own are 1, 50 and 100 ms.
const GATE_MAX_MS: f64 = 10.0;
const TOLD_MAX_MS: f64 = 1_000.0;

fn body() -> Result<()> {
    let traffic = Traffic::start(&Plan::both_rails(240))?;
    let (device, log) = (A0.device(), &traffic.target_log);
    let steps = ["event read", "gate closed", "endpoints cut", "record stored", "peer's cache"];
    let mut times = vec![Vec::new(); steps.len()];
    for _ in 0..ROUNDS {
        settle(&traffic)?;
        let mark = log.mark()?;
        let failed = now_ms();
        set_down(A0)?;
        let seen = log.wait(steps[0], WITHIN, mark, |event| {
            is_of(event, "seen", &device) && event["kind"] == "PORT_ERR"
        })?;
        let gate = log.wait(steps[1], WITHIN, mark, |event| {
            is_of(event, "gate_closed", &device)
        })?;
        let cut = log.wait(steps[2], WITHIN, mark, |event| {
            is_of(event, "endpoints_cut", &device)
        })?;
        // The first record without the port.
        let edited = log.wait("the record is edited", WITHIN, mark, |event| {
            event["event"] == "edited" && time_ms(event).ok() >= time_ms(&gate).ok()
        })?;
        let has = |event: &Value, kind: &str| {
            event["event"] == kind && event["generation"].as_u64() >= edited["generation"].as_u64()
        };
        let stored = log.wait(steps[3], WITHIN, mark, |event| has(event, "published"))?;
        let known = log.wait(steps[4], WITHIN, mark, |event| has(event, "peer_told"))?;
        for (event, times) in [seen, gate, cut, stored, known].iter().zip(&mut times) {
            times.push(time_ms(event)? - failed);
        }
        let mark = log.mark()?;
        A0.up()?;
        log.wait("the gate is open", WITHIN, mark, |event| {
            is_of(event, "gate_opened", &device)
        })?;
    }
    traffic.stop_initiator()?;
    println!("from the fault, {ROUNDS} rounds:       p50        p99");
    let mut medians = Vec::new();
    for (what, times) in steps.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        let at = |percent: usize| times[(times.len() - 1) * percent / 100];
        println!("{what:24} {:9.3} ms {:9.3} ms", at(50), at(99));
        medians.push(at(50));
    }
    let gate = medians[1] - medians[0];
    ensure!(gate < GATE_MAX_MS, "the gate closes {gate} ms after the event");
    ensure!(medians[4] < TOLD_MAX_MS, "the peer knows after {} ms", medians[4]);
    Ok(())
}

/// Waits until the target has stored and told everything of the round before.
fn settle(traffic: &Traffic) -> Result<()> {
    let last = |events: &[Value], kind: &str| {
        let of_kind = events.iter().rev().find(|event| event["event"] == kind);
        of_kind.and_then(|event| event["generation"].as_u64())
    };
    let begin = std::time::Instant::now();
    loop {
        let events = traffic.target_log.all()?;
        let edited = last(&events, "edited");
        if edited.is_none_or(|edited| {
            last(&events, "published") >= Some(edited) && last(&events, "peer_told") >= Some(edited)
        }) {
            return Ok(());
        }
        ensure!(begin.elapsed() < WITHIN, "the record is not told: {edited:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Takes the interface down without starting a program.
fn set_down(nic: Nic) -> Result<()> {
    let file = format!("/sys/class/net/{}/flags", nic.name);
    let flags = fs::read_to_string(&file).with_context(|| file.clone())?;
    let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16)?;
    fs::write(&file, format!("{:#x}", flags & !IFF_UP)).context(file)
}

/// The machine's monotonic clock.
fn now_ms() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 / 1e6
}
