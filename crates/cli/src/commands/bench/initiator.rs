//! The side that moves blocks, and measures.
//!
//! It never retries: what the engine does not manage counts as failed.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rerail_engine::{Batch, Engine, MemoryOptions, Operation, Request, Segment, Status};
use rerail_verbs::HostMemory;
use serde_json::json;

use super::options::{Common, bytes, failed, usage};
use super::pattern::Pattern;
use super::report::{Outcome, Report, Tally};
use crate::failure::ResultExt as _;

/// How long a batch is waited for at most; each of its transfers has its own limit, and fences.
const BATCH_LIMIT: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Direction {
    /// From the target
    Read,
    /// To the target
    Write,
}

impl Direction {
    fn operation(self) -> Operation {
        match self {
            Self::Read => Operation::Read,
            Self::Write => Operation::Write,
        }
    }
}

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    common: Common,
    /// Segment of the target; its HOST:PORT without a store
    #[arg(long, value_name = "PEER")]
    segment: String,
    /// Which way the bytes go
    #[arg(long, value_enum, default_value = "read")]
    operation: Direction,
    /// Bytes of a request
    #[arg(long, value_name = "BYTES", default_value = "65536", value_parser = bytes)]
    block_size: u64,
    /// Requests that are submitted together
    #[arg(long, value_name = "N", default_value = "128",
        value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    batch_size: u64,
    /// Threads that submit
    #[arg(long, value_name = "N", default_value = "1",
        value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: u64,
    /// Seconds to run (default: 10)
    #[arg(long, value_name = "S", conflicts_with = "bytes",
        value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    duration: Option<u64>,
    /// Bytes to move in all
    #[arg(long, value_name = "N")]
    bytes: Option<u64>,
    /// Read everything back by the opposite operation, and compare
    #[arg(long)]
    verify: bool,
    /// Seed of the pattern of bytes
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let events = args.common.events()?;
    let engine = args.common.engine(&events)?;
    let segment = engine.open_segment(&args.segment).map_err(|error| {
        let what = format!("segment {} cannot be opened", args.segment);
        let remedy =
            "start the target first, and give what it prints (without a store: its rpc=HOST:PORT)";
        failed(error, what, remedy)
    })?;
    let plan = Plan::new(args, &segment)?;
    // The second half is where bytes are read back to, or written from.
    let halves = if args.verify { 2 } else { 1 };
    let length = plan.area_bytes * args.threads * halves;
    let memory = usize::try_from(length)
        .map_err(anyhow::Error::from)
        .and_then(|length| HostMemory::allocate(length).map_err(anyhow::Error::from))
        .or_fail(
            format!("{length} bytes cannot be mapped"),
            "lower --block-size, --batch-size or --threads",
        )?;
    let options = MemoryOptions {
        remote_accessible: false,
        ..MemoryOptions::default()
    };
    engine.register(&memory, options).map_err(|error| {
        let remedy = "raise the limit of locked memory (`ulimit -l unlimited`)";
        failed(error, "the buffer cannot be registered", remedy)
    })?;
    events.write("started", json!({"segment": args.segment}));
    let tallies = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..args.threads)
            .map(|thread| {
                let worker = Worker {
                    args,
                    plan: &plan,
                    engine: &engine,
                    segment: &segment,
                    memory: &memory,
                    thread,
                };
                scope.spawn(move || worker.run())
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| {
                worker
                    .join()
                    .unwrap_or_else(|_| Err(anyhow::anyhow!("a thread panicked")))
            })
            .collect::<anyhow::Result<Vec<_>>>()
    })?;
    let report = Report::new(&tallies, engine.rails(&segment));
    events.write("finished", serde_json::to_value(&report)?);
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        out.write_all(report.to_text().as_bytes())?;
    }
    out.flush()?;
    match tallies.iter().find_map(|tally| tally.first_error.as_ref()) {
        None => Ok(ExitCode::SUCCESS),
        Some(error) => Err(usage(
            format!("{} requests failed, the first with: {error}", report.failed),
            if report.has_rails() {
                "see the cause; RERAIL_LOG=info tells what became of each rail"
            } else {
                "see the cause; check that the target still runs, and that its ports can be reached"
            },
        )),
    }
}

