//! The driver of the publisher: every change of the own record goes through here.
//!
//! Edits take effect at once for peers that ask; a task has them stored and told. Deliberately
//! not here: what is published, in which order and when it is tried again, and who may connect
//! when, which the [`Publisher`] machine decides.
//!
//! The record has one owner, the machine: it alone knows which generation was told to whom, which
//! decides whose connections are accepted. So its lease is kept here and not by
//! [`rerail_metadata::OwnedRecords`], which would be a second one.

mod place;
mod readers;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rerail_metadata::descriptor::{InstanceId, SegmentDescriptor, timestamp};
use rerail_transport::event::{Event, Events};
use rerail_transport::machine::Machine;
use rerail_transport::machine::ids::LocalNic;
use rerail_transport::machine::publisher::{
    Acceptance, Action, Edit, Input, LocalRecord, Publisher, PublisherConfig, StoreAnswer,
    StoreFailure, SubscriberId,
};
use rerail_transport::rdma::connector::Admission;
use rerail_transport::rdma::{Clock, Offer};
use rerail_transport::rpc::{Standing, Subscriber};
use tokio::sync::Notify;

use crate::Result;
pub(crate) use place::StorePlace;
use readers::Readers;

/// The own record and its way into the store and to readers.
#[derive(Clone)]
pub(crate) struct Publication {
    shared: Arc<Shared>,
}

struct Shared {
    clock: Clock,
    instance: InstanceId,
    publisher: Mutex<Publisher>,
    /// Something was handed to the publisher.
    touched: Notify,
    /// Nothing is published any more.
    over: AtomicBool,
    store: Option<StorePlace>,
    readers: Arc<Readers>,
    events: Events,
}

impl Publication {
    /// A publication of `record`; `store` is `None` where peers ask for it themselves.
    pub(crate) fn new(
        clock: Clock,
        instance: InstanceId,
        record: LocalRecord,
        store: Option<StorePlace>,
        events: Events,
    ) -> Self {
        let config = PublisherConfig {
            has_store: store.is_some(),
            ..PublisherConfig::default()
        };
        let publisher = Publisher::new(clock.now(), config, instance, record, rand::random());
        Self {
            shared: Arc::new(Shared {
                clock,
                instance,
                publisher: Mutex::new(publisher),
                touched: Notify::new(),
                over: AtomicBool::new(false),
                store,
                readers: Arc::default(),
                events,
            }),
        }
    }

    /// The own instance.
    pub(crate) fn instance(&self) -> InstanceId {
        self.shared.instance
    }

    /// Who is told what happens.
    pub(crate) fn events(&self) -> &Events {
        &self.shared.events
    }

    /// The current record, as a peer that asks is told.
    pub(crate) fn descriptor(&self) -> SegmentDescriptor {
        let mut descriptor = SegmentDescriptor::clone(self.publisher().descriptor());
        descriptor.timestamp = timestamp(std::time::SystemTime::now());
        descriptor
    }

    /// The same at the largest that it becomes with the memory that is registered now; with
    /// `more`, also with a NIC of that name.
    pub(crate) fn largest(&self, more: Option<&str>) -> SegmentDescriptor {
        largest(&self.publisher(), more)
    }

    /// Enters one more NIC if the record at its largest `fits` with it; no other change comes
    /// between. Errors are those of `fits`.
    pub(crate) fn add_nic(
        &self,
        local: LocalNic,
        name: &str,
        fits: impl FnOnce(&dyn Fn() -> SegmentDescriptor) -> Result<()>,
    ) -> Result<()> {
        let publisher = self.publisher();
        fits(&|| largest(&publisher, Some(name)))?;
        let name = name.to_owned();
        self.edit_locked(publisher, Edit::Nic { local, name });
        Ok(())
    }

    /// Changes the record. Returns the generation that has the change.
    pub(crate) fn edit(&self, edit: Edit) -> u64 {
        self.edit_locked(self.publisher(), edit)
    }

    fn edit_locked(&self, mut publisher: MutexGuard<'_, Publisher>, edit: Edit) -> u64 {
        let now = self.shared.clock.now();
        let before = publisher.generation();
        publisher.handle(now, Input::Edit(edit));
        let generation = publisher.generation();
        drop(publisher);
        self.shared.touched.notify_one();
        if generation != before {
            self.tell_event(&Event::Edited { generation });
        }
        generation
    }

    /// Generation of the current record.
    pub(crate) fn generation(&self) -> u64 {
        self.publisher().generation()
    }

