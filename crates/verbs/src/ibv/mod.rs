//! Real devices, through libibverbs.
//!
//! Deliberately public is only the list of devices; everything behind it is the crate's safe API.

mod completion_queue;
mod context;
mod device;
mod ffi;
mod memory;
mod queue_pair;

pub(crate) use completion_queue::CompletionQueue;
pub(crate) use context::Context;
pub(crate) use device::Device;
pub use device::devices;
pub(crate) use memory::{MemoryRegion, ProtectionDomain};
pub(crate) use queue_pair::QueuePair;
