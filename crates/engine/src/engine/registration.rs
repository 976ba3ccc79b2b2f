//! Registering memory with the transports, and in the own record.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use rerail_transport::machine::ids::RegionId;
use rerail_transport::machine::publisher::{Edit, KeyPair};
use rerail_transport::rdma::memory::Holders;
use rerail_transport::rdma::{Piece, RegisteredMemory};
use rerail_verbs::{AccessFlags, HostMemory};

use super::{Engine, Inner};
use crate::memory::{Admission, MemoryOptions, Region, Removal};
use crate::{EngineError, Result, room, topology};

/// How long a registration waits until peers can read of it in the store. It is published later in
/// any case.
const STORED_LIMIT: Duration = Duration::from_secs(3);

/// How long unregistering waits for the NICs to let go of the memory: firmware may hang.
const DEREGISTER_LIMIT: Duration = Duration::from_secs(1);

impl Engine {
    /// Registers all of `memory` with every NIC, or with none, and publishes it. Registering the
    /// same again is counted. Blocks: pinning much memory takes minutes, and one registration waits
    /// for another. Requests on other memory can be submitted meanwhile.
    ///
    /// # Errors
    ///
    /// It overlaps other registered memory, a device refuses it, or the record would be larger than
    /// the store takes.
    pub fn register(&self, memory: &HostMemory, options: MemoryOptions) -> Result<()> {
        self.register_batch(std::slice::from_ref(memory), options)
    }

    /// Registers several memories, all or none, and publishes them together. Blocks. Errors as in
    /// [`register`](Self::register), also when they overlap each other.
    pub fn register_batch(&self, memories: &[HostMemory], options: MemoryOptions) -> Result<()> {
        let inner = &self.inner;
        // It guards nothing that could be broken.
        let one_at_a_time = inner.registering.lock();
        let _one_at_a_time = one_at_a_time.unwrap_or_else(PoisonError::into_inner);
        let (mut counted, mut reserved) = (Vec::new(), Vec::new());
        let mut regions = Vec::new();
        topology::check(&options.location)?;
        let outcome = memories.iter().try_for_each(|memory| {
            // The lock is let go of while devices work.
            let admission = inner.registry_mut().admit(memory, &options)?;
            match admission {
                Admission::Counted => counted.push(memory.addr()),
                Admission::Reserved => {
                    reserved.push(memory.addr());
                    regions.push(inner.register(memory, &options)?);
                }
            }
            Ok(())
        });
        let outcome = outcome.and_then(|()| {
            let (directory, publication) = (&inner.directory, &inner.publication);
            room::check(directory, publication, &inner.name, None)
        });
        if let Err(error) = outcome {
            for region in regions {
                inner.unpublish(&region);
                let (addr, holders) = (region.memory.addr(), region.holders());
                drop(region);
                inner.cancel(addr, holders);
            }
            for addr in reserved {
                inner.registry_mut().cancel(addr);
            }
            for addr in counted {
                // One count of several. Should the others be gone by now and transfers still use
                // it, then it stays registered, which harms nobody.
                let _ = self.unregister(addr);
            }
            return Err(error);
        }
        let mut registry = inner.registry_mut();
        for region in &regions {
            registry.enter(Arc::clone(region));
        }
        drop(registry);
        for region in &regions {
            // A device that was opened meanwhile did not find it yet.
            region.set_near(&inner.places.load());
            inner.rekey(region);
        }
        inner.wait_stored();
        Ok(())
    }

    /// Removes the registration whose first byte is at `addr`, or one count of it. When it
    /// returns, no peer touches the memory any more. Blocks, for a second at most over RDMA.
    ///
    /// # Errors
    ///
    /// It is not registered; or [`EngineError::StillOwnedByHardware`]: own transfers use it, or a
    /// device that the error names has not deregistered it in time. Call it again then: while a
    /// device hangs, the memory that was registered with it stays taken, and must not be freed.
    pub fn unregister(&self, addr: u64) -> Result<()> {
        let removal = self.inner.registry_mut().remove(addr)?;
        let holders = match removal {
            Removal::Counted => return Ok(()),
            Removal::Last(region, holders) => {
                self.inner.unpublish(&region);
                holders
            }
            Removal::Leaving(holders) => holders,
        };
        wait_gone(addr, &holders)?;
        self.inner.registry_mut().free(addr);
        Ok(())
    }
}

