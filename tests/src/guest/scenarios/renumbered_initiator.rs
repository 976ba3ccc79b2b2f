//! The initiator's rail a gets another address, under traffic.

use std::time::Duration;

use super::renumbered::renumber;
use crate::guest::Scenario;
use crate::guest::rig::A1;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "renumbered_initiator",
    full_only: false,
    limit: Duration::from_secs(120),
    body: || renumber(A1, "initiator"),
};
