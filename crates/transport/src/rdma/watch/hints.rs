//! Notices of the kernel about links and addresses: a second hint that a port may differ.
//!
//! Nothing is read out of them: which port they concern, and what is true of it, is for the
//! observer to find out. They tell what verbs events do not, such as a changed MTU.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

use crate::machine::Time;

/// Multicast groups of `NETLINK_ROUTE`: links, IPv4 addresses, IPv6 addresses.
const GROUPS: u32 = 0x1 | 0x10 | 0x100;

/// Least time between two hints: hosts that start containers send notices all the time.
const QUIET: Duration = Duration::from_millis(100);

/// Notices that are thrown away in one go.
const DRAIN_MAX: usize = 256;

/// The notices' socket, where there is one.
pub(super) struct Hints {
    socket: Option<OwnedFd>,
    /// A notice came and no hint was given for it yet.
    pending: bool,
    not_before: Time,
}

impl Hints {
    pub(super) fn open() -> Self {
        let socket = open().inspect_err(|error| {
            tracing::warn!(%error, "no link and address notices: only verbs events and timers tell");
        });
        Self {
            socket: socket.ok(),
            pending: false,
            not_before: Time::ZERO,
        }
    }

    /// Readable when a notice waits.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Takes all notices. True if ports are to be read now.
    pub(super) fn take(&mut self, now: Time) -> bool {
        let mut buffer = [0_u8; 4096];
        if let Some(socket) = &self.socket {
            for _ in 0..DRAIN_MAX {
                match recv(socket, &mut buffer[..], RecvFlags::DONTWAIT) {
                    Ok(_) => self.pending = true,
                    // Notices were lost: that is one, too.
                    Err(rustix::io::Errno::NOBUFS) => self.pending = true,
                    Err(_) => break,
                }
            }
        }
        if !self.pending || now < self.not_before {
            return false;
        }
        self.pending = false;
        self.not_before = now + QUIET;
        true
    }

    /// When a notice that waits becomes a hint.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.pending.then_some(self.not_before)
    }
}

fn open() -> rustix::io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    bind(&socket, &SocketAddrNetlink::new(0, GROUPS))?;
    Ok(socket)
}
