//! What the transport tells the engine about its rails, and asks of it.

use super::endpoint::CloseCause;
use crate::machine::ids::LocalNic;
use crate::machine::rail::{RailCause, RailState};

/// A rail that changed its state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RailChange {
    /// Name of the local NIC.
    pub local: String,
    /// NIC path of the peer.
    pub peer: String,
    /// Name of the peer's segment.
    pub segment: String,
    /// Before.
    pub from: RailState,
    /// Now.
    pub to: RailState,
    /// Why.
    pub cause: RailCause,
    /// What took it down first since it last worked for a while.
    pub first_cause: Option<RailCause>,
}

/// What becomes of an endpoint that is given up: its work is stopped at both ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FenceChange {
    /// Name of the local NIC.
    pub local: String,
    /// NIC path of the peer.
    pub peer: String,
    /// How far it is.
    pub step: FenceStep,
}

/// How far the fence of an endpoint is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FenceStep {
    /// Nothing is posted on the endpoint any more.
    Started {
        /// Why it is given up.
        cause: CloseCause,
    },
    /// What it had not done is given to other rails.
    Rerouted {
        /// How much, in bytes.
        bytes: u64,
    },
    /// None of its work can touch memory any more, unless that could not be `complete`.
    Ended {
        /// False if its queue pairs could not be stopped.
        complete: bool,
    },
}

/// Who hears of the rails. Called on the control runtime, one call at a time and in the order of
/// what happened: a call must not block. Every method does nothing unless it is implemented.
pub trait RdmaEvents: Send + Sync + 'static {
    /// Errors point to a local NIC: its port should be read again.
    fn recheck_local(&self, local: LocalNic) {
        let _ = local;
    }

    /// Errors point to a peer: the record of its segment should be read again, within the peer's
    /// own cool-down.
    fn refresh_peer(&self, segment: &str) {
        let _ = segment;
    }

    /// A rail changed its state.
    fn rail_state(&self, change: &RailChange) {
        let _ = change;
    }

    /// An endpoint that was connected, or about to be, is being given up.
    fn fence(&self, change: &FenceChange) {
        let _ = change;
    }
}
