//! Real metadata stores for tests, each a process of its own on loopback, gone with its value.

pub mod admin;

use std::ffi::OsStr;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::child::{self, Process, Server};

/// How long a store may take until it answers.
const READY_WITHIN: Duration = Duration::from_secs(30);

/// A store, which can be stopped and started again where it was.
pub struct Store {
    url: String,
    members: Vec<Member>,
    /// Its files, removed with it.
    dir: TempDir,
}

/// A process of a store.
struct Member {
    process: Option<Process>,
    program: PathBuf,
    arguments: Vec<String>,
    address: String,
    /// Where it keeps its records.
    data: PathBuf,
}

impl Store {
    /// Our own HTTP server: `rerail metadata serve`.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn http() -> Result<Self> {
        let (dir, address) = (TempDir::new()?, free_address()?);
        let data = dir.path().join("data");
        let command = child::rerail()?;
        let arguments = ["metadata", "serve", "--listen", &address, "--data-dir"];
        let mut arguments = arguments.map(str::to_owned).to_vec();
        arguments.push(data.display().to_string());
        let member = Member::new(command.get_program(), arguments, &address, data);
        Self::start(dir, vec![member], format!("http://{address}/metadata"))
    }

    /// The C++ engine's own HTTP server, of the environment whose Python is `python`.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn cpp_http(python: &Path) -> Result<Self> {
        let address = free_address()?;
        let (host, port) = host_and_port(&address)?;
        let module = [
            "-m",
            "mooncake.http_metadata_server",
            "--log-level",
            "WARNING",
        ];
        let mut arguments = module.map(str::to_owned).to_vec();
        arguments.extend(["--host", host, "--port", port].map(str::to_owned));
        let dir = TempDir::new()?;
        let data = dir.path().join("none");
        let member = Member::new(python.as_os_str(), arguments, &address, data);
        Self::start(dir, vec![member], format!("http://{address}/metadata"))
    }

    /// etcd, from Debian's `etcd-server`.
    ///
    /// # Errors
    /// If it is not installed or does not come up.
    pub fn etcd() -> Result<Self> {
        Self::etcd_members(1)
    }

    /// An etcd of so many members.
    ///
    /// # Errors
    /// As [`Store::etcd`].
    pub fn etcd_members(count: usize) -> Result<Self> {
        let dir = TempDir::new()?;
        let addresses: Vec<(String, String)> = (0..count)
            .map(|_| Ok((free_address()?, free_address()?)))
            .collect::<Result<_>>()?;
        let peers: Vec<String> = addresses
            .iter()
            .enumerate()
            .map(|(index, (_, peer))| format!("m{index}=http://{peer}"))
            .collect();
        let members = addresses.iter().enumerate().map(|(index, (client, peer))| {
            let data = dir.path().join(format!("data{index}"));
            let mut arguments = vec!["--name".to_owned(), format!("m{index}")];
            arguments.extend(["--data-dir".to_owned(), data.display().to_string()]);
            for (flag, address) in [
                ("--listen-client-urls", client),
                ("--advertise-client-urls", client),
                ("--listen-peer-urls", peer),
                ("--initial-advertise-peer-urls", peer),
            ] {
                arguments.extend([flag.to_owned(), format!("http://{address}")]);
            }
            arguments.extend(["--initial-cluster".to_owned(), peers.join(",")]);
            Member::new("etcd".as_ref(), arguments, client, data)
        });
        let members = members.collect();
        let clients: Vec<_> = addresses.into_iter().map(|(client, _)| client).collect();
        Self::start(dir, members, format!("etcd://{}", clients.join(",")))
    }

    /// Redis, from Debian's `redis-server`.
    ///
    /// # Errors
    /// If it is not installed or does not come up.
    pub fn redis() -> Result<Self> {
        let address = free_address()?;
        let (host, port) = host_and_port(&address)?;
        let dir = TempDir::new()?;
        let data = dir.path().join("data");
        let mut arguments = ["--bind", host, "--port", port, "--save", ""]
            .map(str::to_owned)
            .to_vec();
        arguments
            .extend(["--appendonly", "yes", "--notify-keyspace-events", "KA"].map(str::to_owned));
        arguments.extend(["--dir".to_owned(), data.display().to_string()]);
        let member = Member::new("redis-server".as_ref(), arguments, &address, data);
        Self::start(dir, vec![member], format!("redis://{address}"))
    }

    fn start(dir: TempDir, members: Vec<Member>, url: String) -> Result<Self> {
        let mut store = Self { url, members, dir };
        store.start_again()?;
        Ok(store)
    }

    /// Starts what of it does not run, with the records that it had.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start_again(&mut self) -> Result<()> {
        // What stores log is of use only when they fail to start, and then it is in the file.
        let log = std::fs::File::create(self.dir.path().join("log"))?;
        let (url, dir) = (&self.url, &self.dir);
        // Members of a cluster wait for each other.
        for member in &mut self.members {
            if member.process.is_none() {
                member.launch(&log)?;
            }
        }
        for member in &mut self.members {
            let deadline = Instant::now() + READY_WITHIN;
            while TcpStream::connect(&member.address).is_err() {
                ensure!(
                    Instant::now() < deadline,
                    "no store at {url}: {}",
                    log_end(dir)
                );
                // Somebody may have its port for a moment, as the local end of a connection.
                if !member.is_running()? {
                    member.launch(&log)?;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        Ok(())
    }

    /// Kills all of it.
    pub fn kill(&mut self) {
        for member in &mut self.members {
            member.process = None;
        }
    }

    /// Kills the process of a store, or of one member of a cluster.
    pub fn kill_member(&mut self, index: usize) {
        self.members[index].process = None;
    }

    /// Ends it in order.
    ///
    /// # Errors
    /// If it does not end.
    pub fn terminate(&mut self) -> Result<()> {
        for member in &mut self.members {
            if let Some(process) = member.process.take() {
                process.terminate(READY_WITHIN)?;
            }
        }
        Ok(())
    }

    /// Removes its records; it must not run.
    ///
    /// # Errors
    /// If they cannot be removed.
    pub fn wipe(&mut self) -> Result<()> {
        for member in &self.members {
            if member.data.exists() {
                std::fs::remove_dir_all(&member.data)?;
            }
        }
        Ok(())
    }

    /// Sends a signal, by name, to all of it.
    ///
    /// # Errors
    /// If it does not run.
    pub fn signal(&self, name: &str) -> Result<()> {
        let running = self
            .members
            .iter()
            .filter_map(|member| member.process.as_ref());
        running
            .map(Process::pid)
            .try_for_each(|pid| child::signal(pid, name))
    }

    /// What engines are given as `--metadata`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// `host:port` of each member.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        let address = |member: &Member| member.address.clone();
        self.members.iter().map(address).collect()
    }

    /// Process id of its first member, for signals; 0 while it is stopped.
    #[must_use]
    pub fn pid(&self) -> u32 {
        let first = self
            .members
            .first()
            .and_then(|member| member.process.as_ref());
        first.map_or(0, Process::pid)
    }
}

