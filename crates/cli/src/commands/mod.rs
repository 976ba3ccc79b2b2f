//! The commands of the program, one file each: `Args`, which clap fills, and
//! `run(args) -> anyhow::Result<ExitCode>`.
//!
//! Commands write to a locked stdout with `writeln!(out, …)?`, never with `println!`, which panics
//! when the reader has gone. Logs and errors go to stderr. Deliberately not here: any work.

mod bench;
mod gids;
mod metadata;
mod topology;

use std::process::ExitCode;

use clap::Subcommand;

/// What the program can do.
#[derive(Subcommand)]
pub(crate) enum Command {
    Bench(bench::Args),
    Gids(gids::Args),
    Metadata(metadata::Args),
    Topology(topology::Args),
}

impl Command {
    /// Runs the command.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Bench(args) => bench::run(args),
            Self::Gids(args) => gids::run(&args),
            Self::Metadata(args) => metadata::run(args),
            Self::Topology(args) => topology::run(&args),
        }
    }
}
