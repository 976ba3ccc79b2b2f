use std::time::Duration;

use proptest::prelude::*;
use rerail_verbs::{Gid, GidEntry, GidType, LinkLayer, Netdev};

use super::*;
use crate::{NetdevFacts, NetdevKind, Subnet};

const V4: &str = "198.51.100.1";
const V6: &str = "2001:db8::1";
const LINK_LOCAL: &str = "fe80::200:11ff:fe22:1";

fn row(index: u32, gid_type: GidType, gid: &str, netdev: Option<&str>) -> GidEntry {
    GidEntry {
        index,
        gid: gid.parse().expect("a GID literal"),
        gid_type,
        netdev: netdev.map(|name| Netdev {
            index: 0,
            name: name.into(),
        }),
    }
}

fn v2(index: u32, gid: &str, netdev: Option<&str>) -> GidEntry {
    row(index, GidType::RoceV2, gid, netdev)
}

fn table<'a>(entries: &'a [GidEntry], netdevs: &'a [NetdevFacts]) -> PortTable<'a> {
    PortTable {
        device: "mlx5_0",
        port: 1,
        link_layer: LinkLayer::Ethernet,
        table_len: Some(256),
        entries,
        unreadable: &[],
        netdevs,
    }
}

fn ranked(entries: &[GidEntry]) -> Ranking {
    rank(&table(entries, &[]), &GidPolicy::default())
}

fn order(ranking: &Ranking) -> Vec<u32> {
    ranking.accepted().iter().map(|row| row.index).collect()
}

fn selected(entries: &[GidEntry]) -> (u32, GidClass) {
    let ranking = ranked(entries);
    let row = ranking.selected().expect("a choice");
    (row.index, row.class.expect("a class"))
}

#[test]
fn classes_come_in_the_order_of_the_design() {
    let unknown = GidType::UNKNOWN;
    let entries = [
        row(10, unknown, V4, Some("eth0")),
        v2(9, LINK_LOCAL, Some("docker0")),
        v2(8, V4, Some("docker0")),
        v2(7, LINK_LOCAL, None),
        v2(6, LINK_LOCAL, Some("eth0")),
        v2(5, V4, None),
        v2(4, V6, Some("eth0")),
        v2(3, V4, Some("eth0")),
        row(1, GidType::RoceV1, V4, Some("eth0")),
        row(2, GidType::Other(9), V6, None),
    ];
    let ranking = ranked(&entries);
    assert_eq!(order(&ranking), [3, 4, 5, 6, 7, 8, 9, 10, 2]);
    let classes: Vec<_> = ranking
        .rows()
        .iter()
        .map(|row| row.class.map(GidClass::number))
        .collect();
    let expected = [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.5, 5.5, 6.0];
    assert_eq!(classes, expected.map(Some));
    assert_eq!(ranking.rows()[9].reason.verdict, Verdict::V1BesideV2);
}

#[test]
fn roce_v1_is_used_only_without_v2_and_after_unknown_types() {
    let v1 = row(0, GidType::RoceV1, V4, Some("eth0"));
    let ib = row(1, GidType::InfiniBand, V4, Some("eth0"));
    assert_eq!(selected(std::slice::from_ref(&v1)), (0, GidClass::RoceV1));
    assert_eq!(selected(std::slice::from_ref(&ib)), (1, GidClass::RoceV1));
    let unknown = row(9, GidType::UNKNOWN, LINK_LOCAL, None);
    assert_eq!(selected(&[v1.clone(), unknown]), (9, GidClass::UnknownType));
    // A v2 row that is itself rejected keeps no v1 row out.
    let null = v2(3, "::", Some("eth0"));
    assert_eq!(selected(&[v1, null]), (0, GidClass::RoceV1));
}

