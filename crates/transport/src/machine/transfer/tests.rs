//! When a transfer fails, and when it does not.

use proptest::prelude::*;

use super::*;
use crate::machine::drive;
use crate::machine::fence::{self, Abandoned, Fences};
use crate::machine::ids::{EndpointId, LocalNic, RegionId};

const ONE: TransferId = TransferId(1);
const PEER: PeerId = PeerId(7);

struct Rig {
    transfers: Transfers,
    now: Time,
}

impl Rig {
    fn new(transfers: u64) -> Self {
        let mut rig = Self {
            transfers: Transfers::new(TransferConfig::default()),
            now: Time::from_millis(1_000),
        };
        for number in 1..=transfers {
            let deadline = rig.now + Duration::from_secs(30);
            rig.input(Input::Submitted {
                transfer: TransferId(number),
                peer: PEER,
                deadline,
            });
        }
        rig
    }

    fn input(&mut self, input: Input) -> Vec<Action> {
        self.transfers.handle(self.now, input);
        self.poll()
    }

    fn poll(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        drive(&mut self.transfers, self.now, |action| actions.push(action));
        actions
    }

    fn advance(&mut self, millis: u64) -> Vec<Action> {
        self.now += Duration::from_millis(millis);
        self.poll()
    }

    fn slice(&mut self, status: WcStatus) -> Vec<Action> {
        self.input(Input::SliceFailed {
            transfer: ONE,
            status,
        })
    }
}

const RETRY: Action = Action::Retry { transfer: ONE };
const CUT_OFF: Action = Action::CutOff { transfer: ONE };

fn fail(cause: FailCause) -> Action {
    Action::Fail {
        transfer: ONE,
        cause,
    }
}

#[test]
fn failures_of_rails_only_repeat_slices_until_the_deadline() {
    let mut rig = Rig::new(1);
    for _ in 0..1_000 {
        assert_eq!(rig.slice(WcStatus::RetryExcErr), [RETRY]);
        assert_eq!(rig.slice(WcStatus::WrFlushErr), [RETRY]);
    }
    assert_eq!(rig.advance(27_999), []);
    let last = Some(WcStatus::RetryExcErr);
    let failed = [fail(FailCause::Deadline { last }), CUT_OFF];
    assert_eq!(
        rig.advance(1),
        failed,
        "cut off while there is time for its fence"
    );
    assert_eq!(rig.slice(WcStatus::WrFlushErr), []);
    assert_eq!(rig.transfers.next_timeout(), None);
}

#[test]
fn x10_a_transfer_that_hears_nothing_at_all_fails_at_its_deadline() {
    let mut rig = Rig::new(1);
    let failed = [fail(FailCause::Deadline { last: None }), CUT_OFF];
    assert_eq!(rig.advance(30_000), failed);
}

#[test]
fn m04_a_refused_access_is_tried_once_more_with_a_newer_record() {
    let mut rig = Rig::new(1);
    let status = WcStatus::RemAccessErr;
    let asks = [
        Action::Hold { transfer: ONE },
        Action::Refresh { peer: PEER },
    ];
    assert_eq!(rig.slice(status), asks);
    assert_eq!(rig.slice(status), [], "asked once");
    assert_eq!(rig.slice(WcStatus::WrFlushErr), [], "it waits as well");
    let peer = PEER;
    assert_eq!(rig.input(Input::Refreshed { peer, newer: true }), [RETRY]);
    let fault = RequestFault::RemoteKey;
    assert_eq!(
        rig.slice(status),
        [fail(FailCause::Request { fault, status })]
    );
}

#[test]
fn m30_a_refused_access_fails_if_the_record_is_the_same_or_cannot_be_read() {
    let mut rig = Rig::new(2);
    let status = WcStatus::RemAccessErr;
    rig.slice(status);
    let peer = PEER;
    let fault = RequestFault::RemoteKey;
    let failed = [fail(FailCause::Request { fault, status })];
    assert_eq!(
        rig.input(Input::Refreshed { peer, newer: false }),
        failed,
        "and no other"
    );
    assert_eq!(rig.advance(200), [CUT_OFF]);
}

#[test]
fn a_transfer_at_fault_does_not_cut_its_neighbours_at_once() {
    let mut rig = Rig::new(1);
    let status = WcStatus::LocProtErr;
    let fault = RequestFault::LocalKey;
    assert_eq!(
        rig.slice(status),
        [fail(FailCause::Request { fault, status })]
    );
    assert_eq!(rig.advance(199), []);
    rig.input(Input::Ended { transfer: ONE });
    assert_eq!(
        rig.advance(1_000),
        [],
        "what was posted has completed by itself"
    );
    assert!(rig.transfers.is_empty());
}

#[test]
fn length_errors_are_the_path_mtus_first_and_the_requests_later() {
    let mut rig = Rig::new(1);
    let status = WcStatus::LocLenErr;
    for _ in 0..4 {
        assert_eq!(rig.slice(status), [RETRY]);
    }
    let fault = RequestFault::Length;
    assert_eq!(
        rig.slice(status),
        [fail(FailCause::Request { fault, status })]
    );
}

