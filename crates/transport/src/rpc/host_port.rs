//! Texts that name a host, with or without a port (RFC 3986 forms; report H01).

use std::fmt;
use std::net::Ipv6Addr;

/// Port of a text that names none (`MC_HANDSHAKE_PORT`'s default).
pub const PORT_DEFAULT: u16 = 12001;

/// A host name or address, and a port if the text named one.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HostPort {
    /// Host name, IPv4 or IPv6 literal, without brackets.
    pub host: String,
    /// The port, if there was one.
    pub port: Option<u16>,
}

/// A text that names no host.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?} names no host: {reason}; write HOST, HOST:PORT, an IPv6 literal, or [IPv6]:PORT")]
pub struct HostPortError {
    /// The text, cut to 128 characters.
    pub text: String,
    /// What is wrong.
    pub reason: &'static str,
}

impl HostPort {
    /// Reads `HOST`, `HOST:PORT`, a bare IPv6 literal, `[IPv6]`, `[IPv6]:PORT`; a literal may have
    /// a `%scope`.
    pub fn parse(text: &str) -> Result<Self, HostPortError> {
        let error = |reason| HostPortError {
            text: text.chars().take(128).collect(),
            reason,
        };
        let (host, port) = if let Some(inner) = text.strip_prefix('[') {
            let (host, rest) = inner
                .split_once(']')
                .ok_or_else(|| error("a ] is missing"))?;
            if !is_ipv6(host) {
                return Err(error("what stands in brackets is no IPv6 address"));
            }
            match rest.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if rest.is_empty() => (host, None),
                None => return Err(error("after ] only :PORT may follow")),
            }
        } else if is_ipv6(text) {
            (text, None)
        } else {
            match text.split_once(':') {
                Some((host, port)) if !port.contains(':') => (host, Some(port)),
                Some(_) => return Err(error("it has several colons and is no IPv6 address")),
                None => (text, None),
            }
        };
        if host.is_empty() {
            return Err(error("the host is empty"));
        }
        let acceptable = |character: char| {
            !character.is_whitespace() && !character.is_control() && !"/@[]?#".contains(character)
        };
        if host.len() > 253 || !host.chars().all(acceptable) {
            return Err(error("the host has characters that no host has"));
        }
        let port = match port {
            None => None,
            Some(port) => {
                let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
                let number = port
                    .parse::<u16>()
                    .ok()
                    .filter(|number| digits && *number > 0);
                Some(number.ok_or_else(|| error("the port is no number in 1..=65535"))?)
            }
        };
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }

    /// The port, or else `default`.
    pub fn port_or(&self, default: u16) -> u16 {
        self.port.unwrap_or(default)
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        match (host.contains(':'), port) {
            (true, Some(port)) => write!(f, "[{host}]:{port}"),
            (false, Some(port)) => write!(f, "{host}:{port}"),
            (_, None) => f.write_str(host),
        }
    }
}

fn is_ipv6(text: &str) -> bool {
    let (address, scope) = text
        .split_once('%')
        .map_or((text, None), |(a, s)| (a, Some(s)));
    address.parse::<Ipv6Addr>().is_ok() && scope != Some("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h01_hosts_and_ports_are_read_as_in_rfc_3986() {
        let long = "2001:db8:51:4600:9c7d:e2a3:a136:efc";
        for (text, host, port) in [
            (long, long, None),
            ("[2001:db8::5]:15000", "2001:db8::5", Some(15000)),
            ("[2001:db8::5]", "2001:db8::5", None),
            ("::1", "::1", None),
            ("fe80::1%eth0", "fe80::1%eth0", None),
            ("[fe80::1%eth0]:7", "fe80::1%eth0", Some(7)),
            ("node-a.example:12345", "node-a.example", Some(12345)),
            ("0.0.0.0", "0.0.0.0", None),
        ] {
            let parsed = HostPort::parse(text).expect(text);
            assert_eq!((parsed.host.as_str(), parsed.port), (host, port));
            assert_eq!(HostPort::parse(&parsed.to_string()), Ok(parsed));
        }
    }

    #[test]
    fn h01_bad_forms_are_errors() {
        for text in [
            "",
            ":1",
            "a:",
            "a:0",
            "a:65536",
            "a:+5",
            "a:b",
            "a:1:2",
            "[::1",
            "[::1]x",
            "[a]:1",
            "[]",
            "a b",
            "a/b:1",
            "a@b:1",
            "[::1]:",
            "fe80::1%",
            "http://a:1",
        ] {
            assert!(HostPort::parse(text).is_err(), "{text}");
        }
    }
}
