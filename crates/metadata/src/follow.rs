//! Following a prefix: a watch with the lists that its `Resync`s ask for.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::backoff::Backoff;
use crate::error::MetadataError;
use crate::store::{MetadataStore, Record, Result, Watch, WatchEvent};

/// What a [`Follow`] tells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// A record is new, or has another value.
    Put(Record),
    /// A record is gone.
    Delete {
        /// Its key.
        key: String,
    },
    /// Everything up to here is what the store holds. Comes after the first reading, and after
    /// each one that a gap made necessary.
    Synced,
}

/// Keeps a copy of the records under a prefix and tells every difference, whatever gaps the
/// store's watch has. Outages are waited out; they change nothing.
///
/// Where the store cannot list, the prefix is taken for one key.
#[derive(Debug)]
pub struct Follow {
    store: Arc<dyn MetadataStore>,
    prefix: String,
    watch: Watch,
    known: BTreeMap<String, Record>,
    pending: VecDeque<Change>,
    resync_due: bool,
    backoff: Backoff,
}

impl Follow {
    /// Starts to follow `prefix`.
    ///
    /// # Errors
    ///
    /// Those of [`MetadataStore::watch`].
    pub async fn new(store: Arc<dyn MetadataStore>, prefix: &str) -> Result<Self> {
        let watch = store.watch(prefix).await?;
        Ok(Self {
            store,
            prefix: prefix.to_owned(),
            watch,
            known: BTreeMap::new(),
            pending: VecDeque::new(),
            resync_due: false,
            backoff: Backoff::for_stores(),
        })
    }

    /// The records as last told.
    pub fn records(&self) -> &BTreeMap<String, Record> {
        &self.known
    }

    /// The next change; `None` after the store's driver has been shut down. May be cancelled.
    pub async fn next(&mut self) -> Option<Change> {
        loop {
            if let Some(change) = self.pending.pop_front() {
                return Some(change);
            }
            if self.resync_due {
                match self.read().await {
                    Ok(records) => {
                        self.compare(records);
                        self.resync_due = false;
                        self.backoff.reset();
                    }
                    Err(error) => {
                        tracing::debug!(%error, prefix = self.prefix, "cannot read anew yet");
                        self.backoff.pause().await;
                    }
                }
                continue;
            }
            match self.watch.next().await? {
                WatchEvent::Resync => self.resync_due = true,
                WatchEvent::Put(record) => self.put(record),
                WatchEvent::Delete { key } => self.delete(key),
            }
        }
    }

    async fn read(&self) -> Result<Vec<Record>> {
        match self.store.list(&self.prefix).await {
            Err(MetadataError::Unsupported { .. }) => match self.store.get(&self.prefix).await {
                Ok(record) => Ok(vec![record]),
                Err(error) if error.is_not_found() => Ok(Vec::new()),
                Err(error) => Err(error),
            },
            listed => listed,
        }
    }

    fn compare(&mut self, records: Vec<Record>) {
        let listed: std::collections::BTreeSet<&str> =
            records.iter().map(|record| record.key.as_str()).collect();
        let gone: Vec<String> = self
            .known
            .keys()
            .filter(|key| !listed.contains(key.as_str()))
            .cloned()
            .collect();
        for key in gone {
            self.delete(key);
        }
        for record in records {
            self.put(record);
        }
        self.pending.push_back(Change::Synced);
    }

    fn put(&mut self, record: Record) {
        let old = self.known.insert(record.key.clone(), record.clone());
        if old.is_none_or(|old| old.value != record.value) {
            self.pending.push_back(Change::Put(record));
        }
    }

    fn delete(&mut self, key: String) {
        if self.known.remove(&key).is_some() {
            self.pending.push_back(Change::Delete { key });
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::memory::MemoryStore;

    async fn changes_until_synced(follow: &mut Follow) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            match follow.next().await.expect("the store lives") {
                Change::Put(record) => {
                    seen.push(format!(
                        "+{}={}",
                        record.key,
                        String::from_utf8_lossy(&record.value)
                    ));
                }
                Change::Delete { key } => seen.push(format!("-{key}")),
                Change::Synced => return seen,
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_change_in_a_gap_is_missed_and_none_is_told_twice() {
        let store = MemoryStore::new("follow");
        let (writer, reader) = (store.client("writer"), store.client("reader"));
        let put = |key: &'static str, value: &'static str| {
            let writer = writer.clone();
            async move {
                writer
                    .put(key, Bytes::from_static(value.as_bytes()), None)
                    .await
            }
        };
        for key in ["p/same", "p/changed", "p/removed", "q/beside"] {
            put(key, "1").await.expect("put");
        }
        let mut follow = Follow::new(Arc::new(reader), "p/").await.expect("follow");
        assert_eq!(
            changes_until_synced(&mut follow).await,
            ["+p/changed=1", "+p/removed=1", "+p/same=1"]
        );
        store.faults().partition("reader", true);
        put("p/changed", "2").await.expect("put");
        put("p/added", "1").await.expect("put");
        put("p/brief", "1").await.expect("put");
        for key in ["p/removed", "p/brief"] {
            writer.delete(key).await.expect("delete");
        }
        store.faults().partition("reader", false);
        assert_eq!(
            changes_until_synced(&mut follow).await,
            ["-p/removed", "+p/added=1", "+p/changed=2"]
        );
        put("p/same", "1").await.expect("put of the same value");
        put("p/added", "2").await.expect("put");
        match follow.next().await {
            Some(Change::Put(record)) => assert_eq!(record.key, "p/added"),
            other => panic!("{other:?}"),
        }
    }
}