    /// Waits until a generation is in the store, at most `limit`. True if it is, or if there is
    /// no store.
    pub(crate) async fn stored(&self, generation: u64, limit: Duration) -> bool {
        if self.shared.store.is_none() {
            return true;
        }
        let begin = tokio::time::Instant::now();
        while self.publisher().stored_generation() < generation {
            if begin.elapsed() > limit {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        true
    }

    /// Withdraws the record; [`run`](Self::run) ends once that is done.
    pub(crate) fn leave(&self) {
        self.input(Input::Leave);
    }

    /// Waits until the record is withdrawn, at most `limit`.
    pub(crate) async fn left(&self, limit: Duration) {
        let begin = tokio::time::Instant::now();
        while !self.shared.over.load(Ordering::Acquire) && begin.elapsed() < limit {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Has the record stored and told until it is withdrawn or superseded.
    pub(crate) async fn run(self) {
        let kept = self.clone();
        let keeping = tokio::spawn(async move {
            if let Some(place) = &kept.shared.store {
                let found_anew = || kept.input(Input::StoreReconnected);
                place.keep_lease(found_anew).await;
            }
        });
        self.work().await;
        keeping.abort();
        // Whoever is told by us has to look elsewhere now.
        self.shared.readers.clear();
        if let Some(place) = &self.shared.store {
            place.end_lease().await;
        }
        self.shared.over.store(true, Ordering::Release);
    }

    async fn work(&self) {
        let shared = &self.shared;
        loop {
            while let Some(action) = self.poll() {
                if !self.act(action) {
                    return;
                }
            }
            let due = self.publisher().next_timeout();
            let sleep = async {
                match due {
                    Some(due) => {
                        tokio::time::sleep_until(shared.clock.instant(due).into()).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = shared.touched.notified() => {}
                () = sleep => {
                    let now = shared.clock.now();
                    self.publisher().handle_timeout(now);
                }
            }
        }
    }

    /// Tells a reader the record for as long as it listens.
    pub(crate) async fn tell(&self, subscriber: Subscriber) {
        if self.shared.over.load(Ordering::Acquire) {
            return;
        }
        let (reader, peer) = (subscriber.reader(), subscriber.peer());
        let (id, telling) = self.shared.readers.add(reader);
        // Also when this is aborted.
        let _listening = Listening {
            publication: self,
            id,
        };
        self.input(Input::Subscribed { subscriber: id });
        let (mut acknowledgements, teller) = subscriber.split();
        let listen = async {
            loop {
                let Standing {
                    instance,
                    generation,
                } = acknowledgements.next().await?;
                // One that was meant for another life says nothing.
                if instance == self.shared.instance {
                    self.input(Input::Acknowledged {
                        subscriber: id,
                        generation,
                    });
                    let peer = reader.to_string();
                    self.tell_event(&Event::PeerTold { peer, generation });
                }
            }
        };
        let ended = tokio::select! {
            told = telling.run(self.shared.instance, teller) => told,
            heard = listen => heard,
        };
        match ended {
            Ok(()) => tracing::info!(%reader, %peer, "a subscriber was given up"),
            Err(cause) => tracing::debug!(%reader, %peer, %cause, "a subscription ended"),
        }
    }

    fn poll(&self) -> Option<Action> {
        self.publisher().poll()
    }

    /// False after the last action.
    fn act(&self, action: Action) -> bool {
        match action {
            Action::Store { ticket, request } => {
                let own = self.clone();
                // Beside this task: subscribers are told while the store takes its time.
                tokio::spawn(async move {
                    let answer = match &own.shared.store {
                        Some(place) => place.carry_out(request).await,
                        None => {
                            StoreAnswer::Failed(StoreFailure::Failed("there is no store".into()))
                        }
                    };
                    own.input(Input::Store { ticket, answer });
                });
            }
            Action::StoreTrouble {
                generation,
                attempt: 1,
                failure,
            } => tracing::error!(generation, %failure, "the own record is not stored yet"),
            Action::StoreTrouble {
                generation,
                attempt,
                failure,
            } => tracing::debug!(generation, attempt, %failure, "the own record is not stored yet"),
            Action::EditRefused(error) => tracing::error!(%error, "an edit of the own record"),
            Action::Superseded { by } => {
                tracing::error!(?by, "another instance has taken over the name");
                return false;
            }
            Action::Left => return false,
            Action::Stored { generation } => {
                tracing::debug!(generation, "own record stored");
                self.tell_event(&Event::Published { generation });
            }
            Action::Push {
                subscriber,
                generation,
                descriptor,
            } => self
                .shared
                .readers
                .push(subscriber, generation, &descriptor),
            Action::Heartbeat {
                subscriber,
                generation,
            } => self.shared.readers.heartbeat(subscriber, generation),
            Action::DropSubscriber { subscriber } => {
                self.shared.readers.remove(subscriber);
            }
        }
        true
    }

    fn tell_event(&self, event: &Event) {
        self.shared.events.tell(self.shared.clock.now(), event);
    }

    fn input(&self, input: Input) {
        let now = self.shared.clock.now();
        self.publisher().handle(now, input);
        self.shared.touched.notify_one();
    }

    fn publisher(&self) -> MutexGuard<'_, Publisher> {
        // The machine does not panic half-way; a poisoned one is whole.
        self.shared
            .publisher
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn largest(publisher: &Publisher, more: Option<&str>) -> SegmentDescriptor {
    let mut descriptor = publisher.largest(more);
    descriptor.timestamp = timestamp(std::time::SystemTime::now());
    descriptor
}

impl Admission for Publication {
    fn admit(&self, nic: LocalNic, offer: &Offer) -> Result<(), String> {
        let instance = offer.instance.as_deref().and_then(|text| text.parse().ok());
        let from = instance.and_then(|instance| self.shared.readers.of(instance));
        let name = offer.peer_path.as_str();
        match self.publisher().accepts(nic, from) {
            Acceptance::Yes => Ok(()),
            Acceptance::NotYet { generation } => Err(format!(
                "{name} is back, which generation {generation} of the record says: it is neither \
                 stored nor acknowledged yet, try again"
            )),
            Acceptance::Withdrawn => Err(format!("{name} is withdrawn")),
            Acceptance::Closed => Err(format!(
                "the owner of {name} leaves, or another has its name"
            )),
        }
    }
}

/// A subscription as the publisher knows it, while this lives.
struct Listening<'a> {
    publication: &'a Publication,
    id: SubscriberId,
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        self.publication.shared.readers.remove(self.id);
        self.publication.input(Input::Unsubscribed {
            subscriber: self.id,
        });
    }
}

#[cfg(test)]
mod tests {
    use rerail_metadata::descriptor::Protocol;
    use rerail_metadata::{KeySpace, MemoryStore, descriptor::RpcMeta};
    use rerail_topology::gid::{GidClass, Selection};
    use rerail_transport::machine::observer::PortFacts;
    use rerail_transport::machine::publisher::PublishOrder;
    use rerail_verbs::{Gid, GidType, LinkLayer, Mtu};

    use super::*;

    const NIC: LocalNic = LocalNic(0);

    fn port(up: bool) -> Edit {
        let gid: Gid = "::ffff:10.0.0.1".parse().expect("a GID literal");
        Edit::Port {
            local: NIC,
            facts: PortFacts {
                up,
                link_layer: LinkLayer::Ethernet,
                lid: 0,
                gid: Some(Selection {
                    index: 3,
                    gid,
                    gid_type: GidType::RoceV2,
                    netdev: "ens1".into(),
                    class: GidClass::NetdevGlobal,
                }),
                pkey: Some(0xffff),
                mtu: Some(Mtu::Mtu4096),
                speed_mbps: 100_000,
            },
            gids: vec![gid],
        }
    }

    fn publication(store: &MemoryStore) -> Publication {
        let base = SegmentDescriptor::new("a", Protocol::rdma());
        let nics = ["sim0".to_owned()];
        let mut record = LocalRecord::new(base, Vec::new(), nics, PublishOrder::Fixed);
        record.apply(port(true)).expect("there is such a NIC");
        let place = StorePlace::new(
            Arc::new(store.clone()),
            KeySpace::default(),
            "a".into(),
            RpcMeta::new("127.0.0.1", 15_000),
        );
        let clock = Clock::start();
        let instance = InstanceId([3; 16]);
        let publication = Publication::new(clock, instance, record, Some(place), Events::default());
        tokio::spawn(publication.clone().run());
        publication
    }

    fn offer(from: Option<InstanceId>) -> Offer {
        Offer {
            peer_path: "a@sim0".into(),
            instance: from.map(|instance| instance.to_string()),
            ..Offer::default()
        }
    }

    #[tokio::test]
    async fn good_news_are_used_by_whom_they_were_told_and_by_all_once_stored() {
        const SOON: Duration = Duration::from_secs(20);
        let store = MemoryStore::new("s");
        let own = publication(&store);
        assert!(own.stored(1, SOON).await);
        let (reader, stranger) = (InstanceId([1; 16]), InstanceId([2; 16]));
        let (id, _telling) = own.shared.readers.add(reader);
        own.input(Input::Subscribed { subscriber: id });
        for from in [None, Some(reader), Some(stranger)] {
            assert_eq!(own.admit(NIC, &offer(from)), Ok(()));
        }
        store.faults().outage(true);
        own.edit(port(false));
        for from in [None, Some(reader)] {
            let reason = own.admit(NIC, &offer(from)).expect_err("withdrawn");
            assert_eq!(reason, "a@sim0 is withdrawn");
        }
        let generation = own.edit(port(true));
        let reason = own.admit(NIC, &offer(Some(reader))).expect_err("not yet");
        assert!(reason.contains("try again"), "{reason}");
        // Only one that says what was sent counts.
        own.input(Input::Acknowledged {
            subscriber: id,
            generation,
        });
        assert_eq!(own.admit(NIC, &offer(Some(reader))), Ok(()));
        for from in [None, Some(stranger)] {
            own.admit(NIC, &offer(from)).expect_err("not stored yet");
        }
        store.faults().outage(false);
        assert!(own.stored(generation, SOON).await);
        for from in [None, Some(stranger)] {
            assert_eq!(own.admit(NIC, &offer(from)), Ok(()));
        }
        own.leave();
        own.left(SOON).await;
        own.admit(NIC, &offer(Some(reader))).expect_err("it leaves");
    }
}
