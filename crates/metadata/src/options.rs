//! Settings of stores, and the way from a URL to a store.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::error::MetadataError;
use crate::memory::MemoryStore;
use crate::secret::Secret;
use crate::store::MetadataStore;
use crate::url::StoreUrl;

/// Settings shared by all stores. What a URL says wins over them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Deadline of each operation.
    pub deadline: Duration,
    /// Time between two questions of a watch where the store does not tell of changes.
    pub poll_interval: Duration,
    /// Bearer token for HTTP.
    pub token: Option<Secret>,
    /// User for etcd and Redis.
    pub user: Option<String>,
    /// Password for etcd and Redis.
    pub password: Option<Secret>,
    /// Database index of Redis.
    pub redis_database: Option<u8>,
    /// etcd's `--max-request-bytes`.
    pub etcd_request_bytes_max: usize,
    /// Files for TLS. With any of them set, etcd is spoken to over TLS only, and `redis://` and
    /// `http://` are refused.
    pub tls: TlsFiles,
}

/// PEM files for TLS. A file that cannot be used is an error, never a reason to go without.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TlsFiles {
    /// Certificates of the authorities that sign servers.
    pub ca: Option<PathBuf>,
    /// The client's certificate; goes with `key`.
    pub certificate: Option<PathBuf>,
    /// The client's private key; goes with `certificate`.
    pub key: Option<PathBuf>,
}

impl TlsFiles {
    /// True if no file is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            // The C++ engine's HTTP time-out; long enough for an etcd election not to be noticed
            // by more than one attempt.
            deadline: Duration::from_secs(3),
            poll_interval: Duration::from_secs(5),
            token: None,
            user: None,
            password: None,
            redis_database: None,
            etcd_request_bytes_max: 1_572_864,
            tls: TlsFiles::default(),
        }
    }
}

