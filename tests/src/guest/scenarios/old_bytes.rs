//! A WRITE that is still on the wire when its rail goes down: the target reuses the buffer as soon
//! as the transfer is reported finished, and no old byte ever lands in it.
//!
//! That one lands without a fence at the far end is shown on plain verbs in the same rig, by
//! `a_write_of_a_queue_pair_in_error_lands_in_memory_that_was_reused` in the verbs' own tests.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rerail_engine::Request;

use crate::guest::Scenario;
use crate::guest::rig::{A0, A1};
use crate::guest::scenarios::in_process::{engine, memory};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "no_old_byte_lands_in_reused_memory",
    full_only: false,
    limit: Duration::from_secs(120),
    body,
};

const LENGTH: usize = 1 << 20;
/// The bytes of the transfer, and those that the target's owner writes afterwards.
const OLD: u8 = 1;
const NEW: u8 = 2;
/// Longer than any packet of the transfer can be under way.
const WATCHED: Duration = Duration::from_secs(4);

fn body() -> Result<()> {
    let target = engine("target", &["rxe_a0", "rxe_b0"])?;
    let initiator = engine("initiator", &["rxe_a1", "rxe_b1"])?;
    let (from, to) = (memory(&initiator, LENGTH)?, memory(&target, LENGTH)?);
    let segment = initiator.open_segment(target.name())?;
    let write = || Request::write(&segment, from.addr(), to.addr(), LENGTH as u64);
    let mut batch = initiator.allocate_batch(1);
    // Until both rails have carried something.
    let begin = Instant::now();
    loop {
        batch.submit(&[write()])?;
        batch.wait(Duration::from_secs(60))?;
        batch.clear()?;
        let rails = initiator.rails(&segment);
        let used = |name: &str| rails.iter().any(|rail| rail.local == name && rail.bytes > 0);
        if used("rxe_a1") && used("rxe_b1") {
            break;
        }
        ensure!(begin.elapsed() < Duration::from_secs(30), "not both rails are used");
    }
    from.copy_in(0, &[OLD; LENGTH])?;
    A0.impair_inbound("netem delay 1500ms")?;
    batch.submit(&[write()])?;
    // Some of it is on the wire by then.
    std::thread::sleep(Duration::from_millis(200));
    A1.down()?;
    batch.wait(Duration::from_secs(60)).context("the transfer failed")?;
    to.copy_in(0, &[NEW; LENGTH])?;
    let begin = Instant::now();
    let mut bytes = vec![0; LENGTH];
    while begin.elapsed() < WATCHED {
        to.copy_out(0, &mut bytes)?;
        let old = bytes.iter().position(|byte| *byte != NEW);
        ensure!(
            old.is_none(),
            "byte {old:?} is an old one {} ms after the transfer was finished",
            begin.elapsed().as_millis()
        );
    }
    Ok(())
}
