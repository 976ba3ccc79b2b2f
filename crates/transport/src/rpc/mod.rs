//! The control protocol between engines (reference 3): one request frame, one reply frame, over a
//! TCP connection of its own; and, between Rerail engines, a lasting one for each subscription.
//!
//! | module | holds |
//! |---|---|
//! | [`frame`] | length, type and text of a frame, as a codec without I/O |
//! | [`message`] | Connection, Notify and Probe messages |
//! | [`host_port`] | texts that name a host, with or without a port |
//! | [`client`] | one request and its reply, within a time |
//! | [`server`] | a listener that serves many connections at once |
//! | [`subscription`] | the lasting connection over which a server tells its record |
//!
//! Deliberately not here: what is answered (a [`server::Handler`] decides), and the form of segment
//! descriptors, which travel as text.

pub mod client;
pub mod frame;
pub mod host_port;
#[cfg(test)]
mod hostile_tests;
pub mod message;
pub mod server;
pub mod subscription;
#[cfg(test)]
mod tests;

pub use client::{RpcClient, RpcError};
pub use frame::{Frame, FrameKind, MessageType};
pub use host_port::HostPort;
pub use message::{ConnectionMessage, MessageError, Notify};
pub use server::{Handler, RpcServer, ServerLimits};
pub use subscription::{Standing, Subscriber, Subscription, Told};
