//! Leaving out of a failing storm what its failure does not need.
//!
//! Pure: what fails is told by a predicate, which runs the storm.

use std::time::Duration;

/// Spans that differ by less are the same.
const SPAN_STEP: Duration = Duration::from_millis(200);

/// Tries that may still be made. Each is a whole storm.
#[derive(Debug)]
pub(super) struct Budget(pub(super) u64);

impl Budget {
    fn take(&mut self) -> bool {
        let is_left = self.0 > 0;
        self.0 = self.0.saturating_sub(1);
        is_left
    }
}

/// The smallest part of `all` found that still fails, in order: halves are left out first, then
/// smaller and smaller parts, then single ones (delta debugging). `all` itself is taken to fail.
pub(super) fn fewer<T: Clone>(
    all: &[T],
    budget: &mut Budget,
    mut fails: impl FnMut(&[T]) -> bool,
) -> Vec<T> {
    let mut kept = all.to_vec();
    let mut parts = 2;
    // With nothing at all left it is not about these.
    if kept.is_empty() || budget.take() && fails(&[]) {
        return Vec::new();
    }
    while kept.len() > 1 {
        let size = kept.len().div_ceil(parts);
        let mut is_smaller = false;
        let mut begin = 0;
        while begin < kept.len() {
            let end = (begin + size).min(kept.len());
            let without = [&kept[..begin], &kept[end..]].concat();
            // Nothing left was tried.
            if !without.is_empty() {
                if !budget.take() {
                    return kept;
                }
                if fails(&without) {
                    kept = without;
                    is_smaller = true;
                    // What stood behind it stands here now.
                    continue;
                }
            }
            begin = end;
        }
        if size == 1 && !is_smaller {
            break;
        }
        parts = if is_smaller { parts } else { parts * 2 };
        parts = parts.clamp(2, kept.len().max(2));
    }
    kept
}

/// The shortest span found that still fails. `span` itself is taken to fail. That a longer one
/// fails too is assumed, and costs only length where it is not so.
pub(super) fn shorter(
    span: Duration,
    budget: &mut Budget,
    mut fails: impl FnMut(Duration) -> bool,
) -> Duration {
    let (mut well, mut failing) = (Duration::ZERO, span);
    while failing - well > SPAN_STEP && budget.take() {
        let middle = Duration::from_millis((well + (failing - well) / 2).as_millis() as u64);
        if fails(middle) {
            failing = middle;
        } else {
            well = middle;
        }
    }
    failing
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn what_a_failure_needs_is_left_and_nothing_else() {
        let all: Vec<u32> = (0..64).collect();
        for needed in [vec![17], vec![0, 63], vec![3, 7, 11], vec![30, 31, 32, 33]] {
            let mut runs = 0;
            let found = fewer(&all, &mut Budget(1_000), |left| {
                runs += 1;
                needed.iter().all(|fault| left.contains(fault))
            });
            assert_eq!(found, needed, "after {runs} runs");
            assert!(runs < 120, "{runs} runs for {needed:?}");
        }
    }

    #[test]
    fn a_failure_without_any_fault_needs_one_run() {
        let mut runs = 0;
        let found = fewer(&[1, 2, 3], &mut Budget(100), |_| {
            runs += 1;
            true
        });
        assert_eq!((found, runs), (vec![], 1));
        assert_eq!(fewer::<u32>(&[], &mut Budget(0), |_| true), [0_u32; 0]);
    }

    #[test]
    fn a_failure_that_needs_everything_keeps_everything() {
        let all: Vec<u32> = (0..9).collect();
        let found = fewer(&all, &mut Budget(1_000), |left| left.len() == all.len());
        assert_eq!(found, all);
    }

    #[test]
    fn either_of_two_causes_is_enough() {
        let all: Vec<u32> = (0..40).collect();
        let found = fewer(&all, &mut Budget(1_000), |left| {
            left.contains(&5) || left.contains(&35)
        });
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn a_bound_on_runs_holds_and_what_was_found_by_then_counts() {
        let all: Vec<u32> = (0..64).collect();
        let (mut runs, mut budget) = (0, Budget(5));
        let found = fewer(&all, &mut budget, |left| {
            runs += 1;
            left.contains(&9)
        });
        assert_eq!(runs, 5);
        assert!(found.len() < all.len() && found.contains(&9), "{found:?}");
        let untouched = shorter(ms(20_000), &mut budget, |_| panic!("nothing is left"));
        assert_eq!(untouched, ms(20_000));
    }

    #[test]
    fn a_span_is_cut_down_to_what_fails() {
        let mut runs = 0;
        let found = shorter(ms(20_000), &mut Budget(100), |span| {
            runs += 1;
            span >= ms(4_321)
        });
        assert!(found >= ms(4_321) && found <= ms(4_321) + SPAN_STEP);
        assert!(runs <= 8, "{runs}");
        assert!(shorter(ms(20_000), &mut Budget(100), |_| true) <= SPAN_STEP);
    }
}
