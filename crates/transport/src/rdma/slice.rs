//! Where a request is cut (reference 6.6).
//!
//! A slice never crosses the seam of two registered regions, at either end: a large buffer may
//! consist of several, each with keys of its own (report R12).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::near::NicSet;

/// How long slices are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slicing {
    /// Bytes of an ordinary slice (`MC_SLICE_SIZE`).
    pub slice_bytes: u32,
    /// A rest that is longer than a slice by at most this is not cut (`MC_FRAGMENT_RATIO`).
    pub fragment_bytes: u32,
}

impl Slicing {
    /// The same with no slice longer than `bytes`: the longest message of a port.
    #[must_use]
    pub fn within(self, bytes: u32) -> Self {
        let slice_bytes = self.slice_bytes.min(bytes.max(1));
        Self {
            slice_bytes,
            fragment_bytes: self.fragment_bytes.min(bytes.saturating_sub(slice_bytes)),
        }
    }

    /// Length of the next slice, of `remaining` bytes with `local_room` and `remote_room` bytes to
    /// the seams. Zero only when one of them is.
    pub fn cut(self, remaining: u64, local_room: u64, remote_room: u64) -> u32 {
        let whole = u64::from(self.slice_bytes) + u64::from(self.fragment_bytes);
        let length = if remaining <= whole {
            remaining
        } else {
            u64::from(self.slice_bytes)
        };
        // The sum of two u32 may not fit one; a slice of 4 GiB is cut a byte short.
        length
            .min(local_room)
            .min(remote_room)
            .min(u64::from(u32::MAX)) as u32
    }
}

/// A part of a request that is posted as one work request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slice {
    /// First byte, counted from the request's start.
    pub offset: u64,
    /// Bytes, at least one.
    pub length: u32,
}

/// A registered region, or the part of it that a request needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Address of the first byte, as work requests name it.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// One key per NIC of the owner: lkeys at the near end, rkeys at the far end.
    pub keys: Arc<Keys>,
}

impl Piece {
    /// A piece whose keys do not change.
    pub fn new(addr: u64, length: u64, keys: impl IntoIterator<Item = u32>) -> Self {
        let keys = Keys::new(keys.into_iter().map(Some));
        Self { addr, length, keys }
    }

    /// Takes in what a later record of the owner says of regions that were there `before`.
    ///
    /// Where a NIC has the key that it had, another's is changed in place: its device was opened
    /// again, and transfers that wait for a way use the new key. A NIC without a key keeps what it
    /// had: nothing is posted to it before it has another.
    ///
    /// Where no NIC has, the memory may have been registered anew, and be other memory; where it is
    /// gone, too. Whoever goes by the old keys [finds that out](Keys::is_superseded), and has to
    /// begin again.
    pub fn carry_over(before: &[Self], now: &mut [Self]) {
        let place = |piece: &Self| (piece.addr, piece.length);
        // A record may have a place several times.
        let mut known = HashMap::<_, Vec<&Self>>::new();
        for piece in before {
            known.entry(place(piece)).or_default().push(piece);
        }
        let told = Self::told(before, now, |piece| known.get(&place(piece)));
        for piece in now {
            if !before.is_empty() {
                piece.keys.were_told(&told);
            }
            let here = known.get_mut(&place(piece));
            let Some((here, at)) = here.and_then(|here| {
                let at = here
                    .iter()
                    .position(|earlier| piece.is_same_region(earlier))?;
                Some((here, at))
            }) else {
                continue;
            };
            let earlier = here.swap_remove(at);
            for (nic, key) in piece.told_keys() {
                earlier.keys.tell(nic, key, piece.keys.told(nic));
            }
            if earlier.keys.by_nic.len() >= piece.keys.by_nic.len() {
                piece.keys = Arc::clone(&earlier.keys);
            } else {
                // There is no room to tell of later ones.
                earlier.keys.supersede();
            }
        }
        for gone in known.into_values().flatten() {
            gone.keys.supersede();
        }
    }

