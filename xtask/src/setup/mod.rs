//! `cargo xtask setup`: what building and testing needs beyond Rust, gcc and apt.
//!
//! Only Debian and its children are set up; elsewhere the list of packages is the answer. The demo
//! needs none of this and never calls it.

mod apt;
mod libclang;

pub(crate) use apt::{AptLists, DebPackage};
pub(crate) use libclang::libclang_dir;

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::{cpp_engine, process};

/// What is needed, by purpose. Names are Debian's.
const PACKAGES: &[(&str, &[&str])] = &[
    (
        "building the verbs bindings (feature `ibv`)",
        &[
            "gcc",
            "libc6-dev",
            "pkg-config",
            "libibverbs-dev",
            "librdmacm-dev",
            "libclang-14-dev",
        ],
    ),
    (
        "building the etcd client (feature `etcd`)",
        &["protobuf-compiler", "libprotobuf-dev"],
    ),
    (
        "the soft-RoCE guest",
        &[
            "qemu-system-x86",
            "busybox-static",
            "cpio",
            "kmod",
            "iproute2",
            "rdma-core",
            "ibverbs-providers",
            "ibverbs-utils",
            "perftest",
        ],
    ),
    (
        "tests against real stores",
        &["redis-server", "etcd-server", "openssl"],
    ),
    (
        "interop tests with the C++ engine",
        &["python3", "python3-venv", "libnuma1", "libcurl4"],
    ),
    ("checking memory use of the verbs tests", &["valgrind"]),
];

/// `cargo xtask setup`: says what it finds, installs what is missing.
pub(crate) fn run() -> Result<()> {
    check_components()?;
    install_missing()?;
    let python = cpp_engine::python()?;
    println!("setup: everything is there");
    println!("setup: the C++ engine for interop: {}", python.display());
    if let Some(dir) = libclang_dir() {
        println!("setup: libclang for the verbs bindings: {}", dir.display());
    }
    Ok(())
}

/// Checks that the toolchain has what ci calls: rustup's minimal profile lacks both.
fn check_components() -> Result<()> {
    for component in ["fmt", "clippy"] {
        if process::output(process::cargo().args([component, "--version"])).is_err() {
            bail!(
                "this Rust toolchain has no `cargo {component}`, which ci needs; install it with \
                 `rustup component add clippy rustfmt`"
            );
        }
    }
    Ok(())
}

/// Installs what is missing and checks that a usable libclang is there. Says nothing, on stdout
/// least of all, if there is nothing to do.
pub(crate) fn install_missing() -> Result<()> {
    let all = || {
        PACKAGES
            .iter()
            .flat_map(|(_, packages)| packages.iter().copied())
    };
    if process::find("apt-get").is_none() || process::find("dpkg-query").is_none() {
        let mut list = String::new();
        for (purpose, packages) in PACKAGES {
            list.push_str(&format!("\n  for {purpose}: {}", packages.join(" ")));
        }
        bail!(
            "only Debian and its children can be set up by themselves; install what these Debian \
             packages hold, libclang no newer than 15, then call cargo directly:{list}"
        );
    }
    let missing = apt::missing(all())?;
    if !missing.is_empty() {
        eprintln!("setup: installing with apt-get: {}", missing.join(" "));
        apt::install(&missing)?;
    }
    if libclang_dir().is_none() {
        bail!(
            "no libclang of version {} or older was found in /usr/lib/llvm-*/lib; the verbs \
             bindings do not build with a newer one. Install libclang-14-dev, or set \
             LIBCLANG_PATH to a directory that holds one",
            libclang::NEWEST_USABLE
        );
    }
    Ok(())
}

/// Checks that what builds the verbs bindings and boots the guest is there, and installs nothing.
pub(crate) fn check_guest() -> Result<()> {
    let mut missing = Vec::new();
    for program in [
        "gcc",
        "protoc",
        "qemu-system-x86_64",
        "busybox",
        "cpio",
        "kmod",
        "ip",
        "dpkg-deb",
    ] {
        if process::find(program).is_none() {
            missing.push(program);
        }
    }
    if !Path::new("/usr/include/infiniband/verbs.h").is_file() {
        missing.push("libibverbs' headers");
    }
    if libclang_dir().is_none() {
        missing.push("libclang, no newer than 15");
    }
    if !missing.is_empty() {
        bail!(
            "not here: {}. `cargo xtask setup` installs all of it on Debian and its children, and \
             elsewhere says which packages hold it",
            missing.join(", ")
        );
    }
    Ok(())
}

/// `command` as root: as it is for root, else through sudo.
fn as_root(program: &str) -> Result<Command> {
    if process::output(Command::new("id").arg("-u"))?.trim() == "0" {
        return Ok(Command::new(program));
    }
    if process::find("sudo").is_none() {
        bail!("`{program}` needs root, and there is no sudo: run `cargo xtask setup` as root");
    }
    let mut command = Command::new("sudo");
    // sudo drops the environment; apt must not ask questions whoever calls it.
    command.args(["env", "DEBIAN_FRONTEND=noninteractive", program]);
    Ok(command)
}
