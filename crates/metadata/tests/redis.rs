//! Real Redis, and what can happen to it.

#![cfg(feature = "redis")]

mod common;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::forward::Forward;
use common::{
    BAD_FILES, Eavesdropper, Process, free_port, full, installed, logs, make_certificates,
    start_again, with_new_ports,
};
use rerail_metadata::{
    Change, Follow, MetadataError, MetadataStore, OwnedOptions, OwnedRecords, RedisStore,
    StoreOptions, StoreUrl, conformance,
};
use tempfile::TempDir;

struct Server {
    port: u16,
    dir: TempDir,
    arguments: Vec<String>,
    process: Option<Process>,
}

impl Server {
    fn start(arguments: &[&str]) -> Option<Self> {
        if !installed("redis-server") {
            return None;
        }
        Some(with_new_ports(|| {
            let mut server = Self {
                port: free_port(),
                dir: tempfile::tempdir().expect("a directory"),
                arguments: arguments
                    .iter()
                    .map(|&argument| argument.to_owned())
                    .collect(),
                process: None,
            };
            server.launch().then_some(server)
        }))
    }

    /// With keyspace events and every write on disk.
    fn with_events() -> Option<Self> {
        Self::start(&["--notify-keyspace-events", "KA", "--appendonly", "yes"])
    }

    fn restart(&mut self) {
        start_again(|| self.launch());
    }

    /// False if it ended before it served.
    fn launch(&mut self) -> bool {
        let mut command = Command::new("redis-server");
        command
            .args(["--bind", "127.0.0.1", "127.0.0.2", "--save", "", "--dir"])
            .arg(self.dir.path());
        if !self.arguments.iter().any(|argument| argument == "--port") {
            command.args(["--port", &self.port.to_string()]);
        }
        let process = Process::start(command.args(&self.arguments));
        self.process.insert(process).serves(self.port)
    }

    fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("runs")
    }

    fn store(&self) -> RedisStore {
        self.store_at(&format!("redis://127.0.0.1:{}", self.port))
    }

    fn store_at(&self, url: &str) -> RedisStore {
        let mut options = StoreOptions::default();
        options.poll_interval = Duration::from_millis(500);
        let url = StoreUrl::parse(url).expect("a URL");
        RedisStore::new(&url, &options).expect("options are valid")
    }

    /// What an administrator types.
    async fn command(&self, words: &[&str]) {
        let url = format!("redis://127.0.0.1:{}", self.port);
        let client = redis::Client::open(url).expect("a client");
        let mut connection = client
            .get_multiplexed_async_connection()
            .await
            .expect("a connection");
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        loop {
            let done: redis::RedisResult<redis::Value> = command.query_async(&mut connection).await;
            match done {
                Err(error) if error.code() == Some("LOADING") => {}
                done => return drop(done.expect("works")),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn text(value: &'static str) -> Bytes {
    Bytes::from_static(value.as_bytes())
}

async fn until_up<T, F: Future<Output = Result<T, MetadataError>>>(what: impl Fn() -> F) -> T {
    for _ in 0..60 {
        match what().await {
            Ok(done) => return done,
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    panic!("the store does not come back");
}

async fn until_change(follow: &mut Follow, wanted: impl Fn(&Change) -> bool) {
    let waiting = async { while !wanted(&follow.next().await.expect("the watch lives")) {} };
    let waited = tokio::time::timeout(Duration::from_secs(40), waiting).await;
    assert!(waited.is_ok(), "the change does not come");
}

async fn until_followed(follow: &mut Follow, key: &str, value: &str) {
    until_change(follow, |change| {
        matches!(change, Change::Put(record) if record.key == key && record.value == value)
    })
    .await;
}

#[tokio::test]
async fn redis_conforms_with_keyspace_events() {
    let Some(server) = Server::with_events() else {
        return;
    };
    let store: Arc<dyn MetadataStore> = Arc::new(server.store());
    let report = conformance::run(store, "mooncake/conformance/").await;
    let report = report.unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(report.skipped, ["a_watch_of_one_key_sees_it_change"]);
}

#[tokio::test]
async fn redis_conforms_without_keyspace_events() {
    let Some(server) = Server::start(&[]) else {
        return;
    };
    let store: Arc<dyn MetadataStore> = Arc::new(server.store());
    let report = conformance::run(store, "mooncake/conformance/").await;
    report.unwrap_or_else(|failure| panic!("{failure}"));
}

#[tokio::test]
async fn records_are_plain_strings_for_c_plus_plus_readers() {
    let Some(server) = Server::with_events() else {
        return;
    };
    let store = server.store();
    let lease = store
        .grant_lease(Duration::from_secs(60))
        .await
        .expect("lease");
    store
        .put("p/a", text("{}\n"), Some(&lease))
        .await
        .expect("put");
    let client = redis::Client::open(format!("redis://127.0.0.1:{}", server.port)).expect("client");
    let mut connection = client
        .get_multiplexed_async_connection()
        .await
        .expect("connection");
    let value: String = redis::cmd("GET")
        .arg("p/a")
        .query_async(&mut connection)
        .await
        .expect("get");
    assert_eq!(value, "{}\n");
    // A C++ engine takes the name over: the record must not end with our lease.
    server.command(&["SET", "p/a", "theirs"]).await;
    store.keep_alive(&lease).await.expect("alive");
    store.revoke_lease(&lease).await.expect("revoked");
    assert_eq!(store.get("p/a").await.expect("stays").value, "theirs");
}

#[tokio::test]
async fn m12_a_foreign_write_and_delete_reach_the_watch() {
    for server in [Server::with_events(), Server::start(&[])] {
        let Some(server) = server else { return };
        let mut follow = Follow::new(Arc::new(server.store()), "p/")
            .await
            .expect("follow");
        until_change(&mut follow, |change| *change == Change::Synced).await;
        for value in ["1", "2"] {
            server.command(&["SET", "p/a", value]).await;
            until_followed(&mut follow, "p/a", value).await;
        }
        server.command(&["DEL", "p/a"]).await;
        until_change(&mut follow, |change| {
            matches!(change, Change::Delete { .. })
        })
        .await;
    }
}

#[tokio::test]
async fn m17_a_watch_lives_through_a_restart_and_misses_nothing() {
    let Some(mut server) = Server::with_events() else {
        return;
    };
    let store = server.store();
    let mut follow = Follow::new(Arc::new(server.store()), "p/")
        .await
        .expect("follow");
    store.put("p/a", text("1"), None).await.expect("put");
    until_followed(&mut follow, "p/a", "1").await;
    server.process().terminate();
    assert!(store.get("p/a").await.expect_err("away").is_retryable());
    server.restart();
    // Before the watch can be back.
    server.command(&["SET", "p/gap", "2"]).await;
    until_followed(&mut follow, "p/gap", "2").await;
    assert_eq!(until_up(|| store.get("p/a")).await.value, "1");
    store.put("p/a", text("3"), None).await.expect("put");
    until_followed(&mut follow, "p/a", "3").await;
}

#[tokio::test]
async fn killed_connections_are_made_anew() {
    let Some(server) = Server::with_events() else {
        return;
    };
    let store = server.store();
    let mut follow = Follow::new(Arc::new(server.store()), "p/")
        .await
        .expect("follow");
    store.put("p/a", text("1"), None).await.expect("put");
    until_followed(&mut follow, "p/a", "1").await;
    for kind in ["normal", "pubsub"] {
        server.command(&["CLIENT", "KILL", "TYPE", kind]).await;
    }
    store
        .put("p/a", text("2"), None)
        .await
        .expect("at once, over a new connection");
    until_followed(&mut follow, "p/a", "2").await;
    store.put("p/a", text("3"), None).await.expect("put");
    until_followed(&mut follow, "p/a", "3").await;
}

#[tokio::test]
async fn a_flush_is_found_although_no_event_tells_it() {
    let Some(server) = Server::with_events() else {
        return;
    };
    let store = server.store();
    let mut follow = Follow::new(Arc::new(server.store()), "p/")
        .await
        .expect("follow");
    store.put("p/a", text("1"), None).await.expect("put");
    until_followed(&mut follow, "p/a", "1").await;
    server.command(&["FLUSHALL"]).await;
    until_change(&mut follow, |change| {
        matches!(change, Change::Delete { .. })
    })
    .await;
    store.put("p/a", text("2"), None).await.expect("put");
    until_followed(&mut follow, "p/a", "2").await;
}

#[tokio::test]
async fn a_kill_and_an_empty_restart_is_a_resync() {
    let Some(mut server) = Server::start(&["--notify-keyspace-events", "KA"]) else {
        return;
    };
    let store = server.store();
    let lease = store
        .grant_lease(Duration::from_secs(60))
        .await
        .expect("lease");
    let mut follow = Follow::new(Arc::new(server.store()), "p/")
        .await
        .expect("follow");
    store
        .put("p/a", text("1"), Some(&lease))
        .await
        .expect("put");
    until_followed(&mut follow, "p/a", "1").await;
    server.process().kill();
    server.restart();
    until_change(&mut follow, |change| {
        matches!(change, Change::Delete { .. })
    })
    .await;
    let error = store.keep_alive(&lease).await.expect_err("gone");
    assert!(matches!(error, MetadataError::LeaseLost { .. }), "{error}");
}

#[tokio::test]
async fn a_store_frozen_for_15_s_is_an_outage_and_nothing_else() {
    if !full() {
        return;
    }
    let Some(mut server) = Server::with_events() else {
        return;
    };
    let store = server.store();
    let mut follow = Follow::new(Arc::new(server.store()), "p/")
        .await
        .expect("follow");
    store.put("p/a", text("1"), None).await.expect("put");
    until_followed(&mut follow, "p/a", "1").await;
    server.process().signal("STOP");
    let started = std::time::Instant::now();
    assert!(store.get("p/a").await.expect_err("frozen").is_retryable());
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "the deadline holds"
    );
    tokio::time::sleep(Duration::from_secs(15)).await;
    server.process().signal("CONT");
    until_up(|| store.put("p/a", text("2"), None)).await;
    until_followed(&mut follow, "p/a", "2").await;
}

#[tokio::test]
async fn users_databases_and_refusals_are_told_apart() {
    logs::collect();
    let Some(server) = Server::start(&[]) else {
        return;
    };
    server
        .command(&[
            "ACL",
            "SETUSER",
            "node",
            "on",
            ">s3cret",
            "~mooncake/*",
            "~rerail:*",
            "&rerail:*",
            "&__keyspace*",
            "+@all",
        ])
        .await;
    let url = |user: &str| format!("redis://{user}@127.0.0.1:{}/3", server.port);
    let store = server.store_at(&url("node:s3cret"));
    store
        .put("mooncake/a", text("1"), None)
        .await
        .expect("allowed");
    let error = store
        .put("elsewhere/a", text("1"), None)
        .await
        .expect_err("not allowed");
    assert!(matches!(error, MetadataError::Refused { .. }), "{error}");
    let store: Arc<dyn MetadataStore> = Arc::new(store);
    let report = conformance::run(store, "mooncake/conformance/").await;
    report.unwrap_or_else(|failure| panic!("{failure}"));
    // Database 0 has none of it.
    assert!(
        server
            .store()
            .get("mooncake/a")
            .await
            .expect_err("database 0")
            .is_not_found()
    );
    let store = server.store_at(&url("node:wrong-s3cret"));
    let error = store.get("mooncake/a").await.expect_err("wrong password");
    assert!(matches!(error, MetadataError::Refused { .. }), "{error}");
    assert!(!format!("{error} {error:?}").contains("s3cret"));
    logs::assert_without("s3cret");
}

#[tokio::test]
async fn a_fail_over_that_lost_an_acknowledged_write_is_healed_by_read_back() {
    let (Some(old), Some(new)) = (Server::start(&[]), Server::start(&[])) else {
        return;
    };
    let port = old.port.to_string();
    new.command(&["REPLICAOF", "127.0.0.1", &port]).await;
    // Clients know one address only, as behind a service's.
    let service = Forward::to(old.port).await;
    let store = old.store_at(&format!("redis://{}", service.address));
    let mut options = OwnedOptions::default();
    options.ttl = Some(Duration::from_secs(30));
    options.read_back = Duration::from_secs(1);
    let (owned, _events) = OwnedRecords::start(Arc::new(store), options);
    owned.set("p/a", text("1"));
    owned.set("p/b", text("1"));
    owned.stored().await;
    let replicated = async {
        let replica = new.store();
        while replica.get("p/a").await.is_err() || replica.get("p/b").await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(30), replicated).await;
    waited.expect("the replica follows");

    // From here on the replica gets nothing, and the old one still acknowledges.
    new.command(&["REPLICAOF", "NO", "ONE"]).await;
    owned.set("p/a", text("2"));
    owned.set("p/c", text("2"));
    owned.stored().await;
    assert_eq!(old.store().get("p/a").await.expect("stored").value, "2");
    let mut follow = Follow::new(Arc::new(new.store()), "p/")
        .await
        .expect("follow");
    service.switch(new.port);
    drop(old);
    until_followed(&mut follow, "p/a", "2").await;
    until_followed(&mut follow, "p/c", "2").await;
    assert_eq!(new.store().get("p/b").await.expect("kept").value, "1");
    owned.close().await.expect("closed");
    for key in ["p/a", "p/b", "p/c"] {
        let error = new.store().get(key).await.expect_err("withdrawn");
        assert!(error.is_not_found(), "{error}");
    }
}

#[tokio::test]
async fn m28_bad_tls_files_fail_with_the_cause_and_never_fall_back_to_plaintext() {
    if !installed("redis-server") {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let other = tempfile::tempdir().expect("a directory");
    make_certificates(dir.path());
    make_certificates(other.path());
    let file = |name: &str| dir.path().join(name).display().to_string();
    let (certificate, key, ca) = (file("cert.pem"), file("key.pem"), file("ca.pem"));
    let server = with_new_ports(|| {
        let port = free_port();
        let port_text = port.to_string();
        let arguments = [
            "--port",
            "0",
            "--tls-port",
            &port_text,
            "--tls-cert-file",
            &certificate,
            "--tls-key-file",
            &key,
            "--tls-ca-cert-file",
            &ca,
        ];
        let mut server = Server {
            port,
            dir: tempfile::tempdir().expect("a directory"),
            arguments: arguments
                .iter()
                .map(|&argument| argument.to_owned())
                .collect(),
            process: None,
        };
        server.launch().then_some(server)
    });
    let port = server.port;
    let mut good = StoreOptions::default();
    good.deadline = Duration::from_secs(2);
    good.tls.ca = Some(dir.path().join("ca.pem"));
    good.tls.certificate = Some(dir.path().join("cert.pem"));
    good.tls.key = Some(dir.path().join("key.pem"));
    let open = |host: &str, options: &StoreOptions| {
        let url = StoreUrl::parse(&format!("rediss://{host}:{port}")).expect("a URL");
        RedisStore::new(&url, options)
    };
    let store = open("127.0.0.1", &good).expect("made");
    store.put("k", text("1"), None).await.expect("over TLS");

    for bad in BAD_FILES {
        let mut options = good.clone();
        let path = bad.set(&mut options, dir.path(), other.path());
        let error = open("127.0.0.1", &options).expect_err(bad.what).to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
    }
    let mut options = good.clone();
    options.tls.ca = Some(other.path().join("ca.pem"));
    let store = open("127.0.0.1", &options).expect("made");
    let error = store
        .get("k")
        .await
        .expect_err("signed by another authority")
        .to_string();
    assert!(error.contains("ertificate"), "{error}");

    let mut options = good.clone();
    options.tls.certificate = Some(other.path().join("cert.pem"));
    options.tls.key = Some(other.path().join("key.pem"));
    let store = open("127.0.0.1", &options).expect("made");
    store
        .get("k")
        .await
        .expect_err("a client that the server does not know");

    // The server listens there, too, and its certificate is not for that name.
    let store = open("127.0.0.2", &good).expect("made");
    let error = store.get("k").await.expect_err("another name").to_string();
    assert!(error.contains("ertificate"), "{error}");

    let listener = Eavesdropper::start();
    let url = StoreUrl::parse(&format!("rediss://:s3cret@127.0.0.1:{}", listener.port));
    let store = RedisStore::new(&url.expect("a URL"), &good).expect("made");
    store.get("k").await.expect_err("no TLS there");
    store.put("k", text("1"), None).await.expect_err("no TLS");
    listener.assert_only_tls();
}
