//! Client and server against peers that mean them harm or are broken, and requests that are given
//! up. A test of the server ends with a healthy peer that is served.

use std::time::Duration;

use rerail_verbs::HostMemory;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::header::{HEADER_BYTES, Header, STATUS_BYTES, Status};
use super::tests::{Target, bytes_of, client, limited_client, pattern, request, serve, target};
use super::*;

const SOON: Duration = Duration::from_secs(10);

fn memory(length: usize) -> HostMemory {
    HostMemory::allocate(length).expect("memory")
}

fn write_header(size: usize, addr: u64) -> [u8; HEADER_BYTES] {
    Header {
        size: size as u64,
        addr,
        opcode: Opcode::Write,
        with_status: true,
    }
    .encode()
}

async fn connect(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port))
        .await
        .expect("it listens")
}

async fn assert_serves(target: &Target) {
    let client = client(target.server.port(), Version::V2);
    let source = memory(64);
    let write = request(Opcode::Write, &source, 64, target.memory.addr());
    let outcome = timeout(SOON, client.submit(write)).await;
    assert_eq!(outcome, Ok(Ok(Ok(()))));
}

/// A listener whose connections `behave`.
async fn peer<F>(behave: fn(TcpStream) -> F) -> u16
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(behave(stream));
        }
    });
    port
}

/// Takes everything, says nothing, closes when the client does.
async fn swallow(mut stream: TcpStream) {
    let mut scratch = [0; 4096];
    while matches!(stream.read(&mut scratch).await, Ok(count) if count > 0) {}
}

#[tokio::test]
async fn a_thousand_idle_connections_hold_up_nobody() {
    let target = target(4096);
    let mut idle = Vec::new();
    for _ in 0..1000 {
        idle.push(connect(target.server.port()).await);
    }
    assert_serves(&target).await;
}

#[tokio::test]
async fn when_all_places_are_taken_the_longest_idle_connection_makes_room() {
    let regions = Regions::default();
    let memory = memory(4096);
    let addr = regions.add(&memory, 0, 4096).expect("added");
    let limits = ServerLimits {
        connections_max: 3,
        ..ServerLimits::default()
    };
    let server = serve(&regions, limits);
    let mut busy = connect(server.port()).await;
    busy.write_all(&write_header(4096, addr))
        .await
        .expect("sent");
    busy.write_all(&[5; 4000]).await.expect("sent");
    sleep(Duration::from_millis(50)).await;
    let mut idle = Vec::new();
    for _ in 0..5 {
        idle.push(connect(server.port()).await);
        sleep(Duration::from_millis(10)).await;
    }
    let target = Target {
        server,
        regions,
        memory,
    };
    assert_serves(&target).await;
    // The request under way was not the one to end.
    busy.write_all(&[5; 96]).await.expect("sent");
    let mut status = [0; STATUS_BYTES];
    busy.read_exact(&mut status).await.expect("a status");
    assert_eq!(Status::decode(status), Some(Status::Ok));
    let first = timeout(SOON, idle.remove(0).read_u8()).await;
    assert!(matches!(first, Ok(Err(_))), "it was the longest idle one");
}

#[tokio::test]
async fn garbage_byte_by_byte_and_early_ends_cost_nothing() {
    let target = target(4096);
    let port = target.server.port();
    let addr = target.memory.addr();
    for cut in [0, 1, HEADER_BYTES - 1, HEADER_BYTES] {
        let mut stream = connect(port).await;
        stream
            .write_all(&write_header(64, addr)[..cut])
            .await
            .expect("sent");
        drop(stream);
    }
    for bytes in [[0; HEADER_BYTES], [0xff; HEADER_BYTES]] {
        let mut stream = connect(port).await;
        stream.write_all(&bytes).await.expect("sent");
        let mut reply = Vec::new();
        let ended = timeout(SOON, stream.read_to_end(&mut reply)).await;
        assert!(ended.is_ok(), "size {:#x} is rejected at once", bytes[0]);
    }
    let mut slow = connect(port).await;
    slow.set_nodelay(true).expect("set");
    for byte in write_header(64, addr).iter().chain(&[3; 64]) {
        slow.write_all(&[*byte]).await.expect("sent");
    }
    let mut status = [0; STATUS_BYTES];
    slow.read_exact(&mut status).await.expect("a status");
    assert_eq!(Status::decode(status), Some(Status::Ok));
    assert_serves(&target).await;
}

#[tokio::test]
async fn a_rejection_ends_a_long_write_early_and_reaches_its_sender() {
    let target = target(4096);
    let length = 64 << 20;
    let source = memory(length);
    let client = client(target.server.port(), Version::V2);
    let begun = Instant::now();
    for _ in 0..5 {
        let write = request(Opcode::Write, &source, length, target.memory.addr());
        let outcome = client.submit(write).await;
        assert!(
            matches!(outcome, Ok(Err(Failure::Rejected { .. }))),
            "{outcome:?}"
        );
    }
    assert!(begun.elapsed() < Duration::from_secs(4));
    assert_serves(&target).await;
}

