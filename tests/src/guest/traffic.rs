//! Verified traffic between the two hosts of the rig, with everything that tells from outside what
//! happened to it: both sides' files of events, and the store's log of writes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::bench::{Amount, Load, Report, Running, Side, Target};
use crate::store::{HttpStore, json_lines};

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
    /// Environment of the target.
    pub target_env: Vec<(String, String)>,
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
            target_env: Vec::new(),
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
    running: Running,
    _dir: TempDir,
}

impl Traffic {
    /// Starts store, target and initiator, and waits until every own NIC that is there has a rail
    /// that is up.
    ///
    /// # Errors
    /// If one of them does not come up, or traffic does not begin.
    pub fn start(plan: &Plan) -> Result<Self> {
        let dir = TempDir::new()?;
        let path = |name: &str| dir.path().join(name);
        let store = HttpStore::start(&path("store"))?;
        let side = |name: &str, devices: &[&str]| {
            let mut side = Side::rdma(name, devices).with_metadata(store.url());
            side.events = Some(path(&format!("{name}.events")));
            side.env = vec![("MC_TCP_BIND_ADDRESS".to_owned(), "127.0.0.1".to_owned())];
            side
        };
        let mut target = side("target", &plan.target);
        target.env.extend(plan.target_env.iter().cloned());
        let target = Target::start(&target, BUFFER_BYTES)?;
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
            running,
            _dir: dir,
        };
        let is_there = |device: &&&str| Path::new("/sys/class/infiniband").join(device).exists();
        for device in plan.initiator.iter().filter(is_there) {
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
            records: segments(self.store.writes()?),
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

    /// Each write of a segment's record that the store has accepted so far, oldest first.
    ///
    /// # Errors
    /// If the store's log of writes cannot be read.
    pub fn records(&self) -> Result<Vec<Value>> {
        Ok(segments(self.store.writes()?))
    }
}

/// A file of events that is being written.
pub struct EventLog(PathBuf);

impl EventLog {
    /// The file at `path`, which need not be there yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// All events so far.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn all(&self) -> Result<Vec<Value>> {
        json_lines(&self.0)
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
    /// Writes of segments' records that the store accepted.
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

/// NIC paths of a record: those by which its owner lets itself be called.
///
/// # Errors
/// If it has no name or no devices.
pub fn nic_paths(record: &Value) -> Result<BTreeSet<String>> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let server = text(&record["rdma_server_name"]).filter(|server| !server.is_empty());
    let server = server
        .or_else(|| text(&record["name"]))
        .context("a record without a name")?;
    let devices = record["devices"]
        .as_array()
        .context("a record without devices")?;
    let names = devices.iter().filter_map(|device| device["name"].as_str());
    Ok(names.map(|name| format!("{server}@{name}")).collect())
}

/// NIC paths of peers to which rails have led.
#[must_use]
pub fn peers_of_rails(events: &[Value]) -> BTreeSet<String> {
    let rails = events.iter().filter(|event| event["event"] == "rail");
    rails
        .filter_map(|event| event["peer"].as_str().map(str::to_owned))
        .collect()
}

/// The writes of segments' records.
fn segments(writes: Vec<Value>) -> Vec<Value> {
    let is_segment = |write: &Value| {
        let key = write["key"].as_str().unwrap_or_default();
        write["action"] == "put" && key.starts_with("mooncake/ram/")
    };
    writes.into_iter().filter(is_segment).collect()
}
