//! What a server holds: records, leases and the last events. Without I/O or a clock.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::ServerLimits;

#[derive(Debug)]
pub(super) struct Table {
    records: BTreeMap<Arc<str>, Stored>,
    leases: HashMap<Arc<str>, Lease>,
    /// The leases by their ends, so that those that are over are found without looking at all.
    ends: BTreeSet<(Instant, Arc<str>)>,
    events: VecDeque<Event>,
    event_bytes: usize,
    /// Revision of the last event that is no longer in `events`.
    forgotten: u64,
    revision: u64,
    bytes: usize,
    changes: Vec<Change>,
    limits: ServerLimits,
}

#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) value: Bytes,
    pub(super) version: u64,
    pub(super) lease: Option<Arc<str>>,
}

#[derive(Debug)]
struct Lease {
    ttl: Duration,
    ends: Instant,
    keys: HashSet<Arc<str>>,
}

/// One change, kept for watches.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) revision: u64,
    pub(super) key: Arc<str>,
    /// `None` for a deletion.
    pub(super) value: Option<Bytes>,
}

/// One change for the disk.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Put { key: Arc<str>, stored: Stored },
    Delete { key: Arc<str>, revision: u64 },
    GrantLease { id: Arc<str>, ttl: Duration },
    EndLease { id: Arc<str> },
}

impl Change {
    /// The revision that it leads to, if it is one of a record.
    pub(super) fn revision(&self) -> Option<u64> {
        match self {
            Self::Put { stored, .. } => Some(stored.version),
            Self::Delete { revision, .. } => Some(*revision),
            Self::GrantLease { .. } | Self::EndLease { .. } => None,
        }
    }
}

/// What a request asks of the record it changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Condition {
    None,
    Absent,
    Version(u64),
    /// An `ETag` that this server never gave.
    Never,
}

/// Why a change is not made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Refusal {
    /// With the version found, if there is a record.
    Conflict(Option<u64>),
    LeaseGone,
    NotFound,
    TooLarge {
        limit: usize,
    },
    Full(&'static str),
}

/// What a watch gets.
#[derive(Debug)]
pub(super) enum Since {
    /// Events in their order, and the revision that they lead to. There may be more after it.
    Events { events: Vec<Event>, revision: u64 },
    /// The events are no longer all there.
    Resync,
}

impl Table {
    pub(super) fn new(limits: ServerLimits, revision: u64) -> Self {
        Self {
            records: BTreeMap::new(),
            leases: HashMap::new(),
            ends: BTreeSet::new(),
            events: VecDeque::new(),
            event_bytes: 0,
            forgotten: revision,
            revision,
            bytes: 0,
            changes: Vec::new(),
            limits,
        }
    }

    /// Takes over what the disk had.
    pub(super) fn restore(
        &mut self,
        leases: Vec<(String, Duration)>,
        records: Vec<(String, Stored)>,
        revision: u64,
        now: Instant,
    ) {
        for (id, ttl) in leases {
            // Anew in full: its owner could not reach the server meanwhile. No longer than is
            // granted, whatever the file says.
            self.add_lease(id.into(), ttl.min(self.limits.lease_ttl_max), now);
        }
        for (key, stored) in records {
            let key: Arc<str> = key.into();
            if let Some(lease) = stored.lease.as_ref().and_then(|id| self.leases.get_mut(id)) {
                lease.keys.insert(Arc::clone(&key));
            }
            self.bytes += key.len() + stored.value.len();
            self.records.insert(key, stored);
        }
        self.revision = self.revision.max(revision.saturating_add(1));
        self.forgotten = self.revision;
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    pub(super) fn get(&self, key: &str) -> Option<&Stored> {
        self.records.get(key)
    }

    pub(super) fn list<'table>(
        &'table self,
        prefix: &'table str,
    ) -> impl Iterator<Item = (&'table Arc<str>, &'table Stored)> {
        self.records
            .range::<str, _>((Bound::Included(prefix), Bound::Unbounded))
            .take_while(move |(key, _)| key.starts_with(prefix))
    }

    /// Numbers for `/metrics`: records, bytes, leases, events kept.
    pub(super) fn sizes(&self) -> [usize; 4] {
        [
            self.records.len(),
            self.bytes,
            self.leases.len(),
            self.events.len(),
        ]
    }

