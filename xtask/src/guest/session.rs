//! One boot of the guest that runs one command.
//!
//! The command's streams, its status and its result files travel over two writable 9p shares, so
//! that no kernel message gets among them; the console goes to a file that is shown only when the
//! guest fails. Time limits are enforced inside first, where the command's output can still be
//! brought out, and from outside only if that fails.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::image::Image;
use crate::process::{BoundChild, tool};
use crate::workspace;

const RUN: &str = include_str!("run.sh");
const RIG: &str = include_str!("rig.sh");
/// From power-on until the command runs: 5 s on an idle machine, and much more on a loaded one.
const BOOT_MAX: Duration = Duration::from_secs(180);
/// How much later than the inner limit the outer one strikes: TERM, KILL and power-off take time.
const OUTER_LIMIT_AFTER: Duration = Duration::from_secs(30);
/// How often the streams and the status are looked at.
const TICK: Duration = Duration::from_millis(25);
/// How much of the console is shown when the guest fails.
const CONSOLE_LINES_SHOWN: usize = 40;
/// Exit status of `vm` when the command was ended at its limit, as with timeout(1).
const EXIT_TIMED_OUT: u8 = 124;
/// Exit status of `vm` when the guest itself failed and the command's status is not known.
const EXIT_GUEST_FAILED: u8 = 125;
/// Variables that the command inherits, by name and by prefix.
const INHERITED: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "CI",
    "LIBCLANG_PATH",
    "CARGO_HOME",
];
const INHERITED_PREFIXES: &[&str] = &["MC_", "RERAIL_", "RUST_", "RUSTUP_"];

/// What to run, and with what.
pub(crate) struct Session {
    /// Program and arguments.
    pub(crate) command: Vec<OsString>,
    /// Variables for it, beside those that it inherits.
    pub(crate) env: Vec<(String, OsString)>,
    /// Where it runs; the guest has the same directories as the host.
    pub(crate) cwd: PathBuf,
    /// When it is ended.
    pub(crate) timeout: Duration,
    /// The guest's memory.
    pub(crate) memory_mib: u32,
    /// Emulated processors.
    pub(crate) cpus: u32,
    /// Shared writable under the same path; the command finds it in `RERAIL_OUT`.
    pub(crate) out: PathBuf,
    /// Whether to set up the four devices.
    pub(crate) rig: bool,
}

/// How a session ended.
#[derive(Debug)]
pub(crate) enum Ending {
    /// The command's exit status, 128 + N after signal N.
    Exited(u8),
    /// It was ended at its limit.
    TimedOut,
    /// The guest did not boot, died or hung; the end of its console may tell why.
    GuestFailed {
        /// What was seen from outside.
        reason: String,
        /// The last lines of the console.
        console: String,
    },
}

impl Ending {
    /// The status to exit with: the command's, or one that tells what happened in its place.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Exited(status) => *status,
            Self::TimedOut => EXIT_TIMED_OUT,
            Self::GuestFailed { .. } => EXIT_GUEST_FAILED,
        })
    }

    /// What went wrong beside the command itself; `limit_s` is the one that it was given.
    pub(crate) fn problem(&self, limit_s: u64) -> Option<String> {
        match self {
            Self::Exited(_) => None,
            Self::TimedOut => Some(format!("the command was ended at its limit of {limit_s} s")),
            Self::GuestFailed { reason, console } => Some(format!(
                "the guest failed: {reason}\nThe end of its console:\n{console}"
            )),
        }
    }
}

impl Session {
    /// Boots, runs the command with our stdout and stderr as its own, powers off.
    ///
    /// # Errors
    /// If the image cannot be built or QEMU not started. What goes wrong inside is an [`Ending`].
    pub(crate) fn run(&self) -> Result<Ending> {
        let image = Image::ready()?;
        fs::create_dir_all(&self.out)
            .with_context(|| format!("cannot create {}", self.out.display()))?;
        let control = ControlDir::create(self)?;
        let qemu = self.boot(&image, &control.path)?;
        Watch::new(self, &control.path, qemu)?.until_end()
    }

