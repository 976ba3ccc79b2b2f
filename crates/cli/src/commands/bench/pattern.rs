//! Bytes that show where and when they were written.
//!
//! Each word depends on the seed, its remote address and the round, so that bytes of another
//! place, another run or an earlier round are found out.

use rerail_verbs::{HostMemory, OutOfBounds};

/// Bytes that are made or compared at once.
const CHUNK: usize = 16 << 10;

/// A pattern of one round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pattern {
    pub(super) seed: u64,
    pub(super) round: u64,
}

/// A byte that is not what it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mismatch {
    /// Its remote address.
    pub(super) addr: u64,
    /// What it should be.
    pub(super) expected: u8,
    /// What it is.
    pub(super) found: u8,
}

impl Pattern {
    fn byte(self, addr: u64) -> u8 {
        let word = mix(self.seed ^ mix(addr / 8) ^ mix(self.round).rotate_left(17));
        word.to_le_bytes()[(addr % 8) as usize]
    }

    fn fill_chunk(self, addr: u64, bytes: &mut [u8]) {
        let mut word_of = u64::MAX;
        let mut word = [0; 8];
        for (offset, byte) in bytes.iter_mut().enumerate() {
            let at = addr + offset as u64;
            if at / 8 != word_of {
                word_of = at / 8;
                let mixed = mix(self.seed ^ mix(word_of) ^ mix(self.round).rotate_left(17));
                word = mixed.to_le_bytes();
            }
            *byte = word[(at % 8) as usize];
        }
    }

    /// Writes what belongs to remote address `addr` and after it to `offset` of local memory.
    pub(super) fn fill(
        self,
        memory: &HostMemory,
        offset: usize,
        length: usize,
        addr: u64,
    ) -> Result<(), OutOfBounds> {
        let mut chunk = [0; CHUNK];
        let mut done = 0;
        while done < length {
            let count = CHUNK.min(length - done);
            self.fill_chunk(addr + done as u64, &mut chunk[..count]);
            memory.copy_in(offset + done, &chunk[..count])?;
            done += count;
        }
        Ok(())
    }

    /// The first byte at `offset` of local memory that is not what belongs to `addr`.
    pub(super) fn check(
        self,
        memory: &HostMemory,
        offset: usize,
        length: usize,
        addr: u64,
    ) -> Result<Option<Mismatch>, OutOfBounds> {
        let (mut expected, mut found) = ([0; CHUNK], [0; CHUNK]);
        let mut done = 0;
        while done < length {
            let count = CHUNK.min(length - done);
            self.fill_chunk(addr + done as u64, &mut expected[..count]);
            memory.copy_out(offset + done, &mut found[..count])?;
            if expected[..count] != found[..count] {
                let differs = |index: &usize| expected[*index] != found[*index];
                if let Some(index) = (0..count).find(differs) {
                    let addr = addr + (done + index) as u64;
                    return Ok(Some(Mismatch {
                        addr,
                        expected: self.byte(addr),
                        found: found[index],
                    }));
                }
            }
            done += count;
        }
        Ok(None)
    }
}

/// The finaliser of SplitMix64: every bit of the input changes half of the output.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_another_place_round_or_seed_are_found_out() {
        let memory = HostMemory::allocate(100_000).expect("memory");
        let pattern = Pattern { seed: 1, round: 2 };
        pattern.fill(&memory, 3, 70_001, 0x1005).expect("inside");
        let check =
            |pattern: Pattern, addr| pattern.check(&memory, 3, 70_001, addr).expect("inside");
        assert_eq!(check(pattern, 0x1005), None);
        assert!(check(pattern, 0x100d).is_some());
        assert!(
            check(
                Pattern {
                    round: 3,
                    ..pattern
                },
                0x1005
            )
            .is_some()
        );
        assert!(check(Pattern { seed: 2, ..pattern }, 0x1005).is_some());
        memory.copy_in(50_000, &[0, 0]).expect("inside");
        let mismatch = check(pattern, 0x1005).expect("two bytes were lost");
        assert!((0x1005 + 49_997..0x1005 + 49_999).contains(&mismatch.addr));
        assert_eq!(mismatch.found, 0);
    }
}
