//! A store for tests that shows only by its first answer what it can do, as HTTP servers do.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rerail_metadata::{
    Capabilities, LeaseId, MemoryStore, MetadataStore, Record, Result, Version, Watch, WatchKind,
};

/// The store.
#[derive(Debug)]
pub(crate) struct Shy {
    store: MemoryStore,
    answered: AtomicBool,
}

impl Shy {
    pub(crate) fn new(store: MemoryStore) -> Self {
        Self {
            store,
            answered: AtomicBool::new(false),
        }
    }

    fn answer(&self) -> &MemoryStore {
        self.answered.store(true, Ordering::Release);
        &self.store
    }
}

#[async_trait]
impl MetadataStore for Shy {
    fn describe(&self) -> String {
        self.store.describe()
    }

    fn capabilities(&self) -> Capabilities {
        let capabilities = self.store.capabilities();
        if self.answered.load(Ordering::Acquire) {
            return capabilities;
        }
        Capabilities {
            leases: false,
            watch: WatchKind::Polling {
                interval: Duration::from_secs(5),
            },
            ..capabilities
        }
    }

    async fn get(&self, key: &str) -> Result<Record> {
        self.answer().get(key).await
    }

    async fn put(&self, key: &str, value: Bytes, lease: Option<&LeaseId>) -> Result<Version> {
        self.answer().put(key, value, lease).await
    }

    async fn create_if_absent(
        &self,
        key: &str,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        self.answer().create_if_absent(key, value, lease).await
    }

    async fn compare_and_swap(
        &self,
        key: &str,
        expected: &Version,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        let store = self.answer();
        store.compare_and_swap(key, expected, value, lease).await
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        self.answer().delete(key).await
    }

    async fn delete_if(&self, key: &str, expected: &Version) -> Result<bool> {
        self.answer().delete_if(key, expected).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Record>> {
        self.answer().list(prefix).await
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId> {
        self.answer().grant_lease(ttl).await
    }

    async fn keep_alive(&self, lease: &LeaseId) -> Result<()> {
        self.answer().keep_alive(lease).await
    }

    async fn revoke_lease(&self, lease: &LeaseId) -> Result<()> {
        self.answer().revoke_lease(lease).await
    }

    async fn watch(&self, prefix: &str) -> Result<Watch> {
        self.store.watch(prefix).await
    }
}
