//! The time that leases go by.

use std::time::{Duration, Instant};

/// Most that leases age between two looks. Who looks for ended leases does so more often.
pub(super) const STEP_MAX: Duration = Duration::from_millis(250);

/// Goes with the clock, but hardly on while the server itself stands still, frozen or starved: the
/// signs of life of that time wait in its sockets, and must be read before any lease is ended.
#[derive(Debug)]
pub(super) struct LeaseClock {
    looked: Instant,
    time: Instant,
}

impl LeaseClock {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            looked: now,
            time: now,
        }
    }

    /// The time, if it is `now` by the clock.
    pub(super) fn look(&mut self, now: Instant) -> Instant {
        let passed = now.saturating_duration_since(self.looked);
        self.looked = self.looked.max(now);
        self.time += passed.min(STEP_MAX);
        self.time
    }
}
