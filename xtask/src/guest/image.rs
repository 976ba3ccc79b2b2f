//! What QEMU boots: the kernel and an initramfs with busybox, the modules and `init.sh`.
//!
//! Built once and kept below the target directory under a name that depends on everything that
//! goes into it, so that `cargo clean`, a fresh clone or a change of the recipe fetches it again.

use std::collections::BTreeSet;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::kernel::Kernel;
use crate::{process, workspace};

const INIT: &str = include_str!("init.sh");
/// Change it when this file changes what it builds.
const RECIPE: u32 = 1;
/// Loaded at boot with all that they need; there is no modprobe in the guest. `crc32_generic` is
/// named because rdma_rxe asks for it by algorithm, which the dependencies do not show. The last
/// ones are for scenarios: kinds of netdev, and faults on the wire. Words after a module's name are
/// its options (without these two there would be a device of the kind from the start).
const MODULES: &[&str] = &[
    "crc32_pclmul",
    "crc32_generic",
    "virtio_pci",
    "virtio_rng",
    "9pnet_virtio",
    "9p",
    "overlay",
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
    "bridge",
    "veth",
    "dummy numdummies=0",
    "8021q",
    "macvlan",
    "ipvlan",
    "vxlan",
    "bonding max_bonds=0",
    "vrf",
    "sch_netem",
    "sch_tbf",
    "sch_prio",
    "cls_u32",
];

/// The files to boot.
pub(super) struct Image {
    /// The kernel, `-kernel` for QEMU.
    pub(super) kernel: PathBuf,
    /// The initramfs, `-initrd` for QEMU.
    pub(super) initramfs: PathBuf,
}

impl Image {
    /// The image of this recipe, built if it is not there.
    pub(super) fn ready() -> Result<Self> {
        let guest = workspace::target().join("guest");
        let dir = guest.join(format!("image-{:016x}", recipe()));
        if !dir.is_dir() {
            // Built aside and renamed into place: a run that is interrupted, or another that
            // builds the same at the same time, never leaves half an image.
            let building = guest.join(format!("building-{}", std::process::id()));
            let _ = fs::remove_dir_all(&building);
            fs::create_dir_all(&building)?;
            let built = build(&building).context("cannot build the guest's image");
            let moved = built.and_then(|finished| match fs::rename(&finished, &dir) {
                Err(_) if dir.is_dir() => Ok(()),
                moved => moved.with_context(|| format!("cannot create {}", dir.display())),
            });
            let _ = fs::remove_dir_all(&building);
            moved?;
        }
        Ok(Self {
            kernel: dir.join("vmlinuz"),
            initramfs: dir.join("initramfs.gz"),
        })
    }
}

/// A number that changes with the recipe. (Not a checksum: the kernel's is checked on download.)
fn recipe() -> u64 {
    let mut hasher = DefaultHasher::new();
    (RECIPE, INIT, MODULES, super::kernel::PINNED).hash(&mut hasher);
    hasher.finish()
}

/// Builds the two files below `building` and returns the directory that holds just them.
fn build(building: &Path) -> Result<PathBuf> {
    let kernel = Kernel::fetch(building)?;
    let root = building.join("initramfs");
    for dir in ["bin", "modules"] {
        fs::create_dir_all(root.join(dir))?;
    }
    let busybox = process::tool("busybox")?;
    copy(&busybox, &root.join("bin/busybox"))?;
    fs::write(root.join("init"), INIT)?;
    fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755))?;

    let mut order = String::new();
    let mut seen = BTreeSet::new();
    for entry in MODULES {
        let (module, options) = entry.split_once(' ').unwrap_or((entry, ""));
        let files = kernel.module_files(module)?;
        for (at, file) in files.iter().enumerate() {
            let name = file
                .file_name()
                .context("a module without a name")?
                .to_string_lossy();
            if seen.insert(name.clone().into_owned()) {
                copy(file, &root.join("modules").join(&*name))?;
                // The module itself comes last, after what it needs.
                let options = if at + 1 == files.len() { options } else { "" };
                order.push_str(&format!("{name} {options}\n"));
            }
        }
    }
    fs::write(root.join("modules/order"), order)?;

    let finished = building.join("finished");
    fs::create_dir(&finished)?;
    copy(&kernel.image(), &finished.join("vmlinuz"))?;
    pack(&root, &finished.join("initramfs.gz"))?;
    Ok(finished)
}

/// Copies a file; an error names both.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// `find | cpio | gzip`, the form in which the kernel takes an initramfs.
fn pack(root: &Path, archive: &Path) -> Result<()> {
    let script = "set -o pipefail; find . | cpio --quiet --create --format=newc | gzip -1";
    let mut command = Command::new("bash");
    command
        .args(["-c", script])
        .current_dir(root)
        .stdin(Stdio::null())
        .stdout(fs::File::create(archive)?);
    process::run(&mut command)
}
