//! Bytes between a socket and memory, in chunks, each within a time.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rerail_verbs::HostMemory;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::TransportError;
use crate::settings::Settings;

/// How bytes flow.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Pace {
    /// Bytes of one socket operation at most, 1..=1 GiB (`TCP_SLICE_SIZE`, 65 536).
    pub chunk_bytes: usize,
    /// Longest wait for any progress (30 s).
    pub stall_max: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            chunk_bytes: 64 << 10,
            stall_max: Duration::from_secs(30),
        }
    }
}

impl Pace {
    /// The defaults, with what is set.
    ///
    /// # Errors
    ///
    /// [`TransportError::Setting`] for a value that does not parse or is out of range.
    pub fn from_settings(settings: &Settings<'_>) -> Result<Self, TransportError> {
        let default = Self::default();
        let chunk_bytes = settings.number("TCP_SLICE_SIZE", 1..=1 << 30)?;
        Ok(Self {
            chunk_bytes: chunk_bytes.unwrap_or(default.chunk_bytes),
            ..default
        })
    }
}

/// Sends `length` bytes of `memory` at `offset`.
///
/// # Errors
///
/// `TimedOut` when nothing moved for [`Pace::stall_max`]; else the system's.
pub async fn send_memory(
    stream: &TcpStream,
    memory: &HostMemory,
    offset: usize,
    length: usize,
    pace: Pace,
) -> io::Result<()> {
    let mut sent = 0;
    while sent < length {
        let chunk = (length - sent).min(pace.chunk_bytes);
        let sending = stream.async_io(Interest::WRITABLE, || {
            memory.send_to(offset + sent, chunk, stream.as_fd())
        });
        sent += within(pace.stall_max, sending).await?;
    }
    Ok(())
}

/// Receives `length` bytes into `memory` at `offset`.
///
/// # Errors
///
/// `UnexpectedEof` when the peer closes before; `TimedOut` when nothing moved for
/// [`Pace::stall_max`]; else the system's.
pub async fn receive_memory(
    stream: &TcpStream,
    memory: &HostMemory,
    offset: usize,
    length: usize,
    pace: Pace,
) -> io::Result<()> {
    let mut received = 0;
    while received < length {
        let chunk = (length - received).min(pace.chunk_bytes);
        let receiving = stream.async_io(Interest::READABLE, || {
            memory.read_from(offset + received, chunk, stream.as_fd())
        });
        match within(pace.stall_max, receiving).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => received += count,
        }
    }
    Ok(())
}

/// Sends a few bytes of our own.
pub async fn send_bytes(stream: &TcpStream, bytes: &[u8], stall_max: Duration) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        within(stall_max, stream.writable()).await?;
        match stream.try_write(&bytes[sent..]) {
            Ok(count) => sent += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Receives exactly `N` bytes; `None` if the peer closed before the first. The first may take as
/// long as it likes, the others `stall_max` together.
pub async fn receive_bytes<const N: usize>(
    stream: &TcpStream,
    stall_max: Duration,
) -> io::Result<Option<[u8; N]>> {
    let mut bytes = [0; N];
    let mut received = receive_some(stream, &mut bytes).await?;
    if received == 0 {
        return Ok(None);
    }
    let rest = async {
        while received < N {
            match receive_some(stream, &mut bytes[received..]).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => received += count,
            }
        }
        Ok(())
    };
    within(stall_max, rest).await?;
    Ok(Some(bytes))
}

/// Receives at least one byte; 0 at the end of the stream.
async fn receive_some(stream: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        // Readiness may be a false alarm.
        stream.readable().await?;
        match stream.try_read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}

async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match timeout(limit, work).await {
        Ok(result) => result,
        Err(_) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no byte moved for {} ms", limit.as_millis()),
        )),
    }
}
