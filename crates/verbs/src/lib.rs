// As tests its examples need the simulator: without it they are not collected.
#![cfg_attr(any(feature = "sim", not(doctest)), doc = include_str!("../README.md"))]
// Without a backend no device can exist, and the compiler sees that most of the safe layer is never
// reached. It stays compiled, so that what is built upon it needs no `cfg`.
#![cfg_attr(
    not(any(feature = "ibv", feature = "sim")),
    allow(unreachable_code, unused_variables)
)]

mod backend;
mod completion_queue;
#[cfg(any(feature = "ibv", feature = "sim"))]
pub mod conformance;
mod context;
mod control;
mod device;
mod error;
#[cfg(any(test, feature = "ibv", feature = "sim"))]
mod events;
mod fork;
#[cfg(feature = "ibv")]
pub mod ibv;
mod memory;
mod memory_region;
mod objects;
mod owned;
mod page;
mod protection_domain;
mod queue_pair;
#[cfg(feature = "sim")]
pub mod sim;
pub mod types;

pub use completion_queue::CompletionQueue;
pub use context::Context;
pub use control::{ControlThread, JOBS_MAX, Pending};
pub use device::{Device, DeviceList, OPEN_LIMIT};
pub use error::{PostError, VerbsError};
pub use memory::{HostMemory, OutOfBounds, Pages};
pub use memory_region::MemoryRegion;
pub use page::node_of_page;
pub use protection_domain::{ProtectionDomain, QpInit};
pub use queue_pair::QueuePair;
pub use types::*;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_may_be_shared_between_threads() {
        fn shared<T: Send + Sync + 'static>() {}
        shared::<Device>();
        shared::<DeviceList>();
        shared::<Context>();
        shared::<ControlThread>();
        shared::<ProtectionDomain>();
        shared::<MemoryRegion>();
        shared::<CompletionQueue>();
        shared::<QueuePair>();
        shared::<HostMemory>();
        shared::<VerbsError>();
        shared::<PostError>();
    }
}
