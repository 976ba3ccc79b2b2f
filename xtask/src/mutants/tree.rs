//! The scratch copy of the workspace that faults are made in.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

/// Makes `tree` a copy of the workspace at `root` as it is now, uncommitted changes included.
/// Files that are the same already are left alone, so that cargo builds only what differs.
pub(super) fn sync(root: &Path, tree: &Path) -> Result<()> {
    let mut git = Command::new("git");
    git.current_dir(root).args(["ls-files", "-z", "--cached"]);
    git.args(["--others", "--exclude-standard"]);
    let listed = process::output(&mut git)?;
    let mut wanted = BTreeSet::new();
    for file in listed.split('\0').filter(|file| !file.is_empty()) {
        let (from, to) = (root.join(file), tree.join(file));
        // What is deleted and not committed is listed still.
        if !from.is_file() {
            continue;
        }
        wanted.insert(to.clone());
        let bytes = fs::read(&from).with_context(|| from.display().to_string())?;
        if fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&to, bytes).with_context(|| to.display().to_string())?;
    }
    for file in files(tree)? {
        if !wanted.contains(&file) {
            fs::remove_file(&file).with_context(|| file.display().to_string())?;
        }
    }
    Ok(())
}

fn files(tree: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut directories = vec![tree.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                directories.push(entry.path());
            } else {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}
