//! A watch on etcd that outlives its streams.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, WatchOptions, WatchResponse, WatchStream};

use super::members::{Members, causes};
use super::{ANSWER_BYTES_MAX, record};
use crate::backoff::Backoff;
use crate::store::{WatchEvent, WatchSink};

/// Longest time for a new watch to be confirmed.
const START_TIMEOUT: Duration = Duration::from_secs(3);

/// Where to go on.
#[derive(Clone, Copy)]
struct Position {
    cluster: u64,
    revision: i64,
}

/// Why a stream ended.
enum Ended {
    /// The events after our position are gone, or it is not in this history.
    Lost(&'static str),
    Broken(String),
}

/// Runs until the watch is dropped, which aborts the task.
pub(super) async fn run(members: Arc<Members>, prefix: String, sink: WatchSink) {
    let mut backoff = Backoff::for_stores();
    let mut position: Option<Position> = None;
    loop {
        let member = members.current();
        let ended = match start(&members, member, &prefix, position).await {
            Ok((stream, first)) => follow(stream, first, &mut position, &sink, &mut backoff).await,
            Err(ended) => ended,
        };
        match ended {
            Ended::Lost(reason) => {
                tracing::info!(prefix, reason, "watch starts anew");
                position = None;
            }
            Ended::Broken(reason) => {
                tracing::debug!(prefix, reason, "watch interrupted, connecting again");
                members.give_up(member);
            }
        }
        backoff.pause().await;
    }
}

async fn start(
    members: &Members,
    member: usize,
    prefix: &str,
    position: Option<Position>,
) -> Result<(WatchStream, WatchResponse), Ended> {
    let starting = async {
        let client: Client = members.client(member).await?;
        let mut options = WatchOptions::new().with_progress_notify();
        options = if prefix.is_empty() {
            options.with_all_keys()
        } else {
            options.with_prefix()
        };
        if let Some(position) = position {
            options = options.with_start_revision(position.revision + 1);
        }
        let mut stream = client
            .watch_client()
            .max_decoding_message_size(ANSWER_BYTES_MAX)
            .watch(prefix, Some(options))
            .await?;
        let first = stream.message().await?;
        Ok((stream, first))
    };
    match tokio::time::timeout(START_TIMEOUT, starting).await {
        Ok(Ok((stream, Some(first)))) => Ok((stream, first)),
        Ok(Ok((_, None))) => Err(Ended::Broken("the stream ended at once".into())),
        Ok(Err(error)) => Err(Ended::Broken(causes(&error))),
        Err(_) => Err(Ended::Broken("no answer".into())),
    }
}

async fn follow(
    mut stream: WatchStream,
    first: WatchResponse,
    position: &mut Option<Position>,
    sink: &WatchSink,
    backoff: &mut Backoff,
) -> Ended {
    let Some(header) = first.header() else {
        return Ended::Broken("an answer without a header".into());
    };
    if first.canceled() {
        return cancelled(&first);
    }
    let here = Position {
        cluster: header.cluster_id(),
        revision: header.revision(),
    };
    match *position {
        Some(last) if last.cluster != here.cluster => return Ended::Lost("another cluster"),
        Some(last) if last.revision > here.revision => {
            // A cluster that was made anew counts from 1, also under the same id.
            return Ended::Lost("the store's revision went back");
        }
        // The events after the position come, too. The Resync is for a cluster that was made
        // anew and has been filled beyond our revision meanwhile: nothing shows that.
        Some(_) => {}
        None => *position = Some(here),
    }
    sink.push(WatchEvent::Resync);
    backoff.reset();
    let mut message = Ok(Some(first));
    loop {
        match message {
            Ok(Some(answer)) if answer.canceled() => return cancelled(&answer),
            Ok(Some(answer)) => {
                for event in answer.events() {
                    let Some(kv) = event.kv() else { continue };
                    // Version 0 marks a deletion. The library's own accessor panics on kinds
                    // that it does not know.
                    let told = record(kv).map(|record| match kv.version() {
                        0 => WatchEvent::Delete { key: record.key },
                        _ => WatchEvent::Put(record),
                    });
                    match told {
                        Ok(event) => sink.push(event),
                        Err(reason) => tracing::warn!(reason, "an event that cannot be told"),
                    }
                }
                // The answer that confirms a resumed watch tells the store's revision, while
                // the events up to there are still to come.
                if !answer.created()
                    && let (Some(position), Some(header)) = (position.as_mut(), answer.header())
                {
                    position.revision = position.revision.max(header.revision());
                }
            }
            Ok(None) => return Ended::Broken("the stream ended".into()),
            Err(error) => return Ended::Broken(causes(&error)),
        }
        message = stream.message().await;
    }
}

fn cancelled(answer: &WatchResponse) -> Ended {
    if answer.compact_revision() != 0 {
        Ended::Lost("the revisions after the last one seen are compacted")
    } else {
        Ended::Broken(format!(
            "cancelled by the store: {}",
            answer.cancel_reason()
        ))
    }
}
