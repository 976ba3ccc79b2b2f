//! Records that are there as long as their owner is.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rand::Rng;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::error::MetadataError;
use crate::store::{AbortOnDrop, LeaseId, MetadataStore, Record, Result, Version};

/// Events that may wait for the owner; later ones are dropped and logged.
const EVENTS_MAX: usize = 256;

/// Settings of [`OwnedRecords`].
#[derive(Clone)]
#[non_exhaustive]
pub struct OwnedOptions {
    /// How long records outlive an owner that gives no sign of life; kept alive three times in
    /// that time. `None` for records without a lease. Where the store has no leases, they have
    /// none.
    pub ttl: Option<Duration>,
    /// Time between two readings of the own records, ± a fifth. Finds a store that was restarted
    /// empty, or that lost an acknowledged write in a fail-over.
    pub read_back: Duration,
    /// Judges a record that is under an own key and is not what was written there.
    pub judge: Judge,
}

/// Decides what becomes of a record that somebody else wrote; gets the own value, too.
pub type Judge = Arc<dyn Fn(&Record, &Bytes) -> Verdict + Send + Sync>;

/// What becomes of a record that somebody else wrote under an own key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It is left over from another life, or a mistake: write the own one over it.
    Overwrite,
    /// Its writer has taken the key over: leave it, and tell the owner.
    Yield,
}

impl std::fmt::Debug for OwnedOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnedOptions")
            .field("ttl", &self.ttl)
            .field("read_back", &self.read_back)
            .finish_non_exhaustive()
    }
}

impl Default for OwnedOptions {
    fn default() -> Self {
        Self {
            ttl: Some(Duration::from_secs(30)),
            read_back: Duration::from_secs(30),
            judge: Arc::new(|_, _| Verdict::Overwrite),
        }
    }
}

/// What an owner is told.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum OwnedEvent {
    /// Every record is stored as it was last set.
    Stored,
    /// Somebody else has taken the key over; it is written no more.
    Superseded {
        /// The key.
        key: String,
    },
    /// The lease was lost; everything is put again under a new one.
    LeaseLost,
    /// The store cannot be used at the moment; it is tried again.
    Failing(MetadataError),
}

/// Keeps records in a store: writes the latest state of each, tries again until it is there,
/// keeps the lease alive, grants a new one and puts *everything* again when it is lost, and reads
/// back. Overtaken states are never written.
#[derive(Debug)]
pub struct OwnedRecords {
    shared: Arc<Shared>,
    complete: watch::Receiver<bool>,
    _driver: AbortOnDrop,
}

#[derive(Debug)]
struct Shared {
    store: Arc<dyn MetadataStore>,
    wanted: Mutex<Wanted>,
    touched: Notify,
}

#[derive(Debug, Default)]
struct Wanted {
    records: BTreeMap<String, Own>,
    lease: Option<LeaseId>,
    closing: bool,
}

#[derive(Debug)]
struct Own {
    /// `None` once the record is to go.
    value: Option<Bytes>,
    /// The version under which this value is stored; `None` while it is not.
    stored: Option<Version>,
    superseded: bool,
}

impl OwnedRecords {
    /// Starts to keep records. Needs a tokio runtime.
    pub fn start(
        store: Arc<dyn MetadataStore>,
        options: OwnedOptions,
    ) -> (Self, mpsc::Receiver<OwnedEvent>) {
        let (events, received) = mpsc::channel(EVENTS_MAX);
        let (completed, complete) = watch::channel(true);
        let shared = Arc::new(Shared {
            store,
            wanted: Mutex::default(),
            touched: Notify::new(),
        });
        let driver = Driver {
            shared: Arc::clone(&shared),
            options,
            events,
            completed,
            leases: true,
            failing: false,
        };
        let owned = Self {
            shared,
            complete,
            _driver: AbortOnDrop(tokio::spawn(driver.run())),
        };
        (owned, received)
    }

    /// Sets a record. The latest value wins; what it overtakes is never written. A key that was
    /// superseded is claimed anew.
    pub fn set(&self, key: impl Into<String>, value: Bytes) {
        self.shared.wanted().records.insert(
            key.into(),
            Own {
                value: Some(value),
                stored: None,
                superseded: false,
            },
        );
        self.shared.touched.notify_one();
    }

    /// Removes a record, if it is still the own one.
    pub fn remove(&self, key: &str) {
        if let Some(own) = self.shared.wanted().records.get_mut(key) {
            own.value = None;
        }
        self.shared.touched.notify_one();
    }

