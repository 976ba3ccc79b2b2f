//! The soft-RoCE guest: real verbs devices without a card.
//!
//! A Debian kernel under QEMU's software emulation brings the kernel's own soft-RoCE driver; the
//! host's root is its root, read-only below a tmpfs, so every program of the host is there and
//! nothing on the host changes. [`image`] builds what is booted, [`session`] boots it and runs one
//! command; `init.sh`, `run.sh` and `rig.sh` are the guest's side, in the order in which they run.
//! Hardware virtualisation is deliberately not used: where it is offered it may still not work.

mod image;
mod kernel;
mod scenarios;
mod self_check;
mod session;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

pub(crate) use scenarios::{ScenarioArgs, scenarios};
pub(crate) use self_check::self_check;
pub(crate) use session::Session;

use crate::{setup, workspace};

/// Arguments of `cargo xtask vm`.
#[derive(clap::Args)]
#[command(after_help = "\
The command runs as root in the caller's directory, with its PATH, HOME, MC_*, RERAIL_* and RUST_*
variables. It sees the whole file system of this machine; what it writes is gone afterwards, except
below $RERAIL_OUT. Exit status: the command's; 124 if it was ended at its limit; 125 if the guest
failed.

Examples:
  cargo xtask vm -- ibv_devinfo
  cargo xtask vm --timeout 30 -- sh -c 'rdma link; ip addr > $RERAIL_OUT/addresses'")]
pub(crate) struct VmArgs {
    /// Ends the command after this many seconds.
    #[arg(long, value_name = "S", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Memory of the guest in MiB; half of it holds the files that the command writes.
    #[arg(long, value_name = "MB", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(512..=65_536))]
    memory: u32,
    /// Emulated processors.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=32))]
    cpus: u32,
    /// Directory for result files, the command's $RERAIL_OUT [default: target/guest/out].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Boots without the four devices.
    #[arg(long)]
    no_rig: bool,
    /// The command and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<OsString>,
}

/// `cargo xtask vm`: sets up, boots, runs the command with our streams as its own.
pub(crate) fn vm(args: &VmArgs) -> Result<ExitCode> {
    setup::install_missing()?;
    let ending = Session {
        command: args.command.clone(),
        env: Vec::new(),
        cwd: std::env::current_dir()?,
        timeout: Duration::from_secs(args.timeout),
        memory_mib: args.memory,
        cpus: args.cpus,
        out: args
            .out
            .clone()
            .unwrap_or_else(|| workspace::target().join("guest/out")),
        rig: !args.no_rig,
    }
    .run()?;
    if let Some(message) = ending.problem(args.timeout) {
        eprintln!("xtask vm: {message}");
    }
    Ok(ending.exit_code())
}
