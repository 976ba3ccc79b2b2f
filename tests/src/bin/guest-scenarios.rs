//! Runs inside the soft-RoCE guest: `guest-scenarios [--full] [--claims DIR] [--list | --run NAME]
//! [PART…]`.
//!
//! `cargo xtask guest` builds it, boots the guest and starts it there.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use rerail_tests::guest::runner::{self, Selection};

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("guest-scenarios: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool> {
    let mut selection = Selection::default();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--full" => selection.full = true,
            "--list" => {
                for name in runner::names()? {
                    println!("{name}");
                }
                return Ok(true);
            }
            "--claims" => {
                let claims = arguments.next().context("--claims needs a directory")?;
                selection.claims = Some(claims.into());
            }
            "--run" => {
                let name = arguments.next().context("--run needs a scenario's name")?;
                return runner::run_here(&name).map(|()| true);
            }
            _ if argument.starts_with('-') => bail!("unknown option {argument}"),
            _ => selection.filters.push(argument),
        }
    }
    let logs = std::env::var_os("RERAIL_OUT").map_or_else(std::env::temp_dir, PathBuf::from);
    runner::run(&selection, &logs.join("scenarios"))
}
