//! The engine.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use rerail_metadata::descriptor::{InstanceId, Protocol, RpcMeta, SegmentDescriptor};
use rerail_metadata::{StoreOptions, connect};
use rerail_transport::machine::fence::FenceConfig;
use rerail_transport::machine::ids::{PeerId, RegionId};
use rerail_transport::machine::publisher::{Edit, KeyPair, LocalRecord, PublishOrder};
use rerail_transport::rdma::rail::RailStats;
use rerail_transport::rdma::{
    Clock, Identity, OnFinished, PeerNic, PeerSpec, RdmaTransport, Span, Transfer, TransferSpec,
};
use rerail_transport::rpc::{HostPort, Notify, RpcClient, RpcServer};
use rerail_verbs::{AccessFlags, DeviceList, HostMemory, RdmaOpcode};
use tokio::runtime::Runtime;

use crate::batch::{Batch, Operation, Request};
use crate::config::{EngineConfig, Transport};
use crate::directory::Directory;
use crate::memory::{Admission, MemoryOptions, Region, RegionUse, Registry};
use crate::publication::{Publication, StorePlace};
use crate::segment::Segment;
use crate::service::{EngineService, Notification, Shared};
use crate::{EngineError, Result, advertise};

/// Threads of the control runtime: store, RPC, publication and connections.
const CONTROL_THREADS: usize = 2;

/// How long a registration waits until peers can read of it in the store. It is published later in
/// any case.
const STORED_LIMIT: Duration = Duration::from_secs(3);

/// How long closing waits for the record to be withdrawn.
const LEAVE_LIMIT: Duration = Duration::from_secs(2);

/// A transfer engine: registers memory, opens segments of peers, and moves bytes between the two.
///
/// Clones share it; it is closed when the last clone, batch and segment's user is gone. Calls
/// block where they say so, and may be made from any thread, also from within a runtime.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    config: EngineConfig,
    name: String,
    rpc_address: String,
    service: Arc<EngineService>,
    directory: Directory,
    publication: Publication,
    rdma: Arc<RdmaTransport>,
    server: Option<RpcServer>,
    registry: RwLock<Registry>,
    /// Regions of the own record by their registration's address, in chunks.
    next_region: AtomicU64,
    next_peer: AtomicU64,
    // Last: what is above may still need it.
    runtime: Option<Runtime>,
}

