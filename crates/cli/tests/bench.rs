//! What `rerail bench` says when it cannot start, and its advice by the kind of the cause.
//!
//! Deliberately not here: moving bytes, which `cargo xtask demo` and the engine's tests do.

use std::net::{Ipv6Addr, TcpListener};
use std::process::{Command, Output, Stdio};

const TCP: &[&str] = &["--metadata", "P2PHANDSHAKE", "--protocol", "tcp"];
const SMALL: &[&str] = &["--name", "here", "--buffer-size", "4096"];

fn bench(role: &str, arguments: &[&[&str]], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rerail"));
    command.args(["bench", role]).args(arguments.concat());
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("RERAIL_") || name.starts_with("MC_") {
            command.env_remove(name);
        }
    }
    command.envs(variables.iter().copied());
    command.stdin(Stdio::null());
    command.output().expect("the program starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What a failure said, which ends with what to do.
fn fails(role: &str, arguments: &[&[&str]], variables: &[(&str, &str)]) -> String {
    let output = bench(role, arguments, variables);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("what to do: "), "{said}");
    assert!(!said.contains("rdma link"), "not over TCP: {said}");
    said
}

/// A port that an engine may be given, held for as long as it is needed.
fn held_port() -> (TcpListener, String) {
    (20_000..30_000)
        .find_map(|port| {
            let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).ok()?;
            Some((listener, port.to_string()))
        })
        .expect("one of ten thousand ports is free")
}

#[test]
fn ports_in_use_name_the_range_and_that_two_are_taken() {
    let (_listener, port) = held_port();
    let range = [("MC_MIN_RPC_PORT", &*port), ("MC_MAX_RPC_PORT", &*port)];
    let said = fails("target", &[TCP, SMALL], &range);
    for part in ["MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT", "a second one"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn an_address_of_another_machine_names_the_setting() {
    // TEST-NET-1: nobody has it.
    let bind = [("RERAIL_BIND_ADDRESS", "192.0.2.1")];
    let said = fails("target", &[TCP, SMALL], &bind);
    assert!(
        said.contains("what to do: set RERAIL_BIND_ADDRESS"),
        "{said}"
    );
}

#[cfg(feature = "http")]
#[test]
fn a_store_that_is_away_is_not_blamed_on_the_target() {
    // Bound and not listening for HTTP: closed at once.
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        listener.local_addr().expect("bound")
    };
    let url = format!("http://{closed}/metadata");
    let store = ["--metadata", &*url, "--protocol", "tcp", "--name", "here"];
    let peer = ["--segment", "there"];
    let soon = [("RERAIL_METADATA_TIMEOUT_MS", "500")];
    let said = fails("initiator", &[&store, &peer], &soon);
    assert!(said.contains("that the metadata store is up"), "{said}");
    assert!(!said.contains("start the target"), "{said}");
}

#[cfg(not(feature = "etcd"))]
#[test]
fn a_store_that_is_not_built_in_names_its_feature() {
    let store = ["--metadata", "etcd://127.0.0.1:2379", "--protocol", "tcp"];
    let said = fails("target", &[&store, SMALL], &[]);
    assert!(said.contains("--features etcd"), "{said}");
}

#[test]
fn a_peer_that_is_not_there_is_the_target_that_has_to_be_started() {
    let (_, port) = held_port();
    let segment = format!("127.0.0.1:{port}");
    let peer = ["--name", "there", "--segment", &*segment];
    let said = fails("initiator", &[TCP, &peer], &[]);
    assert!(said.contains("start the target first"), "{said}");
}

#[test]
fn a_command_line_that_is_wrong_says_what_is_wanted() {
    let peer = ["--name", "there", "--segment", "127.0.0.1:1"];
    let letters = bench("initiator", &[TCP, &peer, &["--block-size", "64k"]], &[]);
    let nameless = bench("target", &[TCP, &["--name", ""]], &[]);
    for (output, part) in [
        (
            letters,
            "a number of bytes in 1..=1099511627776, in digits alone",
        ),
        (nameless, "a name that is not empty"),
    ] {
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn a_variable_of_no_known_name_is_warned_of_without_its_value() {
    // It fails after the warning.
    let variables = [
        ("RERAIL_TRANSFER_TIMOUT", "s3cret"),
        ("RERAIL_BIND_ADDRESS", "192.0.2.1"),
    ];
    let said = fails("target", &[TCP, SMALL], &variables);
    assert!(
        said.contains("did you mean RERAIL_TRANSFER_TIMEOUT"),
        "{said}"
    );
    assert!(!said.contains("s3cret"), "{said}");
}
