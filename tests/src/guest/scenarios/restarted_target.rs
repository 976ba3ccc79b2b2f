//! The target is killed and started again under its name: requests to the dead process end with
//! that reason soon after the new record is there, and new ones work.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::bench::{Amount, Load, Side, Target};
use crate::guest::Scenario;
use crate::store::HttpStore;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "a_target_that_is_killed_and_restarted_is_another_peer",
    full_only: false,
    limit: Duration::from_secs(150),
    body,
};

const BUFFER_BYTES: u64 = 16 << 20;
/// How long an initiator may go on after the record of the new target is in the store.
const NOTICED_WITHIN: Duration = Duration::from_secs(3);

fn body() -> Result<()> {
    let dir = TempDir::new()?;
    let store = HttpStore::start(&dir.path().join("store"))?;
    let side = |name: &str, devices: &[&str]| {
        let mut side = Side::rdma(name, devices).with_metadata(store.url());
        side.env = vec![("MC_TCP_BIND_ADDRESS".to_owned(), "127.0.0.1".to_owned())];
        side
    };
    let (target, initiator) = (
        side("target", &["rxe_a0", "rxe_b0"]),
        side("initiator", &["rxe_a1", "rxe_b1"]),
    );
    let first = Target::start(&target, BUFFER_BYTES)?;
    let load = Load {
        operation: "write",
        block_bytes: 256 << 10,
        batch: 4,
        threads: 1,
        amount: Amount::Seconds(60),
        verify: false,
    };
    let running = load.start(&initiator, first.segment(), Duration::from_secs(60))?;
    std::thread::sleep(Duration::from_secs(5));
    first.kill();
    let second = Target::start(&target, BUFFER_BYTES)?;
    let begin = Instant::now();
    let output = running.output()?;
    let took = begin.elapsed();
    println!("the initiator ended {} ms after the new target was ready", took.as_millis());
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "an initiator of a dead process went on");
    ensure!(text.contains("restarted"), "it does not say why it failed: {text}");
    ensure!(took < NOTICED_WITHIN, "it was noticed only after {took:?}: {text}");
    let load = Load::verified("write", 256 << 10, 16 << 20);
    let report = load.run(&initiator, second.segment(), Duration::from_secs(60))?;
    report.expect_clean(16 << 20).context("towards the new process")?;
    second.stop()
}
