//! Requests to peers, over a few lasting connections to each.
//!
//! A peer has at most [`ClientLimits::lanes_max`] *lanes*, tasks with a connection each, which take
//! requests from one bounded queue; a lane is started when a request finds no idle one, and ends
//! after some time without work. A request that fails is repeated, over a new connection, until its
//! deadline: READ and WRITE may be done twice.
//!
//! **The fence.** When the outcome of a request is told, none of its bytes can still reach memory
//! at either end. A connection that fails inside a WRITE is closed in our direction, and the end
//! of the peer's direction is awaited: the peer closes only after it has given up the request. A
//! connection whose end does not come within [`ClientLimits::fence_max`] is kept; the request may
//! succeed over another one meanwhile, but is reported only once that end has come. If it never
//! does, because the peer's process is frozen for example, the failure says `unfenced`.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rerail_verbs::HostMemory;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::flow::{Pace, receive_bytes, receive_memory, send_bytes, send_memory};
use super::header::{Header, Opcode, Status};
use crate::rpc::HostPort;

/// First wait before a failed request is repeated; doubled each time.
const BACKOFF_MIN: Duration = Duration::from_millis(10);
/// Longest such wait.
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// Connections of one request whose end may be awaited at once.
const DOUBTFUL_MAX: usize = 4;

/// Bounds of a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ClientLimits {
    /// Connections to one peer (`TCP_LANES_PER_PEER`, 4).
    pub lanes_max: usize,
    /// Requests that may wait for a lane of one peer (`TCP_MAX_QUEUED_TRANSFERS_PER_PEER`, 1 024).
    pub queue_max: usize,
    /// Until a connection stands. 5 s.
    pub connect: Duration,
    /// Until a status comes (`TCP_STATUS_TIMEOUT_SEC`, 30 s).
    pub status: Duration,
    /// How bytes flow.
    pub pace: Pace,
    /// How long a lane stays without work. 60 s.
    pub idle: Duration,
    /// Longest wait for the peer to close after a WRITE was given up. 2 s.
    pub fence_max: Duration,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self {
            lanes_max: 4,
            queue_max: 1_024,
            connect: Duration::from_secs(5),
            status: Duration::from_secs(30),
            pace: Pace::default(),
            idle: Duration::from_secs(60),
            fence_max: Duration::from_secs(2),
        }
    }
}

/// Version of the protocol that a peer's record asks for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Version {
    /// No statuses: a WRITE is finished when its bytes have left.
    V1,
    /// With statuses: a WRITE is finished when its bytes are in the peer's memory.
    V2,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to do.
    pub opcode: Opcode,
    /// Local memory: source of a WRITE, destination of a READ.
    pub memory: HostMemory,
    /// Offset in the local memory.
    pub offset: usize,
    /// Bytes.
    pub length: usize,
    /// First address in the peer's memory.
    pub remote_addr: u64,
    /// When to give up.
    pub deadline: Instant,
}

/// Why a request failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The local range is not inside its memory.
    #[error("{length} bytes at offset {offset} do not lie inside the local memory")]
    LocalRange {
        /// Offset asked for.
        offset: usize,
        /// Bytes asked for.
        length: usize,
    },
    /// The peer says that the addresses are not inside one of its buffers.
    #[error("{peer} rejected {length} bytes at {addr:#x}: not inside one registered buffer")]
    Rejected {
        /// The peer's data port.
        peer: String,
        /// First address.
        addr: u64,
        /// Bytes.
        length: usize,
    },
    /// The deadline passed.
    #[error("{peer}: not finished in time after {attempts} attempts; last trouble: {cause}{}", unfenced_note(*.unfenced))]
    Deadline {
        /// The peer's data port.
        peer: String,
        /// Connections tried.
        attempts: u32,
        /// What went wrong last.
        cause: String,
        /// The peer did not confirm that it gave up a WRITE: bytes of it may still arrive.
        unfenced: bool,
    },
    /// Too many requests wait for the peer.
    #[error("{peer}: {queue_max} requests wait already")]
    QueueFull {
        /// The peer's data port.
        peer: String,
        /// The bound.
        queue_max: usize,
    },
    /// The client was closed.
    #[error("the TCP client was closed")]
    Closed,
}

fn unfenced_note(unfenced: bool) -> &'static str {
    if unfenced {
        "; the peer did not confirm the end of a write"
    } else {
        ""
    }
}

/// Requests to one peer.
#[derive(Clone)]
pub struct TcpClient {
    shared: Arc<Shared>,
}

