//! The rig itself: if this fails, no other result means anything.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::guest::Scenario;
use crate::guest::rig::{NICS, run};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "rig_has_four_active_devices_with_v2_gids",
    full_only: false,
    limit: Duration::from_secs(60),
    body,
};

fn body() -> Result<()> {
    for nic in NICS {
        let device = nic.device();
        ensure!(nic.port_state()? == "4: ACTIVE", "{device}: {}", nic.port_state()?);
        let rows = nic.gid_table()?;
        println!("{device}: {rows:?}");
        ensure!(
            rows.iter().all(|(_, _, kind)| kind == "RoCE v2"),
            "{device} has rows other than RoCE v2: {rows:?}"
        );
        ensure!(
            rows.iter().any(|(_, gid, _)| *gid == nic.gid()),
            "{device} lacks the GID {} of its address: {rows:?}",
            nic.gid()
        );
        // What libibverbs sees, through the same library as the verbs crate.
        let info = run("ibv_devinfo", &format!("-d {device}"))?;
        for wanted in ["PORT_ACTIVE", "active_mtu:\t\t4096", "link_layer:\t\tEthernet"] {
            ensure!(info.contains(wanted), "{device}: ibv_devinfo lacks `{wanted}`:\n{info}");
        }
    }
    Ok(())
}
