//! How much may be posted to a queue.
//!
//! The kernel's or the device's own count is not asked: a send queue that is full is found out by
//! counting what was posted and not yet completed, every kind of work included.

/// Credits of one queue: a send queue's depth, or a completion queue's.
///
/// A queue pair's work takes one credit of its send queue and one of its completion queue; what
/// may be posted is the smaller [`Credits::available`] of both. Every completion gives one back,
/// flushes included.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Credits {
    depth: u32,
    in_use: u32,
    /// The device refused work although there were credits: nothing more until it has room.
    blocked: bool,
    surplus: u64,
}

impl Credits {
    /// An empty queue of `depth` entries.
    pub fn new(depth: u32) -> Self {
        Self {
            depth,
            in_use: 0,
            blocked: false,
            surplus: 0,
        }
    }

    /// Work requests that may be posted now.
    pub fn available(&self) -> u32 {
        if self.blocked {
            0
        } else {
            self.depth - self.in_use
        }
    }

    /// Work requests that were posted and have not completed.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Completions that came without work: a fault of the device or of the accounting.
    pub fn surplus(&self) -> u64 {
        self.surplus
    }

    /// Of `asked` work requests the first `posted` were taken by the device (`bad_wr` is honoured:
    /// what was taken is not posted again), the others were refused, if there are any.
    ///
    /// Returns whether the queue must wait for a completion before the next post. `ENOMEM` on an
    /// empty queue is no back-pressure, since no completion will come: [`Credits::in_use`] is 0
    /// then, and the caller treats the endpoint as broken.
    pub fn posted(&mut self, asked: u32, posted: u32) -> bool {
        let posted = posted.min(asked);
        self.in_use = self.in_use.saturating_add(posted).min(self.depth);
        self.blocked = posted < asked && self.in_use > 0;
        self.blocked
    }

    /// `count` work requests completed, with success or not.
    pub fn completed(&mut self, count: u32) {
        self.surplus += u64::from(count.saturating_sub(self.in_use));
        self.in_use = self.in_use.saturating_sub(count);
        if count > 0 {
            self.blocked = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn x20_a_refused_post_is_back_pressure_and_what_was_taken_counts() {
        let mut credits = Credits::new(16);
        assert!(credits.posted(8, 5), "the device had room for five");
        assert_eq!((credits.in_use(), credits.available()), (5, 0));
        credits.completed(1);
        assert_eq!((credits.in_use(), credits.available()), (4, 12));
        assert!(!credits.posted(12, 12));
        assert_eq!(credits.available(), 0);
        let mut empty = Credits::new(16);
        assert!(
            !empty.posted(1, 0),
            "no completion will ever unblock an empty queue"
        );
    }

    proptest! {
        #[test]
        fn the_count_never_exceeds_the_depth_and_ends_at_zero(
            depth in 1..64_u32,
            steps in prop::collection::vec((any::<bool>(), 0..80_u32, 0..80_u32), 1..200)
        ) {
            let mut credits = Credits::new(depth);
            let mut truth = 0_u32;
            for (post, asked, taken) in steps {
                if post {
                    let asked = asked.min(credits.available());
                    let taken = taken.min(asked);
                    credits.posted(asked, taken);
                    truth += taken;
                } else {
                    let done = asked.min(truth);
                    credits.completed(done);
                    truth -= done;
                }
                prop_assert!(truth <= depth);
                prop_assert_eq!(credits.in_use(), truth);
                prop_assert!(credits.available() + truth <= depth);
            }
            credits.completed(truth);
            prop_assert_eq!(credits.available(), depth);
            prop_assert_eq!(credits.surplus(), 0);
        }
    }
}
