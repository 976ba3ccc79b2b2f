//! Serving peers' requests on registered memory.
//!
//! One task a connection, requests on it one after the other, as the protocol wants it. A
//! connection may be idle for ever (C++ clients keep theirs, and do not repeat a request that meets
//! a closed one), but not in the middle of a request.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use super::flow::{Pace, receive_bytes, receive_memory, send_bytes, send_memory};
use super::header::{HEADER_BYTES, Header, Opcode, Status};
use super::regions::{RegionGuard, Regions};
use crate::listen::listen_on_one_of;

/// After which silence the kernel asks whether an idle peer is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Bounds of a server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ServerLimits {
    /// Connections at once; more wait in the kernel's queue.
    pub connections_max: usize,
    /// How bytes flow.
    pub pace: Pace,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections_max: 4_096,
            pace: Pace::default(),
        }
    }
}

/// A listening server. It stops, with all its connections, when it is dropped.
#[derive(Debug)]
pub struct TcpServer {
    local: SocketAddr,
    accepting: JoinHandle<()>,
}

impl TcpServer {
    /// Listens on `address`, or on any address of IPv6 and IPv4 if there is none, on the first
    /// free port of `ports`. The port is bound once, before anybody is told of it.
    ///
    /// # Errors
    ///
    /// The system's, for the last port tried.
    pub fn start(
        address: Option<IpAddr>,
        ports: RangeInclusive<u16>,
        limits: ServerLimits,
        regions: Regions,
        runtime: &runtime::Handle,
    ) -> io::Result<Self> {
        let listener = listen_on_one_of(address, ports)?;
        let entered = runtime.enter();
        let listener = TcpListener::from_std(listener)?;
        drop(entered);
        let local = listener.local_addr()?;
        let accepting = runtime.spawn(accept(listener, limits, regions));
        Ok(Self { local, accepting })
    }

    /// The port that is listened on: `tcp_data_port`.
    pub fn port(&self) -> u16 {
        self.local.port()
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, limits: ServerLimits, regions: Regions) {
    let places = Arc::new(Semaphore::new(limits.connections_max));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, peer)) => {
                let regions = regions.clone();
                connections.spawn(async move {
                    if let Err(error) = serve(&stream, limits, &regions).await {
                        tracing::debug!(%peer, %error, "a TCP data connection ended");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the TCP data server cannot accept");
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve(stream: &TcpStream, limits: ServerLimits, regions: &Regions) -> io::Result<()> {
    stream.set_nodelay(true)?;
    SockRef::from(stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE))?;
    // However long it takes to begin.
    while let Some(bytes) = receive_bytes::<HEADER_BYTES>(stream, limits.pace.stall_max).await? {
        let header = Header::decode(&bytes);
        let Some(guard) = regions.find(header.addr, header.size) else {
            if header.with_status {
                send_bytes(stream, &Status::Rejected.encode(), limits.pace.stall_max).await?;
            }
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!(
                    "{} bytes at {:#x} are not inside one registered buffer",
                    header.size, header.addr
                ),
            ));
        };
        tokio::select! {
            // Looked at first: memory that is being taken away gets no further byte.
            biased;
            () = guard.revoked() => {
                return Err(io::Error::other("the buffer is being unregistered"));
            }
            done = carry_out(stream, header, &guard, limits.pace) => done?,
        }
    }
    Ok(())
}

async fn carry_out(
    stream: &TcpStream,
    header: Header,
    guard: &RegionGuard,
    pace: Pace,
) -> io::Result<()> {
    let status = async {
        if header.with_status {
            send_bytes(stream, &Status::Ok.encode(), pace.stall_max).await?;
        }
        Ok(())
    };
    // The range is inside the memory, whose length is a usize.
    let (memory, offset, length) = (guard.memory(), guard.offset(), header.size as usize);
    match header.opcode {
        Opcode::Read => {
            status.await?;
            send_memory(stream, memory, offset, length, pace).await
        }
        Opcode::Write => {
            receive_memory(stream, memory, offset, length, pace).await?;
            status.await
        }
    }
}
