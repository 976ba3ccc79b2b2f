//! Whole trees with random damage: files of any content, missing, unreadable, a directory in a
//! file's place and the other way round. Whatever it is, a scan ends, and what was not damaged is
//! found as if nothing had happened.
//!
//! Deliberately not here: what single attributes may hold, which is tested beside their parsers.

mod fixture;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use fixture::{Nic, Port, Tree, mapped, switched_server};
use proptest::prelude::*;
use rerail_topology::gid::{GidPolicy, rank};
use rerail_topology::select::{End, PeerAffinity, RailFacts, RailState, select};
use rerail_topology::{Location, Scan, Topology, TopologyOptions, scan};
use rerail_verbs::Gid;

/// NICs of the tree, each with two ports of four slots.
const NICS: usize = 3;

/// What is done to one file or directory.
#[derive(Clone, Debug)]
enum Damage {
    Missing,
    Content(Vec<u8>),
    Text(String),
    Long(u8),
    Directory,
    /// Opening fails, for root too.
    Loop,
    Dangling,
}

fn damage() -> impl Strategy<Value = Damage> {
    // Texts that almost are what the kernel writes find more than noise does.
    let near = prop_oneof![
        "[0-9a-fx:./ -]{0,40}",
        "(-1|0|4294967295|4294967296|18446744073709551616|1e9|0x|0xffffff|4: |\u{0}|, |.5 Gb)",
        "(RoCE v2|IB/RoCE v1|InfiniBand|Ethernet|eth0|\\.\\./\\.\\.|/|uverbs0|mlx5_0)",
        ".{0,60}",
    ];
    prop_oneof![
        Just(Damage::Missing),
        proptest::collection::vec(any::<u8>(), 0..64).prop_map(Damage::Content),
        near.prop_map(Damage::Text),
        any::<u8>().prop_map(Damage::Long),
        Just(Damage::Directory),
        Just(Damage::Loop),
        Just(Damage::Dangling),
    ]
}

fn apply(path: &Path, damage: &Damage) {
    // An earlier damage may have taken the file, or what it lay in.
    let there = path.symlink_metadata();
    if there.as_ref().is_ok_and(fs::Metadata::is_dir) {
        fs::remove_dir_all(path).expect("removed");
    } else if there.is_ok() {
        fs::remove_file(path).expect("removed");
    }
    if !path.parent().is_some_and(Path::is_dir) {
        return;
    }
    match damage {
        Damage::Missing => {}
        Damage::Content(bytes) => fs::write(path, bytes).expect("a file"),
        Damage::Text(text) => fs::write(path, text).expect("a file"),
        Damage::Long(byte) => fs::write(path, vec![*byte; 10_000]).expect("a file"),
        Damage::Directory => fs::create_dir(path).expect("a directory"),
        Damage::Loop => symlink(path.file_name().expect("a name"), path).expect("a link"),
        Damage::Dangling => symlink("nowhere", path).expect("a link"),
    }
}

/// Three NICs with a GPU each, interfaces and addresses. `order` is the order of creation, which
/// some file systems give back when they list a directory.
fn machine(order: &[usize]) -> Tree {
    let mut tree = Tree::new(2);
    tree.file(
        "proc/net/fib_trie",
        "Local:\n     |-- 10.0.1.1\n        /32 host LOCAL",
    );
    tree.file("proc/net/route", "Iface\tDestination\tGateway\tFlags");
    for &at in order {
        let netdev = ["eth0", "eth1", "eth2"][at];
        let base = format!("sys/class/net/{netdev}");
        tree.file(&format!("{base}/uevent"), "DEVTYPE=vlan");
        tree.file(&format!("{base}/operstate"), "up");
        tree.file(&format!("{base}/mtu"), "4200");
        let ports = (1..=2).map(|number| {
            let mut port = Port::new(number, "10.0.0.1", "");
            port.slots = 4;
            port.rows = vec![
                (
                    0,
                    format!("fe80:0000:0000:0000:0200:11ff:fe22:{at:04x}"),
                    "RoCE v2",
                    netdev,
                ),
                (2, mapped(&format!("10.{at}.{number}.1")), "RoCE v2", netdev),
            ];
            port
        });
        let bridge = format!("pci0000:{at}0/0000:{at}0:01.0");
        let nic = Nic::new(
            &format!("mlx5_{at}"),
            &format!("{bridge}/0000:{at}1:00.0"),
            1,
        );
        tree.nic(&nic.ports(ports.collect()));
        tree.gpu(
            &format!("{bridge}/0000:{at}1:01.0"),
            1,
            "0x030200",
            "0x10de",
        );
    }
    tree
}

/// Every path below a directory, directories first.
fn paths_below(directory: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![directory.to_owned()];
    while let Some(directory) = open.pop() {
        let entries = fs::read_dir(&directory).expect("a directory");
        for entry in entries.map(|entry| entry.expect("an entry").path()) {
            if entry.symlink_metadata().expect("there").is_dir() {
                open.push(entry.clone());
            }
            found.push(entry);
        }
    }
    found.sort();
    found
}

fn read(tree: &Tree) -> Scan {
    Scan::read(tree.root()).expect("the root is there")
}

