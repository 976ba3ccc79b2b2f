//! Memory that is registered with every NIC.
//!
//! Registering is slow and may hang, so that nothing here is locked while a device works: memory
//! is listed first, and then registered with the devices that are open; a device that is opened,
//! the first time or again, registers what is listed. Whichever of the two comes second sees the
//! other. A region is entered on the control thread that made it, so that one that comes after its
//! memory was given up is destroyed there, before a barrier that is submitted later is passed.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rerail_verbs::{AccessFlags, ControlThread, HostMemory, MemoryRegion, Pending, VerbsError};
use rustix::io::Errno;

use super::nic::{Nic, Place};
use super::nics::{NICS_MAX, Nics};
use super::opening::{Opening, REGISTER_MAX};
use super::slice::{Keys, Piece};
use crate::TransportError;

mod holders;

pub use holders::Holders;
use holders::{Holding, Trace};

/// How often whoever waits for a registration looks whether its device is alive.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long a verb may run that has not said that it takes longer.
const VERB_LIMIT: Duration = Duration::from_secs(1);

/// How long a device may work on a registration after its time for it is over.
const HUNG_LIMIT: Duration = Duration::from_secs(3);

/// How often a device that is opened looks for memory that was listed meanwhile.
const PASSES_MAX: usize = 1_000;

/// A part of host memory, registered on all NICs, in chunks that no device finds too long.
///
/// Dropping the last clone deregisters everything; the memory stays mapped until that has
/// happened. A NIC whose device is dead has no region; it gets one when it is open again.
#[derive(Clone, Debug)]
pub struct RegisteredMemory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    memory: HostMemory,
    access: AccessFlags,
    chunks: Vec<Chunk>,
    /// NICs that there were when it was registered.
    nics: usize,
    // Last: it tells that the regions are on their way to be destroyed.
    trace: Trace,
}

/// A chunk: one region on each NIC.
#[derive(Debug)]
struct Chunk {
    offset: usize,
    length: usize,
    /// By the number of the NIC.
    lkeys: Arc<Keys>,
    /// One a NIC at most. NICs that are being taken in have no number yet.
    regions: Mutex<Vec<Held>>,
}

/// A region, its NIC, and the opening of that NIC's device that it was made with.
#[derive(Debug)]
struct Held {
    place: Place,
    opening: u32,
    region: MemoryRegion,
}

/// A chunk as it is published: address, length, and keys by NIC. A NIC that is dead has the key 0,
/// and stands in no matrix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChunkKeys {
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// Keys for peers, one a NIC. NICs behind the last of them have none.
    pub rkeys: Vec<u32>,
    /// Keys for own work requests, one a NIC.
    pub lkeys: Vec<u32>,
}

/// A registration that came to nothing.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct NotRegistered {
    /// Why.
    pub error: TransportError,
    /// Which devices may hold the memory still: those that have not answered.
    pub holders: Holders,
}

impl RegisteredMemory {
    /// Tells when nothing holds the registration any more.
    pub fn holders(&self) -> Holders {
        self.inner.holders()
    }

    /// The memory.
    pub fn memory(&self) -> &HostMemory {
        &self.inner.memory
    }

    /// Its chunks with local keys, for the near end of a transfer.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> {
        let addr = self.inner.memory.addr();
        self.inner.chunks.iter().map(move |chunk| Piece {
            addr: addr + chunk.offset as u64,
            length: chunk.length as u64,
            keys: Arc::clone(&chunk.lkeys),
        })
    }

    /// Its chunks with all keys, for the record.
    pub fn keys(&self) -> Vec<ChunkKeys> {
        let addr = self.inner.memory.addr();
        let keys = |chunk: &Chunk| {
            let regions = chunk.lock();
            let numbered = regions.iter().filter_map(|held| {
                let number = held.place.number()?.0 as usize;
                Some((number, &held.region))
            });
            let count = numbered.clone().map(|(number, _)| number + 1).max();
            let count = count.unwrap_or(0).max(self.inner.nics);
            let all = |key: fn(&MemoryRegion) -> u32| {
                let mut keys = vec![0; count];
                for (number, region) in numbered.clone() {
                    keys[number] = key(region);
                }
                keys
            };
            ChunkKeys {
                addr: addr + chunk.offset as u64,
                length: chunk.length as u64,
                rkeys: all(MemoryRegion::rkey),
                lkeys: all(MemoryRegion::lkey),
            }
        };
        self.inner.chunks.iter().map(keys).collect()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Before the fields, and so the regions, are dropped.
        self.trace.0.gives_up();
    }
}

