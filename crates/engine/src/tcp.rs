//! The TCP side of an engine: serving own memory, and moving transfers over a peer's connections.
//!
//! A transfer is the same thing as over RDMA: slices are claimed from it by tasks, as many as a
//! peer has connections, and each byte ends exactly once. Deliberately not here: sockets, retries
//! and the fence of a request that is cut off, which are the transport's
//! ([`rerail_transport::tcp`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rerail_transport::TransferError;
use rerail_transport::rdma::{Clock, Slicing, Transfer};
use rerail_transport::rpc::HostPort;
use rerail_transport::tcp::{
    ClientLimits, Failure, Opcode, Regions, Request, TcpClient, TcpServer, Version,
};
use rerail_verbs::{HostMemory, RdmaOpcode};
use tokio::runtime;
use tokio::sync::{Semaphore, watch};

use crate::config::EngineConfig;
use crate::{EngineError, Result};

/// Where transfers are cut: what a cancelled transfer moves at most after it was cancelled.
pub(crate) const SLICING: Slicing = Slicing {
    slice_bytes: 1 << 20,
    fragment_bytes: 1 << 18,
};

/// The listener for peers, with the memory that they may touch. Stops when dropped.
pub(crate) struct TcpSide {
    server: TcpServer,
    pub(crate) regions: Regions,
}

impl TcpSide {
    pub(crate) fn start(config: &EngineConfig, runtime: &runtime::Handle) -> Result<Self> {
        let regions = Regions::default();
        let server = TcpServer::start(
            config.bind,
            config.rpc_ports.clone(),
            config.tcp_server,
            regions.clone(),
            runtime,
        )
        .map_err(|error| EngineError::Listen {
            what: "the TCP data server cannot be started",
            kind: error.kind(),
            reason: error.to_string(),
        })?;
        Ok(Self { server, regions })
    }

    pub(crate) fn port(&self) -> u16 {
        self.server.port()
    }
}

/// How often connections that are being closed are looked at.
const CLOSE_TICK: Duration = Duration::from_millis(2);

/// Peers that are remembered.
const PEERS_MAX: usize = 4096;

/// Peers by their data ports: however often a segment is opened, its connections are shared.
#[derive(Default)]
pub(crate) struct TcpPeers(Mutex<HashMap<(String, Version), TcpPeer>>);

impl TcpPeers {
    /// Gives up what is under way to all peers, and waits until it is fenced, at most `limit`.
    pub(crate) fn close(&self, limit: Duration) {
        let mut peers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let peers: Vec<TcpPeer> = peers.drain().map(|(_, peer)| peer).collect();
        peers.iter().for_each(TcpPeer::close);
        let begin = Instant::now();
        while peers.iter().any(|peer| peer.client.lanes() > 0) && begin.elapsed() < limit {
            std::thread::sleep(CLOSE_TICK);
        }
    }

    /// The peer called `name` whose data port is `place`.
    pub(crate) fn get(
        &self,
        name: &str,
        place: HostPort,
        version: Version,
        limits: ClientLimits,
        clock: Clock,
        runtime: runtime::Handle,
    ) -> TcpPeer {
        let key = (place.to_string(), version);
        // A map of peers is whole whatever panicked.
        let mut peers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = peers.get(&key);
        if let Some(peer) = known.filter(|peer| !peer.closed.load(Ordering::Acquire)) {
            let name = name.to_owned();
            return TcpPeer {
                name,
                ..peer.clone()
            };
        }
        if peers.len() >= PEERS_MAX {
            // Segments that are open keep their own.
            peers.clear();
        }
        let peer = TcpPeer::new(name, place, version, limits, clock, runtime);
        peers.insert(key, peer.clone());
        peer
    }
}

/// What ties a transfer over TCP to its owner.
#[derive(Debug)]
pub(crate) struct Tether {
    /// How it went if it could not be fenced: whatever failed first, this is what its owner has to
    /// know. Set before the transfer is finished.
    pub(crate) unfenced: OnceLock<TransferError>,
    given_up: watch::Sender<bool>,
}

impl Default for Tether {
    fn default() -> Self {
        Self {
            unfenced: OnceLock::new(),
            given_up: watch::Sender::new(false),
        }
    }
}

impl Tether {
    /// Ends what is under way instead of waiting for it: it is fenced, which may take as long as
    /// [`ClientLimits::fence_max`], and then told. The transfer has failed before.
    pub(crate) fn give_up(&self) {
        self.given_up.send_replace(true);
    }
}

/// A peer that is reached over TCP. Clones share its connections.
#[derive(Clone)]
pub(crate) struct TcpPeer {
    name: String,
    client: TcpClient,
    lanes: usize,
    /// Room in the client's queue, which refuses what does not fit.
    places: Arc<Semaphore>,
    /// Its process is no more.
    closed: Arc<AtomicBool>,
    clock: Clock,
    runtime: runtime::Handle,
}

