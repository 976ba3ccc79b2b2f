//! Verified traffic between the two hosts of the rig, with everything that tells from outside what
//! happened to it: both sides' files of events, and each change that the store saw.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::bench::{Amount, Load, Report, Running, Side, Target};
use crate::child::{self, Process};
use crate::store::HttpStore;

/// Bytes of the target's buffer.
const BUFFER_BYTES: u64 = 16 << 20;
/// How long until traffic runs over all rails.
const WARM_WITHIN: Duration = Duration::from_secs(30);

/// What traffic there is to be.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Devices of the target.
    pub target: Vec<&'static str>,
    /// Devices of the initiator.
    pub initiator: Vec<&'static str>,
    /// How long it runs, in seconds.
    pub seconds: u64,
    /// `write` or `read`.
    pub operation: &'static str,
    /// Environment of the initiator.
    pub initiator_env: Vec<(String, String)>,
}

impl Plan {
    /// Writes over both rails.
    #[must_use]
    pub fn both_rails(seconds: u64) -> Self {
        Self {
            target: vec!["rxe_a0", "rxe_b0"],
            initiator: vec!["rxe_a1", "rxe_b1"],
            seconds,
            operation: "write",
            initiator_env: Vec::new(),
        }
    }

    /// Writes over rail a alone.
    #[must_use]
    pub fn rail_a(seconds: u64) -> Self {
        Self {
            target: vec!["rxe_a0"],
            initiator: vec!["rxe_a1"],
            ..Self::both_rails(seconds)
        }
    }
}

/// Running traffic.
pub struct Traffic {
    /// The metadata store.
    pub store: HttpStore,
    /// The target's side.
    pub target: Target,
    /// The target's events.
    pub target_log: EventLog,
    /// The initiator's events.
    pub own_log: EventLog,
    records: PathBuf,
    running: Running,
    _watcher: Process,
    _dir: TempDir,
}

impl Traffic {
    /// Starts store, target and initiator, and waits until every own NIC has a rail that is up.
    ///
    /// # Errors
    /// If one of them does not come up, or traffic does not begin.
    pub fn start(plan: &Plan) -> Result<Self> {
        let dir = TempDir::new()?;
        let path = |name: &str| dir.path().join(name);
        let store = HttpStore::start(&path("store"))?;
        let records = path("records");
        let mut watch = child::rerail()?;
        watch.args([
            "metadata",
            "watch",
            "--json",
            "--metadata",
            store.url(),
            "mooncake/ram/",
        ]);
        watch.stdout(Stdio::from(File::create(&records)?));
        let watcher = Process::start(watch)?;
        let side = |name: &str, devices: &[&str]| {
            let mut side = Side::rdma(name, devices).with_metadata(store.url());
            side.events = Some(path(&format!("{name}.events")));
            side.env = vec![("MC_TCP_BIND_ADDRESS".to_owned(), "127.0.0.1".to_owned())];
            side
        };
        let target = Target::start(&side("target", &plan.target), BUFFER_BYTES)?;
        let load = Load {
            operation: plan.operation,
            block_bytes: 256 << 10,
            batch: 4,
            threads: 1,
            amount: Amount::Seconds(plan.seconds),
            verify: true,
        };
        let limit = Duration::from_secs(plan.seconds);
        let mut initiator = side("initiator", &plan.initiator);
        initiator.env.extend(plan.initiator_env.iter().cloned());
        let running = load.start(&initiator, target.segment(), limit)?;
        let traffic = Self {
            target_log: EventLog(path("target.events")),
            own_log: EventLog(path("initiator.events")),
            store,
            target,
            records,
            running,
            _watcher: watcher,
            _dir: dir,
        };
        for device in &plan.initiator {
            traffic
                .own_log
                .wait("a rail is up", WARM_WITHIN, 0, |event| {
                    is_rail(event, device, "up")
                })?;
        }
        Ok(traffic)
    }

    /// The initiator's process id, for signals.
    #[must_use]
    pub fn initiator_pid(&self) -> u32 {
        self.running.pid()
    }

    /// Waits for the initiator's end.
    ///
    /// # Errors
    /// If it fails, or the target does.
    pub fn finish(self) -> Result<Outcome> {
        let report = self.running.report()?;
        self.target.stop()?;
        Ok(Outcome {
            report,
            own: self.own_log.all()?,
            target: self.target_log.all()?,
            records: read_lines(&self.records)?,
        })
    }

