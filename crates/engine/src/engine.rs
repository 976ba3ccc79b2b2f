//! The engine.

mod registration;
mod start;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use rerail_metadata::descriptor::{Device, SegmentDescriptor};
use rerail_transport::TransportError;
use rerail_transport::machine::ids::PeerId;
use rerail_transport::rdma::rail::RailStats;
use rerail_transport::rdma::{
    Clock, OnFinished, Peer, PeerNic, PeerSpec, RdmaTransport, Span, Transfer, TransferSpec,
};
use rerail_transport::rpc::{HostPort, Notify, RpcServer};
use rerail_verbs::{HostMemory, RdmaOpcode};
use tokio::runtime::Runtime;

use crate::batch::{Batch, Operation, Request};
use crate::config::{EngineConfig, Transport};
use crate::directory::Directory;
use crate::memory::{RegionUse, Registry};
use crate::peers::{Life, PeerView, ReachKey};
use crate::publication::Publication;
use crate::segment::{Route, Segment};
use crate::service::{EngineService, Notification};
use crate::tcp::{self, TcpPeer, TcpPeers, TcpSide, Tether};
use crate::topology::Places;
use crate::{EngineError, Result};

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
    clock: Clock,
    name: String,
    rpc_address: String,
    service: Arc<EngineService>,
    directory: Directory,
    publication: Publication,
    peers: PeerView,
    rdma: Option<Arc<RdmaTransport>>,
    places: Arc<ArcSwap<Places>>,
    tcp: Option<TcpSide>,
    server: Option<RpcServer>,
    /// Never held while a device works: submitting takes it.
    registry: Arc<RwLock<Registry>>,
    /// Held by a registration for all its time, which may be minutes.
    registering: Mutex<()>,
    /// Regions of the own record by their registration's address, in chunks.
    next_region: AtomicU64,
    next_peer: AtomicU64,
    tcp_peers: TcpPeers,
    // Last: what is above may still need it.
    runtime: Option<Runtime>,
}

impl Engine {
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

