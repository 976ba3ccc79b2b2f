//! JSON of the answers that only Rerail clients ask for.

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::table::{Event, Stored};

/// `{"revision", "records"}`.
pub(super) fn records<'table>(
    revision: u64,
    records: impl Iterator<Item = (&'table String, &'table Stored)>,
) -> Vec<u8> {
    let records: Vec<Value> = records
        .map(|(key, stored)| {
            let mut members = Map::new();
            members.insert("key".into(), key.as_str().into());
            members.insert("version".into(), stored.version.into());
            insert_value(&mut members, &stored.value);
            members.into()
        })
        .collect();
    to_vec(&json!({"revision": revision, "records": records}))
}

/// `{"revision", "resync", "events"}`.
pub(super) fn events(revision: u64, resync: bool, events: &[Event]) -> Vec<u8> {
    let events: Vec<Value> = events
        .iter()
        .map(|event| {
            let mut members = Map::new();
            members.insert("key".into(), event.key.as_str().into());
            let kind = match &event.value {
                Some(value) => {
                    members.insert("version".into(), event.revision.into());
                    insert_value(&mut members, value);
                    "put"
                }
                None => "delete",
            };
            members.insert("type".into(), kind.into());
            members.into()
        })
        .collect();
    to_vec(&json!({"revision": revision, "resync": resync, "events": events}))
}

/// `{"lease", "ttl_ms"}`.
pub(super) fn lease(id: &str, ttl_ms: u64) -> Vec<u8> {
    to_vec(&json!({"lease": id, "ttl_ms": ttl_ms}))
}

fn insert_value(members: &mut Map<String, Value>, value: &Bytes) {
    match std::str::from_utf8(value) {
        Ok(text) => members.insert("value".into(), text.into()),
        Err(_) => {
            let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
            members.insert("value_hex".into(), hex.into())
        }
    };
}

fn to_vec(value: &impl Serialize) -> Vec<u8> {
    // Writing a `Value` to memory cannot fail.
    serde_json::to_vec(value).unwrap_or_default()
}
