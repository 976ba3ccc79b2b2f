//! Which ends may still take in what a peer sends.
//!
//! A peer that is told that our end is closed takes it that none of its packets reaches our memory
//! any more. So that nobody is told it too early, an end is remembered until its queue pairs are
//! known to be in ERR or destroyed, or their device closed, though its endpoint may have ended
//! before, in a device that hangs.
//!
//! Ends of an earlier process of ours need no memory here: what its queue pairs may still be given
//! lies in pages that the kernel holds until they are gone.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rerail_verbs::ControlThread;

use super::super::inbox::EndpointKey;
use super::super::opening::Opening;

/// Proof that the queue pairs of an end take in nothing any more, once it is given.
#[derive(Clone, Debug)]
pub(super) struct Proof {
    stopped: Arc<AtomicBool>,
    /// What we had posted on them has come back, too.
    drained: Arc<AtomicBool>,
    /// Bytes in flight on them when it was given up to wait for that.
    quarantined_bytes: Arc<AtomicU64>,
    /// The thread of the opening that the queue pairs were made of.
    control: ControlThread,
}

impl Proof {
    /// Not given yet.
    pub(super) fn new(opening: &Opening) -> Self {
        Self {
            stopped: Arc::default(),
            drained: Arc::default(),
            quarantined_bytes: Arc::default(),
            control: opening.context().control().clone(),
        }
    }

    /// All of the queue pairs are in ERR, or destroyed.
    pub(super) fn give(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// All that was posted on the queue pairs has come back, or will not any more.
    pub(super) fn drained(&self) {
        self.drained.store(true, Ordering::Release);
    }

    /// Closing a device destroys what it has refused to destroy before.
    pub(super) fn is_given(&self) -> bool {
        self.stopped.load(Ordering::Acquire) || self.control.is_closed()
    }

    /// Nothing that we had posted is under way any more.
    pub(super) fn is_drained(&self) -> bool {
        self.drained.load(Ordering::Acquire) || self.control.is_closed()
    }

    /// They are in ERR: what was in flight on them has come back, or they were moved there.
    pub(super) fn has_stopped(&self) -> bool {
        self.is_given() || self.is_drained()
    }

    /// Takes how many bytes are in flight, when that is not waited for any more.
    pub(super) fn quarantine(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.quarantined_bytes)
    }

    /// How many of those may be read or written still.
    fn quarantined_bytes(&self) -> u64 {
        let bytes = self.quarantined_bytes.load(Ordering::Acquire);
        if bytes == 0 || self.is_quiet() {
            0
        } else {
            bytes
        }
    }

    /// Nothing moves over the queue pairs any more, in either direction.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_given() && self.is_drained()
    }
}

/// The end of a connection whose queue pairs were to be connected.
#[derive(Debug)]
struct End {
    nic: u32,
    peer_path: String,
    /// The first packet number that the peer said: its request to close says it again.
    peer_psn: Option<u32>,
    proof: Proof,
}

/// Those of all endpoints.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// Of endpoints that are there.
    live: BTreeMap<EndpointKey, End>,
    /// Of endpoints that have ended and over which something may move still, by the own NIC and the
    /// peer's path. Each stands for queue pairs that are alive in a device that hangs, of which a
    /// NIC has `MC_MAX_EP_PER_CTX`, and which is opened again while few openings of it hang.
    over: HashMap<(u32, String), Vec<Over>>,
    /// How many there are of those, and were when all were last looked at.
    over_count: usize,
    over_looked: usize,
}

#[derive(Debug)]
struct Over {
    key: EndpointKey,
    peer_psn: Option<u32>,
    proof: Proof,
}

impl Ends {
    /// The queue pairs of an endpoint are about to be connected.
    pub(super) fn begin(
        &mut self,
        key: EndpointKey,
        (nic, peer_path): (u32, &str),
        peer_psn: Option<u32>,
        proof: Proof,
    ) {
        let end = End {
            nic,
            peer_path: peer_path.to_owned(),
            peer_psn,
            proof,
        };
        self.live.insert(key, end);
    }

