//! Bad input gets a clear error, nothing is lost or left half-open, and the engine serves a
//! healthy peer afterwards: each test ends with one.
#![cfg(feature = "sim")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::time::Duration;

use common::{Rig, registered};
use rerail_engine::{Engine, EngineError, MemoryOptions, Request, Result};
use rerail_metadata::descriptor::{Buffer, Device, JsonForm, Protocol, SegmentDescriptor};
use rerail_verbs::HostMemory;
use rerail_verbs::sim::NicOptions;

const LIMIT: Duration = Duration::from_secs(60);

/// Two hosts with two NICs each, in one subnet, each NIC changed by its name.
fn rig(seed: u64, change: impl Fn(&str, &mut NicOptions)) -> Rig {
    Rig::with(seed, 2, |host, rail| {
        let (name, address) = (format!("sim{rail}"), IpAddr::from([10, 0, host, rail + 1]));
        let mut options = NicOptions::ethernet(&name, address);
        change(&name, &mut options);
        options
    })
}

fn try_engine(rig: &Rig, host: usize, devices: &[&str]) -> Result<Engine> {
    let devices = devices.iter().map(|&device| device.to_owned()).collect();
    let started = rig.try_start(host, "any", &[], |config| config.devices = devices);
    started.map(|running| running.engine)
}

fn engine(rig: &Rig, host: usize) -> Engine {
    try_engine(rig, host, &[]).expect("an engine starts")
}

/// Bytes go from the engine to a new healthy peer and back.
fn assert_serves(rig: &Rig, own: &Engine) {
    there_and_back(own, &engine(rig, 1));
}

fn there_and_back(own: &Engine, peer: &Engine) {
    const LENGTH: usize = 100_001;
    let (source, target) = (
        registered(own, 2 * LENGTH as u64),
        registered(peer, LENGTH as u64),
    );
    let pattern: Vec<u8> = (0..LENGTH).map(|at| (at * 7 + at / 251) as u8).collect();
    source.copy_in(0, &pattern).expect("inside");
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    let length = LENGTH as u64;
    for request in [
        Request::write(&segment, source.addr(), target.addr(), length),
        Request::read(&segment, source.addr() + length, target.addr(), length),
    ] {
        let batch = own.allocate_batch(1);
        batch.submit(&[request]).expect("submitted");
        batch.wait(LIMIT).expect("moved");
    }
    let mut back = vec![0; LENGTH];
    source.copy_out(LENGTH, &mut back).expect("inside");
    assert!(back == pattern, "other bytes came back");
    own.unregister(source.addr()).expect("nothing uses it");
    peer.unregister(target.addr()).expect("nothing uses it");
}

