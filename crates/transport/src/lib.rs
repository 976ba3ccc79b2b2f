#![forbid(unsafe_code)]
#![doc = include_str!("../README.md")]

mod dial;
mod error;
pub mod event;
mod listen;
pub mod machine;
pub mod rdma;
pub mod rpc;
pub mod settings;
pub mod tcp;

pub use error::{TransferError, TransportError};
