//! The transport as a whole.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rerail_verbs::{AccessFlags, DeviceList, HostMemory};
use tokio::runtime;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::clock::Clock;
use super::config::RdmaConfig;
use super::connector::{Connector, Identity};
use super::data_threads::DataThreads;
use super::endpoint::Offer;
use super::events::RdmaEvents;
use super::keeper::RailKeeper;
use super::memory::{NotRegistered, RegisteredMemory, Registrations};
use super::nics::Nics;
use super::outside::{Outside, Tasks};
use super::rail::{Peer, PeerNic, PeerSpec};
use super::router::Router;
use super::signaling::Signaling;
use super::transfer::{OnFinished, Transfer, TransferSpec};
use super::tries::AllTries;
use super::watch::{NicListener, Parts, Watch};
use crate::TransportError;
use crate::event::Events;
use crate::machine::ids::LocalNic;
use crate::machine::rail::RailConfig;

/// Reports of data threads that may wait for the control runtime.
const REPORTS_MAX: usize = 4096;

/// How long closing waits for endpoints to be fenced.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);

/// How long [`RdmaTransport::revoke`] waits: longer than a device may take that does not hang.
const REVOKE_LIMIT: Duration = Duration::from_secs(5);

/// NICs, endpoints and threads of one engine.
pub struct RdmaTransport {
    config: RdmaConfig,
    clock: Clock,
    identity: Identity,
    /// Devices that the user names; all if he names none.
    wanted: Vec<String>,
    nics: Nics,
    tries: Arc<AllTries>,
    registrations: Arc<Registrations>,
    connector: Connector,
    router: Arc<Router>,
    runtime: runtime::Handle,
    /// Stops first, since it acts on what is below.
    watch: OnceLock<Watch>,
    dispatcher: JoinHandle<()>,
    // Last, so that data threads outlive whatever may still hand them something.
    threads: Arc<DataThreads>,
}

impl RdmaTransport {
    /// Opens NICs and starts their threads. `wanted` names devices, as `name` (its first port) or
    /// `name:port`; none means every port of every device. Those that do not exist or cannot be
    /// used yet are taken in once they can, when it is [observed](Self::observe).
    ///
    /// # Errors
    ///
    /// No port that is wanted can be used now.
    pub fn open(
        devices: &DeviceList,
        wanted: &[String],
        config: RdmaConfig,
        clock: Clock,
        identity: Identity,
        signaling: Arc<dyn Signaling>,
        runtime: runtime::Handle,
    ) -> Result<Self, TransportError> {
        let tries = Arc::<AllTries>::default();
        let opened = super::open::open_nics(devices, wanted, &config, &tries)?;
        let (reporter, reports) = mpsc::channel(REPORTS_MAX);
        let threads = DataThreads::new(config.clone(), clock, reporter);
        let nics = Nics::default();
        for nic in opened {
            let inbox = threads.serve(&nic)?;
            nics.push(nic, inbox)?;
        }
        let rails = RailConfig {
            // The endpoint's own time limit says more about what was waited for.
            connect_timeout: config.limits.connect + Duration::from_secs(1),
            ..RailConfig::default()
        };
        let keeper = Arc::new(RailKeeper::new(clock, nics.clone(), rails, rand::random()));
        let outside = Outside {
            clock,
            tasks: Tasks::Runtime(runtime.clone()),
            seed: rand::random(),
        };
        let connector = Connector::new(
            config.clone(),
            outside,
            identity.clone(),
            nics.clone(),
            Arc::clone(&keeper),
            signaling,
        );
        let router = Router::new(nics.clone(), connector.clone(), keeper, clock);
        let router = Arc::new(router);
        let dispatcher = runtime.spawn(Arc::clone(&router).run(reports));
        Ok(Self {
            runtime,
            watch: OnceLock::new(),
            registrations: Arc::default(),
            config,
            clock,
            identity,
            wanted: wanted.to_vec(),
            nics,
            tries,
            connector,
            router,
            dispatcher,
            threads: Arc::new(threads),
        })
    }

