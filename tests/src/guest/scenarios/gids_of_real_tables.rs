//! Real GID tables with rows of many kinds are ranked as design §5 says, and what is chosen
//! connects.

use std::net::Ipv6Addr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::bench::{Load, Side, Target};
use crate::child::{self, stdout_within};
use crate::guest::Scenario;
use crate::guest::rig::{self, A0, A1, Nic, ip};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "gids_of_vlan_macvlan_vxlan_two_subnets_and_ula_are_ranked_and_connect",
    full_only: false,
    limit: Duration::from_secs(240),
    body,
};

const MIB: u64 = 1024 * 1024;
const ONE_RUN: Duration = Duration::from_secs(120);
const SECOND_SUBNET: &str = "192.168.88.0/24";
const ULA_PREFIX: &str = "fd00:77::";

/// What was added to the rig is taken away again, however the scenario ends.
struct Added;

impl Drop for Added {
    fn drop(&mut self) {
        for (nic, host) in [(A0, 1), (A1, 2)] {
            let name = nic.name;
            for link in [format!("{name}.10"), format!("mv{name}"), format!("vxlan{name}")] {
                // One that was not made yet needs no removing.
                let _ = ip(&format!("link del {link}"));
            }
            let _ = ip(&format!("-6 addr del {ULA_PREFIX}{host}/64 dev {name}"));
        }
    }
}

fn body() -> Result<()> {
    let _added = Added;
    for (nic, host) in [(A0, 1), (A1, 2)] {
        let name = nic.name;
        let table = 100 + host;
        ip(&format!("link add link {name} name {name}.10 type vlan id 10"))?;
        ip(&format!("link add mv{name} link {name} type macvlan"))?;
        ip(&format!("link add vxlan{name} type vxlan id 4{host} dstport 4789 dev {name}"))?;
        for (link, subnet) in [("{}.10", "10.10"), ("mv{}", "10.20"), ("vxlan{}", "10.30")] {
            let link = link.replace("{}", name);
            ip(&format!("link set {link} up"))?;
            ip(&format!("addr add {subnet}.0.{host}/24 dev {link} noprefixroute"))?;
        }
        ip(&format!("addr add 192.168.88.{host}/24 dev {name} noprefixroute"))?;
        ip(&format!("-6 addr add {ULA_PREFIX}{host}/64 dev {name} nodad noprefixroute"))?;
        // Packets of the rig's hosts go over the wire, and not over `lo`.
        ip(&format!(
            "rule add pref 20 from 192.168.88.{host} to {SECOND_SUBNET} lookup {table}"
        ))?;
        ip(&format!("route replace {SECOND_SUBNET} dev {name} table {table}"))?;
    }
    for nic in [A0, A1] {
        rig::eventually("every address has its row", || {
            let rows = candidates(nic)?.1;
            let with = |part: &str| rows.iter().any(|row| row.gid.contains(part));
            let addresses = [":c0a8:4d", ":c0a8:58", ":0a0a:", ":0a14:", ":0a1e:", "fd00:0077:"];
            Ok(addresses.iter().all(|part| with(part)))
        })?;
        check(nic)?;
    }
    // What is chosen by itself, and what an operator chooses among the others. Rows of the VLAN and
    // of the ULA are ranked only: the rig has no routes for them.
    connects(&[])?;
    connects(&[("RERAIL_GID_SUBNETS", SECOND_SUBNET)])?;
    Ok(())
}

/// A row as `rerail gids` shows it.
#[derive(Debug)]
struct Row {
    index: u64,
    /// Eight groups of four digits.
    gid: String,
    netdev: String,
    class: f64,
    rank: Option<u64>,
}

/// The index of the chosen row, and all rows.
fn candidates(nic: Nic) -> Result<(u64, Vec<Row>)> {
    let mut command = child::rerail()?;
    command.args(["gids", "--device", &nic.device(), "--json"]);
    let object: Value = serde_json::from_str(stdout_within(command, ONE_RUN)?.trim())?;
    let row = |row: &Value| {
        let gid = row["gid"].as_str()?;
        let digits: String = gid.chars().filter(char::is_ascii_hexdigit).collect();
        let gid = match gid.parse::<Ipv6Addr>() {
            Ok(address) => groups(&address),
            Err(_) if digits.len() == 32 => {
                let bytes = u128::from_str_radix(&digits, 16).ok()?;
                groups(&Ipv6Addr::from_bits(bytes))
            }
            Err(_) => return None,
        };
        Some(Row {
            index: row["index"].as_u64()?,
            gid,
            netdev: row["ndev"].as_str().unwrap_or_default().to_owned(),
            class: row["class"].as_f64()?,
            rank: row["rank"].as_u64(),
        })
    };
    let rows = object["candidates"].as_array().context("no candidates")?;
    let rows: Option<Vec<Row>> = rows.iter().map(row).collect();
    let rows = rows.with_context(|| format!("a row of another form: {object}"))?;
    let selected = object["selected"]["index"].as_u64();
    Ok((selected.with_context(|| format!("nothing is chosen: {object}"))?, rows))
}

fn groups(address: &Ipv6Addr) -> String {
    let groups = address.segments().map(|group| format!("{group:04x}"));
    groups.join(":")
}

/// Classes and order by the words of design §5: class, then IPv4 before IPv6, then index.
fn check(nic: Nic) -> Result<()> {
    let (selected, mut rows) = candidates(nic)?;
    let expected = |row: &Row| {
        let link_local = row.gid.starts_with("fe80:");
        match (row.netdev.starts_with("vxlan"), link_local) {
            (false, false) => 0,
            (false, true) => 2,
            (true, false) => 4,
            (true, true) => 5,
        }
    };
    for row in &rows {
        ensure!(row.class == f64::from(expected(row)), "{}: {row:?}", nic.device());
    }
    let mut by_rank: Vec<u64> = Vec::new();
    rows.sort_by_key(|row| row.rank);
    by_rank.extend(rows.iter().filter(|row| row.rank.is_some()).map(|row| row.index));
    rows.sort_by_key(|row| {
        let ipv4 = row.gid.starts_with("0000:0000:0000:0000:0000:ffff:");
        (expected(row), !ipv4, row.index)
    });
    let by_design: Vec<u64> = rows.iter().map(|row| row.index).collect();
    ensure!(by_rank == by_design, "{}: {by_rank:?}, not {by_design:?}: {rows:?}", nic.device());
    ensure!(selected == by_design[0], "{}: {selected}, not {rows:?}", nic.device());
    println!("{}: {rows:?}", nic.device());
    Ok(())
}

/// Moves and verifies bytes between two engines that have `env`.
fn connects(env: &[(&str, &str)]) -> Result<()> {
    let side = |name: &str, nic: Nic| {
        let env = env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned()));
        Side {
            env: env.collect(),
            ..Side::rdma(name, &[&nic.device()])
        }
    };
    let target = Target::start(&side("target", A0), 4 * MIB)?;
    let load = Load::verified("write", 65_536, 4 * MIB);
    let report = load.run(&side("initiator", A1), target.segment(), ONE_RUN);
    report.with_context(|| format!("{env:?}"))?.expect_clean(4 * MIB)?;
    target.stop()
}
