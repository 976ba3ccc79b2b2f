//! The end of an endpoint: cut, drain, destroy, and the fence at the far end.
//!
//! The order is fixed: the data thread stops posting, the queue pairs go to ERR and the peer is
//! told at the same time, what was posted comes back flushed. That is the *local fence*; where it
//! does not come back in time, that the queue pairs are destroyed is. The *remote fence* is the
//! peer's confirmation, or the time that a packet can live (design §6).
//!
//! Queue pairs that are drained are destroyed only after the remote fence. Until then the peer may
//! send to their numbers, which a device gives to the next ones: those would take packets of the
//! earlier connection for their own, and acknowledge as repetitions what they never wrote.

use super::{Action, CloseCause, Endpoint, Limits, Offer, STOOD_STILL, State, Token};
use crate::machine::Time;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Closing {
    cause: CloseCause,
    since: Time,
    /// Queue pairs were handed to the data thread.
    attached: bool,
    /// When they were in ERR, or gone; later where the wait for what is flushed began anew.
    in_error: Option<Time>,
    /// It did.
    waits_anew: bool,
    /// The data thread has had everything back.
    drained: bool,
    /// Since when they are being destroyed.
    destroying: Option<Time>,
    /// They are destroyed, or hang about with nothing to send.
    gone: bool,
    /// When nothing that was posted could read or write memory here any more.
    locally_fenced: Option<Time>,
    peer_closed: bool,
    /// [`Action::Fenced`] is said.
    fenced: bool,
    /// The peer's requests to close that are answered once the queue pairs are in ERR.
    closers: Vec<Token>,
}

impl Closing {
    pub(super) fn cause(&self) -> &CloseCause {
        &self.cause
    }

    pub(super) fn next_timeout(&self, limits: &Limits) -> Option<Time> {
        match (self.destroying, self.locally_fenced) {
            (Some(since), _) if !self.gone => Some(since + limits.fence),
            (_, Some(at)) => Some(at + limits.packet_lifetime),
            (_, None) => Some(match self.in_error {
                Some(at) => at + limits.drain,
                None => self.since + limits.to_error,
            }),
        }
    }
}

impl Endpoint {
    pub(super) fn close(&mut self, now: Time, cause: CloseCause) {
        if self.is_closing() {
            return;
        }
        if let Some((token, _)) = self.early.take() {
            self.act(Action::Refuse(token, cause.to_string()));
        }
        for token in std::mem::take(&mut self.waiting) {
            self.act(Action::Refuse(token, cause.to_string()));
        }
        if matches!(self.state, State::New | State::Preparing) {
            // A late `Prepared` finds the endpoint closed, and the driver drops its queue pairs.
            self.go(State::Closed);
            self.act(Action::Closed(cause));
            return;
        }
        let attached = self.state == State::Connected;
        if attached {
            self.act(Action::Detach);
        }
        self.act(Action::ToError);
        // A peer that never saw our end has nothing to close, and a C++ peer that closed or rebuilt
        // its end has left ours. A Rerail peer may say so while its queue pairs still work: only
        // its answer to us says that they do not.
        let left = matches!(cause, CloseCause::PeerClosed | CloseCause::PeerRebuilt);
        let peer_closed = (left && !self.peer_confirms()) || self.peer.is_none();
        if !peer_closed {
            let offer = Offer {
                qp_nums: Vec::new(),
                ..self.offer(None)
            };
            self.act(Action::TellPeer(offer));
        }
        self.go(State::Failing(Closing {
            cause,
            since: now,
            attached,
            in_error: None,
            waits_anew: false,
            drained: false,
            destroying: None,
            gone: false,
            locally_fenced: None,
            peer_closed,
            fenced: false,
            closers: Vec::new(),
        }));
    }

    /// Whether the peer answers a request to close only once its queue pairs are in ERR or gone.
    pub(in crate::rdma) fn peer_confirms(&self) -> bool {
        let peer = self.peer.as_ref();
        peer.is_some_and(|peer| peer.instance.is_some())
    }

