//! Ports, addresses and GID tables, and who can reach whom.

use std::net::{IpAddr, Ipv6Addr};

use super::support::{Connected, Host, MS, address, connect, init, options, rtr};
use crate::sim::{Fabric, NicOptions};
use crate::{AsyncEventKind, Gid, GidType, PortState, WcStatus};

/// Index and last byte of each row.
fn rows(host: &Host) -> Vec<(u32, u8)> {
    let rows = host.context.gid_table(1).expect("the table");
    rows.iter().map(|row| (row.index, row.gid.0[15])).collect()
}

fn count(events: &[AsyncEventKind], kind: AsyncEventKind) -> usize {
    events.iter().filter(|event| **event == kind).count()
}

#[test]
fn twenty_additions_and_deletions_are_forty_gid_changes() {
    let two = Connected::new(options());
    let _ = two.a.events();
    let before = rows(&two.a);
    for _ in 0..20 {
        assert!(two.fabric.add_address(two.a.port(), address(200)));
        assert!(two.fabric.delete_address(two.a.port(), address(200)));
    }
    assert_eq!(two.a.events(), [AsyncEventKind::GidChange; 40]);
    assert_eq!(rows(&two.a), before);
    two.post(&[two.write(1, 8)]);
    assert_eq!(
        two.a.statuses(1),
        [WcStatus::Success],
        "the row in use was not touched"
    );
}

#[test]
fn a_hole_stays_while_a_queue_pair_refers_to_the_row() {
    let two = Connected::new(options());
    let port = two.a.port();
    two.fabric.add_address(port, address(50));
    assert_eq!(rows(&two.a)[1..], [(1, 1), (2, 50)]);
    two.fabric.delete_address(port, address(1));
    assert_eq!(rows(&two.a)[1..], [(2, 50)], "later rows keep their index");
    two.fabric.add_address(port, address(1));
    assert_eq!(
        rows(&two.a)[1..],
        [(2, 50), (3, 1)],
        "the same bytes, elsewhere"
    );
    // In ERR the pair still refers to it; destroyed it does not.
    two.pair_a.to_error().expect("ERR");
    two.fabric.add_address(port, address(60));
    assert_eq!(rows(&two.a)[1..], [(2, 50), (3, 1), (4, 60)]);
    let Connected {
        fabric, a, pair_a, ..
    } = two;
    drop(pair_a);
    fabric.add_address(port, address(70));
    assert_eq!(
        rows(&a)[1..],
        [(1, 70), (2, 50), (3, 1), (4, 60)],
        "below the one in use"
    );
}

#[test]
fn without_a_queue_pair_an_address_comes_back_where_it_was() {
    let fabric = Fabric::new(options());
    let host = Host::new(&fabric, 1);
    fabric.add_address(host.port(), address(50));
    let before = rows(&host);
    fabric.delete_address(host.port(), address(1));
    fabric.add_address(host.port(), address(1));
    assert_eq!(rows(&host), before);
}

#[test]
fn renumbering_leaves_link_local_alone_and_a_hole() {
    let two = Connected::new(options());
    let _ = two.a.events();
    two.fabric.delete_address(two.a.port(), address(1));
    let only = two.a.context.gid_table(1).expect("the table");
    assert_eq!(only.len(), 1);
    assert_eq!(only[0].gid.scope(), crate::GidScope::LinkLocal);
    two.fabric.add_address(two.a.port(), address(11));
    assert_eq!(rows(&two.a)[1..], [(2, 11)], "the hole at 1 is still held");
    assert_eq!(two.a.events(), [AsyncEventKind::GidChange; 2]);
}

