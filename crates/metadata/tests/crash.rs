//! Our HTTP server as a process of its own, killed with no chance to clean up.

#![cfg(all(feature = "http", feature = "server"))]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::forward::Forward;
use common::{Process, START_MAX, full};
use rerail_metadata::server::{MetadataServer, ServerOptions};
use rerail_metadata::{
    Change, Follow, HttpStore, KeySpace, MetadataError, MetadataStore, OwnedEvent, OwnedOptions,
    OwnedRecords, StoreOptions,
};

const PORT_FILE: &str = "RERAIL_TEST_SERVER_PORT_FILE";
const DATA_DIR: &str = "RERAIL_TEST_SERVER_DIR";
/// Gives the damage of an earlier run again.
const SEED: &str = "RERAIL_TEST_SEED";

/// No test: what the other processes of this file run. Returns at once when nobody asked.
#[tokio::test]
async fn serve_when_asked() {
    let Some(port_file) = std::env::var_os(PORT_FILE).map(PathBuf::from) else {
        return;
    };
    let mut options = ServerOptions::default();
    options.data_dir = std::env::var_os(DATA_DIR).map(Into::into);
    let server = MetadataServer::open(options).expect("opened");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
    let listener = listener.expect("listens");
    let port = listener.local_addr().expect("an address").port();
    // Renamed, so that nobody reads half of it.
    let part = port_file.with_extension("part");
    std::fs::write(&part, port.to_string()).expect("written");
    std::fs::rename(&part, &port_file).expect("renamed");
    server.serve(listener, std::future::pending()).await;
}

/// A server process on a port of its own choice, and the address under which clients know it.
struct Server {
    process: Process,
    port: u16,
}

impl Server {
    fn start(data_dir: Option<&Path>) -> Self {
        Self::start_by(data_dir, |program| Command::new(program))
    }

    /// With a command that runs the program with whatever arguments come.
    fn start_by(data_dir: Option<&Path>, command: impl FnOnce(&Path) -> Command) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let port_file = dir.path().join("port");
        let mut command = command(&std::env::current_exe().expect("this program"));
        command
            .args(["--exact", "serve_when_asked"])
            .env(PORT_FILE, &port_file);
        if let Some(dir) = data_dir {
            command.env(DATA_DIR, dir);
        }
        let process = Process::start(&mut command);
        let started = Instant::now();
        let port = loop {
            if let Ok(port) = std::fs::read_to_string(&port_file) {
                break port.parse().expect("a port");
            }
            assert!(started.elapsed() < START_MAX, "the server does not start");
            std::thread::sleep(Duration::from_millis(20));
        };
        Self { process, port }
    }
}

fn client(service: &Forward) -> HttpStore {
    let url = format!("http://{}/metadata", service.address);
    HttpStore::new(&url, None, &StoreOptions::default()).expect("a client")
}

fn text(value: &'static str) -> Bytes {
    Bytes::from_static(value.as_bytes())
}