/// The reference's table of cases (transfer-engine.md 5.6), with what this ranking makes of them:
/// private ranges are ordinary, link-local has a class of its own, v1 stays out beside v2.
#[test]
fn the_reference_cases_are_ranked_by_the_design() {
    let private = "10.20.2.72";
    let nd = Some("eth0");
    let v1 = |index, gid, netdev| row(index, GidType::RoceV1, gid, netdev);
    let cases: &[(&str, Vec<GidEntry>, u32, GidClass)] = &[
        (
            "netdev preferred",
            vec![v2(0, V4, None), v2(1, V4, nd)],
            1,
            GidClass::NetdevGlobal,
        ),
        (
            "link-local demoted",
            vec![v2(0, LINK_LOCAL, nd), v2(1, V4, nd)],
            1,
            GidClass::NetdevGlobal,
        ),
        (
            "overlay demoted",
            vec![v2(0, V4, Some("flannel.1")), v2(1, V4, nd)],
            1,
            GidClass::NetdevGlobal,
        ),
        (
            "global without netdev beats link-local",
            vec![v2(0, LINK_LOCAL, nd), v2(1, V4, None)],
            1,
            GidClass::Global,
        ),
        ("only one", vec![v2(3, V4, None)], 3, GidClass::Global),
        (
            "only RoCE v1",
            vec![v1(0, V4, None), v1(2, V4, None)],
            0,
            GidClass::RoceV1,
        ),
        (
            "invalid skipped",
            vec![v2(1, "::", nd), v2(2, V4, nd)],
            2,
            GidClass::NetdevGlobal,
        ),
        (
            "tie-break",
            vec![v2(3, V4, nd), v2(1, V4, nd)],
            1,
            GidClass::NetdevGlobal,
        ),
        (
            "fresh snapshot",
            vec![v2(1, V4, nd), v2(3, V4, None)],
            1,
            GidClass::NetdevGlobal,
        ),
        (
            "#2729",
            vec![
                v1(0, LINK_LOCAL, nd),
                v2(1, LINK_LOCAL, nd),
                v1(2, private, nd),
                v2(3, private, nd),
            ],
            3,
            GidClass::NetdevGlobal,
        ),
        // Not "routable beats private": 5 in the reference.
        (
            "private is ordinary",
            vec![v2(1, private, nd), v2(5, V4, nd)],
            1,
            GidClass::NetdevGlobal,
        ),
        (
            "overlay below private",
            vec![v2(1, private, Some("cni0")), v2(4, private, nd)],
            4,
            GidClass::NetdevGlobal,
        ),
        // Not "link-local with netdev beats private without": 1 in the reference.
        (
            "private without netdev beats link-local",
            vec![v2(1, LINK_LOCAL, nd), v2(3, private, None)],
            3,
            GidClass::Global,
        ),
        (
            "only link-local",
            vec![v2(1, LINK_LOCAL, nd), v2(2, LINK_LOCAL, nd)],
            1,
            GidClass::NetdevLinkLocal,
        ),
    ];
    for (what, entries, index, class) in cases {
        assert_eq!(selected(entries), (*index, *class), "{what}");
    }
    let infiniband = [row(0, GidType::InfiniBand, LINK_LOCAL, nd), v2(1, V4, nd)];
    let mut view = table(&infiniband, &[]);
    view.link_layer = LinkLayer::InfiniBand;
    let ranking = rank(&view, &GidPolicy::default());
    assert_eq!(
        ranking.selected().expect("a choice").index,
        0,
        "IB not penalised"
    );
}

#[test]
fn a_dead_address_goes_after_every_live_row_of_its_class() {
    let address = |text: &str| -> Subnet { text.parse().expect("a subnet") };
    let netdevs = [
        NetdevFacts {
            up: Some(true),
            addresses: Some(vec![address("2001:db8::1/64")]),
            ..NetdevFacts::named("eth0")
        },
        NetdevFacts {
            up: Some(false),
            ..NetdevFacts::named("eth1")
        },
    ];
    let entries = [
        v2(0, V4, Some("eth0")),
        v2(1, "198.51.100.2", Some("eth1")),
        v2(2, V6, Some("eth0")),
        v2(3, V4, None),
    ];
    let ranking = rank(&table(&entries, &netdevs), &GidPolicy::default());
    assert_eq!(order(&ranking), [2, 1, 0, 3]);
    assert!(
        ranking.accepted()[2]
            .reason
            .to_string()
            .contains("no longer has this address")
    );
}