    /// When the owner's devices may have been opened that the keys of a later record are of: for
    /// each NIC the last moment at which a record had another key for a place that was known.
    fn told<'a>(
        before: &[Self],
        now: &[Self],
        known: impl Fn(&Self) -> Option<&'a Vec<&'a Self>>,
    ) -> Vec<Moment> {
        let nics = before
            .iter()
            .chain(now)
            .map(|piece| piece.keys.by_nic.len());
        let mut told = vec![Moment::default(); nics.max().unwrap_or_default()];
        for keys in before.iter().map(|piece| &piece.keys) {
            for (nic, told) in told.iter_mut().enumerate() {
                *told = keys.told(nic).max(*told);
            }
        }
        let present = Moment::next();
        for piece in now {
            let Some(here) = known(piece) else { continue };
            for (nic, key) in piece.told_keys() {
                if !here
                    .iter()
                    .any(|earlier| earlier.keys.get(nic) == Some(key))
                {
                    told[nic] = present;
                }
            }
        }
        told
    }

    /// Keys by NIC that say something.
    fn told_keys(&self) -> impl Iterator<Item = (usize, u32)> {
        let keys = self.keys.iter().enumerate();
        keys.filter_map(|(nic, key)| Some((nic, key.filter(|key| *key != 0)?)))
    }

    /// Whether this may be what `earlier` was, by the keys of NICs whose device is the same.
    fn is_same_region(&self, earlier: &Self) -> bool {
        let mut keys = self.told_keys().peekable();
        let is_away = keys.peek().is_none();
        is_away || keys.any(|(nic, key)| earlier.keys.get(nic) == Some(key))
    }
}

/// How much peers had told of their keys, anywhere in this process. What began at a moment began
/// after all that was told at it, or earlier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Moment(u64);

static LAST_MOMENT: AtomicU64 = AtomicU64::new(0);

impl Moment {
    /// The present one.
    pub(super) fn now() -> Self {
        Self(LAST_MOMENT.load(Ordering::Acquire))
    }

    /// One that nothing has begun at yet.
    fn next() -> Self {
        Self(LAST_MOMENT.fetch_add(1, Ordering::AcqRel) + 1)
    }
}

/// Keys of a region, one per NIC of its owner. They change while transfers are under way: a NIC
/// whose device died gets another key when it is open again and the memory registered with it anew.
/// At the near end there is none in between.
#[derive(Debug)]
pub struct Keys {
    by_nic: Box<[AtomicU64]>,
    /// The [`Moment`]s at which a peer told them; 0, or nothing, where nobody tells any.
    told: Box<[AtomicU64]>,
    /// The owner's record has others for all NICs, or none: the memory may be registered anew.
    superseded: AtomicBool,
}

/// A key that a work request was refused for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RefusedKey {
    /// First byte of what was refused, counted from the request's start.
    pub offset: u64,
    /// Position of the owner's NIC.
    pub nic: u32,
    /// The key.
    pub key: u32,
}

/// There is room for a multiple of so many NICs of a peer.
const PEER_NICS: usize = 8;

/// Stands for no key: keys have 32 bits.
const NO_KEY: u64 = u64::MAX;

impl Keys {
    /// Keys by NIC.
    pub fn new(keys: impl IntoIterator<Item = Option<u32>>) -> Arc<Self> {
        let keys = keys.into_iter();
        Self::told_at(Moment::default(), keys)
    }

    fn told_at(told: Moment, keys: impl Iterator<Item = Option<u32>>) -> Arc<Self> {
        let keys = keys.map(|key| AtomicU64::new(key.map_or(NO_KEY, u64::from)));
        let by_nic: Box<[_]> = keys.collect();
        let told = by_nic.iter().map(|_| AtomicU64::new(told.0));
        Arc::new(Self {
            told: told.collect(),
            by_nic,
            superseded: AtomicBool::new(false),
        })
    }

    /// Keys by NIC, with room for those of NICs that are added later: `count` in all.
    pub(super) fn with_room(count: usize) -> Arc<Self> {
        Arc::new(Self {
            by_nic: (0..count).map(|_| AtomicU64::new(NO_KEY)).collect(),
            told: Box::default(),
            superseded: AtomicBool::new(false),
        })
    }

    /// Keys by NIC of a peer, which tells them now, with room for some NICs that it may add.
    pub fn of_peer(keys: impl ExactSizeIterator<Item = Option<u32>>) -> Arc<Self> {
        let count = keys.len().next_multiple_of(PEER_NICS);
        Self::told_at(
            Moment::next(),
            keys.chain(std::iter::repeat(None)).take(count),
        )
    }

    /// When the key for a NIC was told, or that of other memory with which it came. A connection
    /// that began before may lead into the peer's device as it was before it was opened again,
    /// which knows nothing of a key told since.
    pub(super) fn told(&self, nic: usize) -> Moment {
        let told = self.told.get(nic);
        told.map_or(Moment::default(), |told| {
            Moment(told.load(Ordering::Acquire))
        })
    }

