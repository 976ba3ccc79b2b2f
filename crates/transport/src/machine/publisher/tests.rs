//! What must hold of a publisher, and the reports that it answers.

mod names;
mod properties;
mod record;
mod writing;

use rerail_metadata::descriptor::{LocationNics, Protocol};
use rerail_topology::gid::{GidClass, Selection};
use rerail_verbs::{Gid, GidType, LinkLayer, Mtu};

use super::*;
use crate::machine::drive;
use crate::machine::ids::RegionId;
use crate::machine::observer::PortFacts;

pub(super) fn instance(number: u8) -> InstanceId {
    InstanceId([number; 16])
}

pub(super) fn facts(up: bool, gid: &str) -> PortFacts {
    PortFacts {
        up,
        link_layer: LinkLayer::Ethernet,
        lid: 0,
        gid: Some(Selection {
            index: 3,
            gid: gid.parse().expect("a GID literal"),
            gid_type: GidType::RoceV2,
            netdev: "ens1".into(),
            class: GidClass::NetdevGlobal,
        }),
        pkey: Some(0xffff),
        mtu: Some(Mtu::Mtu4096),
        speed_mbps: 100_000,
    }
}

pub(super) fn port(local: u32, up: bool, gid: &str) -> Input {
    Input::Edit(Edit::Port {
        local: LocalNic(local),
        facts: facts(up, gid),
        gids: vec![gid.parse().expect("a GID literal")],
    })
}

pub(super) fn register(region: u64, nics: u32) -> Input {
    let keys = (0..nics).map(|nic| KeyPair {
        lkey: 1_000 * nic + region as u32,
        rkey: 1_000_000 * nic + region as u32,
    });
    Input::Edit(Edit::Register {
        region: RegionId(region),
        name: "cpu:0".into(),
        addr: 0x1000 * (region + 1),
        length: 0x1000,
        keys: keys.collect(),
    })
}

pub(super) fn local_record(nics: &[&str], order: PublishOrder) -> LocalRecord {
    let base = SegmentDescriptor::new("node-a", Protocol::rdma());
    let names = nics.iter().map(|name| (*name).to_owned());
    let mut record = LocalRecord::new(base, vec!["push/1".into()], names, order);
    let nics: Vec<String> = nics.iter().map(|name| (*name).to_owned()).collect();
    let location = LocationNics {
        preferred: nics[..1].to_vec(),
        available: nics[1..].to_vec(),
    };
    let matrix = BTreeMap::from([("cpu:0".to_owned(), location)]);
    record
        .apply(Edit::Matrix(matrix))
        .expect("a matrix can be set");
    record
}

/// A store of one key, with faults.
#[derive(Default)]
pub(super) struct TestStore {
    pub(super) record: Option<StoredRecord>,
    pub(super) written: Vec<Arc<SegmentDescriptor>>,
    pub(super) rpc_meta: usize,
    pub(super) away: bool,
    /// Writes happen, but their answers are lost.
    pub(super) loses_answers: bool,
    versions: u64,
}

impl TestStore {
    pub(super) fn write(&mut self, identity: Option<(InstanceId, u64)>) -> Version {
        self.versions += 1;
        let version = Version::from_counter(self.versions);
        self.record = Some(StoredRecord {
            version: version.clone(),
            identity,
        });
        version
    }

