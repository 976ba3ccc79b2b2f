//! Where the own record is stored, and the lease that ties it to this process.
//!
//! Records under a lease go when their process does not keep it alive: a killed engine leaves
//! nothing behind on stores that have leases (report M08). Deliberately not here: when something
//! is written, and what becomes of another's record, which the publisher machine decides.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rerail_metadata::descriptor::{JsonForm, RpcMeta, SegmentDescriptor, timestamp};
use rerail_metadata::{KeySpace, LeaseId, MetadataError, MetadataStore, Version};
use rerail_transport::machine::publisher::{StoreAnswer, StoreFailure, StoreRequest, StoredRecord};
use tokio::sync::Mutex;

/// How long records outlive a process that gives no sign of life.
const LEASE_TTL: Duration = Duration::from_secs(30);
/// How often the lease is kept alive; three times in its life.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How soon that is tried again when the store did not answer.
const KEEP_ALIVE_AGAIN: Duration = Duration::from_secs(1);

/// Where the own record is stored.
pub(crate) struct StorePlace {
    store: Arc<dyn MetadataStore>,
    keys: KeySpace,
    name: String,
    rpc: RpcMeta,
    lease: Mutex<Lease>,
}

/// Held while it is granted, so that there is only one.
enum Lease {
    /// Whether the store has leases is not known.
    Unknown,
    /// To be granted before the next write.
    None,
    Granted(LeaseId),
    /// The store has no leases.
    Unsupported,
}

impl StorePlace {
    /// A place for the segment `name`, whose RPC server is at `rpc`.
    pub(crate) fn new(
        store: Arc<dyn MetadataStore>,
        keys: KeySpace,
        name: String,
        rpc: RpcMeta,
    ) -> Self {
        Self {
            store,
            keys,
            name,
            rpc,
            lease: Mutex::new(Lease::Unknown),
        }
    }

