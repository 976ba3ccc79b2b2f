//! Pairs of GIDs that do not reach each other, and packets that are too long for the way.

use rerail_verbs::sim::PacketVerdict;
use rerail_verbs::{Gid, Mtu};

use super::*;
use crate::machine::ids::PeerId;
use crate::rdma::paths::{Doubt, Row};
use crate::rdma::rail::Peer;
use crate::rdma::{PeerNic, PeerSpec, RdmaTransport};

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn gid(text: &str) -> Gid {
    Gid::from_ip(address(text))
}

/// What `host0` asked for, oldest first.
fn asked(rig: &Rig) -> Vec<Offer> {
    let carried = rig.wire.carried.lock().expect("whole");
    let asked = carried
        .iter()
        .filter(|offer| offer.local_path.starts_with("host0@") && offer.ready_ack == Some(false));
    asked.cloned().collect()
}

/// Own GIDs with which `host0` asked.
fn asked_with(rig: &Rig) -> Vec<Gid> {
    let gids = asked(rig).into_iter().filter_map(|offer| offer.gid);
    gids.collect()
}

/// The peer as a record describes it that has another GID.
fn recorded(own: &RdmaTransport, peer: &RdmaTransport, gid: Gid) -> Arc<Peer> {
    let identity = peer.identity();
    let nics = peer.nics().iter().map(|nic| PeerNic {
        index: nic.index().0,
        path: identity.path(nic),
        gid,
        lid: 0,
    });
    own.peer(PeerSpec {
        id: PeerId(1),
        segment: identity.server.clone(),
        server: identity.server.clone(),
        instance: identity.instance.clone(),
        nics: nics.collect(),
    })
}

/// A host with addresses of both families, and one that has lost its IPv4 address.
fn reached_over_ipv6(seed: u64) -> (Rig, RdmaTransport, RdmaTransport) {
    let rig = rig(seed, 1);
    rig.fabric.add_address(rig.port(0, 0), address("fd00::1"));
    rig.fabric.add_address(rig.port(1, 0), address("fd00::2"));
    rig.fabric
        .delete_address(rig.port(1, 0), address("10.0.1.1"));
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    (rig, a, b)
}

#[test]
fn a_peer_with_ipv6_alone_is_reached_from_the_own_ipv6() {
    let (rig, a, b) = reached_over_ipv6(20);
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    assert_eq!(asked_with(&rig), [gid("fd00::1")]);
    assert_eq!(peer.rails()[0].stats().errors, 0);
}

#[test]
fn an_own_gid_beside_the_ports_choice_that_goes_takes_its_endpoints_with_it() {
    let (rig, a, b) = reached_over_ipv6(34);
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    write.run().expect("moved");
    let row = |index, text| Row {
        index,
        gid: gid(text),
    };
    let choice = row(1, "10.0.0.1");
    let local = a.nics()[0].index();
    rig.fabric
        .delete_address(rig.port(0, 0), address("fd00::1"));
    rig.fabric.add_address(rig.port(0, 0), address("fd00::3"));
    let read: Arc<[Row]> = Arc::new([choice, row(2, "fd00::3")]);
    a.connector().table_read(local, &read);
    wait_until("connected again", || asked(&rig).len() > 1);
    assert_eq!(asked_with(&rig)[1], gid("fd00::3"));
    write.run().expect("moved again");
    assert_eq!(asked(&rig).len(), 2, "cut once more than needed");
}

#[test]
fn a_gid_that_the_peer_refuses_is_replaced_by_the_next_at_once() {
    let (rig, a, b) = reached_over_ipv6(21);
    // The record is from before the address went.
    let peer = recorded(&a, &b, gid("10.0.1.1"));
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    write.run().expect("moved");
    assert_eq!(asked_with(&rig), [gid("10.0.0.1"), gid("fd00::1")]);
    assert_eq!(peer.rails()[0].stats().errors, 0);
    // The next connection knows.
    b.connector().close_all(None, "a test");
    wait_until("connected again", || asked(&rig).len() > 2);
    write.run().expect("moved again");
    assert_eq!(asked_with(&rig)[2], gid("fd00::1"));
}

