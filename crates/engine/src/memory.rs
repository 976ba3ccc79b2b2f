//! Which memory is registered.
//!
//! The rules: a registration overlaps no other; the same one again is counted, and really removed
//! with its last unregistration (report R01); nothing is removed while a transfer uses it.
//! Deliberately not here: verbs. What transports keep of a registration is opaque to the registry.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rerail_transport::machine::ids::RegionId;
use rerail_transport::rdma::{Piece, RegisteredMemory};
use rerail_verbs::HostMemory;

use crate::{EngineError, Result};

/// Where memory is that lies anywhere.
pub const WILDCARD_LOCATION: &str = "*";

/// What may be done with registered memory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct MemoryOptions {
    /// Where it is: `cpu:0`, `cuda:1`, or `*`.
    pub location: String,
    /// Peers may read and write it. Without, it serves as the near end of transfers only.
    pub remote_accessible: bool,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        Self {
            location: WILDCARD_LOCATION.to_owned(),
            remote_accessible: true,
        }
    }
}

/// A registration.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) memory: HostMemory,
    pub(crate) options: MemoryOptions,
    /// Its chunks with local keys, for the near ends of transfers.
    pub(crate) pieces: Vec<Piece>,
    /// Keeps it registered with NICs.
    _rdma: Option<RegisteredMemory>,
    /// Its chunks in the own record.
    pub(crate) published: Vec<RegionId>,
    uses: AtomicUsize,
}

impl Region {
    pub(crate) fn new(
        memory: HostMemory,
        options: MemoryOptions,
        pieces: Vec<Piece>,
        rdma: Option<RegisteredMemory>,
        published: Vec<RegionId>,
    ) -> Self {
        Self {
            memory,
            options,
            pieces,
            _rdma: rdma,
            published,
            uses: AtomicUsize::new(0),
        }
    }

    fn end(&self) -> u64 {
        self.memory.addr() + self.memory.length() as u64
    }

    fn describe(&self) -> String {
        let addr = self.memory.addr();
        format!("{} bytes at {addr:#x}", self.memory.length())
    }

    fn is_same(&self, memory: &HostMemory, options: &MemoryOptions) -> bool {
        self.memory.addr() == memory.addr()
            && self.memory.length() == memory.length()
            && self.options == *options
    }
}

/// A transfer's use of a registration; it cannot be unregistered meanwhile.
#[derive(Debug)]
pub(crate) struct RegionUse(Arc<Region>);

impl RegionUse {
    fn new(region: &Arc<Region>) -> Self {
        region.uses.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(region))
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.0
    }
}

impl Drop for RegionUse {
    fn drop(&mut self) {
        self.0.uses.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What registering a range means.
pub(crate) enum Admission {
    /// It is there already and has been counted.
    Counted,
    /// It may be registered.
    New,
}

/// All registrations, by address.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    regions: BTreeMap<u64, (Arc<Region>, usize)>,
}

impl Registry {
    /// Whether `memory` may be registered; counts a registration that is there already.
    pub(crate) fn admit(
        &mut self,
        memory: &HostMemory,
        options: &MemoryOptions,
    ) -> Result<Admission> {
        let (addr, length) = (memory.addr(), memory.length() as u64);
        if let Some((region, count)) = self.regions.get_mut(&addr)
            && region.is_same(memory, options)
        {
            *count += 1;
            return Ok(Admission::Counted);
        }
        let before = self
            .regions
            .range(..addr.saturating_add(length))
            .next_back();
        match before {
            Some((_, (region, _))) if region.end() > addr => Err(EngineError::Overlap {
                addr,
                length,
                other: region.describe(),
            }),
            _ => Ok(Admission::New),
        }
    }

    /// Enters what [`admit`](Self::admit) found to be new.
    pub(crate) fn insert(&mut self, region: Arc<Region>) {
        self.regions.insert(region.memory.addr(), (region, 1));
    }

