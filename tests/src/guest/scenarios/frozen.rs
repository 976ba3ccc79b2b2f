//! Processes that are stopped for ten seconds and go on: initiator, target, store. Nothing fails
//! that need not, no storm of errors follows, and no record is stale afterwards.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::child::signal;
use crate::guest::Scenario;
use crate::guest::traffic::{Plan, Traffic, lines};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "frozen_processes_go_on",
    full_only: false,
    limit: Duration::from_secs(240),
    body,
};

const FROZEN: Duration = Duration::from_secs(10);
/// Endpoints that a freeze may cost: a few a rail, not thousands.
const ERRORS_MAX: u64 = 40;

fn body() -> Result<()> {
    for who in ["initiator", "target", "store"] {
        println!("freezing the {who}");
        let mut traffic = Traffic::start(&Plan::both_rails(20))?;
        let pid = match who {
            "initiator" => traffic.initiator_pid(),
            "target" => traffic.target.process().pid(),
            _ => traffic.store.pid(),
        };
        signal(pid, "STOP")?;
        sleep(FROZEN);
        signal(pid, "CONT")?;
        let outcome = traffic.finish()?;
        // A frozen process still answers on the wire: soft-RoCE works in the kernel.
        let stall = if who == "initiator" { FROZEN } else { Duration::ZERO };
        outcome.expect_flow(stall + Duration::from_secs(2))?;
        let errors: u64 = outcome.report.rails.iter().map(|rail| rail.errors).sum();
        ensure!(
            errors <= ERRORS_MAX,
            "{errors} errors after the {who} was frozen:\n{}",
            lines(&outcome.own)
        );
    }
    Ok(())
}
