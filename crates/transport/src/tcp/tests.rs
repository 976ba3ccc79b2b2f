//! Client and server against each other, and against peers that break the rules.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use rerail_verbs::HostMemory;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::flow::Pace;
use super::header::{HEADER_BYTES, Header, Status};
use super::*;
use crate::rpc::HostPort;

pub(super) struct Target {
    pub(super) server: TcpServer,
    pub(super) regions: Regions,
    pub(super) memory: HostMemory,
}

pub(super) fn target(length: usize) -> Target {
    let regions = Regions::default();
    let memory = HostMemory::allocate(length).expect("memory");
    regions.add(&memory, 0, length).expect("added");
    let server = serve(&regions, ServerLimits::default());
    Target {
        server,
        regions,
        memory,
    }
}

pub(super) fn serve(regions: &Regions, limits: ServerLimits) -> TcpServer {
    let loopback = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
    TcpServer::start(loopback, 0..=0, limits, regions.clone(), &Handle::current())
        .expect("a port is free")
}

pub(super) fn client(port: u16, version: Version) -> TcpClient {
    limited_client(port, version, ClientLimits::default())
}

pub(super) fn limited_client(port: u16, version: Version, limits: ClientLimits) -> TcpClient {
    let peer = HostPort {
        host: "127.0.0.1".into(),
        port: Some(port),
    };
    TcpClient::new(peer, version, limits, Handle::current())
}

pub(super) fn request(
    opcode: Opcode,
    memory: &HostMemory,
    length: usize,
    remote_addr: u64,
) -> Request {
    let deadline = Instant::now() + Duration::from_secs(10);
    Request {
        opcode,
        memory: memory.clone(),
        offset: 0,
        length,
        remote_addr,
        deadline,
    }
}

pub(super) fn bytes_of(memory: &HostMemory, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    memory.copy_out(0, &mut bytes).expect("inside");
    bytes
}

pub(super) fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|index| (index * 31 + index / 251) as u8)
        .collect()
}

#[tokio::test]
async fn bytes_go_there_and_back_in_both_versions() {
    let length = 1_000_003;
    for version in [Version::V1, Version::V2] {
        let target = target(length);
        let client = client(target.server.port(), version);
        let source = HostMemory::allocate(length).expect("memory");
        source.copy_in(0, &pattern(length)).expect("inside");
        let write = request(Opcode::Write, &source, length, target.memory.addr());
        assert_eq!(client.submit(write).await, Ok(Ok(())));
        let back = HostMemory::allocate(length).expect("memory");
        let read = request(Opcode::Read, &back, length, target.memory.addr());
        // A version 1 write may still be on its way when it is done; a read on the same lane is
        // behind it.
        assert_eq!(client.submit(read).await, Ok(Ok(())));
        assert!(bytes_of(&back, length) == pattern(length), "{version:?}");
        assert_eq!(client.lanes(), 1);
    }
}

#[tokio::test]
async fn many_requests_share_few_connections() {
    let length = 4096;
    let target = target(64 * length);
    let client = client(target.server.port(), Version::V2);
    let source = HostMemory::allocate(length).expect("memory");
    source.copy_in(0, &pattern(length)).expect("inside");
    let outcomes: Vec<_> = (0..64)
        .map(|index| target.memory.addr() + (index * length) as u64)
        .map(|addr| client.submit(request(Opcode::Write, &source, length, addr)))
        .collect();
    for outcome in outcomes {
        assert_eq!(outcome.await, Ok(Ok(())));
    }
    assert!(client.lanes() <= 4);
    assert!(bytes_of(&target.memory, 64 * length) == pattern(length).repeat(64));
}

#[tokio::test]
async fn addresses_outside_one_buffer_are_rejected_and_healthy_requests_served() {
    let target = target(8192);
    let neighbour = HostMemory::allocate(4096).expect("memory");
    target.regions.add(&neighbour, 0, 4096).expect("added");
    let source = HostMemory::allocate(1 << 20).expect("memory");
    let client = client(target.server.port(), Version::V2);
    let base = target.memory.addr();
    for (addr, length) in [
        (base + 8191, 2),
        (base - 1, 2),
        (base, 1 << 20),
        (u64::MAX, 1),
    ] {
        for opcode in [Opcode::Read, Opcode::Write] {
            let outcome = client.submit(request(opcode, &source, length, addr)).await;
            assert!(
                matches!(outcome, Ok(Err(Failure::Rejected { .. }))),
                "{opcode:?} {length} at {addr:#x} gave {outcome:?}"
            );
        }
        let healthy = request(Opcode::Write, &source, 16, base);
        assert_eq!(client.submit(healthy).await, Ok(Ok(())));
    }
    let outside = Request {
        offset: 1 << 20,
        ..request(Opcode::Read, &source, 1, base)
    };
    assert!(matches!(
        client.submit(outside).await,
        Ok(Err(Failure::LocalRange { .. }))
    ));
    let empty = request(Opcode::Read, &source, 0, base);
    assert_eq!(client.submit(empty).await, Ok(Ok(())));
}

