//! `rerail metadata` as its users have it: exit statuses, outputs, errors, and no secret anywhere.
//!
//! Deliberately not here: what the stores promise, which `rerail-metadata` tests against each.

#![cfg(feature = "server")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longest time that a process may take for one step. The machine may be busy.
const LIMIT: Duration = Duration::from_secs(60);
const SECRET: &str = "s3cret-s3cret";

fn rerail(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rerail"));
    command.arg("metadata").args(args).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RERAIL_") {
            command.env_remove(name);
        }
    }
    command
}

fn run(args: &[&str]) -> Output {
    rerail(args).output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn succeeds(args: &[&str]) -> String {
    let output = run(args);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{args:?}: {}",
        stderr(&output)
    );
    assert_eq!(stderr(&output), "", "{args:?}");
    stdout(&output)
}

/// Checks that it fails as failures do, and returns what it said.
fn fails(args: &[&str]) -> String {
    let output = run(args);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
    assert_eq!(stdout(&output), "", "{args:?}");
    assert!(said.starts_with("rerail: "), "{args:?}: {said}");
    assert!(said.contains("what to do: "), "{args:?}: {said}");
    said
}

/// A process that is ended with the test, and its output line by line.
struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, lines }
    }

    /// The next line; empty once the process has ended.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("text");
        line.trim_end().to_owned()
    }

    /// Reads until that line.
    fn until(&mut self, wanted: impl Fn(&str) -> bool) -> String {
        loop {
            let line = self.line();
            assert!(!line.is_empty(), "it has ended");
            if wanted(&line) {
                return line;
            }
        }
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args([name, &id]).status();
        assert!(status.expect("kill runs").success());
    }

    /// The exit status after a signal.
    fn ends_on(mut self, signal: &str) -> Option<i32> {
        self.signal(signal);
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            assert!(started.elapsed() < LIMIT, "it does not end on {signal}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server on a free port, and its URL.
fn serve(more: &[&str], env: &[(&str, &str)]) -> (Running, String) {
    let mut command = rerail(&[&["serve", "--listen", "127.0.0.1:0"], more].concat());
    command.envs(env.iter().copied());
    let mut server = Running::start(command);
    let line = server.line();
    let url = line.strip_prefix("ready ").expect(&line).to_owned();
    (server, url)
}

#[test]
fn records_are_written_read_listed_and_removed() {
    let (_server, url) = serve(&[], &[]);
    let at = |command: &'static str, rest: &[&'static str]| {
        let url = url.clone();
        let args = [&[command, "--metadata", &url], rest].concat();
        succeeds(&args)
    };
    assert_eq!(at("put", &["mooncake/ram/a", "{\"name\":\"a\"}"]), "");
    assert_eq!(at("put", &["mooncake/ram/b", "no JSON"]), "");
    // The raw value, without a newline of ours.
    assert_eq!(at("get", &["mooncake/ram/a"]), "{\"name\":\"a\"}");
    assert_eq!(at("list", &[]), "mooncake/ram/a\nmooncake/ram/b\n");
    assert_eq!(at("list", &["mooncake/ram/b"]), "mooncake/ram/b\n");
    assert_eq!(at("list", &["elsewhere/"]), "");

    let parsed = |text: String| -> Value { serde_json::from_str(&text).expect("JSON") };
    let (a, b) = (
        json!({"key": "mooncake/ram/a", "value": {"name": "a"}}),
        json!({"key": "mooncake/ram/b", "value": "no JSON"}),
    );
    assert_eq!(parsed(at("get", &["--json", "mooncake/ram/a"])), a);
    assert_eq!(parsed(at("list", &["--json"])), json!([a, b]));
    assert_eq!(
        parsed(at("put", &["--json", "k", "1"])),
        json!({"key": "k", "stored": true})
    );
    assert_eq!(
        parsed(at("rm", &["--json", "k"])),
        json!({"key": "k", "existed": true})
    );
    assert_eq!(at("rm", &["mooncake/ram/a", "mooncake/ram/b"]), "");
    assert_eq!(at("list", &[]), "");
}

#[test]
fn what_others_have_written_neither_ends_a_line_nor_commands_the_terminal() {
    let (_server, url) = serve(&[], &[]);
    let (key, value) = ("p/a\nb\u{1b}[2J", "1\r\u{7}2\n3\n");
    succeeds(&["put", "--metadata", &url, key, value]);
    let listed = succeeds(&["list", "--metadata", &url]);
    assert_eq!(listed, "p/a\\nb\\u{1b}[2J\n");
    let mut watch = Running::start(rerail(&["watch", "--metadata", &url, "p/"]));
    assert_eq!(watch.line(), "put p/a\\nb\\u{1b}[2J 1\\r\\u{7}2\\n3");
    // As they are where nobody reads lines.
    let listed = succeeds(&["list", "--json", "--metadata", &url]);
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    assert_eq!(listed, json!([{"key": key, "value": value}]));
    assert_eq!(succeeds(&["get", "--metadata", &url, key]), value);
    let output = run(&["rm", "--metadata", &url, key, "no\u{1b}ne"]);
    let said = stderr(&output);
    assert!(said.contains("no\\u{1b}ne"), "{said}");
}

#[test]
fn a_value_comes_from_stdin_byte_for_byte() {
    let (_server, url) = serve(&[], &[]);
    let value = [b"\x00\xff\r\n".as_slice(), &[b'x'; 100_000]].concat();
    let mut put = rerail(&["put", "--metadata", &url, "k", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut stdin = put.stdin.take().expect("piped");
    stdin.write_all(&value).expect("taken");
    drop(stdin);
    assert!(put.wait().expect("a child").success());
    assert_eq!(run(&["get", "--metadata", &url, "k"]).stdout, value);
}

#[test]
fn what_is_not_there_is_exit_status_1_with_the_key_and_what_to_do() {
    let (_server, url) = serve(&[], &[]);
    let said = fails(&["get", "--metadata", &url, "mooncake/ram/nobody"]);
    assert!(
        said.contains("no record under mooncake/ram/nobody"),
        "{said}"
    );
    succeeds(&["put", "--metadata", &url, "k", "1"]);
    // Those that are there go all the same.
    let output = run(&["rm", "--metadata", &url, "nobody", "k"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no record under nobody"));
    assert_eq!(succeeds(&["list", "--metadata", &url]), "");
}

#[test]
fn a_wrong_command_line_is_exit_status_2() {
    for args in [
        &["get"][..],
        &["get", "--metadata", "memory://x"],
        &["put", "--metadata", "memory://x", "k"],
        &["rm", "--metadata", "memory://x"],
        &["list", "--no-such-flag"],
        &["serve", "--listen", "nowhere"],
        &["serve", "--listen", "127.0.0.1"],
        &["no-such-command"],
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(!stderr(&output).is_empty(), "{args:?}");
    }
}

#[test]
fn a_store_that_cannot_be_used_is_named_with_the_cause() {
    let said = fails(&["get", "--metadata", "etc://h", "k"]);
    assert!(said.contains("etcd://"), "known schemes: {said}");
    let said = fails(&["list", "--metadata", "P2PHANDSHAKE"]);
    assert!(said.contains("no store"), "{said}");
    // Closes every connection. A port that nobody listens on might get somebody meanwhile.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let url = format!("http://{address}/metadata");
    for args in [
        &["get", "--metadata", &url, "k"][..],
        &["put", "--metadata", &url, "k", "1"],
        &["rm", "--metadata", &url, "k"],
        &["list", "--metadata", &url],
    ] {
        let said = fails(args);
        assert!(said.contains(&address.to_string()), "{said}");
        assert!(said.contains("because: "), "{said}");
    }
    let mut command = rerail(&["list", "--metadata", &url]);
    let output = command.env("RERAIL_METADATA_TIMEOUT_MS", "1").output();
    let said = stderr(&output.expect("the program starts"));
    assert!(said.contains("RERAIL_METADATA_TIMEOUT_MS"), "{said}");
    assert!(said.contains("100..=600000"), "{said}");
}

#[test]
fn a_watch_prints_records_and_changes_until_it_is_interrupted() {
    let (_server, url) = serve(&[], &[]);
    succeeds(&["put", "--metadata", &url, "p/a", "1"]);
    succeeds(&["put", "--metadata", &url, "elsewhere", "1"]);
    let plain = ["put p/a 1", "synced", "put p/b {}", "delete p/a"];
    let as_json = [
        json!({"event": "put", "key": "p/a", "value": 1}),
        json!({"event": "synced"}),
        json!({"event": "put", "key": "p/b", "value": {}}),
        json!({"event": "delete", "key": "p/a"}),
    ];
    let mut watch = Running::start(rerail(&["watch", "--metadata", &url, "p/"]));
    let mut json_watch = Running::start(rerail(&["watch", "--json", "--metadata", &url, "p/"]));
    watch.until(|line| line == "synced");
    let parse = |line: &str| serde_json::from_str::<Value>(line).expect("JSON");
    let mut seen = vec![];
    while seen.last() != Some(&as_json[1]) {
        seen.push(parse(&json_watch.line()));
    }
    assert_eq!(seen, as_json[..2]);
    succeeds(&["put", "--metadata", &url, "p/b", "{}"]);
    assert_eq!(watch.line(), plain[2]);
    assert_eq!(parse(&json_watch.line()), as_json[2]);
    succeeds(&["rm", "--metadata", &url, "p/a"]);
    assert_eq!(watch.line(), plain[3]);
    assert_eq!(parse(&json_watch.line()), as_json[3]);
    assert_eq!(watch.ends_on("-INT"), Some(0));
    assert_eq!(json_watch.ends_on("-TERM"), Some(0));
}

#[test]
fn a_server_keeps_its_directory_over_kill_and_ends_in_order() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().join("data").display().to_string();
    let (mut server, url) = serve(&["--data-dir", &data], &[]);
    succeeds(&["put", "--metadata", &url, "k", "1"]);
    // Another one must not touch the same files.
    let said = fails(&["serve", "--listen", "127.0.0.1:0", "--data-dir", &data]);
    assert!(said.contains(&data), "{said}");
    server.child.kill().expect("killed");
    server.child.wait().expect("a child");
    let (server, url) = serve(&["--data-dir", &data], &[]);
    assert_eq!(succeeds(&["get", "--metadata", &url, "k"]), "1");

    // An open watch does not hold it up.
    let mut watch = Running::start(rerail(&["watch", "--metadata", &url]));
    watch.until(|line| line == "synced");
    assert_eq!(server.ends_on("-TERM"), Some(0));
    let (server, _) = serve(&[], &[]);
    assert_eq!(server.ends_on("-INT"), Some(0));
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let said = fails(&["serve", "--listen", &address]);
    assert!(
        said.contains(&address) && said.contains("--listen"),
        "{said}"
    );
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().display().to_string();
    let said = fails(&["serve", "--listen", "127.0.0.1:0", "--data-dir", &path]);
    assert!(
        said.contains(&path) && said.contains("--data-dir"),
        "{said}"
    );
    let token = "/nonexistent/token";
    let said = fails(&["serve", "--listen", "127.0.0.1:0", "--token-file", token]);
    assert!(said.contains(token), "{said}");
    let mut server = Running::start(rerail(&["serve", "--json", "--listen", "127.0.0.1:0"]));
    let ready: Value = serde_json::from_str(&server.line()).expect("JSON");
    let url = ready["ready"].as_str().expect("a URL");
    assert!(url.starts_with("http://127.0.0.1:"), "{url}");
}

#[test]
fn without_the_token_a_server_refuses_and_the_token_shows_nowhere() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("token");
    std::fs::write(&file, format!("{SECRET}\n")).expect("written");
    let path = file.display().to_string();
    let (server, url) = serve(&["--token-file", &path], &[("RERAIL_LOG", "trace")]);
    let said = fails(&["get", "--metadata", &url, "k"]);
    assert!(said.contains("refused") && said.contains("401"), "{said}");

    // With it, by variable and by file, at the loudest.
    for (name, value) in [
        ("RERAIL_METADATA_TOKEN", SECRET),
        ("RERAIL_METADATA_TOKEN_FILE", &path),
    ] {
        let mut put = rerail(&["put", "--metadata", &url, "k", "1"]);
        let output = put.env(name, value).env("RERAIL_LOG", "trace").output();
        let output = output.expect("the program starts");
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(!said.contains(SECRET), "{said}");
    }
    let mut get = rerail(&["get", "--metadata", &url, "k"]);
    let output = get.env("RERAIL_METADATA_TOKEN", "wrong-s3cret").output();
    let said = stderr(&output.expect("the program starts"));
    assert!(said.contains("401") && !said.contains("s3cret"), "{said}");
    let shown = std::fs::read(format!("/proc/{}/cmdline", server.child.id())).expect("Linux");
    assert!(!String::from_utf8_lossy(&shown).contains(SECRET));
}

/// A server that refuses whoever comes, in Redis' words. For HTTP and gRPC they are no answer at
/// all. Ends with the test's process.
fn refuser() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = stream.read(&mut [0; 512]);
            let _ = stream.write_all(b"-WRONGPASS no\r\n");
        }
    });
    address
}

