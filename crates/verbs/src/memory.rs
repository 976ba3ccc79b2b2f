//! Host memory that devices and peers may read and write at any time.
//!
//! Deliberately not here: any `&[u8]` or `&mut [u8]` over the memory. A peer can write it whenever
//! it likes, so that a Rust reference would be a lie; bytes go in and out by copy, or straight
//! between the memory and a file descriptor.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

/// A range of this process's memory that may be registered with devices.
///
/// A cheap handle: clones share the memory, which is unmapped when the last handle is gone.
/// Registered regions hold a handle each, so that hardware never sees unmapped memory; a leaked
/// region only leaks the memory.
#[derive(Clone)]
pub struct HostMemory {
    range: Arc<Range>,
}

struct Range {
    addr: NonZeroUsize,
    length: usize,
    backing: Backing,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Backing {
    /// Mapped by us, `mapped` bytes; unmapped on drop.
    Mapped { mapped_bytes: usize },
    /// Somebody else's, who promised that it outlives all handles.
    Borrowed,
}

/// What kind of pages to map.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Pages {
    /// Ordinary pages.
    #[default]
    Normal,
    /// Huge pages of 2 MiB from the reserved pool (`MAP_HUGETLB`).
    Huge2M,
}

/// An access outside a [`HostMemory`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{length} bytes at offset {offset} do not lie inside host memory of {memory_bytes} bytes")]
pub struct OutOfBounds {
    /// First byte asked for.
    pub offset: usize,
    /// Bytes asked for.
    pub length: usize,
    /// Bytes that there are.
    pub memory_bytes: usize,
}

impl HostMemory {
    /// Maps `length` zeroed bytes, page aligned. `length` zero is `EINVAL`.
    pub fn allocate(length: usize) -> io::Result<Self> {
        Self::map(length, Pages::Normal)
    }

    /// Maps `length` zeroed bytes on the given kind of pages.
    pub fn map(length: usize, pages: Pages) -> io::Result<Self> {
        if length == 0 {
            return Err(io::Error::from(rustix::io::Errno::INVAL));
        }
        let (flags, mapped_bytes) = match pages {
            Pages::Normal => (MapFlags::PRIVATE, length),
            Pages::Huge2M => {
                let page_bytes = 2 << 20;
                let mapped_bytes = length
                    .checked_next_multiple_of(page_bytes)
                    .ok_or_else(|| io::Error::from(rustix::io::Errno::NOMEM))?;
                (
                    MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB,
                    mapped_bytes,
                )
            }
        };
        // SAFETY: a new anonymous mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                mapped_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        }?;
        let addr = NonZeroUsize::new(start as usize)
            .ok_or_else(|| io::Error::other("the kernel mapped memory at address zero"))?;
        Ok(Self {
            range: Arc::new(Range {
                addr,
                length,
                backing: Backing::Mapped { mapped_bytes },
            }),
        })
    }

    /// Memory of somebody else's, for callers that have only an address: language bindings.
    ///
    /// Returns `None` for address zero, length zero, or a range that wraps.
    ///
    /// # Safety
    ///
    /// Until every clone of the handle, every region registered over it and every transfer that
    /// names it is gone, the caller keeps the range mapped, readable and writable, and holds no
    /// Rust reference to any byte of it.
    pub unsafe fn from_raw_parts(addr: *mut u8, length: usize) -> Option<Self> {
        let addr = NonZeroUsize::new(addr as usize)?;
        if length == 0 || addr.get().checked_add(length).is_none() {
            return None;
        }
        Some(Self {
            range: Arc::new(Range {
                addr,
                length,
                backing: Backing::Borrowed,
            }),
        })
    }

    /// Address of the first byte.
    pub fn addr(&self) -> u64 {
        self.range.addr.get() as u64
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.range.length
    }

    /// The offset of `length` bytes at address `addr`, if they lie inside.
    pub fn offset_of(&self, addr: u64, length: usize) -> Option<usize> {
        let offset = usize::try_from(addr.checked_sub(self.addr())?).ok()?;
        self.pointer(offset, length).ok().map(|_| offset)
    }

