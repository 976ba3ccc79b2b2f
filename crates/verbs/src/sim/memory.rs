//! Protection domains and registered regions.

use super::core::Core;
use super::node::NicId;
use super::slab::Handle;
use super::trace::trace;
use crate::error::Errno;
use crate::{AccessFlags, HostMemory, Sge};

#[derive(Debug)]
pub(super) struct Pd {
    pub(super) context: Handle,
}

/// A registered region. It holds its memory, so that what arrives late never meets unmapped memory.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) context: Handle,
    pub(super) pd: Handle,
    pub(super) nic: NicId,
    memory: HostMemory,
    /// Where the region begins in `memory`.
    offset: usize,
    length: u64,
    iova: u64,
    access: AccessFlags,
    key: u32,
}

/// Bytes of a registered region: a checked way to them.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    memory: HostMemory,
    offset: usize,
    pub(super) length: usize,
}

impl Piece {
    /// Copies the bytes from `skip` on into `bytes`.
    pub(super) fn copy_out(&self, skip: usize, bytes: &mut [u8]) {
        // The range was checked when the piece was made.
        let copied = self.memory.copy_out(self.offset + skip, bytes);
        debug_assert!(copied.is_ok(), "{copied:?}");
    }

    /// Copies `bytes` to the place from `skip` on.
    pub(super) fn copy_in(&self, skip: usize, bytes: &[u8]) {
        let copied = self.memory.copy_in(self.offset + skip, bytes);
        debug_assert!(copied.is_ok(), "{copied:?}");
    }
}

impl Region {
    /// The bytes of `[addr, addr + length)`, if all of them lie inside and `access` is allowed.
    fn piece(&self, pd: Handle, addr: u64, length: u64, access: AccessFlags) -> Option<Piece> {
        let skip = addr.checked_sub(self.iova)?;
        let end = skip.checked_add(length)?;
        let allowed = self.pd == pd && end <= self.length && self.access.contains(access);
        allowed.then(|| Piece {
            memory: self.memory.clone(),
            offset: self.offset + skip as usize,
            length: length as usize,
        })
    }
}

impl Core {
    pub(super) fn alloc_pd(&mut self, context: Handle) -> Result<Handle, Errno> {
        let nic = self.live_context(context)?.nic;
        let device = &mut self.nics[nic.0];
        if device.pd_count >= device.limits.max_pd {
            return Err(Errno(libc::ENOMEM));
        }
        device.pd_count += 1;
        Ok(self.pds.insert(Pd { context }))
    }

    /// `EBUSY` while regions or queue pairs use it.
    pub(super) fn dealloc_pd(&mut self, pd: Handle) -> Result<(), Errno> {
        let used = self.regions.iter().any(|(_, region)| region.pd == pd)
            || self.pairs.iter().any(|(_, pair)| pair.pd == pd);
        if used {
            return Err(Errno(libc::EBUSY));
        }
        if let Some(pd) = self.pds.remove(pd)
            && let Some(context) = self.contexts.get(pd.context)
        {
            self.nics[context.nic.0].pd_count -= 1;
        }
        Ok(())
    }

