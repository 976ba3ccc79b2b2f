//! From NICs and rails to the own record and the log of events.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};

use arc_swap::ArcSwap;
use rerail_topology::TopologyOptions;
use rerail_transport::event::{Event, Events};
use rerail_transport::machine::ids::LocalNic;
use rerail_transport::machine::observer::PortFacts;
use rerail_transport::machine::peers::Trouble;
use rerail_transport::machine::publisher::Edit;
use rerail_transport::machine::rail::RailState;
use rerail_transport::rdma::{
    Clock, FenceChange, FenceStep, NicListener, Nics, RailChange, RdmaEvents, RdmaTransport,
};
use rerail_verbs::Gid;

use crate::directory::Directory;
use crate::memory::Registry;
use crate::peers::PeerView;
use crate::publication::Publication;
use crate::room;
use crate::topology::Places;

/// Enters into the own record what is true of the own NICs.
pub(crate) struct Recorder {
    pub(crate) publication: Publication,
    pub(crate) directory: Directory,
    /// The own segment.
    pub(crate) name: String,
    pub(crate) registry: Arc<RwLock<Registry>>,
    pub(crate) places: Arc<ArcSwap<Places>>,
    pub(crate) topology: TopologyOptions,
}

impl Recorder {
    fn registry(&self) -> RwLockReadGuard<'_, Registry> {
        // Registrations are entered whole, so a poisoned lock guards a whole registry.
        self.registry.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NicListener for Recorder {
    fn port(&self, local: LocalNic, facts: PortFacts, gids: Vec<Gid>) {
        self.publication.edit(Edit::Port { local, facts, gids });
    }

    fn rekeyed(&self, local: LocalNic) {
        let registry = self.registry();
        let keys = registry.regions().flat_map(|region| region.keys_of(local));
        let keys = keys.collect();
        drop(registry);
        self.publication.edit(Edit::Rekey { local, keys });
    }

    fn adding(&self, local: LocalNic, name: &str) {
        let name = name.to_owned();
        self.publication.edit(Edit::Nic { local, name });
    }

    fn check_room(&self, name: &str) -> Result<(), String> {
        let room = room::check(&self.directory, &self.publication, &self.name, Some(name));
        room.map_err(|error| error.to_string())
    }

    fn added(&self, nics: &Nics) {
        match Places::read(&self.topology, nics) {
            Ok(places) => self.places.store(Arc::new(places)),
            Err(error) => {
                tracing::error!(%error, "peers are not told what the new NIC is near to");
                return;
            }
        }
        let places = self.places.load();
        // Memory that is entered after this is asked about the new places then.
        for region in self.registry().regions() {
            region.set_near(&places);
        }
        self.publication.edit(Edit::Matrix(places.matrix()));
    }
}

/// Hears of the rails.
pub(crate) struct RailListener {
    pub(crate) rdma: Weak<RdmaTransport>,
    pub(crate) publication: Publication,
    pub(crate) peers: PeerView,
    pub(crate) clock: Clock,
    pub(crate) events: Events,
}

impl RdmaEvents for RailListener {
    fn recheck_local(&self, local: LocalNic) {
        if let Some(rdma) = self.rdma.upgrade() {
            rdma.recheck(Some(local));
        }
    }

    fn refresh_peer(&self, segment: &str) {
        self.peers.trouble(segment, Trouble::Connection);
    }

    fn fence(&self, change: &FenceChange) {
        let (local, peer) = (change.local.clone(), change.peer.clone());
        let event = match &change.step {
            FenceStep::Started { cause } => {
                let cause = cause.to_string();
                Event::FenceStarted { local, peer, cause }
            }
            &FenceStep::Rerouted { bytes } => Event::Rerouted { local, peer, bytes },
            &FenceStep::Ended { complete } => Event::FenceEnded {
                local,
                peer,
                complete,
            },
        };
        self.events.tell(self.clock.now(), &event);
    }

    fn rail_state(&self, change: &RailChange) {
        if change.to == RailState::Up
            && let Some(rdma) = self.rdma.upgrade()
            && let Some(nic) = rdma.nics().iter().find(|nic| nic.name() == change.local)
        {
            // Work goes through it again: it is not "recovering" any more.
            self.publication.edit(Edit::Proved { local: nic.index() });
        }
        let event = Event::Rail {
            local: change.local.clone(),
            peer: change.peer.clone(),
            from: name(change.from),
            to: name(change.to),
            cause: change.cause.to_string(),
            first_cause: change.first_cause.as_ref().map(ToString::to_string),
        };
        self.events.tell(self.clock.now(), &event);
    }
}

fn name(state: RailState) -> &'static str {
    match state {
        RailState::Up => "up",
        RailState::Suspect => "suspect",
        RailState::Down => "down",
        RailState::HalfOpen => "half-open",
    }
}
