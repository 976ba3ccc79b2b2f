//! Whether the peer of an end that nothing is posted on is still there.
//!
//! Of an end that a peer has opened, and that no rail of ours uses, nobody hears when the peer's
//! process or host dies: RDMA tells a target nothing. So such an end is probed now and then, by a
//! READ of no bytes, as rails are: it needs no key, every peer's device answers it, a stopped
//! process's too, and where it is not answered the queue pair breaks and the end is closed as
//! always. One end of a NIC is probed at a time. The data thread has the queue pairs only as long.
//!
//! soft-RoCE looks the key of a READ up that it repeats, though it reads nothing. There a lost
//! packet of a probe costs the connection of a peer that lives: it is made anew.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use rerail_verbs::{RemoteAddress, WcStatus};
use tokio::sync::OwnedSemaphorePermit;

use super::{EndpointTask, Mail, Order};
use crate::machine::Time;
use crate::rdma::inbox::Probe;

/// How long a probe may take, and wait before it is posted. One in flight ends sooner by itself:
/// this is for a NIC whose gate is closed.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// The right to probe an end of a NIC.
pub(in crate::rdma::connector) type Turn = OwnedSemaphorePermit;

/// What is known of an end that nothing is posted on.
#[derive(Default)]
pub(super) struct Idle {
    /// When it is to be probed.
    due: Option<Time>,
    /// A turn is waited for.
    asks: bool,
    /// It is being probed, until then at most.
    turn: Option<(Turn, Time)>,
    /// The data thread has the queue pairs for the probe only.
    pub(super) is_lent: bool,
    /// Drains that the data thread will report because it gave the queue pairs back.
    given_back: u32,
}

impl Idle {
    /// It is being closed: nothing is probed any more.
    pub(super) fn end(&mut self) -> Self {
        Self {
            given_back: self.given_back,
            ..Self::default()
        }
    }

    /// Whether a drain that is reported is that of an end which goes on.
    pub(super) fn was_only_lent(&mut self) -> bool {
        let only_lent = self.given_back > 0;
        self.given_back = self.given_back.saturating_sub(1);
        only_lent
    }
}

impl EndpointTask {
    /// When [`look_after`](Self::look_after) is next to be called.
    pub(super) fn idle_due(&self) -> Option<Time> {
        match &self.idle.turn {
            Some((_, until)) => Some(*until),
            None => self.idle.due.filter(|_| !self.idle.asks),
        }
    }

    /// Leaves the peer alone for a while, which differs from end to end.
    pub(super) fn leave_alone(&mut self) {
        let shared = &self.connector.shared;
        let longest = shared.config.limits.idle;
        let shorter = self.connector.chance().random_range(0.0..0.25);
        self.idle.due = Some(shared.clock.now() + longest.mul_f64(1.0 - shorter));
    }

    /// Asks for a turn to probe the peer, if it is time to and nothing else would tell.
    pub(super) async fn look_after(&mut self, now: Time) {
        if self.idle_due().is_none_or(|due| now < due) {
            return;
        }
        if self.idle.turn.is_some() {
            return self.end_turn(false).await;
        }
        self.leave_alone();
        if !self.machine.is_connected() || !self.rails.is_empty() {
            return;
        }
        self.idle.asks = true;
        let (turns, mailbox) = (self.connector.turns(&self.nic), self.mailbox.clone());
        self.connector.shared.tasks.spawn(async move {
            // Never closed.
            if let Ok(turn) = turns.acquire_owned().await {
                let _ = mailbox.send(Mail::Turn(turn));
            }
        });
    }