    /// Opens a peer's segment: reads its record, so that what the peer has registered before is
    /// found. Blocks. From then on its record is followed, while a segment of it is held.
    ///
    /// # Errors
    ///
    /// The peer cannot be asked, nor the store for a peer that is not known yet; the record is
    /// malformed, or its protocol is not ours.
    pub fn open_segment(&self, name: &str) -> Result<Segment> {
        // C++ users write a slash in front.
        let name = name.trim_start_matches('/').to_owned();
        if name.is_empty() {
            return Err(EngineError::Invalid {
                what: "segment name",
                reason: "it is empty".into(),
            });
        }
        let inner = Arc::clone(&self.inner);
        self.inner.block(async move {
            let life = inner.peers.open(&name).await?;
            inner.segment(life).await
        })
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

    /// Cuts a peer off from what it has posted: every RDMA connection between its NICs and ours is
    /// closed, whoever opened it. Blocks, usually for milliseconds. `peer` is the name of its
    /// segment; or the server name of its NIC paths, where that is another and neither a store nor
    /// an open segment tells it. Returns how many connections there were; none is no error, and
    /// without a store may mean that the name is wrong.
    ///
    /// Once this has returned, nothing that the peer had posted on one of these connections, and
    /// nothing of it that is on the wire still, can read or write memory of this engine: all queue
    /// pairs were moved to ERR and are drained. So memory can be used for something else that the
    /// peer does not address any more: because its process is dead, or has been told so.
    ///
    /// It does not keep the peer away: it may connect anew, at once, and a Rerail engine does so to
    /// finish what it was at. Only [`unregister`](Self::unregister) takes memory away from it. Own
    /// transfers towards the peer go on over new connections, too. Access over TCP is not cut off,
    /// since its connections do not say whose they are.
    ///
    /// # Errors
    ///
    /// [`TransportError::NotRevoked`] after five seconds, as when a device hangs: it names the
    /// NICs. What they were told to stop goes on stopping, and calling again goes on waiting; until
    /// then the memory must not be reused. [`EngineError::Metadata`] if no connection has the name
    /// itself, and the store cannot tell whether the peer's NIC paths have another.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # fn expired(engine: &rerail_engine::Engine) -> rerail_engine::Result<()> {
    /// // 10.0.0.2 has died, and held a lease on a part of a registered buffer.
    /// engine.revoke("10.0.0.2:15428")?;
    /// // Nothing that it sent before comes late: the part can be given to somebody else.
    /// # Ok(())
    /// # }
    /// ```
    pub fn revoke(&self, peer: &str) -> Result<usize> {
        let Some(rdma) = self.inner.rdma.clone() else {
            return Ok(0);
        };
        let name = peer.trim_start_matches('/').to_owned();
        // NIC paths may begin with a name of their own.
        let known = self.inner.peers.life(&name);
        let known = known.map(|life| life.descriptor().nic_path_server_name().to_owned());
        let directory = self.inner.directory.clone();
        self.inner.block(async move {
            let found = match known {
                Some(server) => Ok(Some(server)),
                None => directory.stored_server(&name).await,
            };
            let (server, unresolved) = match found {
                Ok(server) => (server, None),
                Err(error) => (None, Some(error)),
            };
            let servers = BTreeSet::from_iter(server.into_iter().chain([name]));
            let count = rdma.revoke(&servers).await?;
            match unresolved {
                // It may have connections under a name that is not known.
                Some(error) if count == 0 => Err(error),
                _ => Ok(count),
            }
        })
    }

    /// What the rails to a segment have done.
    pub fn rails(&self, segment: &Segment) -> Vec<RailStats> {
        let rails = segment.peer().rails();
        rails.iter().map(|rail| rail.stats()).collect()
    }

    /// Bytes of host memory that an RDMA device may still read or write, though its transfer has
    /// ended or its registration was given up: because the device hangs, or refuses to let go.
    ///
    /// Counted are what was in flight of transfers that ended as
    /// [`Unfenced`](rerail_transport::TransferError::Unfenced); all of each registration that
    /// [`unregister`](Self::unregister), or a [`register`](Self::register) that failed, has left to
    /// a device; and regions that a device refused to deregister. What counts for two of these
    /// reasons counts twice. 0 again once the device has answered, or, where it refused something,
    /// once it is closed; always 0 over TCP. Memory must not be freed before `unregister` has taken
    /// it back: until then it says [`StillOwnedByHardware`](EngineError::StillOwnedByHardware).
    /// Never blocks.
    ///
    /// ```no_run
    /// # fn watch(engine: &rerail_engine::Engine) {
    /// let bytes = engine.quarantined_bytes();
    /// if bytes > 0 {
    ///     eprintln!("{bytes} bytes are in the hands of a device that does not answer");
    /// }
    /// # }
    /// ```
    pub fn quarantined_bytes(&self) -> u64 {
        let rdma = self.inner.rdma.as_ref();
        rdma.map_or(0, |rdma| rdma.quarantined_bytes())
    }

    /// What batches need of the engine beyond its life.
    pub(crate) fn for_batches(&self) -> ForBatches {
        let inner = &self.inner;
        let runtime = inner.runtime.as_ref();
        ForBatches {
            engine: Arc::downgrade(inner),
            peers: inner.peers.clone(),
            clock: inner.clock,
            runtime: runtime.map(|runtime| runtime.handle().clone()),
        }
    }

    /// Checks a request and makes a transfer of it, by the record of this revision.
    pub(crate) fn prepare(&self, request: &Request) -> Result<(TransferSpec, RegionUse, u64)> {
        let Request {
            operation,
            local_addr,
            ref segment,
            remote_addr,
            length,
            timeout,
        } = *request;
        let in_use = self.inner.registry().find(local_addr, length)?;
        let pieces = in_use.region().pieces.iter().cloned();
        // Found in one registration, and so covered.
        let local = Span::new(local_addr, length, pieces).ok_or(EngineError::NotRegistered {
            addr: local_addr,
            length,
            nearest: "it is registered in part".into(),
        })?;
        let local = local.near(in_use.region().near());
        let config = &self.inner.config.rdma;
        let now = self.inner.clock.now();
        let limit = timeout.unwrap_or(config.transfer_timeout);
        let deadline = now + limit;
        let (remote, revision) = segment.span(remote_addr, length)?;
        let spec = TransferSpec {
            peer: Arc::clone(segment.peer()),
            opcode: match operation {
                Operation::Read => RdmaOpcode::Read,
                Operation::Write => RdmaOpcode::Write,
            },
            local,
            remote,
            length,
            slicing: match segment.route() {
                Route::Rdma => config.slicing,
                Route::Tcp(_) => tcp::SLICING,
            },
            cut_off: config.limits.cut_off_at(now, deadline),
            limit,
        };
        Ok((spec, in_use, revision))
    }

    /// Starts a transfer to `segment`, whose near end lies in `memory`. What could not be fenced is
    /// put into `tether`. Towards a peer that is gone it fails with that reason; for one that
    /// goes meanwhile, the caller's batch has to be bound to its life.
    pub(crate) fn launch(
        &self,
        segment: &Segment,
        memory: &HostMemory,
        spec: TransferSpec,
        on_finished: Arc<dyn OnFinished>,
        tether: &Arc<Tether>,
    ) -> Arc<Transfer> {
        if let Some(failure) = segment.life().failure() {
            let transfer = Transfer::new(spec, on_finished);
            transfer.fail(failure);
            return transfer;
        }
        match (segment.route(), &self.inner.rdma) {
            (Route::Rdma, Some(rdma)) => rdma.submit(spec, on_finished),
            (Route::Tcp(peer), _) => {
                let transfer = Transfer::new(spec, on_finished);
                peer.launch(&transfer, memory, tether);
                transfer
            }
            (Route::Rdma, None) => {
                // A segment of another engine.
                let transfer = Transfer::new(spec, on_finished);
                transfer.fail(rerail_transport::TransferError::Closed);
                transfer
            }
        }
    }
}

/// What batches need of their engine. It does not keep the engine open.
#[derive(Clone)]
pub(crate) struct ForBatches {
    engine: Weak<Inner>,
    pub(crate) peers: PeerView,
    pub(crate) clock: Clock,
    /// `None` in an engine that is closed.
    pub(crate) runtime: Option<tokio::runtime::Handle>,
}

impl ForBatches {
    /// The engine, while it is open. Not for data threads: who drops the last one closes it.
    pub(crate) fn engine(&self) -> Option<Engine> {
        let inner = self.engine.upgrade()?;
        Some(Engine { inner })
    }
}

impl Inner {
    /// The segment of a peer, reached by what its record speaks.
    async fn segment(&self, life: Arc<Life>) -> Result<Segment> {
        let descriptor = life.descriptor();
        let spec = PeerSpec {
            id: PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed)),
            segment: descriptor.name.clone(),
            server: descriptor.nic_path_server_name().to_owned(),
            instance: descriptor
                .rerail
                .as_ref()
                .map(|rerail| rerail.instance.to_string()),
            nics: Vec::new(),
        };
        if let Some(rdma) = self
            .rdma
            .as_ref()
            .filter(|_| descriptor.protocol.includes("rdma"))
        {
            let key = ReachKey::rdma(&descriptor);
            let found = life.reach(key, &descriptor, || {
                let nics = peer_nics(&descriptor);
                (rdma.peer(PeerSpec { nics, ..spec }), Route::Rdma)
            });
            let reach = self.peers.reached(&life, found);
            return Ok(Segment::new(descriptor, life, reach));
        }
        if descriptor.protocol.includes("tcp") {
            let tcp = self.tcp_peer(&descriptor).await?;
            let key = ReachKey::tcp(&descriptor);
            let found = life.reach(key, &descriptor, || (Peer::new(spec, &[]), Route::Tcp(tcp)));
            let reach = self.peers.reached(&life, found);
            return Ok(Segment::new(descriptor, life, reach));
        }
        Err(EngineError::NoTransport {
            segment: descriptor.name.clone(),
            protocol: descriptor.protocol.names().join(" and "),
            available: if self.rdma.is_some() {
                "rdma and tcp"
            } else {
                "tcp"
            }
            .into(),
        })
    }

    async fn tcp_peer(&self, descriptor: &SegmentDescriptor) -> Result<TcpPeer> {
        let host = match &descriptor.tcp_data_host {
            Some(host) => host.clone(),
            // C++ engines serve data where they serve RPC.
            None => self.directory.place(&descriptor.name).await?.host,
        };
        let place = HostPort {
            host,
            port: Some(descriptor.tcp_data_port),
        };
        let config = &self.config;
        let version = config
            .tcp_version
            .towards(descriptor.tcp_proto_version.into());
        let runtime = tokio::runtime::Handle::current();
        let limits = config.tcp_client;
        Ok(self.tcp_peers.get(
            &descriptor.name,
            place,
            version,
            limits,
            self.clock,
            runtime,
        ))
    }

    fn block<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        match &self.runtime {
            Some(runtime) => block(runtime, work),
            None => Err(TransportError::Closed.into()),
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
        if let Some(rdma) = &self.rdma {
            rdma.close();
        }
        self.tcp_peers.close(LEAVE_LIMIT);
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
        Err(_) => Err(TransportError::Closed.into()),
    }
}

/// The NICs of a record, in its order.
fn peer_nics(descriptor: &SegmentDescriptor) -> Vec<PeerNic> {
    let devices = descriptor.devices.iter().enumerate();
    devices
        .map(|(index, device)| peer_nic(descriptor, index, device))
        .collect()
}

/// A NIC of a record, at this position among the peer's.
pub(crate) fn peer_nic(descriptor: &SegmentDescriptor, index: usize, device: &Device) -> PeerNic {
    PeerNic {
        index: index as u32,
        path: descriptor.nic_path(&device.name).to_string(),
        gid: device.gid,
        lid: device.lid,
    }
}
