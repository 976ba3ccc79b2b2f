//! The library between a program and libibverbs, in `tests/interposer`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::child::stdout_within;
use crate::guest::traffic::Plan;

/// Has the plan's initiator run over the interposer. Returns the directory in which files are
/// faults.
pub(super) fn interpose(dir: &Path, plan: &mut Plan) -> Result<PathBuf> {
    let library = build(dir)?;
    let faults = dir.join("faults");
    std::fs::create_dir(&faults)?;
    plan.initiator_env = vec![
        ("LD_PRELOAD".to_owned(), library.display().to_string()),
        ("RERAIL_INTERPOSE".to_owned(), faults.display().to_string()),
    ];
    Ok(faults)
}

/// Compiles the interposer.
fn build(dir: &Path) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("interposer/interpose.c");
    let library = dir.join("libinterpose.so");
    let mut gcc = Command::new("gcc");
    gcc.args(["-Wall", "-O1", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .arg("-ldl");
    stdout_within(gcc, Duration::from_secs(120)).context("the interposer")?;
    Ok(library)
}
