//! Exponential back-off with jitter.

use std::time::Duration;

use rand::Rng;
use rand::rngs::SmallRng;

/// How long to wait before a next attempt: doubling from `min` to `max`, each drawn from the upper
/// half of its step, so that peers that failed together do not come back together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    attempts: u32,
}

impl Backoff {
    /// A back-off that has made no attempt. A `max` below `min` counts as `min`.
    pub fn new(min: Duration, max: Duration) -> Self {
        Self {
            min,
            max: max.max(min),
            attempts: 0,
        }
    }

    /// Failed attempts since the last reset.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Counts a failed attempt and draws the wait before the next one: in `[step/2, step]`.
    pub fn next_wait(&mut self, rng: &mut SmallRng) -> Duration {
        self.next_wait_within(Duration::MAX, rng)
    }

    /// The same, with a step of at most `max`. An attempt whose step that makes shorter does not
    /// count: it does not make later waits longer.
    pub fn next_wait_within(&mut self, max: Duration, rng: &mut SmallRng) -> Duration {
        let doublings = self.attempts.min(20);
        let full = self.min.saturating_mul(1 << doublings).min(self.max);
        let step = full.min(max);
        if step == full {
            self.attempts = self.attempts.saturating_add(1);
        }
        let nanos = u64::try_from(step.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(rng.random_range(nanos / 2..=nanos))
    }

    /// Forgets the failed attempts.
    pub fn reset(&mut self) {
        self.attempts = 0;
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn waits_double_within_their_bounds_and_never_overflow() {
        let mut rng = SmallRng::seed_from_u64(7);
        let (min, max) = (Duration::from_millis(250), Duration::from_secs(30));
        let mut backoff = Backoff::new(min, max);
        for attempt in 0..100_u32 {
            let step = min.saturating_mul(1 << attempt.min(20)).min(max);
            let wait = backoff.next_wait(&mut rng);
            assert!(
                wait >= step / 2 && wait <= step,
                "attempt {attempt}: {wait:?}"
            );
        }
        backoff.reset();
        assert!(backoff.next_wait(&mut rng) <= min);
    }
}