    /// Waits until every record is stored as it was last set.
    pub async fn stored(&self) {
        let mut complete = self.complete.clone();
        loop {
            if self.shared.wanted().is_complete() {
                return;
            }
            if complete.changed().await.is_err() {
                return;
            }
        }
    }

    /// Removes all records that are still the own ones, and ends the lease.
    ///
    /// # Errors
    ///
    /// The first failure; the records then go when the lease ends.
    pub async fn close(self) -> Result<()> {
        let (lease, stored) = {
            let mut wanted = self.shared.wanted();
            wanted.closing = true;
            let records = std::mem::take(&mut wanted.records);
            let stored: Vec<(String, Version)> = records
                .into_iter()
                .filter(|(_, own)| !own.superseded)
                .filter_map(|(key, own)| Some((key, own.stored?)))
                .collect();
            (wanted.lease.take(), stored)
        };
        for (key, version) in stored {
            match self.shared.store.delete_if(&key, &version).await {
                Ok(_) => {}
                // Somebody else's by now.
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error),
            }
        }
        match lease {
            Some(lease) => self.shared.store.revoke_lease(&lease).await,
            None => Ok(()),
        }
    }
}

impl Shared {
    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wanted {
    fn is_complete(&self) -> bool {
        self.next_dirty().is_none()
    }

    fn next_dirty(&self) -> Option<&String> {
        self.records
            .iter()
            .find(|(_, own)| !own.superseded && (own.value.is_none() || own.stored.is_none()))
            .map(|(key, _)| key)
    }

    fn forget_stored(&mut self) {
        for own in self.records.values_mut() {
            own.stored = None;
        }
    }
}

struct Driver {
    shared: Arc<Shared>,
    options: OwnedOptions,
    events: mpsc::Sender<OwnedEvent>,
    completed: watch::Sender<bool>,
    /// False once the store has said that it has none.
    leases: bool,
    failing: bool,
}

impl Driver {
    async fn run(mut self) {
        let mut backoff = Backoff::for_stores();
        let mut heartbeat_at = Instant::now();
        let mut read_back_at = Instant::now() + self.jittered(self.options.read_back);
        loop {
            let outcome = self.step(&mut heartbeat_at, &mut read_back_at).await;
            if self.shared.wanted().closing {
                return;
            }
            match outcome {
                Ok(()) => {
                    backoff.reset();
                    if std::mem::take(&mut self.failing) {
                        // The store may have lost what it had: look at once.
                        read_back_at = Instant::now();
                        continue;
                    }
                    let next = heartbeat_at.min(read_back_at);
                    tokio::select! {
                        () = self.shared.touched.notified() => {}
                        () = tokio::time::sleep_until(next) => {}
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.failing, true) {
                        tracing::warn!(%error, "own records cannot be stored yet");
                        self.tell(OwnedEvent::Failing(error));
                    }
                    backoff.pause().await;
                }
            }
        }
    }

    /// Does all that is due now.
    async fn step(&mut self, heartbeat_at: &mut Instant, read_back_at: &mut Instant) -> Result<()> {
        if let Some(ttl) = self.options.ttl.filter(|_| self.leases) {
            if *heartbeat_at <= Instant::now() {
                self.keep_lease(ttl).await?;
                *heartbeat_at = Instant::now() + ttl / 3;
            }
        } else {
            *heartbeat_at = *read_back_at;
        }
        if *read_back_at <= Instant::now() {
            self.read_back().await?;
            *read_back_at = Instant::now() + self.jittered(self.options.read_back);
        }
        let mut wrote = false;
        loop {
            let next = self.shared.wanted().next_dirty().cloned();
            let Some(key) = next else { break };
            match self.write(&key).await {
                Err(MetadataError::LeaseLost { .. }) => {
                    self.lease_lost();
                    *heartbeat_at = Instant::now();
                    return Ok(());
                }
                outcome => outcome?,
            }
            wrote = true;
        }
        if wrote {
            self.completed.send_replace(true);
            self.tell(OwnedEvent::Stored);
        }
        Ok(())
    }