#[test]
fn an_interface_known_by_number_alone_is_found() {
    let netdevs = [NetdevFacts {
        index: 7,
        kind: NetdevKind::Tunnel,
        ..NetdevFacts::named("ovl")
    }];
    let mut entry = v2(0, V4, Some(""));
    entry.netdev = Some(Netdev {
        index: 7,
        name: String::new(),
    });
    let entries = [entry];
    let policy = GidPolicy {
        netdevs: vec!["ovl".into()],
        ..GidPolicy::default()
    };
    let ranking = rank(&table(&entries, &netdevs), &policy);
    assert_eq!(
        ranking.selected().expect("a choice").class,
        Some(GidClass::OverlayGlobal)
    );
}

#[test]
fn an_explicit_index_is_honoured_with_a_warning_or_refused() {
    let entries = [
        v2(0, LINK_LOCAL, None),
        v2(1, V4, Some("eth0")),
        v2(2, "::", None),
    ];
    let choose = |index| {
        let policy = GidPolicy {
            index: GidIndexes::every(index),
            subnets: vec!["10.0.0.0/8".parse().expect("a subnet")],
            ..GidPolicy::default()
        };
        rank(&table(&entries, &[]), &policy)
    };
    let ranking = choose(0);
    assert_eq!(ranking.selected().expect("honoured").index, 0);
    assert_eq!(
        ranking.warning(),
        Some(&Warning::ExplicitIndex { index: 0 })
    );
    assert_eq!(order(&ranking), [0]);
    for index in [2, 3, 255] {
        let error = choose(index).selected().expect_err("empty").clone();
        assert!(matches!(error, GidError::IndexUnusable { index: named, .. } if named == index));
    }
    let error = choose(256).selected().expect_err("outside").clone();
    assert!(matches!(
        error,
        GidError::IndexOutOfRange { table_len: 256, .. }
    ));
    let mut view = table(&entries, &[]);
    view.table_len = Some(1);
    let policy = GidPolicy {
        index: GidIndexes::every(1),
        ..GidPolicy::default()
    };
    assert!(
        rank(&view, &policy).accepted().is_empty(),
        "a row outside of the table"
    );
}

#[test]
fn pairs_prefer_the_peers_family_then_its_subnet() {
    let netdevs = [NetdevFacts {
        addresses: Some(vec![
            "10.61.1.5/16".parse().expect("a subnet"),
            "10.62.1.5/16".parse().expect("a subnet"),
            "fd00:1::5/64".parse().expect("a subnet"),
        ]),
        ..NetdevFacts::named("eth0")
    }];
    let eth0 = Some("eth0");
    let entries = [
        v2(3, "10.61.1.5", eth0),
        v2(5, "10.62.1.5", eth0),
        v2(7, "fd00:1::5", eth0),
    ];
    let view = table(&entries, &netdevs);
    let ranking = rank(&view, &GidPolicy::default());
    let first = |peers: &[&str]| {
        let peers: Vec<Gid> = peers
            .iter()
            .map(|gid| gid.parse().expect("a GID"))
            .collect();
        let pairs = candidate_pairs(&view, &ranking, &peers, &[]);
        (pairs[0].local_index, pairs[0].peer.to_ip().to_string())
    };
    assert_eq!(first(&["10.62.9.9"]), (5, "10.62.9.9".into()));
    assert_eq!(first(&["10.99.9.9"]), (3, "10.99.9.9".into()));
    assert_eq!(first(&["fd00:1::9"]), (7, "fd00:1::9".into()));
    assert_eq!(first(&["fe80::9", "10.62.9.9"]), (5, "10.62.9.9".into()));
    // Without prefixes, the longest common one.
    let bare = table(&entries, &[]);
    let pairs = candidate_pairs(&bare, &ranking, &["10.62.9.9".parse().expect("a GID")], &[]);
    let indexes: Vec<_> = pairs.iter().map(|pair| pair.local_index).collect();
    assert_eq!(indexes, [5, 3, 7]);
}