impl TcpPeer {
    fn new(
        name: &str,
        place: HostPort,
        version: Version,
        limits: ClientLimits,
        clock: Clock,
        runtime: runtime::Handle,
    ) -> Self {
        Self {
            name: name.to_owned(),
            client: TcpClient::new(place, version, limits, runtime.clone()),
            lanes: limits.lanes_max,
            places: Arc::new(Semaphore::new(limits.queue_max)),
            closed: Arc::default(),
            clock,
            runtime,
        }
    }

    /// Gives up what is under way: its process is no more. Another one at the same port gets
    /// connections of its own.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.client.close();
    }

    /// Moves a transfer, whose near end lies in `memory`. Returns at once.
    pub(crate) fn launch(
        &self,
        transfer: &Arc<Transfer>,
        memory: &HostMemory,
        tether: &Arc<Tether>,
    ) {
        let length = transfer.spec().length;
        let slices = length.div_ceil(u64::from(SLICING.slice_bytes));
        let workers = usize::try_from(slices)
            .unwrap_or(usize::MAX)
            .min(self.lanes);
        for _ in 0..workers {
            let (peer, transfer, memory) = (self.clone(), Arc::clone(transfer), memory.clone());
            let tether = Arc::clone(tether);
            self.runtime
                .spawn(async move { peer.work(&transfer, &memory, &tether).await });
        }
    }

    async fn work(&self, transfer: &Transfer, memory: &HostMemory, tether: &Tether) {
        let spec = transfer.spec();
        let opcode = match spec.opcode {
            RdmaOpcode::Read => Opcode::Read,
            _ => Opcode::Write,
        };
        loop {
            // Never closed. Taken before the slice, so that a cancelled transfer claims none.
            let _place = self.places.acquire().await;
            let Some(slice) = transfer.claim() else {
                return;
            };
            let length = slice.length as usize;
            let Some(offset) = memory.offset_of(spec.local.addr() + slice.offset, length) else {
                // The near end was found in this memory.
                transfer.fail(TransferError::Closed);
                transfer.unclaim(slice);
                continue;
            };
            let request = Request {
                opcode,
                memory: memory.clone(),
                offset,
                length,
                remote_addr: spec.remote.addr() + slice.offset,
                // Before the transfer's own, so that its fence ends by that.
                deadline: self.clock.instant(spec.cut_off).into(),
            };
            let given_up = tether.given_up.subscribe();
            let outcome = self.client.submit_cancellable(request, given_up);
            match outcome.await.unwrap_or(Err(Failure::Closed)) {
                Ok(()) => transfer.complete(slice),
                Err(failure) => {
                    let error = self.error(failure, spec.limit);
                    if matches!(error, TransferError::Unfenced { .. }) {
                        // One is enough.
                        let _ = tether.unfenced.set(error.clone());
                    }
                    transfer.fail(error);
                    transfer.unclaim(slice);
                }
            }
        }
    }

    fn error(&self, failure: Failure, limit: Duration) -> TransferError {
        let (peer, cause) = (self.name.clone(), failure.to_string());
        match failure {
            Failure::Rejected {
                peer: rail,
                addr,
                length,
            } => TransferError::RemoteAccess {
                peer,
                rail,
                addr,
                length: u32::try_from(length).unwrap_or(u32::MAX),
            },
            _ if failure.is_unfenced() => TransferError::Unfenced { peer, cause },
            Failure::Closed => TransferError::Closed,
            Failure::Canceled { .. } => TransferError::Canceled,
            Failure::Deadline {
                peer: place,
                attempts,
                cause,
                ..
            } => TransferError::Deadline {
                limit,
                peer,
                cause: format!("{cause} (attempt {attempts} at {place})"),
            },
            _ => TransferError::Deadline { limit, peer, cause },
        }
    }
}

#[cfg(test)]
mod tests {
    use rerail_transport::machine::ids::PeerId;
    use rerail_transport::rdma::{OnFinished, Peer, PeerSpec, Piece, Span, TransferSpec};
    use rerail_transport::tcp::header::Status;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::sync::Notify;

    use super::*;

    fn place(port: u16) -> HostPort {
        HostPort {
            host: "127.0.0.1".into(),
            port: Some(port),
        }
    }

