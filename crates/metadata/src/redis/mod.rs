//! Redis, standalone, version 6 and later.
//!
//! Records are plain strings, so that C++ engines read and write them. A version is the value
//! itself. Conditions, leases and the news to watches are scripts, each atomic. Beside the records
//! there are keys below `rerail:`: a hash for each lease and the lease of each record. An ACL user
//! needs `~mooncake/* ~rerail:* &rerail:* &__keyspace*` and the commands of the scripts.
//!
//! Changes by others and records that end with their lease are told at once where
//! `notify-keyspace-events` has `K`, `g`, `$` and `x` (or `KA`); otherwise watches tell a `Resync`
//! each poll interval. Not here: cluster and Sentinel.

mod scripts;
mod watching;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, IntoConnectionInfo, RedisError,
    RedisResult, TlsCertificates,
};

use crate::error::MetadataError;
use crate::options::StoreOptions;
use crate::secret::Secret;
use crate::store::{
    Capabilities, LeaseId, MetadataStore, Record, Result, Version, Watch, WatchKind,
};
use crate::tls::TlsMaterial;
use crate::url::StoreUrl;
use scripts::{Condition, Outcome, Scripts};

/// Redis' own limit of a string, `proto-max-bulk-len`.
const VALUE_BYTES_MAX: usize = 512 << 20;
/// Keys that one SCAN step looks at.
const SCAN_COUNT: usize = 1_000;
/// Records that one MGET reads.
const MGET_MAX: usize = 64;

/// A client of one Redis server.
#[derive(Clone)]
pub struct RedisStore {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    client: Client,
    /// The connection in use; `None` until the next operation makes one.
    connection: Mutex<Option<MultiplexedConnection>>,
    scripts: Scripts,
    database: u8,
    deadline: Duration,
    poll_interval: Duration,
}

impl std::fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The client holds the password.
        f.debug_struct("RedisStore")
            .field("name", &self.inner.name)
            .finish_non_exhaustive()
    }
}

impl RedisStore {
    /// A client of the server that `url` names. Connects when it is used.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Setting`] for TLS files that cannot be used, or that are set without
    /// `rediss://`; [`MetadataError::Url`] for another kind of URL.
    pub fn new(url: &StoreUrl, options: &StoreOptions) -> Result<Self> {
        let name = url.to_string();
        let StoreUrl::Redis {
            host,
            port,
            tls,
            user,
            password,
            database,
        } = url
        else {
            return Err(MetadataError::Url {
                url: name,
                reason: "expected redis:// or rediss://".into(),
            });
        };
        let setting = |reason: String| MetadataError::Setting {
            name: name.clone(),
            reason,
        };
        if !tls && !options.tls.is_empty() {
            return Err(setting(
                "TLS files are set: use rediss://, never plaintext".into(),
            ));
        }
        let database = database.or(options.redis_database).unwrap_or(0);
        let addr = if *tls {
            ConnectionAddr::TcpTls {
                host: host.clone(),
                port: *port,
                insecure: false,
                tls_params: None,
            }
        } else {
            ConnectionAddr::Tcp(host.clone(), *port)
        };
        let info = addr
            .into_connection_info()
            .map_err(|error| setting(error.to_string()))?;
        let mut redis = info.redis_settings().clone().set_db(database.into());
        if let Some(user) = user.as_ref().or(options.user.as_ref()) {
            redis = redis.set_username(user);
        }
        if let Some(password) = password.as_ref().or(options.password.as_ref()) {
            redis = redis.set_password(Secret::expose(password));
        }
        let info = info.set_redis_settings(redis);
        let client = if *tls {
            // Fails if another part of the program has chosen one, which is as good.
            let _ = crate::tls::provider().install_default();
            let material = TlsMaterial::read(&options.tls)?;
            let certificates = TlsCertificates {
                client_tls: material.identity.map(|own| ClientTlsConfig {
                    client_cert: own.certificates.text,
                    client_key: own.key.text,
                }),
                root_cert: material.ca.map(|ca| ca.text),
            };
            Client::build_with_tls(info, certificates)
        } else {
            Client::open(info)
        };
        let client = client.map_err(|error| setting(words(&error)))?;
        Ok(Self {
            inner: Arc::new(Inner {
                name,
                client,
                connection: Mutex::new(None),
                scripts: Scripts::new(),
                database,
                deadline: options.deadline,
                poll_interval: options.poll_interval,
            }),
        })
    }
}