    pub(super) fn close_requested(&mut self, now: Time, token: Token) {
        self.close(now, CloseCause::PeerClosed);
        let confirms = self.peer_confirms();
        let pending = match &mut self.state {
            State::Failing(closing) => {
                closing.peer_closed |= !confirms;
                let wait = closing.in_error.is_none();
                if wait {
                    closing.closers.push(token);
                }
                wait
            }
            _ => false,
        };
        if !pending {
            self.act(Action::Refuse(token, CLOSED.into()));
        }
        self.advance(now);
    }

    pub(super) fn in_error(&mut self, now: Time) {
        let State::Failing(closing) = &mut self.state else {
            return;
        };
        closing.in_error.get_or_insert(now);
        let attached = closing.attached;
        for token in std::mem::take(&mut closing.closers) {
            self.act(Action::Refuse(token, CLOSED.into()));
        }
        if attached {
            self.act(Action::AwaitDrain);
        } else {
            self.drained(now);
        }
    }

    pub(super) fn drained(&mut self, now: Time) {
        if let State::Failing(closing) = &mut self.state {
            closing.drained = true;
            closing.locally_fenced.get_or_insert(now);
        }
        self.advance(now);
    }

    fn destroy(&mut self, now: Time) {
        if let State::Failing(closing) = &mut self.state
            && closing.destroying.is_none()
        {
            closing.destroying = Some(now);
            self.act(Action::Destroy);
        }
    }

    pub(super) fn destroyed(&mut self, now: Time) {
        let State::Failing(closing) = &mut self.state else {
            return;
        };
        closing.locally_fenced.get_or_insert(now);
        closing.gone = true;
        // A destroyed queue pair is as good as one in ERR.
        closing.in_error.get_or_insert(now);
        let attached = closing.attached;
        for token in std::mem::take(&mut closing.closers) {
            self.act(Action::Refuse(token, CLOSED.into()));
        }
        if attached {
            self.act(Action::GiveUp);
        }
        self.advance(now);
    }

    pub(super) fn peer_closed(&mut self, now: Time) {
        if let State::Failing(closing) = &mut self.state {
            closing.peer_closed = true;
        }
        self.advance(now);
    }

    pub(super) fn closing_timeout(&mut self, now: Time) {
        let State::Failing(closing) = &mut self.state else {
            return;
        };
        let Some(due) = closing.next_timeout(&self.limits) else {
            return;
        };
        if now < due {
            return;
        }
        let drains = closing.destroying.is_none() && closing.locally_fenced.is_none();
        if drains
            && closing.in_error.is_some()
            && !closing.waits_anew
            && now.saturating_since(due) >= STOOD_STILL
        {
            (closing.in_error, closing.waits_anew) = (Some(now), true);
            return;
        }
        if closing.destroying.is_none() || closing.gone {
            if closing.locally_fenced.is_some() {
                closing.peer_closed = true;
                self.advance(now);
            } else {
                // Not drained in time: a destroyed queue pair reads and writes nothing either.
                self.destroy(now);
            }
        } else if !closing.attached || closing.drained {
            // They hang about, but have nothing to send any more.
            closing.locally_fenced.get_or_insert(now);
            closing.gone = true;
            self.advance(now);
        } else {
            let cause = closing.cause.clone();
            self.go(State::Closed);
            self.act(Action::Unfenced(cause.to_string()));
            self.act(Action::Closed(cause));
        }
    }

    /// Destroys the queue pairs once both fences are through, and closes for good after that.
    fn advance(&mut self, now: Time) {
        let State::Failing(closing) = &mut self.state else {
            return;
        };
        if closing.locally_fenced.is_none() || !closing.peer_closed {
            return;
        }
        let (gone, told) = (closing.gone, closing.fenced);
        closing.fenced = true;
        let cause = closing.cause.clone();
        if !told {
            self.act(Action::Fenced);
        }
        if gone {
            self.go(State::Closed);
            self.act(Action::Closed(cause));
        } else {
            self.destroy(now);
        }
    }
}

/// Begin of the refusal of a request that is meant for another instance. Both ends read it.
pub(super) const OTHER_INSTANCE: &str = "this is instance ";

/// Answer to a request to close. It has to be a refusal for a C++ peer, who takes any other answer
/// for a connection.
pub const CLOSED: &str = "closed";
