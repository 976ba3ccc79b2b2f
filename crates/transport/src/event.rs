//! What happens to NICs, connections and the record, told to whoever wants to know.
//!
//! Deliberately not here: what is moved, which counters tell, and where events are written.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use crate::machine::Time;

/// One thing that happened. Written as JSON it is an object whose member `event` names the kind.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// A device reported an asynchronous event. It is acknowledged.
    Seen {
        /// The NIC whose context reported it.
        nic: String,
        /// Its kind, by its C name.
        kind: String,
        /// What it is about: `port 1`, a queue pair, the device.
        subject: String,
    },
    /// A port was read.
    PortRead {
        /// The NIC.
        nic: String,
        /// `unchanged`, `moved`, `changed`, `failed`.
        outcome: &'static str,
        /// What changed, or why it failed.
        detail: String,
    },
    /// Nothing may be posted through a NIC any more.
    GateClosed {
        /// The NIC.
        nic: String,
        /// Why.
        cause: String,
    },
    /// A NIC may be proved and used again.
    GateOpened {
        /// The NIC.
        nic: String,
    },
    /// A NIC that was not there at the start was taken in. Nothing is posted through it yet.
    NicAdded {
        /// The NIC.
        nic: String,
    },
    /// A NIC cannot be taken in: one that was not there at the start, or that died and has no room
    /// for all memory. It is tried again; this is told again for another cause.
    NicLeftOut {
        /// The NIC, or its device where it has no name yet.
        nic: String,
        /// Why.
        cause: String,
    },
    /// A NIC's endpoints are being closed.
    EndpointsCut {
        /// The NIC.
        nic: String,
        /// How many.
        endpoints: usize,
        /// Why.
        cause: String,
    },
    /// A new generation of the own record holds: peers that ask or subscribe are told from now on.
    Edited {
        /// The generation.
        generation: u64,
    },
    /// The store has a generation of the own record.
    Published {
        /// The generation.
        generation: u64,
    },
    /// A subscriber has taken in a generation of the own record.
    PeerTold {
        /// The subscriber.
        peer: String,
        /// The generation.
        generation: u64,
    },
    /// A peer's record was taken in.
    PeerRecord {
        /// Name of its segment.
        peer: String,
        /// Its process, if it is a Rerail peer.
        instance: Option<String>,
        /// The record's generation; 0 where it has none.
        generation: u64,
    },
    /// A peer is over: requests to it end.
    PeerParted {
        /// Name of its segment.
        peer: String,
        /// `replaced` by another process of its name, or `withdrawn`.
        why: &'static str,
    },
    /// A rail changed its state.
    Rail {
        /// Own NIC.
        local: String,
        /// The peer's NIC path.
        peer: String,
        /// State before.
        from: &'static str,
        /// State now.
        to: &'static str,
        /// Why.
        cause: String,
        /// What took it down first since it last worked for a while.
        first_cause: Option<String>,
    },
    /// An endpoint is being fenced: its work is stopped at both ends.
    FenceStarted {
        /// Own NIC.
        local: String,
        /// The peer's NIC path.
        peer: String,
        /// Why it is closed.
        cause: String,
    },
    /// What an endpoint had not done goes over other rails.
    Rerouted {
        /// Own NIC.
        local: String,
        /// The peer's NIC path.
        peer: String,
        /// How much, in bytes.
        bytes: u64,
    },
    /// The fence of an endpoint is complete, or given up.
    FenceEnded {
        /// Own NIC.
        local: String,
        /// The peer's NIC path.
        peer: String,
        /// False if its queue pairs could not be stopped.
        complete: bool,
    },
    /// A context is dead and let go of.
    ContextReleased {
        /// The NIC.
        nic: String,
        /// Why.
        cause: String,
    },
    /// A device was opened again, and memory registered with it.
    ContextReopened {
        /// The NIC.
        nic: String,
    },
}

/// Takes events in.
pub trait Subscriber: Send + Sync {
    /// Something happened at a time of the engine's clock. Called on the threads that did it: it
    /// must not block, and never from a data thread while it posts.
    fn event(&self, at: Time, event: &Event) {
        let _ = (at, event);
    }
}

/// Nobody is told.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Subscriber for Silent {}

/// A subscriber that is shared; silent unless one is given.
#[derive(Clone)]
pub struct Events(Arc<dyn Subscriber>);

impl Events {
    /// Tells `subscriber`.
    pub fn new(subscriber: Arc<dyn Subscriber>) -> Self {
        Self(subscriber)
    }

    /// Tells an event.
    pub fn tell(&self, at: Time, event: &Event) {
        tracing::trace!(?event, "event");
        self.0.event(at, event);
    }
}

impl Default for Events {
    fn default() -> Self {
        Self(Arc::new(Silent))
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Events")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_object_with_its_kind() {
        let event = Event::GateClosed {
            nic: "rxe0".into(),
            cause: "port error".into(),
        };
        let text = serde_json::to_string(&event).expect("plain data");
        let expected = r#"{"event":"gate_closed","nic":"rxe0","cause":"port error"}"#;
        assert_eq!(text, expected);
    }
}
