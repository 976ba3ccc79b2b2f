//! The connections to one peer and the queue that they serve.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::runtime;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::attempt::{Doubtful, attempt};
use super::client::Request;
use super::failure::Failure;
use super::header::{Opcode, Status};
use super::limits::{ClientLimits, Version};
use crate::dial::dial;
use crate::rpc::HostPort;

/// First wait before a failed request is repeated; doubled each time.
const BACKOFF_MIN: Duration = Duration::from_millis(10);
/// Longest such wait.
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// Connections of one request whose end may be awaited at once.
const DOUBTFUL_MAX: usize = 4;
/// How often waiting requests are looked through for those that are late or cancelled.
const SWEEP: Duration = Duration::from_millis(20);

/// A request and whom to tell.
pub(super) struct Job {
    pub(super) request: Request,
    pub(super) cancel: Option<watch::Receiver<bool>>,
    pub(super) done: oneshot::Sender<Result<(), Failure>>,
}

impl Job {
    /// Whoever asked may not care any more.
    fn end(self, outcome: Result<(), Failure>) {
        let _ = self.done.send(outcome);
    }

    fn is_canceled(&self) -> bool {
        self.cancel.as_ref().is_some_and(|cancel| *cancel.borrow())
    }
}

/// The lanes of one peer.
pub(super) struct Lanes {
    peer: HostPort,
    version: Version,
    limits: ClientLimits,
    runtime: runtime::Handle,
    state: Mutex<State>,
    arrived: Notify,
    closed: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    lanes: usize,
    /// Lanes without work; each takes one of the waiting requests.
    idle: usize,
    sweeping: bool,
}

impl Lanes {
    pub(super) fn new(
        peer: HostPort,
        version: Version,
        limits: ClientLimits,
        runtime: runtime::Handle,
    ) -> Self {
        Self {
            peer,
            version,
            limits,
            runtime,
            state: Mutex::default(),
            arrived: Notify::new(),
            closed: watch::Sender::new(false),
        }
    }

    pub(super) fn peer(&self) -> &HostPort {
        &self.peer
    }

    pub(super) fn count(&self) -> usize {
        self.state().lanes
    }

    /// Queues a job, and starts a lane if none is idle and there may be one more.
    pub(super) fn add(this: &Arc<Self>, job: Job) {
        let mut state = this.state();
        if *this.closed.borrow() {
            return job.end(Err(Failure::Closed));
        }
        let queue_max = this.limits.queue_max.max(1);
        if state.waiting.len() >= queue_max {
            return job.end(Err(Failure::QueueFull {
                peer: this.peer.to_string(),
                queue_max,
            }));
        }
        state.waiting.push_back(job);
        if state.idle < state.waiting.len() && state.lanes < this.limits.lanes_max.max(1) {
            state.lanes += 1;
            this.runtime.spawn(Self::lane(Arc::clone(this)));
        } else if state.idle < state.waiting.len() && !state.sweeping {
            state.sweeping = true;
            this.runtime.spawn(Self::sweep(Arc::clone(this)));
        }
        drop(state);
        this.arrived.notify_one();
    }

    pub(super) fn close(&self) {
        let waiting = {
            let mut state = self.state();
            self.closed.send_replace(true);
            std::mem::take(&mut state.waiting)
        };
        for job in waiting {
            job.end(Err(Failure::Closed));
        }
    }

    /// One lane. It outlives a dropped client by its idle time at most.
    async fn lane(this: Arc<Self>) {
        let mut connection = None;
        while let Some(job) = this.next_job().await {
            let outcome = this.run(&mut connection, &job).await;
            job.end(outcome);
        }
    }

