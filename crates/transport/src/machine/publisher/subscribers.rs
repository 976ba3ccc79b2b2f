//! Who is told directly, and what each has acknowledged.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rerail_metadata::descriptor::SegmentDescriptor;

use super::PublisherConfig;
use super::io::{Action, SubscriberId};
use crate::machine::Time;

/// Subscribers of one engine at most; a further one is told to go, and reads the store.
pub const SUBSCRIBERS_MAX: usize = 4_096;

#[derive(Clone, Debug)]
struct Subscriber {
    acknowledged: u64,
    /// Latest generation that was sent.
    sent: u64,
    /// Records that were sent and not acknowledged.
    in_flight: u32,
    /// When the connection is given up if nothing is acknowledged.
    give_up_at: Option<Time>,
    heartbeat_at: Time,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Subscribers {
    all: BTreeMap<SubscriberId, Subscriber>,
}

impl Subscribers {
    pub(super) fn acknowledged(&self, subscriber: SubscriberId) -> Option<u64> {
        self.all
            .get(&subscriber)
            .map(|subscriber| subscriber.acknowledged)
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn add(&mut self, now: Time, id: SubscriberId, out: &mut VecDeque<Action>) {
        if self.all.len() >= SUBSCRIBERS_MAX {
            out.push_back(Action::DropSubscriber { subscriber: id });
            return;
        }
        self.all.entry(id).or_insert(Subscriber {
            acknowledged: 0,
            sent: 0,
            in_flight: 0,
            give_up_at: None,
            heartbeat_at: now,
        });
    }

    pub(super) fn remove(&mut self, id: SubscriberId) {
        self.all.remove(&id);
    }

    /// Takes in an acknowledgement. One of a generation that was never sent is a peer's mistake and
    /// counts as that of the last that was.
    pub(super) fn acknowledge(
        &mut self,
        now: Time,
        id: SubscriberId,
        generation: u64,
        cfg: &PublisherConfig,
    ) {
        if let Some(subscriber) = self.all.get_mut(&id) {
            let generation = generation.min(subscriber.sent);
            subscriber.acknowledged = subscriber.acknowledged.max(generation);
            subscriber.in_flight = subscriber.in_flight.saturating_sub(1);
            if generation == subscriber.sent {
                subscriber.in_flight = 0;
            }
            let waits = subscriber.in_flight > 0;
            subscriber.give_up_at = waits.then(|| now + cfg.acknowledge_timeout);
        }
    }

    /// Sends the record to everybody who has room for it and does not have it yet.
    pub(super) fn push(
        &mut self,
        now: Time,
        generation: u64,
        descriptor: &Arc<SegmentDescriptor>,
        cfg: &PublisherConfig,
        out: &mut VecDeque<Action>,
    ) {
        for (id, subscriber) in &mut self.all {
            if subscriber.sent < generation && subscriber.in_flight < cfg.pushes_in_flight_max {
                subscriber.sent = generation;
                subscriber.in_flight += 1;
                subscriber
                    .give_up_at
                    .get_or_insert(now + cfg.acknowledge_timeout);
                out.push_back(Action::Push {
                    subscriber: *id,
                    generation,
                    descriptor: Arc::clone(descriptor),
                });
            }
        }
    }

    pub(super) fn handle_timeout(
        &mut self,
        now: Time,
        generation: u64,
        cfg: &PublisherConfig,
        out: &mut VecDeque<Action>,
    ) {
        self.all.retain(|id, subscriber| {
            if subscriber.give_up_at.is_some_and(|at| at <= now) {
                out.push_back(Action::DropSubscriber { subscriber: *id });
                return false;
            }
            if subscriber.heartbeat_at <= now {
                subscriber.heartbeat_at = now + cfg.heartbeat;
                out.push_back(Action::Heartbeat {
                    subscriber: *id,
                    generation,
                });
            }
            true
        });
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        let each = self.all.values().map(|subscriber| {
            let heartbeat = subscriber.heartbeat_at;
            subscriber
                .give_up_at
                .map_or(heartbeat, |at| at.min(heartbeat))
        });
        each.min()
    }
}
