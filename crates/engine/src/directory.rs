//! Finding peers: where a server's RPC listener is, and what a segment's record says.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use rerail_metadata::descriptor::{InstanceId, JsonForm, RpcMeta, SegmentDescriptor};
use rerail_metadata::{KeySpace, MetadataStore};
use rerail_transport::machine::peers::PeerRecord;
use rerail_transport::rdma::{Boxed, Offer, SignalError, Signaling};
use rerail_transport::rpc::host_port::PORT_DEFAULT;
use rerail_transport::rpc::{
    ConnectionMessage, HostPort, Notify, RpcClient, RpcError, Subscription,
};

use crate::{EngineError, Result};

/// Places that are remembered.
const PLACES_MAX: usize = 4096;

/// Asks peers, and the store about peers.
#[derive(Clone)]
pub(crate) struct Directory {
    shared: Arc<Shared>,
}

struct Shared {
    /// `None` where names are addresses.
    store: Option<(Arc<dyn MetadataStore>, KeySpace)>,
    client: RpcClient,
    /// RPC addresses by server name. Forgotten when a question to one fails, because a peer that
    /// was restarted listens elsewhere.
    places: Mutex<HashMap<String, HostPort>>,
    /// Names of segments by the server name in their NIC paths, where the two differ
    /// (`rdma_server_name`): whoever is in a path is asked under the segment's name.
    segments: Mutex<HashMap<String, String>>,
}

