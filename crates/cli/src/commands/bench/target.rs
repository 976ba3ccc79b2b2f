//! The side that offers memory.

use std::io::Write as _;
use std::process::ExitCode;

use rerail_engine::MemoryOptions;
use rerail_verbs::HostMemory;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::options::{Common, usage};
use crate::failure::ResultExt as _;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    common: Common,
    /// Bytes of the buffer that is offered
    #[arg(long, value_name = "BYTES", default_value = "1073741824")]
    buffer_size: usize,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.buffer_size == 0 {
        return Err(usage("--buffer-size is 0", "offer at least one byte"));
    }
    let events = args.common.events()?;
    let memory = HostMemory::allocate(args.buffer_size).or_fail(
        format!("{} bytes cannot be mapped", args.buffer_size),
        "lower --buffer-size",
    )?;
    let engine = args.common.engine(&events)?;
    engine.register(&memory, MemoryOptions::default()).or_fail(
        "the buffer cannot be registered",
        "raise the limit of locked memory (`ulimit -l unlimited`), or lower --buffer-size",
    )?;
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
