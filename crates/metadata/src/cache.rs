//! A reader's copy of the peers' descriptors.
//!
//! Reading takes no lock and never asks the store. Changes come by watch; a question is asked when
//! a peer is opened, when its time to live is over, and when the caller had trouble with it. Not
//! here: subscriptions to the peers themselves (their records can be [offered](PeerCache::offer)),
//! and what a change means for connections.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::broadcast;
use tokio::time::Instant;

use crate::descriptor::{InstanceId, SegmentDescriptor};
use crate::error::MetadataError;
use crate::follow::{Change, Follow};
use crate::keys::KeySpace;
use crate::store::{AbortOnDrop, MetadataStore, Record, Result, Version};

/// Peers that a cache holds at most.
pub const PEERS_MAX: usize = 65_536;
/// Replaced instances that are remembered for each peer.
const RETIRED_MAX: usize = 16;
/// Events that a reader may be behind.
const EVENTS_MAX: usize = 1_024;
/// Longest pause between two questions for a peer that is missing in the store and alive.
const MISSING_PAUSE_MAX: Duration = Duration::from_secs(30);

/// Settings of a [`PeerCache`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CacheOptions {
    /// Age at which [`PeerCache::open`] asks whether a record is still the same. `None`: never.
    pub ttl: Option<Duration>,
    /// Least time between two questions about one peer that had trouble.
    pub cooldown: Duration,
    /// Consecutive "not found" after which a peer without a sign of life is dropped.
    pub missing_max: u32,
    /// First pause between questions about a peer that the store does not have.
    pub missing_pause: Duration,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self {
            ttl: None,
            cooldown: Duration::from_secs(1),
            missing_max: 3,
            missing_pause: Duration::from_secs(1),
        }
    }
}

/// What a cache holds of one peer.
#[derive(Clone, Debug)]
struct CachedPeer {
    descriptor: Arc<SegmentDescriptor>,
    /// The version of its record, where it came from the store.
    version: Option<Version>,
    /// When the store last confirmed it.
    confirmed: Instant,
}

/// Something changed in the cache.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CacheEvent {
    /// A peer's descriptor is new or another one.
    Changed(Arc<SegmentDescriptor>),
    /// A peer is in the store no more and shows no sign of life.
    Dropped {
        /// Its name.
        name: String,
    },
}

type Snapshot = HashMap<String, CachedPeer>;

/// The cache. Clones are one cache.
#[derive(Clone, Debug)]
pub struct PeerCache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: Arc<dyn MetadataStore>,
    keys: KeySpace,
    options: CacheOptions,
    snapshot: ArcSwap<Snapshot>,
    book: Mutex<Book>,
    events: broadcast::Sender<CacheEvent>,
    questions: AtomicU64,
}

/// When a question began, and what came of it.
type Answered = (Instant, Result<()>);

/// What readers do not need.
#[derive(Debug, Default)]
struct Book {
    peers: HashMap<String, Entry>,
    /// The watch on all segments, where the store can list.
    follower: Option<AbortOnDrop>,
}

#[derive(Debug, Default)]
struct Entry {
    /// Held by the one question in flight; the outcome of the last one with its time.
    asking: Arc<tokio::sync::Mutex<Option<Answered>>>,
    missing: u32,
    missing_since: Option<Instant>,
    alive: Option<Instant>,
    retired: Vec<InstanceId>,
    ever_found: bool,
    /// The watch on this one key, where the store cannot list.
    follower: Option<AbortOnDrop>,
    /// Asks again for a peer that is missing.
    searcher: Option<AbortOnDrop>,
}

impl PeerCache {
    /// An empty cache over `store`.
    pub fn new(store: Arc<dyn MetadataStore>, keys: KeySpace, options: CacheOptions) -> Self {
        let (events, _) = broadcast::channel(EVENTS_MAX);
        Self {
            inner: Arc::new(Inner {
                store,
                keys,
                options,
                snapshot: ArcSwap::default(),
                book: Mutex::default(),
                events,
                questions: AtomicU64::new(0),
            }),
        }
    }

