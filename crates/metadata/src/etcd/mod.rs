//! etcd, version 3.4 and later.
//!
//! Versions are modification revisions. A watch is resumed after the last revision seen; where
//! that has been compacted away, or the cluster is another one, it tells a `Resync`. Not here:
//! JWT tokens' refresh other than by authenticating again, and namespaces.

mod members;
mod watching;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use etcd_client::{
    Client, Compare, CompareOp, DeleteOptions, Error, GetOptions, KeyValue, KvClient, PutOptions,
    ResponseHeader, SortOrder, SortTarget, Txn, TxnOp, TxnOpResponse,
};

use crate::error::MetadataError;
use crate::options::StoreOptions;
use crate::secret::Secret;
use crate::store::{
    Capabilities, LeaseId, MetadataStore, Record, Result, Version, Watch, WatchKind,
};
use crate::tls::TlsMaterial;
use members::{Failed, Members};

/// What a request has besides key and value. Measured well below; etcd counts the whole request.
const REQUEST_OVERHEAD_BYTES: usize = 512;
/// Longest answer that is read. Lists of a whole cluster are the longest.
const ANSWER_BYTES_MAX: usize = 1 << 30;
const TOO_LARGE_HINT: &str = "register fewer or larger buffers, use another store, or raise \
     etcd's --max-request-bytes and RERAIL_ETCD_MAX_REQUEST_BYTES";

/// A client of an etcd cluster.
#[derive(Clone, Debug)]
pub struct EtcdStore {
    members: Arc<Members>,
    request_bytes_max: usize,
}

impl EtcdStore {
    /// A client of the cluster with these members, `host:port` each. Connects when it is used.
    /// With any file set in [`StoreOptions::tls`], speaks TLS only.
    ///
    /// # Errors
    ///
    /// [`MetadataError::Setting`] for TLS files or addresses that cannot be used.
    pub async fn new(
        endpoints: &[String],
        user: Option<(String, Secret)>,
        options: &StoreOptions,
    ) -> Result<Self> {
        let name = format!("etcd://{}", endpoints.join(","));
        let user = user.or_else(|| options.user.clone().zip(options.password.clone()));
        let tls = if options.tls.is_empty() {
            None
        } else {
            Some(TlsMaterial::read(&options.tls)?)
        };
        let members = Members::new(name, endpoints.to_vec(), user, tls, options.deadline).await?;
        Ok(Self {
            members: Arc::new(members),
            request_bytes_max: options.etcd_request_bytes_max,
        })
    }

    fn value_bytes_max(&self) -> usize {
        self.request_bytes_max
            .saturating_sub(REQUEST_OVERHEAD_BYTES)
    }

    fn malformed(&self, key: &str, reason: &str) -> Failed {
        Failed::For(MetadataError::Malformed {
            store: self.describe(),
            key: key.into(),
            reason: reason.into(),
        })
    }

    fn version(&self, header: Option<&ResponseHeader>) -> Result<Version, Failed> {
        header
            .map(|header| Version::from_counter(header.revision() as u64))
            .ok_or_else(|| self.malformed("", "an answer without a header"))
    }

    /// Fills in what the judge of errors does not know.
    fn named(&self, key: &str, lease: Option<&LeaseId>, error: MetadataError) -> MetadataError {
        match error {
            MetadataError::LeaseLost { store, .. } => MetadataError::LeaseLost {
                store,
                lease: lease.map_or_else(String::new, LeaseId::to_string),
            },
            MetadataError::TooLarge {
                store,
                size,
                limit,
                hint,
                ..
            } => MetadataError::TooLarge {
                store,
                key: key.into(),
                size,
                limit,
                hint,
            },
            other => other,
        }
    }

    /// A write under a condition. `expected` is the modification revision, 0 for an absent key.
    async fn put_if(
        &self,
        operation: &'static str,
        key: &str,
        expected: u64,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        self.check_size(key, value.len())?;
        let put = put_options(lease)?;
        let attempt = |client: Client, in_doubt: bool| {
            let (value, put) = (value.clone(), put.clone());
            async move {
                let compare = Compare::mod_revision(key, CompareOp::Equal, expected as i64);
                let txn = Txn::new()
                    .when([compare])
                    .and_then([TxnOp::put(key, value.to_vec(), Some(put))])
                    .or_else([TxnOp::get(key, None)]);
                let answer = kv(&client)
                    .txn(txn)
                    .await
                    .map_err(|error| self.members.judge(operation, error))?;
                if answer.succeeded() {
                    return self.version(answer.header());
                }
                let current = self.found(&answer.op_responses())?;
                if let Some(record) = current.as_ref().filter(|_| in_doubt) {
                    // The member that did not answer has done it.
                    if record.value == value {
                        return Ok(record.version.clone());
                    }
                }
                Err(self.conflict(key, expected, current))
            }
        };
        let outcome = self.members.run(operation, attempt).await;
        outcome.map_err(|error| self.named(key, lease, error))
    }

