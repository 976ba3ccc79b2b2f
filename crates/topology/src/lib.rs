#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod document;
mod error;
pub mod gid;
mod location;
mod matrix;
mod netdev;
pub mod page;
mod pci;
mod rail;
pub mod scan;
pub mod select;
mod subnet;
mod topology;

pub use error::{SettingError, TopologyError};
pub use location::{Location, LocationParseError};
pub use matrix::{Matrix, MatrixEntry};
pub use netdev::{NetdevFacts, NetdevKind};
pub use pci::{Distance, PciPath, Place};
pub use rail::{DeviceFilter, Rail, rails};
pub use scan::Scan;
pub use subnet::{Subnet, SubnetParseError};
pub use topology::{CustomMatrix, Topology, TopologyOptions};
