//! Safe ibverbs.
//!
//! Without features this crate is [plain types](types) and [`HostMemory`]: the vocabulary of all
//! Rerail crates. Feature `ibv` adds real devices, feature `sim` a simulated fabric.

mod memory;
pub mod types;

pub use memory::{HostMemory, OutOfBounds, Pages};
pub use types::*;
