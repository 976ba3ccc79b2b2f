//! Plain verbs types: what devices, ports, queue pairs and completions report, as values.
//!
//! Everything here exists without any feature and without libibverbs; it is the vocabulary of all
//! Rerail crates. Numbers that come from a device or a kernel are never trusted to be known: each
//! enum has an `Other` arm that keeps the raw value. Deliberately not here: anything that calls a
//! verb.

mod completion;
mod event;
mod gid;
mod port;
mod queue_pair;
mod work_request;

pub use completion::{Completion, WcOpcode, WcStatus};
pub use event::{AsyncEvent, AsyncEventKind, EventSubject, ObjectId};
pub use gid::{Gid, GidEntry, GidParseError, GidScope, GidType, Netdev};
pub use port::{LinkLayer, Mtu, PhysState, PortAttr, PortState};
pub use queue_pair::{
    AccessFlags, DeviceAttr, InitAttr, PathAttr, QpAttr, QpCapacity, QpState, RtrAttr, RtsAttr,
};
pub use work_request::{RdmaOpcode, RemoteAddress, SGE_MAX, Sge, WorkRequest};