impl Directory {
    pub(crate) fn new(
        store: Option<(Arc<dyn MetadataStore>, KeySpace)>,
        client: RpcClient,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                store,
                client,
                places: Mutex::default(),
                segments: Mutex::default(),
            }),
        }
    }

    /// The store, if names are looked up in one.
    pub(crate) fn store(&self) -> Option<&(Arc<dyn MetadataStore>, KeySpace)> {
        self.shared.store.as_ref()
    }

    /// The record of a segment and the RPC location of its owner, read afresh. Where there is no
    /// store, `own` is what the peer is told in exchange.
    pub(crate) async fn record(&self, name: &str, own: &SegmentDescriptor) -> Result<PeerRecord> {
        let malformed = |cause| EngineError::Record {
            segment: name.to_owned(),
            cause,
        };
        if let Some((store, keys)) = &self.shared.store {
            let record = store.get(&keys.segment(name)).await?;
            let descriptor = SegmentDescriptor::from_json(&record.value).map_err(malformed)?;
            self.note(name, &descriptor);
            // After the segment, so that the location is not the older of the two.
            let place = match self.locate(store.as_ref(), keys, name).await {
                Ok(place) => Some(place),
                Err(error) => {
                    tracing::debug!(%error, name, "the location of a segment's owner");
                    None
                }
            };
            return Ok(PeerRecord {
                descriptor: Arc::new(descriptor),
                rpc: place.and_then(|place| Some((place.host, place.port?))),
            });
        }
        let place = self.place(name).await?;
        let own = own.to_json(JsonForm::Line);
        let answer = self.shared.client.metadata(&place, own).await;
        let answer = answer.map_err(|error| self.failed(name, "record", error))?;
        let descriptor = SegmentDescriptor::from_json(&answer).map_err(malformed)?;
        self.note(name, &descriptor);
        Ok(PeerRecord {
            descriptor: Arc::new(descriptor),
            rpc: Some((place.host, place.port.unwrap_or(PORT_DEFAULT))),
        })
    }

    /// The server name in the NIC paths of a segment, by its record in the store; `None` if it has
    /// none there, or there is no store.
    pub(crate) async fn stored_server(&self, name: &str) -> Result<Option<String>> {
        let Some((store, keys)) = &self.shared.store else {
            return Ok(None);
        };
        let record = match store.get(&keys.segment(name)).await {
            Ok(record) => record,
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let descriptor = SegmentDescriptor::from_json(&record.value);
        let descriptor = descriptor.map_err(|cause| EngineError::Record {
            segment: name.to_owned(),
            cause,
        })?;
        Ok(Some(descriptor.nic_path_server_name().to_owned()))
    }

    /// Remembers whose NIC paths have a server name of their own.
    fn note(&self, segment: &str, descriptor: &SegmentDescriptor) {
        if let Some(server) = &descriptor.rdma_server_name {
            let mut segments = self.segments();
            if segments.len() >= PLACES_MAX {
                segments.clear();
            }
            segments.insert(server.clone(), segment.to_owned());
        }
    }

    fn segments(&self) -> std::sync::MutexGuard<'_, HashMap<String, String>> {
        // A map of names is whole whatever panicked.
        self.shared
            .segments
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Subscribes to the record of the engine called `server`, as the reader `own`.
    pub(crate) async fn subscribe(&self, server: &str, own: InstanceId) -> Result<Subscription> {
        let place = self.place(server).await?;
        let answer = self.shared.client.subscribe(&place, own).await;
        answer.map_err(|error| self.failed(server, "subscription", error))
    }

    /// Forgets where an engine listens: it has moved.
    pub(crate) fn forget(&self, server: &str) {
        self.places().remove(server);
    }

    /// Sends a notification to the engine called `server`.
    pub(crate) async fn notify(&self, server: &str, notify: &Notify) -> Result<()> {
        let place = self.place(server).await?;
        let answer = self.shared.client.notify(&place, notify).await;
        answer.map_err(|error| self.failed(server, "notification", error))
    }

    /// Asks the engine called `server` for a sign of life.
    pub(crate) async fn probe(&self, server: &str) -> Result<()> {
        let place = self.place(server).await?;
        let answer = self.shared.client.probe(&place).await;
        answer.map_err(|error| self.failed(server, "sign of life", error))
    }

    fn failed(&self, server: &str, what: &'static str, error: RpcError) -> EngineError {
        self.places().remove(server);
        EngineError::Peer {
            peer: server.to_owned(),
            what,
            reason: error.to_string(),
        }
    }

    /// Where the engine called `server` listens.
    pub(crate) async fn place(&self, server: &str) -> Result<HostPort> {
        let Some((store, keys)) = &self.shared.store else {
            return HostPort::parse(server).map_err(|error| EngineError::Invalid {
                what: "segment name",
                reason: error.to_string(),
            });
        };
        let known = self.places().get(server).cloned();
        if let Some(place) = known {
            return Ok(place);
        }
        self.locate(store.as_ref(), keys, server).await
    }

    /// Reads where the engine called `server` listens, and remembers it.
    async fn locate(
        &self,
        store: &dyn MetadataStore,
        keys: &KeySpace,
        server: &str,
    ) -> Result<HostPort> {
        let record = store.get(&keys.rpc_meta(server)).await?;
        let meta = RpcMeta::from_json(&record.value).map_err(|cause| EngineError::Record {
            segment: server.to_owned(),
            cause,
        })?;
        let place = HostPort {
            host: meta.ip_or_host_name,
            port: Some(meta.rpc_port),
        };
        let mut places = self.places();
        if places.len() >= PLACES_MAX {
            places.clear();
        }
        places.insert(server.to_owned(), place.clone());
        Ok(place)
    }

    fn places(&self) -> std::sync::MutexGuard<'_, HashMap<String, HostPort>> {
        // A map of names is whole whatever panicked.
        self.shared
            .places
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Signaling for Directory {
    fn exchange(&self, server: &str, offer: Offer) -> Boxed<Result<Offer, SignalError>> {
        let segment = self.segments().get(server).cloned();
        let server = segment.unwrap_or_else(|| server.to_owned());
        let directory = self.clone();
        Box::pin(async move {
            let place = directory.place(&server).await;
            let place = place.map_err(|error| SignalError::NoAnswer(error.to_string()))?;
            let message = ConnectionMessage::offer(offer);
            match directory.shared.client.connection(&place, &message).await {
                Ok(reply) => Ok(reply.offer),
                Err(RpcError::Refused { reason, .. }) => Err(SignalError::Refused(reason)),
                Err(error) => {
                    directory.places().remove(&server);
                    Err(SignalError::NoAnswer(error.to_string()))
                }
            }
        })
    }
}
