//! Records on disk, in redb. One thread writes; what is queued together is committed together.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use redb::{Builder, Database, DatabaseError, ReadableTable, TableDefinition};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::table::{Change, Records, Stored, Table};
use super::view::Visible;
use crate::error::MetadataError;

const RECORDS: TableDefinition<'_, &str, (u64, &str, &[u8])> = TableDefinition::new("records");
const LEASES: TableDefinition<'_, &str, u64> = TableDefinition::new("leases");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const REVISION: &str = "revision";
const FORMAT: &str = "format";
/// Written into new files; another number is refused.
const FORMAT_VERSION: u64 = 1;
/// Name of the file in the data directory.
const FILE: &str = "metadata.redb";
/// Its name while it is being made.
const FILE_BEING_MADE: &str = "metadata.redb.new";
/// What to do about a file that cannot be used.
const MEND_BY_HAND: &str = "put a copy of it back, or remove it to begin without records";
/// Most requests that one commit covers.
const GROUP_MAX: usize = 512;
/// What a short change counts as.
const ROOM_UNIT: usize = 1 << 10;
/// Most memory for redb's cache of pages. The records are in memory anyway.
const CACHE_BYTES: usize = 16 << 20;

/// The disk could not write; nothing is acknowledged until what is on it has been read again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DiskFailed;

/// What a directory has to have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Expected {
    /// Nothing: what is missing is made.
    Anything,
    /// The file, with every change up to this revision. Nothing is made, so that a directory that
    /// is no longer mounted is not taken for one without records.
    AtLeast(u64),
}

/// The writing thread's queue.
#[derive(Debug)]
pub(super) struct Disk {
    /// `None` only while dropping.
    queue: Option<mpsc::UnboundedSender<Entry>>,
    thread: Option<std::thread::JoinHandle<()>>,
    failed: Arc<AtomicBool>,
}

/// Bounds what waits for the disk, in units of [`ROOM_UNIT`]. Who goes away while a change of his
/// waits, takes none of it along: so it counts, and not the requests.
#[derive(Clone, Debug)]
pub(super) struct Room {
    free: Arc<Semaphore>,
    units_max: usize,
}