impl StoreOptions {
    /// Settings from variables, as `variable` tells them:
    ///
    /// | variable | range | meaning |
    /// |---|---|---|
    /// | `RERAIL_METADATA_TIMEOUT_MS` | 100..=600000 | [`deadline`](Self::deadline) |
    /// | `RERAIL_METADATA_POLL_MS` | 10..=3600000 | [`poll_interval`](Self::poll_interval) |
    /// | `RERAIL_METADATA_TOKEN`, `…_TOKEN_FILE` | | [`token`](Self::token) |
    /// | `RERAIL_METADATA_USER`, else `MC_REDIS_USERNAME` for Redis | | [`user`](Self::user) |
    /// | `RERAIL_METADATA_PASSWORD`, `…_PASSWORD_FILE`, else `MC_REDIS_PASSWORD` for Redis | | [`password`](Self::password) |
    /// | `RERAIL_REDIS_DB_INDEX`, else `MC_REDIS_DB_INDEX` | 0..=255 | [`redis_database`](Self::redis_database) |
    /// | `RERAIL_ETCD_MAX_REQUEST_BYTES` | 1024..=1073741824 | [`etcd_request_bytes_max`](Self::etcd_request_bytes_max) |
    /// | `RERAIL_METADATA_CA_FILE`, `…_CERT_FILE`, `…_KEY_FILE` | | [`tls`](Self::tls) |
    ///
    /// # Errors
    ///
    /// [`MetadataError::Setting`] naming the variable, and value and range where it is no secret.
    pub fn from_variables(
        url: &StoreUrl,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, MetadataError> {
        let set = |name: &str| variable(name).filter(|text| !text.is_empty());
        let milliseconds = |name: &str, min: u64, max: u64, default: Duration| match set(name) {
            None => Ok(default),
            Some(text) => number(name, &text, min, max).map(Duration::from_millis),
        };
        let secret = |name: &str| match (set(name), set(&format!("{name}_FILE"))) {
            (Some(text), _) => Ok(Some(Secret::new(text))),
            (None, Some(path)) => Secret::from_file(&format!("{name}_FILE"), &path).map(Some),
            (None, None) => Ok(None),
        };
        let redis = matches!(url, StoreUrl::Redis { .. });
        let for_redis = |name: &str| if redis { set(name) } else { None };
        let defaults = Self::default();
        let database = ["RERAIL_REDIS_DB_INDEX", "MC_REDIS_DB_INDEX"]
            .into_iter()
            .find_map(|name| for_redis(name).map(|text| number(name, &text, 0, 255)))
            .transpose()?;
        Ok(Self {
            deadline: milliseconds(
                "RERAIL_METADATA_TIMEOUT_MS",
                100,
                600_000,
                defaults.deadline,
            )?,
            poll_interval: milliseconds(
                "RERAIL_METADATA_POLL_MS",
                10,
                3_600_000,
                defaults.poll_interval,
            )?,
            token: secret("RERAIL_METADATA_TOKEN")?,
            user: set("RERAIL_METADATA_USER").or_else(|| for_redis("MC_REDIS_USERNAME")),
            password: secret("RERAIL_METADATA_PASSWORD")?
                .or_else(|| for_redis("MC_REDIS_PASSWORD").map(Secret::new)),
            redis_database: database.map(|index| index as u8),
            etcd_request_bytes_max: match set("RERAIL_ETCD_MAX_REQUEST_BYTES") {
                Some(text) => {
                    number("RERAIL_ETCD_MAX_REQUEST_BYTES", &text, 1 << 10, 1 << 30)? as usize
                }
                None => defaults.etcd_request_bytes_max,
            },
            tls: TlsFiles {
                ca: set("RERAIL_METADATA_CA_FILE").map(PathBuf::from),
                certificate: set("RERAIL_METADATA_CERT_FILE").map(PathBuf::from),
                key: set("RERAIL_METADATA_KEY_FILE").map(PathBuf::from),
            },
        })
    }
}

fn number(name: &str, text: &str, min: u64, max: u64) -> Result<u64, MetadataError> {
    match text.parse() {
        Ok(number) if (min..=max).contains(&number) => Ok(number),
        _ => Err(MetadataError::Setting {
            name: name.into(),
            reason: format!("{text:?} is not a number in {min}..={max}"),
        }),
    }
}

/// Opens the store that `url` names. Does not wait for the store to be up: operations on one
/// that is away end with [`MetadataError::Unavailable`] or [`MetadataError::TimedOut`].
///
/// # Errors
///
/// [`MetadataError::Unsupported`] for a store that this build does not have and for
/// P2PHANDSHAKE, which is none; [`MetadataError::Setting`] for settings that cannot be used.
pub async fn connect(
    url: &StoreUrl,
    options: &StoreOptions,
) -> Result<Arc<dyn MetadataStore>, MetadataError> {
    url.check_built_in()?;
    match url {
        #[cfg(feature = "etcd")]
        StoreUrl::Etcd { endpoints, user } => Ok(Arc::new(
            crate::etcd::EtcdStore::new(endpoints, user.clone(), options).await?,
        )),
        #[cfg(feature = "redis")]
        StoreUrl::Redis { .. } => Ok(Arc::new(crate::redis::RedisStore::new(url, options)?)),
        #[cfg(feature = "http")]
        StoreUrl::Http { url, user } => Ok(Arc::new(crate::http::HttpStore::new(
            url,
            user.clone(),
            options,
        )?)),
        StoreUrl::Memory { name } => Ok(Arc::new(MemoryStore::shared(name, options.deadline))),
        _ => Err(MetadataError::Unsupported {
            store: url.to_string(),
            operation: "be opened",
            reason: "it is no store: descriptors are asked of the peers themselves".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(url: &str, variables: &[(&str, &str)]) -> Result<StoreOptions, MetadataError> {
        let url = StoreUrl::parse(url)?;
        StoreOptions::from_variables(&url, |name| {
            variables
                .iter()
                .find(|(set, _)| *set == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn u10_a_value_out_of_range_is_an_error_with_variable_value_and_range() {
        for (name, value) in [
            ("RERAIL_METADATA_TIMEOUT_MS", "-1"),
            ("RERAIL_METADATA_TIMEOUT_MS", "99"),
            ("RERAIL_METADATA_POLL_MS", "abc"),
            ("MC_REDIS_DB_INDEX", "256"),
        ] {
            let error = options("redis://h:1", &[(name, value)])
                .expect_err(value)
                .to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
            assert!(error.contains("..="), "{error}");
        }
    }

    #[test]
    fn redis_variables_are_read_for_redis_only_and_rerails_win() {
        let variables = [
            ("MC_REDIS_PASSWORD", "m"),
            ("MC_REDIS_USERNAME", "u"),
            ("MC_REDIS_DB_INDEX", "3"),
            ("RERAIL_REDIS_DB_INDEX", "4"),
        ];
        let redis = options("redis://h:1", &variables).expect("valid");
        assert_eq!(redis.password, Some(Secret::new("m")));
        assert_eq!(
            (redis.user.as_deref(), redis.redis_database),
            (Some("u"), Some(4))
        );
        let etcd = options("etcd://h:1", &variables).expect("valid");
        assert_eq!(
            (etcd.password, etcd.user, etcd.redis_database),
            (None, None, None)
        );
    }

    #[test]
    fn a_password_file_that_cannot_be_read_is_named_and_secrets_do_not_show() {
        let file = [("RERAIL_METADATA_PASSWORD_FILE", "/nonexistent/password")];
        let error = options("etcd://h:1", &file)
            .expect_err("no such file")
            .to_string();
        assert!(error.contains("/nonexistent/password"), "{error}");
        let shown = options("etcd://h:1", &[("RERAIL_METADATA_PASSWORD", "s3cret")]);
        assert!(!format!("{shown:?}").contains("s3cret"));
    }
}
