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
//!
//! Bytes go straight between the socket and [`HostMemory`](rerail_verbs::HostMemory): a peer may
//! write that memory at any time, so that no Rust slice over it may exist. Deliberately not here:
//! which peer, which address (the engine knows), and the pipelined protocol `tcp-pipe/1`.

pub mod client;
pub mod flow;
pub mod header;
pub mod regions;
pub mod server;
#[cfg(test)]
mod tests;

pub use client::{ClientLimits, Failure, Request, TcpClient, Version};
pub use header::Opcode;
pub use regions::{RegionGuard, Regions};
pub use server::{ServerLimits, TcpServer};
