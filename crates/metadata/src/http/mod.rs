//! Stores over HTTP: Rerail's own server, and the C++, Python and Go servers.
//!
//! Which of the two it is shows in the answers, and may change when the server is replaced.
//! Foreign servers have no versions, lists, leases or events: conditional writes are a read
//! followed by a write there, and a watch asks again for the one key that its prefix names.
//! `https://` is TLS or an error, never plaintext; files for TLS with `http://` are refused, too.

mod answers;
mod watching;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{CONTENT_TYPE, ETAG, IF_MATCH, IF_NONE_MATCH};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};

use crate::error::MetadataError;
use crate::options::StoreOptions;
use crate::secret::Secret;
use crate::store::{
    Capabilities, LeaseId, MetadataStore, Record, Result, Version, Watch, WatchKind,
};
use crate::tls;

/// What stays as it is in a key: RFC 3986's unreserved characters, as libcurl leaves them.
const KEY: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');
/// Header by which Rerail's server shows itself.
const MARK: &str = "rerail-metadata";
/// Header that binds a record to a lease.
const LEASE: &str = "rerail-lease";
/// Time to connect, as in the C++ engine.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1_500);
/// How long a connection without requests is kept: less than servers do, so that a request does not
/// meet one that is being closed. Rerail's server keeps them for 30 s.
const POOL_IDLE: Duration = Duration::from_secs(20);
/// Longest answer that is read. Lists of a whole cluster are the longest.
const ANSWER_BYTES_MAX: usize = 1 << 30;
/// Characters of a server's words that go into an error.
const REASON_CHARS_MAX: usize = 200;

/// A client of one HTTP server.
#[derive(Clone, Debug)]
pub struct HttpStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    url: String,
    client: Client,
    user: Option<(String, Secret)>,
    token: Option<Secret>,
    deadline: Duration,
    poll_interval: Duration,
    kind: AtomicU8,
}

/// What is known of the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Unknown,
    Rerail,
    Foreign,
}

impl HttpStore {
    /// A client of the server at `url`, to which `?key=` is appended. Connects when it is used.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Setting`] for TLS files that cannot be used, or that are set without
    /// `https://`, and if the client cannot be made.
    pub fn new(url: &str, user: Option<(String, Secret)>, options: &StoreOptions) -> Result<Self> {
        let tls = url.starts_with("https://");
        if !tls && !options.tls.is_empty() {
            return Err(MetadataError::Setting {
                name: url.into(),
                reason: "TLS files are set: use https://, never plaintext".into(),
            });
        }
        let config = if tls {
            tls::client_config(&options.tls)?
        } else {
            tls::no_client_config()?
        };
        let mut builder = Client::builder()
            .tls_backend_preconfigured(config)
            .https_only(tls)
            .connect_timeout(CONNECT_TIMEOUT)
            // Only the server's own answers count.
            .redirect(reqwest::redirect::Policy::none())
            .pool_idle_timeout(POOL_IDLE);
        // A proxy before a loopback address is another machine's loopback.
        if is_loopback(url) {
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|error| MetadataError::Setting {
            name: "HTTP client".into(),
            reason: error.to_string(),
        })?;
        Ok(Self {
            inner: Arc::new(Inner {
                url: url.trim_end_matches('/').to_owned(),
                client,
                user,
                token: options.token.clone(),
                deadline: options.deadline,
                poll_interval: options.poll_interval,
                kind: AtomicU8::new(Kind::Unknown as u8),
            }),
        })
    }
}

/// True if the host of `url` is this machine.
fn is_loopback(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split('/').next().unwrap_or_default();
    let host = match authority.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    host.eq_ignore_ascii_case("localhost")
        || host
            .parse()
            .is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, KEY).to_string()
}

/// An answer, read to its end.
struct Answer {
    status: StatusCode,
    version: Option<Version>,
    body: Bytes,
}

