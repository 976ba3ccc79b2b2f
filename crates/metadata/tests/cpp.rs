//! The C++ engine's own HTTP server under our client, and its records in our server and in etcd.
//!
//! Needs the wheel: `RERAIL_CPP_PYTHON` names the Python that has it. Without it the tests are
//! skipped with a reason.

#![cfg(all(feature = "http", feature = "server"))]

mod common;

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::{Process, free_port, with_new_ports};
use rerail_metadata::descriptor::{JsonForm, RpcMeta, SegmentDescriptor};
use rerail_metadata::server::{MetadataServer, ServerOptions};
use rerail_metadata::{HttpStore, KeySpace, MetadataStore, StoreOptions, conformance};

fn python() -> Option<PathBuf> {
    let python = std::env::var_os("RERAIL_CPP_PYTHON").map(PathBuf::from);
    if python.is_none() {
        eprintln!("skipped: RERAIL_CPP_PYTHON does not name a Python with the C++ engine");
    }
    python
}

fn client(port: u16) -> HttpStore {
    let mut options = StoreOptions::default();
    options.poll_interval = Duration::from_millis(200);
    let url = format!("http://127.0.0.1:{port}/metadata");
    HttpStore::new(&url, None, &options).expect("a client")
}

#[tokio::test]
async fn the_wheels_server_conforms_for_what_it_can_do() {
    let Some(python) = python() else { return };
    let has_server = Command::new(&python)
        .args(["-c", "import aiohttp"])
        .output();
    if !has_server.expect("Python runs").status.success() {
        eprintln!("skipped: its server needs the Python package aiohttp");
        return;
    }
    let (port, _server) = with_new_ports(|| {
        let port = free_port();
        let mut server = Process::start(
            Command::new(&python)
                .args([
                    "-m",
                    "mooncake.http_metadata_server",
                    "--host",
                    "127.0.0.1",
                    "--port",
                ])
                .arg(port.to_string()),
        );
        server.serves(port).then_some((port, server))
    });
    let store = client(port);
    let shared: Arc<dyn MetadataStore> = Arc::new(store.clone());
    let report = conformance::run(shared, "mooncake/conformance/").await;
    let report = report.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(report.passed.contains(&"conditions_hold"), "{report:?}");
    assert!(
        report.passed.contains(&"a_watch_of_one_key_sees_it_change"),
        "{report:?}"
    );
    // It refuses a second PUT of such a key: DELETE, then PUT.
    let key = KeySpace::default().rpc_meta("node-a");
    for body in ["1", "2"] {
        let body = Bytes::from_static(body.as_bytes());
        store.put(&key, body.clone(), None).await.expect("put");
        assert_eq!(store.get(&key).await.expect("get").value, body);
    }
}

/// A C++ engine with one registered buffer, over TCP. Ready once its record is there.
fn cpp_engine(python: &PathBuf, name: &str, metadata: &str) -> Process {
    let script = format!(
        "import time\n\
         from mooncake.engine import TransferEngine\n\
         engine = TransferEngine()\n\
         assert engine.initialize('{name}', '{metadata}', 'tcp', '') == 0\n\
         address = engine.allocate_managed_buffer(65536)\n\
         time.sleep(60)\n"
    );
    Process::start(
        Command::new(python)
            .args(["-c", &script])
            .env("MC_TCP_BIND_ADDRESS", "127.0.0.1"),
    )
}

/// Waits for the engine's record and checks that our codec takes it and gives the same bytes.
async fn read_engine(store: &dyn MetadataStore, name: &str, form: JsonForm) {
    let keys = KeySpace::default();
    let mut attempts = 0;
    let record = loop {
        match store.get(&keys.segment(name)).await {
            Ok(record) => break record,
            Err(error) if attempts > 100 => panic!("{error}"),
            Err(_) => attempts += 1,
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let segment = SegmentDescriptor::from_json(&record.value).expect("a valid record");
    assert_eq!(segment.name, name);
    assert_eq!(segment.rdma_server_name, None, "empty means absent");
    let mut written = segment.clone();
    // Ours leaves out what it has read as absent; all else is the same byte for byte.
    if String::from_utf8_lossy(&record.value).contains("\"rdma_server_name\":\"\"") {
        written.unknown.insert("rdma_server_name".into(), "".into());
    }
    let written = written.to_json(form);
    assert_eq!(
        String::from_utf8_lossy(&written),
        String::from_utf8_lossy(&record.value)
    );
    let record = store.get(&keys.rpc_meta(name)).await.expect("a location");
    let location = RpcMeta::from_json(&record.value).expect("a valid location");
    assert_eq!(location.ip_or_host_name, "127.0.0.1");
    assert_eq!(location.to_json(form), record.value);
}

#[tokio::test]
async fn a_c_plus_plus_engines_record_in_our_server_is_read_and_written_alike() {
    let Some(python) = python() else { return };
    let server = MetadataServer::open(ServerOptions::default()).expect("opened");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("listens");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(server.serve(listener, std::future::pending()));
    let name = format!("127.0.0.1:{}", free_port());
    let url = format!("http://127.0.0.1:{port}/metadata");
    let _engine = cpp_engine(&python, &name, &url);
    read_engine(&client(port), &name, JsonForm::Bare).await;
}

#[cfg(feature = "etcd")]
#[tokio::test]
async fn a_c_plus_plus_engines_record_in_etcd_is_read_and_written_alike() {
    let Some(python) = python() else { return };
    let Some(etcd) = common::start_etcd() else {
        return;
    };
    let endpoint = etcd.url.trim_start_matches("etcd://").to_owned();
    let name = format!("127.0.0.1:{}", free_port());
    let _engine = cpp_engine(&python, &name, &format!("etcd://{endpoint}"));
    let store = rerail_metadata::EtcdStore::new(&[endpoint], None, &StoreOptions::default())
        .await
        .expect("a client");
    read_engine(&store, &name, JsonForm::Line).await;
}