/// A part of the room, given back once its change is on disk.
#[derive(Debug)]
pub(super) struct Taken(#[expect(dead_code, reason = "held")] OwnedSemaphorePermit);

impl Room {
    /// Room for changes of `bytes` in all.
    pub(super) fn new(bytes: usize) -> Self {
        let units_max = (bytes / ROOM_UNIT).clamp(1, Semaphore::MAX_PERMITS);
        Self {
            free: Arc::new(Semaphore::new(units_max)),
            units_max,
        }
    }

    /// Waits until there is room for a change of so many bytes; one that is over all there is
    /// takes all.
    pub(super) async fn take(&self, bytes: usize) -> Result<Taken, DiskFailed> {
        let units = (bytes / ROOM_UNIT + 1).min(self.units_max);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        let free = Arc::clone(&self.free);
        let permit = free.acquire_many_owned(units).await;
        permit.map(Taken).map_err(|_| DiskFailed)
    }
}

impl Drop for Disk {
    /// Waits for the last commit, so that the file is free once the server is gone.
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
impl Disk {
    /// One that writes nothing, and fails once what is returned with it is dropped.
    pub(super) fn stalled() -> (Self, impl Sized) {
        let (queue, entries) = mpsc::unbounded_channel();
        let disk = Self {
            queue: Some(queue),
            thread: None,
            failed: Arc::default(),
        };
        (disk, entries)
    }
}

#[derive(Debug)]
struct Entry {
    changes: Vec<Change>,
    client: Option<SocketAddr>,
    written: oneshot::Sender<()>,
    _room: Taken,
}

/// Completes once the changes are on disk.
#[derive(Debug)]
pub(super) struct Written(oneshot::Receiver<()>);

impl Written {
    pub(super) async fn wait(self) -> Result<(), DiskFailed> {
        self.0.await.map_err(|_| DiskFailed)
    }
}

impl Disk {
    /// Opens the file in `dir`, fills `table` from it and shows it to readers, as later what is
    /// written. `acknowledged` is kept at the last
    /// revision that the file has.
    pub(super) fn open(
        dir: &Path,
        expected: Expected,
        table: &mut Table,
        visible: &Arc<Visible>,
        acknowledged: &Arc<AtomicU64>,
        now: Instant,
    ) -> Result<Self, MetadataError> {
        let cannot = |reason: String| MetadataError::Setting {
            name: "--data-dir".into(),
            reason: format!("{}: {reason}", dir.display()),
        };
        if expected == Expected::Anything {
            std::fs::create_dir_all(dir).map_err(|error| cannot(error.to_string()))?;
        }
        // A damaged file is an error. redb finds most damage by itself, and panics over some.
        let read = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let mut builder = Database::builder();
            builder.set_cache_size(CACHE_BYTES);
            let path = dir.join(FILE);
            check_not_empty(&path)?;
            let made = match expected {
                Expected::Anything => make(&builder, dir)?,
                Expected::AtLeast(_) => None,
            };
            let database = match made {
                Some(database) => Ok(database),
                None => builder.open(&path),
            };
            let database = database.map_err(|error| match error {
                DatabaseError::DatabaseAlreadyOpen => {
                    format!("cannot open {FILE}: another server uses it")
                }
                error => format!("cannot open {FILE}: {error}; if it is damaged, {MEND_BY_HAND}"),
            })?;
            let (records, revision) = load(&database, expected, table, now)?;
            let (identity, length) = look_at(&path)?;
            let file = DataFile {
                database,
                path,
                identity,
                length,
            };
            Ok((file, records, revision))
        }));
        let (mut file, records, revision) = read
            .unwrap_or_else(|_| Err(format!("cannot read {FILE}: it is damaged; {MEND_BY_HAND}")))
            .map_err(cannot)?;

        let (queue, entries) = mpsc::unbounded_channel();
        let failed = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&failed);
        acknowledged.store(revision, Ordering::Release);
        visible.restore(records, table.revision());
        let acknowledged = Arc::clone(acknowledged);
        let shown = Arc::clone(visible);
        let thread = std::thread::Builder::new()
            .name("metadata-disk".into())
            .spawn(move || {
                // However it ends, also by a panic over a damaged file.
                let _ended = Ended(&flag);
                write_loop(&mut file, entries, &shown, &acknowledged);
            })
            .map_err(|error| cannot(error.to_string()))?;
        Ok(Self {
            queue: Some(queue),
            thread: Some(thread),
            failed,
        })
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Queues what one step changed, be it nothing: it is written once all before it is.
    pub(super) fn write(
        &self,
        changes: Vec<Change>,
        client: Option<SocketAddr>,
        room: Taken,
    ) -> Written {
        let (written, done) = oneshot::channel();
        // If the thread is gone the entry is dropped, and with it `written`: the waiter sees it.
        if let Some(queue) = &self.queue {
            let _ = queue.send(Entry {
                changes,
                client,
                written,
                _room: room,
            });
        }
        Written(done)
    }
}

/// Makes a file without records, unless there is one. It gets its name once it is whole: a server
/// that is killed meanwhile leaves nothing that the next one could not open.
fn make(builder: &Builder, dir: &Path) -> Result<Option<Database>, String> {
    let text = |error: &dyn std::fmt::Display| format!("cannot make {FILE}: {error}");
    let path = dir.join(FILE);
    let is_there = || path.try_exists().map_err(|error| text(&error));
    if is_there()? {
        return Ok(None);
    }
    let being_made = dir.join(FILE_BEING_MADE);
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = options.open(&being_made).map_err(|error| text(&error))?;
    // Also redb's lock, which it keeps for as long as the database is open.
    flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
        Errno::WOULDBLOCK => text(&"another server is at it"),
        error => text(&error),
    })?;
    // Whoever had the lock before may have given it the name.
    if is_there()? {
        return Ok(None);
    }
    file.set_len(0).map_err(|error| text(&error))?;
    let database = builder.create_file(file).map_err(|error| text(&error))?;
    let named = std::fs::rename(&being_made, &path);
    // So that the name outlasts a loss of power, as what is written does.
    let named = named.and_then(|()| std::fs::File::open(dir)?.sync_all());
    named.map_err(|error| text(&error))?;
    Ok(Some(database))
}

