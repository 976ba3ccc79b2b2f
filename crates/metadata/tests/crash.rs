//! Our HTTP server as a process of its own, killed with no chance to clean up.

#![cfg(all(feature = "http", feature = "server"))]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use common::{Process, free_port, wait_for_port};
use rerail_metadata::server::{MetadataServer, ServerOptions};
use rerail_metadata::{
    HttpStore, KeySpace, MetadataStore, OwnedOptions, OwnedRecords, StoreOptions,
};

const PORT: &str = "RERAIL_TEST_SERVER_PORT";
const DIR: &str = "RERAIL_TEST_SERVER_DIR";

/// No test: what the other processes of this file run. Returns at once when nobody asked.
#[tokio::test]
async fn serve_when_asked() {
    let Ok(port) = std::env::var(PORT) else {
        return;
    };
    let mut options = ServerOptions::default();
    options.data_dir = std::env::var_os(DIR).map(Into::into);
    let server = MetadataServer::open(options).expect("opened");
    let address = format!("127.0.0.1:{port}");
    let listener = tokio::net::TcpListener::bind(address)
        .await
        .expect("listens");
    server
        .serve(listener, std::future::pending())
        .await
        .expect("serves");
}

fn start(port: u16, dir: Option<&Path>) -> Process {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", "serve_when_asked"])
        .env(PORT, port.to_string());
    if let Some(dir) = dir {
        command.env(DIR, dir);
    }
    let process = Process::start(&mut command);
    wait_for_port(port);
    process
}

fn client(port: u16) -> HttpStore {
    let url = format!("http://127.0.0.1:{port}/metadata");
    HttpStore::new(&url, None, &StoreOptions::default()).expect("a client")
}

#[tokio::test]
async fn kill_9_at_any_moment_loses_no_acknowledged_write() {
    const ROUNDS: u64 = 6;
    const WRITERS: u64 = 8;
    let dir = tempfile::tempdir().expect("a directory");
    let port = free_port();
    // What was acknowledged last for each key; `None` for a deletion.
    let acknowledged: Arc<Mutex<BTreeMap<String, Option<u64>>>> = Arc::default();
    let mut writes = 0;
    for round in 0..ROUNDS {
        let mut server = start(port, Some(dir.path()));
        let stop = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (acknowledged, stop) = (Arc::clone(&acknowledged), Arc::clone(&stop));
                let store = client(port);
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
        server.kill();
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            writes += writer.await.expect("no panic") - round * 1_000_000;
        }
    }
    let _server = start(port, Some(dir.path()));
    let store = client(port);
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
    let port = free_port();
    let mut server = start(port, None);
    let keys = KeySpace::default();
    let mut options = OwnedOptions::default();
    options.ttl = Some(Duration::from_secs(5));
    options.read_back = Duration::from_secs(2);
    let owners: Vec<_> = ["node-a", "node-b"]
        .into_iter()
        .map(|name| {
            let (owned, events) = OwnedRecords::start(Arc::new(client(port)), options.clone());
            owned.set(keys.segment(name), Bytes::from_static(b"{}"));
            owned.set(keys.rpc_meta(name), Bytes::from_static(b"{}"));
            (owned, events)
        })
        .collect();
    for (owned, _) in &owners {
        owned.stored().await;
    }
    server.kill();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let _server = start(port, None);
    let third = client(port);
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
