//! Outgoing connections: each address of a host gets its chance within one time limit.
//!
//! An address that swallows packets (a removed container, a firewall, IPv6 without a route) must
//! not use up the time of the others (report H07). So attempts are started one after the other
//! without waiting long for the one before, families taking turns, as in RFC 8305.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

/// Addresses of one host that are tried at most.
const ADDRESSES_MAX: usize = 8;
/// How long an attempt may be the only one. RFC 8305's "Connection Attempt Delay".
const HEAD_START: Duration = Duration::from_millis(250);

/// Why there is no connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum DialError {
    /// The name has no address; in the resolver's words.
    Resolve(String),
    /// Every address refused; the last one's words.
    Connect(String),
    /// The time was over.
    Timeout {
        /// What was under way.
        doing: &'static str,
    },
}

impl fmt::Display for DialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Resolve(reason) => write!(f, "the name has no address: {reason}"),
            Self::Connect(reason) => write!(f, "cannot connect: {reason}"),
            Self::Timeout { doing } => write!(f, "no connection in time while {doing}"),
        }
    }
}

/// Connects to `host`, a name or literal, at `port`, until `deadline`. Small writes leave at once.
pub(crate) async fn dial(host: &str, port: u16, deadline: Instant) -> Result<TcpStream, DialError> {
    let found = timeout_at(deadline, tokio::net::lookup_host((host, port)))
        .await
        .map_err(|_| DialError::Timeout {
            doing: "resolving the name",
        })?
        .map_err(|error| DialError::Resolve(error.to_string()))?;
    dial_any(in_turns(found.collect()), deadline).await
}

async fn dial_any(addresses: Vec<SocketAddr>, deadline: Instant) -> Result<TcpStream, DialError> {
    let timed_out = DialError::Timeout {
        doing: "connecting",
    };
    let mut last = DialError::Resolve("none was found".to_owned());
    let mut waiting = addresses.into_iter().take(ADDRESSES_MAX).peekable();
    let mut attempts = JoinSet::new();
    loop {
        if let Some(address) = waiting.next() {
            attempts.spawn(attempt(address));
        } else if attempts.is_empty() {
            return Err(last);
        }
        // The last attempt has all the time that is left.
        let until = match waiting.peek() {
            Some(_) => deadline.min(Instant::now() + HEAD_START),
            None => deadline,
        };
        match timeout_at(until, attempts.join_next()).await {
            Ok(Some(Ok(Ok(stream)))) => return Ok(stream),
            Ok(Some(Ok(Err(reason)))) => last = DialError::Connect(reason),
            Ok(Some(Err(error))) => last = DialError::Connect(error.to_string()),
            Ok(None) => {}
            Err(_) if Instant::now() >= deadline => return Err(timed_out),
            Err(_) => {}
        }
    }
}

async fn attempt(address: SocketAddr) -> Result<TcpStream, String> {
    let connected: io::Result<TcpStream> = async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
    .await;
    connected.map_err(|error| format!("{address}: {error}"))
}

/// The addresses with families taking turns, each family in the resolver's order, the resolver's
/// first choice first.
fn in_turns(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let first_is_v6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) = addresses
        .into_iter()
        .partition(|address| address.is_ipv6() == first_is_v6);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut ordered = Vec::new();
    loop {
        let (left, right) = (first.next(), second.next());
        if left.is_none() && right.is_none() {
            return ordered;
        }
        ordered.extend(left);
        ordered.extend(right);
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    /// An address whose listener's queue is full, so that the kernel ignores further attempts.
    async fn swallowing() -> (SocketAddr, Vec<Box<dyn Send>>) {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.bind(address("127.0.0.1:0")).expect("a port");
        let listener = socket.listen(0).expect("listening");
        let at = listener.local_addr().expect("bound");
        let mut held: Vec<Box<dyn Send>> = vec![Box::new(listener)];
        for _ in 0..8 {
            let attempt = timeout(Duration::from_millis(100), TcpStream::connect(at)).await;
            match attempt {
                Ok(stream) => held.push(Box::new(stream)),
                Err(_) => break,
            }
        }
        (at, held)
    }

    #[test]
    fn families_take_turns() {
        let order = in_turns(
            ["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1"]
                .map(address)
                .to_vec(),
        );
        assert_eq!(
            order,
            ["[::1]:1", "1.1.1.1:1", "[::2]:1", "[::3]:1"].map(address)
        );
    }

    #[tokio::test]
    async fn h07_an_address_that_swallows_packets_leaves_time_for_the_next() {
        let (swallowing, _held) = swallowing().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let healthy = listener.local_addr().expect("bound");
        let begun = Instant::now();
        let deadline = begun + Duration::from_secs(5);
        let stream = dial_any(vec![swallowing, healthy], deadline)
            .await
            .expect("the second address answers");
        assert_eq!(stream.peer_addr().expect("connected"), healthy);
        assert!(begun.elapsed() < Duration::from_secs(3));
    }

    #[tokio::test]
    async fn h07_connecting_ends_at_its_time_limit() {
        let (swallowing, _held) = swallowing().await;
        let begun = Instant::now();
        let ended = dial(
            "127.0.0.1",
            swallowing.port(),
            begun + Duration::from_millis(400),
        )
        .await;
        assert!(matches!(ended, Err(DialError::Timeout { .. })), "{ended:?}");
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(400) && took < Duration::from_secs(3));
    }

    #[tokio::test]
    async fn a_refusal_of_every_address_is_told_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let nobody = listener.local_addr().expect("bound");
        drop(listener);
        let deadline = Instant::now() + Duration::from_secs(60);
        match dial_any(vec![nobody, nobody], deadline).await {
            Err(DialError::Connect(reason)) => assert!(reason.contains("127.0.0.1"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}