#[test]
fn no_path_a_restarted_peer_and_a_cancel_end_it_and_the_first_cause_stays() {
    let cause = NoPath::LocalNicsDead;
    let mut rig = Rig::new(1);
    let failed = [fail(FailCause::NoPath(cause))];
    assert_eq!(rig.input(Input::NoPath { peer: PEER, cause }), failed);
    assert_eq!(rig.input(Input::Cancel { transfer: ONE }), []);
    assert_eq!(rig.advance(200), [CUT_OFF]);

    let mut rig = Rig::new(1);
    let failed = [fail(FailCause::PeerRestarted), CUT_OFF];
    assert_eq!(rig.input(Input::PeerRetired { peer: PEER }), failed);

    let mut rig = Rig::new(1);
    rig.advance(27_950);
    let cancelled = [fail(FailCause::Cancelled)];
    assert_eq!(rig.input(Input::Cancel { transfer: ONE }), cancelled);
    assert_eq!(
        rig.advance(50),
        [CUT_OFF],
        "the grace ends where the fence must begin"
    );
}

#[test]
fn x15_what_was_dropped_in_flight_keeps_its_memory_until_it_is_fenced() {
    let mut rig = Rig::new(1);
    let mut fences = Fences::new(FenceConfig::default());
    let (endpoint, region) = (
        EndpointId {
            index: 1,
            generation: 0,
        },
        RegionId(3),
    );
    let mut fence = |now, input| {
        fences.handle(now, input);
        let free = fences.may_unregister(region).is_ok();
        let may_report = std::iter::from_fn(|| fences.poll())
            .any(|action| matches!(action, fence::Action::MayReport { .. }));
        (free, may_report)
    };
    let local = LocalNic(0);
    let peer = PEER;
    fence(
        rig.now,
        fence::Input::Made {
            endpoint,
            local,
            peer,
        },
    );
    rig.input(Input::Cancel { transfer: ONE });
    assert_eq!(rig.advance(200), [CUT_OFF], "a drop is a cancel");
    let work = Abandoned {
        read_bytes: 0,
        write_bytes: 4_096,
    };
    let abandon = fence::Input::Abandon {
        endpoint,
        transfer: ONE,
        region,
        work,
    };
    assert_eq!(fence(rig.now, abandon), (false, false));
    let finish = fence::Input::Finish { transfer: ONE };
    assert_eq!(fence(rig.now, finish), (false, false));
    assert_eq!(
        fence(rig.now, fence::Input::Destroyed { endpoint }),
        (false, false)
    );
    let confirmed = fence::Input::PeerConfirmed { endpoint };
    assert_eq!(fence(rig.now, confirmed), (true, true));
}

#[test]
fn another_peers_troubles_are_not_this_ones() {
    let mut rig = Rig::new(1);
    let peer = PeerId(8);
    let cause = NoPath::PeerGone;
    assert_eq!(rig.input(Input::PeerRetired { peer }), []);
    assert_eq!(rig.input(Input::NoPath { peer, cause }), []);
    assert_eq!(rig.input(Input::Refreshed { peer, newer: false }), []);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn each_transfer_fails_at_most_once_and_is_over_by_its_deadline(
        steps in prop::collection::vec((0..8_u8, 1..6_u64, 0..25_u32, 0..4_000_u64), 1..80)
    ) {
        let mut rig = Rig::new(5);
        let deadline = rig.now + Duration::from_secs(30);
        let mut failed: BTreeMap<TransferId, u32> = BTreeMap::new();
        let mut cut: BTreeMap<TransferId, u32> = BTreeMap::new();
        let mut ended: BTreeSet<TransferId> = BTreeSet::new();
        for (what, number, status, millis) in steps {
            let transfer = TransferId(number);
            let peer = PEER;
            let actions = match what {
                0..=2 => rig.input(Input::SliceFailed {
                    transfer,
                    status: WcStatus::from_raw(status),
                }),
                3 => rig.input(Input::Refreshed { peer, newer: millis % 2 == 0 }),
                4 if millis % 16 == 0 => rig.input(Input::PeerRetired { peer }),
                5 => rig.input(Input::Cancel { transfer }),
                6 => {
                    ended.insert(transfer);
                    rig.input(Input::Ended { transfer })
                }
                _ => rig.advance(millis),
            };
            for action in actions {
                match action {
                    Action::Fail { transfer, .. } => {
                        prop_assert!(!ended.contains(&transfer));
                        *failed.entry(transfer).or_default() += 1;
                    }
                    Action::CutOff { transfer } => {
                        prop_assert!(failed.contains_key(&transfer), "cut off before it failed");
                        prop_assert!(!ended.contains(&transfer));
                        *cut.entry(transfer).or_default() += 1;
                    }
                    Action::Retry { transfer } => {
                        prop_assert!(!failed.contains_key(&transfer), "retried after it failed");
                    }
                    Action::Hold { .. } | Action::Refresh { .. } => {}
                }
            }
        }
        let rest = deadline.saturating_since(rig.now);
        for action in rig.advance(rest.as_millis() as u64) {
            match action {
                Action::Fail { transfer, .. } => *failed.entry(transfer).or_default() += 1,
                Action::CutOff { transfer } => *cut.entry(transfer).or_default() += 1,
                _ => {}
            }
        }
        for number in 1..=5 {
            let transfer = TransferId(number);
            let fails = failed.get(&transfer).copied().unwrap_or(0);
            let cuts = cut.get(&transfer).copied().unwrap_or(0);
            prop_assert!(fails <= 1 && cuts <= 1);
            if !ended.contains(&transfer) {
                prop_assert_eq!((fails, cuts), (1, 1), "not over by its deadline");
            }
            rig.input(Input::Ended { transfer });
        }
        prop_assert!(rig.transfers.is_empty() && rig.transfers.timers.is_empty());
    }
}
