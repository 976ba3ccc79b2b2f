//! One node: a process with the engine's RDMA side, its machines and its work.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rerail_metadata::descriptor::{LocationNics, Protocol, SegmentDescriptor};
use rerail_topology::gid::GidPolicy;
use rerail_verbs::sim::{Fabric, NicId, NodeId, ProcessId};
use rerail_verbs::{AccessFlags, ControlThread, HostMemory};
use tokio::sync::mpsc;

use super::checks::{Due, Table};
use super::ledger::{Flight, Life, SLOT_BYTES, SLOTS, TransferId};
use super::link::{Admits, Outbox, instance_of, lock};
use super::turns::{Hand, Turns};
use crate::event::Events;
use crate::machine::ids::{LocalNic, PeerId, RegionId};
use crate::machine::observer::{Observer, ObserverConfig};
use crate::machine::peers::{PUSH_FEATURE, Peers, PeersConfig};
use crate::machine::publisher::{
    Edit, KeyPair, LocalRecord, PublishOrder, Publisher, PublisherConfig, SubscriberId,
};
use crate::machine::rail::RailConfig;
use crate::machine::{Machine, Time};
use crate::rdma::clock::Clock;
use crate::rdma::config::RdmaConfig;
use crate::rdma::connector::{Connector, Identity};
use crate::rdma::data_threads::DataThreads;
use crate::rdma::driver::Driver;
use crate::rdma::inbox::Inbox;
use crate::rdma::keeper::RailKeeper;
use crate::rdma::memory::{NotRegistered, RegisteredMemory, Registrations};
use crate::rdma::nic::{Nic, PortWish};
use crate::rdma::nics::Nics;
use crate::rdma::open::open_nics;
use crate::rdma::opening::Opening;
use crate::rdma::outside::{Outside, Tasks};
use crate::rdma::rail::Peer;
use crate::rdma::router::Router;
use crate::rdma::slice::{Piece, Slicing};
use crate::rdma::transfer::Transfer;
use crate::rdma::tries::AllTries;
use crate::rdma::watch::{Finder, LOOK_EVERY, Parts};

/// Every node's one registered region.
pub(super) const REGION: RegionId = RegionId(1);

/// Bytes of a slice.
const SLICE_BYTES: u32 = 4 * 1024;

/// Depth of every send queue.
const DEPTH: u32 = 8;

/// Completions that wait on a NIC at most, and so work in flight.
pub(super) const COMPLETIONS_MAX: u32 = 128;

/// Endpoints of a NIC at most.
const ENDPOINTS_MAX: u32 = 512;

pub(super) fn name(node: usize) -> String {
    format!("n{node}")
}

pub(super) fn number(name: &str) -> usize {
    let digits = name
        .strip_prefix('n')
        .and_then(|digits| digits.parse().ok());
    digits.expect("a node's name")
}

pub(super) fn nic_name(nic: u32) -> String {
    format!("mlx5_{nic}")
}

/// A subscriber's id says who it is.
pub(super) fn subscriber((node, life): Life) -> SubscriberId {
    SubscriberId((node as u64) << 32 | u64::from(life))
}

pub(super) fn life_of(subscriber: SubscriberId) -> Life {
    ((subscriber.0 >> 32) as usize, subscriber.0 as u32)
}

/// The number of the adapter of that name on its host.
pub(super) fn nic_number(name: &str) -> usize {
    let digits = name
        .strip_prefix("mlx5_")
        .and_then(|digits| digits.parse().ok());
    digits.expect("an adapter's name")
}

/// All NICs are near all memory.
pub(super) fn matrix(names: Vec<String>) -> Edit {
    let near = LocationNics {
        preferred: names,
        available: Vec::new(),
    };
    Edit::Matrix(BTreeMap::from([("cpu:0".to_owned(), near)]))
}

pub(super) fn config() -> RdmaConfig {
    RdmaConfig {
        send_wr_max: DEPTH,
        cqe_max: COMPLETIONS_MAX,
        endpoints_max: ENDPOINTS_MAX,
        slicing: Slicing {
            slice_bytes: SLICE_BYTES,
            fragment_bytes: SLICE_BYTES / 4,
        },
        ..RdmaConfig::default()
    }
}

/// A control thread in virtual time: what is handed to it happens when the verbs before it are
/// done, and not while its device hangs.
pub(super) struct Control {
    pub(super) thread: ControlThread,
    pub(super) busy_until: Time,
    /// Since when the device has kept it from the next verb.
    pub(super) hangs_since: Option<Time>,
}

