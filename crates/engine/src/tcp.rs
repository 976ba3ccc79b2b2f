//! The TCP side of an engine: serving own memory, and moving transfers over a peer's connections.
//!
//! A transfer is the same thing as over RDMA: slices are claimed from it by tasks, as many as a
//! peer has connections, and each byte ends exactly once. Deliberately not here: sockets, retries
//! and the fence of a request that is cut off, which are the transport's
//! ([`rerail_transport::tcp`]).

use std::sync::Arc;

use rerail_transport::TransferError;
use rerail_transport::rdma::{Clock, Slicing, Transfer};
use rerail_transport::rpc::HostPort;
use rerail_transport::tcp::{
    ClientLimits, Failure, Opcode, Regions, Request, TcpClient, TcpServer, Version,
};
use rerail_verbs::{HostMemory, RdmaOpcode};
use tokio::runtime;
use tokio::sync::Semaphore;

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
        .map_err(|error| EngineError::System {
            what: "the TCP data server cannot be started",
            reason: error.to_string(),
        })?;
        Ok(Self { server, regions })
    }

    pub(crate) fn port(&self) -> u16 {
        self.server.port()
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
    clock: Clock,
    runtime: runtime::Handle,
}

impl TcpPeer {
    pub(crate) fn new(
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
            clock,
            runtime,
        }
    }

    /// Moves a transfer, whose near end lies in `memory`. Returns at once.
    pub(crate) fn launch(&self, transfer: &Arc<Transfer>, memory: &HostMemory) {
        let length = transfer.spec().length;
        let slices = length.div_ceil(u64::from(SLICING.slice_bytes));
        let workers = usize::try_from(slices)
            .unwrap_or(usize::MAX)
            .min(self.lanes);
        for _ in 0..workers {
            let (peer, transfer, memory) = (self.clone(), Arc::clone(transfer), memory.clone());
            self.runtime
                .spawn(async move { peer.work(&transfer, &memory).await });
        }
    }

    async fn work(&self, transfer: &Transfer, memory: &HostMemory) {
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
            let outcome = self.client.submit(Request {
                opcode,
                memory: memory.clone(),
                offset,
                length,
                remote_addr: spec.remote.addr() + slice.offset,
                deadline: self.clock.instant(spec.cut_off).into(),
            });
            match outcome.await.unwrap_or(Err(Failure::Closed)) {
                Ok(()) => transfer.complete(slice),
                Err(failure) => {
                    transfer.fail(self.error(failure));
                    transfer.unclaim(slice);
                }
            }
        }
    }

    fn error(&self, failure: Failure) -> TransferError {
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
            Failure::Deadline { unfenced: true, .. } => TransferError::Unfenced { peer, cause },
            Failure::Closed => TransferError::Closed,
            _ => TransferError::Deadline { peer, cause },
        }
    }
}
