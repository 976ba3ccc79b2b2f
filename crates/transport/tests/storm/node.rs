//! One node: a process with its machines, its verbs objects and its work.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rerail_metadata::descriptor::{InstanceId, LocationNics, Protocol, SegmentDescriptor};
use rerail_topology::gid::GidPolicy;
use rerail_transport::machine::fence::{FenceConfig, Fences};
use rerail_transport::machine::ids::{EndpointId, LocalNic, PeerId, RailId, RegionId, TransferId};
use rerail_transport::machine::observer::{Observer, ObserverConfig, PortReading, ReadFailure};
use rerail_transport::machine::peers::{PUSH_FEATURE, Peers, PeersConfig};
use rerail_transport::machine::progress::{Progress, ProgressConfig};
use rerail_transport::machine::publisher::{
    Edit, KeyPair, LocalRecord, PublishOrder, Publisher, PublisherConfig, SubscriberId,
};
use rerail_transport::machine::rail::{RailConfig, Rails};
use rerail_transport::machine::transfer::{FailCause, TransferConfig, Transfers};
use rerail_transport::machine::{Machine, Time};
use rerail_verbs::sim::{Fabric, NicId, ProcessId};
use rerail_verbs::{
    AccessFlags, CompletionQueue, Context, Device, HostMemory, MemoryRegion, ProtectionDomain,
    RdmaOpcode, VerbsError,
};

use super::ledger::{Life, SLOT_BYTES, SLOTS};
use super::link::{Endpoint, Passive};

/// Every node's one registered region.
pub(crate) const REGION: RegionId = RegionId(1);

pub(crate) fn name(node: usize) -> String {
    format!("n{node}")
}

pub(crate) fn number(name: &str) -> usize {
    let digits = name
        .strip_prefix('n')
        .and_then(|digits| digits.parse().ok());
    digits.expect("a node's name")
}

pub(crate) fn nic_name(nic: u32) -> String {
    format!("mlx5_{nic}")
}

pub(crate) fn nic_number(name: &str) -> Option<u32> {
    name.strip_prefix("mlx5_")?.parse().ok()
}

/// A subscriber's id says who it is.
pub(crate) fn subscriber((node, life): Life) -> SubscriberId {
    SubscriberId((node as u64) << 32 | u64::from(life))
}

pub(crate) fn life_of(subscriber: SubscriberId) -> Life {
    ((subscriber.0 >> 32) as usize, subscriber.0 as u32)
}

/// What an open context was made into.
pub(crate) struct Open {
    pub(crate) context: Context,
    pub(crate) pd: ProtectionDomain,
    pub(crate) queue: CompletionQueue,
    pub(crate) region: MemoryRegion,
}

impl Open {
    fn new(device: &Device, memory: &HostMemory) -> Result<Self, VerbsError> {
        let context = device.open()?;
        let pd = context.alloc_pd()?;
        let queue = context.create_cq(4_096)?;
        let region = register(&pd, memory)?;
        Ok(Self {
            context,
            pd,
            queue,
            region,
        })
    }

    fn register(&self, memory: &HostMemory) -> Result<MemoryRegion, VerbsError> {
        register(&self.pd, memory)
    }

    pub(crate) fn keys(&self) -> KeyPair {
        KeyPair {
            lkey: self.region.lkey(),
            rkey: self.region.rkey(),
        }
    }

    pub(crate) fn read(&self) -> Result<PortReading, ReadFailure> {
        let failure = |query| {
            move |error: VerbsError| ReadFailure {
                query,
                errno: error.errno().unwrap_or(5),
            }
        };
        Ok(PortReading {
            attr: self
                .context
                .port_attr(1)
                .map_err(failure("ibv_query_port"))?,
            gids: self
                .context
                .gid_table(1)
                .map_err(failure("ibv_query_gid_table"))?,
            unreadable: Vec::new(),
            netdevs: Vec::new(),
            pkeys: vec![self.context.pkey(1, 0).map_err(failure("ibv_query_pkey"))?],
        })
    }
}

