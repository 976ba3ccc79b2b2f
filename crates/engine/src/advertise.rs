//! Which own host peers are told.
//!
//! In this order: what the user says; an address in the own name, where there is no store; the
//! local address from which the store is reached; the address of the default route; loopback.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use rerail_metadata::StoreUrl;

use crate::config::EngineConfig;

/// An address that is never reached: connecting a UDP socket to it sends nothing and shows which
/// own address would be used (TEST-NET-1, RFC 5737).
const ANYWHERE: &str = "192.0.2.1:9";

/// The host, and why it is that.
pub(crate) fn choose(config: &EngineConfig) -> (String, &'static str) {
    if let Some(host) = &config.advertise {
        return (host.clone(), "it was set");
    }
    if config.is_peer_to_peer() {
        if let Some(address) = address_in(&config.name) {
            return (address.to_string(), "it is in the name");
        }
    } else if let Some(address) = store(&config.metadata).and_then(|store| towards(&store)) {
        return (address.to_string(), "the store is reached from it");
    }
    match towards(ANYWHERE) {
        Some(address) => (address.to_string(), "it is that of the default route"),
        None => (Ipv4Addr::LOCALHOST.to_string(), "there is no other address"),
    }
}

/// An IP literal as a name, or in front of a port.
fn address_in(name: &str) -> Option<IpAddr> {
    let literal = || {
        name.trim_start_matches('[')
            .trim_end_matches(']')
            .parse()
            .ok()
    };
    name.parse::<SocketAddr>()
        .map(|address| address.ip())
        .ok()
        .or_else(literal)
}

/// `host:port` of a store.
fn store(url: &StoreUrl) -> Option<String> {
    match url {
        StoreUrl::Etcd { endpoints, .. } => endpoints.first().cloned(),
        StoreUrl::Redis { host, port, .. } => Some(format!("{host}:{port}")),
        StoreUrl::Http { url, .. } => {
            let authority = url.split_once("://")?.1.split('/').next()?;
            let has_port = authority.rsplit(':').next()?.parse::<u16>().is_ok();
            Some(if has_port {
                authority.to_owned()
            } else {
                format!("{authority}:80")
            })
        }
        StoreUrl::Memory { .. } => Some("127.0.0.1:9".to_owned()),
        _ => None,
    }
}

/// The local address from which `host:port` is reached.
fn towards(host_port: &str) -> Option<IpAddr> {
    let remote = host_port.to_socket_addrs().ok()?.next()?;
    let any: SocketAddr = if remote.is_ipv4() {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    } else {
        (std::net::Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(remote).ok()?;
    let local = socket.local_addr().ok()?.ip();
    (!local.is_unspecified()).then_some(local)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(metadata: &str, name: &str) -> EngineConfig {
        EngineConfig::with_settings(metadata, name, &|_| None).expect("valid")
    }

    #[test]
    fn h11_the_advertised_host_follows_what_is_known() {
        let mut own = config("P2PHANDSHAKE", "10.1.2.3:17000");
        assert_eq!(choose(&own).0, "10.1.2.3");
        own.advertise = Some("host.example".into());
        assert_eq!(choose(&own).0, "host.example", "what was set wins");
        let own = config("P2PHANDSHAKE", "[::1]:5");
        assert_eq!(choose(&own).0, "::1");
        let own = config("http://127.0.0.1:8080/metadata", "a");
        assert_eq!(choose(&own).0, "127.0.0.1", "a store on loopback");
        assert_eq!(choose(&config("memory://x", "a")).0, "127.0.0.1");
    }
}
