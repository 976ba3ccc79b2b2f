//! Two transports over simulated NICs, wired together without an engine.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rerail_verbs::sim::{
    FabricOptions, LinkOptions, NicId, NicOptions, NodeId, PortId, RealTimeFabric,
};
use rerail_verbs::{AccessFlags, HostMemory, RdmaOpcode};

use super::super::memory::RegisteredMemory;
use super::super::rail::{Peer, PeerNic, PeerSpec};
use super::super::signaling::{Boxed, SignalError};
use super::super::slice::{Piece, Span};
use super::super::transfer::{OnFinished, TransferSpec};
use super::super::transport::RdmaTransport;
use super::*;
use crate::TransferError;
use crate::machine::ids::PeerId;

const LIMIT: Duration = Duration::from_secs(20);
const KIB: u64 = 1024;

/// Carries messages between connectors, and keeps what it has carried.
#[derive(Default)]
struct Wire {
    servers: Mutex<HashMap<String, Connector>>,
    carried: Mutex<Vec<Offer>>,
    /// Refuses everything with these words.
    refusal: Mutex<Option<String>>,
    /// Loses requests to close.
    loses_closes: AtomicBool,
    /// Takes out of every message what C++ engines do not know.
    is_cpp: AtomicBool,
}

impl Wire {
    /// The message as it arrives.
    fn carried(&self, offer: Offer) -> Offer {
        if !self.is_cpp.load(Ordering::SeqCst) {
            return offer;
        }
        Offer {
            psn: None,
            path_mtu: None,
            rd_atomic: None,
            instance: None,
            peer_instance: None,
            ..offer
        }
    }
}

impl Signaling for Arc<Wire> {
    fn exchange(&self, server: &str, offer: Offer) -> Boxed<Result<Offer, SignalError>> {
        self.carried.lock().expect("whole").push(offer.clone());
        let refusal = self.refusal.lock().expect("whole").clone();
        let connector = self.servers.lock().expect("whole").get(server).cloned();
        let (wire, offer) = (Self::clone(self), self.carried(offer));
        let lost = offer.qp_nums.is_empty() && self.loses_closes.load(Ordering::SeqCst);
        Box::pin(async move {
            if lost {
                return Err(SignalError::NoAnswer("lost".into()));
            }
            if let Some(refusal) = refusal {
                return Err(SignalError::Refused(refusal));
            }
            let connector = connector.ok_or_else(|| SignalError::NoAnswer("no server".into()))?;
            let answer = connector.accept(offer).await;
            answer
                .map(|offer| wire.carried(offer))
                .map_err(SignalError::Refused)
        })
    }
}

struct Rig {
    runtime: tokio::runtime::Runtime,
    fabric: RealTimeFabric,
    wire: Arc<Wire>,
    hosts: Vec<(NodeId, NicId)>,
}

fn rig(seed: u64) -> Rig {
    let fabric = RealTimeFabric::start(FabricOptions::card(seed)).expect("a thread");
    let hosts = (0..2_u8).map(|host| {
        let node = fabric.add_node(&format!("host{host}"));
        let address = IpAddr::from([10, 0, host, 1]);
        (
            node,
            fabric.add_nic(node, &NicOptions::ethernet("sim0", address)),
        )
    });
    let hosts = hosts.collect();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build();
    Rig {
        runtime: runtime.expect("a runtime"),
        fabric,
        wire: Arc::default(),
        hosts,
    }
}

impl Rig {
    /// A transport whose server name is `host0` or `host1`. A later one takes the name over.
    fn transport(&self, host: usize, instance: &str) -> RdmaTransport {
        let process = self.fabric.add_process(self.hosts[host].0);
        let identity = Identity {
            server: format!("host{host}"),
            instance: Some(instance.to_owned()),
        };
        let transport = RdmaTransport::open(
            &self.fabric.devices_of(process),
            &[],
            RdmaConfig::default(),
            Clock::start(),
            identity,
            Arc::new(Arc::clone(&self.wire)),
            self.runtime.handle().clone(),
        );
        let transport = transport.expect("a transport");
        let mut servers = self.wire.servers.lock().expect("whole");
        servers.insert(format!("host{host}"), transport.connector().clone());
        drop(servers);
        transport
    }

