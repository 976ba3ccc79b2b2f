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
//! as `value_hex`. Not here: TLS (put a proxy before it) and replication.

mod disk;
mod listen;
mod routes;
mod table;
mod wire;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use tokio::sync::watch;

use crate::error::MetadataError;
use crate::secret::Secret;
use disk::Disk;
use table::{Change, Table};

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
    /// Longest time for one request, its body and the disk included, watches not counted.
    pub request_time_max: Duration,
    /// Most watches waiting at one time.
    pub watches_max: usize,
    /// Most events kept for watches that are away for a moment.
    pub events_max: usize,
    /// Most bytes of values in those events.
    pub event_bytes_max: usize,
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
            lease_ttl_max: Duration::from_secs(24 * 3_600),
        }
    }
}

/// Settings of a server.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ServerOptions {
    /// Where records are kept over restarts; `None` keeps them in memory only.
    pub data_dir: Option<PathBuf>,
    /// What clients must send as `Authorization: Bearer …`. C++ engines cannot.
    pub token: Option<Secret>,
    /// Bounds.
    pub limits: ServerLimits,
}

/// A server. Dropping it ends its tasks; what was acknowledged is on disk by then.
#[derive(Clone, Debug)]
pub struct MetadataServer {
    shared: Arc<Shared>,
    _expiry: Arc<crate::store::AbortOnDrop>,
}

#[derive(Debug)]
struct Shared {
    table: Mutex<Table>,
    disk: Option<Disk>,
    revision: watch::Sender<u64>,
    requests: tokio::sync::Semaphore,
    watches: tokio::sync::Semaphore,
    options: ServerOptions,
    counters: routes::Counters,
}

/// Longest time between two looks for leases that have ended.
const EXPIRY_INTERVAL_MAX: Duration = Duration::from_millis(250);

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
        let disk = match &options.data_dir {
            None => None,
            Some(dir) => Some(Disk::open(dir, &mut table, Instant::now())?),
        };
        let (revision, _) = watch::channel(table.revision());
        let shared = Arc::new(Shared {
            requests: tokio::sync::Semaphore::new(options.limits.requests_max),
            watches: tokio::sync::Semaphore::new(options.limits.watches_max),
            table: Mutex::new(table),
            disk,
            revision,
            options,
            counters: routes::Counters::default(),
        });
        let expiry = tokio::spawn(expire_leases(Arc::downgrade(&shared)));
        Ok(Self {
            shared,
            _expiry: Arc::new(crate::store::AbortOnDrop(expiry)),
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
            shared.revision.send_modify(|_| {});
        };
        let limits = &self.shared.options.limits;
        listen::serve(listener, self.router(), limits, until).await;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Table> {
        // The table is changed in single steps, so a panic elsewhere leaves it usable.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one step on the table and returns once its changes are on disk.
    async fn change<T>(
        &self,
        step: impl FnOnce(&mut Table, Instant) -> T,
    ) -> Result<T, disk::DiskFailed> {
        let (outcome, written) = {
            let mut table = self.lock();
            if self.disk.as_ref().is_some_and(Disk::has_failed) {
                return Err(disk::DiskFailed);
            }
            let outcome = step(&mut table, Instant::now());
            let changes = table.take_changes();
            let revision = table.revision();
            // Queued under the lock, so that the disk sees the order of the table.
            let written = self.write(changes);
            self.revision.send_if_modified(|seen| {
                let newer = revision > *seen;
                *seen = revision;
                newer
            });
            (outcome, written)
        };
        if let Some(written) = written {
            written.wait().await?;
        }
        Ok(outcome)
    }

    fn write(&self, changes: Vec<Change>) -> Option<disk::Written> {
        let disk = self.disk.as_ref()?;
        (!changes.is_empty()).then(|| disk.write(changes))
    }
}

async fn expire_leases(shared: std::sync::Weak<Shared>) {
    loop {
        let pause = {
            let Some(shared) = shared.upgrade() else {
                return;
            };
            let over = shared.change(|table, now| {
                table.expire(now);
                table
                    .next_expiry()
                    .map(|at| at.saturating_duration_since(now))
            });
            // A failed disk is logged where it fails; leases then stay.
            over.await.ok().flatten().unwrap_or(EXPIRY_INTERVAL_MAX)
        };
        let pause = pause.clamp(Duration::from_millis(5), EXPIRY_INTERVAL_MAX);
        tokio::time::sleep(pause).await;
    }
}
