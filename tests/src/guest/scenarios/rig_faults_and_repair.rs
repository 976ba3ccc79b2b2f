//! The faults that scenarios inject do what the kernel is known to do, and are put right again.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::guest::Scenario;
use crate::guest::rig::{self, A0, A1, NICS};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "rig_faults_show_in_the_gid_table_and_are_repaired",
    full_only: false,
    limit: Duration::from_secs(120),
    body,
};

fn body() -> Result<()> {
    // A port that goes down keeps its table.
    let before = A0.gid_table()?;
    A0.down()?;
    rig::eventually("a0's port goes down", || Ok(A0.port_state()? == "1: DOWN"))?;
    ensure!(A1.port_state()? == "4: ACTIVE", "a0's going down must not touch a1");
    let gone: Vec<_> = before.iter().filter(|row| !A0.gid_table().is_ok_and(|t| t.contains(row))).collect();
    ensure!(gone.is_empty(), "rows vanished with the link: {gone:?}");

    // A renumbered NIC has a hole where its address was, and the new one elsewhere.
    A1.renumber(&A1.address(), "192.168.77.12")?;
    rig::eventually("a1's GID moves from .2 to .12", || {
        let rows = A1.gid_table()?;
        let old = rows.iter().any(|(_, gid, _)| *gid == A1.gid());
        let new = rows.iter().any(|(_, gid, _)| gid.ends_with("c0a8:4d0c"));
        Ok(new && !old)
    })?;

    A1.impair_inbound("netem delay 5ms")?;
    rig::restore()?;
    for nic in NICS {
        ensure!(nic.port_state()? == "4: ACTIVE", "{} was not repaired", nic.device());
    }
    let rules = rig::run("ip", "rule show pref 20")?;
    ensure!(rules.lines().count() == NICS.len(), "rules left behind:\n{rules}");
    let queues = rig::run("tc", "qdisc show dev pa1")?;
    ensure!(!queues.contains("netem"), "an impaired wire was left behind: {queues}");
    Ok(())
}
