//! Faults of a store inside the process, for tests of what stands above it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::state::State;
use crate::store::LeaseId;

/// Switches faults on and off, for all clients of the store or for one.
///
/// What differs from a real store's fault: an outage answers at once instead of after a refused
/// connection; [`delay`](Self::delay) over the deadline is the store that does not answer.
#[derive(Clone, Debug)]
pub struct MemoryFaults {
    state: Arc<Mutex<State>>,
}

impl MemoryFaults {
    pub(super) fn new(state: Arc<Mutex<State>>) -> Self {
        Self { state }
    }

    /// Every operation takes this long; from the client's deadline on it times out, and nothing
    /// is done.
    pub fn delay(&self, delay: Duration) {
        self.lock().faults.delay = delay;
    }

    /// Every operation fails as unavailable, watches are silent. Ends with a `Resync` to each.
    pub fn outage(&self, away: bool) {
        let mut state = self.lock();
        state.faults.outage = away;
        state.reach_watchers();
    }

    /// As [`outage`](Self::outage), for one client.
    pub fn partition(&self, client: &str, cut_off: bool) {
        let mut state = self.lock();
        if cut_off {
            state.faults.partitioned.insert(client.to_owned());
        } else {
            state.faults.partitioned.remove(client);
        }
        state.reach_watchers();
    }

    /// Watches are silent while everything else works. Ends with a `Resync` to each.
    pub fn lose_watches(&self, lost: bool) {
        let mut state = self.lock();
        state.faults.watches_lost = lost;
        state.reach_watchers();
    }

    /// The store restarts without its data: records and leases are gone.
    pub fn restart_empty(&self) {
        self.lock().restart_empty();
    }

    /// The next `count` conditional writes and deletions conflict.
    pub fn conflict_next(&self, count: u32) {
        self.lock().faults.conflicts_left = count;
    }

    /// The store takes values of so many bytes at most, and says so; `None` is any.
    pub fn limit_values(&self, bytes_max: Option<usize>) {
        self.lock().faults.value_bytes_max = bytes_max;
    }

    /// The lease ends now, with its records.
    pub fn lose_lease(&self, lease: &LeaseId) {
        self.lock().end_lease(lease);
    }

    /// All leases end now, with their records.
    pub fn lose_all_leases(&self) {
        let mut state = self.lock();
        for lease in state.all_leases() {
            state.end_lease(&lease);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
