//! What the transport tells the engine about its rails, and asks of it.

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
}
