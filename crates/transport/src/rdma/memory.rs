//! Memory that is registered with every NIC.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rerail_verbs::{AccessFlags, HostMemory, MemoryRegion};

use super::nic::Nic;
use super::opening::Opening;
use super::slice::{Keys, Piece};
use crate::TransportError;

/// A part of host memory, registered on all NICs, in chunks that no device finds too long.
///
/// Dropping the last clone deregisters everything; the memory stays mapped until that has
/// happened. A NIC whose device is dead has no region; it gets one when it is open again.
#[derive(Clone, Debug)]
pub struct RegisteredMemory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    memory: HostMemory,
    access: AccessFlags,
    chunks: Vec<Chunk>,
}

/// A chunk: one region on each NIC.
#[derive(Debug)]
struct Chunk {
    offset: usize,
    length: usize,
    lkeys: Arc<Keys>,
    regions: Mutex<Vec<Option<MemoryRegion>>>,
}

/// A chunk as it is published: address, length, and keys by NIC. A NIC that is dead has the key 0,
/// and stands in no matrix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChunkKeys {
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// Keys for peers, one a NIC.
    pub rkeys: Vec<u32>,
    /// Keys for own work requests, one a NIC.
    pub lkeys: Vec<u32>,
}

impl RegisteredMemory {
    /// Registers all of `memory` on every NIC whose device is alive, or on none (report R03):
    /// after an error whatever was registered is deregistered again. Blocks.
    fn register(
        nics: &[Arc<Nic>],
        memory: &HostMemory,
        access: AccessFlags,
        mr_bytes_max: u64,
    ) -> Result<Self, TransportError> {
        let limits = nics.iter().map(|nic| nic.attr().max_mr_bytes);
        let chunk_max = limits.fold(mr_bytes_max, u64::min).max(1);
        let chunk_max = usize::try_from(chunk_max).unwrap_or(usize::MAX);
        let mut chunks = Vec::new();
        let mut offset = 0;
        while offset < memory.length() {
            let length = chunk_max.min(memory.length() - offset);
            let register = |nic: &Arc<Nic>| match nic.opening() {
                None => Ok(None),
                Some(opening) => opening.register(memory, offset, length, access).map(Some),
            };
            let regions = nics.iter().map(register).collect::<Result<Vec<_>, _>>()?;
            let lkeys = regions
                .iter()
                .map(|region| region.as_ref().map(MemoryRegion::lkey));
            chunks.push(Chunk {
                offset,
                length,
                lkeys: Keys::new(lkeys),
                regions: Mutex::new(regions),
            });
            offset += length;
        }
        Ok(Self {
            inner: Arc::new(Inner {
                memory: memory.clone(),
                access,
                chunks,
            }),
        })
    }

    /// Tells when nothing holds the registration any more.
    pub fn holders(&self) -> Holders {
        Holders(Arc::downgrade(&self.inner))
    }

    /// The memory.
    pub fn memory(&self) -> &HostMemory {
        &self.inner.memory
    }

    /// Its chunks with local keys, for the near end of a transfer.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> {
        let addr = self.inner.memory.addr();
        self.inner.chunks.iter().map(move |chunk| Piece {
            addr: addr + chunk.offset as u64,
            length: chunk.length as u64,
            keys: Arc::clone(&chunk.lkeys),
        })
    }

    /// Its chunks with all keys, for the record.
    pub fn keys(&self) -> Vec<ChunkKeys> {
        let addr = self.inner.memory.addr();
        let keys = |chunk: &Chunk| {
            let regions = chunk.lock();
            let all = |key: fn(&MemoryRegion) -> u32| {
                let regions = regions.iter();
                regions
                    .map(|region| region.as_ref().map_or(0, key))
                    .collect()
            };
            ChunkKeys {
                addr: addr + chunk.offset as u64,
                length: chunk.length as u64,
                rkeys: all(MemoryRegion::rkey),
                lkeys: all(MemoryRegion::lkey),
            }
        };
        self.inner.chunks.iter().map(keys).collect()
    }
}

impl Inner {
    /// Lets go of all regions on a NIC whose device is dead.
    fn release(&self, nic: usize) {
        for chunk in &self.chunks {
            chunk.lkeys.set(nic, None);
            // Destroyed by the dead context's own control thread, whenever that comes to it.
            drop(chunk.lock().get_mut(nic).and_then(Option::take));
        }
    }

    /// Registers everything with a device that is open again. Blocks.
    fn register_again(&self, nic: usize, opening: &Opening) -> Result<(), TransportError> {
        for chunk in &self.chunks {
            let region = opening.register(&self.memory, chunk.offset, chunk.length, self.access)?;
            chunk.lkeys.set(nic, Some(region.lkey()));
            if let Some(slot) = chunk.lock().get_mut(nic) {
                *slot = Some(region);
            }
        }
        Ok(())
    }
}

impl Chunk {
    fn lock(&self) -> MutexGuard<'_, Vec<Option<MemoryRegion>>> {
        // A list of handles is whole whatever panicked.
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells when the regions of a registration are on their way to be destroyed.
#[derive(Clone, Debug)]
pub struct Holders(Weak<Inner>);

impl Holders {
    /// True once nothing holds it: its regions were handed to the control threads.
    pub fn are_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// All that is registered, so that it can be registered again with a device that died.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    /// Held by whoever registers, for all the time that it takes.
    all: Mutex<Vec<Weak<Inner>>>,
}

impl Registrations {
    /// Registers memory, and remembers it for as long as it is registered. Blocks.
    pub(super) fn register(
        &self,
        nics: &[Arc<Nic>],
        memory: &HostMemory,
        access: AccessFlags,
        mr_bytes_max: u64,
    ) -> Result<RegisteredMemory, TransportError> {
        // A device that dies or comes back meanwhile waits, so that it misses no registration.
        let mut all = self.lock();
        let registered = RegisteredMemory::register(nics, memory, access, mr_bytes_max)?;
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&registered.inner));
        Ok(registered)
    }

    /// Lets go of all regions on a NIC whose device is dead. Blocks while something is registered.
    pub(super) fn release(&self, nic: &Nic) {
        let all = self.lock();
        if nic.opening().is_some() {
            // It was opened again meanwhile, under the same lock: these are its new regions.
            return;
        }
        for memory in all.iter().filter_map(Weak::upgrade) {
            memory.release(nic.index().0 as usize);
        }
    }

    /// Registers everything with a device that is open again, and takes the device in. Blocks.
    pub(super) fn register_again(
        &self,
        nic: &Nic,
        opening: Arc<Opening>,
    ) -> Result<(), TransportError> {
        let all = self.lock();
        for memory in all.iter().filter_map(Weak::upgrade) {
            memory.register_again(nic.index().0 as usize, &opening)?;
        }
        nic.install(opening);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Inner>>> {
        // A list of handles is whole whatever panicked.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
