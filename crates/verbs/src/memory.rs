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
    /// Huge pages of 2 MiB from the reserved pool (`MAP_HUGETLB`). To register them on kernels
    /// before 5.12, libibverbs wants `RDMAV_HUGEPAGES_SAFE=1` in the environment.
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
    /// both, never undefined behaviour. Bytes beside them are not disturbed.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let start = self.pointer(offset, bytes.len())?;
        let cut = self.cut(start, bytes.len());
        let (head, rest) = bytes.split_at(cut.head);
        let (first, rest) = rest.split_at(cut.first);
        let (words, rest) = rest.split_at(8 * cut.words);
        let (last, tail) = rest.split_at(cut.last);
        self.store_bytes(start, head);
        let mut place = start.wrapping_add(cut.head);
        if !first.is_empty() {
            let within = place.addr() % 8;
            self.store_part(place.wrapping_sub(within), within, first);
            place = place.wrapping_add(first.len());
        }
        for (index, chunk) in words.as_chunks::<8>().0.iter().enumerate() {
            let word = self.word(place.wrapping_add(8 * index));
            word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
        }
        place = place.wrapping_add(words.len());
        if !last.is_empty() {
            self.store_part(place, 0, last);
            place = place.wrapping_add(last.len());
        }
        self.store_bytes(place, tail);
        Ok(())
    }

    /// Copies from the memory at `offset` into `bytes`. Of bytes that are being written at the
    /// same time it may see any mixture.
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfBounds> {
        let start = self.pointer(offset, bytes.len())?;
        let cut = self.cut(start, bytes.len());
        let (head, rest) = bytes.split_at_mut(cut.head);
        let (first, rest) = rest.split_at_mut(cut.first);
        let (words, rest) = rest.split_at_mut(8 * cut.words);
        let (last, tail) = rest.split_at_mut(cut.last);
        self.load_bytes(start, head);
        let mut place = start.wrapping_add(cut.head);
        if !first.is_empty() {
            let within = place.addr() % 8;
            let word = self
                .word(place.wrapping_sub(within))
                .load(Ordering::Relaxed);
            first.copy_from_slice(&word.to_ne_bytes()[within..within + first.len()]);
            place = place.wrapping_add(first.len());
        }
        for (index, chunk) in words.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let word = self.word(place.wrapping_add(8 * index));
            *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        place = place.wrapping_add(words.len());
        if !last.is_empty() {
            let word = self.word(place).load(Ordering::Relaxed);
            last.copy_from_slice(&word.to_ne_bytes()[..last.len()]);
            place = place.wrapping_add(last.len());
        }
        self.load_bytes(place, tail);
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

    /// Cuts `length` bytes at `start`, which came from `pointer`, into pieces of one access each.
    ///
    /// Which access reaches a byte depends on the memory alone, not on the call: aligned words
    /// that lie wholly inside the memory are only ever accessed as words, the few bytes around
    /// them only ever singly. Accesses of different sizes to the same byte at the same time would
    /// be a data race, even though they are atomic.
    fn cut(&self, start: *mut u8, length: usize) -> Cut {
        let memory = self.range.addr.get();
        let words_begin = memory.next_multiple_of(8);
        let words_end = ((memory + self.range.length) / 8 * 8).max(words_begin);
        let (begin, end) = (start.addr(), start.addr() + length);
        let head = words_begin.clamp(begin, end) - begin;
        let tail = end - words_end.clamp(begin, end);
        let inner_begin = begin + head;
        let inner = length - head - tail;
        let first = ((8 - inner_begin % 8) % 8).min(inner);
        Cut {
            head,
            first,
            words: (inner - first) / 8,
            last: (inner - first) % 8,
        }
    }

    fn store_bytes(&self, place: *mut u8, bytes: &[u8]) {
        for (index, byte) in bytes.iter().enumerate() {
            self.byte(place.wrapping_add(index))
                .store(*byte, Ordering::Relaxed);
        }
    }

    fn load_bytes(&self, place: *mut u8, bytes: &mut [u8]) {
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = self.byte(place.wrapping_add(index)).load(Ordering::Relaxed);
        }
    }

    /// Replaces some bytes of the aligned word at `place`, from its byte `within` on. The exchange
    /// fails and is tried again when others write the rest meanwhile: threads, and devices too,
    /// since their writes are coherent with the caches.
    fn store_part(&self, place: *mut u8, within: usize, bytes: &[u8]) {
        let replace = |word: u64| {
            let mut word = word.to_ne_bytes();
            word[within..within + bytes.len()].copy_from_slice(bytes);
            Some(u64::from_ne_bytes(word))
        };
        // Always `Ok`, for `replace` always gives a word.
        let _ = self
            .word(place)
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, replace);
    }

    /// The byte at `place`, which lies inside the memory and in none of its words.
    fn byte(&self, place: *mut u8) -> &AtomicU8 {
        // SAFETY: the byte lies in the memory, which lives as long as `self`. All access from Rust
        // is by atomics of this size, as `cut` decides; whoever else writes is outside the
        // abstract machine.
        unsafe { AtomicU8::from_ptr(place) }
    }

    /// The word at `place`, which is aligned and lies wholly inside the memory.
    fn word(&self, place: *mut u8) -> &AtomicU64 {
        // SAFETY: as in `byte`, and `cut` has made it aligned to 8 bytes.
        unsafe { AtomicU64::from_ptr(place.cast()) }
    }
}

/// Pieces of an access, in order. What follows `last` are single bytes again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cut {
    /// Single bytes before the memory's first word.
    head: usize,
    /// Bytes of a word of which the beginning is not wanted.
    first: usize,
    /// Whole words.
    words: usize,
    /// Bytes of a word of which the end is not wanted.
    last: usize,
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
mod tests;