#[test]
fn pairs_never_repeat_and_end_after_four() {
    let entries: Vec<_> = (0..9)
        .map(|index| v2(index, &format!("10.0.0.{index}"), Some("eth0")))
        .collect();
    let view = table(&entries, &[]);
    let ranking = rank(&view, &GidPolicy::default());
    let peers: Vec<Gid> = ["10.0.0.77", "10.0.0.77", "::", "10.0.0.78"]
        .iter()
        .map(|gid| gid.parse().expect("a GID"))
        .collect();
    let mut tried = Vec::new();
    while let Some(pair) = candidate_pairs(&view, &ranking, &peers, &tried).first() {
        assert!(!tried.contains(pair) && !pair.peer.is_null());
        tried.push(*pair);
    }
    assert_eq!(tried.len(), PAIRS_MAX);
}

fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

struct Port {
    hysteresis: Hysteresis,
}

impl Port {
    fn new() -> Self {
        Self {
            hysteresis: Hysteresis::new(HysteresisTimes::default()),
        }
    }

    fn read(&mut self, at_ms: u64, entries: &[GidEntry]) -> Steady {
        let view = table(entries, &[]);
        let ranking = rank(&view, &GidPolicy::default());
        self.hysteresis.handle(millis(at_ms), &view, &ranking)
    }

    fn index(&self) -> Option<u32> {
        self.hysteresis.in_use().map(|used| used.index)
    }
}

#[test]
fn a_better_class_waits_until_it_has_settled() {
    let eth0 = Some("eth0");
    let weak = v2(1, LINK_LOCAL, eth0);
    let strong = v2(3, V4, eth0);
    let both = [weak.clone(), strong.clone()];
    let mut port = Port::new();
    assert!(matches!(
        port.read(0, std::slice::from_ref(&weak)),
        Steady::Changed(_)
    ));
    assert_eq!(port.read(100, &both), Steady::Unchanged);
    assert_eq!(port.hysteresis.next_timeout(), Some(millis(2_100)));
    assert_eq!(port.read(2_099, &both), Steady::Unchanged);
    // Gone and back: the wait starts anew.
    assert_eq!(port.read(2_100, &[weak]), Steady::Unchanged);
    assert_eq!(port.hysteresis.next_timeout(), None);
    assert_eq!(port.read(2_200, &both), Steady::Unchanged);
    assert!(matches!(port.read(4_200, &both), Steady::Changed(_)));
    assert_eq!(port.index(), Some(3));
}

#[test]
fn a_worse_class_is_held_back_and_then_taken() {
    let weak = [v2(1, LINK_LOCAL, Some("eth0"))];
    let strong = [v2(3, V4, Some("eth0"))];
    let mut port = Port::new();
    assert!(matches!(port.read(0, &strong), Steady::Changed(_)));
    assert_eq!(
        port.read(10, &weak),
        Steady::Held {
            until: millis(2_010)
        }
    );
    assert_eq!(port.read(20, &[]), Steady::Unusable);
    assert_eq!(port.index(), Some(3), "the last GID's text stays");
    assert_eq!(
        port.read(30, &weak),
        Steady::Held {
            until: millis(2_030)
        }
    );
    assert!(matches!(port.read(2_030, &weak), Steady::Changed(_)));
    // Of the published class or better: at once.
    assert!(matches!(port.read(2_040, &strong), Steady::Changed(_)));
}

#[test]
fn family_and_index_never_move_a_working_choice() {
    let eth0 = Some("eth0");
    let six = v2(5, V6, eth0);
    let mut port = Port::new();
    assert!(matches!(
        port.read(0, std::slice::from_ref(&six)),
        Steady::Changed(_)
    ));
    for at in [1, 9_000] {
        let entries = [v2(0, V4, eth0), six.clone(), v2(7, V4, eth0)];
        assert_eq!(port.read(at, &entries), Steady::Unchanged);
    }
}

#[test]
fn a_v1_row_in_use_gives_way_to_v2_only_after_settling() {
    let v1 = row(0, GidType::RoceV1, V4, Some("eth0"));
    let both = [v1.clone(), v2(1, V4, Some("eth0"))];
    let mut port = Port::new();
    assert!(matches!(port.read(0, &[v1]), Steady::Changed(_)));
    assert_eq!(port.read(1, &both), Steady::Unchanged);
    assert!(matches!(port.read(2_001, &both), Steady::Changed(_)));
}

