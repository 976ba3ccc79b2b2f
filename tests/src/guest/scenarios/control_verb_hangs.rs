//! A device whose control verbs hang while its path fails, through an interposer over the real
//! library: the other rail goes on, and the device is opened again once it can be.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};
use tempfile::TempDir;

use crate::guest::Scenario;
use crate::guest::rig::A1;
use crate::guest::scenarios::interposer::interpose;
use crate::guest::traffic::{Plan, Traffic, is_of, is_rail};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "control_verbs_that_hang_cost_their_device_only",
    full_only: false,
    limit: Duration::from_secs(180),
    body,
};

const WITHIN: Duration = Duration::from_secs(30);
/// How long control verbs hang.
const HANGS: Duration = Duration::from_secs(10);

fn body() -> Result<()> {
    let dir = TempDir::new()?;
    let mut plan = Plan::both_rails(30);
    let faults = interpose(dir.path(), &mut plan)?;
    let traffic = Traffic::start(&plan)?;
    let (device, hang) = (A1.device(), faults.join(format!("hang-{}", A1.device())));
    let mark = traffic.own_log.mark()?;
    std::fs::write(&hang, "")?;
    // The path fails, so that the engine wants to stop queue pairs and cannot.
    A1.impair_inbound("netem loss 100%")?;
    traffic
        .own_log
        .wait("the device is given up", WITHIN, mark, |event| {
            is_of(event, "context_released", &device)
        })?;
    sleep(HANGS);
    let mark = traffic.own_log.mark()?;
    std::fs::remove_file(&hang)?;
    A1.impair_inbound("netem loss 0%")?;
    traffic
        .own_log
        .wait("the rail is up again", WITHIN, mark, |event| {
            is_rail(event, &device, "up")
        })?;
    let outcome = traffic.finish()?;
    let other = outcome.own.iter().filter(|event| is_of(event, "context_released", "rxe_b1"));
    ensure!(other.count() == 0, "the other device was given up, too");
    outcome.expect_flow(Duration::from_millis(1_500))
}
