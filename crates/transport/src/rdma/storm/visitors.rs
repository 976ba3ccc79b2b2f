//! Initiators whose record nobody reads: they connect, and die without a word.
//!
//! A visitor is two messages and nothing else: by the time that a node is connected to its queue
//! pairs there are none of such numbers. What the node has of it is to be gone in the end, though
//! nothing of its name ever comes again.

use std::net::IpAddr;

use rerail_verbs::Gid;

use super::fault::Fault;
use super::node::{config, name, nic_name};
use super::world::World;
use crate::rdma::Offer;

/// What the server names of visitors begin with. Nobody answers under one.
const VISITOR: &str = "visitor";

/// No queue pair has a number from here on.
const QP_NUM: u32 = 0xf0_0000;

/// Whether a server is a visitor's.
pub(super) fn is_visitor(server: &str) -> bool {
    server.starts_with(VISITOR)
}

impl World {
    /// Each NIC of each node has a visitor.
    pub(super) fn have_visitors(&mut self) {
        for host in 0..self.hosts.len() {
            for nic in 0..self.hosts[host].nics.len() {
                self.visit(host, nic);
            }
        }
    }

    fn visit(&mut self, host: usize, nic: usize) {
        let from = (host + 1) % self.hosts.len();
        let address = IpAddr::from([10, from as u8, nic as u8, self.hosts[from].addresses[nic]]);
        self.order += 1;
        let number = self.order;
        // Peers of before the acknowledgement post as soon as they are answered.
        let acknowledges = (host + nic).is_multiple_of(2);
        let offer = Offer {
            local_path: format!("{VISITOR}{number}@{}", nic_name(0)),
            peer_path: format!("{}@{}", name(host), nic_name(nic as u32)),
            gid: Some(Gid::from_ip(address)),
            qp_nums: (QP_NUM..).take(config().qp_per_endpoint as usize).collect(),
            ready_ack: acknowledges.then_some(false),
            psn: Some(number as u32 & 0xff_ffff),
            ..Offer::default()
        };
        let Some(node) = self.node(host) else {
            return;
        };
        let connector = node.connector.clone();
        node.turns.spawn(async move {
            let answer = connector.accept(offer.clone()).await;
            if answer.is_ok() && acknowledges {
                let ready_ack = Some(true);
                let acknowledgement = Offer { ready_ack, ..offer };
                // It is dead.
                drop(connector.accept(acknowledgement).await);
            }
        });
        self.coverage.count("fault", &Fault::Visitor);
        self.say(host, format_args!("has a visitor on NIC {nic}"));
    }
}