impl Inner {
    fn slot(&self) -> std::sync::MutexGuard<'_, Option<MultiplexedConnection>> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    async fn connection(&self) -> RedisResult<MultiplexedConnection> {
        if let Some(connection) = self.slot().as_ref() {
            return Ok(connection.clone());
        }
        // Deadlines are the operations' own.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let connection = self
            .client
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        *self.slot() = Some(connection.clone());
        Ok(connection)
    }

    /// Runs `act` within the deadline. A connection that failed is not used again, and the first
    /// failure of an old one is not told if a new one works: the server was restarted meanwhile.
    async fn run<T, F>(
        &self,
        operation: &'static str,
        key: &str,
        act: impl Fn(MultiplexedConnection) -> F,
    ) -> Result<T>
    where
        F: Future<Output = RedisResult<T>>,
    {
        let attempts = async {
            let mut fresh = self.slot().is_none();
            loop {
                let tried = match self.connection().await {
                    Ok(connection) => act(connection).await,
                    Err(error) => Err(error),
                };
                let error = match tried {
                    Ok(done) => return Ok(done),
                    Err(error) => error,
                };
                let broken =
                    error.is_unrecoverable_error() || error.is_io_error() || is_demoted(&error);
                if broken {
                    *self.slot() = None;
                }
                if !broken || fresh {
                    return Err(self.judge(operation, key, &error));
                }
                fresh = true;
            }
        };
        tokio::time::timeout(self.deadline, attempts)
            .await
            .unwrap_or_else(|_| {
                // A connection that does not answer is of no use to the next one either.
                *self.slot() = None;
                Err(MetadataError::TimedOut {
                    store: self.name.clone(),
                    operation,
                    deadline: self.deadline,
                })
            })
    }

    fn judge(&self, operation: &'static str, key: &str, error: &RedisError) -> MetadataError {
        let store = self.name.clone();
        let reason = words(error);
        if reason.contains("invalid bulk length") {
            return MetadataError::TooLarge {
                store,
                key: key.into(),
                size: 0,
                limit: 0,
                hint: "raise proto-max-bulk-len or register fewer buffers",
            };
        }
        let refused = error.kind() == redis::ErrorKind::AuthenticationFailed
            || matches!(
                error.code(),
                Some("NOAUTH" | "WRONGPASS" | "NOPERM" | "WRONGTYPE" | "ERR" | "MISCONF")
            );
        if refused {
            MetadataError::Refused {
                store,
                operation,
                reason,
            }
        } else {
            MetadataError::Unavailable {
                store,
                operation,
                reason,
            }
        }
    }

    async fn put_if(
        &self,
        operation: &'static str,
        key: &str,
        condition: Condition<'_>,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        self.check_size(key, value.len())?;
        let outcome = self
            .run(operation, key, |mut connection| {
                let value = &value;
                async move {
                    self.scripts
                        .put(&mut connection, key, value, condition, lease)
                        .await
                }
            })
            .await?;
        match outcome {
            Outcome::Done => Ok(Version::from_bytes(value)),
            Outcome::NoLease => Err(self.lease_lost(lease)),
            Outcome::Conflict(current) => Err(self.conflict(key, condition, current)),
        }
    }

    fn check_size(&self, key: &str, value_bytes: usize) -> Result<()> {
        if value_bytes <= VALUE_BYTES_MAX {
            return Ok(());
        }
        Err(MetadataError::TooLarge {
            store: self.name.clone(),
            key: key.into(),
            size: value_bytes,
            limit: VALUE_BYTES_MAX,
            hint: "register fewer buffers",
        })
    }

    fn lease_lost(&self, lease: Option<&LeaseId>) -> MetadataError {
        MetadataError::LeaseLost {
            store: self.name.clone(),
            lease: lease.map_or_else(String::new, LeaseId::to_string),
        }
    }

    fn conflict(
        &self,
        key: &str,
        condition: Condition<'_>,
        current: Option<Bytes>,
    ) -> MetadataError {
        let reason = match (&current, condition) {
            (None, _) => "it is gone",
            (Some(_), Condition::Absent) => "there is one already",
            (Some(_), _) => "it has been changed",
        };
        MetadataError::Conflict {
            store: self.name.clone(),
            key: key.into(),
            reason: reason.into(),
            current: current.map(Version::from_bytes),
        }
    }

    /// The records of these keys that are there.
    async fn read(&self, operation: &'static str, keys: &[String]) -> Result<Vec<Record>> {
        let mut records = Vec::with_capacity(keys.len());
        for chunk in keys.chunks(MGET_MAX) {
            let values: Vec<Option<Vec<u8>>> = self
                .run(operation, "", |mut connection| async move {
                    redis::cmd("MGET")
                        .arg(chunk)
                        .query_async(&mut connection)
                        .await
                })
                .await?;
            let found = chunk.iter().zip(values);
            records.extend(found.filter_map(|(key, value)| Some(record(key, value?.into()))));
        }
        Ok(records)
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let pattern = format!("{}*", escape(prefix));
        let mut keys = Vec::new();
        let mut cursor = 0_u64;
        loop {
            let pattern = &pattern;
            let (next, page): (u64, Vec<Vec<u8>>) = self
                .run("list", prefix, |mut connection| async move {
                    redis::cmd("SCAN")
                        .arg(cursor)
                        .arg("MATCH")
                        .arg(pattern)
                        .arg("COUNT")
                        .arg(SCAN_COUNT)
                        .query_async(&mut connection)
                        .await
                })
                .await?;
            // Keys that are no text are none of ours.
            keys.extend(
                page.into_iter()
                    .filter_map(|key| String::from_utf8(key).ok()),
            );
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
        keys.retain(|key| !scripts::is_internal(key));
        // SCAN may tell a key twice.
        keys.sort_unstable();
        keys.dedup();
        Ok(keys)
    }
}

