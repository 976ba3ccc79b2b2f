//! A metadata server over HTTP, to run as a program (`rerail metadata serve`) or embedded.
//!
//! C++ engines use the three calls they know, GET, PUT and DELETE of `/metadata?key=`. Rerail
//! clients also get versions, lists, leases and watches:
//!
//! | request | answer |
//! |---|---|
//! | `GET /metadata?key=K` | 200 the value, `ETag`; 404; 400 without a key |
//! | `PUT /metadata?key=K` | 200, `ETag`; with `If-Match: "v"` or `If-None-Match: *` 412; with `Rerail-Lease: L` 410 if the lease is gone |
//! | `DELETE /metadata?key=K` | 200; 404; with `If-Match` 412 |
//! | `GET /metadata?prefix=P` | 200 `{"revision", "records": [{"key", "version", "value"}]}` |
//! | `GET /metadata/watch?prefix=P[&after=R][&wait_ms=W]` | 200 `{"revision", "resync", "events": […]}` once there are events, or after W |
//! | `POST /metadata/lease?ttl_ms=T` | 200 `{"lease", "ttl_ms"}` |
//! | `PUT`, `DELETE /metadata/lease?id=L` | keeps alive, 410 if it is gone; ends it |
//! | `GET /health` | 200 `OK`; 503 once the disk has failed |
//! | `GET /metrics` | Prometheus text |
//!
//! Unlike the C++ servers, a second PUT of an `rpc_meta` key replaces the first: a restarted
//! engine has another port, and refusing it locks the owner out. A value that is no UTF-8 is sent
//! as `value_hex`. An answer to a watch may hold only the first of many events; `revision` then
//! says where to go on.
//!
//! A disk that cannot be written, such as a full one, refuses changes with 503; the server then
//! goes back to what it has acknowledged, and takes changes again once the disk does. It never
//! makes a new file then, nor takes one that lacks what was acknowledged. Readers see a change
//! once it is on disk; leases are kept alive also while it is not.
//!
//! Not here: TLS (put a proxy before it) and replication.

mod clock;
mod disk;
mod listen;
mod routes;
mod table;
mod view;
mod wire;
mod writes;

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;

use crate::error::MetadataError;
use crate::secret::Secret;
use clock::LeaseClock;
use disk::{Disk, Expected, Room};
use table::{Refusal, Table};
use view::Visible;
use writes::WritesLog;

/// Bounds of a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerLimits {
    /// Longest key in bytes.
    pub key_bytes_max: usize,
    /// Longest value in bytes.
    pub value_bytes_max: usize,
    /// Most bytes of all keys and values.
    pub total_bytes_max: usize,
    /// Most records.
    pub records_max: usize,
    /// Most leases.
    pub leases_max: usize,
    /// Most connections at one time; who comes later waits until one has ended.
    pub connections_max: usize,
    /// Longest time that a connection may send no request, take to send the head of one, or not
    /// take its answer.
    pub idle_max: Duration,
    /// Most requests in work at one time, watches not counted.
    pub requests_max: usize,
    /// Longest time for one request, its body and the disk included, watches not counted. A long
    /// value that does not come at the pace for that is given up early. Answers may take as long
    /// once more to be sent.
    pub request_time_max: Duration,
    /// Most watches waiting at one time.
    pub watches_max: usize,
    /// Most events kept for watches that are away for a moment.
    pub events_max: usize,
    /// Most bytes of values in those events.
    pub event_bytes_max: usize,
    /// Most events in one answer to a watch; the rest comes with the next one.
    pub answer_events_max: usize,
    /// Most bytes of values in one answer to a watch, unless a single one is longer.
    pub answer_event_bytes_max: usize,
    /// Most lists in work at one time; who comes later waits.
    pub lists_max: usize,
    /// Most bytes of long values being received at one time; who comes later waits.
    pub incoming_bytes_max: usize,
    /// Most bytes of changes that wait for the disk; who comes later waits.
    pub disk_queue_bytes_max: usize,
    /// Longest time to live of a lease.
    pub lease_ttl_max: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            key_bytes_max: 4 << 10,
            // 40 000 buffers with keys for 8 NICs are about 12 MB.
            value_bytes_max: 64 << 20,
            total_bytes_max: 4 << 30,
            records_max: 1 << 20,
            leases_max: 1 << 17,
            connections_max: 1 << 15,
            idle_max: Duration::from_secs(30),
            requests_max: 1 << 12,
            request_time_max: Duration::from_secs(60),
            watches_max: 1 << 14,
            events_max: 1 << 14,
            event_bytes_max: 64 << 20,
            answer_events_max: 1 << 10,
            answer_event_bytes_max: 4 << 20,
            lists_max: 1 << 7,
            incoming_bytes_max: 512 << 20,
            disk_queue_bytes_max: 256 << 20,
            lease_ttl_max: Duration::from_secs(24 * 3_600),
        }
    }
}

