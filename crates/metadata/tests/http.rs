//! Rerail's HTTP server and client together.

#![cfg(all(feature = "http", feature = "server"))]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use common::logs;
use common::served::{Server, on_disk, plain_client};
use rerail_metadata::server::{MetadataServer, ServerOptions};
use rerail_metadata::{
    HttpStore, MetadataError, MetadataStore, Secret, StoreOptions, WatchEvent, conformance,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

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

#[tokio::test]
async fn a_foreign_server_that_gives_etags_is_asked_conditionally() {
    // Another's server: no mark, one record, and 304 where the client has it already.
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
    let url = format!("http://{}/metadata", listener.local_addr().expect("bound"));
    let value = Arc::new(Mutex::new("one"));
    let unchanged = Arc::new(AtomicUsize::new(0));
    let (served, counted) = (Arc::clone(&value), Arc::clone(&unchanged));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (value, counted) = (Arc::clone(&served), Arc::clone(&counted));
            tokio::spawn(async move {
                let mut head = [0; 4096];
                while let Ok(count @ 1..) = stream.read(&mut head).await {
                    let head = String::from_utf8_lossy(&head[..count]).to_lowercase();
                    let value = *value.lock().expect("lock");
                    let etag = format!("etag: \"v-{value}\"\r\n");
                    let answer = if head.contains(&format!("if-none-match: \"v-{value}\"")) {
                        counted.fetch_add(1, Ordering::Relaxed);
                        format!("HTTP/1.1 304 Not Modified\r\n{etag}\r\n")
                    } else {
                        let length = value.len();
                        format!("HTTP/1.1 200 OK\r\n{etag}content-length: {length}\r\n\r\n{value}")
                    };
                    let _ = stream.write_all(answer.as_bytes()).await;
                }
            });
        }
    });
    let mut options = StoreOptions::default();
    options.poll_interval = Duration::from_millis(20);
    let store = HttpStore::new(&url, None, &options).expect("a client");
    let mut watch = store.watch("k").await.expect("watch");
    assert_eq!(watch.next().await, Some(WatchEvent::Resync));
    while unchanged.load(Ordering::Relaxed) < 3 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    *value.lock().expect("lock") = "two";
    let Some(WatchEvent::Put(record)) = watch.next().await else {
        panic!("no news");
    };
    assert_eq!(record.value, "two");
    assert_eq!(store.get("k").await.expect("a record").value, "two");
}
