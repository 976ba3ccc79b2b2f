//! The fence. Its invariant, which everything here is for:
//!
//! **When a transfer is reported finished (success, failure, deadline or cancel), no work of it can
//! still touch memory at either end.**
//!
//! A reliable connection does not give that by itself. A WRITE that was posted before its queue
//! pair went to ERR and was drained still landed half a second and more later, on a soft-RoCE
//! device with a delayed wire, in memory that its owner had reused. So abandoned work is fenced at
//! both ends:
//!
//! * the **local end** is fenced when its queue pairs are in ERR *and then* drained, or are
//!   destroyed. Posting the work again, and reporting an abandoned READ, need this much;
//! * the **remote end** is fenced when the peer has confirmed its end in ERR, or, if it does not
//!   answer, [`FenceConfig::packet_lifetime`] after the local fence. Reporting an abandoned WRITE
//!   needs both.
//!
//! The close goes to the peer together with ERR, so that the usual cost is one round trip. A
//! transfer that was never interrupted pays nothing.
//!
//! # When the hardware does not obey
//!
//! A local end that is not fenced within [`FenceConfig::fence_max`] has its context closed. If
//! that hangs as well, the transfer ends as [`Verdict::Unfenced`]: its memory stays pinned and
//! counted ([`Fences::quarantined_bytes`]), and unregistering it says [`StillOwnedByHardware`]
//! until the context is gone after all and the packets' lifetime over.
//!
//! Deliberately not here: verbs, the messages to peers, and which work was posted where (transfer
//! accounting says what is abandoned).

mod endpoint;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

pub use endpoint::Abandoned;

use self::endpoint::{EndpointFence, Local};
use super::ids::{EndpointId, LocalNic, PeerId, RegionId, TransferId};
use super::time::earliest;
use super::{Machine, Time};

/// Times of fences.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FenceConfig {
    /// How long a packet can be on its way (`packet_lifetime_ms`, 2 000).
    pub packet_lifetime: Duration,
    /// How long a local fence, and then the closing of its context, may take (`fence_max_ms`,
    /// 1 000).
    pub fence_max: Duration,
}

impl Default for FenceConfig {
    fn default() -> Self {
        Self {
            packet_lifetime: Duration::from_millis(2_000),
            fence_max: Duration::from_millis(1_000),
        }
    }
}

impl FenceConfig {
    /// When the unfinished work of a transfer is cut off, so that its fence ends by `deadline`
    /// even if the peer does not answer. A transfer shorter than twice that time is cut off after
    /// half of it, and may be reported late: being late is better than being wrong.
    pub fn cut_off_at(&self, submitted: Time, deadline: Time) -> Time {
        let span = deadline.saturating_since(submitted);
        deadline - self.packet_lifetime.min(span / 2)
    }
}

