use proptest::prelude::*;

use super::*;

fn rail(name: &str, address: &str) -> RailFacts {
    let subnet: Subnet = address.parse().expect("a subnet");
    RailFacts {
        name: name.into(),
        gid: Gid::from_ip(subnet.address()),
        subnet: Some(subnet),
        state: RailState::Up,
        speed_mbps: 100_000,
    }
}

fn matrix(text: &str) -> Matrix {
    serde_json::from_str(text).expect("a matrix")
}

fn location(text: &str) -> Location {
    text.parse().expect("a location")
}

/// Names of pairs by tier.
fn names(own: End<'_>, peer: End<'_>, affinity: &PeerAffinity) -> Vec<Vec<(String, String)>> {
    let mut tiers: Vec<Vec<_>> = Vec::new();
    for pair in select(own, peer, affinity) {
        tiers.resize(pair.tier as usize + 1, Vec::new());
        let pair_names = (
            own.devices[pair.local].name.clone(),
            peer.devices[pair.peer].name.clone(),
        );
        tiers[pair.tier as usize].push(pair_names);
    }
    tiers
}

fn pair(left: &str, right: &str) -> (String, String) {
    (left.to_owned(), right.to_owned())
}

const TWO: &str = r#"{"cpu:0":[["a"],["b"]],"cpu:1":[["b"],["a"]]}"#;

#[test]
fn near_rails_come_first_at_both_ends() {
    let matrix = matrix(TWO);
    let devices = [rail("a", "10.0.0.1/16"), rail("b", "10.0.0.2/16")];
    let own = End {
        location: &location("cpu:0"),
        matrix: &matrix,
        devices: &devices,
    };
    let peer = End {
        location: &location("cpu:1"),
        ..own
    };
    let tiers = names(own, peer, &PeerAffinity::None);
    assert_eq!(
        tiers.concat(),
        [
            pair("a", "b"),
            pair("a", "a"),
            pair("b", "b"),
            pair("b", "a")
        ]
    );
    assert_eq!(tiers.len(), 4);
    // A location nobody knows counts as anywhere: all share.
    let anywhere = End {
        location: &location("npu:7"),
        ..own
    };
    assert_eq!(names(anywhere, anywhere, &PeerAffinity::None).len(), 1);
}

#[test]
fn t11_all_equally_near_rails_share() {
    let sixteen: Vec<_> = (0..16)
        .map(|at| rail(&format!("mlx5_{at}"), &format!("10.0.0.{at}/16")))
        .collect();
    let near = |gpu: usize| {
        format!(
            r#""cuda:{gpu}":[["mlx5_{}","mlx5_{}"],[]]"#,
            2 * gpu,
            2 * gpu + 1
        )
    };
    let text: Vec<_> = (0..8).map(near).collect();
    let matrix = matrix(&format!("{{{}}}", text.join(",")));
    let mut used = BTreeSet::new();
    for gpu in 0..8 {
        let own = End {
            location: &location(&format!("cuda:{gpu}")),
            matrix: &matrix,
            devices: &sixteen,
        };
        let pairs = select(own, own, &PeerAffinity::None);
        used.extend(
            pairs
                .iter()
                .filter(|pair| pair.tier == 0)
                .map(|pair| pair.local),
        );
    }
    assert_eq!(used.len(), 16, "no rail is idle");
}

