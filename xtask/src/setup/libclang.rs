//! Finds a libclang that the bindings generator of rdma-sys understands.
//!
//! rdma-sys 0.3 uses bindgen 0.59, which panics with libclang 16 and newer and by itself takes the
//! newest one it finds. Version 14 is what Debian 12 has; 15 was tried too.

use std::path::{Path, PathBuf};

/// The newest major version that the bindings build with.
pub(crate) const NEWEST_USABLE: u32 = 15;

/// The directory for `LIBCLANG_PATH`: the caller's own if it is set, else that of the newest
/// usable version in LLVM's usual place, else `None`.
pub(crate) fn libclang_dir() -> Option<PathBuf> {
    match std::env::var_os("LIBCLANG_PATH") {
        Some(dir) if !dir.is_empty() => Some(dir.into()),
        _ => newest_usable(Path::new("/usr/lib")),
    }
}

/// The newest usable `llvm-N/lib` below `lib` that really holds a libclang.
fn newest_usable(lib: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(lib).ok()?;
    entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let version: u32 = entry
                .file_name()
                .to_str()?
                .strip_prefix("llvm-")?
                .parse()
                .ok()?;
            let dir = entry.path().join("lib");
            (version <= NEWEST_USABLE && holds_libclang(&dir)).then_some((version, dir))
        })
        .max()
        .map(|(_, dir)| dir)
}

/// Whether there is a `libclang.so`, `libclang.so.N` or `libclang-N.so` in `dir`.
fn holds_libclang(dir: &Path) -> bool {
    std::fs::read_dir(dir).is_ok_and(|entries| {
        entries.filter_map(Result::ok).any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("libclang.so")
                || (name.starts_with("libclang-")
                    && name.contains(".so")
                    && !name.starts_with("libclang-cpp"))
        })
    })
}
