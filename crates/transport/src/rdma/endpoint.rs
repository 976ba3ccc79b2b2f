//! The life of one connection between a local NIC and a peer's NIC, as a machine.
//!
//! An endpoint is **one-shot**: a set of queue pairs that is connected once, and after any fault
//! is cut, fenced and destroyed. Connecting again means another endpoint (report H14). It may be
//! opened by us (active), by the peer (passive) or by both at once; then both ends keep the one
//! set of queue pairs that each has announced (report H03).
//!
//! ```text
//!          Open                    Reply               ReadyAckReply
//! New ──> Preparing ──> Offered ──────────> Raising ────────────────> Connected ──┐
//!   Request  │             │ Request           │ (passive: answered)     ▲        │ fault,
//!   ─────────┘             └───────────────────┤                         │        │ close,
//!                                              └──> AwaitingReadyAck ────┘        │ time
//!                                                          └──────────────────────┤
//!                              Closed <── Fencing <── Draining <── Failing <──────┘
//! ```
//!
//! Deliberately not here: messages' JSON, verbs, which endpoint a request belongs to (the
//! connector looks that up), back-off between endpoints, and the work that flows.

use std::collections::VecDeque;
use std::time::Duration;

use rerail_verbs::Gid;

use super::signaling::SignalError;
use crate::machine::{Machine, Time};

mod action;
mod closing;
#[cfg(test)]
pub(super) mod states;

pub use action::{Action, CloseCause, Input, LocalEnds, Offer, PeerEnds, Token, UNREACHABLE};
pub use closing::CLOSED;

/// Time limits of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// From the start until connected.
    pub connect: Duration,
    /// A passive endpoint waits this long for the ready acknowledgement.
    pub ready_ack: Duration,
    /// From the order to go to ERR until the queue pairs are; later they are destroyed, which their
    /// control thread does behind that order.
    pub to_error: Duration,
    /// From ERR until drained; later the queue pairs are destroyed undrained. A device flushes in
    /// microseconds: what has not come back in this time does not come. It begins anew, once, where
    /// this process stood still at its end: then our own thread may just not have looked.
    pub drain: Duration,
    /// From the order to destroy until it is taken for hung (design §6, `fence_max_ms`). With the
    /// two above it is the longest that a local fence takes, or fails after: 2.5 s as they are.
    pub fence: Duration,
    /// How long a packet may live in the network after its queue pair is gone, for a peer that
    /// does not confirm its end.
    pub packet_lifetime: Duration,
    /// After this time at most an end that a peer opened, and that no rail of ours uses, is probed:
    /// nothing else tells that its peer has died.
    pub idle: Duration,
}

impl Limits {
    /// When the unfinished work of a transfer is cut off, so that its fence ends by `deadline`
    /// even if the peer does not answer. A transfer shorter than twice that time is cut off after
    /// half of it, and may be reported late: being late is better than being wrong.
    pub fn cut_off_at(&self, submitted: Time, deadline: Time) -> Time {
        let span = deadline.saturating_since(submitted);
        deadline - self.packet_lifetime.min(span / 2)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            ready_ack: Duration::from_secs(10),
            to_error: Duration::from_secs(1),
            drain: Duration::from_millis(500),
            fence: Duration::from_secs(1),
            packet_lifetime: Duration::from_secs(2),
            idle: Duration::from_secs(60),
        }
    }
}

/// Who an endpoint connects.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parties {
    /// Own NIC path.
    pub local_path: String,
    /// The peer's NIC path.
    pub peer_path: String,
    /// Own instance, told to Rerail peers.
    pub instance: Option<String>,
    /// The instance that the peer is believed to be; `None` for C++ peers.
    pub peer_instance: Option<String>,
    /// Where the peer is by its record, for messages that do not say.
    pub fallback: Option<(Gid, u16)>,
}

/// A time limit that is found to be over by this much or more says that nothing of this process
/// ran.
const STOOD_STILL: Duration = Duration::from_millis(200);

#[derive(Clone, PartialEq, Eq, Debug)]
enum State {
    New,
    /// Queue pairs are being made.
    Preparing,
    /// Our request is out; the queue pairs are in INIT.
    Offered,
    /// The queue pairs are being moved to RTS.
    Raising,
    /// Our ready acknowledgement is out.
    Acknowledging,
    /// The peer has our answer; nothing is posted before its acknowledgement.
    AwaitingReadyAck {
        until: Time,
    },
    Connected,
    Failing(closing::Closing),
    Closed,
}

/// The machine. See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoint {
    parties: Parties,
    limits: Limits,
    state: State,
    deadline: Time,
    local: Option<LocalEnds>,
    peer: Option<PeerEnds>,
    /// Requests of the peer that are to be answered once the queue pairs are ready.
    waiting: Vec<Token>,
    /// A request of the peer that came before our own queue pairs were made.
    early: Option<(Token, Offer)>,
    /// Our own request was answered with the peer's ends, so that we acknowledge.
    answered: bool,
    actions: VecDeque<Action>,
}