/// What is moved where.
struct Plan {
    remote_addr: u64,
    /// Bytes that a thread works on: one batch of blocks.
    area_bytes: u64,
    /// Areas in the target's buffer, for all threads together.
    areas: u64,
    /// Bytes that nobody has claimed; `None` where time is the limit.
    left_bytes: Option<AtomicU64>,
    until: Option<Instant>,
}

impl Plan {
    fn new(args: &Args, segment: &Segment) -> anyhow::Result<Self> {
        // A large buffer may be published in several chunks that follow each other.
        let mut buffers = segment.buffers().iter();
        let Some(first) = buffers.next() else {
            return Err(usage(
                format!("{} offers no memory", segment.name()),
                "give the segment of a bench target",
            ));
        };
        let mut end = first.addr + first.length;
        for buffer in buffers.take_while(|buffer| buffer.addr == first.addr + first.length) {
            end = end.max(buffer.addr + buffer.length);
        }
        let offered = end - first.addr;
        let area_bytes = args.block_size.saturating_mul(args.batch_size);
        let areas = offered / area_bytes.max(1);
        if areas < args.threads {
            return Err(usage(
                format!(
                    "the target's buffer is too small: {offered} bytes < block size {} × batch \
                     size {} × threads {}",
                    args.block_size, args.batch_size, args.threads
                ),
                "give the target a larger --buffer-size, or lower one of the three",
            ));
        }
        let until = args
            .bytes
            .is_none()
            .then(|| Instant::now() + Duration::from_secs(args.duration.unwrap_or(10)));
        Ok(Self {
            remote_addr: first.addr,
            area_bytes,
            areas,
            left_bytes: args.bytes.map(AtomicU64::new),
            until,
        })
    }

    /// Takes up to `bytes` of what is left to be moved.
    fn claim(&self, bytes: u64) -> u64 {
        if self.until.is_some_and(|until| Instant::now() >= until) {
            return 0;
        }
        let Some(left_bytes) = &self.left_bytes else {
            return bytes;
        };
        let mut left = left_bytes.load(Ordering::Relaxed);
        loop {
            let claimed = left.min(bytes);
            match left_bytes.compare_exchange_weak(
                left,
                left - claimed,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return claimed,
                Err(current) => left = current,
            }
        }
    }
}

struct Worker<'a> {
    args: &'a Args,
    plan: &'a Plan,
    engine: &'a Engine,
    segment: &'a Segment,
    memory: &'a HostMemory,
    thread: u64,
}

