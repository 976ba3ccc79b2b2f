//! What soft-RoCE never does, through an interposer over the real library: a device dies, a
//! completion queue breaks, the event channel fails, a control verb hangs. The other rail goes on,
//! and the device is opened again.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::child::stdout_within;
use crate::guest::Scenario;
use crate::guest::rig::A1;
use crate::guest::traffic::{Plan, Traffic, is_of, is_rail};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "devices_that_die_or_hang_are_opened_again",
    full_only: false,
    limit: Duration::from_secs(240),
    body,
};

const WITHIN: Duration = Duration::from_secs(20);
/// How long a control verb hangs.
const HANGS: Duration = Duration::from_secs(10);

fn body() -> Result<()> {
    let dir = TempDir::new()?;
    let library = build(dir.path())?;
    let faults = dir.path().join("faults");
    std::fs::create_dir(&faults)?;
    let mut plan = Plan::both_rails(50);
    plan.initiator_env = vec![
        ("LD_PRELOAD".to_owned(), library.display().to_string()),
        ("RERAIL_INTERPOSE".to_owned(), faults.display().to_string()),
    ];
    let traffic = Traffic::start(&plan)?;
    let device = A1.device();
    for fault in ["fatal", "cqerr", "eio"] {
        println!("{fault}");
        let mark = traffic.own_log.mark()?;
        std::fs::write(faults.join(format!("{fault}-{device}")), "")?;
        for (what, kind) in [
            ("the device is given up", "context_released"),
            ("the device is open again", "context_reopened"),
        ] {
            let log = &traffic.own_log;
            log.wait(what, WITHIN, mark, |event| is_of(event, kind, &device))?;
        }
        let reopened = traffic.own_log.mark()?;
        traffic
            .own_log
            .wait("the rail is up again", WITHIN, reopened, |event| {
                is_rail(event, &device, "up")
            })?;
    }
    println!("hang");
    let mark = traffic.own_log.mark()?;
    let hang = faults.join(format!("hang-{device}"));
    std::fs::write(&hang, "")?;
    // The path fails, so that the engine wants to stop queue pairs and cannot.
    A1.impair_inbound("netem loss 100%")?;
    sleep(HANGS);
    std::fs::remove_file(&hang)?;
    A1.impair_inbound("netem loss 0%")?;
    traffic
        .own_log
        .wait("the rail is up again", WITHIN, mark, |event| {
            is_rail(event, &device, "up")
        })?;
    let outcome = traffic.finish()?;
    let released = outcome.own.iter().filter(|event| is_of(event, "context_released", "rxe_b1"));
    ensure!(released.count() == 0, "the other device was given up, too");
    outcome.expect_flow(Duration::from_millis(1_500))
}

/// Compiles the interposer.
fn build(dir: &Path) -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("interposer/interpose.c");
    let library = dir.join("libinterpose.so");
    let mut gcc = Command::new("gcc");
    gcc.args(["-Wall", "-O1", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .arg("-ldl");
    stdout_within(gcc, Duration::from_secs(120)).context("the interposer")?;
    Ok(library)
}
