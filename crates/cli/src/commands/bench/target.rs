//! The side that offers memory.

use std::io::Write as _;
use std::process::ExitCode;

use rerail_engine::MemoryOptions;
use rerail_verbs::HostMemory;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::options::{Common, bytes, failed};
use crate::failure::ResultExt as _;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    common: Common,
    /// Bytes of the buffer that is offered
    #[arg(long, value_name = "BYTES", default_value = "1073741824", value_parser = bytes)]
    buffer_size: u64,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let events = args.common.events()?;
    let memory = usize::try_from(args.buffer_size)
        .map_err(anyhow::Error::from)
        .and_then(|length| HostMemory::allocate(length).map_err(anyhow::Error::from))
        .or_fail(
            format!("{} bytes cannot be mapped", args.buffer_size),
            "lower --buffer-size",
        )?;
    let engine = args.common.engine(&events)?;
    engine
        .register(&memory, MemoryOptions::default())
        .map_err(|error| {
            let remedy =
                "raise the limit of locked memory (`ulimit -l unlimited`), or lower --buffer-size";
            failed(error, "the buffer cannot be registered", remedy)
        })?;
    // Before anybody is told that we are here, so that no signal is missed.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .or_fail(
            "signals cannot be waited for",
            "raise the limit of open files",
        )?;
    let guard = runtime.enter();
    let remedy = "raise the limit of open files";
    let mut interrupt = signal(SignalKind::interrupt()).or_fail("SIGINT", remedy)?;
    let mut terminate = signal(SignalKind::terminate()).or_fail("SIGTERM", remedy)?;
    drop(guard);
    let (name, rpc) = (engine.name().to_owned(), engine.rpc_address().to_owned());
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready {name} rpc={rpc}")?;
    out.flush()?;
    events.write("ready", json!({"name": name, "rpc": rpc}));
    runtime.block_on(async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    });
    events.write("stopping", json!({}));
    drop(engine);
    Ok(ExitCode::SUCCESS)
}