    /// The first packet number that the peer of an endpoint said.
    pub(super) fn peer_psn(&self, key: EndpointKey) -> Option<u32> {
        self.live.get(&key)?.peer_psn
    }

    /// An endpoint has ended.
    pub(super) fn forget(&mut self, key: EndpointKey) {
        let Some(end) = self.live.remove(&key).filter(|end| !end.proof.is_quiet()) else {
            return;
        };
        let End {
            nic,
            peer_path,
            peer_psn,
            proof,
        } = end;
        let here = self.over.entry((nic, peer_path)).or_default();
        here.push(Over {
            key,
            peer_psn,
            proof,
        });
        self.over_count += 1;
        // All are looked at once there are twice as many, so that each costs the same on average.
        if self.over_count >= 2 * self.over_looked.max(32) {
            self.over.retain(|_, here| {
                here.retain(|over| !over.proof.is_quiet());
                !here.is_empty()
            });
            self.over_count = self.over.values().map(Vec::len).sum();
            self.over_looked = self.over_count;
        }
    }

    /// Bytes in flight on ends that could not be stopped in time, and are not known to have stopped
    /// since.
    pub(super) fn quarantined_bytes(&self) -> u64 {
        let live = self.live.values().map(|end| &end.proof);
        let over = self.over.values().flatten().map(|over| &over.proof);
        live.chain(over).map(Proof::quarantined_bytes).sum()
    }

    /// Whether a request to close may be about an end that has ended without proof. A peer that
    /// says no packet number, or never did, means any between the two NICs.
    pub(super) fn is_unproved(&self, place: &(u32, String), psn: Option<u32>) -> bool {
        let is_meant = |over: &Over| {
            let same = psn.is_none() || over.peer_psn.is_none() || over.peer_psn == psn;
            same && !over.proof.is_given()
        };
        let here = self.over.get(place);
        here.is_some_and(|here| here.iter().any(is_meant))
    }

    /// Proofs of those that have ended and over which something may move still, of the peers that
    /// are meant, with their NICs.
    pub(super) fn over_of(
        &self,
        is_meant: impl Fn(&str) -> bool,
    ) -> impl Iterator<Item = (u32, &Proof)> {
        let places = self.over.iter();
        let places = places.filter(move |((_, path), _)| is_meant(path));
        let over = places.flat_map(|((nic, _), here)| here.iter().map(|over| (*nic, &over.proof)));
        over.filter(|(_, proof)| !proof.is_quiet())
    }

