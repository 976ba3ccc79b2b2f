//! From NICs and rails to the own record and the log of events.

use std::sync::atomic::{AtomicUsize, Ordering};
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
    /// Reading where NICs are asks every device of the machine, one of which may hang.
    pub(crate) rereads: OneAtATime,
}

impl Recorder {
    /// By one thread at a time, so that the latest are told last.
    fn reread_places(&self, nics: &Nics) {
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

    fn adding(&self, local: LocalNic, name: &str) -> Result<(), String> {
        let fits = |largest: &dyn Fn() -> _| room::fits(&self.directory, largest, &self.name);
        let added = self.publication.add_nic(local, name, fits);
        added.map_err(|error| error.to_string())
    }

    fn check_room(&self, name: &str) -> Result<(), String> {
        let room = room::check(&self.directory, &self.publication, &self.name, Some(name));
        room.map_err(|error| error.to_string())
    }

    fn added(&self, nics: &Nics) {
        self.rereads.run(|| self.reread_places(nics));
    }
}

/// Sees to it that something that may take its time is done by one thread at a time, and once more
/// for all who want it meanwhile, none of whom waits.
#[derive(Default)]
pub(crate) struct OneAtATime {
    /// How often it was wanted since nobody did it.
    wanted: AtomicUsize,
}

impl OneAtATime {
    /// Has it done after this call has begun, by this thread or by the one that is at it.
    pub(crate) fn run(&self, mut work: impl FnMut()) {
        if self.wanted.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let turn = Turn(&self.wanted);
        loop {
            let seen = self.wanted.load(Ordering::Acquire);
            work();
            let over = (Ordering::AcqRel, Ordering::Acquire);
            let ended = self.wanted.compare_exchange(seen, 0, over.0, over.1);
            if ended.is_ok() {
                break;
            }
        }
        std::mem::forget(turn);
    }
}

/// Lets another thread have its turn though this one panics.
struct Turn<'a>(&'a AtomicUsize);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn what_is_wanted_while_it_is_done_is_done_once_more_by_whoever_does_it() {
        let (turns, mut done) = (OneAtATime::default(), 0);
        let (begun, begins) = mpsc::channel();
        let (go_on, goes_on) = mpsc::channel();
        std::thread::scope(|scope| {
            let (turns, done) = (&turns, &mut done);
            let first = scope.spawn(move || {
                turns.run(|| {
                    *done += 1;
                    begun.send(()).expect("somebody waits");
                    goes_on.recv().expect("it goes on");
                });
            });
            begins.recv().expect("it begins");
            for _ in 0..3 {
                turns.run(|| panic!("another does it"));
            }
            go_on.send(()).expect("it waits");
            begins.recv().expect("once more");
            go_on.send(()).expect("it waits");
            first.join().expect("no panic");
        });
        assert_eq!(done, 2);
    }

    #[test]
    fn one_that_panics_leaves_the_turn_to_others() {
        let turns = OneAtATime::default();
        let panics = || turns.run(|| panic!("on purpose"));
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics));
        assert!(caught.is_err());
        let mut done = false;
        turns.run(|| done = true);
        assert!(done);
    }
}
