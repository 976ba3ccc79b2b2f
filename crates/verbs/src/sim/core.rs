//! The fabric itself: one state, one clock, one source of chance.
//!
//! Deliberately not here: threads, locks, the real clock. [`Fabric`](super::Fabric) puts this
//! behind a mutex and moves its time on.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::agenda::{Agenda, Due};
use super::completion_queue::Queue;
use super::link::Partition;
use super::memory::{Pd, Region};
use super::node::{Context, Nic, Node, PortId, Process};
use super::options::FabricOptions;
use super::packet::InFlight;
use super::queue_pair::QueuePair;
use super::rng::Rng;
use super::rule::Rules;
use super::slab::Slab;
use super::trace::Trace;
use crate::Gid;

/// All there is, owned by one thread at a time. `Core`'s methods live in the files of what they
/// are about.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) options: FabricOptions,
    /// Since the beginning.
    pub(super) now: Duration,
    pub(super) rng: Rng,
    pub(super) trace: Trace,
    pub(super) agenda: Agenda,
    pub(super) nodes: Vec<Node>,
    pub(super) processes: Vec<Process>,
    pub(super) nics: Vec<Nic>,
    pub(super) contexts: Slab<Context>,
    pub(super) pds: Slab<Pd>,
    pub(super) regions: Slab<Region>,
    pub(super) queues: Slab<Queue>,
    pub(super) pairs: Slab<QueuePair>,
    pub(super) packets: BTreeMap<u64, InFlight>,
    pub(super) next_packet: u64,
    /// Who has an address, in the order in which it was claimed.
    pub(super) directory: BTreeMap<Gid, Vec<PortId>>,
    /// Neighbours that a port has resolved.
    pub(super) neighbours: BTreeSet<(PortId, Gid)>,
    pub(super) partitions: Vec<Partition>,
    pub(super) next_partition: u64,
    pub(super) rules: Rules,
}

/// How much there is of everything: for tests that nothing leaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct FabricStats {
    /// Open contexts.
    pub contexts: usize,
    /// Protection domains.
    pub pds: usize,
    /// Registered regions.
    pub regions: usize,
    /// Completion queues.
    pub completion_queues: usize,
    /// Queue pairs.
    pub queue_pairs: usize,
    /// Work requests that were posted and have not ended.
    pub work_requests: usize,
    /// Places taken in send queues: by those, and by work whose completion was not polled yet where
    /// that counts.
    pub send_places: usize,
    /// Completions that wait to be polled.
    pub completions: usize,
    /// Events that wait to be taken.
    pub events: usize,
    /// Packets that were handed to a port and have not arrived.
    pub packets: usize,
    /// Things that are due.
    pub due: usize,
    /// Addresses that some port has.
    pub addresses: usize,
    /// Neighbours that are resolved.
    pub neighbours: usize,
    /// Fault rules and partitions in force.
    pub rules: usize,
}

impl Core {
    pub(super) fn new(options: FabricOptions) -> Self {
        Self {
            now: Duration::ZERO,
            rng: Rng::new(options.seed),
            trace: Trace::new(options.trace_lines_max),
            agenda: Agenda::default(),
            nodes: Vec::new(),
            processes: Vec::new(),
            nics: Vec::new(),
            contexts: Slab::default(),
            pds: Slab::default(),
            regions: Slab::default(),
            queues: Slab::default(),
            pairs: Slab::default(),
            packets: BTreeMap::new(),
            next_packet: 0,
            directory: BTreeMap::new(),
            neighbours: BTreeSet::new(),
            partitions: Vec::new(),
            next_partition: 0,
            rules: Rules::default(),
            options,
        }
    }

    /// When something will happen by itself.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.agenda.next_deadline()
    }

    /// Does the next thing that is due by `limit`, at its own time. False when there is none.
    pub(super) fn step_until(&mut self, limit: Duration) -> bool {
        let Some((at, due)) = self.agenda.pop_until(limit) else {
            return false;
        };
        self.now = self.now.max(at);
        match due {
            Due::Arrive(packet) => self.arrive(packet),
            Due::Timer(pair) => self.timer(pair),
            Due::Flush(pair) => self.flush(pair),
            Due::Complete(queue, entry) => self.push_completion(queue, entry),
            Due::Event(context, event) => self.deliver_event(context, event),
        }
        true
    }

    /// Does everything that is due by `limit`, in order, and leaves the clock there.
    pub(super) fn advance_to(&mut self, limit: Duration) {
        while self.step_until(limit) {}
        self.now = self.now.max(limit);
    }

    pub(super) fn stats(&self) -> FabricStats {
        FabricStats {
            contexts: self.contexts.len(),
            pds: self.pds.len(),
            regions: self.regions.len(),
            completion_queues: self.queues.len(),
            queue_pairs: self.pairs.len(),
            work_requests: self
                .pairs
                .iter()
                .map(|(_, pair)| pair.send.queue.len())
                .sum(),
            send_places: self
                .pairs
                .iter()
                .map(|(_, pair)| pair.send.occupied as usize)
                .sum(),
            completions: self
                .queues
                .iter()
                .map(|(_, queue)| queue.entries.len())
                .sum(),
            events: self
                .contexts
                .iter()
                .map(|(_, context)| context.events.waiting())
                .sum(),
            packets: self.packets.len(),
            due: self.agenda.len(),
            addresses: self.directory.len(),
            neighbours: self.neighbours.len(),
            rules: self.rules.len() + self.partitions.len(),
        }
    }
}
