//! Events behind which nothing is different: an address that comes and goes, an unrelated row at a
//! lower index, forty events in a row. Endpoints are kept and nothing is published.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::guest::Scenario;
use crate::guest::rig::{A0, A1, ip_batch};
use crate::guest::traffic::{Plan, Traffic, lines};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "nothing_changed",
    full_only: false,
    limit: Duration::from_secs(120),
    body,
};

const ROUNDS: usize = 20;

fn body() -> Result<()> {
    let traffic = Traffic::start(&Plan::both_rails(14))?;
    sleep(Duration::from_millis(500));
    let records = traffic.records()?.len();
    let (own, target) = (traffic.own_log.mark()?, traffic.target_log.mark()?);
    for nic in [A0, A1] {
        let churn: String = (0..ROUNDS)
            .map(|round| {
                let (address, name) = (100 + round, nic.name);
                format!(
                    "addr add 192.168.77.{address}/24 dev {name} noprefixroute\n\
                     addr del 192.168.77.{address}/24 dev {name}\n"
                )
            })
            .collect();
        ip_batch(&churn)?;
    }
    sleep(Duration::from_secs(1));
    // The initiator may have ended meanwhile: that its record goes is no publication.
    let mut after = traffic.records()?.split_off(records);
    after.retain(|record| record["event"] == "put");
    let outcome = traffic.finish()?;
    outcome.expect_flow(Duration::from_millis(1_500))?;
    let names = |records: &[serde_json::Value]| -> Vec<String> {
        records.iter().map(|record| record["key"].to_string()).collect()
    };
    ensure!(after.is_empty(), "stored meanwhile: {:?}\n{}", names(&after), lines(&after));
    for (side, events, mark) in [("own", &outcome.own, own), ("target", &outcome.target, target)] {
        let seen = events[mark..].iter();
        let seen = seen.filter(|event| event["event"] == "seen" && event["kind"] == "GID_CHANGE");
        let seen = seen.count();
        println!("{side}: {seen} events");
        ensure!(seen >= 2 * ROUNDS, "{side} saw {seen} events only");
        // The engine's end is an end of its endpoints, too: only the NICs' gates are looked at.
        let gates = events[mark..].iter().filter(|event| event["event"] == "gate_closed");
        ensure!(gates.count() == 0, "{side} closed a gate:\n{}", lines(&events[mark..]));
    }
    Ok(())
}
