//! Secrets are planted in every place that a store's credentials come from, for every store, with
//! authentication and TLS that fail and that do not: none of what the program says has one, at the
//! loudest, and no process list.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Result, ensure};
use rerail_tests::child::{self, Job, Server};
use rerail_tests::store::Store;
use rerail_tests::store::admin::{ask_etcd, tell_redis};
use serde_json::json;
use tempfile::TempDir;

/// The right one and a wrong one have this in common.
const PLANTED: &str = "pl4nted";
const RIGHT: &str = "pl4nted-right";
const WRONG: &str = "pl4nted-wrong";
/// How `node:pl4nted-…` begins in a header of HTTP.
const PLANTED_BASIC: &str = "bm9kZTpwbDRudGVk";
const ENDED_WITHIN: Duration = Duration::from_secs(60);

/// How the program gets the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Url,
    Variable,
    File,
}

/// The program, at the loudest and with no settings but these.
fn program(arguments: &[&str]) -> Result<Command> {
    let mut command = child::rerail()?;
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RERAIL_") {
            command.env_remove(name);
        }
    }
    command
        .args(arguments)
        .env("RERAIL_LOG", "trace")
        .env("RERAIL_METADATA_TIMEOUT_MS", "2000")
        .env("MC_TCP_BIND_ADDRESS", "127.0.0.1");
    Ok(command)
}

/// Gives `command` the secret; `kind` is `PASSWORD` or `TOKEN`.
fn plant(command: &mut Command, kind: &str, place: Place, secret: &str, dir: &Path) -> Result<()> {
    match place {
        Place::Url => {}
        Place::Variable => {
            command.env(format!("RERAIL_METADATA_{kind}"), secret);
        }
        Place::File => {
            let file = dir.join(secret.replace(PLANTED, "file"));
            std::fs::write(&file, format!("{secret}\n"))?;
            command.env(format!("RERAIL_METADATA_{kind}_FILE"), file);
        }
    }
    if place != Place::Url && kind == "PASSWORD" {
        command.env("RERAIL_METADATA_USER", "node");
    }
    Ok(())
}

fn assert_clean(what: &str, said: &[u8]) {
    let said = String::from_utf8_lossy(said);
    for planted in [PLANTED, PLANTED_BASIC] {
        let line = said.lines().find(|line| line.contains(planted));
        assert!(line.is_none(), "{what}: {line:?}");
    }
}

fn assert_quiet(what: &str, output: &Output) {
    assert_clean(what, &output.stdout);
    assert_clean(what, &output.stderr);
    // Who is let in need not hear anything.
    let said = output.stdout.len() + output.stderr.len();
    let ok = output.status.success();
    assert!(ok || said > 0, "{what}: it says nothing at all");
}

/// A store of one scheme with a password or token, and the URL with a secret in it.
struct Guarded {
    url: String,
    kind: &'static str,
    _running: Vec<Running>,
}

/// What ends with its value.
#[expect(dead_code, reason = "held")]
enum Running {
    Store(Store),
    Server(Server),
}

impl Guarded {
    fn with_secret(&self, secret: &str) -> String {
        self.url.replacen("://", &format!("://node:{secret}@"), 1)
    }

    fn etcd() -> Result<Self> {
        let store = Store::etcd()?;
        let address = &store.addresses()[0];
        for user in ["root", "node"] {
            let body = json!({"name": user, "password": RIGHT});
            ask_etcd(address, "/v3/auth/user/add", &body)?;
            let body = json!({"user": user, "role": "root"});
            if user == "root" {
                ask_etcd(address, "/v3/auth/role/add", &json!({"name": "root"}))?;
            }
            ask_etcd(address, "/v3/auth/user/grant", &body)?;
        }
        ask_etcd(address, "/v3/auth/enable", &json!({}))?;
        Ok(Self {
            url: store.url().to_owned(),
            kind: "PASSWORD",
            _running: vec![Running::Store(store)],
        })
    }

    fn redis() -> Result<Self> {
        let store = Store::redis()?;
        let rule = format!("ACL SETUSER node on >{RIGHT} ~* &* +@all");
        tell_redis(&store.addresses()[0], &rule)?;
        tell_redis(
            &store.addresses()[0],
            &format!("CONFIG SET requirepass {RIGHT}"),
        )?;
        Ok(Self {
            url: store.url().to_owned(),
            kind: "PASSWORD",
            _running: vec![Running::Store(store)],
        })
    }

    fn http(dir: &Path) -> Result<Self> {
        let file = dir.join("servers");
        std::fs::write(&file, RIGHT)?;
        let mut command = program(&["metadata", "serve", "--listen", "127.0.0.1:0"])?;
        command.arg("--token-file").arg(&file);
        // Its log is the test's.
        command.env("RERAIL_LOG", "off");
        let mut server = Server::start(command, "ready ", ENDED_WITHIN)?;
        let url = server.ready_line()["ready ".len()..].to_owned();
        assert_clean("serve", &arguments_of(server.process().pid())?);
        Ok(Self {
            url,
            kind: "TOKEN",
            _running: vec![Running::Server(server)],
        })
    }
}

/// What everybody can read of a process.
fn arguments_of(pid: u32) -> Result<Vec<u8>> {
    Ok(std::fs::read(format!("/proc/{pid}/cmdline"))?)
}