impl Engine {
    /// Starts an engine on the given RDMA devices. Blocks until its record is published, or for a
    /// few seconds where the store is away.
    ///
    /// # Errors
    ///
    /// A device, port, setting or store that cannot be used.
    pub fn start(config: EngineConfig, devices: &DeviceList) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(CONTROL_THREADS)
            .thread_name("rerail-control")
            .enable_all()
            .build()
            .map_err(|error| EngineError::System {
                what: "the control runtime cannot be started",
                reason: error.to_string(),
            })?;
        let clock = Clock::start();
        let instance = InstanceId::now();
        let service = Arc::new(EngineService::default());
        let server = RpcServer::start(
            config.bind,
            config.rpc_ports.clone(),
            config.rpc_server,
            Arc::new(Shared(Arc::clone(&service))),
            runtime.handle(),
        )
        .map_err(|error| EngineError::System {
            what: "the RPC server cannot be started",
            reason: error.to_string(),
        })?;
        let port = server.port();
        let (host, why) = advertise::choose(&config);
        tracing::info!(host, port, why, "advertised RPC address");
        let rpc_address = HostPort {
            host: host.clone(),
            port: Some(port),
        }
        .to_string();
        let name = if config.is_peer_to_peer() {
            rpc_address.clone()
        } else {
            config.name.clone()
        };
        let store = if config.is_peer_to_peer() {
            None
        } else {
            let url = config.metadata.clone();
            let options = StoreOptions::default();
            Some(block(
                &runtime,
                async move { connect(&url, &options).await },
            )?)
        };
        let places = store.clone().map(|store| (store, config.keys.clone()));
        let directory = Directory::new(places, RpcClient::new(config.rpc_client));
        let identity = Identity {
            server: name.clone(),
            instance: Some(instance.to_string()),
        };
        let rdma = RdmaTransport::open(
            devices,
            &config.devices,
            config.rdma.clone(),
            clock,
            identity,
            Arc::new(directory.clone()),
            runtime.handle().clone(),
        )?;
        let rdma = Arc::new(rdma);
        let place = store.map(|store| StorePlace {
            store,
            keys: config.keys.clone(),
            name: name.clone(),
            rpc: RpcMeta::new(host, port),
        });
        let record = record(&name, &rdma);
        let publication = Publication::new(clock, instance, record, place);
        // The listener answers with nothing before these are set.
        let _ = service.publication.set(publication.clone());
        let _ = service.rdma.set(Arc::clone(&rdma));
        runtime.spawn(publication.clone().run());
        let engine = Self {
            inner: Arc::new(Inner {
                config,
                name,
                rpc_address,
                service,
                directory,
                publication,
                rdma,
                server: Some(server),
                registry: RwLock::default(),
                next_region: AtomicU64::new(1),
                next_peer: AtomicU64::new(1),
                runtime: Some(runtime),
            }),
        };
        Ok(engine)
    }

    /// Name of the own segment: what peers open.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// `host:port` of the RPC server, as peers are told.
    pub fn rpc_address(&self) -> &str {
        &self.inner.rpc_address
    }

    /// The own record, as peers see it.
    pub fn descriptor(&self) -> SegmentDescriptor {
        self.inner.publication.descriptor()
    }

    /// How the engine moves bytes.
    pub fn transport(&self) -> Transport {
        self.inner.config.transport
    }

    /// Registers all of `memory` with every NIC, or with none, and publishes it. Registering the
    /// same again is counted. Blocks.
    ///
    /// # Errors
    ///
    /// It overlaps other registered memory, or a device refuses it.
    pub fn register(&self, memory: &HostMemory, options: MemoryOptions) -> Result<()> {
        self.register_batch(std::slice::from_ref(memory), options)
    }

    /// Registers several memories, all or none, and publishes them together. Blocks. Errors as in
    /// [`register`](Self::register).
    pub fn register_batch(&self, memories: &[HostMemory], options: MemoryOptions) -> Result<()> {
        let mut registry = self.inner.registry_mut();
        let mut counted: Vec<u64> = Vec::new();
        let outcome = memories.iter().try_for_each(|memory| {
            if let Admission::New = registry.admit(memory, &options)? {
                let region = self.inner.register(memory, &options)?;
                registry.insert(region);
            }
            counted.push(memory.addr());
            Ok(())
        });
        if let Err(error) = outcome {
            for addr in counted {
                // It was entered just now and nobody else can have used it: the lock is held.
                if let Ok(Some(region)) = registry.remove(addr) {
                    self.inner.unpublish(&region);
                }
            }
            return Err(error);
        }
        drop(registry);
        self.inner.wait_stored();
        Ok(())
    }

    /// Removes the registration that begins at the address of its first byte, or one count of it.
    ///
    /// # Errors
    ///
    /// It is not registered, or [`EngineError::StillOwnedByHardware`]: transfers use it.
    pub fn unregister(&self, addr: u64) -> Result<()> {
        let removed = self.inner.registry_mut().remove(addr)?;
        if let Some(region) = removed {
            self.inner.unpublish(&region);
        }
        Ok(())
    }

    /// Opens a peer's segment: reads its record. Blocks.
    ///
    /// # Errors
    ///
    /// The peer or the store cannot be asked, the record is malformed, or its protocol is not
    /// ours.
    pub fn open_segment(&self, name: &str) -> Result<Segment> {
        // C++ users write a slash in front.
        let name = name.trim_start_matches('/').to_owned();
        if name.is_empty() {
            return Err(EngineError::Invalid {
                what: "segment name",
                reason: "it is empty".into(),
            });
        }
        let (directory, own) = (self.inner.directory.clone(), self.descriptor());
        let descriptor = self
            .inner
            .block(async move { directory.segment(&name, &own).await })?;
        self.inner.segment(descriptor)
    }

    /// A batch with room for `capacity` requests.
    pub fn allocate_batch(&self, capacity: usize) -> Batch {
        Batch::new(self.clone(), capacity)
    }

    /// Sends a notification to the engine of a segment. Blocks until it is taken.
    ///
    /// # Errors
    ///
    /// The peer cannot be asked, or refuses because too many wait there.
    pub fn notify(&self, segment: &str, notification: &Notification) -> Result<()> {
        let (directory, server) = (self.inner.directory.clone(), segment.to_owned());
        let notify = Notify {
            name: notification.name.clone(),
            notify_msg: notification.message.clone(),
        };
        self.inner
            .block(async move { directory.notify(&server, &notify).await })
    }

    /// Takes all notifications that have arrived.
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.inner.service.notifications.take()
    }

    /// Waits until a notification is there, at most `limit`. True if one is.
    pub fn wait_notification(&self, limit: Duration) -> bool {
        let notifications = &self.inner.service.notifications;
        notifications
            .arrived
            .wait(limit, || !notifications.is_empty())
    }

    /// Whether the engine of a segment answers. Blocks for at most the time of one question.
    pub fn probe(&self, segment: &str) -> Result<()> {
        let (directory, server) = (self.inner.directory.clone(), segment.to_owned());
        self.inner
            .block(async move { directory.probe(&server).await })
    }

    /// What the rails to a segment have done.
    pub fn rails(&self, segment: &Segment) -> Vec<RailStats> {
        let now = self.inner.rdma.clock().now();
        let peer = segment.peer().into_iter();
        peer.flat_map(|peer| peer.rails().iter().map(|rail| rail.stats(now)))
            .collect()
    }

    /// Checks a request and makes a transfer of it.
    pub(crate) fn prepare(&self, request: &Request) -> Result<(TransferSpec, RegionUse)> {
        let Request {
            operation,
            local_addr,
            ref segment,
            remote_addr,
            length,
            timeout,
        } = *request;
        let in_use = self.inner.registry().find(local_addr, length)?;
        let rdma = in_use.region().rdma.iter();
        let pieces = rdma.flat_map(|memory| memory.pieces());
        // Found in one registration, and so covered.
        let local = Span::new(local_addr, length, pieces).ok_or(EngineError::NotRegistered {
            addr: local_addr,
            length,
            nearest: "it is registered for another transport".into(),
        })?;
        let remote = segment.span(remote_addr, length)?;
        let Some(peer) = segment.peer() else {
            return Err(no_transport(segment.descriptor()));
        };
        let config = self.inner.rdma.config();
        let now = self.inner.rdma.clock().now();
        let deadline = now + timeout.unwrap_or(config.transfer_timeout);
        let spec = TransferSpec {
            peer: Arc::clone(peer),
            opcode: match operation {
                Operation::Read => RdmaOpcode::Read,
                Operation::Write => RdmaOpcode::Write,
            },
            local,
            remote,
            length,
            slicing: config.slicing,
            cut_off: FenceConfig::default().cut_off_at(now, deadline),
        };
        Ok((spec, in_use))
    }

    pub(crate) fn launch(
        &self,
        spec: TransferSpec,
        on_finished: Arc<dyn OnFinished>,
    ) -> Arc<Transfer> {
        self.inner.rdma.submit(spec, on_finished)
    }
}

