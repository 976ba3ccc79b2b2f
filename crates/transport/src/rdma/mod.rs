//! The RDMA transport.
//!
//! Its invariant: **when a transfer is reported finished (by success, failure, time limit or
//! cancellation), no work of it can touch memory any more, at either end.** An abandoned attempt
//! is fenced *locally* once its queue pair is in ERR and drained, and *remotely* once the peer has
//! said that its end is in ERR or, if the peer cannot be asked, when the time that a packet may
//! live has passed since. Posting again needs the local fence; finishing needs every abandoned
//! WRITE fenced at both ends and every abandoned READ locally. If a device hangs beyond the fence's
//! time limit, the transfer ends as [`Unfenced`](crate::TransferError::Unfenced), and says so.
//!
//! | module | holds |
//! |---|---|
//! | [`transport`] | the whole: NICs, endpoints and threads of one engine |
//! | [`transfer`] | accounting of one request: every byte ends exactly once |
//! | [`slice`](mod@slice) | where a request is cut |
//! | [`rail`] | peers, and the rails that lead to them |
//! | [`keeper`] | how the rails stand: the driver of the rail machine |
//! | [`router`] | which rails a transfer is offered to |
//! | [`driver`], [`data_thread`] | posting and polling |
//! | [`inbox`] | the queues between data and control |
//! | [`endpoint`] | the life of one connection, as a machine |
//! | [`connector`] | which endpoint a rail or a request belongs to, and the machines' driver |
//! | `pairs`, `paths` | queue pairs, and with which own GID and path MTU they are connected |
//! | [`signaling`] | how Connection messages reach a peer |
//! | [`events`] | what the engine is told of the rails, and asked |
//! | [`watch`] | events and readings of the own ports, and what follows from them |
//! | [`nics`] | the own NICs: a list that only grows |
//! | [`clock`] | the engine's time |
//! | [`nic`], [`opening`], [`memory`], [`config`] | ports, open devices, registered memory, settings |
//! | [`near`] | which NICs are near which memory |
//!
//! # The way of a transfer
//!
//! `submit` → router → a NIC's inbox → driver: claim a slice, post, poll, complete. When a
//! completion is an error the driver breaks the link and reports it; the connector moves the queue
//! pairs to ERR and tells the peer; the driver, once all has come back, gives the slices back and
//! reports them stranded; the router offers them to another rail; the transfer is finished when
//! the last byte has arrived *and* the broken endpoint is fenced at both ends.

pub mod clock;
pub mod config;
pub mod connector;
pub mod data_thread;
mod data_threads;
pub mod driver;
pub mod endpoint;
pub mod events;
pub mod inbox;
pub mod keeper;
mod link;
pub mod memory;
pub mod near;
pub mod nic;
pub mod nics;
mod open;
pub mod opening;
mod outside;
mod pairs;
mod paths;
pub mod rail;
#[cfg(test)]
mod rig;
pub mod router;
pub mod signaling;
pub mod slab;
pub mod slice;
#[cfg(test)]
mod storm;
pub mod transfer;
pub mod transport;
mod tries;
pub mod watch;

pub use clock::Clock;
pub use config::RdmaConfig;
pub use connector::Identity;
pub use endpoint::Offer;
pub use events::{FenceChange, FenceStep, RailChange, RdmaEvents};
pub use memory::RegisteredMemory;
pub use near::NicSet;
pub use nics::Nics;
pub use rail::{Peer, PeerNic, PeerSpec};
pub use signaling::{Boxed, SignalError, Signaling};
pub use slice::{Piece, Slicing, Span};
pub use transfer::{OnFinished, Transfer, TransferSpec};
pub use transport::RdmaTransport;
pub use watch::NicListener;