#[test]
fn a_flap_is_one_port_err_and_port_active_twice_and_leaves_the_table() {
    let fabric = Fabric::new(options());
    let host = Host::new(&fabric, 1);
    let before = rows(&host);
    fabric.port_down(host.port());
    fabric.port_down(host.port());
    let attr = host.context.port_attr(1).expect("the port");
    assert_eq!(attr.state, PortState::Down);
    assert_eq!(rows(&host), before);
    assert_eq!(host.events(), [AsyncEventKind::PortErr]);
    fabric.port_up(host.port());
    assert_eq!(host.events(), [AsyncEventKind::PortActive; 2]);
    assert!(
        host.context
            .port_attr(1)
            .expect("the port")
            .state
            .is_active()
    );
}

/// NVIDIA/nccl#2157: after a flap link-local is back first, and the IPv4 address only after
/// `PORT_ACTIVE` and at another index, since old queue pairs still hold its row.
#[test]
fn e08_after_a_flap_ipv4_comes_back_late_and_elsewhere() {
    let two = Connected::new(options());
    let (fabric, port) = (&two.fabric, two.a.port());
    let link_local = two.a.context.gid_table(1).expect("the table")[0]
        .gid
        .to_ip();
    let _ = two.a.events();
    fabric.port_down(port);
    fabric.delete_address(port, link_local);
    fabric.delete_address(port, address(1));
    assert_eq!(
        rows(&two.a),
        [],
        "the table is empty while the port is down"
    );
    assert_eq!(two.a.events()[0], AsyncEventKind::PortErr);
    fabric.add_address(port, link_local);
    assert_eq!(two.a.events(), [AsyncEventKind::GidChange]);
    fabric.port_up(port);
    assert_eq!(two.a.events(), [AsyncEventKind::PortActive; 2]);
    assert_eq!(rows(&two.a).len(), 1, "active, with nothing but link-local");
    fabric.advance(1_500 * MS);
    fabric.add_address(port, address(1));
    assert_eq!(two.a.events(), [AsyncEventKind::GidChange]);
    assert_eq!(rows(&two.a)[1..], [(2, 1)], "the row at 1 is gone for good");
    // What was connected through the old index is of no use any more.
    two.post(&[two.write(1, 8)]);
    assert_eq!(two.a.statuses(1), [WcStatus::LocQpOpErr]);
}

#[test]
fn ipv6_addresses_vanish_with_the_port_and_link_local_does_not() {
    let fabric = Fabric::new(options());
    let host = Host::new(&fabric, 1);
    let ula: IpAddr = "fd00::5".parse::<Ipv6Addr>().expect("a literal").into();
    fabric.add_address(host.port(), ula);
    assert_eq!(rows(&host).len(), 3);
    let _ = host.events();
    fabric.port_down(host.port());
    assert_eq!(rows(&host).len(), 2);
    let events = host.events();
    assert_eq!(count(&events, AsyncEventKind::GidChange), 1, "{events:?}");
    fabric.port_up(host.port());
    assert_eq!(rows(&host).len(), 2, "it does not come back by itself");
}

#[test]
fn after_a_thousand_flaps_everything_is_where_it_was() {
    let two = Connected::new(options());
    let step = |round: u32| {
        let (fabric, port) = (&two.fabric, two.a.port());
        fabric.port_down(port);
        let _ = two.pair_a.post(&[two.write(u64::from(round), 100_000)]);
        fabric.advance(5 * MS);
        fabric.port_up(port);
        fabric.delete_address(port, address(1));
        fabric.advance(MS);
        fabric.add_address(port, address(1));
        two.pair_a.to_reset().expect("RESET");
        two.pair_b.to_reset().expect("RESET");
        let numbers = (two.pair_a.qp_num(), two.pair_b.qp_num());
        connect(&two.a, &two.pair_a, &two.b, numbers.1, 6).expect("connected");
        connect(&two.b, &two.pair_b, &two.a, numbers.0, 6).expect("connected");
        two.post(&[two.write(1, 100_000)]);
        fabric.advance(200 * MS);
        let done = two.a.poll();
        assert_eq!(done.last().map(|done| done.status), Some(WcStatus::Success));
        let _ = (two.a.events(), two.b.events());
        fabric.advance(3_000 * MS);
    };
    step(0);
    let (stats, table) = (two.fabric.stats(), rows(&two.a));
    assert_eq!((stats.packets, stats.due, stats.work_requests), (0, 0, 0));
    // An even number: the address alternates between two indexes.
    for round in 1..=1_000 {
        step(round);
    }
    assert_eq!(two.fabric.stats(), stats);
    assert_eq!(rows(&two.a), table);
}