impl Endpoint {
    /// An endpoint that nothing has happened to.
    pub fn new(now: Time, parties: Parties, limits: Limits) -> Self {
        Self {
            parties,
            limits,
            state: State::New,
            deadline: now + limits.connect,
            local: None,
            peer: None,
            waiting: Vec::new(),
            early: None,
            answered: false,
            actions: VecDeque::new(),
        }
    }

    /// True while work may be posted.
    pub fn is_connected(&self) -> bool {
        self.state == State::Connected
    }

    /// True once it is being cut or has been: a request that comes now is for another endpoint.
    pub fn is_closing(&self) -> bool {
        matches!(self.state, State::Failing(_) | State::Closed)
    }

    /// True once everything of it is gone, at both ends as far as can be known.
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// Why it is being closed; `None` before and after.
    pub fn close_cause(&self) -> Option<&CloseCause> {
        match &self.state {
            State::Failing(closing) => Some(closing.cause()),
            _ => None,
        }
    }

    /// The peer's instance, as far as it is known.
    pub fn peer_instance(&self) -> Option<&String> {
        let told = self.peer.as_ref().and_then(|peer| peer.instance.as_ref());
        told.or(self.parties.peer_instance.as_ref())
    }

    /// True if the peer is known, and does not say which path MTU it uses.
    pub fn is_mtu_unsaid(&self) -> bool {
        let peer = self.peer.as_ref();
        peer.is_some_and(|peer| peer.path_mtu.is_none())
    }

    /// The peer's GID, as far as it is known: by its message, else by its record.
    pub fn peer_gid(&self) -> Option<Gid> {
        let told = self.peer.as_ref().map(|peer| peer.gid);
        let early = || self.early.as_ref().and_then(|(_, offer)| offer.gid);
        let recorded = || self.parties.fallback.map(|(gid, _)| gid);
        told.or_else(early).or_else(recorded)
    }

    fn go(&mut self, to: State) {
        #[cfg(test)]
        crate::machine::seen::follows_on(&self.state, &to);
        self.state = to;
    }

    fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    fn open(&mut self) {
        if self.state == State::New {
            self.go(State::Preparing);
            self.act(Action::Prepare);
        }
    }

    fn prepared(&mut self, now: Time, result: Result<LocalEnds, String>) {
        if self.state != State::Preparing {
            return;
        }
        match result {
            Err(reason) => self.close(now, CloseCause::Local(reason)),
            Ok(local) => {
                self.local = Some(local);
                if let Some((token, offer)) = self.early.take() {
                    self.accept(now, token, offer);
                } else {
                    self.go(State::Offered);
                    let offer = self.offer(Some(false));
                    self.act(Action::Ask(offer));
                }
            }
        }
    }

    /// A peer's request other than a ready acknowledgement, while our queue pairs are in INIT.
    fn accept(&mut self, now: Time, token: Token, offer: Offer) {
        match self.peer_ends(&offer) {
            Err(reason) => {
                self.act(Action::Refuse(token, reason.clone()));
                self.close(now, CloseCause::Mismatch(reason));
            }
            Ok(peer) => {
                self.waiting.push(token);
                self.raise(peer);
            }
        }
    }

    fn raise(&mut self, peer: PeerEnds) {
        self.peer = Some(peer.clone());
        self.go(State::Raising);
        self.act(Action::Raise(peer));
    }

    fn raised(&mut self, now: Time, result: Result<(), String>) {
        if self.state != State::Raising {
            return;
        }
        if let Err(reason) = result {
            for token in std::mem::take(&mut self.waiting) {
                self.act(Action::Refuse(token, reason.clone()));
            }
            self.close(now, CloseCause::Local(reason));
            return;
        }
        let acknowledges = self.peer.as_ref().is_some_and(|peer| peer.ready_ack);
        self.answer_waiting();
        if !acknowledges {
            self.connected();
        } else if self.answered {
            self.acknowledge();
        } else {
            self.go(State::AwaitingReadyAck {
                until: now + self.limits.ready_ack,
            });
        }
    }

    fn answer_waiting(&mut self) {
        let ready_ack = self
            .peer
            .as_ref()
            .and_then(|peer| peer.ready_ack.then_some(false));
        for token in std::mem::take(&mut self.waiting) {
            let offer = self.offer(ready_ack);
            self.act(Action::Answer(token, offer));
        }
    }

    fn acknowledge(&mut self) {
        self.go(State::Acknowledging);
        let offer = self.offer(Some(true));
        self.act(Action::Acknowledge(offer));
    }

    fn connected(&mut self) {
        self.go(State::Connected);
        self.act(Action::Attach);
    }

