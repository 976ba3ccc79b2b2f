//! Client and server against each other, and the server against hostile clients.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rerail_metadata::descriptor::InstanceId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;

use super::client::ClientLimits;
use super::frame::{Frame, FrameKind, MessageType};
use super::server::Reply;
use super::subscription::SubscriptionError;
use super::*;
use crate::rdma::endpoint::Offer;

/// A time within which everything happens on a host under load.
const SOON: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Echo {
    notified: Mutex<Vec<Notify>>,
    subscriptions: Arc<AtomicUsize>,
}

impl Echo {
    pub(super) fn notified(&self) -> Vec<Notify> {
        self.notified.lock().expect("whole").clone()
    }

    /// Waits until `count` subscriptions are open.
    pub(super) async fn until_subscriptions(&self, count: usize) {
        let reached = async {
            while self.subscriptions.load(Ordering::SeqCst) != count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(20), reached).await;
        waited.expect("subscriptions are opened and closed in time");
    }
}

/// What [`Echo`] tells each subscriber first.
pub(super) fn standing() -> Standing {
    Standing {
        instance: InstanceId([7; 16]),
        generation: 3,
    }
}

impl Handler for Echo {
    fn connection(&self, message: ConnectionMessage) -> Reply<ConnectionMessage> {
        let Offer {
            local_path,
            peer_path,
            qp_nums,
            ..
        } = message.offer;
        Box::pin(async move {
            if peer_path == "me@mlx5_0" {
                ConnectionMessage::offer(Offer {
                    local_path: peer_path,
                    peer_path: local_path,
                    qp_nums,
                    ..Offer::default()
                })
            } else {
                ConnectionMessage::refusal(peer_path, local_path, "no such NIC here".to_owned())
            }
        })
    }

    fn metadata(&self, descriptor: Vec<u8>) -> Reply<Option<Vec<u8>>> {
        Box::pin(async move { (descriptor != b"null").then_some(descriptor) })
    }

    fn notify(&self, notify: Notify) -> Reply<bool> {
        let taken = notify.name != "full";
        if taken && let Ok(mut notified) = self.notified.lock() {
            notified.push(notify);
        }
        Box::pin(async move { taken })
    }

    /// Tells where it stands, and then answers each acknowledgement with a record that repeats it.
    fn subscribe(&self, subscriber: Subscriber) -> Reply<()> {
        let count = Arc::clone(&self.subscriptions);
        Box::pin(async move {
            count.fetch_add(1, Ordering::SeqCst);
            let reader = subscriber.reader();
            let (mut taken, mut teller) = subscriber.split();
            let told: Result<(), SubscriptionError> = async {
                teller.heartbeat(standing()).await?;
                loop {
                    let acknowledged = taken.next().await?;
                    let text = format!("{reader} {}", acknowledged.generation);
                    teller.record(text.as_bytes()).await?;
                }
            }
            .await;
            assert!(told.is_err(), "it never ends by itself");
            count.fetch_sub(1, Ordering::SeqCst);
        })
    }
}

pub(super) fn start(limits: ServerLimits) -> (RpcServer, Arc<Echo>, HostPort) {
    let handler = Arc::new(Echo::default());
    let loopback = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let server = RpcServer::start(
        loopback,
        0..=0,
        limits,
        Arc::clone(&handler) as _,
        &Handle::current(),
    )
    .expect("a port is free");
    let address = at(server.port());
    (server, handler, address)
}

pub(super) fn at(port: u16) -> HostPort {
    HostPort {
        host: "127.0.0.1".to_owned(),
        port: Some(port),
    }
}

pub(super) fn request(peer_path: &str) -> ConnectionMessage {
    ConnectionMessage::offer(Offer {
        local_path: "you@mlx5_1".to_owned(),
        peer_path: peer_path.to_owned(),
        qp_nums: vec![7],
        ..Offer::default()
    })
}

/// That a healthy peer is served, and soon.
pub(super) async fn assert_serves(address: &HostPort) {
    let client = RpcClient::default();
    let served = tokio::time::timeout(Duration::from_secs(4), client.probe(address)).await;
    assert_eq!(served, Ok(Ok(())));
}

