//! What becomes of a transfer when something goes wrong (design §6).
//!
//! The accounting of its bytes is another module's ([`rdma::transfer`](crate::rdma::transfer):
//! every byte ends exactly once). This machine holds the rules:
//!
//! * a transfer fails only when its deadline is near, when no path is possible and none expected,
//!   when its peer is another process, when it is at fault itself, or when it is cancelled; every
//!   other failure of a slice means that the slice is posted again;
//! * it is cut off *before* its deadline, so that its fence ends in time;
//! * a refused access asks for the peer's record once; what the record says decides;
//! * it fails once, with the first cause. What was posted is given a moment to complete, since
//!   cutting a connection costs its neighbours a repetition; then it is cut off.
//!
//! Deliberately not here: which rail a slice takes, the fence, and the caller's own time-out.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use rerail_verbs::WcStatus;

use super::fence::FenceConfig;
use super::ids::{PeerId, TransferId};
use super::rail::NoPath;
use super::verdict::{RequestFault, Verdict, verdict};
use super::{Machine, Time};

/// Times and limits of transfers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TransferConfig {
    /// Says how long before its deadline a transfer is cut off.
    pub fence: FenceConfig,
    /// How long the posted work of a transfer that failed may still complete by itself. 200 ms.
    pub grace: Duration,
    /// Length errors after which a transfer is at fault itself: before that they are taken for
    /// ends that disagree on the path MTU, which the next connection mends. 4.
    pub length_errors_max: u32,
}

impl Default for TransferConfig {
    fn default() -> Self {
        Self {
            fence: FenceConfig::default(),
            grace: Duration::from_millis(200),
            length_errors_max: 4,
        }
    }
}

/// What the machine is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// A transfer was submitted.
    Submitted {
        /// Which.
        transfer: TransferId,
        /// To whom. It is bound to that life of the peer.
        peer: PeerId,
        /// When it must be reported.
        deadline: Time,
    },
    /// A slice of it was posted and did not succeed.
    SliceFailed {
        /// Whose.
        transfer: TransferId,
        /// The completion's status.
        status: WcStatus,
    },
    /// The answer to [`Action::Refresh`].
    Refreshed {
        /// Whose record.
        peer: PeerId,
        /// Whether it is newer than the one that the slice was posted with.
        newer: bool,
    },
    /// No path to a peer is possible, and none is expected.
    NoPath {
        /// The peer.
        peer: PeerId,
        /// Why.
        cause: NoPath,
    },
    /// The peer is another process now.
    PeerRetired {
        /// The peer that was.
        peer: PeerId,
    },
    /// The caller does not want it any more, or has dropped it.
    Cancel {
        /// Which.
        transfer: TransferId,
    },
    /// All its bytes have ended. The fence and the report are others' business.
    Ended {
        /// Which.
        transfer: TransferId,
    },
}

/// Why a transfer fails.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FailCause {
    /// Its deadline is too near for anything but its fence.
    #[error("it was not finished in time")]
    Deadline {
        /// The last thing that went wrong with it, if anything did.
        last: Option<WcStatus>,
    },
    /// There is no path.
    #[error("no path: {0}")]
    NoPath(NoPath),
    /// Its peer was restarted.
    #[error("the peer was restarted")]
    PeerRestarted,
    /// It is at fault itself.
    #[error("a completion said {status}")]
    Request {
        /// In which way.
        fault: RequestFault,
        /// The completion's status.
        status: WcStatus,
    },
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// What the machine wants done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// What has failed of it may be posted again, each slice once its local fence is through.
    Retry {
        /// The transfer.
        transfer: TransferId,
    },
    /// What has failed of it must wait, for `Retry` or `Fail`.
    Hold {
        /// The transfer.
        transfer: TransferId,
    },
    /// Ask for the peer's record, and tell `Refreshed`.
    Refresh {
        /// The peer.
        peer: PeerId,
    },
    /// It has failed: nothing of it is posted any more. Said once.
    Fail {
        /// The transfer.
        transfer: TransferId,
        /// The first cause.
        cause: FailCause,
    },
    /// Abandon what is still posted of it: its endpoints go to ERR. Said once, after `Fail`.
    CutOff {
        /// The transfer.
        transfer: TransferId,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Running,
    /// An access was refused; the peer's record is asked for.
    AwaitingRecord,
    /// It has failed; what is posted may complete until its timer.
    Failed,
    /// It is cut off.
    CutOff,
}

#[derive(Clone, Debug)]
struct Watched {
    peer: PeerId,
    state: State,
    timer: Time,
    last: Option<WcStatus>,
    refreshed: bool,
    length_errors: u32,
}

/// The transfers of an engine. See the [module](self).
#[derive(Clone, Debug)]
pub struct Transfers {
    config: TransferConfig,
    all: BTreeMap<TransferId, Watched>,
    timers: BTreeSet<(Time, TransferId)>,
    out: VecDeque<Action>,
}

impl Transfers {
    /// None yet.
    pub fn new(config: TransferConfig) -> Self {
        Self {
            config,
            all: BTreeMap::new(),
            timers: BTreeSet::new(),
            out: VecDeque::new(),
        }
    }

