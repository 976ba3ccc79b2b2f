//! `rerail bench`, driven as a user drives it: command line in, one JSON object out.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::child::{self, Job, Process, Server};

/// How long a target may take until it is ready. The guest emulates its processors.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// How long it may take to end after SIGTERM.
const ENDED_WITHIN: Duration = Duration::from_secs(10);
/// What an initiator may take on top of the time it was asked to run for.
const INITIATOR_SLACK: Duration = Duration::from_secs(60);

/// Options of one side that both have.
#[derive(Clone, Debug)]
pub struct Side {
    /// `--metadata`.
    pub metadata: String,
    /// `--name`.
    pub name: String,
    /// `--protocol`: `rdma` or `tcp`.
    pub protocol: &'static str,
    /// `--device`, joined by commas; empty for all.
    pub devices: Vec<String>,
    /// `--events`.
    pub events: Option<PathBuf>,
    /// Any more arguments.
    pub more: Vec<String>,
    /// Environment of the process.
    pub env: Vec<(String, String)>,
}

impl Side {
    /// RDMA over the named devices, shaking hands without a store.
    #[must_use]
    pub fn rdma(name: &str, devices: &[&str]) -> Self {
        Self {
            metadata: "P2PHANDSHAKE".to_owned(),
            name: name.to_owned(),
            protocol: "rdma",
            devices: devices.iter().map(|&device| device.to_owned()).collect(),
            events: None,
            more: Vec::new(),
            env: Vec::new(),
        }
    }

    /// TCP on loopback, shaking hands without a store.
    #[must_use]
    pub fn tcp(name: &str) -> Self {
        Self {
            protocol: "tcp",
            ..Self::rdma(name, &[])
        }
    }

    /// Takes `url` for the metadata store.
    #[must_use]
    pub fn with_metadata(mut self, url: &str) -> Self {
        url.clone_into(&mut self.metadata);
        self
    }

    fn command(&self, role: &str) -> Result<std::process::Command> {
        let mut command = child::rerail()?;
        command.args([
            "bench",
            role,
            "--metadata",
            &self.metadata,
            "--name",
            &self.name,
        ]);
        command.args(["--protocol", self.protocol]);
        if !self.devices.is_empty() {
            command.args(["--device", &self.devices.join(",")]);
        }
        if let Some(events) = &self.events {
            command.arg("--events").arg(events);
        }
        command.args(&self.more);
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }
}

/// A running `rerail bench target`.
pub struct Target {
    server: Server,
    segment: String,
    rpc: String,
}

impl Target {
    /// Starts it with a buffer of `buffer_bytes` and waits until it can be used.
    ///
    /// # Errors
    /// If it does not say `ready NAME rpc=HOST:PORT` in time.
    pub fn start(side: &Side, buffer_bytes: u64) -> Result<Self> {
        let mut command = side.command("target")?;
        command.args(["--buffer-size", &buffer_bytes.to_string()]);
        if !side.more.iter().any(|argument| argument == "--advertise") {
            // Control traffic of both hosts runs over loopback, in the guest too.
            command.args(["--advertise", "127.0.0.1"]);
        }
        let server = Server::start(command, "ready ", READY_WITHIN)?;
        let line = server.ready_line();
        let (name, rpc) = line["ready ".len()..]
            .split_once(" rpc=")
            .with_context(|| format!("`{line}` is not `ready NAME rpc=HOST:PORT`"))?;
        ensure!(
            rpc.rsplit_once(':')
                .is_some_and(|(_, port)| port.parse::<u16>().is_ok()),
            "`{rpc}` is not HOST:PORT"
        );
        // Without a store, the place of the RPC server is the segment's name.
        let segment = if side.metadata == "P2PHANDSHAKE" {
            rpc
        } else {
            name
        }
        .to_owned();
        let rpc = rpc.to_owned();
        Ok(Self {
            server,
            segment,
            rpc,
        })
    }

    /// `host:port` of its RPC server.
    #[must_use]
    pub fn rpc(&self) -> &str {
        &self.rpc
    }

    /// Kills it, so that it can say nothing to anybody.
    pub fn kill(self) {}

    /// What initiators give as `--segment`.
    #[must_use]
    pub fn segment(&self) -> &str {
        &self.segment
    }

    /// The process.
    pub fn process(&mut self) -> &mut Process {
        self.server.process()
    }

    /// Ends it with SIGTERM.
    ///
    /// # Errors
    /// If it does not end, or not with status 0.
    pub fn stop(self) -> Result<()> {
        let status = self.server.terminate(ENDED_WITHIN)?;
        ensure!(
            status.success(),
            "the target ended with {status} on SIGTERM"
        );
        Ok(())
    }
}

/// How much an initiator does.
#[derive(Clone, Copy, Debug)]
pub enum Amount {
    /// `--bytes`.
    Bytes(u64),
    /// `--duration`, in whole seconds.
    Seconds(u64),
}

/// One run of `rerail bench initiator`.
#[derive(Clone, Debug)]
pub struct Load {
    /// `--operation`: `write` or `read`.
    pub operation: &'static str,
    /// `--block-size`.
    pub block_bytes: u64,
    /// `--batch-size`.
    pub batch: u32,
    /// `--threads`.
    pub threads: u32,
    /// `--bytes` or `--duration`.
    pub amount: Amount,
    /// `--verify`.
    pub verify: bool,
}

