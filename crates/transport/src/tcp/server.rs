//! Serving peers' requests on registered memory.
//!
//! One task a connection, requests on it one after the other, as the protocol wants it. A
//! connection may be idle for ever (C++ clients keep theirs, and do not repeat a request that meets
//! a closed one), but not in the middle of a request.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use super::flow::{Pace, receive_bytes, receive_memory, send_bytes, send_memory};
use super::header::{HEADER_BYTES, Header, Opcode, Status};
use super::regions::{RegionGuard, Regions};
use crate::TransportError;
use crate::listen::{BACKLOG, connections_max, listen_on_one_of};
use crate::settings::Settings;

/// After which silence the kernel asks whether an idle peer is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// How long a rejected client may go on sending.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes thrown away at once.
const LINGER_CHUNK_BYTES: usize = 4 << 10;

/// Bounds of a server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ServerLimits {
    /// Connections at once, at most a quarter of the process's descriptors. One more takes the
    /// place of the one that has been without a request for longest.
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

impl ServerLimits {
    /// The defaults, with what is set (`TCP_SLICE_SIZE`).
    ///
    /// # Errors
    ///
    /// [`TransportError::Setting`] for a value that does not parse or is out of range.
    pub fn from_settings(settings: &Settings<'_>) -> Result<Self, TransportError> {
        Ok(Self {
            pace: Pace::from_settings(settings)?,
            ..Self::default()
        })
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
        let listener = listen_on_one_of(address, ports, BACKLOG)?;
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
    let connections_max = connections_max(limits.connections_max);
    let idle = Idle::default();
    let mut connections = JoinSet::new();
    for id in 0_u64.. {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "the TCP data server cannot accept");
                sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        while connections.len() >= connections_max {
            // Silent connections must not keep others out. If all are busy, one has to end.
            idle.end_longest();
            let _ = timeout(Duration::from_millis(10), connections.join_next()).await;
        }
        let regions = regions.clone();
        let entry = Entry {
            id,
            idle: idle.clone(),
        };
        let (start, started) = oneshot::channel::<()>();
        let task = connections.spawn(async move {
            // Its place in the table is there before it is taken out.
            let _ = started.await;
            if let Err(error) = serve(&stream, limits, &regions, &entry).await {
                tracing::debug!(%peer, %error, "a TCP data connection ended");
            }
        });
        idle.table().insert(
            id,
            Connection {
                task,
                since: Some(Instant::now()),
            },
        );
        let _ = start.send(());
    }
}

/// Since when connections have been without a request.
#[derive(Clone, Default)]
struct Idle(Arc<Mutex<HashMap<u64, Connection>>>);

struct Connection {
    task: AbortHandle,
    since: Option<Instant>,
}

impl Idle {
    fn table(&self) -> MutexGuard<'_, HashMap<u64, Connection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end_longest(&self) {
        let longest = self
            .table()
            .values()
            .filter_map(|connection| Some((connection.since?, connection.task.clone())))
            .min_by_key(|(since, _)| *since);
        if let Some((_, task)) = longest {
            task.abort();
        }
    }
}

/// A connection's place in the table, left when dropped.
struct Entry {
    id: u64,
    idle: Idle,
}

impl Entry {
    fn set_idle(&self, idle: bool) {
        if let Some(connection) = self.idle.table().get_mut(&self.id) {
            connection.since = idle.then(Instant::now);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.idle.table().remove(&self.id);
    }
}

async fn serve(
    stream: &TcpStream,
    limits: ServerLimits,
    regions: &Regions,
    entry: &Entry,
) -> io::Result<()> {
    stream.set_nodelay(true)?;
    SockRef::from(stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE))?;
    // However long it takes to begin.
    while let Some(bytes) = receive_bytes::<HEADER_BYTES>(stream, limits.pace.stall_max).await? {
        entry.set_idle(false);
        let header = Header::decode(&bytes);
        let Some(guard) = regions.find(header.addr, header.size) else {
            if header.with_status {
                send_bytes(stream, &Status::Rejected.encode(), limits.pace.stall_max).await?;
                linger(stream).await;
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
        entry.set_idle(true);
    }
    Ok(())
}

/// Lets a client take our last words. Closing with bytes unread makes the kernel send a reset,
/// upon which a client that is still sending may not look at what came before it.
async fn linger(stream: &TcpStream) {
    let _ = SockRef::from(stream).shutdown(Shutdown::Write);
    let mut scratch = [0; LINGER_CHUNK_BYTES];
    let drain = async {
        while stream.readable().await.is_ok() {
            match stream.try_read(&mut scratch) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    };
    // A client that goes on sending nevertheless gets the reset then.
    let _ = timeout(LINGER, drain).await;
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
