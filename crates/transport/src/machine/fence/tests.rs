//! The invariant, its timing, and what happens when hardware does not obey.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::machine::drive;

const READ: Abandoned = Abandoned {
    read_bytes: 4_096,
    write_bytes: 0,
};
const WRITE: Abandoned = Abandoned {
    read_bytes: 0,
    write_bytes: 4_096,
};
const TRANSFER: TransferId = TransferId(1);
const REGION: RegionId = RegionId(1);
const PEER: PeerId = PeerId(3);

fn endpoint(index: u32) -> EndpointId {
    EndpointId {
        index,
        generation: 0,
    }
}

struct Rig {
    fences: Fences,
    now: Time,
}

impl Rig {
    fn new(endpoints: u32) -> Self {
        let mut rig = Self {
            fences: Fences::new(FenceConfig::default()),
            now: Time::from_millis(1_000),
        };
        for index in 0..endpoints {
            rig.input(Input::Made {
                endpoint: endpoint(index),
                local: LocalNic(index / 2),
                peer: PEER,
            });
        }
        rig
    }

    fn input(&mut self, input: Input) -> Vec<Action> {
        self.fences.handle(self.now, input);
        self.poll()
    }

    fn poll(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        drive(&mut self.fences, self.now, |action| actions.push(action));
        actions
    }

    fn advance(&mut self, millis: u64) -> Vec<Action> {
        self.now += Duration::from_millis(millis);
        self.poll()
    }

    fn abandon(&mut self, index: u32, work: Abandoned) -> Vec<Action> {
        self.input(Input::Abandon {
            endpoint: endpoint(index),
            transfer: TRANSFER,
            region: REGION,
            work,
        })
    }

    fn fence_locally(&mut self, index: u32) -> Vec<Action> {
        let endpoint = endpoint(index);
        let mut actions = self.input(Input::InError { endpoint });
        actions.extend(self.input(Input::Drained { endpoint }));
        actions
    }

    fn finish(&mut self) -> Vec<Action> {
        self.input(Input::Finish { transfer: TRANSFER })
    }
}

fn report(verdict: Verdict) -> Action {
    Action::MayReport {
        transfer: TRANSFER,
        verdict,
    }
}

fn repost(index: u32) -> Action {
    Action::MayRepost {
        transfer: TRANSFER,
        endpoint: endpoint(index),
    }
}

#[test]
fn a_transfer_that_was_never_interrupted_pays_nothing() {
    let mut rig = Rig::new(2);
    assert_eq!(rig.finish(), [report(Verdict::Fenced)]);
}

#[test]
fn the_close_goes_out_together_with_err() {
    let mut rig = Rig::new(1);
    let endpoint = endpoint(0);
    let both = [Action::ToError { endpoint }, Action::ClosePeer { endpoint }];
    assert_eq!(rig.abandon(0, WRITE), both);
    assert_eq!(rig.abandon(0, WRITE), [], "once");
}

#[test]
fn an_abandoned_write_waits_for_both_ends() {
    let mut rig = Rig::new(1);
    rig.abandon(0, WRITE);
    assert_eq!(rig.finish(), []);
    assert_eq!(rig.fence_locally(0), [repost(0)]);
    let confirmed = rig.input(Input::PeerConfirmed {
        endpoint: endpoint(0),
    });
    assert_eq!(confirmed, [report(Verdict::Fenced)]);

    let mut rig = Rig::new(1);
    rig.abandon(0, WRITE);
    assert_eq!(rig.finish(), []);
    let confirmed = rig.input(Input::PeerConfirmed {
        endpoint: endpoint(0),
    });
    assert_eq!(confirmed, [], "the peer's end alone is not enough");
    assert_eq!(rig.fence_locally(0), [repost(0), report(Verdict::Fenced)]);
}

#[test]
fn an_abandoned_read_waits_for_the_local_end_only() {
    let mut rig = Rig::new(1);
    rig.abandon(0, READ);
    assert_eq!(rig.finish(), []);
    assert_eq!(rig.fence_locally(0), [repost(0), report(Verdict::Fenced)]);
}

#[test]
fn a_silent_peer_is_fenced_by_the_packets_lifetime_after_the_local_fence() {
    let mut rig = Rig::new(1);
    rig.abandon(0, WRITE);
    rig.finish();
    rig.advance(500);
    assert_eq!(rig.fence_locally(0), [repost(0)]);
    assert_eq!(rig.advance(1_999), []);
    assert_eq!(rig.advance(1), [report(Verdict::Fenced)]);
}