    /// The lease to write under; `None` where the store has none.
    async fn lease(&self) -> Result<Option<LeaseId>, MetadataError> {
        let mut lease = self.lease.lock().await;
        match &*lease {
            Lease::Granted(lease) => return Ok(Some(lease.clone())),
            Lease::Unsupported => return Ok(None),
            Lease::None => {}
            Lease::Unknown => {
                // A server over HTTP shows by its first answer what it can do.
                match self.store.get(&self.keys.rpc_meta(&self.name)).await {
                    Err(error) if error.is_retryable() => return Err(error),
                    _ if self.store.capabilities().leases => {}
                    _ => {
                        *lease = Lease::Unsupported;
                        return Ok(None);
                    }
                }
            }
        }
        match self.store.grant_lease(LEASE_TTL).await {
            Ok(granted) => {
                *lease = Lease::Granted(granted.clone());
                Ok(Some(granted))
            }
            Err(MetadataError::Unsupported { .. }) => {
                *lease = Lease::Unsupported;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Forgets a lease that the store does not know any more.
    async fn lost(&self, lost: &LeaseId) {
        let mut lease = self.lease.lock().await;
        if matches!(&*lease, Lease::Granted(granted) if granted == lost) {
            *lease = Lease::None;
        }
    }

    /// Keeps the lease alive, for ever. `found_anew` is called when the store was lost and is
    /// back, and when it has lost the lease: in both cases it may have lost the records.
    pub(super) async fn keep_lease(&self, found_anew: impl Fn()) {
        let (mut wait, mut away) = (KEEP_ALIVE, false);
        loop {
            tokio::time::sleep(wait).await;
            let granted = match &*self.lease.lock().await {
                Lease::Granted(granted) => Some(granted.clone()),
                Lease::Unknown | Lease::None => None,
                Lease::Unsupported => return,
            };
            let Some(granted) = granted else {
                continue;
            };
            wait = KEEP_ALIVE;
            match self.store.keep_alive(&granted).await {
                Ok(()) if !away => {}
                Ok(()) => {
                    away = false;
                    found_anew();
                }
                Err(MetadataError::LeaseLost { .. }) => {
                    tracing::warn!(lease = %granted, "the store has lost the own records' lease");
                    self.lost(&granted).await;
                    away = false;
                    found_anew();
                }
                Err(error) => {
                    tracing::debug!(%error, "the own records' lease is not kept alive yet");
                    away = true;
                    wait = KEEP_ALIVE_AGAIN;
                }
            }
        }
    }

    /// Ends the lease, after the records are withdrawn.
    pub(super) async fn end_lease(&self) {
        let ended = std::mem::replace(&mut *self.lease.lock().await, Lease::Unsupported);
        if let Lease::Granted(lease) = ended
            && let Err(error) = self.store.revoke_lease(&lease).await
        {
            tracing::debug!(%error, "the own records' lease ends by itself");
        }
    }

    /// Carries out a request of the publisher.
    pub(super) async fn carry_out(&self, request: StoreRequest) -> StoreAnswer {
        let lease = match request {
            StoreRequest::Read | StoreRequest::Delete(_) => None,
            _ => match self.lease().await {
                Ok(lease) => lease,
                Err(error) => return StoreAnswer::Failed(failure(&error)),
            },
        };
        match self.request(request, lease.as_ref()).await {
            Ok(answer) => answer,
            Err(error) => {
                if let (MetadataError::LeaseLost { .. }, Some(lease)) = (&error, &lease) {
                    self.lost(lease).await;
                }
                StoreAnswer::Failed(failure(&error))
            }
        }
    }

    async fn request(
        &self,
        request: StoreRequest,
        lease: Option<&LeaseId>,
    ) -> Result<StoreAnswer, MetadataError> {
        let (store, key) = (&self.store, self.keys.segment(&self.name));
        let written = |version: Version| StoreAnswer::Written(Some(version));
        Ok(match request {
            StoreRequest::Create(descriptor) => {
                let value = self.encode(&descriptor);
                written(store.create_if_absent(&key, value, lease).await?)
            }
            StoreRequest::Swap(version, descriptor) => {
                let value = self.encode(&descriptor);
                let swapped = store.compare_and_swap(&key, &version, value, lease).await?;
                written(swapped)
            }
            StoreRequest::Read => {
                let record = store.get(&key).await?;
                StoreAnswer::Found(StoredRecord {
                    identity: SegmentDescriptor::from_json(&record.value)
                        .ok()
                        .and_then(|descriptor| descriptor.rerail)
                        .map(|rerail| (rerail.instance, rerail.generation)),
                    version: record.version,
                })
            }
            StoreRequest::Delete(version) => {
                store.delete_if(&key, &version).await?;
                let rpc_key = self.keys.rpc_meta(&self.name);
                if let Err(error) = store.delete(&rpc_key).await {
                    tracing::warn!(%error, "the RPC location stays in the store");
                }
                StoreAnswer::Written(None)
            }
            StoreRequest::RpcMeta => {
                let value = Bytes::from(self.rpc.to_json(self.form()));
                let key = self.keys.rpc_meta(&self.name);
                written(store.put(&key, value, lease).await?)
            }
        })
    }

    fn encode(&self, descriptor: &SegmentDescriptor) -> Bytes {
        let mut descriptor = descriptor.clone();
        descriptor.timestamp = timestamp(std::time::SystemTime::now());
        Bytes::from(descriptor.to_json(self.form()))
    }

    fn form(&self) -> JsonForm {
        if self.store.describe().starts_with("http") {
            JsonForm::Bare
        } else {
            JsonForm::Line
        }
    }
}

fn failure(error: &MetadataError) -> StoreFailure {
    if error.is_not_found() {
        StoreFailure::NotFound
    } else if error.is_conflict() {
        StoreFailure::Conflict
    } else {
        StoreFailure::Failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use rerail_metadata::MemoryStore;
    use rerail_metadata::descriptor::Protocol;

    use super::*;
    use crate::shy::Shy;

    fn place(store: &MemoryStore) -> StorePlace {
        let client = Arc::new(store.client("owner"));
        let rpc = RpcMeta::new("127.0.0.1", 15_000);
        StorePlace::new(client, KeySpace::default(), "a".into(), rpc)
    }

    async fn publish(place: &StorePlace) {
        let descriptor = Arc::new(SegmentDescriptor::new("a", Protocol::rdma()));
        for request in [StoreRequest::RpcMeta, StoreRequest::Create(descriptor)] {
            let answer = place.carry_out(request).await;
            assert!(matches!(answer, StoreAnswer::Written(_)), "{answer:?}");
        }
    }

    async fn records(store: &MemoryStore) -> usize {
        store.list("").await.expect("listed").len()
    }

    #[tokio::test(start_paused = true)]
    async fn m08_the_own_records_go_with_their_process_and_stay_while_it_lives() {
        let store = MemoryStore::new("s");
        let place = Arc::new(place(&store));
        publish(&place).await;
        let kept = Arc::clone(&place);
        let living = tokio::spawn(async move { kept.keep_lease(|| ()).await });
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_eq!(records(&store).await, 2);
        // Killed: nobody says a word any more.
        living.abort();
        tokio::time::sleep(LEASE_TTL + Duration::from_secs(1)).await;
        assert_eq!(records(&store).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn m15_a_lost_lease_and_an_outage_are_told_and_a_new_lease_is_written_under() {
        let store = MemoryStore::new("s");
        let place = Arc::new(place(&store));
        publish(&place).await;
        let (told, mut tellings) = tokio::sync::mpsc::unbounded_channel();
        let kept = Arc::clone(&place);
        tokio::spawn(async move {
            let tell = || told.send(()).expect("heard");
            kept.keep_lease(tell).await;
        });
        store.faults().lose_all_leases();
        assert_eq!(records(&store).await, 0);
        tellings.recv().await.expect("told of the lost lease");
        publish(&place).await;
        tokio::time::sleep(Duration::from_secs(100)).await;
        assert_eq!(records(&store).await, 2, "under the new lease");
        assert!(tellings.try_recv().is_err(), "nothing else happened");
        store.faults().partition("owner", true);
        tokio::time::sleep(Duration::from_secs(20)).await;
        store.faults().partition("owner", false);
        tellings.recv().await.expect("told that the store is back");
        place.end_lease().await;
        assert_eq!(records(&store).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn m08_a_store_that_shows_late_what_it_can_do_has_all_records_under_a_lease() {
        let store = MemoryStore::new("s");
        let rpc = RpcMeta::new("127.0.0.1", 15_000);
        let shy = Arc::new(Shy::new(store.client("owner")));
        let place = StorePlace::new(shy, KeySpace::default(), "a".into(), rpc);
        publish(&place).await;
        assert_eq!(records(&store).await, 2);
        tokio::time::sleep(LEASE_TTL + Duration::from_secs(1)).await;
        assert_eq!(records(&store).await, 0, "nobody keeps them");
    }
}