    /// The key for a NIC.
    pub fn get(&self, nic: usize) -> Option<u32> {
        let key = self.by_nic.get(nic)?.load(Ordering::Acquire);
        u32::try_from(key).ok()
    }

    /// The owner tells the key for a NIC, perhaps once more.
    fn tell(&self, nic: usize, key: u32, at: Moment) {
        if self.get(nic) != Some(key) {
            // First: whoever finds the key finds when it was told.
            if let Some(told) = self.told.get(nic) {
                told.store(at.0, Ordering::Release);
            }
            self.set(nic, Some(key));
        }
    }

    /// They were told at these moments, by NIC.
    fn were_told(&self, at: &[Moment]) {
        for (told, at) in self.told.iter().zip(at) {
            told.store(at.0, Ordering::Release);
        }
    }

    /// Changes the key for a NIC. Nothing happens for one that is not there.
    pub(super) fn set(&self, nic: usize, key: Option<u32>) {
        if let Some(slot) = self.by_nic.get(nic) {
            slot.store(key.map_or(NO_KEY, u64::from), Ordering::Release);
        }
    }

    fn iter(&self) -> impl Iterator<Item = Option<u32>> {
        (0..self.by_nic.len()).map(|nic| self.get(nic))
    }

    /// The owner's record does not go on with them.
    fn supersede(&self) {
        self.superseded.store(true, Ordering::Release);
    }

    /// Whether the owner's record has said since that all its NICs have other keys, or that the
    /// memory is gone: what these name may be other memory by now.
    pub fn is_superseded(&self) -> bool {
        self.superseded.load(Ordering::Acquire)
    }
}

impl PartialEq for Keys {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Keys {}

/// One end of a request: bytes in one or several regions that follow each other without a gap.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    addr: u64,
    pieces: Vec<Piece>,
    near: NicSet,
}

impl Span {
    /// The `length` bytes from `addr`, which `pieces` must cover from the lowest address on.
    ///
    /// `None` if they do not: a byte before the first or after the last, or a gap. Pieces that
    /// are not needed are left out.
    pub fn new(addr: u64, length: u64, pieces: impl IntoIterator<Item = Piece>) -> Option<Self> {
        let end = addr.checked_add(length)?;
        let mut covered = addr;
        let mut kept = Vec::new();
        for piece in pieces {
            let piece_end = piece.addr.checked_add(piece.length)?;
            if piece_end <= covered || covered >= end {
                continue;
            }
            if piece.addr > covered {
                return None;
            }
            covered = piece_end;
            kept.push(piece);
        }
        (covered >= end).then_some(Self {
            addr,
            pieces: kept,
            near: NicSet::ALL,
        })
    }

    /// The same bytes, with the owner's NICs that are near them: those carry the request as long
    /// as one of them can.
    #[must_use]
    pub fn near(self, near: NicSet) -> Self {
        Self { near, ..self }
    }

    /// The owner's NICs near the first byte; all where nothing is known.
    pub fn nics(&self) -> NicSet {
        self.near
    }

    /// Address of the first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Whether there is a key for the owner's NIC at a position, for all of it.
    pub(super) fn has_keys(&self, nic: usize) -> bool {
        let mut pieces = self.pieces.iter();
        pieces.all(|piece| piece.keys.get(nic).is_some())
    }

    /// Whether a part of it has [other keys](Keys::is_superseded) by now.
    pub fn is_superseded(&self) -> bool {
        self.pieces.iter().any(|piece| piece.keys.is_superseded())
    }

    /// The key for the owner's NIC at a position, at `offset`.
    pub fn key(&self, offset: u64, nic: u32) -> Option<u32> {
        self.at(offset)?.2.get(nic as usize)
    }

    /// When its owner told the key for its NIC at a position, at `offset`.
    pub(super) fn told(&self, offset: u64, nic: u32) -> Moment {
        let keys = self.at(offset).map(|(_, _, keys)| keys);
        keys.map_or(Moment::default(), |keys| keys.told(nic as usize))
    }

