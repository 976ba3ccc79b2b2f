//! The guest's kernel: Debian's package, downloaded and unpacked, never installed.
//!
//! Pinned by version and hash while the archive keeps that version, else the newest one of the same
//! series, whose version is printed. The cloud kernel is no choice: it has no `rdma_rxe`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process;
use crate::setup::{AptLists, DebPackage};

/// The package that the project is tested with.
const PINNED_NAME: &str = "linux-image-6.1.0-57-amd64";
const PINNED_VERSION: &str = "6.1.192-3";
const PINNED_SHA256: &str = "14d219d01e1283261817d961dbb3895cb5b4288d0de10e0ba0632a0d993e15bf";
/// The pin as one value, for the name of the image built from it.
pub(super) const PINNED: (&str, &str) = (PINNED_VERSION, PINNED_SHA256);
/// The metapackage whose dependency is the newest kernel, and how the kernel's name starts.
const META: &str = "linux-image-amd64";
const IMAGE_PREFIX: &str = "linux-image-";

/// An unpacked kernel package.
pub(super) struct Kernel {
    /// Where it was unpacked: `boot/` and `lib/modules/` are below.
    pub(super) root: PathBuf,
    /// The release as in `uname -r`.
    pub(super) release: String,
}

impl Kernel {
    /// Downloads the kernel and unpacks it below `dir`, which must be empty.
    pub(super) fn fetch(dir: &Path) -> Result<Self> {
        let deb = download(dir)?;
        let root = dir.join("kernel");
        process::run(
            Command::new("dpkg-deb")
                .arg("--extract")
                .arg(&deb)
                .arg(&root),
        )?;
        std::fs::remove_file(&deb)?;
        let release = std::fs::read_dir(root.join("lib/modules"))
            .context("the kernel package has no modules")?
            .find_map(|entry| entry.ok()?.file_name().into_string().ok())
            .context("the kernel package's module directory is empty")?;
        // The package leaves modules.dep to its installation script.
        process::run(
            Command::new(process::tool("depmod")?)
                .arg("-b")
                .arg(&root)
                .arg(&release),
        )?;
        Ok(Self { root, release })
    }

    /// The bootable image.
    pub(super) fn image(&self) -> PathBuf {
        self.root.join(format!("boot/vmlinuz-{}", self.release))
    }

    /// The files of `module` and all that it needs, in the order in which to load them; empty if
    /// it is built in.
    pub(super) fn module_files(&self, module: &str) -> Result<Vec<PathBuf>> {
        let listed = process::output(
            Command::new(process::tool("modprobe")?)
                .arg("--dirname")
                .arg(&self.root)
                .args(["--set-version", &self.release, "--show-depends", module]),
        )?;
        // `insmod PATH OPTION…`, the options being this machine's own: not for the guest.
        let files = listed
            .lines()
            .filter_map(|line| line.strip_prefix("insmod "));
        Ok(files
            .filter_map(|line| line.split_whitespace().next())
            .map(PathBuf::from)
            .collect())
    }
}

/// The pinned package if it can still be had, else the newest.
fn download(dir: &Path) -> Result<PathBuf> {
    let pinned = DebPackage {
        name: PINNED_NAME.to_owned(),
        version: PINNED_VERSION.to_owned(),
    };
    eprintln!("guest: downloading {PINNED_NAME} {PINNED_VERSION}");
    let refused = match pinned.download(dir) {
        Ok(deb) => {
            check_sha256(&deb)?;
            return Ok(deb);
        }
        Err(error) => error,
    };
    eprintln!("guest: the pinned kernel cannot be had ({refused:#}); renewing the package lists");
    AptLists::default().renew()?;
    if let Ok(deb) = pinned.download(dir) {
        check_sha256(&deb)?;
        return Ok(deb);
    }
    let newest = DebPackage::newest(META, IMAGE_PREFIX)?
        .with_context(|| format!("the package lists know no kernel behind {META}"))?;
    eprintln!(
        "guest: taking {} {} instead of the pinned kernel",
        newest.name, newest.version
    );
    newest.download(dir)
}

/// Compares the pinned package's hash.
fn check_sha256(deb: &Path) -> Result<()> {
    let printed = process::output(Command::new("sha256sum").arg("--binary").arg(deb))?;
    let found = printed.split_whitespace().next().unwrap_or_default();
    // A name with unusual characters makes sha256sum escape the line.
    if found.trim_start_matches('\\') != PINNED_SHA256 {
        bail!(
            "{PINNED_NAME} {PINNED_VERSION} has the SHA-256 {found}, expected {PINNED_SHA256}: \
             somebody changed it on the way"
        );
    }
    Ok(())
}
