//! READs whose success is not to be believed yet.
//!
//! soft-RoCE resumes a READ whose answers were lost with an answer that its own requester does not
//! expect, ends the READ with the status *success* although bytes of it are missing, and moves the
//! queue pair to ERR (seen on Linux 6.1: verified bytes were wrong, and what was posted behind came
//! back flushed without any error before it). So, on such a device only, the newest successful READ
//! of a queue pair counts once more work has succeeded on it; where none is in flight behind it, a
//! READ of no bytes is posted, which cannot be resumed. Cards end such a READ with an error.
//!
//! Deliberately not here: WRITEs, whose acknowledgement says what it says.

use std::sync::Arc;

use rerail_verbs::{RdmaOpcode, RemoteAddress, WorkRequest};

use super::Driver;
use crate::machine::Time;
use crate::rdma::link::{Cargo, Flight};
use crate::rdma::slice::Slice;
use crate::rdma::transfer::Transfer;

/// Vendor that soft-RoCE devices report.
const SOFT_ROCE_VENDOR: u32 = 0x00ff_ffff;

/// True for a device whose READs need proof.
pub(super) fn doubts_reads(vendor_id: u32) -> bool {
    vendor_id == SOFT_ROCE_VENDOR
}

impl Driver {
    /// Work of a queue pair came back with success: what was in doubt is proved, and a READ is in
    /// doubt itself.
    pub(super) fn believe_or_doubt(&mut self, flight: Flight, now: Time) {
        let Some(link) = self.links.get_mut(flight.link) else {
            return;
        };
        let queue = &mut link.queues[flight.queue];
        if let Some((transfer, slice)) = queue.doubtful.take() {
            transfer.complete(slice);
        }
        let Flight {
            cargo,
            lane,
            link,
            keys,
            ..
        } = flight;
        let Cargo::Slice(transfer, slice) = cargo else {
            return;
        };
        if transfer.spec().opcode != RdmaOpcode::Read {
            transfer.complete(slice);
            return;
        }
        let empty = queue.in_flight == 0;
        queue.doubtful = Some((Arc::clone(&transfer), slice));
        if empty {
            let proof = Flight {
                cargo: Cargo::Proof,
                lane,
                link,
                queue: flight.queue,
                keys,
            };
            self.prove(proof, &transfer, slice, now);
        }
    }

    /// Posts a READ of no bytes behind the READ of `slice`, whose success proves it.
    fn prove(&mut self, proof: Flight, transfer: &Transfer, slice: Slice, now: Time) {
        let (key, lane, queue) = (proof.link, proof.lane, proof.queue);
        // A link that is broken gives what is in doubt back once it is drained.
        let Some(pairs) = self.links.get_mut(key).and_then(|link| link.open_pairs()) else {
            return;
        };
        // With the READ's own key: soft-RoCE looks the key of a repeated READ up, even of no bytes.
        let Some(mut request) = proof_request(transfer, slice, proof.keys.remote) else {
            self.break_link(key, "no key to prove a READ with");
            return;
        };
        let Ok(wr_id) = self.flights.insert(proof) else {
            // As many flights as completions fit; one has just come back, so this cannot be.
            self.break_link(key, "no room to prove a READ");
            return;
        };
        request.wr_id = wr_id;
        if let Some(link) = self.links.get_mut(key) {
            link.posted(queue, 0, now);
        }
        self.lanes[lane].posted(now);
        let posted = pairs.0[queue].post(&[request]);
        #[cfg(test)]
        self.note_posted(lane, key, &pairs.0[queue]);
        if let Err(error) = posted
            && error.posted + error.in_doubt == 0
        {
            self.flights.remove(wr_id);
            self.lanes[lane].came_back(0, now);
            if let Some(link) = self.links.get_mut(key) {
                link.came_back(queue, 0, now);
            }
            self.break_link(key, &format!("a READ cannot be proved: {error}"));
        }
    }
}

fn proof_request(transfer: &Transfer, slice: Slice, rkey: u32) -> Option<WorkRequest> {
    let (addr, ..) = transfer.spec().remote.at(slice.offset)?;
    let remote = RemoteAddress { addr, rkey };
    Some(WorkRequest::new(RdmaOpcode::Read, 0, &[], remote))
}
