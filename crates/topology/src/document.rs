//! Reading JSON documents that users write: bounded, with errors that say where.

use std::io::Read as _;
use std::path::Path;

use crate::TopologyError;

/// Longest document in bytes; the longest real one, a table of 1 024 rows, has a tenth of it.
const BYTES_MAX: u64 = 4 * 1024 * 1024;

/// The text of a file.
pub(crate) fn read(path: &Path) -> Result<String, TopologyError> {
    let fail = |source| TopologyError::Read {
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(fail)?;
    let mut text = String::new();
    let bytes = file.take(BYTES_MAX + 1).read_to_string(&mut text);
    if bytes.map_err(fail)? as u64 > BYTES_MAX {
        let reason = format!("longer than {BYTES_MAX} bytes");
        return Err(fail(std::io::Error::other(reason)));
    }
    Ok(text)
}

/// Where and why a text is not what it should be.
pub(crate) fn malformed(document: &str, error: &serde_json::Error) -> TopologyError {
    let reason = error.to_string();
    // The place has fields of its own.
    let place = format!(" at line {} column {}", error.line(), error.column());
    TopologyError::Malformed {
        document: document.to_owned(),
        line: error.line(),
        // At the very start of a line there are no columns yet.
        column: error.column().max(1),
        reason: reason.strip_suffix(&place).unwrap_or(&reason).to_owned(),
    }
}
