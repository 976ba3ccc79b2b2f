//! A slab whose keys are never reused: what a completion or a report names by key is either the
//! thing that was meant, or nothing.
//!
//! A key is an index in the low and a generation in the high 32 bits, and fits a work request's
//! `wr_id`. A stale key, for example of a completion that arrives after its queue pair was given
//! up, finds nothing. Deliberately not here: growth. The capacity is the bound on work in flight.

/// A fixed number of slots.
#[derive(Debug)]
pub struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Slab<T> {
    /// A slab of `capacity` slots, all allocated at once.
    pub fn with_capacity(capacity: u32) -> Self {
        Self {
            slots: (0..capacity)
                .map(|_| Slot {
                    generation: 0,
                    value: None,
                })
                .collect(),
            // Low indexes are handed out first, so that a lightly used slab stays in the cache.
            free: (0..capacity).rev().collect(),
        }
    }

    /// Slots that are in use.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// True when no slot is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Slots that are free.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Puts `value` into a free slot and returns its key, or gives the value back when the slab is
    /// full.
    pub fn insert(&mut self, value: T) -> Result<u64, T> {
        let Some(index) = self.free.pop() else {
            return Err(value);
        };
        let slot = &mut self.slots[index as usize];
        slot.value = Some(value);
        Ok(key(index, slot.generation))
    }

    /// The value of `key`, if it is still there.
    pub fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        let slot = self.slots.get_mut(key as u32 as usize)?;
        if slot.generation != (key >> 32) as u32 {
            return None;
        }
        slot.value.as_mut()
    }

    /// Takes the value of `key` out, if it is still there. The key is dead from then on.
    pub fn remove(&mut self, key: u64) -> Option<T> {
        let index = key as u32;
        let slot = self.slots.get_mut(index as usize)?;
        if slot.generation != (key >> 32) as u32 {
            return None;
        }
        let value = slot.value.take()?;
        // After 2³² uses a slot is retired rather than used under an old key.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(index);
        }
        Some(value)
    }

    /// All values with their keys, by index.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let value = slot.value.as_ref()?;
            Some((key(index as u32, slot.generation), value))
        })
    }

    /// The keys in use, by index. Collected into `keys`, which is cleared first, so that a caller
    /// may change the slab meanwhile without allocating once warm.
    pub fn keys_into(&self, keys: &mut Vec<u64>) {
        keys.clear();
        keys.extend(self.iter().map(|(key, _)| key));
    }
}

fn key(index: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_never_finds_a_later_value() {
        let mut slab = Slab::with_capacity(2);
        let first = slab.insert('a').expect("room");
        let second = slab.insert('b').expect("room");
        assert_eq!(slab.insert('c'), Err('c'));
        assert_eq!(slab.remove(first), Some('a'));
        assert_eq!(slab.remove(first), None);
        let third = slab.insert('d').expect("room");
        assert_eq!(third as u32, first as u32, "the slot is used again");
        assert_ne!(third, first);
        assert_eq!(slab.get_mut(first), None);
        assert_eq!(slab.get_mut(second), Some(&mut 'b'));
        assert_eq!(slab.get_mut(third), Some(&mut 'd'));
        assert_eq!(slab.len(), 2);
        assert_eq!(slab.room(), 0);
    }

    #[test]
    fn keys_of_no_slot_are_nothing() {
        let mut slab = Slab::<u8>::with_capacity(1);
        for key in [0, 1, u64::MAX, 1 << 32] {
            assert_eq!(slab.get_mut(key), None);
            assert_eq!(slab.remove(key), None);
        }
    }
}
