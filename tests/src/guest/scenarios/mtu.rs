//! Interfaces whose MTUs differ, in both orders, and one that changes under traffic without an
//! event.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::bench::{Load, Side, Target};
use crate::guest::Scenario;
use crate::guest::rig::{A0, A1, Nic, ip};
use crate::guest::traffic::{Plan, Traffic};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "mtus_that_differ_and_change",
    full_only: true,
    limit: Duration::from_secs(240),
    body,
};

const SMALL: u32 = 1500;
const LARGE: u32 = 4200;

fn body() -> Result<()> {
    for (target, initiator) in [(SMALL, LARGE), (LARGE, SMALL)] {
        set(A0, target)?;
        set(A1, initiator)?;
        let side = Side::rdma("target", &["rxe_a0"]);
        let running = Target::start(&side, 16 << 20)?;
        for operation in ["write", "read"] {
            let load = Load::verified(operation, 100_001, 4 << 20);
            let own = Side::rdma("initiator", &["rxe_a1"]);
            let report = load.run(&own, running.segment(), Duration::from_secs(60))?;
            let what = format!("{operation} with MTUs {target} and {initiator}");
            report.expect_clean(4 << 20).context(what)?;
        }
        running.stop()?;
    }
    for nic in [A0, A1] {
        set(nic, LARGE)?;
    }
    let traffic = Traffic::start(&Plan::both_rails(20))?;
    set(A0, SMALL)?;
    sleep(Duration::from_secs(6));
    set(A0, LARGE)?;
    sleep(Duration::from_secs(3));
    traffic.finish()?.expect_flow(Duration::from_millis(2_500))
}

fn set(nic: Nic, mtu: u32) -> Result<()> {
    ip(&format!("link set {} mtu {mtu}", nic.name))
}