async fn until_up<T, F: Future<Output = Result<T, MetadataError>>>(what: impl Fn() -> F) -> T {
    for _ in 0..100 {
        match what().await {
            Ok(done) => return done,
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    panic!("the store does not come back");
}

async fn until_followed(follow: &mut Follow, key: &str, value: &str) {
    let wanted = async {
        loop {
            match follow.next().await.expect("the watch lives") {
                Change::Put(record) if record.key == key && record.value == value => return,
                _ => {}
            }
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(40), wanted).await;
    assert!(waited.is_ok(), "{key} = {value} does not come");
}

#[tokio::test]
async fn kill_9_at_any_moment_loses_no_acknowledged_write() {
    const ROUNDS: u64 = 6;
    const WRITERS: u64 = 8;
    let dir = tempfile::tempdir().expect("a directory");
    let service = Forward::to(0).await;
    // What was acknowledged last for each key; `None` for a deletion.
    let acknowledged: Arc<Mutex<BTreeMap<String, Option<u64>>>> = Arc::default();
    let mut writes = 0;
    for round in 0..ROUNDS {
        let mut server = Server::start(Some(dir.path()));
        service.switch(server.port);
        let stop = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (acknowledged, stop) = (Arc::clone(&acknowledged), Arc::clone(&stop));
                let store = client(&service);
                tokio::spawn(async move {
                    // The key in doubt when the server dies is not used again.
                    let mut number = round * 1_000_000;
                    while !stop.load(Ordering::Relaxed) {
                        number += 1;
                        let key = format!("k/{round}/{writer}/{}", number % 5);
                        let forget = |key: &str| acknowledged.lock().expect("lock").remove(key);
                        let before = forget(&key);
                        let value = Bytes::from(number.to_string());
                        let done = if number % 7 == 0 {
                            store.delete(&key).await.map(|_| None)
                        } else {
                            store.put(&key, value, None).await.map(|_| Some(number))
                        };
                        match done {
                            Ok(state) => {
                                acknowledged.lock().expect("lock").insert(key, state);
                            }
                            Err(error) => {
                                assert!(error.is_retryable(), "{error} after {before:?}");
                                return number;
                            }
                        }
                    }
                    number
                })
            })
            .collect();
        // Another moment in each round.
        tokio::time::sleep(Duration::from_millis(150 + 37 * round)).await;
        server.process.kill();
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            writes += writer.await.expect("no panic") - round * 1_000_000;
        }
    }
    let server = Server::start(Some(dir.path()));
    service.switch(server.port);
    let store = client(&service);
    let acknowledged = acknowledged.lock().expect("lock").clone();
    assert!(
        acknowledged.len() > 20,
        "{} keys of {writes} writes",
        acknowledged.len()
    );
    for (key, state) in acknowledged {
        let found = match store.get(&key).await {
            Ok(record) => Some(String::from_utf8_lossy(&record.value).into_owned()),
            Err(error) if error.is_not_found() => None,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(found, state.map(|number| number.to_string()), "{key}");
    }
}

#[tokio::test]
async fn m01_two_owners_publish_again_after_kill_9_and_a_third_finds_them() {
    let mut server = Server::start(None);
    let service = Forward::to(server.port).await;
    let keys = KeySpace::default();
    let mut options = OwnedOptions::default();
    options.ttl = Some(Duration::from_secs(5));
    options.read_back = Duration::from_secs(2);
    let owners: Vec<_> = ["node-a", "node-b"]
        .into_iter()
        .map(|name| {
            let (owned, events) = OwnedRecords::start(Arc::new(client(&service)), options.clone());
            owned.set(keys.segment(name), Bytes::from_static(b"{}"));
            owned.set(keys.rpc_meta(name), Bytes::from_static(b"{}"));
            (owned, events)
        })
        .collect();
    for (owned, _) in &owners {
        owned.stored().await;
    }
    server.process.kill();
    let server = Server::start(None);
    service.switch(server.port);
    let third = client(&service);
    let found = async {
        loop {
            match third.list(keys.prefix()).await {
                Ok(records) if records.len() == 4 => return,
                _ => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(20), found).await;
    assert!(waited.is_ok(), "not all four records are there again");
}

#[tokio::test]
async fn after_kill_9_and_a_restart_from_its_directory_nothing_is_missed() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut server = Server::start(Some(dir.path()));
    let service = Forward::to(server.port).await;
    let mut options = OwnedOptions::default();
    options.ttl = Some(Duration::from_secs(60));
    let (owned, mut events) = OwnedRecords::start(Arc::new(client(&service)), options);
    owned.set("p/owned", text("1"));
    owned.stored().await;
    let store = client(&service);
    let kept = store.put("p/kept", text("1"), None).await.expect("put");
    let mut follow = Follow::new(Arc::new(client(&service)), "p/").await;
    let follow = follow.as_mut().expect("follow");
    until_followed(follow, "p/owned", "1").await;
    server.process.kill();
    // Overtaken while the server is away, and never written.
    owned.set("p/owned", text("2"));
    owned.set("p/owned", text("3"));
    let server = Server::start(Some(dir.path()));
    service.switch(server.port);
    let version = until_up(|| async { Ok(store.get("p/kept").await?.version) }).await;
    assert_eq!(version, kept, "the record is the one from before");
    until_followed(follow, "p/owned", "3").await;
    until_up(|| store.put("p/new", text("1"), None)).await;
    until_followed(follow, "p/new", "1").await;
    // The lease is on disk, too: nothing had to be put again.
    while let Ok(event) = events.try_recv() {
        assert!(!matches!(event, OwnedEvent::LeaseLost), "{event:?}");
    }
    owned.close().await.expect("closed");
}

#[tokio::test]
async fn a_server_frozen_for_15_s_is_an_outage_and_nothing_else() {
    if !full() {
        return;
    }
    let server = Server::start(None);
    let service = Forward::to(server.port).await;
    let store = client(&service);
    let (owned, _events) = OwnedRecords::start(Arc::new(store.clone()), OwnedOptions::default());
    owned.set("p/owned", text("1"));
    owned.stored().await;
    let mut follow = Follow::new(Arc::new(client(&service)), "p/").await;
    let follow = follow.as_mut().expect("follow");
    until_followed(follow, "p/owned", "1").await;
    server.process.signal("STOP");
    assert!(
        store
            .get("p/owned")
            .await
            .expect_err("frozen")
            .is_retryable()
    );
    owned.set("p/owned", text("2"));
    tokio::time::sleep(Duration::from_secs(15)).await;
    server.process.signal("CONT");
    until_followed(follow, "p/owned", "2").await;
    until_up(|| store.put("p/a", text("2"), None)).await;
    until_followed(follow, "p/a", "2").await;
    owned.close().await.expect("closed");
}

/// Ends a file's growth where a full disk would: at so many blocks of 512 bytes.
fn with_file_limit(program: &Path, blocks: u32) -> Command {
    let mut command = Command::new("sh");
    let script = format!("trap '' XFSZ; ulimit -S -f {blocks}; exec \"$0\" \"$@\"");
    command.arg("-c").arg(script).arg(program);
    command
}

#[tokio::test]
async fn a_full_disk_refuses_changes_loses_nothing_and_heals_once_there_is_room() {
    const LENGTH: usize = 100_000;
    let dir = tempfile::tempdir().expect("a directory");
    // Room for the file as it is made, and some records.
    let mut server = Server::start_by(Some(dir.path()), |program| with_file_limit(program, 8_192));
    let service = Forward::to(server.port).await;
    let store = client(&service);
    let value = |number: usize| -> Bytes { vec![b'a' + number as u8; LENGTH].into() };
    let mut follow = Follow::new(Arc::new(client(&service)), "k/").await;
    let follow = follow.as_mut().expect("follow");
    let mut stored = 0;
    let error = loop {
        match store.put(&format!("k/{stored}"), value(stored), None).await {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
        assert!(stored < 150, "the limit on files does not hold");
    };
    // Nobody ever sees it.
    let refused = format!("k/{stored}");
    let sees = store.get(&refused).await;
    assert!(sees.expect_err("refused").is_not_found());
    assert!(stored > 3, "only {stored} records fitted: {error}");
    assert!(error.is_retryable(), "{error}");
    assert!(error.to_string().contains("disk"), "{error}");
    // It goes on answering, with what it has acknowledged, and shows that it is ill.
    let last = format!("k/{}", stored - 1);
    until_up(|| store.get(&last)).await;
    let ill = store.put("k/0", text("no"), None).await;
    assert!(ill.expect_err("still full").is_retryable());

    let limit = Command::new("prlimit")
        .args([
            "--pid",
            &server.process.id().to_string(),
            "--fsize=unlimited",
        ])
        .status();
    assert!(limit.expect("prlimit runs").success());
    until_up(|| store.put("k/late", text("1"), None)).await;
    until_followed(follow, "k/late", "1").await;
    let check = async |store: &HttpStore| {
        let records = store.list("k/").await.expect("a list");
        assert_eq!(
            records.len(),
            stored + 1,
            "what was acknowledged, and no more"
        );
        for number in 0..stored {
            let record = store.get(&format!("k/{number}")).await.expect("stored");
            assert!(record.value == value(number), "k/{number} is another");
        }
    };
    check(&store).await;
    let sees = store.get(&refused).await;
    assert!(sees.expect_err("refused").is_not_found());
    assert_eq!(follow.records().len(), stored + 1);
    server.process.kill();
    let server = Server::start(Some(dir.path()));
    service.switch(server.port);
    until_up(|| store.get("k/late")).await;
    check(&store).await;
}

#[tokio::test]
async fn a_damaged_file_is_an_error_that_names_it_or_harmless_and_never_a_panic() {
    const RECORDS: usize = 200;
    let whole = {
        let dir = tempfile::tempdir().expect("a directory");
        let mut server = Server::start(Some(dir.path()));
        let service = Forward::to(server.port).await;
        let store = client(&service);
        let lease = store.grant_lease(Duration::from_secs(60)).await;
        let lease = lease.expect("lease");
        for number in 0..RECORDS {
            let value = vec![b'x'; 100 + 13 * number];
            let key = format!("k/{number}");
            let stored = store.put(&key, value.into(), Some(&lease)).await;
            stored.expect("put");
        }
        server.process.kill();
        std::fs::read(dir.path().join("metadata.redb")).expect("the file")
    };
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("metadata.redb");
    let mut options = ServerOptions::default();
    options.data_dir = Some(dir.path().to_owned());
    // Each run looks somewhere else.
    let seed: u64 = match std::env::var(SEED) {
        Ok(seed) => seed.parse().expect(SEED),
        Err(_) => rand::random(),
    };
    eprintln!("{SEED}={seed}");
    let mut random = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(seed);
    for round in 0..60 {
        use rand::Rng as _;
        let mut bytes = whole.clone();
        let what = match (round, round % 4) {
            // Two that nobody may overlook.
            (0, _) => {
                bytes.truncate(100);
                "no more than a part of the head"
            }
            (1, _) => {
                bytes[..8].fill(0);
                "another kind of file"
            }
            // What a disk that lost its end has.
            (_, 0) => {
                bytes.truncate(random.random_range(0..whole.len()));
                "shorter"
            }
            // A lost page.
            (_, 1) => {
                let at = random.random_range(0..whole.len() / 4096) * 4096;
                bytes[at..at + 4096].fill(0);
                "a page of zeros"
            }
            // Garbage in the head, where the trees begin.
            (_, 2) => {
                for _ in 0..4 {
                    let at = random.random_range(0..512);
                    bytes[at] = random.random();
                }
                "another head"
            }
            _ => {
                for _ in 0..64 {
                    let at = random.random_range(0..whole.len());
                    bytes[at] ^= 1 << random.random_range(0..8);
                }
                "flipped bits"
            }
        };
        std::fs::write(&file, &bytes).expect("written");
        match MetadataServer::open(options.clone()) {
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("metadata.redb"), "{seed} {round}: {error}");
                assert!(error.contains(&*dir.path().to_string_lossy()), "{error}");
            }
            Ok(server) => {
                assert!(round > 1, "{what} is opened");
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
                let listener = listener.expect("listens");
                let port = listener.local_addr().expect("an address").port();
                let serving = tokio::spawn(server.serve(listener, std::future::pending()));
                let store = client(&Forward::to(port).await);
                for work in [
                    store.put("k/0", text("1"), None).await.map(drop),
                    store.delete("k/1").await.map(drop),
                    store.list("k/").await.map(drop),
                ] {
                    if let Err(error) = work {
                        assert!(error.is_retryable(), "{seed} {round}, {what}: {error}");
                    }
                }
                serving.abort();
                let _ = serving.await;
            }
        }
    }
}
