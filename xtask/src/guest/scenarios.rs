//! `cargo xtask guest`: the scenarios of the `rerail-tests` crate, in one guest or several.
//!
//! Scenarios wait much more than they work: a port that is down for ten seconds is down that long.
//! So all of them run in two guests side by side, each of which takes the next one that is left.

use std::ffi::OsString;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use super::image::Image;
use super::session::{Ending, Session};
use crate::artifacts::Artifacts;
use crate::{cpp_engine, setup, workspace};

/// How long all scenarios of a kind may take together.
const LIMIT_S: u64 = 2400;
const LIMIT_FULL_S: u64 = 4800;
/// The C++ engine takes gigabytes for itself at start, and dies silently if it does not get them.
/// QEMU takes from this machine only what is used.
const MEMORY_MIB: u32 = 12_288;
/// Guests that share all scenarios.
const GUESTS: u8 = 2;

/// Arguments of `cargo xtask guest`.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct ScenarioArgs {
    /// Also the long ones.
    #[arg(long)]
    pub(crate) full: bool,
    /// Prints the scenarios' names and runs none.
    #[arg(long)]
    pub(crate) list: bool,
    /// Guests that share the scenarios [default: 2 for all of them, otherwise 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(crate) guests: Option<u8>,
    /// Parts of names of scenarios [default: all].
    #[arg(value_name = "PART")]
    pub(crate) parts: Vec<String>,
}

/// Builds the program and the scenarios and runs them in the guest.
pub(crate) fn scenarios(args: &ScenarioArgs) -> Result<()> {
    setup::install_missing()?;
    let artifacts = Artifacts::build()?;
    let out = workspace::target().join("guest/out");
    // Of this run alone: another one beside it must not take its scenarios away.
    let claims = out.join(format!("claims-{}", std::process::id()));
    let _ = fs::remove_dir_all(&claims);
    fs::create_dir_all(&claims).with_context(|| format!("cannot make {}", claims.display()))?;
    let mut command: Vec<OsString> = vec![artifacts.program("guest-scenarios")?.into()];
    if args.full {
        command.push("--full".into());
    }
    if args.list {
        command.push("--list".into());
    } else {
        command.extend(["--claims".into(), claims.clone().into()]);
    }
    command.extend(args.parts.iter().map(OsString::from));
    // `CRATE=PATH`, separated by colons, as the scenarios' runner reads it.
    let mut tests = OsString::new();
    for (crate_name, path) in artifacts.device_tests() {
        tests.push(format!("{crate_name}="));
        tests.push(path);
        tests.push(":");
    }
    let limit_s = if args.full { LIMIT_FULL_S } else { LIMIT_S };
    let session = Session {
        command,
        env: vec![
            ("RERAIL_BIN".to_owned(), artifacts.program("rerail")?.into()),
            ("RERAIL_CPP_PYTHON".to_owned(), cpp_engine::python()?.into()),
            ("RERAIL_DEVICE_TESTS".to_owned(), tests),
            // For those tests: two devices that reach each other, and leave to break their links.
            (
                "RERAIL_VERBS_TEST_DEVICES".to_owned(),
                "rxe_a1,rxe_a0".into(),
            ),
            ("RERAIL_VERBS_TEST_FAULTS".to_owned(), "1".into()),
        ],
        cwd: workspace::root(),
        timeout: Duration::from_secs(limit_s),
        memory_mib: MEMORY_MIB,
        cpus: 2,
        out,
        rig: true,
    };
    // Made once, before the guests would each make it.
    Image::ready()?;
    let guests = match args.guests {
        Some(guests) => guests,
        None if args.parts.is_empty() && !args.list => GUESTS,
        None => 1,
    };
    let endings = std::thread::scope(|scope| {
        let running: Vec<_> = (0..guests).map(|_| scope.spawn(|| session.run())).collect();
        let ended = running.into_iter().map(|guest| guest.join());
        ended
            .map(|ending| ending.unwrap_or_else(|_| Err(anyhow!("the thread of a guest panicked"))))
            .collect::<Result<Vec<_>>>()
    })?;
    let _ = fs::remove_dir_all(&claims);
    for ending in &endings {
        if let Some(problem) = ending.problem(limit_s) {
            bail!("{problem}");
        }
    }
    if endings
        .iter()
        .any(|ending| !matches!(ending, Ending::Exited(0)))
    {
        bail!("scenarios failed; their logs are in target/guest/out/scenarios");
    }
    Ok(())
}
