//! What soft-RoCE never does, through an interposer over the real library: a device dies, a
//! completion queue breaks, the event channel fails. The other rail goes on, and the device is
//! opened again.

use std::time::Duration;

use anyhow::{Result, ensure};
use tempfile::TempDir;

use crate::guest::Scenario;
use crate::guest::rig::A1;
use crate::guest::scenarios::interposer::interpose;
use crate::guest::traffic::{Plan, Traffic, is_of, is_rail};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "devices_that_die_are_opened_again",
    full_only: false,
    limit: Duration::from_secs(240),
    body,
};

const WITHIN: Duration = Duration::from_secs(20);

fn body() -> Result<()> {
    let dir = TempDir::new()?;
    let mut plan = Plan::both_rails(40);
    let faults = interpose(dir.path(), &mut plan)?;
    let traffic = Traffic::start(&plan)?;
    let device = A1.device();
    for fault in ["fatal", "cqerr", "eio"] {
        println!("{fault}");
        let mark = traffic.own_log.mark()?;
        std::fs::write(faults.join(format!("{fault}-{device}")), "")?;
        for (what, kind) in [
            ("the device is given up", "context_released"),
            ("the device is open again", "context_reopened"),
        ] {
            let log = &traffic.own_log;
            log.wait(what, WITHIN, mark, |event| is_of(event, kind, &device))?;
        }
        let reopened = traffic.own_log.mark()?;
        traffic
            .own_log
            .wait("the rail is up again", WITHIN, reopened, |event| {
                is_rail(event, &device, "up")
            })?;
    }
    let outcome = traffic.finish()?;
    let released = outcome.own.iter().filter(|event| is_of(event, "context_released", "rxe_b1"));
    ensure!(released.count() == 0, "the other device was given up, too");
    outcome.expect_flow(Duration::from_millis(1_500))
}
