//! The time of machines: a number that a driver passes in.
//!
//! Why not [`std::time::Instant`]: it can only be made by asking a clock, so that a virtual clock,
//! a recorded run and a model checker could not make one. A [`Time`] is an ordinary value: it can
//! be written down, replayed, compared and hashed. Deliberately not here: anything that asks a
//! clock.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// Nanoseconds since an origin that the driver chose once, monotonic like its clock.
///
/// A driver keeps one origin per engine and passes [`Time::since`] of it to every machine; the
/// simulated fabric passes its virtual time. Times of two origins must not be mixed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Time(u64);

impl Time {
    /// The origin.
    pub const ZERO: Self = Self(0);

    /// The time `nanos` nanoseconds after the origin.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// The time `millis` milliseconds after the origin.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// `now` as seen from `origin`. Earlier instants become the origin.
    pub fn since(origin: std::time::Instant, now: std::time::Instant) -> Self {
        Self::ZERO + now.saturating_duration_since(origin)
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time since the origin.
    pub const fn as_duration(self) -> Duration {
        Duration::from_nanos(self.0)
    }

    /// How long ago `earlier` was; zero if it is not earlier.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    /// Saturates: a time-out of 500 years is "never", not a panic.
    fn add(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

impl AddAssign<Duration> for Time {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl Sub<Duration> for Time {
    type Output = Self;

    /// Saturates at the origin.
    fn sub(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(nanos))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}.{:09}s",
            self.0 / 1_000_000_000,
            self.0 % 1_000_000_000
        )
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The earlier of two optional times.
pub(crate) fn earliest(left: Option<Time>, right: Option<Time>) -> Option<Time> {
    match (left, right) {
        (Some(left), Some(right)) => Some(left.min(right)),
        (left, right) => left.or(right),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_instead_of_panicking() {
        let late = Time::from_nanos(u64::MAX - 1);
        assert_eq!(late + Duration::from_secs(9), Time::from_nanos(u64::MAX));
        assert_eq!(Time::from_millis(1) - Duration::from_secs(1), Time::ZERO);
        assert_eq!(
            Time::from_millis(1).saturating_since(Time::from_millis(2)),
            Duration::ZERO
        );
        assert_eq!(Time::from_millis(1_234).to_string(), "1.234000000s");
    }

    #[test]
    fn earliest_ignores_what_is_absent() {
        let (one, two) = (Time::from_millis(1), Time::from_millis(2));
        assert_eq!(earliest(Some(two), Some(one)), Some(one));
        assert_eq!(earliest(None, Some(two)), Some(two));
        assert_eq!(earliest(None, None), None);
    }
}
