//! Completion queues.

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
        // SAFETY: all zero is a value of every field. Providers leave fields of failed work
        // unwritten; so nothing uninitialised is ever read.
        let mut raw: [ffi::ibv_wc; CHUNK] = unsafe { std::mem::zeroed() };
        let mut taken = 0;
        while taken < completions.len() {
            let room = (completions.len() - taken).min(CHUNK);
            // SAFETY: the queue is alive and the array has room for as many.
            let count = unsafe { (self.poll)(self.raw.as_ptr(), room as c_int, raw.as_mut_ptr()) };
            if count < 0 {
                if taken > 0 {
                    // These are not to be lost. A broken queue fails again at the next call.
                    return Ok(taken);
                }
                ffi::check(count)?;
            }
            let count = (count as usize).min(room);
            for (to, from) in completions[taken..].iter_mut().zip(&raw[..count]) {
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
