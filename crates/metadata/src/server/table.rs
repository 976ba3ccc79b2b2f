//! What a server holds: records, leases and the last events. Without I/O or a clock.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::ServerLimits;

#[derive(Debug)]
pub(super) struct Table {
    records: BTreeMap<String, Stored>,
    leases: HashMap<String, Lease>,
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
    pub(super) lease: Option<String>,
}

#[derive(Debug)]
struct Lease {
    ttl: Duration,
    ends: Instant,
    keys: HashSet<String>,
}

/// One change, kept for watches.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) revision: u64,
    pub(super) key: String,
    /// `None` for a deletion.
    pub(super) value: Option<Bytes>,
}

/// One change for the disk.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Put { key: String, stored: Stored },
    Delete { key: String, revision: u64 },
    GrantLease { id: String, ttl: Duration },
    EndLease { id: String },
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
    Events(Vec<Event>),
    /// The events are no longer all there.
    Resync,
}

impl Table {
    pub(super) fn new(limits: ServerLimits, revision: u64) -> Self {
        Self {
            records: BTreeMap::new(),
            leases: HashMap::new(),
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
            // Anew in full: its owner could not reach the server meanwhile.
            self.leases.insert(
                id,
                Lease {
                    ttl,
                    ends: now + ttl,
                    keys: HashSet::new(),
                },
            );
        }
        for (key, stored) in records {
            if let Some(lease) = stored.lease.as_ref().and_then(|id| self.leases.get_mut(id)) {
                lease.keys.insert(key.clone());
            }
            self.bytes += key.len() + stored.value.len();
            self.records.insert(key, stored);
        }
        self.revision = self.revision.max(revision + 1);
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
    ) -> impl Iterator<Item = (&'table String, &'table Stored)> {
        self.records
            .range(prefix.to_owned()..)
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
        let stored = Stored {
            value,
            version: self.revision,
            lease: lease.map(str::to_owned),
        };
        if let Some(lease) = lease.and_then(|id| self.leases.get_mut(id)) {
            lease.keys.insert(key.to_owned());
        }
        self.log(key, Some(stored.value.clone()));
        self.changes.push(Change::Put {
            key: key.to_owned(),
            stored: stored.clone(),
        });
        self.records.insert(key.to_owned(), stored);
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
        self.changes.push(Change::GrantLease {
            id: id.clone(),
            ttl,
        });
        self.leases.insert(
            id,
            Lease {
                ttl,
                ends: now + ttl,
                keys: HashSet::new(),
            },
        );
        Ok(())
    }

    pub(super) fn keep_alive(&mut self, id: &str, now: Instant) -> Result<Duration, Refusal> {
        // One that is over is gone, also if nobody has looked since.
        self.expire(now);
        let lease = self.leases.get_mut(id).ok_or(Refusal::LeaseGone)?;
        lease.ends = now + lease.ttl;
        Ok(lease.ttl)
    }

    pub(super) fn end_lease(&mut self, id: &str) -> Result<(), Refusal> {
        let lease = self.leases.remove(id).ok_or(Refusal::LeaseGone)?;
        self.changes.push(Change::EndLease { id: id.to_owned() });
        let mut keys: Vec<String> = lease.keys.into_iter().collect();
        keys.sort_unstable();
        for key in keys {
            self.remove(&key);
        }
        Ok(())
    }

    pub(super) fn expire(&mut self, now: Instant) {
        let mut over: Vec<String> = self
            .leases
            .iter()
            .filter(|(_, lease)| lease.ends <= now)
            .map(|(id, _)| id.clone())
            .collect();
        over.sort_unstable();
        for id in over {
            let _ = self.end_lease(&id);
        }
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.leases.values().map(|lease| lease.ends).min()
    }

    /// Events under `prefix` after the revision `after`.
    pub(super) fn since(&self, prefix: &str, after: u64) -> Since {
        // A revision from the future is one of another life of this server.
        if after < self.forgotten || after > self.revision {
            return Since::Resync;
        }
        let first = self.events.partition_point(|event| event.revision <= after);
        Since::Events(
            self.events
                .range(first..)
                .filter(|event| event.key.starts_with(prefix))
                .cloned()
                .collect(),
        )
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
        if let Some(old) = self.records.remove(key) {
            self.bytes -= key.len() + old.value.len();
            self.revision += 1;
            self.log(key, None);
            let revision = self.revision;
            self.changes.push(Change::Delete {
                key: key.to_owned(),
                revision,
            });
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

    fn log(&mut self, key: &str, value: Option<Bytes>) {
        self.event_bytes += value.as_ref().map_or(0, Bytes::len);
        self.events.push_back(Event {
            revision: self.revision,
            key: key.to_owned(),
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
