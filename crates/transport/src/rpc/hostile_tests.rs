//! The server against clients that mean it harm or are broken. Each test ends with a healthy peer
//! that is served.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::client::ClientLimits;
use super::frame::{Frame, MessageType};
use super::tests::{assert_serves, request, start};
use super::*;
use crate::settings::Settings;

const SOON: Duration = Duration::from_secs(10);

fn impatient() -> ServerLimits {
    ServerLimits {
        request: Duration::from_millis(500),
        ..ServerLimits::default()
    }
}

async fn connect(address: &HostPort) -> TcpStream {
    TcpStream::connect((&*address.host, address.port_or(0)))
        .await
        .expect("the server listens")
}

/// What the server says until it closes; an error of the socket counts as a close.
async fn until_closed(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let ended = timeout(SOON, stream.read_to_end(&mut bytes)).await;
    assert!(ended.is_ok(), "the server kept the connection");
    bytes
}

#[tokio::test]
async fn h20_a_thousand_idle_connections_hold_up_nobody() {
    let (_server, _, address) = start(ServerLimits::default());
    let mut idle = Vec::new();
    for _ in 0..1000 {
        idle.push(connect(&address).await);
    }
    let begun = Instant::now();
    assert_serves(&address).await;
    assert!(begun.elapsed() < Duration::from_secs(2));
    drop(idle);
    assert_serves(&address).await;
}

#[tokio::test]
async fn h20_when_every_place_is_taken_by_silence_a_healthy_peer_waits_one_time_limit() {
    let limits = ServerLimits {
        connections_max: 4,
        ..impatient()
    };
    let (_server, _, address) = start(limits);
    let mut silent = Vec::new();
    for _ in 0..6 {
        silent.push(connect(&address).await);
    }
    assert_serves(&address).await;
}

#[tokio::test]
async fn h20_a_frame_that_comes_byte_by_byte_is_served_in_time_and_dropped_after() {
    let (_server, _, address) = start(impatient());
    let bytes = Frame::typed(MessageType::Probe, *b"{}\n").encode();
    let mut slow = connect(&address).await;
    slow.set_nodelay(true).expect("set");
    for byte in &bytes {
        slow.write_all(&[*byte]).await.expect("sent");
        sleep(Duration::from_millis(2)).await;
    }
    assert!(!until_closed(slow).await.is_empty(), "it was quick enough");

    let mut slower = connect(&address).await;
    slower.write_all(&bytes[..3]).await.expect("sent");
    // The time limit is of the whole request: a byte now and then does not extend it.
    let drip = async {
        loop {
            sleep(Duration::from_millis(200)).await;
            if slower.write_all(&[0]).await.is_err() {
                return;
            }
        }
    };
    timeout(SOON, drip).await.expect("the server let go");
    assert_serves(&address).await;
}

#[tokio::test]
async fn h20_a_client_that_closes_in_the_middle_costs_nothing() {
    let (_server, _, address) = start(ServerLimits::default());
    let bytes = Frame::typed(MessageType::Connection, request("me@mlx5_0").encode()).encode();
    for cut in [0, 1, 7, 8, 9, 20, bytes.len()] {
        let mut stream = connect(&address).await;
        stream.write_all(&bytes[..cut]).await.expect("sent");
        drop(stream);
    }
    assert_serves(&address).await;
}

#[tokio::test]
async fn h20_lengths_that_cannot_be_are_refused_at_once() {
    let (_server, _, address) = start(ServerLimits::default());
    for length in [0, (1 << 20) + 1, 4 << 30, 1 << 63, u64::MAX] {
        let mut stream = connect(&address).await;
        stream
            .write_all(&u64::to_le_bytes(length))
            .await
            .expect("sent");
        let begun = Instant::now();
        assert!(until_closed(stream).await.is_empty(), "{length}");
        // Long before the time limit of a request.
        assert!(begun.elapsed() < Duration::from_secs(3), "{length}");
    }
    for text in [
        "GET / HTTP/1.1\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}",
    ] {
        let mut stream = connect(&address).await;
        stream.write_all(text.as_bytes()).await.expect("sent");
        assert!(until_closed(stream).await.is_empty(), "{text:?}");
    }
    assert_serves(&address).await;
}

