//! The trait that every store implements, and its values.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::error::MetadataError;

/// Result of an operation on a store.
pub type Result<T, E = MetadataError> = std::result::Result<T, E>;

/// Events that one watcher may be behind before they collapse into one [`WatchEvent::Resync`].
pub const WATCH_QUEUE_MAX: usize = 1_024;

/// A store of small records under string keys, shared by all engines of a cluster.
///
/// Object-safe: programs hold an `Arc<dyn MetadataStore>`, made from a URL by
/// [`crate::connect`]. Every operation has its own deadline and ends with an error instead of
/// waiting longer. [`crate::conformance`] holds every implementation to this contract.
///
/// Architecture invariant: a store keeps no records of its clients' in this process. What it
/// answers is what the store said.
#[async_trait]
pub trait MetadataStore: fmt::Debug + Send + Sync {
    /// The store in words for logs and errors, without secrets.
    fn describe(&self) -> String;

    /// What this store can do.
    fn capabilities(&self) -> Capabilities;

    /// What a write of so many bytes under `key` would come to, without sending anything.
    ///
    /// # Errors
    ///
    /// [`MetadataError::TooLarge`], with the limit and what to do, where the limit is known.
    fn check_size(&self, key: &str, value_bytes: usize) -> Result<()> {
        let _ = (key, value_bytes);
        Ok(())
    }

    /// The record under `key`.
    ///
    /// # Errors
    ///
    /// [`MetadataError::NotFound`] only when the store answered that there is none.
    async fn get(&self, key: &str) -> Result<Record>;

    /// Writes `value` under `key`, whatever is there. With a lease, the record goes when the
    /// lease goes; without one, it stays, also where an earlier record had a lease.
    async fn put(&self, key: &str, value: Bytes, lease: Option<&LeaseId>) -> Result<Version>;

    /// Writes only if `key` is absent.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Conflict`] if there is a record.
    async fn create_if_absent(
        &self,
        key: &str,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version>;

    /// Writes only if the record still has the version `expected`.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Conflict`] if it has another one, or is gone.
    async fn compare_and_swap(
        &self,
        key: &str,
        expected: &Version,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version>;

    /// Removes the record. False if there was none.
    async fn delete(&self, key: &str) -> Result<bool>;

    /// Removes the record only if it still has the version `expected`. False if there was none.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Conflict`] if it has another one.
    async fn delete_if(&self, key: &str, expected: &Version) -> Result<bool>;

    /// All records whose key starts with `prefix`, in ascending order of keys.
    async fn list(&self, prefix: &str) -> Result<Vec<Record>>;

    /// A lease that ends `ttl` after the last [`keep_alive`](Self::keep_alive). Stores may round
    /// `ttl` up to whole seconds.
    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId>;

    /// Starts the lease's time anew.
    ///
    /// # Errors
    ///
    /// [`MetadataError::LeaseLost`] if the store does not know it any more: its records are gone
    /// and have to be written again under a new one.
    async fn keep_alive(&self, lease: &LeaseId) -> Result<()>;

    /// Ends the lease and removes its records. Ending one that is gone is no error.
    async fn revoke_lease(&self, lease: &LeaseId) -> Result<()>;

    /// Events under `prefix`, from now on until the watch is dropped. Returns at once, also while
    /// the store is away. See [`Watch`] for what is promised.
    async fn watch(&self, prefix: &str) -> Result<Watch>;
}

/// What a store can do beyond reading and writing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// Conditional writes are atomic. Where false (foreign HTTP servers) they are a read followed
    /// by a write, and two writers can both win.
    pub atomic_conditions: bool,
    /// [`MetadataStore::list`] works.
    pub list: bool,
    /// Leases work.
    pub leases: bool,
    /// How changes are found.
    pub watch: WatchKind,
    /// Largest value in bytes, where the store has a limit.
    pub value_bytes_max: Option<usize>,
}

/// How a watch finds changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WatchKind {
    /// The store tells.
    Events,
    /// The watch asks again and again.
    Polling {
        /// Time between two questions.
        interval: Duration,
    },
}

/// One record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// Its key.
    pub key: String,
    /// Its value.
    pub value: Bytes,
    /// Its version, for conditional writes.
    pub version: Version,
}

/// A state of a record. Opaque: only the store that made it can compare it, and only for equality.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Version(Bytes);

impl Version {
    /// For implementations: a version from whatever identifies it in the store.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Self {
        Self(bytes.into())
    }

    /// For implementations: a version from a counter.
    pub fn from_counter(counter: u64) -> Self {
        Self(Bytes::copy_from_slice(&counter.to_be_bytes()))
    }

    /// The bytes that made it.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The counter that made it, if one did.
    pub fn as_counter(&self) -> Option<u64> {
        self.0.as_ref().try_into().ok().map(u64::from_be_bytes)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.as_counter() {
            Some(counter) => write!(f, "Version({counter})"),
            None => write!(f, "Version({} bytes)", self.0.len()),
        }
    }
}

/// A lease that a store granted. Opaque, and no secret.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LeaseId(Arc<str>);

