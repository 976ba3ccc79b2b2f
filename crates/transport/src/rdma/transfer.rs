//! Accounting of one request: every byte of it ends exactly once.
//!
//! A transfer is shared by the NICs that work on it. Each claims the next slice when it has room
//! to post one, so that slices go where they finish first, and the work list is never longer than
//! the queues are deep, whatever the request's size (report X18). Slices of a connection that
//! broke are given back and claimed again. Deliberately not here: which NIC works on it, and when
//! a broken connection is fenced; see the modules `router` and `connector`.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crossbeam::queue::SegQueue;
use rerail_verbs::RdmaOpcode;

use super::rail::Peer;
use super::slice::{RefusedKey, Slice, Slicing, Span};
use crate::error::TransferError;
use crate::machine::Time;
use crate::machine::ids::LocalNic;

/// What is to be moved.
#[derive(Clone, Debug)]
pub struct TransferSpec {
    /// The owner of the far end.
    pub peer: Arc<Peer>,
    /// Write: local to remote; read: remote to local.
    pub opcode: RdmaOpcode,
    /// The near end.
    pub local: Span,
    /// The far end.
    pub remote: Span,
    /// Bytes.
    pub length: u64,
    /// Where it is cut.
    pub slicing: Slicing,
    /// When it is cut off if it is not finished, early enough for its fence to end by its
    /// deadline ([`Limits::cut_off_at`](super::endpoint::Limits::cut_off_at)).
    pub cut_off: Time,
    /// The time limit that it was given, for the error that it ends with.
    pub limit: Duration,
}

/// Who is told that a transfer has finished.
pub trait OnFinished: Send + Sync {
    /// The transfer has finished: no work of it can touch memory at either end any more. Called
    /// exactly once, on whatever thread ended the last byte, which is mostly a data thread: it
    /// must not block.
    fn finished(&self, transfer: &Transfer);
}

/// A request on its way.
pub struct Transfer {
    spec: TransferSpec,
    /// First byte that nobody has claimed. At `length` when all are claimed or given up.
    cursor: AtomicU64,
    /// Slices whose attempt was abandoned and locally fenced.
    returned: SegQueue<Slice>,
    /// Bytes that have not ended, plus one per fence that is waited for. At 0 it is finished: only
    /// a holder of a part of it adds to it, so that it never comes back from 0.
    open: AtomicU64,
    transferred: AtomicU64,
    retried_slices: AtomicU64,
    /// The local NICs that have it in their queues, a bit each.
    offered: AtomicU64,
    error: OnceLock<TransferError>,
    /// What was refused at the far end.
    refusals: Mutex<Refusals>,
    /// There is something.
    was_refused: AtomicBool,
    /// It failed since its far end may be registered anew.
    outdated: AtomicBool,
    /// Takes precedence over `error`: its memory must not be used again.
    unfenced: OnceLock<TransferError>,
    on_finished: Arc<dyn OnFinished>,
    /// What has ended.
    #[cfg(test)]
    ended: std::sync::Mutex<Vec<Range<u64>>>,
}

/// What was refused at the far end of a transfer.
#[derive(Default)]
struct Refusals {
    /// One key a NIC.
    keys: Vec<RefusedKey>,
    /// What it fails with if that is the request's mistake.
    error: Option<TransferError>,
}

/// What leads to the far end of a transfer.
#[derive(Default)]
struct Leads {
    /// A NIC that has refused it.
    refused: bool,
    /// Another one.
    others: bool,
}

impl Transfer {
    /// A transfer of which nothing is claimed. One of length 0 is finished before this returns.
    pub fn new(spec: TransferSpec, on_finished: Arc<dyn OnFinished>) -> Arc<Self> {
        let length = spec.length;
        let transfer = Arc::new(Self {
            spec,
            cursor: AtomicU64::new(0),
            returned: SegQueue::new(),
            open: AtomicU64::new(length),
            transferred: AtomicU64::new(0),
            retried_slices: AtomicU64::new(0),
            offered: AtomicU64::new(0),
            error: OnceLock::new(),
            refusals: Mutex::default(),
            was_refused: AtomicBool::new(false),
            outdated: AtomicBool::new(false),
            unfenced: OnceLock::new(),
            on_finished,
            #[cfg(test)]
            ended: std::sync::Mutex::default(),
        });
        if length == 0 {
            transfer.on_finished.finished(&transfer);
        }
        transfer
    }