    /// Copies `bytes` into the memory at `offset`.
    ///
    /// A peer or another thread that writes the same bytes at the same time leaves a mixture of
    /// both, never undefined behaviour.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let start = self.pointer(offset, bytes.len())?;
        let (head, words) = split(start, bytes.len());
        for (index, byte) in bytes[..head].iter().enumerate() {
            self.byte(start, index).store(*byte, Ordering::Relaxed);
        }
        let mut chunks = bytes[head..].chunks_exact(8);
        for (index, chunk) in chunks.by_ref().take(words).enumerate() {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            self.word(start, head + 8 * index)
                .store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        let tail = head + 8 * words;
        for (index, byte) in bytes[tail..].iter().enumerate() {
            self.byte(start, tail + index)
                .store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies from the memory at `offset` into `bytes`. Of bytes that are being written at the
    /// same time it may see any mixture.
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfBounds> {
        let start = self.pointer(offset, bytes.len())?;
        let (head, words) = split(start, bytes.len());
        for (index, byte) in bytes[..head].iter_mut().enumerate() {
            *byte = self.byte(start, index).load(Ordering::Relaxed);
        }
        for (index, chunk) in bytes[head..].chunks_exact_mut(8).take(words).enumerate() {
            let word = self.word(start, head + 8 * index).load(Ordering::Relaxed);
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        let tail = head + 8 * words;
        for (index, byte) in bytes[tail..].iter_mut().enumerate() {
            *byte = self.byte(start, tail + index).load(Ordering::Relaxed);
        }
        Ok(())
    }

    /// Reads up to `length` bytes from `fd` straight into the memory (`read(2)`). Returns the
    /// number read, 0 at the end of the stream; an access out of bounds is `InvalidInput`.
    pub fn read_from(&self, offset: usize, length: usize, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let start = self
            .pointer(offset, length)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        // SAFETY: `pointer` checked that the range is ours, mapped and writable for as long as
        // `self` lives; the kernel, not Rust code, writes it.
        let count = unsafe { libc::read(fd.as_raw_fd(), start.cast(), length) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Writes up to `length` bytes of the memory to `fd` (`write(2)`, with `MSG_NOSIGNAL` on
    /// sockets). Returns the number written; an access out of bounds is `InvalidInput`.
    pub fn send_to(&self, offset: usize, length: usize, fd: BorrowedFd<'_>) -> io::Result<usize> {
        let start = self
            .pointer(offset, length)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        // SAFETY: as in `read_from`; the kernel only reads the range.
        let count = unsafe { libc::send(fd.as_raw_fd(), start.cast(), length, libc::MSG_NOSIGNAL) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    fn pointer(&self, offset: usize, length: usize) -> Result<*mut u8, OutOfBounds> {
        let inside = offset
            .checked_add(length)
            .is_some_and(|end| end <= self.range.length);
        if !inside {
            return Err(OutOfBounds {
                offset,
                length,
                memory_bytes: self.range.length,
            });
        }
        Ok((self.range.addr.get() + offset) as *mut u8)
    }

    /// The byte at `start + index`, where `start` came from `pointer` for a range that holds it.
    fn byte(&self, start: *mut u8, index: usize) -> &AtomicU8 {
        // SAFETY: the byte lies in the checked range, which lives as long as `self`; all access
        // from Rust is atomic, and whoever else writes is outside the abstract machine.
        unsafe { AtomicU8::from_ptr(start.add(index)) }
    }

    /// The aligned word at `start + index`, under the same rule.
    fn word(&self, start: *mut u8, index: usize) -> &AtomicU64 {
        // SAFETY: as in `byte`; `split` made the word aligned to 8 bytes and wholly inside.
        unsafe { AtomicU64::from_ptr(start.add(index).cast()) }
    }
}

/// Bytes before the first aligned word, and whole words after them, of `length` bytes at `start`.
fn split(start: *mut u8, length: usize) -> (usize, usize) {
    let head = start.align_offset(8).min(length);
    (head, (length - head) / 8)
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("addr", &format_args!("{:#x}", self.range.addr))
            .field("length", &self.range.length)
            .field("backing", &self.range.backing)
            .finish()
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Backing::Mapped { mapped_bytes } = self.backing {
            // SAFETY: `map` made exactly this mapping, and no handle to it is left.
            let unmapped = unsafe { rustix::mm::munmap(self.addr.get() as *mut _, mapped_bytes) };
            if let Err(error) = unmapped {
                tracing::warn!(addr = self.addr.get(), mapped_bytes, %error, "munmap failed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_at_every_alignment() {
        let memory = HostMemory::allocate(4096).expect("a page can be mapped");
        let pattern: Vec<u8> = (0..64).map(|byte| byte as u8 ^ 0xa5).collect();
        for offset in 0..17 {
            for length in 0..40 {
                memory.copy_in(0, &[0; 128]).expect("inside");
                memory.copy_in(offset, &pattern[..length]).expect("inside");
                let mut whole = [1; 128];
                memory.copy_out(0, &mut whole).expect("inside");
                assert_eq!(whole[offset..offset + length], pattern[..length]);
                assert!(
                    whole[..offset]
                        .iter()
                        .chain(&whole[offset + length..])
                        .all(|b| *b == 0)
                );
            }
        }
    }

    #[test]
    fn access_out_of_bounds_is_refused() {
        let memory = HostMemory::allocate(100).expect("a page can be mapped");
        assert!(memory.copy_in(100, &[]).is_ok());
        assert!(memory.copy_in(100, &[0]).is_err());
        assert!(memory.copy_out(usize::MAX, &mut [0; 2]).is_err());
        assert_eq!(memory.offset_of(memory.addr() + 99, 1), Some(99));
        assert_eq!(memory.offset_of(memory.addr() + 99, 2), None);
        assert_eq!(memory.offset_of(memory.addr() - 1, 1), None);
        assert!(HostMemory::allocate(0).is_err());
    }

    #[test]
    fn descriptors_read_and_write_the_memory_itself() {
        use std::os::fd::AsFd;
        let (left, right) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
        let memory = HostMemory::allocate(4096).expect("a page can be mapped");
        memory.copy_in(8, b"across").expect("inside");
        assert_eq!(memory.send_to(8, 6, left.as_fd()).expect("sent"), 6);
        assert_eq!(memory.read_from(100, 6, right.as_fd()).expect("read"), 6);
        let mut back = [0; 6];
        memory.copy_out(100, &mut back).expect("inside");
        assert_eq!(&back, b"across");
        assert!(memory.read_from(4090, 7, right.as_fd()).is_err());
    }
}
