//! Our program and the C++ engine, each in each role, over each store both know.
//!
//! The C++ ends are `tests/interop/peer.py`, which uses the engine's own Python module and compares
//! bytes, and the engine's bench, which compares none; ours is `rerail bench`. Redis is not here:
//! the published C++ engine is built without it.

mod cpp;
pub mod faults;

use std::fmt;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::bench::{Amount, Load, Side, Target};
use crate::child::{Server, stdout_within};
use crate::store::Store;
use cpp::{BENCH_BUFFER, Cpp};

const MIB: u64 = 1024 * 1024;
const READY_WITHIN: Duration = Duration::from_secs(90);
const MOVED_WITHIN: Duration = Duration::from_secs(180);
/// What the C++ bench may take for two seconds of work.
const BENCH_WITHIN: Duration = Duration::from_secs(60);
/// What the C++ engine logs when its device completes nothing any more.
const STUCK: &str = "CQ completion timeout";
const ENDED_WITHIN: Duration = Duration::from_secs(30);
/// Not a multiple of any slice, page or word.
const ODD_BLOCK: u64 = 100_001;
/// Blocks that are one round of our bench's pattern: its batch.
const ROUND_BLOCKS: u64 = 8;
/// No store: peers are asked for their records.
const HANDSHAKE: &str = "P2PHANDSHAKE";

/// How the two reach each other, and how much is moved.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// `tcp` or `rdma`.
    protocol: &'static str,
    /// The target's device; empty for TCP.
    target_device: &'static str,
    /// The initiator's device; empty for TCP.
    initiator_device: &'static str,
    /// Bytes of a row whose bytes are compared.
    bytes: u64,
    /// Where the two meet.
    meetings: &'static [Meeting],
    /// Where its bench and ours meet.
    bench_meetings: &'static [Meeting],
}

/// TCP on this machine.
pub const TCP: Setting = Setting {
    protocol: "tcp",
    target_device: "",
    initiator_device: "",
    bytes: 64 * MIB,
    meetings: &[
        Meeting::Handshake,
        Meeting::OurHttp,
        Meeting::TheirHttp,
        Meeting::Etcd,
    ],
    bench_meetings: &[Meeting::Handshake, Meeting::OurHttp],
};
/// RDMA in the guest, whose processors are emulated.
pub const RDMA: Setting = Setting {
    protocol: "rdma",
    target_device: "rxe_a0",
    initiator_device: "rxe_a1",
    bytes: 8 * MIB,
    meetings: &[
        Meeting::Handshake,
        Meeting::OurHttp,
        Meeting::TheirHttp,
        Meeting::Etcd,
    ],
    bench_meetings: &[Meeting::Handshake],
};

/// Which store the two meet in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meeting {
    Handshake,
    OurHttp,
    TheirHttp,
    Etcd,
}

impl fmt::Display for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Handshake => HANDSHAKE,
            Self::OurHttp => "HTTP, our server",
            Self::TheirHttp => "HTTP, the C++ server",
            Self::Etcd => "etcd",
        })
    }
}

/// Who initiates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The C++ engine, against our target.
    TheyInitiate,
    /// We, against a C++ target.
    WeInitiate,
}

/// Moves bytes to and fro between the C++ engine and ours, without a store, and compares them.
///
/// # Errors
/// If something fails or differs, or there is no C++ engine.
pub fn meet(setting: Setting, role: Role) -> Result<()> {
    let cpp = Cpp::from_env()?;
    match role {
        Role::TheyInitiate => cpp_initiates(&cpp, &setting, HANDSHAKE),
        Role::WeInitiate => we_initiate(&cpp, &setting, HANDSHAKE),
    }
}

