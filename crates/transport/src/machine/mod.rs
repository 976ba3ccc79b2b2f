//! Decisions without I/O: what a NIC's events mean, what is published, who is a peer, which rail
//! carries work.
//!
//! A machine has no clock, thread, socket, runtime or source of randomness: [`Time`] and seeds
//! come in as arguments, and nothing depends on the order of a hash map. The same machine runs
//! under the real driver, under the simulated fabric with one seed and virtual time, and in a
//! replay of a recording ([`record`]).
//!
//! | machine | one for | decides |
//! |---|---|---|
//! | [`observer`] | context | what an event means, which GID is used, when gates close and open |
//! | [`publisher`] | engine | what is stored and told to subscribers, when; whose name it is |
//! | [`peers`] | engine | which records are taken in and when they are read; who restarted |
//! | [`rail`] | engine | which rails carry work, when they are proved, who is blamed |
//!
//! The endpoint, one for each connection, is a machine too, which decides when abandoned work can
//! touch no memory any more: [`rdma::endpoint`](crate::rdma::endpoint). [`verdict`] says whose
//! fault a completion is, [`ids`] how things are named, [`flow`] what one machine's actions mean to
//! the next.
//!
//! # The way of one event
//!
//! ```text
//!  device            observer             publisher                   a peer
//!    | PORT_ERR          |                    |                          |
//!    |------------------>| CloseGate ---------+--> rails: Down, no post  |
//!    |   (acknowledged)  | ReadPort           |                          |
//!    |<------------------|                    |                          |
//!    | DOWN              | CutEndpoints ------+--> endpoint: ERR, close->| its end in ERR
//!    |------------------>| Publish ---------->| Push ------------------->| peers: NIC Down
//!    |                   |                    | Store ---> store ------->|   rails: Down
//!    | PORT_ACTIVE       |                    |                          |
//!    |------------------>| ReadPort, Publish->| Push, Store ------------>| peers: NIC Up
//!    |                   | HalfOpen ----------+--> rails: connect, probe, Up <--> accepts()
//! ```
//!
//! Work that was posted before the gate closed comes back flushed or not at all. The driver of the
//! data thread finds the latter, and gives its slices back to be posted again once their endpoint
//! is fenced ([`rdma::driver`](crate::rdma::driver)).
//!
//! # How a driver uses a machine
//!
//! Every driver's loop body is a `step(now)` of this shape, whatever the machine:
//!
//! 1. hand over what has arrived: `machine.handle(now, input)` for each input, in order;
//! 2. if `machine.next_timeout()` has passed: `machine.handle_timeout(now)`;
//! 3. carry out each action of `machine.poll()`, **in order**, until it returns `None`; what comes
//!    of an action is an input later, never a return value;
//! 4. sleep until the next input or `machine.next_timeout()`, whichever comes first.
//!
//! [`drive`] is steps 2 and 3. An action must not be carried out before the ones that came before
//! it: "close the gate, cut, publish" is safe in that order only. Calling `handle_timeout` early or
//! twice does no harm. Actions that are not polled wait; a driver that never polls holds at most
//! what its inputs caused.
//!
//! ```
//! use rerail_transport::machine::{Machine, Time, drive};
//!
//! /// Says "tick" each second.
//! struct Ticker { next: Time, due: bool }
//!
//! impl Machine for Ticker {
//!     type Input = ();
//!     type Action = &'static str;
//!     fn handle(&mut self, _now: Time, (): ()) {}
//!     fn handle_timeout(&mut self, now: Time) {
//!         if now >= self.next {
//!             self.next = now + std::time::Duration::from_secs(1);
//!             self.due = true;
//!         }
//!     }
//!     fn poll(&mut self) -> Option<&'static str> {
//!         std::mem::take(&mut self.due).then_some("tick")
//!     }
//!     fn next_timeout(&self) -> Option<Time> { Some(self.next) }
//! }
//!
//! let mut ticker = Ticker { next: Time::from_millis(1_000), due: false };
//! let mut said = Vec::new();
//! drive(&mut ticker, Time::from_millis(999), |action| said.push(action));
//! assert!(said.is_empty());
//! drive(&mut ticker, Time::from_millis(1_000), |action| said.push(action));
//! assert_eq!(said, ["tick"]);
//! ```

pub mod backoff;
pub mod flow;
pub mod ids;
pub mod observer;
pub mod peers;
pub mod publisher;
pub mod rail;
pub mod record;
#[cfg(test)]
pub(crate) mod seen;
#[cfg(test)]
mod tests;
mod time;
pub mod verdict;

pub use time::Time;

/// A decision machine: inputs and time go in, actions come out.
pub trait Machine {
    /// What can happen to the machine.
    type Input;
    /// What it wants done.
    type Action;

    /// Takes in what happened at `now`. Must not be called with a `now` earlier than before.
    fn handle(&mut self, now: Time, input: Self::Input);

    /// Lets the machine act on timers that are due at `now`. Does nothing when none is.
    fn handle_timeout(&mut self, now: Time);

    /// The next thing to do, oldest first.
    fn poll(&mut self) -> Option<Self::Action>;

    /// When [`Machine::handle_timeout`] is next to be called; `None` without a timer.
    fn next_timeout(&self) -> Option<Time>;
}

/// Handles a time-out that is due and gives every action to `act`, in order.
///
/// At most [`DRIVE_TIMEOUTS_MAX`] due time-outs are handled in one call, so that a machine whose
/// timer does not move cannot hold the driver's thread.
pub fn drive<M: Machine>(machine: &mut M, now: Time, mut act: impl FnMut(M::Action)) {
    for _ in 0..DRIVE_TIMEOUTS_MAX {
        while let Some(action) = machine.poll() {
            act(action);
        }
        if machine.next_timeout().is_none_or(|due| due > now) {
            return;
        }
        machine.handle_timeout(now);
    }
    while let Some(action) = machine.poll() {
        act(action);
    }
}

/// Due time-outs that one call of [`drive`] handles at most.
pub const DRIVE_TIMEOUTS_MAX: usize = 64;
