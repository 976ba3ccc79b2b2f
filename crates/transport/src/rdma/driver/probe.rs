//! Probes: READs of the engine's own, by which a rail is proved before it carries user work.
//!
//! A probe goes over each queue pair of the rail's endpoint, since each has a connection of its
//! own. It passes the gates of the NIC and the endpoint like any work. Deliberately not here: what
//! is probed and when, which the rail machine decides.

use rerail_verbs::{RdmaOpcode, Sge, WcStatus, WorkRequest};

use super::Driver;
use crate::machine::Time;
use crate::machine::ids::RailId;
use crate::machine::verdict::{Verdict, verdict};
use crate::rdma::inbox::{Probe, Report};
use crate::rdma::link::{Cargo, Flight, LaneProbe, WorkKeys};

impl Driver {
    /// Keeps a probe until it can be posted. A later one replaces it: the machine has given the
    /// earlier one up by then.
    pub(super) fn take_probe(&mut self, order: Probe) {
        let lane = self.lane(&order.rail);
        self.lanes[lane].probe = Some(LaneProbe { order, left: 0 });
    }

    /// Posts a lane's probe if there is room. False if it has to wait.
    pub(super) fn post_probe(&mut self, index: usize, now: Time) -> bool {
        let lane = &self.lanes[index];
        let Some(LaneProbe { order, .. }) = &lane.probe else {
            return false;
        };
        let (rail, probe) = (order.rail.id(), order.probe);
        let link = lane.link();
        let link = link.and_then(|key| Some((key, self.links.get_mut(key)?)));
        let Some((key, link)) = link else {
            // Its endpoint broke before.
            self.end_probe(index, rail, probe, WcStatus::WrFlushErr);
            return true;
        };
        let Some(pairs) = link.open_pairs().filter(|_| link.has_room()) else {
            return false;
        };
        if self.flights.room() < pairs.0.len() {
            return false;
        }
        // A device that has just died is reported by others.
        let Some(opening) = self.nic.opening() else {
            return false;
        };
        let mut request = probe_request(order, opening.scratch());
        let mut refused = None;
        let mut left = 0;
        for (queue, pair) in pairs.0.iter().enumerate() {
            let flight = Flight {
                cargo: Cargo::Probe(probe),
                lane: index,
                link: key,
                queue,
                keys: WorkKeys::default(),
            };
            let Ok(wr_id) = self.flights.insert(flight) else {
                break;
            };
            request.wr_id = wr_id;
            match pair.post(std::slice::from_ref(&request)) {
                Err(error) if error.posted + error.in_doubt == 0 => {
                    self.flights.remove(wr_id);
                    refused = Some(error);
                    break;
                }
                _ => {}
            }
            link.posted(queue, 0, now);
            self.lanes[index].posted(now);
            left += 1;
        }
        if let Some(probe) = &mut self.lanes[index].probe {
            probe.left = left;
        }
        #[cfg(test)]
        for pair in &pairs.0 {
            self.note_posted(index, key, pair);
        }
        if let Some(error) = refused {
            self.lanes[index].probe = None;
            self.break_link(key, &format!("a probe cannot be posted: {error}"));
        }
        true
    }

    /// A probe came back from one queue pair with success.
    pub(super) fn probe_came_back(&mut self, index: usize, number: u64) {
        let Some(probe) = &mut self.lanes[index].probe else {
            return;
        };
        if probe.order.probe != number || probe.left == 0 {
            return;
        }
        probe.left -= 1;
        if probe.left == 0 {
            let rail = probe.order.rail.id();
            self.end_probe(index, rail, number, WcStatus::Success);
        }
    }

    /// A probe came back from one queue pair with an error. That of a queue pair that was broken
    /// already says nothing: whoever broke it has reported why.
    pub(super) fn probe_failed(&mut self, index: usize, number: u64, status: WcStatus) {
        let current = self.lanes[index].probe.as_ref();
        if current.is_some_and(|probe| probe.order.probe == number)
            && verdict(status) != Verdict::Flushed
        {
            let rail = self.lanes[index].rail.id();
            self.end_probe(index, rail, number, status);
        }
    }

    fn end_probe(&mut self, index: usize, rail: RailId, probe: u64, status: WcStatus) {
        self.lanes[index].probe = None;
        self.unsent.push_back(Report::ProbeDone {
            rail,
            probe,
            status,
        });
    }
}

fn probe_request(order: &Probe, scratch: &rerail_verbs::MemoryRegion) -> WorkRequest {
    if order.length == 0 {
        return WorkRequest::new(RdmaOpcode::Read, 0, &[], order.remote);
    }
    let local = Sge {
        addr: scratch.addr(),
        length: order.length,
        lkey: scratch.lkey(),
    };
    WorkRequest::read(0, local, order.remote)
}
