//! Two rails in subnets that cannot reach each other: only pairs that can are used, and finding out
//! costs the first request little.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::bench::{Load, Side, Target};
use crate::guest::Scenario;
use crate::guest::rig::{B0, B1};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "rails_that_cannot_reach_each_other",
    full_only: false,
    limit: Duration::from_secs(120),
    body,
};

fn body() -> Result<()> {
    for nic in [B0, B1] {
        nic.move_to_subnet("192.168.78")?;
    }
    for operation in ["write", "read"] {
        let target = Target::start(&Side::rdma("target", &["rxe_a0", "rxe_b0"]), 16 << 20)?;
        let initiator = Side::rdma("initiator", &["rxe_a1", "rxe_b1"]);
        // One request, then many.
        let mut load = Load::verified(operation, 64 << 10, 64 << 10);
        load.batch = 1;
        let first = load.run(&initiator, target.segment(), Duration::from_secs(60))?;
        first.expect_clean(64 << 10)?;
        println!("first {operation}: {:.0} ms", first.max_stall_ms);
        ensure!(first.max_stall_ms < 2_000.0, "the first took {:.0} ms", first.max_stall_ms);
        let mut load = Load::verified(operation, 64 << 10, 8 << 20);
        load.batch = 1;
        let report = load.run(&initiator, target.segment(), Duration::from_secs(60))?;
        report.expect_clean(8 << 20)?;
        println!("{operation}: median {:.1} ms", report.p50_us / 1_000.0);
        ensure!(report.p50_us < 50_000.0, "the median took {} us", report.p50_us);
        for rail in report.rails.iter().filter(|rail| rail.bytes > 0) {
            let same = rail.local.contains("_a") == rail.peer.contains("_a");
            ensure!(same, "bytes went over a pair that cannot reach each other: {rail:?}");
        }
        target.stop()?;
    }
    Ok(())
}
