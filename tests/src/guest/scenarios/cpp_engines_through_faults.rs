//! The same with the C++ engine at both ends beside it, in one table.

use std::time::Duration;

use crate::guest::Scenario;
use crate::interop::faults::{Pair, Trial, compare};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cpp_engines_through_faults",
    full_only: true,
    limit: Duration::from_secs(600),
    body: || compare(&[Pair::CppToCpp, Pair::CppToOurs, Pair::OursToCpp], Trial::FlapAndRenumber),
};
