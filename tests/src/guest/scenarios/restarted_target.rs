//! The target is killed and started again under its name: requests to the dead process end with
//! that reason soon after the new record is seen, and new ones work.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::bench::{Amount, Load, Side, Target};
use crate::guest::Scenario;
use crate::guest::traffic::{EventLog, between_ms, lines};
use crate::store::HttpStore;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "a_target_that_is_killed_and_restarted_is_another_peer",
    full_only: false,
    limit: Duration::from_secs(150),
    body,
};

const BUFFER_BYTES: u64 = 16 << 20;
/// How long after the new record was seen all requests to the dead process have ended, but for
/// those of which work was in flight when its rails failed: a dead process confirms no fence, so
/// that they end when the two seconds are over that a packet may live.
const ENDED_WITHIN_MS: f64 = 1_000.0;
const FENCED_WITHIN_MS: f64 = 2_000.0 + ENDED_WITHIN_MS;

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
    let log = EventLog::new(dir.path().join("initiator.events"));
    let mut logging = initiator.clone();
    logging.events = Some(log.path().to_owned());
    let running = load.start(&logging, first.segment(), Duration::from_secs(60))?;
    std::thread::sleep(Duration::from_secs(5));
    first.kill();
    let second = Target::start(&target, BUFFER_BYTES)?;
    let output = running.output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "an initiator of a dead process went on");
    ensure!(text.contains("restarted"), "it does not say why it failed: {text}");
    let events = log.all()?;
    let last = |kind: &str| {
        let found = events.iter().rev().find(|event| event["event"] == kind);
        found.with_context(|| format!("no event {kind}:\n{}", lines(&events)))
    };
    let cut = events.iter().rev().find(|event| event["event"] == "rail" && event["from"] == "up");
    let cut = cut.with_context(|| format!("no rail has failed:\n{}", lines(&events)))?;
    let ended = last("finished")?;
    let (took, since_cut) = (between_ms(last("peer_record")?, ended)?, between_ms(cut, ended)?);
    println!("all requests ended {took:.0} ms after the new record, {since_cut:.0} ms after the cut");
    if took >= ENDED_WITHIN_MS && since_cut >= FENCED_WITHIN_MS {
        bail!("they ended only {took:.0} ms after the new record was seen:\n{}", lines(&events));
    }
    // Towards the new process everything works.
    let load = Load::verified("write", 256 << 10, 16 << 20);
    let report = load.run(&initiator, second.segment(), Duration::from_secs(60))?;
    report.expect_clean(16 << 20).context("towards the new process")?;
    second.stop()
}
