//! Real servers for tests: started on free loopback ports in directories of their own, ended with
//! the test.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file uses a part of this"
)]

pub mod forward;
pub mod logs;
#[cfg(all(feature = "http", feature = "server"))]
pub mod served;

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time that a server may take to listen. The machine may be busy.
pub const START_MAX: Duration = Duration::from_secs(30);

/// How often a server is started whose ports others took.
const STARTS_MAX: usize = 5;

/// True if long fault tests are asked for.
pub fn full() -> bool {
    let full = std::env::var_os("RERAIL_FULL").is_some_and(|value| value == "1");
    if !full {
        eprintln!("skipped: takes long; set RERAIL_FULL=1");
    }
    full
}

/// True if `program` is installed. Without it the test is skipped with a reason, or fails where
/// all stores are required.
pub fn installed(program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    if !found {
        let required = std::env::var_os("RERAIL_REQUIRE_STORES").is_some_and(|set| set == "1");
        assert!(
            !required,
            "{program} is not installed, and RERAIL_REQUIRE_STORES=1"
        );
        eprintln!("skipped: {program} is not installed");
    }
    found
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    listener.local_addr().expect("an address").port()
}

/// Tries `start` with new ports until it works, at most [`STARTS_MAX`] times: between
/// [`free_port`] and a server's start somebody else may take the port.
pub fn with_new_ports<T>(mut start: impl FnMut() -> Option<T>) -> T {
    (0..STARTS_MAX)
        .find_map(|_| start())
        .unwrap_or_else(|| panic!("the server ended at once, {STARTS_MAX} times"))
}

