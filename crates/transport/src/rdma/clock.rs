//! The engine's time: what its limits are counted by, and what its tasks sleep by.
//!
//! Tasks of this module sleep by the clock and by nothing else, so that whole nodes can be run in
//! virtual time (module `storm`).

use std::future::Future;
use std::time::{Duration, Instant};

#[cfg(test)]
use super::storm::Hand;
use crate::machine::Time;

/// Times that are counted from the engine's start.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
    /// Moves instead of the real time, where it is there.
    #[cfg(test)]
    hand: Option<&'static Hand>,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        Self {
            origin: Instant::now(),
            #[cfg(test)]
            hand: None,
        }
    }

    /// A clock whose hand is moved by its owner.
    #[cfg(test)]
    pub(super) fn by_hand(hand: &'static Hand) -> Self {
        let hand = Some(hand);
        Self {
            hand,
            ..Self::start()
        }
    }

    /// The time.
    pub fn now(&self) -> Time {
        #[cfg(test)]
        if let Some(hand) = self.hand {
            return hand.now();
        }
        Time::since(self.origin, Instant::now())
    }

    /// The instant of a time, for sleeping until then.
    pub fn instant(&self, time: Time) -> Instant {
        self.origin + time.as_duration()
    }

    /// Sleeps until `time`.
    pub(super) async fn sleep_until(self, time: Time) {
        #[cfg(test)]
        if let Some(hand) = self.hand {
            return hand.sleep_until(time).await;
        }
        tokio::time::sleep_until(self.instant(time).into()).await;
    }

    /// Sleeps for a while.
    pub(super) async fn sleep(self, how_long: Duration) {
        self.sleep_until(self.now() + how_long).await;
    }

    /// What `future` gives within `limit`; `None` if it gives nothing by then.
    pub(super) async fn within<F: Future>(self, limit: Duration, future: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            output = future => Some(output),
            () = self.sleep(limit) => None,
        }
    }
}