#[tokio::test]
async fn h20_three_hundred_queue_pairs_are_refused_with_the_members_name() {
    let (_server, _, address) = start(ServerLimits::default());
    let client = RpcClient::default();
    let mut message = request("me@mlx5_0");
    message.offer.qp_nums = (0..300).collect();
    match client.connection(&address, &message).await {
        Err(RpcError::Refused { reason, .. }) => assert!(reason.contains("qp_num"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_serves(&address).await;
}

#[tokio::test]
async fn h20_texts_that_are_no_message_are_answered_and_forgotten() {
    let (_server, handler, address) = start(ServerLimits::default());
    let deep = "[".repeat(100_000);
    for kind in [MessageType::Connection, MessageType::Notify] {
        for text in ["", "null", "[]", "7", "{", "\"x\"", "\u{0}", deep.as_str()] {
            let mut stream = connect(&address).await;
            let frame = Frame::typed(kind, text.as_bytes());
            stream.write_all(&frame.encode()).await.expect("sent");
            stream.shutdown().await.expect("shut down");
            let reply = until_closed(stream).await;
            assert_eq!(
                reply[8], kind as u8,
                "the reply repeats the type: {text:.20}"
            );
        }
    }
    assert!(handler.notified().is_empty());
    assert_serves(&address).await;
}

#[tokio::test]
async fn a_reply_that_nobody_takes_is_given_up() {
    let (_server, _, address) = start(impatient());
    // More than socket buffers hold, echoed to a client that never reads.
    let text = vec![b' '; (1 << 20) - 1];
    let mut deaf = connect(&address).await;
    let frame = Frame::typed(MessageType::Metadata, text).encode();
    deaf.write_all(&frame).await.expect("sent");
    sleep(Duration::from_millis(800)).await;
    assert_serves(&address).await;
    let _ = until_closed(deaf).await;
}

#[tokio::test]
async fn h16_a_peer_that_starts_late_is_reached_then() {
    let (server, _, address) = start(ServerLimits::default());
    let port = server.port();
    server.stop(Duration::ZERO).await;
    let client = RpcClient::default();
    let early = client.probe(&address).await.expect_err("nobody is there");
    assert!(matches!(early, RpcError::Connect { .. }), "{early}");
    assert!(early.is_retryable());
    let handler = std::sync::Arc::new(super::tests::Echo::default());
    let loopback = Some(std::net::Ipv4Addr::LOCALHOST.into());
    let _server = RpcServer::start(
        loopback,
        port..=port,
        ServerLimits::default(),
        handler,
        &tokio::runtime::Handle::current(),
    )
    .expect("a fixed port can be listened on again at once");
    assert_serves(&address).await;
}

#[tokio::test]
async fn stopping_lets_requests_under_way_finish() {
    let (server, _, address) = start(ServerLimits::default());
    let bytes = Frame::typed(MessageType::Probe, *b"{}\n").encode();
    let mut half = connect(&address).await;
    half.write_all(&bytes[..5]).await.expect("sent");
    // The probe comes after the half request, so that this one has been accepted, too.
    assert_serves(&address).await;
    let stopping = tokio::spawn(server.stop(SOON));
    while TcpStream::connect((&*address.host, address.port_or(0)))
        .await
        .is_ok()
    {
        sleep(Duration::from_millis(5)).await;
    }
    half.write_all(&bytes[5..]).await.expect("sent");
    assert!(!until_closed(half).await.is_empty());
    timeout(SOON, stopping)
        .await
        .expect("it stops when the last request is done")
        .expect("no panic");
}

#[tokio::test]
async fn h01_ipv6_literals_are_listened_on_and_reached() {
    let handler = std::sync::Arc::new(super::tests::Echo::default());
    let server = RpcServer::start(
        None,
        0..=0,
        ServerLimits::default(),
        handler,
        &tokio::runtime::Handle::current(),
    )
    .expect("a port is free");
    // Any address means those of both families, as far as the machine has them.
    let mut hosts = vec!["127.0.0.1".to_owned()];
    if std::net::TcpListener::bind("[::1]:0").is_ok() {
        hosts.push("[::1]".to_owned());
    }
    for host in hosts {
        let address = HostPort::parse(&format!("{host}:{}", server.port())).expect("well-formed");
        assert_serves(&address).await;
    }
}

#[test]
fn u10_limits_are_read_strictly() {
    let with = |name: &'static str, value: &'static str| {
        let lookup = move |variable: &str| (variable == name).then(|| value.to_owned());
        let settings = Settings::new(&lookup);
        ClientLimits::from_settings(&settings)
            .and_then(|client| Ok((client, ServerLimits::from_settings(&settings)?)))
    };
    let (client, server) = with("MC_HANDSHAKE_MAX_LENGTH", "2097152").expect("valid");
    assert_eq!(
        (client.reply_bytes_max, server.request_bytes_max),
        (2 << 20, 2 << 20)
    );
    let (client, _) = with("RERAIL_HANDSHAKE_CONNECT_TIMEOUT", "7").expect("valid");
    assert_eq!(client.connect, Duration::from_secs(7));
    for (name, value) in [
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", "3600"),
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", "-1"),
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", "abc"),
        ("MC_HANDSHAKE_MAX_LENGTH", "1048575"),
        ("MC_HANDSHAKE_MAX_LENGTH", "134217729"),
    ] {
        let error = with(name, value).expect_err("out of range").to_string();
        assert!(error.contains(name) && error.contains(value), "{error}");
    }
}

#[tokio::test]
async fn h20_hostile_subscribers_are_let_go_and_hold_up_nobody() {
    let (_server, handler, address) = start(impatient());
    let subscribe = Frame::typed(
        MessageType::Subscribe,
        super::subscription::request(rerail_metadata::descriptor::InstanceId([1; 16])),
    )
    .encode();
    // As the first frame: no request at all, or one without an instance.
    for first in [
        Frame::typed(MessageType::Push, *b"{}"),
        Frame::typed(MessageType::Acknowledge, *b"{}"),
        Frame::typed(MessageType::Heartbeat, *b"{}"),
        Frame::typed(MessageType::Subscribe, *b"{}"),
        Frame::typed(MessageType::Subscribe, *b"null"),
        Frame::typed(MessageType::Subscribe, vec![b'['; 100_000]),
    ] {
        let mut stream = connect(&address).await;
        stream.write_all(&first.encode()).await.expect("sent");
        assert!(until_closed(stream).await.is_empty(), "{:?}", first.kind);
    }
    // After it: nothing but acknowledgements, none of them long.
    let zeros = "0".repeat(32);
    for second in [
        Frame::typed(MessageType::Acknowledge, *b"{}").encode(),
        Frame::typed(MessageType::Acknowledge, *b"nonsense").encode(),
        Frame::typed(
            MessageType::Acknowledge,
            format!(r#"{{"generation":-1,"instance":"{zeros}"}}"#),
        )
        .encode(),
        Frame::typed(MessageType::Heartbeat, *b"{}").encode(),
        Frame::typed(MessageType::Connection, *b"{}").encode(),
        subscribe.clone(),
        u64::MAX.to_le_bytes().to_vec(),
        8_192_u64.to_le_bytes().to_vec(),
        vec![0; 8],
    ] {
        let mut stream = connect(&address).await;
        stream.write_all(&subscribe).await.expect("sent");
        stream.write_all(&second).await.expect("sent");
        let told = until_closed(stream).await;
        assert!(!told.is_empty(), "it was told before");
    }
    handler.until_subscriptions(0).await;
    // One that closes in the middle of a frame.
    let mut stream = connect(&address).await;
    stream.write_all(&subscribe).await.expect("sent");
    stream.write_all(&[9, 0, 0]).await.expect("sent");
    handler.until_subscriptions(1).await;
    drop(stream);
    handler.until_subscriptions(0).await;
    assert_serves(&address).await;
}

#[tokio::test]
async fn a_subscriber_that_takes_nothing_is_given_up() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port is free");
    let port = listener.local_addr().expect("bound").port();
    let frozen = TcpStream::connect(("127.0.0.1", port))
        .await
        .expect("it listens");
    let (stream, peer) = listener.accept().await.expect("accepted");
    let reader = rerail_metadata::descriptor::InstanceId([1; 16]);
    let (_taken, mut teller) = Subscriber::new(stream, peer, reader).split();
    let record = vec![b' '; 16 << 20];
    let told = timeout(Duration::from_secs(60), async {
        loop {
            if let Err(error) = teller.record(&record).await {
                return error;
            }
        }
    });
    let error = told.await.expect("it does not wait for ever");
    let given_up = matches!(error, super::subscription::SubscriptionError::Stuck)
        // The kernel may be first.
        || matches!(error, super::subscription::SubscriptionError::Io(_));
    assert!(given_up, "{error}");
    drop(frozen);
}

#[tokio::test]
async fn a_reader_gives_up_an_owner_that_talks_nonsense() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port is free");
    let port = listener.local_addr().expect("bound").port();
    let limits = ClientLimits {
        reply_bytes_max: 100_000,
        ..ClientLimits::default()
    };
    let client = RpcClient::new(limits);
    for told in [
        Frame::typed(MessageType::Acknowledge, *b"{}").encode(),
        Frame::typed(MessageType::Heartbeat, *b"{}").encode(),
        Frame::typed(MessageType::Connection, *b"{}").encode(),
        100_001_u64.to_le_bytes().to_vec(),
        b"HTTP/1.1 400 Bad Request\r\n".to_vec(),
        Vec::new(),
    ] {
        let answer = async {
            let (mut stream, _) = listener.accept().await.expect("accepted");
            stream.write_all(&told).await.expect("sent");
        };
        let server = super::tests::at(port);
        let reader = rerail_metadata::descriptor::InstanceId([1; 16]);
        let (subscription, ()) = tokio::join!(client.subscribe(&server, reader), answer);
        let mut subscription = subscription.expect("connected");
        let next = timeout(SOON, subscription.next()).await;
        assert!(next.expect("in time").is_err(), "{told:?}");
    }
}
