//! The ends of an interop test that the C++ engine plays: its Python module, its bench and its
//! metadata server, all from one Python environment outside the repository.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{HANDSHAKE, Setting};
use crate::child::{Server, output_within};

/// How long an end may take until it is ready: it loads 40 MB of libraries, in the guest slowly.
const READY_WITHIN: Duration = Duration::from_secs(90);
/// What its bench submits at once.
const BENCH_THREADS: u64 = 2;
const BENCH_BATCH: u64 = 16;
const BENCH_BLOCK: u64 = 64 * 1024;
/// The bench raises its buffer to this, and so must a target be.
pub(super) const BENCH_BUFFER: u64 = BENCH_THREADS * BENCH_BATCH * BENCH_BLOCK;
/// What the bench says once it listens, and the last line before it registers its buffer.
const BENCH_LISTENS: &str = "listening on ";
const BENCH_READY: &str = "DRAM is used";

/// Where the C++ engine is.
pub(super) struct Cpp {
    python: PathBuf,
}

impl Cpp {
    /// `RERAIL_CPP_PYTHON` names the Python that has the engine's module; xtask sets it.
    pub(super) fn from_env() -> Result<Self> {
        let python = std::env::var_os("RERAIL_CPP_PYTHON")
            .context("RERAIL_CPP_PYTHON is not set: run `cargo xtask interop`")?;
        Ok(Self {
            python: python.into(),
        })
    }

    /// The Python of its environment.
    pub(super) fn python(&self) -> &Path {
        &self.python
    }

    /// `peer.py ROLE`, the engine's Python module as one end.
    pub(super) fn peer(&self, role: &str, setting: &Setting, device: &str, url: &str) -> Command {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/peer.py");
        let mut command = Command::new(&self.python);
        command
            .arg(script)
            .args([role, "--metadata", url, "--name", &name(role, url)])
            .args(["--protocol", setting.protocol, "--device", device]);
        command
    }

    /// Its bench as a target; the segment that initiators open.
    pub(super) fn bench_target(&self, setting: &Setting, url: &str) -> Result<(Server, String)> {
        let name = name("target", url);
        let bench = self.bench("target", &name, setting, setting.target_device, url)?;
        // What it has to say it says on stderr.
        let mut command = Command::new("sh");
        command
            .args(["-c", "exec \"$@\" 2>&1", "sh"])
            .arg(bench.get_program())
            .args(bench.get_args());
        for (variable, value) in bench.get_envs() {
            command.env(variable, value.unwrap_or_default());
        }
        let server = Server::start(command, BENCH_READY, READY_WITHIN)?;
        let mut lines = server.lines_until_ready().iter();
        let listens = lines.find_map(|line| Some(line.split_once(BENCH_LISTENS)?.1.to_owned()));
        let segment = match url {
            HANDSHAKE => listens.context("it does not say where it listens")?,
            _ => name,
        };
        Ok((server, segment))
    }

    /// Its bench as the initiator, for two seconds.
    pub(super) fn bench_initiator(
        &self,
        setting: &Setting,
        url: &str,
        segment: &str,
        operation: &str,
        limit: Duration,
    ) -> Result<()> {
        let name = name("initiator", url);
        let device = setting.initiator_device;
        let mut command = self.bench("initiator", &name, setting, device, url)?;
        command
            .arg(format!("-segment_id={segment}"))
            .arg(format!("-operation={operation}"))
            .arg("-duration=2");
        let output = output_within(command, limit)?;
        let said = String::from_utf8_lossy(&output.stderr);
        // It exits with 0 whatever happens, and says so in words.
        let batches = said
            .split_once("batch count ")
            .and_then(|(_, rest)| rest.split(',').next()?.parse::<u64>().ok());
        let done = said.contains("Test completed") && batches.is_some_and(|batches| batches > 0);
        ensure!(
            output.status.success() && done && !said.contains("FAILED"),
            "the C++ bench ended with {} and said:\n{said}",
            output.status
        );
        Ok(())
    }

    fn bench(
        &self,
        mode: &str,
        name: &str,
        setting: &Setting,
        device: &str,
        url: &str,
    ) -> Result<Command> {
        let mut command = Command::new(self.package()?.join("transfer_engine_bench"));
        command
            .arg(format!("-mode={mode}"))
            .arg(format!("-metadata_server={url}"))
            .arg(format!("-local_server_name={name}"))
            .arg(format!("-protocol={}", setting.protocol))
            .arg(format!("-device_name={device}"))
            .arg(format!("-buffer_size={BENCH_BUFFER}"))
            .arg(format!("-block_size={BENCH_BLOCK}"))
            .arg(format!("-batch_size={BENCH_BATCH}"))
            .arg(format!("-threads={BENCH_THREADS}"))
            // Lines then begin with their text.
            .arg("-log_prefix=false")
            .env("MC_TCP_BIND_ADDRESS", "127.0.0.1");
        if setting.protocol == "tcp" {
            command.env("MC_FORCE_TCP", "1");
        }
        Ok(command)
    }

    /// The package's directory: `lib/pythonX.Y/site-packages/mooncake` of the environment.
    fn package(&self) -> Result<PathBuf> {
        let environment = self.python.ancestors().nth(2);
        let lib = environment
            .context("RERAIL_CPP_PYTHON is no bin/python")?
            .join("lib");
        let mut versions = std::fs::read_dir(&lib).with_context(|| lib.display().to_string())?;
        versions
            .find_map(|version| {
                let package = version.ok()?.path().join("site-packages/mooncake");
                package.is_dir().then_some(package)
            })
            .with_context(|| format!("{} has no package mooncake", lib.display()))
    }
}

/// Without a store, a name is the host that peers connect to. In a store no two ends have the same
/// one: the engine's Python module leaves its record behind.
fn name(role: &str, url: &str) -> String {
    static ENDS: AtomicU32 = AtomicU32::new(0);
    match url {
        HANDSHAKE => "127.0.0.1".to_owned(),
        _ => format!("cpp-{role}-{}", ENDS.fetch_add(1, Ordering::Relaxed)),
    }
}
