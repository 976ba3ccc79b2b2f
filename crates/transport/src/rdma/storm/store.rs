//! A store in memory, with faults of its own: away, slow, emptied, silent to watchers, or losing
//! the answer to a write that it made.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::link::life_of_instance;
use crate::machine::Time;
use crate::machine::peers::{Fetched, PeerRecord};
use crate::machine::publisher::{StoreAnswer, StoreFailure, StoreRequest, StoredRecord};
use rerail_metadata::Version;
use rerail_metadata::descriptor::{Device, InstanceId, RerailMember, SegmentDescriptor};
use rerail_verbs::GidScope;

#[derive(Default)]
pub(super) struct Store {
    records: BTreeMap<String, (u64, Arc<SegmentDescriptor>)>,
    versions: u64,
    /// Nothing is answered but failures.
    pub(super) away: bool,
    /// Watchers are told nothing; afterwards they are told that they may have missed something.
    pub(super) silent: bool,
    /// Writes are made, and answered with a failure.
    pub(super) forgets_answers: bool,
    /// The last generation written by each instance.
    written: BTreeMap<(String, InstanceId), u64>,
    /// NICs of each instance that were in its record with an address that is not link-local.
    routed: BTreeSet<(String, InstanceId, String)>,
}

/// A request on its way to the store.
pub(super) struct Errand {
    pub(super) ticket: u64,
    pub(super) request: StoreRequest,
    /// Since when it is under way.
    pub(super) asked: Time,
    pub(super) is_slow: bool,
}

/// What watchers are to be told.
pub(super) enum Told {
    Put(String, Arc<SegmentDescriptor>),
    Delete(String),
}

impl Store {
    pub(super) fn record(&self, key: &str) -> Option<&Arc<SegmentDescriptor>> {
        self.records.get(key).map(|(_, record)| record)
    }

    /// Everything is lost. Other engines of which there is nothing but a record are alive: they
    /// write it again.
    pub(super) fn empty(&mut self) {
        self.records.retain(|_, (_, record)| {
            let life = member(record).map(|member| life_of_instance(member.instance));
            life.is_none_or(|life| life.1 == u32::MAX)
        });
    }

    pub(super) fn fetch(&self, key: &str) -> Fetched {
        match self.records.get(key) {
            _ if self.away => Fetched::Unavailable,
            Some((_, descriptor)) => Fetched::Found(peer_record(descriptor)),
            None => Fetched::NotFound,
        }
    }

    /// Carries out a request about the key of `name`, which its sender may have given up.
    pub(super) fn request(
        &mut self,
        name: &str,
        request: StoreRequest,
        is_given_up: bool,
    ) -> (StoreAnswer, Option<Told>) {
        if self.away {
            let failure = StoreFailure::Failed("no answer".to_owned());
            return (StoreAnswer::Failed(failure), None);
        }
        let current = self.records.get(name).map(|(version, _)| *version);
        let is_at = |expected: &Version| expected.as_counter() == current;
        match request {
            StoreRequest::RpcMeta => (StoreAnswer::Written(None), None),
            StoreRequest::Read => match self.records.get(name) {
                None => (StoreAnswer::Failed(StoreFailure::NotFound), None),
                Some((version, descriptor)) => {
                    let found = StoredRecord {
                        version: Version::from_counter(*version),
                        identity: member(descriptor)
                            .map(|member| (member.instance, member.generation)),
                    };
                    (StoreAnswer::Found(found), None)
                }
            },
            StoreRequest::Create(descriptor) if current.is_none() => {
                self.write(name, descriptor, is_given_up)
            }
            StoreRequest::Swap(expected, descriptor) if is_at(&expected) => {
                self.write(name, descriptor, is_given_up)
            }
            StoreRequest::Delete(expected) if is_at(&expected) => {
                self.records.remove(name);
                (
                    StoreAnswer::Written(None),
                    Some(Told::Delete(name.to_owned())),
                )
            }
            _ => (StoreAnswer::Failed(StoreFailure::Conflict), None),
        }
    }

    fn write(
        &mut self,
        name: &str,
        descriptor: Arc<SegmentDescriptor>,
        is_given_up: bool,
    ) -> (StoreAnswer, Option<Told>) {
        if let Some(member) = member(&descriptor) {
            let key = (name.to_owned(), member.instance);
            let last = self.written.entry(key).or_default();
            assert!(
                *last <= member.generation || is_given_up,
                "a state that was overtaken was written"
            );
            *last = member.generation.max(*last);
            // No fault leaves a NIC without its address for as long as a worse one is held back.
            for Device { name: nic, gid, .. } in &descriptor.devices {
                let of = (name.to_owned(), member.instance, nic.clone());
                let is_link_local = gid.scope() == GidScope::LinkLocal;
                assert!(
                    !is_link_local || !self.routed.contains(&of),
                    "{name}: {nic} is published as {gid}, and has a better address"
                );
                if !is_link_local && !gid.is_null() {
                    self.routed.insert(of);
                }
            }
        }
        let told = self.put(name, descriptor);
        let answer = if self.forgets_answers {
            StoreAnswer::Failed(StoreFailure::Failed("the answer was lost".to_owned()))
        } else {
            StoreAnswer::Written(Some(Version::from_counter(self.versions)))
        };
        (answer, Some(told))
    }

    /// Writes a record, whoever's it is and whatever was there.
    pub(super) fn put(&mut self, name: &str, descriptor: Arc<SegmentDescriptor>) -> Told {
        self.versions += 1;
        let record = (self.versions, Arc::clone(&descriptor));
        self.records.insert(name.to_owned(), record);
        Told::Put(name.to_owned(), descriptor)
    }
}

pub(super) fn member(descriptor: &SegmentDescriptor) -> Option<&RerailMember> {
    descriptor.rerail.as_ref()
}

pub(super) fn peer_record(descriptor: &Arc<SegmentDescriptor>) -> PeerRecord {
    PeerRecord {
        descriptor: Arc::clone(descriptor),
        rpc: None,
    }
}