impl Load {
    /// One thread that moves `bytes` in blocks of `block_bytes` and verifies them.
    #[must_use]
    pub fn verified(operation: &'static str, block_bytes: u64, bytes: u64) -> Self {
        Self {
            operation,
            block_bytes,
            batch: 8,
            threads: 1,
            amount: Amount::Bytes(bytes),
            verify: true,
        }
    }

    /// Runs it against `segment` and returns its report. `limit` bounds a run by bytes.
    ///
    /// # Errors
    /// If it exits other than 0 or prints anything but one JSON object.
    pub fn run(&self, side: &Side, segment: &str, limit: Duration) -> Result<Report> {
        self.start(side, segment, limit)?.report()
    }

    /// Starts it and lets the caller make faults meanwhile.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(&self, side: &Side, segment: &str, limit: Duration) -> Result<Running> {
        let mut command = side.command("initiator")?;
        command
            .args([
                "--segment",
                segment,
                "--operation",
                self.operation,
                "--json",
            ])
            .args(["--block-size", &self.block_bytes.to_string()])
            .args(["--batch-size", &self.batch.to_string()])
            .args(["--threads", &self.threads.to_string()]);
        let limit = match self.amount {
            Amount::Bytes(bytes) => {
                command.args(["--bytes", &bytes.to_string()]);
                limit
            }
            Amount::Seconds(seconds) => {
                command.args(["--duration", &seconds.to_string()]);
                Duration::from_secs(seconds) + INITIATOR_SLACK
            }
        };
        if self.verify {
            command.arg("--verify");
        }
        Ok(Running {
            job: Job::start(command)?,
            limit,
        })
    }
}

/// An initiator at work.
pub struct Running {
    job: Job,
    limit: Duration,
}

impl Running {
    /// Its process id, for signals.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.job.pid()
    }

    /// Waits for its end, whatever it is.
    ///
    /// # Errors
    /// If it does not end in time.
    pub fn output(self) -> Result<std::process::Output> {
        self.job.output_within(self.limit)
    }

    /// Waits for its end and returns its report.
    ///
    /// # Errors
    /// As [`Load::run`].
    pub fn report(self) -> Result<Report> {
        let shown = self.job.shown().to_owned();
        Report::parse(&self.job.stdout_within(self.limit)?).with_context(|| shown)
    }
}

/// The initiator's JSON object.
#[derive(Clone, Debug, Deserialize)]
pub struct Report {
    /// Bytes moved by the named operation.
    pub bytes: u64,
    /// Time it took.
    pub seconds: f64,
    /// 10⁹ bytes a second.
    pub gbytes_per_s: f64,
    /// Requests of the named operation.
    pub ops: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Slices that were posted again.
    pub retried_slices: u64,
    /// Longest time between successive completions of a thread.
    pub max_stall_ms: f64,
    /// Median latency of a request.
    pub p50_us: f64,
    /// Latency that one request in a hundred exceeds.
    pub p99_us: f64,
    /// What each rail carried.
    pub rails: Vec<RailReport>,
}

/// One rail of a [`Report`].
#[derive(Clone, Debug, Deserialize)]
pub struct RailReport {
    /// Local device.
    pub local: String,
    /// Peer's device.
    pub peer: String,
    /// Bytes that it carried.
    pub bytes: u64,
    /// Errors seen on it.
    pub errors: u64,
    /// State at the end.
    pub state: String,
}

impl Report {
    /// Reads the one line that the initiator prints.
    fn parse(stdout: &str) -> Result<Self> {
        let mut lines = stdout.lines();
        let (Some(line), None) = (lines.next(), lines.next()) else {
            bail!("expected one line with a JSON object, got `{stdout}`");
        };
        serde_json::from_str(line).with_context(|| format!("no report: `{line}`"))
    }

    /// Insists that nothing failed and that at least `bytes` were moved.
    ///
    /// # Errors
    /// With the whole report, if not so.
    pub fn expect_clean(&self, bytes: u64) -> Result<()> {
        ensure!(
            self.failed == 0,
            "{} requests failed: {self:?}",
            self.failed
        );
        ensure!(
            self.bytes >= bytes,
            "only {} of {bytes} bytes were moved: {self:?}",
            self.bytes
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Report;

    #[test]
    fn a_report_is_one_line_with_all_members() {
        let line = r#"{"bytes":8,"seconds":0.5,"gbytes_per_s":1.6e-8,"ops":1,"failed":0,"retried_slices":0,"max_stall_ms":1,"p50_us":2,"p99_us":3,"rails":[{"local":"rxe_a1","peer":"rxe_a0","bytes":8,"errors":0,"state":"up"}]}"#;
        let report = Report::parse(&format!("{line}\n")).expect("a report");
        assert!(report.expect_clean(8).is_ok());
        assert!(report.expect_clean(9).is_err());
        assert_eq!(report.rails[0].peer, "rxe_a0");
        assert!(Report::parse(&format!("{line}\n{line}\n")).is_err());
        assert!(Report::parse(&line.replace("\"ops\":1,", "")).is_err());
        assert!(Report::parse("").is_err());
    }
}