    /// It is its turn.
    pub(super) async fn take_turn(&mut self, now: Time, turn: Turn) {
        self.idle.asks = false;
        let is_idle = self.machine.is_connected() && self.rails.is_empty();
        let (Some(pairs), Some(rail)) = (&self.pairs, self.connector.probing_rail(&self.nic))
        else {
            return;
        };
        // Nothing is posted through a closed gate, and others would wait.
        if !is_idle || !self.nic.is_gate_open() {
            return;
        }
        let attach = Order::Attach {
            endpoint: self.key,
            rail: Arc::clone(&rail),
            pairs: Arc::clone(pairs),
            began: self.began,
            gate: Arc::clone(&self.gate),
        };
        self.idle.turn = Some((turn, now + PROBE_LIMIT));
        self.idle.is_lent |= !self.attached;
        self.attached = true;
        self.order(attach).await;
        self.order(Order::Probe(Probe {
            rail,
            probe: self.key,
            remote: RemoteAddress { addr: 0, rkey: 0 },
            length: 0,
        }))
        .await;
    }

    /// Its probe came back. That of one that failed has broken the queue pair, which the data
    /// thread reports by itself.
    pub(super) async fn probed(&mut self, status: WcStatus) {
        if self.idle.turn.is_some() {
            self.end_turn(status == WcStatus::Success).await;
        }
    }

    /// Makes room for the next end of the NIC. The data thread gives the queue pairs back, unless
    /// something may be in flight on them.
    async fn end_turn(&mut self, has_come_back: bool) {
        let turn = self.idle.turn.take();
        if let Some(rail) = self.connector.probing_rail(&self.nic) {
            self.order(Order::Unlink(rail)).await;
        }
        if self.idle.is_lent && has_come_back && self.machine.is_connected() {
            self.idle.is_lent = false;
            self.attached = false;
            self.idle.given_back += 1;
            self.order(Order::AwaitDrain(self.key)).await;
        }
        self.leave_alone();
        drop(turn);
    }
}

#[cfg(test)]
mod tests {
    use rerail_verbs::Gid;
    use tokio::sync::mpsc;

    use super::*;
    use crate::machine::Machine as _;
    use crate::rdma::RdmaTransport;
    use crate::rdma::endpoint::{Endpoint, Input, Limits, LocalEnds, Offer, Parties, Token};
    use crate::rdma::inbox::{Inbox, Pairs};
    use crate::rdma::keeper::Binding;
    use crate::rdma::rig::{peer_of, rig};

    const KEY: u64 = 1_000_000;

    /// The end of a connection that a peer has opened. Nobody obeys its orders.
    fn end(own: &RdmaTransport) -> EndpointTask {
        let (local_path, peer_path) = ("host1@sim0".to_owned(), "host0@sim0".to_owned());
        let asked = Offer {
            local_path: peer_path.clone(),
            peer_path: local_path.clone(),
            gid: Some(Gid::NULL),
            ..Offer::default()
        };
        let parties = Parties {
            local_path,
            peer_path: peer_path.clone(),
            instance: None,
            peer_instance: None,
            fallback: None,
        };
        let now = own.clock().now();
        let mut machine = Endpoint::new(now, parties, Limits::default());
        let asked = Offer {
            qp_nums: vec![17],
            ..asked
        };
        machine.handle(now, Input::Requested(Token(1), asked));
        let made = LocalEnds {
            qp_nums: vec![17],
            ..LocalEnds::default()
        };
        machine.handle(now, Input::Prepared(Ok(made)));
        machine.handle(now, Input::Raised(Ok(())));
        while machine.poll().is_some() {}
        assert!(machine.is_connected());
        let nic = Arc::clone(&own.nics()[0]);
        let opening = nic.opening().expect("open");
        let connector = own.connector().clone();
        let inbox = Arc::new(Inbox::new(Arc::default()));
        // Its mail is brought by hand.
        let (mailbox, _) = mpsc::unbounded_channel();
        let device = (nic, opening);
        let mut end = EndpointTask::new(connector, KEY, device, inbox, peer_path, machine, mailbox);
        end.pairs = Some(Arc::new(Pairs(Vec::new())));
        end
    }

    impl EndpointTask {
        fn turn(&self) -> Option<Turn> {
            self.connector.turns(&self.nic).try_acquire_owned().ok()
        }