struct Shared {
    peer: HostPort,
    version: Version,
    limits: ClientLimits,
    runtime: runtime::Handle,
    queue: mpsc::Sender<Job>,
    jobs: tokio::sync::Mutex<mpsc::Receiver<Job>>,
    lanes: AtomicUsize,
    idle: AtomicUsize,
    starting: Mutex<()>,
}

struct Job {
    request: Request,
    done: oneshot::Sender<Result<(), Failure>>,
}

impl TcpClient {
    /// A client of the peer whose data port is `peer`. Connects when there is work.
    pub fn new(
        peer: HostPort,
        version: Version,
        limits: ClientLimits,
        runtime: runtime::Handle,
    ) -> Self {
        let (queue, jobs) = mpsc::channel(limits.queue_max.max(1));
        let shared = Shared {
            peer,
            version,
            limits,
            runtime,
            queue,
            jobs: tokio::sync::Mutex::new(jobs),
            lanes: AtomicUsize::new(0),
            idle: AtomicUsize::new(0),
            starting: Mutex::new(()),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Hands over a request. Never blocks; the receiver gets the outcome.
    pub fn submit(&self, request: Request) -> oneshot::Receiver<Result<(), Failure>> {
        let (done, outcome) = oneshot::channel();
        let Request {
            opcode: _,
            memory,
            offset,
            length,
            ..
        } = &request;
        let end = offset.checked_add(*length);
        if end.is_none_or(|end| end > memory.length()) {
            let _ = done.send(Err(Failure::LocalRange {
                offset: *offset,
                length: *length,
            }));
            return outcome;
        }
        if *length == 0 {
            // The protocol has no empty request: servers reject it.
            let _ = done.send(Ok(()));
            return outcome;
        }
        match self.shared.queue.try_send(Job { request, done }) {
            Ok(()) => self.shared.clone().ensure_lane(),
            Err(error) => {
                let failure = match &error {
                    mpsc::error::TrySendError::Full(_) => Failure::QueueFull {
                        peer: self.shared.peer.to_string(),
                        queue_max: self.shared.limits.queue_max,
                    },
                    mpsc::error::TrySendError::Closed(_) => Failure::Closed,
                };
                let _ = error.into_inner().done.send(Err(failure));
            }
        }
        outcome
    }

    /// Lanes that there are now.
    pub fn lanes(&self) -> usize {
        self.shared.lanes.load(Ordering::SeqCst)
    }
}

impl fmt::Debug for TcpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpClient")
            .field("peer", &self.shared.peer)
            .field("version", &self.shared.version)
            .field("lanes", &self.lanes())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Starts a lane if none is idle and there may be one more.
    fn ensure_lane(self: Arc<Self>) {
        let _one_at_a_time = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        let lanes = self.lanes.load(Ordering::SeqCst);
        let waiting = self.limits.queue_max.saturating_sub(self.queue.capacity());
        if lanes >= self.limits.lanes_max.max(1)
            || (lanes > 0 && self.idle.load(Ordering::SeqCst) >= waiting)
        {
            return;
        }
        self.lanes.fetch_add(1, Ordering::SeqCst);
        let shared = Arc::clone(&self);
        self.runtime.spawn(async move {
            let mut connection = None;
            // A lane outlives a dropped client by its idle time at most.
            while let Some(job) = shared.next_job().await {
                let outcome = shared.run(&mut connection, &job.request).await;
                // Whoever asked may not care any more.
                let _ = job.done.send(outcome);
            }
        });
    }

    /// The next request; `None` when the lane is to end.
    async fn next_job(&self) -> Option<Job> {
        self.idle.fetch_add(1, Ordering::SeqCst);
        let next = timeout(self.limits.idle, async {
            self.jobs.lock().await.recv().await
        })
        .await;
        self.idle.fetch_sub(1, Ordering::SeqCst);
        if let Ok(Some(job)) = next {
            return Some(job);
        }
        let _one_at_a_time = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        // Between the time-out and here a request may have come that counted on this lane.
        let late = self
            .jobs
            .try_lock()
            .ok()
            .and_then(|mut jobs| jobs.try_recv().ok());
        if late.is_none() {
            self.lanes.fetch_sub(1, Ordering::SeqCst);
        }
        late
    }

    /// Tries a request until it is done, its deadline has passed or it can never succeed.
    async fn run(
        &self,
        connection: &mut Option<TcpStream>,
        request: &Request,
    ) -> Result<(), Failure> {
        let mut trouble = Trouble::default();
        let mut backoff = BACKOFF_MIN;
        while Instant::now() < request.deadline && trouble.doubtful.len() < DOUBTFUL_MAX {
            trouble.attempts += 1;
            let stream = match connection.take() {
                Some(stream) => Ok(stream),
                None => self.connect(request.deadline).await,
            };
            match stream {
                Ok(stream) => match self.attempt_in_time(&stream, request).await {
                    Ok(status) => {
                        trouble.settle(request.deadline).await;
                        return match status {
                            _ if !trouble.doubtful.is_empty() => Err(self.failure(trouble)),
                            Status::Ok => {
                                *connection = Some(stream);
                                Ok(())
                            }
                            // The server closes after a rejection, and has stored nothing.
                            _ => Err(Failure::Rejected {
                                peer: self.peer.to_string(),
                                addr: request.remote_addr,
                                length: request.length,
                            }),
                        };
                    }
                    Err(error) => {
                        trouble.cause = error.to_string();
                        if request.opcode == Opcode::Write {
                            trouble.fence(stream, self.limits.fence_max).await;
                        }
                    }
                },
                Err(error) => trouble.cause = error.to_string(),
            }
            sleep_until((Instant::now() + backoff).min(request.deadline)).await;
            backoff = (2 * backoff).min(BACKOFF_MAX);
        }
        trouble.settle(request.deadline).await;
        Err(self.failure(trouble))
    }

    fn failure(&self, trouble: Trouble) -> Failure {
        Failure::Deadline {
            peer: self.peer.to_string(),
            attempts: trouble.attempts,
            cause: trouble.cause,
            unfenced: !trouble.doubtful.is_empty(),
        }
    }

    async fn connect(&self, deadline: Instant) -> io::Result<TcpStream> {
        let deadline = deadline.min(Instant::now() + self.limits.connect);
        let address = (self.peer.host.as_str(), self.peer.port_or(0));
        let stream = timeout_at(deadline, TcpStream::connect(address))
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no connection in time"))??;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    async fn attempt(&self, stream: &TcpStream, request: &Request) -> io::Result<Status> {
        let Request {
            opcode,
            memory,
            offset,
            length,
            remote_addr,
            ..
        } = request;
        let pace = self.limits.pace;
        let with_status = self.version == Version::V2;
        let header = Header {
            size: *length as u64,
            addr: *remote_addr,
            opcode: *opcode,
            with_status,
        };
        send_bytes(stream, &header.encode(), pace.stall_max).await?;
        match (opcode, self.version) {
            (Opcode::Read, version) => {
                if version == Version::V2 {
                    let status =
                        timeout(self.limits.status, receive_status(stream, pace)).await??;
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
                // An early rejection ends the sending; the status of success comes after it.
                tokio::select! {
                    biased;
                    early = &mut status => return early,
                    sent = send_memory(stream, memory, *offset, *length, pace) => sent?,
                }
                timeout(self.limits.status, status).await?
            }
        }
    }

    async fn attempt_in_time(&self, stream: &TcpStream, request: &Request) -> io::Result<Status> {
        timeout_at(request.deadline, self.attempt(stream, request))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// What went wrong with a request so far.
struct Trouble {
    attempts: u32,
    cause: String,
    /// Connections over which bytes of a WRITE may still arrive.
    doubtful: Vec<TcpStream>,
}

impl Default for Trouble {
    fn default() -> Self {
        let cause = String::from("it waited for a connection");
        Self {
            attempts: 0,
            cause,
            doubtful: Vec::new(),
        }
    }
}

impl Trouble {
    /// Ends our direction of a connection and waits for the end of the peer's: after that the peer
    /// stores nothing more.
    async fn fence(&mut self, mut stream: TcpStream, fence_max: Duration) {
        // An error means that the connection is gone already.
        let _ = stream.shutdown().await;
        if timeout(fence_max, end_of(&stream)).await.is_err() {
            self.doubtful.push(stream);
        }
    }

    /// Waits for the connections that have not ended yet, until `deadline`.
    async fn settle(&mut self, deadline: Instant) {
        while let Some(stream) = self.doubtful.pop() {
            if timeout_at(deadline, end_of(&stream)).await.is_err() {
                self.doubtful.push(stream);
                return;
            }
        }
    }
}

/// Returns when the peer has closed its direction, or the connection is broken.
async fn end_of(stream: &TcpStream) {
    loop {
        if stream.readable().await.is_err() {
            return;
        }
        match stream.try_read(&mut [0; 512]) {
            Ok(0) => return,
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
            _ => {}
        }
    }
}

async fn receive_status(stream: &TcpStream, pace: Pace) -> io::Result<Status> {
    let bytes = receive_bytes(stream, pace.stall_max)
        .await?
        .ok_or(io::ErrorKind::UnexpectedEof)?;
    Status::decode(bytes)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the peer sent no status frame"))
}