    fn port(&self, host: usize) -> PortId {
        self.hosts[host].1.port(1)
    }

    fn asks(&self) -> u64 {
        let carried = self.wire.carried.lock().expect("whole");
        let asks = carried
            .iter()
            .filter(|offer| offer.ready_ack == Some(false));
        asks.count() as u64
    }
}

fn peer_of(own: &RdmaTransport, id: u64, peer: &RdmaTransport) -> Arc<Peer> {
    let identity = peer.identity();
    let nics = peer.nics().iter().map(|nic| PeerNic {
        index: nic.index().0,
        path: identity.path(nic),
        gid: nic.facts().expect("usable").gid.gid,
        lid: nic.facts().expect("usable").lid,
    });
    own.peer(PeerSpec {
        id: PeerId(id),
        segment: identity.server.clone(),
        server: identity.server.clone(),
        instance: identity.instance.clone(),
        nics: nics.collect(),
    })
}

fn registered(transport: &RdmaTransport, length: u64) -> RegisteredMemory {
    let memory = HostMemory::allocate(length as usize).expect("memory");
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    transport.register(&memory, access).expect("registered")
}

#[derive(Default)]
struct Finish(OnceLock<Option<TransferError>>);

impl OnFinished for Finish {
    fn finished(&self, transfer: &Transfer) {
        let first = self.0.set(transfer.error().cloned());
        assert!(first.is_ok(), "finished once");
    }
}

