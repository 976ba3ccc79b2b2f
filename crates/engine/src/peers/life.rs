//! One life of a peer: a process, and what its record says at the moment.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

use rerail_metadata::descriptor::{Buffer, SegmentDescriptor};
use rerail_transport::TransferError;
use rerail_transport::machine::peers::{NicChange, Parting};
use rerail_transport::rdma::slice::Keys;
use rerail_transport::rdma::{NicSet, Peer, PeerNic, Piece};
use rerail_verbs::Gid;

use crate::batch;
use crate::engine::peer_nic;
use crate::event::Event;
use crate::segment::Route;
use crate::topology::near_buffer;

/// Batches that are looked through for dead ones at least before the list may grow.
const BATCHES_MIN: usize = 16;

/// A process that has, or had, a segment's name. What is bound to it ends with it.
pub(crate) struct Life {
    name: String,
    over: OnceLock<Parting>,
    now: Mutex<Now>,
    /// Answers to questions after trouble.
    refreshes: AtomicU64,
    /// Something of the above has changed.
    pub(crate) news: Event,
}

struct Now {
    descriptor: Arc<SegmentDescriptor>,
    /// Counts the records that were taken in.
    revision: u64,
    /// NICs that are withdrawn, by name.
    down: BTreeSet<String>,
    /// Ways to it: the latest, and those that segments still use.
    reaches: Vec<Arc<Reach>>,
    batches: Vec<Weak<batch::Shared>>,
    batches_max: usize,
}

/// A way to a peer: its rails or data connections, and what it offers over them.
pub(crate) struct Reach {
    peer: Arc<Peer>,
    route: Route,
    offered: RwLock<Arc<Offered>>,
}

/// What a peer offers.
#[derive(Clone, Debug)]
pub(crate) struct Offered {
    /// The way. A peer may add NICs to it.
    key: ReachKey,
    /// Which of its life's records said so.
    pub(crate) revision: u64,
    /// By address.
    pub(crate) buffers: Vec<Piece>,
    /// The record.
    descriptor: Arc<SegmentDescriptor>,
}

impl Offered {
    /// What a record offers over this way. `None` if it lacks one of its NICs.
    fn new(key: &ReachKey, revision: u64, descriptor: &Arc<SegmentDescriptor>) -> Option<Self> {
        let mut key = key.clone();
        key.add_nics(descriptor);
        Some(Self {
            buffers: key.offered(descriptor)?,
            key,
            revision,
            descriptor: Arc::clone(descriptor),
        })
    }

    /// The owner's NICs near the byte at `addr`, by the positions that keys have, too.
    pub(crate) fn near(&self, addr: u64) -> NicSet {
        let ReachKey::Rdma { nics, .. } = &self.key else {
            return NicSet::ALL;
        };
        let holds = |buffer: &&Buffer| {
            addr.checked_sub(buffer.addr)
                .is_some_and(|at| at < buffer.length)
        };
        let Some(buffer) = self.descriptor.buffers.iter().find(holds) else {
            return NicSet::ALL;
        };
        near_buffer(&self.descriptor, buffer, addr, |name| {
            nics.iter().position(|(known, _)| known == name)
        })
    }
}

/// What makes a way another way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ReachKey {
    /// Rails to these NICs, in this order: keys of memory are put in the same.
    Rdma {
        /// Whom to ask for connections.
        server: String,
        /// Their names; with GID and LID where only the record tells them, which is so for
        /// C++ engines of old.
        nics: Vec<(String, Option<(Gid, u16)>)>,
    },
    /// Connections to this data port.
    Tcp {
        /// Its host, if the record has one.
        host: Option<String>,
        /// The port.
        port: u16,
        /// Version of the data protocol.
        version: u32,
    },
}

impl ReachKey {
    pub(crate) fn rdma(descriptor: &SegmentDescriptor) -> Self {
        let tells = descriptor.rerail.is_some();
        let nics = descriptor.devices.iter().map(|device| {
            let address = (!tells).then_some((device.gid, device.lid));
            (device.name.clone(), address)
        });
        Self::Rdma {
            server: descriptor.nic_path_server_name().to_owned(),
            nics: nics.collect(),
        }
    }

    pub(crate) fn tcp(descriptor: &SegmentDescriptor) -> Self {
        Self::Tcp {
            host: descriptor.tcp_data_host.clone(),
            port: descriptor.tcp_data_port,
            version: descriptor.tcp_proto_version,
        }
    }

    /// Puts the NICs behind the known ones that a record has and the way does not: a peer that
    /// tells its NICs itself takes in new ones while it lives.
    fn add_nics(&mut self, descriptor: &SegmentDescriptor) {
        let Self::Rdma { nics, .. } = self else {
            return;
        };
        if descriptor.rerail.is_none() {
            return;
        }
        for device in &descriptor.devices {
            if !nics.iter().any(|(name, _)| *name == device.name) {
                nics.push((device.name.clone(), None));
            }
        }
    }

