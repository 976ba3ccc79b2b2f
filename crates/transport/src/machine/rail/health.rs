//! One rail: its state, its back-off, its damping and its measured rate.

use std::time::Duration;

use super::io::{ProbeKind, RailCause, RailState, RailTraits};
use crate::machine::Time;
use crate::machine::backoff::Backoff;

/// How far the proof of a half-open rail has come.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Proof {
    /// Not begun, since nobody wants the rail, or not needed.
    None,
    /// Waits for one of its NIC's places.
    Waiting,
    /// A handshake is under way.
    Connecting { until: Time },
    /// A probe is under way.
    Probing {
        probe: u64,
        kind: ProbeKind,
        until: Time,
    },
}

impl Proof {
    /// Whether it takes one of its NIC's places.
    pub(super) fn is_running(self) -> bool {
        self.step().is_some()
    }

    /// Of which kind the place is that it takes.
    pub(super) fn step(self) -> Option<Step> {
        match self {
            Self::None | Self::Waiting => None,
            Self::Connecting { .. } => Some(Step::Connect),
            Self::Probing { .. } => Some(Step::Probe),
        }
    }
}

/// The two parts of a proof, each with places of its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(super) enum Step {
    Connect,
    Probe,
}

#[derive(Clone, Debug)]
pub(super) struct Rail {
    pub(super) traits: RailTraits,
    pub(super) state: RailState,
    pub(super) proof: Proof,
    pub(super) wanted: bool,
    pub(super) connected: bool,
    pub(super) first_cause: Option<RailCause>,
    pub(super) backoff: Backoff,
    /// End of the back-off of a rail that is down.
    pub(super) retry_at: Time,
    /// End of the suspicion of a suspect rail.
    pub(super) suspect_until: Time,
    /// Since when it works without a break.
    pub(super) up_since: Option<Time>,
    /// Faults of requests that were forgiven since it last worked for a while.
    pub(super) request_faults: u32,
    pub(super) damping: Damping,
    pub(super) rate: RateMeter,
    /// The timer under which it is filed.
    pub(super) timer: Option<Time>,
}

impl Rail {
    pub(super) fn new(traits: RailTraits, backoff: Backoff) -> Self {
        Self {
            traits,
            state: RailState::HalfOpen,
            proof: Proof::None,
            wanted: false,
            connected: false,
            first_cause: None,
            backoff,
            retry_at: Time::ZERO,
            suspect_until: Time::ZERO,
            up_since: None,
            request_faults: 0,
            damping: Damping::default(),
            rate: RateMeter::default(),
            timer: None,
        }
    }

    /// Goes on with its proof, or ends it; returns how far it was.
    pub(super) fn set_proof(&mut self, to: Proof) -> Proof {
        #[cfg(test)]
        crate::machine::seen::follows_on(&self.proof, &to);
        std::mem::replace(&mut self.proof, to)
    }

    /// Whether it carries user work.
    pub(super) fn is_usable(&self) -> bool {
        matches!(self.state, RailState::Up | RailState::Suspect)
    }
}

/// Penalty of frequent flaps, after the manner of RFC 2439: each loss of a working rail adds, time
/// halves it, and above a threshold the rail is held back although it could be tried.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Damping {
    penalty: u32,
    at: Time,
    held_until: Time,
}

impl Damping {
    const PER_FLAP: u32 = 1_000;
    const SUPPRESS: u32 = 3_000;
    const REUSE: u32 = 750;
    const MAX: u32 = 6_000;
    const HALF_LIFE: Duration = Duration::from_secs(15);

    /// A working rail was lost at `now`.
    pub(super) fn flap(&mut self, now: Time) {
        self.decay(now);
        self.penalty = (self.penalty + Self::PER_FLAP).min(Self::MAX);
        if self.penalty > Self::SUPPRESS {
            // At most three halvings from MAX to REUSE: 45 s, within the 60 s that are allowed.
            let mut penalty = self.penalty;
            self.held_until = now;
            while penalty > Self::REUSE {
                penalty /= 2;
                self.held_until += Self::HALF_LIFE;
            }
        }
    }

    fn decay(&mut self, now: Time) {
        while self.penalty > 0 && now >= self.at + Self::HALF_LIFE {
            self.penalty /= 2;
            self.at += Self::HALF_LIFE;
        }
        if self.penalty == 0 {
            self.at = now;
        }
    }

    /// Until when the rail is held back; in the past if it is not.
    pub(super) fn held_until(&self) -> Time {
        self.held_until
    }
}

/// Moving average of a rail's rate in bytes a second.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct RateMeter {
    bytes_per_s: Option<u64>,
}

impl RateMeter {
    /// Samples shorter than this say more about the clock than about the rail.
    const SAMPLE_MIN: Duration = Duration::from_micros(10);

    pub(super) fn sample(&mut self, bytes: u64, took: Duration) {
        if took < Self::SAMPLE_MIN || bytes == 0 {
            return;
        }
        let rate = u128::from(bytes) * 1_000_000_000 / took.as_nanos();
        let rate = u64::try_from(rate).unwrap_or(u64::MAX).max(1);
        self.bytes_per_s = Some(match self.bytes_per_s {
            None => rate,
            Some(old) => old - old / 8 + rate / 8,
        });
    }

    pub(super) fn bytes_per_s(&self) -> Option<u64> {
        self.bytes_per_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damping_holds_after_frequent_flaps_and_expires_within_60_s() {
        let mut damping = Damping::default();
        let mut now = Time::from_millis(1_000);
        for _ in 0..3 {
            damping.flap(now);
            assert!(damping.held_until() <= now);
            now += Duration::from_millis(500);
        }
        for _ in 0..100 {
            damping.flap(now);
            let held = damping.held_until().saturating_since(now);
            assert!(held >= Duration::from_secs(30) && held <= Duration::from_secs(60));
            now += Duration::from_millis(500);
        }
        now += Duration::from_secs(600);
        damping.flap(now);
        assert!(
            damping.held_until() <= now,
            "one flap in ten minutes is no reason"
        );
    }

    #[test]
    fn the_rate_follows_its_samples() {
        let mut meter = RateMeter::default();
        meter.sample(1_000_000, Duration::from_millis(1));
        assert_eq!(meter.bytes_per_s(), Some(1_000_000_000));
        for _ in 0..60 {
            meter.sample(100_000, Duration::from_millis(1));
        }
        let rate = meter.bytes_per_s().unwrap_or(0);
        assert!((90_000_000..120_000_000).contains(&rate), "{rate}");
        meter.sample(0, Duration::from_secs(1));
        meter.sample(u64::MAX, Duration::ZERO);
        assert_eq!(meter.bytes_per_s(), Some(rate));
    }
}
