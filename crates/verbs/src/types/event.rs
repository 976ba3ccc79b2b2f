//! Asynchronous events of a context.

use std::fmt;

use super::completion::raw_enum;

raw_enum! {
    /// Kind of an asynchronous event (`enum ibv_event_type`), read as an integer: kernels newer
    /// than this code may send numbers that it does not know.
    AsyncEventKind {
        /// Error on a completion queue.
        CqErr = 0, "CQ_ERR";
        /// Error on a queue pair, which is in the error state now.
        QpFatal = 1, "QP_FATAL";
        /// Invalid request on a queue pair's responder.
        QpReqErr = 2, "QP_REQ_ERR";
        /// Access violation on a queue pair's responder.
        QpAccessErr = 3, "QP_ACCESS_ERR";
        /// First packet on a queue pair in RTR.
        CommEst = 4, "COMM_EST";
        /// The send queue is drained.
        SqDrained = 5, "SQ_DRAINED";
        /// The connection moved to its alternate path.
        PathMig = 6, "PATH_MIG";
        /// The connection could not move to its alternate path.
        PathMigErr = 7, "PATH_MIG_ERR";
        /// The device is dead.
        DeviceFatal = 8, "DEVICE_FATAL";
        /// A port became active.
        PortActive = 9, "PORT_ACTIVE";
        /// A port went down.
        PortErr = 10, "PORT_ERR";
        /// A port's LID changed.
        LidChange = 11, "LID_CHANGE";
        /// A port's P_Key table changed.
        PkeyChange = 12, "PKEY_CHANGE";
        /// The subnet manager changed.
        SmChange = 13, "SM_CHANGE";
        /// Error on a shared receive queue.
        SrqErr = 14, "SRQ_ERR";
        /// A shared receive queue fell below its limit.
        SrqLimitReached = 15, "SRQ_LIMIT_REACHED";
        /// A queue pair consumed the last receive of its shared receive queue.
        QpLastWqeReached = 16, "QP_LAST_WQE_REACHED";
        /// The subnet manager asks clients to register again.
        ClientReregister = 17, "CLIENT_REREGISTER";
        /// A port's GID table changed.
        GidChange = 18, "GID_CHANGE";
        /// Error on a work queue.
        WqFatal = 19, "WQ_FATAL";
        /// A port's speed changed (rdma-core 62).
        DeviceSpeedChange = 20, "DEVICE_SPEED_CHANGE";
    }
}

/// Identity of one of our verbs objects: a slab index with a generation, never reused as a pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ObjectId {
    /// Position in the context's slab.
    pub index: u32,
    /// How often that position had been used before.
    pub generation: u32,
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// What an event is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum EventSubject {
    /// The whole device.
    Device,
    /// A port, numbered from 1.
    Port(u32),
    /// A queue pair; `None` if it was not created here or is gone.
    QueuePair(Option<ObjectId>),
    /// A completion queue; `None` if it was not created here or is gone.
    CompletionQueue(Option<ObjectId>),
    /// An object of another type, or an event of a kind that is not known.
    Other,
}

impl fmt::Display for EventSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => f.write_str("device"),
            Self::Port(port) => write!(f, "port {port}"),
            Self::QueuePair(Some(_)) => f.write_str("queue pair"),
            Self::QueuePair(None) => f.write_str("foreign queue pair"),
            Self::CompletionQueue(_) => f.write_str("completion queue"),
            Self::Other => f.write_str("other object"),
        }
    }
}

/// An asynchronous event, already acknowledged: it holds no reference to any verbs object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AsyncEvent {
    /// What happened.
    pub kind: AsyncEventKind,
    /// To whom.
    pub subject: EventSubject,
}
