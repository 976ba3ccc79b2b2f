use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::RawQuery;
use bytes::Bytes;

use super::clock::LeaseClock;
use super::disk::Disk;
use super::table::{Condition, Refusal, Table};
use super::view::{Since, View};
use super::{
    CHANGE_BYTES, EXPIRY_INTERVAL_MAX, MEND_INTERVAL, MetadataServer, ServerLimits, ServerOptions,
    Shared, routes,
};

/// What a thread logs.
#[derive(Clone, Default, Debug)]
pub(super) struct Log(Arc<Mutex<String>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut text = self.0.lock().expect("lock");
        text.push_str(&String::from_utf8_lossy(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Collects from this thread while the guard lives.
    pub(super) fn collect(&self) -> tracing::subscriber::DefaultGuard {
        let writer = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::set_default(subscriber)
    }

    /// Lines of this level that contain `what`.
    pub(super) fn count(&self, level: &str, what: &str) -> usize {
        let text = self.0.lock().expect("lock");
        let lines = text.lines();
        lines
            .filter(|line| line.contains(level) && line.contains(what))
            .count()
    }
}

#[test]
fn what_is_renewed_before_anybody_has_ended_it_is_not_over() {
    let mut table = table(ServerLimits::default());
    let now = Instant::now();
    let ttl = Duration::from_secs(2);
    for id in ["renewed", "left"] {
        table.grant_lease(id.into(), ttl, now).expect("lease");
        table
            .put(id, Bytes::new(), Condition::None, Some(id))
            .expect("put");
    }
    // The one that ends leases waits for the disk all the while.
    table.keep_alive("renewed", now + 2 * ttl).expect("there");
    table.expire(now + 2 * ttl);
    assert!(table.version("renewed").is_some());
    assert!(table.version("left").is_none());
}

#[test]
fn a_server_that_stood_still_hears_its_clients_before_it_ends_their_leases() {
    let mut table = table(ServerLimits::default());
    let mut now = Instant::now();
    let mut clock = LeaseClock::new(now);
    let ttl = Duration::from_secs(1);
    for id in ["renewed", "left"] {
        table.grant_lease(id.into(), ttl, now).expect("lease");
    }
    now += Duration::from_secs(15);
    table.expire(clock.look(now));
    table.keep_alive("renewed", clock.look(now)).expect("there");
    // From here on it runs, and their time with it.
    for _ in 0..8 {
        now += EXPIRY_INTERVAL_MAX;
        table.expire(clock.look(now));
    }
    let later = clock.look(now);
    assert_eq!(table.keep_alive("left", later), Err(Refusal::LeaseGone));
    table.keep_alive("renewed", later).expect("there");
    for _ in 0..11 {
        now += EXPIRY_INTERVAL_MAX;
        table.expire(clock.look(now));
    }
    assert_eq!(table.next_expiry(), None, "none is left");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_does_not_wait_for_a_disk_that_stalls() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = on_disk(dir.path());
    let ttl = Duration::from_secs(60);
    let grant = |table: &mut Table, now| table.grant_lease("l".into(), ttl, now);
    let granted = server.shared.change(None, CHANGE_BYTES, grant).await;
    granted.expect("on disk").expect("granted");
    let room = server.shared.room.as_ref().expect("on disk");
    // What waits for the disk has it all.
    let _stalled = room.take(usize::MAX).await.expect("free");
    let query = RawQuery(Some("id=l".to_owned()));
    let renewed = routes::keep_alive(axum::extract::State(server.clone()), query);
    let renewed = tokio::time::timeout(Duration::from_secs(3_600), renewed).await;
    let renewed = renewed.expect("at once").expect("renewed");
    assert_eq!(renewed.status(), 200);
}

fn on_disk(dir: &Path) -> MetadataServer {
    let data_dir = Some(dir.to_owned());
    let options = ServerOptions {
        data_dir,
        ..ServerOptions::default()
    };
    MetadataServer::open(options).expect("opened")
}

async fn put(shared: &Shared, key: &str, value: &'static str) {
    let value = Bytes::from_static(value.as_bytes());
    let put = |table: &mut Table, _| table.put(key, value, Condition::None, None);
    let put = shared.change(None, CHANGE_BYTES, put).await;
    put.expect("on disk").expect("put");
}

fn read(shared: &Shared, key: &str) -> Option<Bytes> {
    let view = shared.visible.lock();
    view.get(key).map(|stored| stored.value.clone())
}

#[tokio::test(start_paused = true)]
async fn what_is_not_on_disk_is_shown_to_nobody() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = on_disk(dir.path());
    let shared = &*server.shared;
    put(shared, "k", "1").await;
    let version = shared.lock().table.version("k").expect("stored");
    let watch = shared.visible.subscribe();
    // The first disk's thread is gone once it is dropped.
    let (stalled, fail) = Disk::stalled();
    drop(shared.lock().disk.replace(stalled));
    let value = Bytes::from_static(b"2");
    let replace = |table: &mut Table, _| table.put("k", value, Condition::None, None);
    let mut replacing = Box::pin(shared.change(None, CHANGE_BYTES, replace));
    // Refused for the sake of what may never be: it has to wait, too.
    let stale = |table: &mut Table, _| table.delete("k", Condition::Version(version));
    let mut refused = Box::pin(shared.change(None, CHANGE_BYTES, stale));
    let waited = tokio::time::timeout(Duration::from_secs(60), &mut replacing).await;
    assert!(waited.is_err(), "it is not on disk");
    let waited = tokio::time::timeout(Duration::from_secs(60), &mut refused).await;
    assert!(waited.is_err(), "what it is refused for is not on disk");
    let unchanged = || {
        assert_eq!(read(shared, "k").expect("there"), "1");
        let since = shared.visible.lock().since("", version);
        assert!(matches!(since, Since::Events { events, .. } if events.is_empty()));
        assert!(!watch.has_changed().expect("lives"), "a watch was woken");
    };
    unchanged();
    drop(fail);
    replacing.await.expect_err("never on disk");
    refused.await.expect_err("nor this");
    unchanged();
}

#[tokio::test(start_paused = true)]
async fn nothing_is_served_as_healed_that_lacks_what_was_acknowledged() {
    let parent = tempfile::tempdir().expect("a directory");
    let dir = parent.path().join("data");
    let file = dir.join("metadata.redb");
    let server = on_disk(&dir);
    let shared = &*server.shared;
    put(shared, "k", "1").await;
    // As after a failure. The file is whole once it is closed.
    let fail = || shared.lock().disk = None;
    fail();
    let older = std::fs::read(&file).expect("the file");
    shared.reload(&dir).expect("all is there");
    put(shared, "k", "2").await;
    fail();
    let newest = std::fs::read(&file).expect("the file");
    let other = parent.path().join("other");
    drop(on_disk(&other));
    let other = std::fs::read(other.join("metadata.redb")).expect("a file without records");

    let refused = |why: &str| {
        let error = shared.reload(&dir).expect_err(why).to_string();
        assert!(error.contains(&*dir.to_string_lossy()), "{error}");
        assert!(error.contains(why), "{error}");
        assert!(shared.disk_has_failed());
        assert_eq!(read(shared, "k").expect("served"), "2");
    };
    std::fs::remove_file(&file).expect("removed");
    refused("No such file");
    assert!(!file.exists(), "a file was made");
    std::fs::remove_dir(&dir).expect("removed");
    refused("No such file");
    assert!(!dir.exists(), "a directory was made");
    std::fs::create_dir(&dir).expect("made");
    for stale in [older, other] {
        std::fs::write(&file, stale).expect("written");
        refused("were acknowledged");
    }
    std::fs::write(&file, newest).expect("written");
    shared.reload(&dir).expect("all is there");
    assert_eq!(read(shared, "k").expect("served"), "2");
    put(shared, "k", "3").await;
}

#[tokio::test(start_paused = true)]
async fn each_reason_why_the_disk_stays_unusable_is_told_once() {
    let log = Log::default();
    let _told = log.collect();
    let dir = tempfile::tempdir().expect("a directory");
    let server = on_disk(dir.path());
    put(&server.shared, "k", "1").await;
    server.shared.lock().disk = None;
    let file = dir.path().join("metadata.redb");
    let aside = dir.path().join("aside");
    std::fs::rename(&file, &aside).expect("renamed");
    tokio::time::sleep(10 * MEND_INTERVAL).await;
    assert_eq!(log.count("WARN", "No such file"), 1, "{log:?}");
    std::fs::write(&file, "no database").expect("written");
    tokio::time::sleep(10 * MEND_INTERVAL).await;
    assert_eq!(log.count("WARN", "metadata.redb"), 2, "{log:?}");
    std::fs::rename(&aside, &file).expect("renamed");
    tokio::time::sleep(2 * MEND_INTERVAL).await;
    assert_eq!(log.count("INFO", "on disk again"), 1, "{log:?}");
    put(&server.shared, "k", "2").await;
}

#[tokio::test(start_paused = true)]
async fn a_data_file_that_goes_under_the_server_is_noticed_by_the_next_change() {
    for replaced in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let server = on_disk(dir.path());
        let shared = &*server.shared;
        put(shared, "k", "1").await;
        let file = dir.path().join("metadata.redb");
        let aside = dir.path().join("aside");
        std::fs::rename(&file, &aside).expect("renamed");
        if replaced {
            std::fs::copy(&aside, &file).expect("copied");
        }
        let value = Bytes::from_static(b"2");
        let change = |table: &mut Table, _| table.put("k", value, Condition::None, None);
        let changed = shared.change(None, CHANGE_BYTES, change).await;
        changed.expect_err("nobody would find it again");
        assert_eq!(read(shared, "k").expect("served"), "1");
        // One that has what was acknowledged is as good.
        if !replaced {
            tokio::time::sleep(3 * MEND_INTERVAL).await;
            assert!(shared.disk_has_failed() && !file.exists());
            std::fs::rename(&aside, &file).expect("renamed");
        }
        tokio::time::sleep(3 * MEND_INTERVAL).await;
        put(shared, "k", "3").await;
    }
}

