//! What the thread does about the first that it learns of a NIC.

use std::sync::atomic::AtomicUsize;

use super::super::rig::{rig, wait_until};
use super::*;

/// Counts what is to be published.
#[derive(Default)]
struct Published(AtomicUsize);

impl NicListener for Published {
    fn port(&self, _local: LocalNic, facts: observer::PortFacts, _gids: Vec<Gid>) {
        assert!(!facts.up, "it is not usable");
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn rekeyed(&self, _local: LocalNic) {}
}

#[test]
fn a_port_that_fails_before_it_is_first_read_is_shut() {
    let rig = rig(1, 1);
    let transport = rig.transport(0, "a1");
    let nic = Arc::clone(&transport.nics()[0]);
    assert!(nic.is_gate_open(), "it was usable when it was opened");
    rig.fabric.port_down(rig.port(0, 0));
    let listener = Arc::new(Published::default());
    let told = Arc::clone(&listener);
    transport
        .observe(listener, Events::default())
        .expect("a thread");
    wait_until("it is told", || told.0.load(Ordering::SeqCst) > 0);
    assert!(
        !nic.is_gate_open(),
        "nothing may be posted when peers are told"
    );
}

#[test]
fn a_device_that_dies_before_it_is_first_read_is_shut_and_let_go_of() {
    let rig = rig(2, 1);
    let transport = rig.transport(0, "a1");
    let nic = Arc::clone(&transport.nics()[0]);
    rig.fabric.kill_device(rig.hosts[0].1[0]);
    transport
        .observe(Arc::new(Published::default()), Events::default())
        .expect("a thread");
    wait_until("it is let go of", || nic.opening().is_none());
    assert!(!nic.is_gate_open());
}