/// Fills `table`, and returns the records and the last revision that the file has.
fn load(
    database: &Database,
    expected: Expected,
    table: &mut Table,
    now: Instant,
) -> Result<(Records, u64), String> {
    let text = |error: &dyn std::fmt::Display| format!("cannot read {FILE}: {error}");
    // Makes the tables of a new file, and shows that it can be written.
    let write = database.begin_write().map_err(|error| text(&error))?;
    let loaded = {
        let mut meta = write.open_table(META).map_err(|error| text(&error))?;
        let format = meta
            .get(FORMAT)
            .map_err(|error| text(&error))?
            .map(|guard| guard.value());
        match format {
            Some(FORMAT_VERSION) => {}
            Some(other) => {
                return Err(format!(
                    "{FILE} has format {other}, this program {FORMAT_VERSION}"
                ));
            }
            None => {
                meta.insert(FORMAT, FORMAT_VERSION)
                    .map_err(|error| text(&error))?;
            }
        }
        let revision = meta.get(REVISION).map_err(|error| text(&error))?;
        let revision = revision.map_or(0, |guard| guard.value());
        if let Expected::AtLeast(least) = expected
            && revision < least
        {
            return Err(format!(
                "{FILE} has changes up to {revision}, but those up to {least} were acknowledged: \
                 it is an older one, or another; put the right one back, or start the server \
                 again to take this one"
            ));
        }
        let mut leases = Vec::new();
        let lease_table = write.open_table(LEASES).map_err(|error| text(&error))?;
        for entry in lease_table.iter().map_err(|error| text(&error))? {
            let (id, ttl) = entry.map_err(|error| text(&error))?;
            leases.push((id.value().to_owned(), Duration::from_millis(ttl.value())));
        }
        let mut records = Vec::new();
        let record_table = write.open_table(RECORDS).map_err(|error| text(&error))?;
        for entry in record_table.iter().map_err(|error| text(&error))? {
            let (key, stored) = entry.map_err(|error| text(&error))?;
            let (version, lease, value) = stored.value();
            let stored = Stored {
                value: Bytes::copy_from_slice(value),
                version,
                lease: (!lease.is_empty()).then(|| lease.into()),
            };
            records.push((key.value().into(), stored));
        }
        table.restore(leases, &records, revision, now);
        (records, revision)
    };
    write.commit().map_err(|error| text(&error))?;
    Ok(loaded)
}

/// Notes that nothing is written any more.
struct Ended<'flag>(&'flag AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(
                "writing the metadata to disk panicked, over a damaged {FILE} most likely; \
                 refusing all changes until it can be read again"
            );
        }
        self.0.store(true, Ordering::Release);
    }
}

/// The file, open.
struct DataFile {
    database: Database,
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
    /// Bytes. Only a commit changes it.
    length: u64,
}

impl DataFile {
    /// Whether what was written can be found again: a file that was deleted or replaced under the
    /// server takes writes like any other.
    fn check_in_place(&mut self) -> Result<(), String> {
        let (identity, length) = look_at(&self.path)?;
        if identity == self.identity {
            self.length = length;
            return Ok(());
        }
        Err(format!(
            "{FILE} was replaced by another file while the server ran: put the right one back, or \
             start the server again to take this one"
        ))
    }

    /// Whether it has all that was written to it: the rest of one that was cut off takes writes
    /// like any other, and cannot be read again.
    fn check_whole(&self) -> Result<(), String> {
        let (identity, length) = look_at(&self.path)?;
        if identity != self.identity || length >= self.length {
            return Ok(());
        }
        Err(format!(
            "{FILE} had {} bytes, and was cut off at {length} while the server ran; {MEND_BY_HAND}",
            self.length
        ))
    }
}

/// Device and inode of the file, and its length in bytes.
fn look_at(path: &Path) -> Result<((u64, u64), u64), String> {
    let found = std::fs::metadata(path);
    let found = found.map_err(|error| {
        format!(
            "{FILE} is not where it was opened ({error}): put it back, or start the server again \
             to begin without records"
        )
    })?;
    Ok(((found.dev(), found.ino()), found.len()))
}

