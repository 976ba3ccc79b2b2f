//! Store URLs: which store a program means.

use std::fmt;

use crate::error::MetadataError;
use crate::secret::Secret;

/// Schemes of this crate with the feature each needs; `memory` and P2PHANDSHAKE need none.
const SCHEMES: [(&str, &str, bool); 5] = [
    ("etcd", "etcd", cfg!(feature = "etcd")),
    ("redis", "redis", cfg!(feature = "redis")),
    ("rediss", "redis", cfg!(feature = "redis")),
    ("http", "http", cfg!(feature = "http")),
    ("https", "http", cfg!(feature = "http")),
];

/// Port of etcd where the URL names none.
const ETCD_PORT: u16 = 2379;
/// Port of Redis where the URL names none.
const REDIS_PORT: u16 = 6379;
/// What C++ engines take as Redis' port where the URL names none.
const CPP_REDIS_PORT: u16 = 12001;

/// A parsed store URL. `Display` and `Debug` never show a password.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StoreUrl {
    /// `etcd://h:p[,h:p…]` (`;` too), or bare `h:p`.
    Etcd {
        /// Members, `host:port` each.
        endpoints: Vec<String>,
        /// From `etcd://user:password@…`.
        user: Option<(String, Secret)>,
    },
    /// `redis://` or `rediss://`.
    Redis {
        /// Host, IPv6 without brackets.
        host: String,
        /// Port.
        port: u16,
        /// True for `rediss://` (and `redis+tls://`).
        tls: bool,
        /// ACL user.
        user: Option<String>,
        /// Password.
        password: Option<Secret>,
        /// Database index; `None` where the URL names none.
        database: Option<u8>,
    },
    /// `http://` or `https://`: the endpoint to which `?key=` is appended.
    Http {
        /// The URL without user information.
        url: String,
        /// From `http://user:password@…`; sent as basic authentication.
        user: Option<(String, Secret)>,
    },
    /// `memory://NAME`: one store a name within this process.
    Memory {
        /// The name.
        name: String,
    },
    /// `P2PHANDSHAKE`: no store; descriptors are asked of the peers themselves.
    PeerToPeer,
}

impl StoreUrl {
    /// Parses a URL.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Url`], with the schemes that are known. Whether the scheme is compiled in
    /// is not asked here: see [`StoreUrl::check_built_in`].
    pub fn parse(text: &str) -> Result<Self, MetadataError> {
        let text = text.trim();
        if text == "P2PHANDSHAKE" {
            return Ok(Self::PeerToPeer);
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            // A bare host:port is etcd, as in the C++ engine.
            return Self::parse_etcd(text, text);
        };
        match scheme {
            "etcd" => Self::parse_etcd(text, rest),
            "redis" => Self::parse_redis(text, rest, false),
            "rediss" | "redis+tls" => Self::parse_redis(text, rest, true),
            "http" | "https" => Self::parse_http(text, scheme, rest),
            "memory" => {
                if rest.is_empty() {
                    return Err(bad(text, "expected memory://NAME"));
                }
                Ok(Self::Memory { name: rest.into() })
            }
            other => Err(bad(
                text,
                &format!(
                    "scheme {other:?} is not known; known are {}",
                    known_schemes()
                ),
            )),
        }
    }

    /// True if there is a password in it.
    pub fn has_secret(&self) -> bool {
        match self {
            Self::Etcd { user, .. } | Self::Http { user, .. } => user.is_some(),
            Self::Redis { password, .. } => password.is_some(),
            Self::Memory { .. } | Self::PeerToPeer => false,
        }
    }

