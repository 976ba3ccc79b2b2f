//! The own NICs: a list that only grows.
//!
//! A NIC keeps its position for the life of the process, since keys of memory and the record's
//! `devices[]` go by it. The places are there from the start, so that data threads and the choice
//! of rails read the list without a lock while a NIC is taken in that did not exist before.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::inbox::Inbox;
use super::nic::Nic;
use crate::TransportError;
use crate::machine::ids::LocalNic;

/// NICs of an engine at most: as many as a [`NicSet`](super::NicSet) tells apart.
pub const NICS_MAX: usize = 64;

/// The own NICs with their inboxes, in the order of the record's `devices[]`. Clones share it.
#[derive(Clone, Debug)]
pub struct Nics {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    seats: Box<[OnceLock<Seat>]>,
    /// Seats that are taken: the first ones.
    taken: AtomicUsize,
}

/// A NIC, and what reaches its data thread.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) nic: Arc<Nic>,
    pub(super) inbox: Arc<Inbox>,
}

/// The next seat, for one NIC.
#[must_use]
pub(super) struct Vacancy<'a> {
    shared: &'a Shared,
    seat: &'a OnceLock<Seat>,
    position: usize,
}

impl Vacancy<'_> {
    /// The number that goes with it.
    pub(super) fn number(&self) -> LocalNic {
        LocalNic(self.position as u32)
    }

    /// Takes the NIC in that it is for.
    pub(super) fn take(self, nic: Arc<Nic>, inbox: Arc<Inbox>) {
        nic.place().set_number(self.number());
        nic.set_used();
        // One thread at a time gives seats, and this one was empty.
        self.seat.get_or_init(|| Seat { nic, inbox });
        self.shared
            .taken
            .store(self.position + 1, Ordering::Release);
    }
}

impl Default for Nics {
    fn default() -> Self {
        let seats = (0..NICS_MAX).map(|_| OnceLock::new()).collect();
        Self {
            shared: Arc::new(Shared {
                seats,
                taken: AtomicUsize::new(0),
            }),
        }
    }
}

impl Nics {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.shared.taken.load(Ordering::Acquire)
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The NIC at a position.
    pub fn get(&self, position: usize) -> Option<&Arc<Nic>> {
        Some(&self.seat(position)?.nic)
    }

    /// The NIC of that number.
    pub fn at(&self, local: LocalNic) -> Option<&Arc<Nic>> {
        self.get(local.0 as usize)
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Nic>> + Clone {
        self.seats().map(|seat| &seat.nic)
    }

    /// Their names, in order.
    pub fn names(&self) -> Vec<String> {
        self.iter().map(|nic| nic.name().to_owned()).collect()
    }

    /// The seat for a NIC, whose number is the next one, or is to be. By one thread at a time until
    /// it is taken.
    ///
    /// # Errors
    ///
    /// [`NICS_MAX`] NICs are there, or its number is not the next one.
    pub(super) fn vacancy(&self, nic: &Nic) -> Result<Vacancy<'_>, TransportError> {
        let taken = self.len();
        let position = nic.place().number().map_or(taken, |own| own.0 as usize);
        match self.shared.seats.get(position) {
            Some(seat) if position == taken && seat.get().is_none() => Ok(Vacancy {
                shared: &self.shared,
                seat,
                position,
            }),
            _ => Err(TransportError::Device {
                device: nic.device().to_owned(),
                reason: format!(
                    "it would be NIC number {position} after {taken} of at most {NICS_MAX}"
                ),
            }),
        }
    }

    /// Takes a NIC in, whose number is the next one, or is set to that. By one thread at a time.
    /// Errors as in [`vacancy`](Self::vacancy).
    pub(super) fn push(&self, nic: Arc<Nic>, inbox: Arc<Inbox>) -> Result<(), TransportError> {
        self.vacancy(&nic)?.take(nic, inbox);
        Ok(())
    }

    pub(super) fn seat(&self, position: usize) -> Option<&Seat> {
        self.shared.seats.get(position)?.get()
    }

    pub(super) fn seats(&self) -> impl Iterator<Item = &Seat> + Clone {
        self.shared.seats.iter().map_while(OnceLock::get)
    }
}

#[cfg(test)]
impl std::ops::Index<usize> for Nics {
    type Output = Arc<Nic>;

    fn index(&self, position: usize) -> &Arc<Nic> {
        &self.shared.seats[position].get().expect("a NIC").nic
    }
}
