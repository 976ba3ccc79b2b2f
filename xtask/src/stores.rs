//! `cargo xtask stores`: each store of the metadata crate alone.
//!
//! For each feature of a store, the crate's tests with only that feature, and the program built
//! with only that feature, which then moves data between two processes that meet in such a store.
//! What works only because another store's feature is on, too, fails here. Deliberately not here:
//! all stores together, which is what the workspace's tests and the demo have.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::{process, setup, workspace};

/// Longest time for one set's build, its tests, and its data.
const BUILT_WITHIN: Duration = Duration::from_secs(1_800);
const TESTED_WITHIN: Duration = Duration::from_secs(900);
const MOVED_WITHIN: Duration = Duration::from_secs(180);

/// One store alone.
struct Alone {
    /// Feature of the crate and of the program; empty for none.
    feature: &'static str,
    /// What the two processes meet in, as `one-store` takes it.
    meeting: &'static str,
    /// A URL that this program must refuse, and the feature it must name.
    refuses: (&'static str, &'static str),
}

/// The program with `server` comes before the one with `http`, which needs a server to talk to.
const ALONE: &[Alone] = &[
    Alone {
        feature: "",
        meeting: "none",
        refuses: ("etcd://127.0.0.1:1", "etcd"),
    },
    Alone {
        feature: "server",
        meeting: "http",
        refuses: ("redis://127.0.0.1:1", "redis"),
    },
    Alone {
        feature: "http",
        meeting: "http",
        refuses: ("etcd://127.0.0.1:1", "etcd"),
    },
    Alone {
        feature: "etcd",
        meeting: "etcd",
        refuses: ("http://127.0.0.1:1/metadata", "http"),
    },
    Alone {
        feature: "redis",
        meeting: "redis",
        refuses: ("etcd://127.0.0.1:1", "etcd"),
    },
];

/// Arguments of `cargo xtask stores`.
#[derive(clap::Args, Default)]
pub(crate) struct StoresArgs {
    /// Only the programs, not the crate's tests.
    #[arg(long)]
    programs_only: bool,
}

/// Builds, tests and runs all of them.
pub(crate) fn run(args: &StoresArgs) -> Result<()> {
    setup::install_missing()?;
    let programs = target().join("programs");
    fs::create_dir_all(&programs).with_context(|| programs.display().to_string())?;
    cargo(
        BUILT_WITHIN,
        &[
            "build",
            "--locked",
            "-p",
            "rerail-tests",
            "--bin",
            "one-store",
        ],
    )?;
    for alone in ALONE {
        let shown = if alone.feature.is_empty() {
            "no store"
        } else {
            alone.feature
        };
        println!("stores: {shown} alone");
        let program = build(alone, &programs)?;
        refuses(alone, &program)?;
        moves(alone, &program, &programs)?;
        if !args.programs_only {
            tests(alone)?;
        }
    }
    println!("stores: each works alone");
    Ok(())
}

/// One directory for all sets, beside the workspace's own: they share most dependencies with each
/// other, and none of what is built here is what the workspace's builds want.
fn target() -> PathBuf {
    workspace::target().join("stores")
}

/// A cargo command that builds quickly: what is built here runs for seconds.
fn cargo(limit: Duration, arguments: &[&str]) -> Result<()> {
    let mut command = process::cargo();
    command
        .args(arguments)
        .env("CARGO_TARGET_DIR", target())
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_DEV_DEBUG", "false")
        // A store that is not there is an error: `setup` has installed it.
        .env("RERAIL_REQUIRE_STORES", "1");
    process::run_within(&command, limit)
}

fn tests(alone: &Alone) -> Result<()> {
    let mut arguments = vec!["test", "--locked", "--quiet", "-p", "rerail-metadata"];
    arguments.extend(["--no-default-features", "--features", alone.feature]);
    cargo(TESTED_WITHIN, &arguments)
}

/// Builds the program and puts it where the next build does not replace it.
fn build(alone: &Alone, programs: &Path) -> Result<PathBuf> {
    let mut arguments = vec!["build", "--locked", "-p", "rerail"];
    arguments.extend(["--no-default-features", "--features", alone.feature]);
    cargo(BUILT_WITHIN, &arguments)?;
    let program = programs.join(format!("rerail-{}", alone.feature));
    fs::copy(target().join("debug/rerail"), &program)
        .with_context(|| program.display().to_string())?;
    Ok(program)
}

/// A store that is not built in is an error that says so, not a crash (report M19).
fn refuses(alone: &Alone, program: &Path) -> Result<()> {
    let (url, feature) = alone.refuses;
    let output = std::process::Command::new(program)
        .args(["metadata", "list", "--metadata", url])
        .output()
        .with_context(|| program.display().to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1)
            && said.contains(&format!("without the feature `{feature}`")),
        "built with {:?} alone, rerail should refuse {url}: {}, {said}",
        alone.feature,
        output.status
    );
    Ok(())
}

fn moves(alone: &Alone, program: &Path, programs: &Path) -> Result<()> {
    let mut command = std::process::Command::new(target().join("debug/one-store"));
    command
        .arg(alone.meeting)
        .env("RERAIL_BIN", program)
        .env("RERAIL_SERVER_BIN", programs.join("rerail-server"));
    process::run_within(&command, MOVED_WITHIN)
        .with_context(|| format!("rerail with {:?} alone moves no data", alone.feature))
}
