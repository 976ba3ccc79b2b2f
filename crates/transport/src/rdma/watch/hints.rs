//! Notices of the kernel: a second hint that a port may differ, and that there may be another
//! device.
//!
//! Nothing is read out of them but whether they are about RDMA devices at all: which port they
//! concern, and what is true of it, is for the observer to find out. Those about links and
//! addresses tell what verbs events do not, such as a changed MTU.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with,
};

use crate::machine::Time;

/// Multicast groups of `NETLINK_ROUTE`: links, IPv4 addresses, IPv6 addresses.
const LINK_GROUPS: u32 = 0x1 | 0x10 | 0x100;

/// The kernel's own group of `NETLINK_KOBJECT_UEVENT`.
const DEVICE_GROUPS: u32 = 0x1;

/// What notices about RDMA devices have in them.
const DEVICE_WORDS: &[u8] = b"SUBSYSTEM=infiniband";

/// Least time between two hints: hosts that start containers send notices all the time.
const QUIET: Duration = Duration::from_millis(100);

/// Notices that are thrown away in one go.
const DRAIN_MAX: usize = 256;

/// The notices' sockets, where there are any.
pub(super) struct Hints {
    links: Source,
    devices: Source,
}

impl Hints {
    pub(super) fn open() -> Self {
        let links = open(None, LINK_GROUPS).inspect_err(|error| {
            tracing::warn!(%error, "no link and address notices: only verbs events and timers tell");
        });
        let devices = open(Some(KOBJECT_UEVENT), DEVICE_GROUPS).inspect_err(|error| {
            tracing::info!(%error, "no notices of devices: new ones are looked for by timer");
        });
        Self {
            links: Source::new(links.ok(), b""),
            devices: Source::new(devices.ok(), DEVICE_WORDS),
        }
    }

    /// Readable when a notice waits.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [&self.links, &self.devices]
            .into_iter()
            .filter_map(|source| source.socket.as_ref().map(AsFd::as_fd))
    }

    /// Takes all notices of links and addresses. True if ports are to be read now.
    pub(super) fn take(&mut self, now: Time) -> bool {
        self.links.take(now)
    }

    /// Takes all notices of devices. True if there may be others now.
    pub(super) fn take_device(&mut self, now: Time) -> bool {
        self.devices.take(now)
    }

    /// When a notice that waits becomes a hint.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let waiting = [&self.links, &self.devices];
        let waiting = waiting.into_iter().filter(|source| source.pending);
        waiting.map(|source| source.not_before).min()
    }
}

/// One socket.
struct Source {
    socket: Option<OwnedFd>,
    /// What a notice must have in it to count.
    words: &'static [u8],
    /// A notice came and no hint was given for it yet.
    pending: bool,
    not_before: Time,
}

impl Source {
    fn new(socket: Option<OwnedFd>, words: &'static [u8]) -> Self {
        Self {
            socket,
            words,
            pending: false,
            not_before: Time::ZERO,
        }
    }

    fn take(&mut self, now: Time) -> bool {
        let mut buffer = [0_u8; 4096];
        if let Some(socket) = &self.socket {
            for _ in 0..DRAIN_MAX {
                match recv(socket, &mut buffer[..], RecvFlags::DONTWAIT) {
                    Ok((length, _)) => self.pending |= counts(&buffer, length, self.words),
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
}

/// Whether the notice of `length` bytes in a buffer has these words in it.
fn counts(buffer: &[u8], length: usize, words: &[u8]) -> bool {
    let notice = buffer.get(..length).unwrap_or(buffer);
    words.is_empty() || notice.windows(words.len()).any(|here| here == words)
}

fn open(protocol: Option<Protocol>, groups: u32) -> rustix::io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        protocol,
    )?;
    bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_notices_of_rdma_devices_are_hints_of_devices() {
        let of_device: &[u8] =
            b"add@/devices/virtual/infiniband/rxe0\0ACTION=add\0SUBSYSTEM=infiniband\0SEQNUM=7\0";
        let of_link: &[u8] = b"add@/devices/virtual/net/veth0\0ACTION=add\0SUBSYSTEM=net\0";
        assert!(counts(of_device, of_device.len(), DEVICE_WORDS));
        assert!(!counts(of_link, of_link.len(), DEVICE_WORDS));
        assert!(!counts(of_device, 20, DEVICE_WORDS), "no byte past its end");
        assert!(counts(of_link, of_link.len(), b""));
        assert!(
            counts(of_device, usize::MAX, DEVICE_WORDS),
            "one that was cut"
        );
    }
}
