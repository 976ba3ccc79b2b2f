//! What is made of whole machines: which devices count, which ports are rails, what is left out.
//!
//! The reported cases and fixtures of whole servers go through the program, in the tests of
//! `rerail topology`; here is what a user of this crate alone relies on.

mod fixture;

use std::fs;
use std::os::unix::fs::symlink;

use fixture::{Nic, Port, Tree, mapped, switched_server};
use rerail_topology::{CustomMatrix, DeviceFilter, Scan, Topology, TopologyError, TopologyOptions};
use rerail_verbs::GidType;

fn topology(tree: &Tree) -> Topology {
    Topology::read(tree.root(), &TopologyOptions::default()).expect("a topology")
}

fn rails(topology: &Topology) -> Vec<&str> {
    topology
        .rails
        .iter()
        .map(|rail| rail.name.as_str())
        .collect()
}

fn with_rate(name: &str, slot: u32, rate: &'static str) -> Nic {
    let mut port = Port::new(1, "10.0.0.1", "eth0");
    port.gbit = rate;
    Nic::new(name, &format!("pci0000:00/0000:00:0{slot}.0"), 0).ports(vec![port])
}

fn devices(list: &str) -> TopologyOptions {
    TopologyOptions {
        devices: DeviceFilter::parse("--devices", list).expect("a list"),
        ..TopologyOptions::default()
    }
}

#[test]
fn a_device_counts_if_its_node_may_be_read_and_written() {
    let mut tree = Tree::new(1);
    for (slot, mode) in [Some(0o600), Some(0o400), Some(0o200), Some(0), None]
        .iter()
        .enumerate()
    {
        let pci = format!("pci0000:00/0000:00:0{slot}.0");
        let mut nic = Nic::new(&format!("mlx5_{slot}"), &pci, 0);
        nic.mode = *mode;
        tree.nic(&nic);
    }
    let topology = topology(&tree);
    assert_eq!(rails(&topology), ["mlx5_0"]);
    for nic in &topology.scan.nics[1..] {
        assert!(
            nic.closed_because.is_some() && !nic.is_usable(),
            "{}",
            nic.name
        );
        assert_eq!(nic.usable_ports().count(), 0);
    }
    assert_eq!(topology.warnings.len(), 4, "{:?}", topology.warnings);
}

#[test]
fn a_node_that_the_kernel_does_not_know_is_none() {
    let mut tree = Tree::new(1);
    tree.nic(&Nic::new("mlx5_0", "pci0000:00/0000:00:01.0", -1));
    let scan = Scan::read(tree.root()).expect("a scan");
    assert_eq!(scan.nics[0].numa_node, None);
}

#[test]
fn an_attribute_that_cannot_be_read_is_not_guessed() {
    let mut tree = Tree::new(1);
    let mut port = Port::new(1, "10.0.0.1", "");
    port.rows = vec![(1, mapped("10.0.0.1"), "RoCE v2", "eth0")];
    tree.nic(&Nic::new("mlx5_0", "pci0000:00/0000:00:01.0", 0).ports(vec![port]));
    let types = "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/1";
    fs::remove_file(tree.path(types)).expect("removed");
    let scan = Scan::read(tree.root()).expect("a scan");
    assert_eq!(scan.nics[0].ports[0].gids[0].gid_type, GidType::UNKNOWN);
}

#[test]
fn names_are_in_the_order_in_which_people_count() {
    let mut tree = Tree::new(1);
    for (slot, name) in ["mlx5_10", "mlx5_2", "bnxt_0"].iter().enumerate() {
        tree.nic(&Nic::new(name, &format!("pci0000:00/0000:00:0{slot}.0"), 0));
    }
    assert_eq!(rails(&topology(&tree)), ["bnxt_0", "mlx5_2", "mlx5_10"]);
}

#[test]
fn a_link_out_of_the_tree_leads_nowhere() {
    let mut tree = Tree::new(1);
    tree.nic(&Nic::new("mlx5_0", "", 0));
    let elsewhere = Tree::new(1);
    elsewhere.directory("sys/devices/pci0000:00/0000:00:01.0");
    let target = elsewhere.path("sys/devices/pci0000:00/0000:00:01.0");
    // A relative one, since an absolute one starts at the root that is given.
    let up = "../".repeat(32);
    let target = format!(
        "{up}{}",
        target.display().to_string().trim_start_matches('/')
    );
    let link = tree.path("sys/class/infiniband/mlx5_0/device");
    symlink(target, &link).expect("a link");
    assert!(link.exists(), "it leads somewhere");
    assert_eq!(Scan::read(tree.root()).expect("a scan").nics[0].pci, None);
}