#[tokio::test]
async fn every_kind_of_request_is_answered() {
    let (_server, handler, address) = start(ServerLimits::default());
    let client = RpcClient::default();
    assert_serves(&address).await;
    let reply = client
        .connection(&address, &request("me@mlx5_0"))
        .await
        .expect("an offer");
    assert_eq!(reply.offer.qp_nums, [7]);
    let text = vec![b' '; 300_000];
    assert_eq!(client.metadata(&address, text.clone()).await, Ok(text));
    let notify = Notify {
        name: "a".into(),
        notify_msg: "done".into(),
    };
    assert_eq!(client.notify(&address, &notify).await, Ok(()));
    assert_eq!(handler.notified(), [notify]);
}

#[tokio::test]
async fn a_subscription_lasts_and_carries_both_ways() {
    let limits = ServerLimits {
        request: Duration::from_millis(100),
        ..ServerLimits::default()
    };
    let (_server, handler, address) = start(limits);
    let reader = InstanceId([9; 16]);
    let client = RpcClient::default();
    let mut subscription = client.subscribe(&address, reader).await.expect("connected");
    let first = subscription.next().await.expect("told");
    assert_eq!(first, Told::Current(standing()));
    // No time limit of a request ends it.
    tokio::time::sleep(Duration::from_millis(300)).await;
    for generation in [1, u64::MAX] {
        let taken = Standing {
            generation,
            ..standing()
        };
        subscription.acknowledge(taken).await.expect("sent");
        let record = subscription.next().await.expect("told");
        let text = format!("{reader} {generation}").into_bytes();
        assert_eq!(record, Told::Record(text));
    }
    drop(subscription);
    handler.until_subscriptions(0).await;
    assert_serves(&address).await;
}

#[tokio::test]
async fn subscriptions_take_no_place_of_requests_and_too_many_are_refused() {
    let limits = ServerLimits {
        connections_max: 1,
        subscriptions_max: 2,
        ..ServerLimits::default()
    };
    let (server, handler, address) = start(limits);
    let client = RpcClient::default();
    let subscribe = async || {
        let reader = InstanceId([9; 16]);
        client.subscribe(&address, reader).await.expect("connected")
    };
    let (mut first, mut second) = (subscribe().await, subscribe().await);
    for held in [&mut first, &mut second] {
        assert!(matches!(held.next().await, Ok(Told::Current(_))));
    }
    assert_serves(&address).await;
    let refused = subscribe().await.next().await;
    assert!(
        matches!(refused, Err(SubscriptionError::Refused)),
        "{refused:?}"
    );
    drop(first);
    handler.until_subscriptions(1).await;
    assert!(matches!(
        subscribe().await.next().await,
        Ok(Told::Current(_))
    ));
    // A server that stops ends them, and does not wait out its grace for them.
    let stopping = tokio::time::timeout(Duration::from_secs(20), server.stop(SOON * 100));
    stopping.await.expect("it stops");
    assert!(second.next().await.is_err());
}

#[tokio::test]
async fn h18_a_refusal_reaches_the_caller_with_its_reason() {
    let (_server, _, address) = start(ServerLimits::default());
    let client = RpcClient::default();
    let error = client
        .connection(&address, &request("me@mlx5_9"))
        .await
        .expect_err("refused");
    assert_eq!(
        error.to_string(),
        format!("{address} refused: no such NIC here")
    );
    let full = Notify {
        name: "full".into(),
        notify_msg: "x".into(),
    };
    assert!(matches!(
        client.notify(&address, &full).await,
        Err(RpcError::Refused { .. })
    ));
    let none = client.metadata(&address, b"null".to_vec()).await;
    assert!(matches!(none, Err(RpcError::Refused { .. })));
}

#[tokio::test]
async fn an_old_request_gets_an_old_reply() {
    let (_server, _, address) = start(ServerLimits::default());
    let mut stream = TcpStream::connect((&*address.host, address.port_or(0)))
        .await
        .expect("connected");
    let frame = Frame {
        kind: FrameKind::Old,
        text: request("me@mlx5_0").encode(),
    };
    stream.write_all(&frame.encode()).await.expect("sent");
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).await.expect("a reply");
    assert_eq!(reply[8], b'{');
    assert!(ConnectionMessage::decode(&reply[8..]).is_ok());
}

