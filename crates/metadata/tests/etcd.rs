//! Real etcd, and what can happen to it.

#![cfg(feature = "etcd")]

mod common;

use std::path::PathBuf;
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
    Change, EtcdStore, Follow, MetadataError, MetadataStore, Secret, StoreOptions, WatchEvent,
    conformance,
};
use tempfile::TempDir;

/// A cluster of one or more members.
struct Cluster {
    members: Vec<Member>,
    dir: TempDir,
    tls: bool,
    arguments: Vec<String>,
}

struct Member {
    client_port: u16,
    peer_port: u16,
    process: Option<Process>,
}

impl Cluster {
    fn start(size: usize) -> Option<Self> {
        Self::start_with(size, false, &[])
    }

    fn start_with(size: usize, tls: bool, arguments: &[&str]) -> Option<Self> {
        if !installed("etcd") {
            return None;
        }
        Some(with_new_ports(|| Self::try_start(size, tls, arguments)))
    }

    /// `None` if a member ended before it served.
    fn try_start(size: usize, tls: bool, arguments: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a directory");
        if tls {
            make_certificates(dir.path());
        }
        let members = (0..size)
            .map(|_| Member {
                client_port: free_port(),
                peer_port: free_port(),
                process: None,
            })
            .collect();
        let arguments = arguments
            .iter()
            .map(|&argument| argument.to_owned())
            .collect();
        let mut cluster = Self {
            members,
            dir,
            tls,
            arguments,
        };
        for index in 0..size {
            cluster.launch(index);
        }
        let serves = |member: &mut Member| {
            let process = member.process.as_mut();
            process.is_some_and(|process| process.serves(member.client_port))
        };
        cluster.members.iter_mut().all(serves).then_some(cluster)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn launch(&mut self, index: usize) {
        let scheme = if self.tls { "https" } else { "http" };
        let peers: Vec<String> = self
            .members
            .iter()
            .enumerate()
            .map(|(index, member)| format!("m{index}=http://127.0.0.1:{}", member.peer_port))
            .collect();
        let member = &self.members[index];
        let client = format!("{scheme}://127.0.0.1:{}", member.client_port);
        let mut listen = client.clone();
        if self.tls {
            // A second name, for which the certificate is not.
            listen += &format!(",{scheme}://127.0.0.2:{}", member.client_port);
        }
        let peer = format!("http://127.0.0.1:{}", member.peer_port);
        let mut command = Command::new("etcd");
        command
            .args(["--name", &format!("m{index}"), "--data-dir"])
            .arg(self.file(&format!("data{index}")))
            .args([
                "--listen-client-urls",
                &listen,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args(["--initial-cluster", &peers.join(",")])
            .args(["--log-level", "error", "--unsafe-no-fsync"])
            .args(&self.arguments);
        if self.tls {
            command
                .arg("--cert-file")
                .arg(self.file("cert.pem"))
                .arg("--key-file")
                .arg(self.file("key.pem"))
                .arg("--trusted-ca-file")
                .arg(self.file("ca.pem"))
                .arg("--client-cert-auth");
        }
        self.members[index].process = Some(Process::start(&mut command));
    }

    /// Starts the first member again, where it was.
    fn restart(&mut self) {
        start_again(|| {
            self.launch(0);
            let port = self.members[0].client_port;
            self.process(0).serves(port)
        });
    }

    fn process(&mut self, index: usize) -> &mut Process {
        self.members[index].process.as_mut().expect("runs")
    }

    fn endpoints(&self) -> Vec<String> {
        let endpoint = |member: &Member| format!("127.0.0.1:{}", member.client_port);
        self.members.iter().map(endpoint).collect()
    }

    async fn store(&self) -> EtcdStore {
        self.store_with(&StoreOptions::default())
            .await
            .expect("options are valid")
    }

    async fn store_with(&self, options: &StoreOptions) -> Result<EtcdStore, MetadataError> {
        EtcdStore::new(&self.endpoints(), None, options).await
    }

    /// A client of the library's own, for what an administrator does.
    async fn admin(&self) -> etcd_client::Client {
        etcd_client::Client::connect(self.endpoints(), None)
            .await
            .expect("connects")
    }
}

fn text(value: &'static str) -> Bytes {
    Bytes::from_static(value.as_bytes())
}

/// Tries until the store answers again.
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

/// Follows until `key` has `value`.
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
async fn etcd_conforms() {
    let Some(cluster) = Cluster::start(1) else {
        return;
    };
    let store: Arc<dyn MetadataStore> = Arc::new(cluster.store().await);
    let report = conformance::run(store, "mooncake/conformance/").await;
    let report = report.unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(report.skipped, ["a_watch_of_one_key_sees_it_change"]);
}

#[tokio::test]
async fn m10_a_watch_lives_through_stop_and_start_and_misses_nothing() {
    let Some(mut cluster) = Cluster::start(1) else {
        return;
    };
    let store = cluster.store().await;
    store.put("p/kept", text("1"), None).await.expect("put");
    let mut follow = Follow::new(Arc::new(store.clone()), "p/")
        .await
        .expect("follow");
    until_followed(&mut follow, "p/kept", "1").await;
    cluster.process(0).kill();
    let error = store.get("p/kept").await.expect_err("away");
    assert!(error.is_retryable(), "{error}");
    cluster.restart();
    until_up(|| store.put("p/new", text("2"), None)).await;
    until_followed(&mut follow, "p/new", "2").await;
    assert_eq!(store.get("p/kept").await.expect("kept").value, "1");
}

#[tokio::test]
async fn m10_a_compaction_during_the_outage_is_a_resync() {
    let Some(mut cluster) = Cluster::start(1) else {
        return;
    };
    let store = cluster.store().await;
    let mut watch = store.watch("p/").await.expect("watch");
    assert_eq!(watch.next().await, Some(WatchEvent::Resync));
    store.put("p/a", text("0"), None).await.expect("put");
    assert!(matches!(watch.next().await, Some(WatchEvent::Put(_))));
    cluster.process(0).kill();
    cluster.restart();
    // Another client is faster than the watch: it changes much and compacts.
    let other = cluster.store().await;
    let mut last = 0;
    for _ in 0..50 {
        let version = until_up(|| other.put("p/a", text("x"), None)).await;
        last = version.as_counter().expect("a revision");
    }
    cluster
        .admin()
        .await
        .compact(last as i64, None)
        .await
        .expect("compacted");
    let mut resyncs = 0;
    other.put("p/b", text("end"), None).await.expect("put");
    loop {
        let event = tokio::time::timeout(Duration::from_secs(20), watch.next()).await;
        match event.expect("the watch is alive").expect("and goes on") {
            WatchEvent::Resync => resyncs += 1,
            WatchEvent::Put(record) if record.key == "p/b" => break,
            // The list after a Resync may have told of it already.
            _ if resyncs > 0 && store.get("p/b").await.is_ok() => break,
            _ => {}
        }
    }
    assert!(resyncs > 0);
}

#[tokio::test]
async fn m12_a_put_over_a_record_reaches_the_watch() {
    let Some(cluster) = Cluster::start(1) else {
        return;
    };
    let store = cluster.store().await;
    store.put("p/a", text("1"), None).await.expect("put");
    let mut follow = Follow::new(Arc::new(store), "p/").await.expect("follow");
    until_followed(&mut follow, "p/a", "1").await;
    cluster
        .admin()
        .await
        .put("p/a", "2", None)
        .await
        .expect("put by hand");
    until_followed(&mut follow, "p/a", "2").await;
}

#[tokio::test]
async fn m15_a_lease_revoked_outside_is_found_lost() {
    let Some(cluster) = Cluster::start(1) else {
        return;
    };
    let store = cluster.store().await;
    let lease = store
        .grant_lease(Duration::from_secs(60))
        .await
        .expect("lease");
    store
        .put("p/a", text("1"), Some(&lease))
        .await
        .expect("put");
    store.keep_alive(&lease).await.expect("alive");
    let id = lease.as_str().parse().expect("a number");
    cluster
        .admin()
        .await
        .lease_revoke(id)
        .await
        .expect("revoked");
    let error = store.keep_alive(&lease).await.expect_err("gone");
    assert!(matches!(error, MetadataError::LeaseLost { .. }), "{error}");
    assert!(
        store
            .get("p/a")
            .await
            .expect_err("gone with it")
            .is_not_found()
    );
}

#[tokio::test]
async fn an_empty_restart_is_a_resync_although_the_revision_goes_back() {
    let Some(mut cluster) = Cluster::start(1) else {
        return;
    };
    let store = cluster.store().await;
    for _ in 0..5 {
        store.put("p/a", text("1"), None).await.expect("put");
    }
    let mut follow = Follow::new(Arc::new(store.clone()), "p/")
        .await
        .expect("follow");
    until_followed(&mut follow, "p/a", "1").await;
    cluster.process(0).kill();
    std::fs::remove_dir_all(cluster.file("data0")).expect("wiped");
    cluster.restart();
    let gone = async {
        loop {
            if let Change::Delete { key } = follow.next().await.expect("lives") {
                return key;
            }
        }
    };
    let gone = tokio::time::timeout(Duration::from_secs(30), gone)
        .await
        .expect("told");
    assert_eq!(gone, "p/a");
    until_up(|| store.put("p/b", text("2"), None)).await;
    until_followed(&mut follow, "p/b", "2").await;
}

#[tokio::test]
async fn three_members_losing_their_leader_lose_no_write_and_no_event() {
    let Some(mut cluster) = Cluster::start(3) else {
        return;
    };
    let store = cluster.store().await;
    until_up(|| store.put("p/a", text("1"), None)).await;
    let mut follow = Follow::new(Arc::new(store.clone()), "p/")
        .await
        .expect("follow");
    until_followed(&mut follow, "p/a", "1").await;
    let status = cluster.admin().await.status().await.expect("status");
    let leader = status.leader();
    let mut index = 0;
    for (member, endpoint) in cluster.endpoints().iter().enumerate() {
        let mut client = etcd_client::Client::connect([endpoint], None)
            .await
            .expect("connects");
        let header = client.status().await.expect("status");
        if header
            .header()
            .is_some_and(|header| header.member_id() == leader)
        {
            index = member;
        }
    }
    cluster.process(index).kill();
    let version = until_up(|| store.put("p/a", text("2"), None)).await;
    until_up(|| store.compare_and_swap("p/a", &version, text("3"), None)).await;
    until_followed(&mut follow, "p/a", "3").await;
}

#[tokio::test]
async fn a_frozen_member_counts_as_dead() {
    let Some(mut cluster) = Cluster::start(3) else {
        return;
    };
    let store = cluster.store().await;
    until_up(|| store.put("p/a", text("1"), None)).await;
    // Member 0 is the one in use.
    cluster.process(0).signal("STOP");
    until_up(|| store.put("p/a", text("2"), None)).await;
    let started = std::time::Instant::now();
    assert_eq!(
        store.get("p/a").await.expect("from another member").value,
        "2"
    );
    // Once it is known that a member is frozen, it is not asked any more: this takes no deadline
    // (3 s) and no attempt's share of one. The limit is wide, for a machine that is busy.
    assert!(
        started.elapsed() < Duration::from_secs(10),
        "{:?}",
        started.elapsed()
    );
    cluster.process(0).signal("CONT");
}

#[tokio::test]
async fn a_store_frozen_for_15_s_is_an_outage_and_nothing_else() {
    if !full() {
        return;
    }
    let Some(mut cluster) = Cluster::start(1) else {
        return;
    };
    let store = cluster.store().await;
    store.put("p/a", text("1"), None).await.expect("put");
    let mut follow = Follow::new(Arc::new(store.clone()), "p/")
        .await
        .expect("follow");
    until_followed(&mut follow, "p/a", "1").await;
    cluster.process(0).signal("STOP");
    let started = std::time::Instant::now();
    assert!(store.get("p/a").await.expect_err("frozen").is_retryable());
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "the deadline holds"
    );
    tokio::time::sleep(Duration::from_secs(15)).await;
    cluster.process(0).signal("CONT");
    until_up(|| store.put("p/a", text("2"), None)).await;
    until_followed(&mut follow, "p/a", "2").await;
}

#[tokio::test]
async fn the_size_limit_is_named_before_anything_is_sent() {
    // Nobody listens: an error about size shows that nothing was tried.
    let endpoints = [format!("127.0.0.1:{}", free_port())];
    let store = EtcdStore::new(&endpoints, None, &StoreOptions::default())
        .await
        .expect("made");
    let limit = store.capabilities().value_bytes_max.expect("a limit");
    let error = store
        .put("k", vec![b'x'; limit + 1].into(), None)
        .await
        .expect_err("over");
    let MetadataError::TooLarge { limit: named, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(*named, limit);
    let Some(cluster) = Cluster::start(1) else {
        return;
    };
    let store = cluster.store().await;
    let key = "k".repeat(100);
    let value: Bytes = vec![b'x'; limit - key.len()].into();
    let lease = store
        .grant_lease(Duration::from_secs(60))
        .await
        .expect("lease");
    let version = store
        .put(&key, value.clone(), Some(&lease))
        .await
        .expect("at the limit");
    let swapped = store
        .compare_and_swap(&key, &version, value, Some(&lease))
        .await;
    swapped.expect("a transaction at the limit");
}

#[tokio::test]
async fn users_are_checked_and_an_expired_or_forgotten_token_is_renewed() {
    logs::collect();
    let Some(mut cluster) = Cluster::start_with(1, false, &["--auth-token-ttl", "1"]) else {
        return;
    };
    let mut admin = cluster.admin().await;
    admin.user_add("root", "s3cret", None).await.expect("user");
    admin.role_add("root").await.expect("role");
    admin
        .user_grant_role("root", "root")
        .await
        .expect("granted");
    admin.auth_enable().await.expect("enabled");
    let mut options = StoreOptions::default();
    options.user = Some("root".into());
    options.password = Some(Secret::new("s3cret"));
    let store = cluster.store_with(&options).await.expect("made");
    store
        .put("p/a", text("1"), None)
        .await
        .expect("with the password");
    let mut follow = Follow::new(Arc::new(store.clone()), "p/")
        .await
        .expect("follow");
    until_followed(&mut follow, "p/a", "1").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    store
        .put("p/a", text("2"), None)
        .await
        .expect("after the token expired");
    until_followed(&mut follow, "p/a", "2").await;
    // Tokens are in memory only: a restarted member knows none.
    cluster.process(0).kill();
    cluster.restart();
    until_up(|| store.put("p/a", text("3"), None)).await;
    until_followed(&mut follow, "p/a", "3").await;

    let stranger = cluster.store().await;
    let error = stranger.get("p/a").await.expect_err("no password");
    assert!(matches!(error, MetadataError::Refused { .. }), "{error}");
    options.password = Some(Secret::new("wrong-s3cret"));
    let store = cluster.store_with(&options).await.expect("made");
    let error = store.get("p/a").await.expect_err("wrong password");
    assert!(matches!(error, MetadataError::Refused { .. }), "{error}");
    assert!(!format!("{error} {error:?} {store:?}").contains("s3cret"));
    logs::assert_without("s3cret");
}

#[tokio::test]
async fn m28_bad_tls_files_fail_with_the_cause_and_never_fall_back_to_plaintext() {
    let Some(cluster) = Cluster::start_with(1, true, &[]) else {
        return;
    };
    let other = tempfile::tempdir().expect("a directory");
    make_certificates(other.path());
    let mut good = StoreOptions::default();
    good.deadline = Duration::from_secs(2);
    good.tls.ca = Some(cluster.file("ca.pem"));
    good.tls.certificate = Some(cluster.file("cert.pem"));
    good.tls.key = Some(cluster.file("key.pem"));
    let store = cluster.store_with(&good).await.expect("made");
    until_up(|| store.put("k", text("1"), None)).await;

    for bad in BAD_FILES {
        let mut options = good.clone();
        let path = bad.set(&mut options, cluster.dir.path(), other.path());
        let error = cluster.store_with(&options).await;
        let error = error.expect_err(bad.what).to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
    }
    let mut options = good.clone();
    options.tls.certificate = None;
    cluster
        .store_with(&options)
        .await
        .expect_err("a key without its certificate");

    let mut options = good.clone();
    options.tls.ca = Some(other.path().join("ca.pem"));
    let store = cluster.store_with(&options).await.expect("made");
    let error = store
        .get("k")
        .await
        .expect_err("signed by another authority")
        .to_string();
    assert!(error.contains("certificate"), "{error}");

    let mut options = good.clone();
    options.tls.certificate = Some(other.path().join("cert.pem"));
    options.tls.key = Some(other.path().join("key.pem"));
    let store = cluster.store_with(&options).await.expect("made");
    store
        .get("k")
        .await
        .expect_err("a client that the server does not know");

    // The certificate is for localhost and 127.0.0.1, not for this name of the same machine.
    let name = [format!("127.0.0.2:{}", cluster.members[0].client_port)];
    let store = EtcdStore::new(&name, None, &good).await.expect("made");
    let error = store.get("k").await.expect_err("another name").to_string();
    assert!(error.contains("certificate"), "{error}");

    let listener = Eavesdropper::start();
    let endpoint = [format!("127.0.0.1:{}", listener.port)];
    let user = Some(("root".to_owned(), Secret::new("s3cret")));
    let store = EtcdStore::new(&endpoint, user, &good).await.expect("made");
    store.get("k").await.expect_err("no TLS there");
    store.put("k", text("1"), None).await.expect_err("no TLS");
    listener.assert_only_tls();
}

#[tokio::test]
async fn m23_a_store_that_starts_late_is_waited_for() {
    if !installed("etcd") {
        return;
    }
    // A port of our own, so that nobody takes it before the store starts.
    let service = Forward::to(free_port()).await;
    let endpoints = [service.address.to_string()];
    let store = EtcdStore::new(&endpoints, None, &StoreOptions::default())
        .await
        .expect("made");
    let mut follow = Follow::new(Arc::new(store.clone()), "p/")
        .await
        .expect("follow");
    assert!(
        store
            .get("p/a")
            .await
            .expect_err("not up yet")
            .is_retryable()
    );
    let cluster = Cluster::start(1).expect("installed");
    service.switch(cluster.members[0].client_port);
    until_up(|| store.put("p/a", text("1"), None)).await;
    until_followed(&mut follow, "p/a", "1").await;
}

#[tokio::test]
async fn m08_records_of_killed_processes_go_with_their_leases() {
    let Some(cluster) = Cluster::start(1) else {
        return;
    };
    let store = cluster.store().await;
    for port in 0..10 {
        let lease = store
            .grant_lease(Duration::from_secs(2))
            .await
            .expect("lease");
        let key = format!("mooncake/ram/10.60.7.196:{port}");
        store
            .put(&key, text("{}"), Some(&lease))
            .await
            .expect("put");
    }
    assert_eq!(store.list("mooncake/ram/").await.expect("list").len(), 10);
    let gone = async {
        while !store.list("mooncake/ram/").await.expect("list").is_empty() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(10), gone).await;
    assert!(waited.is_ok(), "records of dead processes pile up");
}
