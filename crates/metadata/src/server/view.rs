//! What readers see: never more than is on disk, if there is one. Without I/O.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::watch;

use super::ServerLimits;
use super::table::{Change, Records, Stored};
use super::writes::WritesLog;

/// The view, under a lock of its own, and who waits for a change of it.
#[derive(Debug)]
pub(super) struct Visible {
    view: Mutex<View>,
    changed: watch::Sender<()>,
    writes: Option<WritesLog>,
}

impl Visible {
    pub(super) fn new(limits: ServerLimits, revision: u64, writes: Option<WritesLog>) -> Self {
        Self {
            view: Mutex::new(View::new(limits, revision)),
            changed: watch::channel(()).0,
            writes,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, View> {
        // The view is changed in single steps, so a panic elsewhere leaves it usable.
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows what one step changed, asked for by `client`. Steps are shown in their order.
    pub(super) fn show(&self, changes: Vec<Change>, client: Option<SocketAddr>) {
        if let Some(writes) = &self.writes {
            writes.note(&changes, client);
        }
        let mut view = self.lock();
        let before = view.revision;
        for change in changes {
            view.apply(change);
        }
        let is_newer = view.revision > before;
        drop(view);
        if is_newer {
            self.wake();
        }
    }

    /// Shows other records instead of all. Watches are told to read anew.
    pub(super) fn restore(&self, records: Records, revision: u64) {
        let mut view = self.lock();
        *view = View::new(view.limits.clone(), revision);
        view.records = records.into_iter().collect();
        drop(view);
        self.wake();
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Has every watch look again.
    pub(super) fn wake(&self) {
        self.changed.send_replace(());
    }
}

/// The records, and the last events.
#[derive(Debug)]
pub(super) struct View {
    records: BTreeMap<Arc<str>, Stored>,
    events: VecDeque<Event>,
    event_bytes: usize,
    /// Revision of the last event that is no longer in `events`.
    forgotten: u64,
    revision: u64,
    limits: ServerLimits,
}

/// One change, kept for watches.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) revision: u64,
    pub(super) key: Arc<str>,
    /// `None` for a deletion.
    pub(super) value: Option<Bytes>,
}

/// What a watch gets.
#[derive(Debug)]
pub(super) enum Since {
    /// Events in their order, and the revision that they lead to. There may be more after it.
    Events { events: Vec<Event>, revision: u64 },
    /// The events are no longer all there.
    Resync,
}

impl View {
    pub(super) fn new(limits: ServerLimits, revision: u64) -> Self {
        Self {
            records: BTreeMap::new(),
            events: VecDeque::new(),
            event_bytes: 0,
            forgotten: revision,
            revision,
            limits,
        }
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn get(&self, key: &str) -> Option<&Stored> {
        self.records.get(key)
    }

    pub(super) fn list<'view>(
        &'view self,
        prefix: &'view str,
    ) -> impl Iterator<Item = (&'view Arc<str>, &'view Stored)> {
        self.records
            .range::<str, _>((Bound::Included(prefix), Bound::Unbounded))
            .take_while(move |(key, _)| key.starts_with(prefix))
    }

    /// Numbers for `/metrics`: records, events kept.
    pub(super) fn sizes(&self) -> [usize; 2] {
        [self.records.len(), self.events.len()]
    }

    /// Events under `prefix` after the revision `after`.
    pub(super) fn since(&self, prefix: &str, after: u64) -> Since {
        // A revision from the future is one of another life of this server.
        if after < self.forgotten || after > self.revision {
            return Since::Resync;
        }
        let first = self.events.partition_point(|event| event.revision <= after);
        let mut revision = self.revision;
        let (mut events, mut bytes) = (Vec::new(), 0);
        for event in self.events.range(first..) {
            if !event.key.starts_with(prefix) {
                continue;
            }
            bytes += event.value.as_ref().map_or(0, Bytes::len);
            if events.len() == self.limits.answer_events_max
                || (bytes > self.limits.answer_event_bytes_max && !events.is_empty())
            {
                // The rest is for the next question.
                revision = event.revision - 1;
                break;
            }
            events.push(event.clone());
        }
        Since::Events { events, revision }
    }

    pub(super) fn apply(&mut self, change: Change) {
        match change {
            Change::Put { key, stored } => {
                self.revision = stored.version;
                self.log(Arc::clone(&key), Some(stored.value.clone()));
                self.records.insert(key, stored);
            }
            Change::Delete { key, revision } => {
                self.revision = revision;
                self.records.remove(&key);
                self.log(key, None);
            }
            Change::GrantLease { .. } | Change::EndLease { .. } => {}
        }
    }

    fn log(&mut self, key: Arc<str>, value: Option<Bytes>) {
        self.event_bytes += value.as_ref().map_or(0, Bytes::len);
        self.events.push_back(Event {
            revision: self.revision,
            key,
            value,
        });
        while self.events.len() > self.limits.events_max
            || (self.event_bytes > self.limits.event_bytes_max && self.events.len() > 1)
        {
            if let Some(event) = self.events.pop_front() {
                self.event_bytes -= event.value.as_ref().map_or(0, Bytes::len);
                self.forgotten = event.revision;
            }
        }
    }
}