impl Inner {
    fn new(memory: &HostMemory, access: AccessFlags, chunk_max: usize, nics: usize) -> Self {
        let mut chunks = Vec::new();
        let mut offset = 0;
        while offset < memory.length() {
            let length = chunk_max.min(memory.length() - offset);
            chunks.push(Chunk {
                offset,
                length,
                lkeys: Keys::with_room(NICS_MAX),
                regions: Mutex::default(),
            });
            offset += length;
        }
        Self {
            memory: memory.clone(),
            access,
            chunks,
            nics,
            trace: Trace::default(),
        }
    }

    fn holders(&self) -> Holders {
        Holders(Arc::clone(&self.trace.0))
    }

    /// Has a chunk registered with an opening, which enters the region when it comes.
    fn ask(
        self: &Arc<Self>,
        chunk: usize,
        nic: &Arc<Nic>,
        opening: &Opening,
    ) -> Result<Asked, VerbsError> {
        // First, so that nobody overlooks it.
        self.trace.0.asked(nic.name(), opening);
        let Chunk { offset, length, .. } = self.chunks[chunk];
        let (weak, for_nic) = (Arc::downgrade(self), Arc::clone(nic));
        let number = opening.number();
        let enter = move |region| {
            // Without a taker it is destroyed after this job.
            if let Some(inner) = weak.upgrade() {
                inner.chunks[chunk].enter(&for_nic, number, region);
            }
        };
        let pending = opening.register((&self.memory, offset, length), self.access, enter)?;
        Ok(Asked {
            nic: Arc::clone(nic),
            opening: number,
            control: opening.context().control().clone(),
            pending,
        })
    }

    /// Lets go of the regions on a NIC that were made before its opening `current`.
    fn release(&self, place: &Place, current: u32) {
        for chunk in &self.chunks {
            chunk.withdraw(place, |opening| opening < current);
        }
    }

    /// Whether all of it is registered with an opening of a NIC.
    fn is_with(&self, place: &Place, opening: u32) -> bool {
        let mut chunks = self.chunks.iter();
        chunks.all(|chunk| {
            let regions = chunk.lock();
            let mut regions = regions.iter();
            regions.any(|held| held.place == *place && held.opening == opening)
        })
    }

    /// A NIC was taken in: its keys may be used.
    fn number(&self, place: &Place) {
        for chunk in &self.chunks {
            let regions = chunk.lock();
            let held = regions.iter().find(|held| held.place == *place);
            if let (Some(held), Some(number)) = (held, place.number()) {
                chunk.lkeys.set(number.0 as usize, Some(held.region.lkey()));
            }
        }
    }
}

/// A registration that a device works on.
struct Asked {
    nic: Arc<Nic>,
    opening: u32,
    control: ControlThread,
    pending: Pending<Result<(), VerbsError>>,
}

impl Asked {
    /// Waits for its end. The death of a device in use is no failure: it registers everything when
    /// it is opened again.
    fn wait(&self) -> Result<(), TransportError> {
        let begin = Instant::now();
        let mut hung_since = None;
        loop {
            let result = match self.pending.wait_timeout(LOOK_EVERY) {
                Ok(result) => result,
                Err(error) => Err(error),
            };
            let Err(error) = result else {
                return Ok(());
            };
            if self.nic.openings() > self.opening {
                tracing::warn!(
                    nic = self.nic.name(),
                    "died while memory was registered with it"
                );
                return Ok(());
            }
            if !self.control.is_overdue(VERB_LIMIT) {
                hung_since = None;
            }
            // Whoever watches a device in use gives it up first.
            let hung_since = hung_since.get_or_insert_with(Instant::now);
            let is_late = begin.elapsed() > REGISTER_MAX || hung_since.elapsed() > HUNG_LIMIT;
            if !matches!(error, VerbsError::NoAnswer { .. }) || is_late {
                return Err(error.into());
            }
        }
    }
}

