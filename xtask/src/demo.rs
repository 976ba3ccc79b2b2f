//! `cargo xtask demo`: a metadata store, a target and an initiator as processes on this machine.
//!
//! Over TCP it needs Rust and a C linker, and runs in seconds once it is built; with `--soft-roce`
//! the same three run in the guest, over real verbs. Faults are deliberately not shown here but by
//! the guest's scenarios (`cargo xtask guest`).

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::guest::Session;
use crate::process::{self, BoundChild};
use crate::{setup, workspace};

/// How long a process may take to be ready, to move the data, and to end.
const READY_WITHIN: Duration = Duration::from_secs(30);
const MOVED_WITHIN_S: u64 = 120;
const ENDED_WITHIN: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(20);
/// The guest's limit: it boots, and its processors are emulated.
const GUEST_LIMIT_S: u64 = 600;
const GUEST_MEMORY_MIB: u32 = 4096;
const MIB: u64 = 1024 * 1024;

/// Arguments of `cargo xtask demo`.
#[derive(clap::Args, Default)]
pub(crate) struct DemoArgs {
    /// Over real verbs, in the soft-RoCE guest, instead of over TCP on this machine. Needs what
    /// `cargo xtask setup` installs, 4 GiB of memory and some minutes; no RDMA device, no root.
    #[arg(long)]
    soft_roce: bool,
    /// Runs it with a program that is already built, here and now.
    #[arg(long, hide = true, value_name = "RERAIL")]
    with: Option<PathBuf>,
}

/// Builds the program and runs the demo.
pub(crate) fn run(args: &DemoArgs) -> Result<ExitCode> {
    if let Some(rerail) = &args.with {
        let show = if args.soft_roce {
            Show::soft_roce(rerail)
        } else {
            Show::tcp(rerail)
        };
        show.run()?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.soft_roce {
        return in_guest();
    }
    println!("demo: building the program; Rust and a C linker are needed");
    let mut build = process::cargo();
    build.args([
        "build",
        "--locked",
        "--package",
        "rerail",
        "--no-default-features",
    ]);
    // The store's client is `http`, its server `server`.
    build.args(["--features", "sim,server,http"]);
    process::run(&mut build)?;
    Show::tcp(&workspace::target().join("debug/rerail")).run()?;
    Ok(ExitCode::SUCCESS)
}

/// Starts this program in the guest, to run the demo there.
fn in_guest() -> Result<ExitCode> {
    println!(
        "demo: over soft-RoCE it runs in a guest of QEMU, with Debian's kernel and this machine's \
         programs; it needs no RDMA device, no root and no KVM, but {} GiB of memory, some minutes, \
         the network at the first start (the kernel is fetched), and what `cargo xtask setup` \
         installs",
        GUEST_MEMORY_MIB / 1024
    );
    setup::check_guest()?;
    println!("demo: building the program with real verbs");
    let mut build = process::cargo();
    // With all features, as everything else here builds it.
    build.args(["build", "--locked", "--package", "rerail"]);
    process::run(&mut build)?;
    let command: [OsString; 5] = [
        std::env::current_exe()?.into(),
        "demo".into(),
        "--soft-roce".into(),
        "--with".into(),
        workspace::target().join("debug/rerail").into(),
    ];
    println!("demo: booting the guest");
    let ending = Session {
        command: command.to_vec(),
        env: Vec::new(),
        cwd: workspace::root(),
        timeout: Duration::from_secs(GUEST_LIMIT_S),
        memory_mib: GUEST_MEMORY_MIB,
        cpus: 2,
        out: workspace::target().join("guest/out"),
        rig: true,
    }
    .run()?;
    if let Some(problem) = ending.problem(GUEST_LIMIT_S) {
        bail!("{problem}");
    }
    Ok(ending.exit_code())
}

/// What is moved, and over what.
struct Show<'a> {
    rerail: &'a Path,
    protocol: &'static str,
    /// Devices of the target and of the initiator; `None` if the protocol has none.
    devices: Option<(&'static str, &'static str)>,
    bytes: u64,
    blocks: &'static [u64],
}

impl<'a> Show<'a> {
    fn tcp(rerail: &'a Path) -> Self {
        let blocks = &[64 * 1024, MIB];
        Self {
            rerail,
            protocol: "tcp",
            devices: None,
            bytes: 256 * MIB,
            blocks,
        }
    }

    fn soft_roce(rerail: &'a Path) -> Self {
        let devices = Some(("rxe_a0", "rxe_a1"));
        Self {
            rerail,
            protocol: "rdma",
            devices,
            bytes: 64 * MIB,
            blocks: &[64 * 1024],
        }
    }

