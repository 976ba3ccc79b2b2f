//! The target is killed and started again under its name: requests to the dead process end with
//! that reason within a second after the new record is seen, and new ones work.
//!
//! One thing takes longer: a WRITE that was in flight when its rail failed waits until no packet
//! of it can be under way any more, two seconds from then on, because a dead process confirms no
//! fence. That another process has its name does not shorten it: the older one may live on
//! somewhere, frozen or cut off from the store, with its memory and queue pairs as they were. A
//! process that is started again at once is known before that time is over, and one that takes its
//! time after it; both are shown.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rerail_engine::{
    Batch, Event, Events, RailState, Request, Status, Subscriber, Time, TransferError,
};
use tempfile::TempDir;

use super::in_process::{engine_in, memory};
use crate::bench::{Amount, Load, Side, Target};
use crate::guest::Scenario;
use crate::store::HttpStore;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "a_target_that_is_killed_and_restarted_is_another_peer",
    full_only: false,
    limit: Duration::from_secs(150),
    body,
};

const BUFFER_BYTES: u64 = 16 << 20;
/// How long after the new record was seen requests to the dead process have ended.
const ENDED_WITHIN: Duration = Duration::from_secs(1);
/// How long after its rail failed a packet may be under way (`packet_lifetime_ms`).
const LIFETIME: Duration = Duration::from_secs(2);
/// How long anything may take that is not measured.
const WITHIN: Duration = Duration::from_secs(30);

fn body() -> Result<()> {
    restart("at once", Duration::ZERO)?;
    restart("when no packet can be under way any more", LIFETIME + ENDED_WITHIN)?;
    the_program_says_why()
}

/// Kills a target while requests to it are under way, and starts it again `pause` after its rails
/// have failed.
fn restart(when: &str, pause: Duration) -> Result<()> {
    let dir = TempDir::new()?;
    let store = HttpStore::start(&dir.path().join("store"))?;
    let target = target_side(&store);
    let first = Target::start(&target, BUFFER_BYTES)?;
    let seen = Arc::new(Seen::default());
    let events = Events::new(seen.clone());
    let engine = engine_in(store.url(), "initiator", &["rxe_a1", "rxe_b1"], events)?;
    let source = memory(&engine, BUFFER_BYTES as usize)?;
    let segment = engine.open_segment(first.segment())?;
    let write = || {
        let far = segment.buffers()[0].addr;
        Request::write(&segment, source.addr(), far, BUFFER_BYTES)
    };
    let warm = engine.allocate_batch(1);
    warm.submit(&[write()])?;
    warm.wait(WITHIN)?;
    let in_flight = engine.allocate_batch(4);
    in_flight.submit(&[write(), write(), write(), write()])?;
    let moved = in_flight.transferred_bytes();
    eventually("bytes are in flight", || in_flight.transferred_bytes() > moved)?;
    first.kill();
    let carries = |state: RailState| matches!(state, RailState::Up | RailState::Suspect);
    eventually("no rail works", || {
        !engine.rails(&segment).iter().any(|rail| carries(rail.state))
    })?;
    let cut = Instant::now();
    let not_posted = engine.allocate_batch(1);
    not_posted.submit(&[write()])?;
    sleep(pause);
    ensure!(not_posted.unfinished() == 1, "it ended before the target was there again");
    let second = Target::start(&target, BUFFER_BYTES)?;
    for (what, batch) in [("was in flight", &in_flight), ("was not posted", &not_posted)] {
        if batch.wait(WITHIN).is_ok() {
            bail!("a request to a dead process that {what} has succeeded");
        }
    }
    let (parted, record) = seen.replaced()?;
    let after = |at: Instant| at.saturating_duration_since(record);
    let (late, fenced) = (last(&not_posted)?, last(&in_flight)?);
    println!(
        "started again {when}; after its record was seen: parted {:.1?}, what was not posted ended \
         {:.1?}, what was in flight {:.1?} ({:.1?} after the rails had failed)",
        after(parted),
        after(late),
        after(fenced),
        fenced.saturating_duration_since(cut)
    );
    ensure!(after(parted) < ENDED_WITHIN, "parted late");
    ensure!(after(late) < ENDED_WITHIN, "ended late");
    let fence_over = cut + LIFETIME;
    ensure!(
        fenced < record.max(fence_over) + ENDED_WITHIN,
        "what was in flight ended late"
    );
    // Towards the new process everything works.
    let segment = engine.open_segment(second.segment())?;
    let far = segment.buffers()[0].addr;
    let again = engine.allocate_batch(1);
    again.submit(&[Request::write(&segment, source.addr(), far, BUFFER_BYTES)])?;
    again.wait(WITHIN).context("towards the new process")?;
    second.stop()
}

