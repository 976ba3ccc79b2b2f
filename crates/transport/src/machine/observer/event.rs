//! What an asynchronous event means for one context: a table, and nothing else.

use rerail_verbs::{AsyncEvent, AsyncEventKind, EventSubject, ObjectId};

/// Why a context or a port is believed broken before anything was asked of it.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeathCause {
    /// The device, a completion queue or a work queue said so.
    #[error("the device reported {0}")]
    Event(AsyncEventKind),
    /// The event channel cannot be read.
    #[error("reading the event channel failed with errno {errno}")]
    Channel {
        /// `errno` of the read; EIO when the device is gone.
        errno: i32,
    },
    /// A control verb has not come back in time.
    #[error("{verb} has not come back for a second")]
    VerbHung {
        /// C name of the verb.
        verb: &'static str,
    },
}

/// What to do about an event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Meaning {
    /// Read that port again; `close` closes its gate before that.
    Port { port: u32, close: bool },
    /// Read every port again; `close` closes all gates before that.
    AllPorts { close: bool, known: bool },
    /// One of our queue pairs is broken.
    QueuePair(ObjectId),
    /// A queue pair that is not ours, or not any more.
    ForeignQueuePair,
    /// The whole context is dead.
    ContextDead(DeathCause),
    /// Nothing follows from it.
    Nothing,
}

/// The event table of the design. Kinds are sticky where `close` is true: what they say is not
/// taken back by a port that reads ACTIVE, only by a proof.
pub(super) fn meaning(event: AsyncEvent) -> Meaning {
    use AsyncEventKind as Kind;
    match event.kind {
        Kind::PortErr => port(event.subject, true),
        Kind::PortActive
        | Kind::LidChange
        | Kind::GidChange
        | Kind::PkeyChange
        | Kind::SmChange
        | Kind::ClientReregister
        | Kind::DeviceSpeedChange => port(event.subject, false),
        Kind::QpFatal | Kind::QpAccessErr | Kind::QpReqErr | Kind::PathMigErr => {
            match event.subject {
                EventSubject::QueuePair(Some(id)) => Meaning::QueuePair(id),
                _ => Meaning::ForeignQueuePair,
            }
        }
        // A completion queue that cannot be named is taken for one of ours: the context has no
        // other user, and a broken queue that is used on loses completions.
        Kind::CqErr | Kind::WqFatal | Kind::DeviceFatal => {
            Meaning::ContextDead(DeathCause::Event(event.kind))
        }
        // Shared receive queues are not used, path migration is not used, and the rest are notes.
        Kind::CommEst
        | Kind::SqDrained
        | Kind::PathMig
        | Kind::SrqErr
        | Kind::SrqLimitReached
        | Kind::QpLastWqeReached => Meaning::Nothing,
        // A number newer than this code: the kernel found it worth telling, so look.
        _ => match event.subject {
            EventSubject::Port(number) => Meaning::Port {
                port: number,
                close: false,
            },
            _ => Meaning::AllPorts {
                close: false,
                known: false,
            },
        },
    }
}

fn port(subject: EventSubject, close: bool) -> Meaning {
    match subject {
        EventSubject::Port(port) => Meaning::Port { port, close },
        _ => Meaning::AllPorts { close, known: true },
    }
}
