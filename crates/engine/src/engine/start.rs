//! Starting an engine: listeners first, because their ports are part of its name and record.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use rerail_metadata::descriptor::{InstanceId, Protocol, RpcMeta, SegmentDescriptor};
use rerail_metadata::{MetadataStore, connect};
use rerail_transport::machine::peers::PUSH_FEATURE;
use rerail_transport::machine::publisher::{Edit, LocalRecord, PublishOrder};
use rerail_transport::rdma::{Clock, Identity, RdmaTransport};
use rerail_transport::rpc::host_port::PORT_DEFAULT;
use rerail_transport::rpc::{HostPort, RpcClient, RpcServer};
use rerail_verbs::DeviceList;
use tokio::runtime::Runtime;

use super::{Engine, Inner, block};
use crate::config::{EngineConfig, Transport};
use crate::directory::Directory;
use crate::memory::Registry;
use crate::nics::{OneAtATime, RailListener, Recorder};
use crate::peers::PeerView;
use crate::publication::{Publication, StorePlace};
use crate::service::{EngineService, Shared};
use crate::tcp::{TcpPeers, TcpSide};
use crate::topology::Places;
use crate::{EngineError, Result, advertise};

/// Threads of the control runtime: store, RPC, publication, connections, and TCP's data.
const CONTROL_THREADS: usize = 2;
/// How long an idle thread of the runtime's pool for blocking work is kept. Ports are read there,
/// every ten seconds while they are well.
const BLOCKING_IDLE: Duration = Duration::from_secs(1);

/// Version of the TCP data protocol in our own record (reference 7).
const TCP_PROTO_VERSION: u32 = 2;

