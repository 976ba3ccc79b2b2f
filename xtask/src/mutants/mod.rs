//! `cargo xtask mutants`: deliberate faults, each of which must turn a test red.
//!
//! A test is worth what it catches. `mutants/*.patch` are faults in the code that an engine runs,
//! one a file, with the tests that must notice. Each is made in a scratch copy of the workspace,
//! built, and tested; a mutant that survives is an error, and so is one that does not apply or
//! build: red must mean that a test looked. That each still applies is checked by `tidy`, too.
//!
//! Deliberately not here: faults that nobody chose. Those of this list stand for the invariants of
//! the project, and each is cheap to try.

mod patch;
mod tree;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

pub(crate) use patch::{DIRECTORY, all};

use self::patch::{Catcher, Patch};
use crate::{process, workspace};

/// The first build has all third-party crates in it.
const BUILT_WITHIN: Duration = Duration::from_secs(1_800);
/// Every command is a handful of tests. A mutant may make one hang, which is red as well.
const TESTED_WITHIN: Duration = Duration::from_secs(180);
/// Catchers that are named; of more only the number is told.
const NAMED_MAX: usize = 3;

/// Options of `cargo xtask mutants`.
#[derive(clap::Args, Default)]
pub(crate) struct MutantsArgs {
    /// Only those whose names contain one of these
    parts: Vec<String>,
}

/// Tries them all, and tells by which test each was caught.
pub(crate) fn run(args: &MutantsArgs) -> Result<()> {
    let root = workspace::root();
    let is_wanted = |patch: &Patch| {
        args.parts.is_empty() || args.parts.iter().any(|part| patch.name.contains(part))
    };
    let patches: Vec<_> = all(&root)?.into_iter().filter(is_wanted).collect();
    ensure!(
        !patches.is_empty(),
        "no mutant is named so; see {DIRECTORY}/"
    );
    let scratch = Scratch::create(root)?;
    for patch in &patches {
        scratch.restore()?;
        patch.check(&scratch.tree)?;
    }
    scratch.restore()?;
    let catchers: BTreeSet<_> = patches.iter().flat_map(|patch| &patch.catchers).collect();
    for catcher in catchers {
        println!("mutants: without a fault: {catcher}");
        let outcome = scratch.test(catcher)?;
        ensure!(
            outcome.caught_by.is_empty() && !outcome.is_red,
            "red without a fault: {catcher}\n{}",
            outcome.output
        );
        ensure!(outcome.passed > 0, "no test is named so: {catcher}");
    }
    let mut rows = Vec::new();
    for patch in &patches {
        println!("mutants: {}: {}", patch.name, patch.fault);
        scratch.restore()?;
        patch.apply(&scratch.tree)?;
        for catcher in &patch.catchers {
            let begin = Instant::now();
            let outcome = scratch
                .test(catcher)
                .with_context(|| format!("the mutant {}", patch.name))?;
            let row = Row {
                name: &patch.name,
                verdict: outcome.verdict(),
                took: begin.elapsed(),
            };
            println!("mutants: {row}");
            rows.push(row);
        }
    }
    println!("\nmutants: caught by");
    rows.iter().for_each(|row| println!("    {row}"));
    let survivors = rows.iter().filter(|row| row.verdict.is_err());
    let survivors: BTreeSet<_> = survivors.map(|row| row.name).collect();
    if !survivors.is_empty() {
        bail!(
            "{} of {} mutants are not caught by all that should: {}",
            survivors.len(),
            patches.len(),
            survivors.into_iter().collect::<Vec<_>>().join(", ")
        );
    }
    println!("mutants: all {} are caught", patches.len());
    Ok(())
}

/// What became of one.
struct Row<'a> {
    name: &'a str,
    /// Its catchers, or why there is none.
    verdict: Result<String, String>,
    took: Duration,
}

impl std::fmt::Display for Row<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Ok(what) | Err(what)) = &self.verdict;
        write!(
            f,
            "{:<32} {what} ({:.0} s)",
            self.name,
            self.took.as_secs_f64()
        )
    }
}

/// A copy of the workspace, and a target directory of its own: both stay for the next run.
struct Scratch {
    root: PathBuf,
    tree: PathBuf,
    target: PathBuf,
}

impl Scratch {
    fn create(root: PathBuf) -> Result<Self> {
        let directory = workspace::target().join("mutants");
        let tree = directory.join("tree");
        fs::create_dir_all(&tree).with_context(|| tree.display().to_string())?;
        Ok(Self {
            root,
            tree,
            target: directory.join("target"),
        })
    }

