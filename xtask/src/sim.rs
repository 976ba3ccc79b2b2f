//! `cargo xtask sim`: storms over whole nodes on the simulated fabric, many seeds.

use anyhow::Result;

use crate::process;

/// Options of `cargo xtask sim`.
#[derive(clap::Args)]
pub(crate) struct SimArgs {
    /// How many seeds
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The first of them; the others follow it
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs them, one after the other on each processor. A seed that fails is printed, with the last
/// lines of its trace.
pub(crate) fn run(args: &SimArgs) -> Result<()> {
    storm(args.seed, args.seeds)
}

/// `count` seeds from `first` on.
pub(crate) fn storm(first: u64, count: u64) -> Result<()> {
    let mut command = process::cargo();
    command.args(["test", "--locked", "--quiet", "-p", "rerail-transport"]);
    command.args(["--test", "storm", "whatever_happens", "--", "--nocapture"]);
    command.env("RERAIL_SIM_SEEDS", count.to_string());
    command.env("RERAIL_SIM_SEED", first.to_string());
    process::run(&mut command)
}
