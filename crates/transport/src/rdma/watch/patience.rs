//! When a device that could not be taken in is tried again.

use std::time::Duration;

use crate::TransportError;
use crate::machine::Time;
use crate::rdma::memory::Registered;

/// First wait. It is doubled each time.
const AGAIN_MIN: Duration = Duration::from_secs(1);

/// Longest wait for what costs little to try.
const AGAIN_MAX: Duration = Duration::from_secs(60);

/// Longest wait for a device that has no room for all memory, which is registered with it each
/// time: its limits may have been raised, and nobody says so.
const NO_ROOM_AGAIN_MAX: Duration = Duration::from_secs(30 * 60);

/// What is known of a device that was tried in vain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Patience {
    cause: String,
    wait: Duration,
    not_before: Time,
    /// For want of room: what was registered when it was tried.
    too_much: Option<Registered>,
}

impl Patience {
    /// After one more try in vain, at which so much memory was `registered`. With it, whether the
    /// cause is another one than `before`.
    pub(super) fn after(
        before: Option<&Self>,
        now: Time,
        error: &TransportError,
        registered: Registered,
    ) -> (Self, bool) {
        let (cause, wait_max, too_much) = match error {
            // Their sizes say nothing new.
            TransportError::NoRoomForMemory { error, .. } => {
                (error.to_string(), NO_ROOM_AGAIN_MAX, Some(registered))
            }
            TransportError::NoRoomInRecord { .. } => (
                "the own record".to_owned(),
                NO_ROOM_AGAIN_MAX,
                Some(registered),
            ),
            error => (error.to_string(), AGAIN_MAX, None),
        };
        let same = before.filter(|before| before.cause == cause);
        let wait = before.map_or(AGAIN_MIN, |before| (before.wait * 2).min(wait_max));
        let not_before = now + wait;
        let patience = Self {
            cause,
            wait,
            not_before,
            too_much,
        };
        (patience, same.is_none())
    }

    /// Something suggests that the next try may end otherwise: it is due at once.
    pub(super) fn hurry(&mut self, now: Time) {
        self.not_before = self.not_before.min(now);
    }

    /// Whether there was no room for all memory.
    pub(super) fn wants_room(&self) -> bool {
        self.too_much.is_some()
    }

    /// Whether to try again, with so much memory registered. Less than at the last try may fit.
    pub(super) fn is_over(&self, now: Time, registered: impl FnOnce() -> Registered) -> bool {
        let too_much = self.too_much.as_ref();
        now >= self.not_before || too_much.is_some_and(|then| registered().is_less_than(then))
    }
}

#[cfg(test)]
mod tests {
    use rerail_verbs::VerbsError;

    use super::*;

    const FULL: Registered = Registered {
        bytes: 1 << 20,
        regions: 10,
    };

    fn no_room(errno: i32) -> TransportError {
        TransportError::NoRoomForMemory {
            nic: "mlx5_0".to_owned(),
            bytes: FULL.bytes,
            regions: FULL.regions,
            error: VerbsError::Verb {
                verb: "ibv_reg_mr_iova2",
                device: "mlx5_0".into(),
                port: None,
                errno,
            },
        }
    }

    #[test]
    fn a_device_without_room_is_tried_ever_more_seldom_and_told_of_once() {
        let mut now = Time::ZERO;
        let (mut patience, news) = Patience::after(None, now, &no_room(12), FULL);
        assert!(news);
        let mut tries = 0;
        while now < Time::ZERO + Duration::from_secs(24 * 3600) {
            now += Duration::from_secs(1);
            if patience.is_over(now, || FULL) {
                let (next, news) = Patience::after(Some(&patience), now, &no_room(12), FULL);
                assert!(!news);
                (patience, tries) = (next, tries + 1);
            }
        }
        // Eleven until the longest wait, and two an hour from then on.
        assert!((50..65).contains(&tries), "{tries}");
        let (_, news) = Patience::after(Some(&patience), now, &no_room(28), FULL);
        assert!(news, "another cause");
    }

    #[test]
    fn less_memory_than_at_the_last_try_is_tried_at_once_and_as_much_again_is_not() {
        let (patience, _) = Patience::after(None, Time::ZERO, &no_room(12), FULL);
        let with = |bytes, regions| patience.is_over(Time::ZERO, || Registered { bytes, regions });
        assert!(!with(FULL.bytes, FULL.regions));
        assert!(!with(FULL.bytes + 1, FULL.regions + 1));
        assert!(with(FULL.bytes - 1, FULL.regions));
        assert!(with(FULL.bytes + 1, FULL.regions - 1));
        let other = TransportError::Closed;
        let (patience, _) = Patience::after(None, Time::ZERO, &other, FULL);
        let none = Registered::default();
        assert!(
            !patience.is_over(Time::ZERO, || none),
            "it is not for want of room"
        );
    }
}
