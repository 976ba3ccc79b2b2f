//! The openings of the NIC's device whose completion queues are polled: the one in use, and those
//! that died and still have queue pairs to drain.

use std::sync::Arc;

use rerail_verbs::CompletionQueue;

use super::super::nic::Nic;
use super::super::opening::Opening;

pub(super) struct Openings {
    seen: u32,
    polled: Vec<Arc<Opening>>,
}

impl Openings {
    pub(super) fn new(nic: &Nic) -> Self {
        let mut openings = Self {
            seen: nic.openings(),
            polled: Vec::new(),
        };
        openings.polled.extend(nic.opening());
        openings
    }

    /// What [`Nic::openings`] was when it was looked at last.
    pub(super) fn seen(&self) -> u32 {
        self.seen
    }

    /// Takes in that the device died, or was opened again.
    pub(super) fn renew(&mut self, nic: &Nic) {
        self.seen = nic.openings();
        let known = |opening: &Arc<Opening>| {
            self.polled
                .iter()
                .any(|other| other.number() == opening.number())
        };
        let new = nic.opening().filter(|opening| !known(opening));
        self.polled.extend(new);
    }

    /// Lets go of dead ones that no link is of. `oldest` is the oldest opening that a link is of.
    pub(super) fn retain_from(&mut self, oldest: Option<u32>) {
        let keep = oldest.map_or(self.seen, |oldest| oldest.min(self.seen));
        self.polled.retain(|opening| opening.number() >= keep);
    }

    pub(super) fn count(&self) -> usize {
        self.polled.len()
    }

    /// Number of the opening at a place, or of the latest.
    pub(super) fn number(&self, index: usize) -> u32 {
        self.polled
            .get(index)
            .map_or(self.seen, |opening| opening.number())
    }

    pub(super) fn cq(&self, index: usize) -> Option<&CompletionQueue> {
        self.polled.get(index).map(|opening| opening.cq())
    }
}
