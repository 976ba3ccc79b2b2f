//! Serving other engines: many connections at once, each bounded in bytes and in time.
//!
//! A client that says nothing costs a socket for [`ServerLimits::request`] and holds up nobody
//! (C++ servers serve one connection after the other, reference 3.2).

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::frame::{Decoder, Frame, FrameKind, LENGTH_MAX_DEFAULT, MessageType, length_max};
use super::message::{ConnectionMessage, NO_REPLY, Notify, PROBE_REPLY};
use super::subscription::{Subscriber, reader_of};
use crate::TransportError;
use crate::listen::{BACKLOG, connections_max, listen_on_one_of};
use crate::machine::publisher::SUBSCRIBERS_MAX;
use crate::settings::Settings;

/// Bytes asked of the socket at once.
const CHUNK_BYTES: usize = 16 << 10;

/// A future that owns all it needs.
pub type Reply<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Decides what is answered. Probes are answered by the server itself.
pub trait Handler: Send + Sync + 'static {
    /// Answers a Connection message; a refusal is a message with a reason.
    fn connection(&self, message: ConnectionMessage) -> Reply<ConnectionMessage>;

    /// Answers a segment descriptor's text with our own; `None` where a store holds descriptors.
    fn metadata(&self, descriptor: Vec<u8>) -> Reply<Option<Vec<u8>>>;

    /// Takes a notification; false if there is no room for it.
    fn notify(&self, notify: Notify) -> Reply<bool>;

    /// Tells a subscriber the own record until the subscription is over. Who has no record to
    /// tell closes it at once.
    fn subscribe(&self, subscriber: Subscriber) -> Reply<()> {
        drop(subscriber);
        Box::pin(std::future::ready(()))
    }
}

/// Bounds of a server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ServerLimits {
    /// Connections at once, at most a quarter of the process's descriptors; more wait in the
    /// kernel's queue.
    pub connections_max: usize,
    /// Subscriptions at once, which take no place of the connections above; at most another
    /// quarter of the process's descriptors. More are refused.
    pub subscriptions_max: usize,
    /// Connections that the kernel holds until they are accepted (`HANDSHAKE_LISTEN_BACKLOG`).
    pub backlog: u16,
    /// Longest request (`HANDSHAKE_MAX_LENGTH`).
    pub request_bytes_max: usize,
    /// From accepting a connection to the last byte of its request.
    pub request: Duration,
    /// For the handler's answer, and again for the client to take it.
    pub reply: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections_max: 2_048,
            subscriptions_max: SUBSCRIBERS_MAX,
            backlog: BACKLOG,
            request_bytes_max: LENGTH_MAX_DEFAULT,
            request: Duration::from_secs(5),
            reply: Duration::from_secs(30),
        }
    }
}

impl ServerLimits {
    /// The defaults, with what is set: `HANDSHAKE_MAX_LENGTH` (bytes, 1 MiB..=128 MiB)
    /// and `HANDSHAKE_LISTEN_BACKLOG` (1..=65535).
    ///
    /// # Errors
    ///
    /// [`TransportError::Setting`] for a value that does not parse or is out of range.
    pub fn from_settings(settings: &Settings<'_>) -> Result<Self, TransportError> {
        Ok(Self {
            backlog: settings
                .number("HANDSHAKE_LISTEN_BACKLOG", 1..=u16::MAX)?
                .unwrap_or(BACKLOG),
            request_bytes_max: length_max(settings)?,
            ..Self::default()
        })
    }
}

/// A listening server. It stops when it is dropped, requests under way included.
#[derive(Debug)]
pub struct RpcServer {
    local: SocketAddr,
    accepting: JoinHandle<()>,
    stopping: watch::Sender<bool>,
}

impl RpcServer {
    /// Listens on `address`, or on any address of IPv6 and IPv4 if there is none, on the first
    /// free port of `ports`, tried in random order; the port is bound once and stays bound.
    ///
    /// # Errors
    ///
    /// The system's, for the last port tried.
    pub fn start(
        address: Option<IpAddr>,
        ports: RangeInclusive<u16>,
        limits: ServerLimits,
        handler: Arc<dyn Handler>,
        runtime: &runtime::Handle,
    ) -> io::Result<Self> {
        let listener = listen_on_one_of(address, ports, limits.backlog)?;
        let entered = runtime.enter();
        let listener = TcpListener::from_std(listener)?;
        drop(entered);
        let local = listener.local_addr()?;
        let (stopping, stopped) = watch::channel(false);
        let accepting = runtime.spawn(accept(listener, limits, handler, stopped));
        Ok(Self {
            local,
            accepting,
            stopping,
        })
    }

    /// Stops listening at once, lets requests under way finish for `grace`, ends the rest, and
    /// returns when none is left.
    pub async fn stop(mut self, grace: Duration) {
        self.stopping.send_replace(true);
        if timeout(grace, &mut self.accepting).await.is_err() {
            self.accepting.abort();
            let _ = (&mut self.accepting).await;
        }
    }

    /// The port that is listened on.
    pub fn port(&self) -> u16 {
        self.local.port()
    }
}

impl Drop for RpcServer {
    fn drop(&mut self) {
        // Connections under way end with the task that holds them.
        self.accepting.abort();
    }
}