    fn run(&self) -> Result<()> {
        println!("demo: starting a metadata store: rerail metadata serve");
        let mut serve = BoundChild::start(self.rerail, |command| {
            command.args(["metadata", "serve", "--listen", "127.0.0.1:0"]);
            command.stdin(Stdio::null()).stdout(Stdio::piped());
        })?;
        let ready = first_line(&mut serve)?;
        let store = ready
            .strip_prefix("ready ")
            .with_context(|| format!("the metadata store said `{ready}`"))?;
        println!("demo: the store is at {store}");

        println!("demo: starting a target, which publishes its memory there");
        let mut target = BoundChild::start(self.rerail, |command| {
            command.args([
                "bench",
                "target",
                "--metadata",
                store,
                "--name",
                "demo-target",
            ]);
            command.args(["--protocol", self.protocol, "--advertise", "127.0.0.1"]);
            command.args(["--buffer-size", &(64 * MIB).to_string()]);
            if let Some((device, _)) = self.devices {
                command.args(["--device", device]);
            }
            command.stdin(Stdio::null()).stdout(Stdio::piped());
        })?;
        let ready = first_line(&mut target)?;
        ensure!(ready.starts_with("ready "), "the target said `{ready}`");
        println!("demo: target: {ready}");

        for operation in ["write", "read"] {
            for &block in self.blocks {
                self.transfer(store, operation, block)?;
            }
        }
        println!("demo: ending the target; it withdraws what it had published");
        end(&mut target)?;
        println!("demo: every byte arrived, nothing failed");
        Ok(())
    }

    /// Runs an initiator and says what it reports.
    fn transfer(&self, store: &str, operation: &str, block: u64) -> Result<()> {
        let mut command = Command::new("timeout");
        command.arg(MOVED_WITHIN_S.to_string()).arg(self.rerail);
        command.args([
            "bench",
            "initiator",
            "--metadata",
            store,
            "--name",
            "demo-initiator",
        ]);
        command.args(["--segment", "demo-target", "--protocol", self.protocol]);
        command.args(["--operation", operation, "--block-size", &block.to_string()]);
        command.args(["--batch-size", "16", "--threads", "1", "--verify", "--json"]);
        command.args(["--bytes", &self.bytes.to_string()]);
        if let Some((_, device)) = self.devices {
            command.args(["--device", device]);
        }
        let printed = process::output(&mut command)?;
        let report: Value = serde_json::from_str(printed.trim())
            .with_context(|| format!("the initiator's report `{printed}`"))?;
        let number = |name: &str| {
            let value = report[name].as_f64();
            value.with_context(|| format!("the report has no `{name}`: {printed}"))
        };
        ensure!(number("failed")? == 0.0, "requests failed: {printed}");
        let bytes = report["bytes"].as_u64().unwrap_or_default();
        ensure!(
            bytes >= self.bytes,
            "only {bytes} of {} bytes were moved",
            self.bytes
        );
        println!(
            "demo: {operation:5} {} MiB in blocks of {:4} KiB: {:.2} GB/s, median {:.0} us; verified",
            bytes / MIB,
            block / 1024,
            number("gbytes_per_s")?,
            number("p50_us")?
        );
        Ok(())
    }
}

/// The first line that `child` prints.
fn first_line(child: &mut BoundChild) -> Result<String> {
    let stdout = child
        .get()
        .stdout
        .take()
        .context("the child's stdout is not a pipe")?;
    let (send, lines) = mpsc::channel();
    std::thread::spawn(move || {
        // Reads to the end, so that the child never blocks on a full pipe.
        for line in BufReader::new(stdout)
            .lines()
            .map_while(std::io::Result::ok)
        {
            let _ = send.send(line);
        }
    });
    let line = lines.recv_timeout(READY_WITHIN);
    line.with_context(|| {
        format!(
            "the target was not ready within {} s",
            READY_WITHIN.as_secs()
        )
    })
}

/// Ends `child` as a service manager would.
fn end(child: &mut BoundChild) -> Result<()> {
    let pid = child.get().id().to_string();
    process::run(Command::new("kill").args(["-TERM", &pid]))?;
    let deadline = Instant::now() + ENDED_WITHIN;
    loop {
        if let Some(status) = child.get().try_wait()? {
            ensure!(
                status.success(),
                "the target ended with {status} on SIGTERM"
            );
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "the target does not end on SIGTERM"
        );
        std::thread::sleep(TICK);
    }
}