impl Control {
    /// When its next turn comes, if something waits for it.
    pub(super) fn due(&self) -> Option<Time> {
        (self.thread.waiting() > 0).then_some(self.busy_until)
    }
}

/// A NIC with those who work for it.
pub(super) struct Port {
    pub(super) id: NicId,
    pub(super) nic: Arc<Nic>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) driver: Driver,
    /// The driver did something when it was last stepped: there may be more.
    pub(super) is_busy: bool,
    pub(super) observer: Observer,
    /// The device whose events are read; `None` while it is dead.
    pub(super) opening: Option<Arc<Opening>>,
    /// Those of this opening and of earlier ones that are not closed yet.
    pub(super) controls: Vec<Control>,
    /// The GID table as the endpoints know it.
    pub(super) table: Option<Table>,
    /// The same as they will know it once they have read their mail.
    pub(super) told_table: Option<Table>,
}

impl Port {
    fn new(
        id: NicId,
        nic: Arc<Nic>,
        (driver, inbox): (Driver, Arc<Inbox>),
        now: Time,
        seed: u64,
    ) -> Self {
        let (config, policy) = (ObserverConfig::default(), GidPolicy::default());
        let seed = seed ^ u64::from(nic.index().0);
        Self {
            id,
            driver,
            is_busy: false,
            observer: Observer::new(now, config, nic.device(), &policy, [1], seed),
            opening: nic.opening(),
            nic,
            inbox,
            controls: Vec::new(),
            table: None,
            told_table: None,
        }
    }
}

/// A peer, as long as its process lives.
pub(super) struct Known {
    pub(super) life: Life,
    pub(super) peer: Arc<Peer>,
    /// NICs in its record.
    pub(super) nics: usize,
    /// What its record offers.
    pub(super) offered: Vec<Piece>,
}

/// A transfer that is not reported.
pub(super) struct Job {
    pub(super) transfer: Arc<Transfer>,
    pub(super) peer: PeerId,
    pub(super) flight: Flight,
    /// Of the record that it went by first.
    pub(super) generation: u64,
    /// It was refused once, and posted again by a newer record.
    pub(super) reposted: bool,
    /// It was refused, and the peer's record is asked for.
    pub(super) asks: bool,
}

pub(super) struct Node {
    pub(super) life: Life,
    pub(super) process: ProcessId,
    pub(super) frozen: bool,
    /// It does not reach the store.
    pub(super) has_no_store: bool,
    /// The processes that it listens to, one a host.
    pub(super) subscribed: BTreeMap<usize, Life>,
    pub(super) ports: Vec<Port>,
    pub(super) memory: HostMemory,
    pub(super) registered: RegisteredMemory,
    pub(super) publisher: Arc<Mutex<Publisher>>,
    pub(super) peers: Peers,
    pub(super) keeper: Arc<RailKeeper>,
    pub(super) connector: Connector,
    pub(super) router: Arc<Router>,
    pub(super) parts: Parts,
    finder: Arc<Finder>,
    /// When it looks for NICs that have come.
    pub(super) look_at: Time,
    seed: u64,
    pub(super) turns: Turns,
    pub(super) outbox: Outbox,
    pub(super) known: BTreeMap<PeerId, Known>,
    pub(super) jobs: BTreeMap<TransferId, Job>,
    /// Of the own record when the publisher had nothing to do: what it writes later is no older.
    pub(super) generation: u64,
    /// The last generation taken in of each peer.
    pub(super) generations: BTreeMap<PeerId, u64>,
    /// Peers whose life is over.
    pub(super) retired: BTreeMap<PeerId, Time>,
    /// What is to be reported by a certain time.
    pub(super) due: Vec<Due>,
    pub(super) next: u64,
}

/// Whatever the watch's parts would have run in a pool the world does itself: nothing of this
/// runtime ever runs.
fn idle_runtime() -> tokio::runtime::Handle {
    static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    let make = || {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a runtime without drivers")
    };
    RUNTIME.get_or_init(make).handle().clone()
}

fn register(
    registrations: &Registrations,
    nics: &Nics,
    memory: &HostMemory,
) -> Result<RegisteredMemory, NotRegistered> {
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    registrations.register(nics, memory, access, u64::MAX)
}

fn registration(registered: &RegisteredMemory) -> Edit {
    let chunks = registered.keys();
    let chunk = chunks.first().expect("one chunk");
    let keys = chunk.lkeys.iter().zip(&chunk.rkeys);
    Edit::Register {
        region: REGION,
        name: "cpu:0".to_owned(),
        addr: chunk.addr,
        length: chunk.length,
        keys: keys
            .map(|(lkey, rkey)| KeyPair {
                lkey: *lkey,
                rkey: *rkey,
            })
            .collect(),
    }
}