#[test]
fn no_secret_shows_whoever_is_refused_or_let_in() -> Result<()> {
    let dir = TempDir::new()?;
    for guarded in [
        Guarded::etcd()?,
        Guarded::redis()?,
        Guarded::http(dir.path())?,
    ] {
        for place in [Place::Url, Place::Variable, Place::File] {
            for secret in [WRONG, RIGHT] {
                // A server over HTTP has no users, only a token, which no URL has.
                let let_in = secret == RIGHT && !(place == Place::Url && guarded.kind == "TOKEN");
                let what = format!("{} {place:?} {secret}", guarded.url);
                let url = match place {
                    Place::Url => guarded.with_secret(secret),
                    _ => guarded.url.clone(),
                };
                let mut list = program(&["metadata", "list"])?;
                list.env("RERAIL_METADATA", &url);
                plant(&mut list, guarded.kind, place, secret, dir.path())?;
                let output = child::output_within(list, ENDED_WITHIN)?;
                assert_quiet(&what, &output);
                ensure!(
                    output.status.success() == let_in,
                    "{what}: {}",
                    String::from_utf8_lossy(&output.stderr)
                );
                if place != Place::Url {
                    bench(&what, &guarded, place, secret, dir.path())?;
                }
            }
        }
    }
    Ok(())
}

/// An engine keeps trying while it is refused; it has the most to say.
fn bench(what: &str, guarded: &Guarded, place: Place, secret: &str, dir: &Path) -> Result<()> {
    let events = dir.join("events");
    let mut target = program(&["bench", "target", "--protocol", "tcp", "--name", "a"])?;
    target.args(["--advertise", "127.0.0.1", "--metadata", &guarded.url]);
    target.arg("--events").arg(&events);
    plant(&mut target, guarded.kind, place, secret, dir)?;
    let job = Job::start(target)?;
    assert_clean(what, &arguments_of(job.pid())?);
    // Long enough for several attempts; how many is not what is asked.
    std::thread::sleep(Duration::from_secs(2));
    child::signal(job.pid(), "TERM")?;
    assert_quiet(&format!("{what}, bench"), &job.output_within(ENDED_WITHIN)?);
    assert_clean(&format!("{what}, events"), &std::fs::read(&events)?);
    Ok(())
}

#[test]
fn no_secret_shows_or_is_sent_where_tls_fails() -> Result<()> {
    let dir = TempDir::new()?;
    let mut openssl = Command::new("openssl");
    openssl
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt"])
        .args(["ec_paramgen_curve:P-256", "-nodes", "-days", "2"])
        .args(["-subj", "/CN=ca", "-keyout", "key.pem", "-out", "ca.pem"])
        .current_dir(dir.path());
    child::stdout_within(openssl, ENDED_WITHIN)?;
    std::fs::write(dir.path().join("garbled.pem"), RIGHT)?;

    // Speaks no TLS, and keeps what it is sent.
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let heard = std::sync::Arc::<std::sync::Mutex<Vec<u8>>>::default();
    let hearing = std::sync::Arc::clone(&heard);
    std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut buffer = [0; 1024];
            if let Ok(count) = stream.read(&mut buffer) {
                hearing
                    .lock()
                    .expect("lock")
                    .extend_from_slice(&buffer[..count]);
            }
            let _ = stream.write_all(b"-NOAUTH this is no TLS\r\n");
        }
    });
    let urls = ["etcd://", "rediss://", "https://"];
    for scheme in urls {
        for ca in ["ca.pem", "garbled.pem", "missing.pem"] {
            for place in [Place::Url, Place::Variable, Place::File] {
                let user = match place {
                    Place::Url => format!("node:{RIGHT}@"),
                    _ => String::new(),
                };
                let path = if scheme == "https://" {
                    "/metadata"
                } else {
                    ""
                };
                let mut list = program(&["metadata", "list"])?;
                list.env("RERAIL_METADATA", format!("{scheme}{user}{address}{path}"))
                    .env("RERAIL_METADATA_CA_FILE", dir.path().join(ca));
                for kind in ["PASSWORD", "TOKEN"] {
                    plant(&mut list, kind, place, RIGHT, dir.path())?;
                }
                let output = child::output_within(list, ENDED_WITHIN)?;
                let what = format!("{scheme} {ca} {place:?}");
                assert_quiet(&what, &output);
                ensure!(!output.status.success(), "{what}: there is no store");
            }
        }
    }
    let heard = heard.lock().expect("lock").clone();
    ensure!(!heard.is_empty(), "nobody came");
    assert_clean("what was sent", &heard);
    Ok(())
}

#[test]
fn no_help_shows_a_secret_of_the_environment() -> Result<()> {
    let url = format!("redis://node:{RIGHT}@127.0.0.1:1");
    for arguments in [
        &["--help"][..],
        &["metadata", "--help"],
        &["metadata", "serve", "--help"],
        &["metadata", "watch", "--help"],
        &["bench", "--help"],
        &["bench", "target", "--help"],
        &["bench", "initiator", "--help"],
        &["metadata", "list", "--no-such-option"],
        &["no-such-command"],
    ] {
        let mut help = program(arguments)?;
        help.env("RERAIL_METADATA", &url)
            .env("RERAIL_METADATA_PASSWORD", RIGHT)
            .env("RERAIL_METADATA_TOKEN", RIGHT);
        let output = child::output_within(help, ENDED_WITHIN)?;
        assert_quiet(&arguments.join(" "), &output);
    }
    Ok(())
}