    fn replied(&mut self, now: Time, reply: Result<Offer, SignalError>) {
        match (&self.state, reply) {
            (State::Offered, Err(SignalError::Refused(reason)))
                if reason.starts_with(closing::OTHER_INSTANCE) =>
            {
                self.close(now, CloseCause::PeerRestarted(reason));
            }
            (State::Offered, Err(error)) => self.close(now, unanswered(error)),
            (State::Offered, Ok(offer))
                if !is_same(&self.parties.peer_instance, &offer.instance) =>
            {
                let reason = "its answer comes from another instance";
                self.close(now, CloseCause::PeerRestarted(reason.into()));
            }
            (State::Offered, Ok(offer)) => match self.peer_ends(&offer) {
                Ok(peer) => {
                    self.answered = true;
                    self.raise(peer);
                }
                Err(reason) => self.close(now, CloseCause::Mismatch(reason)),
            },
            // Both opened at once, and the peer's request came first. Its answer to ours must name
            // the same queue pairs; that it refused ours does no harm.
            (State::Raising | State::AwaitingReadyAck { .. } | State::Connected, Ok(offer)) => {
                let same = self.is_of_peer(&offer);
                if !same {
                    let reason = "the answer names other queue pairs than the peer's own request";
                    self.close(now, CloseCause::Mismatch(reason.into()));
                    return;
                }
                self.answered = true;
                if matches!(self.state, State::AwaitingReadyAck { .. }) {
                    self.acknowledge();
                }
            }
            // A late reply to an endpoint that is gone.
            _ => {}
        }
    }

    fn acknowledged(&mut self, now: Time, reply: Result<(), SignalError>) {
        match (&self.state, reply) {
            (State::Acknowledging, Ok(())) => self.connected(),
            (State::Acknowledging, Err(error)) => self.close(now, unanswered(error)),
            _ => {}
        }
    }

    fn requested(&mut self, now: Time, token: Token, offer: Offer) {
        if offer.qp_nums.is_empty() {
            if self.is_late_close(&offer) {
                self.act(Action::Refuse(token, CLOSED.into()));
            } else {
                self.close_requested(now, token);
            }
            return;
        }
        if offer.ready_ack == Some(true) {
            self.ready_ack(token, &offer);
            return;
        }
        if let Some(current) = self.foreign_instance(&offer) {
            self.act(Action::Refuse(token, current.clone()));
            if self.state == State::New {
                // It was made for this request, and another may never come.
                self.close(now, CloseCause::Mismatch(current));
            }
            return;
        }
        match self.state {
            State::New => {
                self.early = Some((token, offer));
                self.open();
            }
            State::Preparing => {
                if let Some((older, _)) = self.early.replace((token, offer)) {
                    self.act(Action::Refuse(older, "overtaken by a later request".into()));
                }
            }
            State::Offered => self.accept(now, token, offer),
            State::Raising
            | State::Acknowledging
            | State::AwaitingReadyAck { .. }
            | State::Connected => {
                let same = self.is_of_peer(&offer);
                if same {
                    self.waiting.push(token);
                    if self.state != State::Raising {
                        self.answer_waiting();
                    }
                } else {
                    // The peer has built its end anew (report H06).
                    self.close(now, CloseCause::PeerRebuilt);
                    self.act(Action::PassOn(token, offer));
                }
            }
            State::Failing(_) | State::Closed => self.act(Action::PassOn(token, offer)),
        }
    }

    fn ready_ack(&mut self, token: Token, offer: &Offer) {
        let same = self.is_of_peer(offer);
        match self.state {
            State::AwaitingReadyAck { .. } | State::Acknowledging if same => {
                let answer = self.offer(Some(true));
                self.act(Action::Answer(token, answer));
                self.connected();
            }
            State::Connected if same => {
                let answer = self.offer(Some(true));
                self.act(Action::Answer(token, answer));
            }
            State::AwaitingReadyAck { .. } | State::Acknowledging | State::Connected => {
                let reason = "stale ready acknowledgement: it names other queue pairs";
                self.act(Action::Refuse(token, reason.into()));
            }
            _ => {
                let reason = "ready acknowledgement for an endpoint that is not connected";
                self.act(Action::Refuse(token, reason.into()));
            }
        }
    }

    /// Whether a message comes from the ends that we are connected to. Devices give the numbers of
    /// queue pairs that are destroyed to new ones, so that the first packet number, where the peer
    /// says it, has to be the same, too.
    fn is_of_peer(&self, offer: &Offer) -> bool {
        self.peer.as_ref().is_some_and(|peer| {
            let same_psn = offer.psn.is_none() || peer.psn.is_none() || offer.psn == peer.psn;
            peer.qp_nums == offer.qp_nums && same_psn
        })
    }

