//! Runs scenarios one after the other and says how each ended.
//!
//! Each runs in a process group of its own: a crash or a hang of one is only its own failure, and
//! nothing it started lives on beside the next. Tests of other crates that need devices come in as
//! test executables (`RERAIL_DEVICE_TESTS`: entries `CRATE=PATH`, separated by colons), each of
//! their tests as one scenario.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{all, rig};
use crate::child::stdout_within;

/// How long one test of another crate may take.
const FOREIGN_LIMIT: Duration = Duration::from_secs(120);
/// How long all tests of an executable may take under valgrind, on emulated processors.
const VALGRIND_LIMIT: Duration = Duration::from_secs(400);
/// Invalid accesses and lost memory are errors. What is only "possibly lost" is not: libibverbs
/// keeps its list of devices for ever, reached through pointers into the middle of it.
const VALGRIND: &[&str] = &[
    "--quiet",
    "--leak-check=full",
    "--show-leak-kinds=definite",
    "--errors-for-leak-kinds=definite",
    "--child-silent-after-fork=yes",
    "--error-exitcode=9",
];
/// A child made by fork leaves without freeing what it has a copy of. Valgrind takes that for lost
/// and changes the exit status that the test looks at.
const TESTS_IN_TURN: &[&str] = &["--test-threads=1", "--nocapture", "--skip=forked_child"];
const LISTED_WITHIN: Duration = Duration::from_secs(30);
const TICK: Duration = Duration::from_millis(20);

/// What to run.
#[derive(Debug, Default)]
pub struct Selection {
    /// Also what is only for `--full`.
    pub full: bool,
    /// Parts of names; empty for all.
    pub filters: Vec<String>,
    /// A directory that several runners share, each in a guest of its own: what one has claimed
    /// there the others leave out.
    pub claims: Option<PathBuf>,
}

impl Selection {
    fn takes(&self, job: &Job) -> bool {
        (self.full || !job.full_only)
            && (self.filters.is_empty() || self.filters.iter().any(|part| job.name.contains(part)))
    }

    /// Whether it is ours to run. Making a directory succeeds for one runner only.
    fn claims(&self, job: &Job) -> Result<bool> {
        let Some(claims) = &self.claims else {
            return Ok(true);
        };
        let claim = claims.join(job.file_name());
        match std::fs::create_dir(&claim) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error).with_context(|| format!("cannot make {}", claim.display())),
        }
    }
}

/// Something to run as a process: a scenario of ours or a test of another crate.
struct Job {
    name: String,
    full_only: bool,
    limit: Duration,
    program: PathBuf,
    arguments: Vec<String>,
}

/// Runs what `selection` takes, a line for each; whether all of it passed. Logs go below `logs`.
///
/// # Errors
/// If nothing is selected, or the rig cannot be put in order.
pub fn run(selection: &Selection, logs: &Path) -> Result<bool> {
    std::fs::create_dir_all(logs)?;
    let jobs: Vec<_> = jobs()?
        .into_iter()
        .filter(|job| selection.takes(job))
        .collect();
    if jobs.is_empty() {
        bail!("no scenario is called like {:?}", selection.filters);
    }
    let (mut passed, mut failed) = (0, Vec::new());
    for job in &jobs {
        if !selection.claims(job)? {
            continue;
        }
        rig::restore().with_context(|| format!("before {}", job.name))?;
        let log = logs.join(format!("{}.log", job.file_name()));
        let started = Instant::now();
        let outcome = job.run(&log);
        let seconds = started.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => {
                passed += 1;
                println!("ok     {seconds:7.1} s  {}", job.name);
            }
            Err(error) => {
                println!("FAILED {seconds:7.1} s  {}: {error:#}", job.name);
                let text = std::fs::read(&log).unwrap_or_default();
                for line in String::from_utf8_lossy(&text).lines() {
                    println!("    | {line}");
                }
                failed.push(job.name.as_str());
            }
        }
    }
    for name in &failed {
        println!("failed: {name}");
    }
    println!("{passed} passed, {} failed", failed.len());
    Ok(failed.is_empty())
}