#[test]
fn x01_drained_before_err_does_not_count() {
    let mut rig = Rig::new(1);
    let endpoint = endpoint(0);
    rig.abandon(0, READ);
    rig.finish();
    assert_eq!(rig.input(Input::Drained { endpoint }), []);
    assert_eq!(
        rig.input(Input::InError { endpoint }),
        [],
        "the drain is not skipped"
    );
    assert_eq!(
        rig.input(Input::Drained { endpoint }),
        [repost(0), report(Verdict::Fenced)]
    );
}

#[test]
fn every_endpoint_that_a_transfer_used_is_waited_for() {
    let mut rig = Rig::new(3);
    for index in 0..3 {
        rig.abandon(index, READ);
    }
    rig.finish();
    assert_eq!(rig.fence_locally(2), [repost(2)]);
    assert_eq!(rig.fence_locally(0), [repost(0)]);
    assert_eq!(rig.fence_locally(1), [repost(1), report(Verdict::Fenced)]);
}

#[test]
fn a_queue_pair_that_does_not_obey_has_its_context_closed() {
    let mut rig = Rig::new(2);
    rig.abandon(0, READ);
    rig.abandon(1, READ);
    rig.finish();
    let local = LocalNic(0);
    assert_eq!(rig.advance(999), []);
    assert_eq!(
        rig.advance(1),
        [Action::CloseContext { local }],
        "once for both"
    );
    assert_eq!(
        rig.input(Input::ContextClosed { local }),
        [repost(0), repost(1), report(Verdict::Fenced)]
    );
}

#[test]
fn hardware_that_hangs_leaves_the_transfer_unfenced_and_its_memory_in_quarantine() {
    let mut rig = Rig::new(1);
    rig.abandon(0, WRITE);
    rig.finish();
    rig.advance(1_000);
    assert_eq!(rig.fences.quarantined_bytes(), 0);
    assert_eq!(rig.advance(1_000), [report(Verdict::Unfenced)]);
    assert_eq!(rig.fences.quarantined_bytes(), 4_096);
    let owned = rig.fences.may_unregister(REGION);
    assert_eq!(
        owned,
        Err(StillOwnedByHardware {
            bytes: 4_096,
            endpoint: endpoint(0)
        })
    );
    assert_eq!(rig.fences.may_unregister(RegionId(2)), Ok(()));
    assert_eq!(rig.finish(), [report(Verdict::Unfenced)], "asked again");
    // The context goes after all: packets may still be on their way.
    rig.advance(60_000);
    rig.input(Input::ContextClosed { local: LocalNic(0) });
    assert_eq!(rig.fences.quarantined_bytes(), 4_096);
    assert!(rig.fences.may_unregister(REGION).is_err());
    rig.advance(2_000);
    assert_eq!(rig.fences.quarantined_bytes(), 0);
    assert_eq!(rig.fences.may_unregister(REGION), Ok(()));
    assert!(rig.fences.is_empty());
}

#[test]
fn revoke_returns_when_the_peers_queue_pairs_are_drained() {
    let mut rig = Rig::new(2);
    let other = PeerId(9);
    rig.input(Input::Made {
        endpoint: endpoint(7),
        local: LocalNic(0),
        peer: other,
    });
    let peer = PEER;
    let actions = rig.input(Input::Revoke { peer });
    assert_eq!(
        actions.len(),
        4,
        "both of that peer's, not the other's: {actions:?}"
    );
    assert!(rig.fences.is_revoking(peer) && !rig.fences.is_revoking(other));
    rig.fence_locally(0);
    // A connection that was being made meanwhile is closed as well, and waited for.
    let late = rig.input(Input::Made {
        endpoint: endpoint(5),
        local: LocalNic(0),
        peer,
    });
    assert_eq!(late.len(), 2);
    assert_eq!(rig.fence_locally(1), []);
    let revoked = Action::Revoked {
        peer,
        verdict: Verdict::Fenced,
    };
    assert_eq!(rig.fence_locally(5), [revoked]);
    assert!(!rig.fences.is_revoking(peer));
    let nobody = PeerId(44);
    let revoked = Action::Revoked {
        peer: nobody,
        verdict: Verdict::Fenced,
    };
    assert_eq!(rig.input(Input::Revoke { peer: nobody }), [revoked]);
}

#[test]
fn x04_nothing_is_left_of_endpoints_that_are_gone() {
    let mut rig = Rig::new(1_000);
    for index in 0..1_000 {
        rig.abandon(index, WRITE);
    }
    rig.finish();
    for index in 0..1_000 {
        rig.fence_locally(index);
        rig.input(Input::Destroyed {
            endpoint: endpoint(index),
        });
    }
    assert_eq!(rig.advance(2_000), [report(Verdict::Fenced)]);
    assert!(rig.fences.is_empty());
    assert_eq!(rig.fences.next_timeout(), None);
    // A word about one of them that comes late is known to be late.
    assert_eq!(rig.abandon(17, WRITE), [repost(17)]);
}