    /// The descriptor of a peer that has been opened. Without locks or waiting.
    pub fn get(&self, name: &str) -> Option<Arc<SegmentDescriptor>> {
        let snapshot = self.inner.snapshot.load();
        snapshot.get(name).map(|peer| Arc::clone(&peer.descriptor))
    }

    /// The descriptor of a peer: the cached one, or the store's. From now on it is kept up to
    /// date. A store that is away does not take a cached one away.
    ///
    /// # Errors
    ///
    /// [`MetadataError::NotFound`], or those of the store, for a peer that is not cached.
    pub async fn open(&self, name: &str) -> Result<Arc<SegmentDescriptor>> {
        let cached = self.inner.snapshot.load().get(name).cloned();
        if let Some(peer) = cached {
            let fresh = |ttl| peer.confirmed.elapsed() < ttl;
            if self.inner.options.ttl.is_none_or(fresh) {
                return Ok(peer.descriptor);
            }
            return match self.inner.ask(name, Instant::now()).await {
                Ok(()) => Ok(self.get(name).unwrap_or(peer.descriptor)),
                Err(error) => {
                    tracing::debug!(%error, name, "cached record not confirmed");
                    Ok(self.get(name).unwrap_or(peer.descriptor))
                }
            };
        }
        self.refresh(name).await
    }

    /// Asks the store for one peer, after trouble with it. Callers at one time share one question,
    /// and within the cooldown its answer. On failure the cached descriptor stays.
    ///
    /// # Errors
    ///
    /// Those of the store; the transfer that had the trouble fails, the others go on.
    pub async fn refresh(&self, name: &str) -> Result<Arc<SegmentDescriptor>> {
        let since = Instant::now().checked_sub(self.inner.options.cooldown);
        let cached = self.get(name).is_some();
        // A peer that nobody has yet is worth a question at any time.
        let since = since.filter(|_| cached).unwrap_or_else(Instant::now);
        self.inner.ask(name, since).await?;
        let found = self.get(name).ok_or_else(|| self.inner.not_found(name))?;
        self.inner.follow(name).await;
        Ok(found)
    }

    /// Takes a descriptor that came from the peer itself. False if it is older than the cached
    /// one, or of an instance that has been replaced.
    pub fn offer(&self, descriptor: SegmentDescriptor) -> bool {
        let name = descriptor.name.clone();
        self.inner.accept(&name, descriptor, None)
    }

    /// Notes a sign of life: a completion, or an answer to a probe.
    pub fn note_alive(&self, name: &str) {
        if let Some(entry) = self.inner.book().peers.get_mut(name) {
            entry.alive = Some(Instant::now());
        }
    }

    /// Drops a peer; opening it asks the store.
    pub fn forget(&self, name: &str) {
        self.inner.book().peers.remove(name);
        self.inner.publish(|snapshot| {
            snapshot.remove(name);
        });
    }

    /// Changes from now on.
    pub fn events(&self) -> broadcast::Receiver<CacheEvent> {
        self.inner.events.subscribe()
    }

    /// True if the store has ever had this peer, for messages about missing ones.
    pub fn was_ever_found(&self, name: &str) -> bool {
        self.inner
            .book()
            .peers
            .get(name)
            .is_some_and(|entry| entry.ever_found)
    }

    /// Questions that were put to the store so far, watches not counted.
    pub fn questions(&self) -> u64 {
        self.inner.questions.load(Ordering::Relaxed)
    }
}

impl Inner {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn not_found(&self, name: &str) -> MetadataError {
        MetadataError::NotFound {
            store: self.store.describe(),
            key: self.keys.segment(name),
        }
    }

    /// Changes the snapshot. Writers take turns, readers see the old one or the new one.
    fn publish(&self, change: impl Fn(&mut Snapshot)) {
        self.snapshot.rcu(|snapshot| {
            let mut next = Snapshot::clone(snapshot);
            change(&mut next);
            next
        });
    }