    fn carry_out(&mut self, request: StoreRequest) -> StoreAnswer {
        if self.away {
            return StoreAnswer::Failed(StoreFailure::Failed("connection refused".into()));
        }
        let current = self.record.as_ref().map(|record| record.version.clone());
        let answer = match (request, current) {
            (StoreRequest::RpcMeta, _) => {
                self.rpc_meta += 1;
                StoreAnswer::Written(None)
            }
            (StoreRequest::Read, None) => StoreAnswer::Failed(StoreFailure::NotFound),
            (StoreRequest::Read, Some(_)) => match &self.record {
                Some(record) => StoreAnswer::Found(record.clone()),
                None => StoreAnswer::Failed(StoreFailure::NotFound),
            },
            (StoreRequest::Create(_), Some(_)) => StoreAnswer::Failed(StoreFailure::Conflict),
            (StoreRequest::Swap(expected, _), current) if Some(&expected) != current.as_ref() => {
                StoreAnswer::Failed(StoreFailure::Conflict)
            }
            (StoreRequest::Delete(_), None) => StoreAnswer::Failed(StoreFailure::NotFound),
            (StoreRequest::Delete(expected), current) if Some(&expected) != current.as_ref() => {
                StoreAnswer::Failed(StoreFailure::Conflict)
            }
            (StoreRequest::Create(descriptor) | StoreRequest::Swap(_, descriptor), _) => {
                let member = descriptor.rerail.as_ref().expect("ours has it");
                let identity = Some((member.instance, member.generation));
                self.written.push(descriptor);
                StoreAnswer::Written(Some(self.write(identity)))
            }
            (StoreRequest::Delete(_), _) => {
                self.record = None;
                StoreAnswer::Written(None)
            }
        };
        if self.loses_answers {
            return StoreAnswer::Failed(StoreFailure::Failed("timed out".into()));
        }
        answer
    }

    /// Generations written, in order.
    pub(super) fn generations(&self) -> Vec<u64> {
        let generation = |descriptor: &Arc<SegmentDescriptor>| {
            descriptor
                .rerail
                .as_ref()
                .map_or(0, |member| member.generation)
        };
        self.written.iter().map(generation).collect()
    }
}

pub(super) struct Rig {
    pub(super) publisher: Publisher,
    pub(super) store: TestStore,
    pub(super) now: Time,
    pub(super) answers: bool,
    pub(super) out: Option<(u64, StoreRequest)>,
    pub(super) log: Vec<Action>,
}

impl Rig {
    pub(super) fn new(store: TestStore, nics: &[&str]) -> Self {
        Self::with(store, instance(5), local_record(nics, PublishOrder::Fixed))
    }

    pub(super) fn with(store: TestStore, instance: InstanceId, record: LocalRecord) -> Self {
        let now = Time::from_millis(10);
        let config = PublisherConfig::default();
        let mut rig = Self {
            publisher: Publisher::new(now, config, instance, record, 3),
            store,
            now,
            answers: true,
            out: None,
            log: Vec::new(),
        };
        rig.settle();
        rig
    }

    pub(super) fn settle(&mut self) {
        loop {
            let mut actions = Vec::new();
            drive(&mut self.publisher, self.now, |action| actions.push(action));
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.log.push(action.clone());
                if let Action::Store { ticket, request } = action {
                    self.out = Some((ticket, request));
                    if self.answers {
                        self.answer();
                    }
                }
            }
        }
    }

    /// Carries out the request that is out.
    pub(super) fn answer(&mut self) {
        if let Some((ticket, request)) = self.out.take() {
            let answer = self.store.carry_out(request);
            self.publisher
                .handle(self.now, Input::Store { ticket, answer });
        }
    }

    /// What is out is lost, and all that follows is answered; afterwards nothing is again.
    pub(super) fn is_not_answered(&mut self, is_it: impl Fn(&StoreRequest) -> bool) {
        let (_, lost) = self.out.take().expect("something is out");
        assert!(is_it(&lost), "{lost:?}");
        self.answers = true;
        self.advance(Duration::from_secs(20));
        self.answers = false;
    }

    pub(super) fn input(&mut self, input: Input) {
        self.publisher.handle(self.now, input);
        self.settle();
    }

    pub(super) fn advance(&mut self, by: Duration) {
        let until = self.now + by;
        while let Some(due) = self.publisher.next_timeout().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.settle();
        }
        self.now = until;
        self.settle();
    }

    pub(super) fn last(&self) -> &SegmentDescriptor {
        self.store.written.last().expect("something was written")
    }

    pub(super) fn is_superseded(&self) -> bool {
        matches!(self.log.last(), Some(Action::Superseded { .. }))
    }
}

pub(super) fn gid(text: &str) -> Gid {
    text.parse().expect("a GID literal")
}
