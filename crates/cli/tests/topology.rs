//! Machines of many kinds through the program's own path, `rerail topology --root`: the reported
//! cases by name, and what the command does with options that cannot be honoured.
//!
//! Deliberately not here: distances and matrices as functions, which are tested beside them.

#[path = "../../topology/tests/fixture/mod.rs"]
mod fixture;

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Output, Stdio};

use fixture::{Nic, Port, Tree, mapped, switched_server};
use serde_json::{Value, json};

fn command(args: &[&str], tree: &Tree) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rerail"));
    command.args(args).arg("--root").arg(tree.root());
    for variable in [
        "RERAIL_LOG",
        "RERAIL_DEVICES",
        "MC_TE_FILTERS",
        "RERAIL_CUSTOM_TOPOLOGY",
        "MC_CUSTOM_TOPO_JSON",
        "RERAIL_GID_INDEX",
        "MC_GID_INDEX",
        "NCCL_IB_GID_INDEX",
        "RERAIL_GID_SUBNETS",
        "RERAIL_GID_NETDEVS",
    ] {
        command.env_remove(variable);
    }
    command
}

fn run(command: &mut Command) -> Output {
    command.output().expect("the program starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn object(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    let object: Value = serde_json::from_slice(&output.stdout).expect("stdout is JSON");
    let keys: Vec<_> = object.as_object().expect("an object").keys().collect();
    assert_eq!(keys, ["gpus", "nics", "priority_matrix", "warnings"]);
    object
}

fn topology(tree: &Tree, more: &[&str]) -> Value {
    let mut args = vec!["topology", "--json"];
    args.extend(more);
    let output = run(&mut command(&args, tree));
    assert_eq!(stderr(&output), "", "nothing to complain about");
    object(&output)
}

fn rails(object: &Value) -> Vec<&str> {
    let nics = object["nics"].as_array().expect("a list").iter();
    let ports = nics.flat_map(|nic| nic["ports"].as_array().expect("a list"));
    ports.filter_map(|port| port["rail"].as_str()).collect()
}

fn case(id: &str) -> Value {
    let text = include_str!("../../topology/tests/data/topology-cases.json");
    let cases: Value = serde_json::from_str(text).expect("the cases are JSON");
    let mut cases = cases.as_array().expect("a list").iter();
    cases
        .find(|case| case["id"] == id)
        .expect("the case")
        .clone()
}

/// The `pci` list of a case as a tree.
fn pci_tree(case: &Value, nodes: u32) -> Tree {
    let mut tree = Tree::new(nodes);
    for device in case["pci"].as_array().expect("a list") {
        let name = device["name"].as_str().expect("a name");
        let sysfs = device["sysfs"].as_str().expect("a path");
        let pci = sysfs.strip_prefix("/sys/devices/").expect("a device");
        let numa = i32::try_from(device["numa"].as_i64().expect("a number")).expect("small");
        if name.starts_with("cuda:") {
            tree.gpu(pci, numa, "0x030200", "0x10de");
        } else {
            tree.nic(&Nic::new(name, pci, numa));
        }
    }
    tree
}

fn write(tree: &Tree, name: &str, text: &str) -> String {
    tree.file(name, text);
    tree.path(name).to_str().expect("UTF-8").to_owned()
}

fn netdev(tree: &Tree, name: &str, devtype: &str, mtu: u32) {
    let base = format!("sys/class/net/{name}");
    tree.file(
        &format!("{base}/uevent"),
        &format!("DEVTYPE={devtype}\nINTERFACE={name}"),
    );
    tree.file(&format!("{base}/operstate"), "up");
    tree.file(&format!("{base}/mtu"), &mtu.to_string());
}

#[test]
fn t01_siblings_under_one_switch_are_near() {
    let case = case("T01");
    let object = topology(&pci_tree(&case, 2), &[]);
    let expect = &case["expect"]["cuda:0"];
    let expected = json!([expect["preferred"], expect["avail"]]);
    assert_eq!(object["priority_matrix"]["cuda:0"], expected);
    assert_eq!(object["gpus"][0]["distances"]["mlx5_2"], "PIX");
    assert_eq!(object["gpus"][0]["distances"]["mlx5_3"], "NODE");
}

#[test]
fn t03_devices_are_found_by_their_uverbs_nodes() {
    let case = case("T03");
    let mut tree = Tree::new(1);
    let devices = case["sysfs_verbs"].as_object().expect("an object");
    for (slot, device) in devices.values().enumerate() {
        let pci = format!("pci0000:00/0000:00:0{slot}.0");
        tree.nic(&Nic::new(device.as_str().expect("a name"), &pci, 0));
    }
    for node in case["dev_infiniband"].as_array().expect("a list") {
        let path = format!("dev/infiniband/{}", node.as_str().expect("a name"));
        if !tree.path(&path).exists() {
            tree.file(&path, "");
        }
    }
    let object = topology(&tree, &[]);
    assert_eq!(rails(&object), ["mlx5_0", "mlx5_1"]);
    assert!(!tree.path("dev/infiniband/mlx5_0").exists());
}

#[test]
fn t05_the_filter_keeps_a_management_nic_out_of_matrix_and_rails() {
    let mut tree = Tree::new(1);
    for (slot, name) in ["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5", "mlx5_bond_0"]
        .iter()
        .enumerate()
    {
        tree.nic(&Nic::new(name, &format!("pci0000:00/0000:00:0{slot}.0"), 0));
    }
    let mut command = command(&["topology", "--json"], &tree);
    let output = run(command.env("MC_TE_FILTERS", "mlx5_0, mlx5_1,mlx5_4,mlx5_5,not_here"));
    let object = object(&output);
    assert_eq!(rails(&object), ["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"]);
    assert!(!object["priority_matrix"].to_string().contains("bond"));
    assert!(object["warnings"].to_string().contains("not_here"));
    let output = run(command.env("MC_TE_FILTERS", "mlx6_0"));
    assert_eq!(output.status.code(), Some(1), "a list that matches nothing");
}

#[test]
fn t07_every_active_port_is_a_rail() {
    let case = case("T07");
    let mut tree = Tree::new(2);
    for (slot, hca) in case["hcas"].as_array().expect("a list").iter().enumerate() {
        let active = hca["active_ports"].as_array().expect("a list");
        let count = hca["phys_port_cnt"].as_u64().expect("a number");
        let ports = (1..=count).map(|number| {
            let mut port = Port::new(number as u32, &format!("10.{slot}.{number}.1"), "eth0");
            port.active = active.contains(&json!(number));
            port
        });
        let name = hca["name"].as_str().expect("a name");
        let pci = format!("pci0000:{slot}0/0000:{slot}0:01.0");
        tree.nic(&Nic::new(name, &pci, 0).ports(ports.collect()));
    }
    let object = topology(&tree, &[]);
    let rails = rails(&object);
    assert_eq!(rails.len(), 32);
    assert_eq!(rails[..4], ["mlx5_0", "mlx5_0:6", "mlx5_0:9", "mlx5_0:12"]);
    assert_eq!(
        object["priority_matrix"]["cpu:0"][0]
            .as_array()
            .expect("a list")
            .len(),
        32
    );
}

#[test]
fn t09_a_custom_matrix_is_honoured_or_refused_with_its_place() {
    let tree = switched_server(8, 8);
    let good = write(
        &tree,
        "good.json",
        r#"{"cuda:1": [["mlx5_4"], ["mlx5_1"]]}"#,
    );
    let object = topology(&tree, &["--custom", &good]);
    assert_eq!(
        object["priority_matrix"],
        json!({"cuda:1": [["mlx5_4"], ["mlx5_1"]]})
    );
    assert_eq!(rails(&object), ["mlx5_1", "mlx5_4"]);
    let cases = [
        (
            "{\n \"cuda:1\": [[\"mlx_bond_4\"], []]\n}",
            ["mlx_bond_4", "line 2, column 14"],
        ),
        (
            "{\n \"cuda:1\": [[\"mlx5_4\"]]\n}",
            ["line 2", "custom.json"],
        ),
        ("{\n \"cuda one\": [[], []]\n}", ["cuda one", "line 2"]),
        ("", ["column 1", "custom.json"]),
    ];
    for (text, parts) in cases {
        let path = write(&tree, "custom.json", text);
        let output = run(&mut command(
            &["topology", "--json", "--custom", &path],
            &tree,
        ));
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(output.stdout.is_empty(), "no silent fall-back to discovery");
        for part in parts {
            assert!(
                stderr(&output).contains(part),
                "{part} is not in {}",
                stderr(&output)
            );
        }
    }
    // The text itself does as well as a file, and has places too.
    let inline = r#"{"cuda:1": [["mlx5_4"], ["mlx5_1"]]}"#;
    assert_eq!(topology(&tree, &["--custom", inline]), object);
    let mut by_variable = command(&["topology", "--json"], &tree);
    let output = run(by_variable.env("MC_CUSTOM_TOPO_JSON", inline));
    assert_eq!(self::object(&output), object);
    let broken = "{\n \"cuda:1\": [[\"mlx5_4\"], [\"mlx5_9\"]]\n}";
    let output = run(&mut command(&["topology", "--custom", broken], &tree));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("custom topology, line 2, column 26: ")
            && stderr(&output).contains("mlx5_9"),
        "{}",
        stderr(&output)
    );
    // Where both are given, the option wins over the variable.
    let mut command = command(&["topology", "--json", "--custom", &good], &tree);
    let output = run(command.env("MC_CUSTOM_TOPO_JSON", "/nonexistent"));
    assert_eq!(self::object(&output), object);
}

