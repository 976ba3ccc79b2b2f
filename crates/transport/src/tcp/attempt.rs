//! One request over one connection, and how a connection is given up.

use std::io;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::client::Request;
use super::flow::{Pace, receive_bytes, receive_memory, send_bytes, send_memory};
use super::header::{Header, Opcode, Status};
use super::limits::{ClientLimits, Version};

/// How long a peer's last status is looked for when sending has failed: what it said before it
/// closed is here already, or never comes.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Sends a request and sees it through.
pub(super) async fn attempt(
    stream: &TcpStream,
    request: &Request,
    version: Version,
    limits: &ClientLimits,
) -> io::Result<Status> {
    let Request {
        opcode,
        memory,
        offset,
        length,
        remote_addr,
        ..
    } = request;
    let pace = limits.pace;
    let header = Header {
        size: *length as u64,
        addr: *remote_addr,
        opcode: *opcode,
        with_status: version == Version::V2,
    };
    send_bytes(stream, &header.encode(), pace.stall_max).await?;
    match (opcode, version) {
        (Opcode::Read, version) => {
            if version == Version::V2 {
                let status = timeout(limits.status, receive_status(stream, pace)).await??;
                if status != Status::Ok {
                    return Ok(status);
                }
            }
            receive_memory(stream, memory, *offset, *length, pace).await?;
            Ok(Status::Ok)
        }
        (Opcode::Write, Version::V1) => {
            send_memory(stream, memory, *offset, *length, pace).await?;
            Ok(Status::Ok)
        }
        (Opcode::Write, Version::V2) => {
            let status = receive_status(stream, pace);
            tokio::pin!(status);
            // An early rejection ends the sending.
            let sent = tokio::select! {
                biased;
                early = &mut status => return not_success(early),
                sent = send_memory(stream, memory, *offset, *length, pace) => sent,
            };
            match sent {
                Ok(()) => timeout(limits.status, status).await?,
                Err(error) => match timeout(LAST_WORDS, status).await {
                    Ok(Ok(status)) if status != Status::Ok => Ok(status),
                    _ => Err(error),
                },
            }
        }
    }
}

/// Nobody can have stored what was not sent yet.
fn not_success(early: io::Result<Status>) -> io::Result<Status> {
    match early {
        Ok(Status::Ok) => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the peer reported success before it had all bytes",
        )),
        other => other,
    }
}

async fn receive_status(stream: &TcpStream, pace: Pace) -> io::Result<Status> {
    let bytes = receive_bytes(stream, pace.stall_max)
        .await?
        .ok_or(io::ErrorKind::UnexpectedEof)?;
    Status::decode(bytes)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the peer sent no status frame"))
}

/// Connections over which bytes of a given up WRITE may still arrive. A connection leaves only when
/// its end is known, also when a wait for that is cut off.
pub(super) struct Doubtful {
    streams: Vec<TcpStream>,
    fence_max: Duration,
}

impl Doubtful {
    /// None yet; one whose end does not come within `fence_max` is kept.
    pub(super) fn new(fence_max: Duration) -> Self {
        Self {
            streams: Vec::new(),
            fence_max,
        }
    }

    /// Ends our direction of a connection and waits for the end of the peer's: after that the peer
    /// stores nothing more.
    pub(super) async fn fence(&mut self, mut stream: TcpStream) {
        // An error means that the connection is gone already.
        let _ = stream.shutdown().await;
        self.streams.push(stream);
        self.settle(Instant::now() + self.fence_max).await;
    }

    /// Waits until `until` for the connections that have not ended yet, the latest first. True
    /// when all have.
    pub(super) async fn settle(&mut self, until: Instant) -> bool {
        while let Some(stream) = self.streams.last() {
            match timeout_at(until, end_of(stream)).await {
                Ok(End::Confirmed) => {}
                // Nothing more can be learnt from it. What has reached the peer's kernel is stored
                // within that time, and what has not never is.
                Ok(End::Lost) => sleep(self.fence_max).await,
                Err(_) => return false,
            }
            self.streams.pop();
        }
        true
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.streams.len()
    }
}

/// How a connection ended.
enum End {
    /// The peer closed it.
    Confirmed,
    /// The own kernel gave it up, unheard: a time-out, an unreachable host.
    Lost,
}

/// Returns when the peer has closed its direction, or the connection is broken.
async fn end_of(stream: &TcpStream) -> End {
    loop {
        if stream.readable().await.is_err() {
            return End::Lost;
        }
        match stream.try_read(&mut [0; 512]) {
            Ok(0) => return End::Confirmed,
            Ok(_) => {}
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => {}
                io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    return End::Confirmed;
                }
                _ => return End::Lost,
            },
        }
    }
}