    /// What is moved.
    pub fn spec(&self) -> &TransferSpec {
        &self.spec
    }

    /// Bytes that arrived. Counts whole slices.
    pub fn transferred_bytes(&self) -> u64 {
        self.transferred.load(Ordering::Acquire)
    }

    /// Slices that had to be posted again.
    pub fn retried_slices(&self) -> u64 {
        self.retried_slices.load(Ordering::Relaxed)
    }

    /// Why it failed, or is about to: set once, before it is finished.
    pub fn error(&self) -> Option<&TransferError> {
        self.unfenced.get().or(self.error.get())
    }

    /// The keys of the far end that were refused, each of another NIC; the last was refused last.
    pub fn refused_keys(&self) -> Vec<RefusedKey> {
        self.refusals().keys.clone()
    }

    /// Whether it failed because the record has other keys for the far end than it goes by. All of
    /// it can be posted again by those.
    pub fn is_outdated(&self) -> bool {
        self.outdated.load(Ordering::Acquire)
    }

    /// A key of the far end that is in force was refused. False if the key may be at fault and not
    /// the request: only one NIC has refused it, and there are others that lead to the same bytes.
    /// `error` is what it fails with once none of them does.
    pub(super) fn is_refused(&self, key: RefusedKey, error: &TransferError) -> bool {
        let mut refusals = self.refusals();
        refusals.keys.retain(|known| known.nic != key.nic);
        let others = refusals.keys.iter().any(|known| self.is_in_force(known));
        refusals.keys.push(key);
        refusals.error = Some(error.clone());
        drop(refusals);
        self.was_refused.store(true, Ordering::Release);
        others || !self.leads().others
    }

    /// Whether the peer's NIC at a position has refused the key that is known of it.
    pub(super) fn avoids(&self, nic: usize) -> bool {
        let is_of = |known: &RefusedKey| known.nic as usize == nic && self.is_in_force(known);
        self.was_refused.load(Ordering::Acquire) && self.refusals().keys.iter().any(is_of)
    }

    /// Fails it if all that leads to the far end now is what has refused it. False if not.
    pub(super) fn fail_if_refused(&self) -> bool {
        if !self.was_refused.load(Ordering::Acquire) {
            return false;
        }
        let leads = self.leads();
        let error = self.refusals().error.clone();
        match error.filter(|_| leads.refused && !leads.others) {
            Some(error) => {
                self.fail(error);
                true
            }
            None => false,
        }
    }

    /// Fails it if its far end has [other keys](super::slice::Keys::is_superseded) by now.
    pub(super) fn fail_if_outdated(&self) -> bool {
        let is_superseded = self.spec.remote.is_superseded();
        if is_superseded {
            self.fail_outdated();
        }
        is_superseded
    }

    /// Its far end has other keys by now.
    fn fail_outdated(&self) {
        if self.error.get().is_some() {
            return;
        }
        // Whoever is told of the failure asks for it.
        self.outdated.store(true, Ordering::Release);
        self.fail(TransferError::RemoteAccess {
            peer: self.spec.peer.segment().to_owned(),
            rail: "any rail".to_owned(),
            addr: self.spec.remote.addr(),
            length: u32::try_from(self.spec.length).unwrap_or(u32::MAX),
        });
    }

    /// Which of the peer's NICs can be used for the far end now.
    fn leads(&self) -> Leads {
        let mut leads = Leads::default();
        let rails = self.spec.peer.table();
        for rail in rails.iter().filter(|rail| rail.is_usable()) {
            let nic = rail.peer_position();
            if self.spec.remote.has_keys(nic) {
                let refused = self.avoids(nic);
                leads.refused |= refused;
                leads.others |= !refused;
            }
        }
        leads
    }

