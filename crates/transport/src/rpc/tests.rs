//! Client and server against each other, and the server against hostile clients.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;

use super::client::ClientLimits;
use super::frame::{Frame, FrameKind, MessageType};
use super::server::Reply;
use super::*;
use crate::rdma::endpoint::Offer;

#[derive(Default)]
pub(super) struct Echo {
    notified: Mutex<Vec<Notify>>,
}

impl Echo {
    pub(super) fn notified(&self) -> Vec<Notify> {
        self.notified.lock().expect("whole").clone()
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
