//! Child processes of tests: bounded in time, ended with the value that holds them.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How often a child's end is looked for.
const TICK: Duration = Duration::from_millis(10);

/// The `rerail` program under test: `RERAIL_BIN`, which xtask sets, else the one beside the running
/// test in cargo's target directory.
///
/// # Errors
/// If there is none.
pub fn rerail() -> Result<Command> {
    if let Some(path) = std::env::var_os("RERAIL_BIN") {
        return Ok(Command::new(path));
    }
    let test = std::env::current_exe()?;
    let found = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join("rerail"))
        .find(|p| p.is_file());
    Ok(Command::new(found.with_context(|| {
        format!(
            "no rerail near {}: set RERAIL_BIN, or build with `cargo build`",
            test.display()
        )
    })?))
}

/// Runs `command` to its end, or kills it after `limit`.
///
/// # Errors
/// If it cannot be started or did not end in time; the message holds its output. Its exit status is
/// for the caller to judge.
pub fn output_within(command: Command, limit: Duration) -> Result<Output> {
    Job::start(command)?.output_within(limit)
}

/// Like [`output_within`], and an error unless the child exits 0. Returns its stdout.
///
/// # Errors
/// With the child's stderr, if it fails.
pub fn stdout_within(command: Command, limit: Duration) -> Result<String> {
    Job::start(command)?.stdout_within(limit)
}

/// Sends a signal, by its name without `SIG`.
///
/// # Errors
/// If there is no such process.
pub fn signal(pid: u32, name: &str) -> Result<()> {
    let mut kill = Command::new("kill");
    kill.arg(format!("-{name}")).arg(pid.to_string());
    let status = kill.status()?;
    if !status.success() {
        bail!("no process {pid} for SIG{name}");
    }
    Ok(())
}

/// A child that works on while its output is gathered; killed with this value.
pub struct Job {
    process: Process,
    shown: String,
    stdout: JoinHandle<Vec<u8>>,
    stderr: JoinHandle<Vec<u8>>,
}

impl Job {
    /// Starts `command`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(mut command: Command) -> Result<Self> {
        let shown = format!("{command:?}");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = Process::start(command)?;
        let stdout = process.0.stdout.take().context("the child has no stdout")?;
        let stderr = process.0.stderr.take().context("the child has no stderr")?;
        Ok(Self {
            process,
            shown,
            stdout: gather(stdout),
            stderr: gather(stderr),
        })
    }

    /// Its command line, for messages.
    #[must_use]
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Its process id, for signals.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// Waits for its end, or kills it after `limit`.
    ///
    /// # Errors
    /// As [`output_within`].
    pub fn output_within(mut self, limit: Duration) -> Result<Output> {
        let status = self.process.wait_within(limit)?;
        if status.is_none() {
            self.process.0.kill()?;
            self.process.0.wait()?;
        }
        let stdout = self.stdout.join().unwrap_or_default();
        let stderr = self.stderr.join().unwrap_or_default();
        match status {
            Some(status) => Ok(Output {
                status,
                stdout,
                stderr,
            }),
            None => bail!(
                "{} did not end within {} s\nstdout: {}\nstderr: {}",
                self.shown,
                limit.as_secs(),
                String::from_utf8_lossy(&stdout),
                String::from_utf8_lossy(&stderr)
            ),
        }
    }

    /// Like [`Job::output_within`], and an error unless it exits 0. Returns its stdout.
    ///
    /// # Errors
    /// With what it printed, if it fails.
    pub fn stdout_within(self, limit: Duration) -> Result<String> {
        let shown = self.shown.clone();
        let output = self.output_within(limit)?;
        let stdout = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("{shown}: {}\n{stderr}{stdout}", output.status);
        }
        Ok(stdout.into_owned())
    }
}

/// Reads a stream to its end on a thread of its own, lest a full pipe holds the child up.
fn gather(mut stream: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What could be read until an error is still worth showing.
        let _ = stream.read_to_end(&mut bytes);
        bytes
    })
}

/// A server: started, waited for until it says that it is ready, ended with this value.
pub struct Server {
    process: Process,
    /// What it printed until it was ready.
    lines: Vec<String>,
}

/// Lines of a server's beginning that are kept.
const LINES_MAX: usize = 10_000;

