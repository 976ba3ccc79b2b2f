//! The C++ engine cannot tell us from its own kind over RDMA, in either role.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::guest::Scenario;
use crate::interop;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cpp_engine_moves_bytes_to_and_from_us_over_rdma",
    full_only: false,
    limit: Duration::from_secs(900),
    body,
};

fn body() -> Result<()> {
    ensure!(interop::run(interop::RDMA)?, "a row of the table failed");
    Ok(())
}
