//! What a server decides by: which records and leases there are, with the changes that are still on
//! their way to the disk. What readers see is in `view`. Without I/O or a clock.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::ServerLimits;

#[derive(Debug)]
pub(super) struct Table {
    records: HashMap<Arc<str>, Known>,
    leases: HashMap<Arc<str>, Lease>,
    /// The leases by their ends, so that those that are over are found without looking at all.
    ends: BTreeSet<(Instant, Arc<str>)>,
    revision: u64,
    bytes: usize,
    changes: Vec<Change>,
    limits: ServerLimits,
}

/// What is decided by of a record; its value is for readers.
#[derive(Debug)]
struct Known {
    version: u64,
    value_bytes: usize,
    lease: Option<Arc<str>>,
}

/// Records by their keys.
pub(super) type Records = Vec<(Arc<str>, Stored)>;

/// A record, for the disk and for readers.
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

/// One change, for the disk and for readers.
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

impl Table {
    pub(super) fn new(limits: ServerLimits, revision: u64) -> Self {
        Self {
            records: HashMap::new(),
            leases: HashMap::new(),
            ends: BTreeSet::new(),
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
        records: &[(Arc<str>, Stored)],
        revision: u64,
        now: Instant,
    ) {
        for (id, ttl) in leases {
            // Anew in full: its owner could not reach the server meanwhile. No longer than is
            // granted, whatever the file says.
            self.add_lease(id.into(), ttl.min(self.limits.lease_ttl_max), now);
        }
        for (key, stored) in records {
            if let Some(lease) = stored.lease.as_ref().and_then(|id| self.leases.get_mut(id)) {
                lease.keys.insert(Arc::clone(key));
            }
            self.bytes += key.len() + stored.value.len();
            let known = Known {
                version: stored.version,
                value_bytes: stored.value.len(),
                lease: stored.lease.clone(),
            };
            self.records.insert(Arc::clone(key), known);
        }
        self.revision = self.revision.max(revision.saturating_add(1));
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// The version of a record, if there is one.
    pub(super) fn version(&self, key: &str) -> Option<u64> {
        self.records.get(key).map(|known| known.version)
    }

    /// Numbers for `/metrics`: bytes, leases.
    pub(super) fn sizes(&self) -> [usize; 2] {
        [self.bytes, self.leases.len()]
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
        let freed = old.map_or(0, |old| key.len() + old.value_bytes);
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
        let known = Known {
            version: stored.version,
            value_bytes: stored.value.len(),
            lease: stored.lease.clone(),
        };
        self.records.insert(Arc::clone(&key), known);
        self.changes.push(Change::Put { key, stored });
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

    fn check(&self, key: &str, condition: Condition) -> Result<(), Refusal> {
        let current = self.version(key);
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
            self.bytes -= key.len() + old.value_bytes;
            self.revision += 1;
            let revision = self.revision;
            self.changes.push(Change::Delete { key, revision });
        }
    }

    /// Takes `key` out of the lease it is under.
    fn detach(&mut self, key: &str) {
        let lease = self.records.get(key).and_then(|known| known.lease.as_ref());
        if let Some(lease) = lease.and_then(|id| self.leases.get_mut(id)) {
            lease.keys.remove(key);
        }
    }
}
