//! NIC paths with a server name of their own at both ends (`MC_RDMA_BIND_ADDRESS`): traffic moves
//! to rail b when rail a is cut at both ends, ours with ours and with the C++ engine. The path by
//! which the other NIC is then asked is the one that it was registered with.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::guest::Scenario;
use crate::guest::rig::{A0, A1};
use crate::guest::traffic::{Plan, Traffic, nic_paths, peers_of_rails};
use crate::interop::faults::{Pair, Trial, compare};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "rdma_bind_address_on_both_ends",
    full_only: true,
    limit: Duration::from_secs(600),
    body,
};

fn body() -> Result<()> {
    ours_to_ours()?;
    let pairs = [Pair::CppToOurs, Pair::OursToCpp, Pair::CppToCpp];
    compare(&pairs, Trial::CutWithBindAddresses)
}

fn ours_to_ours() -> Result<()> {
    let bind = |address: &str| vec![("MC_RDMA_BIND_ADDRESS".to_owned(), address.to_owned())];
    let mut plan = Plan::both_rails(14);
    plan.target_env = bind(&A0.address());
    plan.initiator_env = bind(&A1.address());
    let traffic = Traffic::start(&plan)?;
    A0.down()?;
    A1.down()?;
    sleep(Duration::from_secs(1));
    let outcome = traffic.finish()?;
    outcome.expect_flow(Duration::from_millis(1_500))?;
    let rails = outcome.report.rails.iter();
    let b: u64 = rails.filter(|rail| rail.local == "rxe_b1").map(|rail| rail.bytes).sum();
    ensure!(b > 0, "rail b carried nothing: {:?}", outcome.report);
    let mut records = outcome.records.iter().map(|record| &record["value"]);
    let record = records.rfind(|record| record["name"] == "target");
    let record = record.context("the target has no record")?;
    let server = record["rdma_server_name"].as_str().unwrap_or_default();
    ensure!(server.starts_with(&A0.address()), "NIC paths begin with `{server}`");
    let (used, registered) = (peers_of_rails(&outcome.own), nic_paths(record)?);
    ensure!(used == registered, "rails to {used:?}, registered are {registered:?}");
    Ok(())
}
