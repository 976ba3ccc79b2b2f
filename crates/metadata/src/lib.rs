#![forbid(unsafe_code)]
#![doc = include_str!("../README.md")]

mod backoff;
mod cache;
pub mod conformance;
pub mod descriptor;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod follow;
#[cfg(feature = "http")]
mod http;
mod keys;
pub mod memory;
mod options;
mod owned;
#[cfg(feature = "redis")]
mod redis;
mod secret;
#[cfg(feature = "server")]
pub mod server;
mod store;
#[cfg(any(feature = "etcd", feature = "redis", feature = "http"))]
mod tls;
mod url;

pub use cache::{CacheEvent, CacheOptions, PEERS_MAX, PeerCache};
pub use error::MetadataError;
#[cfg(feature = "etcd")]
pub use etcd::EtcdStore;
pub use follow::{Change, Follow};
#[cfg(feature = "http")]
pub use http::HttpStore;
pub use keys::KeySpace;
pub use memory::MemoryStore;
pub use options::{StoreOptions, TlsFiles, connect};
pub use owned::{Judge, OwnedEvent, OwnedOptions, OwnedRecords, Verdict};
#[cfg(feature = "redis")]
pub use redis::RedisStore;
pub use secret::Secret;
pub use store::{
    Capabilities, LeaseId, MetadataStore, Record, Result, Version, WATCH_QUEUE_MAX, Watch,
    WatchEvent, WatchKind, WatchSink,
};
pub use url::StoreUrl;
