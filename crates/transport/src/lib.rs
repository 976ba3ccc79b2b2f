#![forbid(unsafe_code)]
//! Transports that survive faults. See the module list.

mod error;
pub mod machine;
pub mod rdma;
pub mod rpc;
pub mod settings;

pub use error::{TransferError, TransportError};
