//! Interfaces whose MTUs differ, in both orders; one that changes under traffic, which no event
//! tells; a bridge in between that carries less than both ends believe; and a host that has IPv6
//! only. Ours with ours and with the C++ engine.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::bench::{Load, Side, Target};
use crate::guest::Scenario;
use crate::guest::rig::{A0, A1, Nic, eventually, ip, restore};
use crate::guest::traffic::{Plan, Traffic, is_rail};
use crate::interop::{self, Role};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "mtus_that_differ_and_change",
    full_only: true,
    limit: Duration::from_secs(900),
    body,
};

const SMALL: u32 = 1500;
const LARGE: u32 = 4200;
const BYTES: u64 = 4 << 20;
const WITHIN: Duration = Duration::from_secs(30);
/// Of one move without another path, with the search for a path MTU that passes.
const SEARCH_MAX_MS: f64 = 5_000.0;

fn body() -> Result<()> {
    let (writes, failed) = interop::cpp_to_cpp(interop::RDMA)?;
    println!("for comparison  equal MTUs: C++ to C++, {failed} of {writes} writes failed");
    for (target, initiator) in [(SMALL, LARGE), (LARGE, SMALL)] {
        let what = format!("MTU {target} at the target, {initiator} at the initiator");
        set(A0.name, target)?;
        set(A1.name, initiator)?;
        timed(&format!("{what}: ours"), moves)?;
        // The C++ engine tells nobody its MTU and asks nobody for theirs. Where it has the larger
        // one its packets do not fit our interface, and no setting of ours helps (`MC_MTU` at its
        // end does): that is so between two of its kind, too.
        let (role, direction) = if target < initiator {
            (Role::WeInitiate, "ours to C++")
        } else {
            (Role::TheyInitiate, "C++ to ours")
        };
        timed(&format!("{what}: {direction}"), || interop::meet(interop::RDMA, role))?;
        let (writes, failed) = interop::cpp_to_cpp(interop::RDMA)?;
        println!("for comparison  {what}: C++ to C++, {failed} of {writes} writes failed");
    }
    restore()?;
    set(&format!("p{}", A0.name), SMALL)?;
    timed("a bridge that carries less", || {
        let lost = || -> Result<u64> {
            Ok(A0.counter("completer_retry_err")? + A1.counter("completer_retry_err")?)
        };
        let lost_before = lost()?;
        let stall = moves_with_stall()?;
        let lost = lost()? - lost_before;
        println!("{lost} times a device sent again, longest stall {stall:.0} ms");
        ensure!(lost > 0, "everything got through, so that nothing was shown");
        ensure!(stall < SEARCH_MAX_MS, "a stall of {stall:.0} ms");
        Ok(())
    })?;
    restore()?;
    timed("a target with a link-local address alone: ours", || {
        without_ipv4(A0)?;
        moves()
    })?;
    timed("the same: ours to C++", || interop::meet(interop::RDMA, Role::WeInitiate))?;
    restore()?;
    timed("an initiator with a link-local address alone: ours", || {
        without_ipv4(A1)?;
        moves()
    })?;
    restore()?;
    timed("MTU changes under traffic", || changes(A0.name))?;
    restore()?;
    timed("MTU in between changes under traffic", || changes(&format!("p{}", A0.name)))
}

fn timed(what: &str, run: impl FnOnce() -> Result<()>) -> Result<()> {
    let begin = Instant::now();
    run().with_context(|| what.to_owned())?;
    println!("ok {:5.1} s  {what}", begin.elapsed().as_secs_f64());
    Ok(())
}

fn set(netdev: &str, mtu: u32) -> Result<()> {
    ip(&format!("link set {netdev} mtu {mtu}"))
}

/// Moves and verifies bytes over rail a alone, both ways.
fn moves() -> Result<()> {
    moves_with_stall().map(drop)
}

/// The same; the longest time without a completion, in milliseconds.
fn moves_with_stall() -> Result<f64> {
    let target = Target::start(&Side::rdma("target", &["rxe_a0"]), 16 << 20)?;
    let mut stall = 0.0_f64;
    for operation in ["write", "read"] {
        let load = Load::verified(operation, 100_001, BYTES);
        let own = Side::rdma("initiator", &["rxe_a1"]);
        let report = load.run(&own, target.segment(), Duration::from_secs(60))?;
        report.expect_clean(BYTES).context(operation)?;
        stall = stall.max(report.max_stall_ms);
    }
    target.stop()?;
    Ok(stall)
}

/// Takes the NIC's IPv4 address away, so that its link-local row is all it has.
fn without_ipv4(nic: Nic) -> Result<()> {
    ip(&format!("-4 addr flush dev {}", nic.name))?;
    eventually("only the link-local row is left", || {
        let rows = nic.gid_table()?;
        Ok(rows.len() == 1 && rows[0].1.starts_with("fe80:"))
    })
}

/// Makes `netdev` small and large again while bytes move over both rails; rail a comes back both
/// times.
fn changes(netdev: &str) -> Result<()> {
    let traffic = Traffic::start(&Plan::both_rails(24))?;
    set(netdev, SMALL)?;
    sleep(Duration::from_secs(8));
    let mark = traffic.own_log.mark()?;
    let rails_up = traffic.own_log.all()?;
    let last = rails_up.iter().rev().find(|event| {
        event["event"] == "rail" && event["local"] == A1.device() && event["peer"] == "target@rxe_a0"
    });
    if !last.is_some_and(|event| event["to"] == "up") {
        traffic.own_log.wait("rail a is up again", WITHIN, mark, |event| {
            is_rail(event, &A1.device(), "up")
        })?;
    }
    set(netdev, LARGE)?;
    sleep(Duration::from_secs(4));
    let outcome = traffic.finish()?;
    outcome.expect_flow(Duration::from_millis(2_500))?;
    let rails = outcome.report.rails.iter();
    let a = rails.filter(|rail| rail.local == A1.device()).map(|rail| rail.bytes).sum::<u64>();
    ensure!(a > 0, "rail a carried nothing: {:?}", outcome.report.rails);
    Ok(())
}