/// What the fences are told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// An endpoint exists. Told before anything is posted on it, and before the peer can use it.
    Made {
        /// The endpoint.
        endpoint: EndpointId,
        /// The local NIC.
        local: LocalNic,
        /// The peer.
        peer: PeerId,
    },
    /// An endpoint is to be closed, with or without abandoned work on it. Nothing is posted on it
    /// from now on.
    Close {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// Work is given up: it was posted on the endpoint and has not completed with success. Closes
    /// the endpoint.
    Abandon {
        /// The endpoint.
        endpoint: EndpointId,
        /// The transfer.
        transfer: TransferId,
        /// The local memory.
        region: RegionId,
        /// How much of what.
        work: Abandoned,
    },
    /// All queue pairs of the endpoint are in ERR.
    InError {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// All work that was posted on the endpoint has completed. Counts only after `InError`.
    Drained {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// The endpoint's queue pairs are destroyed.
    Destroyed {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// The peer has confirmed, in answer to a close, that its end is in ERR.
    PeerConfirmed {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// A context is closed: all its queue pairs are gone.
    ContextClosed {
        /// The local NIC.
        local: LocalNic,
    },
    /// The transfer is over but for its fences: may it be reported?
    Finish {
        /// The transfer.
        transfer: TransferId,
    },
    /// Nothing of the peer may touch our memory any more (`revoke`).
    Revoke {
        /// The peer.
        peer: PeerId,
    },
}

/// How a transfer's fences ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Verdict {
    /// The invariant holds.
    Fenced,
    /// The hardware does not answer: the transfer's memory is in quarantine.
    Unfenced,
}

/// What the fences want done, in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Move the endpoint's queue pairs to ERR, drain and destroy them; tell each step.
    ToError {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// Ask the peer to move its end to ERR; tell `PeerConfirmed` if it answers that it did.
    ClosePeer {
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// What the transfer has abandoned on this endpoint may be posted elsewhere.
    MayRepost {
        /// The transfer.
        transfer: TransferId,
        /// The endpoint.
        endpoint: EndpointId,
    },
    /// The transfer may be reported.
    MayReport {
        /// The transfer.
        transfer: TransferId,
        /// Whether it is fenced.
        verdict: Verdict,
    },
    /// A queue pair does not obey: close its whole context, and tell `ContextClosed`.
    CloseContext {
        /// The local NIC.
        local: LocalNic,
    },
    /// [`Input::Revoke`] has ended.
    Revoked {
        /// The peer.
        peer: PeerId,
        /// Whether all its queue pairs are fenced.
        verdict: Verdict,
    },
}

/// Memory that cannot be unregistered yet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[error(
    "{bytes} bytes of abandoned work may still touch the region: wait for {endpoint} to be fenced"
)]
pub struct StillOwnedByHardware {
    /// Bytes of work that is not fenced.
    pub bytes: u64,
    /// An endpoint on which some of it was posted.
    pub endpoint: EndpointId,
}

/// All fences of an engine. See the [module](self).
#[derive(Clone, Debug)]
pub struct Fences {
    config: FenceConfig,
    endpoints: BTreeMap<EndpointId, EndpointFence>,
    /// Latest generation of each slab position whose fence is complete and forgotten.
    retired: BTreeMap<u32, u32>,
    /// Transfers that wait to be reported, with the endpoints that they wait for.
    finishing: BTreeMap<TransferId, BTreeSet<EndpointId>>,
    revoking: BTreeSet<PeerId>,
    out: VecDeque<Action>,
}

impl Fences {
    /// Nothing to fence yet.
    pub fn new(config: FenceConfig) -> Self {
        Self {
            config,
            endpoints: BTreeMap::new(),
            retired: BTreeMap::new(),
            finishing: BTreeMap::new(),
            revoking: BTreeSet::new(),
            out: VecDeque::new(),
        }
    }

    /// Bytes of abandoned work on endpoints that the hardware has not let go of.
    pub fn quarantined_bytes(&self) -> u64 {
        let each = self
            .endpoints
            .values()
            .map(EndpointFence::quarantined_bytes);
        each.fold(0, u64::saturating_add)
    }

    /// Whether connections of the peer must be refused because it is being revoked.
    pub fn is_revoking(&self, peer: PeerId) -> bool {
        self.revoking.contains(&peer)
    }

    /// Whether a region can be unregistered as far as abandoned work goes.
    ///
    /// # Errors
    ///
    /// [`StillOwnedByHardware`] while some work on it is not fenced.
    pub fn may_unregister(&self, region: RegionId) -> Result<(), StillOwnedByHardware> {
        let mut owned: Option<StillOwnedByHardware> = None;
        for (endpoint, fence) in &self.endpoints {
            for ((_, of), work) in &fence.work {
                if *of == region && !fence.covers(*work) {
                    let owned = owned.get_or_insert(StillOwnedByHardware {
                        bytes: 0,
                        endpoint: *endpoint,
                    });
                    owned.bytes = owned.bytes.saturating_add(work.bytes());
                }
            }
        }
        owned.map_or(Ok(()), Err)
    }

    /// Endpoints that are known: live, or not fenced at both ends.
    pub fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// Whether no endpoint is known.
    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }

    fn close(&mut self, now: Time, endpoint: EndpointId) {
        let Some(fence) = self.endpoints.get_mut(&endpoint) else {
            return;
        };
        if fence.local != Local::Live {
            return;
        }
        fence.local = Local::Fencing {
            until: now + self.config.fence_max,
        };
        // Both at once: the peer's round trip runs while we drain.
        self.out.push_back(Action::ToError { endpoint });
        self.out.push_back(Action::ClosePeer { endpoint });
    }

    fn abandon(
        &mut self,
        now: Time,
        endpoint: EndpointId,
        transfer: TransferId,
        region: RegionId,
        work: Abandoned,
    ) {
        let retired = self.is_retired(endpoint);
        match self.endpoints.get_mut(&endpoint) {
            Some(fence) => {
                fence.work.entry((transfer, region)).or_default().add(work);
                let fenced = fence.is_locally_fenced();
                if let Some(waits_for) = self.finishing.get_mut(&transfer) {
                    waits_for.insert(endpoint);
                }
                self.close(now, endpoint);
                if fenced {
                    self.out.push_back(Action::MayRepost { transfer, endpoint });
                }
                self.settle(endpoint);
            }
            None if retired => {
                self.out.push_back(Action::MayRepost { transfer, endpoint });
            }
            None => {
                // Nobody told of it, so nobody can fence it. Claiming anything would be a lie.
                tracing::error!(%endpoint, "work was abandoned on an endpoint that is not known");
                let mut fence = EndpointFence::new(LocalNic(u32::MAX), PeerId(u64::MAX));
                fence.stuck();
                fence.work.insert((transfer, region), work);
                self.endpoints.insert(endpoint, fence);
            }
        }
    }

    /// Whether the endpoint was known once and is fenced at both ends.
    fn is_retired(&self, endpoint: EndpointId) -> bool {
        let latest = self.retired.get(&endpoint.index);
        latest.is_some_and(|latest| endpoint.generation <= *latest)
    }

    /// Says what an endpoint's progress allows, and forgets it if nothing is left.
    fn settle(&mut self, endpoint: EndpointId) {
        let Some(fence) = self.endpoints.get_mut(&endpoint) else {
            return;
        };
        let stuck = fence.local == Local::Stuck;
        let (peer, complete) = (fence.peer, fence.is_complete());
        let covered = |fence: &EndpointFence, transfer: TransferId| {
            let works = fence
                .work
                .range((transfer, RegionId(0))..=(transfer, RegionId(u64::MAX)));
            works.into_iter().all(|(_, work)| fence.covers(*work))
        };
        let mut free = Vec::new();
        for (transfer, waits_for) in &mut self.finishing {
            if !waits_for.contains(&endpoint) {
                continue;
            }
            if stuck {
                free.push((*transfer, Verdict::Unfenced));
            } else if covered(fence, *transfer) {
                waits_for.remove(&endpoint);
                if waits_for.is_empty() {
                    free.push((*transfer, Verdict::Fenced));
                }
            }
        }
        for (transfer, verdict) in free {
            self.finishing.remove(&transfer);
            self.out.push_back(Action::MayReport { transfer, verdict });
        }
        if complete {
            fence.work.clear();
            if fence.destroyed {
                self.endpoints.remove(&endpoint);
                let latest = self
                    .retired
                    .entry(endpoint.index)
                    .or_insert(endpoint.generation);
                *latest = (*latest).max(endpoint.generation);
            }
        }
        self.settle_revoke(peer);
    }

    /// A target is safe from a peer as soon as its own ends are fenced: what arrives is dropped.
    fn settle_revoke(&mut self, peer: PeerId) {
        if !self.revoking.contains(&peer) {
            return;
        }
        let mut verdict = Verdict::Fenced;
        for fence in self.endpoints.values().filter(|fence| fence.peer == peer) {
            match fence.local {
                Local::Fenced { .. } => {}
                Local::Stuck => verdict = Verdict::Unfenced,
                Local::Live | Local::Fencing { .. } | Local::Closing { .. } => return,
            }
        }
        self.revoking.remove(&peer);
        self.out.push_back(Action::Revoked { peer, verdict });
    }

    /// Applies a change of one endpoint, and says what comes of it.
    fn change(&mut self, endpoint: EndpointId, change: impl FnOnce(&mut EndpointFence)) {
        let Some(fence) = self.endpoints.get_mut(&endpoint) else {
            return;
        };
        let was = fence.is_locally_fenced();
        change(fence);
        if !was && fence.is_locally_fenced() {
            let transfers: BTreeSet<_> = fence.work.keys().map(|(transfer, _)| *transfer).collect();
            for transfer in transfers {
                self.out.push_back(Action::MayRepost { transfer, endpoint });
            }
        }
        self.settle(endpoint);
    }

    fn finish(&mut self, transfer: TransferId) {
        let mut waits_for = BTreeSet::new();
        let mut verdict = Verdict::Fenced;
        for (endpoint, fence) in &self.endpoints {
            let works = fence
                .work
                .range((transfer, RegionId(0))..=(transfer, RegionId(u64::MAX)));
            if works.into_iter().any(|(_, work)| !fence.covers(*work)) {
                waits_for.insert(*endpoint);
                if fence.local == Local::Stuck {
                    verdict = Verdict::Unfenced;
                }
            }
        }
        if waits_for.is_empty() || verdict == Verdict::Unfenced {
            self.out.push_back(Action::MayReport { transfer, verdict });
        } else {
            self.finishing.insert(transfer, waits_for);
        }
    }

    fn revoke(&mut self, now: Time, peer: PeerId) {
        self.revoking.insert(peer);
        let of_peer =
            |(id, fence): (&EndpointId, &EndpointFence)| (fence.peer == peer).then_some(*id);
        let endpoints: Vec<_> = self.endpoints.iter().filter_map(of_peer).collect();
        for endpoint in endpoints {
            self.close(now, endpoint);
        }
        self.settle_revoke(peer);
    }

    fn due(&mut self, now: Time, endpoint: EndpointId) {
        let fence_max = self.config.fence_max;
        let Some(fence) = self.endpoints.get_mut(&endpoint) else {
            return;
        };
        match fence.local {
            Local::Live | Local::Stuck => {}
            Local::Fencing { .. } => {
                let until = now + fence_max;
                fence.local = Local::Closing { until };
                let local = fence.local_nic;
                let asked = self.endpoints.iter().any(|(id, fence)| {
                    *id != endpoint
                        && fence.local_nic == local
                        && matches!(fence.local, Local::Closing { .. })
                });
                if !asked {
                    self.out.push_back(Action::CloseContext { local });
                }
            }
            Local::Closing { .. } => {
                fence.stuck();
                self.settle(endpoint);
            }
            Local::Fenced { .. } => {
                fence.lifetime_over();
                self.settle(endpoint);
            }
        }
    }
}

impl Machine for Fences {
    type Input = Input;
    type Action = Action;

    fn handle(&mut self, now: Time, input: Input) {
        match input {
            Input::Made {
                endpoint,
                local,
                peer,
            } => {
                if !self.is_retired(endpoint) {
                    let fence = || EndpointFence::new(local, peer);
                    self.endpoints.entry(endpoint).or_insert_with(fence);
                }
                if self.revoking.contains(&peer) {
                    self.close(now, endpoint);
                }
            }
            Input::Close { endpoint } => self.close(now, endpoint),
            Input::Abandon {
                endpoint,
                transfer,
                region,
                work,
            } => self.abandon(now, endpoint, transfer, region, work),
            Input::InError { endpoint } => self.change(endpoint, EndpointFence::in_error),
            Input::Drained { endpoint } => self.change(endpoint, |fence| fence.drained(now)),
            Input::Destroyed { endpoint } => self.change(endpoint, |fence| fence.destroyed(now)),
            Input::PeerConfirmed { endpoint } => {
                self.change(endpoint, EndpointFence::peer_confirmed);
            }
            Input::ContextClosed { local } => {
                let on_it = |(id, fence): (&EndpointId, &EndpointFence)| {
                    (fence.local_nic == local).then_some(*id)
                };
                let endpoints: Vec<_> = self.endpoints.iter().filter_map(on_it).collect();
                for endpoint in endpoints {
                    self.change(endpoint, |fence| fence.destroyed(now));
                }
            }
            Input::Finish { transfer } => self.finish(transfer),
            Input::Revoke { peer } => self.revoke(now, peer),
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        let lifetime = self.config.packet_lifetime;
        let is_due = |(id, fence): (&EndpointId, &EndpointFence)| {
            fence
                .next_timeout(lifetime)
                .is_some_and(|due| due <= now)
                .then_some(*id)
        };
        let due: Vec<_> = self.endpoints.iter().filter_map(is_due).collect();
        for endpoint in due {
            self.due(now, endpoint);
        }
    }

    fn poll(&mut self) -> Option<Action> {
        self.out.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        let lifetime = self.config.packet_lifetime;
        let timeouts = self
            .endpoints
            .values()
            .map(|fence| fence.next_timeout(lifetime));
        timeouts.fold(None, earliest)
    }
}