/// Steps of tests/data/gid-event-sequences.json, by report.
fn sequence(id: &str) -> serde_json::Value {
    let text = include_str!("../../tests/data/gid-event-sequences.json");
    let all: serde_json::Value = serde_json::from_str(text).expect("the cases are JSON");
    let all = all.as_array().expect("a list");
    all.iter()
        .find(|case| case["id"] == id)
        .expect("the case")
        .clone()
}

fn step_entries(step: &serde_json::Value) -> Vec<GidEntry> {
    let rows = step["table"].as_array().expect("a table").iter();
    rows.map(|entry| GidEntry {
        index: u32::try_from(entry["index"].as_u64().expect("an index")).expect("small"),
        gid: entry["gid"]
            .as_str()
            .expect("a gid")
            .parse()
            .expect("a gid"),
        gid_type: match entry["type"].as_str() {
            Some("RoCE v2") => GidType::RoceV2,
            _ => GidType::RoceV1,
        },
        netdev: entry["ndev"].as_str().map(|name| Netdev {
            index: 0,
            name: name.into(),
        }),
    })
    .collect()
}

#[test]
fn e08_after_a_flap_link_local_is_held_back_and_the_new_index_is_used() {
    let case = sequence("E08");
    let steps: Vec<_> = case["steps"]
        .as_array()
        .expect("steps")
        .iter()
        .map(step_entries)
        .collect();
    let mut port = Port::new();
    assert!(matches!(port.read(0, &steps[0]), Steady::Changed(_)));
    assert_eq!(port.index(), Some(3));
    port.hysteresis.port_down();
    // At t = 40 the port is not active yet: the observer does not ask. At 41 it is.
    assert_eq!(
        port.read(41_000, &steps[3]),
        Steady::Held {
            until: millis(43_000)
        }
    );
    let moved = port.read(42_500, &steps[4]);
    assert!(
        matches!(&moved, Steady::Moved(selection) if selection.index == 6),
        "{moved:?}"
    );
}

#[test]
fn e12_a_storm_of_events_without_a_change_changes_nothing() {
    let case = sequence("E12");
    let steps: Vec<_> = case["steps"]
        .as_array()
        .expect("steps")
        .iter()
        .map(step_entries)
        .collect();
    let mut port = Port::new();
    assert!(matches!(port.read(0, &steps[0]), Steady::Changed(_)));
    for event in 0..40 {
        assert_eq!(port.read(5_000 + event * 75, &steps[1]), Steady::Unchanged);
    }
    // A temporary IPv6 address came: no better class.
    for at in [60_000, 70_000] {
        assert_eq!(port.read(at, &steps[2]), Steady::Unchanged);
    }
}

fn any_gid() -> impl Strategy<Value = Gid> {
    prop_oneof![
        any::<[u8; 16]>().prop_map(Gid),
        any::<[u8; 4]>().prop_map(|bytes| Gid::from_ipv4(bytes.into())),
        any::<[u8; 8]>().prop_map(|id| {
            let mut bytes = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            bytes[8..].copy_from_slice(&id);
            Gid(bytes)
        }),
        Just(Gid::NULL),
    ]
}

fn any_entry() -> impl Strategy<Value = GidEntry> {
    let netdev = prop_oneof![
        Just(None),
        "(eth[0-3]|docker0|flannel.1|)".prop_map(|name| Some(Netdev { index: 2, name })),
    ];
    (0..300_u32, any_gid(), 0..5_u32, netdev).prop_map(|(index, gid, gid_type, netdev)| GidEntry {
        index,
        gid,
        gid_type: GidType::from_raw(gid_type),
        netdev,
    })
}

fn any_facts() -> impl Strategy<Value = NetdevFacts> {
    let subnet = (any_gid(), 0..=32_u8)
        .prop_map(|(gid, bits)| Subnet::new(gid.to_ip(), bits).expect("short"));
    let addresses = proptest::option::of(proptest::collection::vec(subnet, 0..4));
    ("eth[0-3]", any::<Option<bool>>(), addresses).prop_map(|(name, up, addresses)| NetdevFacts {
        up,
        addresses,
        ..NetdevFacts::named(name)
    })
}

