//! What both scenarios of a renumbered port have in common.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::guest::rig::Nic;
use crate::guest::traffic::{Plan, Traffic};

const WITHIN: Duration = Duration::from_secs(20);

/// The new address as a GID, in the form of records.
const NEW_GID: &str = "00:00:00:00:00:00:00:00:00:00:ff:ff:c0:a8:4d:0b";

/// Gives `nic` the address .11 while bytes move. `segment` is whose record has the NIC, if the
/// store keeps it.
pub(super) fn renumber(nic: Nic, segment: &str) -> Result<()> {
    let traffic = Traffic::start(&Plan::both_rails(14))?;
    sleep(Duration::from_secs(1));
    nic.renumber(&nic.address(), "192.168.77.11")?;
    let is_new = |record: &serde_json::Value| {
        record["value"]["name"] == segment && gids(record).iter().any(|gid| gid == NEW_GID)
    };
    let begin = std::time::Instant::now();
    while !traffic.records()?.iter().any(is_new) {
        ensure!(
            begin.elapsed() < WITHIN,
            "the new GID is not published: {:?}",
            traffic.records()?
        );
        sleep(Duration::from_millis(20));
    }
    println!(
        "published {} ms after the change at the latest",
        begin.elapsed().as_millis()
    );
    let outcome = traffic.finish()?;
    outcome.expect_flow(Duration::from_secs(2))?;
    // Every write of it, as the store logged it.
    let mut last = 0;
    let mut first_with_new = None;
    for record in outcome
        .records
        .iter()
        .filter(|record| record["value"]["name"] == segment)
    {
        let generation = record["value"]["rerail"]["generation"]
            .as_u64()
            .unwrap_or(0);
        ensure!(generation >= last, "generation {generation} after {last}");
        if first_with_new.is_none() && gids(record).iter().any(|gid| gid == NEW_GID) {
            ensure!(
                generation > last,
                "the new GID came without a new generation: {record}"
            );
            first_with_new = Some(generation);
        }
        last = generation;
        for gid in gids(record) {
            ensure!(
                !gid.starts_with("fe:80"),
                "a link-local GID was published: {record}"
            );
        }
    }
    ensure!(
        first_with_new.is_some_and(|generation| generation > 1),
        "no later generation with the new GID was stored"
    );
    Ok(())
}

fn gids(record: &serde_json::Value) -> Vec<String> {
    let devices = record["value"]["devices"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let gid = |device: &serde_json::Value| device["gid"].as_str().map(str::to_owned);
    devices.iter().filter_map(gid).collect()
}
