//! The driver of one endpoint: carries out the machine's actions and hands the outcomes back.
//!
//! Nothing here waits for an outcome: verbs run on the NIC's control thread and messages in tasks
//! of their own, and both end as mail. So a request of the peer is answered while our own is out.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use rerail_verbs::{AsyncEventKind, Gid, ObjectId, QpState, QueuePair, WcStatus};
use tokio::sync::{mpsc, oneshot, watch};

use super::super::endpoint::{
    Action, CLOSED, CloseCause, Endpoint, Input, LocalEnds, Offer, PeerEnds, Token, is_same,
};
use super::super::events::{FenceChange, FenceStep};
use super::super::inbox::{EndpointKey, Inbox, Leftover, Order, Pairs};
use super::super::keeper::{Binding, RailKeeper};
use super::super::nic::Nic;
use super::super::opening::Opening;
use super::super::pairs::{self, Prepared, Raised};
use super::super::paths::{Paths, Row, Way};
use super::super::rail::Rail;
use super::super::signaling::SignalError;
use super::super::slice::Moment;
use super::super::transfer::Transfer;
use super::{Answer, Connector, Mailbox, Proof, order};
use crate::machine::rail::ProbeKind;
use crate::machine::{Machine, Time};

mod idle;
mod learn;
mod messages;

use idle::{Idle, Turn};
use messages::Purpose;

/// What a C++ peer answers to a request without queue pairs, after it has moved its end to ERR.
const CPP_CLOSED: &str = "QP count mismatch";

/// What reaches an endpoint.
pub(super) enum Mail {
    /// An input of the machine.
    Input(Input),
    /// The NIC's GID table, as it has just been read.
    TableRead(Arc<[Row]>),
    /// Queue pairs were made, or not.
    Prepared(Result<Prepared, String>),
    /// Queue pairs were connected, or not.
    Raised(Raised),
    /// A request of the peer.
    Request(Offer, oneshot::Sender<Answer>),
    /// A rail whose work is to be posted on it.
    Bind(Arc<Rail>, Binding),
    /// A rail that does not use it any more. It is closed, unless the rail is only `forgotten` and
    /// it serves others.
    Release {
        rail: Arc<Rail>,
        binding: Binding,
        forgotten: bool,
        /// The probe that it did not pass, if that is why.
        unproved: Option<ProbeKind>,
    },
    /// A device's event of a queue pair, which may be one of the endpoint's.
    QueuePairEvent(ObjectId, AsyncEventKind),
    /// Its queue pairs were in ERR before we moved them there.
    WereInError,
    /// It is its turn to probe whether its peer is still there.
    Turn(Turn),
    /// That probe came back, with success or not.
    Probed(WcStatus),
    /// The data thread has nothing of it any more; what was left is held for the fence.
    Drained(Leftover),
}

pub(super) struct EndpointTask {
    connector: Connector,
    key: EndpointKey,
    nic: Arc<Nic>,
    /// The open device that its queue pairs are made of.
    opening: Arc<Opening>,
    inbox: Arc<Inbox>,
    peer_path: String,
    machine: Endpoint,
    mailbox: Mailbox,
    local: Option<LocalEnds>,
    /// Own rows of the GID table to connect with, best first.
    rows: Vec<Row>,
    /// The peer has been told the GID of the first.
    is_bound: bool,
    pairs: Option<Arc<Pairs>>,
    /// That they have stopped; `None` before they are to be connected.
    proof: Option<Proof>,
    gate: Arc<AtomicBool>,
    /// The rails whose work is posted on it: mostly one.
    rails: Vec<(Arc<Rail>, Binding)>,
    /// It was opened by us.
    opened_here: bool,
    /// The data thread knows the endpoint.
    attached: bool,
    idle: Idle,
    retired: bool,
    /// When it began. A Rerail peer has to say something after that to complete it, and does not
    /// once it has closed its end, which it does before it publishes keys of the device's next
    /// opening.
    began: Moment,
    /// Gone once it is closing: what it has to say to connect is not said any more.
    open: Option<watch::Sender<()>>,
    last_token: u64,
    answers: BTreeMap<Token, oneshot::Sender<Answer>>,
    held: Vec<Arc<Transfer>>,
}

