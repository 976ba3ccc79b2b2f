//! The TCP transport (reference 7): READ and WRITE of a peer's registered memory over sockets, for
//! machines without RDMA. Wire versions 1 and 2, both directions.
//!
//! | module | holds |
//! |---|---|
//! | [`header`] | request headers and status frames |
//! | [`regions`] | which memory peers may touch, and how that ends |
//! | [`flow`] | bytes between a socket and memory |
//! | [`server`] | serving peers |
//! | [`client`] | requests to peers, over a few lasting connections |
//! | [`limits`] | bounds of a client, and the version to speak |
//! | [`failure`] | why a request failed |
//!
//! Bytes go straight between the socket and [`HostMemory`](rerail_verbs::HostMemory): a peer may
//! write that memory at any time, so that no Rust slice over it may exist. Deliberately not here:
//! which peer, which address (the engine knows), and the pipelined protocol `tcp-pipe/1`.

mod attempt;
pub mod client;
pub mod failure;
pub mod flow;
pub mod header;
#[cfg(test)]
mod hostile_tests;
mod lanes;
pub mod limits;
pub mod regions;
pub mod server;
#[cfg(test)]
mod tests;

pub use client::{Outcome, Request, TcpClient};
pub use failure::Failure;
pub use header::Opcode;
pub use limits::{ClientLimits, Version};
pub use regions::{RegionGuard, Regions};
pub use server::{ServerLimits, TcpServer};
