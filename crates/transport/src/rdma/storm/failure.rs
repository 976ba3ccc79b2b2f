//! Storms that fail: caught, kept in a file, and shortened.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::fs;
use std::panic::PanicHookInfo;
use std::path::PathBuf;
use std::sync::Once;
use std::time::Duration;

use super::shorten::{Budget, fewer, shorter};
use super::variable;
use super::world::{Run, World};

/// How long the faults of a whole storm come.
const STORM: Duration = Duration::from_secs(20);

/// Storms that shortening one may take; `RERAIL_SIM_RUNS` asks for others.
const RUNS_MAX: u64 = 80;

/// Lines that a failure shows; `RERAIL_SIM_LINES` asks for others.
const TAIL: u64 = 60;

/// What is made of a seed's storm: all, or the part that a failure needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    /// Numbers of the faults that are made; all if `None`.
    pub(super) faults: Option<BTreeSet<u32>>,
    /// How long faults come, and work is asked for.
    pub(super) span: Duration,
}

impl Default for Cut {
    fn default() -> Self {
        Self {
            faults: None,
            span: STORM,
        }
    }
}

impl Cut {
    /// The part that `RERAIL_SIM_FAULTS` (numbers with commas, or `none`) and `RERAIL_SIM_SPAN_MS`
    /// ask for.
    pub(super) fn asked_for() -> Self {
        let faults = std::env::var("RERAIL_SIM_FAULTS").ok().map(|text| {
            let numbers = text.split(',').filter(|number| *number != "none");
            let number = |number: &str| {
                let parsed = number.trim().parse();
                parsed.unwrap_or_else(|_| panic!("RERAIL_SIM_FAULTS={text}: expected 3,7 or none"))
            };
            numbers.map(number).collect()
        });
        let span = variable("RERAIL_SIM_SPAN_MS").map_or(STORM, Duration::from_millis);
        Self { faults, span }
    }

    pub(super) fn makes(&self, fault: u32) -> bool {
        let faults = self.faults.as_ref();
        faults.is_none_or(|faults| faults.contains(&fault))
    }

    fn of(faults: &[u32], span: Duration) -> Self {
        let faults = Some(faults.iter().copied().collect());
        Self { faults, span }
    }
}

/// As options of `cargo xtask sim`.
impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(faults) = &self.faults {
            let numbers: Vec<_> = faults.iter().map(u32::to_string).collect();
            let numbers = numbers.join(",");
            let numbers = if numbers.is_empty() { "none" } else { &numbers };
            write!(f, " --faults {numbers}")?;
        }
        if self.span != STORM {
            write!(f, " --span-ms {}", self.span.as_millis())?;
        }
        Ok(())
    }
}

/// A storm that went wrong.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) seed: u64,
    pub(super) cut: Cut,
    /// Where it panicked, which says of what kind it is.
    pub(super) place: String,
    what: String,
    backtrace: Option<Backtrace>,
    /// Those that were made until then.
    faults: Vec<u32>,
    trace: Vec<String>,
}

/// What is learnt of a panic before it is caught.
#[derive(Default)]
struct Heard {
    place: String,
    what: String,
    backtrace: Option<Backtrace>,
    faults: Vec<u32>,
    trace: Vec<String>,
}

thread_local! {
    /// `Some` while this thread runs a storm.
    static HEARD: RefCell<Option<Heard>> = const { RefCell::new(None) };
}

/// From now on panics of storms are kept and not printed: shortening makes many.
fn listen() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let is_heard = HEARD.with_borrow_mut(|heard| heard.as_mut().map(|h| hear(h, info)));
            if is_heard.is_none() {
                others(info);
            }
        }));
    });
}

fn hear(heard: &mut Heard, info: &PanicHookInfo<'_>) {
    let place = info.location().map(ToString::to_string);
    heard.place = place.unwrap_or_default();
    let what = info.payload_as_str();
    what.unwrap_or("no words").clone_into(&mut heard.what);
    let backtrace = Backtrace::capture();
    let is_there = backtrace.status() == BacktraceStatus::Captured;
    heard.backtrace = is_there.then_some(backtrace);
}

/// A world is left in the middle of a panic.
pub(super) fn left(trace: &mut Vec<String>, faults: &mut Vec<u32>) {
    HEARD.with_borrow_mut(|heard| {
        if let Some(heard) = heard {
            heard.trace = std::mem::take(trace);
            heard.faults = std::mem::take(faults);
        }
    });
}

