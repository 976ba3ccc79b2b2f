//! Asking another engine's server: one connection, one request, one reply, all within a time.

use std::fmt;
use std::time::Duration;

use rerail_metadata::descriptor::InstanceId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::frame::{Decoder, Frame, FrameError, LENGTH_MAX_DEFAULT, MessageType, length_max};
use super::host_port::{HostPort, PORT_DEFAULT};
use super::message::{ConnectionMessage, MessageError, Notify, PROBE_REQUEST};
use super::subscription::{self, Subscription};
use crate::TransportError;
use crate::dial::{DialError, dial};
use crate::settings::Settings;

/// Bytes asked of the socket at once.
const CHUNK_BYTES: usize = 16 << 10;

/// Why a request got no useful reply.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RpcError {
    /// The host has no address.
    #[error("{server}: the name has no address: {reason}")]
    Resolve {
        /// Whom we asked.
        server: String,
        /// The resolver's words.
        reason: String,
    },
    /// Nothing listens there, or it cannot be reached.
    #[error("{server}: cannot connect: {reason}")]
    Connect {
        /// Whom we asked.
        server: String,
        /// The system's words, of the last address tried.
        reason: String,
    },
    /// The time was over.
    #[error("{server}: no answer within {waited_ms} ms while {doing}")]
    Timeout {
        /// Whom we asked.
        server: String,
        /// Milliseconds waited.
        waited_ms: u64,
        /// What was under way.
        doing: &'static str,
    },
    /// The connection ended before the reply did.
    #[error("{server}: the connection ended before the reply: {reason}")]
    Closed {
        /// Whom we asked.
        server: String,
        /// The system's words.
        reason: String,
    },
    /// The reply is no frame.
    #[error("{server}: {error}")]
    Frame {
        /// Whom we asked.
        server: String,
        /// What is wrong.
        error: FrameError,
    },
    /// The reply is about something else than the request.
    #[error("{server}: asked for {asked:?}, the reply is a {got:?}")]
    WrongType {
        /// Whom we asked.
        server: String,
        /// Type of the request.
        asked: MessageType,
        /// Type of the reply.
        got: MessageType,
    },
    /// The reply's text cannot be read.
    #[error("{server}: malformed reply: {error}")]
    Malformed {
        /// Whom we asked.
        server: String,
        /// What is wrong.
        error: MessageError,
    },
    /// The peer refused, with a reason.
    #[error("{server} refused: {reason}")]
    Refused {
        /// Whom we asked.
        server: String,
        /// The peer's words, cut to 512 characters.
        reason: String,
    },
}

impl RpcError {
    /// True when asking again later may help.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Resolve { .. }
            | Self::Connect { .. }
            | Self::Timeout { .. }
            | Self::Closed { .. }
            | Self::Refused { .. } => true,
            Self::Frame { .. } | Self::WrongType { .. } | Self::Malformed { .. } => false,
        }
    }
}

/// Times and sizes of a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ClientLimits {
    /// Until a connection stands, all addresses of the host together
    /// (`HANDSHAKE_CONNECT_TIMEOUT`, 5 s).
    pub connect: Duration,
    /// From the first byte of the request to the last of the reply. 10 s: the server may have to
    /// wait a second for the kernel to resolve a neighbour, and C++ servers take one request at a
    /// time.
    pub exchange: Duration,
    /// Longest reply (`HANDSHAKE_MAX_LENGTH`).
    pub reply_bytes_max: usize,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            exchange: Duration::from_secs(10),
            reply_bytes_max: LENGTH_MAX_DEFAULT,
        }
    }
}

impl ClientLimits {
    /// The defaults, with what is set: `HANDSHAKE_CONNECT_TIMEOUT` (seconds, 1..=3599) and
    /// `HANDSHAKE_MAX_LENGTH` (bytes, 1 MiB..=128 MiB).
    ///
    /// # Errors
    ///
    /// [`TransportError::Setting`] for a value that does not parse or is out of range.
    pub fn from_settings(settings: &Settings<'_>) -> Result<Self, TransportError> {
        let default = Self::default();
        let connect_s = settings.number("HANDSHAKE_CONNECT_TIMEOUT", 1..=3_599)?;
        Ok(Self {
            connect: connect_s.map_or(default.connect, Duration::from_secs),
            reply_bytes_max: length_max(settings)?,
            ..default
        })
    }
}

/// Asks servers. Holds no connection: the protocol has one request in each, and subscriptions are
/// their reader's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RpcClient {
    limits: ClientLimits,
}

impl RpcClient {
    /// A client with these limits.
    pub fn new(limits: ClientLimits) -> Self {
        Self { limits }
    }

    /// Sends a Connection message and returns the peer's.
    ///
    /// # Errors
    ///
    /// [`RpcError::Refused`] when the peer gives a reason not to connect, or answers `null`: a C++
    /// engine does so until its RDMA transport is there.
    pub async fn connection(
        &self,
        server: &HostPort,
        message: &ConnectionMessage,
    ) -> Result<ConnectionMessage, RpcError> {
        let text = self
            .exchange(server, MessageType::Connection, message.encode())
            .await?;
        if is_null(&text) {
            return Err(refused(server, "it takes no connections (yet)"));
        }
        let reply = ConnectionMessage::decode(&text).map_err(|error| malformed(server, error))?;
        if reply.reply_msg.is_empty() {
            Ok(reply)
        } else {
            Err(refused(server, &reply.reply_msg))
        }
    }