#[tokio::test]
async fn success_is_not_believed_before_all_bytes_were_sent() {
    async fn hasty(mut stream: TcpStream) {
        let _ = stream.write_all(&Status::Ok.encode()).await;
        sleep(Duration::from_millis(200)).await;
    }
    let port = peer(hasty).await;
    let client = client(port, Version::V2);
    let source = memory(64 << 20);
    let deadline = Instant::now() + Duration::from_millis(700);
    let write = Request {
        deadline,
        ..request(Opcode::Write, &source, 64 << 20, 0x1000)
    };
    match client.submit(write).await {
        Ok(Err(Failure::Deadline { .. })) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_peer_that_speaks_another_protocol_is_named_at_the_deadline() {
    async fn http(mut stream: TcpStream) {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    }
    let port = peer(http).await;
    let client = client(port, Version::V2);
    let local = memory(4096);
    for opcode in [Opcode::Read, Opcode::Write] {
        let deadline = Instant::now() + Duration::from_millis(300);
        let request = Request {
            deadline,
            ..request(opcode, &local, 4096, 0x1000)
        };
        match client.submit(request).await {
            Ok(Err(error @ Failure::Deadline { .. })) => {
                assert!(error.to_string().contains(&port.to_string()), "{error}");
                assert!(!error.is_unfenced() && error.is_retryable());
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(bytes_of(&local, 4096).iter().all(|byte| *byte == 0));
}

#[tokio::test]
async fn a_waiting_request_ends_at_its_own_deadline_while_others_keep_all_lanes() {
    let port = peer(swallow).await;
    let limits = ClientLimits {
        lanes_max: 1,
        ..ClientLimits::default()
    };
    let client = limited_client(port, Version::V2, limits);
    let source = memory(4096);
    let long = client.submit(request(Opcode::Write, &source, 4096, 0x1000));
    let begun = Instant::now();
    let short = Request {
        deadline: begun + Duration::from_millis(200),
        ..request(Opcode::Write, &source, 4096, 0x1000)
    };
    let outcome = timeout(SOON / 2, client.submit(short)).await;
    assert!(
        matches!(
            outcome,
            Ok(Ok(Err(Failure::Deadline {
                attempts: 0,
                unfenced: false,
                ..
            })))
        ),
        "{outcome:?}"
    );
    assert!(begun.elapsed() >= Duration::from_millis(200));
    drop(long);
}

#[tokio::test]
async fn a_cancelled_write_is_told_after_its_fence_and_lands_nowhere_later() {
    // A server that takes bytes slowly: the write is in the middle when it is cancelled.
    let length = 64 << 20;
    let target = target(length);
    let client = client(target.server.port(), Version::V2);
    let source = memory(length);
    source.copy_in(0, &pattern(length)).expect("inside");
    let (cancel, canceled) = watch::channel(false);
    let write = request(Opcode::Write, &source, length, target.memory.addr());
    let outcome = client.submit_cancellable(write, canceled);
    sleep(Duration::from_millis(3)).await;
    cancel.send_replace(true);
    match timeout(SOON, outcome).await {
        Ok(Ok(Err(Failure::Canceled {
            unfenced: false, ..
        })))
        | Ok(Ok(Ok(()))) => {}
        other => panic!("{other:?}"),
    }
    let zeros = vec![0; length];
    target.memory.copy_in(0, &zeros).expect("inside");
    sleep(Duration::from_millis(100)).await;
    assert!(
        bytes_of(&target.memory, length) == zeros,
        "a byte came after the fence"
    );
    assert_serves(&target).await;
}

#[tokio::test]
async fn closing_ends_what_waits_and_what_is_under_way() {
    let port = peer(swallow).await;
    let limits = ClientLimits {
        lanes_max: 2,
        ..ClientLimits::default()
    };
    let client = limited_client(port, Version::V2, limits);
    let source = memory(4096);
    let write = || request(Opcode::Write, &source, 4096, 0x1000);
    let outcomes: Vec<_> = (0..8).map(|_| client.submit(write())).collect();
    sleep(Duration::from_millis(50)).await;
    client.close();
    for outcome in outcomes {
        let outcome = timeout(SOON / 2, outcome).await;
        assert_eq!(outcome, Ok(Ok(Err(Failure::Closed))));
    }
    assert_eq!(client.submit(write()).await, Ok(Err(Failure::Closed)));
    let gone = async {
        while client.lanes() > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, gone).await.expect("its lanes end");
}

#[tokio::test]
async fn a_cancelled_write_to_a_frozen_peer_says_that_it_is_not_fenced() {
    async fn frozen(stream: TcpStream) {
        sleep(Duration::from_secs(60)).await;
        drop(stream);
    }
    let limits = ClientLimits {
        fence_max: Duration::from_millis(100),
        ..ClientLimits::default()
    };
    let client = limited_client(peer(frozen).await, Version::V2, limits);
    let source = memory(4096);
    let (cancel, canceled) = watch::channel(false);
    let write = request(Opcode::Write, &source, 4096, 0x1000);
    let outcome = client.submit_cancellable(write, canceled);
    sleep(Duration::from_millis(50)).await;
    cancel.send_replace(true);
    match timeout(SOON / 2, outcome).await {
        Ok(Ok(Err(failure @ Failure::Canceled { .. }))) => assert!(failure.is_unfenced()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn more_requests_than_the_queue_holds_are_refused_at_once() {
    let limits = ClientLimits {
        lanes_max: 1,
        queue_max: 4,
        ..ClientLimits::default()
    };
    let client = limited_client(peer(swallow).await, Version::V2, limits);
    let source = memory(64);
    let outcomes: Vec<_> = (0..6)
        .map(|_| client.submit(request(Opcode::Write, &source, 64, 0x1000)))
        .collect();
    let mut refused = 0;
    client.close();
    for outcome in outcomes {
        if let Ok(Err(Failure::QueueFull { queue_max: 4, .. })) = outcome.await {
            refused += 1;
        }
    }
    assert!(refused == 2 || refused == 1, "{refused}");
}