#[test]
fn a_pair_that_is_connected_and_carries_nothing_is_left_for_the_next() {
    let rig = rig(23, 1);
    rig.fabric.add_address(rig.port(0, 0), address("10.0.0.2"));
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let in_use = a.nics()[0].facts().expect("usable").gid.gid;
    let silent = rig.fabric.on_packet(move |packet| {
        if packet.source == Some(in_use) || packet.destination == Some(in_use) {
            PacketVerdict::Drop
        } else {
            PacketVerdict::Pass
        }
    });
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    write.run().expect("moved");
    let tried = asked_with(&rig);
    assert_eq!(tried.len(), 2, "{tried:?}");
    assert_eq!(tried[0], in_use);
    // It stays with the one that works.
    b.connector().close_all(None, "a test");
    wait_until("connected again", || asked(&rig).len() > 2);
    write.run().expect("moved again");
    assert_eq!(asked_with(&rig)[2], tried[1]);
    drop(silent);
}

/// Moves over a way on which packets from `from` are lost that are longer than 1500 bytes, which
/// no interface says.
fn over_a_short_way(seed: u64, from: usize) {
    let rig = rig(seed, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let short = LinkOptions {
        frame_bytes_max: Some(1_500),
        ..LinkOptions::default()
    };
    let short = rig.fabric.degrade(rig.port(from, 0), short);
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let write = Move::all(&a, &peer, &source, &target);
    write.run().expect("moved");
    let mtus: Vec<_> = asked(&rig)
        .into_iter()
        .filter_map(|ask| ask.path_mtu)
        .collect();
    assert_eq!(mtus[0], Mtu::Mtu4096);
    assert_eq!(mtus.last(), Some(&Mtu::Mtu1024));
    // One step, and no more.
    assert!(mtus.len() <= 4, "{mtus:?}");
    let begin = Instant::now();
    write.run().expect("moved again");
    assert!(begin.elapsed() < LIMIT / 4);
    drop(short);
}

#[test]
fn packets_that_are_too_long_for_the_way_to_us_make_the_next_connection_use_shorter_ones() {
    over_a_short_way(24, 1);
}

#[test]
fn packets_that_are_too_long_for_the_way_to_the_peer_do_so_too() {
    over_a_short_way(25, 0);
}

#[test]
fn a_long_probe_that_never_ends_makes_the_next_connection_use_shorter_packets() {
    let rig = rig(29, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let mut lost = 0;
    let silent = rig.fabric.on_work(move |work| {
        // One on each queue pair of the first connection.
        let is_long_probe = work.opcode == RdmaOpcode::Read && work.bytes > 0;
        lost += u32::from(is_long_probe);
        if is_long_probe && lost <= 2 {
            WorkVerdict::LoseCompletion
        } else {
            WorkVerdict::Pass
        }
    });
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    let mtus: Vec<_> = asked(&rig)
        .into_iter()
        .filter_map(|ask| ask.path_mtu)
        .collect();
    assert_eq!(mtus, [Mtu::Mtu4096, Mtu::Mtu1024]);
    drop(silent);
}

/// Moves between ends that do not tell each other their MTUs, with an interface of 1500 at `small`.
fn between_ends_that_do_not_say(seed: u64, small: usize) {
    let rig = rig(seed, 1);
    rig.wire.is_cpp.store(true, Ordering::SeqCst);
    rig.fabric.set_netdev_mtu(rig.port(small, 0), 1_500);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
}

#[test]
fn h09_a_peer_that_does_not_say_its_smaller_mtu_is_reached_after_a_step_down() {
    between_ends_that_do_not_say(26, 1);
}

#[test]
fn h09_a_peer_that_does_not_say_its_smaller_mtu_reaches_us_after_a_step_down() {
    between_ends_that_do_not_say(27, 0);
}

#[test]
fn h09_a_step_down_that_was_wrong_is_taken_back() {
    let rig = rig(32, 1);
    rig.wire.is_cpp.store(true, Ordering::SeqCst);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let way = (0, b.identity().path(&b.nics()[0]));
    let now = a.connector().shared.clock.now();
    let cut = a.connector().paths().long_lost(now, &way, Doubt::Sure);
    assert!(cut);
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    let advice = a.connector().paths().advice(now, &way, None);
    assert_eq!(advice.mtu_max, None);
}

#[test]
fn a_device_with_short_messages_gets_slices_that_fit() {
    let rig = rig(28, 1);
    let mut options = rerail_verbs::sim::NicOptions::ethernet("short0", address("10.0.0.9"));
    options.ports[0].max_msg_bytes = 10_000;
    rig.fabric.add_nic(rig.hosts[0].0, &options);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let longest = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let seen = Arc::clone(&longest);
    let watched = rig.fabric.on_work(move |work| {
        seen.fetch_max(work.bytes, Ordering::SeqCst);
        WorkVerdict::Pass
    });
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    let longest = longest.load(Ordering::SeqCst);
    assert!(longest > 0 && longest <= 10_000, "{longest}");
    drop(watched);
}