impl Chunk {
    /// Takes a region in, unless its opening is over, or a later one has been here.
    fn enter(&self, nic: &Nic, opening: u32, region: MemoryRegion) {
        let place = nic.place();
        let mut regions = self.lock();
        let known = regions.iter().position(|held| held.place == *place);
        // Whoever lets go of an opening says so first, and then looks here.
        if nic.is_over(opening) || known.is_some_and(|at| regions[at].opening > opening) {
            return;
        }
        if let Some(number) = place.number() {
            self.lkeys.set(number.0 as usize, Some(region.lkey()));
        }
        let held = Held {
            place: place.clone(),
            opening,
            region,
        };
        match known {
            // What it takes the place of is of an opening that came to nothing.
            Some(at) => regions[at] = held,
            None => regions.push(held),
        }
    }

    /// Lets go of the region on a NIC if its opening is `unwanted`.
    fn withdraw(&self, place: &Place, unwanted: impl Fn(u32) -> bool) {
        let mut regions = self.lock();
        let is_meant = |held: &Held| held.place == *place && unwanted(held.opening);
        if let Some(at) = regions.iter().position(is_meant) {
            if let Some(number) = place.number() {
                self.lkeys.set(number.0 as usize, None);
            }
            // Destroyed by its own context's control thread, whenever that comes to it.
            regions.swap_remove(at);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Held>> {
        // A list of handles is whole whatever panicked.
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How much memory is registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Registered {
    /// Bytes.
    pub(super) bytes: u64,
    /// Regions on each NIC that they are in.
    pub(super) regions: usize,
}

impl Registered {
    /// Whether it asks less of a device, in one respect at least.
    pub(super) fn is_less_than(&self, other: &Self) -> bool {
        self.bytes < other.bytes || self.regions < other.regions
    }
}

/// All that is registered, so that it can be registered with a device that is opened later.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    /// Never held while a device works.
    all: Mutex<Vec<Listed>>,
}

/// Memory that is registered, or was given up and is held by a device still.
#[derive(Debug)]
struct Listed {
    memory: Weak<Inner>,
    bytes: u64,
    holding: Arc<Holding>,
}

impl Listed {
    fn is_over(&self) -> bool {
        self.memory.strong_count() == 0 && !self.holding.is_held()
    }
}

impl Registrations {
    /// Registers all of `memory` on every NIC whose device is alive, or on none (report R03), and
    /// remembers it for as long as it is registered. Blocks.
    pub(super) fn register(
        &self,
        nics: &Nics,
        memory: &HostMemory,
        access: AccessFlags,
        mr_bytes_max: u64,
    ) -> Result<RegisteredMemory, NotRegistered> {
        let limits = nics.iter().map(|nic| nic.attr().max_mr_bytes);
        let chunk_max = limits.fold(mr_bytes_max, u64::min).max(1);
        let chunk_max = usize::try_from(chunk_max).unwrap_or(usize::MAX);
        let inner = Arc::new(Inner::new(memory, access, chunk_max, nics.len()));
        let mut all = self.lock();
        all.retain(|other| !other.is_over());
        all.push(Listed {
            memory: Arc::downgrade(&inner),
            bytes: memory.length() as u64,
            holding: Arc::clone(&inner.trace.0),
        });
        // A device that is installed after this finds the memory in the list.
        let open = |nic: &Arc<Nic>| Some((Arc::clone(nic), nic.opening()?));
        let openings: Vec<_> = nics.iter().filter_map(open).collect();
        drop(all);
        let register = |chunk| {
            let ask = |(nic, opening): &(Arc<Nic>, Arc<Opening>)| {
                if nic.openings() > opening.number() {
                    return Ok(None);
                }
                inner.ask(chunk, nic, opening).map(Some)
            };
            // On all devices at once.
            let asked = openings.iter().map(ask).collect::<Result<Vec<_>, _>>()?;
            asked.iter().flatten().try_for_each(Asked::wait)
        };
        match (0..inner.chunks.len()).try_for_each(register) {
            Ok(()) => Ok(RegisteredMemory { inner }),
            Err(error) => {
                let holders = inner.holders();
                Err(NotRegistered { error, holders })
            }
        }
    }

    /// Lets go of all regions on a NIC whose device is dead. Never blocks.
    pub(super) fn release(&self, nic: &Nic) {
        let current = nic.openings();
        for memory in self.listed() {
            memory.release(nic.place(), current);
        }
    }

    /// Registers everything with a device that was opened, and then has it `taken` in: from then on
    /// whatever is registered is registered with it. Blocks.
    pub(super) fn register_all(
        &self,
        nic: &Arc<Nic>,
        opening: &Opening,
        taken: impl FnOnce() -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        // Under the lock: memory that is listed after this finds the device open.
        let registered = self.complete(nic, opening).and_then(|listed| {
            taken()?;
            for memory in listed.iter().filter_map(|listed| listed.memory.upgrade()) {
                memory.number(nic.place());
            }
            Ok(())
        });
        if registered.is_err() {
            // First, so that no region of it is entered that comes late.
            nic.give_up(opening);
            for memory in self.listed() {
                for chunk in &memory.chunks {
                    chunk.withdraw(nic.place(), |number| number == opening.number());
                }
            }
        }
        registered
    }

    /// Registers everything that is listed with a device. Nothing is missing at the end, nor is it
    /// later for as long as the list is held, which is returned.
    fn complete(
        &self,
        nic: &Arc<Nic>,
        opening: &Opening,
    ) -> Result<MutexGuard<'_, Vec<Listed>>, TransportError> {
        let registered = self.registered();
        for _ in 0..PASSES_MAX {
            let all = self.lock();
            let lacking = all.iter().filter(|listed| {
                let memory = listed.memory.upgrade();
                memory.is_some_and(|memory| !memory.is_with(nic.place(), opening.number()))
            });
            let lacking: Vec<_> = lacking.map(|listed| listed.memory.clone()).collect();
            if lacking.is_empty() {
                return Ok(all);
            }
            drop(all);
            for memory in lacking {
                let done = register_one(&memory, nic, opening);
                done.map_err(|error| no_room(nic, &registered, error))?;
            }
        }
        Err(TransportError::Device {
            device: nic.device().to_owned(),
            reason: "memory is registered faster than it can take it in".into(),
        })
    }

    /// How much there is.
    pub(super) fn registered(&self) -> Registered {
        let listed = self.listed();
        let bytes = listed.iter().map(|memory| memory.memory.length() as u64);
        Registered {
            bytes: bytes.sum(),
            regions: listed.iter().map(|memory| memory.chunks.len()).sum(),
        }
    }

    /// Bytes of memory that was given up and that a device may hold still. Never blocks.
    pub(super) fn quarantined_bytes(&self) -> u64 {
        let mut all = self.lock();
        all.retain(|listed| !listed.is_over());
        let given_up = all
            .iter()
            .filter(|listed| listed.memory.strong_count() == 0);
        given_up.map(|listed| listed.bytes).sum()
    }

    fn listed(&self) -> Vec<Arc<Inner>> {
        let all = self.lock();
        let memory = all.iter().filter_map(|listed| listed.memory.upgrade());
        memory.collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Listed>> {
        // A list of handles is whole whatever panicked.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a device says by this that it has no room: for want of memory, of entries in its tables
/// (`EOVERFLOW` of irdma's, `EAGAIN` of mlx5's firmware), or because of a limit of the process.
/// Whatever else it says, it fails.
fn means_no_room(errno: i32) -> bool {
    matches!(
        Errno::from_raw_os_error(errno),
        Errno::NOMEM
            | Errno::NOSPC
            | Errno::NOBUFS
            | Errno::MFILE
            | Errno::TOOBIG
            | Errno::OVERFLOW
            | Errno::AGAIN
    )
}

/// What an error means of a device that registers everything.
fn no_room(nic: &Nic, registered: &Registered, error: TransportError) -> TransportError {
    match error {
        TransportError::Verbs(error @ VerbsError::Verb { errno, .. }) if means_no_room(errno) => {
            TransportError::NoRoomForMemory {
                nic: nic.name().to_owned(),
                bytes: registered.bytes,
                regions: registered.regions,
                error,
            }
        }
        error => error,
    }
}

/// Registers one memory with a device that was opened, if it is registered still. Does not hold it
/// while the device works.
fn register_one(
    memory: &Weak<Inner>,
    nic: &Arc<Nic>,
    opening: &Opening,
) -> Result<(), TransportError> {
    let mut chunk = 0;
    loop {
        let asked = match memory.upgrade() {
            Some(inner) if chunk < inner.chunks.len() => inner.ask(chunk, nic, opening)?,
            _ => return Ok(()),
        };
        asked.wait()?;
        chunk += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::nic::{Place, PortWish};
    use super::super::rig::{registered, rig};
    use super::*;

    #[test]
    fn two_devices_of_one_name_at_one_position_both_hold_what_they_registered() {
        let rig = rig(7, 1);
        let transport = rig.transport(0, "a1");
        let memory = registered(&transport, 4096);
        let devices = transport.nics()[0].relist().expect("they can be listed");
        let device = devices.find("sim0").expect("it is there");
        // One that went, and lives on in what holds it, and one that came in its place.
        let taken_in = || {
            let (place, config) = (Place::default(), transport.config());
            let any = PortWish::Any;
            let nic = Nic::open(place, device, 1, "late0", config, any, &Arc::default());
            let nic = Arc::new(nic.expect("open"));
            let opening = nic.opening().expect("open");
            memory
                .inner
                .ask(0, &nic, &opening)
                .expect("room")
                .wait()
                .expect("registered");
            (nic, opening)
        };
        let (_gone, _come) = (taken_in(), taken_in());
        let names = memory.inner.trace.0.nics();
        assert_eq!(names, ["sim0", "late0", "late0"]);
    }

    #[test]
    fn a_region_of_an_opening_that_is_over_is_not_entered_however_late_it_comes() {
        let rig = rig(8, 1);
        let transport = rig.transport(0, "a1");
        let memory = registered(&transport, 4096);
        let nic = Arc::clone(&transport.nics()[0]);
        let register = |opening: &Opening| {
            let asked = memory.inner.ask(0, &nic, opening).expect("room");
            asked.wait().expect("registered");
        };
        let lkey = || memory.pieces().next().expect("one").keys.get(0);
        let keys = || (memory.keys()[0].rkeys[0], lkey());
        let first = nic.open_device().expect("open");
        let before = keys();
        assert!(before.0 != 0 && before.1.is_some());
        assert!(memory.inner.is_with(nic.place(), first.number()));
        assert!(!memory.inner.is_with(nic.place(), first.number() + 2));
        memory.inner.release(nic.place(), first.number());
        assert_eq!(keys(), before, "it is the present one's");
        nic.release();
        memory.inner.release(nic.place(), nic.openings());
        assert_eq!(keys(), (0, None));
        register(&first);
        assert_eq!(keys(), (0, None), "its device is dead");
        // Two that come to the same device, the earlier one later.
        let reopen = || nic.reopen(transport.config()).expect("open");
        let (second, third) = (reopen(), reopen());
        register(&third);
        let of_third = keys();
        assert!(of_third.0 != 0 && of_third.1.is_some());
        register(&second);
        assert_eq!(keys(), of_third);
        let waited = memory.holders().wait_gone(Duration::from_millis(50));
        let held = waited.expect_err("it is registered");
        assert!(held.contains(&"sim0".to_owned()), "{held:?}");
    }

    #[test]
    fn a_device_that_fails_while_it_registers_is_not_taken_for_one_without_room() {
        let rig = rig(44, 1);
        let transport = rig.transport(0, "a1");
        let nic = &transport.nics()[0];
        // What mlx5 gives while it is being reset, and for commands that its firmware does not
        // carry out in time.
        for errno in [Errno::NXIO, Errno::NOLINK, Errno::TIMEDOUT, Errno::REMOTEIO] {
            let error = TransportError::Verbs(VerbsError::Verb {
                verb: "ibv_reg_mr_iova2",
                device: "mlx5_0".into(),
                port: None,
                errno: errno.raw_os_error(),
            });
            let meant = no_room(nic, &Registered::default(), error);
            assert!(
                !matches!(meant, TransportError::NoRoomForMemory { .. }),
                "{meant}"
            );
        }
    }
}
