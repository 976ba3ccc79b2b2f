//! Whether queue pairs make progress (design §6): work that never completes is found without any
//! event or error.
//!
//! One machine per data thread. The oldest unfinished request of a queue pair must complete within
//! 500 ms plus its bytes at a quarter of the measured rate, and every completion starts that time
//! anew. Before a queue pair is judged, its completion queue is polled until it is empty. A thread
//! that was not scheduled for more than 200 ms judges nobody for it: the gap does not count.
//!
//! Deliberately not here: what is done about a queue pair that makes no progress (its endpoint
//! goes to ERR, its work is abandoned), and deadlines of whole transfers.
//!
//! The hot path is [`Input::Posted`] and [`Input::Completed`]: neither allocates once the queue
//! pair is known.

mod credits;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use rerail_verbs::ObjectId;

pub use credits::Credits;

use super::{Machine, Time};

/// Times of progress.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ProgressConfig {
    /// Time that any request has. 500 ms.
    pub base: Duration,
    /// What a measured rate is divided by before it is relied on. 4.
    pub rate_divisor: u32,
    /// A gap between two calls that is not held against anybody. 200 ms.
    pub gap: Duration,
    /// How often the machine must be called while work is out. 50 ms.
    pub tick: Duration,
    /// Longest time that a request has, however slow its rail was. 10 s.
    pub max: Duration,
}

impl Default for ProgressConfig {
    fn default() -> Self {
        Self {
            base: Duration::from_millis(500),
            rate_divisor: 4,
            gap: Duration::from_millis(200),
            tick: Duration::from_millis(50),
            max: Duration::from_secs(10),
        }
    }
}

/// What the machine is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// A queue pair may be posted to.
    Opened {
        /// The queue pair.
        queue_pair: ObjectId,
        /// Depth of its send queue: more is never posted, see [`Credits`].
        depth: u32,
    },
    /// A queue pair is out of use; its work is not watched any more.
    Closed {
        /// The queue pair.
        queue_pair: ObjectId,
    },
    /// The measured rate of a queue pair's rail in bytes a second.
    Rate {
        /// The queue pair.
        queue_pair: ObjectId,
        /// The rate.
        bytes_per_s: u64,
    },
    /// A signalled request was posted. Requests of one queue pair complete in the order of their
    /// posting.
    Posted {
        /// The queue pair.
        queue_pair: ObjectId,
        /// Its bytes.
        bytes: u32,
    },
    /// Requests completed.
    Completed {
        /// The queue pair.
        queue_pair: ObjectId,
        /// How many.
        count: u32,
    },
    /// The completion queue was polled until it was empty, and `Completed` told of all it gave.
    PolledEmpty,
}

/// What the machine wants done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Somebody is late: poll until the completion queue is empty, then tell `PolledEmpty`.
    PollUntilEmpty,
    /// The queue pair makes no progress: its endpoint goes to ERR. Said once.
    Stalled {
        /// The queue pair.
        queue_pair: ObjectId,
        /// How long nothing has completed, gaps not counted.
        silent_for: Duration,
    },
}

#[derive(Clone, Debug)]
struct Watch {
    /// Bytes of the unfinished requests, oldest first.
    outstanding: VecDeque<u32>,
    depth: usize,
    rate: Option<u64>,
    /// When the oldest began to count: its posting or the last completion. Scheduled time.
    since: Time,
    stalled: bool,
}

/// Watches the queue pairs of one data thread. See the [module](self).
#[derive(Clone, Debug)]
pub struct Progress {
    config: ProgressConfig,
    watches: BTreeMap<ObjectId, Watch>,
    outstanding: usize,
    last_call: Time,
    /// Time in which this thread was not scheduled. Deadlines are in time less this.
    lost: Duration,
    polling: bool,
    out: VecDeque<Action>,
}

impl Progress {
    /// Watches nothing yet.
    pub fn new(config: ProgressConfig) -> Self {
        Self {
            config,
            watches: BTreeMap::new(),
            outstanding: 0,
            last_call: Time::ZERO,
            lost: Duration::ZERO,
            polling: false,
            out: VecDeque::new(),
        }
    }

