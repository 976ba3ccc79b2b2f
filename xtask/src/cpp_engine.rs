//! The C++ engine that interop is tested with: its Python wheel in a virtual environment.
//!
//! Outside the repository, in the user's cache, and never part of it. Pinned by version and hash
//! while the registry keeps that version, else the newest one, whose version is printed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

const PACKAGE: &str = "mooncake-transfer-engine-non-cuda";
const VERSION: &str = "0.3.13.post1";
/// The hash of the wheel for CPython 3.11 on x86-64, which is what Debian 12 has.
const SHA256: &str = "ca9f668a04ffe648b250fda28b97d0a7da149cb110dec5cf3d166a9e68afc940";

/// The Python of an environment in which `mooncake.engine` can be imported. Made if not there.
pub(crate) fn python() -> Result<PathBuf> {
    let cache = cache_dir()?;
    let environment = cache.join(format!("cpp-engine-{VERSION}"));
    let python = environment.join("bin/python");
    if !python.exists() {
        fs::create_dir_all(&cache)?;
        // Made aside and renamed: an interrupted run leaves nothing that looks finished.
        let building = cache.join(format!("building-{}", std::process::id()));
        let _ = fs::remove_dir_all(&building);
        let made = install(&building).and_then(|()| match fs::rename(&building, &environment) {
            Err(_) if python.exists() => Ok(()),
            renamed => renamed.context("cannot put the C++ engine's environment in place"),
        });
        let _ = fs::remove_dir_all(&building);
        made.context("cannot install the C++ engine")?;
    }
    Ok(python)
}

fn cache_dir() -> Result<PathBuf> {
    let cache = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
        (_, Some(home)) => Path::new(&home).join(".cache"),
        _ => anyhow::bail!("neither XDG_CACHE_HOME nor HOME is set"),
    };
    Ok(cache.join("rerail"))
}

fn install(environment: &Path) -> Result<()> {
    // The distribution's own Python: the wheel is for its version, another may be first in PATH.
    process::output(
        Command::new("/usr/bin/python3")
            .args(["-m", "venv"])
            .arg(environment),
    )?;
    let python = environment.join("bin/python");
    let pip = |arguments: &[&str]| {
        let mut command = Command::new(&python);
        command.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]);
        process::output(command.args(arguments))
    };
    eprintln!("interop: installing {PACKAGE} {VERSION}");
    let requirements = environment.join("requirements.txt");
    fs::write(
        &requirements,
        format!("{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n"),
    )?;
    let pinned = pip(&["--require-hashes", "-r", &requirements.to_string_lossy()]);
    if let Err(error) = pinned {
        eprintln!("interop: the pinned version cannot be had: {error:#}");
        pip(&[PACKAGE])?;
        let shown = process::output(Command::new(&python).args(["-m", "pip", "show", PACKAGE]))?;
        let version = shown.lines().find(|line| line.starts_with("Version: "));
        eprintln!(
            "interop: taking the newest instead: {}",
            version.unwrap_or("unknown")
        );
    }
    process::output(Command::new(&python).args(["-c", "import mooncake.engine"]))?;
    Ok(())
}
