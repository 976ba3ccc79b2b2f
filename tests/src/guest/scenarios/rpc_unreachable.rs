//! The target's RPC port cannot be reached for ten seconds while its rail a goes down and comes
//! back: the other rail carries on, and no transfer fails.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::guest::Scenario;
use crate::guest::rig::{A0, block_port, unblock_ports};
use crate::guest::traffic::{Plan, Traffic};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "the_targets_rpc_port_is_unreachable",
    full_only: false,
    limit: Duration::from_secs(150),
    body,
};

fn body() -> Result<()> {
    let traffic = Traffic::start(&Plan::both_rails(22))?;
    let rpc = traffic.target.rpc();
    let port = rpc.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    block_port(port.with_context(|| format!("no port in {rpc}"))?)?;
    A0.down()?;
    sleep(Duration::from_secs(5));
    A0.up()?;
    sleep(Duration::from_secs(5));
    unblock_ports()?;
    traffic.finish()?.expect_flow(Duration::from_millis(2_500))
}
