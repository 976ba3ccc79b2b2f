//! What is due when.

use std::collections::BTreeMap;
use std::time::Duration;

use super::completion_queue::Entry;
use super::event::QueuedEvent;
use super::slab::Handle;

/// Something that the fabric will do by itself.
#[derive(Debug)]
pub(super) enum Due {
    /// A packet of that number reaches its destination, or the end of its life.
    Arrive(u64),
    /// A queue pair's acknowledgement timer may have run out.
    Timer(Handle),
    /// A queue pair in the error state flushes.
    Flush(Handle),
    /// A completion that was held back enters its queue.
    Complete(Handle, Entry),
    /// An asynchronous event that was held back enters its context's queue.
    Event(Handle, QueuedEvent),
}

/// Everything that is due, by time; what is due at the same instant happens in the order in which
/// it was entered.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    entries: BTreeMap<(Duration, u64), Due>,
    sequence: u64,
}

impl Agenda {
    pub(super) fn push(&mut self, at: Duration, due: Due) {
        self.entries.insert((at, self.sequence), due);
        self.sequence += 1;
    }

    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.entries.first_key_value().map(|((at, _), _)| *at)
    }

    /// Takes the first entry that is due at `limit` or before.
    pub(super) fn pop_until(&mut self, limit: Duration) -> Option<(Duration, Due)> {
        let entry = self.entries.first_entry()?;
        let at = entry.key().0;
        (at <= limit).then(|| (at, entry.remove()))
    }

    pub(super) fn retain(&mut self, mut keep: impl FnMut(&Due) -> bool) {
        self.entries.retain(|_, due| keep(due));
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}
