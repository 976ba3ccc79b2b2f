//! One of two targets is told to stop: it withdraws and goes, and the other is not disturbed.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::bench::{Amount, Load, Side, Target};
use crate::child;
use crate::guest::Scenario;
use crate::guest::traffic::{Plan, Traffic};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "sigterm_of_one_of_two_targets",
    full_only: false,
    limit: Duration::from_secs(150),
    body,
};

fn body() -> Result<()> {
    let traffic = Traffic::start(&Plan::both_rails(16))?;
    let side = |name: &str, devices: &[&str]| {
        let mut side = Side::rdma(name, devices).with_metadata(traffic.store.url());
        side.env = vec![("MC_TCP_BIND_ADDRESS".to_owned(), "127.0.0.1".to_owned())];
        side
    };
    let leaving = Target::start(&side("leaving", &["rxe_a0", "rxe_b0"]), 16 << 20)?;
    let load = Load {
        operation: "write",
        block_bytes: 64 << 10,
        batch: 4,
        threads: 1,
        amount: Amount::Seconds(60),
        verify: false,
    };
    let second = side("second", &["rxe_a1", "rxe_b1"]);
    let running = load.start(&second, leaving.segment(), Duration::from_secs(60))?;
    sleep(Duration::from_secs(3));
    // Ends by itself, within its time for draining.
    leaving.stop()?;
    let output = running.output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "an initiator without a target went on");
    println!("the initiator of the target that left: {}", text.lines().last().unwrap_or_default());
    let mut get = child::rerail()?;
    get.args(["metadata", "get", "--metadata", traffic.store.url(), "mooncake/ram/leaving"]);
    let record = child::output_within(get, Duration::from_secs(20))?;
    ensure!(!record.status.success(), "the record of the target that left is still there");
    traffic.finish()?.expect_flow(Duration::from_millis(1_500))
}
