//! The store is away while the only rail is renumbered twice: nothing fails, and only the last
//! state is written.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::guest::Scenario;
use crate::guest::rig::A0;
use crate::guest::traffic::{Plan, Traffic};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "store_outage_through_two_renumberings",
    full_only: false,
    limit: Duration::from_secs(150),
    body,
};

const WITHIN: Duration = Duration::from_secs(20);
const BETWEEN: &str = "00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:4d:0b";
const LAST: &str = "00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:4d:0c";

fn body() -> Result<()> {
    let mut traffic = Traffic::start(&Plan::rail_a(24))?;
    let before = traffic.records()?.len();
    traffic.store.stop();
    A0.renumber(&A0.address(), "192.168.77.11")?;
    sleep(Duration::from_secs(4));
    A0.renumber("192.168.77.11", "192.168.77.12")?;
    sleep(Duration::from_secs(4));
    traffic.store.start_again()?;
    let has = |records: &[serde_json::Value], gid: &str| {
        records.iter().any(|record| record.to_string().contains(gid))
    };
    let begin = Instant::now();
    while !has(&traffic.records()?, LAST) {
        ensure!(begin.elapsed() < WITHIN, "the last state is not stored: {:?}", traffic.records()?);
        sleep(Duration::from_millis(50));
    }
    println!("stored {} ms after the store is back", begin.elapsed().as_millis());
    let outcome = traffic.finish()?;
    // One rail: between two addresses there is no path, and RTR to an unknown neighbour takes 1 s.
    outcome.expect_flow(Duration::from_secs(4))?;
    ensure!(!has(&outcome.records[before..], BETWEEN), "an overtaken state was written");
    Ok(())
}