fn any_policy() -> impl Strategy<Value = GidPolicy> {
    let index = prop_oneof![
        4 => Just(GidIndexes::default()),
        1 => (0..300_u32).prop_map(GidIndexes::every),
    ];
    let subnets = prop_oneof![
        3 => Just(vec![]),
        1 => (any_gid(), 0..=32_u8).prop_map(|(gid, bits)| vec![Subnet::new(gid.to_ip(), bits).expect("short")]),
    ];
    (index, subnets).prop_map(|(index, subnets)| GidPolicy {
        index,
        subnets,
        netdevs: vec![],
    })
}

proptest! {
    #[test]
    fn ranking_is_total_and_never_selects_a_rejected_row(
        entries in proptest::collection::vec(any_entry(), 0..40),
        netdevs in proptest::collection::vec(any_facts(), 0..4),
        policy in any_policy(),
        infiniband: bool,
    ) {
        let mut view = table(&entries, &netdevs);
        if infiniband {
            view.link_layer = LinkLayer::InfiniBand;
        }
        let ranking = rank(&view, &policy);
        prop_assert_eq!(ranking.rows().len(), entries.len());
        let mut positions: Vec<_> = ranking.rows().iter().map(|row| row.entry).collect();
        positions.sort_unstable();
        prop_assert!((0..entries.len()).map(Some).eq(positions), "every row appears once");
        for (rank, row) in (0..).zip(ranking.accepted()) {
            prop_assert!(row.is_accepted() && row.rank == Some(rank) && !row.gid.is_null());
            prop_assert!(policy.index != GidIndexes::default()
                || policy.subnets.is_empty()
                || policy.subnets.iter().any(|subnet| subnet.contains_gid(&row.gid)));
        }
        for row in &ranking.rows()[ranking.accepted().len()..] {
            prop_assert!(!row.is_accepted() && row.rank.is_none());
            prop_assert!(!row.reason.to_string().is_empty());
        }
        match ranking.selected() {
            Ok(row) => prop_assert_eq!(row.rank, Some(0)),
            Err(error) => prop_assert!(ranking.accepted().is_empty() && !error.to_string().is_empty()),
        }
    }

    #[test]
    fn ranking_does_not_depend_on_the_order_of_reading(
        entries in proptest::collection::vec(any_entry(), 0..20),
        seed: u64,
        policy in any_policy(),
    ) {
        let mut shuffled = entries.clone();
        let mut state = seed | 1;
        for last in (1..shuffled.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            shuffled.swap(last, (state >> 33) as usize % (last + 1));
        }
        let summary = |entries: &[GidEntry]| {
            let ranking = rank(&table(entries, &[]), &policy);
            let rows = ranking.rows().iter();
            let rows: Vec<_> = rows
                .map(|row| (row.entry.map(|at| entries[at].clone()), row.class, row.rank, row.reason))
                .collect();
            (rows, ranking.selected().map_err(Clone::clone).map(|row| row.index))
        };
        prop_assert_eq!(summary(&entries), summary(&shuffled));
    }

    #[test]
    fn ranking_is_stable_a_worse_newcomer_moves_nobody(
        entries in proptest::collection::vec(any_entry(), 1..20),
    ) {
        let before = order(&ranked(&entries));
        let mut more = entries.clone();
        more.push(row(299, GidType::RoceV1, "fe80::1", None));
        let after: Vec<_> = order(&ranked(&more)).into_iter().collect();
        prop_assert_eq!(&after[..before.len()], &before[..]);
    }

    #[test]
    fn pairs_are_distinct_accepted_and_at_most_four(
        entries in proptest::collection::vec(any_entry(), 0..20),
        peers in proptest::collection::vec(any_gid(), 0..6),
    ) {
        let view = table(&entries, &[]);
        let ranking = rank(&view, &GidPolicy::default());
        let pairs = candidate_pairs(&view, &ranking, &peers, &[]);
        prop_assert!(pairs.len() <= PAIRS_MAX);
        for (at, pair) in pairs.iter().enumerate() {
            prop_assert!(!pairs[..at].contains(pair) && peers.contains(&pair.peer));
            prop_assert!(ranking.accepted().iter().any(|row| row.index == pair.local_index));
        }
    }
}