#[tokio::test]
async fn after_a_region_is_taken_away_no_byte_of_a_write_lands() {
    let length = 1 << 20;
    let target = target(length);
    let mut stream = TcpStream::connect(("127.0.0.1", target.server.port()))
        .await
        .expect("there");
    let addr = target.memory.addr();
    let header = Header {
        size: length as u64,
        addr,
        opcode: Opcode::Write,
        with_status: true,
    };
    stream.write_all(&header.encode()).await.expect("sent");
    stream.write_all(&vec![7; length / 2]).await.expect("sent");
    while bytes_of(&target.memory, 1) != [7] {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(target.regions.remove(addr).await);
    target.memory.copy_in(0, &vec![1; length]).expect("inside");
    // The server has gone away; what is left of the write goes nowhere.
    let _ = stream.write_all(&vec![7; length / 2]).await;
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(rest.is_empty(), "no status was sent");
    assert!(
        bytes_of(&target.memory, length)
            .iter()
            .all(|byte| *byte == 1)
    );
}

#[tokio::test]
async fn a_lost_connection_is_replaced_and_the_request_repeated() {
    let target = target(4096);
    let listener = TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port is free");
    let port = listener.local_addr().expect("bound").port();
    let real = target.server.port();
    // The first two connections break inside the request, the third is passed on.
    tokio::spawn(async move {
        for broken in [true, true, false] {
            let Ok((mut inner, _)) = listener.accept().await else {
                return;
            };
            if broken {
                let _ = inner.read_exact(&mut [0; HEADER_BYTES + 100]).await;
                continue;
            }
            let Ok(mut outer) = TcpStream::connect(("127.0.0.1", real)).await else {
                return;
            };
            let _ = tokio::io::copy_bidirectional(&mut inner, &mut outer).await;
        }
    });
    let client = client(port, Version::V2);
    let source = HostMemory::allocate(4096).expect("memory");
    source.copy_in(0, &pattern(4096)).expect("inside");
    let write = request(Opcode::Write, &source, 4096, target.memory.addr());
    assert_eq!(client.submit(write).await, Ok(Ok(())));
    assert!(bytes_of(&target.memory, 4096) == pattern(4096));
}

#[tokio::test]
async fn x10_a_silent_peer_ends_at_the_deadline_and_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port is free");
    let port = listener.local_addr().expect("bound").port();
    let limits = ClientLimits {
        fence_max: Duration::from_millis(50),
        ..ClientLimits::default()
    };
    let client = limited_client(port, Version::V2, limits);
    let source = HostMemory::allocate(4096).expect("memory");
    let deadline = Instant::now() + Duration::from_millis(300);
    let write = Request {
        deadline,
        ..request(Opcode::Write, &source, 4096, 0x1000)
    };
    match client.submit(write).await {
        Ok(Err(Failure::Deadline {
            peer,
            attempts: 1,
            unfenced: true,
            ..
        })) => {
            assert_eq!(peer, format!("127.0.0.1:{port}"));
        }
        other => panic!("{other:?}"),
    }
    drop(listener);
    let deadline = Instant::now() + Duration::from_millis(200);
    let write = Request {
        deadline,
        ..request(Opcode::Write, &source, 4096, 0x1000)
    };
    match client.submit(write).await {
        Ok(Err(Failure::Deadline {
            attempts,
            unfenced: false,
            ..
        })) => assert!(attempts > 1),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_peer_that_stops_in_the_middle_is_let_go_of() {
    let regions = Regions::default();
    let memory = HostMemory::allocate(4096).expect("memory");
    let addr = regions.add(&memory, 0, 4096).expect("added");
    let stall_max = Duration::from_millis(100);
    let pace = Pace {
        stall_max,
        ..Pace::default()
    };
    let server = serve(
        &regions,
        ServerLimits {
            pace,
            ..ServerLimits::default()
        },
    );
    let connect = || TcpStream::connect(("127.0.0.1", server.port()));
    let mut idle = connect().await.expect("there");
    let mut half_header = connect().await.expect("there");
    half_header.write_all(&[1; 10]).await.expect("sent");
    let mut half_write = connect().await.expect("there");
    let header = Header {
        size: 4096,
        addr,
        opcode: Opcode::Write,
        with_status: true,
    };
    half_write.write_all(&header.encode()).await.expect("sent");
    for stream in [&mut half_header, &mut half_write] {
        let ended = tokio::time::timeout(Duration::from_secs(5), stream.read_u8()).await;
        assert!(matches!(ended, Ok(Err(_))));
    }
    // One that has not begun a request may wait as long as it likes.
    idle.write_all(&header.encode()).await.expect("sent");
    idle.write_all(&[9; 4096]).await.expect("sent");
    let mut status = [0; 8];
    idle.read_exact(&mut status).await.expect("a status");
    assert_eq!(Status::decode(status), Some(Status::Ok));
}