#[test]
fn a_data_file_that_is_empty_is_refused_and_left_as_it_is() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("metadata.redb");
    std::fs::write(&file, "").expect("written");
    let options = || ServerOptions {
        data_dir: Some(dir.path().to_owned()),
        ..ServerOptions::default()
    };
    let error = MetadataServer::open(options()).expect_err("its records are lost");
    let error = error.to_string();
    assert!(
        error.contains("metadata.redb is empty") && error.contains("remove it"),
        "{error}"
    );
    assert_eq!(std::fs::metadata(&file).expect("there").len(), 0);
    std::fs::remove_file(&file).expect("removed");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _entered = runtime.enter();
    MetadataServer::open(options()).expect("begins without records");
}

#[tokio::test(start_paused = true)]
async fn a_data_file_that_is_cut_off_under_the_server_is_noticed_by_the_next_change() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = on_disk(dir.path());
    let shared = &*server.shared;
    put(shared, "k", "1").await;
    let file = dir.path().join("metadata.redb");
    let whole = std::fs::metadata(&file).expect("there").len();
    for length in [whole - 1, 0] {
        let copy = std::fs::read(&file).expect("read");
        let cut = std::fs::File::options().write(true).open(&file);
        cut.expect("there").set_len(length).expect("cut off");
        let value = Bytes::from_static(b"2");
        let change = |table: &mut Table, _| table.put("k", value, Condition::None, None);
        let changed = shared.change(None, CHANGE_BYTES, change).await;
        changed.expect_err("nobody could read it again");
        assert_eq!(read(shared, "k").expect("served"), "1");
        std::fs::write(&file, copy).expect("put back");
        tokio::time::sleep(3 * MEND_INTERVAL).await;
        put(shared, "k", "1").await;
    }
}