impl Inner {
    fn kind(&self) -> Kind {
        match self.kind.load(Ordering::Acquire) {
            1 => Kind::Rerail,
            2 => Kind::Foreign,
            _ => Kind::Unknown,
        }
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.client.request(method, format!("{}{path}", self.url));
        match (&self.token, &self.user) {
            (Some(token), _) => request.bearer_auth(token.expose()),
            (None, Some((user, password))) => request.basic_auth(user, Some(password.expose())),
            (None, None) => request,
        }
    }

    fn unavailable(&self, operation: &'static str, reason: String) -> MetadataError {
        MetadataError::Unavailable {
            store: self.url.clone(),
            operation,
            reason,
        }
    }

    fn malformed(&self, key: &str, reason: impl Into<String>) -> MetadataError {
        MetadataError::Malformed {
            store: self.url.clone(),
            key: key.into(),
            reason: reason.into(),
        }
    }

    fn not_found(&self, key: &str) -> MetadataError {
        MetadataError::NotFound {
            store: self.url.clone(),
            key: key.into(),
        }
    }

    fn conflict(&self, key: &str, reason: &str, current: Option<Version>) -> MetadataError {
        MetadataError::Conflict {
            store: self.url.clone(),
            key: key.into(),
            reason: reason.into(),
            current,
        }
    }

    fn lease_lost(&self, lease: &LeaseId) -> MetadataError {
        MetadataError::LeaseLost {
            store: self.url.clone(),
            lease: lease.to_string(),
        }
    }

    /// Sends a request and reads the answer, all within `deadline`.
    async fn send_within(
        &self,
        operation: &'static str,
        request: RequestBuilder,
        deadline: Duration,
    ) -> Result<Answer> {
        let exchange = async {
            let response = request
                .send()
                .await
                .map_err(|error| self.unavailable(operation, causes(error)))?;
            let marked = response.headers().contains_key(MARK);
            let kind = if marked { Kind::Rerail } else { Kind::Foreign };
            // A proxy's own refusal says nothing about the server behind it.
            if marked || !response.status().is_server_error() {
                self.kind.store(kind as u8, Ordering::Release);
            }
            self.read(operation, response).await
        };
        tokio::time::timeout(deadline, exchange)
            .await
            .unwrap_or_else(|_| {
                Err(MetadataError::TimedOut {
                    store: self.url.clone(),
                    operation,
                    deadline,
                })
            })
    }

    async fn send(&self, operation: &'static str, request: RequestBuilder) -> Result<Answer> {
        self.send_within(operation, request, self.deadline).await
    }

    async fn read(&self, operation: &'static str, mut response: Response) -> Result<Answer> {
        let status = response.status();
        let version = response
            .headers()
            .get(ETAG)
            .map(|etag| Version::from_bytes(Bytes::copy_from_slice(etag.as_bytes())));
        let mut chunks = Vec::new();
        loop {
            let chunk = response.chunk().await;
            match chunk.map_err(|error| self.unavailable(operation, causes(error)))? {
                None => break,
                Some(chunk) if chunks.len() + chunk.len() > ANSWER_BYTES_MAX => {
                    return Err(self.malformed(
                        "",
                        format!(
                            "the answer of {} bytes is too long",
                            chunks.len() + chunk.len()
                        ),
                    ));
                }
                Some(chunk) => chunks.extend_from_slice(&chunk),
            }
        }
        Ok(Answer {
            status,
            version,
            body: chunks.into(),
        })
    }

