//! What the publisher is told, and what it wants done.

use std::sync::Arc;

use rerail_metadata::Version;
use rerail_metadata::descriptor::{InstanceId, SegmentDescriptor};

use super::local::{Edit, EditError};

/// A subscriber: one connection over which a peer is told the record. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SubscriberId(pub u64);

/// What a store says to a request that it did not carry out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreFailure {
    /// There is no record.
    #[error("there is no record")]
    NotFound,
    /// The record is another one than was expected.
    #[error("the record is not the expected one")]
    Conflict,
    /// Anything else: an outage, a time-out (the write may have happened), a refusal.
    #[error("{0}")]
    Failed(String),
}

/// A record that was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredRecord {
    /// Its version, for the next conditional write.
    pub version: Version,
    /// Who wrote it and which generation; `None` for a writer without the member `rerail`, or a
    /// record that is no document at all.
    pub identity: Option<(InstanceId, u64)>,
}

/// One request to the store, about the own segment's key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreRequest {
    /// Write if there is nothing.
    Create(Arc<SegmentDescriptor>),
    /// Write if the version is still this.
    Swap(Version, Arc<SegmentDescriptor>),
    /// Read.
    Read,
    /// Delete if the version is still this.
    Delete(Version),
    /// Write the RPC location, if it is not what is there. Answered with `Written`, whose version
    /// is not used.
    RpcMeta,
}

/// What a request gave.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreAnswer {
    /// It was written (or deleted), with this version.
    Written(Option<Version>),
    /// It was read.
    Found(StoredRecord),
    /// Neither.
    Failed(StoreFailure),
}

/// What the publisher is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Input {
    /// The own record changes.
    Edit(Edit),
    /// A request to the store ended.
    Store {
        /// Which.
        ticket: u64,
        /// How.
        answer: StoreAnswer,
    },
    /// The store was lost and is back, or a lease was lost and granted anew: read back at once.
    StoreReconnected,
    /// A peer subscribed, over a new connection.
    Subscribed {
        /// The connection.
        subscriber: SubscriberId,
    },
    /// A subscriber has taken in a generation.
    Acknowledged {
        /// The connection.
        subscriber: SubscriberId,
        /// Which generation.
        generation: u64,
    },
    /// A subscriber's connection is gone.
    Unsubscribed {
        /// The connection.
        subscriber: SubscriberId,
    },
    /// The engine leaves: withdraw the record.
    Leave,
}

/// What the publisher wants done, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Carry out a request to the store; answer [`Input::Store`]. At most one is out.
    Store {
        /// Names it.
        ticket: u64,
        /// What to do.
        request: StoreRequest,
    },
    /// Send the record to a subscriber. One that is overtaken on the way is not sent twice.
    Push {
        /// To whom.
        subscriber: SubscriberId,
        /// Generation of the record.
        generation: u64,
        /// The record.
        descriptor: Arc<SegmentDescriptor>,
    },
    /// Tell a subscriber that the current pair is (instance, generation).
    Heartbeat {
        /// To whom.
        subscriber: SubscriberId,
        /// The current generation.
        generation: u64,
    },
    /// A subscriber does not acknowledge, or there are too many: close its connection.
    DropSubscriber {
        /// Which.
        subscriber: SubscriberId,
    },
    /// A generation is in the store.
    Stored {
        /// Which. Everything up to it is known to whoever reads the store.
        generation: u64,
    },
    /// A generation could not be stored; it is tried again. Nothing is cut for it.
    StoreTrouble {
        /// The generation that is to be stored.
        generation: u64,
        /// Attempts in a row; the first is an error line.
        attempt: u32,
        /// What the store said.
        failure: StoreFailure,
    },
    /// An edit could not be made.
    EditRefused(EditError),
    /// Another instance has taken the name: nothing is published or accepted any more. The last
    /// action.
    Superseded {
        /// Which; `None` if its writer does not say.
        by: Option<InstanceId>,
    },
    /// The record is withdrawn. The last action.
    Left,
}