    /// Whether both are one way: NICs go by name, whatever their order in the record.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Rdma { server, nics },
                Self::Rdma {
                    server: other_server,
                    nics: others,
                },
            ) => {
                server == other_server
                    && nics.len() == others.len()
                    && nics.iter().all(|nic| others.contains(nic))
            }
            (left, right) => left == right,
        }
    }

    /// What a record offers over this way, keys in the order of its NICs. `None` if the record
    /// lacks one of them.
    fn offered(&self, descriptor: &SegmentDescriptor) -> Option<Vec<Piece>> {
        let mut pieces = Vec::with_capacity(descriptor.buffers.len());
        match self {
            Self::Tcp { .. } => {
                let buffers = descriptor.buffers.iter();
                pieces.extend(buffers.map(|buffer| Piece::new(buffer.addr, buffer.length, [])));
            }
            Self::Rdma { nics, .. } => {
                let position = |(name, _): &(String, _)| {
                    let mut devices = descriptor.devices.iter();
                    devices.position(|device| device.name == *name)
                };
                let order: Vec<usize> = nics.iter().map(position).collect::<Option<_>>()?;
                for buffer in &descriptor.buffers {
                    // Memory without keys is not offered over RDMA.
                    if buffer.rkey.is_empty() {
                        continue;
                    }
                    // A NIC that is being taken in is told before its keys are.
                    let any = buffer.rkey.iter().any(|key| *key != 0);
                    let key = |at: &usize| {
                        let key = buffer.rkey.get(*at).copied();
                        key.filter(|key| *key != 0 || !any)
                    };
                    let keys = Keys::of_peer(order.iter().map(key));
                    let (addr, length) = (buffer.addr, buffer.length);
                    pieces.push(Piece { addr, length, keys });
                }
            }
        }
        pieces.sort_by_key(|piece| piece.addr);
        Some(pieces)
    }
}

/// A way that was asked for.
pub(crate) struct FoundReach {
    pub(crate) reach: Arc<Reach>,
    /// It was made now: its rails know nothing of NICs that are withdrawn.
    pub(crate) is_new: bool,
    /// Ways that no segment uses any more, replaced by a new one.
    pub(crate) unused: Vec<Arc<Reach>>,
}

impl Reach {
    /// What is offered over it at the moment.
    pub(crate) fn offered(&self) -> Arc<Offered> {
        // Replaced whole, so that a poisoned lock guards a whole one.
        let offered = self.offered.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&offered)
    }

    pub(crate) fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    pub(crate) fn route(&self) -> &Route {
        &self.route
    }

    /// Position of a NIC among those of the peer.
    pub(crate) fn nic(&self, name: &str) -> Option<u32> {
        let offered = self.offered();
        let ReachKey::Rdma { nics, .. } = &offered.key else {
            return None;
        };
        let found = nics.iter().position(|(known, _)| known == name)?;
        u32::try_from(found).ok()
    }

    /// The peer's NICs, in the order of their positions.
    pub(crate) fn nics(&self) -> Vec<PeerNic> {
        let offered = self.offered();
        let ReachKey::Rdma { nics, .. } = &offered.key else {
            return Vec::new();
        };
        let nic = |(index, (name, _)): (usize, &(String, _))| {
            let mut devices = offered.descriptor.devices.iter();
            let device = devices.find(|device| device.name == *name)?;
            Some(peer_nic(&offered.descriptor, index, device))
        };
        nics.iter().enumerate().map_while(nic).collect()
    }

    fn take(&self, descriptor: &Arc<SegmentDescriptor>, revision: u64) {
        let mut offered = self.offered.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut new) = Offered::new(&offered.key, revision, descriptor) {
            Piece::carry_over(&offered.buffers, &mut new.buffers);
            *offered = Arc::new(new);
        }
    }
}

impl Life {
    pub(crate) fn new(descriptor: Arc<SegmentDescriptor>) -> Arc<Self> {
        let devices = descriptor.devices.iter();
        Arc::new(Self {
            name: descriptor.name.clone(),
            over: OnceLock::new(),
            now: Mutex::new(Now {
                // Until the first record has been taken in.
                down: devices.map(|device| device.name.clone()).collect(),
                descriptor,
                revision: 0,
                reaches: Vec::new(),
                batches: Vec::new(),
                batches_max: BATCHES_MIN,
            }),
            refreshes: AtomicU64::new(0),
            news: Event::default(),
        })
    }

    /// Name of the segment.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Its record, as it was taken in last.
    pub(crate) fn descriptor(&self) -> Arc<SegmentDescriptor> {
        Arc::clone(&self.now().descriptor)
    }

