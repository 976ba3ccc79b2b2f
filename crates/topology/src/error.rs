//! What can go wrong.

use std::io;
use std::path::PathBuf;

/// A setting whose value cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{variable}={value:?} cannot be used: expected {expected}; correct it or unset it")]
pub struct SettingError {
    /// The variable or option.
    pub variable: String,
    /// Its value, cut to 128 characters.
    pub value: String,
    /// What it may be.
    pub expected: String,
}

impl SettingError {
    pub(crate) fn new(
        variable: impl Into<String>,
        value: &str,
        expected: impl Into<String>,
    ) -> Self {
        Self {
            variable: variable.into(),
            value: value.chars().take(128).collect(),
            expected: expected.into(),
        }
    }
}

/// What can go wrong in finding out about NICs and memory. Choosing a GID has an error of its own,
/// [`GidError`](crate::gid::GidError).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A setting cannot be used.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A document does not have its form.
    #[error("{document}{}: {reason}", place(*line, *column))]
    Malformed {
        /// The file's name, or what else the text is.
        document: String,
        /// Line, from 1; 0 if the fault is nowhere in particular.
        line: usize,
        /// Column, from 1; 0 if the fault is nowhere in particular.
        column: usize,
        /// What is wrong and what is expected.
        reason: String,
    },
    /// Devices were named that this machine does not have, or that cannot be used.
    #[error(
        "{source_of_names} names {}, which this machine does not have or may not use; usable: {}",
        unknown.join(", "),
        if usable.is_empty() { "none".to_owned() } else { usable.join(", ") }
    )]
    UnknownDevices {
        /// Who named them: a variable, an option, a file.
        source_of_names: String,
        /// The names.
        unknown: Vec<String>,
        /// What could have been named.
        usable: Vec<String>,
    },
}

/// Where a fault is, if it is anywhere in particular.
fn place(line: usize, column: usize) -> String {
    if line == 0 {
        String::new()
    } else {
        format!(", line {line}, column {column}")
    }
}

impl TopologyError {
    /// Whether the same call may work later without anybody changing a setting or a file.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Read { source, .. } => source.kind() == io::ErrorKind::Interrupted,
            // Devices come and go.
            Self::UnknownDevices { .. } => true,
            Self::Setting(_) | Self::Malformed { .. } => false,
        }
    }
}
