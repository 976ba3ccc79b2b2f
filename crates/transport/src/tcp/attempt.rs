//! One request over one connection, and how a connection is given up.

use std::io;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

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
    /// There was one whose end will never be known.
    lost: bool,
}

impl Doubtful {
    /// None yet; one whose end does not come within `fence_max` is kept.
    pub(super) fn new(fence_max: Duration) -> Self {
        Self {
            streams: Vec::new(),
            fence_max,
            lost: false,
        }
    }

    /// Ends our direction of a connection and waits for the end of the peer's: after that the peer
    /// stores nothing more. `error` is what the attempt failed with, if it did.
    pub(super) async fn fence(&mut self, mut stream: TcpStream, error: Option<&io::Error>) {
        if error.is_some_and(|error| error.raw_os_error().is_some() && !is_the_peers(error)) {
            // Linux tells such an error once, and then an end of file that the peer knows
            // nothing of.
            self.lost = true;
            return;
        }
        // It fails on a connection that is gone already; whether the peer knows is seen below.
        let _ = stream.shutdown().await;
        self.streams.push(stream);
        self.settle(Instant::now() + self.fence_max).await;
    }

    /// Waits until `until` for the connections that have not ended yet, the latest first. True
    /// when the peer has ended all.
    pub(super) async fn settle(&mut self, until: Instant) -> bool {
        while let Some(stream) = self.streams.last() {
            match timeout_at(until, end_of(stream)).await {
                Ok(End::Confirmed) => {}
                // Nothing more can be learnt from it, and no wait proves anything: a peer that is
                // frozen or cut off may store later what has reached its kernel.
                Ok(End::Lost) => self.lost = true,
                Err(_) => return false,
            }
            self.streams.pop();
        }
        !self.lost
    }

    /// True if the end of one will never be known: no further attempt can be told as done.
    pub(super) fn is_lost(&self) -> bool {
        self.lost
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
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if is_the_peers(&error) => return End::Confirmed,
            Err(_) => return End::Lost,
        }
    }
}

/// True for an error that only the peer's host can cause. Of the others (`ETIMEDOUT`,
/// `EHOSTUNREACH` ...) the peer may know nothing.
fn is_the_peers(error: &io::Error) -> bool {
    // EPIPE says that a reset came before.
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_end_of_file_after_an_error_of_our_own_is_no_fence() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port is free");
        let address = listener.local_addr().expect("bound");
        // Linux: ENETUNREACH, ECONNABORTED, ETIMEDOUT and EHOSTUNREACH; EPIPE and ECONNRESET.
        let own = [101, 103, 110, 113].map(|errno| (io::Error::from_raw_os_error(errno), false));
        let peers = [32, 104].map(|errno| (io::Error::from_raw_os_error(errno), true));
        let given_up = (io::ErrorKind::TimedOut.into(), true);
        for (error, fenced) in own.into_iter().chain(peers).chain([given_up]) {
            let stream = TcpStream::connect(address).await.expect("it listens");
            drop(listener.accept().await.expect("connected"));
            let mut doubtful = Doubtful::new(Duration::from_secs(10));
            doubtful.fence(stream, Some(&error)).await;
            assert_eq!(doubtful.settle(Instant::now()).await, fenced, "{error}");
        }
    }
}
