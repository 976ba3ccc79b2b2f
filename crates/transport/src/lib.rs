#![forbid(unsafe_code)]
//! Transports that survive faults. See the module list.

mod dial;
mod error;
mod listen;
pub mod machine;
pub mod rdma;
pub mod rpc;
pub mod settings;
pub mod tcp;

pub use error::{TransferError, TransportError};