impl Finish {
    fn wait(&self) -> Result<(), TransferError> {
        wait_until("the transfer is finished", || self.0.get().is_some());
        match self.0.get() {
            Some(Some(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Move<'a> {
    own: &'a RdmaTransport,
    peer: &'a Arc<Peer>,
    source: &'a RegisteredMemory,
    target: &'a RegisteredMemory,
    length: u64,
    time: Duration,
    /// Added to the remote key.
    key_error: u32,
}

impl Move<'_> {
    fn write(&self) -> (Arc<Transfer>, Arc<Finish>) {
        let length = self.length;
        let local = Span::new(self.source.memory().addr(), length, self.source.pieces());
        let remote = self.target.keys().into_iter().map(|chunk| {
            let keys = chunk.rkeys.iter();
            let keys = keys.map(|key| key.wrapping_add(self.key_error));
            Piece::new(chunk.addr, chunk.length, keys)
        });
        let remote = Span::new(self.target.memory().addr(), length, remote);
        let spec = TransferSpec {
            peer: Arc::clone(self.peer),
            opcode: RdmaOpcode::Write,
            local: local.expect("registered"),
            remote: remote.expect("registered"),
            length,
            slicing: self.own.config().slicing,
            cut_off: self.own.clock().now() + self.time,
        };
        let finish = Arc::new(Finish::default());
        (self.own.submit(spec, finish.clone()), finish)
    }

    fn run(&self) -> Result<(), TransferError> {
        self.write().1.wait()
    }
}

#[test]
fn a_connection_that_the_peer_closes_costs_its_rail_a_back_off_and_no_more() {
    let rig = rig(1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(5),
        key_error: 0,
    };
    write.run().expect("moved");
    b.connector().close_all(None, "a test");
    wait_until("fenced", || a.connector().endpoints() == 0);
    let now = a.clock().now();
    let due = peer.rails()[0].down_until();
    assert!(due <= now + Duration::from_millis(250), "{due:?} {now:?}");
    let begin = Instant::now();
    write.run().expect("moved again");
    assert!(begin.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_peer_that_says_no_packet_numbers_gets_packets_from_number_0_on() {
    let rig = rig(10);
    rig.wire.is_cpp.store(true, Ordering::SeqCst);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(5),
        key_error: 0,
    };
    write.run().expect("moved");
}

#[test]
fn a_rail_is_blamed_once_for_a_connection_that_fails() {
    let rig = rig(2);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    *rig.wire.refusal.lock().expect("whole") = Some("not today".into());
    let write = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(1),
        key_error: 0,
    };
    let error = write.run().expect_err("no connection");
    assert!(error.to_string().contains("not today"), "{error}");
    let (errors, asks) = (peer.rails()[0].stats(a.clock().now()).errors, rig.asks());
    assert!(errors > 0 && errors <= asks, "{errors} of {asks}");
}

#[test]
fn a_request_with_a_bad_key_fails_alone_and_its_rail_is_not_blamed() {
    let rig = rig(3);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let good = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(5),
        key_error: 0,
    };
    let bad = Move {
        key_error: 0x1234_5600,
        ..good
    };
    good.run().expect("moved");
    for _ in 0..4 {
        let error = bad.run().expect_err("no such key");
        assert!(
            matches!(error, TransferError::RemoteAccess { .. }),
            "{error}"
        );
        good.run().expect("the others go on");
    }
    let stats = peer.rails()[0].stats(a.clock().now());
    assert_eq!(stats.errors, 0, "{:?}", peer.rails()[0].last_trouble());
}

#[test]
fn work_for_an_instance_that_is_no_more_never_reaches_the_next_one() {
    let rig = rig(4);
    let (a, old) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let stale = peer_of(&a, 1, &old);
    let source = registered(&a, 64 * KIB);
    drop(old);
    let b = rig.transport(1, "b2");
    let target = registered(&b, 64 * KIB);
    let to_stale = Move {
        own: &a,
        peer: &stale,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(5),
        key_error: 0,
    };
    let peer = peer_of(&a, 2, &b);
    let to_b = Move {
        peer: &peer,
        ..to_stale
    };
    // Connected between the same NICs already, so that there is something to mistake.
    to_b.run().expect("moved");
    let error = to_stale.run().expect_err("that process is gone");
    assert!(
        matches!(error, TransferError::PeerRestarted { .. }),
        "{error}"
    );
    let begin = Instant::now();
    to_b.run().expect("the younger is not disturbed");
    assert!(begin.elapsed() < Duration::from_secs(1));
    assert_eq!(peer.rails()[0].stats(a.clock().now()).errors, 0);
}

fn request(from: &str, to: &str, qp_num: u32) -> Offer {
    Offer {
        local_path: from.to_owned(),
        peer_path: to.to_owned(),
        gid: Some(rerail_verbs::Gid::from_ip(IpAddr::from([10, 0, 0, 1]))),
        qp_nums: vec![qp_num, qp_num + 1],
        ready_ack: Some(false),
        ..Offer::default()
    }
}

#[test]
fn strangers_get_a_bounded_number_of_endpoints() {
    let rig = rig(5);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let path = b.identity().path(&b.nics()[0]);
    let accept = |offer: Offer| rig.runtime.block_on(b.connector().accept(offer));
    for wrong in ["", "@", "host0", "@sim0", "host0@"] {
        let reason = accept(request(wrong, &path, 1)).expect_err("no NIC path");
        assert!(reason.contains("server@device"), "{reason}");
    }
    assert_eq!(b.connector().endpoints(), 0);
    let answers = (0..70).map(|stranger| {
        let from = format!("stranger{stranger}@sim0");
        accept(request(&from, &path, 1000 + 2 * stranger))
    });
    let refused: Vec<String> = answers.filter_map(Result::err).collect();
    assert_eq!(refused.len(), 70 - HALF_OPEN_PER_NIC_MAX, "{refused:?}");
    assert!(refused[0].contains("acknowledgement"), "{refused:?}");

    // One that acknowledges makes room.
    let ack = Offer {
        ready_ack: Some(true),
        ..request("stranger0@sim0", &path, 1000)
    };
    accept(ack).expect("acknowledged");
    accept(request("late@sim0", &path, 3000)).expect("there is room");
    drop(a);
}

#[test]
fn permits_for_servers_that_nobody_talks_to_are_forgotten() {
    let rig = rig(6);
    let a = rig.transport(0, "a1");
    let held = a.connector().permits("held");
    for server in 0..100 {
        drop(a.connector().permits(&format!("server{server}")));
    }
    assert!(a.connector().table().permits.len() <= 2);
    assert!(Arc::ptr_eq(&held, &a.connector().permits("held")));
}

#[test]
fn a_control_thread_that_hangs_ends_transfers_as_unfenced() {
    let rig = rig(7);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(15),
        key_error: 0,
    };
    write.run().expect("moved");
    let lost = rig.fabric.block(&[rig.port(0)], &[rig.port(1)]);
    rig.fabric
        .hang_control(rig.hosts[0].1, Duration::from_secs(4));
    let late = Move {
        time: Duration::from_millis(100),
        ..write
    };
    let begin = Instant::now();
    let error = late.run().expect_err("it cannot be stopped");
    assert!(matches!(error, TransferError::Unfenced { .. }), "{error}");
    assert!(begin.elapsed() < Duration::from_millis(3_500));
    assert_eq!(a.connector().unfenced(), 1);
    drop(lost);
}

#[test]
fn memory_may_be_reused_once_a_transfer_is_reported_finished() {
    let rig = rig(8);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move {
        own: &a,
        peer: &peer,
        source: &source,
        target: &target,
        length: 64 * KIB,
        time: Duration::from_secs(5),
        key_error: 0,
    };
    write.run().expect("moved");
    let ones = vec![1; 64 * KIB as usize];
    let twos = vec![2; 64 * KIB as usize];
    source.memory().copy_in(0, &ones).expect("inside");
    // The packets are long on their way, and nobody tells the peer to stop listening to them.
    rig.wire.loses_closes.store(true, Ordering::SeqCst);
    let latency = Duration::from_millis(600);
    let slow = rig.fabric.degrade(
        rig.port(0),
        LinkOptions {
            latency,
            ..LinkOptions::default()
        },
    );
    let cut_off = Move {
        time: Duration::from_millis(100),
        ..write
    };
    let error = cut_off.run().expect_err("it runs out of time");
    assert!(matches!(error, TransferError::Deadline { .. }), "{error}");
    target.memory().copy_in(0, &twos).expect("inside");
    std::thread::sleep(latency + Duration::from_millis(100));
    let mut found = vec![0; 64 * KIB as usize];
    target.memory().copy_out(0, &mut found).expect("inside");
    assert!(found == twos, "bytes of a finished transfer came late");
    drop(slow);
}

#[test]
fn a_cpp_peer_is_told_of_a_cut_by_a_request_without_queue_pairs() {
    let rig = rig(10);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let path = b.identity().path(&b.nics()[0]);
    let accept = |offer: Offer| rig.runtime.block_on(b.connector().accept(offer));
    // Neither has an instance: one acknowledges, the other is too old for that.
    let old = Offer {
        ready_ack: None,
        ..request("cpp-old@mlx5_0", &path, 2000)
    };
    accept(old).expect("an endpoint");
    accept(request("cpp@mlx5_0", &path, 1000)).expect("an endpoint");
    let acknowledgement = Offer {
        ready_ack: Some(true),
        ..request("cpp@mlx5_0", &path, 1000)
    };
    accept(acknowledgement).expect("acknowledged");
    b.connector().close_all(None, "its GID has changed");
    let told = |peer: &str| {
        let carried = rig.wire.carried.lock().expect("whole");
        carried.iter().any(|offer| {
            offer.peer_path == peer && offer.local_path == path && offer.qp_nums.is_empty()
        })
    };
    wait_until("both are told", || {
        told("cpp@mlx5_0") && told("cpp-old@mlx5_0")
    });
    drop(a);
}

/// Refuses everybody, with a reason.
struct Nobody;

impl Admission for Nobody {
    fn admit(&self, nic: LocalNic, offer: &Offer) -> Result<(), String> {
        Err(format!(
            "{} of NIC {} is not back yet",
            offer.peer_path, nic.0
        ))
    }
}

#[test]
fn whom_the_engine_does_not_admit_is_refused_in_its_words() {
    let rig = rig(11);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let path = b.identity().path(&b.nics()[0]);
    let accept = |offer: Offer| rig.runtime.block_on(b.connector().accept(offer));
    accept(request("host0@sim0", &path, 1000)).expect("nobody objects");
    b.connector().set_admission(Arc::new(Nobody));
    let refused = accept(request("host9@sim0", &path, 1000)).expect_err("not admitted");
    assert_eq!(refused, format!("{path} of NIC 0 is not back yet"));
    // What was admitted before goes on.
    let acknowledgement = Offer {
        ready_ack: Some(true),
        ..request("host0@sim0", &path, 1000)
    };
    accept(acknowledgement).expect("acknowledged");
    drop(a);
}
