//! What the store holds. Every method is one step under the store's lock.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::error::MetadataError;
use crate::store::{LeaseId, Record, Result, Version, WatchEvent, WatchSink};

#[derive(Debug, Default)]
pub(super) struct State {
    records: BTreeMap<String, Stored>,
    leases: HashMap<LeaseId, LeaseState>,
    watchers: Vec<Watcher>,
    /// Counts all changes, so that a version never comes back, not even after a restart.
    changes: u64,
    leases_granted: u64,
    pub(super) faults: Faults,
}

#[derive(Debug)]
struct Stored {
    value: Bytes,
    version: u64,
    lease: Option<LeaseId>,
}

#[derive(Debug)]
struct LeaseState {
    ttl: Duration,
    ends: Instant,
}

#[derive(Debug)]
struct Watcher {
    prefix: String,
    client: Arc<str>,
    sink: WatchSink,
    /// A `Resync` is due once the watcher can be reached again.
    resync_due: bool,
}

/// The faults that are set.
#[derive(Debug, Default)]
pub(super) struct Faults {
    pub(super) delay: Duration,
    pub(super) outage: bool,
    pub(super) watches_lost: bool,
    pub(super) partitioned: HashSet<String>,
    pub(super) conflicts_left: u32,
    pub(super) value_bytes_max: Option<usize>,
}

impl State {
    pub(super) fn delay(&self) -> Duration {
        self.faults.delay
    }