impl Inner {
    fn segment(&self, descriptor: SegmentDescriptor) -> Result<Segment> {
        if !descriptor.protocol.includes("rdma") {
            return Err(no_transport(&descriptor));
        }
        let nics = descriptor
            .devices
            .iter()
            .enumerate()
            .map(|(index, device)| PeerNic {
                index: index as u32,
                path: descriptor.nic_path(&device.name).to_string(),
                gid: device.gid,
                lid: device.lid,
            });
        let spec = PeerSpec {
            id: PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed)),
            segment: descriptor.name.clone(),
            server: descriptor.nic_path_server_name().to_owned(),
            instance: descriptor
                .rerail
                .as_ref()
                .map(|rerail| rerail.instance.to_string()),
            nics: nics.collect(),
        };
        let peer = self.rdma.peer(spec);
        Ok(Segment::new(descriptor, Some(peer)))
    }

    fn register(&self, memory: &HostMemory, options: &MemoryOptions) -> Result<Arc<Region>> {
        let mut access = AccessFlags::LOCAL_WRITE;
        if options.remote_accessible {
            access |= AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        }
        let registered = self
            .rdma
            .register(memory, access)
            .map_err(rerail_transport::TransportError::from)?;
        let chunks = if options.remote_accessible {
            registered.keys()
        } else {
            Vec::new()
        };
        let mut ids = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let region = RegionId(self.next_region.fetch_add(1, Ordering::Relaxed));
            ids.push(region);
            let keys = chunk.lkeys.iter().zip(&chunk.rkeys);
            self.publication.edit(Edit::Register {
                region,
                name: options.location.clone(),
                addr: chunk.addr,
                length: chunk.length,
                keys: keys
                    .map(|(lkey, rkey)| KeyPair {
                        lkey: *lkey,
                        rkey: *rkey,
                    })
                    .collect(),
            });
        }
        Ok(Arc::new(Region::new(
            memory.clone(),
            options.clone(),
            Some(registered),
            ids,
        )))
    }

    fn unpublish(&self, region: &Region) {
        for region in &region.published {
            self.publication.edit(Edit::Unregister { region: *region });
        }
    }

    /// Gives the store time to take the latest registrations in.
    fn wait_stored(&self) {
        let publication = self.publication.clone();
        let generation = publication.generation();
        let stored =
            self.block(async move { Ok(publication.stored(generation, STORED_LIMIT).await) });
        if !matches!(stored, Ok(true)) {
            tracing::warn!(generation, "the store does not have the own record yet");
        }
    }

    fn block<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        match &self.runtime {
            Some(runtime) => block(runtime, work),
            None => Err(rerail_transport::TransportError::Closed.into()),
        }
    }

    fn registry(&self) -> RwLockReadGuard<'_, Registry> {
        // Registrations are entered whole, so a poisoned lock guards a whole registry.
        self.registry
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn registry_mut(&self) -> RwLockWriteGuard<'_, Registry> {
        self.registry
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.publication.leave();
        self.rdma.close();
        drop(self.server.take());
        let publication = self.publication.clone();
        // What cannot be withdrawn in time stays, and is taken over by the next instance.
        let _ = self.block(async move {
            publication.left(LEAVE_LIMIT).await;
            Ok(())
        });
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Runs `work` on the runtime and waits for it, from whatever thread.
fn block<T, E, F>(runtime: &Runtime, work: F) -> Result<T>
where
    T: Send + 'static,
    E: Into<EngineError> + Send + 'static,
    F: Future<Output = Result<T, E>> + Send + 'static,
{
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    runtime.spawn(async move {
        // Nobody waits any more: the result is dropped.
        let _ = sender.send(work.await);
    });
    match receiver.recv() {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(rerail_transport::TransportError::Closed.into()),
    }
}