/// What must hold of any topology, whatever it was made of.
fn check_topology(scan: Scan) {
    let topology = Topology::new(scan, &TopologyOptions::default()).expect("no options to refuse");
    let rails: BTreeSet<_> = topology
        .rails
        .iter()
        .map(|rail| rail.name.as_str())
        .collect();
    assert_eq!(rails.len(), topology.rails.len(), "a name is used once");
    for rail in &topology.rails {
        let nic = topology.scan.nic(&rail.device).expect("a rail's NIC");
        let port = nic.port(rail.port).expect("a rail's port");
        assert!(nic.closed_because.is_none() && port.is_usable());
        let table = port.table(&nic.name, &topology.scan.netdevs);
        let ranking = rank(&table, &GidPolicy::default());
        let _ = (ranking.selected(), ranking.warning());
    }
    let devices: Vec<_> = topology
        .rails
        .iter()
        .map(|rail| facts(&rail.name))
        .collect();
    for (location, entry) in topology.matrix.entries() {
        assert!(entry.names().all(|name| rails.contains(name)));
        assert_eq!(
            entry.names().count(),
            rails.len(),
            "{location} knows every rail"
        );
        let location = location.parse::<Location>().expect("a location");
        let end = End {
            location: &location,
            matrix: &topology.matrix,
            devices: &devices,
        };
        assert_eq!(
            select(end, end, &PeerAffinity::None).len(),
            rails.len() * rails.len()
        );
    }
}

fn facts(name: &str) -> RailFacts {
    RailFacts {
        name: name.to_owned(),
        gid: Gid::NULL,
        subnet: None,
        state: RailState::Up,
        speed_mbps: 0,
    }
}

fn nic<'s>(scan: &'s Scan, name: &str) -> &'s scan::Nic {
    scan.nic(name).expect("a NIC that was not damaged is found")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn damage_anywhere_is_survived(
        wounds in proptest::collection::vec((any::<prop::sample::Index>(), damage()), 1..30),
        switched: bool,
    ) {
        let tree = if switched { switched_server(8, 2) } else { machine(&[0, 1, 2]) };
        let paths = paths_below(tree.root());
        for (at, damage) in &wounds {
            apply(&paths[at.index(paths.len())], damage);
        }
        check_topology(read(&tree));
    }

    #[test]
    fn a_damaged_nic_hides_no_other(
        wounds in proptest::collection::vec((any::<prop::sample::Index>(), damage()), 1..12),
        victim in 0..NICS,
    ) {
        let tree = machine(&[0, 1, 2]);
        let before = read(&tree);
        let name = format!("mlx5_{victim}");
        let mut paths = paths_below(&tree.path(&format!("sys/class/infiniband/{name}")));
        paths.extend(paths_below(&tree.path(&format!("sys/class/infiniband_verbs/uverbs{victim}"))));
        paths.push(tree.path(&format!("dev/infiniband/uverbs{victim}")));
        paths.push(tree.path(&format!("sys/class/infiniband/{name}")));
        for (at, damage) in &wounds {
            apply(&paths[at.index(paths.len())], damage);
        }
        // Only a node that claims to be another NIC's could speak for that one.
        let ibdev = tree.path(&format!("sys/class/infiniband_verbs/uverbs{victim}/ibdev"));
        let claims = fs::read_to_string(ibdev).unwrap_or_default();
        prop_assume!(claims.trim() == name || !claims.contains("mlx5_"));
        let after = read(&tree);
        for other in (0..NICS).filter(|other| *other != victim) {
            let other = format!("mlx5_{other}");
            prop_assert_eq!(nic(&before, &other), nic(&after, &other));
        }
        prop_assert_eq!(&before.gpus, &after.gpus);
        check_topology(after);
    }

    #[test]
    fn a_damaged_port_hides_no_other(
        wounds in proptest::collection::vec((any::<prop::sample::Index>(), damage()), 1..8),
    ) {
        let tree = machine(&[0, 1, 2]);
        let before = read(&tree);
        let port = tree.path("sys/class/infiniband/mlx5_1/ports/1");
        let mut paths = paths_below(&port);
        paths.push(port);
        for (at, damage) in &wounds {
            apply(&paths[at.index(paths.len())], damage);
        }
        let after = read(&tree);
        prop_assert_eq!(nic(&before, "mlx5_1").port(2), nic(&after, "mlx5_1").port(2));
        prop_assert!(nic(&after, "mlx5_1").is_usable());
        prop_assert_eq!(nic(&before, "mlx5_0"), nic(&after, "mlx5_0"));
    }

    #[test]
    fn a_damaged_slot_hides_no_other(
        damage in damage(),
        what in prop_oneof![Just("gids"), Just("gid_attrs/types"), Just("gid_attrs/ndevs")],
        slot in 0..4_u32,
    ) {
        let tree = machine(&[0, 1, 2]);
        let before = read(&tree);
        let port = "sys/class/infiniband/mlx5_2/ports/2";
        apply(&tree.path(&format!("{port}/{what}/{slot}")), &damage);
        let after = read(&tree);
        let rows = |scan: &Scan| -> Vec<_> {
            let port = nic(scan, "mlx5_2").port(2).expect("the port").clone();
            port.gids.into_iter().filter(|row| row.index != slot).collect()
        };
        prop_assert_eq!(rows(&before), rows(&after));
        let port = nic(&after, "mlx5_2").port(2).expect("the port");
        prop_assert!(port.unreadable_gids.iter().all(|row| row.index == slot));
        if what != "gids" && slot % 2 == 1 {
            prop_assert_eq!(before, after, "an empty slot's type and interface do not matter");
        }
    }
}

#[test]
fn the_order_of_creation_changes_nothing() {
    let options = TopologyOptions::default();
    let topology = |order: &[usize]| Topology::read(machine(order).root(), &options);
    let first = topology(&[0, 1, 2]).expect("a topology");
    assert_eq!(first.rails.len(), 2 * NICS);
    for order in [[2, 1, 0], [1, 2, 0], [2, 0, 1]] {
        // Numbers of nodes follow the order of creation, as they do in the kernel.
        let mut again = topology(&order).expect("a topology");
        for nic in &mut again.scan.nics {
            nic.uverbs
                .clone_from(&first.scan.nic(&nic.name).expect("the NIC").uverbs);
        }
        assert_eq!(again, first, "{order:?}");
    }
}
