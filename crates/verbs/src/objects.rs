//! Identities of a context's objects, so that an event names one without holding a pointer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::ObjectId;

/// The queue pairs and completion queues of one context that are alive.
///
/// A backend names an object by a *key* of its own, such as an address, which may be used again
/// as soon as the object is destroyed; the [`ObjectId`] never is.
#[derive(Debug, Default)]
pub(crate) struct ObjectTable {
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    /// Generation and, while occupied, key of each slot.
    slots: Vec<(u32, Option<u64>)>,
    free: Vec<u32>,
    by_key: BTreeMap<u64, u32>,
}

impl ObjectTable {
    /// Enters the object that the backend names `key`, until the registration is dropped.
    pub(crate) fn insert(self: &Arc<Self>, key: u64) -> Registration {
        let mut slots = self.lock();
        let index = slots.free.pop().unwrap_or_else(|| {
            slots.slots.push((0, None));
            // 2³² live objects do not fit into memory.
            (slots.slots.len() - 1) as u32
        });
        let slot = &mut slots.slots[index as usize];
        slot.1 = Some(key);
        let id = ObjectId {
            index,
            generation: slot.0,
        };
        slots.by_key.insert(key, index);
        Registration {
            table: Arc::clone(self),
            id,
        }
    }

    /// The live object that the backend names `key`.
    #[cfg(any(test, feature = "ibv", feature = "sim"))]
    pub(crate) fn resolve(&self, key: u64) -> Option<ObjectId> {
        let slots = self.lock();
        let index = *slots.by_key.get(&key)?;
        let (generation, _) = slots.slots[index as usize];
        Some(ObjectId { index, generation })
    }

    fn remove(&self, id: ObjectId) {
        let mut slots = self.lock();
        let slot = &mut slots.slots[id.index as usize];
        let key = slot.1.take();
        // A slot whose generations are used up is never used again.
        if let Some(next) = slot.0.checked_add(1) {
            slot.0 = next;
            slots.free.push(id.index);
        }
        // Unless a newer object has the key already.
        if let Some(key) = key
            && slots.by_key.get(&key) == Some(&id.index)
        {
            slots.by_key.remove(&key);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        // No code that can panic runs under the lock, so a poisoned one is whole.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An object's place in the table; dropping it removes the object, which must happen *before* the
/// backend destroys it and may use its key again.
#[derive(Debug)]
pub(crate) struct Registration {
    table: Arc<ObjectTable>,
    id: ObjectId,
}

impl Registration {
    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.table.remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reused_key_gets_a_new_identity() {
        let table = Arc::new(ObjectTable::default());
        let first = table.insert(0x1000);
        let other = table.insert(0x2000);
        let first_id = first.id();
        assert_eq!(table.resolve(0x1000), Some(first_id));
        drop(first);
        assert_eq!(table.resolve(0x1000), None);
        let second = table.insert(0x1000);
        assert_eq!(second.id().index, first_id.index);
        assert_ne!(second.id(), first_id);
        assert_eq!(table.resolve(0x1000), Some(second.id()));
        assert_eq!(table.resolve(0x2000), Some(other.id()));
    }
}
