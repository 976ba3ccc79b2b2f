//! What must hold at each step of a data thread, and of what waits anywhere.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use super::ledger::{SLOTS, TransferId};
use super::node::{COMPLETIONS_MAX, Node};
use super::world::{Host, World};
use crate::machine::Time;
use crate::machine::ids::{PeerId, RailId};
use crate::rdma::driver::Activity;
use crate::rdma::paths::Row;

/// Within this time after the news that a peer was restarted its transfers have ended, but for
/// those of which something is posted.
const RESTARTED_WITHIN: Duration = Duration::from_secs(1);

/// A call of a data thread to post on a queue pair.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) struct Posted {
    /// The rail whose work it is.
    pub(in crate::rdma) rail: RailId,
    /// The endpoint's own gate.
    pub(in crate::rdma) is_gate_open: bool,
    /// The queue pair's number.
    pub(in crate::rdma) qp_num: u32,
}

thread_local! {
    static POSTED: RefCell<Vec<Posted>> = const { RefCell::new(Vec::new()) };
    /// The most that waited in the mailbox of an endpoint.
    static MAIL: Cell<usize> = const { Cell::new(0) };
}

/// An endpoint has taken in mail, and there is more.
pub(in crate::rdma) fn note_mail(left: usize) {
    MAIL.set(MAIL.get().max(left));
}

/// A data thread has posted.
pub(in crate::rdma) fn note_posted(posted: Posted) {
    if super::coverage::keeps_notes() {
        POSTED.with_borrow_mut(|all| all.push(posted));
    }
}

/// The GID table of a port as its observer was told.
pub(super) struct Table {
    /// When it was read.
    pub(super) at: Time,
    pub(super) rows: Arc<[Row]>,
}

/// A transfer that is to be reported by a certain time.
pub(super) struct Due {
    pub(super) transfer: TransferId,
    pub(super) by: Time,
}

impl World {
    /// What the data threads do.
    pub(super) fn step_drivers(&mut self, host: usize, is_first: bool) -> bool {
        let (now, fabric) = (self.now, self.fabric.clone());
        let Some(node) = self.node(host) else {
            return false;
        };
        let mut moved = false;
        for port in &mut node.ports {
            if !is_first && port.inbox.is_empty() && !port.is_busy {
                continue;
            }
            let is_shut = !port.nic.is_gate_open();
            if let (false, Some(facts)) = (is_shut, port.observer.facts(1)) {
                assert!(port.observer.gate_open(1), "the NIC's gate is open alone");
                let known = facts.gid.as_ref().map(|row| row.gid);
                let used = port.nic.facts().map(|facts| facts.gid.gid);
                assert_eq!(used, known, "an address that is known to be gone is used");
            }
            port.is_busy = port.driver.step(now) == Activity::Busy;
            moved |= port.is_busy;
            for posted in POSTED.take() {
                assert!(!is_shut, "posted through a closed gate: {posted:?}");
                assert!(
                    posted.is_gate_open,
                    "its endpoint's gate is closed: {posted:?}"
                );
                let peer = posted.rail.peer.peer;
                // A data thread and the news are not in step within one instant.
                let retired = node.retired.get(&peer);
                assert!(
                    retired.is_none_or(|since| *since == now),
                    "posted to an instance that is retired since {retired:?}: {posted:?}"
                );
                let row = fabric.own_row(port.id, posted.qp_num);
                let (Some(row), Some(table)) = (row, &port.table) else {
                    continue;
                };
                // One that is connected with a row that has come since may be ahead of the reading.
                let is_older = row.since < table.at.as_duration();
                let (index, gid) = (row.index, row.gid);
                assert!(
                    !is_older || table.rows.contains(&Row { index, gid }),
                    "posted with {row:?}, which is not in the table read at {}: {:?}",
                    table.at,
                    table.rows
                );
            }
        }
        moved
    }

    /// A peer was replaced by another process: what is not under way to it ends at once.
    pub(super) fn expect_restarted(&mut self, host: usize, peer: PeerId) {
        let by = self.now + RESTARTED_WITHIN;
        let Some(node) = self.node(host) else {
            return;
        };
        let ports = &node.ports;
        let is_posted = |transfer: &Arc<_>| {
            let mut ports = ports.iter();
            ports.any(|port| port.driver.has_posted(transfer))
        };
        let jobs = node.jobs.iter().filter(|(_, job)| {
            let transfer = &job.transfer;
            let is_over = transfer.is_finished() || transfer.error().is_some();
            job.peer == peer && !is_over && transfer.fences() == 0 && !is_posted(transfer)
        });
        let due = jobs.map(|(id, _)| Due { transfer: *id, by });
        let due: Vec<_> = due.collect();
        node.due.extend(due);
    }