impl Worker<'_> {
    fn run(&self) -> anyhow::Result<Tally> {
        let mut tally = Tally::new(Instant::now());
        let mut batch = self.engine.allocate_batch(self.args.batch_size as usize);
        for round in 0.. {
            let bytes = self.plan.claim(self.plan.area_bytes);
            if bytes == 0 || tally.failed > 0 {
                break;
            }
            self.round(&mut batch, round, bytes, &mut tally)?;
        }
        Ok(tally)
    }

    /// Moves `bytes` in blocks, and verifies them if asked to.
    fn round(
        &self,
        batch: &mut Batch,
        round: u64,
        bytes: u64,
        tally: &mut Tally,
    ) -> anyhow::Result<()> {
        let Args {
            operation, verify, ..
        } = *self.args;
        // Threads never share an area, and each visits all of its own in turn.
        let own_areas = self.plan.areas / self.args.threads;
        let area = self.thread * own_areas + round % own_areas;
        let remote = self.plan.remote_addr + area * self.plan.area_bytes;
        let (first, second) = self.offsets();
        let pattern = Pattern {
            seed: self.args.seed,
            round,
        };
        let length = usize::try_from(bytes)?;
        if !verify {
            return self.transfer(
                batch,
                operation.operation(),
                first,
                remote,
                bytes,
                Some(tally),
            );
        }
        let (source, sink) = match operation {
            Direction::Write => (first, second),
            Direction::Read => (second, first),
        };
        pattern.fill(self.memory, source, length, remote)?;
        // What stood here before must not pass for what arrives.
        let other = Pattern {
            seed: !self.args.seed,
            ..pattern
        };
        other.fill(self.memory, sink, length, remote)?;
        let timed = |direction| (operation == direction).then_some(());
        let write_tally = timed(Direction::Write).map(|()| &mut *tally);
        self.transfer(batch, Operation::Write, source, remote, bytes, write_tally)?;
        let read_tally = timed(Direction::Read).map(|()| &mut *tally);
        self.transfer(batch, Operation::Read, sink, remote, bytes, read_tally)?;
        if tally.failed > 0 {
            return Ok(());
        }
        if let Some(mismatch) = pattern.check(self.memory, sink, length, remote)? {
            tally.failed(format!(
                "round {round}: the byte at {:#x} is {:#04x}, not {:#04x}",
                mismatch.addr, mismatch.found, mismatch.expected
            ));
        }
        Ok(())
    }

    /// Offsets of the two areas of this thread in local memory; equal without `--verify`.
    fn offsets(&self) -> (usize, usize) {
        let area = self.plan.area_bytes as usize;
        let first = area * self.thread as usize;
        let second = first + area * self.args.threads as usize;
        (first, if self.args.verify { second } else { first })
    }

    /// Moves `bytes` in blocks as one batch. Counts them in `tally` if there is one; a failure of
    /// the opposite operation is an error.
    fn transfer(
        &self,
        batch: &mut Batch,
        operation: Operation,
        offset: usize,
        remote: u64,
        bytes: u64,
        tally: Option<&mut Tally>,
    ) -> anyhow::Result<()> {
        let local = self.memory.addr() + offset as u64;
        let requests: Vec<Request> = (0..bytes.div_ceil(self.args.block_size))
            .map(|block| {
                let at = block * self.args.block_size;
                let length = self.args.block_size.min(bytes - at);
                let mut request = Request::write(self.segment, local + at, remote + at, length);
                request.operation = operation;
                request
            })
            .collect();
        let begin = Instant::now();
        batch.submit(&requests).or_fail(
            "requests cannot be submitted",
            "open the segment again; the target may have been restarted",
        )?;
        // What failed is counted below, one by one.
        let waited = batch.wait(BATCH_LIMIT);
        let end = Instant::now();
        let Some(tally) = tally else {
            waited.or_fail("the opposite operation of --verify failed", "see the cause")?;
            batch.clear()?;
            return Ok(());
        };
        tally.resume(begin);
        tally.timed += end - begin;
        tally.bytes += batch.transferred_bytes();
        tally.retried_slices += batch.retried_slices();
        let outcomes = (0..batch.len()).map(|index| Outcome {
            finished: batch.finished_at(index),
            error: match batch.status(index) {
                Some(Status::Completed) => None,
                Some(Status::Failed(error)) => Some(error.to_string()),
                _ => Some("unfinished".into()),
            },
        });
        tally.count(outcomes.collect());
        tally.waited_until(end);
        batch.clear()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_bytes_as_there_are_numbers_are_a_limit_like_any_other() {
        let plan = Plan {
            remote_addr: 0,
            area_bytes: 1 << 20,
            areas: 1,
            left_bytes: Some(AtomicU64::new(u64::MAX)),
            until: None,
        };
        assert_eq!(plan.claim(1 << 20), 1 << 20);
        assert_eq!(plan.claim(u64::MAX), u64::MAX - (1 << 20));
        assert_eq!(plan.claim(1 << 20), 0);
    }
}