#[test]
fn t09_filter_and_custom_matrix_hold_together_and_say_so() {
    let tree = switched_server(8, 8);
    let custom = write(
        &tree,
        "custom.json",
        r#"{"cpu:0": [["mlx5_0", "mlx5_1"], []]}"#,
    );
    let object = topology(&tree, &["--custom", &custom, "--devices", "mlx5_1"]);
    assert_eq!(
        object["priority_matrix"],
        json!({"cpu:0": [["mlx5_1"], []]})
    );
    assert!(object["warnings"].to_string().contains("mlx5_0"));
}

#[test]
fn t11_with_sixteen_nics_every_gpu_has_two_and_none_is_idle() {
    let object = topology(&switched_server(16, 8), &[]);
    let mut used = Vec::new();
    for gpu in 0..8 {
        let entry = &object["priority_matrix"][format!("cuda:{gpu}")];
        let preferred = entry[0].as_array().expect("a list");
        assert_eq!(preferred.len(), 2, "GPU {gpu}");
        used.extend(preferred.clone());
    }
    used.sort_by_key(ToString::to_string);
    used.dedup();
    assert_eq!(used.len(), 16);
}

#[test]
fn t13_an_unknown_node_is_near_to_every_node() {
    let case = case("T13");
    let object = topology(&pci_tree(&case, 1), &[]);
    assert_eq!(
        object["priority_matrix"],
        json!({
            "cpu:0": [["mlx5_0"], []],
            "cuda:0": [["mlx5_0"], []],
        })
    );
    assert_eq!(object["nics"][0]["numa_node"], Value::Null);
    assert_eq!(object["gpus"][0]["numa_node"], Value::Null);
}

