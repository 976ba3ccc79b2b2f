//! Which memory probes read.

use super::*;
use crate::machine::rail::ProbeKind;
use crate::rdma::paths::MTU_SAFE;

/// Where both ends probe with keys out of date at once, each end's bad READ puts the other's queue
/// pairs in ERR before either is told that its own key was wrong. The storm found it, once in
/// 3 500 seeds.
#[test]
fn a_probe_whose_end_was_closed_unsaid_is_not_made_with_that_key_again() {
    let rig = rig(21, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, 64 * KIB), registered(&b, 64 * KIB));
    // A probe that reads memory stays under way.
    let nic = rig.hosts[0].1[0];
    let slow = rig.fabric.on_work(move |work| {
        if work.nic == nic && work.opcode == RdmaOpcode::Read && work.bytes > 0 {
            WorkVerdict::CompleteAfter(Duration::from_secs(60))
        } else {
            WorkVerdict::Pass
        }
    });
    let (_, finish) = Move::all(&a, &peer, &source, &target).write();
    let rail = std::sync::Arc::clone(&peer.rails()[0]);
    let reads = || rail.probed_memory(MTU_SAFE.bytes()).is_some();
    wait_until("a probe with a key is under way", || {
        reads() && rail.unproved() == Some(ProbeKind::FullMtuRead)
    });
    let closed = b.connector().close_all(None, "both are in ERR");
    assert_eq!(closed, 1);
    wait_until("the next probe needs no key", || !reads());
    slow.undo();
    finish.wait().expect("moved");
}
