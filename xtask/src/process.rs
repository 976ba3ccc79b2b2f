//! Child processes: run one and insist on success, or bind its life to ours.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{setup, workspace};

/// A cargo command in the workspace's root, with the libclang that rdma-sys can use.
///
/// Every cargo child goes through here: a newer libclang beside the right one would otherwise be
/// picked up by the bindings' build and break it.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace::root());
    // The variables that `cargo run` set for xtask itself would make cargo rebuild crates whose
    // build scripts look at them.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    if let Some(dir) = setup::libclang_dir() {
        command.env("LIBCLANG_PATH", dir);
    }
    command
}

/// Runs `command` with our stdout and stderr; an error unless it exits 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    let status = command
        .status()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed: {status}");
    }
    Ok(())
}

/// Runs `command` and returns its stdout; an error with its stderr unless it exits 0.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("`{shown}` failed: {}\n{}", output.status, stderr.trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// coreutils' exit status for a command that was ended after its time.
pub(crate) const TIMED_OUT: i32 = 124;

/// Like [`run`], but ends the command and all its children after `limit`, and when we die.
pub(crate) fn run_within(command: &Command, limit: Duration) -> Result<()> {
    let mut bounded = bounded(command, limit);
    let shown = shown(command);
    let status = bounded
        .status()
        .with_context(|| format!("cannot start `{shown}`"))?;
    match status.code() {
        Some(0) => Ok(()),
        Some(TIMED_OUT) => bail!("`{shown}` was ended after {} s", limit.as_secs()),
        _ => bail!("`{shown}` failed: {status}"),
    }
}

/// Runs `command` for at most `limit` and returns its exit status ([`TIMED_OUT`] after that) and
/// its stdout, whatever they are.
pub(crate) fn output_within(command: &Command, limit: Duration) -> Result<(Option<i32>, String)> {
    let output = bounded(command, limit)
        .output()
        .with_context(|| format!("cannot start `{}`", shown(command)))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok((output.status.code(), stdout))
}

/// `command`, which is ended with all its children after `limit`, and when we die.
///
/// coreutils' timeout gives the children a process group of its own and signals all of it; the
/// kernel tells timeout, by way of setpriv, when we are gone.
fn bounded(command: &Command, limit: Duration) -> Command {
    let mut bounded = Command::new("setpriv");
    bounded
        .args(["--pdeathsig", "TERM", "--", "timeout", "--kill-after=10"])
        .arg(limit.as_secs().to_string())
        .arg(command.get_program())
        .args(command.get_args())
        .stdin(Stdio::null());
    if let Some(dir) = command.get_current_dir() {
        bounded.current_dir(dir);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => bounded.env(name, value),
            None => bounded.env_remove(name),
        };
    }
    bounded
}

/// The program and its arguments as one would type them, for messages.
pub(crate) fn shown(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

/// Looks `program` up in PATH and in the administrator's directories, which a user's PATH lacks.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let admin = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(admin)
        .map(|dir| dir.join(program))
        .find(|p| p.is_file())
}

/// Like [`find`], but an error that names the program if it is not there.
pub(crate) fn tool(program: &str) -> Result<PathBuf> {
    find(program).with_context(|| format!("`{program}` is not installed"))
}

/// A child that never outlives us: killed when this value is dropped, and by the kernel when this
/// process dies in any way at all, `kill -9` included.
pub(crate) struct BoundChild {
    child: Child,
}

impl BoundChild {
    /// Starts `program` with the arguments and streams that `configure` sets.
    ///
    /// The kernel's half is `setpriv --pdeathsig`, which needs no unsafe code here; without
    /// util-linux only the first half holds. Call it from the main thread: the kernel takes the
    /// end of the *thread* that started the child for the end of the parent.
    pub(crate) fn start(
        program: impl AsRef<OsStr>,
        configure: impl FnOnce(&mut Command),
    ) -> Result<Self> {
        let mut command = match find("setpriv") {
            Some(setpriv) => {
                let mut command = Command::new(setpriv);
                command.args(["--pdeathsig", "KILL", "--"]).arg(&program);
                command
            }
            None => Command::new(&program),
        };
        configure(&mut command);
        let shown = shown(&command);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start `{shown}`"))?;
        Ok(Self { child })
    }

    /// The child, for its streams and its status.
    pub(crate) fn get(&mut self) -> &mut Child {
        &mut self.child
    }
}

impl Drop for BoundChild {
    fn drop(&mut self) {
        // Both fail only if the child has already been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