#[test]
fn displays_that_are_no_gpus_do_not_count_and_visible_devices_are_exact() {
    let tree = Tree::new(1);
    for (slot, (class, vendor)) in [
        ("0x030200", "0x1a03"),
        ("0x030200", "0x10de"),
        ("0x030200", "0x10de"),
        ("0x040300", "0x10de"),
    ]
    .iter()
    .enumerate()
    {
        tree.gpu(&format!("pci0000:00/0000:00:0{slot}.0"), 0, class, vendor);
    }
    for (slot, uuid) in [(1, "GPU-12ab"), (2, "GPU-12cd")] {
        let facts = format!("proc/driver/nvidia/gpus/0000:00:0{slot}.0/information");
        tree.file(&facts, &format!("GPU UUID: \t {uuid}"));
    }
    let scan = Scan::read(tree.root()).expect("a scan");
    assert_eq!(scan.gpus.len(), 2);
    let count = |visible| scan.gpu_locations(Some(visible)).len();
    assert_eq!(count("GPU-12a"), 1);
    assert_eq!(
        count("GPU-12"),
        0,
        "which of the two is meant cannot be told"
    );
    assert_eq!(
        count("1,GPU-99,0"),
        1,
        "the first that names nothing ends the list"
    );
    assert_eq!(scan.gpu_locations(None).len(), 2);
}

#[test]
fn ports_far_slower_than_the_fastest_stay_out_unless_they_are_named() {
    let mut tree = Tree::new(1);
    tree.nic(&with_rate("mlx5_0", 0, "100 Gb/sec (4X EDR)"));
    tree.nic(&with_rate("mlx5_1", 1, "25 Gb/sec (1X EDR)"));
    tree.nic(&with_rate("mlx5_2", 2, "40 Gb/sec (4X QDR)"));
    tree.nic(&with_rate("mlx5_3", 3, "no rate"));
    let found = topology(&tree);
    assert_eq!(
        rails(&found),
        ["mlx5_0", "mlx5_2", "mlx5_3"],
        "an unknown rate is not slow"
    );
    assert!(found.warnings.concat().contains("mlx5_1"));
    let named = Topology::read(tree.root(), &devices("mlx5_1")).expect("it is there");
    assert_eq!(rails(&named), ["mlx5_1"]);
}

#[test]
fn virtual_functions_stand_back_only_beside_their_own_physical_one() {
    let mut tree = Tree::new(1);
    let function = |number: u32| format!("pci0000:00/0000:00:01.0/0000:01:00.{number}");
    for number in 0..3 {
        let mut nic = Nic::new(&format!("mlx5_{number}"), &function(number), 0);
        nic.physical_function = (number > 0).then(|| function(0));
        tree.nic(&nic);
    }
    assert_eq!(rails(&topology(&tree)), ["mlx5_0"]);
    // As in a pod that was given two of them.
    fs::remove_file(tree.path("dev/infiniband/uverbs0")).expect("removed");
    assert_eq!(rails(&topology(&tree)), ["mlx5_1", "mlx5_2"]);
}

#[test]
fn each_used_port_has_a_name_of_its_own() {
    let mut tree = Tree::new(1);
    let ports = (1..=3).map(|number| {
        let mut port = Port::new(number, &format!("10.0.{number}.1"), "eth0");
        port.active = number != 1;
        port
    });
    let ports: Vec<_> = ports.collect();
    tree.nic(&Nic::new("mlx5_1", "pci0000:00/0000:00:01.0", 0).ports(ports.clone()));
    tree.nic(&Nic::new("mlx5_10", "pci0000:00/0000:00:02.0", 0).ports(ports));
    let found = topology(&tree);
    assert_eq!(
        rails(&found),
        ["mlx5_1", "mlx5_1:3", "mlx5_10", "mlx5_10:3"]
    );
    let one = Topology::read(tree.root(), &devices("mlx5_1:3")).expect("it is there");
    assert_eq!((rails(&one), one.rails[0].port), (vec!["mlx5_1"], 3));
    for list in ["mlx5_1:9", "mlx5_2", "mlx5_1,mlx5_3"] {
        let refused = Topology::read(tree.root(), &devices(list)).expect_err(list);
        assert!(
            matches!(refused, TopologyError::UnknownDevices { .. }),
            "{refused}"
        );
    }
}

