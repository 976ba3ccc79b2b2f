//! What the view of the peers is told, and what it wants done.

use std::sync::Arc;

use rerail_metadata::descriptor::{InstanceId, SegmentDescriptor};

use crate::machine::ids::PeerId;

/// A peer's record, and where its RPC listener is, if that is known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerRecord {
    /// The segment descriptor.
    pub descriptor: Arc<SegmentDescriptor>,
    /// Host and port of the RPC listener. A watch that sees only the segment leaves it out.
    pub rpc: Option<(String, u16)>,
}

/// What reading a record gave.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fetched {
    /// It is there.
    Found(PeerRecord),
    /// The store answered that there is none.
    NotFound,
    /// The store does not answer, or what it holds is no record.
    Unavailable,
}

/// Why a record is doubted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Trouble {
    /// The peer refused an access: its keys may be stale.
    RemoteAccess,
    /// It cannot be connected to, or connections break.
    Connection,
}

/// What the view is told. Peers go by their segment's name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Input {
    /// A peer is of interest from now on.
    Open {
        /// Its name.
        name: String,
    },
    /// It is not any more.
    Close {
        /// Its name.
        name: String,
    },
    /// [`Action::Fetch`] ended.
    Fetched {
        /// Which.
        ticket: u64,
        /// How.
        result: Fetched,
    },
    /// The store's watch saw a record.
    WatchPut {
        /// The peer.
        name: String,
        /// The record.
        record: PeerRecord,
    },
    /// The store's watch saw a record go.
    WatchDelete {
        /// The peer.
        name: String,
    },
    /// The store's watch may have missed something.
    WatchResync,
    /// [`Action::Subscribe`] succeeded.
    Subscribed {
        /// The peer.
        name: String,
    },
    /// A subscription, or the attempt at one, ended.
    SubscriptionLost {
        /// The peer.
        name: String,
    },
    /// A record came over a subscription.
    Pushed {
        /// The peer.
        name: String,
        /// The record.
        record: PeerRecord,
    },
    /// A heartbeat came over a subscription.
    Heartbeat {
        /// The peer.
        name: String,
        /// Its instance.
        instance: InstanceId,
        /// Its current generation.
        generation: u64,
    },
    /// Work towards a peer failed in a way that a stale record would explain.
    Trouble {
        /// The peer.
        name: String,
        /// In which way.
        trouble: Trouble,
    },
    /// A completion or a probe's reply came from the peer. May be told as rarely as once a second.
    Alive {
        /// The peer.
        name: String,
    },
}

/// How a NIC of a peer differs from before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NicChange {
    /// It is usable now: new, or back.
    Up,
    /// It is withdrawn, or gone from the record.
    Down,
    /// It was and is usable, with another GID or LID: endpoints that use the old one are cut.
    Moved,
}

/// Why nothing is known of a peer any more.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Parting {
    /// Another process has its name: requests to it end with `PeerRestarted`.
    Replaced,
    /// Its record is gone and it shows no sign of life: requests to it end with `NoPath`.
    Withdrawn,
    /// It is of no interest any more.
    Closed,
}

/// What a question after trouble came to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Refreshed {
    /// The record is newer: try again with it.
    Newer,
    /// It is as it was.
    Same,
    /// The store does not answer. The record at hand is kept.
    Unavailable,
    /// The store says that there is none.
    NotFound,
}

/// What the view wants done, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Read a peer's record and RPC location; answer [`Input::Fetched`].
    Fetch {
        /// Names the request.
        ticket: u64,
        /// The peer.
        name: String,
    },
    /// Keep one connection to the peer, over which it tells its record.
    Subscribe {
        /// The peer.
        name: String,
        /// Its record, which says where it is.
        descriptor: Arc<SegmentDescriptor>,
    },
    /// Close that connection.
    Unsubscribe {
        /// The peer.
        name: String,
    },
    /// The store has lost the peer's record: ask the peer for a sign of life (a probe of the
    /// engine's own) and tell [`Input::Alive`] if it gives one.
    AskAlive {
        /// The peer.
        name: String,
    },
    /// Acknowledge over the subscription what is taken in.
    Acknowledge {
        /// The peer.
        name: String,
        /// Its instance.
        instance: InstanceId,
        /// The generation.
        generation: u64,
    },
    /// The peer is another process now, or gone: requests bound to it end, its endpoints are cut.
    /// Nothing is replayed into a successor.
    Retired {
        /// The name.
        name: String,
        /// The peer that was.
        peer: PeerId,
        /// Why.
        parting: Parting,
    },
    /// A peer's record is taken in.
    Updated {
        /// The name.
        name: String,
        /// The peer: another one after each restart.
        peer: PeerId,
        /// The record.
        descriptor: Arc<SegmentDescriptor>,
        /// NICs that differ from the record before, by name; all usable ones the first time.
        nics: Vec<(String, NicChange)>,
    },
    /// What came of a question that trouble had asked.
    Refreshed {
        /// The name.
        name: String,
        /// The answer.
        outcome: Refreshed,
    },
}
