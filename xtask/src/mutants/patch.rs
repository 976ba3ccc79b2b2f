//! A deliberate fault: a patch file with a header.
//!
//! ```text
//! fault: what is broken, in words,
//!   which may go on in lines that are indented
//! tests: -p rerail-transport --lib -- machine::observer
//! env: NAME=value ANOTHER=value
//! diff --git a/crates/… b/crates/…
//! ```
//!
//! `tests` are the arguments of the `cargo test` that must turn red, and `env` is the environment
//! that it needs beyond ours, if any. More such lines are more catchers: each must turn red.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Where they are kept, below the workspace's root.
pub(crate) const DIRECTORY: &str = "mutants";

/// One fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Patch {
    /// Name of the file without its extension.
    pub(crate) name: String,
    /// The file.
    pub(crate) path: PathBuf,
    /// What is broken.
    pub(crate) fault: String,
    /// What must turn red, each by itself.
    pub(crate) catchers: Vec<Catcher>,
}

/// Tests that must notice a fault.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Catcher {
    /// Arguments of `cargo test`, and of the test program behind `--`.
    pub(crate) tests: Vec<String>,
    /// Their environment beyond ours.
    pub(crate) env: Vec<(String, String)>,
}

impl fmt::Display for Catcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.env {
            write!(f, "{name}={value} ")?;
        }
        write!(f, "cargo test {}", self.tests.join(" "))
    }
}

/// All of them, by name.
pub(crate) fn all(root: &Path) -> Result<Vec<Patch>> {
    let directory = root.join(DIRECTORY);
    let shown = || directory.display().to_string();
    let mut patches = Vec::new();
    for entry in fs::read_dir(&directory).with_context(shown)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "patch")
        {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let patch = parse(&path, &text).with_context(|| path.display().to_string())?;
            patches.push(patch);
        }
    }
    ensure!(!patches.is_empty(), "{} holds no patch", shown());
    patches.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(patches)
}

fn parse(path: &Path, text: &str) -> Result<Patch> {
    let (mut fault, mut catchers) = (String::new(), Vec::<Catcher>::new());
    let mut in_fault = false;
    for line in text.lines().take_while(|line| !line.starts_with("diff ")) {
        if let Some(rest) = line.strip_prefix("fault:") {
            rest.trim().clone_into(&mut fault);
        } else if let Some(rest) = line.strip_prefix("tests:") {
            let tests: Vec<_> = rest.split_whitespace().map(str::to_owned).collect();
            ensure!(!tests.is_empty(), "`tests:` names none");
            let env = Vec::new();
            catchers.push(Catcher { tests, env });
        } else if let Some(rest) = line.strip_prefix("env:") {
            let catcher = catchers
                .last_mut()
                .context("`env:` stands behind no `tests:`")?;
            for word in rest.split_whitespace() {
                let set = word.split_once('=');
                let (name, value) = set.with_context(|| format!("`{word}` is not NAME=value"))?;
                catcher.env.push((name.to_owned(), value.to_owned()));
            }
        } else if line.starts_with(' ') && in_fault {
            fault.push(' ');
            fault.push_str(line.trim());
        } else if !line.is_empty() {
            bail!(
                "`{line}` is neither `fault:`, `tests:`, `env:`, nor an indented line behind \
                 `fault:`"
            );
        }
        in_fault = line.starts_with("fault:") || in_fault && line.starts_with(' ');
    }
    ensure!(!fault.is_empty(), "the header has no `fault:`");
    ensure!(!catchers.is_empty(), "the header has no `tests:`");
    let name = path.file_stem().unwrap_or_default();
    Ok(Patch {
        name: name.to_string_lossy().into_owned(),
        path: path.to_owned(),
        fault,
        catchers,
    })
}

impl Patch {
    /// Whether it applies to the tree at `root`.
    pub(crate) fn check(&self, root: &Path) -> Result<()> {
        self.git_apply(root, &["--check"])
    }

    /// Applies it to the tree at `root`.
    pub(crate) fn apply(&self, root: &Path) -> Result<()> {
        self.git_apply(root, &[])
    }

    fn git_apply(&self, root: &Path, arguments: &[&str]) -> Result<()> {
        let mut git = Command::new("git");
        git.current_dir(root)
            // A tree inside a repository is taken for what it is: git would leave out, without a
            // word, whatever lies outside the directory that it is called in.
            .env("GIT_CEILING_DIRECTORIES", root.parent().unwrap_or(root))
            .arg("apply")
            .args(arguments)
            .arg(&self.path)
            .stdin(Stdio::null());
        let output = git.output().context("cannot start git")?;
        ensure!(
            output.status.success(),
            "{} does not apply any more: make its fault anew in today's code ({})",
            self.name,
            String::from_utf8_lossy(&output.stderr)
                .trim()
                .replace('\n', "; ")
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_up_to_the_diff() {
        let text = "fault: a b\n  c\ntests: -p x --lib -- y\ntests: -p z\nenv: A=1 B=c=d\n\
                    diff --git a/z b/z\nfault: no\n";
        let patch = parse(Path::new("mutants/some-fault.patch"), text).expect("it is well-formed");
        assert_eq!(patch.name, "some-fault");
        assert_eq!(patch.fault, "a b c");
        let [one, other] = &patch.catchers[..] else {
            panic!("two lines of tests: {:?}", patch.catchers);
        };
        assert_eq!(one.to_string(), "cargo test -p x --lib -- y");
        assert_eq!(other.to_string(), "A=1 B=c=d cargo test -p z");
        for bad in [
            "",
            "fault: a\ndiff\n",
            "tests: a\n",
            "fault: a\nb\ntests: c\n",
            "fault: a\nenv: B=1\ntests: c\n",
            "fault: a\ntests: c\nenv: B\n",
        ] {
            parse(Path::new("a.patch"), bad).expect_err(bad);
        }
    }
}