    /// Removes one count of the registration that begins at `addr`. Returns the region when that
    /// was its last.
    pub(crate) fn remove(&mut self, addr: u64) -> Result<Option<Arc<Region>>> {
        let Some((region, count)) = self.regions.get_mut(&addr) else {
            return Err(EngineError::NotRegistered {
                addr,
                length: 0,
                nearest: self.nearest(addr),
            });
        };
        if *count > 1 {
            *count -= 1;
            return Ok(None);
        }
        let uses = region.uses.load(Ordering::Acquire);
        if uses > 0 {
            return Err(EngineError::StillOwnedByHardware { addr, uses });
        }
        Ok(self.regions.remove(&addr).map(|(region, _)| region))
    }

    /// The one registration that holds `length` bytes from `addr`, for a transfer.
    pub(crate) fn find(&self, addr: u64, length: u64) -> Result<RegionUse> {
        let before = self.regions.range(..=addr).next_back();
        let inside = before.filter(|(_, (region, _))| {
            addr.checked_add(length)
                .is_some_and(|end| end <= region.end())
        });
        match inside {
            Some((_, (region, _))) => Ok(RegionUse::new(region)),
            None => Err(EngineError::NotRegistered {
                addr,
                length,
                nearest: self.nearest(addr),
            }),
        }
    }

    /// The registration next to an address, in words (report R09).
    fn nearest(&self, addr: u64) -> String {
        let before = self.regions.range(..=addr).next_back();
        let after = self.regions.range(addr..).next();
        match before.or(after) {
            Some((_, (region, _))) => format!("nearest are {}", region.describe()),
            None => "nothing is registered".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(pages: usize) -> HostMemory {
        HostMemory::allocate(pages * 4096).expect("memory can be mapped")
    }

    fn register(registry: &mut Registry, memory: &HostMemory) -> Result<bool> {
        let options = MemoryOptions::default();
        match registry.admit(memory, &options)? {
            Admission::Counted => Ok(false),
            Admission::New => {
                let region = Region::new(memory.clone(), options, Vec::new(), None, Vec::new());
                registry.insert(Arc::new(region));
                Ok(true)
            }
        }
    }

    #[test]
    fn r01_the_same_registration_is_counted_and_gone_after_the_last() {
        let mut registry = Registry::default();
        let memory = memory(1);
        assert!(register(&mut registry, &memory).expect("new"));
        assert!(!register(&mut registry, &memory).expect("counted"));
        assert!(registry.remove(memory.addr()).expect("known").is_none());
        assert!(registry.find(memory.addr(), 1).is_ok());
        assert!(registry.remove(memory.addr()).expect("known").is_some());
        assert!(registry.find(memory.addr(), 1).is_err());
        assert!(registry.remove(memory.addr()).is_err());
    }

    #[test]
    fn the_same_bytes_under_another_location_overlap() {
        let mut registry = Registry::default();
        let memory = memory(1);
        register(&mut registry, &memory).expect("new");
        let options = MemoryOptions {
            location: "cpu:1".into(),
            ..MemoryOptions::default()
        };
        assert!(matches!(
            registry.admit(&memory, &options),
            Err(EngineError::Overlap { .. })
        ));
    }

    #[test]
    fn r09_one_byte_past_the_end_names_the_nearest_registration() {
        let mut registry = Registry::default();
        let memory = memory(2);
        register(&mut registry, &memory).expect("new");
        let end = memory.addr() + 8192;
        assert!(registry.find(memory.addr() + 100, 8092).is_ok(), "interior");
        let error = registry.find(end - 1, 2).expect_err("past the end");
        assert!(error.to_string().contains("8192 bytes at"), "{error}");
        assert!(registry.find(memory.addr() - 1, 2).is_err());
        assert!(registry.find(memory.addr(), u64::MAX).is_err());
    }

    #[test]
    fn memory_in_use_cannot_be_unregistered() {
        let mut registry = Registry::default();
        let memory = memory(1);
        register(&mut registry, &memory).expect("new");
        let in_use = registry.find(memory.addr(), 10).expect("registered");
        let error = registry.remove(memory.addr()).expect_err("in use");
        assert!(matches!(
            error,
            EngineError::StillOwnedByHardware { uses: 1, .. }
        ));
        assert!(error.is_retryable());
        drop(in_use);
        assert!(registry.remove(memory.addr()).expect("free").is_some());
    }
}
