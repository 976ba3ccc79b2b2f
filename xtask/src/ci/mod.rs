//! `cargo xtask ci`: everything that must pass before a change lands.
//!
//! A list of stages, run in order; the first that fails ends the run. Quick ones that find common
//! mistakes come first. Each has a budget: what it should take at most on two cores with nothing
//! built before. Going over it is said aloud and fails nothing, since a busy machine is no fault of
//! the change; a command that takes several times as long hangs, and is ended.

mod stages;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::{process, workspace};

/// What all stages together may take without `--full`.
const BUDGET: Duration = Duration::from_secs(30 * 60);

/// A command hangs once it has taken this many of its stage's budgets and this long besides.
const HANGS_AFTER_BUDGETS: u32 = 4;
const HANGS_AFTER: Duration = Duration::from_secs(300);

/// One stage.
struct Stage {
    name: &'static str,
    /// At most this long on two cores, from empty caches.
    budget_s: u64,
    /// Only with `--full`.
    full_only: bool,
    run: fn(&Context) -> Result<()>,
}

impl Stage {
    fn budget(&self) -> Duration {
        Duration::from_secs(self.budget_s)
    }
}

/// What a stage gets to know.
struct Context {
    /// Whether the long sets are wanted.
    full: bool,
    /// When the stage's commands count as hung.
    limit: Duration,
}

impl Context {
    /// Runs a cargo command, bounded.
    fn cargo(&self, arguments: &[&str]) -> Result<()> {
        self.cargo_with(arguments, &[])
    }

    /// Runs a cargo command with more environment, bounded.
    fn cargo_with(&self, arguments: &[&str], env: &[(&str, &str)]) -> Result<()> {
        let mut command = process::cargo();
        command.args(arguments).envs(env.iter().copied());
        println!("$ {}", shown(arguments, env));
        process::run_within(&command, self.limit)
    }
}

fn shown(arguments: &[&str], env: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (name, value) in env {
        text.push_str(&format!("{name}='{value}' "));
    }
    format!("{text}cargo {}", arguments.join(" "))
}

/// `cargo xtask ci`.
pub(crate) fn run(full: bool) -> Result<()> {
    let started = Instant::now();
    let stages: Vec<_> = stages::STAGES
        .iter()
        .filter(|stage| full || !stage.full_only)
        .collect();
    let mut lines = Vec::new();
    for (at, stage) in stages.iter().enumerate() {
        println!("\n=== {} ({} of {})", stage.name, at + 1, stages.len());
        let stage_started = Instant::now();
        let context = Context {
            full,
            limit: HANGS_AFTER_BUDGETS * stage.budget() + HANGS_AFTER,
        };
        let outcome = (stage.run)(&context);
        let line = report(stage, stage_started.elapsed());
        println!("=== {line}");
        lines.push(line);
        if let Err(error) = outcome {
            bail!(
                "ci failed in the stage `{}`: {error:#}\nto repeat it in {}: cargo xtask ci {}",
                stage.name,
                workspace::root().display(),
                if full { "--full" } else { "" }
            );
        }
    }
    println!("\n=== ci: all {} stages passed", stages.len());
    for line in lines {
        println!("    {line}");
    }
    let took = started.elapsed();
    println!(
        "    {:<10} {:6.1} s of {} s",
        "in all",
        took.as_secs_f64(),
        BUDGET.as_secs()
    );
    Ok(())
}

/// The stage's time and its budget.
fn report(stage: &Stage, took: Duration) -> String {
    let over = if took > stage.budget() {
        ": OVER ITS BUDGET"
    } else {
        ""
    };
    let seconds = took.as_secs_f64();
    format!(
        "{:<10} {seconds:6.1} s of {} s{over}",
        stage.name, stage.budget_s
    )
}

#[cfg(test)]
mod tests {
    use super::{BUDGET, stages::STAGES};

    #[test]
    fn the_stages_budgets_add_up_to_half_an_hour_at_most() {
        let short = STAGES.iter().filter(|stage| !stage.full_only);
        assert!(short.map(|stage| stage.budget_s).sum::<u64>() <= BUDGET.as_secs());
    }
}
