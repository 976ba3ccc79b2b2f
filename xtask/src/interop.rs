//! `cargo xtask interop`: our program and the C++ engine against each other.
//!
//! The table over TCP runs on this machine; the one over RDMA is a scenario of the guest, so that
//! in `ci` it shares the scenarios' boot.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::artifacts::Artifacts;
use crate::guest::{self, ScenarioArgs};
use crate::{cpp_engine, process, setup};

/// The scenario with the table over RDMA.
const GUEST_SCENARIO: &str = "cpp_engine";

/// When the table on this machine counts as hung: it takes half a minute.
const TCP_LIMIT: Duration = Duration::from_secs(600);

/// Both tables.
pub(crate) fn run() -> Result<()> {
    setup::install_missing()?;
    over_tcp()?;
    guest::scenarios(&ScenarioArgs {
        parts: vec![GUEST_SCENARIO.to_owned()],
        ..ScenarioArgs::default()
    })
}

/// The table on this machine.
pub(crate) fn over_tcp() -> Result<()> {
    let python = cpp_engine::python()?;
    let artifacts = Artifacts::build()?;
    let mut command = Command::new(artifacts.program("interop")?);
    command
        .env("RERAIL_CPP_PYTHON", python)
        .env("RERAIL_BIN", artifacts.program("rerail")?);
    process::run_within(&command, TCP_LIMIT)
}