#[test]
fn work_on_an_endpoint_that_nobody_told_of_is_never_called_fenced() {
    let mut rig = Rig::new(0);
    rig.abandon(4, READ);
    assert_eq!(rig.finish(), [report(Verdict::Unfenced)]);
}

#[test]
fn the_fence_of_a_cut_off_transfer_starts_before_its_deadline() {
    let config = FenceConfig::default();
    let at = |submitted, deadline| {
        config.cut_off_at(Time::from_millis(submitted), Time::from_millis(deadline))
    };
    assert_eq!(at(0, 30_000), Time::from_millis(28_000));
    assert_eq!(at(10_000, 11_000), Time::from_millis(10_500));
    assert_eq!(at(10_000, 9_000), Time::from_millis(9_000));
}

/// What the hardware and the wire really do, to judge the machine's words by.
#[derive(Clone, Copy, Default)]
struct Truth {
    local_fenced: Option<Time>,
    in_error: bool,
    peer_in_error: bool,
    writes: bool,
    used: bool,
}

impl Truth {
    /// Whether work of it can still touch memory.
    fn can_touch(&self, now: Time, lifetime: Duration) -> bool {
        let Some(at) = self.local_fenced else {
            return self.used;
        };
        let arrives = !self.peer_in_error && now < at + lifetime;
        self.used && self.writes && arrives
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn nothing_reported_as_fenced_can_touch_memory(
        steps in prop::collection::vec((0..9_u8, 0..4_u32, 0..2_500_u64), 1..80)
    ) {
        let mut rig = Rig::new(4);
        let lifetime = FenceConfig::default().packet_lifetime;
        let mut truth: BTreeMap<u32, Truth> = BTreeMap::new();
        let mut finished = false;
        let mut reports = 0;
        for (what, index, millis) in steps {
            let id = endpoint(index);
            let end = truth.entry(index).or_default();
            let actions = match what {
                0 | 1 if !finished && end.local_fenced.is_none() => {
                    end.used = true;
                    end.writes |= what == 0;
                    rig.abandon(index, if what == 0 { WRITE } else { READ })
                }
                2 => {
                    end.in_error = true;
                    rig.input(Input::InError { endpoint: id })
                }
                3 => {
                    // Drained is told truly only of a queue pair in ERR; before, it says nothing.
                    if end.in_error {
                        end.local_fenced.get_or_insert(rig.now);
                    }
                    rig.input(Input::Drained { endpoint: id })
                }
                4 => {
                    end.local_fenced.get_or_insert(rig.now);
                    rig.input(Input::Destroyed { endpoint: id })
                }
                5 => {
                    end.peer_in_error = true;
                    rig.input(Input::PeerConfirmed { endpoint: id })
                }
                6 if !finished => {
                    finished = true;
                    rig.finish()
                }
                7 => {
                    let local = LocalNic(index / 2);
                    for index in [local.0 * 2, local.0 * 2 + 1] {
                        let end = truth.entry(index).or_default();
                        end.local_fenced.get_or_insert(rig.now);
                    }
                    rig.input(Input::ContextClosed { local })
                }
                _ => rig.advance(millis),
            };
            for action in actions {
                match action {
                    Action::MayReport { verdict: Verdict::Fenced, .. } => {
                        reports += 1;
                        for (index, end) in &truth {
                            prop_assert!(!end.can_touch(rig.now, lifetime), "endpoint {}", index);
                        }
                    }
                    Action::MayReport { verdict: Verdict::Unfenced, .. } => {
                        reports += 1;
                        prop_assert!(rig.fences.quarantined_bytes() > 0);
                    }
                    Action::MayRepost { endpoint, .. } => {
                        let end = truth.get(&endpoint.index).copied().unwrap_or_default();
                        prop_assert!(end.local_fenced.is_some(), "posted again too early");
                    }
                    _ => {}
                }
            }
            if rig.fences.may_unregister(REGION).is_ok() {
                for end in truth.values() {
                    prop_assert!(!end.can_touch(rig.now, lifetime), "unregistered too early");
                }
            }
        }
        prop_assert!(reports <= 1, "reported once");
        // The hardware lets go at last: all ends, and nothing is left.
        if !finished {
            rig.finish();
        }
        for local in 0..2 {
            rig.input(Input::ContextClosed { local: LocalNic(local) });
        }
        rig.advance(2_000);
        prop_assert!(rig.fences.is_empty());
        prop_assert_eq!(rig.fences.quarantined_bytes(), 0);
        prop_assert_eq!(rig.fences.may_unregister(REGION), Ok(()));
        prop_assert!(rig.fences.finishing.is_empty());
    }
}
