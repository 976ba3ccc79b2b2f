//! Errors of the verbs API.

use std::sync::Arc;
use std::time::Duration;

use crate::OutOfBounds;

/// Why a verb could not be carried out.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// The verb was called and failed.
    #[error("{verb} on {device}{} failed: {} (errno {errno}){}",
        at_port(*.port), text(*.errno), hint(verb, *.errno))]
    Verb {
        /// Name of the C function, with the transition for `ibv_modify_qp`.
        verb: &'static str,
        /// Name of the device.
        device: Arc<str>,
        /// Port that the verb was about, where it was about one.
        port: Option<u32>,
        /// Error number of the operating system.
        errno: i32,
    },
    /// This process was forked after devices were opened. The objects belong to the parent: a
    /// child must open devices itself, after `exec`.
    #[error("verbs objects cannot be used in a forked child; open devices after exec")]
    ForkedProcess,
    /// The range to be registered lies outside its memory.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
    /// Objects of two contexts were mixed in one call.
    #[error("{what} belongs to another context than the one of {device} that is to use it")]
    ForeignObject {
        /// What was given.
        what: &'static str,
        /// Device of the context that was to use it.
        device: Arc<str>,
    },
    /// The control thread has as many jobs waiting as it may have.
    #[error("the control thread of {device} has {jobs_max} jobs waiting; it may hang in a verb")]
    ControlBusy {
        /// Name of the device.
        device: Arc<str>,
        /// Most jobs that may wait.
        jobs_max: usize,
    },
    /// The control thread has ended, because the context is closed.
    #[error("the context of {device} is closed")]
    ControlClosed {
        /// Name of the device.
        device: Arc<str>,
    },
    /// The control thread has not answered in time. The verb may still be carried out.
    #[error("the control thread of {device} gave no answer within {} ms", .waited.as_millis())]
    NoAnswer {
        /// Name of the device.
        device: Arc<str>,
        /// How long was waited.
        waited: Duration,
    },
    /// The control thread dropped the job: it panicked, or the context was closed first.
    #[error("a job of the control thread of {device} ended without an answer")]
    JobLost {
        /// Name of the device.
        device: Arc<str>,
    },
    /// No thread could be started.
    #[error("the control thread of {device} could not be started: {} (errno {errno})", text(*.errno))]
    Thread {
        /// Name of the device.
        device: Arc<str>,
        /// Error number of the operating system, 0 when it gave none.
        errno: i32,
    },
}

impl VerbsError {
    /// True when the same call can succeed later without anything else being changed: a full
    /// queue, a lack of memory, an interrupted or timed-out call.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Verb { errno, .. } | Self::Thread { errno, .. } => matches!(
                *errno,
                libc::EAGAIN | libc::EINTR | libc::EBUSY | libc::ENOMEM | libc::ETIMEDOUT
            ),
            Self::ControlBusy { .. } | Self::NoAnswer { .. } => true,
            Self::ForkedProcess
            | Self::OutOfBounds(_)
            | Self::ForeignObject { .. }
            | Self::ControlClosed { .. }
            | Self::JobLost { .. } => false,
        }
    }

    /// The operating system's error number, where a call gave one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Verb { errno, .. } | Self::Thread { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

/// A batch of work requests that was not posted as a whole.
///
/// Of the requests given, the first [`posted`](Self::posted) are in the send queue and complete
/// like any other; the next [`in_doubt`](Self::in_doubt) may be; the rest are not and never will
/// be.
///
/// Requests are in doubt when the provider reports an error without naming the request that it
/// refused. soft-RoCE's does so when the requests are in the queue but ringing the doorbell
/// failed: they may yet be carried out, or flushed when the queue pair goes to the error state.
/// Move the queue pair there, and treat them as in flight until it is drained.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{posted} work requests were posted and {in_doubt} may have been: {cause}")]
pub struct PostError {
    /// Requests at the head of the batch that are in the send queue.
    pub posted: usize,
    /// Requests after them whose fate is not known; 0 in the ordinary case.
    pub in_doubt: usize,
    /// Why the rest are not.
    #[source]
    pub cause: VerbsError,
}

