//! One rail loses everything for ten seconds, without an event.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;

use crate::guest::Scenario;
use crate::guest::rig::A1;
use crate::guest::traffic::{Plan, Traffic};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "silent_loss",
    full_only: false,
    limit: Duration::from_secs(120),
    body,
};

fn body() -> Result<()> {
    let traffic = Traffic::start(&Plan::both_rails(16))?;
    A1.impair_inbound("netem loss 100%")?;
    sleep(Duration::from_secs(10));
    A1.impair_inbound("netem loss 0%")?;
    traffic.finish()?.expect_flow(Duration::from_millis(1_500))
}