    fn boot(&self, image: &Image, control: &Path) -> Result<BoundChild> {
        let program = tool("qemu-system-x86_64")?;
        let share = |path: &Path, tag: &str, options: &str| {
            // A comma in a value is written twice for QEMU.
            let path = path.to_string_lossy().replace(',', ",,");
            format!(
                "local,path={path},mount_tag={tag},security_model=none,multidevs=remap{options}"
            )
        };
        let messages = File::create(control.join("qemu"))?;
        BoundChild::start(program, |qemu| {
            qemu.args([
                "-accel",
                "tcg",
                "-cpu",
                "max",
                "-display",
                "none",
                "-nodefaults",
            ])
            .args(["-no-reboot", "-device", "virtio-rng-pci"])
            .args([
                "-smp",
                &self.cpus.to_string(),
                "-m",
                &self.memory_mib.to_string(),
            ])
            .arg("-serial")
            .arg(format!("file:{}", control.join("console").display()))
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initramfs)
            .args(["-append", "console=ttyS0 quiet loglevel=5 panic=-1"])
            .args(["-virtfs", &share(Path::new("/"), "host", ",readonly=on")])
            .args(["-virtfs", &share(control, "control", "")])
            .args(["-virtfs", &share(&self.out, "out", "")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(messages);
        })
    }

    /// What `run.sh` reads.
    fn settings(&self) -> Vec<u8> {
        let rig = if self.rig { "yes" } else { "no" };
        let seconds = self.timeout.as_secs();
        let mut text = format!("timeout_s={seconds}\nrig={rig}\nout_dir=").into_bytes();
        text.extend_from_slice(&quoted(self.out.as_os_str()));
        text.push(b'\n');
        text
    }

    /// The script that becomes the command: environment, directory, `exec`.
    fn command_script(&self) -> Vec<u8> {
        let mut script = Vec::new();
        for (name, value) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let inherited = INHERITED.contains(&&*text)
                || INHERITED_PREFIXES
                    .iter()
                    .any(|prefix| text.starts_with(prefix));
            // A name that no shell accepts cannot be passed on by one.
            let plain = text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            if inherited && plain {
                script.extend_from_slice(format!("export {text}=").as_bytes());
                script.extend_from_slice(&quoted(&value));
                script.push(b'\n');
            }
        }
        for (name, value) in &self.env {
            script.extend_from_slice(format!("export {name}=").as_bytes());
            script.extend_from_slice(&quoted(value));
            script.push(b'\n');
        }
        script.extend_from_slice(b"export RERAIL_OUT=");
        script.extend_from_slice(&quoted(self.out.as_os_str()));
        script.extend_from_slice(b"\ncd ");
        script.extend_from_slice(&quoted(self.cwd.as_os_str()));
        script.extend_from_slice(b" || exit 126\nexec");
        for word in &self.command {
            script.push(b' ');
            script.extend_from_slice(&quoted(word));
        }
        script.push(b'\n');
        script
    }
}

/// `text` as one word for a shell.
fn quoted(text: &OsStr) -> Vec<u8> {
    let mut word = vec![b'\''];
    for &byte in text.as_bytes() {
        if byte == b'\'' {
            word.extend_from_slice(b"'\\''");
        } else {
            word.push(byte);
        }
    }
    word.push(b'\'');
    word
}

/// The directory behind the `control` share. Removed with this value.
struct ControlDir {
    path: PathBuf,
}