impl Node {
    /// Starts a process on the adapters of its host, as `RdmaTransport::open` and the engine do.
    pub(super) fn start(
        hand: &'static Hand,
        fabric: &Fabric,
        host: NodeId,
        ids: &[NicId],
        life: Life,
        seed: u64,
    ) -> Self {
        let process = fabric.add_process(host);
        let (clock, turns, outbox) = (Clock::by_hand(hand), Turns::default(), Outbox::default());
        let (now, config) = (clock.now(), config());
        let memory = HostMemory::allocate(SLOTS * SLOT_BYTES).expect("memory");
        let tries = Arc::<AllTries>::default();
        let open = || open_nics(&fabric.devices_of(process), &[], &config, &tries);
        // One that finds nothing to use would be started again and again until it does.
        let opened = open().or_else(|_| {
            let left = fabric.devices_of(process);
            let name = left.devices().first().expect("one is plugged in").name();
            let id = ids[nic_number(name)];
            fabric.reset_device(id);
            let device = fabric.device_of(process, id);
            let (place, any) = (LocalNic(0).into(), PortWish::Any);
            let nic = Nic::open(place, &device, 1, name, &config, any, &tries.of(name, 1));
            nic.map(|nic| vec![Arc::new(nic)])
        });
        let opened = opened.expect("a device that was reset opens");
        let (reporter, reports) = mpsc::channel(4_096);
        let identity = Identity {
            server: name(life.0),
            instance: Some(instance_of(life).to_string()),
        };
        let threads = Arc::new(DataThreads::in_turns(config.clone(), clock, reporter));
        let (nics, mut ports) = (Nics::default(), Vec::new());
        for nic in opened {
            let inbox = threads.serve(&nic).expect("no thread is needed");
            nics.push(Arc::clone(&nic), inbox)
                .expect("there is a place for it");
            let id = ids[nic_number(nic.device())];
            let driver = threads.take_drivers().pop().expect("its own");
            ports.push(Port::new(id, nic, driver, now, seed));
        }
        let rails = RailConfig {
            connect_timeout: config.limits.connect + Duration::from_secs(1),
            ..RailConfig::default()
        };
        let keeper = Arc::new(RailKeeper::new(clock, nics.clone(), rails, seed));
        let connector = Connector::new(
            config.clone(),
            Outside {
                clock,
                tasks: Tasks::Turns(turns.clone()),
                seed,
            },
            identity,
            nics.clone(),
            Arc::clone(&keeper),
            Arc::new(outbox.clone()),
        );
        let router = Router::new(nics.clone(), connector.clone(), Arc::clone(&keeper), clock);
        let router = Arc::new(router);
        router.set_events(Arc::new(outbox.clone()));
        turns.spawn(Arc::clone(&router).run(reports));
        let registrations = Arc::new(Registrations::default());
        let registered = register(&registrations, &nics, &memory);
        let registered = registered.expect("devices that have just been opened register");
        let publisher = publisher(now, life, &nics, &registered, seed);
        let publisher = Arc::new(Mutex::new(publisher));
        connector.set_admission(Arc::new(Admits(Arc::clone(&publisher))));
        let parts = Parts {
            nics,
            wanted: Vec::new(),
            threads,
            tries,
            registrations,
            config,
            clock,
            connector: connector.clone(),
            router: Arc::clone(&router),
            runtime: idle_runtime(),
            listener: Arc::new(outbox.clone()),
            events: Events::default(),
        };
        let mut node = Self {
            finder: Arc::new(Finder::new(&parts)),
            look_at: now + LOOK_EVERY,
            seed,
            life,
            process,
            frozen: false,
            has_no_store: false,
            subscribed: BTreeMap::new(),
            ports,
            memory,
            registered,
            publisher,
            peers: Peers::new(PeersConfig::default(), seed),
            keeper,
            connector,
            router,
            parts,
            turns,
            outbox,
            known: BTreeMap::new(),
            jobs: BTreeMap::new(),
            generation: 0,
            generations: BTreeMap::new(),
            retired: BTreeMap::new(),
            due: Vec::new(),
            next: 1,
        };
        node.know_controls(now);
        node
    }

    /// The endpoints have read what they were told of GID tables.
    pub(super) fn heed_tables(&mut self) {
        for port in &mut self.ports {
            if let Some(table) = port.told_table.take() {
                port.table = Some(table);
            }
        }
    }