/// Asserts that an error's text names all of `parts`.
fn assert_names(error: &EngineError, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn an_unknown_device_is_named_with_those_that_there_are() {
    let rig = rig(1, |_, _| {});
    for wish in ["sim0:0", "sim0:x", ""] {
        let error = try_engine(&rig, 0, &["sim1", wish]).err().expect(wish);
        assert_names(&error, &[wish, "sim0", "sim1"]);
    }
    // Beside one that works it may come later.
    for wish in ["mlx5_0", "mlx5_0:1"] {
        let error = try_engine(&rig, 0, &[wish]).err().expect(wish);
        assert_names(&error, &[wish, "sim0", "sim1"]);
        let beside = try_engine(&rig, 0, &["sim1", wish]).expect("sim1 works");
        assert_serves(&rig, &beside);
    }
    // What was opened before the bad name was met is closed again.
    assert_serves(&rig, &engine(&rig, 0));
}

#[test]
fn a_port_that_is_down_is_refused_by_name_and_left_out_otherwise() {
    let rig = rig(2, |_, _| {});
    let port = rig.port(0, 0);
    rig.fabric.port_down(port);
    let error = try_engine(&rig, 0, &["sim0"]).err().expect("it is down");
    assert_names(&error, &["sim0", "DOWN"]);
    assert_serves(&rig, &engine(&rig, 0));
    rig.fabric.port_up(port);
    assert_serves(
        &rig,
        &try_engine(&rig, 0, &["sim0"]).expect("it is up again"),
    );
}

#[test]
fn addresses_that_are_not_registered_are_refused_before_anything_is_posted() {
    let rig = rig(3, |_, _| {});
    let (own, peer) = (engine(&rig, 0), engine(&rig, 1));
    // One request may not span two registrations, whether they touch or not.
    let (source, other) = (registered(&own, 8192), registered(&own, 8192));
    let (low, high) = if source.addr() < other.addr() {
        (source.addr(), other.addr())
    } else {
        (other.addr(), source.addr())
    };
    let target = registered(&peer, 8192);
    let segment = own.open_segment(peer.name()).expect("the peer is there");
    let batch = own.allocate_batch(4);
    let end = source.addr() + 8192;
    for (local, remote, length) in [
        (end - 1, target.addr(), 2),
        (low + 8000, target.addr(), high - low),
        (source.addr(), target.addr() + 8191, 2),
        (source.addr(), target.addr() - 1, 1),
        (0, target.addr(), 1),
        (source.addr(), u64::MAX, 1),
    ] {
        let request = Request::write(&segment, local, remote, length);
        let error = batch.submit(&[request]).expect_err("not registered");
        assert_names(&error, &[&format!("{length} bytes at")]);
    }
    assert!(batch.is_empty());
    there_and_back(&own, &peer);
}

#[test]
fn regions_that_overlap_are_refused_and_the_first_stays() {
    let rig = rig(4, |_, _| {});
    let own = engine(&rig, 0);
    let (memory, another) = (registered(&own, 12_288), HostMemory::allocate(4096));
    let another = another.expect("memory");
    // The same bytes for another purpose: what is registered already is neither counted nor lost.
    let elsewhere = MemoryOptions {
        location: "cpu:1".into(),
        ..MemoryOptions::default()
    };
    let error = own
        .register(&memory, elsewhere.clone())
        .expect_err("it overlaps");
    assert_names(&error, &["overlap", "12288 bytes at"]);
    // All or nothing, whichever of them it is; also with each other.
    for pair in [[&another, &memory], [&another, &another]] {
        let pair = pair.map(Clone::clone);
        own.register_batch(&pair, elsewhere.clone())
            .expect_err("the second overlaps");
    }
    own.register(&another, MemoryOptions::default())
        .expect("the first was given back");
    for memory in [&memory, &another] {
        own.unregister(memory.addr()).expect("counted once");
        own.unregister(memory.addr()).expect_err("and no more");
    }
    assert_serves(&rig, &own);
}

#[test]
fn r03_r08_a_registration_that_fails_on_the_second_nic_is_an_error_and_leaves_nothing() {
    // Room for the probes' own region and one more.
    let rig = rig(5, |name, options| {
        if name == "sim1" {
            options.limits.max_mr = 2;
        }
    });
    let own = engine(&rig, 0);
    let (first, second) = (
        HostMemory::allocate(4096).expect("memory"),
        HostMemory::allocate(4096).expect("memory"),
    );
    own.register(&first, MemoryOptions::default())
        .expect("one fits");
    for _ in 0..3 {
        let error = own
            .register(&second, MemoryOptions::default())
            .expect_err("no room");
        assert_names(&error, &["ibv_reg_mr", "sim1"]);
    }
    assert_eq!(
        own.descriptor().buffers.len(),
        1,
        "what failed is not published"
    );
    own.unregister(first.addr()).expect("nothing uses it");
    own.register(&second, MemoryOptions::default())
        .expect("its place is free on both");
    own.unregister(second.addr()).expect("nothing uses it");
    assert_serves(&rig, &own);
}

#[test]
fn names_that_lead_nowhere_are_errors_with_a_reason() {
    let rig = rig(6, |_, _| {});
    let own = engine(&rig, 0);
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let nobody = closed.local_addr().expect("bound").to_string();
    drop(closed);
    for name in [
        &*nobody,
        "",
        "127.0.0.1:99999",
        "127.0.0.1:",
        "127.0.0.1:port",
        "[::1",
        "::1]:5",
        ":12345",
        "host name:1",
    ] {
        let error = own.open_segment(name).expect_err(name);
        assert!(!error.to_string().is_empty());
    }
    assert_names(
        &own.open_segment(&nobody).expect_err("nobody"),
        &[&nobody, "refused"],
    );
    assert_serves(&rig, &own);
}

/// Answers each connection to a port with what `serve` does to it.
fn server(serve: impl Fn(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("bound").to_string();
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            serve(stream);
        }
    });
    address
}

fn frame(kind: u8, text: &[u8]) -> Vec<u8> {
    let mut bytes = (text.len() as u64 + 1).to_le_bytes().to_vec();
    bytes.push(kind);
    bytes.extend_from_slice(text);
    bytes
}

/// A request's type byte and text; `None` if the client goes away.
fn read_frame(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut length = [0; 8];
    stream.read_exact(&mut length).ok()?;
    let mut body = vec![0; usize::try_from(u64::from_le_bytes(length)).ok()?];
    stream.read_exact(&mut body).ok()?;
    let text = body.split_off(1);
    Some((body[0], text))
}

/// Bytes that a broken peer answers with, none to close, or `None` to say nothing.
fn broken_answers() -> Vec<(&'static str, Option<Vec<u8>>)> {
    vec![
        ("closes", Some(Vec::new())),
        ("closes mid-frame", Some(frame(0, b"{}")[..5].to_vec())),
        ("no JSON", Some(frame(0, b"hello"))),
        (
            "wrong types",
            Some(frame(
                0,
                br#"{"name":7,"protocol":[],"qp_num":"x","local_nic_path":[]}"#,
            )),
        ),
        ("null", Some(frame(0, b"null"))),
        ("frame length 0", Some(vec![0; 8])),
        (
            "frame length 2^63",
            Some((1_u64 << 63).to_le_bytes().to_vec()),
        ),
        ("never answers", None),
    ]
}