    /// One question about `name`, unless one that began after `since` has been answered.
    async fn ask(self: &Arc<Self>, name: &str, since: Instant) -> Result<()> {
        let asking = {
            let mut book = self.book();
            if !book.peers.contains_key(name) && book.peers.len() >= PEERS_MAX {
                return Err(MetadataError::Unsupported {
                    store: self.store.describe(),
                    operation: "cache another peer",
                    reason: format!("{PEERS_MAX} are cached already"),
                });
            }
            Arc::clone(&book.peers.entry(name.to_owned()).or_default().asking)
        };
        let mut last = asking.lock().await;
        if let Some((at, outcome)) = last.as_ref().filter(|(at, _)| *at >= since) {
            tracing::trace!(name, ?at, "shared the answer of another question");
            return outcome.clone();
        }
        let started = Instant::now();
        self.questions.fetch_add(1, Ordering::Relaxed);
        let outcome = match self.store.get(&self.keys.segment(name)).await {
            Ok(record) => self.take(name, &record),
            Err(error) => {
                if error.is_not_found() {
                    self.missing(name);
                }
                Err(error)
            }
        };
        *last = Some((started, outcome.clone()));
        outcome
    }

    /// Takes a record from the store.
    fn take(&self, name: &str, record: &Record) -> Result<()> {
        {
            let mut book = self.book();
            let Some(entry) = book.peers.get_mut(name) else {
                return Ok(());
            };
            entry.missing = 0;
            entry.missing_since = None;
            entry.ever_found = true;
            entry.searcher = None;
        }
        let confirmed = Instant::now();
        let known = self
            .snapshot
            .load()
            .get(name)
            .and_then(|peer| peer.version.clone());
        if known.as_ref() == Some(&record.version) {
            // The same record: nothing to parse.
            self.publish(|snapshot| {
                if let Some(peer) = snapshot.get_mut(name) {
                    peer.confirmed = confirmed;
                }
            });
            return Ok(());
        }
        let malformed = |reason: String| MetadataError::Malformed {
            store: self.store.describe(),
            key: record.key.clone(),
            reason,
        };
        let descriptor = SegmentDescriptor::from_json(&record.value)
            .map_err(|error| malformed(error.to_string()))?;
        if descriptor.name != name {
            return Err(malformed(format!(
                "member name: it is {:?}",
                descriptor.name
            )));
        }
        self.accept(name, descriptor, Some(record.version.clone()));
        Ok(())
    }

    /// Takes a descriptor in if it is newer than the cached one.
    fn accept(&self, name: &str, descriptor: SegmentDescriptor, version: Option<Version>) -> bool {
        let descriptor = Arc::new(descriptor);
        {
            let mut book = self.book();
            let Some(entry) = book.peers.get_mut(name) else {
                return false;
            };
            let old = self
                .snapshot
                .load()
                .get(name)
                .map(|peer| Arc::clone(&peer.descriptor));
            let lives = |descriptor: &SegmentDescriptor| {
                let rerail = descriptor.rerail.as_ref();
                rerail.map(|member| (member.instance, member.generation))
            };
            let (was, is) = (old.as_deref().and_then(lives), lives(&descriptor));
            if is.is_some_and(|(instance, _)| entry.retired.contains(&instance)) {
                return false;
            }
            match (was, is) {
                (Some((was, old)), Some((is, new))) if was == is && new < old => return false,
                (Some((was, _)), is) if is.is_none_or(|(is, _)| is != was) => {
                    if entry.retired.len() == RETIRED_MAX {
                        entry.retired.remove(0);
                    }
                    entry.retired.push(was);
                }
                _ => {}
            }
            // Within the lock, so that two descriptors of one peer cannot overtake each other.
            let peer = CachedPeer {
                descriptor: Arc::clone(&descriptor),
                version,
                confirmed: Instant::now(),
            };
            self.publish(|snapshot| {
                snapshot.insert(name.to_owned(), peer.clone());
            });
            if old.is_some_and(|old| old.same_content(&descriptor)) {
                return true;
            }
        }
        // Nobody may be listening.
        let _ = self.events.send(CacheEvent::Changed(descriptor));
        true
    }

