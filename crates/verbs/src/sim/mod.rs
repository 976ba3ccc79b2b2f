//! A simulated RDMA fabric.
//!
//! Hosts with adapters, ports with GID tables, links with latency and loss, and all that the
//! public API of this crate can be used for, without a card, a kernel module or a right. The
//! fabric's [`Device`](crate::Device)s are opened like real ones.
//!
//! Two kinds of time: [`Fabric`] lives in virtual time and is deterministic, from one seed;
//! [`RealTimeFabric`] follows the clock for programs with threads.
//!
//! The fault model is [`FabricOptions`] (what goes wrong by itself), [rules](Fabric::on_packet)
//! with a verdict and a guard, and direct calls such as [`Fabric::port_down`]. The defaults are
//! what Linux' soft-RoCE was measured to do; where the model differs from it or from cards, the
//! function says so.
//!
//! Deliberately not here: two-sided verbs, atomics, inline data, unreliable transports, switches
//! and congestion inside the network.

mod agenda;
pub(crate) mod backend;
mod completion_queue;
mod control;
mod core;
mod event;
mod fabric;
mod faults;
mod gid_table;
mod link;
mod memory;
mod node;
mod options;
mod packet;
mod port;
mod queue_pair;
mod real_time;
mod requester;
mod responder;
mod rng;
mod rule;
mod slab;
mod trace;

pub use self::core::FabricStats;
pub use fabric::Fabric;
pub use faults::FaultGuard;
pub use node::{NicId, NodeId, PortId, ProcessId};
pub use options::{
    EventOptions, FabricOptions, LinkOptions, NicOptions, OwnPortFailure, PortOptions, VerbTime,
};
pub use queue_pair::OwnRow;
pub use real_time::RealTimeFabric;
pub use rule::{
    EventVerdict, EventView, PacketKind, PacketVerdict, PacketView, PostVerdict, WorkVerdict,
    WorkView,
};

#[cfg(test)]
mod tests;
