//! `cargo xtask tidy`: the house rules that a program can check.
//!
//! What rustfmt, clippy and rustc can check is left to them; what only a reader can judge is in
//! CONTRIBUTING.md. Also runs as a test, so that plain `cargo test` finds a breach.

mod code;
mod dependencies;
mod files;
mod licence;
mod manifests;
mod reports;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::{mutants, workspace};

/// One breach of one rule.
#[derive(Debug)]
struct Breach {
    /// Relative to the workspace's root.
    file: PathBuf,
    /// From 1; `None` if the rule is about the whole file.
    line: Option<usize>,
    /// The rule and what to do.
    message: String,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file.display(), self.message),
            None => write!(f, "{}: {}", self.file.display(), self.message),
        }
    }
}

/// `cargo xtask tidy`.
pub(crate) fn run() -> Result<()> {
    let breaches = breaches()?;
    if breaches.is_empty() {
        println!("tidy: nothing to complain about");
        return Ok(());
    }
    for breach in &breaches {
        eprintln!("tidy: {breach}");
    }
    bail!("tidy: {} breaches of the house rules", breaches.len())
}

/// All breaches, by file.
fn breaches() -> Result<Vec<Breach>> {
    let root = workspace::root();
    let mut breaches = Vec::new();
    for file in committed_files(&root)? {
        let text = std::fs::read_to_string(root.join(&file))?;
        breaches.extend(files::check(&file, &text));
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => breaches.extend(code::check(&file, &text)),
            Some("toml") if file.ends_with("Cargo.toml") => {
                breaches.extend(manifests::check(&file, &text));
            }
            _ => {}
        }
    }
    breaches.extend(dependencies::check(&root)?);
    breaches.extend(reports::check(&root));
    let rotten = mutants::rotten(&root).into_iter();
    breaches.extend(rotten.map(|(file, message)| Breach {
        file,
        line: None,
        message,
    }));
    breaches.sort_by(|a, b| (&a.file, a.line).cmp(&(&b.file, b.line)));
    Ok(breaches)
}

/// The text files that the rules are about, relative to `root`: what we write by hand. Test data
/// (JSON and the like) keeps whatever form it was taken in.
fn committed_files(root: &Path) -> Result<Vec<PathBuf>> {
    const EXTENSIONS: &[&str] = &["rs", "toml", "md", "sh", "py", "c", "h"];
    // Hidden directories are tools' own, but for these.
    const HIDDEN_BUT_OURS: &[&str] = &[".ci", ".cargo", ".config"];
    let mut files = Vec::new();
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(root.join(&directory))? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let path = directory.join(&*name);
            if entry.file_type()?.is_dir() {
                let hidden = name.starts_with('.') && !HIDDEN_BUT_OURS.contains(&&*name);
                if !hidden && name != "target" {
                    directories.push(path);
                }
            } else if path == Path::new(".ci/run")
                || path
                    .extension()
                    .is_some_and(|e| EXTENSIONS.iter().any(|ours| e == *ours))
            {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_workspace_keeps_its_house_rules() {
        let breaches = super::breaches().expect("the workspace can be read");
        let shown: Vec<_> = breaches.iter().map(ToString::to_string).collect();
        assert!(shown.is_empty(), "{}", shown.join("\n"));
    }
}