    /// The store answered that it has no such record.
    fn missing(self: &Arc<Self>, name: &str) {
        let cached = self.snapshot.load().contains_key(name);
        let dropped = {
            let mut book = self.book();
            let Some(entry) = book.peers.get_mut(name) else {
                return;
            };
            if !cached {
                if !entry.ever_found {
                    // A name that is nobody's must not take room.
                    book.peers.remove(name);
                }
                return;
            }
            entry.missing = entry.missing.saturating_add(1);
            let since = *entry.missing_since.get_or_insert_with(Instant::now);
            let silent = entry.alive.is_none_or(|alive| alive < since);
            let dropped = entry.missing >= self.options.missing_max && silent;
            if dropped {
                entry.missing = 0;
                entry.missing_since = None;
                entry.follower = None;
                entry.searcher = None;
            } else if entry.searcher.is_none() {
                entry.searcher = Some(self.search(name.to_owned()));
            }
            dropped
        };
        if dropped {
            self.publish(|snapshot| {
                snapshot.remove(name);
            });
            let _ = self.events.send(CacheEvent::Dropped {
                name: name.to_owned(),
            });
        }
    }

    /// Asks again and again for a peer that is missing, until it is found or dropped.
    fn search(self: &Arc<Self>, name: String) -> AbortOnDrop {
        let weak = Arc::downgrade(self);
        let mut pause = self.options.missing_pause;
        AbortOnDrop(tokio::spawn(async move {
            loop {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(MISSING_PAUSE_MAX);
                let Some(inner) = weak.upgrade() else { return };
                let _ = inner.ask(&name, Instant::now()).await;
                if !inner.snapshot.load().contains_key(&name) {
                    return;
                }
            }
        }))
    }

    /// Makes sure that changes of `name` are told: by one watch on all segments where the store
    /// can list, else by one on the key.
    async fn follow(self: &Arc<Self>, name: &str) {
        let key = self.keys.segment(name);
        let all = self.store.capabilities().list && key.starts_with(&self.keys.segments());
        let has = |book: &Book| match all {
            true => book.follower.is_some(),
            false => book
                .peers
                .get(name)
                .is_none_or(|entry| entry.follower.is_some()),
        };
        if has(&self.book()) {
            return;
        }
        let prefix = if all { self.keys.segments() } else { key };
        let follow = match Follow::new(Arc::clone(&self.store), &prefix).await {
            Ok(follow) => follow,
            Err(error) => {
                tracing::warn!(%error, prefix, "changes are not told; records are asked for");
                return;
            }
        };
        let mut book = self.book();
        if has(&book) {
            return;
        }
        let task = AbortOnDrop(tokio::spawn(run_follower(Arc::downgrade(self), follow)));
        if all {
            book.follower = Some(task);
        } else if let Some(entry) = book.peers.get_mut(name) {
            entry.follower = Some(task);
        }
    }
}

async fn run_follower(weak: std::sync::Weak<Inner>, mut follow: Follow) {
    while let Some(change) = follow.next().await {
        let Some(inner) = weak.upgrade() else { return };
        let (key, record) = match change {
            Change::Put(record) => (record.key.clone(), Some(record)),
            Change::Delete { key } => (key, None),
            Change::Synced => continue,
        };
        // Peers that nobody has opened are nobody's business.
        let name = inner.keys.segment_name(&key).map(str::to_owned);
        let Some(name) = name.filter(|name| inner.snapshot.load().contains_key(name)) else {
            continue;
        };
        match record {
            Some(record) => {
                if let Err(error) = inner.take(&name, &record) {
                    tracing::warn!(%error, name, "a record that cannot be used; the old one stays");
                }
            }
            None => inner.missing(&name),
        }
    }
}

#[cfg(test)]
mod tests;
