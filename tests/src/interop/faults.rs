//! The C++ engine and ours through the same faults on the rig, side by side.
//!
//! The target's rail a goes down and comes back, and is then renumbered, while one process writes
//! over two rails. The C++ engine has no account of its stalls; `tests/interop/peer.py` times it.

use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::cpp::Cpp;
use super::{HANDSHAKE, READY_WITHIN, Setting};
use crate::bench::{Amount, Load, Side, Target};
use crate::child::{Job, Server};
use crate::guest::rig::A0;

/// Both rails of each host.
const BOTH_RAILS: Setting = Setting {
    protocol: "rdma",
    target_device: "rxe_a0,rxe_b0",
    initiator_device: "rxe_a1,rxe_b1",
    bytes: BYTES,
    meetings: &[],
    bench_meetings: &[],
};
const BYTES: u64 = 8 << 20;
const BLOCK: u64 = 256 << 10;
/// How long it writes.
const SECONDS: u64 = 24;
/// Until writing is under way: the C++ engine takes long to load.
const MOVING_WITHIN: Duration = Duration::from_secs(90);
const ENDED_WITHIN: Duration = Duration::from_secs(SECONDS + 90);
/// What a pair with one of ours may wait at most.
const STALL_MAX_MS: f64 = 5_000.0;

/// Which engine is at which end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pair {
    /// Theirs writes to ours.
    CppToOurs,
    /// Ours writes to theirs.
    OursToCpp,
    /// Theirs writes to theirs.
    CppToCpp,
}

/// What the writing process saw.
#[derive(Clone, Copy, Debug)]
struct Seen {
    ops: u64,
    failed: u64,
    max_stall_ms: f64,
}

/// Runs each pair through the faults and prints a table. A pair with one of ours must not fail, nor
/// stall for five seconds; the C++ engine's own pair is there to compare.
///
/// # Errors
/// If a process does not start, or one of our pairs does not hold.
pub fn compare(pairs: &[Pair]) -> Result<()> {
    let cpp = Cpp::from_env()?;
    let mut rows = Vec::new();
    for pair in pairs {
        crate::guest::rig::restore()?;
        let seen = run(&cpp, *pair).with_context(|| format!("{pair:?}"))?;
        println!(
            "{:10} {:6} writes, {:3} failed, longest stall {:6.0} ms",
            format!("{pair:?}"),
            seen.ops,
            seen.failed,
            seen.max_stall_ms
        );
        rows.push((*pair, seen));
    }
    for (pair, seen) in rows.iter().filter(|(pair, _)| *pair != Pair::CppToCpp) {
        let holds = seen.failed == 0 && seen.ops > 0 && seen.max_stall_ms < STALL_MAX_MS;
        ensure!(holds, "{pair:?}: {seen:?}");
    }
    Ok(())
}

fn run(cpp: &Cpp, pair: Pair) -> Result<Seen> {
    match pair {
        Pair::CppToOurs => {
            let side = Side::rdma("target", &["rxe_a0", "rxe_b0"]);
            let target = Target::start(&side, BYTES)?;
            let seen = cpp_writes(cpp, target.segment())?;
            target.stop()?;
            Ok(seen)
        }
        Pair::CppToCpp => {
            let (_target, segment) = cpp_target(cpp)?;
            cpp_writes(cpp, &segment)
        }
        Pair::OursToCpp => {
            let (_target, segment) = cpp_target(cpp)?;
            let load = Load {
                operation: "write",
                block_bytes: BLOCK,
                batch: 1,
                threads: 1,
                amount: Amount::Seconds(SECONDS),
                verify: true,
            };
            let side = Side::rdma("initiator", &["rxe_a1", "rxe_b1"]);
            let running = load.start(&side, &segment, ENDED_WITHIN)?;
            sleep(Duration::from_secs(4));
            faults()?;
            let report = running.report()?;
            Ok(Seen {
                ops: report.ops,
                failed: report.failed,
                max_stall_ms: report.max_stall_ms,
            })
        }
    }
}

fn cpp_target(cpp: &Cpp) -> Result<(Server, String)> {
    let mut command = cpp.peer("target", &BOTH_RAILS, BOTH_RAILS.target_device, HANDSHAKE);
    command.args(["--size", &BYTES.to_string()]);
    let server = Server::start(command, "ready ", READY_WITHIN)?;
    let segment = server.ready_line()["ready ".len()..].to_owned();
    Ok((server, segment))
}

fn cpp_writes(cpp: &Cpp, segment: &str) -> Result<Seen> {
    let device = BOTH_RAILS.initiator_device;
    let mut command = cpp.peer("initiator", &BOTH_RAILS, device, HANDSHAKE);
    command
        .args(["--segment", segment, "--bytes", &BYTES.to_string()])
        .args(["--block", &BLOCK.to_string()])
        .args(["--seconds", &SECONDS.to_string()]);
    // What it prints goes to a file: the first line says that it moves, the second is its report.
    let dir = tempfile::TempDir::new()?;
    let printed = dir.path().join("printed");
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "exec \"$@\" > \"$0\""])
        .arg(&printed)
        .arg(command.get_program())
        .args(command.get_args());
    let job = Job::start(shell)?;
    let begin = std::time::Instant::now();
    let text = || std::fs::read_to_string(&printed).unwrap_or_default();
    while !text().starts_with("moving") {
        ensure!(
            begin.elapsed() < MOVING_WITHIN,
            "the C++ engine does not begin to move"
        );
        sleep(Duration::from_millis(50));
    }
    sleep(Duration::from_secs(2));
    faults()?;
    let output = job.output_within(ENDED_WITHIN)?;
    // Its log shows with ours, should the scenario fail.
    eprintln!("{}", String::from_utf8_lossy(&output.stderr));
    let text = text();
    let report: Value = serde_json::from_str(text.lines().nth(1).unwrap_or_default())
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let number = |member: &str| report[member].as_u64().context("its report");
    Ok(Seen {
        ops: number("ops")?,
        failed: number("failed")?,
        max_stall_ms: report["max_stall_ms"].as_f64().context("its report")?,
    })
}

/// The target's rail a goes down for four seconds, and later gets another address.
fn faults() -> Result<()> {
    A0.down()?;
    sleep(Duration::from_secs(4));
    A0.up()?;
    sleep(Duration::from_secs(5));
    A0.renumber(&A0.address(), "192.168.77.11")?;
    sleep(Duration::from_secs(5));
    Ok(())
}