    /// Starts to observe the NICs: from now on `listener` is told what is true of each, first of
    /// all as it is now, and `events` everything that happens. Done once.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn observe(
        &self,
        listener: Arc<dyn NicListener>,
        events: Events,
    ) -> Result<(), TransportError> {
        let watch = Watch::start(self.parts(listener, events))?;
        // A second thread would be stopped here.
        let _ = self.watch.set(watch);
        Ok(())
    }

    /// What the observers' thread works on.
    pub(super) fn parts(&self, listener: Arc<dyn NicListener>, events: Events) -> Parts {
        Parts {
            nics: self.nics.clone(),
            wanted: self.wanted.clone(),
            threads: Arc::clone(&self.threads),
            tries: Arc::clone(&self.tries),
            registrations: Arc::clone(&self.registrations),
            config: self.config.clone(),
            clock: self.clock,
            connector: self.connector.clone(),
            router: Arc::clone(&self.router),
            runtime: self.runtime.clone(),
            listener,
            events,
        }
    }

    /// Has a NIC's port read, or all: something suggests that it differs from what is known.
    pub fn recheck(&self, local: Option<LocalNic>) {
        if let Some(watch) = self.watch.get() {
            watch.hint(local);
        }
    }

    /// Its settings.
    pub fn config(&self) -> &RdmaConfig {
        &self.config
    }

    /// Its clock: time limits of transfers are times of it.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Who it is to peers.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Its NICs, in the order of the record's `devices[]`. There may be more later.
    pub fn nics(&self) -> &Nics {
        &self.nics
    }

    /// Its endpoints.
    pub fn connector(&self) -> &Connector {
        &self.connector
    }

    /// A peer, with a rail from each NIC to each of its NICs.
    pub fn peer(&self, spec: PeerSpec) -> Arc<Peer> {
        let peer = Peer::new(spec, &self.nics.names());
        self.router.declare(&peer);
        peer
    }

    /// The router: what the observer says of local gates goes there.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// Tells `events` of the rails from now on. Only the first call counts.
    pub fn set_events(&self, events: Arc<dyn RdmaEvents>) {
        self.router.set_events(events);
    }

    /// The peer's record says that its NIC at position `nic_index` of `devices[]` is up, or not.
    pub fn peer_nic(&self, peer: &Arc<Peer>, nic_index: u32, up: bool) {
        self.router.peer_nic(peer, nic_index, up);
    }

    /// The peer's record has these NICs now, of which the first are those that it was made with; of
    /// the others, those at the positions `down` are withdrawn. Of those that are known only the
    /// addresses are taken in, where they differ.
    pub fn peer_grown(&self, peer: &Arc<Peer>, nics: &[PeerNic], down: &[u32]) {
        self.router.peer_grown(peer, nics, down);
    }

    /// The peer's record is withdrawn: it is not expected back, and transfers to it end as
    /// [`NoPath`](crate::TransferError::NoPath).
    pub fn peer_gone(&self, peer: &Peer) {
        self.router.peer_gone(peer);
    }

    /// Another process has taken the peer's place: transfers to it end as
    /// [`PeerRestarted`](crate::TransferError::PeerRestarted).
    pub fn peer_restarted(&self, peer: &Peer) {
        self.router.peer_restarted(peer);
    }

    /// Forgets what is known of the rails to a peer that is not used any more, and closes their
    /// connections. A transfer to it would begin anew.
    pub fn forget_peer(&self, peer: &Peer) {
        self.router.forget_peer(peer);
    }

    /// Registers memory with every NIC, or none. Blocks.
    ///
    /// # Errors
    ///
    /// With the devices that may hold the memory still, though it is not registered.
    pub fn register(
        &self,
        memory: &HostMemory,
        access: AccessFlags,
    ) -> Result<RegisteredMemory, NotRegistered> {
        let mr_bytes_max = self.config.mr_bytes_max;
        self.registrations
            .register(&self.nics, memory, access, mr_bytes_max)
    }

    /// Bytes of host memory that a device may still read or write, though nobody uses them any more
    /// for what they were given: because it hangs, or refuses to let go. They are those
    ///
    /// - in flight of transfers that have ended as [`Unfenced`](crate::TransferError::Unfenced);
    /// - of registrations that were given up and that a device has not let go of, all of each;
    /// - of regions that a device refused to deregister, while it is open.
    ///
    /// What counts for two of these reasons counts twice. 0 again once the device answers or is
    /// closed. From any thread; never blocks.
    pub fn quarantined_bytes(&self) -> u64 {
        let in_flight = self.connector.quarantined_bytes();
        let given_up = self.registrations.quarantined_bytes();
        in_flight + given_up + self.tries.quarantined_bytes()
    }

    /// Starts a transfer, in slices that every own port can move at once. Never blocks;
    /// `on_finished` is told once it is over.
    pub fn submit(&self, spec: TransferSpec, on_finished: Arc<dyn OnFinished>) -> Arc<Transfer> {
        let longest = self.nics().iter().map(|nic| nic.max_msg_bytes()).min();
        let slicing = spec.slicing.within(longest.unwrap_or(u32::MAX));
        let transfer = Transfer::new(TransferSpec { slicing, ..spec }, on_finished);
        self.router.route(Arc::clone(&transfer));
        transfer
    }

    /// Takes a peer's Connection message and returns the answer, or the reason to refuse.
    pub async fn accept(&self, offer: Offer) -> Result<Offer, String> {
        self.connector.accept(offer).await
    }

    /// Cuts off the peer that calls itself by one of the names `servers` in its NIC paths: every
    /// connection with it is closed, whoever opened it, and has stopped when this returns; see
    /// [`Connector::revoke`]. Returns how many there were.
    ///
    /// # Errors
    ///
    /// [`TransportError::NotRevoked`] if some have not stopped within five seconds.
    pub async fn revoke(&self, servers: &BTreeSet<String>) -> Result<usize, TransportError> {
        self.connector.revoke(servers, REVOKE_LIMIT).await
    }

    /// Closes all endpoints and waits until they are fenced, for a few seconds at most.
    ///
    /// Transfers that are not finished then fail as `Closed` once the transport is dropped.
    pub fn close(&self) {
        let begin = Instant::now();
        self.connector.close_all(None, "the engine was closed");
        while self.connector.endpoints() > 0 && begin.elapsed() < CLOSE_LIMIT {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for RdmaTransport {
    fn drop(&mut self) {
        drop(self.watch.take());
        self.threads.stop();
        // With the data threads gone, its channel is closed and it ends by itself; a runtime that
        // is being shut down may never run it again.
        self.dispatcher.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::super::nic::{Nic, PortWish};
    use super::super::rig::{KIB, LIMIT, Move, peer_of, registered, rig, wait_until};
    use super::*;

    #[test]
    fn a_nic_that_has_lost_its_keys_fails_no_transfer() {
        let rig = rig(3, 2);
        let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
        let peer = peer_of(&a, 1, &b);
        let (source, target) = (registered(&a, 512 * KIB), registered(&b, 512 * KIB));
        let write = Move::all(&a, &peer, &source, &target);
        write.run().expect("moved");
        // The device died, and whoever closes its gate has not come to it yet.
        let nic = &a.nics()[0];
        nic.release();
        a.registrations.release(nic);
        assert!(nic.is_gate_open());
        for _ in 0..8 {
            write.run().expect("over the other NIC");
        }
    }

    #[test]
    fn a_registration_is_held_until_the_last_who_has_it_lets_go() {
        let rig = rig(4, 1);
        let transport = rig.transport(0, "a1");
        let memory = registered(&transport, KIB);
        let (holders, other) = (memory.holders(), memory.clone());
        drop(memory);
        let held = holders.wait_gone(Duration::ZERO);
        assert_eq!(held, Err(vec!["sim0".to_owned()]), "another has it");
        drop(other);
        assert_eq!(holders.wait_gone(LIMIT), Ok(()));
    }

    #[test]
    fn memory_that_a_device_refuses_to_let_go_of_is_held_until_it_is_closed() {
        let rig = rig(8, 2);
        let transport = rig.transport(0, "a1");
        let (memory, other) = (registered(&transport, KIB), registered(&transport, KIB));
        let refuses = rig.fabric.refuse_to_deregister(rig.hosts[0].1[0]);
        let holders = memory.holders();
        drop(memory);
        let held = Err(vec!["sim0".to_owned()]);
        assert_eq!(holders.wait_gone(LIMIT), held, "and nobody waits in vain");
        // All of the registration, and the region of it that was refused.
        assert_eq!(transport.quarantined_bytes(), 2 * KIB);
        drop(refuses);
        assert_eq!(holders.wait_gone(LIMIT), held, "it is not asked again");
        let others = other.holders();
        drop(other);
        assert_eq!(others.wait_gone(LIMIT), Ok(()), "it lets go of the next");
        let nic = &transport.nics()[0];
        nic.release();
        transport.registrations.release(nic);
        wait_until("it is closed", || {
            holders.wait_gone(Duration::ZERO).is_ok() && transport.quarantined_bytes() == 0
        });
    }

    #[test]
    fn a_registration_that_hangs_on_one_device_does_not_hold_up_another_device() {
        const HANG: Duration = Duration::from_secs(15);
        let rig = rig(5, 2);
        let transport = Arc::new(rig.transport(0, "a1"));
        let memory = registered(&transport, 64 * KIB);
        rig.fabric.hang_control(rig.hosts[0].1[1], HANG);
        let other = Arc::clone(&transport);
        let hanging = std::thread::spawn(move || {
            let memory = HostMemory::allocate(4096).expect("memory");
            other.register(&memory, AccessFlags::LOCAL_WRITE)
        });
        let second = transport.nics()[1].opening().expect("it is open");
        let control = second.context().control();
        wait_until("the device works on it", || control.stuck_for().is_some());
        // The first device dies meanwhile, and comes back.
        let nic = &transport.nics()[0];
        nic.release();
        transport.registrations.release(nic);
        assert_eq!(memory.keys()[0].rkeys[0], 0);
        let opening = nic.reopen(&transport.config).expect("it works");
        let taken = || {
            nic.install(Arc::clone(&opening));
            Ok(())
        };
        let registered = transport.registrations.register_all(nic, &opening, taken);
        registered.expect("the other device does not matter");
        assert_ne!(memory.keys()[0].rkeys[0], 0);
        assert!(!hanging.is_finished(), "the device hangs still");
        // Nobody watches the device here, so that the registration gives up in the end.
        let failed = hanging
            .join()
            .expect("no panic")
            .expect_err("it hangs too long");
        assert_eq!(failed.holders.wait_gone(LIMIT), Ok(()), "{}", failed.error);
    }

    #[test]
    fn a_region_that_comes_after_its_nic_was_given_up_is_not_the_next_ones() {
        const HANG: Duration = Duration::from_secs(12);
        let rig = rig(6, 1);
        let transport = rig.transport(0, "a1");
        let memory = registered(&transport, 64 * KIB);
        let address = "10.0.0.9".parse().expect("an address");
        let options = rerail_verbs::sim::NicOptions::ethernet("late0", address);
        let late = rig.fabric.add_nic(rig.hosts[0].0, &options);
        let devices = transport.nics()[0].relist().expect("they can be listed");
        let device = devices.find("late0").expect("it is there").clone();
        let (local, config) = (LocalNic(1), &transport.config);
        let tries = Arc::default();
        let any = PortWish::Any;
        let nic = Nic::open(local.into(), &device, 1, "late0", config, any, &tries);
        let nic = Arc::new(nic.expect("open"));
        let opening = nic.opening().expect("open");
        rig.fabric.hang_control(late, HANG);
        let taken = || panic!("it does not have the memory");
        let registered = transport.registrations.register_all(&nic, &opening, taken);
        assert!(registered.is_err(), "it hangs");
        let control = opening.context().control();
        assert!(control.stuck_for().is_some(), "it hangs still");
        wait_until("the device has come to it", || {
            control.stuck_for().is_none()
        });
        control.execute(|| ()).expect("it works again");
        let rkeys = &memory.keys()[0].rkeys;
        assert!(rkeys.get(1).is_none_or(|key| *key == 0), "{rkeys:?}");
    }

    #[test]
    fn a_region_of_a_reopening_that_came_to_nothing_is_not_entered_when_it_comes_late() {
        const HANG: Duration = Duration::from_secs(12);
        let rig = rig(43, 1);
        let transport = rig.transport(0, "a1");
        let memory = registered(&transport, 64 * KIB);
        let nic = Arc::clone(&transport.nics()[0]);
        let registrations = &transport.registrations;
        nic.release();
        registrations.release(&nic);
        assert_eq!(memory.keys()[0].rkeys, [0]);
        let opening = nic.reopen(&transport.config).expect("open");
        rig.fabric.hang_control(rig.hosts[0].1[0], HANG);
        let taken = || panic!("it does not have the memory");
        let registered = registrations.register_all(&nic, &opening, taken);
        assert!(registered.is_err(), "it hangs");
        let control = opening.context().control();
        wait_until("the device has come to it", || {
            control.stuck_for().is_none()
        });
        let barrier = control.submit(|| ()).expect("it works again");
        barrier.wait_timeout(HANG).expect("done");
        assert_eq!(memory.keys()[0].rkeys, [0], "the key of a dead opening");
    }
}
