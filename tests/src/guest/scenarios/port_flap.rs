//! What both scenarios of a port that goes down and comes back have in common.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::guest::rig::{A1, Nic};
use crate::guest::traffic::{EventLog, Plan, Traffic, between_ms, is_of, is_rail};

/// How long the port is down.
const DOWN: Duration = Duration::from_secs(10);
/// How long anything may take that is not measured.
const WITHIN: Duration = Duration::from_secs(20);

/// Takes `nic` down and up while bytes move: nothing fails, and rail a is used again soon.
pub(super) fn flap(nic: Nic, log_of: impl Fn(&Traffic) -> &EventLog) -> Result<()> {
    let traffic = Traffic::start(&Plan::both_rails(24))?;
    let log = log_of(&traffic);
    let (mark, own_mark) = (log.mark()?, traffic.own_log.mark()?);
    nic.down()?;
    let closed = log.wait("the gate is closed", WITHIN, mark, |event| {
        is_of(event, "gate_closed", &nic.device())
    })?;
    sleep(DOWN);
    nic.up()?;
    let active = log.wait("the port is active", WITHIN, mark, |event| {
        is_of(event, "seen", &nic.device()) && event["kind"] == "PORT_ACTIVE"
    })?;
    let down = traffic
        .own_log
        .wait("the rail is down", WITHIN, own_mark, |event| {
            is_rail(event, &A1.device(), "down")
        })?;
    println!(
        "gate closed {:.1} ms before the rail is down",
        between_ms(&closed, &down)?
    );
    let up = |event: &serde_json::Value| {
        is_rail(event, &A1.device(), "up")
            && between_ms(&active, event).is_ok_and(|since| since > 0.0)
    };
    let up = traffic
        .own_log
        .wait("the rail is up again", WITHIN, own_mark, up)?;
    let back = between_ms(&active, &up)?;
    println!("rail a is up {back:.0} ms after PORT_ACTIVE");
    ensure!(
        back < 3_000.0,
        "rail a is up only {back:.0} ms after PORT_ACTIVE"
    );
    let outcome = traffic.finish()?;
    outcome.expect_flow(Duration::from_millis(1_500))?;
    let rails = outcome.report.rails.iter();
    let a = rails.filter(|rail| rail.local == A1.device() && rail.state == "up");
    a.map(|rail| rail.bytes)
        .max()
        .filter(|bytes| *bytes > 0)
        .with_context(|| {
            format!(
                "rail a carries nothing at the end: {:?}",
                outcome.report.rails
            )
        })?;
    Ok(())
}
