//! Watches over HTTP: long polls at Rerail's server, questions to foreign ones.

use std::sync::Arc;
use std::time::Duration;

use reqwest::{Method, StatusCode};

use super::{Inner, Kind, answers, encoded};
use crate::backoff::Backoff;
use crate::store::{Record, Version, WatchEvent, WatchSink};

/// How long the server may hold a long poll.
const WAIT: Duration = Duration::from_secs(20);
/// What the answer may take beyond that.
const GRACE: Duration = Duration::from_secs(5);

/// Runs until the watch is dropped, which aborts the task.
pub(super) async fn run(inner: Arc<Inner>, prefix: String, sink: WatchSink) {
    let mut backoff = Backoff::for_stores();
    loop {
        match inner.known_kind("watch").await {
            Ok(Kind::Rerail) => long_poll(&inner, &prefix, &sink, &mut backoff).await,
            Ok(_) => poll(&inner, &prefix, &sink).await,
            Err(error) => tracing::debug!(%error, "watch waits for the store"),
        }
        backoff.pause().await;
    }
}

/// Follows Rerail's server until it turns out to be another one.
async fn long_poll(inner: &Inner, prefix: &str, sink: &WatchSink, backoff: &mut Backoff) {
    let mut after: Option<u64> = None;
    loop {
        let mut path = format!(
            "/watch?prefix={}&wait_ms={}",
            encoded(prefix),
            WAIT.as_millis()
        );
        if let Some(after) = after {
            path += &format!("&after={after}");
        }
        let request = inner.request(Method::GET, &path);
        let answer = match inner.send_within("watch", request, WAIT + GRACE).await {
            Ok(answer) if answer.status == StatusCode::OK => answer,
            Ok(answer) => {
                let error = inner.unexpected("watch", prefix, &answer);
                tracing::warn!(%error, "watch refused, trying again");
                if inner.kind() != Kind::Rerail {
                    return;
                }
                backoff.pause().await;
                continue;
            }
            Err(error) => {
                // The server remembers what happened since `after`, or says that it does not.
                tracing::debug!(%error, "watch interrupted, connecting again");
                backoff.pause().await;
                continue;
            }
        };
        match answers::events(&answer.body) {
            Ok(answer) => {
                backoff.reset();
                after = Some(answer.revision);
                if answer.resync {
                    sink.push(WatchEvent::Resync);
                }
                for event in answer.events {
                    sink.push(event);
                }
            }
            Err(reason) => {
                tracing::warn!(reason, "malformed answer to a watch, trying again");
                after = None;
                backoff.pause().await;
            }
        }
    }
}

/// Asks a foreign server again and again for the one key that `prefix` names, until it turns out
/// to be Rerail's.
async fn poll(inner: &Inner, prefix: &str, sink: &WatchSink) {
    let mut seen: Option<Record> = None;
    let mut first = true;
    loop {
        // Where the server gives an `ETag`, an unchanged record is not sent again.
        let etag = seen.as_ref().map(|record| &record.version);
        let etag = etag.filter(|version| is_etag(version));
        let found = inner.get_unless(prefix, etag).await;
        if inner.kind() == Kind::Rerail {
            return;
        }
        match found {
            Ok(None) => {}
            Ok(Some(record)) => {
                let before = seen.replace(record.clone());
                if before.is_none_or(|before| before.value != record.value) {
                    if !std::mem::take(&mut first) {
                        sink.push(WatchEvent::Put(record));
                    } else {
                        sink.push(WatchEvent::Resync);
                    }
                }
            }
            Err(error) if error.is_not_found() => {
                let existed = seen.take().is_some();
                if std::mem::take(&mut first) {
                    sink.push(WatchEvent::Resync);
                } else if existed {
                    sink.push(WatchEvent::Delete {
                        key: prefix.to_owned(),
                    });
                }
            }
            // What was seen before stays as it is: an outage is no change.
            Err(error) => tracing::debug!(%error, "cannot ask the store for changes"),
        }
        tokio::time::sleep(inner.poll_interval).await;
    }
}

/// Longest `ETag` that is sent back.
const ETAG_BYTES_MAX: usize = 256;

/// True for `"…"` and `W/"…"`; where a server gives none, the value stands for the version.
fn is_etag(version: &Version) -> bool {
    let bytes = version.as_bytes();
    let quoted = bytes.strip_prefix(b"W/").unwrap_or(bytes);
    quoted.len() > 1
        && quoted.starts_with(b"\"")
        && quoted.ends_with(b"\"")
        && bytes.len() <= ETAG_BYTES_MAX
        && bytes.iter().all(u8::is_ascii_graphic)
}
