//! Events behind which nothing is different: an address that comes and goes, an unrelated row at a
//! lower index, forty events in a row. Endpoints are kept and nothing is published.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::guest::Scenario;
use crate::guest::rig::{A0, A1, Nic, eventually, ip, ip_batch};
use crate::guest::traffic::{Plan, Traffic, lines};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "nothing_changed",
    full_only: false,
    limit: Duration::from_secs(120),
    body,
};

const ROUNDS: usize = 20;

/// The unrelated address below the one in use, and the one that takes its row.
const BELOW: [(&str, &str); 2] = [
    ("fd77::1", "fd77:0000:0000:0000:0000:0000:0000:0001"),
    ("fd77::2", "fd77:0000:0000:0000:0000:0000:0000:0002"),
];

/// Puts an unrelated row below the one of the NIC's own address.
fn raise(nic: Nic) -> Result<()> {
    let (name, address) = (nic.name, nic.address());
    let absent = |gid: String| move || Ok(nic.row_of(&gid)?.is_none());
    let present = |gid: String| move || Ok(nic.row_of(&gid)?.is_some());
    // The table gives a new address the lowest free row.
    ip(&format!("addr del {address}/24 dev {name}"))?;
    eventually("its row is free", absent(nic.gid()))?;
    ip(&format!("addr add {}/64 dev {name} nodad", BELOW[0].0))?;
    eventually("the row is taken", present(BELOW[0].1.to_owned()))?;
    ip(&format!("addr add {address}/24 dev {name} noprefixroute"))?;
    eventually("the address is back", present(nic.gid()))?;
    is_below(nic, BELOW[0].1)
}

fn is_below(nic: Nic, gid: &str) -> Result<()> {
    let (below, own) = (nic.row_of(gid)?, nic.row_of(&nic.gid())?);
    ensure!(below.is_some() && below < own, "{gid} is in row {below:?}, ours in {own:?}");
    Ok(())
}

/// Frees the row and has another address take it.
fn replace_below(nic: Nic) -> Result<()> {
    let name = nic.name;
    ip(&format!("addr del {}/64 dev {name}", BELOW[0].0))?;
    eventually("the lower row is free", || Ok(nic.row_of(BELOW[0].1)?.is_none()))?;
    ip(&format!("addr add {}/64 dev {name} nodad", BELOW[1].0))?;
    eventually("it is taken again", || Ok(nic.row_of(BELOW[1].1)?.is_some()))?;
    is_below(nic, BELOW[1].1)
}

fn body() -> Result<()> {
    for nic in [A0, A1] {
        raise(nic)?;
    }
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
        replace_below(nic)?;
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
