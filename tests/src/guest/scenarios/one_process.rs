//! Two engines in one process, and an engine that transfers to itself.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rerail_engine::{Engine, Request};

use crate::guest::Scenario;
use crate::guest::scenarios::in_process::{engine, memory};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "engines_in_one_process_and_one_with_itself",
    full_only: false,
    limit: Duration::from_secs(120),
    body,
};

/// No multiple of a slice, a page or a word.
const LENGTH: usize = 700_001;
const WITHIN: Duration = Duration::from_secs(60);

fn body() -> Result<()> {
    let left = engine("left", &["rxe_a0", "rxe_b0"])?;
    let right = engine("right", &["rxe_a1", "rxe_b1"])?;
    there_and_back(&left, &right).context("from left to right")?;
    there_and_back(&right, &left).context("from right to left")?;
    there_and_back(&left, &left).context("from left to itself")
}

/// Writes a pattern, reads it back into other memory, and compares.
fn there_and_back(own: &Engine, peer: &Engine) -> Result<()> {
    let (source, sink) = (memory(own, LENGTH)?, memory(own, LENGTH)?);
    let target = memory(peer, LENGTH)?;
    let pattern: Vec<u8> = (0..LENGTH).map(|at| (at * 7 + at / 251) as u8).collect();
    source.copy_in(0, &pattern)?;
    let segment = own.open_segment(peer.name())?;
    let mut batch = own.allocate_batch(1);
    let (length, far) = (LENGTH as u64, target.addr());
    for request in [
        Request::write(&segment, source.addr(), far, length),
        Request::read(&segment, sink.addr(), far, length),
    ] {
        batch.submit(&[request])?;
        batch.wait(WITHIN)?;
        batch.clear()?;
    }
    let mut back = vec![0; LENGTH];
    sink.copy_out(0, &mut back)?;
    ensure!(back == pattern, "other bytes came back");
    for memory in [&source, &sink] {
        own.unregister(memory.addr())?;
    }
    Ok(peer.unregister(target.addr())?)
}