impl EndpointTask {
    pub(super) fn new(
        connector: Connector,
        key: EndpointKey,
        (nic, opening): (Arc<Nic>, Arc<Opening>),
        inbox: Arc<Inbox>,
        peer_path: String,
        machine: Endpoint,
        mailbox: Mailbox,
    ) -> Self {
        Self {
            connector,
            key,
            nic,
            opening,
            inbox,
            peer_path,
            machine,
            mailbox,
            local: None,
            rows: Vec::new(),
            is_bound: false,
            pairs: None,
            proof: None,
            gate: Arc::new(AtomicBool::new(true)),
            rails: Vec::new(),
            opened_here: false,
            attached: false,
            idle: Idle::default(),
            retired: false,
            began: Moment::now(),
            open: Some(watch::channel(()).0),
            last_token: 0,
            answers: BTreeMap::new(),
            held: Vec::new(),
        }
    }

    pub(super) async fn run(mut self, mut mail: mpsc::UnboundedReceiver<Mail>) {
        let clock = self.connector.shared.clock;
        loop {
            self.retire_if_closing();
            while let Some(action) = self.machine.poll() {
                self.act(action).await;
                self.retire_if_closing();
            }
            if self.machine.is_closed() {
                break;
            }
            let due = self.machine.next_timeout();
            let due = due.into_iter().chain(self.idle_due()).min();
            let sleep = async {
                match due {
                    Some(due) => clock.sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // What has come counts, though the time may be over: this process was stopped.
                biased;
                next = mail.recv() => match next {
                    Some(next) => {
                        #[cfg(test)]
                        super::super::storm::note_mail(mail.len());
                        self.read(next).await;
                    }
                    None => break,
                },
                () = sleep => {
                    let now = clock.now();
                    self.machine.handle_timeout(now);
                    self.look_after(now).await;
                }
            }
        }
        self.connector.forget(self.key);
        // Mail that came while it closed: nothing is left to wait for.
        mail.close();
        while let Ok(late) = mail.try_recv() {
            match late {
                Mail::Drained(leftover) => self.held.extend(leftover.held),
                Mail::Request(offer, answer) => self.connector.deliver(offer, answer),
                Mail::Bind(rail, binding) => self.connector.want(&rail, binding),
                Mail::Release {
                    rail,
                    binding,
                    forgotten,
                    unproved,
                } => self.release_elsewhere(&rail, binding, forgotten, unproved),
                Mail::Input(_)
                | Mail::Prepared(_)
                | Mail::Raised(_)
                | Mail::WereInError
                | Mail::Turn(_)
                | Mail::Probed(_)
                | Mail::TableRead(_)
                | Mail::QueuePairEvent(..) => {}
            }
        }
        self.held.iter().for_each(|transfer| transfer.release());
    }

    async fn read(&mut self, mail: Mail) {
        let now = self.connector.shared.clock.now();
        match mail {
            Mail::Input(input) => {
                self.opened_here |= input == Input::Open;
                self.machine.handle(now, input);
            }
            Mail::Prepared(Ok(prepared)) => {
                let Prepared { pairs, local, rows } = prepared;
                if let Some(row) = rows.first() {
                    let toward = self.machine.peer_gid();
                    self.paths().chosen(&self.way(), toward, row.gid);
                }
                let pairs = Arc::new(Pairs(pairs));
                self.opening.has_made(&pairs);
                self.pairs = Some(pairs);
                self.rows = rows;
                self.local = Some(local.clone());
                self.machine.handle(now, Input::Prepared(Ok(local)));
            }
            Mail::Prepared(Err(reason)) => self.machine.handle(now, Input::Prepared(Err(reason))),
            Mail::Raised(raised) => self.raised(now, raised),
            Mail::Request(offer, answer) => {
                self.last_token += 1;
                let token = Token(self.last_token);
                self.answers.insert(token, answer);
                self.machine.handle(now, Input::Requested(token, offer));
            }
            Mail::Bind(rail, binding) => self.bind(rail, binding).await,
            Mail::Release {
                rail,
                binding,
                forgotten,
                unproved,
            } => self.release(&rail, binding, forgotten, unproved).await,
            Mail::QueuePairEvent(queue_pair, kind) => {
                let own = |pairs: &Arc<Pairs>| pairs.0.iter().any(|pair| pair.id() == queue_pair);
                if self.pairs.as_ref().is_some_and(own) {
                    let cause = CloseCause::Event(kind);
                    self.machine.handle(now, Input::Close(cause));
                }
            }
            Mail::WereInError => self.were_in_error(),
            Mail::Turn(turn) => self.take_turn(now, turn).await,
            Mail::Probed(status) => self.probed(status).await,
            Mail::TableRead(table) => {
                if let Some(gone) = self.own_row().filter(|row| !table.contains(row)) {
                    let reason = format!("its own GID {} has left its row", gone.gid);
                    let cause = CloseCause::Withdrawn(reason);
                    self.machine.handle(now, Input::Close(cause));
                }
            }
            Mail::Drained(leftover) => {
                self.held.extend(leftover.held);
                if self.idle.was_only_lent() {
                    return;
                }
                let bytes = leftover.rerouted_bytes;
                if bytes > 0 {
                    self.tell_fence(FenceStep::Rerouted { bytes });
                }
                self.has_drained();
                self.machine.handle(now, Input::Drained);
            }
        }
    }

    async fn act(&mut self, action: Action) {
        #[cfg(test)]
        super::super::storm::note_action(self.key, (self.nic.name(), &self.peer_path), &action);
        match action {
            Action::Prepare => self.prepare(),
            Action::Raise(peer) => {
                let proof = Proof::new(&self.opening);
                self.proof = Some(proof.clone());
                self.connector
                    .raises(self.key, &self.way(), peer.psn, proof);
                if let Some(instance) = &peer.instance {
                    self.connector.outdate(&self.peer_path, instance);
                }
                self.raise(peer);
            }
            Action::Ask(offer) if offer.local_path == offer.peer_path => self.loop_back(offer),
            Action::Ask(offer) => {
                self.is_bound = true;
                self.exchange(offer, Purpose::Handshake, |reply| {
                    Some(Input::Replied(reply))
                });
            }
            Action::Acknowledge(offer) => {
                let acknowledged = |reply: Result<_, _>| Input::Acknowledged(reply.map(drop));
                self.exchange(offer, Purpose::Handshake, move |reply| {
                    Some(acknowledged(reply))
                });
            }
            Action::TellPeer(offer) => self.exchange(offer, Purpose::Close, |reply| match reply {
                Err(SignalError::Refused(text)) if text == CLOSED || text.contains(CPP_CLOSED) => {
                    Some(Input::PeerClosed)
                }
                _ => None,
            }),
            Action::Answer(token, offer) => {
                // Whoever reads the answer finds the place free that the handshake took.
                if self.machine.is_connected() {
                    self.connector.opened(self.key);
                }
                self.answer(token, Ok(offer));
            }
            Action::Refuse(token, reason) => self.answer(token, Err(reason)),
            Action::PassOn(token, offer) => {
                if let Some(answer) = self.answers.remove(&token) {
                    self.connector.deliver(offer, answer);
                }
            }
            Action::Attach => {
                self.connector.opened(self.key);
                tracing::info!(nic = self.nic.name(), peer = %self.peer_path, "connected");
                let instance = self.machine.peer_instance();
                let keeper = Arc::clone(self.keeper());
                let opened = keeper.opened(self.nic.index(), &self.peer_path, instance);
                for (rail, _) in &opened {
                    rail.set_endpoint(self.key);
                }
                let rails = std::mem::take(&mut self.rails).into_iter().chain(opened);
                let (fitting, others): (Vec<_>, Vec<_>) =
                    rails.partition(|(rail, _)| self.fits(rail));
                self.rails = fitting;
                for (rail, binding) in self.rails.clone() {
                    self.attach(&rail, binding).await;
                }
                for (rail, _) in others {
                    keeper.peer_restarted(&rail);
                }
                self.leave_alone();
            }
            Action::Detach => {
                self.gate.store(false, Ordering::Release);
                if self.attached {
                    self.order(Order::Detach(self.key)).await;
                }
                // After the order: the next endpoint's probe must not find this one in its place.
                self.idle = self.idle.end();
            }
            Action::ToError => self.to_error(),
            Action::AwaitDrain if self.attached => {
                self.order(Order::AwaitDrain(self.key)).await;
            }
            Action::AwaitDrain => {
                self.has_drained();
                self.input(Input::Drained);
            }
            Action::Destroy => self.destroy(),
            Action::GiveUp => {
                if self.attached {
                    self.order(Order::GiveUp(self.key)).await;
                }
            }
            Action::Fenced => {
                // An end that was never attached may be given up in a device that hangs.
                let complete = self.proof.as_ref().is_some_and(Proof::has_stopped);
                self.tell_fence(FenceStep::Ended { complete });
                for transfer in self.held.drain(..) {
                    transfer.release();
                }
            }
            Action::Unfenced(cause) => {
                tracing::error!(
                    nic = self.nic.name(), peer = %self.peer_path, %cause,
                    "queue pairs could not be stopped: their transfers' memory is not safe"
                );
                self.connector.count_unfenced();
                self.tell_fence(FenceStep::Ended { complete: false });
                if let Some(proof) = self.proof.as_ref().filter(|_| self.attached) {
                    let unfence = Order::Unfence {
                        endpoint: self.key,
                        cause,
                        quarantined_bytes: proof.quarantine(),
                    };
                    self.order(unfence).await;
                }
            }
            Action::Closed(cause) => {
                tracing::debug!(nic = self.nic.name(), peer = %self.peer_path, %cause, "closed");
                // It may never have had queue pairs.
                self.retire(&cause);
            }
        }
    }

    async fn order(&self, wanted: Order) {
        order(self.connector.shared.clock, &self.inbox, wanted).await;
    }

    /// Nothing that was posted on it is under way any more.
    fn has_drained(&self) {
        if let Some(proof) = &self.proof {
            proof.drained();
        }
    }

    /// Tells how far the fence is. One whose queue pairs were never to be connected needs none.
    fn tell_fence(&self, step: FenceStep) {
        if self.proof.is_some() {
            self.keeper().tell_fence(FenceChange {
                local: self.nic.name().to_owned(),
                peer: self.peer_path.clone(),
                step,
            });
        }
    }

    fn input(&self, input: Input) {
        // The receiver lives as long as the task does.
        let _ = self.mailbox.send(Mail::Input(input));
    }

    fn answer(&mut self, token: Token, answer: Answer) {
        if let Some(waiting) = self.answers.remove(&token) {
            if let Err(reason) = &answer
                && reason != CLOSED
            {
                tracing::info!(peer = %self.peer_path, %reason, "connection refused");
            }
            // A peer that has gone away needs no answer.
            let _ = waiting.send(answer);
        }
    }

    fn prepare(&self) {
        let (nic, mailbox) = (Arc::clone(&self.nic), self.mailbox.clone());
        let opening = Arc::clone(&self.opening);
        let config = self.connector.shared.config.clone();
        // Between Rerail peers packets of an earlier connection must not fit a later one.
        let psn = if self.connector.shared.identity.instance.is_some() {
            self.connector.packet_number()
        } else {
            0
        };
        let now = self.connector.shared.clock.now();
        let toward = self.machine.peer_gid();
        let mut advice = self.paths().advice(now, &self.way(), toward);
        // One that asks us has chosen already, and of C++ peers there is one GID to choose.
        advice.peer_chooses = self.opened_here && self.machine.peer_instance().is_some();
        let submitted = self.opening.context().control().execute(move || {
            let prepared = pairs::prepare(&nic, &opening, &config, &advice, psn);
            let prepared = prepared.map_err(|error| error.to_string());
            let _ = mailbox.send(Mail::Prepared(prepared));
        });
        if let Err(error) = submitted {
            let _ = self.mailbox.send(Mail::Prepared(Err(error.to_string())));
        }
    }

    fn raise(&self, peer: PeerEnds) {
        let (Some(pairs), Some(local)) = (self.pairs.clone(), self.local.clone()) else {
            return;
        };
        let (nic, mailbox) = (Arc::clone(&self.nic), self.mailbox.clone());
        let config = self.connector.shared.config.clone();
        let control = self.opening.context().control().clone();
        let mut rows = self.rows.clone();
        if self.is_bound {
            rows.truncate(1);
        }
        let submitted = self.opening.context().control().execute(move || {
            let own = (&local, rows.as_slice());
            let raised = pairs::raise(&pairs.0, &nic, &control, &config, own, &peer);
            // Gone before the outcome is told, so that the owner can destroy them.
            drop(pairs);
            let _ = mailbox.send(Mail::Raised(raised));
        });
        if let Err(error) = submitted {
            self.input(Input::Raised(Err(error.to_string())));
        }
    }

    fn raised(&mut self, now: Time, raised: Raised) {
        let way = self.way();
        // Queue pairs that were stopped meanwhile go nowhere, whatever the way is.
        let is_over = self.machine.close_cause().is_some() || self.opening.is_stopped();
        for gid in raised.refused.iter().filter(|_| !is_over) {
            self.paths().refused(now, &way, *gid);
        }
        let outcome = raised.outcome.map(|gid| {
            if let Some(local) = &mut self.local
                && local.gid != Some(gid)
            {
                tracing::info!(nic = self.nic.name(), peer = %self.peer_path, %gid, "other GID");
                local.gid = Some(gid);
                self.machine.handle(now, Input::Uses(gid));
            }
        });
        self.machine.handle(now, Input::Raised(outcome));
    }

    fn to_error(&self) {
        let (Some(pairs), mailbox) = (self.pairs.clone(), self.mailbox.clone()) else {
            return;
        };
        let asks = !self.opened_here && self.machine.is_mtu_unsaid();
        let proof = self.proof.clone();
        let submitted = self.opening.context().control().submit_urgent(move || {
            let is_in_error = |pair: &QueuePair| {
                let known = pair.query();
                known.is_ok_and(|known| known.state == QpState::Error)
            };
            if asks && pairs.0.iter().any(is_in_error) {
                let _ = mailbox.send(Mail::WereInError);
            }
            // All of them, whatever the others say.
            let failed = pairs
                .0
                .iter()
                .fold(None, |failed, pair| pair.to_error().err().or(failed));
            drop(pairs);
            match failed {
                None => {
                    if let Some(proof) = proof {
                        proof.give();
                    }
                    let _ = mailbox.send(Mail::Input(Input::InError));
                }
                // The machine destroys them when its time for draining is over.
                Some(error) => tracing::error!(%error, "a queue pair does not go to ERR"),
            }
        });
        if let Err(error) = submitted.map(drop) {
            tracing::error!(%error, "no queue pair can be moved to ERR");
        }
    }

    /// Destroys the queue pairs once nobody else has them, and tells when that is done.
    fn destroy(&mut self) {
        let pairs = self.pairs.take();
        let (control, mailbox) = (
            self.opening.context().control().clone(),
            self.mailbox.clone(),
        );
        let (clock, proof) = (self.connector.shared.clock, self.proof.clone());
        self.connector.shared.tasks.spawn(async move {
            let refused = control.failed_destructions();
            if let Some(pairs) = pairs {
                while Arc::strong_count(&pairs) > 1 {
                    clock.sleep(Duration::from_millis(1)).await;
                }
                drop(pairs);
            }
            // Runs after everything that was dropped before it was submitted.
            loop {
                let (mailbox, proof, of) = (mailbox.clone(), proof.clone(), control.clone());
                let barrier = control.execute(move || {
                    if of.failed_destructions() == refused
                        && let Some(proof) = &proof
                    {
                        proof.give();
                        proof.drained();
                    }
                    // One that the device refuses to destroy may be at work still, unless it is in
                    // ERR: the machine's own time limit gives the verdict.
                    if proof.is_none_or(|proof| proof.is_given()) {
                        let _ = mailbox.send(Mail::Input(Input::Destroyed));
                    }
                });
                match barrier {
                    Err(error) if error.is_retryable() => {
                        clock.sleep(Duration::from_millis(1)).await;
                    }
                    // Without a control thread nothing is known of them: the machine's own time
                    // limit gives the verdict.
                    Err(error) => {
                        tracing::error!(%error, "it is not known when queue pairs are destroyed");
                        return;
                    }
                    Ok(()) => return,
                }
            }
        });
    }

    /// A NIC that talks to itself connects its queue pairs to themselves, without a message.
    fn loop_back(&self, offer: Offer) {
        let reply = Offer {
            ready_ack: None,
            ..offer
        };
        self.input(Input::Replied(Ok(reply)));
    }

    async fn bind(&mut self, rail: Arc<Rail>, binding: Binding) {
        if self.retired {
            self.connector.want(&rail, binding);
            return;
        }
        if self.machine.is_connected() && !self.fits(&rail) {
            // Its addresses are another process's.
            self.keeper().peer_restarted(&rail);
            return;
        }
        if self.machine.is_connected() {
            self.attach(&rail, binding).await;
        }
        self.rails.retain(|(bound, _)| !Arc::ptr_eq(bound, &rail));
        self.rails.push((rail, binding));
    }

    /// The rail does not use the endpoint any more.
    async fn release(
        &mut self,
        rail: &Arc<Rail>,
        binding: Binding,
        forgotten: bool,
        unproved: Option<ProbeKind>,
    ) {
        let here =
            |(bound, since): &(Arc<Rail>, Binding)| Arc::ptr_eq(bound, rail) && *since == binding;
        if self.retired || !self.rails.iter().any(here) {
            self.release_elsewhere(rail, binding, forgotten, unproved);
            return;
        }
        self.rails.retain(|bound| !here(bound));
        if let Some(probe) = unproved.filter(|_| self.attached) {
            self.unproved(probe);
        }
        if forgotten && (!self.rails.is_empty() || !self.opened_here) {
            if self.attached {
                self.order(Order::Unlink(Arc::clone(rail))).await;
            }
            return;
        }
        let cause = CloseCause::Withdrawn("its rail is not used any more".into());
        let now = self.connector.shared.clock.now();
        self.machine.handle(now, Input::Close(cause));
    }

    /// The rail may have been bound to a later endpoint meanwhile.
    fn release_elsewhere(
        &self,
        rail: &Arc<Rail>,
        binding: Binding,
        forgotten: bool,
        unproved: Option<ProbeKind>,
    ) {
        if rail.endpoint() != self.key {
            self.connector.release(rail, binding, forgotten, unproved);
        }
    }

    async fn attach(&mut self, rail: &Arc<Rail>, binding: Binding) {
        let Some(pairs) = &self.pairs else {
            return;
        };
        let attach = Order::Attach {
            endpoint: self.key,
            rail: Arc::clone(rail),
            pairs: Arc::clone(pairs),
            began: self.began,
            gate: Arc::clone(&self.gate),
        };
        self.attached = true;
        self.idle.is_lent = false;
        rail.begins();
        self.order(attach).await;
        // After the order: a probe that comes of it finds the queue pairs there.
        self.keeper().connected(rail, binding);
    }

    fn keeper(&self) -> &Arc<RailKeeper> {
        &self.connector.shared.keeper
    }

    /// Whether the rail's work is meant for the process at the other end.
    fn fits(&self, rail: &Rail) -> bool {
        let meant = rail.instance().map(str::to_owned);
        is_same(&self.machine.peer_instance().cloned(), &meant)
    }

    fn retire_if_closing(&mut self) {
        if let Some(cause) = self.machine.close_cause().cloned() {
            self.retire(&cause);
        }
    }

    /// Makes room for the next endpoint, and tells what became of the rails'. Done once.
    fn retire(&mut self, cause: &CloseCause) {
        if std::mem::replace(&mut self.retired, true) {
            return;
        }
        self.open = None;
        self.connector.retire(&self.nic, &self.peer_path, self.key);
        self.tell_fence(FenceStep::Started {
            cause: cause.clone(),
        });
        self.learn(cause);
        // The peer is about to connect us, which is as good; or another GID may do.
        let again = !self.attached
            && (*cause == CloseCause::PeerRebuilt
                || (cause.is_unreachable() && self.is_bound && self.rows.len() > 1));
        for (rail, binding) in self.rails.drain(..) {
            let is_rebuilt = *cause == CloseCause::PeerRebuilt;
            if again && (!is_rebuilt || rail.follows_rebuilding()) {
                self.connector.want(&rail, binding);
                continue;
            }
            let keeper = &self.connector.shared.keeper;
            keeper.lost(&rail, binding, cause, self.attached);
        }
    }

    /// The local NIC and the peer's.
    fn way(&self) -> Way {
        (self.nic.index().0, self.peer_path.clone())
    }

    fn paths(&self) -> MutexGuard<'_, Paths> {
        self.connector.paths()
    }

    /// The row that it uses, if that is another one than the port's choice.
    fn own_row(&self) -> Option<Row> {
        let gid = self.own_gid()?;
        let choice = self.nic.facts().map(|facts| facts.gid.gid);
        let own = self.rows.iter().find(|row| row.gid == gid);
        own.filter(|row| choice != Some(row.gid)).copied()
    }

    fn own_gid(&self) -> Option<Gid> {
        self.local.as_ref().and_then(|local| local.gid)
    }
}
