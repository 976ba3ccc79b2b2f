//! Scenarios on real verbs devices, in the soft-RoCE guest (`cargo xtask vm`).
//!
//! All of them run in one boot, one after the other, each in a process of its own, on a rig that is
//! put back in order in between. To add one, write `scenarios/NAME.rs` with a `SCENARIO`, and add
//! `NAME` to the list in `scenarios/mod.rs`. Tests of one crate that need devices are its own
//! (`crates/verbs/tests/soft_roce.rs`) and run here too.

pub mod rig;
pub mod runner;
mod scenarios;
pub mod traffic;

use std::time::Duration;

use anyhow::Result;

pub use scenarios::all;

/// Something that must hold on the two-host rig.
pub struct Scenario {
    /// What must hold, or the fault, with underscores.
    pub name: &'static str,
    /// Whether it runs only with `--full`.
    pub full_only: bool,
    /// When it counts as hung. Emulated processors are slow: be generous.
    pub limit: Duration,
    /// The test. It may panic; what it prints is shown if it fails.
    pub body: fn() -> Result<()>,
}