/// Refuses a file that is there and empty: it was cut off by a fault of the disk, or by somebody,
/// and had records. This server's own is never so, since it is made under another name.
fn check_not_empty(path: &Path) -> Result<(), String> {
    match std::fs::metadata(path) {
        Ok(found) if found.len() == 0 => Err(format!(
            "{FILE} is empty: its records are lost; {MEND_BY_HAND}"
        )),
        // What else is wrong with it shows when it is opened.
        _ => Ok(()),
    }
}

fn write_loop(
    file: &mut DataFile,
    mut entries: mpsc::UnboundedReceiver<Entry>,
    visible: &Visible,
    acknowledged: &AtomicU64,
) {
    while let Some(first) = entries.blocking_recv() {
        let mut group = vec![first];
        while group.len() < GROUP_MAX {
            let Ok(next) = entries.try_recv() else { break };
            group.push(next);
        }
        if let Err(error) = commit(file, &group) {
            // What is in memory is ahead of the disk now, so that going on would acknowledge
            // changes on top of one that is lost.
            tracing::error!(
                %error,
                "cannot write the metadata to disk; refusing all changes until it can be read again"
            );
            return;
        }
        let changes = group.iter().flat_map(|entry| &entry.changes);
        if let Some(revision) = changes.filter_map(Change::revision).last() {
            acknowledged.store(revision, Ordering::Release);
        }
        for entry in group {
            visible.show(entry.changes, entry.client);
            // The client may be gone; its change is on disk all the same.
            let _ = entry.written.send(());
        }
    }
}

fn commit(file: &mut DataFile, group: &[Entry]) -> Result<(), Box<dyn std::error::Error>> {
    if group.iter().all(|entry| entry.changes.is_empty()) {
        return Ok(());
    }
    file.check_whole()?;
    // The default durability: the file is synced before the commit returns.
    let write = file.database.begin_write()?;
    {
        let mut records = write.open_table(RECORDS)?;
        let mut leases = write.open_table(LEASES)?;
        let mut meta = write.open_table(META)?;
        for change in group.iter().flat_map(|entry| &entry.changes) {
            match change {
                Change::Put { key, stored } => {
                    let lease = stored.lease.as_deref().unwrap_or_default();
                    records.insert(&**key, (stored.version, lease, stored.value.as_ref()))?;
                    meta.insert(REVISION, stored.version)?;
                }
                Change::Delete { key, revision } => {
                    records.remove(&**key)?;
                    meta.insert(REVISION, *revision)?;
                }
                Change::GrantLease { id, ttl } => {
                    leases.insert(&**id, ttl.as_millis() as u64)?;
                }
                Change::EndLease { id } => {
                    leases.remove(&**id)?;
                }
            }
        }
    }
    write.commit()?;
    // Afterwards: nothing is acknowledged that went into a file which is not there any more.
    file.check_in_place()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::{Ended, Room};
    use crate::server::tests::Log;

    #[test]
    fn a_panic_of_the_writing_thread_is_told() {
        let log = Log::default();
        let failed = AtomicBool::new(false);
        let panicked = std::thread::scope(|scope| {
            let writing = || {
                let _told = log.collect();
                let _ended = Ended(&failed);
                panic!("as redb does over a damaged file");
            };
            scope.spawn(writing).join()
        });
        assert!(panicked.is_err());
        assert!(failed.load(Ordering::Acquire));
        assert_eq!(log.count("ERROR", "damaged metadata.redb"), 1, "{log:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn changes_wait_for_room_however_their_clients_fare() {
        let room = Room::new(10 << 10);
        let first = room.take(6 << 10).await.expect("free");
        // Longer than all there is: takes all, once it is free.
        let mut second = Box::pin(room.take(1 << 30));
        let waited = tokio::time::timeout(Duration::from_secs(1), &mut second).await;
        assert!(waited.is_err(), "there is no room yet");
        drop(first);
        let second = second.await.expect("free");
        assert_eq!(room.free.available_permits(), 0);
        drop(second);
        assert_eq!(room.free.available_permits(), 10);
    }
}