#[test]
fn a_server_that_was_killed_while_it_made_its_file_leaves_nothing_that_hinders_the_next() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _entered = runtime.enter();
    for half_made in ["", "not whole yet"] {
        let dir = tempfile::tempdir().expect("a directory");
        let being_made = dir.path().join("metadata.redb.new");
        std::fs::write(&being_made, half_made).expect("written");
        let server = on_disk(dir.path());
        assert!(dir.path().join("metadata.redb").exists() && !being_made.exists());
        // A second one has no part in it.
        let options = ServerOptions {
            data_dir: Some(dir.path().to_owned()),
            ..ServerOptions::default()
        };
        let error = MetadataServer::open(options).expect_err("it is in use");
        assert!(
            error.to_string().contains("another server uses it"),
            "{error}"
        );
        drop(server);
        on_disk(dir.path());
    }
}

#[test]
fn a_data_file_is_made_by_one_server_at_a_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let other = std::fs::File::create(dir.path().join("metadata.redb.new")).expect("made");
    let lock = rustix::fs::FlockOperation::LockExclusive;
    rustix::fs::flock(&other, lock).expect("locked");
    let options = ServerOptions {
        data_dir: Some(dir.path().to_owned()),
        ..ServerOptions::default()
    };
    let error = MetadataServer::open(options).expect_err("another is at it");
    assert!(error.to_string().contains("another server"), "{error}");
    assert!(!dir.path().join("metadata.redb").exists());
}

