//! Which memory is registered.
//!
//! The rules: a registration overlaps no other; the same one again is counted, and really removed
//! with its last unregistration (report R01); nothing is removed while a transfer uses it.
//! Deliberately not here: verbs. What transports keep of a registration is opaque to the registry.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rerail_transport::machine::ids::{LocalNic, RegionId};
use rerail_transport::machine::publisher::KeyPair;
use rerail_transport::rdma::memory::{ChunkKeys, Holders};
use rerail_transport::rdma::{NicSet, Piece, RegisteredMemory};
use rerail_verbs::HostMemory;

use crate::topology::Places;
use crate::{EngineError, Result};

/// Where memory is that lies anywhere.
pub const WILDCARD_LOCATION: &str = "*";

/// What may be done with registered memory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct MemoryOptions {
    /// Where it is: `cpu:0`, `cuda:1`, or `*`, which means that the engine finds it out where it
    /// can (RDMA, host memory whose pages lie on one NUMA node).
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
    /// Where it is, as far as is known.
    location: String,
    /// The own NICs near it: a [`NicSet`].
    near: AtomicU64,
    /// Keeps it registered with NICs.
    rdma: Option<RegisteredMemory>,
    /// Its chunks in the own record.
    pub(crate) published: Vec<RegionId>,
}

impl Region {
    pub(crate) fn new(
        memory: HostMemory,
        options: MemoryOptions,
        pieces: Vec<Piece>,
        location: String,
        rdma: Option<RegisteredMemory>,
        published: Vec<RegionId>,
    ) -> Self {
        Self {
            memory,
            options,
            pieces,
            location,
            near: AtomicU64::new(NicSet::ALL.to_bits()),
            rdma,
            published,
        }
    }
}

impl Region {
    /// The own NICs near it.
    pub(crate) fn near(&self) -> NicSet {
        NicSet::from_bits(self.near.load(Ordering::Relaxed))
    }

    /// Takes in what is near to what now.
    pub(crate) fn set_near(&self, places: &Places) {
        let near = places.near(&self.location);
        self.near.store(near.to_bits(), Ordering::Relaxed);
    }

    /// Tells when nothing holds its registration with NICs any more.
    pub(crate) fn holders(&self) -> Holders {
        let registered = self.rdma.as_ref().map(RegisteredMemory::holders);
        registered.unwrap_or_default()
    }

    /// Its chunks in the own record with the keys that a NIC has for them now.
    pub(crate) fn keys_of(&self, local: LocalNic) -> Vec<(RegionId, KeyPair)> {
        let chunks = self.rdma.iter().flat_map(RegisteredMemory::keys);
        let pair = |(region, chunk): (&RegionId, ChunkKeys)| {
            let nic = local.0 as usize;
            let lkey = *chunk.lkeys.get(nic)?;
            let rkey = *chunk.rkeys.get(nic)?;
            Some((*region, KeyPair { lkey, rkey }))
        };
        self.published.iter().zip(chunks).filter_map(pair).collect()
    }
}

/// A transfer's use of a registration; it cannot be unregistered meanwhile.
#[derive(Debug)]
pub(crate) struct RegionUse(Arc<Region>);

impl RegionUse {
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.0
    }
}

/// What registering a range means.
pub(crate) enum Admission {
    /// It is there already and has been counted.
    Counted,
    /// It is reserved, to be registered and [entered](Registry::enter), or
    /// [cancelled](Registry::cancel).
    Reserved,
}

/// What is left to be done after a registration was removed.
pub(crate) enum Removal {
    /// Nothing: it is registered still, by another count.
    Counted,
    /// It was the last count. The range stays taken until it is [freed](Registry::free).
    Last(Arc<Region>, Holders),
    /// An earlier removal has not been seen through: devices may still hold the memory.
    Leaving(Holders),
}

/// A range that is taken.
#[derive(Debug)]
struct Slot {
    length: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// NICs are pinning it.
    Reserved,
    /// Registered, so many times.
    Entered(Arc<Region>, usize),
    /// Devices are letting go of it.
    Leaving(Holders),
    /// The same of a registration that failed: nobody is about to unregister it.
    Failed(Holders),
}