impl PostError {
    /// The provider's error number; `None` when no provider was called.
    pub fn errno(&self) -> Option<i32> {
        self.cause.errno()
    }

    /// True when the send queue had no room: post again once completions have been polled.
    pub fn is_queue_full(&self) -> bool {
        self.errno() == Some(libc::ENOMEM) && self.in_doubt == 0
    }
}

/// An error number as a backend reports it; the safe layer adds verb, device and port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Errno(pub(crate) i32);

/// Outcome of a backend's call.
pub(crate) type BackendResult<T> = Result<T, Errno>;

/// A backend's refusal of a batch: how many were posted, how many may have been, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PostRefusal {
    pub(crate) posted: usize,
    pub(crate) in_doubt: usize,
    pub(crate) errno: Errno,
}

fn at_port(port: Option<u32>) -> String {
    port.map_or_else(String::new, |port| format!(" port {port}"))
}

/// What to look at when memory cannot be registered: the system's words alone lead nowhere (report
/// R05).
fn hint(verb: &str, errno: i32) -> &'static str {
    match errno {
        libc::EFAULT if verb.starts_with("ibv_reg_mr") => {
            "; the addresses are no host memory of this process: memory of a GPU needs the kernel \
             module that lends it to NICs (nvidia_peermem) and an allocator that it knows, or to \
             be registered as a dma-buf"
        }
        libc::ENOMEM if verb.starts_with("ibv_reg_") => {
            "; raise the limit of locked memory (ulimit -l), or register fewer regions"
        }
        libc::EOPNOTSUPP if verb.starts_with("ibv_reg_dmabuf") => {
            "; this kernel or driver registers no dma-buf: load nvidia_peermem and register the \
             address"
        }
        _ => "",
    }
}

/// The system's words for an error number, without the number.
fn text(errno: i32) -> String {
    let with_number = std::io::Error::from_raw_os_error(errno).to_string();
    match with_number.find(" (os error") {
        Some(end) => with_number[..end].to_owned(),
        None => with_number,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verb(errno: i32, port: Option<u32>) -> VerbsError {
        VerbsError::Verb {
            verb: "ibv_modify_qp(RTR)",
            device: Arc::from("rxe_a0"),
            port,
            errno,
        }
    }

    #[test]
    fn messages_name_verb_device_port_and_cause() {
        assert_eq!(
            verb(libc::ETIMEDOUT, Some(1)).to_string(),
            "ibv_modify_qp(RTR) on rxe_a0 port 1 failed: Connection timed out (errno 110)"
        );
        assert_eq!(
            verb(libc::ENODATA, None).to_string(),
            "ibv_modify_qp(RTR) on rxe_a0 failed: No data available (errno 61)"
        );
    }

    #[test]
    fn r05_memory_that_cannot_be_registered_says_what_to_look_at() {
        let refused = |verb, errno| {
            let error = VerbsError::Verb {
                verb,
                device: Arc::from("mlx5_0"),
                port: None,
                errno,
            };
            error.to_string()
        };
        for (verb, errno, words) in [
            ("ibv_reg_mr_iova2", libc::EFAULT, "nvidia_peermem"),
            ("ibv_reg_mr_iova2", libc::ENOMEM, "ulimit -l"),
            ("ibv_reg_dmabuf_mr", libc::EOPNOTSUPP, "nvidia_peermem"),
        ] {
            let text = refused(verb, errno);
            assert!(
                text.contains(words) && text.contains(&format!("(errno {errno})")),
                "{text}"
            );
        }
        assert!(!refused("ibv_create_qp", libc::EFAULT).contains("nvidia_peermem"));
    }

    #[test]
    fn only_passing_conditions_are_retryable() {
        assert!(verb(libc::EAGAIN, None).is_retryable());
        assert!(verb(libc::ETIMEDOUT, None).is_retryable());
        assert!(!verb(libc::EINVAL, None).is_retryable());
        assert!(!VerbsError::ForkedProcess.is_retryable());
    }
}
