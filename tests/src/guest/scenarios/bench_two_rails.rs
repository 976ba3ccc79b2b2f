//! With two NICs a side, both carry work.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::bench::{Load, Side, Target};
use crate::guest::Scenario;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bench_uses_both_rails",
    full_only: false,
    limit: Duration::from_secs(180),
    body,
};

const MIB: u64 = 1024 * 1024;

fn body() -> Result<()> {
    let target = Target::start(&Side::rdma("target", &["rxe_a0", "rxe_b0"]), 16 * MIB)?;
    let initiator = Side::rdma("initiator", &["rxe_a1", "rxe_b1"]);
    let load = Load::verified("write", MIB, 64 * MIB);
    let report = load.run(&initiator, target.segment(), Duration::from_secs(120))?;
    report.expect_clean(64 * MIB)?;
    for device in ["rxe_a1", "rxe_b1"] {
        let carried: u64 =
            report.rails.iter().filter(|rail| rail.local == device).map(|rail| rail.bytes).sum();
        ensure!(carried >= 8 * MIB, "{device} carried {carried} bytes only: {:?}", report.rails);
    }
    target.stop()
}