    /// The feature that the store needs; `None` where it is always there.
    pub fn feature(&self) -> Option<&'static str> {
        match self {
            Self::Etcd { .. } => Some("etcd"),
            Self::Redis { .. } => Some("redis"),
            Self::Http { .. } => Some("http"),
            Self::Memory { .. } | Self::PeerToPeer => None,
        }
    }

    /// Checks that this build has the store.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Unsupported`], which says what is missing and what there is
    /// (report M19).
    pub fn check_built_in(&self) -> Result<(), MetadataError> {
        let Some(feature) = self.feature() else {
            return Ok(());
        };
        if SCHEMES
            .iter()
            .any(|(_, name, built_in)| *name == feature && *built_in)
        {
            return Ok(());
        }
        Err(MetadataError::Unsupported {
            store: self.to_string(),
            operation: "be opened by this build",
            reason: format!(
                "it was built without the feature `{feature}`; it has {}",
                built_in_schemes()
            ),
        })
    }

    fn parse_etcd(text: &str, rest: &str) -> Result<Self, MetadataError> {
        let (user, hosts) = split_user(text, rest)?;
        let user = match user {
            None => None,
            Some((Some(name), Some(password))) => Some((name, password)),
            Some(_) => return Err(bad(text, "etcd needs both a user and a password")),
        };
        let endpoints = hosts
            .trim_end_matches('/')
            .split([',', ';'])
            .map(str::trim)
            .filter(|endpoint| !endpoint.is_empty())
            .map(|endpoint| {
                let (host, port) = host_port(text, endpoint)?;
                Ok(join_host_port(&host, port.unwrap_or(ETCD_PORT)))
            })
            .collect::<Result<Vec<_>, MetadataError>>()?;
        if endpoints.is_empty() {
            return Err(bad(text, "expected etcd://HOST:PORT[,HOST:PORT…]"));
        }
        Ok(Self::Etcd { endpoints, user })
    }

    fn parse_redis(text: &str, rest: &str, tls: bool) -> Result<Self, MetadataError> {
        let (user, rest) = split_user(text, rest)?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let database = match path.trim_end_matches('/') {
            "" => None,
            index => Some(
                index
                    .parse::<u8>()
                    .map_err(|_| bad(text, "the database index is not a number in 0..=255"))?,
            ),
        };
        let (host, port) = host_port(text, authority)?;
        if port.is_none() {
            tracing::warn!(
                "Redis port not given: using {REDIS_PORT}; C++ engines take {CPP_REDIS_PORT} \
                 there, so name the port"
            );
        }
        let (user, password) = user.unwrap_or((None, None));
        Ok(Self::Redis {
            host,
            port: port.unwrap_or(REDIS_PORT),
            tls,
            user,
            password,
            database,
        })
    }

    fn parse_http(text: &str, scheme: &str, rest: &str) -> Result<Self, MetadataError> {
        let (user, rest) = split_user(text, rest)?;
        let user = user.map(|(name, password)| {
            let password = password.unwrap_or_else(|| Secret::new(""));
            (name.unwrap_or_default(), password)
        });
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        host_port(text, authority)?;
        if rest.contains(['?', '#']) {
            return Err(bad(
                text,
                "must not have a query or a fragment; ?key= is appended to it",
            ));
        }
        Ok(Self::Http {
            url: format!("{scheme}://{rest}"),
            user,
        })
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Etcd { endpoints, .. } => write!(f, "etcd://{}", endpoints.join(",")),
            Self::Redis {
                host,
                port,
                tls,
                database,
                ..
            } => {
                let scheme = if *tls { "rediss" } else { "redis" };
                write!(f, "{scheme}://{}", join_host_port(host, *port))?;
                match database {
                    Some(index) => write!(f, "/{index}"),
                    None => Ok(()),
                }
            }
            Self::Http { url, .. } => f.write_str(url),
            Self::Memory { name } => write!(f, "memory://{name}"),
            Self::PeerToPeer => f.write_str("P2PHANDSHAKE"),
        }
    }
}

/// All schemes, for messages.
fn known_schemes() -> String {
    let mut names: Vec<String> = SCHEMES
        .iter()
        .map(|(name, ..)| format!("{name}://"))
        .collect();
    names.push("memory://".into());
    names.push("P2PHANDSHAKE".into());
    names.join(", ")
}

