//! What a node's engine part tells its surroundings: messages for peers, news of its ports and
//! rails, transfers that have finished. It waits here until the world carries it on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rerail_metadata::descriptor::InstanceId;
use rerail_verbs::Gid;
use tokio::sync::oneshot;

use super::ledger::{Life, TransferId};
use super::node::subscriber;
use crate::machine::ids::LocalNic;
use crate::machine::observer;
use crate::machine::peers;
use crate::machine::publisher::{self, Acceptance, Publisher};
use crate::rdma::connector::Admission;
use crate::rdma::events::{RailChange, RdmaEvents};
use crate::rdma::nics::Nics;
use crate::rdma::watch::NicListener;
use crate::rdma::{Boxed, Offer, OnFinished, SignalError, Signaling, Transfer};

/// Queue pairs of a NIC that are remembered, to break one of them.
const REMEMBERED: usize = 16;

/// The answer to a Connection message, as it arrives.
pub(super) type Answer = Result<Offer, SignalError>;

/// What goes over the wire that is not RDMA. Messages to a process that is gone are answered by
/// its host, which knows only that nobody is there.
#[derive(Clone, Debug)]
pub(super) enum Message {
    /// A Connection message. The number names the exchange in the whole world.
    Ask(u64, Box<Offer>),
    /// Its answer.
    Reply(u64, Box<Answer>),
    ToPublisher(publisher::Input),
    ToPeers(peers::Input),
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What waits to be carried on.
pub(super) enum Outgoing {
    /// A Connection message to that server.
    Ask(String, Offer, oneshot::Sender<Answer>),
    /// The answer to exchange of that number, which came from there.
    Reply(usize, u64, Answer),
    Port(LocalNic, observer::PortFacts, Vec<Gid>),
    /// A NIC of this name is about to be taken in.
    Adding(LocalNic, String),
    /// These are the own NICs now.
    Added(Vec<String>),
    /// Memory has new keys on a NIC.
    Rekeyed(LocalNic),
    Rail(Box<RailChange>),
    Recheck(LocalNic),
    Refresh(String),
    Finished(TransferId),
}

/// Everything of one node that waits.
#[derive(Clone, Default)]
pub(super) struct Outbox(Arc<Mutex<Waiting>>);

#[derive(Default)]
struct Waiting {
    all: VecDeque<Outgoing>,
    /// The latest queue pairs by NIC path, as messages named them.
    pairs: BTreeMap<String, VecDeque<u32>>,
}

impl Outbox {
    pub(super) fn put(&self, outgoing: Outgoing) {
        lock(&self.0).all.push_back(outgoing);
    }

    pub(super) fn take(&self) -> VecDeque<Outgoing> {
        std::mem::take(&mut lock(&self.0).all)
    }

    /// What waits to be carried on.
    pub(super) fn waiting(&self) -> usize {
        lock(&self.0).all.len()
    }

    /// Queue pairs that were made on a NIC of this node lately.
    pub(super) fn pairs(&self, path: &str) -> Vec<u32> {
        let waiting = lock(&self.0);
        waiting
            .pairs
            .get(path)
            .into_iter()
            .flatten()
            .copied()
            .collect()
    }

    /// Remembers what a message of this node says about its own queue pairs.
    pub(super) fn remember(&self, offer: &Offer) {
        let mut waiting = lock(&self.0);
        let here = waiting.pairs.entry(offer.local_path.clone()).or_default();
        here.extend(&offer.qp_nums);
        while here.len() > REMEMBERED {
            here.pop_front();
        }
    }
}

impl Signaling for Outbox {
    fn exchange(&self, server: &str, offer: Offer) -> Boxed<Answer> {
        self.remember(&offer);
        let (answer, answered) = oneshot::channel();
        self.put(Outgoing::Ask(server.to_owned(), offer, answer));
        Box::pin(async move {
            let lost = || Err(SignalError::NoAnswer("the exchange was given up".into()));
            answered.await.unwrap_or_else(|_| lost())
        })
    }
}

impl NicListener for Outbox {
    fn port(&self, local: LocalNic, facts: observer::PortFacts, gids: Vec<Gid>) {
        self.put(Outgoing::Port(local, facts, gids));
    }

    /// Of NICs that are taken in. The world opens devices again itself.
    fn rekeyed(&self, local: LocalNic) {
        self.put(Outgoing::Rekeyed(local));
    }

    fn adding(&self, local: LocalNic, name: &str) -> Result<(), String> {
        self.put(Outgoing::Adding(local, name.to_owned()));
        Ok(())
    }

    fn added(&self, nics: &Nics) {
        self.put(Outgoing::Added(nics.names()));
    }
}

impl RdmaEvents for Outbox {
    fn recheck_local(&self, local: LocalNic) {
        self.put(Outgoing::Recheck(local));
    }

    fn refresh_peer(&self, segment: &str) {
        self.put(Outgoing::Refresh(segment.to_owned()));
    }

    fn rail_state(&self, change: &RailChange) {
        self.put(Outgoing::Rail(Box::new(change.clone())));
    }
}

/// Tells that one transfer has finished.
pub(super) struct Finish(pub(super) TransferId, pub(super) Outbox);

impl OnFinished for Finish {
    fn finished(&self, _: &Transfer) {
        self.1.put(Outgoing::Finished(self.0));
    }
}

/// Who may connect: whom the publisher says has heard of it, as `engine::publication` asks it.
pub(super) struct Admits(pub(super) Arc<Mutex<Publisher>>);

impl Admission for Admits {
    fn admit(&self, nic: LocalNic, offer: &Offer) -> Result<(), String> {
        let instance = offer.instance.as_deref().and_then(|text| text.parse().ok());
        let from = instance.map(|instance| subscriber(life_of_instance(instance)));
        match lock(&self.0).accepts(nic, from) {
            Acceptance::Yes => Ok(()),
            other => Err(format!("refused: {other:?}")),
        }
    }
}

/// Instances are numbered by host and life; those of others have a mark of their own.
pub(super) fn instance_of((host, life): Life) -> InstanceId {
    let mut bytes = [0; 16];
    bytes[0] = life as u8 + 1;
    bytes[1] = host as u8;
    InstanceId(bytes)
}

pub(super) fn life_of_instance(InstanceId(bytes): InstanceId) -> Life {
    let life = match bytes[2] {
        0 => u32::from(bytes[0].saturating_sub(1)),
        _ => u32::MAX,
    };
    (usize::from(bytes[1]), life)
}