async fn accept(
    listener: TcpListener,
    limits: ServerLimits,
    handler: Arc<dyn Handler>,
    mut stopped: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(connections_max(limits.connections_max)));
    let subscriptions = connections_max(limits.subscriptions_max);
    let subscriptions = Arc::new(Semaphore::new(subscriptions));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let next = async {
            // Never closed: `places` lives as long as this function.
            let place = Arc::clone(&places).acquire_owned().await.ok();
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            next = next => next,
            _ = stopped.wait_for(|stopped| *stopped) => break,
        };
        match accepted {
            Ok((stream, peer)) => {
                let connection = Connection {
                    stream,
                    peer,
                    place,
                    limits,
                    handler: Arc::clone(&handler),
                };
                connections.spawn(connection.serve(Arc::clone(&subscriptions), stopped.clone()));
            }
            Err(error) => {
                // Out of descriptors, for example: connections that end give some back.
                tracing::warn!(%error, "the RPC server cannot accept");
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// One connection: a request, a reply, and the end; or a subscription.
struct Connection {
    stream: TcpStream,
    peer: SocketAddr,
    /// Free again when the connection ends, or becomes a subscription.
    place: Option<OwnedSemaphorePermit>,
    limits: ServerLimits,
    handler: Arc<dyn Handler>,
}

impl Connection {
    async fn serve(mut self, subscriptions: Arc<Semaphore>, mut stopped: watch::Receiver<bool>) {
        let _ = self.stream.set_nodelay(true);
        let (limits, peer) = (self.limits, self.peer);
        let request = match timeout(limits.request, read_request(&mut self.stream, limits)).await {
            Ok(Ok(Some(request))) => request,
            // Port scanners and health checks connect and leave.
            Ok(Ok(None)) => return,
            Ok(Err(reason)) => {
                tracing::debug!(%peer, reason, "an RPC connection was dropped");
                return;
            }
            Err(_) => {
                tracing::debug!(%peer, "an RPC connection was dropped: no request in time");
                return;
            }
        };
        let kind = request.kind;
        if kind == FrameKind::Typed(MessageType::Subscribe) {
            tokio::select! {
                () = self.tell(&request.text, &subscriptions) => {}
                // Unlike a request it has no end that could be waited for.
                _ = stopped.wait_for(|stopped| *stopped) => {}
            }
            return;
        }
        let text = match timeout(limits.reply, answer(request, &*self.handler)).await {
            Ok(Some(text)) => text,
            Ok(None) => {
                tracing::debug!(%peer, ?kind, "an RPC connection was dropped: no request");
                return;
            }
            Err(_) => {
                tracing::warn!(%peer, ?kind, "an RPC request was not answered in time");
                NO_REPLY.to_vec()
            }
        };
        self.reply(Frame { kind, text }).await;
    }

    async fn reply(&mut self, reply: Frame) {
        let reply = reply.encode();
        let finish = async {
            self.stream.write_all(&reply).await?;
            self.stream.shutdown().await?;
            // The client closes when it has the reply; closing first could cut off its last bytes.
            self.stream.read(&mut [0]).await
        };
        let _ = timeout(self.limits.request, finish).await;
    }

    /// A subscription, to its end.
    async fn tell(mut self, request: &[u8], subscriptions: &Arc<Semaphore>) {
        let peer = self.peer;
        let reader = match reader_of(request) {
            Ok(reader) => reader,
            Err(error) => {
                tracing::debug!(%peer, %error, "a subscription was dropped");
                return;
            }
        };
        let Ok(_place) = Arc::clone(subscriptions).try_acquire_owned() else {
            tracing::warn!(%peer, "too many subscriptions; this reader has to ask the store");
            self.reply(Frame::typed(MessageType::Subscribe, NO_REPLY))
                .await;
            return;
        };
        drop(self.place.take());
        let subscriber = Subscriber::new(self.stream, peer, reader);
        self.handler.subscribe(subscriber).await;
    }
}

async fn read_request(
    stream: &mut TcpStream,
    limits: ServerLimits,
) -> Result<Option<Frame>, String> {
    let mut decoder = Decoder::new(limits.request_bytes_max);
    let mut chunk = [0; CHUNK_BYTES];
    loop {
        let missing = decoder.missing().map_err(|error| error.to_string())?;
        if missing == 0 {
            return decoder.finish().map_err(|error| error.to_string());
        }
        let wanted = missing.min(CHUNK_BYTES);
        match stream.read(&mut chunk[..wanted]).await {
            Ok(0) if decoder.is_empty() => return Ok(None),
            Ok(0) => return Err("closed in the middle of a frame".to_owned()),
            Ok(count) => decoder.push(&chunk[..count]),
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// The reply's text; `None` for a frame that is no request.
async fn answer(request: Frame, handler: &dyn Handler) -> Option<Vec<u8>> {
    Some(match request.kind.message_type() {
        MessageType::Connection => match ConnectionMessage::decode(&request.text) {
            Ok(message) => handler.connection(message).await.encode(),
            Err(error) => {
                ConnectionMessage::refusal(String::new(), String::new(), error.to_string()).encode()
            }
        },
        MessageType::Metadata => match handler.metadata(request.text).await {
            Some(text) => text,
            None => NO_REPLY.to_vec(),
        },
        MessageType::Notify => match Notify::decode(&request.text) {
            Ok(notify) => {
                let taken = handler.notify(notify).await;
                let notify_msg = if taken {
                    "success".to_owned()
                } else {
                    String::new()
                };
                Notify {
                    name: String::new(),
                    notify_msg,
                }
                .encode()
            }
            Err(_) => NO_REPLY.to_vec(),
        },
        MessageType::Probe => PROBE_REPLY.to_vec(),
        MessageType::Subscribe
        | MessageType::Push
        | MessageType::Acknowledge
        | MessageType::Heartbeat => return None,
    })
}