    /// The proof of an endpoint between these two whose queue pairs were to be connected, unless it
    /// has ended and nothing moves over it.
    pub(super) fn proof(&self, place: &(u32, String), key: EndpointKey) -> Option<&Proof> {
        if let Some(end) = self.live.get(&key) {
            return Some(&end.proof);
        }
        let over = self.over.get(place)?.iter().find(|over| over.key == key);
        over.map(|over| &over.proof)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use rerail_verbs::Context;
    use rerail_verbs::sim::{FabricOptions, NicOptions, RealTimeFabric};

    use super::super::super::rig::wait_until;
    use super::*;

    const PATH: &str = "host1@sim0";

    /// What would know of the queue pairs of a device.
    fn device() -> (RealTimeFabric, Context) {
        let fabric = RealTimeFabric::start(FabricOptions::card(1)).expect("a thread");
        let node = fabric.add_node("host");
        fabric.add_nic(
            node,
            &NicOptions::ethernet("sim0", IpAddr::from([10, 0, 0, 1])),
        );
        let devices = fabric.devices_of(fabric.add_process(node));
        let context = devices.find("sim0").expect("added").open().expect("open");
        (fabric, context)
    }

    fn proof(context: &Context) -> Proof {
        Proof {
            stopped: Arc::default(),
            drained: Arc::default(),
            quarantined_bytes: Arc::default(),
            control: context.control().clone(),
        }
    }

    fn place(nic: u32, path: &str) -> (u32, String) {
        (nic, path.to_owned())
    }

    /// An end between NIC 0 and [`PATH`] whose endpoint has ended.
    fn over(ends: &mut Ends, key: EndpointKey, psn: Option<u32>, proof: &Proof) {
        ends.begin(key, (0, PATH), psn, proof.clone());
        ends.forget(key);
    }

    /// How many ends towards [`PATH`] may move still.
    fn moving(ends: &Ends) -> usize {
        ends.over_of(|path| path == PATH).count()
    }

    #[test]
    fn a_close_is_about_an_end_between_the_same_nics_unless_both_say_other_packet_numbers() {
        let (_fabric, context) = device();
        let proof = proof(&context);
        for (known, same, other) in [
            (Some(7), [Some(7), None], true),
            (None, [Some(7), None], false),
        ] {
            let mut ends = Ends::default();
            over(&mut ends, 1, known, &proof);
            let here = place(0, PATH);
            for psn in same {
                assert!(ends.is_unproved(&here, psn), "{known:?} {psn:?}");
                assert!(!ends.is_unproved(&place(1, PATH), psn), "another NIC");
                let peers_other = place(0, "host1@sim1");
                assert!(!ends.is_unproved(&peers_other, psn));
            }
            assert_eq!(ends.is_unproved(&here, Some(8)), !other);
        }
    }

    #[test]
    fn an_end_moves_until_it_is_in_error_and_what_was_posted_on_it_is_back() {
        let (_fabric, context) = device();
        let mut ends = Ends::default();
        let here = place(0, PATH);
        let [quiet, late] = [proof(&context), proof(&context)];
        quiet.give();
        quiet.drained();
        over(&mut ends, 1, Some(1), &quiet);
        assert!(ends.proof(&here, 1).is_none());
        over(&mut ends, 2, Some(2), &late);
        assert!(ends.is_unproved(&here, Some(2)) && moving(&ends) == 1);
        late.drained();
        assert!(
            ends.is_unproved(&here, Some(2)),
            "the peer's may come still"
        );
        assert_eq!(moving(&ends), 1);
        let other = proof(&context);
        other.give();
        over(&mut ends, 3, Some(3), &other);
        assert!(!ends.is_unproved(&here, Some(3)), "the peer's cannot come");
        assert_eq!(moving(&ends), 2, "ours may be under way");
        assert!(ends.proof(&here, 3).is_some_and(|proof| !proof.is_quiet()));
        late.give();
        other.drained();
        assert_eq!(moving(&ends), 0);
        assert!(!ends.is_unproved(&here, None));
    }

    #[test]
    fn all_that_move_are_known_and_those_that_do_not_are_forgotten() {
        const MANY: usize = 5000;
        let (_fabric, context) = device();
        let mut ends = Ends::default();
        let proofs: Vec<_> = (0..MANY).map(|_| proof(&context)).collect();
        for (key, proof) in proofs.iter().enumerate() {
            over(&mut ends, key as EndpointKey, Some(1), proof);
        }
        assert_eq!(moving(&ends), MANY);
        for proof in &proofs[1..] {
            proof.give();
            proof.drained();
        }
        assert_eq!(moving(&ends), 1);
        // Others come, and all are looked at again before there are twice as many.
        for key in MANY..3 * MANY {
            over(&mut ends, key as EndpointKey, Some(1), &proofs[0]);
        }
        assert_eq!(moving(&ends), 1 + 2 * MANY);
        assert_eq!(ends.over_count, 1 + 2 * MANY, "the others are forgotten");
    }

    #[test]
    fn a_device_that_is_closed_is_proof_for_all_of_its_ends() {
        let (_fabric, context) = device();
        let mut ends = Ends::default();
        let here = place(0, PATH);
        for key in 0..100 {
            over(&mut ends, key, Some(1), &proof(&context));
        }
        ends.begin(9_999, (0, PATH), Some(1), proof(&context));
        assert!(ends.is_unproved(&here, Some(1)));
        let control = context.control().clone();
        drop(context);
        wait_until("the device is closed", || control.is_closed());
        assert!(!ends.is_unproved(&here, None));
        assert_eq!(moving(&ends), 0);
        assert!(ends.proof(&here, 9_999).is_some_and(Proof::is_quiet));
    }
}
