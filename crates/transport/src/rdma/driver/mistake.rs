//! Whose mistake it is that a key was refused.
//!
//! A completion's status does not tell a key that was never right from one that was right until a
//! device was given up, mostly one that works on, or until memory was registered anew. So it is the
//! request's mistake only if the key is in force when the refusal comes; and, of a peer's key, not
//! by the word of one NIC whose record may be late, as long as another one leads to the same bytes.
//! Nor by that of a connection that is older than the key: its other end may be one that the peer
//! made of the device before it was opened again, and that hangs about.

use rerail_verbs::WcStatus;

use super::Driver;
use crate::TransferError;
use crate::machine::verdict::{RequestFault, Verdict, verdict};
use crate::rdma::link::WorkKeys;
use crate::rdma::rail::Rail;
use crate::rdma::slice::{RefusedKey, Slice};
use crate::rdma::transfer::Transfer;

impl Driver {
    /// What a transfer fails with, of which a slice came back with `status`, if that is its own
    /// mistake. `posted` are the lane, the link and the keys of the slice.
    pub(super) fn mistake(
        &mut self,
        transfer: &Transfer,
        slice: Slice,
        (lane, link, posted): (usize, u64, WorkKeys),
        status: WcStatus,
    ) -> Option<TransferError> {
        let Verdict::Request(fault) = verdict(status) else {
            return None;
        };
        let link = self.links.get_mut(link)?;
        if self.nic.is_over(link.opening) {
            return None;
        }
        let began = link.began;
        let spec = transfer.spec();
        let rail = &self.lanes[lane].rail;
        let (own, far) = (self.nic.index().0, rail.id().peer.nic);
        let error = || request_error(transfer, slice, rail, status);
        match fault {
            RequestFault::LocalKey => {
                let is_in_force = spec.local.key(slice.offset, own) == Some(posted.local);
                is_in_force.then(error)
            }
            RequestFault::RemoteKey => {
                let is_in_force = spec.remote.key(slice.offset, far) == Some(posted.remote);
                let is_older = began < spec.remote.told(slice.offset, far);
                if transfer.fail_if_outdated() || !is_in_force || is_older {
                    return None;
                }
                let key = RefusedKey {
                    offset: slice.offset,
                    nic: far,
                    key: posted.remote,
                };
                let error = error();
                transfer.is_refused(key, &error).then_some(error)
            }
            // Lost packets cause it on soft-RoCE as well, and ends that disagree on the MTU.
            RequestFault::Length => None,
        }
    }
}

/// The error of a request that is itself at fault.
fn request_error(
    transfer: &Transfer,
    slice: Slice,
    rail: &Rail,
    status: WcStatus,
) -> TransferError {
    let spec = transfer.spec();
    if status == WcStatus::RemAccessErr {
        TransferError::RemoteAccess {
            peer: rail.segment().to_owned(),
            rail: rail.to_string(),
            addr: spec.remote.addr() + slice.offset,
            length: slice.length,
        }
    } else {
        TransferError::Refused {
            rail: rail.to_string(),
            addr: spec.local.addr() + slice.offset,
            length: slice.length,
            cause: status.to_string(),
        }
    }
}