    /// Takes every fault out.
    fn restore(&self) -> Result<()> {
        tree::sync(&self.root, &self.tree)
    }

    fn cargo(&self) -> Command {
        let mut command = process::cargo();
        command
            .current_dir(&self.tree)
            .env("CARGO_TARGET_DIR", &self.target)
            // Nobody debugs them, and they are large.
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        command
    }

    /// Builds, which must go well, and runs the tests.
    fn test(&self, Catcher { tests, env }: &Catcher) -> Result<Outcome> {
        let mut parts = tests.splitn(2, |argument| argument == "--");
        let (cargo, filter) = (parts.next().unwrap_or(&[]), parts.next().unwrap_or(&[]));
        let mut build = self.cargo();
        build.args(["test", "--locked", "--quiet", "--no-run"]);
        build.args(cargo);
        process::run_within(&build, BUILT_WITHIN).context("it does not build")?;
        let mut run = self.cargo();
        run.args(["test", "--locked"]).args(cargo).arg("--");
        // One by one, so that one that hangs is the last that is named.
        run.arg("--test-threads=1").args(filter);
        run.envs(env.iter().map(|(name, value)| (name, value)));
        let (code, output) = process::output_within(&run, TESTED_WITHIN)?;
        Ok(Outcome::of(code, output))
    }
}

/// What a run of tests gave.
struct Outcome {
    /// It did not end well.
    is_red: bool,
    /// Names of the tests that failed or hung.
    caught_by: Vec<String>,
    passed: usize,
    output: String,
}

impl Outcome {
    fn of(code: Option<i32>, output: String) -> Self {
        let mut caught_by = Vec::new();
        let mut passed = 0;
        // What a test prints may stand between its name and its end.
        let mut running: Option<&str> = None;
        for line in output.lines() {
            if let Some((name, _)) = line
                .strip_prefix("test ")
                .and_then(|rest| rest.split_once(" ... "))
            {
                running = Some(name);
            }
            let ended = |word| line == word || line.ends_with(&format!(" ... {word}"));
            if ended("ok") {
                passed += 1;
                running = None;
            } else if ended("FAILED") {
                caught_by.extend(running.take().map(str::to_owned));
            }
        }
        let is_red = code != Some(0);
        if is_red {
            let how = if code == Some(process::TIMED_OUT) {
                "hangs"
            } else {
                "ends the process"
            };
            caught_by.extend(running.map(|name| format!("{name} ({how})")));
        }
        Self {
            is_red,
            caught_by,
            passed,
            output,
        }
    }

    /// The catchers, or why this counts for nothing.
    fn verdict(&self) -> Result<String, String> {
        if !self.is_red {
            return Err("SURVIVES".to_owned());
        }
        if self.caught_by.is_empty() {
            return Err(format!("RED, BUT NO TEST FAILED:\n{}", self.output));
        }
        let named: Vec<_> = self.caught_by.iter().take(NAMED_MAX).cloned().collect();
        let more = match self.caught_by.len().saturating_sub(NAMED_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        Ok(format!("{}{more}", named.join(", ")))
    }
}

/// Those that rot, with what to do: for `tidy`.
pub(crate) fn rotten(root: &Path) -> Vec<(PathBuf, String)> {
    let patches = match all(root) {
        Ok(patches) => patches,
        Err(error) => return vec![(PathBuf::from(DIRECTORY), format!("{error:#}"))],
    };
    let checked = patches.iter().map(|patch| (patch, patch.check(root)));
    let rotten = checked.filter_map(|(patch, checked)| {
        let file = Path::new(DIRECTORY).join(format!("{}.patch", patch.name));
        Some((file, format!("{:#}", checked.err()?)))
    });
    rotten.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catchers_are_those_that_failed_or_were_running_at_the_end() {
        let text = "test a::b ... ok\ntest a::c ... FAILED\ntest d ... some words\nFAILED\n";
        let outcome = Outcome::of(Some(101), text.to_owned());
        assert_eq!(outcome.passed, 1);
        assert_eq!(outcome.verdict(), Ok("a::c, d".to_owned()));
        let hung = Outcome::of(
            Some(process::TIMED_OUT),
            "test a ... ok\ntest b ... ".into(),
        );
        assert_eq!(hung.verdict(), Ok("b (hangs)".to_owned()));
        let survived = Outcome::of(Some(0), "test a ... ok\n".into());
        assert_eq!(survived.verdict(), Err("SURVIVES".to_owned()));
        let broken = Outcome::of(Some(101), "error: no such crate\n".into());
        assert!(broken.verdict().is_err(), "nothing was tested");
    }
}
