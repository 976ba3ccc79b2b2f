//! `cargo xtask sim`: storms over whole nodes on the simulated fabric, many seeds.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Parser as _;

use crate::process;

/// Seeds without a word about them.
const SEEDS: u64 = 300;

/// Options of `cargo xtask sim`.
#[derive(clap::Args, Default)]
pub(crate) struct SimArgs {
    /// How many seeds; 300, or one of a storm that is cut
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// The first of them; the others follow it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Makes only the faults of these numbers, as in 3,7,11; `none` for none
    #[arg(long)]
    faults: Option<String>,
    /// Makes faults and asks for work during so many milliseconds of virtual time
    #[arg(long)]
    span_ms: Option<u64>,
    /// Runs a failure again that was kept in target/sim/
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seeds", "seed", "faults", "span_ms"])]
    replay: Option<PathBuf>,
}

/// The command in a file of a failure.
#[derive(clap::Parser)]
struct Kept {
    #[command(flatten)]
    args: SimArgs,
}

/// Runs them side by side. A seed that fails is printed, kept in `target/sim/`, and shortened.
pub(crate) fn run(args: &SimArgs) -> Result<()> {
    // Alone it needs nothing but Rust.
    let packages = &["-p", "rerail-transport"];
    match &args.replay {
        Some(file) => {
            let shown = || file.display().to_string();
            let text = fs::read_to_string(file).with_context(shown)?;
            let args = kept(&text).with_context(shown)?;
            process::run(&mut command(&args, packages))
        }
        None => process::run(&mut command(args, packages)),
    }
}

/// `count` seeds from `first` on, with what `packages` selects: its features decide what is built.
pub(crate) fn storm(first: u64, count: u64, packages: &[&str]) -> Result<()> {
    let args = SimArgs {
        seeds: Some(count),
        seed: first,
        ..SimArgs::default()
    };
    process::run(&mut command(&args, packages))
}

fn command(args: &SimArgs, packages: &[&str]) -> Command {
    let is_cut = args.faults.is_some() || args.span_ms.is_some();
    let count = args.seeds.unwrap_or(if is_cut { 1 } else { SEEDS });
    let mut command = process::cargo();
    command.args(["test", "--locked", "--quiet"]).args(packages);
    command.args(["--lib", "storm::whatever_happens", "--", "--nocapture"]);
    command.env("RERAIL_SIM_SEEDS", count.to_string());
    command.env("RERAIL_SIM_SEED", args.seed.to_string());
    if let Some(faults) = &args.faults {
        command.env("RERAIL_SIM_FAULTS", faults);
    }
    if let Some(span) = args.span_ms {
        command.env("RERAIL_SIM_SPAN_MS", span.to_string());
    }
    command
}

/// The options in the first line of what a failing seed left.
fn kept(text: &str) -> Result<SimArgs> {
    let line = text.lines().next().unwrap_or_default();
    let words = line.strip_prefix("cargo xtask ");
    let words = words.context("its first line is not `cargo xtask sim …`")?;
    Ok(Kept::try_parse_from(words.split_whitespace())?.args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_failure_says_how_it_is_run_again() {
        let first = "cargo xtask sim --seeds 1 --seed 77 --faults 3,7 --span-ms 4200";
        let args = kept(&format!("{first}\nworld.rs:1:1: words\n")).expect("well-formed");
        assert_eq!((args.seeds, args.seed), (Some(1), 77));
        assert_eq!(args.faults.as_deref(), Some("3,7"));
        assert_eq!(args.span_ms, Some(4_200));
        for bad in ["", "cargo xtask sim --sead 1\n", "0.1s n0 starts\n"] {
            kept(bad).map(|_| ()).expect_err(bad);
        }
    }
}