/// Schemes of this build, for messages.
fn built_in_schemes() -> String {
    let mut names: Vec<String> = SCHEMES
        .iter()
        .filter(|(.., built_in)| *built_in)
        .map(|(name, ..)| format!("{name}://"))
        .collect();
    names.push("memory://".into());
    names.push("P2PHANDSHAKE".into());
    names.join(", ")
}

/// The reason never quotes parts of the URL: where it is broken, any part may be a password.
fn bad(text: &str, reason: &str) -> MetadataError {
    MetadataError::Url {
        url: redact(text),
        reason: reason.into(),
    }
}

/// The URL with its user information cut out.
fn redact(text: &str) -> String {
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    let authority = rest.split('/').next().unwrap_or(rest);
    let cut = match authority.rfind('@') {
        Some(at) => format!("***{}", &rest[at..]),
        None => match rest.rfind('@') {
            // A password with a bare `/` in it: cut there, too.
            Some(at) => format!("***{}", &rest[at..]),
            None => rest.to_owned(),
        },
    };
    if scheme.is_empty() {
        cut
    } else {
        format!("{scheme}://{cut}")
    }
}

type UserInfo = (Option<String>, Option<Secret>);

/// Splits `user:password@` off, percent-decoding both.
fn split_user<'text>(
    text: &str,
    rest: &'text str,
) -> Result<(Option<UserInfo>, &'text str), MetadataError> {
    let end = rest.find('/').unwrap_or(rest.len());
    let Some(at) = rest[..end].rfind('@') else {
        return Ok((None, rest));
    };
    let (name, password) = match rest[..at].split_once(':') {
        Some((name, password)) => (name, Some(password)),
        None => (&rest[..at], None),
    };
    let decode = |part: &str| {
        percent_decode(part).ok_or_else(|| bad(text, "user information is not percent-encoded"))
    };
    let name = match decode(name)? {
        name if name.is_empty() => None,
        name => Some(name),
    };
    let password = password.map(decode).transpose()?.map(Secret::new);
    Ok((Some((name, password)), &rest[at + 1..]))
}

fn percent_decode(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while index < bytes.len() {
        if bytes[index] == b'%' {
            let digits = text.get(index + 1..index + 3)?;
            decoded.push(u8::from_str_radix(digits, 16).ok()?);
            index += 3;
        } else {
            decoded.push(bytes[index]);
            index += 1;
        }
    }
    String::from_utf8(decoded).ok()
}

/// `host`, `host:port`, `[v6]`, `[v6]:port`; a bare IPv6 literal is a host (RFC 3986 has no such
/// form, and a port in it would be a guess).
fn host_port(text: &str, authority: &str) -> Result<(String, Option<u16>), MetadataError> {
    let port_of = |port: &str| match port.parse::<u16>() {
        Ok(port) if port != 0 => Ok(port),
        _ => Err(bad(text, "the port is not a number in 1..=65535")),
    };
    let (host, port) = if let Some(rest) = authority.strip_prefix('[') {
        let Some((host, after)) = rest.split_once(']') else {
            return Err(bad(text, "']' is missing after an IPv6 address"));
        };
        if host.parse::<std::net::Ipv6Addr>().is_err() {
            return Err(bad(text, "what stands in [] is no IPv6 address"));
        }
        match after.strip_prefix(':') {
            Some(port) => (host, Some(port_of(port)?)),
            None if after.is_empty() => (host, None),
            None => return Err(bad(text, "expected ':' and a port after ']'")),
        }
    } else if authority.parse::<std::net::Ipv6Addr>().is_ok() {
        (authority, None)
    } else {
        match authority.split_once(':') {
            Some((host, port)) => (host, Some(port_of(port)?)),
            None => (authority, None),
        }
    };
    if host.is_empty() || host.contains(char::is_whitespace) {
        return Err(bad(text, "the host is missing or has spaces"));
    }
    Ok((host.to_owned(), port))
}

fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn u01_every_published_connection_string_is_understood() {
        let etcd = |endpoints: &[&str]| StoreUrl::Etcd {
            endpoints: endpoints
                .iter()
                .map(|&endpoint| endpoint.to_owned())
                .collect(),
            user: None,
        };
        for (text, expected) in [
            ("etcd://192.0.2.1:2379", etcd(&["192.0.2.1:2379"])),
            ("192.0.2.1:2379", etcd(&["192.0.2.1:2379"])),
            (
                "etcd://a:2379;b:2379;c:2379",
                etcd(&["a:2379", "b:2379", "c:2379"]),
            ),
            ("etcd://a:1,b:2", etcd(&["a:1", "b:2"])),
            ("etcd://[fd00::5]:2379", etcd(&["[fd00::5]:2379"])),
            ("etcd://fd00::5", etcd(&["[fd00::5]:2379"])),
            ("P2PHANDSHAKE", StoreUrl::PeerToPeer),
            ("memory://a/b", StoreUrl::Memory { name: "a/b".into() }),
            (
                "http://192.0.2.1:8080/metadata",
                StoreUrl::Http {
                    url: "http://192.0.2.1:8080/metadata".into(),
                    user: None,
                },
            ),
            (
                "redis://:s3cret@192.0.2.9:6379/3",
                StoreUrl::Redis {
                    host: "192.0.2.9".into(),
                    port: 6379,
                    tls: false,
                    user: None,
                    password: Some(Secret::new("s3cret")),
                    database: Some(3),
                },
            ),
            (
                "rediss://user:p%40w@h:6380",
                StoreUrl::Redis {
                    host: "h".into(),
                    port: 6380,
                    tls: true,
                    user: Some("user".into()),
                    password: Some(Secret::new("p@w")),
                    database: None,
                },
            ),
        ] {
            assert_eq!(StoreUrl::parse(text).expect(text), expected, "{text}");
        }
    }

    #[test]
    fn u01_an_unknown_scheme_lists_the_known_ones() {
        let error = StoreUrl::parse("etc://x")
            .expect_err("no such scheme")
            .to_string();
        for scheme in [
            "etcd://",
            "redis://",
            "http://",
            "memory://",
            "P2PHANDSHAKE",
        ] {
            assert!(error.contains(scheme), "{error}");
        }
    }

    #[test]
    fn secrets_never_show() {
        for text in [
            "redis://:s3cret@h:6379/3",
            "redis://:s3cret@h:99999",
            "redis://u:s3cret@h/x",
            "etcd://u:s3cret@h:2379",
            "http://u:s3cret@h/metadata?x",
            "nope://u:s3cret@h",
            "redis://:s3/s3cret@h",
        ] {
            let shown = match StoreUrl::parse(text) {
                Ok(url) => format!("{url} {url:?}"),
                Err(error) => format!("{error} {error:?}"),
            };
            assert!(!shown.contains("s3cret"), "{text}: {shown}");
        }
    }

    #[test]
    fn broken_urls_are_errors() {
        for text in [
            "",
            "etcd://",
            "etcd://h:0",
            "etcd://h:x",
            "etcd://[fd00::5",
            "etcd://[x]:1",
            "redis://",
            "redis://h/256",
            "redis://h:70000",
            "http://",
            "http:///metadata",
            "memory://",
            "etcd://user@h:1",
        ] {
            assert!(StoreUrl::parse(text).is_err(), "{text:?} must be refused");
        }
    }

    #[test]
    fn m19_a_store_that_is_not_built_in_is_named_with_what_there_is() {
        for text in ["etcd://h:1", "redis://h:1", "http://h:1/metadata"] {
            let url = StoreUrl::parse(text).expect("valid");
            let feature = url.feature().expect("needs one");
            let built_in = SCHEMES
                .iter()
                .any(|(_, name, here)| *name == feature && *here);
            match url.check_built_in() {
                Ok(()) => assert!(built_in, "{text}"),
                Err(error) => {
                    assert!(!built_in, "{text}");
                    let error = error.to_string();
                    assert!(error.contains(&format!("`{feature}`")), "{error}");
                    assert!(error.contains("memory://"), "{error}");
                }
            }
        }
        StoreUrl::parse("memory://x")
            .expect("valid")
            .check_built_in()
            .expect("always there");
    }
}
