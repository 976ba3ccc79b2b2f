//! `rerail bench`: how fast bytes move, and whether they are the right ones.

mod advice;
mod initiator;
mod options;
mod pattern;
mod report;
mod target;

use std::process::ExitCode;

use clap::Subcommand;

/// Measures transfers between two processes.
#[derive(clap::Args)]
#[command(
    arg_required_else_help = true,
    after_help = "Examples:\n  \
                  rerail bench target --metadata P2PHANDSHAKE --name here --advertise 10.0.0.1\n  \
                  rerail bench initiator --metadata P2PHANDSHAKE --name there \\\n\x20     \
                  --segment 10.0.0.1:15428 --operation write --block-size 65536 --duration 10 --verify\n\n\
                  Settings are variables such as MC_TRANSFER_TIMEOUT; crates/engine/README.md has the table of all."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Offers a buffer until SIGINT or SIGTERM; prints `ready NAME rpc=HOST:PORT` once it can be
    /// used.
    Target(target::Args),
    /// Moves blocks to or from a target's buffer.
    Initiator(initiator::Args),
}

/// Runs the command.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.role {
        Role::Target(args) => target::run(&args),
        Role::Initiator(args) => initiator::run(&args),
    }
}
