//! What an observer is told, and what it wants done.

use rerail_verbs::{AsyncEvent, AsyncEventKind, Gid, ObjectId};

use super::{Changes, DeathCause, FailReason, Outcome, PortFacts, PortReading, ReadFailure};

/// Names one reading of one port, so that a late answer is known as such.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ReadId {
    /// The port, from 1.
    pub port: u32,
    /// Counts the port's readings.
    pub number: u64,
}

/// What an observer is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Input {
    /// An event, **already acknowledged**, of the context that was opened as `epoch`.
    Event {
        /// [`Observer::epoch`](super::Observer::epoch) when the context was opened.
        epoch: u32,
        /// The event.
        event: AsyncEvent,
    },
    /// The answer to [`Action::ReadPort`].
    PortRead {
        /// [`Observer::epoch`](super::Observer::epoch) when the reading was asked.
        epoch: u32,
        /// Which reading.
        read: ReadId,
        /// What was read; any part that failed makes it a failure.
        result: Result<PortReading, ReadFailure>,
    },
    /// Link or address notices of the kernel, or an endpoint that was refused with a reason which
    /// a port's change would explain: read the port, or all.
    Hint {
        /// The port; `None` for all.
        port: Option<u32>,
    },
    /// The event channel cannot be read any more.
    ChannelFailed {
        /// The context's epoch.
        epoch: u32,
        /// `errno` of the read.
        errno: i32,
    },
    /// A control verb other than a reading has not come back for a second.
    VerbHung {
        /// The context's epoch.
        epoch: u32,
        /// C name of the verb.
        verb: &'static str,
    },
    /// [`Action::Reopen`] succeeded, memory is registered again.
    Reopened {
        /// The epoch of the action.
        epoch: u32,
    },
    /// [`Action::Reopen`] failed.
    ReopenFailed {
        /// The epoch of the action.
        epoch: u32,
    },
}

/// Why a gate is closed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CloseCause {
    /// A sticky event, before anything was asked.
    Event(AsyncEventKind),
    /// What a reading showed.
    Outcome,
    /// The context is dead.
    ContextDead(DeathCause),
}

/// Why endpoints are cut.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CutCause {
    /// The GID stands in another row.
    Moved,
    /// What they used differs.
    Changed(Changes),
    /// The port failed.
    Failed(FailReason),
    /// The context is dead.
    ContextDead(DeathCause),
}

/// What an observer wants done, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Query state, GID table and P_Keys of a port, all fresh; answer [`Input::PortRead`].
    ReadPort(ReadId),
    /// What a reading amounts to. For logs, metrics and subscribers; nothing is to be done.
    Report {
        /// The port.
        port: u32,
        /// The outcome.
        outcome: Outcome,
    },
    /// From now on nothing may be posted through the port.
    CloseGate {
        /// The port.
        port: u32,
        /// Why.
        cause: CloseCause,
    },
    /// Move the port's endpoints to ERR, drain and drop them.
    CutEndpoints {
        /// The port.
        port: u32,
        /// Why.
        cause: CutCause,
    },
    /// Tell the publisher.
    Publish {
        /// The port.
        port: u32,
        /// What is true now.
        facts: PortFacts,
        /// Its usable GIDs, best first; none while it is down.
        gids: Vec<Gid>,
    },
    /// Endpoints work on; make new ones with the new values when there is occasion.
    ReplaceLazily {
        /// The port.
        port: u32,
        /// What differs.
        changes: Changes,
    },
    /// The port may be proved: probes and handshakes may pass its gate, user work may not yet.
    HalfOpen {
        /// The port.
        port: u32,
        /// Whether endpoints lived through it. They must be probed before they are used.
        endpoints_kept: bool,
    },
    /// An event of one endpoint. It concerns no other.
    EndpointEvent {
        /// The queue pair.
        queue_pair: ObjectId,
        /// The event.
        kind: AsyncEventKind,
    },
    /// Let go of the context and all that was made of it, without waiting for it.
    ReleaseContext {
        /// Why.
        cause: DeathCause,
    },
    /// Open the device again and register memory; answer [`Input::Reopened`] or
    /// [`Input::ReopenFailed`].
    Reopen {
        /// Names the new context in every later input.
        epoch: u32,
    },
}

/// What has been counted since the start.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Counters {
    /// Events taken in.
    pub events: u64,
    /// Events of a kind that is not known.
    pub unknown_kinds: u64,
    /// Events of a port that is not watched, or of a queue pair that is not ours any more.
    pub foreign: u64,
    /// Events and answers of a context or reading that is over.
    pub stale: u64,
    /// Hints that caused no reading of their own.
    pub coalesced: u64,
}
