use rerail_topology::gid::{GidPolicy, rank};
use rerail_verbs::{GidEntry, GidType};

use super::*;

fn gid(text: &str) -> Gid {
    Gid::from_ip(text.parse().expect("an address"))
}

fn entries(addresses: &[&str]) -> Vec<GidEntry> {
    let entry = |(index, text): (usize, &&str)| GidEntry {
        index: index as u32,
        gid: gid(text),
        gid_type: GidType::RoceV2,
        netdev: None,
    };
    addresses.iter().enumerate().map(entry).collect()
}

/// Addresses that are tried, in order.
fn tried(addresses: &[&str], in_use: &str, advice: &Advice) -> Vec<String> {
    let entries = entries(addresses);
    let table = PortTable {
        device: "sim0",
        port: 1,
        link_layer: LinkLayer::Ethernet,
        table_len: Some(256),
        entries: &entries,
        unreadable: &[],
        netdevs: &[],
    };
    let ranking = rank(&table, &GidPolicy::default());
    let rows = rows(&table, &ranking, gid(in_use), advice);
    rows.iter().map(|row| row.gid.to_ip().to_string()).collect()
}

fn toward(peer: &str) -> Advice {
    Advice {
        toward: Some(gid(peer)),
        peer_chooses: true,
        ..Advice::default()
    }
}

#[test]
fn the_peers_family_comes_first_then_its_subnet_then_the_class() {
    let own = ["fe80::1", "10.0.0.1", "10.9.0.1", "fd00::1"];
    let order = tried(&own, "10.0.0.1", &toward("10.9.0.2"));
    assert_eq!(order, ["10.9.0.1", "10.0.0.1", "fd00::1", "fe80::1"]);
    let order = tried(&own, "10.0.0.1", &toward("fd00::2"));
    assert_eq!(order, ["fd00::1", "fe80::1", "10.0.0.1", "10.9.0.1"]);
    let order = tried(&own, "10.0.0.1", &toward("fe80::2"));
    assert_eq!(order[0], "fe80::1");
}

#[test]
fn among_equals_the_ports_own_choice_is_used_and_then_the_last() {
    let own = ["10.0.0.3", "10.0.0.1", "10.0.0.2"];
    let mut advice = toward("10.0.0.7");
    assert_eq!(tried(&own, "10.0.0.1", &advice)[0], "10.0.0.1");
    advice.last = Some(gid("10.0.0.2"));
    assert_eq!(tried(&own, "10.0.0.1", &advice)[0], "10.0.0.2");
    // One of a worse class is left as soon as a better one may do.
    let own = ["fe80::1", "fd00::1"];
    let mut advice = toward("fd00::2");
    advice.last = Some(gid("fe80::1"));
    assert_eq!(tried(&own, "fd00::1", &advice)[0], "fd00::1");
}

#[test]
fn what_failed_is_left_out_until_all_has_failed() {
    let own = ["10.0.0.1", "10.0.0.2"];
    let mut advice = toward("10.0.0.7");
    advice.avoid = vec![gid("10.0.0.1")];
    assert_eq!(tried(&own, "10.0.0.1", &advice), ["10.0.0.2"]);
    advice.avoid.push(gid("10.0.0.2"));
    assert_eq!(tried(&own, "10.0.0.1", &advice), ["10.0.0.1", "10.0.0.2"]);
}

#[test]
fn at_most_four_are_tried_and_none_of_another_family_where_the_peer_has_one_gid() {
    let own = [
        "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "fd00::1",
    ];
    let mut advice = toward("10.0.0.7");
    assert_eq!(tried(&own, "10.0.0.1", &advice).len(), PAIRS_MAX);
    advice.peer_chooses = false;
    assert_eq!(tried(&own[4..], "10.0.0.5", &advice), ["10.0.0.5"]);
    // Where there is no other, it may be what the operator wants.
    assert_eq!(tried(&own[5..], "fd00::1", &advice), ["fd00::1"]);
}

#[test]
fn without_the_ports_own_choice_in_the_table_there_is_nothing_to_try() {
    let none: [String; 0] = [];
    assert_eq!(tried(&["10.0.0.1"], "10.0.0.2", &toward("10.0.0.7")), none);
    assert_eq!(
        tried(&["10.0.0.1"], "10.0.0.1", &Advice::default()),
        ["10.0.0.1"]
    );
}

