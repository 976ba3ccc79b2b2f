//! Every fixture of a reported GID table through the program's own path, `rerail gids --table`,
//! named for its report; and what the command does with input that is wrong.
//!
//! Deliberately not here: the ranking's properties, which are tested beside it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../topology/tests/data");

fn rerail(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rerail"));
    command.args(args);
    for variable in [
        "RERAIL_LOG",
        "RERAIL_GID_INDEX",
        "MC_GID_INDEX",
        "NCCL_IB_GID_INDEX",
    ] {
        command.env_remove(variable);
    }
    command
}

fn run(args: &[&str]) -> Output {
    rerail(args).output().expect("the program starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn object(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        text.lines().count(),
        1,
        "one object on one line: {text}{}",
        stderr(output)
    );
    serde_json::from_str(&text).expect("stdout is JSON")
}

fn fixture(id: &str) -> Value {
    let text = std::fs::read_to_string(Path::new(DATA).join(format!("gid-{id}.json")));
    serde_json::from_str(&text.expect("the fixture is there")).expect("the fixture is JSON")
}

fn rank(table: &Value, more: &[&str]) -> (Value, Output) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("table.json");
    std::fs::write(&path, table.to_string()).expect("a file");
    let path = path.to_str().expect("UTF-8");
    let mut args = vec!["gids", "--json", "--table", path];
    args.extend(more);
    let output = run(&args);
    (object(&output), output)
}

/// Checks what the fixture says, with `config` in place of its own if there is one.
fn check(table: &Value, expectation: &Value) -> Value {
    let (object, output) = rank(table, &[]);
    assert_form(&object, table);
    if expectation["expected"] == "error" {
        assert_eq!(object["selected"], Value::Null);
        assert!(
            object["error"]
                .as_str()
                .is_some_and(|error| !error.is_empty())
        );
        assert_eq!(output.status.code(), Some(1));
        return object;
    }
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(object["error"], Value::Null);
    let index = &object["selected"]["index"];
    assert!(index.is_u64(), "{object}");
    if !expectation["expected_index"].is_null() {
        assert_eq!(*index, expectation["expected_index"], "{}", table["why"]);
    }
    if let Some(accept) = table["accept"].as_array() {
        assert!(accept.contains(index), "{index} is not among {accept:?}");
    }
    if let Some(must_not) = table["must_not"].as_array() {
        assert!(!must_not.contains(index), "{index} is among {must_not:?}");
    }
    assert!(!stderr(&output).contains("ERROR"), "{}", stderr(&output));
    object
}

/// The form of design §8: these members and no others, best first, every row with its reason.
fn assert_form(object: &Value, table: &Value) {
    let keys = |value: &Value| -> Vec<String> {
        value
            .as_object()
            .expect("an object")
            .keys()
            .cloned()
            .collect()
    };
    assert_eq!(keys(object), ["candidates", "error", "selected"]);
    let candidates = object["candidates"].as_array().expect("a list");
    assert_eq!(
        candidates.len(),
        table["entries"].as_array().expect("a list").len()
    );
    for (at, candidate) in candidates.iter().enumerate() {
        let expected = [
            "accepted", "class", "gid", "index", "ndev", "rank", "reason", "type",
        ];
        assert_eq!(keys(candidate), expected);
        assert!(!candidate["reason"].as_str().expect("a text").is_empty());
        if candidate["accepted"] == true {
            assert_eq!(candidate["rank"], at, "accepted rows come first, in order");
        } else {
            assert_eq!(candidate["rank"], Value::Null);
        }
    }
    if let Some(selected) = object["selected"].as_object() {
        assert_eq!(
            selected.keys().collect::<Vec<_>>(),
            ["class", "gid", "index"]
        );
        for member in ["class", "gid", "index"] {
            assert_eq!(selected[member], candidates[0][member]);
        }
    }
}

fn with_config(table: &Value, config: Value) -> Value {
    let mut table = table.clone();
    table["config"] = config;
    table
}

/// The fixture itself and all its variants. Returns the object of the fixture itself.
fn check_all(id: &str) -> Value {
    let table = fixture(id);
    let object = check(&table, &table);
    for variant in table["variants"].as_array().unwrap_or(&Vec::new()) {
        check(&with_config(&table, variant["config"].clone()), variant);
    }
    object
}

#[test]
fn g01_link_local_never_beats_a_private_address() {
    let object = check_all("G01");
    assert_eq!(object["selected"]["class"], 0);
}

#[test]
fn g03_a_row_of_another_namespace_comes_after_the_hosts_own() {
    let object = check_all("G03");
    assert_eq!(object["candidates"][1]["class"], 1);
}