    fn conflict(&self, key: &str, expected: u64, current: Option<Record>) -> Failed {
        let reason = match (&current, expected) {
            (Some(_), 0) => "there is one already",
            (Some(_), _) => "it has been changed",
            (None, _) => "it is gone",
        };
        Failed::For(MetadataError::Conflict {
            store: self.describe(),
            key: key.into(),
            reason: reason.into(),
            current: current.map(|record| record.version),
        })
    }

    /// The record in the first answer of a transaction's other branch.
    fn found(&self, answers: &[TxnOpResponse]) -> Result<Option<Record>, Failed> {
        match answers.first() {
            Some(TxnOpResponse::Get(answer)) => answer
                .kvs()
                .first()
                .map(|kv| record(kv).map_err(|reason| self.malformed("", &reason)))
                .transpose(),
            _ => Err(self.malformed("", "a transaction without the answer asked for")),
        }
    }

    async fn read(&self, key: &str, prefix: bool) -> Result<Vec<Record>> {
        let operation = if prefix { "list" } else { "get" };
        let options = prefix.then(|| {
            let options = GetOptions::new().with_sort(SortTarget::Key, SortOrder::Ascend);
            // An empty prefix means all keys, which etcd spells differently.
            if key.is_empty() {
                options.with_all_keys()
            } else {
                options.with_prefix()
            }
        });
        let attempt = |client: Client, _| {
            let options = options.clone();
            async move {
                let answer = kv(&client)
                    .get(key, options)
                    .await
                    .map_err(|error| self.members.judge(operation, error))?;
                answer
                    .kvs()
                    .iter()
                    .map(|kv| record(kv).map_err(|reason| self.malformed(key, &reason)))
                    .collect()
            }
        };
        self.members.run(operation, attempt).await
    }
}

fn kv(client: &Client) -> KvClient {
    client
        .kv_client()
        .max_decoding_message_size(ANSWER_BYTES_MAX)
}

fn record(kv: &KeyValue) -> Result<Record, String> {
    Ok(Record {
        key: kv
            .key_str()
            .map_err(|_| "a key that is not UTF-8".to_owned())?
            .to_owned(),
        value: Bytes::copy_from_slice(kv.value()),
        version: Version::from_counter(kv.mod_revision() as u64),
    })
}

fn lease_number(lease: &LeaseId) -> Result<i64> {
    lease
        .as_str()
        .parse()
        .map_err(|_| MetadataError::LeaseLost {
            store: "etcd".into(),
            lease: lease.to_string(),
        })
}

fn put_options(lease: Option<&LeaseId>) -> Result<PutOptions> {
    let options = PutOptions::new();
    Ok(match lease {
        Some(lease) => options.with_lease(lease_number(lease)?),
        None => options,
    })
}

/// The revision in a version; one that etcd cannot have matches nothing.
fn revision_of(version: &Version) -> u64 {
    version
        .as_counter()
        .filter(|&revision| revision != 0 && revision <= i64::MAX as u64)
        .unwrap_or(i64::MAX as u64)
}