    /// What was to be reported by now is.
    pub(super) fn check_due(&mut self) {
        let now = self.now;
        let hosts = self.hosts.iter_mut();
        let awake = hosts.flat_map(|host| host.node.iter_mut().chain(&mut host.ghost));
        for node in awake.filter(|node| !node.frozen) {
            let mut late = node.due.iter().filter(|due| due.by <= now);
            let late = late.find(|due| node.jobs.contains_key(&due.transfer));
            let late = late.map(|due| due.transfer);
            assert_eq!(late, None, "not reported in time, with nothing posted");
            node.due.retain(|due| now < due.by);
        }
    }

    /// Every queue is within its bound: a few times what the work at hand explains.
    pub(super) fn check_bounds(&self) {
        let deferred = self.hosts.iter().map(|host| host.deferred.len());
        let coming = self.coming.len() + self.ends.len() + deferred.sum::<usize>();
        let nodes = || self.hosts.iter().flat_map(Host::processes);
        let ports = nodes().map(|node| node.ports.len()).sum::<usize>();
        let ends = nodes().map(|node| node.connector.endpoints());
        let ends = ends.sum::<usize>();
        let tasks = nodes().map(|node| node.turns.tasks()).sum::<usize>();
        let fabric = self.fabric.stats();
        // Work that was given up stays with the device until its queue pair is destroyed.
        let work_max = 2 * ports * COMPLETIONS_MAX as usize;
        // Whatever a node knows of its peers, they know it.
        let pairs_of = |node: &Node| node.ports.len() * (ports - node.ports.len());
        let world = [
            ("things to come", coming, 2_000),
            (
                "messages without an answer",
                self.exchanges.len(),
                64 + 2 * ends,
            ),
            ("endpoint's mail", MAIL.take(), 64),
            ("sleepers", self.hand.sleepers(), 64 + 4 * tasks),
            ("events of devices", fabric.events, 64 * ports),
            ("completions", fabric.completions, work_max),
            ("work requests", fabric.work_requests, work_max),
            ("packets", fabric.packets, 10_000),
            ("things that are due in the fabric", fabric.due, 10_000),
        ];
        assert_within(&world);
        for node in nodes() {
            let rails = node.known.values().map(|known| known.peer.rails().len());
            let rails = rails.sum::<usize>().max(pairs_of(node));
            let (jobs, ends) = (node.jobs.len(), node.connector.endpoints());
            assert_within(&[
                // Each rail has one, and for some time those that are being fenced.
                ("endpoints", ends, 64 + 16 * rails),
                // A message that nobody answers is waited for as long as a connection may take,
                // 10 s, and each rail sends some a second.
                ("tasks", node.turns.tasks(), 64 + 8 * ends + 24 * rails),
                ("outgoing news", node.outbox.waiting(), 64),
                // Each transfer may be there a few times, some that are over until they are seen.
                ("parked transfers", node.router.parked(), 64 + 2 * jobs),
                (
                    "commands of the rails",
                    node.keeper.commands(),
                    64 + 4 * rails,
                ),
            ]);
            for port in &node.ports {
                let work = port.inbox.work.len() + port.driver.pending();
                assert_within(&[
                    // Each transfer once.
                    ("work of a NIC", work, jobs + SLOTS),
                    ("orders of a NIC", port.inbox.orders.len(), 64 + ends),
                    ("reports of a NIC", port.driver.reports(), 64 + 2 * ends),
                ]);
                for control in &port.controls {
                    let waiting = control.thread.waiting();
                    // Of ends that are gone, too, while it hangs.
                    let most = 64 + 8 * ends + 16 * rails;
                    assert_within(&[("verbs of a device", waiting, most)]);
                }
            }
        }
    }
}

/// Each figure, with its name, is at most what comes with it.
fn assert_within(figures: &[(&str, usize, usize)]) {
    for (what, found, most) in figures {
        assert!(found <= most, "{found} {what}, of {most} at most");
    }
}
