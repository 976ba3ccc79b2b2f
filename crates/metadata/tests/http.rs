//! Rerail's HTTP server and client together.

#![cfg(all(feature = "http", feature = "server"))]

mod common;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::logs;
use rerail_metadata::server::{MetadataServer, ServerOptions};
use rerail_metadata::{
    HttpStore, MetadataError, MetadataStore, Secret, StoreOptions, WatchEvent, conformance,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

/// A server within the test. Dropping it stops it as a crash would: connections are cut.
struct Server {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start(options: ServerOptions, address: Option<SocketAddr>) -> Self {
        let address = address.unwrap_or_else(|| ([127, 0, 0, 1], 0).into());
        let mut attempts = 0;
        let listener = loop {
            match TcpListener::bind(address).await {
                Ok(listener) => break listener,
                Err(error) if attempts > 50 => panic!("cannot listen on {address}: {error}"),
                Err(_) => attempts += 1,
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        let address = listener.local_addr().expect("an address");
        let (stop, stopped) = oneshot::channel();
        let server = MetadataServer::open(options).expect("options are valid");
        let task = tokio::spawn(async move {
            let stopped = async {
                let _ = stopped.await;
            };
            server.serve(listener, stopped).await;
        });
        Self {
            address,
            stop: Some(stop),
            task,
        }
    }

    fn url(&self) -> String {
        format!("http://{}/metadata", self.address)
    }

    fn client(&self) -> HttpStore {
        HttpStore::new(&self.url(), None, &StoreOptions::default()).expect("a client")
    }

    async fn stop(mut self) -> SocketAddr {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        let _ = (&mut self.task).await;
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A client as others write them, without TLS.
fn plain_client() -> reqwest::Client {
    let tls = rustls::ClientConfig::builder_with_provider(
        rustls::crypto::ring::default_provider().into(),
    )
    .with_safe_default_protocol_versions()
    .expect("versions")
    .with_root_certificates(rustls::RootCertStore::empty())
    .with_no_client_auth();
    let client = reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .no_proxy();
    client.build().expect("a client")
}

fn on_disk(dir: &Path) -> ServerOptions {
    let mut options = ServerOptions::default();
    options.data_dir = Some(dir.to_owned());
    options
}

#[tokio::test]
async fn the_http_server_conforms_in_memory() {
    let server = Server::start(ServerOptions::default(), None).await;
    let store: Arc<dyn MetadataStore> = Arc::new(server.client());
    let report = conformance::run(store, "mooncake/conformance/").await;
    let report = report.unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(report.skipped, ["a_watch_of_one_key_sees_it_change"]);
}

#[tokio::test]
async fn the_http_server_conforms_on_disk() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::start(on_disk(dir.path()), None).await;
    let store: Arc<dyn MetadataStore> = Arc::new(server.client());
    let report = conformance::run(store, "mooncake/conformance/").await;
    report.unwrap_or_else(|failure| panic!("{failure}"));
}

#[tokio::test]
async fn m06_both_spellings_of_an_encoded_key_are_one_record() {
    let cases: serde_json::Value =
        serde_json::from_str(include_str!("cases/metadata-config-cases.json")).expect("JSON");
    let case = &cases["http_keys"]["cases"][0];
    let server = Server::start(ServerOptions::default(), None).await;
    let http = plain_client();
    let url = |path: &serde_json::Value| {
        format!(
            "http://{}{}",
            server.address,
            path.as_str().expect("a path")
        )
    };
    let answer = http
        .put(url(&case["put"]))
        .body("{}")
        .send()
        .await
        .expect("put");
    assert_eq!(answer.status(), 200);
    let answer = http.get(url(&case["get"])).send().await.expect("get");
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.text().await.expect("text"), "{}");
    let key = "mooncake/ram/127.0.0.1:14291";
    assert_eq!(server.client().get(key).await.expect("get").value, "{}");
    let answer = http.delete(url(&case["get"])).send().await.expect("delete");
    assert_eq!(answer.status(), 200);
    let absent = &cases["absent_key"];
    let answer = http
        .get(url(&absent["http_get"]))
        .send()
        .await
        .expect("get");
    assert_eq!(
        answer.status().as_u16(),
        absent["http_status"].as_u64().expect("status") as u16
    );
    assert_eq!(
        answer.text().await.expect("text"),
        absent["body"].as_str().expect("body")
    );
    let key = cases["http_keys"]["cases"][1]["put_key"]
        .as_str()
        .expect("a key");
    server
        .client()
        .put(key, Bytes::from_static(b"1"), None)
        .await
        .expect("put");
    assert_eq!(server.client().get(key).await.expect("get").value, "1");
}

#[tokio::test]
async fn a_crashed_owner_replaces_its_rpc_meta_record() {
    // The C++ servers answer 400 to the second PUT and lock the restarted engine out.
    let server = Server::start(ServerOptions::default(), None).await;
    let store = server.client();
    let key = "mooncake/rpc_meta/node-a";
    for body in [
        r#"{"ip_or_host_name":"h","rpc_port":1}"#,
        r#"{"ip_or_host_name":"h","rpc_port":2}"#,
    ] {
        store
            .put(key, Bytes::from_static(body.as_bytes()), None)
            .await
            .expect("put");
        assert_eq!(store.get(key).await.expect("get").value, body);
    }
}

#[tokio::test]
async fn m01_a_watch_lives_through_an_empty_restart() {
    let server = Server::start(ServerOptions::default(), None).await;
    let store = server.client();
    let mut watch = store.watch("k").await.expect("watch");
    assert_eq!(watch.next().await, Some(WatchEvent::Resync));
    store
        .put("k", Bytes::from_static(b"1"), None)
        .await
        .expect("put");
    assert!(matches!(watch.next().await, Some(WatchEvent::Put(_))));
    let address = server.stop().await;
    assert!(store.get("k").await.expect_err("away").is_retryable());
    let _server = Server::start(ServerOptions::default(), Some(address)).await;
    assert_eq!(watch.next().await, Some(WatchEvent::Resync));
    assert!(
        store
            .get("k")
            .await
            .expect_err("restarted empty")
            .is_not_found()
    );
    store
        .put("k", Bytes::from_static(b"2"), None)
        .await
        .expect("put");
    assert!(matches!(watch.next().await, Some(WatchEvent::Put(_))));
}

#[tokio::test]
async fn records_and_leases_outlive_a_restart_and_versions_do_not_come_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = Server::start(on_disk(dir.path()), None).await;
    let store = server.client();
    let lease = store
        .grant_lease(Duration::from_secs(2))
        .await
        .expect("lease");
    let version = store
        .put("kept", Bytes::from_static(b"1"), None)
        .await
        .expect("put");
    store
        .put("leased", Bytes::from_static(b"2"), Some(&lease))
        .await
        .expect("put");
    store
        .put("removed", Bytes::from_static(b"3"), None)
        .await
        .expect("put");
    store.delete("removed").await.expect("delete");
    let address = server.stop().await;
    let _server = Server::start(on_disk(dir.path()), Some(address)).await;
    assert_eq!(store.get("kept").await.expect("kept").version, version);
    assert!(
        store
            .get("removed")
            .await
            .expect_err("removed")
            .is_not_found()
    );
    store
        .keep_alive(&lease)
        .await
        .expect("the lease is kept, too");
    let later = store.put("removed", Bytes::new(), None).await.expect("put");
    assert_ne!(later, version);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(
        store
            .get("leased")
            .await
            .expect_err("the lease has ended")
            .is_not_found()
    );
}

#[tokio::test]
async fn a_second_server_on_the_same_data_is_an_error_that_names_the_directory() {
    let dir = tempfile::tempdir().expect("a directory");
    let _server = Server::start(on_disk(dir.path()), None).await;
    let error = MetadataServer::open(on_disk(dir.path()))
        .expect_err("in use")
        .to_string();
    assert!(error.contains(&dir.path().display().to_string()), "{error}");
}

#[tokio::test]
async fn without_the_token_nothing_is_read_or_written_and_it_never_shows() {
    logs::collect();
    let mut options = ServerOptions::default();
    options.token = Some(Secret::new("s3cret"));
    let server = Server::start(options, None).await;
    let stranger = server.client();
    let error = stranger.get("k").await.expect_err("no token");
    assert!(matches!(error, MetadataError::Refused { .. }), "{error}");
    let mut options = StoreOptions::default();
    options.token = Some(Secret::new("s3cret"));
    let friend = HttpStore::new(&server.url(), None, &options).expect("a client");
    friend
        .put("k", Bytes::new(), None)
        .await
        .expect("with the token");
    assert!(!format!("{friend:?}{options:?}").contains("s3cret"));
    logs::assert_without("s3cret");
    let health = plain_client()
        .get(format!("http://{}/health", server.address))
        .send()
        .await
        .expect("health");
    assert_eq!(health.text().await.expect("text"), "OK");
}

#[tokio::test]
async fn values_over_the_limit_are_too_large() {
    let mut options = ServerOptions::default();
    options.limits.value_bytes_max = 1_000;
    let server = Server::start(options, None).await;
    let store = server.client();
    let error = store
        .put("k", vec![0; 1_001].into(), None)
        .await
        .expect_err("over");
    assert!(matches!(error, MetadataError::TooLarge { .. }), "{error}");
    store
        .put("k", vec![0; 1_000].into(), None)
        .await
        .expect("at the limit");
    let metrics = plain_client()
        .get(format!("http://{}/metrics", server.address))
        .send()
        .await
        .expect("get");
    assert!(
        metrics
            .text()
            .await
            .expect("text")
            .contains("rerail_metadata_records 1\n")
    );
}

#[tokio::test]
async fn a_server_that_never_answers_times_out_by_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
    let url = format!(
        "http://{}/metadata",
        listener.local_addr().expect("an address")
    );
    let mut options = StoreOptions::default();
    options.deadline = Duration::from_millis(300);
    let store = HttpStore::new(&url, None, &options).expect("a client");
    let started = std::time::Instant::now();
    let error = store.get("k").await.expect_err("no answer");
    assert!(matches!(error, MetadataError::TimedOut { .. }), "{error}");
    // Without a deadline it would wait for ever. The limit is wide, for a machine that is busy.
    assert!(started.elapsed() < Duration::from_secs(10));
}

/// Sends `head` and says whether the server closes the connection, with what it said before.
async fn is_closed(address: SocketAddr, head: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connects");
    stream.write_all(head.as_bytes()).await.expect("sent");
    let mut said = String::new();
    let end = tokio::time::timeout(Duration::from_secs(30), stream.read_to_string(&mut said));
    // A reset is an end, too.
    let _ = end.await.expect("the server closes the connection");
    said
}

#[tokio::test]
async fn slow_and_silent_clients_are_closed_and_hold_no_place() {
    let mut options = ServerOptions::default();
    options.limits.connections_max = 3;
    options.limits.requests_max = 2;
    options.limits.idle_max = Duration::from_millis(500);
    options.limits.request_time_max = Duration::from_millis(500);
    let server = Server::start(options, None).await;
    // More of them than there are places: each of them gets its turn, and ours does.
    let put = "PUT /metadata?key=k HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nbegun";
    let heads = [
        "",
        "GET /metadata?key=k HTT",
        put,
        "GET /health HTTP/1.1\r\n",
        put,
        "",
    ];
    let closed = heads.map(|head| tokio::spawn(is_closed(server.address, head)));
    let store = server.client();
    let mut attempts = 0;
    while let Err(error) = store.put("k", Bytes::from_static(b"1"), None).await {
        assert!(error.is_retryable() && attempts < 20, "{error}");
        attempts += 1;
    }
    for (head, said) in heads.iter().zip(closed) {
        let said = said.await.expect("no panic");
        if *head == put {
            assert!(said.starts_with("HTTP/1.1 408"), "{said}");
        }
    }
    // What was begun is not there in part.
    assert_eq!(store.get("k").await.expect("get").value, "1");
}

#[tokio::test]
async fn a_watch_outlives_the_limits_of_a_request() {
    let mut options = ServerOptions::default();
    options.limits.idle_max = Duration::from_millis(300);
    options.limits.request_time_max = Duration::from_millis(300);
    let server = Server::start(options, None).await;
    let http = plain_client();
    let url = format!("http://{}/metadata/watch?prefix=k", server.address);
    let first = http.get(&url).send().await.expect("resync");
    let first: serde_json::Value = first.json().await.expect("JSON");
    let revision = first["revision"].as_u64().expect("a revision");
    let url = format!("{url}&after={revision}&wait_ms=1500");
    let started = std::time::Instant::now();
    let answer = http.get(&url).send().await.expect("an answer");
    assert_eq!(answer.status(), 200);
    assert!(started.elapsed() >= Duration::from_millis(1_500));
}
