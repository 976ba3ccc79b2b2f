//! The model's only source of chance.

use std::time::Duration;

/// A small generator (SplitMix64: Steele, Lea and Flood 2014). The same seed gives the same numbers
/// on every machine and in every version of this crate, which a library's generator need not.
#[derive(Clone, Debug)]
pub(super) struct Rng {
    state: u64,
}

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    pub(super) fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// True with the given probability. Draws nothing for 0 and 1, so that a fault that is switched
    /// off does not change the rest of a run.
    pub(super) fn chance(&mut self, probability: f64) -> bool {
        if probability <= 0.0 {
            return false;
        }
        if probability >= 1.0 {
            return true;
        }
        let unit = (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        unit < probability
    }

    /// A duration from `min` to `max`, both included. Draws nothing when they are equal.
    pub(super) fn between(&mut self, min: Duration, max: Duration) -> Duration {
        let span = max.saturating_sub(min).as_nanos() as u64;
        if span == 0 {
            return min;
        }
        let offset = match span.checked_add(1) {
            Some(width) => self.next_u64() % width,
            None => self.next_u64(),
        };
        min + Duration::from_nanos(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_its_published_numbers() {
        // Reference values of SplitMix64 for seed 1234567.
        let mut rng = Rng::new(1_234_567);
        assert_eq!(rng.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(rng.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn draws_stay_in_range() {
        let mut rng = Rng::new(1);
        let (min, max) = (Duration::from_nanos(5), Duration::from_nanos(7));
        for _ in 0..100 {
            assert!((min..=max).contains(&rng.between(min, max)));
        }
        assert!(!rng.chance(0.0));
        assert!(rng.chance(1.0));
        let hits = (0..10_000).filter(|_| rng.chance(0.25)).count();
        assert!((2_200..2_800).contains(&hits), "{hits}");
    }
}