    fn is_in_force(&self, known: &RefusedKey) -> bool {
        self.spec.remote.key(known.offset, known.nic) == Some(known.key)
    }

    fn refusals(&self) -> MutexGuard<'_, Refusals> {
        // A list of numbers is whole whatever panicked.
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True once every byte has ended and every fence is through.
    pub fn is_finished(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    /// True while there is something to claim.
    pub fn has_work(&self) -> bool {
        self.cursor.load(Ordering::Acquire) < self.spec.length || !self.returned.is_empty()
    }

    /// Bytes that nobody has claimed, about: slices that came back count as whole ones.
    pub fn unclaimed_bytes(&self) -> u64 {
        let cursor = self.cursor.load(Ordering::Acquire).min(self.spec.length);
        let returned = self.returned.len() as u64 * u64::from(self.spec.slicing.slice_bytes);
        (self.spec.length - cursor).saturating_add(returned)
    }

    /// Notes that it is put into the queue of a local NIC. False if that has it already, and will
    /// find whatever there is to claim.
    pub(super) fn begin_offer(&self, local: LocalNic) -> bool {
        let Some(bit) = 1_u64.checked_shl(local.0) else {
            return true;
        };
        self.offered.fetch_or(bit, Ordering::SeqCst) & bit == 0
    }

    /// It has left the NIC's queue. Whoever calls this looks for work once more
    /// ([`has_work`](Self::has_work)): what came back meanwhile was not offered.
    pub(super) fn end_offer(&self, local: LocalNic) {
        if let Some(bit) = 1_u64.checked_shl(local.0) {
            self.offered.fetch_and(!bit, Ordering::SeqCst);
        }
        // The look must not come before it.
        fence(Ordering::SeqCst);
    }

    /// The next slice to post. The caller owns it and must end it, with
    /// [`complete`](Self::complete) or [`give_back`](Self::give_back).
    pub fn claim(&self) -> Option<Slice> {
        if !self.returned.is_empty()
            && let Some(slice) = self.returned.pop()
        {
            return Some(slice);
        }
        let mut offset = self.cursor.load(Ordering::Acquire);
        loop {
            if offset >= self.spec.length {
                return None;
            }
            let (_, local_room, _) = self.spec.local.at(offset)?;
            let (_, remote_room, _) = self.spec.remote.at(offset)?;
            let remaining = self.spec.length - offset;
            let length = self.spec.slicing.cut(remaining, local_room, remote_room);
            match self.cursor.compare_exchange_weak(
                offset,
                offset + u64::from(length),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Some(Slice { offset, length }),
                Err(current) => offset = current,
            }
        }
    }

    /// Ends a slice that arrived.
    pub fn complete(&self, slice: Slice) {
        let bytes = u64::from(slice.length);
        self.transferred.fetch_add(bytes, Ordering::AcqRel);
        self.end_bytes(slice.offset..slice.offset + bytes);
    }

    /// Takes a slice back whose attempt is locally fenced, to be claimed again; a failed transfer
    /// ends it.
    pub fn give_back(&self, slice: Slice) {
        if self.error.get().is_none() {
            self.retried_slices.fetch_add(1, Ordering::Relaxed);
        }
        self.unclaim(slice);
    }

    /// Takes a slice back that was claimed and never posted.
    pub fn unclaim(&self, slice: Slice) {
        self.returned.push(slice);
        // Either `fail` sees this push when it empties the queue, or this sees its error.
        fence(Ordering::SeqCst);
        if self.error.get().is_some() {
            self.end_returned();
        }
    }

    /// Fails the transfer once its time is over. True while it has failed for whatever reason.
    pub fn check_cut_off(&self, now: Time) -> bool {
        if now >= self.spec.cut_off && self.error.get().is_none() {
            self.fail(self.time_is_over());
        }
        self.error.get().is_some()
    }

    /// The error of one whose time is over.
    pub fn time_is_over(&self) -> TransferError {
        let peer = &self.spec.peer;
        let rails = peer.table();
        let mut troubles = rails.iter().filter_map(|rail| {
            let trouble = rail.last_trouble()?;
            Some(format!("{rail}: {trouble}"))
        });
        TransferError::Deadline {
            limit: self.spec.limit,
            peer: peer.segment().to_owned(),
            cause: troubles.next().unwrap_or_else(|| "none".into()),
        }
    }

    /// Fails the transfer: nothing of it can be claimed any more, and it is finished once all that
    /// is claimed has come back. Of several causes the first is kept. False if it had failed
    /// before.
    pub fn fail(&self, error: TransferError) -> bool {
        // Held meanwhile, so that no error appears on a transfer that has finished without.
        let hold = |open: u64| (open > 0).then_some(open + 1);
        let held = self
            .open
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, hold);
        if held.is_err() {
            return false;
        }
        if self.error.set(error).is_err() {
            self.release();
            return false;
        }
        fence(Ordering::SeqCst);
        let unclaimed = self.cursor.swap(self.spec.length, Ordering::AcqRel);
        self.end_returned();
        self.end_bytes(unclaimed..self.spec.length);
        // Last, because it may finish the transfer.
        self.release();
        true
    }