impl ControlDir {
    fn create(session: &Session) -> Result<Self> {
        let guest = workspace::target().join("guest");
        fs::create_dir_all(&guest)?;
        remove_left_behind(&guest)?;
        // One process may run several guests.
        static RUNS: AtomicU32 = AtomicU32::new(0);
        let run = RUNS.fetch_add(1, Ordering::Relaxed);
        let path = guest.join(format!("run-{}-{run}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let control = Self { path };
        let files: [(&str, &[u8]); 7] = [
            ("run.sh", RUN.as_bytes()),
            ("rig.sh", RIG.as_bytes()),
            ("settings", &session.settings()),
            ("command.sh", &session.command_script()),
            ("status", b""),
            ("stdout", b""),
            ("stderr", b""),
        ];
        for (name, content) in files {
            fs::write(control.path.join(name), content)?;
        }
        Ok(control)
    }
}

impl Drop for ControlDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Removes what runs that were killed have left: directories named for processes that are gone.
fn remove_left_behind(guest: &Path) -> Result<()> {
    for entry in fs::read_dir(guest)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let pid = ["run-", "building-"]
            .iter()
            .find_map(|prefix| name.strip_prefix(prefix))
            .map(|rest| rest.split('-').next().unwrap_or(rest));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// Follows a running guest: carries its streams over and waits for its last word.
struct Watch<'a> {
    session: &'a Session,
    control: &'a Path,
    qemu: BoundChild,
    stdout: Tail,
    stderr: Tail,
    /// When the guest must have said its next word: `ready`, then `exit`.
    deadline: Instant,
    ready: bool,
}

impl<'a> Watch<'a> {
    fn new(session: &'a Session, control: &'a Path, qemu: BoundChild) -> Result<Self> {
        Ok(Self {
            session,
            control,
            qemu,
            stdout: Tail::open(&control.join("stdout"))?,
            stderr: Tail::open(&control.join("stderr"))?,
            deadline: Instant::now() + BOOT_MAX,
            ready: false,
        })
    }

    fn until_end(mut self) -> Result<Ending> {
        loop {
            // Looked at before the status: a guest that has powered off says nothing more.
            let gone = self.qemu.get().try_wait()?.is_some();
            let status = fs::read_to_string(self.control.join("status"))?;
            self.stdout.carry_over(&mut io::stdout())?;
            self.stderr.carry_over(&mut io::stderr())?;
            if !self.ready && status.lines().any(|line| line == "ready") {
                self.ready = true;
                self.deadline = Instant::now() + self.session.timeout + OUTER_LIMIT_AFTER;
            }
            if let Some(ending) = self.ending(&status) {
                return Ok(ending);
            }
            if gone {
                return Ok(self.failed("it ended without telling the command's status".to_owned()));
            }
            if Instant::now() >= self.deadline {
                return Ok(if self.ready {
                    // Its own limit did not bring it to an end: the guest hangs.
                    Ending::TimedOut
                } else {
                    self.failed(format!("it was not up after {} s", BOOT_MAX.as_secs()))
                });
            }
            std::thread::sleep(TICK);
        }
    }

    /// What the status file says, if it says the last word.
    fn ending(&self, status: &str) -> Option<Ending> {
        // A line without its end is still being written.
        let complete = &status[..status.rfind('\n')?];
        let mut timed_out = false;
        for line in complete.lines() {
            match line.split_once(' ').unwrap_or((line, "")) {
                ("timeout", _) => timed_out = true,
                ("exit", _) if timed_out => return Some(Ending::TimedOut),
                ("exit", status) => {
                    return Some(match status.parse() {
                        Ok(status) => Ending::Exited(status),
                        Err(_) => self.failed(format!("it reported the status `{status}`")),
                    });
                }
                ("failed", why) => return Some(self.failed(why.to_owned())),
                _ => {}
            }
        }
        None
    }

    fn failed(&self, reason: String) -> Ending {
        let mut console = String::new();
        for name in ["qemu", "console"] {
            let bytes = fs::read(self.control.join(name)).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes).replace('\r', "");
            let lines: Vec<_> = text.lines().collect();
            for line in &lines[lines.len().saturating_sub(CONSOLE_LINES_SHOWN)..] {
                console.push_str(line);
                console.push('\n');
            }
        }
        Ending::GuestFailed { reason, console }
    }
}

/// Reads a file that grows.
struct Tail {
    file: File,
}

impl Tail {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { file })
    }

    /// Writes what has come since the last call to `to`.
    fn carry_over(&mut self, to: &mut impl Write) -> io::Result<()> {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let count = self.file.read(&mut buffer)?;
            if count == 0 {
                return to.flush();
            }
            to.write_all(&buffer[..count])?;
        }
    }
}