    /// The error for a status that an operation does not expect.
    fn unexpected(&self, operation: &'static str, key: &str, answer: &Answer) -> MetadataError {
        let store = self.url.clone();
        let words: String = String::from_utf8_lossy(&answer.body)
            .chars()
            .filter(|character| !character.is_control())
            .take(REASON_CHARS_MAX)
            .collect();
        let reason = match answer.status {
            // Absent records have a meaning for most operations, which never come here.
            StatusCode::NOT_FOUND => "nothing is served at this path (status 404): the URLs of \
                                      these servers end in /metadata"
                .to_owned(),
            status => format!("status {}: {words}", status.as_u16()),
        };
        match answer.status {
            StatusCode::PAYLOAD_TOO_LARGE => MetadataError::TooLarge {
                store,
                key: key.into(),
                size: 0,
                limit: 0,
                hint: "raise the server's limit or register fewer buffers",
            },
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
                self.unavailable(operation, reason)
            }
            status if status.is_server_error() => self.unavailable(operation, reason),
            _ => MetadataError::Refused {
                store,
                operation,
                reason,
            },
        }
    }

    /// Makes sure that it is known which kind of server this is.
    async fn known_kind(&self, operation: &'static str) -> Result<Kind> {
        if self.kind() == Kind::Unknown {
            let path = format!("?key={}", encoded("rerail/probe"));
            self.send(operation, self.request(Method::GET, &path))
                .await?;
        }
        Ok(self.kind())
    }

    fn require_rerail(&self, kind: Kind, operation: &'static str) -> Result<()> {
        if kind == Kind::Rerail {
            return Ok(());
        }
        Err(MetadataError::Unsupported {
            store: self.url.clone(),
            operation,
            reason: "the server is not Rerail's".into(),
        })
    }

    async fn get(&self, key: &str) -> Result<Record> {
        match self.get_unless(key, None).await? {
            Some(record) => Ok(record),
            None => Err(self.malformed(key, "not modified, which nobody asked")),
        }
    }

    /// The record; `None` if the server says that it is still the one with this `ETag`.
    async fn get_unless(&self, key: &str, seen: Option<&Version>) -> Result<Option<Record>> {
        let path = format!("?key={}", encoded(key));
        let mut request = self.request(Method::GET, &path);
        if let Some(seen) = seen {
            request = request.header(IF_NONE_MATCH, seen.as_bytes());
        }
        let answer = self.send("get", request).await?;
        match answer.status {
            StatusCode::NOT_MODIFIED if seen.is_some() => Ok(None),
            StatusCode::OK => Ok(Some(Record {
                key: key.into(),
                // Foreign servers have no versions; the value stands for its own.
                version: answer
                    .version
                    .unwrap_or_else(|| Version::from_bytes(answer.body.clone())),
                value: answer.body,
            })),
            StatusCode::NOT_FOUND => Err(self.not_found(key)),
            _ => Err(self.unexpected("get", key, &answer)),
        }
    }

    /// PUT with whatever headers; the answer's status is the caller's to judge.
    async fn send_put(
        &self,
        key: &str,
        value: &Bytes,
        lease: Option<&LeaseId>,
        condition: impl FnOnce(RequestBuilder) -> RequestBuilder,
    ) -> Result<Answer> {
        let path = format!("?key={}", encoded(key));
        let mut request = self
            .request(Method::PUT, &path)
            .header(CONTENT_TYPE, "application/json")
            .body(value.clone());
        if let Some(lease) = lease {
            request = request.header(LEASE, lease.as_str());
        }
        self.send("put", condition(request)).await
    }

    fn put_outcome(
        &self,
        key: &str,
        value: &Bytes,
        lease: Option<&LeaseId>,
        answer: &Answer,
    ) -> Result<Version> {
        match (answer.status, lease) {
            (StatusCode::OK, _) => Ok(answer
                .version
                .clone()
                .unwrap_or_else(|| Version::from_bytes(value.clone()))),
            (StatusCode::GONE, Some(lease)) => Err(self.lease_lost(lease)),
            (StatusCode::PRECONDITION_FAILED, _) => Err(self.conflict(
                key,
                "it has been changed, made or removed",
                answer.version.clone(),
            )),
            (StatusCode::PAYLOAD_TOO_LARGE, _) => Err(MetadataError::TooLarge {
                store: self.url.clone(),
                key: key.into(),
                size: value.len(),
                limit: 0,
                hint: "raise the server's limit or register fewer buffers",
            }),
            _ => Err(self.unexpected("put", key, answer)),
        }
    }

    /// A plain PUT; where a foreign server does not let a key be written again, DELETE and PUT.
    async fn put(&self, key: &str, value: Bytes, lease: Option<&LeaseId>) -> Result<Version> {
        if lease.is_some() {
            let kind = self.known_kind("put").await?;
            self.require_rerail(kind, "bind a record to a lease")?;
        }
        let mut answer = self.send_put(key, &value, lease, |request| request).await?;
        let duplicate = answer.status == StatusCode::BAD_REQUEST && self.kind() == Kind::Foreign;
        if duplicate && key.contains("rpc_meta") {
            self.delete(key, None).await?;
            answer = self.send_put(key, &value, lease, |request| request).await?;
        }
        self.put_outcome(key, &value, lease, &answer)
    }

    async fn delete(&self, key: &str, expected: Option<&Version>) -> Result<bool> {
        let path = format!("?key={}", encoded(key));
        let mut request = self.request(Method::DELETE, &path);
        if let Some(version) = expected {
            request = request.header(IF_MATCH, version.as_bytes());
        }
        let answer = self.send("delete", request).await?;
        match answer.status {
            StatusCode::OK => Ok(true),
            StatusCode::NOT_FOUND => Ok(false),
            StatusCode::PRECONDITION_FAILED => {
                Err(self.conflict(key, "it has been changed", answer.version))
            }
            _ => Err(self.unexpected("delete", key, &answer)),
        }
    }

    /// For foreign servers: checks a condition by reading.
    async fn check_by_reading(&self, key: &str, expected: Option<&Version>) -> Result<()> {
        let current = match self.get(key).await {
            Ok(record) => Some(record.version),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(error),
        };
        if current.as_ref() == expected {
            return Ok(());
        }
        let reason = match (expected, &current) {
            (None, _) => "there is one already",
            (Some(_), None) => "it is gone",
            (Some(_), Some(_)) => "it has been changed",
        };
        Err(self.conflict(key, reason, current))
    }
}

