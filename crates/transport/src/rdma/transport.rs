//! The transport as a whole.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rerail_verbs::{AccessFlags, DeviceList, HostMemory};
use tokio::runtime;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::config::RdmaConfig;
use super::connector::{Connector, Identity};
use super::data_thread::{Clock, DataThread};
use super::driver::Driver;
use super::endpoint::Offer;
use super::events::RdmaEvents;
use super::inbox::{Inbox, Wake};
use super::keeper::RailKeeper;
use super::memory::{RegisteredMemory, Registrations};
use super::nic::Nic;
use super::rail::{Peer, PeerSpec};
use super::router::Router;
use super::signaling::Signaling;
use super::transfer::{OnFinished, Transfer, TransferSpec};
use super::watch::{NicListener, Parts, Watch};
use crate::TransportError;
use crate::event::Events;
use crate::machine::ids::LocalNic;
use crate::machine::rail::RailConfig;

/// Reports of data threads that may wait for the control runtime.
const REPORTS_MAX: usize = 4096;

/// How long closing waits for endpoints to be fenced.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);

/// NICs, endpoints and threads of one engine.
pub struct RdmaTransport {
    config: RdmaConfig,
    clock: Clock,
    identity: Identity,
    nics: Vec<Arc<Nic>>,
    registrations: Arc<Registrations>,
    connector: Connector,
    router: Arc<Router>,
    runtime: runtime::Handle,
    /// Stops first, since it acts on what is below.
    watch: OnceLock<Watch>,
    dispatcher: JoinHandle<()>,
    // Last, so that data threads outlive whatever may still hand them something.
    threads: Vec<DataThread>,
}

impl RdmaTransport {
    /// Opens NICs and starts their threads. `wanted` names devices, as `name` (its first active
    /// port) or `name:port`; none means every active port of every device.
    ///
    /// # Errors
    ///
    /// A device or port that was asked for does not exist or cannot be used; without a wish, no
    /// port can be used at all.
    pub fn open(
        devices: &DeviceList,
        wanted: &[String],
        config: RdmaConfig,
        clock: Clock,
        identity: Identity,
        signaling: Arc<dyn Signaling>,
        runtime: runtime::Handle,
    ) -> Result<Self, TransportError> {
        let nics = super::open::open_nics(devices, wanted, &config)?;
        let (reporter, reports) = mpsc::channel(REPORTS_MAX);
        let threads_max = std::thread::available_parallelism().map_or(1, usize::from) / 2;
        let threads_count = nics.len().min(threads_max.max(1));
        let wakes: Vec<_> = (0..threads_count)
            .map(|_| Arc::new(Wake::default()))
            .collect();
        let inboxes: Vec<_> = (0..nics.len())
            .map(|nic| Arc::new(Inbox::new(Arc::clone(&wakes[nic % threads_count]))))
            .collect();
        let mut drivers: Vec<Vec<Driver>> = (0..threads_count).map(|_| Vec::new()).collect();
        for (index, nic) in nics.iter().enumerate() {
            drivers[index % threads_count].push(Driver::new(
                Arc::clone(nic),
                Arc::clone(&inboxes[index]),
                reporter.clone(),
                &config,
                clock.now(),
            ));
        }
        let threads = drivers
            .into_iter()
            .zip(wakes)
            .zip(&nics)
            .map(|((drivers, wake), nic)| DataThread::start(nic.name(), drivers, wake, clock))
            .collect::<Result<Vec<_>, _>>()?;
        let rails = RailConfig {
            // The endpoint's own time limit says more about what was waited for.
            connect_timeout: config.limits.connect + Duration::from_secs(1),
            ..RailConfig::default()
        };
        let keeper = Arc::new(RailKeeper::new(clock, nics.clone(), rails, rand::random()));
        let connector = Connector::new(
            config.clone(),
            clock,
            identity.clone(),
            nics.clone(),
            inboxes.clone(),
            Arc::clone(&keeper),
            signaling,
            runtime.clone(),
        );
        let router = Router::new(nics.clone(), inboxes, connector.clone(), keeper, clock);
        let router = Arc::new(router);
        let dispatcher = runtime.spawn(Arc::clone(&router).run(reports));
        Ok(Self {
            runtime,
            watch: OnceLock::new(),
            registrations: Arc::default(),
            config,
            clock,
            identity,
            nics,
            connector,
            router,
            dispatcher,
            threads,
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
        let watch = Watch::start(Parts {
            nics: self.nics.clone(),
            registrations: Arc::clone(&self.registrations),
            config: self.config.clone(),
            clock: self.clock,
            connector: self.connector.clone(),
            router: Arc::clone(&self.router),
            runtime: self.runtime.clone(),
            listener,
            events,
        })?;
        // A second thread would be stopped here.
        let _ = self.watch.set(watch);
        Ok(())
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

    /// Its NICs, in the order of the record's `devices[]`.
    pub fn nics(&self) -> &[Arc<Nic>] {
        &self.nics
    }

    /// Its endpoints.
    pub fn connector(&self) -> &Connector {
        &self.connector
    }

    /// A peer, with a rail from each NIC to each of its NICs.
    pub fn peer(&self, spec: PeerSpec) -> Arc<Peer> {
        let names: Vec<String> = self.nics.iter().map(|nic| nic.name().to_owned()).collect();
        let peer = Peer::new(spec, &names);
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
    pub fn register(
        &self,
        memory: &HostMemory,
        access: AccessFlags,
    ) -> Result<RegisteredMemory, TransportError> {
        let mr_bytes_max = self.config.mr_bytes_max;
        self.registrations
            .register(&self.nics, memory, access, mr_bytes_max)
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
        self.threads.clear();
        // With the data threads gone, its channel is closed and it ends by itself; a runtime that
        // is being shut down may never run it again.
        self.dispatcher.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::super::rig::{KIB, Move, peer_of, registered, rig};

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
        let (holders, reopening) = (memory.holders(), memory.clone());
        drop(memory);
        assert!(!holders.are_gone(), "a device that is opened again has it");
        drop(reopening);
        assert!(holders.are_gone());
    }
}
