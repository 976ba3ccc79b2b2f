//! The fence of one endpoint: both ends, and the work that waits for it.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::machine::Time;
use crate::machine::ids::{LocalNic, PeerId, RegionId, TransferId};

/// Abandoned work of one transfer on one region: bytes that were posted and did not complete with
/// success. Flushed work counts, for its packets may be on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Abandoned {
    /// Bytes of READs: packets still write here, until the local end is fenced.
    pub read_bytes: u64,
    /// Bytes of WRITEs: packets still write there, until both ends are fenced.
    pub write_bytes: u64,
}

impl Abandoned {
    pub(super) fn add(&mut self, more: Self) {
        self.read_bytes = self.read_bytes.saturating_add(more.read_bytes);
        self.write_bytes = self.write_bytes.saturating_add(more.write_bytes);
    }

    pub(super) fn bytes(self) -> u64 {
        self.read_bytes.saturating_add(self.write_bytes)
    }
}

/// How far the local end is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Local {
    /// Working.
    Live,
    /// Told to go to ERR, by then it should be drained.
    Fencing { until: Time },
    /// Its context is being closed since that took too long.
    Closing { until: Time },
    /// Even that hangs: nobody knows what the hardware still does.
    Stuck,
    /// In ERR and drained, or destroyed.
    Fenced { at: Time },
}

#[derive(Clone, Debug)]
pub(super) struct EndpointFence {
    pub(super) local_nic: LocalNic,
    pub(super) peer: PeerId,
    pub(super) local: Local,
    in_error: bool,
    peer_confirmed: bool,
    lifetime_over: bool,
    /// It was stuck once: what it has not let go of since is in quarantine.
    quarantined: bool,
    pub(super) destroyed: bool,
    pub(super) work: BTreeMap<(TransferId, RegionId), Abandoned>,
}

impl EndpointFence {
    pub(super) fn new(local_nic: LocalNic, peer: PeerId) -> Self {
        Self {
            local_nic,
            peer,
            local: Local::Live,
            in_error: false,
            peer_confirmed: false,
            lifetime_over: false,
            quarantined: false,
            destroyed: false,
            work: BTreeMap::new(),
        }
    }

    /// The queue pairs are in ERR.
    pub(super) fn in_error(&mut self) {
        self.in_error = true;
    }

    /// All posted work has completed. Before ERR that says nothing: more could be posted.
    pub(super) fn drained(&mut self, now: Time) {
        if self.in_error {
            self.fence_locally(now);
        }
    }

    /// The queue pairs do not exist any more.
    pub(super) fn destroyed(&mut self, now: Time) {
        self.destroyed = true;
        self.fence_locally(now);
    }

    /// The hardware does not answer.
    pub(super) fn stuck(&mut self) {
        self.local = Local::Stuck;
        self.quarantined = true;
    }

    /// Bytes that a stuck endpoint has not let go of.
    pub(super) fn quarantined_bytes(&self) -> u64 {
        let works = self
            .work
            .values()
            .filter(|work| self.quarantined && !self.covers(**work));
        works.map(|work| work.bytes()).fold(0, u64::saturating_add)
    }

    fn fence_locally(&mut self, now: Time) {
        if !self.is_locally_fenced() {
            self.local = Local::Fenced { at: now };
        }
    }

    /// The peer has said that its end is in ERR: what still arrives there is dropped.
    pub(super) fn peer_confirmed(&mut self) {
        self.peer_confirmed = true;
    }

    pub(super) fn is_locally_fenced(&self) -> bool {
        matches!(self.local, Local::Fenced { .. })
    }

    pub(super) fn is_remotely_fenced(&self) -> bool {
        self.peer_confirmed || self.lifetime_over
    }

    /// Whether nothing of that work can touch memory any more.
    pub(super) fn covers(&self, work: Abandoned) -> bool {
        self.is_locally_fenced() && (work.write_bytes == 0 || self.is_remotely_fenced())
    }

    pub(super) fn is_complete(&self) -> bool {
        self.is_locally_fenced() && self.is_remotely_fenced()
    }

    pub(super) fn next_timeout(&self, lifetime: Duration) -> Option<Time> {
        match self.local {
            Local::Live | Local::Stuck => None,
            Local::Fencing { until } | Local::Closing { until } => Some(until),
            Local::Fenced { at } if !self.is_remotely_fenced() => Some(at + lifetime),
            Local::Fenced { .. } => None,
        }
    }

    /// Packets that were on the wire at the local fence are gone by now.
    pub(super) fn lifetime_over(&mut self) {
        self.lifetime_over = true;
    }
}
