//! Our program and the C++ engine, each in each role, over each store both know.
//!
//! The C++ end is `tests/interop/peer.py`, which uses the engine's own Python module and compares
//! every byte; ours is `rerail bench` with `--verify`. Redis is not here: the published C++ engine
//! is built without it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::bench::{Load, Side, Target};
use crate::child::{Server, stdout_within};
use crate::store::Store;

const MIB: u64 = 1024 * 1024;
const READY_WITHIN: Duration = Duration::from_secs(60);
const MOVED_WITHIN: Duration = Duration::from_secs(180);
const ENDED_WITHIN: Duration = Duration::from_secs(20);
/// Not a multiple of any slice, page or word.
const ODD_BLOCK: u64 = 100_001;

/// How the two reach each other, and how much is moved.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// `tcp` or `rdma`.
    pub protocol: &'static str,
    /// The target's device; empty for TCP.
    pub target_device: &'static str,
    /// The initiator's device; empty for TCP.
    pub initiator_device: &'static str,
    /// Bytes a row.
    pub bytes: u64,
}

/// TCP on this machine.
pub const TCP: Setting = Setting {
    protocol: "tcp",
    target_device: "",
    initiator_device: "",
    bytes: 64 * MIB,
};
/// RDMA in the guest.
pub const RDMA: Setting = Setting {
    protocol: "rdma",
    target_device: "rxe_a0",
    initiator_device: "rxe_a1",
    bytes: 16 * MIB,
};

/// Which store the two meet in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meeting {
    Handshake,
    Http,
    Etcd,
}

impl fmt::Display for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Handshake => "P2PHANDSHAKE",
            Self::Http => "http (ours)",
            Self::Etcd => "etcd",
        })
    }
}

/// Runs the table for `setting`, a line for each row; whether all rows passed.
///
/// # Errors
/// If a store cannot be started, or there is no C++ engine.
pub fn run(setting: Setting) -> Result<bool> {
    let cpp = Cpp::from_env()?;
    let (mut passed, mut failed) = (0, 0);
    for meeting in [Meeting::Handshake, Meeting::Http, Meeting::Etcd] {
        let store = match meeting {
            Meeting::Handshake => None,
            Meeting::Http => Some(Store::http()?),
            Meeting::Etcd => Some(Store::etcd()?),
        };
        let url = store.as_ref().map_or("P2PHANDSHAKE", Store::url);
        type Row = fn(&Cpp, Setting, &str) -> Result<()>;
        let rows = [
            ("C++ -> Rerail  write, read", cpp_initiates as Row),
            ("Rerail -> C++  write", |cpp, setting, url| {
                we_initiate(cpp, setting, url, "write")
            }),
            ("Rerail -> C++  read", |cpp, setting, url| {
                we_initiate(cpp, setting, url, "read")
            }),
        ];
        for (name, row) in rows {
            let started = Instant::now();
            let outcome = row(&cpp, setting, url);
            let seconds = started.elapsed().as_secs_f64();
            let protocol = setting.protocol;
            let title = format!("{protocol:4}  {name:28} {meeting}");
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
fn cpp_initiates(cpp: &Cpp, setting: Setting, url: &str) -> Result<()> {
    let side = side("rerail-target", setting, setting.target_device, url);
    let target = Target::start(&side, setting.bytes)?;
    let mut command = cpp.command("initiator", setting, setting.initiator_device, url);
    command.args([
        "--segment",
        target.segment(),
        "--block",
        &ODD_BLOCK.to_string(),
    ]);
    command.args(["--bytes", &setting.bytes.to_string()]);
    let printed = stdout_within(command, MOVED_WITHIN)?;
    let report: Value = serde_json::from_str(printed.trim()).context("peer.py's report")?;
    ensure!(
        report["failed"] == 0 && report["wrong_pages"] == 0 && report["bytes"] == setting.bytes,
        "the C++ engine reports {printed}"
    );
    target.stop()
}

/// We move bytes to or from a C++ target and verify them by the opposite operation.
fn we_initiate(cpp: &Cpp, setting: Setting, url: &str, operation: &'static str) -> Result<()> {
    let mut command = cpp.command("target", setting, setting.target_device, url);
    command.args(["--size", &setting.bytes.to_string()]);
    let target = Server::start(command, "ready ", READY_WITHIN)?;
    let segment = target.ready_line()["ready ".len()..].to_owned();
    let side = side("rerail-initiator", setting, setting.initiator_device, url);
    for block in [64 * 1024, ODD_BLOCK] {
        let bytes = (setting.bytes / 2).next_multiple_of(block);
        let load = Load::verified(operation, block, bytes);
        load.run(&side, &segment, MOVED_WITHIN)?
            .expect_clean(bytes)?;
    }
    let status = target.terminate(ENDED_WITHIN)?;
    ensure!(status.success(), "the C++ target ended with {status}");
    Ok(())
}

fn side(name: &str, setting: Setting, device: &str, url: &str) -> Side {
    let side = if device.is_empty() {
        Side::tcp(name)
    } else {
        Side::rdma(name, &[device])
    };
    debug_assert_eq!(side.protocol, setting.protocol);
    side.with_metadata(url)
}

/// Where the C++ engine is.
struct Cpp {
    python: PathBuf,
    script: PathBuf,
}

impl Cpp {
    /// `RERAIL_CPP_PYTHON` names the Python that has the engine's module; xtask sets it.
    fn from_env() -> Result<Self> {
        let python = std::env::var_os("RERAIL_CPP_PYTHON")
            .context("RERAIL_CPP_PYTHON is not set: run `cargo xtask interop`")?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/peer.py");
        Ok(Self {
            python: python.into(),
            script,
        })
    }

    fn command(&self, role: &str, setting: Setting, device: &str, url: &str) -> Command {
        let mut command = Command::new(&self.python);
        command.arg(&self.script).arg(role);
        command.args([
            "--metadata",
            url,
            "--protocol",
            setting.protocol,
            "--device",
            device,
        ]);
        // Without a store, a name is the host that peers connect to.
        let name = if url == "P2PHANDSHAKE" {
            "127.0.0.1".to_owned()
        } else {
            format!("cpp-{role}")
        };
        command
            .args(["--name", &name])
            .env("MC_TCP_BIND_ADDRESS", "127.0.0.1");
        command
    }
}
