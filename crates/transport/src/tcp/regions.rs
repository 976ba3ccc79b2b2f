//! Which memory peers may touch over TCP.
//!
//! A range must lie inside one region: adjacent regions are not merged, as in C++ engines. Taking
//! a region away ends the requests that are touching it and waits until none does: after that no
//! byte of it is read or written for a peer.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rerail_verbs::HostMemory;
use tokio::sync::Notify;

/// Regions by their first address. Clones share the table.
#[derive(Clone, Debug, Default)]
pub struct Regions {
    by_addr: Arc<Mutex<BTreeMap<u64, Arc<Region>>>>,
}

struct Region {
    memory: HostMemory,
    offset: usize,
    length: u64,
    revoked: AtomicBool,
    users: AtomicUsize,
    /// Wakes requests when the region is taken away.
    revoking: Notify,
    /// Wakes who takes it away when a request has ended.
    left: Notify,
}

/// The region cannot be added: it overlaps one that is there, or is no part of its memory.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{length} bytes at {addr:#x} overlap a region that peers may touch already, or lie outside their memory"
)]
pub struct NotAdded {
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
}

impl Regions {
    /// Lets peers touch `length` bytes of `memory` at `offset`. Returns their first address.
    pub fn add(&self, memory: &HostMemory, offset: usize, length: usize) -> Result<u64, NotAdded> {
        let addr = memory.addr().saturating_add(offset as u64);
        let error = NotAdded {
            addr,
            length: length as u64,
        };
        if length == 0 || memory.offset_of(addr, length) != Some(offset) {
            return Err(error);
        }
        let end = addr + length as u64;
        let mut table = self.table();
        let before = table.range(..end).next_back();
        if before.is_some_and(|(start, region)| start + region.length > addr) {
            return Err(error);
        }
        let region = Region {
            memory: memory.clone(),
            offset,
            length: length as u64,
            revoked: AtomicBool::new(false),
            users: AtomicUsize::new(0),
            revoking: Notify::new(),
            left: Notify::new(),
        };
        table.insert(addr, Arc::new(region));
        Ok(addr)
    }

    /// Takes away the region that begins at `addr`, and waits until nobody touches it. False if
    /// there is none.
    pub async fn remove(&self, addr: u64) -> bool {
        let Some(region) = self.table().remove(&addr) else {
            return false;
        };
        region.revoked.store(true, Ordering::SeqCst);
        region.revoking.notify_waiters();
        loop {
            let left = region.left.notified();
            tokio::pin!(left);
            // Listening must begin before the count is read, or its last change could be missed.
            left.as_mut().enable();
            if region.users.load(Ordering::SeqCst) == 0 {
                return true;
            }
            left.await;
        }
    }

    /// The region that holds `length` bytes at `addr`, pinned until the guard is dropped.
    pub fn find(&self, addr: u64, length: u64) -> Option<RegionGuard> {
        let last = addr.checked_add(length.checked_sub(1)?)?;
        let table = self.table();
        let (start, region) = table.range(..=addr).next_back()?;
        if last - start >= region.length {
            return None;
        }
        // Under the lock: `remove` takes the region out before it waits for its users.
        region.users.fetch_add(1, Ordering::SeqCst);
        Some(RegionGuard {
            region: Arc::clone(region),
            skip: addr - start,
        })
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Region>>> {
        self.by_addr.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("memory", &self.memory)
            .field("offset", &self.offset)
            .field("length", &self.length)
            .field("users", &self.users)
            .finish_non_exhaustive()
    }
}

/// A range of a region that a request is touching.
#[derive(Debug)]
pub struct RegionGuard {
    region: Arc<Region>,
    skip: u64,
}

impl RegionGuard {
    /// The memory.
    pub fn memory(&self) -> &HostMemory {
        &self.region.memory
    }

    /// Offset of the range in the memory.
    pub fn offset(&self) -> usize {
        self.region.offset + self.skip as usize
    }

    /// Returns when the region is being taken away; then the request must end at once.
    pub async fn revoked(&self) {
        loop {
            let revoking = self.region.revoking.notified();
            tokio::pin!(revoking);
            revoking.as_mut().enable();
            if self.region.revoked.load(Ordering::SeqCst) {
                return;
            }
            revoking.await;
        }
    }
}

impl Drop for RegionGuard {
    fn drop(&mut self) {
        self.region.users.fetch_sub(1, Ordering::SeqCst);
        // In this order: who takes the region away says so before it counts.
        if self.region.revoked.load(Ordering::SeqCst) {
            self.region.left.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ranges_are_checked_as_in_the_reference() {
        let regions = Regions::default();
        let memory = HostMemory::allocate(0x4000).expect("memory");
        let base = memory.addr();
        regions.add(&memory, 0x1000, 0x2000).expect("the first");
        let found = |offset: u64, length| regions.find(base + offset, length).is_some();
        assert!(found(0x1000, 0x2000) && found(0x2fff, 1));
        assert!(!found(0x3000, 0x100) && !found(0x2f00, 0x200) && !found(0x0f00, 0x200));
        assert!(!found(0x1000, 0));
        assert!(regions.find(u64::MAX, 1).is_none());
        assert!(regions.find(1, u64::MAX).is_none());
        // A neighbour is another region: nothing may span both.
        regions.add(&memory, 0x3000, 0x1000).expect("the neighbour");
        assert!(found(0x3000, 0x1000) && !found(0x2800, 0x1000));
        assert!(regions.add(&memory, 0x2fff, 2).is_err(), "overlap");
        assert!(regions.add(&memory, 0x0800, 0x1000).is_err(), "overlap");
        assert!(regions.add(&memory, 0x3fff, 2).is_err(), "outside");
        assert!(regions.add(&memory, 0, 0x1000).is_ok());
    }

    #[tokio::test]
    async fn taking_a_region_away_waits_for_its_users() {
        let regions = Regions::default();
        let memory = HostMemory::allocate(4096).expect("memory");
        let addr = regions.add(&memory, 0, 4096).expect("added");
        let guard = regions.find(addr, 8).expect("inside");
        let removing = tokio::spawn({
            let regions = regions.clone();
            async move { regions.remove(addr).await }
        });
        guard.revoked().await;
        assert!(regions.find(addr, 8).is_none());
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!removing.is_finished());
        drop(guard);
        assert!(removing.await.expect("no panic"));
        assert!(!regions.remove(addr).await);
    }
}