    /// Registers `length` bytes at address `addr` of this process, named `iova` in work requests.
    ///
    /// One key serves as both lkey and rkey, as on most devices.
    pub(super) fn register(
        &mut self,
        pd: Handle,
        memory: &HostMemory,
        addr: u64,
        length: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<(Handle, u32), Errno> {
        let context = self.pds.get(pd).ok_or(Errno(libc::EIO))?.context;
        let nic = self.live_context(context)?.nic;
        let remote_write = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        if access.intersects(remote_write) && !access.contains(AccessFlags::LOCAL_WRITE) {
            return Err(Errno(libc::EINVAL));
        }
        let offset = memory.offset_of(addr, length).ok_or(Errno(libc::EFAULT))?;
        let limits = &self.nics[nic.0].limits;
        if length == 0 || length as u64 > limits.max_mr_bytes {
            return Err(Errno(libc::EINVAL));
        }
        if self.nics[nic.0].regions.len() >= limits.max_mr as usize {
            return Err(Errno(libc::ENOMEM));
        }
        let recycle = self.options.recycle_keys;
        let device = &mut self.nics[nic.0];
        let index = device.key_indexes.take();
        let uses = device.key_uses.entry(index).or_default();
        let key = index << 8 | u32::from(*uses);
        if !recycle {
            *uses = uses.wrapping_add(1);
        }
        let region = self.regions.insert(Region {
            context,
            pd,
            nic,
            memory: memory.clone(),
            offset,
            length: length as u64,
            iova,
            access,
            key,
        });
        self.nics[nic.0].regions.insert(key, region);
        trace!(
            self,
            "region {key:#x} of {length} on {}",
            self.nic_name(nic)
        );
        Ok((region, key))
    }

    /// `EIO` while the adapter refuses it; not in a context that died.
    pub(super) fn deregister(&mut self, handle: Handle) -> Result<(), Errno> {
        if let Some(region) = self.regions.get(handle) {
            let lives = self.live_context(region.context).is_ok();
            if lives && self.nics[region.nic.0].refuses_to_deregister > 0 {
                return Err(Errno(libc::EIO));
            }
        }
        self.remove_region(handle);
        Ok(())
    }

    pub(super) fn remove_region(&mut self, handle: Handle) {
        if let Some(region) = self.regions.remove(handle) {
            let device = &mut self.nics[region.nic.0];
            device.regions.remove(&region.key);
            device.key_indexes.give_back(region.key >> 8);
            trace!(
                self,
                "no region {:#x} on {}",
                region.key,
                self.nic_name(region.nic)
            );
        }
    }

    /// The peer's bytes that a packet names, if its key, range and access are right.
    pub(super) fn remote_piece(
        &self,
        nic: NicId,
        pd: Handle,
        key: u32,
        range: (u64, u64),
        access: AccessFlags,
    ) -> Option<Piece> {
        let region = self.nics[nic.0].regions.get(&key)?;
        self.regions
            .get(*region)?
            .piece(pd, range.0, range.1, access)
    }

    /// The local pieces of a work request; `None` when one of them is not covered by its key.
    pub(super) fn local_pieces(
        &self,
        nic: NicId,
        pd: Handle,
        sges: &[Sge],
        access: AccessFlags,
    ) -> Option<Vec<Piece>> {
        sges.iter()
            .filter(|sge| sge.length > 0)
            .map(|sge| {
                let range = (sge.addr, u64::from(sge.length));
                self.remote_piece(nic, pd, sge.lkey, range, access)
            })
            .collect()
    }
}

/// Copies the bytes `[skip, skip + bytes.len())` of the pieces, taken as one, into `bytes`.
pub(super) fn gather(pieces: &[Piece], skip: u64, bytes: &mut [u8]) {
    walk(pieces, skip, bytes.len(), |piece, from, range| {
        piece.copy_out(from, &mut bytes[range]);
    });
}

/// Copies `bytes` to the place `[skip, skip + bytes.len())` of the pieces, taken as one.
pub(super) fn scatter(pieces: &[Piece], skip: u64, bytes: &[u8]) {
    walk(pieces, skip, bytes.len(), |piece, from, range| {
        piece.copy_in(from, &bytes[range]);
    });
}

fn walk(
    pieces: &[Piece],
    skip: u64,
    length: usize,
    mut visit: impl FnMut(&Piece, usize, std::ops::Range<usize>),
) {
    let mut skip = skip as usize;
    let mut done = 0;
    for piece in pieces {
        if skip >= piece.length {
            skip -= piece.length;
            continue;
        }
        let count = (piece.length - skip).min(length - done);
        visit(piece, skip, done..done + count);
        done += count;
        skip = 0;
        if done == length {
            return;
        }
    }
}