impl Server {
    /// Starts `command` and waits for a line on its stdout that starts with `ready`. Its stderr is
    /// ours.
    ///
    /// # Errors
    /// If it ends, closes its stdout or stays silent for `limit`.
    pub fn start(mut command: Command, ready: &str, limit: Duration) -> Result<Self> {
        let shown = format!("{command:?}");
        command.stdout(Stdio::piped());
        let mut process = Process::start(command)?;
        let stdout = process.0.stdout.take().context("the pipe is missing")?;
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            // Goes on to the end of the stream, so that a talkative server never blocks.
            for line in BufReader::new(stdout)
                .lines()
                .map_while(std::io::Result::ok)
            {
                let _ = send.send(line);
            }
        });
        let deadline = Instant::now() + limit;
        let mut printed = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match lines.recv_timeout(left) {
                Ok(line) if line.starts_with(ready) => {
                    printed.push(line);
                    return Ok(Self {
                        process,
                        lines: printed,
                    });
                }
                Ok(line) if printed.len() < LINES_MAX => printed.push(line),
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    bail!(
                        "{shown} did not print `{ready}…` within {} s",
                        limit.as_secs()
                    )
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let status = process.wait_within(Duration::from_secs(1))?;
                    bail!("{shown} ended before it was ready: {status:?}")
                }
            }
        }
    }

    /// The line that said it was ready.
    #[must_use]
    pub fn ready_line(&self) -> &str {
        self.lines.last().map_or("", String::as_str)
    }

    /// What it printed until then, that line included.
    #[must_use]
    pub fn lines_until_ready(&self) -> &[String] {
        &self.lines
    }

    /// The process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// The process, without its stdout.
    #[must_use]
    pub fn into_process(self) -> Process {
        self.process
    }

    /// Sends SIGTERM and waits.
    ///
    /// # Errors
    /// As [`Process::terminate`].
    pub fn terminate(self, limit: Duration) -> Result<ExitStatus> {
        self.process.terminate(limit)
    }
}

/// A child that is killed when this value goes.
pub struct Process(Child);

impl Process {
    /// Starts `command` without stdin.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(mut command: Command) -> Result<Self> {
        let child = command.stdin(Stdio::null()).spawn();
        Ok(Self(
            child.with_context(|| format!("cannot start {command:?}"))?,
        ))
    }

    /// Its process id, for signals.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Whether it still runs.
    ///
    /// # Errors
    /// If the system cannot tell.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.0.try_wait()?.is_none())
    }

    /// Its exit status, or `None` if it still runs after `limit`.
    ///
    /// # Errors
    /// If the system cannot tell.
    pub fn wait_within(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(TICK);
        }
    }

    /// Sends SIGTERM and waits.
    ///
    /// # Errors
    /// If it has ended before, or does not end within `limit`; it is killed then.
    pub fn terminate(mut self, limit: Duration) -> Result<ExitStatus> {
        let status = Command::new("kill")
            .arg("-TERM")
            .arg(self.pid().to_string())
            .status()?;
        if !status.success() {
            bail!("no process {} to terminate: it ended before", self.pid());
        }
        let status = self.wait_within(limit)?;
        status.with_context(|| format!("still running {} s after SIGTERM", limit.as_secs()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if it has been waited for already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_child_that_hangs_is_ended_and_its_output_kept() {
        let started = Instant::now();
        let error = output_within(
            shell("echo before; exec sleep 60"),
            Duration::from_millis(300),
        )
        .expect_err("it hangs");
        assert!(error.to_string().contains("before"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_server_is_ready_when_it_says_so() {
        let script = "echo starting; echo ready x rpc=1:2; exec sleep 60";
        let mut server =
            Server::start(shell(script), "ready ", Duration::from_secs(10)).expect("ready");
        assert_eq!(server.ready_line(), "ready x rpc=1:2");
        assert!(server.process().is_running().expect("a status"));
        assert!(
            !server
                .terminate(Duration::from_secs(10))
                .expect("it ends")
                .success()
        );
    }

    #[test]
    fn a_server_that_dies_or_stays_silent_is_an_error() {
        let limit = Duration::from_secs(10);
        assert!(Server::start(shell("exit 3"), "ready ", limit).is_err());
        assert!(
            Server::start(shell("exec sleep 60"), "ready ", Duration::from_millis(200)).is_err()
        );
    }
}
