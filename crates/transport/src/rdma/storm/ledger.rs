//! The truth about memory and transfers, which no node knows: what each slot of each node's memory
//! must hold, and which transfers have been reported.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::machine::Time;
use rerail_verbs::{HostMemory, RdmaOpcode};

/// Slots of a node's memory; the first is for probes.
pub(super) const SLOTS: usize = 48;
pub(super) const SLOT_BYTES: usize = 16 * 1024;
/// How long a slot is watched after its transfer was reported, if it is not used again before.
const WATCHED: Duration = Duration::from_secs(4);

/// A transfer, numbered by who asked for it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct TransferId(pub(super) u64);

/// One life of one node.
pub(super) type Life = (usize, u32);

#[derive(Clone, Debug)]
enum Slot {
    Free,
    Used,
    /// Its transfer is reported: nothing may change here.
    Resting {
        holds: Vec<u8>,
        until: Time,
    },
    /// The process that asked for the transfer died: only the owner could make it safe.
    Orphaned {
        until: Time,
    },
}

/// One transfer, as its user sees it.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) opcode: RdmaOpcode,
    pub(super) from: Life,
    pub(super) to: Life,
    pub(super) local_slot: usize,
    pub(super) remote_slot: usize,
    pub(super) bytes: usize,
    pattern: u64,
}

pub(super) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..bytes).map(next).collect()
}

#[derive(Default)]
pub(super) struct Ledger {
    slots: BTreeMap<Life, (HostMemory, Vec<Slot>)>,
    flights: BTreeMap<(Life, TransferId), Flight>,
    pub(super) submitted: u64,
    pub(super) reported: u64,
    pub(super) lost_with_process: u64,
    /// Transfers that ended with an error since the last fault had healed.
    pub(super) failed_since_healed: u64,
    /// Memory is used again at once, always: nobody watches it.
    pub(super) unwatched: bool,
}

impl Ledger {
    pub(super) fn born(&mut self, life: Life, memory: &HostMemory) {
        let slots = vec![Slot::Free; SLOTS];
        self.slots.insert(life, (memory.clone(), slots));
    }

    /// A process is gone: its memory means nothing any more, and what it had asked for leaves
    /// orphans at its peers.
    pub(super) fn died(&mut self, now: Time, life: Life) {
        self.slots.remove(&life);
        let own: Vec<_> = self
            .flights
            .range((life, TransferId(0))..=(life, TransferId(u64::MAX)))
            .map(|(key, flight)| (*key, flight.clone()))
            .collect();
        for (key, flight) in own {
            self.flights.remove(&key);
            self.lost_with_process += 1;
            if let Some((_, slots)) = self.slots.get_mut(&flight.to) {
                let until = now + 2 * WATCHED;
                slots[flight.remote_slot] = Slot::Orphaned { until };
            }
        }
    }

    fn take(&mut self, life: Life) -> Option<usize> {
        let (_, slots) = self.slots.get_mut(&life)?;
        let free = slots
            .iter()
            .skip(1)
            .position(|slot| matches!(slot, Slot::Free))?
            + 1;
        slots[free] = Slot::Used;
        Some(free)
    }

    fn give_back(&mut self, life: Life, slot: usize) {
        if let Some((_, slots)) = self.slots.get_mut(&life) {
            slots[slot] = Slot::Free;
        }
    }

    /// Prepares memory at both ends of a transfer; `None` if there is no room.
    pub(super) fn submit(
        &mut self,
        transfer: TransferId,
        from: Life,
        to: Life,
        opcode: RdmaOpcode,
        bytes: usize,
        seed: u64,
    ) -> Option<Flight> {
        let local_slot = self.take(from)?;
        let Some(remote_slot) = self.take(to) else {
            self.give_back(from, local_slot);
            return None;
        };
        let good = pattern(seed, bytes);
        let bad: Vec<u8> = good.iter().map(|byte| !byte).collect();
        let (local, remote) = match opcode {
            RdmaOpcode::Read => (&bad, &good),
            _ => (&good, &bad),
        };
        self.put(from, local_slot, local);
        self.put(to, remote_slot, remote);
        let flight = Flight {
            opcode,
            from,
            to,
            local_slot,
            remote_slot,
            bytes,
            pattern: seed,
        };
        self.flights.insert((from, transfer), flight.clone());
        self.submitted += 1;
        Some(flight)
    }