/// The same with the program at both ends: it stops, and says why.
fn the_program_says_why() -> Result<()> {
    let dir = TempDir::new()?;
    let store = HttpStore::start(&dir.path().join("store"))?;
    let target = target_side(&store);
    let initiator = side(&store, "initiator", &["rxe_a1", "rxe_b1"]);
    let first = Target::start(&target, BUFFER_BYTES)?;
    let load = Load {
        operation: "write",
        block_bytes: 256 << 10,
        batch: 4,
        threads: 1,
        amount: Amount::Seconds(60),
        verify: false,
    };
    let running = load.start(&initiator, first.segment(), Duration::from_secs(60))?;
    sleep(Duration::from_secs(5));
    first.kill();
    let second = Target::start(&target, BUFFER_BYTES)?;
    let output = running.output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "an initiator of a dead process went on");
    ensure!(text.contains("restarted"), "it does not say why it failed: {text}");
    let load = Load::verified("write", 256 << 10, 16 << 20);
    let report = load.run(&initiator, second.segment(), Duration::from_secs(60))?;
    report.expect_clean(16 << 20).context("towards the new process")?;
    second.stop()
}

fn target_side(store: &HttpStore) -> Side {
    side(store, "target", &["rxe_a0", "rxe_b0"])
}

fn side(store: &HttpStore, name: &str, devices: &[&str]) -> Side {
    let mut side = Side::rdma(name, devices).with_metadata(store.url());
    side.env = vec![("MC_TCP_BIND_ADDRESS".to_owned(), "127.0.0.1".to_owned())];
    side
}

/// When the last request of a batch ended, all of which must have ended because their peer was
/// replaced.
fn last(batch: &Batch) -> Result<Instant> {
    let mut last = None;
    for index in 0..batch.len() {
        match batch.status(index) {
            Some(Status::Failed(TransferError::PeerRestarted { .. })) => {}
            // What had arrived before the target was killed.
            Some(Status::Completed) => continue,
            other => bail!("request {index} ended otherwise: {other:?}"),
        }
        last = last.max(batch.finished_at(index).map(|(at, _)| at));
    }
    last.context("nothing failed")
}

fn eventually(what: &str, holds: impl Fn() -> bool) -> Result<()> {
    let begin = Instant::now();
    while !holds() {
        ensure!(begin.elapsed() < WITHIN, "not within {WITHIN:?}: {what}");
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Events with their times.
#[derive(Default)]
struct Seen(Mutex<Vec<(Instant, Event)>>);

impl Seen {
    /// When the target's first process was parted with, and when the record of its second was taken
    /// in, which may be told in either order.
    fn replaced(&self) -> Result<(Instant, Instant)> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let parted = seen
            .iter()
            .find(|(_, event)| matches!(event, Event::PeerParted { why: "replaced", .. }));
        let instances = seen.iter().filter_map(|(at, event)| match event {
            Event::PeerRecord { instance, .. } => Some((at, instance)),
            _ => None,
        });
        let first = instances.clone().next().map(|(_, instance)| instance);
        let record = instances.clone().find(|(_, instance)| Some(*instance) != first);
        match (parted, record) {
            (Some((parted, _)), Some((record, _))) => Ok((*parted, *record)),
            _ => bail!("it was not seen to be replaced: {seen:?}"),
        }
    }
}

impl Subscriber for Seen {
    fn event(&self, _at: Time, event: &Event) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.push((Instant::now(), event.clone()));
    }
}