fn register(pd: &ProtectionDomain, memory: &HostMemory) -> Result<MemoryRegion, VerbsError> {
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    pd.register(memory, 0, memory.length(), access)
}

/// An adapter as its process has it.
pub(crate) struct Nic {
    pub(crate) id: NicId,
    pub(crate) device: Device,
    pub(crate) open: Option<Open>,
    /// Control verbs of a context come one after the other.
    pub(crate) busy_until: Time,
}

fn registration(nics: &[Nic], memory: &HostMemory) -> Edit {
    let keys = nics.iter().map(|nic| nic.open.as_ref());
    Edit::Register {
        region: REGION,
        name: "cpu:0".to_owned(),
        addr: memory.addr(),
        length: memory.length() as u64,
        keys: keys
            .map(|open| open.map_or(KeyPair::default(), Open::keys))
            .collect(),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Slice {
    Pending,
    Posted(EndpointId),
    /// Given up on that endpoint: not to be posted again before its local fence.
    Abandoned(EndpointId),
    Done,
    Failed,
}

/// A transfer that is not reported.
pub(crate) struct Job {
    pub(crate) peer: PeerId,
    pub(crate) opcode: RdmaOpcode,
    pub(crate) local_at: usize,
    pub(crate) remote_at: usize,
    pub(crate) bytes: usize,
    pub(crate) slices: Vec<Slice>,
    pub(crate) hold: bool,
    pub(crate) failed: Option<FailCause>,
    pub(crate) finishing: bool,
}

/// Bytes of a slice.
pub(crate) const SLICE_BYTES: usize = 4 * 1024;

impl Job {
    pub(crate) fn is_over(&self) -> bool {
        let over = |slice: &Slice| matches!(slice, Slice::Done | Slice::Failed);
        self.slices.iter().all(over)
    }

    /// What has failed and waits will not be posted any more.
    pub(crate) fn give_up(&mut self) {
        for slice in &mut self.slices {
            if matches!(slice, Slice::Pending | Slice::Abandoned(_)) {
                *slice = Slice::Failed;
            }
        }
    }

    /// Offset and length of a slice.
    pub(crate) fn piece(&self, slice: usize) -> (usize, usize) {
        let at = slice * SLICE_BYTES;
        (at, SLICE_BYTES.min(self.bytes - at))
    }
}

pub(crate) struct Node {
    pub(crate) life: Life,
    pub(crate) process: ProcessId,
    pub(crate) frozen: bool,
    pub(crate) nics: Vec<Nic>,
    pub(crate) memory: HostMemory,
    pub(crate) observers: Vec<Observer>,
    pub(crate) publisher: Publisher,
    pub(crate) peers: Peers,
    pub(crate) rails: Rails,
    pub(crate) fences: Fences,
    pub(crate) transfers: Transfers,
    pub(crate) progress: Progress,
    pub(crate) of_peer: BTreeMap<PeerId, Life>,
    pub(crate) endpoints: BTreeMap<EndpointId, Endpoint>,
    pub(crate) by_rail: BTreeMap<RailId, EndpointId>,
    pub(crate) by_work: BTreeMap<u64, EndpointId>,
    pub(crate) passives: BTreeMap<(Life, EndpointId), Passive>,
    pub(crate) jobs: BTreeMap<TransferId, Job>,
    pub(crate) gates: BTreeSet<LocalNic>,
    /// Endpoints of peers that were closed before they had connected, or since.
    pub(crate) closed: BTreeSet<(Life, EndpointId)>,
    /// The last generation taken in of each peer.
    pub(crate) generations: BTreeMap<PeerId, u64>,
    pub(crate) next: u64,
    pub(crate) refreshing: BTreeSet<PeerId>,
}

impl Node {
    /// Starts a process on the adapters of its host.
    pub(crate) fn start(
        now: Time,
        fabric: &Fabric,
        host: rerail_verbs::sim::NodeId,
        nics: &[NicId],
        life: Life,
        seed: u64,
    ) -> Self {
        let process = fabric.add_process(host);
        let memory = HostMemory::allocate(SLOTS * SLOT_BYTES).expect("memory");
        let nics: Vec<_> = nics
            .iter()
            .map(|id| {
                let device = fabric.device_of(process, *id);
                let open = Open::new(&device, &memory).ok();
                Nic {
                    id: *id,
                    device,
                    open,
                    busy_until: now,
                }
            })
            .collect();
        let names: Vec<String> = (0..nics.len() as u32).map(nic_name).collect();
        let base = SegmentDescriptor::new(name(life.0), Protocol::rdma());
        let features = vec![PUSH_FEATURE.to_owned()];
        let mut record = LocalRecord::new(base, features, names.clone(), PublishOrder::Fixed);
        let near = LocationNics {
            preferred: names,
            available: Vec::new(),
        };
        let edits = [
            Edit::Matrix(BTreeMap::from([("cpu:0".to_owned(), near)])),
            registration(&nics, &memory),
        ];
        for edit in edits {
            record.apply(edit).expect("it can be made");
        }
        let mut instance = [0; 16];
        instance[0] = life.1 as u8 + 1;
        instance[1] = life.0 as u8;
        let observer = |nic: u32| {
            let (config, policy) = (ObserverConfig::default(), GidPolicy::default());
            Observer::new(
                now,
                config,
                &nic_name(nic),
                &policy,
                [1],
                seed ^ u64::from(nic),
            )
        };
        Self {
            life,
            process,
            frozen: false,
            observers: (0..nics.len() as u32).map(observer).collect(),
            publisher: Publisher::new(
                now,
                PublisherConfig::default(),
                InstanceId(instance),
                record,
                seed,
            ),
            peers: Peers::new(PeersConfig::default(), seed),
            rails: Rails::new(RailConfig::default(), seed),
            fences: Fences::new(FenceConfig::default()),
            transfers: Transfers::new(TransferConfig::default()),
            progress: Progress::new(ProgressConfig::default()),
            nics,
            memory,
            of_peer: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            by_rail: BTreeMap::new(),
            by_work: BTreeMap::new(),
            passives: BTreeMap::new(),
            jobs: BTreeMap::new(),
            gates: BTreeSet::new(),
            closed: BTreeSet::new(),
            generations: BTreeMap::new(),
            next: 1,
            refreshing: BTreeSet::new(),
        }
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        let observers = self.observers.iter().filter_map(Machine::next_timeout);
        let others = [
            self.publisher.next_timeout(),
            self.peers.next_timeout(),
            self.rails.next_timeout(),
            self.fences.next_timeout(),
            self.transfers.next_timeout(),
            self.progress.next_timeout(),
        ];
        observers.chain(others.into_iter().flatten()).min()
    }

    /// When the verbs that were called on a NIC are done. Verbs of a context end in the order of
    /// their calls; each that is called while the device hangs is charged all of the hang, so that
    /// times are not summed.
    pub(crate) fn done_at(&mut self, now: Time, fabric: &Fabric, local: LocalNic) -> Time {
        let process = self.process;
        let nic = &mut self.nics[local.0 as usize];
        let took = fabric.take_verb_time(process, nic.id);
        nic.busy_until = nic.busy_until.max(now + took.max(Duration::from_micros(5)));
        nic.busy_until
    }

    /// Registers all memory once more, under new keys: peers' records are stale until they learn.
    pub(crate) fn register_anew(&mut self) -> [Edit; 2] {
        for nic in &mut self.nics {
            if let Some(open) = &mut nic.open
                && let Ok(region) = open.register(&self.memory)
            {
                open.region = region;
            }
        }
        let register = registration(&self.nics, &self.memory);
        [Edit::Unregister { region: REGION }, register]
    }

    /// Opens a NIC's device again and registers memory with it.
    pub(crate) fn reopen(&mut self, local: LocalNic) -> bool {
        let nic = &mut self.nics[local.0 as usize];
        nic.open = None;
        nic.open = Open::new(&nic.device, &self.memory).ok();
        nic.open.is_some()
    }
}
