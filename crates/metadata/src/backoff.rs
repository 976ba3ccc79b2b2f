//! Pauses between attempts.

use std::time::Duration;

use rand::Rng;

/// Doubling pauses with jitter, so that the clients of a store that returns do not come at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    min: Duration,
    max: Duration,
}

impl Backoff {
    pub(crate) fn new(min: Duration, max: Duration) -> Self {
        Self {
            next: min,
            min,
            max,
        }
    }

    /// Between a tenth of a second and two: a store is looked for again soon, and not hammered.
    pub(crate) fn for_stores() -> Self {
        Self::new(Duration::from_millis(100), Duration::from_secs(2))
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.min;
    }

    /// The next pause, between half and all of the current step.
    pub(crate) fn step(&mut self) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(self.max);
        step.mul_f64(rand::rng().random_range(0.5..=1.0))
    }

    pub(crate) async fn pause(&mut self) {
        tokio::time::sleep(self.step()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_bound_and_start_anew_after_success() {
        let mut backoff = Backoff::for_stores();
        for base_ms in [100, 200, 400, 800, 1_600, 2_000, 2_000] {
            let step = backoff.step().as_millis();
            assert!(
                (base_ms / 2..=base_ms).contains(&step),
                "{step} of {base_ms}"
            );
        }
        backoff.reset();
        assert!(backoff.step() <= Duration::from_millis(100));
    }
}