#[tokio::test]
async fn h20_hostile_clients_cost_the_others_nothing() {
    let limits = ServerLimits {
        request: Duration::from_millis(400),
        ..ServerLimits::default()
    };
    let (_server, _, address) = start(limits);
    let connect = || TcpStream::connect((address.host.clone(), address.port_or(0)));
    let mut held = Vec::new();
    for _ in 0..200 {
        held.push(connect().await.expect("connected"));
    }
    for bytes in [
        vec![0; 8],
        (1_u64 << 63).to_le_bytes().to_vec(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        Frame::typed(MessageType::Connection, *b"{\"qp_num\":7}").encode(),
        Frame::typed(MessageType::Connection, *b"not json").encode(),
        Frame::typed(MessageType::Notify, *b"[]").encode(),
        // Half a frame, and then nothing.
        Frame::typed(MessageType::Probe, vec![b' '; 1000]).encode()[..500].to_vec(),
    ] {
        let mut stream = connect().await.expect("connected");
        // The server may have closed already.
        let _ = stream.write_all(&bytes).await;
        held.push(stream);
    }
    assert_serves(&address).await;
    // All of them are let go of.
    for mut stream in held {
        let mut rest = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut rest));
        assert!(ended.await.is_ok(), "a silent connection was kept");
    }
    assert_serves(&address).await;
}

#[tokio::test]
async fn a_bad_message_is_refused_with_the_members_name() {
    let (_server, _, address) = start(ServerLimits::default());
    let client = RpcClient::default();
    let text = client
        .exchange(
            &address,
            MessageType::Connection,
            b"{\"qp_num\":7}".to_vec(),
        )
        .await
        .expect("an answer");
    let reply = ConnectionMessage::decode(&text).expect("readable");
    assert!(reply.reply_msg.contains("qp_num"), "{}", reply.reply_msg);
}

/// A server that reads nothing and answers with `bytes`, or never if there are none.
async fn broken_server(bytes: Option<Vec<u8>>) -> HostPort {
    let listener = TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port is free");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            if let Some(bytes) = &bytes {
                let _ = stream.write_all(bytes).await;
                let _ = stream.shutdown().await;
            }
            held.push(stream);
        }
    });
    at(port)
}

#[tokio::test]
async fn a_client_names_what_a_broken_server_did() {
    let limits = ClientLimits {
        exchange: Duration::from_millis(300),
        ..ClientLimits::default()
    };
    let client = RpcClient::new(limits);
    let ask = async |address: HostPort| {
        client
            .connection(&address, &request("me@mlx5_0"))
            .await
            .expect_err("broken")
    };
    let silent = ask(broken_server(None).await).await;
    assert!(matches!(silent, RpcError::Timeout { .. }), "{silent}");
    let closing = ask(broken_server(Some(Vec::new())).await).await;
    assert!(matches!(closing, RpcError::Closed { .. }), "{closing}");
    let huge = ask(broken_server(Some((1_u64 << 63).to_le_bytes().to_vec())).await).await;
    assert!(matches!(huge, RpcError::Frame { .. }), "{huge}");
    let null = Frame::typed(MessageType::Connection, *b"null\n").encode();
    let null = ask(broken_server(Some(null)).await).await;
    assert!(matches!(null, RpcError::Refused { .. }), "{null}");
    assert!(null.is_retryable());
    let wrong = Frame::typed(MessageType::Connection, *b"{\"qp_num\":\"x\"}").encode();
    let wrong = ask(broken_server(Some(wrong)).await).await;
    assert!(matches!(wrong, RpcError::Malformed { .. }), "{wrong}");
    let other = Frame::typed(MessageType::Probe, *b"{}\n").encode();
    let other = ask(broken_server(Some(other)).await).await;
    assert!(matches!(other, RpcError::WrongType { .. }), "{other}");
    let nobody = ask(at(1)).await;
    assert!(matches!(nobody, RpcError::Connect { .. }), "{nobody}");
    assert!(nobody.is_retryable());
}
