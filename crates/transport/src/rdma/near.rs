//! Which NICs are near a buffer.

/// NICs by their positions among their owner's, as a set that costs nothing to pass around. A
/// position past the last that it can tell apart counts as in it: to be near is a preference.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NicSet(u64);

/// Positions that are told apart.
const POSITIONS: usize = 64;

impl NicSet {
    /// All NICs: nothing is known, or all are equally near.
    pub const ALL: Self = Self(u64::MAX);

    /// The set as bits, for an atomic.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// The set of these [bits](Self::to_bits).
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Whether the NIC at a position is in it.
    pub fn contains(self, position: usize) -> bool {
        position >= POSITIONS || self.0 & (1 << position) != 0
    }
}

impl Default for NicSet {
    fn default() -> Self {
        Self::ALL
    }
}

/// The NICs at these positions; all of them if there are none, since memory is somewhere.
impl FromIterator<usize> for NicSet {
    fn from_iter<I: IntoIterator<Item = usize>>(positions: I) -> Self {
        let told_apart = positions
            .into_iter()
            .filter(|position| *position < POSITIONS);
        match told_apart.fold(0, |set, position| set | 1 << position) {
            0 => Self::ALL,
            set => Self(set),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_what_it_was_made_of_and_an_empty_one_all() {
        let set: NicSet = [1, 63].into_iter().collect();
        let held: Vec<_> = (0..64).filter(|position| set.contains(*position)).collect();
        assert_eq!(held, [1, 63]);
        assert!(set.contains(64), "not told apart");
        let none: NicSet = std::iter::empty().collect();
        assert_eq!(none, NicSet::ALL);
    }
}
