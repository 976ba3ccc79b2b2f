//! What soft-RoCE never does, through an interposer over the real library: a device dies, a
//! completion queue breaks, the event channel fails, at one end and at the other. The other rail
//! goes on, and the device is opened again. It works on all the while, so that whatever is left of
//! it is found out.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::guest::Scenario;
use crate::guest::rig::{A0, A1};
use crate::guest::scenarios::interposer::interpose;
use crate::guest::traffic::{EventLog, Plan, Traffic, is_of};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "devices_that_die_are_opened_again",
    full_only: false,
    limit: Duration::from_secs(240),
    body,
};

const WITHIN: Duration = Duration::from_secs(20);

/// Waits until a rail of the device is up, whichever; the target has no work, and so no rails.
fn wait_for_rail(log: &EventLog, device: &str) -> Result<()> {
    let begin = Instant::now();
    loop {
        let mut up = BTreeSet::new();
        for event in log.all()?.iter().filter(|event| is_of_rail(event, device)) {
            let peer = event["peer"].to_string();
            if event["to"] == "up" {
                up.insert(peer);
            } else {
                up.remove(&peer);
            }
        }
        if !up.is_empty() {
            return Ok(());
        }
        ensure!(begin.elapsed() < WITHIN, "not within {WITHIN:?}: a rail of {device} is up");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_of_rail(event: &Value, device: &str) -> bool {
    event["event"] == "rail" && event["local"] == device
}

fn body() -> Result<()> {
    let dir = TempDir::new()?;
    let mut plan = Plan::both_rails(40);
    let faults = interpose(dir.path(), &mut plan)?;
    plan.target_env = plan.initiator_env.clone();
    let traffic = Traffic::start(&plan)?;
    let (own, far) = (&traffic.own_log, &traffic.target_log);
    for (fault, log, nic) in [
        ("fatal", own, A1),
        ("cqerr", far, A0),
        ("cqerr", own, A1),
        ("eio", far, A0),
        ("eio", own, A1),
        ("fatal", far, A0),
    ] {
        let device = nic.device();
        println!("{fault} of {device}");
        let mark = log.mark()?;
        std::fs::write(faults.join(format!("{fault}-{device}")), "")?;
        for (what, kind) in [
            ("the device is given up", "context_released"),
            ("the device is open again", "context_reopened"),
        ] {
            log.wait(what, WITHIN, mark, |event| is_of(event, kind, &device))?;
        }
        wait_for_rail(own, &A1.device())?;
    }
    let outcome = traffic.finish()?;
    let all = outcome.own.iter().chain(&outcome.target);
    let others = all.filter(|event| {
        is_of(event, "context_released", "rxe_b1") || is_of(event, "context_released", "rxe_b0")
    });
    ensure!(others.count() == 0, "the other device was given up, too");
    outcome.expect_flow(Duration::from_millis(1_500))
}
