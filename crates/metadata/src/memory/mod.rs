//! `memory://NAME`: a store inside the process, with faults for tests.
//!
//! Not here: anything between processes, and persistence.

mod faults;
mod state;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::error::MetadataError;
use crate::store::{
    Capabilities, LeaseId, MetadataStore, Record, Result, Version, Watch, WatchKind,
};
pub use faults::MemoryFaults;
use state::State;

/// Stores by name. They live as long as the process, as a server would outlive its clients.
static STORES: LazyLock<Mutex<HashMap<String, Arc<Mutex<State>>>>> = LazyLock::new(Mutex::default);

/// A client of a store inside the process.
///
/// Clones are the same client; [`MemoryStore::client`] makes another one of the same store, so
/// that one of them can be cut off.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    name: Arc<str>,
    client: Arc<str>,
    deadline: Duration,
    state: Arc<Mutex<State>>,
}

impl MemoryStore {
    /// A store that nobody else has.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            client: "".into(),
            deadline: Duration::from_secs(3),
            state: Arc::default(),
        }
    }

    /// The store of this name within the process.
    pub fn shared(name: &str, deadline: Duration) -> Self {
        let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
        let state = Arc::clone(stores.entry(name.to_owned()).or_default());
        Self {
            name: name.into(),
            client: "".into(),
            deadline,
            state,
        }
    }

    /// Another client of the same store.
    pub fn client(&self, client: &str) -> Self {
        Self {
            client: client.into(),
            ..self.clone()
        }
    }

    /// Another client with another deadline for each operation.
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self {
            deadline,
            ..self.clone()
        }
    }

    /// Faults of the store, for all its clients or for one.
    pub fn faults(&self) -> MemoryFaults {
        MemoryFaults::new(Arc::clone(&self.state))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is changed in single steps, so a panic elsewhere leaves it usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one operation with the faults that are set.
    async fn run<T>(
        &self,
        operation: &'static str,
        act: impl FnOnce(&mut State, &str) -> Result<T> + Send,
    ) -> Result<T> {
        let delay = self.lock().delay();
        if delay >= self.deadline {
            tokio::time::sleep(self.deadline).await;
            return Err(MetadataError::TimedOut {
                store: self.describe(),
                operation,
                deadline: self.deadline,
            });
        }
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let mut state = self.lock();
        if let Some(reason) = state.out_of_reach(&self.client) {
            return Err(MetadataError::Unavailable {
                store: self.describe(),
                operation,
                reason: reason.into(),
            });
        }
        state.expire_leases();
        act(&mut state, &self.describe())
    }
}

#[async_trait]
impl MetadataStore for MemoryStore {
    fn describe(&self) -> String {
        format!("memory://{}", self.name)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            atomic_conditions: true,
            list: true,
            leases: true,
            watch: WatchKind::Events,
            value_bytes_max: self.lock().faults.value_bytes_max,
        }
    }

    fn check_size(&self, key: &str, value_bytes: usize) -> Result<()> {
        self.lock().check_size(&self.describe(), key, value_bytes)
    }

    async fn get(&self, key: &str) -> Result<Record> {
        self.run("get", |state, store| state.get(store, key)).await
    }

    async fn put(&self, key: &str, value: Bytes, lease: Option<&LeaseId>) -> Result<Version> {
        self.run("put", |state, store| state.put(store, key, value, lease))
            .await
    }

    async fn create_if_absent(
        &self,
        key: &str,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        self.run("create", |state, store| {
            state.check(store, key, None)?;
            state.put(store, key, value, lease)
        })
        .await
    }

    async fn compare_and_swap(
        &self,
        key: &str,
        expected: &Version,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        self.run("compare-and-swap", |state, store| {
            state.check(store, key, Some(expected))?;
            state.put(store, key, value, lease)
        })
        .await
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        self.run("delete", |state, _| Ok(state.remove(key))).await
    }

    async fn delete_if(&self, key: &str, expected: &Version) -> Result<bool> {
        self.run("delete", |state, store| {
            if state.get(store, key).is_err() {
                return Ok(false);
            }
            state.check(store, key, Some(expected))?;
            Ok(state.remove(key))
        })
        .await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Record>> {
        self.run("list", |state, _| Ok(state.list(prefix))).await
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId> {
        let state = Arc::clone(&self.state);
        self.run("grant a lease", |locked, _| {
            Ok(locked.grant_lease(ttl, state))
        })
        .await
    }

    async fn keep_alive(&self, lease: &LeaseId) -> Result<()> {
        self.run("keep a lease alive", |state, store| {
            state.keep_alive(store, lease)
        })
        .await
    }

    async fn revoke_lease(&self, lease: &LeaseId) -> Result<()> {
        self.run("revoke a lease", |state, _| {
            state.end_lease(lease);
            Ok(())
        })
        .await
    }

    async fn watch(&self, prefix: &str) -> Result<Watch> {
        let (sink, watch) = Watch::channel();
        self.lock().watch(prefix, &self.client, sink);
        Ok(watch)
    }
}