    async fn keep_lease(&mut self, ttl: Duration) -> Result<()> {
        let lease = self.shared.wanted().lease.clone();
        if let Some(lease) = lease {
            match self.shared.store.keep_alive(&lease).await {
                Ok(()) => return Ok(()),
                Err(MetadataError::LeaseLost { .. }) => self.lease_lost(),
                Err(error) => return Err(error),
            }
        }
        match self.shared.store.grant_lease(ttl).await {
            Ok(lease) => {
                let mut wanted = self.shared.wanted();
                wanted.lease = Some(lease);
                wanted.forget_stored();
                Ok(())
            }
            Err(MetadataError::Unsupported { .. }) => {
                self.leases = false;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn lease_lost(&self) {
        let mut wanted = self.shared.wanted();
        wanted.lease = None;
        wanted.forget_stored();
        drop(wanted);
        self.tell(OwnedEvent::LeaseLost);
    }

    /// Marks every record that is not stored as it should be.
    async fn read_back(&self) -> Result<()> {
        let keys: Vec<String> = self.shared.wanted().records.keys().cloned().collect();
        for key in keys {
            let found = match self.shared.store.get(&key).await {
                Ok(record) => Some(record),
                Err(error) if error.is_not_found() => None,
                Err(error) => return Err(error),
            };
            let mut wanted = self.shared.wanted();
            let Some(own) = wanted.records.get_mut(&key).filter(|own| !own.superseded) else {
                continue;
            };
            match (&found, &own.stored) {
                (Some(found), Some(stored)) if found.version == *stored => {}
                // A write that was in flight when the store failed may have come through.
                (Some(found), _) if Some(&found.value) == own.value.as_ref() => {
                    own.stored = Some(found.version.clone());
                }
                _ => own.stored = None,
            }
        }
        Ok(())
    }

    /// Brings one record to its wanted state, on condition that nobody else has changed it.
    async fn write(&self, key: &str) -> Result<()> {
        let (value, lease) = {
            let wanted = self.shared.wanted();
            let Some(own) = wanted.records.get(key) else {
                return Ok(());
            };
            (own.value.clone(), wanted.lease.clone())
        };
        let store = &self.shared.store;
        let found = match store.get(key).await {
            Ok(record) => Some(record),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(error),
        };
        let Some(value) = value else {
            return self.withdraw(key, found).await;
        };
        let stored = match &found {
            None => {
                store
                    .create_if_absent(key, value.clone(), lease.as_ref())
                    .await
            }
            Some(found) => {
                let foreign = found.value != value && !self.wrote(key, found);
                if foreign && (self.options.judge)(found, &value) == Verdict::Yield {
                    self.superseded(key);
                    return Ok(());
                }
                let version = &found.version;
                store
                    .compare_and_swap(key, version, value.clone(), lease.as_ref())
                    .await
            }
        };
        match stored {
            Ok(version) => {
                let mut wanted = self.shared.wanted();
                if let Some(own) = wanted.records.get_mut(key)
                    && own.value.as_ref() == Some(&value)
                {
                    own.stored = Some(version);
                }
                Ok(())
            }
            // Somebody was faster: look again, in the next round of the loop.
            Err(error) if error.is_conflict() => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// True if `found` is what this owner wrote last.
    fn wrote(&self, key: &str, found: &Record) -> bool {
        let wanted = self.shared.wanted();
        wanted
            .records
            .get(key)
            .is_some_and(|own| own.stored.as_ref() == Some(&found.version))
    }

    async fn withdraw(&self, key: &str, found: Option<Record>) -> Result<()> {
        if let Some(found) = found {
            let ours = self.wrote(key, &found);
            if ours {
                match self.shared.store.delete_if(key, &found.version).await {
                    Err(error) if !error.is_conflict() => return Err(error),
                    _ => {}
                }
            }
        }
        let mut wanted = self.shared.wanted();
        // Unless it was set again meanwhile.
        if wanted
            .records
            .get(key)
            .is_some_and(|own| own.value.is_none())
        {
            wanted.records.remove(key);
        }
        Ok(())
    }

    fn superseded(&self, key: &str) {
        if let Some(own) = self.shared.wanted().records.get_mut(key) {
            own.superseded = true;
        }
        self.tell(OwnedEvent::Superseded {
            key: key.to_owned(),
        });
    }

    fn tell(&self, event: OwnedEvent) {
        if let Err(mpsc::error::TrySendError::Full(event)) = self.events.try_send(event) {
            tracing::warn!(?event, "the owner does not read its events");
        }
    }

    fn jittered(&self, period: Duration) -> Duration {
        period.mul_f64(rand::rng().random_range(0.8..=1.2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryStore;

    fn text(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }

    fn start(store: &MemoryStore) -> (OwnedRecords, mpsc::Receiver<OwnedEvent>) {
        OwnedRecords::start(Arc::new(store.client("owner")), OwnedOptions::default())
    }

    async fn value(store: &MemoryStore, key: &str) -> Option<Bytes> {
        store.get(key).await.ok().map(|record| record.value)
    }

    #[tokio::test(start_paused = true)]
    async fn m08_records_go_with_their_owner() {
        let store = MemoryStore::new("s");
        let (owned, _events) = start(&store);
        owned.set("k", text("1"));
        owned.stored().await;
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_eq!(value(&store, "k").await, Some(text("1")), "kept alive");
        drop(owned);
        tokio::time::sleep(Duration::from_secs(31)).await;
        assert_eq!(value(&store, "k").await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn m15_a_lost_lease_is_granted_anew_and_everything_put_again() {
        let store = MemoryStore::new("s");
        let (owned, mut events) = start(&store);
        for key in ["a", "b", "c"] {
            owned.set(key, text("1"));
        }
        owned.stored().await;
        store.faults().lose_all_leases();
        assert_eq!(store.list("").await.expect("list").len(), 0);
        tokio::time::sleep(Duration::from_secs(11)).await;
        assert_eq!(
            store.list("").await.expect("list").len(),
            3,
            "within a third of the ttl"
        );
        let mut lost = false;
        while let Ok(event) = events.try_recv() {
            lost |= matches!(event, OwnedEvent::LeaseLost);
        }
        assert!(lost);
        tokio::time::sleep(Duration::from_secs(100)).await;
        assert_eq!(
            store.list("").await.expect("list").len(),
            3,
            "under the new lease"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn m01_a_store_restarted_empty_gets_everything_again() {
        let store = MemoryStore::new("s");
        let options = OwnedOptions {
            ttl: None,
            ..OwnedOptions::default()
        };
        let (owned, _events) = OwnedRecords::start(Arc::new(store.clone()), options);
        owned.set("ram", text("1"));
        owned.set("rpc_meta", text("2"));
        owned.stored().await;
        store.faults().restart_empty();
        tokio::time::sleep(Duration::from_secs(37)).await;
        assert_eq!(value(&store, "ram").await, Some(text("1")));
        assert_eq!(value(&store, "rpc_meta").await, Some(text("2")));
    }

    #[tokio::test(start_paused = true)]
    async fn e24_after_an_outage_only_the_last_state_is_written() {
        let store = MemoryStore::new("s");
        let (owned, mut events) = start(&store);
        owned.set("k", text("1"));
        owned.stored().await;
        let mut watch = store.client("reader").watch("k").await.expect("watch");
        watch.next().await;
        store.faults().partition("owner", true);
        for value in ["2", "3"] {
            owned.set("k", text(value));
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        store.faults().partition("owner", false);
        owned.stored().await;
        match watch.next().await {
            Some(crate::WatchEvent::Put(record)) => assert_eq!(record.value, "3"),
            other => panic!("{other:?}"),
        }
        let mut failing = 0;
        while let Ok(event) = events.try_recv() {
            failing += u32::from(matches!(event, OwnedEvent::Failing(_)));
        }
        assert_eq!(failing, 1, "an outage is told once");
    }

    #[tokio::test(start_paused = true)]
    async fn the_judge_decides_between_two_owners_of_one_name() {
        let store = MemoryStore::new("s");
        let options = |ours: &'static str| OwnedOptions {
            // The greater value has the name, as the younger instance would.
            judge: Arc::new(move |found, _| {
                if found.value.as_ref() > ours.as_bytes() {
                    Verdict::Yield
                } else {
                    Verdict::Overwrite
                }
            }),
            ..OwnedOptions::default()
        };
        let client = |name| Arc::new(store.client(name));
        let (old, mut old_events) = OwnedRecords::start(client("old"), options("1"));
        old.set("k", text("1"));
        old.stored().await;
        let (young, _young_events) = OwnedRecords::start(client("young"), options("2"));
        young.set("k", text("2"));
        young.stored().await;
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert_eq!(value(&store, "k").await, Some(text("2")));
        let mut superseded = 0;
        while let Ok(event) = old_events.try_recv() {
            superseded += u32::from(matches!(event, OwnedEvent::Superseded { .. }));
        }
        assert_eq!(superseded, 1);
        old.close().await.expect("closed");
        assert_eq!(
            value(&store, "k").await,
            Some(text("2")),
            "the other's record stays"
        );
        young.close().await.expect("closed");
        assert_eq!(value(&store, "k").await, None);
    }
}