    /// True for a request to close that belongs to an earlier endpoint of the peer: its packet
    /// numbers are others. C++ peers do not say theirs.
    fn is_late_close(&self, offer: &Offer) -> bool {
        let early = self.early.as_ref().and_then(|(_, offer)| offer.psn);
        let known = self.peer.as_ref().and_then(|peer| peer.psn).or(early);
        offer.psn.is_some() && offer.psn != known
    }

    /// The reason to refuse a request that was meant for another instance of this segment.
    fn foreign_instance(&self, offer: &Offer) -> Option<String> {
        let meant = offer.peer_instance.as_ref()?;
        let own = self.parties.instance.as_ref()?;
        (meant != own).then(|| format!("{}{own}, not {meant}", closing::OTHER_INSTANCE))
    }

    fn peer_ends(&self, offer: &Offer) -> Result<PeerEnds, String> {
        let Parties {
            local_path,
            peer_path,
            fallback,
            ..
        } = &self.parties;
        if offer.peer_path != *local_path || offer.local_path != *peer_path {
            return Err(format!(
                "NIC paths do not match: {} to {} is not {peer_path} to {local_path}",
                offer.local_path, offer.peer_path
            ));
        }
        let own = self.local.as_ref().map_or(0, |local| local.qp_nums.len());
        if offer.qp_nums.len() != own {
            return Err(format!(
                "{} queue pairs on one side, {own} on the other: MC_NUM_QP_PER_EP must be equal",
                offer.qp_nums.len()
            ));
        }
        let (gid, lid) = match (offer.gid, fallback) {
            (Some(gid), _) => (gid, offer.lid),
            (None, Some(known)) => *known,
            (None, None) => {
                return Err("the message has no GID, and the record is not known".into());
            }
        };
        Ok(PeerEnds {
            gid,
            lid,
            qp_nums: offer.qp_nums.clone(),
            psn: offer.psn,
            path_mtu: offer.path_mtu,
            rd_atomic: offer.rd_atomic,
            instance: offer.instance.clone(),
            ready_ack: offer.ready_ack.is_some(),
        })
    }

    fn offer(&self, ready_ack: Option<bool>) -> Offer {
        let local = self.local.clone().unwrap_or_default();
        Offer {
            local_path: self.parties.local_path.clone(),
            peer_path: self.parties.peer_path.clone(),
            gid: local.gid,
            lid: local.lid,
            qp_nums: local.qp_nums,
            ready_ack,
            psn: Some(local.psn),
            path_mtu: local.path_mtu,
            rd_atomic: Some(local.rd_atomic),
            instance: self.parties.instance.clone(),
            peer_instance: self.parties.peer_instance.clone(),
        }
    }
}

/// Why an endpoint closes whose message was not answered with an offer.
fn unanswered(error: SignalError) -> CloseCause {
    match error {
        SignalError::Refused(reason) => CloseCause::Refused(reason),
        SignalError::NoAnswer(_) => CloseCause::NoAnswer(error.to_string()),
    }
}

/// Whether two instances can be one: C++ peers and their records name none.
pub(super) fn is_same(one: &Option<String>, other: &Option<String>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one == other,
        _ => true,
    }
}

impl Machine for Endpoint {
    type Input = Input;
    type Action = Action;

    fn handle(&mut self, now: Time, input: Input) {
        match input {
            Input::Open => self.open(),
            Input::Prepared(result) => self.prepared(now, result),
            Input::Uses(gid) => {
                if let Some(local) = &mut self.local {
                    local.gid = Some(gid);
                }
            }
            Input::Raised(result) => self.raised(now, result),
            Input::Replied(reply) => self.replied(now, reply),
            Input::Acknowledged(reply) => self.acknowledged(now, reply),
            Input::Requested(token, offer) => self.requested(now, token, offer),
            Input::Close(cause) => self.close(now, cause),
            Input::InError => self.in_error(now),
            Input::Drained => self.drained(now),
            Input::Destroyed => self.destroyed(now),
            Input::PeerClosed => self.peer_closed(now),
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        match &self.state {
            State::New | State::Connected | State::Closed => {}
            State::Failing(_) => self.closing_timeout(now),
            State::AwaitingReadyAck { until } if now >= *until => {
                self.close(now, CloseCause::Timeout("no ready acknowledgement came"));
            }
            State::Preparing | State::Offered | State::Raising | State::Acknowledging
                if now >= self.deadline =>
            {
                self.close(now, CloseCause::Timeout("the handshake took too long"));
            }
            _ => {}
        }
    }

    fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        match &self.state {
            State::New | State::Connected | State::Closed => None,
            State::Failing(closing) => closing.next_timeout(&self.limits),
            State::AwaitingReadyAck { until } => Some(*until),
            State::Preparing | State::Offered | State::Raising | State::Acknowledging => {
                Some(self.deadline)
            }
        }
    }
}

#[cfg(test)]
mod tests;
