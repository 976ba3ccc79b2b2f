//! Completion queues.

use std::mem::MaybeUninit;
use std::os::raw::c_int;
use std::ptr::NonNull;

use super::ffi;
use crate::error::{BackendResult, Errno};
use crate::{Completion, WcOpcode, WcStatus};

/// Completions taken by one call of the provider.
const CHUNK: usize = 16;

/// `struct ibv_cq`, with the provider's operation at hand.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    raw: NonNull<ffi::ibv_cq>,
    poll: ffi::PollCq,
}

// SAFETY: libibverbs allows polling from any thread; providers lock the queue.
unsafe impl Send for CompletionQueue {}
// SAFETY: as for `Send`.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// # Safety
    ///
    /// `raw` is a live queue, which the new handle owns.
    pub(super) unsafe fn new(raw: NonNull<ffi::ibv_cq>) -> BackendResult<Self> {
        // SAFETY: a live queue points to its context, whose operations are set once and for all.
        let poll = unsafe { (*(*raw.as_ptr()).context).ops.poll_cq };
        match poll {
            Some(poll) => Ok(Self { raw, poll }),
            None => {
                // SAFETY: the queue is alive and nobody has seen it.
                let _ = unsafe { ffi::ibv_destroy_cq(raw.as_ptr()) };
                Err(Errno(libc::EOPNOTSUPP))
            }
        }
    }

    pub(super) fn raw(&self) -> NonNull<ffi::ibv_cq> {
        self.raw
    }

    pub(crate) fn event_key(&self) -> u64 {
        self.raw.as_ptr() as u64
    }

    pub(crate) fn poll(&self, completions: &mut [Completion]) -> BackendResult<usize> {
        let mut raw = [const { MaybeUninit::<ffi::ibv_wc>::uninit() }; CHUNK];
        let head: *mut ffi::ibv_wc = raw.as_mut_ptr().cast();
        let mut taken = 0;
        while taken < completions.len() {
            let room = (completions.len() - taken).min(CHUNK);
            // SAFETY: the queue is alive and the array has room for as many. All zero is a value
            // of every field; providers leave fields of failed work unwritten, and nothing
            // uninitialised must be read below.
            let count = unsafe {
                head.write_bytes(0, room);
                (self.poll)(self.raw.as_ptr(), room as c_int, head)
            };
            if count < 0 {
                if taken > 0 {
                    // These are not to be lost. A broken queue fails again at the next call.
                    return Ok(taken);
                }
                ffi::check(count)?;
            }
            let count = (count as usize).min(room);
            // SAFETY: `count` is at most `room`, so that these were written above.
            let found = unsafe { std::slice::from_raw_parts(head, count) };
            for (to, from) in completions[taken..].iter_mut().zip(found) {
                *to = completion(from);
            }
            taken += count;
            if count < room {
                break;
            }
        }
        Ok(taken)
    }

    pub(crate) fn destroy(self) -> BackendResult<()> {
        // SAFETY: the queue is alive, and the safe layer has destroyed the queue pairs that use
        // it. Events about it are acknowledged, or will be at once, by `next_event`.
        ffi::check(unsafe { ffi::ibv_destroy_cq(self.raw.as_ptr()) })
    }
}

fn completion(raw: &ffi::ibv_wc) -> Completion {
    Completion {
        wr_id: raw.wr_id,
        status: WcStatus::from_raw(raw.status),
        vendor_err: raw.vendor_err,
        opcode: WcOpcode::from_raw(raw.opcode),
        byte_len: raw.byte_len,
        qp_num: raw.qp_num,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        static CALLS: Cell<usize> = const { Cell::new(0) };
        /// Completions that the provider has left, or what it returns instead.
        static LEFT: Cell<c_int> = const { Cell::new(0) };
    }

    /// Gives completions numbered down to 1, each of a status and opcode that nobody knows.
    unsafe extern "C" fn poll_cq(
        _: *mut ffi::ibv_cq,
        room: c_int,
        place: *mut ffi::ibv_wc,
    ) -> c_int {
        CALLS.set(CALLS.get() + 1);
        let left = LEFT.get();
        if left < 0 {
            return left;
        }
        let count = left.min(room);
        for index in 0..count {
            // SAFETY: there is room for `room`.
            unsafe {
                let raw = &mut *place.add(index as usize);
                raw.wr_id = (left - index) as u64;
                raw.status = 99;
                raw.opcode = 200;
            }
        }
        LEFT.set(left - count);
        count
    }

    fn poll(left: c_int, room: usize) -> (BackendResult<usize>, Vec<Completion>) {
        CALLS.set(0);
        LEFT.set(left);
        let queue = CompletionQueue {
            raw: NonNull::dangling(),
            poll: poll_cq,
        };
        let mut completions = vec![Completion::EMPTY; room];
        (queue.poll(&mut completions), completions)
    }

    #[test]
    fn numbers_that_nobody_knows_are_values() {
        let (count, completions) = poll(1, 4);
        assert_eq!(count, Ok(1));
        assert_eq!(completions[0].status, WcStatus::Other(99));
        assert_eq!(completions[0].opcode, WcOpcode::Other(200));
        // What the provider left alone reads as zero.
        assert_eq!((completions[0].vendor_err, completions[0].qp_num), (0, 0));
    }

    #[test]
    fn as_many_are_taken_as_fit_in_as_few_calls() {
        for (left, room, taken, calls) in [
            (0, 0, 0, 0),
            (0, 5, 0, 1),
            (5, 5, 5, 1),
            (16, 16, 16, 1),
            (17, 40, 17, 2),
            (100, 40, 40, 3),
        ] {
            let (count, completions) = poll(left, room);
            assert_eq!(count, Ok(taken), "{left} in {room}");
            assert_eq!(CALLS.get(), calls, "{left} in {room}");
            assert_eq!(LEFT.get() as usize, left as usize - taken);
            for (index, completion) in completions[..taken].iter().enumerate() {
                assert_eq!(completion.wr_id, (left as usize - index) as u64);
            }
        }
    }

    #[test]
    fn a_broken_queue_is_an_error() {
        assert_eq!(poll(-libc::EIO, 4).0, Err(Errno(libc::EIO)));
        ffi::clear_errno();
        assert_eq!(poll(-1, 4).0, Err(Errno(libc::EIO)));
    }
}
