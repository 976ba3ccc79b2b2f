#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod document;
mod error;
pub mod gid;
mod netdev;
mod subnet;

pub use error::{SettingError, TopologyError};
pub use netdev::{NetdevFacts, NetdevKind};
pub use subnet::{Subnet, SubnetParseError};