    /// The next request; `None` when the lane is to end, which is counted already.
    async fn next_job(&self) -> Option<Job> {
        let mut closed = self.closed.subscribe();
        let until = Instant::now() + self.limits.idle;
        let mut counted_idle = false;
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            // Listening begins before the queue is looked at, so that no arrival is missed.
            arrived.as_mut().enable();
            {
                let mut state = self.state();
                let job = state.waiting.pop_front();
                let ended = job.is_none() && (Instant::now() >= until || *self.closed.borrow());
                if (job.is_some() || ended) && counted_idle {
                    state.idle -= 1;
                }
                if ended {
                    state.lanes -= 1;
                }
                if job.is_some() || ended {
                    return job;
                }
                if !counted_idle {
                    counted_idle = true;
                    state.idle += 1;
                }
            }
            tokio::select! {
                () = &mut arrived => {}
                () = sleep_until(until) => {}
                // An error cannot be: `self` holds the sender.
                _ = closed.wait_for(|closed| *closed) => {}
            }
        }
    }

    /// Ends waiting requests that are late or cancelled while all lanes are busy.
    async fn sweep(this: Arc<Self>) {
        loop {
            sleep(SWEEP).await;
            let now = Instant::now();
            let (ended, go_on) = {
                let mut state = this.state();
                let (ended, kept): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut state.waiting)
                    .into_iter()
                    .partition(|job| job.request.deadline <= now || job.is_canceled());
                state.waiting = kept;
                state.sweeping = !state.waiting.is_empty();
                (ended, state.sweeping)
            };
            for job in ended {
                let failure = if job.is_canceled() {
                    Failure::Canceled {
                        peer: this.peer.to_string(),
                        unfenced: false,
                    }
                } else {
                    this.late(0, "all connections were busy".to_owned(), false)
                };
                job.end(Err(failure));
            }
            if !go_on {
                return;
            }
        }
    }

    /// Tries a request until it is done, given up, late, or can never succeed.
    async fn run(&self, connection: &mut Option<TcpStream>, job: &Job) -> Result<(), Failure> {
        let fence_max = self.limits.fence_max;
        let mut doubtful = Doubtful::new(fence_max);
        let mut under_way = None;
        let given_up = self.given_up(job.cancel.clone());
        let outcome = {
            let trying = self.try_in_time(connection, &mut under_way, &mut doubtful, &job.request);
            tokio::select! {
                biased;
                failure = given_up => Err(failure),
                outcome = trying => outcome,
            }
        };
        let until = match outcome {
            // Nobody waits for the deadline of what was given up.
            Err(Failure::Canceled { .. } | Failure::Closed) => Instant::now() + fence_max,
            _ => job.request.deadline,
        };
        // Cut off in the middle: bytes of a WRITE may be on their way.
        if let Some(stream) = under_way
            && job.request.opcode == Opcode::Write
        {
            doubtful.fence(stream, None).await;
        }
        if doubtful.settle(until).await {
            return outcome;
        }
        let peer = self.peer.to_string();
        Err(match outcome {
            Err(Failure::Canceled { .. } | Failure::Closed) => Failure::Canceled {
                peer,
                unfenced: true,
            },
            Err(Failure::Deadline {
                attempts, cause, ..
            }) => self.late(attempts, cause, true),
            _ => self.late(1, "an earlier attempt did not end".to_owned(), true),
        })
    }

    /// Attempts until the deadline. `under_way` holds the connection whose attempt was cut off
    /// when the future is dropped.
    async fn try_in_time(
        &self,
        connection: &mut Option<TcpStream>,
        under_way: &mut Option<TcpStream>,
        doubtful: &mut Doubtful,
        request: &Request,
    ) -> Result<(), Failure> {
        let mut attempts = 0;
        let mut cause = String::from("it waited for a connection");
        let mut backoff = BACKOFF_MIN;
        while Instant::now() < request.deadline
            && doubtful.len() < DOUBTFUL_MAX
            && !doubtful.is_lost()
        {
            attempts += 1;
            let mut failed = None;
            let connected = match connection.take() {
                Some(stream) => Ok(stream),
                None => self.connect(request.deadline).await,
            };
            match connected {
                Ok(stream) => {
                    let stream = &*under_way.insert(stream);
                    let trying = attempt(stream, request, self.version, &self.limits);
                    let status = timeout_at(request.deadline, trying).await;
                    let was_cut_off = status.is_err();
                    match status.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
                        Ok(Status::Ok) => {
                            *connection = under_way.take();
                            return Ok(());
                        }
                        // The server closes after a rejection, and has stored nothing.
                        Ok(_) => {
                            *under_way = None;
                            return Err(Failure::Rejected {
                                peer: self.peer.to_string(),
                                addr: request.remote_addr,
                                length: request.length,
                            });
                        }
                        Err(error) => {
                            // That the time is over says less than what went wrong before.
                            if !was_cut_off {
                                cause = error.to_string();
                            } else if attempts == 1 {
                                cause = "the peer did not answer".to_owned();
                            }
                            failed = Some(error);
                        }
                    }
                }
                Err(reason) if attempts == 1 || Instant::now() < request.deadline => cause = reason,
                Err(_) => {}
            }
            if let Some(stream) = under_way.take()
                && request.opcode == Opcode::Write
            {
                doubtful.fence(stream, failed.as_ref()).await;
            }
            sleep_until((Instant::now() + backoff).min(request.deadline)).await;
            backoff = (2 * backoff).min(BACKOFF_MAX);
        }
        Err(self.late(attempts, cause, false))
    }

    /// Returns when the client is closed or the request cancelled.
    async fn given_up(&self, cancel: Option<watch::Receiver<bool>>) -> Failure {
        let mut closed = self.closed.subscribe();
        let canceled = async {
            if let Some(mut cancel) = cancel
                && cancel.wait_for(|canceled| *canceled).await.is_ok()
            {
                return;
            }
            // Nobody can cancel it (any more).
            std::future::pending::<()>().await;
        };
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => Failure::Closed,
            () = canceled => Failure::Canceled {
                peer: self.peer.to_string(),
                unfenced: false,
            },
        }
    }

    fn late(&self, attempts: u32, cause: String, unfenced: bool) -> Failure {
        Failure::Deadline {
            peer: self.peer.to_string(),
            attempts,
            cause,
            unfenced,
        }
    }

    async fn connect(&self, deadline: Instant) -> Result<TcpStream, String> {
        let deadline = deadline.min(Instant::now() + self.limits.connect);
        dial(&self.peer.host, self.peer.port_or(0), deadline)
            .await
            .map_err(|error| error.to_string())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