impl LeaseId {
    /// For implementations: a lease from its id in the store.
    pub fn new(id: impl Into<Arc<str>>) -> Self {
        Self(id.into())
    }

    /// The id in the store.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Something happened under a watched prefix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WatchEvent {
    /// A record was written, anew or over another.
    Put(Record),
    /// A record went: deleted, or its lease ended.
    Delete {
        /// Its key.
        key: String,
    },
    /// Events may be missing: list the prefix and compare. A normal event, not an error.
    Resync,
}

/// The events of one prefix, as [`next`](Watch::next) or as a [`futures::Stream`].
///
/// - The first event is always [`WatchEvent::Resync`], and it comes once the watch is in force:
///   a reader that lists on every `Resync` and then follows the events misses no change.
/// - After a gap (a reconnection, a compaction, a reader too slow for
///   [`WATCH_QUEUE_MAX`]) there is another one.
/// - Events of one key come in the order of its changes; several changes may arrive as the last.
/// - It outlives outages, and ends only when the store's driver has been shut down.
#[derive(Debug)]
pub struct Watch {
    events: mpsc::Receiver<WatchEvent>,
    lagged: Arc<AtomicBool>,
    // Ends the driver's task when the watch is dropped.
    _driver: Option<AbortOnDrop>,
}

impl Watch {
    /// For implementations: a watch and the end that feeds it. The sink holds back nothing:
    /// what does not fit becomes a `Resync`.
    pub fn channel() -> (WatchSink, Self) {
        let (sender, events) = mpsc::channel(WATCH_QUEUE_MAX);
        let lagged = Arc::new(AtomicBool::new(false));
        let sink = WatchSink {
            sender,
            lagged: Arc::clone(&lagged),
        };
        let watch = Self {
            events,
            lagged,
            _driver: None,
        };
        (sink, watch)
    }

    /// For implementations: a watch fed by a task of its own, which is aborted when the watch is
    /// dropped. Must be called within a tokio runtime.
    pub fn spawn<F>(driver: impl FnOnce(WatchSink) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sink, mut watch) = Self::channel();
        watch._driver = Some(AbortOnDrop(tokio::spawn(driver(sink))));
        watch
    }

    /// The next event; `None` after the store's driver has been shut down.
    pub async fn next(&mut self) -> Option<WatchEvent> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<WatchEvent>> {
        match self.events.poll_recv(context) {
            Poll::Ready(Some(event)) => Poll::Ready(Some(event)),
            // The queue was full and has been drained: whatever was dropped meanwhile is in the
            // store by now, so that a list after this event sees it. Tokio's budget makes a
            // queue look empty at times; an old event must not follow the Resync.
            _ if self.events.is_empty() && self.lagged.swap(false, Ordering::AcqRel) => {
                Poll::Ready(Some(WatchEvent::Resync))
            }
            other => other,
        }
    }
}

impl futures::Stream for Watch {
    type Item = WatchEvent;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<WatchEvent>> {
        self.get_mut().poll_event(context)
    }
}

/// The end of a [`Watch`] that a store writes to. Never blocks.
#[derive(Clone, Debug)]
pub struct WatchSink {
    sender: mpsc::Sender<WatchEvent>,
    lagged: Arc<AtomicBool>,
}

impl WatchSink {
    /// Queues `event`, or notes that a `Resync` is due where there is no room.
    pub fn push(&self, event: WatchEvent) {
        if self.lagged.load(Ordering::Acquire) {
            return;
        }
        if let Err(mpsc::error::TrySendError::Full(_)) = self.sender.try_send(event) {
            self.lagged.store(true, Ordering::Release);
            // The reader may have drained the queue in between and sleep by now; then there is
            // room, and this wakes it. If there is none, it will look at the flag later.
            if self.sender.try_send(WatchEvent::Resync).is_ok() {
                self.lagged.store(false, Ordering::Release);
            }
        }
    }

    /// True once the watch has been dropped.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Returns once the watch has been dropped.
    pub async fn closed(&self) {
        self.sender.closed().await;
    }
}

#[derive(Debug)]
pub(crate) struct AbortOnDrop(pub(crate) tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delete(index: usize) -> WatchEvent {
        WatchEvent::Delete {
            key: index.to_string(),
        }
    }

    #[tokio::test]
    async fn a_slow_watcher_gets_one_resync_after_what_fitted() {
        let (sink, mut watch) = Watch::channel();
        for index in 0..WATCH_QUEUE_MAX + 500 {
            sink.push(delete(index));
        }
        for index in 0..WATCH_QUEUE_MAX {
            assert_eq!(watch.next().await, Some(delete(index)));
        }
        assert_eq!(watch.next().await, Some(WatchEvent::Resync));
        sink.push(delete(7));
        assert_eq!(watch.next().await, Some(delete(7)));
        drop(sink);
        assert_eq!(watch.next().await, None);
    }

    #[test]
    fn versions_compare_by_their_bytes_and_show_no_value() {
        assert_eq!(Version::from_counter(5).as_counter(), Some(5));
        assert_ne!(Version::from_counter(5), Version::from_counter(6));
        let version = Version::from_bytes("a secret value");
        assert_eq!(format!("{version:?}"), "Version(14 bytes)");
    }
}