impl Member {
    fn new(program: &OsStr, arguments: Vec<String>, address: &str, data: PathBuf) -> Self {
        Self {
            process: None,
            program: program.into(),
            arguments,
            address: address.to_owned(),
            data,
        }
    }

    fn launch(&mut self, log: &std::fs::File) -> Result<()> {
        // Redis does not make its own.
        std::fs::create_dir_all(&self.data)?;
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command.stdout(log.try_clone()?).stderr(log.try_clone()?);
        self.process = Some(Process::start(command)?);
        Ok(())
    }

    fn is_running(&mut self) -> Result<bool> {
        self.process.as_mut().map_or(Ok(false), Process::is_running)
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
            .arg(&self.dir)
            .arg("--writes-log")
            .arg(self.writes_path());
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

    /// Every write that it has accepted, oldest first, over restarts.
    ///
    /// # Errors
    /// If its log of writes cannot be read.
    pub fn writes(&self) -> Result<Vec<Value>> {
        json_lines(&self.writes_path())
    }

    fn writes_path(&self) -> PathBuf {
        self.dir.with_extension("writes")
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

/// The JSON objects of a file, one a line; a last line that is not whole yet is left out.
///
/// # Errors
/// If it cannot be read, or a line is none.
pub fn json_lines(path: &Path) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |line: &str| serde_json::from_str(line).with_context(|| line.to_owned());
    whole.lines().map(parse).collect()
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
