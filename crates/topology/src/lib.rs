#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod document;
mod error;
pub mod gid;
mod netdev;
mod pci;
pub mod scan;
mod subnet;

pub use error::{SettingError, TopologyError};
pub use netdev::{NetdevFacts, NetdevKind};
pub use pci::{Distance, PciPath, Place};
pub use scan::Scan;
pub use subnet::{Subnet, SubnetParseError};
