//! Why a document was refused.

/// A document that does not have the form of the wire.
///
/// Every variant names the member it is about, written as a path such as `buffers[3].rkey[1]`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DocumentError {
    /// The text is not JSON, or not UTF-8.
    #[error("not JSON at line {line}, column {column}: {reason}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What the parser found.
        reason: String,
    },
    /// A member that must be there is missing.
    #[error("member {field} is missing")]
    Missing {
        /// Path of the member.
        field: String,
    },
    /// A member has another JSON type.
    #[error("member {field}: expected {expected}, found {found}")]
    Type {
        /// Path of the member.
        field: String,
        /// What the wire form asks for.
        expected: &'static str,
        /// The JSON type found.
        found: &'static str,
    },
    /// A member has the right type and a value that is not allowed.
    #[error("member {field}: {reason}")]
    Value {
        /// Path of the member.
        field: String,
        /// Why the value is refused.
        reason: String,
    },
    /// The document is longer than the reader accepts.
    #[error("document of {size} bytes is over the limit of {limit} bytes")]
    TooLarge {
        /// Bytes of the document.
        size: usize,
        /// The reader's limit in bytes.
        limit: usize,
    },
}

impl DocumentError {
    /// Path of the member at fault; `None` when the text as a whole is.
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Missing { field } | Self::Type { field, .. } | Self::Value { field, .. } => {
                Some(field)
            }
            Self::Syntax { .. } | Self::TooLarge { .. } => None,
        }
    }

    pub(crate) fn value(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Value {
            field: field.into(),
            reason: reason.into(),
        }
    }
}
