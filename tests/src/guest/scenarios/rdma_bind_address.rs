//! NIC paths with a server name of their own at both ends (`MC_RDMA_BIND_ADDRESS`): traffic moves
//! to rail b when rail a is cut.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::bench::{Amount, Load, Side, Target};
use crate::guest::Scenario;
use crate::guest::rig::A1;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "rdma_bind_address_on_both_ends",
    full_only: true,
    limit: Duration::from_secs(120),
    body,
};

fn body() -> Result<()> {
    let side = |name: &str, devices: &[&str], address: &str| {
        let mut side = Side::rdma(name, devices);
        let variable = "MC_RDMA_BIND_ADDRESS".to_owned();
        side.env.push((variable, address.to_owned()));
        side
    };
    let target = side("target", &["rxe_a0", "rxe_b0"], "192.168.77.1");
    let target = Target::start(&target, 16 << 20)?;
    let initiator = side("initiator", &["rxe_a1", "rxe_b1"], "192.168.77.2");
    let load = Load {
        operation: "write",
        block_bytes: 256 << 10,
        batch: 4,
        threads: 1,
        amount: Amount::Seconds(14),
        verify: true,
    };
    let running = load.start(&initiator, target.segment(), Duration::from_secs(14))?;
    sleep(Duration::from_secs(5));
    A1.down()?;
    let report = running.report()?;
    report.expect_clean(1)?;
    ensure!(
        report.max_stall_ms < 1_500.0,
        "a stall of {} ms",
        report.max_stall_ms
    );
    let b = report.rails.iter().filter(|rail| rail.local == "rxe_b1");
    let b: u64 = b.map(|rail| rail.bytes).sum();
    ensure!(b > 0, "rail b carried nothing: {report:?}");
    target.stop()
}
