//! Objects by index and generation, and dense numbers that are used again.

use std::collections::BTreeSet;

/// Identity of an object of the model: the index is used again, the pair never is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Handle {
    pub(super) index: u32,
    pub(super) generation: u32,
}

/// Objects of one type. The lowest free index is given out first, so that a stale index soon names
/// another object, as a freed address does.
#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: BTreeSet<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: BTreeSet::new(),
        }
    }
}

impl<T> Slab<T> {
    pub(super) fn insert(&mut self, value: T) -> Handle {
        if let Some(index) = self.free.pop_first() {
            let slot = &mut self.slots[index as usize];
            slot.value = Some(value);
            return Handle {
                index,
                generation: slot.generation,
            };
        }
        self.slots.push(Slot {
            generation: 0,
            value: Some(value),
        });
        Handle {
            index: (self.slots.len() - 1) as u32,
            generation: 0,
        }
    }

    pub(super) fn get(&self, handle: Handle) -> Option<&T> {
        let slot = self.slots.get(handle.index as usize)?;
        slot.value
            .as_ref()
            .filter(|_| slot.generation == handle.generation)
    }

    pub(super) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        let slot = self.slots.get_mut(handle.index as usize)?;
        slot.value
            .as_mut()
            .filter(|_| slot.generation == handle.generation)
    }

    pub(super) fn remove(&mut self, handle: Handle) -> Option<T> {
        let slot = self.slots.get_mut(handle.index as usize)?;
        if slot.generation != handle.generation {
            return None;
        }
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.insert(handle.index);
        Some(value)
    }

    /// Live objects in the order of their indexes.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let handle = Handle {
                index: index as u32,
                generation: slot.generation,
            };
            slot.value.as_ref().map(|value| (handle, value))
        })
    }

    /// Handles of the live objects that `wanted` accepts.
    pub(super) fn handles(&self, wanted: impl Fn(&T) -> bool) -> Vec<Handle> {
        self.iter()
            .filter(|(_, value)| wanted(value))
            .map(|(handle, _)| handle)
            .collect()
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

/// Numbers such as those of queue pairs: dense, the lowest free one first.
#[derive(Debug)]
pub(super) struct Numbers {
    next: u32,
    free: BTreeSet<u32>,
}

impl Numbers {
    pub(super) fn starting_at(first: u32) -> Self {
        Self {
            next: first,
            free: BTreeSet::new(),
        }
    }

    pub(super) fn take(&mut self) -> u32 {
        self.free.pop_first().unwrap_or_else(|| {
            let number = self.next;
            self.next += 1;
            number
        })
    }

    pub(super) fn give_back(&mut self, number: u32) {
        self.free.insert(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_finds_nothing() {
        let mut slab = Slab::default();
        let first = slab.insert('a');
        let other = slab.insert('b');
        assert_eq!(slab.remove(first), Some('a'));
        let second = slab.insert('c');
        assert_eq!(second.index, first.index);
        assert_eq!(slab.get(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.get(second), Some(&'c'));
        assert_eq!(slab.get(other), Some(&'b'));
        assert_eq!(slab.len(), 2);
    }

    #[test]
    fn numbers_are_dense_and_come_again() {
        let mut numbers = Numbers::starting_at(17);
        assert_eq!((numbers.take(), numbers.take()), (17, 18));
        numbers.give_back(17);
        assert_eq!((numbers.take(), numbers.take()), (17, 19));
    }
}