/// Settings of a server.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Where records are kept over restarts; `None` keeps them in memory only. It is made if it is
    /// not there, and its file, too; a file that is there and empty has lost its records, and is
    /// refused. One that is deleted, replaced or cut off while the server runs is noticed by the
    /// next change: that is refused, as all are until the file is back.
    pub data_dir: Option<PathBuf>,
    /// What clients must send as `Authorization: Bearer …`. C++ engines cannot.
    pub token: Option<Secret>,
    /// Where every change of a record is written down, as a JSON object on a line: its time,
    /// version, key, value, and who asked for it. Never a token or a lease.
    pub writes_log: Option<PathBuf>,
    /// Bounds.
    pub limits: ServerLimits,
}

/// A server. Dropping it ends its tasks; what was acknowledged is on disk by then.
#[derive(Clone, Debug)]
pub struct MetadataServer {
    shared: Arc<Shared>,
    _tasks: Arc<[crate::store::AbortOnDrop]>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    visible: Arc<Visible>,
    /// Room for changes that wait for the disk, if there is one.
    room: Option<Room>,
    /// The last revision that is on disk, if there is one. What is opened again has to have it.
    acknowledged: Arc<AtomicU64>,
    requests: tokio::sync::Semaphore,
    watches: tokio::sync::Semaphore,
    lists: Arc<tokio::sync::Semaphore>,
    /// Bytes of long values that may yet be received.
    incoming: Arc<tokio::sync::Semaphore>,
    options: ServerOptions,
    counters: routes::Counters,
}

/// What the server decides by, and the disk that has to have it: under one lock, so that the disk
/// sees the changes in their order.
#[derive(Debug)]
struct State {
    table: Table,
    clock: LeaseClock,
    /// `None` without a data directory, and while one that has failed is opened again.
    disk: Option<Disk>,
}

/// What a change without a value counts as: keys and numbers.
const CHANGE_BYTES: usize = 8 << 10;
/// How often a disk that has failed is tried again.
const MEND_INTERVAL: Duration = Duration::from_secs(2);
/// Longest time between two looks for leases that have ended, and for what time it is for them.
const EXPIRY_INTERVAL_MAX: Duration = Duration::from_millis(100);

impl MetadataServer {
    /// Opens the data, if there is any, and starts to let leases end. Needs a tokio runtime.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Setting`] if `data_dir` cannot be used: it names the directory and why.
    pub fn open(options: ServerOptions) -> Result<Self, MetadataError> {
        // A version never comes back, also after a restart without data, as long as the clock
        // does not go backwards: the count of changes starts at the time in microseconds.
        let start = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(1, |since| since.as_micros() as u64);
        let mut table = Table::new(options.limits.clone(), start);
        let now = Instant::now();
        let writes = match &options.writes_log {
            None => None,
            Some(path) => {
                let open = WritesLog::open(path).map_err(|error| MetadataError::Setting {
                    name: "writes_log".into(),
                    reason: format!("{}: {error}", path.display()),
                });
                Some(open?)
            }
        };
        let visible = Visible::new(options.limits.clone(), start, writes);
        let (visible, acknowledged) = (Arc::new(visible), Arc::default());
        let disk = match &options.data_dir {
            None => None,
            Some(dir) => {
                let any = Expected::Anything;
                let disk = Disk::open(dir, any, &mut table, &visible, &acknowledged, now);
                Some(disk?)
            }
        };
        let shared = Arc::new(Shared {
            requests: tokio::sync::Semaphore::new(options.limits.requests_max),
            watches: tokio::sync::Semaphore::new(options.limits.watches_max),
            lists: Arc::new(tokio::sync::Semaphore::new(options.limits.lists_max)),
            incoming: Arc::new(tokio::sync::Semaphore::new(
                options
                    .limits
                    .incoming_bytes_max
                    .max(options.limits.value_bytes_max),
            )),
            room: disk
                .is_some()
                .then(|| Room::new(options.limits.disk_queue_bytes_max)),
            state: Mutex::new(State {
                table,
                clock: LeaseClock::new(now),
                disk,
            }),
            visible,
            acknowledged,
            options,
            counters: routes::Counters::default(),
        });
        let mut tasks = vec![tokio::spawn(expire_leases(Arc::downgrade(&shared)))];
        if let Some(dir) = shared.options.data_dir.clone() {
            tasks.push(tokio::spawn(mend_disk(Arc::downgrade(&shared), dir)));
        }
        let tasks = tasks.into_iter().map(crate::store::AbortOnDrop).collect();
        Ok(Self {
            shared,
            _tasks: tasks,
        })
    }

    /// The routes, for embedding into an application of one's own.
    pub fn router(&self) -> Router {
        routes::router(self.clone())
    }

