//! The target's port goes down for ten seconds and comes back, under traffic.

use std::time::Duration;

use super::port_flap::flap;
use crate::guest::Scenario;
use crate::guest::rig::A0;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "port_flap_at_the_target",
    full_only: false,
    limit: Duration::from_secs(150),
    body: || flap(A0, |traffic| &traffic.target_log),
};
