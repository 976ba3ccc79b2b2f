//! The C++ engine's own HTTP server under our client, and its records in our server and in etcd.
//!
//! Needs the wheel: `RERAIL_CPP_PYTHON` names the Python that has it. Without it the tests are
//! skipped with a reason.

#![cfg(all(feature = "http", feature = "server"))]

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::forward::Forward;
use common::{Process, free_port, with_new_ports};
use rerail_metadata::descriptor::{
    InstanceId, JsonForm, Protocol, RerailMember, RpcMeta, SegmentDescriptor,
};
use rerail_metadata::server::{MetadataServer, ServerOptions};
use rerail_metadata::{
    HttpStore, KeySpace, MetadataError, MetadataStore, OwnedEvent, OwnedOptions, OwnedRecords,
    StoreOptions, Verdict, conformance,
};

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

/// The wheel's own HTTP server, and a port that leads to it.
struct TheirServer {
    python: PathBuf,
    process: Process,
    service: Forward,
}

impl TheirServer {
    async fn start() -> Option<Self> {
        let python = python()?;
        let asked = Command::new(&python)
            .args(["-c", "import aiohttp"])
            .output();
        if !asked.expect("Python runs").status.success() {
            let required = std::env::var_os("RERAIL_REQUIRE_STORES").is_some_and(|set| set == "1");
            let why = "the C++ engine's server needs the Python package aiohttp";
            assert!(!required, "{why}, and RERAIL_REQUIRE_STORES=1");
            eprintln!("skipped: {why}");
            return None;
        }
        let (process, port) = Self::launch(&python);
        let service = Forward::to(port).await;
        Some(Self {
            python,
            process,
            service,
        })
    }

    fn launch(python: &Path) -> (Process, u16) {
        with_new_ports(|| {
            let port = free_port();
            let mut command = Command::new(python);
            command.args(["-m", "mooncake.http_metadata_server", "--host", "127.0.0.1"]);
            let mut process = Process::start(command.args(["--port", &port.to_string()]));
            process.serves(port).then_some((process, port))
        })
    }

    /// Kills it and starts another one, which is empty.
    fn restart(&mut self) {
        self.process.kill();
        let (process, port) = Self::launch(&self.python);
        self.process = process;
        self.service.switch(port);
    }

    fn client(&self) -> HttpStore {
        client(self.service.address.port())
    }
}

#[tokio::test]
async fn the_wheels_server_conforms_for_what_it_can_do() {
    let Some(server) = TheirServer::start().await else {
        return;
    };
    let shared: Arc<dyn MetadataStore> = Arc::new(server.client());
    let report = conformance::run(shared, "mooncake/conformance/").await;
    let report = report.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(report.passed.contains(&"conditions_hold"), "{report:?}");
    assert!(
        report.passed.contains(&"a_watch_of_one_key_sees_it_change"),
        "{report:?}"
    );
    // It refuses a second PUT of such a key: DELETE, then PUT.
    let store = server.client();
    let key = KeySpace::default().rpc_meta("node-a");
    for body in ["1", "2"] {
        let body = Bytes::from_static(body.as_bytes());
        store.put(&key, body.clone(), None).await.expect("put");
        assert_eq!(store.get(&key).await.expect("get").value, body);
    }
    // What it cannot do is said, and what to do about it.
    let error = store.list("mooncake/").await.expect_err("no lists");
    assert!(
        matches!(error, MetadataError::Unsupported { .. }),
        "{error}"
    );
}

fn options(own: InstanceId) -> OwnedOptions {
    let mut options = OwnedOptions::default();
    options.read_back = Duration::from_millis(500);
    // The younger instance has the name.
    options.judge = Arc::new(move |found, _| {
        let found = SegmentDescriptor::from_json(&found.value).ok();
        match found.and_then(|segment| segment.rerail) {
            Some(rerail) if rerail.instance > own => Verdict::Yield,
            _ => Verdict::Overwrite,
        }
    });
    options
}

fn record(instance: InstanceId) -> Bytes {
    let segment = SegmentDescriptor {
        rerail: Some(RerailMember::new(instance)),
        ..SegmentDescriptor::new("node-a", Protocol::tcp())
    };
    segment.to_json(JsonForm::Bare).into()
}

/// Waits until every key has that value.
async fn until_all(store: &HttpStore, keys: &[String], value: &Bytes) {
    let all = async {
        for key in keys {
            while store.get(key).await.ok().map(|found| found.value).as_ref() != Some(value) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(30), all).await;
    waited.expect("the records are those of the owner");
}

#[tokio::test]
async fn on_the_wheels_server_the_younger_of_two_owners_has_the_name_and_a_crash_locks_nobody_out()
{
    let Some(mut server) = TheirServer::start().await else {
        return;
    };
    let store = server.client();
    let spaces = KeySpace::default();
    // The second is one that the server lets nobody write again.
    let keys = [spaces.segment("node-a"), spaces.rpc_meta("node-a")];
    let owner = |instance: u8| {
        let instance = InstanceId([instance; 16]);
        let (owned, events) = OwnedRecords::start(Arc::new(server.client()), options(instance));
        for key in &keys {
            owned.set(key.clone(), record(instance));
        }
        (owned, events, record(instance))
    };
    // One that crashes leaves its records; the next life writes over them.
    let (crashed, _events, _) = owner(1);
    crashed.stored().await;
    drop(crashed);
    let (old, mut old_events, old_record) = owner(2);
    old.stored().await;
    until_all(&store, &keys, &old_record).await;

    // Twice alive under one name: the older one is told, for each of its records.
    let (young, mut young_events, young_record) = owner(3);
    young.stored().await;
    let superseded = async {
        let mut lost = BTreeSet::new();
        while lost.len() < keys.len() {
            match old_events.recv().await.expect("it is alive") {
                OwnedEvent::Superseded { key } => lost.insert(key),
                _ => false,
            };
        }
    };
    let told = tokio::time::timeout(Duration::from_secs(30), superseded).await;
    told.expect("the older owner is told");
    until_all(&store, &keys, &young_record).await;
    old.close().await.expect("closed");
    until_all(&store, &keys, &young_record).await;

    // Restarted empty, as after a crash of its own.
    server.restart();
    until_all(&store, &keys, &young_record).await;
    while let Ok(event) = young_events.try_recv() {
        assert!(!matches!(event, OwnedEvent::Superseded { .. }), "{event:?}");
    }
    young.close().await.expect("closed");
    for key in &keys {
        assert!(store.get(key).await.expect_err("gone").is_not_found());
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
