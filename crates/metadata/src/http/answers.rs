//! Reading the JSON answers of Rerail's server.

use bytes::Bytes;
use serde_json::Value;

use crate::store::{LeaseId, Record, Version, WatchEvent};

/// Events after a revision.
pub(super) struct Events {
    pub(super) revision: u64,
    pub(super) resync: bool,
    pub(super) events: Vec<WatchEvent>,
}

type Parsed<T> = Result<T, String>;

pub(super) fn records(body: &[u8]) -> Parsed<(Vec<Record>, u64)> {
    let mut document = parse(body)?;
    let revision = number(&document, "revision")?;
    let records = list(&mut document, "records")?
        .iter()
        .map(record)
        .collect::<Parsed<Vec<_>>>()?;
    Ok((records, revision))
}

pub(super) fn events(body: &[u8]) -> Parsed<Events> {
    let mut document = parse(body)?;
    let revision = number(&document, "revision")?;
    let resync = document
        .get("resync")
        .and_then(Value::as_bool)
        .unwrap_or(false);
    let events = list(&mut document, "events")?
        .iter()
        .map(|event| match text(event, "type")? {
            "put" => Ok(WatchEvent::Put(record(event)?)),
            "delete" => Ok(WatchEvent::Delete {
                key: text(event, "key")?.into(),
            }),
            other => Err(format!("event of type {other:?}")),
        })
        .collect::<Parsed<Vec<_>>>()?;
    Ok(Events {
        revision,
        resync,
        events,
    })
}

pub(super) fn lease(body: &[u8]) -> Parsed<LeaseId> {
    Ok(LeaseId::new(text(&parse(body)?, "lease")?))
}

fn parse(body: &[u8]) -> Parsed<Value> {
    serde_json::from_slice(body).map_err(|error| format!("not JSON: {error}"))
}

fn text<'value>(value: &'value Value, member: &str) -> Parsed<&'value str> {
    value
        .get(member)
        .and_then(Value::as_str)
        .ok_or_else(|| format!("no text in member {member}"))
}

fn number(value: &Value, member: &str) -> Parsed<u64> {
    value
        .get(member)
        .and_then(Value::as_u64)
        .ok_or_else(|| format!("no number in member {member}"))
}

fn list(value: &mut Value, member: &str) -> Parsed<Vec<Value>> {
    match value.get_mut(member).map(Value::take) {
        Some(Value::Array(items)) => Ok(items),
        _ => Err(format!("no list in member {member}")),
    }
}

fn record(value: &Value) -> Parsed<Record> {
    let bytes = match value.get("value_hex") {
        Some(_) => from_hex(text(value, "value_hex")?)?,
        None => Bytes::copy_from_slice(text(value, "value")?.as_bytes()),
    };
    // The form of an ETag, so that it can be sent back as one.
    let version = format!("\"{}\"", number(value, "version")?);
    Ok(Record {
        key: text(value, "key")?.into(),
        value: bytes,
        version: Version::from_bytes(version),
    })
}

fn from_hex(text: &str) -> Parsed<Bytes> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    text.as_bytes()
        .chunks(2)
        .map(|pair| match pair {
            &[high, low] => Some((digit(high)? << 4 | digit(low)?) as u8),
            _ => None,
        })
        .collect::<Option<Vec<u8>>>()
        .map(Bytes::from)
        .ok_or_else(|| "value_hex is not hex".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_are_none_are_errors() {
        for body in [
            "",
            "[]",
            "{}",
            r#"{"revision":1}"#,
            r#"{"revision":"1","events":[]}"#,
            r#"{"revision":1,"events":[{"type":"put"}]}"#,
            r#"{"revision":1,"events":[{"type":"x","key":"k"}]}"#,
            r#"{"revision":1,"events":[{"type":"put","key":"k","version":1,"value_hex":"abc"}]}"#,
        ] {
            assert!(events(body.as_bytes()).is_err(), "{body}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_come_as_hex() {
        let body = br#"{"revision":3,"records":[{"key":"k","version":2,"value_hex":"00fF"}]}"#;
        let (records, revision) = records(body).expect("valid");
        assert_eq!(revision, 3);
        assert_eq!(records[0].value.as_ref(), [0, 255]);
        assert_eq!(records[0].version.as_bytes(), b"\"2\"");
    }
}