    /// Why `client` cannot reach the store, if it cannot.
    pub(super) fn out_of_reach(&self, client: &str) -> Option<&'static str> {
        if self.faults.outage {
            Some("the store is away (fault)")
        } else if self.faults.partitioned.contains(client) {
            Some("this client is cut off (fault)")
        } else {
            None
        }
    }

    pub(super) fn get(&self, store: &str, key: &str) -> Result<Record> {
        match self.records.get(key) {
            Some(stored) => Ok(record(key, stored)),
            None => Err(MetadataError::NotFound {
                store: store.into(),
                key: key.into(),
            }),
        }
    }

    pub(super) fn list(&self, prefix: &str) -> Vec<Record> {
        self.records
            .range(prefix.to_owned()..)
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, stored)| record(key, stored))
            .collect()
    }

    /// Checks a condition: absent for `None`, else exactly this version.
    pub(super) fn check(
        &mut self,
        store: &str,
        key: &str,
        expected: Option<&Version>,
    ) -> Result<()> {
        let current = self
            .records
            .get(key)
            .map(|stored| Version::from_counter(stored.version));
        let reason = if self.faults.conflicts_left > 0 {
            self.faults.conflicts_left -= 1;
            "somebody was faster (fault)"
        } else if current.as_ref() == expected {
            return Ok(());
        } else if current.is_none() {
            "it is gone"
        } else if expected.is_none() {
            "there is one already"
        } else {
            "it has been changed"
        };
        Err(MetadataError::Conflict {
            store: store.into(),
            key: key.into(),
            reason: reason.into(),
            current,
        })
    }

    pub(super) fn check_size(&self, store: &str, key: &str, size: usize) -> Result<()> {
        match self.faults.value_bytes_max {
            Some(limit) if size > limit => Err(MetadataError::TooLarge {
                store: store.to_owned(),
                key: key.to_owned(),
                size,
                limit,
                hint: "raise the limit or register fewer buffers",
            }),
            _ => Ok(()),
        }
    }

    pub(super) fn put(
        &mut self,
        store: &str,
        key: &str,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        self.check_size(store, key, value.len())?;
        if let Some(lease) = lease.filter(|lease| !self.leases.contains_key(*lease)) {
            return Err(lease_lost(store, lease));
        }
        self.changes += 1;
        let stored = Stored {
            value,
            version: self.changes,
            lease: lease.cloned(),
        };
        let record = record(key, &stored);
        let version = record.version.clone();
        self.records.insert(key.to_owned(), stored);
        self.tell(key, WatchEvent::Put(record));
        Ok(version)
    }

    pub(super) fn remove(&mut self, key: &str) -> bool {
        let existed = self.records.remove(key).is_some();
        if existed {
            self.changes += 1;
            self.tell(key, WatchEvent::Delete { key: key.into() });
        }
        existed
    }

    pub(super) fn grant_lease(&mut self, ttl: Duration, state: Arc<Mutex<Self>>) -> LeaseId {
        self.leases_granted += 1;
        let lease = LeaseId::new(self.leases_granted.to_string());
        let ends = Instant::now() + ttl;
        self.leases.insert(lease.clone(), LeaseState { ttl, ends });
        // Ends with the lease. Watchers learn of the end without anyone asking.
        tokio::spawn(async move {
            let mut ends = ends;
            loop {
                tokio::time::sleep_until(ends).await;
                let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                if !state.faults.outage {
                    state.expire_leases();
                }
                match state.leases.get(&lease) {
                    Some(later) if later.ends > ends => ends = later.ends,
                    // An outage keeps the lease beyond its end, as a stopped server would.
                    Some(over) => ends = Instant::now() + over.ttl,
                    None => return,
                }
            }
        });
        LeaseId::new(self.leases_granted.to_string())
    }

    pub(super) fn keep_alive(&mut self, store: &str, lease: &LeaseId) -> Result<()> {
        match self.leases.get_mut(lease) {
            Some(state) => {
                state.ends = Instant::now() + state.ttl;
                Ok(())
            }
            None => Err(lease_lost(store, lease)),
        }
    }

    pub(super) fn end_lease(&mut self, lease: &LeaseId) {
        self.leases.remove(lease);
        let keys: Vec<String> = self
            .records
            .iter()
            .filter(|(_, stored)| stored.lease.as_ref() == Some(lease))
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            self.remove(&key);
        }
    }

    pub(super) fn all_leases(&self) -> Vec<LeaseId> {
        self.leases.keys().cloned().collect()
    }

    pub(super) fn expire_leases(&mut self) {
        let now = Instant::now();
        let over: Vec<LeaseId> = self
            .leases
            .iter()
            .filter(|(_, state)| state.ends <= now)
            .map(|(lease, _)| lease.clone())
            .collect();
        for lease in over {
            self.end_lease(&lease);
        }
    }

    pub(super) fn watch(&mut self, prefix: &str, client: &Arc<str>, sink: WatchSink) {
        self.watchers.push(Watcher {
            prefix: prefix.to_owned(),
            client: Arc::clone(client),
            sink,
            resync_due: true,
        });
        self.reach_watchers();
    }

    /// A restart without data: records and leases are gone, nobody is told what went.
    pub(super) fn restart_empty(&mut self) {
        self.records.clear();
        self.leases.clear();
        for watcher in &mut self.watchers {
            watcher.resync_due = true;
        }
        self.reach_watchers();
    }

    /// Sends every `Resync` that is due to the watchers that can be reached.
    pub(super) fn reach_watchers(&mut self) {
        self.watchers.retain(|watcher| !watcher.sink.is_closed());
        let Self {
            faults, watchers, ..
        } = self;
        for watcher in watchers {
            if faults.silences(&watcher.client) {
                watcher.resync_due = true;
            } else if std::mem::take(&mut watcher.resync_due) {
                watcher.sink.push(WatchEvent::Resync);
            }
        }
    }

    fn tell(&mut self, key: &str, event: WatchEvent) {
        self.watchers.retain(|watcher| !watcher.sink.is_closed());
        let Self {
            faults, watchers, ..
        } = self;
        for watcher in watchers {
            if faults.silences(&watcher.client) {
                watcher.resync_due = true;
            } else if key.starts_with(&watcher.prefix) {
                watcher.sink.push(event.clone());
            }
        }
    }
}

impl Faults {
    /// True if watches of `client` get nothing.
    fn silences(&self, client: &str) -> bool {
        self.outage || self.watches_lost || self.partitioned.contains(client)
    }
}

fn record(key: &str, stored: &Stored) -> Record {
    Record {
        key: key.to_owned(),
        value: stored.value.clone(),
        version: Version::from_counter(stored.version),
    }
}

fn lease_lost(store: &str, lease: &LeaseId) -> MetadataError {
    MetadataError::LeaseLost {
        store: store.into(),
        lease: lease.to_string(),
    }
}
