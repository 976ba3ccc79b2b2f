//! Memory that is registered with every NIC.

use rerail_verbs::{AccessFlags, HostMemory, MemoryRegion, VerbsError};

use super::nic::Nic;
use super::slice::Piece;

/// A part of host memory, registered on all NICs, in chunks that no device finds too long.
///
/// Dropping it deregisters everything; the memory stays mapped until that has happened.
#[derive(Clone, Debug)]
pub struct RegisteredMemory {
    memory: HostMemory,
    chunks: Vec<Chunk>,
}

/// A chunk: one region on each NIC.
#[derive(Clone, Debug)]
struct Chunk {
    addr: u64,
    length: u64,
    regions: Vec<MemoryRegion>,
}

/// A chunk as it is published: address, length, and keys by NIC.
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
    /// Registers all of `memory` on every NIC, or on none (report R03): after an error whatever
    /// was registered is deregistered again. Blocks.
    pub(super) fn register(
        nics: &[std::sync::Arc<Nic>],
        memory: &HostMemory,
        access: AccessFlags,
        mr_bytes_max: u64,
    ) -> Result<Self, VerbsError> {
        let limits = nics.iter().map(|nic| nic.attr().max_mr_bytes);
        let chunk_max = limits.fold(mr_bytes_max, u64::min).max(1);
        let chunk_max = usize::try_from(chunk_max).unwrap_or(usize::MAX);
        let mut chunks = Vec::new();
        let mut offset = 0;
        while offset < memory.length() {
            let length = chunk_max.min(memory.length() - offset);
            let regions = nics
                .iter()
                .map(|nic| nic.register(memory, offset, length, access))
                .collect::<Result<Vec<_>, _>>()?;
            chunks.push(Chunk {
                addr: memory.addr() + offset as u64,
                length: length as u64,
                regions,
            });
            offset += length;
        }
        Ok(Self {
            memory: memory.clone(),
            chunks,
        })
    }

    /// The memory.
    pub fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// Its chunks with local keys, for the near end of a transfer.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> {
        self.chunks.iter().map(|chunk| Piece {
            addr: chunk.addr,
            length: chunk.length,
            keys: chunk.regions.iter().map(MemoryRegion::lkey).collect(),
        })
    }

    /// Its chunks with all keys, for the record.
    pub fn keys(&self) -> Vec<ChunkKeys> {
        let keys = |chunk: &Chunk| ChunkKeys {
            addr: chunk.addr,
            length: chunk.length,
            rkeys: chunk.regions.iter().map(MemoryRegion::rkey).collect(),
            lkeys: chunk.regions.iter().map(MemoryRegion::lkey).collect(),
        };
        self.chunks.iter().map(keys).collect()
    }
}