/// Lets the C++ engine write to its own kind for a second, without a store; how many writes it
/// began and how many of them failed.
///
/// # Errors
/// If one of them does not start, or there is no C++ engine.
pub fn cpp_to_cpp(setting: Setting) -> Result<(u64, u64)> {
    let cpp = Cpp::from_env()?;
    let mut command = cpp.peer("target", &setting, setting.target_device, HANDSHAKE);
    command.args(["--size", &setting.bytes.to_string()]);
    let target = Server::start(command, "ready ", READY_WITHIN)?;
    let segment = &target.ready_line()["ready ".len()..];
    let mut command = cpp.peer("initiator", &setting, setting.initiator_device, HANDSHAKE);
    command.args(["--segment", segment, "--seconds", "1"]);
    command.args(["--bytes", &setting.bytes.to_string()]);
    let printed = stdout_within(command, MOVED_WITHIN)?;
    let report = printed.lines().last().unwrap_or_default();
    let report: Value = serde_json::from_str(report).with_context(|| printed.clone())?;
    let number = |member: &str| report[member].as_u64().context("peer.py's report");
    Ok((number("ops")?, number("failed")?))
}

/// A row of the table: what is moved, given the store's URL.
type Row = fn(&Cpp, &Setting, &str) -> Result<()>;

/// Rows in which every byte is compared.
const COMPARED: &[(&str, Row)] = &[
    ("C++ -> Rerail  write, read", cpp_initiates),
    ("Rerail -> C++  write, read", we_initiate),
];
/// Rows with the engine's bench.
const BENCH: &[(&str, Row)] = &[
    ("C++ bench -> Rerail  write, read", cpp_bench_initiates),
    ("Rerail -> C++ bench  write, read", we_initiate_to_its_bench),
];