    /// Address of the byte at `offset`, bytes from there to the seam, and the region's keys.
    pub fn at(&self, offset: u64) -> Option<(u64, u64, &Arc<Keys>)> {
        let addr = self.addr.checked_add(offset)?;
        let index = self
            .pieces
            .partition_point(|piece| piece.addr.saturating_add(piece.length) <= addr);
        let piece = self.pieces.get(index)?;
        let inside = addr.checked_sub(piece.addr)?;
        Some((addr, piece.length - inside, &piece.keys))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLICING: Slicing = Slicing {
        slice_bytes: 65_536,
        fragment_bytes: 16_384,
    };

    fn piece(addr: u64, length: u64, key: u32) -> Piece {
        Piece {
            addr,
            length,
            keys: Keys::new([Some(key)]),
        }
    }

    #[test]
    fn keys_of_a_later_record_are_found_by_those_who_have_the_earlier_one() {
        let of = |addr, keys: &[Option<u32>]| Piece {
            addr,
            length: 100,
            keys: Keys::of_peer(keys.iter().copied()),
        };
        let before = [of(100, &[Some(1), Some(2)]), of(200, &[Some(3), Some(4)])];
        let span = Span::new(150, 100, before.clone()).expect("covered");
        // The first NIC was opened again, a third has come, and the second region is another one.
        let mut now = [of(100, &[Some(11), Some(2), Some(12)]), of(300, &[Some(5)])];
        Piece::carry_over(&before, &mut now);
        let keys = |offset| [0, 1, 2].map(|nic| span.key(offset, nic));
        assert_eq!(keys(0), [Some(11), Some(2), Some(12)]);
        let old = [Some(3), Some(4), None];
        assert_eq!(keys(99), old, "nobody says so any more");
        assert!(span.is_superseded(), "a part of it is gone");
        let span = Span::new(150, 50, now.clone()).expect("covered");
        let keys = |offset| [0, 1, 2].map(|nic| span.key(offset, nic));
        // Two are away, of which one says so by a 0.
        let mut later = [of(100, &[Some(0), None, Some(12)])];
        Piece::carry_over(&now, &mut later);
        assert_eq!(keys(0), [Some(11), Some(2), Some(12)]);
        let mut away = [of(100, &[Some(0), Some(0), Some(0)])];
        Piece::carry_over(&later, &mut away);
        assert_eq!(keys(0), [Some(11), Some(2), Some(12)]);
        assert!(!span.is_superseded());
    }

    #[test]
    fn memory_that_is_registered_anew_is_not_taken_for_the_old() {
        let of = |keys: &[u32]| [Piece::new(100, 100, keys.iter().copied())];
        let before = of(&[1, 2]);
        let span = Span::new(150, 50, before.clone()).expect("covered");
        let mut now = of(&[11, 12]);
        Piece::carry_over(&before, &mut now);
        assert!(span.is_superseded());
        let keys = |span: &Span| [0, 1].map(|nic| span.key(0, nic));
        assert_eq!(
            keys(&span),
            [Some(1), Some(2)],
            "it begins again or is refused"
        );
        let anew = Span::new(150, 50, now).expect("covered");
        assert!(!anew.is_superseded());
        assert_eq!(keys(&anew), [Some(11), Some(12)]);
        // It is gone for a moment, and comes back with a key that it had.
        let now = of(&[11, 12]);
        Piece::carry_over(anew.pieces.as_slice(), &mut []);
        assert!(anew.is_superseded());
        Piece::carry_over(&[], &mut now.clone());
        assert!(!Span::new(150, 50, now).expect("covered").is_superseded());
    }

    #[test]
    fn a_key_is_as_old_as_the_device_may_be_that_it_is_of() {
        let of = |addr, keys: &[Option<u32>]| Piece {
            addr,
            length: 100,
            keys: Keys::of_peer(keys.iter().copied()),
        };
        let told = |pieces: &[Piece]| -> Vec<_> {
            let told = pieces
                .iter()
                .map(|piece| [0, 1].map(|nic| piece.keys.told(nic)));
            told.collect()
        };
        let began = Moment::now();
        // Whatever a first record says may be younger than a connection that was there.
        let mut first = [of(100, &[Some(1), Some(2)]), of(200, &[Some(3), None])];
        Piece::carry_over(&[], &mut first);
        let first_told = told(&first);
        assert!(first_told.iter().flatten().all(|told| *told > began));
        let began = Moment::now();
        // Memory is added: no device is another one for that.
        let mut more = [
            of(100, &[Some(1), Some(2)]),
            of(200, &[Some(3), None]),
            of(300, &[Some(4), Some(5)]),
        ];
        Piece::carry_over(&first, &mut more);
        assert!(told(&more).iter().all(|[first, _]| *first <= began));
        // One device was opened again, and what is added is of it as well.
        let mut again = [
            of(100, &[Some(11), Some(2)]),
            of(300, &[Some(14), Some(5)]),
            of(400, &[Some(16), Some(6)]),
        ];
        Piece::carry_over(&more, &mut again);
        assert!(
            told(&again)
                .iter()
                .all(|[first, second]| *first > began && *second <= began)
        );
        // All were.
        let mut all = [of(100, &[Some(21), Some(22)])];
        let began = Moment::now();
        Piece::carry_over(&again, &mut all);
        assert!(told(&all).iter().flatten().all(|told| *told > began));
    }

    #[test]
    fn a_record_that_has_a_place_twice_offers_what_it_has_last() {
        let of = |keys: [u32; 2]| Piece {
            addr: 100,
            length: 100,
            keys: Keys::of_peer(keys.into_iter().map(Some)),
        };
        let mut last = vec![of([1, 2])];
        for now in [
            vec![[1, 2], [3, 4]],
            vec![[3, 4], [1, 2]],
            vec![[1, 2], [3, 5]],
            vec![[3, 5]],
            vec![[3, 5]],
            vec![[6, 7], [6, 7]],
        ] {
            let mut pieces: Vec<_> = now.iter().map(|keys| of(*keys)).collect();
            Piece::carry_over(&last, &mut pieces);
            for (piece, keys) in pieces.iter().zip(&now) {
                assert!(!piece.keys.is_superseded(), "{now:?}");
                assert_eq!([0, 1].map(|nic| piece.keys.get(nic)), keys.map(Some));
            }
            last = pieces;
        }
    }

    #[test]
    fn who_has_no_room_for_the_keys_of_more_nics_begins_again() {
        let of = |nics: u32| Piece {
            addr: 100,
            length: 100,
            keys: Keys::of_peer((0..nics).map(|nic| Some(nic + 1))),
        };
        let before = [of(8)];
        Piece::carry_over(&before, &mut [of(8)]);
        assert!(!before[0].keys.is_superseded());
        let mut now = [of(9)];
        Piece::carry_over(&before, &mut now);
        assert!(before[0].keys.is_superseded() && !now[0].keys.is_superseded());
        assert_eq!(now[0].keys.get(8), Some(9));
    }

    #[test]
    fn a_small_rest_goes_with_the_slice_before() {
        for (remaining, expected) in [
            (1, 1),
            (65_536, 65_536),
            (81_920, 81_920),
            (81_921, 65_536),
            (1 << 40, 65_536),
        ] {
            assert_eq!(SLICING.cut(remaining, u64::MAX, u64::MAX), expected);
        }
    }

    #[test]
    fn no_slice_is_longer_than_the_longest_message() {
        for (longest, expected) in [
            (u32::MAX, 81_920),
            (81_920, 81_920),
            (70_000, 65_536),
            (1_000, 1_000),
            (0, 1),
        ] {
            let slicing = SLICING.within(longest);
            assert_eq!(
                slicing.cut(81_920, u64::MAX, u64::MAX),
                expected,
                "{longest}"
            );
        }
    }

    #[test]
    fn r12_a_slice_ends_at_the_seam_of_either_end() {
        assert_eq!(SLICING.cut(100_000, 10, 20), 10);
        assert_eq!(SLICING.cut(100_000, 20, 10), 10);
        let span = Span::new(
            150,
            200,
            [piece(100, 100, 1), piece(200, 100, 2), piece(300, 100, 3)],
        )
        .expect("covered");
        let at = |offset| {
            let (addr, room, keys) = span.at(offset).expect("inside");
            (addr, room, keys.get(0))
        };
        assert_eq!(at(0), (150, 50, Some(1)));
        assert_eq!(at(49), (199, 1, Some(1)));
        assert_eq!(at(50), (200, 100, Some(2)));
        assert_eq!(at(199), (349, 51, Some(3)));
    }

    #[test]
    fn r09_a_span_is_covered_to_the_last_byte_or_refused() {
        let pieces = || [piece(100, 100, 1), piece(200, 100, 2)];
        assert!(Span::new(100, 200, pieces()).is_some());
        assert!(Span::new(100, 201, pieces()).is_none());
        assert!(Span::new(99, 2, pieces()).is_none());
        assert!(Span::new(u64::MAX, 2, pieces()).is_none());
        assert!(Span::new(100, 200, [piece(100, 99, 1), piece(200, 100, 2)]).is_none());
    }
}