#[async_trait]
impl MetadataStore for EtcdStore {
    fn describe(&self) -> String {
        self.members.name().to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            atomic_conditions: true,
            list: true,
            leases: true,
            watch: WatchKind::Events,
            value_bytes_max: Some(self.value_bytes_max()),
        }
    }

    /// The limit counts the key, too, which is in the same request.
    fn check_size(&self, key: &str, value_bytes: usize) -> Result<()> {
        let limit = self.value_bytes_max();
        if key.len() + value_bytes <= limit {
            return Ok(());
        }
        Err(MetadataError::TooLarge {
            store: self.describe(),
            key: key.into(),
            size: value_bytes,
            limit,
            hint: TOO_LARGE_HINT,
        })
    }

    async fn get(&self, key: &str) -> Result<Record> {
        let found = self.read(key, false).await?;
        found
            .into_iter()
            .next()
            .ok_or_else(|| MetadataError::NotFound {
                store: self.describe(),
                key: key.into(),
            })
    }

    async fn put(&self, key: &str, value: Bytes, lease: Option<&LeaseId>) -> Result<Version> {
        self.check_size(key, value.len())?;
        let put = put_options(lease)?;
        let attempt = |client: Client, _| {
            let (value, put) = (value.clone(), put.clone());
            async move {
                let answer = kv(&client)
                    .put(key, value.to_vec(), Some(put))
                    .await
                    .map_err(|error| self.members.judge("put", error))?;
                self.version(answer.header())
            }
        };
        let outcome = self.members.run("put", attempt).await;
        outcome.map_err(|error| self.named(key, lease, error))
    }

    async fn create_if_absent(
        &self,
        key: &str,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        self.put_if("create", key, 0, value, lease).await
    }

    async fn compare_and_swap(
        &self,
        key: &str,
        expected: &Version,
        value: Bytes,
        lease: Option<&LeaseId>,
    ) -> Result<Version> {
        self.put_if("compare-and-swap", key, revision_of(expected), value, lease)
            .await
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        let attempt = |client: Client, in_doubt| async move {
            let answer = kv(&client)
                .delete(key, Some(DeleteOptions::new()))
                .await
                .map_err(|error| self.members.judge("delete", error))?;
            // In doubt, the member that did not answer may be the one that removed it.
            Ok(answer.deleted() > 0 || in_doubt)
        };
        self.members.run("delete", attempt).await
    }

    async fn delete_if(&self, key: &str, expected: &Version) -> Result<bool> {
        let revision = revision_of(expected);
        let attempt = |client: Client, in_doubt| async move {
            let txn = Txn::new()
                .when([Compare::mod_revision(
                    key,
                    CompareOp::Equal,
                    revision as i64,
                )])
                .and_then([TxnOp::delete(key, None)])
                .or_else([TxnOp::get(key, None)]);
            let answer = kv(&client)
                .txn(txn)
                .await
                .map_err(|error| self.members.judge("delete", error))?;
            if answer.succeeded() {
                return Ok(true);
            }
            match self.found(&answer.op_responses())? {
                None => Ok(in_doubt),
                current => Err(self.conflict(key, revision, current)),
            }
        };
        self.members.run("delete", attempt).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Record>> {
        self.read(prefix, true).await
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId> {
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let attempt = |mut client: Client, _| async move {
            let answer = client
                .lease_grant(seconds.max(1) as i64, None)
                .await
                .map_err(|error| self.members.judge("grant a lease", error))?;
            Ok(LeaseId::new(answer.id().to_string()))
        };
        self.members.run("grant a lease", attempt).await
    }

    async fn keep_alive(&self, lease: &LeaseId) -> Result<()> {
        let id = lease_number(lease)?;
        let operation = "keep a lease alive";
        let attempt = |mut client: Client, _| async move {
            match client.lease_keep_alive(id).await {
                Ok(_) => Ok(()),
                // The library's word for a time to live of 0 (report M15).
                Err(Error::LeaseKeepAliveError(reason)) if reason.contains("not found") => {
                    Err(Failed::For(MetadataError::LeaseLost {
                        store: self.describe(),
                        lease: lease.to_string(),
                    }))
                }
                Err(error) => Err(self.members.judge(operation, error)),
            }
        };
        let outcome = self.members.run(operation, attempt).await;
        outcome.map_err(|error| self.named("", Some(lease), error))
    }

    async fn revoke_lease(&self, lease: &LeaseId) -> Result<()> {
        let id = lease_number(lease)?;
        let operation = "revoke a lease";
        let attempt = |mut client: Client, _| async move {
            client
                .lease_revoke(id)
                .await
                .map(drop)
                .map_err(|error| self.members.judge(operation, error))
        };
        match self.members.run(operation, attempt).await {
            Err(MetadataError::LeaseLost { .. }) => Ok(()),
            outcome => outcome,
        }
    }

    async fn watch(&self, prefix: &str) -> Result<Watch> {
        let (members, prefix) = (Arc::clone(&self.members), prefix.to_owned());
        Ok(Watch::spawn(|sink| watching::run(members, prefix, sink)))
    }
}