fn way() -> Way {
    (0, "peer@sim0".to_owned())
}

fn at(seconds: u64) -> Time {
    Time::ZERO + Duration::from_secs(seconds)
}

#[test]
fn a_refusal_is_remembered_for_a_minute_and_for_that_peers_gid_only() {
    let mut paths = Paths::default();
    let (one, other) = (gid("10.0.0.1"), gid("10.0.0.2"));
    let peer = Some(gid("10.0.0.7"));
    paths.chosen(&way(), peer, one);
    paths.refused(at(0), &way(), one);
    let advice = paths.advice(at(1), &way(), peer);
    assert_eq!((advice.avoid, advice.last), (vec![one], Some(one)));
    assert_eq!(
        paths.advice(at(1), &way(), Some(other)),
        Advice {
            toward: Some(other),
            ..Advice::default()
        }
    );
    assert!(paths.advice(at(60), &way(), peer).avoid.is_empty());
    // Once all have failed they are gone through again.
    paths.refused(at(61), &way(), one);
    paths.chosen(&way(), peer, one);
    assert!(paths.advice(at(61), &way(), peer).avoid.is_empty());
}

#[test]
fn a_pair_that_has_worked_is_given_up_after_several_silent_connections() {
    let mut paths = Paths::default();
    let (one, peer) = (gid("10.0.0.1"), Some(gid("10.0.0.7")));
    paths.chosen(&way(), peer, one);
    paths.proved(&way(), one);
    for _ in 1..STRIKES_PROVED {
        paths.silent(at(0), &way(), one);
        assert!(paths.advice(at(0), &way(), peer).avoid.is_empty());
    }
    paths.silent(at(0), &way(), one);
    assert_eq!(paths.advice(at(0), &way(), peer).avoid, [one]);
    paths.proved(&way(), one);
    assert!(paths.advice(at(0), &way(), peer).avoid.is_empty());
    // One that never has is given up at once.
    let mut paths = Paths::default();
    paths.chosen(&way(), peer, one);
    paths.silent(at(0), &way(), one);
    assert_eq!(paths.advice(at(0), &way(), peer).avoid, [one]);
}

#[test]
fn the_path_mtu_is_cut_for_a_minute_when_long_packets_are_lost() {
    let mut paths = Paths::default();
    assert!(!paths.long_lost(at(0), &way(), Doubt::Likely));
    paths.long_passed(&way());
    assert!(!paths.long_lost(at(0), &way(), Doubt::Likely));
    assert!(paths.long_lost(at(1), &way(), Doubt::Likely));
    assert_eq!(paths.advice(at(60), &way(), None).mtu_max, Some(MTU_SAFE));
    assert_eq!(paths.advice(at(61), &way(), None).mtu_max, None);
    assert!(paths.long_lost(at(70), &way(), Doubt::Sure));
    // Another GID takes the same way.
    paths.chosen(&way(), Some(gid("10.0.0.7")), gid("10.0.0.1"));
    assert_eq!(paths.advice(at(71), &way(), None).mtu_max, Some(MTU_SAFE));
}

#[test]
fn failures_that_are_far_apart_do_not_cut_the_path_mtu() {
    let mut paths = Paths::default();
    for hour in 0..5 {
        assert!(!paths.long_lost(at(3_600 * hour), &way(), Doubt::Likely));
    }
}

#[test]
fn the_latest_refusals_are_kept_and_the_oldest_goes() {
    let mut paths = Paths::default();
    let peer = Some(gid("10.0.0.7"));
    let own: Vec<_> = (1..=PAIRS_MAX + 1)
        .map(|host| gid(&format!("10.0.0.{host}")))
        .collect();
    paths.chosen(&way(), peer, own[0]);
    for gid in &own {
        paths.refused(at(1), &way(), *gid);
    }
    assert_eq!(paths.advice(at(2), &way(), peer).avoid, own[1..]);
}

#[test]
fn the_number_of_ways_is_bounded() {
    let mut paths = Paths::default();
    for stranger in 0..2 * WAYS_MAX {
        let way = (0, format!("stranger{stranger}@sim0"));
        paths.chosen(&way, None, gid("10.0.0.1"));
        assert!(paths.ways.len() <= WAYS_MAX);
    }
}
