//! Our first promise: bytes written arrive, bytes read are the peer's, whatever the sizes.

use std::time::Duration;

use anyhow::Result;

use crate::bench::{Load, Side, Target};
use crate::guest::Scenario;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "bench_moves_and_verifies_64_mib_by_write_and_by_read",
    full_only: false,
    limit: Duration::from_secs(400),
    body,
};

const MIB: u64 = 1024 * 1024;
const ONE_RUN: Duration = Duration::from_secs(120);
/// Block sizes: the usual ones, and one that is a multiple of no slice, page or word.
const BLOCKS: [u64; 5] = [4 * 1024, 64 * 1024, MIB, MIB + 4 * 1024, 100_001];

fn body() -> Result<()> {
    let target = Target::start(&Side::rdma("target", &["rxe_a0"]), 64 * MIB)?;
    let initiator = Side::rdma("initiator", &["rxe_a1"]);
    for operation in ["write", "read"] {
        for block in BLOCKS {
            let bytes = (64 * MIB).next_multiple_of(block);
            let load = Load::verified(operation, block, bytes);
            let report = load.run(&initiator, target.segment(), ONE_RUN)?;
            report.expect_clean(bytes)?;
            println!("{operation} {block}: {:.3} GB/s, {:?}", report.gbytes_per_s, report.rails);
        }
    }
    target.stop()
}