fn record(key: &str, value: Bytes) -> Record {
    Record {
        key: key.to_owned(),
        version: Version::from_bytes(value.clone()),
        value,
    }
}

/// A server that has become a replica refuses writes; the next connection may reach the new one.
fn is_demoted(error: &RedisError) -> bool {
    matches!(error.code(), Some("READONLY" | "MASTERDOWN" | "LOADING"))
}

/// The error in words. The library's own hold no credentials.
fn words(error: &RedisError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let said = cause.to_string();
        if !text.contains(&said) {
            text += &format!(": {said}");
        }
        source = cause.source();
    }
    text
}

/// `text` for a glob pattern, so that it stands for itself.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if matches!(character, '*' | '?' | '[' | ']' | '\\' | '^') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

#[async_trait]
impl MetadataStore for RedisStore {
    fn describe(&self) -> String {
        self.inner.name.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            atomic_conditions: true,
            list: true,
            leases: true,
            watch: WatchKind::Events,
            value_bytes_max: Some(VALUE_BYTES_MAX),
        }
    }

    fn check_size(&self, key: &str, value_bytes: usize) -> Result<()> {
        self.inner.check_size(key, value_bytes)
    }

    async fn get(&self, key: &str) -> Result<Record> {
        let value: Option<Vec<u8>> = self
            .inner
            .run("get", key, |mut connection| async move {
                redis::cmd("GET")
                    .arg(key)
                    .query_async(&mut connection)
                    .await
            })
            .await?;
        match value {
            Some(value) => Ok(record(key, value.into())),
            None => Err(MetadataError::NotFound {
                store: self.describe(),
                key: key.into(),
            }),
        }
    }

    async fn put(&self, key: &str, value: Bytes, lease: Option<&LeaseId>) -> Result<Version> {
        self.inner
            .put_if("put", key, Condition::None, value, lease)
            .await
    }

    async fn create_if_absent(
        &self,
        key: &str,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        self.inner
            .put_if("create", key, Condition::Absent, value, lease)
            .await
    }

    async fn compare_and_swap(
        &self,
        key: &str,
        expected: &Version,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        let condition = Condition::Value(expected.as_bytes());
        self.inner
            .put_if("compare-and-swap", key, condition, value, lease)
            .await
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        let inner = &self.inner;
        let outcome = inner
            .run("delete", key, |mut connection| async move {
                inner
                    .scripts
                    .delete(&mut connection, key, Condition::None)
                    .await
            })
            .await?;
        Ok(matches!(outcome, Outcome::Done))
    }

    async fn delete_if(&self, key: &str, expected: &Version) -> Result<bool> {
        let inner = &self.inner;
        let condition = Condition::Value(expected.as_bytes());
        let outcome = inner
            .run("delete", key, |mut connection| async move {
                inner.scripts.delete(&mut connection, key, condition).await
            })
            .await?;
        match outcome {
            Outcome::Done => Ok(true),
            Outcome::Conflict(Some(current)) => Err(inner.conflict(key, condition, Some(current))),
            Outcome::Conflict(None) | Outcome::NoLease => Ok(false),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Record>> {
        let keys = self.inner.keys(prefix).await?;
        self.inner.read("list", &keys).await
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId> {
        let inner = &self.inner;
        let lease = LeaseId::new(uuid::Uuid::now_v7().simple().to_string());
        let granted = &lease;
        inner
            .run("grant a lease", "", |mut connection| async move {
                inner.scripts.grant(&mut connection, granted, ttl).await
            })
            .await?;
        Ok(lease)
    }

    async fn keep_alive(&self, lease: &LeaseId) -> Result<()> {
        let inner = &self.inner;
        let known = inner
            .run("keep a lease alive", "", |mut connection| async move {
                inner.scripts.keep_alive(&mut connection, lease).await
            })
            .await?;
        if known {
            Ok(())
        } else {
            Err(inner.lease_lost(Some(lease)))
        }
    }

    async fn revoke_lease(&self, lease: &LeaseId) -> Result<()> {
        let inner = &self.inner;
        inner
            .run("revoke a lease", "", |mut connection| async move {
                inner.scripts.revoke(&mut connection, lease).await
            })
            .await
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
    fn a_prefix_stands_for_itself_in_a_pattern() {
        assert_eq!(escape("a*[b]?\\^"), "a\\*\\[b\\]\\?\\\\\\^");
    }

    #[test]
    fn the_password_never_shows() {
        let url = StoreUrl::parse("redis://u:s3cret@127.0.0.1:1/3").expect("valid");
        let store = RedisStore::new(&url, &StoreOptions::default()).expect("made");
        assert!(!format!("{store:?}{}", store.describe()).contains("s3cret"));
    }

    #[test]
    fn m28_tls_files_without_rediss_are_refused() {
        let url = StoreUrl::parse("redis://127.0.0.1:1").expect("valid");
        let mut options = StoreOptions::default();
        options.tls.ca = Some("/nonexistent".into());
        let error = RedisStore::new(&url, &options).expect_err("plaintext");
        assert!(error.to_string().contains("rediss://"), "{error}");
    }
}
