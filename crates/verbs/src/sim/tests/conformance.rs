//! The bodies that every backend must pass, on simulated devices.

use std::time::Duration;

use super::support::address;
use crate::conformance::{BODIES, Fabric as Conforming, Side};
use crate::sim::{Fabric, FabricOptions, NicId, NicOptions, RealTimeFabric};
use crate::{Context, Gid};

/// Two hosts with an adapter each.
struct Pair {
    fabric: Fabric,
    nics: [NicId; 2],
}

impl Pair {
    fn new(fabric: Fabric) -> Self {
        let nics = [1, 2].map(|host| {
            let node = fabric.add_node(&format!("host{host}"));
            fabric.add_nic(node, &NicOptions::ethernet("sim0", address(host)))
        });
        Self { fabric, nics }
    }

    fn nic(&self, side: Side) -> NicId {
        match side {
            Side::Initiator => self.nics[0],
            Side::Target => self.nics[1],
        }
    }
}

impl Conforming for Pair {
    fn open(&self, side: Side) -> Context {
        let device = self.fabric.device(self.nic(side));
        device.open().expect("it opens")
    }

    fn pass_time(&self) {
        if self.fabric.is_virtual() {
            self.fabric.advance(Duration::from_millis(1));
        } else {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn set_link(&self, side: Side, up: bool) -> bool {
        let port = self.nic(side).port(1);
        if up {
            self.fabric.port_up(port);
        } else {
            self.fabric.port_down(port);
        }
        true
    }

    fn set_gid(&self, side: Side, gid: Gid, present: bool) -> bool {
        let port = self.nic(side).port(1);
        if present {
            self.fabric.add_gid(port, gid, None)
        } else {
            self.fabric.delete_address(port, gid.to_ip())
        }
    }
}

fn run(pair: &Pair) {
    let nothing = objects(&pair.fabric);
    for (name, body) in BODIES {
        println!("{name}");
        body(pair);
        // Control threads may still be closing in real time.
        for _ in 0..1_000 {
            if objects(&pair.fabric) == nothing {
                break;
            }
            pair.pass_time();
        }
        assert_eq!(objects(&pair.fabric), nothing, "{name}");
    }
}

fn objects(fabric: &Fabric) -> [usize; 5] {
    let stats = fabric.stats();
    [
        stats.contexts,
        stats.pds,
        stats.regions,
        stats.completion_queues,
        stats.queue_pairs,
    ]
}

#[test]
fn a_fabric_like_soft_roce_conforms() {
    run(&Pair::new(Fabric::new(FabricOptions::soft_roce(1))));
}

#[test]
fn a_fabric_like_cards_conforms() {
    run(&Pair::new(Fabric::new(FabricOptions::card(1))));
}

#[test]
fn a_fabric_that_sends_packet_by_packet_conforms() {
    run(&Pair::new(Fabric::new(FabricOptions {
        packets_per_burst: 1,
        window_bursts: 3,
        ..FabricOptions::soft_roce(1)
    })));
}

#[test]
fn a_fabric_in_real_time_conforms() {
    let options = FabricOptions {
        // Resolving takes a second each time otherwise, and each body connects anew.
        neighbour_resolution: Duration::from_millis(5),
        ..FabricOptions::soft_roce(1)
    };
    let fabric = RealTimeFabric::start(options).expect("a thread");
    run(&Pair::new(fabric.clone()));
}