/// The names of all that can be run.
///
/// # Errors
/// If a test executable cannot be asked for its tests.
pub fn names() -> Result<Vec<String>> {
    Ok(jobs()?.into_iter().map(|job| job.name).collect())
}

/// Runs one scenario of ours in this process: what [`run`] starts.
///
/// # Errors
/// The scenario's.
pub fn run_here(name: &str) -> Result<()> {
    let scenario = all().iter().find(|scenario| scenario.name == name);
    (scenario
        .with_context(|| format!("no scenario `{name}`"))?
        .body)()
}

fn jobs() -> Result<Vec<Job>> {
    let this = std::env::current_exe()?;
    let mut jobs: Vec<_> = all()
        .iter()
        .map(|scenario| Job {
            name: scenario.name.to_owned(),
            full_only: scenario.full_only,
            limit: scenario.limit,
            program: this.clone(),
            arguments: vec!["--run".to_owned(), scenario.name.to_owned()],
        })
        .collect();
    let foreign = std::env::var("RERAIL_DEVICE_TESTS").unwrap_or_default();
    for entry in foreign.split(':').filter(|entry| !entry.is_empty()) {
        let (crate_name, path) = entry
            .split_once('=')
            .with_context(|| format!("RERAIL_DEVICE_TESTS: `{entry}` is not CRATE=PATH"))?;
        jobs.extend(foreign_jobs(crate_name, path)?);
    }
    Ok(jobs)
}

/// A test executable's tests, one by one, and all of them once more under valgrind.
fn foreign_jobs(crate_name: &str, path: &str) -> Result<Vec<Job>> {
    let mut command = Command::new(path);
    command.args(["--list", "--format", "terse"]);
    let listed = stdout_within(command, LISTED_WITHIN)?;
    let tests = listed
        .lines()
        .filter_map(|line| line.strip_suffix(": test"));
    let mut jobs: Vec<_> = tests
        .map(|test| Job {
            name: format!("{crate_name}::{test}"),
            full_only: false,
            limit: FOREIGN_LIMIT,
            program: path.into(),
            arguments: ["--exact", "--nocapture", test].map(str::to_owned).to_vec(),
        })
        .collect();
    jobs.push(Job {
        name: format!("{crate_name}::all_under_valgrind"),
        full_only: false,
        limit: VALGRIND_LIMIT,
        program: "valgrind".into(),
        arguments: VALGRIND
            .iter()
            .chain(&[path])
            .chain(TESTS_IN_TURN)
            .map(|&a| a.to_owned())
            .collect(),
    });
    Ok(jobs)
}

/// Whether a log says that its test left something out, as tests do where there are no devices.
fn left_out(log: &Path) -> Result<bool> {
    Ok(String::from_utf8_lossy(&std::fs::read(log)?).contains("left out: "))
}

impl Job {
    fn file_name(&self) -> String {
        self.name.replace([':', '/'], "_")
    }

    /// Runs it with its output in `log`; an error unless it exits 0 within its limit.
    fn run(&self, log: &Path) -> Result<()> {
        let output = File::create(log)?;
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()?;
        let deadline = Instant::now() + self.limit;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            if Instant::now() >= deadline {
                break None;
            }
            std::thread::sleep(TICK);
        };
        // Its children too, and whether or not it ended by itself: nothing may outlive it.
        let group = format!("-{}", child.id());
        let _ = Command::new("kill")
            .args(["-KILL", "--", &group])
            .stderr(Stdio::null())
            .status();
        child.wait()?;
        match status {
            Some(status) if status.success() && left_out(log)? => {
                bail!("it left something out, though everything it needs is here")
            }
            None => bail!("not done after {} s", self.limit.as_secs()),
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("{status}"),
        }
    }
}
