//! JSON of the answers that only Rerail clients ask for.
//!
//! Lists and events are written piece by piece while they are sent: an answer in the making costs
//! a few words for each record, however long the values are and however slow its reader.

use std::iter;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::json;

use super::view::Event;

/// A piece is sent once it has this many bytes.
const PIECE_BYTES: usize = 32 << 10;

/// A record in a list, as it was when the list was made.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) key: Arc<str>,
    pub(super) version: u64,
    pub(super) value: Bytes,
}

/// `{"revision", "records"}`.
pub(super) fn records(
    revision: u64,
    records: Vec<Listed>,
) -> impl Iterator<Item = Bytes> + Send + 'static {
    let head = format!(r#"{{"revision":{revision},"records":["#);
    let items = records.into_iter().enumerate().flat_map(|(index, record)| {
        let comma = if index == 0 { "" } else { "," };
        let (key, version) = (quoted(&record.key), record.version);
        let open = format!(r#"{comma}{{"key":{key},"version":{version},"#);
        around(open, value(record.value), "}")
    });
    pieces(around(head, items, "]}"))
}

/// `{"revision", "resync", "events"}`.
pub(super) fn events(
    revision: u64,
    resync: bool,
    events: Vec<Event>,
) -> impl Iterator<Item = Bytes> + Send + 'static {
    let head = format!(r#"{{"revision":{revision},"resync":{resync},"events":["#);
    let items = events.into_iter().enumerate().flat_map(|(index, event)| {
        let comma = if index == 0 { "" } else { "," };
        let (key, version) = (quoted(&event.key), event.revision);
        let open = match event.value {
            Some(_) => {
                format!(r#"{comma}{{"type":"put","key":{key},"version":{version},"#)
            }
            None => format!(r#"{comma}{{"type":"delete","key":{key}"#),
        };
        around(open, event.value.into_iter().flat_map(value), "}")
    });
    pieces(around(head, items, "]}"))
}

/// `{"lease", "ttl_ms"}`.
pub(super) fn lease(id: &str, ttl_ms: u64) -> String {
    json!({"lease": id, "ttl_ms": ttl_ms}).to_string()
}

fn around(
    open: String,
    inner: impl Iterator<Item = Vec<u8>>,
    close: &str,
) -> impl Iterator<Item = Vec<u8>> {
    let close = close.as_bytes().to_vec();
    iter::once(open.into_bytes())
        .chain(inner)
        .chain(iter::once(close))
}

/// The member with a value: text as it is, other bytes in hex.
fn value(value: Bytes) -> impl Iterator<Item = Vec<u8>> {
    let is_text = std::str::from_utf8(&value).is_ok();
    let open = if is_text {
        r#""value":""#
    } else {
        r#""value_hex":""#
    };
    let mut at = 0;
    let parts = iter::from_fn(move || {
        let rest = value.get(at..).filter(|rest| !rest.is_empty())?;
        let mut end = rest.len().min(PIECE_BYTES);
        if is_text {
            // Never inside a character.
            while end < rest.len() && rest[end] & 0xc0 == 0x80 {
                end += 1;
            }
        }
        let part = &rest[..end];
        at += end;
        Some(if is_text {
            let text = quoted(&String::from_utf8_lossy(part));
            text.as_bytes()[1..text.len() - 1].to_vec()
        } else {
            hex(part)
        })
    });
    around(open.to_owned(), parts, "\"")
}

/// A JSON string, its quotes included.
fn quoted(text: &str) -> String {
    json!(text).to_string()
}

fn hex(bytes: &[u8]) -> Vec<u8> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = |byte: &u8| [byte >> 4, byte & 15].map(|half| DIGITS[usize::from(half)]);
    bytes.iter().flat_map(digits).collect()
}

/// Joins short parts, so that each is worth sending.
fn pieces(
    mut parts: impl Iterator<Item = Vec<u8>> + Send + 'static,
) -> impl Iterator<Item = Bytes> + Send + 'static {
    iter::from_fn(move || {
        let mut piece = parts.next()?;
        while piece.len() < PIECE_BYTES {
            match parts.next() {
                Some(part) => piece.extend_from_slice(&part),
                None => break,
            }
        }
        Some(piece.into())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn parsed(pieces: impl Iterator<Item = Bytes>) -> Value {
        let text: Vec<u8> = pieces.flatten().collect();
        serde_json::from_slice(&text).expect("JSON")
    }

    #[test]
    fn what_is_cut_into_pieces_reads_as_a_whole() {
        // Two bytes a character, an odd one before: pieces would end inside of one.
        let long = format!("x{}\"\u{1}\n", "ä".repeat(PIECE_BYTES));
        let listed = |key: &str, value: &[u8]| Listed {
            key: key.into(),
            version: 7,
            value: Bytes::copy_from_slice(value),
        };
        let bytes: Vec<u8> = (0..=255).cycle().take(3 * PIECE_BYTES + 1).collect();
        let hexed: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let list = vec![
            listed("a\"/\u{0}", long.as_bytes()),
            listed("b", &bytes),
            listed("c", b""),
        ];
        let answer = parsed(records(9, list));
        assert_eq!(
            answer,
            json!({"revision": 9, "records": [
                {"key": "a\"/\u{0}", "version": 7, "value": long},
                {"key": "b", "version": 7, "value_hex": hexed},
                {"key": "c", "version": 7, "value": ""},
            ]})
        );
        assert_eq!(
            parsed(records(1, Vec::new())),
            json!({"revision": 1, "records": []})
        );
    }

    #[test]
    fn events_tell_what_is_put_and_what_is_gone() {
        let event = |revision, value: Option<&'static str>| Event {
            revision,
            key: "k".into(),
            value: value.map(Bytes::from),
        };
        let list = vec![event(3, Some("{}")), event(4, None)];
        assert_eq!(
            parsed(events(4, false, list)),
            json!({"revision": 4, "resync": false, "events": [
                {"type": "put", "key": "k", "version": 3, "value": "{}"},
                {"type": "delete", "key": "k"},
            ]})
        );
    }
}
