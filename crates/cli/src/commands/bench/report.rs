//! What an initiator measured.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rerail_engine::RailStats;
use serde::Serialize;

/// The longest latency that is told from longer ones, in ns: an hour.
const LATENCY_MAX_NS: u64 = 3_600_000_000_000;
/// Digits of latencies that are kept.
const DIGITS: u8 = 3;

/// Latencies in ns: each is counted, to three digits, in a size that does not change.
fn no_latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LATENCY_MAX_NS, DIGITS).expect("the bounds are in order")
}

/// What one thread measured.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) bytes: u64,
    pub(super) ops: u64,
    pub(super) failed: u64,
    pub(super) retried_slices: u64,
    pub(super) timed: Duration,
    pub(super) first_error: Option<String>,
    stall: Duration,
    last_completion: Instant,
    latencies_ns: Histogram<u64>,
}

/// How a request ended.
#[derive(Debug)]
pub(super) struct Outcome {
    /// When, and how long it took.
    pub(super) finished: Option<(Instant, Duration)>,
    /// Why it failed.
    pub(super) error: Option<String>,
}

impl Tally {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            bytes: 0,
            ops: 0,
            failed: 0,
            retried_slices: 0,
            timed: Duration::ZERO,
            first_error: None,
            stall: Duration::ZERO,
            last_completion: now,
            latencies_ns: no_latencies(),
        }
    }

    /// The named operation goes on at `now`: what happened since the last completion was not it.
    pub(super) fn resume(&mut self, now: Instant) {
        self.last_completion = now;
    }

    /// Counts requests of the named operation. One that failed has no latency and is no operation.
    pub(super) fn count(&mut self, mut outcomes: Vec<Outcome>) {
        outcomes.sort_by_key(|outcome| outcome.finished);
        for outcome in outcomes {
            match (outcome.error, outcome.finished) {
                (Some(error), _) => self.failed(error),
                (None, Some((at, took))) => self.completed(at, took),
                (None, None) => {}
            }
        }
    }

    /// A request is finished. In the order of completion.
    fn completed(&mut self, at: Instant, took: Duration) {
        self.waited_until(at);
        self.last_completion = self.last_completion.max(at);
        self.ops += 1;
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.latencies_ns.saturating_record(nanos);
    }

    /// Nothing has completed until `now`, with requests in flight.
    pub(super) fn waited_until(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.last_completion);
        self.stall = self.stall.max(gap);
    }

    pub(super) fn failed(&mut self, error: String) {
        self.failed += 1;
        self.first_error.get_or_insert(error);
    }
}

/// The JSON object of an initiator.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    bytes: u64,
    seconds: f64,
    gbytes_per_s: f64,
    ops: u64,
    pub(super) failed: u64,
    retried_slices: u64,
    max_stall_ms: f64,
    p50_us: f64,
    p99_us: f64,
    rails: Vec<Rail>,
}

#[derive(Debug, Serialize)]
struct Rail {
    local: String,
    peer: String,
    bytes: u64,
    errors: u64,
    state: &'static str,
}

impl Report {
    /// Over TCP there are none.
    pub(super) fn has_rails(&self) -> bool {
        !self.rails.is_empty()
    }

    /// The report of all threads together. `seconds` counts the named operation only.
    pub(super) fn new(tallies: &[Tally], rails: Vec<RailStats>) -> Self {
        let sum = |of: fn(&Tally) -> u64| tallies.iter().map(of).sum::<u64>();
        let bytes = sum(|tally| tally.bytes);
        let timed = tallies
            .iter()
            .map(|tally| tally.timed)
            .max()
            .unwrap_or_default();
        let seconds = timed.as_secs_f64();
        let stall = tallies
            .iter()
            .map(|tally| tally.stall)
            .max()
            .unwrap_or_default();
        let mut latencies = no_latencies();
        for tally in tallies {
            // They have the same bounds.
            latencies += &tally.latencies_ns;
        }
        let percentile_us = |percent| latencies.value_at_percentile(percent) as f64 / 1e3;
        Self {
            bytes,
            seconds,
            gbytes_per_s: if seconds > 0.0 {
                bytes as f64 / seconds / 1e9
            } else {
                0.0
            },
            ops: sum(|tally| tally.ops),
            failed: sum(|tally| tally.failed),
            retried_slices: sum(|tally| tally.retried_slices),
            max_stall_ms: stall.as_secs_f64() * 1e3,
            p50_us: percentile_us(50.0),
            p99_us: percentile_us(99.0),
            rails: rails.into_iter().map(rail).collect(),
        }
    }

