//! What both roles have in common: starting an engine, and writing events.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use clap::ValueEnum;
use rerail_engine::{Engine, EngineConfig, Transport};
use rerail_verbs::DeviceList;
use serde_json::Value;

use crate::failure::{Failure, ResultExt as _};

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
    /// Name of the own segment
    #[arg(long)]
    name: String,
    /// How bytes move
    #[arg(long, value_enum, default_value = "rdma")]
    protocol: Protocol,
    /// Devices joined by commas, each as NAME or NAME:PORT (default: all)
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
    /// Starts the engine.
    pub(super) fn engine(&self) -> anyhow::Result<Engine> {
        let mut config = EngineConfig::new(&self.metadata, &self.name).or_fail(
            "the settings cannot be used",
            "correct the value that is named",
        )?;
        config.devices.clone_from(&self.device);
        if let Some(host) = &self.advertise {
            config.advertise = Some(host.clone());
        }
        let devices = match self.protocol {
            Protocol::Rdma => devices()?,
            Protocol::Tcp => DeviceList::default(),
        };
        config.transport = match self.protocol {
            Protocol::Rdma => Transport::Rdma,
            Protocol::Tcp => Transport::Tcp,
        };
        Engine::start(config, &devices).or_fail(
            "the engine cannot be started",
            "look at the devices with `rdma link`, and at the store's address",
        )
    }

    /// Opens the file of events.
    pub(super) fn events(&self) -> anyhow::Result<Events> {
        let file = match &self.events {
            None => None,
            Some(path) => Some(File::create(path).or_fail(
                format!("{} cannot be written", path.display()),
                "name a file in a folder that exists and may be written",
            )?),
        };
        Ok(Events {
            file,
            origin: Instant::now(),
        })
    }
}

/// Where events go.
pub(super) struct Events {
    file: Option<File>,
    origin: Instant,
}

impl Events {
    /// Writes an event with its time.
    pub(super) fn write(&mut self, event: &str, details: Value) -> anyhow::Result<()> {
        if let Some(file) = &mut self.file {
            let time_ns = u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let line = serde_json::json!({"time_ns": time_ns, "event": event, "details": details});
            writeln!(file, "{line}").or_fail(
                "an event cannot be written",
                "make room where --events points to",
            )?;
        }
        Ok(())
    }
}

#[cfg(feature = "ibv")]
fn devices() -> anyhow::Result<DeviceList> {
    rerail_verbs::ibv::devices().or_fail(
        "the RDMA devices cannot be listed",
        "load the kernel modules ib_uverbs and that of the device",
    )
}

#[cfg(not(feature = "ibv"))]
fn devices() -> anyhow::Result<DeviceList> {
    Err(anyhow::Error::new(Failure::new(
        "this build has no RDMA",
        "build it with the feature `ibv`",
    )))
}

/// A value that makes no sense together with another.
pub(super) fn usage(what: impl Into<String>, remedy: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Failure::new(what, remedy))
}