    /// Transfers that have not ended.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether all have ended.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn set_timer(&mut self, transfer: TransferId, at: Time) {
        if let Some(watched) = self.all.get_mut(&transfer) {
            self.timers.remove(&(watched.timer, transfer));
            watched.timer = at;
            self.timers.insert((at, transfer));
        }
    }

    fn fail(&mut self, now: Time, transfer: TransferId, cause: FailCause) {
        let Some(watched) = self.all.get_mut(&transfer) else {
            return;
        };
        if !matches!(watched.state, State::Running | State::AwaitingRecord) {
            return;
        }
        watched.state = State::Failed;
        // The grace never reaches past the time at which its fence must begin.
        let cut_off_at = (now + self.config.grace).min(watched.timer.max(now));
        self.out.push_back(Action::Fail { transfer, cause });
        let at_once = matches!(cause, FailCause::Deadline { .. } | FailCause::PeerRestarted);
        if at_once {
            self.cut_off(transfer);
        } else {
            self.set_timer(transfer, cut_off_at);
        }
    }

    fn cut_off(&mut self, transfer: TransferId) {
        if let Some(watched) = self.all.get_mut(&transfer) {
            watched.state = State::CutOff;
            self.timers.remove(&(watched.timer, transfer));
            self.out.push_back(Action::CutOff { transfer });
        }
    }

    fn slice_failed(&mut self, now: Time, transfer: TransferId, status: WcStatus) {
        let Some(watched) = self.all.get_mut(&transfer) else {
            return;
        };
        match (watched.state, verdict(status)) {
            (State::Failed | State::CutOff, _) | (_, Verdict::Done) => {}
            (_, Verdict::Request(fault @ RequestFault::LocalKey)) => {
                self.fail(now, transfer, FailCause::Request { fault, status });
            }
            (_, Verdict::Request(fault @ RequestFault::Length)) => {
                watched.length_errors += 1;
                watched.last = Some(status);
                if watched.length_errors > self.config.length_errors_max {
                    self.fail(now, transfer, FailCause::Request { fault, status });
                } else if watched.state == State::Running {
                    self.out.push_back(Action::Retry { transfer });
                }
            }
            // Its other slices are refused as well, and wait for the same answer.
            (State::AwaitingRecord, _) => watched.last = Some(status),
            (State::Running, Verdict::Request(fault @ RequestFault::RemoteKey)) => {
                watched.last = Some(status);
                if watched.refreshed {
                    self.fail(now, transfer, FailCause::Request { fault, status });
                } else {
                    watched.refreshed = true;
                    watched.state = State::AwaitingRecord;
                    let peer = watched.peer;
                    self.out.push_back(Action::Hold { transfer });
                    self.out.push_back(Action::Refresh { peer });
                }
            }
            (State::Running, Verdict::Flushed) => self.out.push_back(Action::Retry { transfer }),
            (State::Running, Verdict::LocalNic | Verdict::Peer | Verdict::Path) => {
                watched.last = Some(status);
                self.out.push_back(Action::Retry { transfer });
            }
        }
    }

    fn of_peer(&self, peer: PeerId) -> Vec<TransferId> {
        let of_peer = self.all.iter().filter(|(_, watched)| watched.peer == peer);
        of_peer.map(|(transfer, _)| *transfer).collect()
    }

    fn refreshed(&mut self, now: Time, peer: PeerId, newer: bool) {
        for transfer in self.of_peer(peer) {
            let Some(watched) = self.all.get_mut(&transfer) else {
                continue;
            };
            if watched.state != State::AwaitingRecord {
                continue;
            }
            if newer {
                watched.state = State::Running;
                self.out.push_back(Action::Retry { transfer });
            } else {
                let status = watched.last.unwrap_or(WcStatus::RemAccessErr);
                let fault = RequestFault::RemoteKey;
                self.fail(now, transfer, FailCause::Request { fault, status });
            }
        }
    }
}

impl Machine for Transfers {
    type Input = Input;
    type Action = Action;

    fn handle(&mut self, now: Time, input: Input) {
        match input {
            Input::Submitted {
                transfer,
                peer,
                deadline,
            } => {
                let timer = self.config.fence.cut_off_at(now, deadline);
                let watched = Watched {
                    peer,
                    state: State::Running,
                    timer,
                    last: None,
                    refreshed: false,
                    length_errors: 0,
                };
                if self.all.contains_key(&transfer) {
                    tracing::error!(transfer = transfer.0, "a transfer was submitted twice");
                    return;
                }
                self.all.insert(transfer, watched);
                self.timers.insert((timer, transfer));
            }
            Input::SliceFailed { transfer, status } => self.slice_failed(now, transfer, status),
            Input::Refreshed { peer, newer } => self.refreshed(now, peer, newer),
            Input::NoPath { peer, cause } => {
                for transfer in self.of_peer(peer) {
                    self.fail(now, transfer, FailCause::NoPath(cause));
                }
            }
            Input::PeerRetired { peer } => {
                for transfer in self.of_peer(peer) {
                    self.fail(now, transfer, FailCause::PeerRestarted);
                }
            }
            Input::Cancel { transfer } => self.fail(now, transfer, FailCause::Cancelled),
            Input::Ended { transfer } => {
                if let Some(watched) = self.all.remove(&transfer) {
                    self.timers.remove(&(watched.timer, transfer));
                }
            }
        }
    }

    fn handle_timeout(&mut self, now: Time) {
        while let Some((due, transfer)) = self.timers.first().copied() {
            if due > now {
                return;
            }
            self.timers.remove(&(due, transfer));
            match self
                .all
                .get(&transfer)
                .map(|watched| (watched.state, watched.last))
            {
                Some((State::Running | State::AwaitingRecord, last)) => {
                    self.fail(now, transfer, FailCause::Deadline { last });
                }
                Some((State::Failed, _)) => self.cut_off(transfer),
                Some((State::CutOff, _)) | None => {}
            }
        }
    }

    fn poll(&mut self) -> Option<Action> {
        self.out.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.timers.first().map(|(due, _)| *due)
    }
}
