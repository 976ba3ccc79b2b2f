//! The driver of the publisher: every change of the own record goes through here.
//!
//! Edits take effect at once for peers that ask; a task writes them to the store. Deliberately
//! not here: what is published, in which order and when it is tried again, which the
//! [`Publisher`] machine decides.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rerail_metadata::descriptor::{InstanceId, JsonForm, RpcMeta, SegmentDescriptor, timestamp};
use rerail_metadata::{KeySpace, MetadataError, MetadataStore, Version};
use rerail_transport::machine::Machine;
use rerail_transport::machine::publisher::{
    Action, Edit, Input, LocalRecord, Publisher, PublisherConfig, StoreAnswer, StoreFailure,
    StoreRequest, StoredRecord,
};
use rerail_transport::rdma::Clock;
use tokio::sync::Notify;

/// The own record and its way into the store.
#[derive(Clone)]
pub(crate) struct Publication {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Clock,
    publisher: Mutex<Publisher>,
    /// Something was handed to the publisher.
    touched: Notify,
    /// Nothing is published any more.
    over: AtomicBool,
    store: Option<StorePlace>,
}

/// Where the own record is stored.
pub(crate) struct StorePlace {
    pub(crate) store: Arc<dyn MetadataStore>,
    pub(crate) keys: KeySpace,
    pub(crate) name: String,
    pub(crate) rpc: RpcMeta,
}

impl Publication {
    /// A publication of `record`; `store` is `None` where peers ask for it themselves.
    pub(crate) fn new(
        clock: Clock,
        instance: InstanceId,
        record: LocalRecord,
        store: Option<StorePlace>,
    ) -> Self {
        let config = PublisherConfig {
            has_store: store.is_some(),
            ..PublisherConfig::default()
        };
        let publisher = Publisher::new(clock.now(), config, instance, record, rand::random());
        Self {
            shared: Arc::new(Shared {
                clock,
                publisher: Mutex::new(publisher),
                touched: Notify::new(),
                over: AtomicBool::new(false),
                store,
            }),
        }
    }

    /// The current record, as a peer that asks is told.
    pub(crate) fn descriptor(&self) -> SegmentDescriptor {
        let mut descriptor = SegmentDescriptor::clone(self.publisher().descriptor());
        descriptor.timestamp = timestamp(std::time::SystemTime::now());
        descriptor
    }

    /// Changes the record. Returns the generation that has the change.
    pub(crate) fn edit(&self, edit: Edit) -> u64 {
        let now = self.shared.clock.now();
        let mut publisher = self.publisher();
        publisher.handle(now, Input::Edit(edit));
        let generation = publisher.generation();
        drop(publisher);
        self.shared.touched.notify_one();
        generation
    }

    /// Generation of the current record.
    pub(crate) fn generation(&self) -> u64 {
        self.publisher().generation()
    }

    /// Waits until a generation is in the store, at most `limit`. True if it is, or if there is
    /// no store.
    pub(crate) async fn stored(&self, generation: u64, limit: Duration) -> bool {
        if self.shared.store.is_none() {
            return true;
        }
        let begin = tokio::time::Instant::now();
        while self.publisher().stored_generation() < generation {
            if begin.elapsed() > limit {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        true
    }

    /// Withdraws the record; [`run`](Self::run) ends once that is done.
    pub(crate) fn leave(&self) {
        let now = self.shared.clock.now();
        self.publisher().handle(now, Input::Leave);
        self.shared.touched.notify_one();
    }

    /// Waits until the record is withdrawn, at most `limit`.
    pub(crate) async fn left(&self, limit: Duration) {
        let begin = tokio::time::Instant::now();
        while !self.shared.over.load(Ordering::Acquire) && begin.elapsed() < limit {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Writes the record to the store until it is withdrawn or superseded.
    pub(crate) async fn run(self) {
        let shared = &self.shared;
        loop {
            while let Some(action) = self.poll() {
                if !self.act(action).await {
                    shared.over.store(true, Ordering::Release);
                    return;
                }
            }
            let due = self.publisher().next_timeout();
            let sleep = async {
                match due {
                    Some(due) => {
                        tokio::time::sleep_until(shared.clock.instant(due).into()).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = shared.touched.notified() => {}
                () = sleep => {
                    let now = shared.clock.now();
                    self.publisher().handle_timeout(now);
                }
            }
        }
    }

    fn poll(&self) -> Option<Action> {
        self.publisher().poll()
    }

    /// False after the last action.
    async fn act(&self, action: Action) -> bool {
        match action {
            Action::Store { ticket, request } => {
                let answer = match &self.shared.store {
                    Some(place) => place.carry_out(request).await,
                    None => StoreAnswer::Failed(StoreFailure::Failed("there is no store".into())),
                };
                let now = self.shared.clock.now();
                let input = Input::Store { ticket, answer };
                self.publisher().handle(now, input);
            }
            Action::StoreTrouble {
                generation,
                attempt: 1,
                failure,
            } => tracing::error!(generation, %failure, "the own record is not stored yet"),
            Action::StoreTrouble {
                generation,
                attempt,
                failure,
            } => tracing::debug!(generation, attempt, %failure, "the own record is not stored yet"),
            Action::EditRefused(error) => tracing::error!(%error, "an edit of the own record"),
            Action::Superseded { by } => {
                tracing::error!(?by, "another instance has taken over the name");
                return false;
            }
            Action::Left => return false,
            Action::Stored { generation } => tracing::debug!(generation, "own record stored"),
            // Nobody can subscribe yet.
            Action::Push { .. } | Action::Heartbeat { .. } | Action::DropSubscriber { .. } => {}
        }
        true
    }

    fn publisher(&self) -> MutexGuard<'_, Publisher> {
        // The machine does not panic half-way; a poisoned one is whole.
        self.shared
            .publisher
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl StorePlace {
    async fn carry_out(&self, request: StoreRequest) -> StoreAnswer {
        let key = self.keys.segment(&self.name);
        let written = |version: Result<Version, MetadataError>| match version {
            Ok(version) => StoreAnswer::Written(Some(version)),
            Err(error) => StoreAnswer::Failed(failure(&error)),
        };
        match request {
            StoreRequest::Create(descriptor) => {
                let value = self.encode(&descriptor);
                written(self.store.create_if_absent(&key, value, None).await)
            }
            StoreRequest::Swap(version, descriptor) => {
                let value = self.encode(&descriptor);
                written(
                    self.store
                        .compare_and_swap(&key, &version, value, None)
                        .await,
                )
            }
            StoreRequest::Read => match self.store.get(&key).await {
                Ok(record) => StoreAnswer::Found(StoredRecord {
                    identity: SegmentDescriptor::from_json(&record.value)
                        .ok()
                        .and_then(|descriptor| descriptor.rerail)
                        .map(|rerail| (rerail.instance, rerail.generation)),
                    version: record.version,
                }),
                Err(error) => StoreAnswer::Failed(failure(&error)),
            },
            StoreRequest::Delete(version) => match self.store.delete_if(&key, &version).await {
                Ok(_) => {
                    let rpc_key = self.keys.rpc_meta(&self.name);
                    if let Err(error) = self.store.delete(&rpc_key).await {
                        tracing::warn!(%error, "the RPC location stays in the store");
                    }
                    StoreAnswer::Written(None)
                }
                Err(error) => StoreAnswer::Failed(failure(&error)),
            },
            StoreRequest::RpcMeta => {
                let value = Bytes::from(self.rpc.to_json(self.form()));
                let key = self.keys.rpc_meta(&self.name);
                written(self.store.put(&key, value, None).await)
            }
        }
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
