//! What a change costs with each store: 1 000 segments, and 100 watchers of all of them in one
//! process.
//!
//! `cargo xtask bench stores` prints a table: the time from a put to the first and to the last
//! watcher, what 100 watchers need to be in step at first, and bytes on the wire and requests to
//! the server for one change. Real etcd and Redis, and our server in this process; all on loopback,
//! where a counting forwarder stands between. Deliberately not here: the disk, which is each
//! server's own matter (etcd runs without fsync here).

#[path = "../tests/common/mod.rs"]
mod common;

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rerail_metadata::descriptor::{Buffer, Device, JsonForm, Protocol, SegmentDescriptor};
use rerail_metadata::server::{MetadataServer, ServerOptions};
use rerail_metadata::{Change, Follow, KeySpace, MetadataStore, StoreOptions, StoreUrl, connect};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

const SEGMENTS: usize = 1_000;
const WATCHERS: usize = 100;
const CHANGES: usize = 100;
/// Longest time for one step.
const LIMIT: Duration = Duration::from_secs(120);

/// A store under measurement.
struct Subject {
    name: &'static str,
    url: String,
    /// Bytes that went through the forwarder; none for a store without a wire.
    bytes: Arc<AtomicU64>,
    /// How many requests the server has had.
    requests: Box<dyn Fn() -> u64>,
    _running: Option<common::Store>,
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let value = record(0);
    println!(
        "{SEGMENTS} segments of {} bytes, {WATCHERS} watchers, {CHANGES} changes one after another\n",
        value.len()
    );
    println!(
        "| store | in step after, ms | bytes for that | put to first watcher, ms (p50) | put to every \
         watcher, ms (p50) | (p99) | bytes a change | requests a change |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    runtime.block_on(async {
        measure(memory()).await;
        measure(http().await).await;
        for subject in [etcd().await, redis().await].into_iter().flatten() {
            measure(subject).await;
        }
    });
}

/// As a node with 8 NICs and 16 buffers has it. `sequence` is in a timestamp's place.
fn record(sequence: usize) -> Bytes {
    let mut segment = SegmentDescriptor::new("node", Protocol::rdma());
    segment.timestamp = format!("{sequence:026}");
    for index in 0..8 {
        let gid = rerail_verbs::Gid::from_ipv4([10, 0, 0, index + 1].into());
        let device = Device::new(format!("mlx5_{index}"), 0, gid);
        segment.devices.push(device);
    }
    for index in 0..16 {
        segment.buffers.push(Buffer {
            name: "cpu:0".into(),
            addr: 0x7f00_0000_0000 + (index << 30),
            length: 1 << 30,
            rkey: vec![0x00ff_ffff; 8],
            lkey: vec![0x00ff_ffff; 8],
            ..Buffer::default()
        });
    }
    segment.to_json(JsonForm::Bare).into()
}

async fn measure(subject: Subject) {
    let url = StoreUrl::parse(&subject.url).expect("a URL");
    let mut options = StoreOptions::default();
    options.deadline = LIMIT;
    let store = connect(&url, &options).await.expect("a store");
    let keys = KeySpace::default();
    let key = |index: usize| keys.segment(&format!("node-{index:04}"));
    for index in 0..SEGMENTS {
        let stored = store.put(&key(index), record(0), None).await;
        stored.expect("stored");
    }
    let started = Instant::now();
    let before = subject.bytes.load(Ordering::Relaxed);
    let (told, mut news) = mpsc::unbounded_channel();
    for _ in 0..WATCHERS {
        let (store, prefix, told) = (Arc::clone(&store), keys.segments(), told.clone());
        tokio::spawn(watcher(store, prefix, told));
    }
    // Each tells once that it is in step.
    expect_news(&mut news, None).await;
    let in_step = started.elapsed();
    let bytes_in_step = subject.bytes.load(Ordering::Relaxed) - before;

    let (mut first, mut last) = (Vec::new(), Vec::new());
    let before = (subject.bytes.load(Ordering::Relaxed), (subject.requests)());
    for change in 1..=CHANGES {
        let value = record(change);
        let started = Instant::now();
        let stored = store.put(&key(change), value.clone(), None).await;
        stored.expect("stored");
        let (earliest, latest) = expect_news(&mut news, Some(&value)).await;
        first.push(earliest.duration_since(started));
        last.push(latest.duration_since(started));
    }
    let changes = CHANGES as u64;
    let bytes = (subject.bytes.load(Ordering::Relaxed) - before.0) / changes;
    // The last question after the requests is one itself.
    let requests = (subject.requests)().saturating_sub(before.1) as f64 / CHANGES as f64;
    first.sort_unstable();
    last.sort_unstable();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let at = |times: &[Duration], percent: usize| ms(times[(times.len() - 1) * percent / 100]);
    println!(
        "| {} | {:.0} | {bytes_in_step} | {:.2} | {:.2} | {:.2} | {bytes} | {requests:.1} |",
        subject.name,
        ms(in_step),
        at(&first, 50),
        at(&last, 50),
        at(&last, 99),
    );
}

