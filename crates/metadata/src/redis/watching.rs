//! A watch on Redis: published keys and keyspace events, and after each gap a `Resync`.
//!
//! An event only says that a record may have changed; what it is now is read.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use redis::aio::{PubSubSink, PubSubStream};
use redis::{Msg, RedisResult};

use super::{Inner, escape, scripts, words};
use crate::backoff::Backoff;
use crate::store::{WatchEvent, WatchSink};

/// Events taken together before their records are read.
const BATCH_MAX: usize = 1_024;

/// Runs until the watch is dropped, which aborts the task.
pub(super) async fn run(inner: Arc<Inner>, prefix: String, sink: WatchSink) {
    let mut backoff = Backoff::for_stores();
    loop {
        let reason = match tokio::time::timeout(inner.deadline, subscribe(&inner, &prefix)).await {
            Ok(Ok(subscription)) => {
                backoff.reset();
                subscription.follow(&inner, &prefix, &sink).await
            }
            Ok(Err(reason)) => reason,
            Err(_) => "no answer".into(),
        };
        tracing::debug!(prefix, reason, "watch interrupted, subscribing again");
        backoff.pause().await;
    }
}

struct Subscription {
    control: PubSubSink,
    messages: PubSubStream,
    /// What keyspace events' channels start with; `None` where the server sends none.
    keyspace: Option<String>,
    /// The server's life at the last look.
    life: String,
}

async fn subscribe(inner: &Inner, prefix: &str) -> Result<Subscription, String> {
    let keyspace = if sends_keyspace_events(inner).await {
        Some(format!("__keyspace@{}__:", inner.database))
    } else {
        tracing::warn!(
            store = inner.name,
            "no keyspace events: changes by others are found each {:?}; set \
             notify-keyspace-events to KA for at once",
            inner.poll_interval
        );
        None
    };
    let pubsub = inner
        .client
        .get_async_pubsub()
        .await
        .map_err(|error| words(&error))?;
    let (mut control, messages) = pubsub.split();
    let subscribed = control.subscribe(scripts::CHANNEL).await;
    subscribed.map_err(|error| words(&error))?;
    if let Some(channel) = &keyspace {
        let pattern = format!("{}{}*", escape(channel), escape(prefix));
        let subscribed = control.psubscribe(pattern).await;
        subscribed.map_err(|error| words(&error))?;
    }
    let life = life(inner).await?;
    Ok(Subscription {
        control,
        messages,
        keyspace,
        life,
    })
}

/// False also where the question is not allowed.
async fn sends_keyspace_events(inner: &Inner) -> bool {
    let asked: Result<Vec<String>, _> = inner
        .run("ask for settings", "", |mut connection| async move {
            redis::cmd("CONFIG")
                .arg("GET")
                .arg("notify-keyspace-events")
                .query_async(&mut connection)
                .await
        })
        .await;
    let flags = asked
        .ok()
        .and_then(|pair| pair.into_iter().nth(1))
        .unwrap_or_default();
    flags.contains('K')
        && (flags.contains('A') || ['g', '$', 'x'].iter().all(|&kind| flags.contains(kind)))
}

/// A text that changes when the server loses its data.
async fn life(inner: &Inner) -> Result<String, String> {
    let asked: Result<String, _> = inner
        .run("watch", scripts::LIFE, |mut connection| async move {
            let fresh = uuid::Uuid::now_v7().simple().to_string();
            let _: Option<String> = redis::cmd("SET")
                .arg(scripts::LIFE)
                .arg(fresh)
                .arg("NX")
                .query_async(&mut connection)
                .await?;
            redis::cmd("GET")
                .arg(scripts::LIFE)
                .query_async(&mut connection)
                .await
        })
        .await;
    asked.map_err(|error| error.to_string())
}

impl Subscription {
    /// Follows until something breaks, and says what.
    async fn follow(mut self, inner: &Inner, prefix: &str, sink: &WatchSink) -> String {
        sink.push(WatchEvent::Resync);
        let mut ticks = tokio::time::interval(inner.poll_interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            let first = tokio::select! {
                message = self.messages.next() => match message {
                    Some(message) => message,
                    None => return "the connection ended".into(),
                },
                _ = ticks.tick() => {
                    if let Err(reason) = self.look(inner, sink).await {
                        return reason;
                    }
                    continue;
                }
            };
            let mut changed = BTreeSet::new();
            let mut next = Some(first);
            while let Some(message) = next {
                changed.extend(self.key(&message).filter(|key| key.starts_with(prefix)));
                next = if changed.len() < BATCH_MAX {
                    self.messages.next().now_or_never().flatten()
                } else {
                    None
                };
            }
            if let Err(reason) = tell(inner, changed, sink).await {
                return reason;
            }
        }
    }

    /// The key of the record that a message is about.
    fn key(&self, message: &Msg) -> Option<String> {
        let key = match message.get_channel_name() {
            scripts::CHANNEL => message.get_payload().ok()?,
            channel => channel.strip_prefix(self.keyspace.as_deref()?)?.to_owned(),
        };
        (!scripts::is_internal(&key)).then_some(key)
    }

    /// Checks that the subscription is alive and the server the same, and makes up for what the
    /// server does not tell.
    async fn look(&mut self, inner: &Inner, sink: &WatchSink) -> Result<(), String> {
        let looking = async {
            let pong: RedisResult<redis::Value> = self.control.ping_message("rerail").await;
            pong.map_err(|error| words(&error))?;
            life(inner).await
        };
        let life = tokio::time::timeout(inner.deadline.max(Duration::from_secs(1)), looking)
            .await
            .map_err(|_| "the subscription does not answer".to_owned())??;
        if life != self.life {
            tracing::info!(
                store = inner.name,
                "the store has lost its data; reading anew"
            );
            self.life = life;
            sink.push(WatchEvent::Resync);
        } else if self.keyspace.is_none() {
            sink.push(WatchEvent::Resync);
        }
        Ok(())
    }
}

/// Reads the changed records and tells what they are now.
async fn tell(inner: &Inner, changed: BTreeSet<String>, sink: &WatchSink) -> Result<(), String> {
    let keys: Vec<String> = changed.into_iter().collect();
    let records = inner
        .read("watch", &keys)
        .await
        .map_err(|error| error.to_string())?;
    let mut records = records.into_iter().peekable();
    for key in keys {
        match records.next_if(|record| record.key == key) {
            Some(record) => sink.push(WatchEvent::Put(record)),
            None => sink.push(WatchEvent::Delete { key }),
        }
    }
    Ok(())
}
