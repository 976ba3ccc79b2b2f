#![forbid(unsafe_code)]
//! The transfer engine: segments, memory, batches and the choice of rails.

mod advertise;
mod batch;
mod config;
mod directory;
mod engine;
mod error;
mod event;
mod memory;
mod publication;
mod segment;
mod service;

pub use batch::{Batch, Operation, Request, Status};
pub use config::{EngineConfig, Transport};
pub use engine::Engine;
pub use error::{EngineError, Result};
pub use memory::{MemoryOptions, WILDCARD_LOCATION};
pub use rerail_transport::rdma::rail::{RailState, RailStats};
pub use segment::Segment;
pub use service::Notification;
