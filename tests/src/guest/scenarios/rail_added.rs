//! A rail that does not exist when the engines start: its devices are added while bytes move, first
//! at the initiator and then at the target, and carry traffic soon.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::bench::{Load, Side, Target};
use crate::guest::Scenario;
use crate::guest::rig::{B0, B1, Nic, run};
use crate::guest::traffic::{EventLog, Plan, Traffic, is_of, is_rail};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "a_rail_added_after_start_carries_traffic",
    full_only: false,
    limit: Duration::from_secs(120),
    body,
};

/// How soon after its device was added a rail is proved, so that traffic goes over it.
const WITHIN: Duration = Duration::from_secs(5);

/// Longest stall, that of the first request included, which waits for the first connection.
/// Measured were 1.3 s where the kernel did not know the neighbour, which takes it 1.0 s to find.
const STALL_MAX: Duration = Duration::from_millis(1_500);

fn body() -> Result<()> {
    for nic in [B0, B1] {
        run("rdma", &format!("link del {}", nic.device()))?;
    }
    meet()?;
    let traffic = Traffic::start(&Plan::both_rails(15))?;
    let own = &traffic.own_log;
    add(B1, own, own, |event| is_rail(event, &B1.device(), "up"))?;
    add(B0, &traffic.target_log, own, |event| {
        let to_new = event["peer"].as_str().is_some_and(|peer| peer.ends_with(&B0.device()));
        is_rail(event, &B1.device(), "up") && to_new
    })?;
    sleep(Duration::from_secs(1));
    let outcome = traffic.finish()?;
    outcome.expect_flow(STALL_MAX)?;
    let carried = |to: &str| {
        let rails = outcome.report.rails.iter();
        let of_new = rails.filter(|rail| rail.local == B1.device() && rail.peer.ends_with(to));
        of_new.map(|rail| rail.bytes).sum::<u64>()
    };
    let (to_old, to_new) = (carried("_a0"), carried("_b0"));
    println!("over the new NIC: {to_old} bytes to the old one, {to_new} to the peer's new one");
    ensure!(
        to_old > 0 && to_new > 0,
        "the new rails carried too little: {:?}",
        outcome.report.rails
    );
    Ok(())
}

/// Moves a little over the rail that is there, so that the kernel knows its neighbours.
fn meet() -> Result<()> {
    let target = Target::start(&Side::rdma("target", &["rxe_a0"]), 1 << 20)?;
    let load = Load::verified("write", 4096, 1 << 16);
    let initiator = Side::rdma("initiator", &["rxe_a1"]);
    load.run(&initiator, target.segment(), Duration::from_secs(30))?;
    target.stop()
}

/// Adds a device, and waits until a rail over it is up.
fn add(nic: Nic, log: &EventLog, own: &EventLog, is_up: impl Fn(&Value) -> bool) -> Result<()> {
    let (mark, own_mark) = (log.mark()?, own.mark()?);
    let (device, netdev) = (nic.device(), nic.name);
    run("rdma", &format!("link add {device} type rxe netdev {netdev}"))?;
    let begin = Instant::now();
    log.wait("it is taken in", WITHIN, mark, |event| {
        is_of(event, "nic_added", &device)
    })?;
    let taken = begin.elapsed();
    log.wait("its gate is open", WITHIN, mark, |event| {
        is_of(event, "gate_opened", &device)
    })?;
    let open = begin.elapsed();
    own.wait("a rail over it is up", WITHIN, own_mark, is_up)?;
    let up = begin.elapsed();
    println!("{device}: taken in after {taken:?}, gate open after {open:?}, rail up after {up:?}");
    ensure!(up < WITHIN, "{device} carries traffic only after {up:?}");
    Ok(())
}
