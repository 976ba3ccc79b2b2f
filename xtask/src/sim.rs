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

/// Runs them side by side. A seed that fails is printed, with the last lines of its trace.
pub(crate) fn run(args: &SimArgs) -> Result<()> {
    // Alone it needs nothing but Rust.
    storm(args.seed, args.seeds, &["-p", "rerail-transport"])
}

/// `count` seeds from `first` on, with what `packages` selects: its features decide what is built.
pub(crate) fn storm(first: u64, count: u64, packages: &[&str]) -> Result<()> {
    let mut command = process::cargo();
    command.args(["test", "--locked", "--quiet"]).args(packages);
    command.args(["--lib", "storm::whatever_happens", "--", "--nocapture"]);
    command.env("RERAIL_SIM_SEEDS", count.to_string());
    command.env("RERAIL_SIM_SEED", first.to_string());
    process::run(&mut command)
}