impl Slot {
    fn describe(&self, addr: u64) -> String {
        let what = match self.state {
            State::Reserved => ", which are being registered",
            State::Entered(..) => "",
            State::Leaving(_) | State::Failed(_) => {
                ", which a device has not let go of: try again once it has"
            }
        };
        format!("{} bytes at {addr:#x}{what}", self.length)
    }
}

/// All registrations, by address.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    slots: BTreeMap<u64, Slot>,
}

impl Registry {
    /// All registrations that can be used.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Region> {
        self.slots.values().filter_map(|slot| match &slot.state {
            State::Entered(region, _) => Some(&**region),
            State::Reserved | State::Leaving(_) | State::Failed(_) => None,
        })
    }

    /// Takes the range of `memory`, or counts the registration that is there already. Must not be
    /// called while another registration is under way, which would be an overlap with it.
    pub(crate) fn admit(
        &mut self,
        memory: &HostMemory,
        options: &MemoryOptions,
    ) -> Result<Admission> {
        let (addr, length) = (memory.addr(), memory.length() as u64);
        if let Some(slot) = self.slots.get_mut(&addr)
            && let State::Entered(region, count) = &mut slot.state
            && slot.length == length
            && region.options == *options
        {
            *count += 1;
            return Ok(Admission::Counted);
        }
        // Each turn returns, or removes one.
        while let Some((&other, slot)) = self.slots.range(..addr.saturating_add(length)).next_back()
            && other + slot.length > addr
        {
            if let State::Failed(holders) = &slot.state
                && holders.wait_gone(Duration::ZERO).is_ok()
            {
                self.slots.remove(&other);
                continue;
            }
            return Err(EngineError::Overlap {
                addr,
                length,
                other: slot.describe(other),
            });
        }
        let state = State::Reserved;
        self.slots.insert(addr, Slot { length, state });
        Ok(Admission::Reserved)
    }

    /// Enters what was [reserved](Admission::Reserved): transfers may use it from now on.
    pub(crate) fn enter(&mut self, region: Arc<Region>) {
        let (addr, length) = (region.memory.addr(), region.memory.length() as u64);
        let state = State::Entered(region, 1);
        self.slots.insert(addr, Slot { length, state });
    }

    /// Gives up a reservation.
    pub(crate) fn cancel(&mut self, addr: u64) {
        if let Some(State::Reserved) = self.slots.get(&addr).map(|slot| &slot.state) {
            self.slots.remove(&addr);
        }
    }

    /// Gives up a reservation of memory that devices may still hold. The range stays taken until
    /// they have let go of it.
    pub(crate) fn cancel_held(&mut self, addr: u64, holders: Holders) {
        if let Some(slot) = self.slots.get_mut(&addr)
            && let State::Reserved = slot.state
        {
            slot.state = State::Failed(holders);
        }
    }

    /// Removes one count of the registration that begins at `addr`.
    pub(crate) fn remove(&mut self, addr: u64) -> Result<Removal> {
        let nearest = self.nearest(addr);
        match self.slots.get_mut(&addr).map(|slot| &mut slot.state) {
            None | Some(State::Reserved) => Err(EngineError::NotRegistered {
                addr,
                length: 0,
                nearest,
            }),
            Some(State::Leaving(holders) | State::Failed(holders)) => {
                Ok(Removal::Leaving(holders.clone()))
            }
            Some(State::Entered(_, count)) if *count > 1 => {
                *count -= 1;
                Ok(Removal::Counted)
            }
            Some(state @ State::Entered(..)) => {
                let holders = match &*state {
                    State::Entered(region, _) => {
                        // Nobody can add to it: that takes the lock that is held here.
                        let uses = Arc::strong_count(region) - 1;
                        if uses > 0 {
                            let owner = format!("{uses} transfers");
                            return Err(EngineError::StillOwnedByHardware { addr, owner });
                        }
                        region.holders()
                    }
                    State::Reserved | State::Leaving(_) | State::Failed(_) => Holders::default(),
                };
                match std::mem::replace(state, State::Leaving(holders.clone())) {
                    State::Entered(region, _) => Ok(Removal::Last(region, holders)),
                    State::Reserved | State::Leaving(_) | State::Failed(_) => {
                        Ok(Removal::Leaving(holders))
                    }
                }
            }
        }
    }

    /// Frees the range of a registration that was removed and that no device holds any more.
    pub(crate) fn free(&mut self, addr: u64) {
        let state = self.slots.get(&addr).map(|slot| &slot.state);
        if let Some(State::Leaving(_) | State::Failed(_)) = state {
            self.slots.remove(&addr);
        }
    }

    /// The one registration that holds `length` bytes from `addr`, for a transfer.
    pub(crate) fn find(&self, addr: u64, length: u64) -> Result<RegionUse> {
        let before = self.slots.range(..=addr).next_back();
        if let Some((begin, slot)) = before
            && let State::Entered(region, _) = &slot.state
            && let Some(end) = addr.checked_add(length)
            && end <= begin + slot.length
        {
            return Ok(RegionUse(Arc::clone(region)));
        }
        Err(EngineError::NotRegistered {
            addr,
            length,
            nearest: self.nearest(addr),
        })
    }

    /// The registration next to an address, in words (report R09).
    fn nearest(&self, addr: u64) -> String {
        let before = self.slots.range(..=addr).next_back();
        let after = self.slots.range(addr..).next();
        match before.or(after) {
            Some((begin, slot)) => format!("nearest are {}", slot.describe(*begin)),
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
            Admission::Reserved => {
                let region = Region::new(
                    memory.clone(),
                    options,
                    Vec::new(),
                    WILDCARD_LOCATION.to_owned(),
                    None,
                    Vec::new(),
                );
                registry.enter(Arc::new(region));
                Ok(true)
            }
        }
    }

    /// True if it was the last count.
    fn remove(registry: &mut Registry, addr: u64) -> Result<bool> {
        let last = matches!(registry.remove(addr)?, Removal::Last(..));
        registry.free(addr);
        Ok(last)
    }

    #[test]
    fn r01_the_same_registration_is_counted_and_gone_after_the_last() {
        let mut registry = Registry::default();
        let memory = memory(1);
        assert!(register(&mut registry, &memory).expect("new"));
        assert!(!register(&mut registry, &memory).expect("counted"));
        assert!(!remove(&mut registry, memory.addr()).expect("known"));
        assert!(registry.find(memory.addr(), 1).is_ok());
        assert!(remove(&mut registry, memory.addr()).expect("known"));
        assert!(registry.find(memory.addr(), 1).is_err());
        assert!(remove(&mut registry, memory.addr()).is_err());
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
        let error = remove(&mut registry, memory.addr()).expect_err("in use");
        assert!(
            matches!(error, EngineError::StillOwnedByHardware { .. }),
            "{error}"
        );
        assert!(error.is_retryable());
        drop(in_use);
        assert!(remove(&mut registry, memory.addr()).expect("free"));
    }

    #[test]
    fn a_range_stays_taken_until_devices_have_let_go_of_it() {
        let mut registry = Registry::default();
        let memory = memory(1);
        register(&mut registry, &memory).expect("new");
        assert!(matches!(
            registry.remove(memory.addr()),
            Ok(Removal::Last(..))
        ));
        assert!(registry.find(memory.addr(), 1).is_err());
        let error = register(&mut registry, &memory).expect_err("a device holds it");
        assert!(error.to_string().contains("not let go"), "{error}");
        assert!(matches!(
            registry.remove(memory.addr()),
            Ok(Removal::Leaving(_))
        ));
        registry.free(memory.addr());
        assert!(register(&mut registry, &memory).expect("free again"));
    }

    #[test]
    fn a_range_whose_registration_failed_is_free_once_devices_have_let_go_of_it() {
        let mut registry = Registry::default();
        let memory = memory(1);
        let options = MemoryOptions::default();
        assert!(registry.admit(&memory, &options).is_ok());
        // By now nobody holds it.
        registry.cancel_held(memory.addr(), Holders::default());
        assert!(register(&mut registry, &memory).expect("free again"));
    }

    #[test]
    fn a_reservation_can_be_neither_used_nor_unregistered() {
        let mut registry = Registry::default();
        let memory = memory(1);
        let options = MemoryOptions::default();
        assert!(matches!(
            registry.admit(&memory, &options),
            Ok(Admission::Reserved)
        ));
        assert!(registry.find(memory.addr(), 1).is_err());
        assert!(registry.remove(memory.addr()).is_err());
        registry.cancel(memory.addr());
        assert!(register(&mut registry, &memory).expect("given up before"));
    }
}