    #[tokio::test]
    async fn segments_of_one_data_port_share_its_connections() {
        let (peers, clock) = (TcpPeers::default(), Clock::start());
        let get = |name, port, version| {
            let runtime = runtime::Handle::current();
            let limits = ClientLimits::default();
            peers.get(name, place(port), version, limits, clock, runtime)
        };
        let first = get("a", 1, Version::V2);
        let same = |other: &TcpPeer| Arc::ptr_eq(&first.places, &other.places);
        assert!(same(&get("a", 1, Version::V2)));
        let renamed = get("b", 1, Version::V2);
        assert!(same(&renamed) && renamed.name == "b");
        assert!(!same(&get("a", 2, Version::V2)));
        assert!(!same(&get("a", 1, Version::V1)));
        first.close();
        assert!(!same(&get("a", 1, Version::V2)), "another process");
    }

    struct Told(Notify);

    impl OnFinished for Told {
        fn finished(&self, _: &Transfer) {
            self.0.notify_one();
        }
    }

    /// A write of `LENGTH` bytes to `port`, cut off after `time`.
    fn launched(port: u16, time: Duration) -> (Arc<Transfer>, Arc<Told>, Arc<Tether>) {
        const LENGTH: u64 = 2 << 20;
        let clock = Clock::start();
        let peers = TcpPeers::default();
        let runtime = runtime::Handle::current();
        let limits = ClientLimits::default();
        let peer = peers.get("peer", place(port), Version::V2, limits, clock, runtime);
        let memory = HostMemory::allocate(LENGTH as usize).expect("memory");
        let span = |addr| {
            let piece = Piece::new(addr, LENGTH, []);
            Span::new(addr, LENGTH, [piece]).expect("covered")
        };
        let spec = PeerSpec {
            id: PeerId(1),
            segment: "peer".into(),
            server: "peer".into(),
            instance: None,
            nics: Vec::new(),
        };
        let spec = TransferSpec {
            peer: Peer::new(spec, &[]),
            opcode: RdmaOpcode::Write,
            local: span(memory.addr()),
            remote: span(1 << 20),
            length: LENGTH,
            slicing: SLICING,
            cut_off: clock.now() + time,
            limit: time,
        };
        let told = Arc::new(Told(Notify::new()));
        let transfer = Transfer::new(spec, Arc::clone(&told) as Arc<dyn OnFinished>);
        let tether = Arc::new(Tether::default());
        peer.launch(&transfer, &memory, &tether);
        (transfer, told, tether)
    }

    /// A transfer that is given up in the middle, to a peer that closes when it is asked to or not
    /// at all.
    async fn given_up_to(peer_closes: bool) -> Arc<Tether> {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port is free");
        let port = listener.local_addr().expect("bound").port();
        // An hour: only giving up ends it.
        let (transfer, told, tether) = launched(port, Duration::from_secs(3600));
        let (mut stream, _) = listener.accept().await.expect("it connects");
        stream
            .read_exact(&mut [0])
            .await
            .expect("a request is under way");
        let serving = tokio::spawn(async move {
            let mut kept = Vec::new();
            let mut next = stream;
            loop {
                if peer_closes {
                    tokio::spawn(async move { next.read_to_end(&mut Vec::new()).await });
                } else {
                    kept.push(next);
                }
                let Ok((stream, _)) = listener.accept().await else {
                    return;
                };
                next = stream;
            }
        });
        transfer.fail(TransferError::Canceled);
        tether.give_up();
        told.0.notified().await;
        serving.abort();
        assert!(matches!(transfer.error(), Some(TransferError::Canceled)));
        tether
    }

    #[tokio::test]
    async fn a_transfer_that_is_given_up_ends_with_its_fence_and_not_at_its_time_limit() {
        let tether = given_up_to(true).await;
        assert!(tether.unfenced.get().is_none(), "the peer closed its ends");
        let tether = given_up_to(false).await;
        let error = tether
            .unfenced
            .get()
            .expect("nobody knows what arrives yet");
        assert!(matches!(error, TransferError::Unfenced { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_slice_without_a_fence_is_told_though_another_failed_first() {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port is free");
        let port = listener.local_addr().expect("bound").port();
        // It rejects the first request, and says nothing to the second.
        tokio::spawn(async move {
            let mut silent = Vec::new();
            for index in 0.. {
                let Ok((mut stream, _)) = listener.accept().await else {
                    return;
                };
                if index == 0 {
                    let _ = stream.write_all(&Status::Rejected.encode()).await;
                    tokio::spawn(async move { stream.read_to_end(&mut Vec::new()).await });
                } else {
                    silent.push(stream);
                }
            }
        });
        let (transfer, told, tether) = launched(port, Duration::from_millis(500));
        told.0.notified().await;
        let first = transfer.error().expect("failed");
        assert!(
            matches!(first, TransferError::RemoteAccess { .. }),
            "{first}"
        );
        let error = tether.unfenced.get().expect("before it is finished");
        assert!(matches!(error, TransferError::Unfenced { .. }), "{error}");
    }
}