    /// Takes in control threads of devices that were opened, whatever came of it.
    pub(super) fn know_controls(&mut self, now: Time) {
        for port in &mut self.ports {
            port.controls.retain(|control| !control.thread.is_closed());
            let known = port.controls.len();
            for thread in port.nic.controls() {
                let mut known = port.controls[..known].iter();
                if !thread.is_closed() && !known.any(|known| known.thread.is_same(&thread)) {
                    port.controls.push(Control {
                        thread,
                        busy_until: now,
                        hangs_since: None,
                    });
                }
            }
        }
    }

    /// Its process is gone: whatever it had is, too.
    pub(super) fn end(mut self) {
        let controls = self.ports.iter_mut();
        let controls: Vec<_> = controls
            .flat_map(|port| std::mem::take(&mut port.controls))
            .collect();
        self.turns.end();
        drop(self);
        for control in controls {
            while control.thread.turn() {}
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// When something is to be done for a machine; tasks sleep by the world's hand.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let observers = self.ports.iter();
        let observers = observers.filter_map(|port| port.observer.next_timeout());
        let publisher = lock(&self.publisher).next_timeout();
        let others = [publisher, self.peers.next_timeout()];
        observers.chain(others.into_iter().flatten()).min()
    }

    /// Registers all memory once more, under new keys: peers' records are stale until they learn.
    /// `None` if a device has died and nobody knows yet.
    pub(super) fn register_anew(&mut self) -> Option<[Edit; 2]> {
        let Parts {
            registrations,
            nics,
            ..
        } = &self.parts;
        self.registered = register(registrations, nics, &self.memory).ok()?;
        let register = registration(&self.registered);
        Some([Edit::Unregister { region: REGION }, register])
    }

    /// Takes in NICs that have come, as the pool does for the watch; their names.
    pub(super) fn look(&mut self, now: Time, fabric: &Fabric, ids: &[NicId]) -> Vec<String> {
        self.look_at = now + LOOK_EVERY;
        // Tries that came to nothing are closed by threads that no port has.
        for control in self.parts.tries.of_strangers() {
            while control.turn() {}
        }
        let found = RefCell::new(Vec::new());
        for attempt in self.finder.look().attempts {
            attempt.run(|nic| found.borrow_mut().push(nic));
        }
        let (found, drivers) = (found.into_inner(), self.parts.threads.take_drivers());
        assert_eq!(found.len(), drivers.len(), "each has a driver");
        let names = found.iter().map(|nic| nic.name().to_owned()).collect();
        for (nic, driver) in found.into_iter().zip(drivers) {
            let id = ids[nic_number(nic.device())];
            // The look has taken that long.
            let took = fabric.take_verb_time(self.process, id);
            self.look_at = self.look_at.max(now + took);
            self.ports.push(Port::new(id, nic, driver, now, self.seed));
        }
        self.know_controls(now);
        names
    }

    /// Opens a NIC's device again and registers memory with it, as `watch::reopen_in_pool` does.
    pub(super) fn reopen(&mut self, now: Time, local: LocalNic) -> bool {
        let Parts {
            registrations,
            config,
            ..
        } = &self.parts;
        let port = &mut self.ports[local.0 as usize];
        let nic = &port.nic;
        let opened = nic.reopen(config).and_then(|opening| {
            let taken = || {
                nic.install(Arc::clone(&opening));
                Ok(())
            };
            registrations.register_all(nic, &opening, taken)
        });
        self.know_controls(now);
        opened.is_ok()
    }

    /// Keys of the region on one NIC.
    pub(super) fn keys(&self, local: LocalNic) -> KeyPair {
        let chunks = self.registered.keys();
        let chunk = chunks.first().expect("one chunk");
        let at = local.0 as usize;
        let key = |keys: &[u32]| keys.get(at).copied().unwrap_or(0);
        KeyPair {
            lkey: key(&chunk.lkeys),
            rkey: key(&chunk.rkeys),
        }
    }
}

fn publisher(
    now: Time,
    life: Life,
    nics: &Nics,
    registered: &RegisteredMemory,
    seed: u64,
) -> Publisher {
    let base = SegmentDescriptor::new(name(life.0), Protocol::rdma());
    let features = vec![PUSH_FEATURE.to_owned()];
    let mut record = LocalRecord::new(base, features, nics.names(), PublishOrder::Fixed);
    let edits = [matrix(nics.names()), registration(registered)];
    for edit in edits {
        record.apply(edit).expect("it can be made");
    }
    let instance = instance_of(life);
    Publisher::new(now, PublisherConfig::default(), instance, record, seed)
}
