//! The few calls of dpkg and apt that set-up and the guest's kernel need.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::as_root;
use crate::process;

/// How often a step that depends on the network is tried, and how long we wait in between.
const TRIES_MAX: u32 = 3;
const PAUSE_BETWEEN_TRIES: Duration = Duration::from_secs(5);

/// Which of `packages` are not installed, in the order given.
pub(crate) fn missing<'a>(packages: impl Iterator<Item = &'a str>) -> Result<Vec<&'a str>> {
    let packages: Vec<_> = packages.collect();
    // dpkg-query exits 1 if it does not know one of the names, and still answers for the others.
    let output = Command::new("dpkg-query")
        .args(["--show", "--showformat", "${Package} ${db:Status-Status}\n"])
        .args(&packages)
        .stdin(Stdio::null())
        .output()
        .context("cannot start dpkg-query")?;
    let known = String::from_utf8_lossy(&output.stdout);
    let installed: BTreeSet<_> = known
        .lines()
        .filter_map(|line| line.strip_suffix(" installed"))
        .collect();
    Ok(packages
        .into_iter()
        .filter(|name| !installed.contains(name))
        .collect())
}

/// Installs `packages`. The lists on the machine may be stale (files of that version gone from the
/// mirror) or not be there at all, so they are renewed before every try.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    let mut lists = AptLists::default();
    retry("installing packages", || {
        lists.renew()?;
        let mut command = as_root("apt-get")?;
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["install", "--yes", "--quiet", "--no-install-recommends"])
            .args(packages)
            .stdin(Stdio::null());
        process::run(&mut command)
    })
}

/// The package lists of this machine, renewed at most [`TRIES_MAX`] times in all.
#[derive(Default)]
pub(crate) struct AptLists {
    renewals: u32,
}

impl AptLists {
    /// `apt-get update`.
    pub(crate) fn renew(&mut self) -> Result<()> {
        if self.renewals >= TRIES_MAX {
            bail!("the package lists have been renewed {TRIES_MAX} times without effect");
        }
        self.renewals += 1;
        let mut command = as_root("apt-get")?;
        command
            .args(["update", "--quiet", "--quiet"])
            .stdin(Stdio::null());
        process::run(&mut command)
    }
}

/// One version of one package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DebPackage {
    /// The package's name.
    pub(crate) name: String,
    /// Debian's version of it.
    pub(crate) version: String,
}

impl DebPackage {
    /// What the metapackage `meta` stands for at present, or `None` if the lists do not know it.
    ///
    /// # Errors
    /// If apt-cache cannot be run.
    pub(crate) fn newest(meta: &str, prefix: &str) -> Result<Option<Self>> {
        let Ok(depends) = process::output(Command::new("apt-cache").args(["depends", meta])) else {
            return Ok(None);
        };
        let Some(name) = depends
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .find(|name| name.starts_with(prefix))
        else {
            return Ok(None);
        };
        let shown =
            process::output(Command::new("apt-cache").args(["show", "--no-all-versions", name]))?;
        let version = shown
            .lines()
            .find_map(|line| line.strip_prefix("Version: "));
        Ok(version.map(|version| Self {
            name: name.to_owned(),
            version: version.to_owned(),
        }))
    }

    /// Downloads the package into the empty directory `dir`; apt checks its signature chain.
    pub(crate) fn download(&self, dir: &Path) -> Result<std::path::PathBuf> {
        let wanted = format!("{}={}", self.name, self.version);
        process::output(
            Command::new("apt-get")
                // As root apt would drop to a user that may not write here, and warn.
                .args(["-o", "APT::Sandbox::User=root", "download", &wanted])
                .current_dir(dir),
        )?;
        let deb = std::fs::read_dir(dir)?
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .find(|path| path.extension().is_some_and(|extension| extension == "deb"));
        deb.with_context(|| format!("apt-get download {wanted} left no file"))
    }
}

/// Calls `step` until it succeeds, at most [`TRIES_MAX`] times.
fn retry(what: &str, mut step: impl FnMut() -> Result<()>) -> Result<()> {
    let mut tries = 1;
    loop {
        match step() {
            Ok(()) => return Ok(()),
            Err(error) if tries == TRIES_MAX => {
                return Err(error.context(format!("{what} failed {TRIES_MAX} times")));
            }
            Err(error) => {
                eprintln!("setup: {what}: try {tries} of {TRIES_MAX} failed: {error:#}");
                std::thread::sleep(PAUSE_BETWEEN_TRIES);
                tries += 1;
            }
        }
    }
}
