//! What both roles have in common: starting an engine, and writing events.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use clap::ValueEnum;
use rerail_engine::{Engine, EngineConfig, EngineError, Event, Events, Subscriber, Transport};
use rerail_transport::machine::Time;
use rerail_verbs::DeviceList;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::advice;
use crate::failure::{Failure, ResultExt as _};

/// Most bytes of a buffer or block.
const BYTES_MAX: u64 = 1 << 40;

/// How bytes move.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum Protocol {
    /// Over verbs devices
    Rdma,
    /// Over sockets
    Tcp,
}

/// Options of both roles.
#[derive(clap::Args)]
pub(super) struct Common {
    /// Metadata store: etcd://, redis://, http://, memory://, or P2PHANDSHAKE for none
    #[arg(long, value_name = "URL")]
    metadata: String,
    /// Name of the own segment. Without a store (P2PHANDSHAKE) peers use its HOST:PORT instead; an
    /// IP address as the name is then the host that they are told, and a port behind it is ignored
    #[arg(long, value_parser = segment_name)]
    name: String,
    /// How bytes move (default: rdma, or tcp where MC_FORCE_TCP is set)
    #[arg(long, value_enum)]
    protocol: Option<Protocol>,
    /// Devices joined by commas, each as NAME or NAME:PORT (default: all). One must work; others
    /// are taken in once they do
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    device: Vec<String>,
    /// Host that peers are told (default: found by itself)
    #[arg(long, value_name = "HOST")]
    advertise: Option<String>,
    /// File for events, one JSON object on a line each
    #[arg(long, value_name = "FILE")]
    events: Option<PathBuf>,
}

impl Common {
    /// Starts the engine, which tells its events to `log`.
    pub(super) fn engine(&self, log: &Arc<EventLog>) -> anyhow::Result<Engine> {
        let mut config = EngineConfig::new(&self.metadata, &self.name).or_fail(
            "the settings cannot be used",
            "correct the value that is named",
        )?;
        config.events = Events::new(Arc::clone(log) as Arc<dyn Subscriber>);
        config.devices.clone_from(&self.device);
        if let Some(host) = &self.advertise {
            config.advertise = Some(host.clone());
        }
        match self.protocol {
            None => {}
            Some(Protocol::Rdma) => config.transport = Transport::Rdma,
            Some(Protocol::Tcp) => config.transport = Transport::Tcp,
        }
        let devices = match config.transport {
            Transport::Rdma => devices()?,
            _ => DeviceList::default(),
        };
        Engine::start(config, &devices)
            .map_err(|error| failed(error, "the engine cannot be started", "see the cause"))
    }

    /// Opens the file of events.
    pub(super) fn events(&self) -> anyhow::Result<Arc<EventLog>> {
        let file = match &self.events {
            None => None,
            Some(path) => Some(File::create(path).or_fail(
                format!("{} cannot be written", path.display()),
                "name a file in a folder that exists and may be written",
            )?),
        };
        Ok(Arc::new(EventLog(file.map(Mutex::new))))
    }
}

/// Where events go: one JSON object a line, with the machine's monotonic time in nanoseconds, so
/// that the files of several processes can be laid side by side.
pub(super) struct EventLog(Option<Mutex<File>>);

impl EventLog {
    /// Writes an event of the program's own.
    pub(super) fn write(&self, event: &str, mut members: Value) {
        members["event"] = json!(event);
        self.line(members);
    }

    fn line(&self, mut event: Value) {
        let Some(file) = &self.0 else {
            return;
        };
        let now = clock_gettime(ClockId::Monotonic);
        event["time_ns"] = json!(now.tv_sec * 1_000_000_000 + now.tv_nsec);
        // One write a line: whoever reads along never sees half of one.
        let line = format!("{event}\n");
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = file.write_all(line.as_bytes()) {
            // Moving bytes goes on: it is what the program is for.
            tracing::error!(%error, "an event cannot be written");
        }
    }
}

impl Subscriber for EventLog {
    fn event(&self, _at: Time, event: &Event) {
        if self.0.is_some()
            && let Ok(event) = serde_json::to_value(event)
        {
            self.line(event);
        }
    }
}

#[cfg(feature = "ibv")]
fn devices() -> anyhow::Result<DeviceList> {
    rerail_verbs::ibv::devices().or_fail(
        "the RDMA devices cannot be listed",
        "load the kernel modules ib_uverbs and that of the device, or use --protocol tcp",
    )
}

#[cfg(not(feature = "ibv"))]
fn devices() -> anyhow::Result<DeviceList> {
    Err(anyhow::Error::new(Failure::new(
        "this build has no RDMA",
        "use --protocol tcp, or build it with the feature `ibv`",
    )))
}

/// A number of bytes: digits only, so that nobody has to guess whether a `k` is 1 000 or 1 024.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(bytes) if (1..=BYTES_MAX).contains(&bytes) => Ok(bytes),
        _ => Err(format!(
            "expected a number of bytes in 1..={BYTES_MAX}, in digits alone, such as 65536"
        )),
    }
}

/// The name of the own segment.
fn segment_name(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("expected a name that is not empty".to_owned());
    }
    Ok(text.to_owned())
}

/// The error of an operation of the engine, with advice by its kind, or else `remedy`.
pub(super) fn failed(error: EngineError, what: impl Into<String>, remedy: &str) -> anyhow::Error {
    let remedy = advice::about(&error, remedy);
    anyhow::Error::from(error).context(Failure::new(what, remedy))
}

/// A value that makes no sense together with another.
pub(super) fn usage(what: impl Into<String>, remedy: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Failure::new(what, remedy))
}