fn table(limits: ServerLimits) -> Table {
    Table::new(limits, 100)
}

#[test]
fn a_watch_that_was_away_too_long_is_told_to_resync() {
    let limits = ServerLimits {
        events_max: 2,
        ..ServerLimits::default()
    };
    let mut view = View::new(limits.clone(), 100);
    let mut table = table(limits);
    for key in ["a/1", "b/1", "a/2"] {
        table
            .put(key, Bytes::new(), Condition::None, None)
            .expect("put");
    }
    for change in table.take_changes() {
        view.apply(change);
    }
    assert!(
        matches!(view.since("a/", 100), Since::Resync),
        "the first event is forgotten"
    );
    assert!(
        matches!(view.since("a/", 104), Since::Resync),
        "from another life"
    );
    match view.since("a/", 101) {
        Since::Events { events, .. } => assert_eq!(events.len(), 1, "a/2 only: {events:?}"),
        Since::Resync => panic!("events 102 and 103 are there"),
    }
}

#[test]
fn limits_are_refusals_and_change_nothing() {
    let limits = ServerLimits {
        value_bytes_max: 4,
        total_bytes_max: 7,
        records_max: 2,
        leases_max: 1,
        ..ServerLimits::default()
    };
    let mut table = table(limits);
    let now = Instant::now();
    let mut put = |key: &str, value: &'static str| {
        table.put(
            key,
            Bytes::from_static(value.as_bytes()),
            Condition::None,
            None,
        )
    };
    assert_eq!(put("a", "12345"), Err(Refusal::TooLarge { limit: 4 }));
    put("a", "1234").expect("fits");
    assert_eq!(put("b", "12"), Err(Refusal::Full("too many bytes")));
    put("a", "1").expect("an overwrite frees what it replaces");
    put("b", "1").expect("fits");
    assert_eq!(put("c", "1"), Err(Refusal::Full("too many records")));
    let second = Duration::from_secs(1);
    table.grant_lease("l".into(), second, now).expect("first");
    let full = table.grant_lease("m".into(), second, now);
    assert_eq!(full, Err(Refusal::Full("too many leases")));
    assert_eq!(table.sizes(), [4, 1]);
}

#[test]
fn a_lease_takes_its_records_along_and_no_others() {
    let mut table = table(ServerLimits::default());
    let now = Instant::now();
    let ttl = Duration::from_secs(2);
    table.grant_lease("l".into(), ttl, now).expect("lease");
    for key in ["kept", "left", "gone"] {
        table
            .put(key, Bytes::new(), Condition::None, Some("l"))
            .expect("put");
    }
    table
        .put("kept", Bytes::new(), Condition::None, None)
        .expect("put without the lease");
    table.delete("left", Condition::None).expect("deleted");
    table.keep_alive("l", now + ttl / 2).expect("in time");
    table.expire(now + ttl);
    assert!(table.version("gone").is_some(), "kept alive until 3 s");
    table.expire(now + 2 * ttl);
    assert_eq!(
        table.keep_alive("l", now + 2 * ttl),
        Err(Refusal::LeaseGone)
    );
    assert!(table.version("gone").is_none());
    assert!(table.version("kept").is_some());
    let refused = table.put("x", Bytes::new(), Condition::None, Some("l"));
    assert_eq!(refused, Err(Refusal::LeaseGone));
}