/// The error and what caused it, without the URL, which is in the store's name already.
fn causes(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

#[async_trait]
impl MetadataStore for HttpStore {
    fn describe(&self) -> String {
        self.inner.url.clone()
    }

    /// Those of a foreign server until the first answer has shown which kind it is.
    fn capabilities(&self) -> Capabilities {
        let rerail = self.inner.kind() == Kind::Rerail;
        Capabilities {
            atomic_conditions: rerail,
            list: rerail,
            leases: rerail,
            watch: if rerail {
                WatchKind::Events
            } else {
                WatchKind::Polling {
                    interval: self.inner.poll_interval,
                }
            },
            value_bytes_max: None,
        }
    }

    async fn get(&self, key: &str) -> Result<Record> {
        self.inner.get(key).await
    }

    async fn put(&self, key: &str, value: Bytes, lease: Option<&LeaseId>) -> Result<Version> {
        self.inner.put(key, value, lease).await
    }

    async fn create_if_absent(
        &self,
        key: &str,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        let inner = &self.inner;
        if inner.known_kind("create").await? == Kind::Rerail {
            let absent = |request: RequestBuilder| request.header(IF_NONE_MATCH, "*");
            let answer = inner.send_put(key, &value, lease, absent).await?;
            return inner.put_outcome(key, &value, lease, &answer);
        }
        inner.check_by_reading(key, None).await?;
        inner.put(key, value, lease).await
    }

    async fn compare_and_swap(
        &self,
        key: &str,
        expected: &Version,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        let inner = &self.inner;
        if inner.known_kind("compare-and-swap").await? == Kind::Rerail {
            let matching = |request: RequestBuilder| request.header(IF_MATCH, expected.as_bytes());
            let answer = inner.send_put(key, &value, lease, matching).await?;
            return inner.put_outcome(key, &value, lease, &answer);
        }
        inner.check_by_reading(key, Some(expected)).await?;
        inner.put(key, value, lease).await
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        self.inner.delete(key, None).await
    }

    async fn delete_if(&self, key: &str, expected: &Version) -> Result<bool> {
        let inner = &self.inner;
        if inner.known_kind("delete").await? == Kind::Rerail {
            return inner.delete(key, Some(expected)).await;
        }
        match inner.check_by_reading(key, Some(expected)).await {
            Ok(()) => inner.delete(key, None).await,
            Err(MetadataError::Conflict { current: None, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Record>> {
        let inner = &self.inner;
        let kind = inner.known_kind("list").await?;
        inner.require_rerail(kind, "list records")?;
        let path = format!("?prefix={}", encoded(prefix));
        let answer = inner
            .send("list", inner.request(Method::GET, &path))
            .await?;
        if answer.status != StatusCode::OK {
            return Err(inner.unexpected("list", prefix, &answer));
        }
        let (records, _) =
            answers::records(&answer.body).map_err(|reason| inner.malformed(prefix, reason))?;
        Ok(records)
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId> {
        let inner = &self.inner;
        let kind = inner.known_kind("grant a lease").await?;
        inner.require_rerail(kind, "grant a lease")?;
        let path = format!("/lease?ttl_ms={}", ttl.as_millis());
        let answer = inner
            .send("grant a lease", inner.request(Method::POST, &path))
            .await?;
        if answer.status != StatusCode::OK {
            return Err(inner.unexpected("grant a lease", "", &answer));
        }
        answers::lease(&answer.body).map_err(|reason| inner.malformed("", reason))
    }

    async fn keep_alive(&self, lease: &LeaseId) -> Result<()> {
        let inner = &self.inner;
        let path = format!("/lease?id={}", encoded(lease.as_str()));
        let request = inner.request(Method::PUT, &path);
        let answer = inner.send("keep a lease alive", request).await?;
        match answer.status {
            StatusCode::OK => Ok(()),
            // A foreign server in its place knows no leases at all.
            StatusCode::GONE | StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
                Err(inner.lease_lost(lease))
            }
            _ => Err(inner.unexpected("keep a lease alive", "", &answer)),
        }
    }

    async fn revoke_lease(&self, lease: &LeaseId) -> Result<()> {
        let inner = &self.inner;
        let path = format!("/lease?id={}", encoded(lease.as_str()));
        let request = inner.request(Method::DELETE, &path);
        let answer = inner.send("revoke a lease", request).await?;
        match answer.status {
            StatusCode::OK | StatusCode::GONE | StatusCode::NOT_FOUND => Ok(()),
            _ => Err(inner.unexpected("revoke a lease", "", &answer)),
        }
    }

    async fn watch(&self, prefix: &str) -> Result<Watch> {
        let (inner, prefix) = (Arc::clone(&self.inner), prefix.to_owned());
        Ok(Watch::spawn(|sink| watching::run(inner, prefix, sink)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_proxy_stands_before_a_loopback_address() {
        for url in [
            "http://127.0.0.1:80/m",
            "http://[::1]:1/m",
            "http://LOCALHOST",
            "http://127.9.9.9",
        ] {
            assert!(is_loopback(url), "{url}");
        }
        for url in [
            "http://10.0.0.1:80/127.0.0.1",
            "http://localhost.example:1/m",
        ] {
            assert!(!is_loopback(url), "{url}");
        }
    }

    #[test]
    fn keys_are_encoded_as_libcurl_does() {
        assert_eq!(
            encoded("mooncake/rpc_meta/[fd00::5]:14291 +~"),
            "mooncake%2Frpc_meta%2F%5Bfd00%3A%3A5%5D%3A14291%20%2B~"
        );
    }
}
