//! The log of writes: each change of a record in a line of its own, for whoever counts from
//! outside what engines write.
//!
//! A line is a JSON object: `time_ms` since 1970, `version` that the record has now or its removal
//! has, `action` (`put`, `delete`), `key`, `client` (address and port of who asked for it; null for
//! the end of a lease) and, of a put, `value` as JSON, or as hex under `value_hex` where it is not.
//! Tokens and leases never get here. Lines stand in the order in which the changes took effect.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::Value;

use super::table::Change;

/// Only the server's user may read it: records name keys of memory.
const MODE: u32 = 0o600;

/// An open log.
#[derive(Debug)]
pub(super) struct WritesLog {
    file: Mutex<File>,
}

#[derive(Serialize)]
struct Line<'a> {
    time_ms: u64,
    version: u64,
    action: &'static str,
    key: &'a str,
    client: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_hex: Option<String>,
}

impl WritesLog {
    /// Appends to the file at `path`, which is made if it is not there.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.create(true).append(true).mode(MODE).open(path)?;
        Ok(Self {
            file: Mutex::new(file),
        })
    }

    /// Writes down what one step changed, asked for by `client`. A line that cannot be written is
    /// missing, and said to be.
    pub(super) fn note(&self, changes: &[Change], client: Option<SocketAddr>) {
        let mut text = Vec::new();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let time_ms = now.map_or(0, |since| since.as_millis() as u64);
        for change in changes {
            let line = match change {
                Change::Put { key, stored } => {
                    let value: Option<Value> = serde_json::from_slice(&stored.value).ok();
                    Line {
                        time_ms,
                        version: stored.version,
                        action: "put",
                        key,
                        client,
                        value_hex: value.is_none().then(|| hex(&stored.value)),
                        value,
                    }
                }
                Change::Delete { key, revision } => Line {
                    time_ms,
                    version: *revision,
                    action: "delete",
                    key,
                    client,
                    value: None,
                    value_hex: None,
                },
                Change::GrantLease { .. } | Change::EndLease { .. } => continue,
            };
            if let Err(error) = serde_json::to_writer(&mut text, &line) {
                tracing::error!(%error, line.key, "a write is missing in the log of writes");
                continue;
            }
            text.push(b'\n');
        }
        if text.is_empty() {
            return;
        }
        // One that panicked half-way left at most half a line.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = file.write_all(&text) {
            tracing::error!(%error, "writes are missing in the log of writes");
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::table::Stored;
    use super::*;

    #[test]
    fn every_write_is_a_line_and_a_lease_is_in_none() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("writes");
        let put = |version, value: &'static [u8]| Change::Put {
            key: "k".into(),
            stored: Stored {
                value: Bytes::from_static(value),
                version,
                lease: Some("lease".into()),
            },
        };
        let client = "127.0.0.1:7".parse().ok();
        let delete = || Change::Delete {
            key: "old".into(),
            revision: 1,
        };
        let log = WritesLog::open(&path).expect("a file");
        log.note(&[delete()], None);
        log.note(&[put(2, b"{\"a\": 1}\n")], client);
        log.note(&[Change::EndLease { id: "lease".into() }, delete()], client);
        drop(log);
        // Opened again after a restart it goes on.
        WritesLog::open(&path)
            .expect("a file")
            .note(&[put(3, b"\xff")], None);
        let text = std::fs::read_to_string(&path).expect("text");
        assert!(!text.contains("lease"), "{text}");
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("an object"))
            .collect();
        let all = |name: &str| {
            lines
                .iter()
                .map(|line| line[name].clone())
                .collect::<Vec<_>>()
        };
        let json = |text: &str| serde_json::from_str::<Vec<Value>>(text).expect("json");
        assert_eq!(all("version"), json("[1, 2, 1, 3]"));
        assert_eq!(all("action"), json(r#"["delete", "put", "delete", "put"]"#));
        assert_eq!(all("key"), json(r#"["old", "k", "old", "k"]"#));
        let clients = json(r#"[null, "127.0.0.1:7", "127.0.0.1:7", null]"#);
        assert_eq!(all("client"), clients);
        assert_eq!(lines[1]["value"]["a"], 1);
        assert_eq!(lines[3]["value_hex"], "ff");
    }
}