#[test]
fn an_address_that_another_host_takes_over_leads_there() {
    let two = Connected::new(options());
    let c = Host::new(&two.fabric, 3);
    two.a.fill(1);
    two.post(&[two.write(1, 8)]);
    assert_eq!(two.a.statuses(1), [WcStatus::Success]);
    // C has B's address now, and a pair of B's number that knows nothing of A.
    let foreign = c.pair();
    assert_eq!(foreign.qp_num(), two.pair_b.qp_num());
    two.fabric.add_address(c.port(), address(2));
    two.b.fill(0);
    two.post(&[two.write(2, 8)]);
    assert_eq!(two.a.statuses(1), [WcStatus::RetryExcErr]);
    assert_eq!(two.b.bytes(0, 8), [0; 8]);
    // Once C gives it back, B answers again.
    two.fabric.delete_address(c.port(), address(2));
    let pair = two.a.pair();
    two.pair_b.to_reset().expect("RESET");
    connect(&two.a, &pair, &two.b, two.pair_b.qp_num(), 6).expect("connected");
    connect(&two.b, &two.pair_b, &two.a, pair.qp_num(), 6).expect("connected");
    pair.post(&[two.write(3, 8)]).expect("posted");
    assert_eq!(two.a.statuses(1), [WcStatus::Success]);
}

#[test]
fn ports_of_two_networks_cannot_reach_each_other() {
    let fabric = Fabric::new(options());
    let a = Host::new(&fabric, 1);
    let mut far = NicOptions::ethernet("far", address(2));
    far.ports[0].segment = 1;
    let b = Host::with_nic(&fabric, &far);
    let (pair, peer) = (a.pair(), b.pair());
    pair.to_init(&init()).expect("INIT");
    let refused = pair.to_rtr(&rtr(&a, &b, peer.qp_num()));
    assert_eq!(refused.expect_err("no way").errno(), Some(libc::ETIMEDOUT));
}

#[test]
fn a_full_table_refuses_and_frees() {
    let fabric = Fabric::new(options());
    let mut nic = NicOptions::ethernet("nic", address(1));
    nic.ports[0].gid_tbl_len = 3;
    let host = Host::with_nic(&fabric, &nic);
    assert!(fabric.add_address(host.port(), address(2)));
    assert!(!fabric.add_address(host.port(), address(3)));
    assert!(
        !fabric.delete_address(host.port(), address(9)),
        "it is not there"
    );
    assert!(fabric.delete_address(host.port(), address(2)));
    assert!(fabric.add_address(host.port(), address(3)));
}

#[test]
fn rows_say_type_and_interface() {
    let fabric = Fabric::new(options());
    let mut nic = NicOptions::ethernet("nic", address(1));
    nic.ports[0].roce_v1_rows = true;
    let host = Host::with_nic(&fabric, &nic);
    let _ = host.events();
    fabric.add_gid(host.port(), Gid::from_ip(address(9)), Some("vxlan7"));
    assert_eq!(host.events(), [AsyncEventKind::GidChange; 2]);
    let rows = host.context.gid_table(1).expect("the table");
    let found: Vec<_> = rows
        .iter()
        .map(|row| {
            let netdev = row.netdev.as_ref().expect("an interface");
            (row.gid_type, netdev.name.as_str())
        })
        .collect();
    let (v1, v2) = (GidType::RoceV1, GidType::RoceV2);
    let (own, over) = ("nic_eth", "vxlan7");
    assert_eq!(
        found,
        [
            (v1, own),
            (v2, own),
            (v1, own),
            (v2, own),
            (v1, over),
            (v2, over)
        ]
    );
}
