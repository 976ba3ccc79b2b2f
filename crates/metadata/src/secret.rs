//! Passwords and tokens, which must never be printed.

use std::fmt;

use crate::error::MetadataError;

/// A text that neither `Debug` nor `Display` shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Takes the text over.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Reads a file, without the newline at its end. `setting` is what errors name.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Setting`] if the file cannot be read or is empty.
    pub fn from_file(setting: &str, path: &str) -> Result<Self, MetadataError> {
        let error = |reason: String| MetadataError::Setting {
            name: setting.into(),
            reason: format!("{path}: {reason}"),
        };
        let text = std::fs::read_to_string(path).map_err(|cause| error(cause.to_string()))?;
        match text.trim_end_matches(['\r', '\n']) {
            "" => Err(error("the file is empty".into())),
            text => Ok(Self::new(text)),
        }
    }

    /// The text itself, for handing to a client library only.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
