//! Registering memory with the transports, and in the own record.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rerail_transport::TransportError;
use rerail_transport::machine::ids::RegionId;
use rerail_transport::machine::publisher::{Edit, KeyPair};
use rerail_transport::rdma::{Piece, RegisteredMemory};
use rerail_verbs::{AccessFlags, HostMemory};

use super::{Engine, Inner};
use crate::memory::{Admission, MemoryOptions, Region};
use crate::{EngineError, Result};

/// How long a registration waits until peers can read of it in the store. It is published later in
/// any case.
const STORED_LIMIT: Duration = Duration::from_secs(3);

impl Engine {
    /// Registers all of `memory` with every NIC, or with none, and publishes it. Registering the
    /// same again is counted. Blocks.
    ///
    /// # Errors
    ///
    /// It overlaps other registered memory, or a device refuses it.
    pub fn register(&self, memory: &HostMemory, options: MemoryOptions) -> Result<()> {
        self.register_batch(std::slice::from_ref(memory), options)
    }

    /// Registers several memories, all or none, and publishes them together. Blocks. Errors as in
    /// [`register`](Self::register).
    pub fn register_batch(&self, memories: &[HostMemory], options: MemoryOptions) -> Result<()> {
        let mut registry = self.inner.registry_mut();
        let mut counted: Vec<u64> = Vec::new();
        let outcome = memories.iter().try_for_each(|memory| {
            if let Admission::New = registry.admit(memory, &options)? {
                let region = self.inner.register(memory, &options)?;
                registry.insert(region);
            }
            counted.push(memory.addr());
            Ok(())
        });
        if let Err(error) = outcome {
            for addr in counted {
                // It was entered just now and nobody else can have used it: the lock is held.
                if let Ok(Some(region)) = registry.remove(addr) {
                    self.inner.unpublish(&region);
                }
            }
            return Err(error);
        }
        drop(registry);
        self.inner.wait_stored();
        Ok(())
    }

    /// Removes the registration whose first byte is at `addr`, or one count of it. When it
    /// returns, no peer touches the memory any more. Blocks.
    ///
    /// # Errors
    ///
    /// It is not registered, or [`EngineError::StillOwnedByHardware`]: own transfers use it.
    pub fn unregister(&self, addr: u64) -> Result<()> {
        let removed = self.inner.registry_mut().remove(addr)?;
        if let Some(region) = removed {
            self.inner.unpublish(&region);
        }
        Ok(())
    }
}

impl Inner {
    fn register(&self, memory: &HostMemory, options: &MemoryOptions) -> Result<Arc<Region>> {
        let rdma = match &self.rdma {
            Some(rdma) => {
                let mut access = AccessFlags::LOCAL_WRITE;
                if options.remote_accessible {
                    access |= AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
                }
                Some(
                    rdma.register(memory, access)
                        .map_err(TransportError::from)?,
                )
            }
            None => None,
        };
        let mut published = Vec::new();
        if options.remote_accessible {
            published = match &rdma {
                Some(registered) => self.publish_rdma(registered, options),
                None => self.publish_tcp(memory)?,
            };
        }
        let pieces = match &rdma {
            Some(registered) => registered.pieces().collect(),
            None => vec![Piece {
                addr: memory.addr(),
                length: memory.length() as u64,
                keys: Arc::from([]),
            }],
        };
        let (memory, options) = (memory.clone(), options.clone());
        Ok(Arc::new(Region::new(
            memory, options, pieces, rdma, published,
        )))
    }

    fn publish_rdma(&self, memory: &RegisteredMemory, options: &MemoryOptions) -> Vec<RegionId> {
        let publish = |chunk: rerail_transport::rdma::memory::ChunkKeys| {
            let region = self.next_region();
            let keys = chunk.lkeys.iter().zip(&chunk.rkeys);
            let keys = keys.map(|(lkey, rkey)| KeyPair {
                lkey: *lkey,
                rkey: *rkey,
            });
            self.publication.edit(Edit::Register {
                region,
                name: options.location.clone(),
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
