//! Clients that mean ill, or are broken, and Rerail's HTTP server: it stays up, bounded and right
//! for the others.

#![cfg(all(feature = "http", feature = "server"))]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::served::{Server, plain_client};
use rerail_metadata::server::ServerOptions;
use rerail_metadata::{
    Change, Follow, HttpStore, MetadataError, MetadataStore, Secret, StoreOptions,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

/// Longest time for anything here. The machine may be busy.
const LIMIT: Duration = Duration::from_secs(60);

async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LIMIT, work).await {
        Ok(done) => done,
        Err(_) => panic!("{what} takes longer than {LIMIT:?}"),
    }
}

/// Tries until it works; an error that is none of an outage is a fault of the server.
async fn until_up<T, F: Future<Output = Result<T, MetadataError>>>(what: impl Fn() -> F) -> T {
    let trying = async {
        loop {
            match what().await {
                Ok(done) => return done,
                Err(error) => assert!(error.is_retryable(), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    within("the server's recovery", trying).await
}

/// Sends `text` and returns what the server says until it closes the connection.
async fn until_closed(address: SocketAddr, text: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connects");
    // It may close before it has read everything.
    let _ = stream.write_all(text.as_bytes()).await;
    let mut said = Vec::new();
    let mut buffer = [0; 4 << 10];
    let reading = async {
        // A reset is an end, too.
        while let Ok(count @ 1..) = stream.read(&mut buffer).await {
            said.extend_from_slice(&buffer[..count]);
        }
    };
    within("the end of the connection", reading).await;
    String::from_utf8_lossy(&said).into_owned()
}

/// The status of the answer to one request in its own connection.
async fn status(address: SocketAddr, request: &str) -> u16 {
    let said = until_closed(address, request).await;
    let status = said.split(' ').nth(1).and_then(|word| word.parse().ok());
    status.unwrap_or_else(|| panic!("no answer to {:.100}: {said}", request))
}

async fn metric(server: &Server, name: &str) -> u64 {
    let url = format!("http://{}/metrics", server.address);
    let answer = plain_client().get(url).send().await.expect("an answer");
    let text = answer.text().await.expect("text");
    let start = format!("rerail_metadata_{name} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&start));
    line.and_then(|number| number.parse().ok()).expect(name)
}

#[tokio::test]
async fn slow_and_silent_clients_are_closed_and_hold_no_place() {
    let mut options = ServerOptions::default();
    options.limits.connections_max = 3;
    options.limits.requests_max = 2;
    options.limits.idle_max = Duration::from_millis(500);
    options.limits.request_time_max = Duration::from_millis(500);
    let server = Server::start(options, None).await;
    // More of them than there are places: each of them gets its turn, and ours does.
    let put = "PUT /metadata?key=k HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nbegun";
    let heads = [
        "",
        "GET /metadata?key=k HTT",
        put,
        "GET /health HTTP/1.1\r\n",
        put,
        "",
    ];
    let closed = heads.map(|head| tokio::spawn(until_closed(server.address, head)));
    let store = server.client();
    let mut attempts = 0;
    while let Err(error) = store.put("k", Bytes::from_static(b"1"), None).await {
        assert!(error.is_retryable() && attempts < 20, "{error}");
        attempts += 1;
    }
    for (head, said) in heads.iter().zip(closed) {
        let said = said.await.expect("no panic");
        if *head == put {
            assert!(said.starts_with("HTTP/1.1 408"), "{said}");
        }
    }
    // What was begun is not there in part.
    assert_eq!(store.get("k").await.expect("get").value, "1");
}

#[tokio::test]
async fn bodies_that_are_too_long_or_not_whole_change_nothing() {
    let mut options = ServerOptions::default();
    options.limits.value_bytes_max = 100_000;
    let server = Server::start(options, None).await;
    let put = |headers: &str, body: &str| {
        let head = "PUT /metadata?key=k HTTP/1.1\r\nhost: h\r\nconnection: close\r\n";
        format!("{head}{headers}\r\n\r\n{body}")
    };
    // Refused by what it says, before any of it comes.
    let announced = put("content-length: 10000000000", "");
    assert_eq!(status(server.address, &announced).await, 413);
    let chunks = format!("c350\r\n{}\r\n", "x".repeat(50_000)).repeat(3);
    let unannounced = put("transfer-encoding: chunked", &format!("{chunks}0\r\n\r\n"));
    assert_eq!(status(server.address, &unannounced).await, 413);
    for nonsense in [
        put("content-length: -1", "x"),
        put("content-length: 1\r\ncontent-length: 2", "xx"),
        put("content-length: 99999999999999999999999", "x"),
        put("transfer-encoding: chunked", "not a length\r\n"),
        put("transfer-encoding: chunked", "ffffffffffffffffff\r\nx"),
    ] {
        let said = until_closed(server.address, &nonsense).await;
        assert!(!said.starts_with("HTTP/1.1 200"), "{nonsense}: {said}");
    }
    // Half a request, and the client is gone.
    for half in [
        put("content-length: 9", "begun"),
        put("transfer-encoding: chunked", "9\r\nbegun"),
        "PUT /metadata?key=k HTTP/1.1\r\nhos".to_owned(),
        "\0\u{1}\u{2}GET".to_owned(),
    ] {
        let mut stream = TcpStream::connect(server.address).await.expect("connects");
        stream.write_all(half.as_bytes()).await.expect("sent");
        stream.shutdown().await.expect("shut down");
        let mut said = Vec::new();
        let _ = within("the end", stream.read_to_end(&mut said)).await;
    }
    let error = server.client().get("k").await.expect_err("nothing stored");
    assert!(error.is_not_found(), "{error}");
    assert_eq!(metric(&server, "records").await, 0);
}

#[tokio::test]
async fn long_bodies_together_wait_for_room_and_short_ones_do_not() {
    let mut options = ServerOptions::default();
    options.limits.value_bytes_max = 1 << 20;
    options.limits.incoming_bytes_max = 1 << 20;
    options.limits.request_time_max = Duration::from_secs(10);
    let server = Server::start(options, None).await;
    // Each may take all the room there is and sends nothing of it.
    let slow = "PUT /metadata?key=slow HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n";
    let long = format!(
        "{}content-length: 1000000\r\n\r\n",
        &slow[..slow.len() - 30]
    );
    assert!(long.contains("host: h\r\ncontent-length"), "{long}");
    let slow_ones: Vec<_> = [slow, &long, slow]
        .map(|head| {
            let head = head.to_owned();
            let address = server.address;
            tokio::spawn(async move { until_closed(address, &head).await })
        })
        .into();
    let store = server.client();
    // All of them are in work once the requests are.
    for number in 0..20 {
        let value = Bytes::from(number.to_string());
        store.put("short", value, None).await.expect("not held up");
    }
    let long: Bytes = vec![b'x'; 500_000].into();
    until_up(|| store.put("long", long.clone(), None)).await;
    assert_eq!(store.get("long").await.expect("stored").value, long);
    for slow in slow_ones {
        let said = slow.await.expect("no panic");
        assert!(said.starts_with("HTTP/1.1 408"), "{said}");
    }
}

#[tokio::test]
async fn who_sends_a_long_value_a_few_bytes_a_second_holds_no_room() {
    let mut options = ServerOptions::default();
    options.limits.value_bytes_max = 1 << 20;
    options.limits.incoming_bytes_max = 1 << 20;
    // Longer than anything here may take.
    options.limits.request_time_max = 2 * LIMIT;
    let server = Server::start(options, None).await;
    // Without a length, beyond what is received without room; and with one.
    let put = "PUT /metadata?key=slow HTTP/1.1\r\nhost: h\r\n";
    let begun = "x".repeat(70_000);
    let chunked = format!("{put}transfer-encoding: chunked\r\n\r\n11170\r\n{begun}\r\n");
    let announced = format!("{put}content-length: 1000000\r\n\r\n");
    for (head, piece) in [(chunked, "1\r\nx\r\n"), (announced, "x")] {
        let mut stream = TcpStream::connect(server.address).await.expect("connects");
        stream.write_all(head.as_bytes()).await.expect("sent");
        let holds = async {
            while metric(&server, "receiving_bytes").await < 900_000 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        within("the room's end", holds).await;
        let (mut reading, mut writing) = stream.into_split();
        let dripping = tokio::spawn(async move {
            while writing.write_all(piece.as_bytes()).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(250)).await;
            }
        });
        let mut client = StoreOptions::default();
        client.deadline = LIMIT;
        let store = HttpStore::new(&server.url(), None, &client).expect("a client");
        let long: Bytes = vec![b'x'; 900_000].into();
        within("room", until_up(|| store.put("long", long.clone(), None))).await;
        let mut said = Vec::new();
        let _ = within("its end", reading.read_to_end(&mut said)).await;
        dripping.abort();
        let said = String::from_utf8_lossy(&said);
        assert!(said.starts_with("HTTP/1.1 408"), "{said}");
    }
}

#[tokio::test]
async fn who_does_not_take_his_list_is_cut_off_and_others_get_theirs() {
    const RECORDS: usize = 64;
    let mut options = ServerOptions::default();
    options.limits.lists_max = 1;
    options.limits.idle_max = Duration::from_secs(1);
    options.limits.request_time_max = Duration::from_secs(2);
    let server = Server::start(options, None).await;
    let mut client = StoreOptions::default();
    client.deadline = LIMIT;
    let store = HttpStore::new(&server.url(), None, &client).expect("a client");
    let value: Bytes = vec![b'x'; 1 << 20].into();
    for number in 0..RECORDS {
        let key = format!("p/{number:03}");
        store.put(&key, value.clone(), None).await.expect("put");
    }
    // One reads nothing at all, and one a little at a time, for ever.
    let get = "GET /metadata?prefix=p/ HTTP/1.1\r\nhost: h\r\n\r\n";
    let mut silent = TcpStream::connect(server.address).await.expect("connects");
    silent.write_all(get.as_bytes()).await.expect("sent");
    let mut dripping = TcpStream::connect(server.address).await.expect("connects");
    dripping.write_all(get.as_bytes()).await.expect("sent");
    let dripped = tokio::spawn(async move {
        let (mut bytes, mut buffer) = (0, vec![0; 8 << 10]);
        while let Ok(count @ 1..) = dripping.read(&mut buffer).await {
            bytes += count;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        bytes
    });
    let records = until_up(|| store.list("p/")).await;
    assert_eq!(records.len(), RECORDS);
    assert!(records.iter().all(|record| record.value == value));
    let dripped = within("the slow reader's end", dripped).await;
    assert!(dripped.expect("no panic") < RECORDS << 20, "it was not cut");
    drop(silent);
}

/// Asks, and then takes 4 kB a second for as long as the connection lives: of a small buffer, so
/// that the kernel tells of each bit, and the server's kernel sees a client that lives. Returns
/// once the answer has begun.
async fn drip(address: SocketAddr, target: &str) -> tokio::task::JoinHandle<()> {
    let socket = TcpSocket::new_v4().expect("a socket");
    // The kernel's least.
    socket.set_recv_buffer_size(1).expect("set");
    let mut stream = socket.connect(address).await.expect("connects");
    let get = format!("GET {target} HTTP/1.1\r\nhost: h\r\n\r\n");
    stream.write_all(get.as_bytes()).await.expect("sent");
    let mut buffer = [0; 400];
    let first = within("the answer's beginning", stream.read(&mut buffer)).await;
    assert!(first.expect("an answer") > 0);
    tokio::spawn(async move {
        while let Ok(1..) = stream.read(&mut buffer).await {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
}

#[tokio::test]
async fn who_takes_a_little_at_a_time_holds_no_place_of_a_list() {
    let mut options = ServerOptions::default();
    options.limits.lists_max = 1;
    options.limits.request_time_max = Duration::from_secs(2);
    let server = Server::start(options, None).await;
    let store = server.client();
    let value: Bytes = vec![b'x'; 1 << 20].into();
    // More than the kernel takes in ahead.
    for number in 0..32 {
        let key = format!("p/{number}");
        until_up(|| store.put(&key, value.clone(), None)).await;
    }
    until_up(|| store.put("q", Bytes::new(), None)).await;
    let dripping = drip(server.address, "/metadata?prefix=p/").await;
    assert_eq!(until_up(|| store.list("q")).await.len(), 1);
    dripping.abort();
}

#[tokio::test]
async fn who_takes_a_little_at_a_time_holds_no_connection() {
    let mut options = ServerOptions::default();
    options.limits.connections_max = 1;
    options.limits.idle_max = Duration::from_secs(20);
    options.limits.request_time_max = Duration::from_secs(4);
    let server = Server::start(options, None).await;
    let store = server.client();
    let (length, value) = (16 << 20, "x".repeat(16 << 20));
    let put = format!(
        "PUT /metadata?key=long HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\
         content-length: {length}\r\n\r\n{value}"
    );
    let stored = async { while status(server.address, &put).await != 200 {} };
    within("the long value", stored).await;
    let dripping = drip(server.address, "/metadata?key=long").await;
    until_up(|| store.put("short", Bytes::new(), None)).await;
    dripping.abort();
}

#[tokio::test]
async fn an_answer_to_a_watch_is_bounded_and_the_rest_comes_with_the_next() {
    let mut options = ServerOptions::default();
    options.limits.answer_events_max = 3;
    options.limits.answer_event_bytes_max = 1_000;
    let server = Server::start(options, None).await;
    let store = server.client();
    let http = plain_client();
    let watch = format!("http://{}/metadata/watch?prefix=p/", server.address);
    let ask = async |after: Option<u64>| -> serde_json::Value {
        let url = after.map_or_else(|| watch.clone(), |after| format!("{watch}&after={after}"));
        let answer = http.get(url).send().await.expect("an answer");
        answer.json().await.expect("JSON")
    };
    let mut after = ask(None).await["revision"].as_u64().expect("a revision");
    let keys: Vec<String> = (0..10).map(|number| format!("p/{number}")).collect();
    for (number, key) in keys.iter().enumerate() {
        // Others' changes lie between; the last ones are long.
        store.put("q", Bytes::new(), None).await.expect("put");
        let length = if number < 7 { 1 } else { 700 };
        let value = vec![b'x'; length].into();
        store.put(key, value, None).await.expect("put");
    }
    let mut seen = Vec::new();
    let mut counts = Vec::new();
    while seen.len() < keys.len() {
        let answer = ask(Some(after)).await;
        assert_eq!(answer["resync"], false);
        after = answer["revision"].as_u64().expect("a revision");
        let events = answer["events"].as_array().expect("events");
        let key = |event: &serde_json::Value| event["key"].as_str().expect("a key").to_owned();
        seen.extend(events.iter().map(key));
        counts.push(events.len());
    }
    assert_eq!(seen, keys);
    assert_eq!(counts, [3, 3, 2, 1, 1]);
}

#[tokio::test]
async fn a_thousand_watchers_are_all_told_and_who_is_too_many_is_refused() {
    const WATCHERS: usize = 1_000;
    let mut options = ServerOptions::default();
    options.limits.watches_max = WATCHERS;
    let server = Server::start(options, None).await;
    let store = server.client();
    let first = plain_client()
        .get(format!("http://{}/metadata/watch", server.address))
        .send()
        .await
        .expect("an answer");
    let first: serde_json::Value = first.json().await.expect("JSON");
    let after = first["revision"].as_u64().expect("a revision");
    let request = format!(
        "GET /metadata/watch?prefix=p/&after={after}&wait_ms=60000 HTTP/1.1\r\nhost: h\r\n\
         connection: close\r\n\r\n"
    );
    let watchers: Vec<_> = (0..WATCHERS)
        .map(|_| {
            let (address, request) = (server.address, request.clone());
            tokio::spawn(async move { until_closed(address, &request).await })
        })
        .collect();
    let all_wait = async {
        while metric(&server, "watches_waiting").await < WATCHERS as u64 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within("a thousand watches", all_wait).await;
    assert_eq!(status(server.address, &request).await, 503);
    // Others are served while they wait.
    store.put("q", Bytes::new(), None).await.expect("put");
    let value = Bytes::from_static(b"told");
    store.put("p/k", value, None).await.expect("put");
    for watcher in watchers {
        let said = within("news", watcher).await.expect("no panic");
        assert!(said.contains("\"told\""), "{said}");
    }
    assert_eq!(metric(&server, "watches_waiting").await, 0);
}

#[tokio::test]
async fn strange_keys_are_kept_apart_or_refused_by_name() {
    let server = Server::start(ServerOptions::default(), None).await;
    let store = server.client();
    let long = "k".repeat(4 << 10);
    let keys = [
        "mooncake/ram/a",
        "mooncake/ram//a",
        "mooncake/ram/a/",
        "mooncake%2Fram%2Fa",
        "mooncake/ram/../ram/a",
        "a\0b",
        "line\nbreak\r\nx: y",
        " ",
        "+",
        "a b",
        "a+b",
        "&key=b",
        "#",
        "?",
        "ключ/キー/🗝",
        "e\u{301}",
        "é",
        "\u{feff}",
        "\u{202e}",
        &long,
    ];
    for key in keys {
        let value = Bytes::copy_from_slice(key.as_bytes());
        store.put(key, value, None).await.expect(key);
    }
    let mut expected = keys.map(str::to_owned);
    expected.sort_unstable();
    let listed = store.list("").await.expect("listed");
    let listed: Vec<String> = listed.into_iter().map(|record| record.key).collect();
    assert_eq!(listed, expected);
    for key in keys {
        assert_eq!(store.get(key).await.expect(key).value, key);
        assert!(store.delete(key).await.expect(key), "{key}");
    }
    assert_eq!(metric(&server, "records").await, 0);

    let error = store.put(&(long + "k"), Bytes::new(), None).await;
    let error = error.expect_err("too long").to_string();
    assert!(error.contains("4096 bytes"), "{error}");
    let get =
        |target: &str| format!("GET {target} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n");
    for (target, expected) in [
        ("/metadata?key=", 400),
        ("/metadata", 400),
        ("/metadata?", 400),
        ("/metadata?key=%ff", 400),
        ("/metadata?key=%zz", 404),
        ("/metadata?key=%", 404),
        ("/metadata?key=a&key=b", 404),
        ("/metadata/?key=a", 404),
        ("/metadata/../etc/passwd", 404),
        ("//metadata?key=a", 404),
        ("/metadata/watch?after=-1", 400),
        ("/metadata/watch?after=99999999999999999999", 400),
        ("/metadata/watch?wait_ms=x", 400),
    ] {
        let status = status(server.address, &get(target)).await;
        assert_eq!(status, expected, "{target}");
    }
    let long = "k".repeat(5_000);
    for target in ["/metadata?prefix=", "/metadata/watch?prefix="] {
        let request = get(&format!("{target}{long}"));
        assert_eq!(status(server.address, &request).await, 400, "{target}");
    }
    // Far too long for a head: refused, or at least cut off.
    let said = until_closed(server.address, &get(&format!("/?{}", "k".repeat(1 << 20)))).await;
    assert!(!said.starts_with("HTTP/1.1 200"), "{said}");
    let many = "x: y\r\n".repeat(10_000);
    let head = format!("GET /health HTTP/1.1\r\n{many}\r\n");
    let said = until_closed(server.address, &head).await;
    assert!(!said.starts_with("HTTP/1.1 200"), "{said}");
}

#[tokio::test]
async fn only_the_token_itself_opens_a_server_that_has_one() {
    let mut options = ServerOptions::default();
    options.token = Some(Secret::new("right-token"));
    let server = Server::start(options, None).await;
    let with = |headers: &str| {
        format!("GET /metadata?key=k HTTP/1.1\r\nhost: h\r\nconnection: close\r\n{headers}\r\n\r\n")
    };
    for wrong in [
        "x: y",
        "authorization:",
        "authorization: Bearer",
        "authorization: Bearer ",
        "authorization: Bearer right-toke",
        "authorization: Bearer right-token2",
        "authorization: Bearer RIGHT-TOKEN",
        "authorization: Bearer right-token,right-token",
        "authorization: Basic right-token",
        "authorization: right-token",
        "authorization: Bearer wrong\r\nauthorization: Bearer right-token",
        "cookie: right-token",
    ] {
        assert_eq!(status(server.address, &with(wrong)).await, 401, "{wrong}");
    }
    for right in [
        "authorization: Bearer right-token",
        // The scheme's case does not matter (RFC 9110, 11.1).
        "AUTHORIZATION: bearer right-token",
    ] {
        assert_eq!(status(server.address, &with(right)).await, 404, "{right}");
    }
    let long = format!("authorization: Bearer {}", "x".repeat(8 << 10));
    assert_eq!(status(server.address, &with(&long)).await, 401);
    for target in ["/metrics", "/metadata/watch", "/metadata?prefix="] {
        let get = format!("GET {target} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n");
        assert_eq!(status(server.address, &get).await, 401, "{target}");
    }
    // A body is not received from who may not send it.
    let put = "PUT /metadata?key=k HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\
               content-length: 60000000\r\n\r\n";
    assert_eq!(status(server.address, put).await, 401);
}

#[tokio::test]
async fn a_watch_is_right_again_after_every_kind_of_ill_client() {
    let mut options = ServerOptions::default();
    options.limits.idle_max = Duration::from_secs(1);
    options.limits.request_time_max = Duration::from_secs(1);
    options.limits.connections_max = 64;
    options.limits.events_max = 8;
    let server = Server::start(options, None).await;
    let mut follow = Follow::new(Arc::new(server.client()), "p/")
        .await
        .expect("follow");
    let heads = [
        "",
        "GET / HTTP/1.1\r\n",
        "PUT /metadata?key=p/x HTTP/1.1\r\nhost: h\r\ncontent-length: 50\r\n\r\nhalf",
        "DELETE /metadata?key=p/none HTTP/1.1\r\nhost: h\r\n\r\n",
        "POST /metadata/lease?ttl_ms=100 HTTP/1.1\r\nhost: h\r\n\r\n",
    ];
    // Twice as many as there are places.
    let ill: Vec<_> = (0..128)
        .map(|index| {
            let (address, head) = (server.address, heads[index % heads.len()]);
            tokio::spawn(async move { until_closed(address, head).await })
        })
        .collect();
    let store = server.client();
    for number in 0..50 {
        let value = Bytes::from(number.to_string());
        until_up(|| store.put("p/k", value.clone(), None)).await;
    }
    let last = async {
        loop {
            match follow.next().await.expect("it lives") {
                Change::Put(record) if record.value == "49" => return,
                _ => {}
            }
        }
    };
    within("the last change", last).await;
    for client in ill {
        let _ = within("its end", client).await;
    }
    assert_eq!(follow.records().len(), 1, "{:?}", follow.records());
}