#[test]
fn t16_each_nic_keeps_its_own_interface_and_address() {
    let case = case("T16");
    let mut tree = Tree::new(1);
    let netdevs = case["netdevs"].as_array().expect("a list");
    for (slot, entry) in netdevs.iter().enumerate() {
        let name = entry["name"].as_str().expect("a name");
        let (address, _) = entry["addr"]
            .as_str()
            .expect("a text")
            .split_once('/')
            .expect("bits");
        netdev(&tree, name, "", 4200);
        let mut port = Port::new(1, address, "");
        port.rows = vec![(
            1,
            mapped(address),
            "RoCE v2",
            Box::leak(name.to_owned().into_boxed_str()),
        )];
        let pci = format!("pci0000:00/0000:00:{slot:02x}.0");
        tree.nic(&Nic::new(&format!("mlx5_{slot}"), &pci, 0).ports(vec![port]));
    }
    let object = topology(&tree, &[]);
    for (slot, entry) in netdevs.iter().enumerate() {
        let port = &object["nics"][slot]["ports"][0];
        assert_eq!(port["gid"]["ndev"], entry["name"]);
        let address = entry["addr"]
            .as_str()
            .expect("a text")
            .split('/')
            .next()
            .expect("one");
        assert_eq!(port["gid"]["gid"], mapped(address));
        assert_eq!(port["mtu_bytes"], 4096);
    }
    // Which of a peer's rails is tried first is `select`'s test of the same name.
}