#[test]
fn passwords_show_in_no_log_error_help_or_process_list() {
    let address = refuser();
    let redis = format!("redis://user:{SECRET}@{address}/3");
    let etcd = format!("etcd://user:{SECRET}@{address}");
    let http = format!("http://user:{SECRET}@{address}/metadata");
    for url in [&redis, &etcd, &http] {
        let mut list = rerail(&["list"]);
        list.env("RERAIL_METADATA", url).env("RERAIL_LOG", "trace");
        let output = list.env("RERAIL_METADATA_TIMEOUT_MS", "1000").output();
        let output = output.expect("the program starts");
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&address), "{said}");
        assert!(
            !said.contains(SECRET) && !stdout(&output).contains(SECRET),
            "{said}"
        );
    }
    for broken in [
        format!("redis://user:{SECRET}@h:99999"),
        format!("nope://user:{SECRET}@h"),
        format!("etcd://:{SECRET}@h:1"),
    ] {
        let mut list = rerail(&["list"]);
        let output = list.env("RERAIL_METADATA", &broken).output();
        let output = output.expect("the program starts");
        assert_eq!(output.status.code(), Some(1));
        assert!(!stderr(&output).contains(SECRET), "{}", stderr(&output));
    }
    for command in ["serve", "get", "put", "rm", "list", "watch", ""] {
        let args: Vec<&str> = [command, "--help"]
            .into_iter()
            .filter(|arg| !arg.is_empty())
            .collect();
        let output = rerail(&args)
            .env("RERAIL_METADATA", &redis)
            .env("RERAIL_METADATA_PASSWORD", SECRET)
            .env("RERAIL_METADATA_TOKEN", SECRET)
            .output()
            .expect("the program starts");
        assert_eq!(output.status.code(), Some(0), "{command}");
        assert!(
            !stdout(&output).contains(SECRET),
            "{command}: {}",
            stdout(&output)
        );
    }
    // A watch goes on while the store is away; what others see of it has no password.
    let mut watch = rerail(&["watch"]);
    watch.env("RERAIL_METADATA", &redis);
    let watch = Running::start(watch);
    let shown = std::fs::read(format!("/proc/{}/cmdline", watch.child.id())).expect("Linux");
    assert!(!String::from_utf8_lossy(&shown).contains(SECRET));
    // Whoever gives it as an argument is told that others can read it.
    let output = run(&["list", "--metadata", &redis]);
    let said = stderr(&output);
    assert!(
        said.contains("process list") && !said.contains(SECRET),
        "{said}"
    );
}
