//! Detection of a forked child.
//!
//! A child shares the parent's device files and mapped doorbells, but none of its threads: a verb
//! called there could damage the parent's queues. Every call of this crate asks [`check`] first.
//! Deliberately not here: `vfork` and `posix_spawn`, whose children run no Rust code before
//! `exec` and whose memory is the parent's own.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::VerbsError;

/// Set by the `pthread_atfork` handler, in the child only.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn mark_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Makes [`is_child`] true in every process forked from here on. Called when a context is opened;
/// calls after the first do nothing.
pub(crate) fn watch() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handler stores to an atomic and nothing else, which is allowed between
        // fork and exec. glibc drops the handlers of a library that is unloaded.
        let rc = unsafe { libc::pthread_atfork(None, None, Some(mark_child)) };
        if rc != 0 {
            tracing::warn!(
                errno = rc,
                "pthread_atfork failed: a forked child is not recognised"
            );
        }
    });
}

/// True in a process that was forked after [`watch`].
pub(crate) fn is_child() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// `ForkedProcess` in a forked child. One relaxed load, cheap enough for posting and polling.
pub(crate) fn check() -> Result<(), VerbsError> {
    if is_child() {
        Err(VerbsError::ForkedProcess)
    } else {
        Ok(())
    }
}
