//! `rerail topology` and `rerail gids` on real devices say what the kernel's files say.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::child::{self, stdout_within};
use crate::guest::Scenario;
use crate::guest::rig::{self, A0, A1, B0, NICS, Nic};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "topology_and_gids_say_what_sysfs_says",
    full_only: false,
    limit: Duration::from_secs(120),
    body,
};

const ONE_RUN: Duration = Duration::from_secs(30);

fn body() -> Result<()> {
    let topology = rerail(&["topology", "--json"])?;
    let nics = topology["nics"].as_array().context("nics is no list")?;
    for nic in NICS {
        let device = nic.device();
        let seen = nics.iter().find(|seen| seen["name"] == *device);
        let port = &seen.with_context(|| format!("{device} is not shown"))?["ports"][0];
        let attribute = |name: &str| {
            let path = format!("/sys/class/infiniband/{device}/ports/1/{name}");
            let text = std::fs::read_to_string(&path).with_context(|| path.clone());
            text.map(|text| text.trim().to_owned())
        };
        ensure!(port["state"] == "ACTIVE", "{device}: {port}");
        ensure!(attribute("state")? == "4: ACTIVE");
        ensure!(port["link_layer"] == *attribute("link_layer")?, "{device}: {port}");
        // What the wire's 4200 bytes leave for a path, as libibverbs says too.
        ensure!(port["mtu_bytes"] == 4096, "{device}: {port}");
        ensure!(port["rail"] == *device, "{device}: {port}");
        check_gids(nic, &port["gid"])?;
    }
    let in_matrix = topology["priority_matrix"]["cpu:0"].to_string();
    ensure!(NICS.iter().all(|nic| in_matrix.contains(&nic.device())), "{in_matrix}");

    // A port without a link is shown, and is no rail.
    B0.down()?;
    rig::eventually("b0's port goes down", || Ok(B0.port_state()? == "1: DOWN"))?;
    let topology = rerail(&["topology", "--json"])?;
    let rails: BTreeSet<String> = topology["nics"]
        .as_array()
        .context("nics is no list")?
        .iter()
        .filter_map(|nic| Some(nic["ports"][0]["rail"].as_str()?.to_owned()))
        .collect();
    ensure!(!rails.contains(&B0.device()) && rails.contains(&A0.device()), "{rails:?}");
    ensure!(topology["warnings"].to_string().contains(&B0.device()), "{topology}");

    // After a renumbering the choice is the new address, wherever its row is.
    A1.renumber(&A1.address(), "192.168.77.12")?;
    rig::eventually("a1's GID moves from .2 to .12", || {
        Ok(A1.gid_table()?.iter().any(|(_, gid, _)| gid.ends_with("c0a8:4d0c")))
    })?;
    let gids = rerail(&["gids", "--json", "--device", &A1.device()])?;
    let chosen = gids["selected"]["gid"].as_str().unwrap_or_default();
    ensure!(chosen.ends_with("c0a8:4d0c"), "{gids}");
    Ok(())
}

/// Every row of the kernel's table is a candidate with its type, the choice is the NIC's address,
/// and `topology` shows the same choice.
fn check_gids(nic: Nic, shown: &Value) -> Result<()> {
    let device = nic.device();
    let gids = rerail(&["gids", "--json", "--device", &device, "--port", "1"])?;
    let candidates = gids["candidates"].as_array().context("candidates is no list")?;
    let kernel = nic.gid_table()?;
    ensure!(candidates.len() == kernel.len(), "{device}: {gids} against {kernel:?}");
    for (index, gid, kind) in &kernel {
        let same = |row: &&Value| {
            row["index"] == *index && row["gid"] == **gid
        };
        let row = candidates.iter().find(same);
        let row = row.with_context(|| format!("{device}: row {index} is not in {gids}"))?;
        ensure!(row["type"] == **kind && row["ndev"] == nic.name, "{device}: {row}");
    }
    ensure!(gids["selected"]["gid"] == *nic.gid(), "{device}: {gids}");
    ensure!(shown["index"] == gids["selected"]["index"], "{device}: {shown} against {gids}");
    Ok(())
}

fn rerail(args: &[&str]) -> Result<Value> {
    let mut command = child::rerail()?;
    command.args(args);
    let stdout = stdout_within(command, ONE_RUN)?;
    serde_json::from_str(&stdout).with_context(|| format!("rerail {args:?}"))
}