    /// Whether so many `slots` of each process's memory can be taken.
    pub(super) fn has_room(&self, slots: usize) -> bool {
        let is_free = |slot: &&Slot| matches!(slot, Slot::Free);
        let mut all = self.slots.values();
        all.all(|(_, of)| of.iter().skip(1).filter(is_free).count() >= slots)
    }

    fn put(&self, life: Life, slot: usize, bytes: &[u8]) {
        let (memory, _) = &self.slots[&life];
        memory.copy_in(slot * SLOT_BYTES, bytes).expect("inside");
    }

    fn holds(&self, life: Life, slot: usize, bytes: usize) -> Option<Vec<u8>> {
        let (memory, _) = self.slots.get(&life)?;
        let mut found = vec![0; bytes];
        memory
            .copy_out(slot * SLOT_BYTES, &mut found)
            .expect("inside");
        Some(found)
    }

    /// A transfer is reported. From here on its memory belongs to its users at both ends: they use
    /// it at once for something else, or watch that nothing changes.
    pub(super) fn report(
        &mut self,
        now: Time,
        life: Life,
        transfer: TransferId,
        success: bool,
        fenced: bool,
        reuse: bool,
    ) {
        let flight = self.flights.remove(&(life, transfer));
        let flight = flight.unwrap_or_else(|| panic!("{transfer:?} of {life:?} ended twice"));
        self.reported += 1;
        self.failed_since_healed += u64::from(!success);
        let (source, target) = match flight.opcode {
            RdmaOpcode::Read => (
                (flight.to, flight.remote_slot),
                (flight.from, flight.local_slot),
            ),
            _ => (
                (flight.from, flight.local_slot),
                (flight.to, flight.remote_slot),
            ),
        };
        let found = self.holds(target.0, target.1, flight.bytes);
        if success && let Some(found) = &found {
            let good = pattern(flight.pattern, flight.bytes);
            let wrong = good
                .iter()
                .zip(found)
                .position(|(good, found)| good != found);
            let was_good = self.holds(source.0, source.1, flight.bytes) == Some(good.clone());
            let is_bad = found.iter().zip(&good).all(|(found, good)| *found == !good);
            assert_eq!(
                wrong,
                None,
                "{transfer:?} of {life:?} succeeded without its bytes: {flight:?}; its source holds \
                 them: {was_good}; its target was never written: {is_bad}; {:x?}",
                &found[..16]
            );
        }
        if !fenced {
            // Said to be in the hardware's hands: whatever happens there was announced.
            for (life, slot) in [source, target] {
                if let Some((_, slots)) = self.slots.get_mut(&life) {
                    slots[slot] = Slot::Orphaned {
                        until: now + 16 * WATCHED,
                    };
                }
            }
            return;
        }
        // What would be read from now on is garbage, and would show at the other end.
        let garbage = vec![0xdb; flight.bytes];
        if self.slots.contains_key(&source.0) {
            self.put(source.0, source.1, &garbage);
        }
        for ((life, slot), holds) in [(source, Some(garbage)), (target, found)] {
            let (Some((_, slots)), Some(holds)) = (self.slots.get_mut(&life), holds) else {
                continue;
            };
            slots[slot] = if reuse || self.unwatched {
                Slot::Free
            } else {
                Slot::Resting {
                    holds,
                    until: now + WATCHED,
                }
            };
        }
    }

    /// Memory of reported transfers is as it was.
    pub(super) fn check(&mut self, now: Time) {
        for (life, (memory, slots)) in &mut self.slots {
            for (at, slot) in slots.iter_mut().enumerate() {
                match slot {
                    Slot::Resting { holds, until } => {
                        let mut found = vec![0; holds.len()];
                        memory
                            .copy_out(at * SLOT_BYTES, &mut found)
                            .expect("inside");
                        assert!(
                            found == *holds,
                            "slot {at} of {life:?} changed after its transfer was reported"
                        );
                        if now >= *until {
                            *slot = Slot::Free;
                        }
                    }
                    Slot::Orphaned { until } if now >= *until => *slot = Slot::Free,
                    _ => {}
                }
            }
        }
    }

    /// Transfers that are not reported.
    pub(super) fn open(&self) -> usize {
        self.flights.len()
    }
}