/// Starts a server again on the port it had. Another test may have that port for a moment, as the
/// local end of a connection.
pub fn start_again(mut start: impl FnMut() -> bool) {
    let started = Instant::now();
    while !start() {
        assert!(
            started.elapsed() < START_MAX,
            "it ends at once, again and again"
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// A process that ends with the test, whatever happens.
#[derive(Debug)]
pub struct Process {
    child: Child,
}

impl Process {
    pub fn start(command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { child }
    }

    /// Waits until it listens on `port`. False if it ends before.
    pub fn serves(&mut self, port: u16) -> bool {
        let started = Instant::now();
        while !listens(port) {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return false;
            }
            assert!(started.elapsed() < START_MAX, "nobody listens on {port}");
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by name, such as `STOP`.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .arg(format!("-{name}"))
            .arg(self.id().to_string())
            .status()
            .expect("kill runs");
        assert!(status.success(), "kill -{name}");
    }

    /// As `kill -9`, and waits for the end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Ends it in order.
    pub fn terminate(&mut self) {
        self.signal("TERM");
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn listens(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok()
}

/// Waits until somebody listens on the port.
pub fn wait_for_port(port: u16) {
    let started = Instant::now();
    while !listens(port) {
        assert!(started.elapsed() < START_MAX, "nobody listens on {port}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Notes how the first bytes of connections look, and closes them: what would be sent in clear.
pub struct Eavesdropper {
    pub port: u16,
    seen: std::sync::Arc<std::sync::Mutex<Vec<Vec<u8>>>>,
}

impl Eavesdropper {
    pub fn start() -> Self {
        use std::io::Read as _;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listens");
        let port = listener.local_addr().expect("an address").port();
        let seen = std::sync::Arc::<std::sync::Mutex<Vec<Vec<u8>>>>::default();
        let noted = std::sync::Arc::clone(&seen);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut bytes = vec![0; 64];
                let read = stream.and_then(|mut stream| stream.read(&mut bytes));
                bytes.truncate(read.unwrap_or(0));
                noted.lock().expect("lock").push(bytes);
            }
        });
        Self { port, seen }
    }

    /// Panics unless there were connections and every one began with a TLS handshake.
    pub fn assert_only_tls(&self) {
        let seen = self.seen.lock().expect("lock").clone();
        let begun: Vec<_> = seen.iter().filter(|bytes| !bytes.is_empty()).collect();
        assert!(!begun.is_empty(), "nobody came");
        for bytes in begun {
            assert_eq!(bytes[0], 0x16, "{:?}", String::from_utf8_lossy(bytes));
        }
    }
}

/// Makes a certificate authority and a certificate for `127.0.0.1` and `localhost` that it
/// signed, as `ca.pem`, `cert.pem` and `key.pem` in `dir`.
pub fn make_certificates(dir: &Path) {
    let run = |arguments: &str| {
        let status = Command::new("openssl")
            .args(arguments.split_whitespace())
            .current_dir(dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .expect("openssl runs");
        assert!(status.success(), "openssl {arguments}");
    };
    let extensions = "basicConstraints=CA:FALSE\nsubjectAltName=IP:127.0.0.1,DNS:localhost\n\
                      extendedKeyUsage=serverAuth,clientAuth\n";
    std::fs::write(dir.join("extensions"), extensions).expect("written");
    let curve = "ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    run(&format!(
        "req -x509 -newkey {curve} -keyout ca-key.pem -out ca.pem -days 2 -subj /CN=test-ca"
    ));
    run(&format!(
        "req -newkey {curve} -keyout key.pem -out request.pem -subj /CN=localhost"
    ));
    run(
        "x509 -req -in request.pem -CA ca.pem -CAkey ca-key.pem -CAcreateserial -out cert.pem \
         -days 2 -extfile extensions",
    );
}

/// A file for TLS that no client may be made with.
pub struct BadFile {
    pub what: &'static str,
    /// Name below one of the two directories of [`make_certificates`].
    name: &'static str,
    of_other: bool,
    place: fn(&mut rerail_metadata::TlsFiles) -> &mut Option<PathBuf>,
}

/// One of each kind. `extensions` is no PEM, and the other directory's key is another
/// certificate's.
pub const BAD_FILES: [BadFile; 7] = {
    const fn bad(
        what: &'static str,
        name: &'static str,
        place: fn(&mut rerail_metadata::TlsFiles) -> &mut Option<PathBuf>,
    ) -> BadFile {
        BadFile {
            what,
            name,
            of_other: false,
            place,
        }
    }
    [
        bad("a missing CA", "missing.pem", |tls| &mut tls.ca),
        bad("a garbled CA", "extensions", |tls| &mut tls.ca),
        bad("a key as CA", "key.pem", |tls| &mut tls.ca),
        bad("a garbled certificate", "extensions", |tls| {
            &mut tls.certificate
        }),
        bad("a missing key", "missing.pem", |tls| &mut tls.key),
        bad("a garbled key", "extensions", |tls| &mut tls.key),
        BadFile {
            what: "another certificate's key",
            name: "key.pem",
            of_other: true,
            place: |tls| &mut tls.key,
        },
    ]
};

impl BadFile {
    /// Puts it into the options, and returns its path.
    pub fn set(
        &self,
        options: &mut rerail_metadata::StoreOptions,
        dir: &Path,
        other: &Path,
    ) -> PathBuf {
        let dir = if self.of_other { other } else { dir };
        let path = dir.join(self.name);
        *(self.place)(&mut options.tls) = Some(path.clone());
        path
    }
}

/// A single etcd or Redis with what it needs, for tests that only want a store.
pub struct Store {
    pub url: String,
    _process: Process,
    _dir: tempfile::TempDir,
}

/// Starts an etcd.
pub fn start_etcd() -> Option<Store> {
    if !installed("etcd") {
        return None;
    }
    Some(with_new_ports(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let port = free_port();
        let client = format!("http://127.0.0.1:{port}");
        let peer = format!("http://127.0.0.1:{}", free_port());
        let mut process = Process::start(
            Command::new("etcd")
                .arg("--data-dir")
                .arg(dir.path())
                .args([
                    "--listen-client-urls",
                    &client,
                    "--advertise-client-urls",
                    &client,
                ])
                .args([
                    "--listen-peer-urls",
                    &peer,
                    "--initial-advertise-peer-urls",
                    &peer,
                ])
                .args([
                    "--initial-cluster",
                    &format!("default={peer}"),
                    "--unsafe-no-fsync",
                ]),
        );
        process.serves(port).then(|| Store {
            url: format!("etcd://127.0.0.1:{port}"),
            _process: process,
            _dir: dir,
        })
    }))
}

/// Starts a Redis with keyspace events.
pub fn start_redis() -> Option<Store> {
    if !installed("redis-server") {
        return None;
    }
    Some(with_new_ports(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let port = free_port();
        let mut process = Process::start(
            Command::new("redis-server")
                .args([
                    "--bind",
                    "127.0.0.1",
                    "--port",
                    &port.to_string(),
                    "--save",
                    "",
                    "--dir",
                ])
                .arg(dir.path())
                .args(["--notify-keyspace-events", "KA"]),
        );
        process.serves(port).then(|| Store {
            url: format!("redis://127.0.0.1:{port}"),
            _process: process,
            _dir: dir,
        })
    }))
}
