//! What can go wrong with a store.

use std::time::Duration;

use crate::descriptor::DocumentError;
use crate::store::Version;

/// An operation on a store that failed. Messages never contain passwords, tokens or values.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// The store answered: there is no such key.
    #[error("{store}: no record under {key}")]
    NotFound {
        /// The store, without secrets.
        store: String,
        /// The key.
        key: String,
    },
    /// The record is not in the state that the operation asked for.
    #[error("{store}: the record under {key} is not the expected one: {reason}")]
    Conflict {
        /// The store, without secrets.
        store: String,
        /// The key.
        key: String,
        /// What was found instead.
        reason: String,
        /// The version found, where the store told; `None` if the key is absent or it did not.
        current: Option<Version>,
    },
    /// The store cannot be reached or cannot work at the moment. Worth a retry.
    #[error("{store}: cannot {operation} now: {reason}")]
    Unavailable {
        /// The store, without secrets.
        store: String,
        /// What was tried.
        operation: &'static str,
        /// The cause in words.
        reason: String,
    },
    /// No answer within the operation's own deadline. Worth a retry; a write may have happened.
    #[error("{store}: {operation} not answered within {deadline:?}")]
    TimedOut {
        /// The store, without secrets.
        store: String,
        /// What was tried.
        operation: &'static str,
        /// The deadline.
        deadline: Duration,
    },
    /// The store answered and said no: credentials, permission, or a request it does not take.
    #[error("{store}: refused to {operation}: {reason}")]
    Refused {
        /// The store, without secrets.
        store: String,
        /// What was tried.
        operation: &'static str,
        /// The store's words.
        reason: String,
    },
    /// The value is over what the store takes. Found before anything is sent where the limit is
    /// known.
    #[error("{store}: the value of {key} {}; {hint}", too_large(*.size, *.limit))]
    TooLarge {
        /// The store, without secrets.
        store: String,
        /// The key.
        key: String,
        /// Bytes of the value; 0 where they are not known.
        size: usize,
        /// The store's limit in bytes; 0 where it did not say.
        limit: usize,
        /// What the operator can do.
        hint: &'static str,
    },
    /// What the store returned is no answer, or a record is no document.
    #[error("{store}: malformed answer for {key}: {reason}")]
    Malformed {
        /// The store, without secrets.
        store: String,
        /// The key or prefix.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// The lease is over: its records are gone or about to go.
    #[error("{store}: lease {lease} is gone")]
    LeaseLost {
        /// The store, without secrets.
        store: String,
        /// The lease.
        lease: String,
    },
    /// The store cannot do this at all.
    #[error("{store} cannot {operation}: {reason}")]
    Unsupported {
        /// The store, without secrets.
        store: String,
        /// What was asked for.
        operation: &'static str,
        /// Why not.
        reason: String,
    },
    /// A store URL that cannot be understood.
    #[error("store URL {url:?}: {reason}")]
    Url {
        /// The URL, without secrets.
        url: String,
        /// What is wrong and what is known.
        reason: String,
    },
    /// A setting that does not parse or is out of range.
    #[error("setting {name}: {reason}")]
    Setting {
        /// Name of the setting or variable.
        name: String,
        /// Value and range, or why the file cannot be used.
        reason: String,
    },
    /// A document that is about to be written is not valid.
    #[error(transparent)]
    Document(#[from] DocumentError),
}

/// How a value is over a limit, of which stores do not tell everything.
fn too_large(size: usize, limit: usize) -> String {
    match (size, limit) {
        (0, 0) => "is over the limit, which the store does not tell".to_owned(),
        (0, limit) => format!("is over the limit of {limit} bytes"),
        (size, 0) => format!("has {size} bytes, over the limit, which the store does not tell"),
        (size, limit) => format!("has {size} bytes, the limit is {limit}"),
    }
}

impl MetadataError {
    /// True if the same operation may succeed later without anyone's doing.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::TimedOut { .. })
    }

    /// True if the store *answered* that there is no such record. An outage never counts.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }

    /// True if a condition on the record's state did not hold.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_not_known_is_not_said_to_be_nothing() {
        let text = |size, limit| {
            let error = MetadataError::TooLarge {
                store: "http://h".into(),
                key: "k".into(),
                size,
                limit,
                hint: "register fewer buffers",
            };
            error.to_string()
        };
        assert!(text(5, 4).contains("has 5 bytes, the limit is 4; register"));
        for (size, limit) in [(0, 0), (5, 0), (0, 4)] {
            let text = text(size, limit);
            let zero = text.contains("is 0") || text.contains(" 0 bytes");
            assert!(text.contains("over the limit") && !zero, "{text}");
        }
    }
}