#[test]
fn g05_link_local_alone_is_used_with_a_warning() {
    check_all("G05");
    let (_, output) = rank(&fixture("G05"), &[]);
    assert!(
        stderr(&output).contains("last resort"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn g06_empty_slots_make_no_noise_and_hide_no_row() {
    check_all("G06");
    let (_, output) = rank(&fixture("G06"), &[]);
    assert_eq!(stderr(&output), "");
}

#[test]
fn g08_an_unreadable_slot_concerns_that_slot_only() {
    let object = check_all("G08");
    let rejected = object["candidates"].as_array().expect("a list").iter();
    assert_eq!(
        rejected
            .filter(|row| row["reason"] == "rejected: empty slot")
            .count(),
        4
    );
}

#[test]
fn g11_the_bonds_row_beats_the_vxlans_with_the_same_address() {
    check_all("G11");
    let table = with_config(&fixture("G11"), json!({"gid_netdevs": ["b3.vxlan.30100"]}));
    let (object, _) = rank(&table, &[]);
    assert_eq!(
        object["selected"]["index"], 3,
        "the override by interface name"
    );
}

#[test]
fn g14_two_link_local_addresses_push_the_private_one_to_index_5() {
    check_all("G14");
}

#[test]
fn g16_the_ioctl_tells_the_type_and_without_it_unknown_is_said() {
    check_all("G16");
    let mut table = fixture("G16");
    table
        .as_object_mut()
        .expect("an object")
        .remove("ioctl_types");
    let (object, output) = rank(&table, &[]);
    assert_eq!(object["candidates"][0]["type"], "unknown");
    assert_eq!(object["selected"]["class"], 5.5);
    assert!(
        stderr(&output).contains("type unknown"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn g18_an_address_that_the_interface_lost_is_not_chosen() {
    let object = check_all("G18");
    let reason = object["candidates"][1]["reason"].as_str().expect("a text");
    assert!(reason.contains("no longer has this address"), "{reason}");
    // Within one class, too.
    let mut table = fixture("G18");
    table["entries"][0]["gid"] = json!("0000:0000:0000:0000:0000:ffff:c000:0265");
    check(&table, &table);
}

#[test]
fn g21_on_infiniband_link_local_is_normal() {
    let object = check_all("G21");
    assert_eq!(object["selected"]["class"], 0);
    assert_eq!(object["candidates"][0]["type"], "IB");
    // The kernel's word for the type is the same as that of RoCE v1.
    let mut table = fixture("G21");
    table["entries"][0]["type"] = json!("IB/RoCE v1");
    let (object, _) = rank(&table, &[]);
    assert_eq!(object["candidates"][0]["type"], "IB");
}

#[test]
fn g23_an_explicit_index_needs_no_interface() {
    check_all("G23");
    let (_, output) = rank(&fixture("G23"), &[]);
    assert!(
        stderr(&output).contains("configured"),
        "{}",
        stderr(&output)
    );
    for index in [1, 7, 8, 255] {
        let table = with_config(&fixture("G23"), json!({"gid_index": index}));
        check(&table, &json!({"expected": "error"}));
    }
}

#[test]
fn g25_the_v1_twin_of_the_right_row_is_rejected() {
    let object = check_all("G25");
    let candidates = object["candidates"].as_array().expect("a list");
    let twin = candidates
        .iter()
        .find(|row| row["index"] == 2)
        .expect("the twin");
    assert_eq!(twin["accepted"], false);
}

#[test]
fn g27_a_list_of_subnets_decides_between_fabrics_or_fails() {
    check_all("G27");
    let (object, _) = rank(
        &with_config(&fixture("G27"), json!({})),
        &["--peer", "10.62.9.9"],
    );
    assert_eq!(
        object["selected"]["index"], 5,
        "without a list, the peer's fabric decides"
    );
}

#[test]
fn g31_ipv4_comes_first_and_a_peer_of_the_other_family_turns_it() {
    let object = check_all("G31");
    assert_eq!(object["selected"]["index"], 5);
    let (object, _) = rank(&fixture("G31"), &["--peer", "fd00:cc:0:1::7"]);
    assert_eq!(object["selected"]["index"], 3);
    let (object, _) = rank(
        &with_config(&fixture("G31"), json!({"gid_subnets": ["fd00::/8"]})),
        &[],
    );
    assert_eq!(object["selected"]["index"], 3, "the override");
}

// g33 (sizes of table queries, iWARP without a table) concerns reading a real device: the size of
// ibv_query_gid_table's buffer is rerail-verbs' matter. What remains here is that a port without a
// table is no fault of the others.
#[test]
fn g33_a_port_without_a_table_is_an_answer_and_not_a_fault() {
    let mut table = fixture("G21");
    table["entries"] = json!([]);
    table["gid_tbl_len"] = json!(0);
    check(&table, &json!({"expected": "error"}));
}

#[test]
fn g34_after_a_toggle_the_row_beyond_the_hole_is_found() {
    check_all("G34");
    let mut table = fixture("G34");
    let rows = table["entries"].as_array_mut().expect("a list");
    rows.last_mut().expect("a row")["index"] = json!(3);
    let (object, _) = rank(&table, &[]);
    assert_eq!(
        object["selected"]["index"],
        fixture("G34")["before_event"]["expected_index"]
    );
}

#[test]
fn every_fixture_has_its_test_here() {
    let source = include_str!("gids.rs");
    let mut seen = 0;
    for entry in std::fs::read_dir(DATA).expect("the data") {
        let name = entry
            .expect("an entry")
            .file_name()
            .into_string()
            .expect("UTF-8");
        let id = name
            .strip_prefix("gid-G")
            .and_then(|rest| rest.strip_suffix(".json"));
        if let Some(id) = id {
            assert!(source.contains(&format!("fn g{id}_")), "no test for {name}");
            seen += 1;
        }
    }
    assert!(seen >= 15, "only {seen} fixtures found");
}

#[test]
fn the_order_of_rows_in_the_file_means_nothing() {
    for id in ["G08", "G11", "G27", "G31"] {
        let table = fixture(id);
        let mut reversed = table.clone();
        reversed["entries"]
            .as_array_mut()
            .expect("a list")
            .reverse();
        assert_eq!(rank(&table, &[]).0, rank(&reversed, &[]).0, "{id}");
    }
}

#[test]
fn a_malformed_table_or_configuration_yields_the_object_and_status_1() {
    let good = fixture("G27");
    let changed = |member: &str, value: Value| {
        let mut table = good.clone();
        table[member] = value;
        table
    };
    let without = |member: &str| {
        let mut table = good.clone();
        table.as_object_mut().expect("an object").remove(member);
        table
    };
    let mut row_twice = good.clone();
    row_twice["entries"][1]["index"] = json!(0);
    let mut bad_gid = good.clone();
    bad_gid["entries"][1]["gid"] = json!("not a gid");
    let mut no_index = good.clone();
    no_index["entries"][1]["index"] = json!(-1);
    let cases = [
        json!([]),
        json!({}),
        without("entries"),
        without("link_layer"),
        changed("entries", json!("none")),
        changed("link_layer", json!("Token Ring")),
        changed("gid_tbl_len", json!(2)),
        changed("port", json!(0)),
        changed("netdevs", json!([{"name": "ens2", "addrs": ["10.0.0.1"]}])),
        changed("config", json!({"gid_subnets": ["10.0.0.0/33"]})),
        changed("config", json!({"gid_subnets": "10.0.0.0/8"})),
        changed("config", json!({"gid_index": -1})),
        changed("config", json!({"gid_index": "abc"})),
        changed("config", json!({"gid_index": 256})),
        changed("config", json!({"gid_subnet": ["10.0.0.0/8"]})),
        changed("config", json!({"gid_netdevs": ["eth7"]})),
        row_twice,
        bad_gid,
        no_index,
    ];
    for table in cases {
        let (object, output) = rank(&table, &[]);
        assert_eq!(object["selected"], Value::Null, "{table}");
        assert!(
            object["error"]
                .as_str()
                .is_some_and(|error| !error.is_empty()),
            "{table}"
        );
        assert_eq!(output.status.code(), Some(1), "{table}");
        assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
    }
}

#[test]
fn an_error_in_a_file_says_where_it_is() {
    let directory = tempfile::tempdir().expect("a directory");
    let path: PathBuf = directory.path().join("t.json");
    std::fs::write(&path, "{\n \"device\": \"mlx5_0\",\n \"port\": x\n}").expect("a file");
    let output = run(&["gids", "--table", path.to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("line 3, column 10"),
        "{}",
        stderr(&output)
    );
    let output = run(&["gids", "--json", "--table", "/nonexistent"]);
    assert_eq!(object(&output)["selected"], Value::Null);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_wrong_command_line_is_status_2() {
    for args in [
        &["gids", "--port", "0"][..],
        &["gids", "--peer", "x"],
        &["gids", "--nonsense"],
        &[],
    ] {
        assert_eq!(run(args).status.code(), Some(2), "{args:?}");
    }
    assert_eq!(run(&["gids", "--help"]).status.code(), Some(0));
}

#[test]
fn a_machine_without_rdma_is_an_answer() {
    let empty = tempfile::tempdir().expect("a directory");
    let output = run(&[
        "gids",
        "--json",
        "--root",
        empty.path().to_str().expect("UTF-8"),
    ]);
    let object = object(&output);
    assert_eq!(object["selected"], Value::Null);
    assert!(
        object["error"]
            .as_str()
            .expect("a text")
            .contains("no RDMA device")
    );
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_closed_output_is_no_panic() {
    let table = Path::new(DATA).join("gid-G08.json");
    for args in [&["gids", "--table"][..], &["gids", "--json", "--table"]] {
        let mut command = rerail(args);
        command
            .arg(&table)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("it ends");
        assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
}

#[test]
fn the_table_for_people_marks_the_choice() {
    let table = Path::new(DATA).join("gid-G25.json");
    let output = run(&["gids", "--table", table.to_str().expect("UTF-8")]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let chosen: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("* mlx5_bond_2"))
        .collect();
    assert_eq!(chosen.len(), 1, "{text}");
    assert!(chosen[0].contains("10.77.3.4"), "{text}");
}