    /// Fails the transfer because a queue pair with work of it cannot be stopped, even if it has
    /// failed for another reason. Only for a caller that owns a slice of it, or a fence.
    pub fn unfence(&self, cause: &str) {
        let peer = self.spec.peer.segment().to_owned();
        let cause = cause.to_owned();
        let error = self
            .unfenced
            .get_or_init(|| TransferError::Unfenced { peer, cause });
        self.fail(error.clone());
    }

    /// Adds a fence that must be through before the transfer is finished. Only for a caller that
    /// owns a slice of it, or another fence.
    pub fn hold(&self) {
        self.open.fetch_add(1, Ordering::AcqRel);
    }

    /// A fence is through.
    pub fn release(&self) {
        self.end(1);
    }

    fn end_returned(&self) {
        while let Some(slice) = self.returned.pop() {
            self.end_bytes(slice.offset..slice.offset + u64::from(slice.length));
        }
    }

    fn end_bytes(&self, bytes: Range<u64>) {
        #[cfg(test)]
        self.note_ended(&bytes);
        self.end(bytes.end - bytes.start);
    }

    fn end(&self, units: u64) {
        if units == 0 {
            return;
        }
        let before = self.open.fetch_sub(units, Ordering::AcqRel);
        debug_assert!(before >= units, "{units} of {before} that are open end");
        if before == units {
            self.on_finished.finished(self);
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("opcode", &self.spec.opcode)
            .field("length", &self.spec.length)
            .field("claimed", &self.cursor.load(Ordering::Relaxed))
            .field("open", &self.open.load(Ordering::Relaxed))
            .field("error", &self.error.get())
            .finish()
    }
}

/// What tests look at: which bytes have ended, and how many fences are waited for.
#[cfg(test)]
impl Transfer {
    fn note_ended(&self, bytes: &Range<u64>) {
        if !bytes.is_empty() {
            self.ended().push(bytes.clone());
        }
    }

    fn ended(&self) -> std::sync::MutexGuard<'_, Vec<Range<u64>>> {
        self.ended.lock().expect("whole")
    }

    /// The first byte that has not ended exactly once, if the transfer is finished; `None` if all
    /// have.
    pub(super) fn first_amiss(&self) -> Option<u64> {
        let mut pieces = self.ended().clone();
        pieces.sort_unstable_by_key(|piece| piece.start);
        let mut next = 0;
        for piece in pieces {
            if piece.start != next {
                return Some(next.min(piece.start));
            }
            next = piece.end;
        }
        (next != self.spec.length).then_some(next)
    }

    /// Fences that it waits for.
    pub(super) fn fences(&self) -> u64 {
        let ended: u64 = self
            .ended()
            .iter()
            .map(|piece| piece.end - piece.start)
            .sum();
        let open = self.open.load(Ordering::Acquire);
        open.saturating_sub(self.spec.length - ended)
    }
}

#[cfg(test)]
mod tests;
