#![forbid(unsafe_code)]
#![doc = include_str!("../README.md")]

mod advertise;
mod batch;
mod config;
mod directory;
mod engine;
mod error;
mod event;
mod memory;
mod nics;
mod peers;
mod publication;
mod room;
mod segment;
mod service;
pub mod settings;
#[cfg(test)]
mod shy;
mod tcp;
mod topology;

pub use batch::{Batch, Operation, Request, Status};
pub use config::{EngineConfig, Transport};
pub use engine::Engine;
pub use error::{EngineError, Result};
pub use memory::{MemoryOptions, WILDCARD_LOCATION};
pub use rerail_transport::TransferError;
pub use rerail_transport::event::{Event, Events, Subscriber};
pub use rerail_transport::machine::Time;
pub use rerail_transport::rdma::rail::{RailState, RailStats};
pub use segment::Segment;
pub use service::Notification;