    /// For people.
    pub(super) fn to_text(&self) -> String {
        let mut text = format!(
            "{} bytes in {:.3} s: {:.3} GB/s\n{} requests, {} failed, {} slices posted again\n\
             latency {:.1} us median, {:.1} us at 99 %; longest stall {:.1} ms\n",
            self.bytes,
            self.seconds,
            self.gbytes_per_s,
            self.ops,
            self.failed,
            self.retried_slices,
            self.p50_us,
            self.p99_us,
            self.max_stall_ms,
        );
        for rail in &self.rails {
            text.push_str(&format!(
                "rail {} - {}: {} bytes, {} errors, {}\n",
                rail.local, rail.peer, rail.bytes, rail.errors, rail.state
            ));
        }
        text
    }
}

fn rail(stats: RailStats) -> Rail {
    let peer = stats.peer.rsplit('@').next().unwrap_or_default().to_owned();
    Rail {
        local: stats.local,
        peer,
        bytes: stats.bytes,
        errors: stats.errors,
        state: stats.state.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To the digits that are kept.
    fn is_about(found_us: f64, expected_us: f64) -> bool {
        (found_us / expected_us - 1.0).abs() < 2e-3
    }

    #[test]
    fn requests_that_failed_count_as_such_only() {
        let begin = Instant::now();
        let outcome = |millis, error: Option<&str>| Outcome {
            finished: Some((
                begin + Duration::from_millis(millis),
                Duration::from_millis(millis),
            )),
            error: error.map(str::to_owned),
        };
        let mut tally = Tally::new(begin);
        tally.count(vec![
            outcome(30_000, Some("cut off")),
            outcome(2, None),
            outcome(1, None),
        ]);
        assert_eq!((tally.ops, tally.failed), (2, 1));
        assert_eq!(tally.latencies_ns.len(), 2);
        assert_eq!(tally.first_error.as_deref(), Some("cut off"));
        let report = Report::new(&[tally], Vec::new());
        assert_eq!(report.ops, 2);
        assert!(is_about(report.p50_us, 1_000.0), "{}", report.p50_us);
        assert!(is_about(report.p99_us, 2_000.0), "{}", report.p99_us);
    }

    #[test]
    fn without_any_request_there_is_no_latency() {
        let report = Report::new(&[Tally::new(Instant::now())], Vec::new());
        assert_eq!((report.p50_us, report.p99_us), (0.0, 0.0));
    }

    #[test]
    fn every_request_of_a_long_run_counts_and_takes_no_room() {
        const BATCH: u64 = 128;
        let begin = Instant::now();
        let (mut one, mut other) = (Tally::new(begin), Tally::new(begin));
        let room = one.latencies_ns.distinct_values();
        // In each batch latencies rise.
        for _ in 0..1_000 {
            let outcomes = (1..=BATCH).map(|at| {
                let took = Duration::from_micros(10 * at);
                Outcome {
                    finished: Some((begin + took, took)),
                    error: None,
                }
            });
            one.count(outcomes.collect());
        }
        // A thread with few requests weighs as much as it has.
        for _ in 0..100 {
            other.completed(begin, Duration::from_secs(1));
        }
        assert_eq!(one.latencies_ns.distinct_values(), room, "it never grows");
        let report = Report::new(&[one, other], Vec::new());
        assert_eq!(report.ops, 1_000 * BATCH + 100);
        assert!(is_about(report.p50_us, 650.0), "{}", report.p50_us);
        assert!(is_about(report.p99_us, 1_270.0), "{}", report.p99_us);
    }

    #[test]
    fn the_longest_stall_counts_between_completions_and_for_what_is_in_flight_at_the_end() {
        let begin = Instant::now();
        let at = |millis| begin + Duration::from_millis(millis);
        let mut tally = Tally::new(begin);
        tally.completed(at(10), Duration::from_millis(10));
        tally.completed(at(15), Duration::from_millis(15));
        assert_eq!(tally.stall, Duration::from_millis(10));
        tally.resume(at(500));
        tally.completed(at(505), Duration::from_millis(5));
        assert_eq!(
            tally.stall,
            Duration::from_millis(10),
            "what was between is not counted"
        );
        tally.waited_until(at(600));
        assert_eq!(tally.stall, Duration::from_millis(95));
    }
}