    /// Serves until `shutdown` completes; then requests in flight are finished, and watches are
    /// answered. A connection that cannot be accepted is logged, and the next one is tried.
    pub async fn serve(
        self,
        listener: tokio::net::TcpListener,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) {
        let shared = Arc::clone(&self.shared);
        let until = async move {
            shutdown.await;
            // Wakes every watch, which then sees that the server stops.
            shared.watches.close();
            shared.visible.wake();
        };
        let limits = &self.shared.options.limits;
        listen::serve(listener, self.router(), limits, until).await;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The table is changed in single steps, so a panic elsewhere leaves it usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True once nothing can be written any more.
    fn disk_has_failed(&self) -> bool {
        self.has_failed(&self.lock())
    }

    fn has_failed(&self, state: &State) -> bool {
        self.room.is_some() && state.disk.as_ref().is_none_or(Disk::has_failed)
    }

    /// Keeps a lease alive, at once: who is in time must not be late because the disk is. There
    /// is nothing to write, and what a failed disk has of a lease is one anew.
    fn keep_alive(&self, id: &str) -> Result<Result<Duration, Refusal>, disk::DiskFailed> {
        let mut state = self.lock();
        let now = state.clock.look(Instant::now());
        let outcome = state.table.keep_alive(id, now);
        // The disk may still have it, and then it comes back.
        if outcome.is_err() && self.has_failed(&state) {
            return Err(disk::DiskFailed);
        }
        Ok(outcome)
    }

    /// Zero once a lease is over; `None` without leases.
    fn until_next_expiry(&self) -> Option<Duration> {
        let mut state = self.lock();
        let now = state.clock.look(Instant::now());
        let next = state.table.next_expiry();
        next.map(|at| at.saturating_duration_since(now))
    }

    /// Runs one step on the table, which `client` asked for and which changes about so many bytes,
    /// and returns once its changes are on disk and shown to readers. A refusal waits, too: it may
    /// be for the sake of a change that is still on its way.
    async fn change<T>(
        &self,
        client: Option<SocketAddr>,
        bytes: usize,
        step: impl FnOnce(&mut Table, Instant) -> T,
    ) -> Result<T, disk::DiskFailed> {
        let room = match &self.room {
            Some(room) => Some(room.take(bytes).await?),
            None => None,
        };
        let (outcome, written) = {
            let mut state = self.lock();
            if self.has_failed(&state) {
                return Err(disk::DiskFailed);
            }
            let State { table, clock, disk } = &mut *state;
            let outcome = step(table, clock.look(Instant::now()));
            let changes = table.take_changes();
            let written = match (disk, room) {
                (Some(disk), Some(room)) => Some(disk.write(changes, client, room)),
                _ => {
                    self.visible.show(changes, client);
                    None
                }
            };
            (outcome, written)
        };
        if let Some(written) = written {
            written.wait().await?;
        }
        Ok(outcome)
    }

    /// Goes back to what the disk has, after it has failed: what it had not was acknowledged and
    /// shown to nobody. A directory that lacks what was acknowledged is refused. Watches are told
    /// to read anew.
    fn reload(&self, dir: &Path) -> Result<(), MetadataError> {
        // The file is free once its last user is gone.
        let failed = self.lock().disk.take();
        drop(failed);
        let start = self.lock().table.revision().saturating_add(1);
        let mut table = Table::new(self.options.limits.clone(), start);
        let expected = Expected::AtLeast(self.acknowledged.load(Ordering::Acquire));
        let now = Instant::now();
        let (visible, acknowledged) = (&self.visible, &self.acknowledged);
        let disk = Disk::open(dir, expected, &mut table, visible, acknowledged, now)?;
        let mut state = self.lock();
        *state = State {
            table,
            clock: LeaseClock::new(now),
            disk: Some(disk),
        };
        Ok(())
    }
}

/// Opens the data again after the disk has failed, such as for want of space.
async fn mend_disk(shared: std::sync::Weak<Shared>, dir: PathBuf) {
    // Each reason is told once, and not every two seconds for as long as it lasts.
    let mut told = None;
    loop {
        tokio::time::sleep(MEND_INTERVAL).await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        if !shared.disk_has_failed() {
            continue;
        }
        let dir = dir.clone();
        let reloaded = tokio::task::spawn_blocking(move || shared.reload(&dir)).await;
        let reason = match reloaded {
            Ok(Ok(())) => {
                tracing::info!("the metadata is on disk again; changes are taken");
                told = None;
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        if told.as_ref() != Some(&reason) {
            tracing::warn!(
                reason,
                "cannot open the metadata again; refusing all changes, and trying every {} s",
                MEND_INTERVAL.as_secs()
            );
            told = Some(reason);
        }
    }
}

/// Ends the leases whose time is over, and nobody else does: so renewals that came before are seen
/// before, and only the ends wait for the disk.
async fn expire_leases(shared: std::sync::Weak<Shared>) {
    loop {
        let pause = {
            let Some(shared) = shared.upgrade() else {
                return;
            };
            if shared
                .until_next_expiry()
                .is_some_and(|left| left.is_zero())
            {
                let expire = |table: &mut Table, now| table.expire(now);
                // A failed disk is logged where it fails; leases then stay.
                let _ = shared.change(None, CHANGE_BYTES, expire).await;
            }
            shared.until_next_expiry().unwrap_or(EXPIRY_INTERVAL_MAX)
        };
        let pause = pause.clamp(Duration::from_millis(5), EXPIRY_INTERVAL_MAX);
        tokio::time::sleep(pause).await;
    }
}