/// Answers a request as `answer` says, with the request's own type.
fn answer_brokenly(stream: &mut TcpStream, kind: u8, answer: &Option<Vec<u8>>) {
    match answer {
        None => {
            // Until the client gives up.
            let _ = stream.read(&mut [0]);
        }
        Some(bytes) => {
            let mut bytes = bytes.clone();
            if bytes.len() > 8 {
                bytes[8] = kind;
            }
            // A client that has gone away is no concern of this one's.
            let _ = stream.write_all(&bytes);
        }
    }
}

#[test]
fn peers_that_answer_for_their_record_with_nonsense_are_errors() {
    let rig = rig(7, |_, _| {});
    let own = engine(&rig, 0);
    for (what, answer) in broken_answers() {
        let address = server(move |mut stream| {
            if let Some((kind, _)) = read_frame(&mut stream) {
                answer_brokenly(&mut stream, kind, &answer);
            }
        });
        let error = own.open_segment(&address).expect_err(what);
        assert_names(&error, &[&address]);
    }
    assert_serves(&rig, &own);
}

/// The record of a peer at `address` that has one NIC and offers one buffer.
fn record(address: &str) -> SegmentDescriptor {
    let mut record = SegmentDescriptor::new(address, Protocol::rdma());
    let gid = "::ffff:10.0.1.1".parse().expect("a GID");
    record.devices.push(Device::new("sim0", 0, gid));
    record.buffers.push(Buffer {
        name: "*".into(),
        addr: 0x10_0000,
        length: 4096,
        rkey: vec![1],
        lkey: vec![1],
        ..Buffer::default()
    });
    record
}

#[test]
fn peers_that_break_off_the_handshake_cost_their_own_requests_only() {
    let rig = rig(8, |_, _| {});
    let (own, healthy) = (engine(&rig, 0), engine(&rig, 1));
    let source = registered(&own, 4096);
    for (what, answer) in broken_answers() {
        // The listener's own address is in its record, which it therefore learns from the peer.
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("bound").to_string();
        let text = record(&address).to_json(JsonForm::Line);
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let (text, answer) = (text.clone(), answer.clone());
                std::thread::spawn(move || match read_frame(&mut stream) {
                    Some((1, _)) => {
                        let _ = stream.write_all(&frame(1, &text));
                    }
                    Some((kind, _)) => answer_brokenly(&mut stream, kind, &answer),
                    None => {}
                });
            }
        });
        let segment = own.open_segment(&address).expect("its record is sound");
        let batch = own.allocate_batch(1);
        let mut request = Request::write(&segment, source.addr(), 0x10_0000, 64);
        request.timeout = Some(Duration::from_secs(2));
        batch.submit(&[request]).expect("submitted");
        // Meanwhile others are served.
        there_and_back(&own, &healthy);
        let error = batch.wait(LIMIT).expect_err(what);
        assert!(matches!(error, EngineError::Transfer(_)), "{what}: {error}");
        assert_names(&error, &[&address]);
    }
    own.unregister(source.addr())
        .expect("nothing uses it any more");
    assert_serves(&rig, &own);
}

/// What an engine answers to these bytes, until it closes.
fn ask(engine: &Engine, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(engine.rpc_address()).expect("it listens");
    stream.set_read_timeout(Some(LIMIT)).expect("a time limit");
    // The engine may close before it has read all.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[test]
fn requests_that_make_no_sense_are_refused_with_a_reason() {
    let rig = rig(9, |_, _| {});
    let (own, peer) = (engine(&rig, 0), engine(&rig, 1));
    let message = |to: &str, qp_nums: &[u32]| {
        let text = format!(
            r#"{{"local_nic_path":"127.0.0.1:1@mlx5_0","peer_nic_path":"{to}","local_lid":0,"local_gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:00:01:01","qp_num":{qp_nums:?},"ready_ack":false,"reply_msg":""}}"#
        );
        frame(0, text.as_bytes())
    };
    let own_path = format!("{}@sim0", own.name());
    for (what, bytes, reason) in [
        (
            "wrong NIC path",
            message(&format!("{}@sim7", own.name()), &[1, 2]),
            "no NIC",
        ),
        (
            "another server's NIC path",
            message("10.0.0.9:1@sim0", &[1, 2]),
            "no NIC",
        ),
        (
            "unequal QP counts",
            message(&own_path, &[1, 2, 3]),
            "MC_NUM_QP_PER_EP",
        ),
        ("300 QPs", message(&own_path, &[1; 300]), "qp_num"),
        ("no JSON", frame(0, b"{nonsense"), ""),
        ("frame length 0", vec![0; 9], ""),
        (
            "frame length 2^63",
            (1_u64 << 63).to_le_bytes().to_vec(),
            "",
        ),
    ] {
        let answer = String::from_utf8_lossy(&ask(&own, &bytes)).into_owned();
        assert!(answer.contains(reason), "{what}: {answer:?}");
    }
    // The other direction is the healthy one here: the peer connects to the engine that was asked.
    there_and_back(&peer, &own);
    assert_serves(&rig, &own);
}