#[test]
fn t16_the_peers_rail_in_the_same_subnet_comes_first() {
    let networks = [
        "10.112.0.{}/16",
        "10.113.2.{}/24",
        "10.113.3.{}/24",
        "10.113.4.{}/24",
    ];
    let rails = |host: &str| -> Vec<_> {
        let numbered = networks.iter().enumerate();
        numbered
            .map(|(at, network)| rail(&format!("mlx5_{at}"), &network.replace("{}", host)))
            .collect()
    };
    let names: Vec<_> = (0..4).map(|at| format!("\"mlx5_{at}\"")).collect();
    let matrix = matrix(&format!(r#"{{"cpu:0":[[{}],[]]}}"#, names.join(",")));
    let (left, right) = (rails("13"), rails("14"));
    let own = End {
        location: &location("cpu:0"),
        matrix: &matrix,
        devices: &left,
    };
    let peer = End {
        devices: &right,
        ..own
    };
    let pairs = select(own, peer, &PeerAffinity::None);
    let first: Vec<_> = pairs.iter().filter(|pair| pair.tier == 0).collect();
    assert_eq!(first.len(), 4);
    assert!(first.iter().all(|pair| pair.local == pair.peer));
    assert_eq!(
        pairs.len(),
        16,
        "the others remain, should a router join the subnets"
    );
}

#[test]
fn state_speed_and_withdrawal_count() {
    let matrix = matrix(r#"{"cpu:0":[["a","b","c","d","ghost"],[]]}"#);
    let mut devices = [
        rail("a", "10.0.0.1/16"),
        rail("b", "10.0.0.2/16"),
        rail("c", "10.0.0.3/16"),
        rail("d", "10.0.0.4/16"),
        rail("withdrawn", "10.0.0.5/16"),
    ];
    devices[0].state = RailState::Recovering;
    devices[1].state = RailState::Down;
    devices[2].speed_mbps = 25_000;
    let own = End {
        location: &location("cpu:0"),
        matrix: &matrix,
        devices: &devices,
    };
    let tiers = names(own, own, &PeerAffinity::None);
    assert_eq!(tiers[0], [pair("d", "d")]);
    assert_eq!(tiers[1], [pair("c", "c"), pair("c", "d"), pair("d", "c")]);
    let all = tiers.concat();
    assert!(
        all.iter()
            .all(|(left, _)| left != "b" && left != "withdrawn" && left != "ghost")
    );
    assert_eq!(all.len(), 9);
}

#[test]
fn what_cannot_talk_comes_last_and_either_ends_prefix_tells_it() {
    let matrix = matrix(r#"{"cpu:0":[["a","b","c"],[]]}"#);
    let own = [rail("a", "10.0.0.1/8")];
    // As seen from the own end all are one network; the peer's prefixes are longer.
    let mut peers = [
        rail("a", "10.1.0.2/16"),
        rail("b", "10.0.0.3/16"),
        rail("c", "fd00::1/64"),
    ];
    let left = End {
        location: &location("cpu:0"),
        matrix: &matrix,
        devices: &own,
    };
    let tiers = |devices: &[RailFacts]| {
        let right = End { devices, ..left };
        names(left, right, &PeerAffinity::None)
    };
    let expected = [
        vec![pair("a", "b")],
        vec![pair("a", "a")],
        vec![pair("a", "c")],
    ];
    assert_eq!(tiers(&peers), expected);
    // Without a prefix nothing speaks against a pair of one family.
    for peer in &mut peers {
        peer.subnet = None;
    }
    let expected = [vec![pair("a", "a"), pair("a", "b")], vec![pair("a", "c")]];
    assert_eq!(tiers(&peers), expected);
}

#[test]
fn no_wish_of_the_operators_is_worth_a_rail_that_is_not_proved() {
    let matrix = matrix(r#"{"cpu:0":[["a","b"],[]]}"#);
    let mut devices = [rail("a", "10.0.0.1/16"), rail("b", "10.0.0.2/16")];
    devices[0].state = RailState::Recovering;
    let own = End {
        location: &location("cpu:0"),
        matrix: &matrix,
        devices: &devices,
    };
    let there = [rail("a", "10.0.0.3/16")];
    let peer = End {
        devices: &there,
        ..own
    };
    let tiers = names(own, peer, &PeerAffinity::SameName);
    assert_eq!(tiers, [[pair("b", "a")], [pair("a", "a")]]);
}

#[test]
fn a_location_without_any_nic_counts_as_anywhere() {
    let matrix = matrix(r#"{"cpu:0":[["a"],["b"]],"cuda:0":[[],[]]}"#);
    let devices = [rail("a", "10.0.0.1/16"), rail("b", "10.0.0.2/16")];
    let own = End {
        location: &location("cuda:0"),
        matrix: &matrix,
        devices: &devices,
    };
    let tiers = names(own, own, &PeerAffinity::None);
    assert_eq!(tiers.len(), 1);
    assert_eq!(tiers[0].len(), 4);
}

#[test]
fn equally_good_pairs_are_in_the_order_of_their_names() {
    let matrix = matrix(r#"{"cpu:0":[["b","a"],[]]}"#);
    let devices = [rail("b", "10.0.0.2/16"), rail("a", "10.0.0.1/16")];
    let own = End {
        location: &location("cpu:0"),
        matrix: &matrix,
        devices: &devices,
    };
    let tiers = names(own, own, &PeerAffinity::None);
    let expected = [
        pair("a", "a"),
        pair("a", "b"),
        pair("b", "a"),
        pair("b", "b"),
    ];
    assert_eq!(tiers[0], expected);
}

#[test]
fn affinities_keep_their_meaning_and_pin_nothing() {
    let matrix = matrix(r#"{"cuda:0":[["a","b"],["c"]],"cpu:0":[["a","b","c"],[]]}"#);
    let devices = [
        rail("a", "10.0.0.1/16"),
        rail("b", "10.0.0.2/16"),
        rail("c", "10.0.0.3/16"),
    ];
    let own = End {
        location: &location("cuda:0"),
        matrix: &matrix,
        devices: &devices,
    };
    let tiers = names(own, own, &PeerAffinity::SameName);
    assert_eq!(tiers[0], [pair("a", "a"), pair("b", "b")]);
    let map = PeerAffinity::Map(BTreeMap::from([
        ("a".to_owned(), vec!["b".to_owned()]),
        ("b".to_owned(), vec!["c".to_owned()]),
    ]));
    let tiers = names(own, own, &map);
    assert_eq!(tiers[0], [pair("a", "b")], "c is not preferred at the peer");
    assert_eq!(tiers.concat().len(), 9, "others remain for retries");
    let host = End {
        location: &location("cpu:0"),
        ..own
    };
    assert_eq!(
        names(host, host, &map).len(),
        1,
        "for memory of devices only"
    );
}

#[test]
fn affinity_settings_are_read_strictly() {
    let read = |variables: &[(&str, &str)]| {
        PeerAffinity::from_env(|name| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, text)| (*text).to_owned())
        })
    };
    assert_eq!(read(&[]).expect("none"), PeerAffinity::None);
    assert_eq!(
        read(&[("MC_ENABLE_DEST_DEVICE_AFFINITY", "0")]).expect("presence counts"),
        PeerAffinity::SameName
    );
    let off = [
        ("RERAIL_ENABLE_DEST_DEVICE_AFFINITY", "0"),
        ("MC_ENABLE_DEST_DEVICE_AFFINITY", "1"),
    ];
    assert_eq!(read(&off).expect("RERAIL_ wins"), PeerAffinity::None);
    let map = [
        ("MC_ENABLE_HCA_PEER_AFFINITY", "True"),
        ("MC_NIC_PEER_AFFINITY", "a=b, c;d=e;"),
    ];
    let PeerAffinity::Map(map) = read(&map).expect("a map") else {
        panic!("not a map");
    };
    assert_eq!(map["a"], ["b", "c"]);
    for text in ["", "a", "a=", "=b", "a=b;a=c", "a=b,,c"] {
        let variables = [
            ("MC_ENABLE_HCA_PEER_AFFINITY", "1"),
            ("MC_NIC_PEER_AFFINITY", text),
        ];
        assert!(read(&variables).is_err(), "{text}");
    }
    assert!(read(&[("MC_ENABLE_HCA_PEER_AFFINITY", "yes")]).is_err());
    let both = [
        ("MC_ENABLE_HCA_PEER_AFFINITY", "1"),
        ("MC_ENABLE_DEST_DEVICE_AFFINITY", ""),
    ];
    assert!(
        read(&both)
            .expect_err("a contradiction")
            .to_string()
            .contains("not both")
    );
}

fn any_devices() -> impl Strategy<Value = Vec<RailFacts>> {
    let one = ("[a-e]", 0..3_u8, any::<[u8; 4]>(), 0..3_u32, any::<bool>());
    let one = one.prop_map(|(name, state, address, speed_mbps, v4)| RailFacts {
        name,
        gid: if v4 {
            Gid::from_ipv4(address.into())
        } else {
            Gid([address[0]; 16])
        },
        subnet: v4.then(|| Subnet::new(std::net::IpAddr::from(address), 8).expect("short")),
        state: [RailState::Up, RailState::Recovering, RailState::Down][usize::from(state)],
        speed_mbps,
    });
    // Of equal names only the first counts, so that their order would matter.
    proptest::collection::vec(one, 0..6).prop_map(|mut devices| {
        let mut seen = BTreeSet::new();
        devices.retain(|rail| seen.insert(rail.name.clone()));
        devices
    })
}

fn any_matrix() -> impl Strategy<Value = Matrix> {
    let list = || proptest::collection::vec("[a-g]", 0..4);
    let entry = ("(cpu|cuda):[0-2]", (list(), list()));
    proptest::collection::btree_map(entry.0, entry.1, 0..4).prop_map(|entries| {
        let text = serde_json::to_string(&entries).expect("JSON");
        serde_json::from_str(&text).expect("a matrix")
    })
}

proptest! {
    #[test]
    fn selection_names_only_what_is_in_the_matrix_and_in_devices(
        own in (any_matrix(), any_devices(), 0..3_u32),
        peer in (any_matrix(), any_devices(), 0..3_u32),
        same_name: bool,
    ) {
        let affinity = if same_name { PeerAffinity::SameName } else { PeerAffinity::None };
        let (own_location, peer_location) = (Location::Cpu(own.2), Location::Cpu(peer.2));
        let left = End { location: &own_location, matrix: &own.0, devices: &own.1 };
        let right = End { location: &peer_location, matrix: &peer.0, devices: &peer.1 };
        let pairs = select(left, right, &affinity);
        let named = |end: End<'_>, at: usize| {
            let rail = &end.devices[at];
            rail.state != RailState::Down && end.matrix.names().any(|name| name == rail.name)
        };
        for (at, pair) in pairs.iter().enumerate() {
            prop_assert!(named(left, pair.local) && named(right, pair.peer));
            prop_assert!(at == 0 || pairs[at - 1].tier == pair.tier || pairs[at - 1].tier + 1 == pair.tier);
        }
        // The order of devices[] counts for nothing but positions.
        let reversed: Vec<_> = peer.1.iter().rev().cloned().collect();
        let again = select(left, End { devices: &reversed, ..right }, &affinity);
        let names = |pairs: &[RailPair], devices: &[RailFacts]| -> Vec<_> {
            pairs.iter().map(|pair| (pair.local, devices[pair.peer].name.clone(), pair.tier)).collect()
        };
        prop_assert_eq!(names(&pairs, &peer.1), names(&again, &reversed));
    }
}