#[test]
fn t18_one_root_complex_ranks_before_one_node() {
    let mut tree = Tree::new(1);
    tree.gpu(
        "pci0000:26/0000:26:01.0/0000:27:00.0",
        0,
        "0x030200",
        "0x10de",
    );
    for (slot, root) in ["26", "48", "59"].iter().enumerate() {
        let pci = format!("pci0000:{root}/0000:{root}:02.0/0000:{root}:1f.0");
        tree.nic(&Nic::new(&format!("mlx5_{slot}"), &pci, 0));
    }
    let object = topology(&tree, &[]);
    let expected = json!([["mlx5_0"], ["mlx5_1", "mlx5_2"]]);
    assert_eq!(object["priority_matrix"]["cuda:0"], expected);
    assert_eq!(
        object["gpus"][0]["distances"],
        json!({"mlx5_0": "PHB", "mlx5_1": "NODE", "mlx5_2": "NODE"})
    );
}

// Where there is no RDMA, what was asked for is had or refused: nothing is chosen instead.
#[test]
fn t21_without_hcas_an_explicit_choice_is_refused_and_not_replaced() {
    let tree = Tree::new(1);
    let object = topology(&tree, &[]);
    assert_eq!(object["nics"], json!([]));
    assert_eq!(object["priority_matrix"], json!({"cpu:0": [[], []]}));
    let output = run(&mut command(&["topology", "--devices", "mlx5_0"], &tree));
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("mlx5_0"), "{}", stderr(&output));
}

