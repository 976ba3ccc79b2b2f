//! Real metadata stores for tests, each a process of its own on loopback, gone with its value.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::child::{self, Process, Server};

/// How long a store may take until it answers.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// A running store.
pub struct Store {
    process: Process,
    url: String,
    /// Its files, removed with it.
    _dir: TempDir,
}

impl Store {
    /// Our own HTTP server: `rerail metadata serve`.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn http() -> Result<Self> {
        let mut command = child::rerail()?;
        command.args(["metadata", "serve", "--listen", "127.0.0.1:0"]);
        let server = Server::start(command, "ready ", READY_WITHIN)?;
        let url = server.ready_line()["ready ".len()..].to_owned();
        Ok(Self {
            process: server.into_process(),
            url,
            _dir: TempDir::new()?,
        })
    }

    /// The C++ engine's own HTTP server, of the environment whose Python is `python`.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn cpp_http(python: &Path) -> Result<Self> {
        let address = free_address()?;
        let (host, port) = host_and_port(&address)?;
        let mut command = Command::new(python);
        command.args([
            "-m",
            "mooncake.http_metadata_server",
            "--log-level",
            "WARNING",
        ]);
        command.args(["--host", host, "--port", port]);
        Self::start(
            command,
            TempDir::new()?,
            &address,
            format!("http://{address}/metadata"),
        )
    }

    /// etcd, from Debian's `etcd-server`.
    ///
    /// # Errors
    /// If it is not installed or does not come up.
    pub fn etcd() -> Result<Self> {
        let (clients, peers) = (free_address()?, free_address()?);
        let dir = TempDir::new()?;
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(dir.path());
        for (flag, address) in [
            ("--listen-client-urls", &clients),
            ("--advertise-client-urls", &clients),
            ("--listen-peer-urls", &peers),
            ("--initial-advertise-peer-urls", &peers),
        ] {
            command.arg(flag).arg(format!("http://{address}"));
        }
        command
            .arg("--initial-cluster")
            .arg(format!("default=http://{peers}"));
        Self::start(command, dir, &clients, format!("etcd://{clients}"))
    }

    /// Redis, from Debian's `redis-server`.
    ///
    /// # Errors
    /// If it is not installed or does not come up.
    pub fn redis() -> Result<Self> {
        let address = free_address()?;
        let (host, port) = host_and_port(&address)?;
        let dir = TempDir::new()?;
        let mut command = Command::new("redis-server");
        command
            .args(["--bind", host, "--port", port, "--save", "", "--dir"])
            .arg(dir.path());
        Self::start(command, dir, &address, format!("redis://{address}"))
    }

    fn start(mut command: Command, dir: TempDir, address: &str, url: String) -> Result<Self> {
        // What stores log is of use only when they fail to start, and then it is in the file.
        let log = std::fs::File::create(dir.path().join("log"))?;
        command.stdout(log.try_clone()?).stderr(log);
        let mut process = Process::start(command)?;
        let deadline = Instant::now() + READY_WITHIN;
        while TcpStream::connect(address).is_err() {
            let alive = process.is_running()? && Instant::now() < deadline;
            ensure!(alive, "no store at {url}: {}", log_end(&dir));
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(Self {
            process,
            url,
            _dir: dir,
        })
    }

    /// What engines are given as `--metadata`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its process id, for signals.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }
}

/// Our own HTTP server with its records on disk, which can be stopped and started again where it
/// was.
pub struct HttpStore {
    process: Option<Process>,
    url: String,
    address: String,
    dir: PathBuf,
}

impl HttpStore {
    /// Starts it with its records in `dir`.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start(dir: &Path) -> Result<Self> {
        let mut store = Self {
            process: None,
            url: String::new(),
            address: "127.0.0.1:0".to_owned(),
            dir: dir.to_owned(),
        };
        store.start_again()?;
        Ok(store)
    }

    /// Starts it again after [`stop`](Self::stop), at the same address.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start_again(&mut self) -> Result<()> {
        let mut command = child::rerail()?;
        command
            .args(["metadata", "serve", "--listen", &self.address, "--data-dir"])
            .arg(&self.dir);
        let server = Server::start(command, "ready ", READY_WITHIN)?;
        self.url = server.ready_line()["ready ".len()..].to_owned();
        let authority = self
            .url
            .strip_prefix("http://")
            .and_then(|url| url.split('/').next());
        self.address = authority
            .context("the server's URL has no address")?
            .to_owned();
        self.process = Some(server.into_process());
        Ok(())
    }

    /// Kills it.
    pub fn stop(&mut self) {
        self.process = None;
    }

    /// What engines are given as `--metadata`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its process id, for signals; 0 while it is stopped.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Process::pid)
    }
}

/// An address on loopback that is free at present. Somebody may take it before its user does, which
/// then fails to start.
fn free_address() -> Result<String> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?
        .local_addr()?
        .to_string())
}

fn host_and_port(address: &str) -> Result<(&str, &str)> {
    address.split_once(':').context("an address without a port")
}

fn log_end(dir: &TempDir) -> String {
    let log = std::fs::read(dir.path().join("log")).unwrap_or_default();
    let from = log.len().saturating_sub(2000);
    String::from_utf8_lossy(&log[from..]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::Store;

    #[test]
    fn stores_start_and_end_with_their_values() {
        for start in [Store::etcd, Store::redis] {
            let store = start().expect("it starts");
            let process = format!("/proc/{}", store.pid());
            assert!(std::path::Path::new(&process).exists());
            drop(store);
            assert!(!std::path::Path::new(&process).exists());
        }
    }
}
