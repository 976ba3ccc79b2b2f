//! The C++ engine and ours through the same faults on the rig, side by side, while one process
//! writes over two rails. The C++ engine has no account of its stalls; `tests/interop/peer.py`
//! times it.

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;

use super::cpp::Cpp;
use super::{HANDSHAKE, READY_WITHIN, Setting};
use crate::bench::{Amount, Load, Side, Target};
use crate::child::{Job, Server};
use crate::guest::rig::{A0, A1, B0};
use crate::guest::traffic::{EventLog, peers_of_rails};

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

/// Server names in the NIC paths of both ends (`MC_RDMA_BIND_ADDRESS`).
const TARGET_BIND: &str = "192.168.77.1";
const INITIATOR_BIND: &str = "192.168.77.2";
/// Before the server name in what the C++ engine says at its start.
const BOUND: &str = "using RDMA bind address ";

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

/// What is done to a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trial {
    /// The target's rail a goes down for four seconds, and later gets another address.
    FlapAndRenumber,
    /// NIC paths have a server name of their own at both ends, and rail a is cut at both for good:
    /// whoever writes goes over to the other NIC of the target, by the path in its record. In a
    /// store it would be no trial of ours: the C++ engine looks there for the peer's RPC server
    /// under the name in its NIC paths, under which nobody, itself included, enters it.
    CutWithBindAddresses,
}

/// What the writing process saw.
#[derive(Clone, Copy, Debug)]
struct Seen {
    ops: u64,
    failed: u64,
    max_stall_ms: f64,
}

/// Runs each pair through a trial and prints a table. A pair with one of ours must not fail, nor
/// stall for five seconds, and moves over rail b while rail a is down; the C++ engine's own pair is
/// there to compare.
///
/// # Errors
/// If a process does not start, or one of our pairs does not hold.
pub fn compare(pairs: &[Pair], trial: Trial) -> Result<()> {
    let cpp = Cpp::from_env()?;
    let mut rows = Vec::new();
    for pair in pairs {
        crate::guest::rig::restore()?;
        let stage = Stage::set(&cpp, trial)?;
        let (seen, over_b) = stage.run(*pair).with_context(|| format!("{pair:?}"))?;
        println!(
            "{:10} {:6} writes, {:3} failed, longest stall {:6.0} ms, {over_b:6} packets to rail b \
             while rail a was down",
            format!("{pair:?}"),
            seen.ops,
            seen.failed,
            seen.max_stall_ms,
        );
        rows.push((*pair, seen, over_b));
    }
    for (pair, seen, over_b) in rows.iter().filter(|row| row.0 != Pair::CppToCpp) {
        let holds = seen.failed == 0 && seen.ops > 0 && seen.max_stall_ms < STALL_MAX_MS;
        ensure!(
            holds && *over_b > 0,
            "{pair:?}: {seen:?}, {over_b} packets over rail b"
        );
    }
    Ok(())
}

/// Where a pair plays its trial.
struct Stage<'a> {
    cpp: &'a Cpp,
    trial: Trial,
    dir: TempDir,
}

impl<'a> Stage<'a> {
    fn set(cpp: &'a Cpp, trial: Trial) -> Result<Self> {
        let dir = TempDir::new()?;
        Ok(Self { cpp, trial, dir })
    }

    /// What the writer saw, and how many packets came to the target's NIC b while a was down.
    fn run(&self, pair: Pair) -> Result<(Seen, u64)> {
        if pair == Pair::CppToOurs {
            let target = Target::start(&self.our_side("target"), BYTES)?;
            let outcome = self.cpp_writes(target.segment())?;
            target.stop()?;
            return Ok(outcome);
        }
        let (target, segment) = self.cpp_target()?;
        match pair {
            Pair::OursToCpp => {
                // It says which server name it has registered its NICs with.
                let mut lines = target.lines_until_ready().iter();
                let said = lines.find_map(|line| Some(line.split_once(BOUND)?.1));
                let server = said.and_then(|said| said.split_whitespace().next());
                self.we_write(&segment, server.unwrap_or(&segment))
            }
            Pair::CppToOurs | Pair::CppToCpp => self.cpp_writes(&segment),
        }
    }

    /// Variables of an end.
    fn env(&self, role: &str) -> Vec<(String, String)> {
        let mut env = vec![("MC_TCP_BIND_ADDRESS".to_owned(), "127.0.0.1".to_owned())];
        if self.trial == Trial::CutWithBindAddresses {
            env.push(("MC_RDMA_BIND_ADDRESS".to_owned(), bind(role).to_owned()));
        }
        env
    }