/// Runs a storm, or the part of it that is asked for.
pub(super) fn storm(seed: u64, cut: &Cut) -> Result<Run, Box<Failure>> {
    listen();
    HEARD.set(Some(Heard::default()));
    let run = std::panic::catch_unwind(|| World::storm(seed, cut));
    let heard = HEARD.take().unwrap_or_default();
    run.map_err(|_| {
        Box::new(Failure {
            seed,
            cut: cut.clone(),
            place: heard.place,
            what: heard.what,
            backtrace: heard.backtrace,
            faults: heard.faults,
            trace: heard.trace,
        })
    })
}

impl Failure {
    /// The command that runs it again.
    pub(super) fn command(&self) -> String {
        let Self { seed, cut, .. } = self;
        format!("cargo xtask sim --seeds 1 --seed {seed}{cut}")
    }

    /// Says what happened, with the last lines, and keeps all of them in a file.
    pub(super) fn tell(&self) {
        let Self { seed, place, .. } = self;
        let mut text = format!("seed {seed} failed at {place}:\n  {}\n", self.what);
        if let Some(backtrace) = &self.backtrace {
            let _ = writeln!(text, "{backtrace}");
        }
        let tail = variable("RERAIL_SIM_LINES").unwrap_or(TAIL);
        let from = self.trace.len().saturating_sub(tail as usize);
        let _ = writeln!(text, "the last of {} lines:", self.trace.len());
        for line in &self.trace[from..] {
            let _ = writeln!(text, "  {line}");
        }
        let _ = writeln!(text, "again: {}", self.command());
        match self.keep(&seed.to_string()) {
            Ok(path) => eprintln!("{text}all lines: {}", path.display()),
            Err(error) => eprintln!("{text}its lines cannot be kept: {error}"),
        }
    }

    /// Writes the trace to `target/sim/NAME.txt`.
    fn keep(&self, name: &str) -> std::io::Result<PathBuf> {
        let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
        let workspace = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target");
        let directory = target.unwrap_or_else(workspace).join("sim");
        fs::create_dir_all(&directory)?;
        let path = directory.canonicalize()?.join(format!("{name}.txt"));
        let mut text = format!("{}\n{}: {}\n", self.command(), self.place, self.what);
        for line in &self.trace {
            text.push_str(line);
            text.push('\n');
        }
        fs::write(&path, text)?;
        Ok(path)
    }

    /// Leaves out of the storm what this kind of failure does not need, and says what is left.
    pub(super) fn shorten(&self) {
        let most = variable("RERAIL_SIM_RUNS").unwrap_or(RUNS_MAX);
        if most == 0 {
            return;
        }
        let mut budget = Budget(most);
        let mut least: Option<Box<Self>> = None;
        let mut fails = |cut: &Cut| {
            let failed = storm(self.seed, cut).err();
            let same = failed.filter(|failed| failed.place == self.place);
            let is_same = same.is_some();
            least = same.or(least.take());
            is_same
        };
        let faults = self.cut.faults.clone();
        let span = shorter(self.cut.span, &mut budget, |span| {
            let faults = faults.clone();
            fails(&Cut { faults, span })
        });
        // Those of them that come within that span have no bearing on it if they are not made.
        let faults = fewer(&self.faults, &mut budget, |left| {
            fails(&Cut::of(left, span))
        });
        shorter(span, &mut budget, |span| fails(&Cut::of(&faults, span)));
        let Some(least) = least else {
            eprintln!(
                "seed {}: in {most} runs nothing could be left out",
                self.seed
            );
            return;
        };
        let (left, made) = (least.faults.len(), self.faults.len());
        eprintln!(
            "seed {} fails there with {left} of {made} faults and {:?} of {:?}, after {} runs: {}",
            self.seed,
            least.cut.span,
            self.cut.span,
            most - budget.0,
            least.command(),
        );
        for line in least.trace.iter().filter(|line| line.contains(" fault ")) {
            eprintln!("  {line}");
        }
        match least.keep(&format!("{}-short", self.seed)) {
            Ok(path) => eprintln!("its lines: {}", path.display()),
            Err(error) => eprintln!("its lines cannot be kept: {error}"),
        }
    }
}
