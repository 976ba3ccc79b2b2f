//! Listening sockets: bound once, before anybody is told of them, and never bound again.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;

use socket2::{Domain, Protocol, Socket, Type};

/// Ports that are tried at most when any of a range will do.
const PORT_TRIES_MAX: u32 = 500;
/// Connections that the kernel may hold before they are accepted, unless it is said.
pub(crate) const BACKLOG: u16 = 128;

/// Listens on `address`, or on any address of IPv6 and IPv4 if there is none, on the first free
/// port of `ports`, tried in random order. The socket does not block; the kernel holds `backlog`
/// connections for it.
///
/// # Errors
///
/// The system's, for the last port tried.
pub(crate) fn listen_on_one_of(
    address: Option<IpAddr>,
    ports: RangeInclusive<u16>,
    backlog: u16,
) -> io::Result<TcpListener> {
    let (first, last) = (*ports.start(), *ports.end());
    if first > last {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the range of ports is empty",
        ));
    }
    let count = u32::from(last - first) + 1;
    // Random, so that engines which start at once do not all try the same port first.
    let offset = rand::random_range(0..count);
    let mut last_error = None;
    for step in 0..count.min(PORT_TRIES_MAX) {
        let port = first + ((offset + step) % count) as u16;
        match bind(address, port, backlog, count == 1 && port != 0) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                return Ok(listener);
            }
            Err(error) => last_error = Some(error),
        }
    }
    let error = last_error.unwrap_or_else(|| io::ErrorKind::AddrInUse.into());
    Err(io::Error::new(
        error.kind(),
        format!("no port of {first}..={last} can be used: {error}"),
    ))
}

/// How many connections a server may hold of the `wanted`: a quarter of the descriptors that the
/// process may open, so that strangers cannot use up what devices, stores and peers need.
pub(crate) fn connections_max(wanted: usize) -> usize {
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let quarter = descriptors.map_or(usize::MAX, |limit| (limit / 4) as usize);
    wanted.min(quarter).max(1)
}

fn bind(
    address: Option<IpAddr>,
    port: u16,
    backlog: u16,
    is_chosen: bool,
) -> io::Result<TcpListener> {
    if let Some(address) = address {
        return listen(SocketAddr::new(address, port), backlog, is_chosen);
    }
    // A host may have no IPv6 at all.
    listen(
        SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port),
        backlog,
        is_chosen,
    )
    .or_else(|error| {
        if error.kind() == io::ErrorKind::AddrInUse {
            Err(error)
        } else {
            listen(
                SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port),
                backlog,
                is_chosen,
            )
        }
    })
}

fn listen(address: SocketAddr, backlog: u16, is_chosen: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    // A port that the operator chose must be usable at once after a restart, while connections of
    // the process before still wait out their time. Any of a range is left alone then.
    if is_chosen {
        socket.set_reuse_address(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(backlog.into())?;
    Ok(socket.into())
}