        /// What the data thread was ordered to do, oldest first.
        fn ordered(&self) -> Vec<&'static str> {
            let orders = std::iter::from_fn(|| self.inbox.orders.pop());
            let names = orders.map(|order| match order {
                Order::Attach { .. } => "attach",
                Order::Probe(_) => "probe",
                Order::Unlink(_) => "unlink",
                Order::AwaitDrain(KEY) => "give back",
                other => panic!("{other:?}"),
            });
            names.collect()
        }

        async fn begins(&mut self, now: Time) {
            let turn = self.turn().expect("nobody has it");
            self.take_turn(now, turn).await;
            assert!(self.turn().is_none(), "one of the NIC's ends at a time");
        }
    }

    /// Runs what an end does at a time.
    fn with_end(run: impl AsyncFnOnce(&mut EndpointTask, Time)) {
        let rig = rig(50, 1);
        let own = rig.transport(1, "b1");
        let (mut end, now) = (end(&own), own.clock().now());
        rig.runtime.block_on(run(&mut end, now));
        assert!(end.turn().is_some(), "the next one can be probed");
    }

    #[test]
    fn queue_pairs_that_were_lent_for_a_probe_are_given_back_when_it_has_come_back() {
        with_end(async |end, now| {
            for _ in 0..2 {
                end.begins(now).await;
                assert_eq!(end.ordered(), ["attach", "probe"]);
                end.probed(WcStatus::Success).await;
                assert_eq!(end.ordered(), ["unlink", "give back"]);
                assert!(!end.attached);
            }
        });
    }

    #[test]
    fn queue_pairs_that_the_data_thread_has_for_other_reasons_stay_there() {
        with_end(async |end, now| {
            end.attached = true;
            end.begins(now).await;
            assert_eq!(end.ordered(), ["attach", "probe"]);
            end.probed(WcStatus::Success).await;
            assert_eq!(end.ordered(), ["unlink"]);
            assert!(end.attached);
        });
    }

    #[test]
    fn queue_pairs_that_a_rail_takes_over_while_they_are_lent_stay_there() {
        let rig = rig(51, 1);
        let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
        let rail = Arc::clone(&peer_of(&b, 1, &a).rails()[0]);
        let (mut end, now) = (end(&b), b.clock().now());
        rig.runtime.block_on(async {
            end.begins(now).await;
            end.bind(rail, Binding::NONE).await;
            assert_eq!(end.ordered(), ["attach", "probe", "attach"]);
            end.probed(WcStatus::Success).await;
        });
        assert_eq!(end.ordered(), ["unlink"]);
        assert!(end.attached);
    }

    #[test]
    fn a_probe_that_does_not_come_back_in_its_time_holds_up_no_other_and_is_not_posted_later() {
        with_end(async |end, now| {
            end.begins(now).await;
            assert_eq!(end.ordered(), ["attach", "probe"]);
            let until = now + PROBE_LIMIT;
            assert_eq!(end.idle_due(), Some(until));
            end.look_after(until).await;
            // Something may be in flight on them.
            assert_eq!(end.ordered(), ["unlink"]);
            assert!(end.attached && end.turn().is_some());
            // Given back by the next one that comes back.
            end.begins(until).await;
            assert_eq!(end.ordered(), ["attach", "probe"]);
            end.probed(WcStatus::Success).await;
            assert_eq!(end.ordered(), ["unlink", "give back"]);
        });
    }

    #[test]
    fn nothing_is_probed_and_nobody_waits_while_the_gate_is_closed() {
        with_end(async |end, now| {
            end.nic.set_gate(false);
            let turn = end.turn().expect("nobody has it");
            end.take_turn(now, turn).await;
            assert!(end.ordered().is_empty() && !end.attached);
        });
    }

    #[test]
    fn each_drain_of_queue_pairs_that_were_only_lent_is_told_from_that_of_the_end() {
        let mut idle = Idle {
            given_back: 2,
            ..Idle::default()
        };
        assert!(idle.was_only_lent());
        // Its report may still be under way when the end begins to close.
        idle = idle.end();
        assert!(idle.was_only_lent());
        assert!(!idle.was_only_lent(), "this one ends it");
    }
}
