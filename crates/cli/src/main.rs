//! The `rerail` program: parses the command line, runs one command, turns what became of it into an
//! exit status.
//!
//! Exit status: 0 done, 1 failed (the reason on stderr), 2 the command line is wrong. Deliberately
//! not here: what a command does; each has its own file in [`commands`].

mod commands;
mod failure;
mod process_list;
mod variables;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use tracing_subscriber::EnvFilter;

/// Variable with the filter of what is logged to stderr, in the form of `tracing`'s `EnvFilter`.
const LOG_VARIABLE: &str = "RERAIL_LOG";
/// What is logged when nobody says.
const LOG_DEFAULT: &str = "warn";
/// The command line is wrong.
const EXIT_USAGE: u8 = 2;

/// Moves memory between machines over RDMA or TCP, and keeps moving it while the network changes.
#[derive(Parser)]
#[command(
    name = "rerail",
    version,
    about,
    arg_required_else_help = true,
    after_help = "Environment:\n  RERAIL_LOG   what is logged to stderr: error, warn, info, debug, trace, or a filter such\n               as rerail_engine=debug (default: warn)\n\nExit status: 0 done, 1 failed, 2 wrong command line."
)]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return say_usage(&error),
    };
    if let Err(error) = init_logging() {
        return failure::report(&error);
    }
    process_list::warn_of_secrets(std::env::args());
    variables::warn_of_unknown();
    match cli.command.run() {
        Ok(code) => code,
        Err(error) => failure::report(&error),
    }
}

/// Prints help, version or a usage error. A reader that has gone is no failure.
fn say_usage(error: &clap::Error) -> ExitCode {
    // Nobody is left to be told when even this cannot be written.
    let _ = error.print();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => ExitCode::from(EXIT_USAGE),
    }
}

fn init_logging() -> anyhow::Result<()> {
    use failure::ResultExt as _;

    let text = match std::env::var(LOG_VARIABLE) {
        Ok(text) if !text.is_empty() => text,
        Ok(_) | Err(std::env::VarError::NotPresent) => LOG_DEFAULT.to_owned(),
        Err(error) => return Err(error).or_fail(LOG_VARIABLE, "set it to text, or unset it"),
    };
    let filter = EnvFilter::builder().parse(&text).or_fail(
        format!("{LOG_VARIABLE}={text} is not a log filter"),
        "use error, warn, info, debug, trace, or target=level pairs joined by commas",
    )?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    Ok(())
}