impl Engine {
    /// Starts an engine. `devices` are those that it may use for RDMA; an engine over TCP uses
    /// none. Blocks until its listeners and ports are open.
    ///
    /// # Errors
    ///
    /// A device, port, setting or store that cannot be used.
    pub fn start(config: EngineConfig, devices: &DeviceList) -> Result<Self> {
        let runtime = runtime()?;
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
        .map_err(|error| EngineError::Listen {
            what: "the RPC server cannot be started",
            kind: error.kind(),
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
        let store = open_store(&config, &runtime)?;
        let records = store.clone().map(|store| (store, config.keys.clone()));
        let directory = Directory::new(records, RpcClient::new(config.rpc_client));
        let (mut rdma, mut tcp) = (None, None);
        match config.transport {
            Transport::Rdma => {
                rdma = Some(Arc::new(RdmaTransport::open(
                    devices,
                    &config.devices,
                    config.rdma.clone(),
                    clock,
                    Identity {
                        server: rdma_name(&config, &name).unwrap_or_else(|| name.clone()),
                        instance: Some(instance.to_string()),
                    },
                    Arc::new(directory.clone()),
                    runtime.handle().clone(),
                )?));
            }
            Transport::Tcp => tcp = Some(TcpSide::start(&config, runtime.handle())?),
        }
        let places = match &rdma {
            Some(rdma) => Places::read(&config.topology, rdma.nics())?,
            None => Places::default(),
        };
        let places = Arc::new(ArcSwap::from_pointee(places));
        let record = match (&rdma, &tcp) {
            (Some(rdma), _) => rdma_record(&name, rdma, &places.load()),
            (None, tcp) => tcp_record(&name, &host, tcp.as_ref().map_or(0, TcpSide::port)),
        };
        let place = store.map(|store| {
            let rpc = RpcMeta::new(host, port);
            StorePlace::new(store, config.keys.clone(), name.clone(), rpc)
        });
        let events = config.events.clone();
        let publication = Publication::new(clock, instance, record, place, events);
        let registry = Arc::<RwLock<Registry>>::default();
        let peers = PeerView::new(clock, directory.clone(), publication.clone());
        // Until these are set the listener refuses what it cannot answer.
        let _ = service.publication.set(publication.clone());
        if let Some(rdma) = &rdma {
            rdma.connector()
                .set_admission(Arc::new(publication.clone()));
            let _ = service.rdma.set(Arc::clone(rdma));
            peers.set_rails(rdma);
            let recorder = Arc::new(Recorder {
                publication: publication.clone(),
                directory: directory.clone(),
                name: name.clone(),
                registry: Arc::clone(&registry),
                places: Arc::clone(&places),
                topology: config.topology.clone(),
                rereads: OneAtATime::default(),
            });
            rdma.set_events(Arc::new(RailListener {
                rdma: Arc::downgrade(rdma),
                publication: publication.clone(),
                peers: peers.clone(),
                clock,
                events: config.events.clone(),
            }));
            rdma.observe(recorder, config.events.clone())?;
        }
        runtime.spawn(publication.clone().run());
        runtime.spawn(peers.clone().run());
        Ok(Self {
            inner: Arc::new(Inner {
                config,
                clock,
                name,
                rpc_address,
                service,
                directory,
                publication,
                peers,
                rdma,
                places,
                tcp,
                server: Some(server),
                registry,
                registering: Mutex::default(),
                next_region: AtomicU64::new(1),
                next_peer: AtomicU64::new(1),
                tcp_peers: TcpPeers::default(),
                runtime: Some(runtime),
            }),
        })
    }
}

fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .thread_name("rerail-control")
        .thread_keep_alive(BLOCKING_IDLE)
        .enable_all()
        .build()
        .map_err(|error| EngineError::System {
            what: "the control runtime cannot be started",
            reason: error.to_string(),
        })
}

fn open_store(config: &EngineConfig, runtime: &Runtime) -> Result<Option<Arc<dyn MetadataStore>>> {
    if config.is_peer_to_peer() {
        return Ok(None);
    }
    let url = config.metadata.clone();
    let options = config.store.clone();
    block(runtime, async move { connect(&url, &options).await }).map(Some)
}

/// The own record over RDMA, before any memory is registered.
fn rdma_record(name: &str, rdma: &RdmaTransport, places: &Places) -> LocalRecord {
    let mut base = SegmentDescriptor::new(name, Protocol::rdma());
    let server = &rdma.identity().server;
    base.rdma_server_name = (server != name).then(|| server.clone());
    let mut record = LocalRecord::new(base, features(), rdma.nics().names(), PublishOrder::Fixed);
    // A NIC that is not usable yet is entered by its observer.
    let ports = rdma.nics().iter().filter_map(|nic| {
        let facts = nic.facts()?;
        Some(Edit::Port {
            local: nic.index(),
            gids: facts.gids.clone(),
            facts: facts.observed(),
        })
    });
    let matrix = Edit::Matrix(places.matrix());
    for edit in ports.chain([matrix]) {
        if let Err(error) = record.apply(edit) {
            // Only for NICs that the record was not made with.
            tracing::error!(%error, "the own record");
        }
    }
    record
}

/// The server name in the own NIC paths, where it is not the segment's: the address that was set,
/// with the port of the segment's name.
fn rdma_name(config: &EngineConfig, name: &str) -> Option<String> {
    let host = config.rdma_bind.clone()?;
    let port = HostPort::parse(name).ok().and_then(|place| place.port);
    let port = Some(port.unwrap_or(PORT_DEFAULT));
    Some(HostPort { host, port }.to_string())
}

/// The own record over TCP.
fn tcp_record(name: &str, host: &str, port: u16) -> LocalRecord {
    let mut base = SegmentDescriptor::new(name, Protocol::tcp());
    base.tcp_data_port = port;
    base.tcp_data_host = Some(host.to_owned());
    base.tcp_proto_version = TCP_PROTO_VERSION;
    LocalRecord::new(base, features(), [], PublishOrder::Fixed)
}

/// What Rerail peers may ask of us beyond the formats of C++ engines.
fn features() -> Vec<String> {
    vec![PUSH_FEATURE.to_owned()]
}