/// The own record before any memory is registered.
fn record(name: &str, rdma: &RdmaTransport) -> LocalRecord {
    let base = SegmentDescriptor::new(name, Protocol::rdma());
    let names: Vec<String> = rdma
        .nics()
        .iter()
        .map(|nic| nic.name().to_owned())
        .collect();
    let mut record = LocalRecord::new(base, Vec::new(), names.clone(), PublishOrder::Fixed);
    let ports = rdma.nics().iter().map(|nic| {
        let facts = nic.facts();
        Edit::Port {
            local: nic.index(),
            gids: facts.gids.clone(),
            facts: facts.observed(),
        }
    });
    let nics = rerail_metadata::descriptor::LocationNics {
        preferred: names,
        available: Vec::new(),
    };
    let matrix = Edit::Matrix([(crate::memory::WILDCARD_LOCATION.to_owned(), nics)].into());
    for edit in ports.chain([matrix]) {
        if let Err(error) = record.apply(edit) {
            // Only for NICs that the record was not made with.
            tracing::error!(%error, "the own record");
        }
    }
    record
}

fn no_transport(descriptor: &SegmentDescriptor) -> EngineError {
    EngineError::NoTransport {
        segment: descriptor.name.clone(),
        protocol: descriptor.protocol.names().join(" and "),
        available: "rdma".into(),
    }
}