#[test]
fn what_is_not_known_to_be_far_is_near() {
    let mut tree = Tree::new(2);
    tree.nic(&Nic::new("mlx5_0", "pci0000:00/0000:00:01.0", 0));
    tree.nic(&Nic::new("mlx5_1", "pci0000:00/0000:00:02.0", 1));
    tree.nic(&Nic::new("mlx5_2", "pci0000:00/0000:00:03.0", -1));
    tree.gpu("pci0000:00/0000:00:04.0", 1, "0x030200", "0x10de");
    let found = topology(&tree);
    let preferred = |location: &str| found.matrix.entry(location).expect("an entry").preferred;
    assert_eq!(preferred("cpu:0"), ["mlx5_0", "mlx5_2"]);
    assert_eq!(preferred("cpu:1"), ["mlx5_1", "mlx5_2"]);
    // All below one host bridge: the node decides, and an unknown one is not another one.
    assert_eq!(preferred("cuda:0"), ["mlx5_1", "mlx5_2"]);
    // Several that are equally near share.
    let found = topology(&switched_server(16, 4));
    assert_eq!(
        found
            .matrix
            .entry("cuda:3")
            .expect("an entry")
            .preferred
            .len(),
        2
    );
}

#[test]
fn a_matrix_of_ones_own_is_taken_whole_or_not_at_all() {
    let tree = switched_server(8, 4);
    let with = |text: &str, list: Option<&str>| {
        let mut options = list.map_or_else(TopologyOptions::default, devices);
        options.custom = Some(CustomMatrix::parse(text));
        Topology::read(tree.root(), &options)
    };
    let text = r#" {"cpu:0": [["mlx5_3", "mlx5_1"], ["mlx5_3"]]}"#;
    let found = with(text, None).expect("a matrix");
    let entry = found.matrix.entry("cpu:0").expect("an entry");
    assert_eq!(
        (entry.preferred.len(), entry.available.len()),
        (2, 0),
        "a name counts once"
    );
    assert_eq!(rails(&found), ["mlx5_1", "mlx5_3"]);
    let found = with(text, Some("mlx5_1,mlx5_2")).expect("a matrix");
    assert_eq!(rails(&found), ["mlx5_1", "mlx5_2"], "the filter holds");
    assert_eq!(found.matrix.names().collect::<Vec<_>>(), ["mlx5_1"]);
    assert!(
        found.warnings.concat().contains("mlx5_3"),
        "and what it leaves out is said"
    );
    for (text, place) in [
        (r#"{"cpu:0": [["mlx5_9"], []]}"#, (1, 13)),
        ("{\"cpu:0\": [[], []],\n \"cpu:0\": [[], []]}", (2, 8)),
    ] {
        match with(text, None) {
            Err(TopologyError::Malformed { line, column, .. }) => {
                assert_eq!((line, column), place, "{text}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    assert!(matches!(
        with("/nonexistent", None),
        Err(TopologyError::Read { .. })
    ));
    let variables =
        |wanted: &'static str| move |name: &str| (name == wanted).then(|| text.to_owned());
    for variable in ["RERAIL_CUSTOM_TOPOLOGY", "MC_CUSTOM_TOPO_JSON"] {
        let options = TopologyOptions::from_env(variables(variable)).expect("it parses");
        assert_eq!(options.custom, Some(CustomMatrix::Inline(text.to_owned())));
    }
}

#[test]
fn addresses_belong_to_the_interface_whose_network_holds_them() {
    let tree = Tree::new(1);
    for name in ["eth0", "eth1"] {
        tree.file(&format!("sys/class/net/{name}/operstate"), "up");
    }
    let route = |name: &str, destination: &str, gateway: &str| {
        // As the kernel writes them: words of this machine's order.
        let word = |address: &str| {
            let address: std::net::Ipv4Addr = address.parse().expect("an address");
            format!("{:08X}", u32::from_ne_bytes(address.octets()))
        };
        let mask = word("255.255.0.0");
        let (destination, gateway) = (word(destination), word(gateway));
        format!("{name}\t{destination}\t{gateway}\t1\t0\t0\t0\t{mask}\t0\t0\t0")
    };
    let routes = [
        "Iface\tDestination".to_owned(),
        route("eth0", "10.1.0.0", "0.0.0.0"),
        route("eth1", "10.2.0.0", "0.0.0.0"),
        // Behind a gateway: says nothing of whose an address is.
        route("eth1", "10.1.0.0", "10.2.0.1"),
    ];
    tree.file("proc/net/route", &routes.join("\n"));
    let local = |address: &str| format!("     |-- {address}\n        /32 host LOCAL\n");
    let trie = ["10.1.0.5", "10.2.0.5", "10.9.0.5"].map(local).concat();
    tree.file("proc/net/fib_trie", &format!("Local:\n{trie}"));
    let scan = Scan::read(tree.root()).expect("a scan");
    let of = |name: &str| {
        let facts = scan
            .netdevs
            .iter()
            .find(|facts| facts.name == name)
            .expect("it is there");
        let addresses = facts.addresses.as_ref().expect("they can be read").iter();
        addresses
            .map(|subnet| subnet.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        of("eth0"),
        ["10.1.0.5/16", "10.9.0.5/32"],
        "nobody's counts as everybody's"
    );
    assert_eq!(of("eth1"), ["10.2.0.5/16", "10.9.0.5/32"]);
}
