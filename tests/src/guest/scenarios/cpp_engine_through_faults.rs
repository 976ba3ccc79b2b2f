//! The C++ engine and ours, each in each role, while rail a of the target flaps and is renumbered.

use std::time::Duration;

use crate::guest::Scenario;
use crate::interop::faults::{Pair, Trial, compare};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cpp_engine_through_faults",
    full_only: false,
    limit: Duration::from_secs(600),
    body: || compare(&[Pair::CppToOurs, Pair::OursToCpp], Trial::FlapAndRenumber),
};
