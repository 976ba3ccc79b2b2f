//! The documents that engines publish: segment descriptors and RPC locations.
//!
//! The forms are Mooncake's, byte for byte; the member `rerail` and `tcp_data_host` are read by
//! those who know them. Members that this crate does not know are kept through a
//! read-modify-write, at every level. Not here: which keys the documents live under
//! ([`KeySpace`](crate::KeySpace)), and the compact form for subscriptions (feature `bincode`).

mod buffer;
#[cfg(feature = "bincode")]
mod compact;
mod device;
mod encode;
mod error;
mod fields;
mod nic_path;
mod rerail;
mod rpc_meta;
mod segment;
mod timestamp;

#[cfg(test)]
mod tests;

pub use buffer::Buffer;
#[cfg(feature = "bincode")]
pub use compact::{COMPACT_BYTES_MAX, COMPACT_VERSION};
pub use device::Device;
pub use encode::JsonForm;
pub use error::DocumentError;
pub use nic_path::{NicPath, nic_path};
pub use rerail::{DeviceState, InstanceId, RerailDevice, RerailMember};
pub use rpc_meta::RpcMeta;
pub use segment::{LocationNics, Protocol, SegmentDescriptor};
pub use timestamp::timestamp;

/// Members that this crate does not know, in ascending order, as they were read.
pub type UnknownMembers = std::collections::BTreeMap<String, serde_json::Value>;