    /// Unfinished requests of all queue pairs.
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Time in which the thread was not scheduled, in all.
    pub fn lost(&self) -> Duration {
        self.lost
    }

    /// Notes that the thread runs, and returns the time in which it did.
    fn scheduled(&mut self, now: Time) -> Time {
        let gap = now.saturating_since(self.last_call);
        if self.outstanding > 0 && gap > self.config.gap {
            tracing::debug!(?gap, "the data thread was not scheduled");
            self.lost += gap;
        }
        self.last_call = self.last_call.max(now);
        now - self.lost
    }

    /// How long the oldest of a queue pair's requests has.
    fn allowance(&self, watch: &Watch) -> Option<Duration> {
        let bytes = watch.outstanding.front()?;
        let at_rate = match watch.rate {
            Some(rate) => {
                let divisor = u128::from(self.config.rate_divisor.max(1));
                let nanos = u128::from(*bytes) * 1_000_000_000 * divisor / u128::from(rate.max(1));
                Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
            }
            None => Duration::ZERO,
        };
        Some(
            self.config
                .base
                .saturating_add(at_rate)
                .min(self.config.max),
        )
    }

    fn is_late(&self, watch: &Watch, now: Time) -> bool {
        !watch.stalled
            && self
                .allowance(watch)
                .is_some_and(|allowed| now >= watch.since + allowed)
    }

    fn judge(&mut self, now: Time) {
        let late = |(id, watch): (&ObjectId, &Watch)| self.is_late(watch, now).then_some(*id);
        let late: Vec<_> = self.watches.iter().filter_map(late).collect();
        for queue_pair in late {
            if let Some(watch) = self.watches.get_mut(&queue_pair) {
                watch.stalled = true;
                self.out.push_back(Action::Stalled {
                    queue_pair,
                    silent_for: now.saturating_since(watch.since),
                });
            }
        }
    }
}

impl Machine for Progress {
    type Input = Input;
    type Action = Action;

    fn handle(&mut self, now: Time, input: Input) {
        let now = self.scheduled(now);
        match input {
            Input::Opened { queue_pair, depth } => {
                let depth = depth as usize;
                let watch = Watch {
                    outstanding: VecDeque::with_capacity(depth),
                    depth,
                    rate: None,
                    since: now,
                    stalled: false,
                };
                self.watches.entry(queue_pair).or_insert(watch);
            }
            Input::Closed { queue_pair } => {
                if let Some(watch) = self.watches.remove(&queue_pair) {
                    self.outstanding -= watch.outstanding.len();
                }
            }
            Input::Rate {
                queue_pair,
                bytes_per_s,
            } => {
                if let Some(watch) = self.watches.get_mut(&queue_pair) {
                    watch.rate = Some(bytes_per_s);
                }
            }
            Input::Posted { queue_pair, bytes } => {
                if let Some(watch) = self.watches.get_mut(&queue_pair)
                    && watch.outstanding.len() < watch.depth
                {
                    if watch.outstanding.is_empty() {
                        watch.since = now;
                    }
                    watch.outstanding.push_back(bytes);
                    self.outstanding += 1;
                }
            }
            Input::Completed { queue_pair, count } => {
                if let Some(watch) = self.watches.get_mut(&queue_pair) {
                    let done = (count as usize).min(watch.outstanding.len());
                    watch.outstanding.drain(..done);
                    self.outstanding -= done;
                    if done > 0 {
                        watch.since = now;
                    }
                }
            }
            Input::PolledEmpty => {
                if std::mem::take(&mut self.polling) {
                    self.judge(now);
                }
            }
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        let now = self.scheduled(now);
        if !self.polling && self.watches.values().any(|watch| self.is_late(watch, now)) {
            self.polling = true;
            self.out.push_back(Action::PollUntilEmpty);
        }
    }

    fn poll(&mut self) -> Option<Action> {
        self.out.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        (self.outstanding > 0).then(|| self.last_call + self.config.tick)
    }
}