    /// Sends our segment descriptor's text and returns the peer's (P2P mode).
    ///
    /// # Errors
    ///
    /// [`RpcError::Refused`] when the peer answers `null`.
    pub async fn metadata(
        &self,
        server: &HostPort,
        descriptor: Vec<u8>,
    ) -> Result<Vec<u8>, RpcError> {
        let text = self
            .exchange(server, MessageType::Metadata, descriptor)
            .await?;
        if is_null(&text) {
            return Err(refused(
                server,
                "it does not exchange metadata; does it use a store?",
            ));
        }
        Ok(text)
    }

    /// Sends a notification; returns when the peer has taken it.
    ///
    /// # Errors
    ///
    /// [`RpcError::Refused`] when the peer did not take it.
    pub async fn notify(&self, server: &HostPort, notify: &Notify) -> Result<(), RpcError> {
        let text = self
            .exchange(server, MessageType::Notify, notify.encode())
            .await?;
        if is_null(&text) {
            return Err(refused(server, "it takes no notifications"));
        }
        let reply = Notify::decode(&text).map_err(|error| malformed(server, error))?;
        if reply.notify_msg.is_empty() {
            return Err(refused(server, "the notification was not taken"));
        }
        Ok(())
    }

    /// Asks whether the peer's process is alive. Any reply of the right type means so.
    pub async fn probe(&self, server: &HostPort) -> Result<(), RpcError> {
        self.exchange(server, MessageType::Probe, PROBE_REQUEST.to_vec())
            .await
            .map(drop)
    }

    /// Subscribes to the server's record, as the reader `own`. Only for a server whose record lists
    /// `push/1`. That it takes the subscription shows when it tells something.
    ///
    /// # Errors
    ///
    /// It cannot be connected to.
    pub async fn subscribe(
        &self,
        server: &HostPort,
        own: InstanceId,
    ) -> Result<Subscription, RpcError> {
        let mut stream = self.connect(server).await?;
        let request = Frame::typed(MessageType::Subscribe, subscription::request(own)).encode();
        let deadline = Instant::now() + self.limits.exchange;
        timeout_at(deadline, stream.write_all(&request))
            .await
            .map_err(|_| timed_out(server, self.limits.exchange, "subscribing"))?
            .map_err(|error| closed(server, &error))?;
        Ok(Subscription::new(stream, self.limits.reply_bytes_max))
    }

    /// One request and its reply's text.
    pub async fn exchange(
        &self,
        server: &HostPort,
        asked: MessageType,
        text: Vec<u8>,
    ) -> Result<Vec<u8>, RpcError> {
        let mut stream = self.connect(server).await?;
        let deadline = Instant::now() + self.limits.exchange;
        let request = Frame::typed(asked, text).encode();
        let exchange = async {
            stream
                .write_all(&request)
                .await
                .map_err(|error| closed(server, &error))?;
            self.read_reply(server, &mut stream).await
        };
        let reply = timeout_at(deadline, exchange)
            .await
            .map_err(|_| timed_out(server, self.limits.exchange, "waiting for the reply"))??;
        let got = reply.kind.message_type();
        if got != asked {
            return Err(RpcError::WrongType {
                server: server.to_string(),
                asked,
                got,
            });
        }
        Ok(reply.text)
    }

    async fn connect(&self, server: &HostPort) -> Result<TcpStream, RpcError> {
        let limit = self.limits.connect;
        let port = server.port_or(PORT_DEFAULT);
        dial(&server.host, port, Instant::now() + limit)
            .await
            .map_err(|error| match error {
                DialError::Resolve(reason) => RpcError::Resolve {
                    server: server.to_string(),
                    reason,
                },
                DialError::Connect(reason) => RpcError::Connect {
                    server: server.to_string(),
                    reason,
                },
                DialError::Timeout { doing } => timed_out(server, limit, doing),
            })
    }

    async fn read_reply(
        &self,
        server: &HostPort,
        stream: &mut TcpStream,
    ) -> Result<Frame, RpcError> {
        let bad_frame = |error| RpcError::Frame {
            server: server.to_string(),
            error,
        };
        let mut decoder = Decoder::new(self.limits.reply_bytes_max);
        let mut chunk = [0; CHUNK_BYTES];
        loop {
            let missing = decoder.missing().map_err(bad_frame)?;
            if missing == 0 {
                break;
            }
            let wanted = missing.min(CHUNK_BYTES);
            match stream.read(&mut chunk[..wanted]).await {
                Ok(0) => return Err(closed(server, &"it was closed")),
                Ok(count) => decoder.push(&chunk[..count]),
                Err(error) => return Err(closed(server, &error)),
            }
        }
        decoder
            .finish()
            .map_err(bad_frame)?
            .ok_or_else(|| closed(server, &"the reply is empty"))
    }
}

/// How a server says that it has no handler for a request, or that the handler failed.
fn is_null(text: &[u8]) -> bool {
    text.trim_ascii() == b"null"
}

fn closed(server: &HostPort, reason: &dyn fmt::Display) -> RpcError {
    RpcError::Closed {
        server: server.to_string(),
        reason: reason.to_string(),
    }
}

fn malformed(server: &HostPort, error: MessageError) -> RpcError {
    RpcError::Malformed {
        server: server.to_string(),
        error,
    }
}

fn refused(server: &HostPort, reason: &str) -> RpcError {
    let reason = reason.chars().take(512).collect();
    RpcError::Refused {
        server: server.to_string(),
        reason,
    }
}

fn timed_out(server: &HostPort, waited: Duration, doing: &'static str) -> RpcError {
    let waited_ms = waited.as_millis() as u64;
    RpcError::Timeout {
        server: server.to_string(),
        waited_ms,
        doing,
    }
}