    pub(super) fn put(
        &mut self,
        key: &str,
        value: Bytes,
        condition: Condition,
        lease: Option<&str>,
    ) -> Result<u64, Refusal> {
        self.check(key, condition)?;
        if lease.is_some_and(|id| !self.leases.contains_key(id)) {
            return Err(Refusal::LeaseGone);
        }
        if value.len() > self.limits.value_bytes_max {
            return Err(Refusal::TooLarge {
                limit: self.limits.value_bytes_max,
            });
        }
        let old = self.records.get(key);
        let freed = old.map_or(0, |old| key.len() + old.value.len());
        if old.is_none() && self.records.len() >= self.limits.records_max {
            return Err(Refusal::Full("too many records"));
        }
        let bytes = self.bytes - freed + key.len() + value.len();
        if bytes > self.limits.total_bytes_max {
            return Err(Refusal::Full("too many bytes"));
        }
        self.bytes = bytes;
        self.detach(key);
        self.revision += 1;
        let key: Arc<str> = match self.records.get_key_value(key) {
            Some((key, _)) => Arc::clone(key),
            None => key.into(),
        };
        let lease = lease.and_then(|id| {
            let (id, _) = self.leases.get_key_value(id)?;
            let id = Arc::clone(id);
            self.leases.get_mut(&id)?.keys.insert(Arc::clone(&key));
            Some(id)
        });
        let stored = Stored {
            value,
            version: self.revision,
            lease,
        };
        self.log(Arc::clone(&key), Some(stored.value.clone()));
        self.changes.push(Change::Put {
            key: Arc::clone(&key),
            stored: stored.clone(),
        });
        self.records.insert(key, stored);
        Ok(self.revision)
    }

    pub(super) fn delete(&mut self, key: &str, condition: Condition) -> Result<(), Refusal> {
        if !self.records.contains_key(key) {
            return Err(Refusal::NotFound);
        }
        self.check(key, condition)?;
        self.remove(key);
        Ok(())
    }

    pub(super) fn grant_lease(
        &mut self,
        id: String,
        ttl: Duration,
        now: Instant,
    ) -> Result<(), Refusal> {
        if self.leases.len() >= self.limits.leases_max {
            return Err(Refusal::Full("too many leases"));
        }
        let id: Arc<str> = id.into();
        self.changes.push(Change::GrantLease {
            id: Arc::clone(&id),
            ttl,
        });
        self.add_lease(id, ttl, now);
        Ok(())
    }

    pub(super) fn keep_alive(&mut self, id: &str, now: Instant) -> Result<Duration, Refusal> {
        // One whose time is over counts until it is ended, which nobody has seen yet: a stall of
        // the disk, which has to hear of the end first, must not end what is renewed.
        let (id, lease) = self.leases.remove_entry(id).ok_or(Refusal::LeaseGone)?;
        self.ends.remove(&(lease.ends, Arc::clone(&id)));
        let ttl = lease.ttl;
        let ends = now + ttl;
        self.ends.insert((ends, Arc::clone(&id)));
        self.leases.insert(id, Lease { ends, ..lease });
        Ok(ttl)
    }

    pub(super) fn end_lease(&mut self, id: &str) -> Result<(), Refusal> {
        let (id, lease) = self.leases.remove_entry(id).ok_or(Refusal::LeaseGone)?;
        self.ends.remove(&(lease.ends, Arc::clone(&id)));
        self.changes.push(Change::EndLease { id });
        let mut keys: Vec<Arc<str>> = lease.keys.into_iter().collect();
        keys.sort_unstable();
        for key in keys {
            self.remove(&key);
        }
        Ok(())
    }

    pub(super) fn expire(&mut self, now: Instant) {
        while let Some((ends, id)) = self.ends.first().cloned()
            && ends <= now
        {
            // Takes it out of `ends`, too.
            let _ = self.end_lease(&id);
        }
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.ends.first().map(|(ends, _)| *ends)
    }

    fn add_lease(&mut self, id: Arc<str>, ttl: Duration, now: Instant) {
        let ends = now + ttl;
        self.ends.insert((ends, Arc::clone(&id)));
        let keys = HashSet::new();
        self.leases.insert(id, Lease { ttl, ends, keys });
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

    fn check(&self, key: &str, condition: Condition) -> Result<(), Refusal> {
        let current = self.records.get(key).map(|stored| stored.version);
        let holds = match condition {
            Condition::None => true,
            Condition::Absent => current.is_none(),
            Condition::Version(version) => current == Some(version),
            Condition::Never => false,
        };
        if holds {
            Ok(())
        } else {
            Err(Refusal::Conflict(current))
        }
    }

    fn remove(&mut self, key: &str) {
        self.detach(key);
        if let Some((key, old)) = self.records.remove_entry(key) {
            self.bytes -= key.len() + old.value.len();
            self.revision += 1;
            self.log(Arc::clone(&key), None);
            let revision = self.revision;
            self.changes.push(Change::Delete { key, revision });
        }
    }

    /// Takes `key` out of the lease it is under.
    fn detach(&mut self, key: &str) {
        let lease = self
            .records
            .get(key)
            .and_then(|stored| stored.lease.as_ref());
        if let Some(lease) = lease.and_then(|id| self.leases.get_mut(id)) {
            lease.keys.remove(key);
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