/// What a watcher saw, and when; `None` for being in step.
type News = (Option<Bytes>, Instant);

async fn watcher(store: Arc<dyn MetadataStore>, prefix: String, told: mpsc::UnboundedSender<News>) {
    let mut follow = Follow::new(store, &prefix).await.expect("follow");
    let mut in_step = false;
    while let Some(change) = follow.next().await {
        let news = match change {
            Change::Synced if !std::mem::replace(&mut in_step, true) => None,
            Change::Put(record) if in_step => Some(record.value),
            _ => continue,
        };
        if told.send((news, Instant::now())).is_err() {
            return;
        }
    }
}

/// Waits until every watcher has told that; when the first and the last did.
async fn expect_news(
    news: &mut mpsc::UnboundedReceiver<News>,
    wanted: Option<&Bytes>,
) -> (Instant, Instant) {
    let mut times = Vec::with_capacity(WATCHERS);
    let all = async {
        while times.len() < WATCHERS {
            let (what, at) = news.recv().await.expect("watchers are alive");
            if what.as_ref() == wanted {
                times.push(at);
            }
        }
    };
    let waited = tokio::time::timeout(LIMIT, all).await;
    waited.expect("every watcher is told");
    times.sort_unstable();
    (times[0], times[WATCHERS - 1])
}

fn memory() -> Subject {
    Subject {
        name: "memory",
        url: "memory://bench".into(),
        bytes: Arc::default(),
        requests: Box::new(|| 0),
        _running: None,
    }
}

async fn http() -> Subject {
    let server = MetadataServer::open(ServerOptions::default()).expect("opened");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(server.serve(listener, std::future::pending()));
    let (service, bytes) = counted(address).await;
    let wanted = ["reads", "writes", "deletes", "watch_answers"];
    Subject {
        name: "HTTP, our server",
        url: format!("http://{service}/metadata"),
        bytes,
        requests: Box::new(move || {
            let text = http_get(address);
            let total = |name| sum(&text, &format!("rerail_metadata_{name}_total "));
            wanted.into_iter().map(total).sum()
        }),
        _running: None,
    }
}

async fn etcd() -> Option<Subject> {
    let running = common::start_etcd()?;
    let address = running.url.trim_start_matches("etcd://").parse();
    let address: SocketAddr = address.expect("an address");
    let (service, bytes) = counted(address).await;
    Some(Subject {
        name: "etcd",
        url: format!("etcd://{service}"),
        bytes,
        requests: Box::new(move || sum(&http_get(address), "grpc_server_msg_received_total{")),
        _running: Some(running),
    })
}

async fn redis() -> Option<Subject> {
    let running = common::start_redis()?;
    let address = running.url.trim_start_matches("redis://").parse();
    let address: SocketAddr = address.expect("an address");
    let (service, bytes) = counted(address).await;
    Some(Subject {
        name: "Redis",
        url: format!("redis://{service}"),
        bytes,
        requests: Box::new(move || {
            let answer = ask(address, "INFO stats\r\nQUIT\r\n");
            sum(&answer, "total_commands_processed:")
        }),
        _running: Some(running),
    })
}

/// The sum of the numbers at the ends of the lines that start so.
fn sum(text: &str, start: &str) -> u64 {
    let number = |line: &str| -> Option<f64> {
        let line = line.strip_prefix(start)?;
        let number = line.rsplit([' ', ':']).next()?;
        number.trim().parse().ok()
    };
    text.lines().filter_map(number).sum::<f64>() as u64
}

fn http_get(address: SocketAddr) -> String {
    let request = format!("GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    ask(address, &request)
}

/// Sends a text and reads until the server closes the connection.
fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = std::net::TcpStream::connect(address).expect("connects");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

/// An address that leads to `server` and counts the bytes of both directions.
async fn counted(server: SocketAddr) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
    let address = listener.local_addr().expect("an address");
    let bytes = Arc::<AtomicU64>::default();
    let counter = Arc::clone(&bytes);
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            // A client may try once more after the server has ended.
            let Ok(server) = TcpStream::connect(server).await else {
                continue;
            };
            for stream in [&client, &server] {
                stream.set_nodelay(true).expect("an option");
            }
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::spawn(copy(from_client, to_server, Arc::clone(&counter)));
            tokio::spawn(copy(from_server, to_client, Arc::clone(&counter)));
        }
    });
    (address, bytes)
}

async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    bytes: Arc<AtomicU64>,
) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        bytes.fetch_add(count as u64, Ordering::Relaxed);
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}