    fn our_side(&self, role: &str) -> Side {
        let devices = match role {
            "target" => ["rxe_a0", "rxe_b0"],
            _ => ["rxe_a1", "rxe_b1"],
        };
        let mut side = Side::rdma(&format!("our-{role}"), &devices);
        side.env = self.env(role);
        side.events = Some(self.dir.path().join(format!("{role}.events")));
        side
    }

    fn cpp_end(&self, role: &str) -> Command {
        let device = match role {
            "target" => BOTH_RAILS.target_device,
            _ => BOTH_RAILS.initiator_device,
        };
        let mut command = self.cpp.peer(role, &BOTH_RAILS, device, HANDSHAKE);
        command.envs(self.env(role));
        command
    }

    fn cpp_target(&self) -> Result<(Server, String)> {
        let mut command = self.cpp_end("target");
        command.args(["--size", &BYTES.to_string()]);
        let server = Server::start(shell("exec \"$@\" 2>&1", &command), "ready ", READY_WITHIN)?;
        let segment = server.ready_line()["ready ".len()..].to_owned();
        Ok((server, segment))
    }

    /// We write; `server` is the name in the NIC paths that the target was registered with.
    fn we_write(&self, segment: &str, server: &str) -> Result<(Seen, u64)> {
        let load = Load {
            operation: "write",
            block_bytes: BLOCK,
            batch: 1,
            threads: 1,
            amount: Amount::Seconds(SECONDS),
            verify: true,
        };
        let side = self.our_side("initiator");
        let running = load.start(&side, segment, ENDED_WITHIN)?;
        sleep(Duration::from_secs(4));
        let over_b = self.faults()?;
        let report = running.report()?;
        let seen = Seen {
            ops: report.ops,
            failed: report.failed,
            max_stall_ms: report.max_stall_ms,
        };
        if let Some(events) = side.events {
            let used = peers_of_rails(&EventLog::new(events).all()?);
            let registered = ["rxe_a0", "rxe_b0"].map(|device| format!("{server}@{device}"));
            ensure!(
                used == registered.clone().into(),
                "rails to {used:?}, registered are {registered:?}"
            );
        }
        Ok((seen, over_b))
    }

    fn cpp_writes(&self, segment: &str) -> Result<(Seen, u64)> {
        let mut command = self.cpp_end("initiator");
        command
            .args(["--segment", segment, "--bytes", &BYTES.to_string()])
            .args(["--block", &BLOCK.to_string()])
            .args(["--seconds", &SECONDS.to_string()]);
        // What it prints goes to a file: a line when it moves, and its report.
        let printed = self.dir.path().join("printed");
        let script = format!("exec \"$@\" > {}", printed.display());
        let job = Job::start(shell(&script, &command))?;
        let begin = Instant::now();
        let text = || fs::read_to_string(&printed).unwrap_or_default();
        while !text().starts_with("moving") {
            ensure!(
                begin.elapsed() < MOVING_WITHIN,
                "the C++ engine does not begin to move"
            );
            sleep(Duration::from_millis(50));
        }
        sleep(Duration::from_secs(2));
        let over_b = self.faults()?;
        let output = job.output_within(ENDED_WITHIN)?;
        // Its log shows with ours, should the scenario fail.
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        let text = text();
        let report: Value = serde_json::from_str(text.lines().nth(1).unwrap_or_default())
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let number = |member: &str| report[member].as_u64().context("its report");
        let seen = Seen {
            ops: number("ops")?,
            failed: number("failed")?,
            max_stall_ms: report["max_stall_ms"].as_f64().context("its report")?,
        };
        Ok((seen, over_b))
    }

    /// Makes the faults; packets that came to the target's NIC b while a was down.
    fn faults(&self) -> Result<u64> {
        match self.trial {
            Trial::FlapAndRenumber => {
                let begin = B0.counter("rcvd_pkts")?;
                A0.down()?;
                sleep(Duration::from_secs(4));
                let over_b = B0.counter("rcvd_pkts")? - begin;
                A0.up()?;
                sleep(Duration::from_secs(5));
                A0.renumber(&A0.address(), "192.168.77.11")?;
                sleep(Duration::from_secs(5));
                Ok(over_b)
            }
            Trial::CutWithBindAddresses => {
                A0.down()?;
                A1.down()?;
                let begin = B0.counter("rcvd_pkts")?;
                sleep(Duration::from_secs(8));
                Ok(B0.counter("rcvd_pkts")? - begin)
            }
        }
    }
}

/// `command` started by a shell's `script`, in which it is `$@`.
fn shell(script: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", script, "sh"])
        .arg(command.get_program())
        .args(command.get_args());
    for (variable, value) in command.get_envs() {
        shell.env(variable, value.unwrap_or_default());
    }
    shell
}

fn bind(role: &str) -> &'static str {
    match role {
        "target" => TARGET_BIND,
        _ => INITIATOR_BIND,
    }
}