    /// Ends the initiator before its time, as a user does.
    ///
    /// # Errors
    /// If it is not there any more.
    pub fn stop_initiator(self) -> Result<()> {
        crate::child::signal(self.running.pid(), "TERM")?;
        self.target.stop()
    }

    /// Each change of the records that the store has told so far, oldest first.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn records(&self) -> Result<Vec<Value>> {
        read_lines(&self.records)
    }
}

/// A file of events that is being written.
pub struct EventLog(PathBuf);

impl EventLog {
    /// All events so far.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn all(&self) -> Result<Vec<Value>> {
        read_lines(&self.0)
    }

    /// How many events there are so far: a mark for [`wait`](Self::wait).
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn mark(&self) -> Result<usize> {
        Ok(self.all()?.len())
    }

    /// Waits for the first event from `mark` on that is `wanted`.
    ///
    /// # Errors
    /// With `what` and the last events, if none comes within `limit`.
    pub fn wait(
        &self,
        what: &str,
        limit: Duration,
        mark: usize,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let begin = Instant::now();
        loop {
            let events = if self.0.exists() {
                self.all()?
            } else {
                Vec::new()
            };
            if let Some(event) = events.iter().skip(mark).find(|event| wanted(event)) {
                return Ok(event.clone());
            }
            if begin.elapsed() > limit {
                let last = events.iter().rev().take(20).rev();
                let last: Vec<_> = last.map(Value::to_string).collect();
                bail!(
                    "not within {limit:?}: {what}; the last events:\n{}",
                    last.join("\n")
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    /// The initiator's report.
    pub report: Report,
    /// The initiator's events.
    pub own: Vec<Value>,
    /// The target's events.
    pub target: Vec<Value>,
    /// Changes that the store told.
    pub records: Vec<Value>,
}

impl Outcome {
    /// Insists that nothing failed, something moved, and no thread waited longer than `stall`.
    ///
    /// # Errors
    /// With the whole report and the rails' events, if not so.
    pub fn expect_flow(&self, stall: Duration) -> Result<()> {
        let Report {
            failed,
            bytes,
            max_stall_ms,
            ..
        } = self.report;
        println!(
            "moved {bytes} bytes, {failed} failed, {} slices again, longest stall {max_stall_ms:.0} ms",
            self.report.retried_slices
        );
        let as_wanted = failed == 0 && bytes > 0 && max_stall_ms <= stall.as_secs_f64() * 1_000.0;
        ensure!(
            as_wanted,
            "{:?}\nlimit of a stall: {stall:?}\ninitiator:\n{}\ntarget:\n{}",
            self.report,
            lines(&self.own),
            lines(&self.target)
        );
        Ok(())
    }
}

/// The events as text, one a line.
#[must_use]
pub fn lines(events: &[Value]) -> String {
    let lines: Vec<_> = events.iter().map(Value::to_string).collect();
    lines.join("\n")
}

/// Whether the event is of this kind, at this NIC.
#[must_use]
pub fn is_of(event: &Value, kind: &str, nic: &str) -> bool {
    event["event"] == kind && event["nic"] == nic
}

/// Whether the event says that a rail from `local` is in `state` now.
#[must_use]
pub fn is_rail(event: &Value, local: &str, state: &str) -> bool {
    event["event"] == "rail" && event["local"] == local && event["to"] == state
}

/// When the event happened, in milliseconds of the machine's monotonic clock.
///
/// # Errors
/// If it does not say.
pub fn time_ms(event: &Value) -> Result<f64> {
    let nanos = event["time_ns"].as_u64();
    let nanos = nanos.with_context(|| format!("{event} has no time"))?;
    Ok(nanos as f64 / 1e6)
}

/// Milliseconds from one event to another.
///
/// # Errors
/// If one has no time.
pub fn between_ms(from: &Value, to: &Value) -> Result<f64> {
    Ok(time_ms(to)? - time_ms(from)?)
}

/// The JSON objects of a file, one a line; a last line that is not whole yet is left out.
fn read_lines(path: &Path) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |line: &str| serde_json::from_str(line).with_context(|| line.to_owned());
    whole.lines().map(parse).collect()
}
