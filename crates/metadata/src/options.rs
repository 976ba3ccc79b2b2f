//! Settings of stores, and the way from a URL to a store.

use std::sync::Arc;
use std::time::Duration;

use crate::error::MetadataError;
use crate::memory::MemoryStore;
use crate::secret::Secret;
use crate::store::MetadataStore;
use crate::url::StoreUrl;

/// Settings shared by all stores.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Deadline of each operation.
    pub deadline: Duration,
    /// Time between two questions of a watch where the store does not tell of changes.
    pub poll_interval: Duration,
    /// Bearer token for HTTP.
    pub token: Option<Secret>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            // The C++ engine's HTTP time-out; long enough for an etcd election not to be noticed
            // by more than one attempt.
            deadline: Duration::from_secs(3),
            poll_interval: Duration::from_secs(5),
            token: None,
        }
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