    /// Why requests to it fail, once they do.
    pub(crate) fn failure(&self) -> Option<TransferError> {
        let peer = self.name.clone();
        match self.over.get()? {
            Parting::Replaced => Some(TransferError::PeerRestarted { peer }),
            Parting::Withdrawn => Some(TransferError::NoPath {
                peer,
                cause: "its record is withdrawn, and it shows no sign of life".into(),
            }),
            // Nobody uses it then.
            Parting::Closed => None,
        }
    }

    /// Answers so far to questions after trouble.
    pub(crate) fn refreshes(&self) -> u64 {
        self.refreshes.load(Ordering::Acquire)
    }

    /// The way to it called `key`, as made of `descriptor`; `make` makes a new one.
    pub(crate) fn reach(
        &self,
        key: ReachKey,
        descriptor: &Arc<SegmentDescriptor>,
        make: impl FnOnce() -> (Arc<Peer>, Route),
    ) -> FoundReach {
        let mut now = self.now();
        let mut known = now.reaches.iter();
        if let Some(reach) = known.find(|reach| reach.offered().key.is_same(&key)) {
            return FoundReach {
                reach: Arc::clone(reach),
                is_new: false,
                unused: Vec::new(),
            };
        }
        let (peer, route) = make();
        // The record may have changed since the key was made of it.
        let present = Offered::new(&key, now.revision, &now.descriptor);
        let present = present.or_else(|| Offered::new(&key, now.revision, descriptor));
        let offered = present.unwrap_or_else(|| Offered {
            key,
            revision: now.revision,
            buffers: Vec::new(),
            descriptor: Arc::clone(descriptor),
        });
        let reach = Arc::new(Reach {
            offered: RwLock::new(Arc::new(offered)),
            peer,
            route,
        });
        let known = std::mem::take(&mut now.reaches).into_iter();
        let (used, unused) = known.partition(|reach| Arc::strong_count(reach) > 1);
        now.reaches = used;
        now.reaches.push(Arc::clone(&reach));
        FoundReach {
            reach,
            is_new: true,
            unused,
        }
    }

    /// All ways to it.
    pub(crate) fn reaches(&self) -> Vec<Arc<Reach>> {
        self.now().reaches.clone()
    }

    /// Names of the NICs that are withdrawn.
    pub(crate) fn down(&self) -> Vec<String> {
        self.now().down.iter().cloned().collect()
    }

    /// Takes a record in.
    pub(crate) fn take(&self, descriptor: Arc<SegmentDescriptor>, nics: &[(String, NicChange)]) {
        let mut now = self.now();
        now.revision += 1;
        for (name, change) in nics {
            match change {
                NicChange::Down => {
                    now.down.insert(name.clone());
                }
                NicChange::Up | NicChange::Moved => {
                    now.down.remove(name);
                }
            }
        }
        // One that is new and not said to be up is withdrawn.
        let known = Arc::clone(&now.descriptor);
        for device in &descriptor.devices {
            let is_new = !known.devices.iter().any(|other| other.name == device.name);
            if is_new && !nics.iter().any(|(name, _)| *name == device.name) {
                now.down.insert(device.name.clone());
            }
        }
        for reach in &now.reaches {
            reach.take(&descriptor, now.revision);
        }
        now.descriptor = descriptor;
        drop(now);
        self.news.signal();
    }

    /// A question after trouble is answered.
    pub(super) fn refreshed(&self) {
        self.refreshes.fetch_add(1, Ordering::AcqRel);
        self.news.signal();
    }

    /// It is over. Requests find out by [`end`](Self::end), and new ones at once.
    pub(super) fn part(&self, parting: Parting) {
        // Of several reasons the first counts.
        let _ = self.over.set(parting);
        self.news.signal();
    }

    /// Ends what is bound to it, once it is over.
    pub(super) fn end(&self) {
        let Some(failure) = self.failure() else {
            return;
        };
        let batches = std::mem::take(&mut self.now().batches);
        for batch in batches.iter().filter_map(Weak::upgrade) {
            batch.fail_all_to(self, &failure);
        }
    }

    /// Has the requests of a batch end with it. To be called before they are started.
    pub(crate) fn bind(&self, batch: &Arc<batch::Shared>) {
        let mut now = self.now();
        if now.batches.len() >= now.batches_max {
            now.batches.retain(|batch| batch.strong_count() > 0);
            now.batches_max = BATCHES_MIN.max(2 * now.batches.len());
        }
        now.batches.push(Arc::downgrade(batch));
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        // Nothing under the lock panics half-way: a poisoned one is whole.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Life")
            .field("name", &self.name)
            .field("over", &self.over.get())
            .finish_non_exhaustive()
    }
}