impl Inner {
    /// Gives up a reservation; its range stays taken while a device may hold the memory.
    fn cancel(&self, addr: u64, holders: Holders) {
        match wait_gone(addr, &holders) {
            Ok(()) => self.registry_mut().cancel(addr),
            Err(_) => self.registry_mut().cancel_held(addr, holders),
        }
    }

    fn register(&self, memory: &HostMemory, options: &MemoryOptions) -> Result<Arc<Region>> {
        let rdma = match &self.rdma {
            Some(rdma) => {
                let mut access = AccessFlags::LOCAL_WRITE;
                if options.remote_accessible {
                    access |= AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
                }
                let registered = rdma.register(memory, access).map_err(|failed| {
                    self.cancel(memory.addr(), failed.holders);
                    failed.error
                });
                Some(registered?)
            }
            None => None,
        };
        // Its pages are there now: registering pins them.
        let location = match &rdma {
            Some(_) => topology::locate(memory, &options.location),
            None => options.location.clone(),
        };
        let mut published = Vec::new();
        if options.remote_accessible {
            published = match &rdma {
                Some(registered) => self.publish_rdma(registered, &location),
                None => self.publish_tcp(memory)?,
            };
        }
        let pieces = match &rdma {
            Some(registered) => registered.pieces().collect(),
            None => vec![Piece::new(memory.addr(), memory.length() as u64, [])],
        };
        let (memory, options) = (memory.clone(), options.clone());
        Ok(Arc::new(Region::new(
            memory, options, pieces, location, rdma, published,
        )))
    }

    fn publish_rdma(&self, memory: &RegisteredMemory, location: &str) -> Vec<RegionId> {
        let publish = |chunk: rerail_transport::rdma::memory::ChunkKeys| {
            let region = self.next_region();
            let keys = chunk.lkeys.iter().zip(&chunk.rkeys);
            let keys = keys.map(|(lkey, rkey)| KeyPair {
                lkey: *lkey,
                rkey: *rkey,
            });
            self.publication.edit(Edit::Register {
                region,
                name: location.to_owned(),
                addr: chunk.addr,
                length: chunk.length,
                keys: keys.collect(),
            });
            region
        };
        memory.keys().into_iter().map(publish).collect()
    }

    fn publish_tcp(&self, memory: &HostMemory) -> Result<Vec<RegionId>> {
        let Some(tcp) = &self.tcp else {
            return Ok(Vec::new());
        };
        let added = tcp.regions.add(memory, 0, memory.length());
        added.map_err(|error| EngineError::Invalid {
            what: "memory",
            reason: error.to_string(),
        })?;
        let region = self.next_region();
        self.publication.edit(Edit::Register {
            region,
            // In TCP segments a buffer has the server's name.
            name: self.name.clone(),
            addr: memory.addr(),
            length: memory.length() as u64,
            keys: Vec::new(),
        });
        Ok(vec![region])
    }

    /// Publishes the keys that a registration has now, where they differ.
    fn rekey(&self, region: &Region) {
        for nic in self.rdma.iter().flat_map(|rdma| rdma.nics().iter()) {
            let local = nic.index();
            let keys = region.keys_of(local).into_iter().collect();
            self.publication.edit(Edit::Rekey { local, keys });
        }
    }

    fn unpublish(&self, region: &Region) {
        for region in &region.published {
            self.publication.edit(Edit::Unregister { region: *region });
        }
        if let Some(tcp) = &self.tcp {
            let (regions, addr) = (tcp.regions.clone(), region.memory.addr());
            // Only a runtime that is gone cannot be asked, and then nobody is served any more.
            let _ = self.block(async move {
                regions.remove(addr).await;
                Ok(())
            });
        }
    }

    fn next_region(&self) -> RegionId {
        RegionId(self.next_region.fetch_add(1, Ordering::Relaxed))
    }

    /// Gives the store time to take the latest registrations in.
    fn wait_stored(&self) {
        let publication = self.publication.clone();
        let generation = publication.generation();
        let stored =
            self.block(async move { Ok(publication.stored(generation, STORED_LIMIT).await) });
        if !matches!(stored, Ok(true)) {
            tracing::warn!(generation, "the store does not have the own record yet");
        }
    }
}

/// Waits until no device holds a registration that was given up.
fn wait_gone(addr: u64, holders: &Holders) -> Result<()> {
    holders.wait_gone(DEREGISTER_LIMIT).map_err(|devices| {
        let devices = devices.join(", ");
        tracing::warn!(devices, addr, "memory is not deregistered yet");
        let owner = format!("device {devices}, which has not deregistered it yet");
        EngineError::StillOwnedByHardware { addr, owner }
    })
}