/// Runs the table for `setting`, a line for each row; whether all rows passed.
///
/// # Errors
/// If a store cannot be started, or there is no C++ engine.
pub fn run(setting: Setting) -> Result<bool> {
    let cpp = Cpp::from_env()?;
    let (mut passed, mut failed) = (0, 0);
    for &meeting in setting.meetings {
        let store = match meeting {
            Meeting::Handshake => None,
            Meeting::OurHttp => Some(Store::http()?),
            Meeting::TheirHttp => Some(Store::cpp_http(cpp.python())?),
            Meeting::Etcd => Some(Store::etcd()?),
        };
        let url = store.as_ref().map_or(HANDSHAKE, Store::url);
        let bench = setting.bench_meetings.contains(&meeting);
        for (name, row) in COMPARED.iter().chain(BENCH.iter().filter(|_| bench)) {
            let started = Instant::now();
            let outcome = row(&cpp, &setting, url);
            let seconds = started.elapsed().as_secs_f64();
            let title = format!("{:4}  {name:33} {meeting}", setting.protocol);
            match outcome {
                Ok(()) => {
                    passed += 1;
                    println!("ok     {seconds:7.1} s  {title}");
                }
                Err(error) => {
                    failed += 1;
                    println!("FAILED {seconds:7.1} s  {title}: {error:#}");
                }
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0)
}

/// The C++ engine writes into our target, reads back, compares.
fn cpp_initiates(cpp: &Cpp, setting: &Setting, url: &str) -> Result<()> {
    let target = our_target(setting, url, setting.bytes)?;
    let mut command = cpp.peer("initiator", setting, setting.initiator_device, url);
    command.args([
        "--segment",
        target.segment(),
        "--block",
        &ODD_BLOCK.to_string(),
    ]);
    command.args(["--bytes", &setting.bytes.to_string()]);
    let printed = unless_stuck(setting, || {
        let mut again = Command::new(command.get_program());
        again.args(command.get_args());
        stdout_within(again, MOVED_WITHIN)
    })?;
    let report: Value = serde_json::from_str(printed.trim()).context("peer.py's report")?;
    ensure!(
        report["failed"] == 0 && report["wrong_pages"] == 0 && report["bytes"] == setting.bytes,
        "the C++ engine reports {printed}"
    );
    target.stop()
}

/// We move bytes to and from a C++ target and verify them by the opposite operation; what we wrote
/// last the target looks up in its own memory.
fn we_initiate(cpp: &Cpp, setting: &Setting, url: &str) -> Result<()> {
    let last_bytes = ODD_BLOCK * ROUND_BLOCKS;
    let mut command = cpp.peer("target", setting, setting.target_device, url);
    command.args(["--size", &setting.bytes.to_string()]);
    command.args(["--expect-bytes", &last_bytes.to_string()]);
    let target = Server::start(command, "ready ", READY_WITHIN)?;
    let segment = target.ready_line()["ready ".len()..].to_owned();
    for operation in ["write", "read"] {
        for block in [64 * 1024, ODD_BLOCK] {
            let bytes = (setting.bytes / 2).next_multiple_of(block);
            let load = Load::verified(operation, block, bytes);
            we_move(setting, url, &segment, &load)?;
        }
    }
    let last = Load::verified("write", ODD_BLOCK, last_bytes);
    we_move(setting, url, &segment, &last)?;
    let status = target.terminate(ENDED_WITHIN)?;
    ensure!(
        status.success(),
        "the C++ target ended with {status}: its memory is not as written"
    );
    Ok(())
}

/// The C++ bench writes into our target and reads from it.
fn cpp_bench_initiates(cpp: &Cpp, setting: &Setting, url: &str) -> Result<()> {
    let target = our_target(setting, url, BENCH_BUFFER)?;
    for operation in ["write", "read"] {
        let run = || cpp.bench_initiator(setting, url, target.segment(), operation, BENCH_WITHIN);
        unless_stuck(setting, run)?;
    }
    target.stop()
}

/// Our bench against the C++ one as target.
fn we_initiate_to_its_bench(cpp: &Cpp, setting: &Setting, url: &str) -> Result<()> {
    let (target, segment) = cpp.bench_target(setting, url)?;
    for operation in ["write", "read"] {
        let load = Load::verified(operation, 64 * 1024, BENCH_BUFFER);
        // The bench does not say when its buffer is registered, and so may not have it yet.
        let deadline = Instant::now() + READY_WITHIN;
        while let Err(error) = we_move(setting, url, &segment, &load) {
            let text = format!("{error:#}");
            let early = text.contains("offers no memory") || text.contains("cannot be opened");
            if !early || Instant::now() >= deadline {
                return Err(error);
            }
        }
    }
    let status = target.terminate(ENDED_WITHIN)?;
    ensure!(status.success(), "the C++ bench ended with {status}");
    Ok(())
}

/// Runs a C++ initiator, once more if its device is stuck: it posts with `retry_cnt` 7, which
/// soft-RoCE takes for ever, so that one lost packet at a bad time hangs it, whoever the peer is.
fn unless_stuck<T>(setting: &Setting, run: impl Fn() -> Result<T>) -> Result<T> {
    match run() {
        Err(error) if setting.protocol == "rdma" && format!("{error:#}").contains(STUCK) => {
            println!("       again: the C++ engine's device has lost its work");
            run()
        }
        outcome => outcome,
    }
}

fn our_target(setting: &Setting, url: &str, bytes: u64) -> Result<Target> {
    Target::start(&side("rerail-target", setting.target_device, url), bytes)
}

/// Runs `load` against `segment`; nothing may fail.
fn we_move(setting: &Setting, url: &str, segment: &str, load: &Load) -> Result<()> {
    let side = side("rerail-initiator", setting.initiator_device, url);
    let report = load.run(&side, segment, MOVED_WITHIN)?;
    report.expect_clean(match load.amount {
        Amount::Bytes(bytes) => bytes,
        Amount::Seconds(_) => 1,
    })
}

fn side(name: &str, device: &str, url: &str) -> Side {
    let side = if device.is_empty() {
        Side::tcp(name)
    } else {
        Side::rdma(name, &[device])
    };
    side.with_metadata(url)
}