#[test]
fn t21_without_hcas_the_explicit_transport_wins() {
    let has_rdma = std::fs::read_dir("/sys/class/infiniband")
        .is_ok_and(|mut devices| devices.next().is_some());
    if has_rdma {
        eprintln!("left out: this machine has RDMA devices");
        return;
    }
    let bench = |protocol: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rerail"));
        command.args(["bench", "target", "--metadata", "P2PHANDSHAKE"]);
        command.args(["--name", "127.0.0.1", "--advertise", "127.0.0.1"]);
        command.args(["--buffer-size", "4096", "--protocol", protocol]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let refused = run(&mut bench("rdma"));
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    assert_eq!(refused.stdout, b"", "it is not ready over anything else");
    assert!(
        stderr(&refused).contains("what to do"),
        "{}",
        stderr(&refused)
    );
    let mut target = bench("tcp").spawn().expect("the program starts");
    let mut first = String::new();
    let stdout = target.stdout.take().expect("piped");
    let read = BufReader::new(stdout).read_line(&mut first);
    target.kill().expect("it can be ended");
    let ended = target.wait_with_output().expect("it ends");
    read.expect("text");
    assert!(
        first.starts_with("ready 127.0.0.1"),
        "{first}{}",
        stderr(&ended)
    );
}

#[test]
fn u08_a_device_with_a_port_is_taken_and_an_unknown_one_refused() {
    let mut tree = Tree::new(1);
    let ports = vec![
        Port::new(1, "10.0.1.1", "eth0"),
        Port::new(2, "10.0.2.1", "eth1"),
    ];
    tree.nic(&Nic::new("mlx5_0", "pci0000:00/0000:00:01.0", 0).ports(ports));
    assert_eq!(rails(&topology(&tree, &[])), ["mlx5_0", "mlx5_0:2"]);
    let object = topology(&tree, &["--devices", "mlx5_0:2"]);
    assert_eq!(
        rails(&object),
        ["mlx5_0"],
        "the first used port has the device's name"
    );
    assert_eq!(object["nics"][0]["ports"][0]["rail"], Value::Null);
    for list in ["mlx5_0:3", "mlx5_0:", "mlx5_1", "mlx5_0,mlx5_9", "", ","] {
        let output = run(&mut command(&["topology", "--devices", list], &tree));
        assert_eq!(output.status.code(), Some(1), "{list}");
    }
}

#[test]
fn an_eight_gpu_server_has_one_nearest_nic_a_gpu() {
    let object = topology(&switched_server(8, 16), &[]);
    for gpu in 0..8 {
        let entry = &object["priority_matrix"][format!("cuda:{gpu}")];
        assert_eq!(entry[0], json!([format!("mlx5_{gpu}")]));
        assert_eq!(entry[1].as_array().expect("a list").len(), 7);
    }
    let near = |node: &str| {
        object["priority_matrix"][node][0]
            .as_array()
            .expect("a list")
            .len()
    };
    assert_eq!((near("cpu:0"), near("cpu:1")), (4, 4));
}

#[test]
fn two_sockets_with_every_device_on_its_own_bridge_go_by_node() {
    let mut tree = Tree::new(2);
    for slot in 0..4 {
        let numa = slot / 2;
        tree.gpu(
            &format!("pci0000:{slot}0/0000:{slot}0:00.0"),
            numa,
            "0x120000",
            "0x1002",
        );
        tree.nic(&Nic::new(
            &format!("mlx5_{slot}"),
            &format!("pci0000:{slot}8/0000:{slot}8:00.0"),
            numa,
        ));
    }
    let object = topology(&tree, &[]);
    assert_eq!(
        object["priority_matrix"]["hip:3"],
        json!([["mlx5_2", "mlx5_3"], ["mlx5_0", "mlx5_1"]])
    );
    assert_eq!(object["gpus"][0]["vendor"], "amd");
}

#[test]
fn a_dual_port_hca_with_only_port_2_up_is_used_through_it() {
    let mut tree = Tree::new(1);
    let mut first = Port::new(1, "10.0.1.1", "eth0");
    first.active = false;
    let ports = vec![first, Port::new(2, "10.0.2.1", "eth1")];
    tree.nic(&Nic::new("mlx4_0", "pci0000:00/0000:00:01.0", 0).ports(ports));
    let object = topology(&tree, &[]);
    assert_eq!(object["nics"][0]["ports"][1]["rail"], "mlx4_0");
    assert_eq!(object["nics"][0]["ports"][0]["rail"], Value::Null);
}

#[test]
fn an_infiniband_fabric_shows_lids_and_takes_link_local() {
    let mut tree = Tree::new(1);
    let mut port = Port::new(1, "10.0.0.1", "");
    port.infiniband = true;
    port.lid = 3471;
    port.gbit = "200 Gb/sec (4X HDR)";
    port.rows = vec![(
        0,
        "fe80:0000:0000:0000:0200:1103:0022:3301".into(),
        "IB/RoCE v1",
        "",
    )];
    tree.nic(&Nic::new("mlx5_0", "pci0000:00/0000:00:01.0", 0).ports(vec![port]));
    let object = topology(&tree, &[]);
    let port = &object["nics"][0]["ports"][0];
    assert_eq!(
        (port["lid"].as_u64(), port["rate_mbps"].as_u64()),
        (Some(3471), Some(200_000))
    );
    assert_eq!(
        port["gids_in_use"], 1,
        "fe80:: with a zero interface id is an empty slot"
    );
    assert_eq!(
        (&port["gid"]["index"], &port["rail"]),
        (&json!(0), &json!("mlx5_0"))
    );
}

#[test]
fn a_pod_that_sees_three_hcas_and_may_open_one_uses_that_one() {
    let mut tree = Tree::new(1);
    for (slot, mode) in [(0, Some(0o000)), (1, Some(0o666)), (2, None)] {
        let mut nic = Nic::new(
            &format!("mlx5_{slot}"),
            &format!("pci0000:00/0000:00:0{slot}.0"),
            0,
        );
        nic.mode = mode;
        tree.nic(&nic);
    }
    let object = topology(&tree, &[]);
    assert_eq!(rails(&object), ["mlx5_1"]);
    assert_eq!(object["priority_matrix"]["cpu:0"], json!([["mlx5_1"], []]));
    for slot in [0, 2] {
        let reason = object["nics"][slot]["reason"].as_str().expect("a reason");
        assert!(
            reason.contains(&format!("/dev/infiniband/uverbs{slot}")),
            "{reason}"
        );
    }
}

#[test]
fn bonds_and_vlans_are_ordinary_and_overlays_are_not() {
    let mut tree = Tree::new(1);
    netdev(&tree, "bond0", "bond", 9000);
    netdev(&tree, "bond0.7", "vlan", 9000);
    netdev(&tree, "ovl", "vxlan", 1450);
    let mut port = Port::new(1, "10.0.0.1", "");
    port.rows = vec![
        (0, mapped("10.9.0.1"), "RoCE v2", "ovl"),
        (1, mapped("10.7.0.1"), "RoCE v2", "bond0.7"),
        (2, mapped("10.0.0.1"), "RoCE v2", "bond0"),
    ];
    tree.nic(&Nic::new("mlx5_bond_0", "pci0000:00/0000:00:01.0", 0).ports(vec![port]));
    let object = topology(&tree, &[]);
    assert_eq!(object["nics"][0]["ports"][0]["gid"]["ndev"], "bond0.7");
    let output = run(&mut command(&["gids", "--json"], &tree));
    let gids: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(gids["candidates"][2]["class"], 4);
    assert_eq!(gids["candidates"][2]["ndev"], "ovl");
}

#[test]
fn forty_hcas_with_virtual_functions_use_the_physical_ones() {
    let mut tree = Tree::new(1);
    for slot in 0..40 {
        let function = |number: i32| {
            let bus = 1 + slot / 10;
            format!("pci0000:00/0000:00:01.0/0000:{bus:02x}:00.{number}")
        };
        let own = function(0);
        let first = slot % 10 == 0;
        let pci = function(slot % 10);
        let mut nic = Nic::new(&format!("mlx5_{slot}"), &pci, -1);
        nic.physical_function = (!first).then_some(own);
        tree.nic(&nic);
    }
    let object = topology(&tree, &[]);
    assert_eq!(rails(&object), ["mlx5_0", "mlx5_10", "mlx5_20", "mlx5_30"]);
    assert!(object["warnings"].to_string().contains("virtual functions"));
    let object = topology(&tree, &["--devices", "mlx5_11"]);
    assert_eq!(rails(&object), ["mlx5_11"], "an explicit choice wins");
}

#[test]
fn a_far_slower_nic_stays_out_unless_it_is_named() {
    let mut tree = Tree::new(1);
    for (slot, rate) in [
        "100 Gb/sec (4X EDR)",
        "10 Gb/sec (1X SDR)",
        "40 Gb/sec (4X QDR)",
    ]
    .iter()
    .enumerate()
    {
        let mut port = Port::new(1, "10.0.0.1", "eth0");
        port.gbit = rate;
        tree.nic(
            &Nic::new(
                &format!("mlx5_{slot}"),
                &format!("pci0000:00/0000:00:0{slot}.0"),
                0,
            )
            .ports(vec![port]),
        );
    }
    let object = topology(&tree, &[]);
    assert_eq!(rails(&object), ["mlx5_0", "mlx5_2"]);
    assert!(object["warnings"].to_string().contains("mlx5_1"));
    assert_eq!(
        rails(&topology(&tree, &["--devices", "mlx5_1"])),
        ["mlx5_1"]
    );
    let custom = write(&tree, "custom.json", r#"{"cpu:0": [["mlx5_1"], []]}"#);
    assert_eq!(rails(&topology(&tree, &["--custom", &custom])), ["mlx5_1"]);
}

#[test]
fn a_fault_in_one_slot_port_or_nic_never_hides_the_others() {
    let mut tree = switched_server(8, 16);
    let class = "sys/class/infiniband";
    let remove = |path: String| std::fs::remove_file(tree.path(&path)).expect("removed");
    // A slot, a port's state, a NIC's node, a NIC's ports, an attribute of garbage.
    remove(format!("{class}/mlx5_0/ports/1/gids/0"));
    tree.directory(&format!("{class}/mlx5_0/ports/1/gids/0"));
    remove(format!("{class}/mlx5_1/ports/1/state"));
    std::fs::remove_dir_all(tree.path(&format!("{class}/mlx5_2/ports"))).expect("removed");
    tree.file(&format!("{class}/mlx5_3/ports/1/rate"), "\u{fffd} quick");
    tree.file(&format!("{class}/mlx5_3/ports/1/gids/1"), "no gid");
    tree.file("sys/class/infiniband/stray", "");
    tree.nic(&Nic::new("mlx5_9", "pci0000:ff/0000:ff:00.0", 7));
    let object = topology(&tree, &[]);
    assert_eq!(
        rails(&object),
        [
            "mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_9"
        ]
    );
    assert_eq!(object["nics"][0]["ports"][0]["gid"]["index"], 3);
    let output = run(&mut command(
        &["gids", "--json", "--device", "mlx5_0"],
        &tree,
    ));
    let gids: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(gids["selected"]["index"], 3);
    assert!(gids["candidates"].to_string().contains("cannot be read"));
}

#[test]
fn gpus_are_told_by_class_and_vendor() {
    let tree = Tree::new(1);
    let functions = [
        ("0x030200", "0x10de", true),
        ("0x030000", "0x10de", true),
        ("0x038000", "0x1002", true),
        ("0x120000", "0x1002", true),
        ("0x038000", "0x8086", true),
        ("0x030000", "0x1a03", false),
        ("0x040300", "0x10de", false),
        ("0x030000", "0x8086", false),
    ];
    let mut expected = 0;
    for (slot, (class, vendor, is_gpu)) in functions.iter().enumerate() {
        tree.gpu(
            &format!("pci0000:00/0000:00:{slot:02x}.0"),
            -1,
            class,
            vendor,
        );
        expected += usize::from(*is_gpu);
    }
    tree.file(
        "proc/driver/nvidia/gpus/0000:00:00.0/information",
        "Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-0123",
    );
    let object = topology(&tree, &[]);
    let gpus = object["gpus"].as_array().expect("a list");
    assert_eq!(gpus.len(), expected);
    assert_eq!(
        (&gpus[0]["model"], &gpus[0]["uuid"]),
        (&json!("NVIDIA H100"), &json!("GPU-0123"))
    );
    let locations: Vec<_> = gpus
        .iter()
        .filter_map(|gpu| gpu["location"].as_str())
        .collect();
    assert_eq!(locations, ["cuda:0", "cuda:1", "hip:0", "hip:1", "xpu:0"]);
}

#[test]
fn the_tables_for_people_show_everything() {
    let output = run(&mut command(&["topology"], &switched_server(8, 8)));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in ["mlx5_7", "ACTIVE", "cuda:7", "PIX", "SYS", "cpu:1"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}
