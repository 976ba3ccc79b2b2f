//! Ends that a peer opened, and of whose death nothing tells.

use std::sync::atomic::AtomicU64;

use super::*;
use crate::rdma::RdmaConfig;
use crate::rdma::endpoint::Limits;

/// Probes often.
fn config() -> RdmaConfig {
    RdmaConfig {
        limits: Limits {
            idle: Duration::from_millis(40),
            ..Limits::default()
        },
        ..RdmaConfig::default()
    }
}

#[test]
fn an_end_of_a_peer_that_died_without_a_word_is_found_and_one_of_a_peer_that_lives_stays() {
    for is_cpp in [false, true] {
        let rig = rig(15, 2);
        rig.wire.is_cpp.store(is_cpp, Ordering::SeqCst);
        let (a, b) = (
            rig.transport(0, "a1"),
            rig.transport_with(1, "b1", config()),
        );
        let peer = peer_of(&a, 1, &b);
        let (source, target) = (registered(&a, 512 * KIB), registered(&b, 512 * KIB));
        let write = Move::all(&a, &peer, &source, &target);
        wait_until("both NICs have a connection", || {
            write.run().expect("moved");
            b.connector().endpoints() >= 2
        });
        let (ends, asks) = (b.connector().endpoints(), rig.asks());
        // From here on only `b` posts.
        let probes: Arc<[AtomicU64; 2]> = Arc::default();
        let (seen, nics) = (Arc::clone(&probes), rig.hosts[1].1.clone());
        let watching = rig.fabric.on_work(move |work| {
            let of_b = nics.iter().position(|nic| *nic == work.nic);
            if let Some(nic) = of_b.filter(|_| work.opcode == RdmaOpcode::Read && work.bytes == 0) {
                seen[nic].fetch_add(1, Ordering::SeqCst);
            }
            WorkVerdict::Pass
        });
        wait_until("each NIC's end is probed again and again", || {
            probes.iter().all(|count| count.load(Ordering::SeqCst) >= 6)
        });
        assert_eq!(b.connector().endpoints(), ends, "its peer lives");
        write.run().expect("moved");
        assert_eq!(rig.asks(), asks, "over the same connections");
        drop(watching);
        // `a` is gone as far as anybody can see, and says nothing.
        rig.wire.loses_closes.store(true, Ordering::SeqCst);
        *rig.wire.refusal.lock().expect("whole") = Some(("host0", "dead"));
        let here = [rig.port(0, 0), rig.port(0, 1)];
        let lost = rig.fabric.block(&here, &[rig.port(1, 0), rig.port(1, 1)]);
        wait_until("its ends are gone", || b.connector().endpoints() == 0);
        assert_eq!(b.connector().unfenced(), 0);
        drop(lost);
    }
}

#[test]
fn an_end_that_is_probed_serves_a_rail_that_comes_meanwhile() {
    let rig = rig(16, 1);
    let (a, b) = (
        rig.transport(0, "a1"),
        rig.transport_with(1, "b1", config()),
    );
    let to_b = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    let there = Move::all(&a, &to_b, &source, &target);
    there.run().expect("moved");
    let asks = rig.asks();
    // Rails come and go while the end is being probed, each at another moment.
    for round in 0..60 {
        let to_a = peer_of(&b, 2 + round, &a);
        Move::all(&b, &to_a, &target, &source).run().expect("back");
        b.forget_peer(&to_a);
    }
    there.run().expect("moved");
    assert_eq!(rig.asks(), asks, "over one connection");
    assert_eq!(b.connector().endpoints(), 1);
}
