//! Both rails go down for five seconds: transfers wait, and go on.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::guest::Scenario;
use crate::guest::rig::{A1, B1};
use crate::guest::traffic::{Plan, Traffic, between_ms, is_rail};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "both_rails_down",
    full_only: false,
    limit: Duration::from_secs(150),
    body,
};

const DOWN: Duration = Duration::from_secs(5);
const WITHIN: Duration = Duration::from_secs(20);

fn body() -> Result<()> {
    let traffic = Traffic::start(&Plan::both_rails(18))?;
    A1.down()?;
    B1.down()?;
    sleep(DOWN);
    let mark = traffic.own_log.mark()?;
    A1.up()?;
    B1.up()?;
    let active = traffic.own_log.wait("a port is active", WITHIN, mark, |event| {
        event["event"] == "seen" && event["kind"] == "PORT_ACTIVE"
    })?;
    let up = traffic.own_log.wait("a rail is up", WITHIN, mark, |event| {
        is_rail(event, &A1.device(), "up") || is_rail(event, &B1.device(), "up")
    })?;
    let back = between_ms(&active, &up)?;
    println!("a rail is up {back:.0} ms after the first PORT_ACTIVE");
    ensure!(back < 3_000.0, "a rail is up only {back:.0} ms after the first PORT_ACTIVE");
    traffic.finish()?.expect_flow(DOWN + Duration::from_secs(3))
}
