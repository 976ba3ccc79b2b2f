//! Scenarios, named for what must hold or for their report.

use rerail_verbs::AsyncEventKind;

use super::*;

#[test]
fn a_rail_is_proved_by_two_probes_before_it_carries_work() {
    let mut rig = Rig::new(0, 0);
    rig.silent = true;
    rig.gate(0, OPEN);
    let id = rail(0, 1, 0);
    let traits = RailTraits {
        same_subnet: true,
        speed_mbps: 0,
    };
    rig.input(Input::Declare { rail: id, traits });
    assert_eq!(rig.rails.path(PeerId(1)), Path::Expected { want: Some(id) });
    assert!(rig.log.is_empty(), "nobody wants it");
    rig.input(Input::Wanted { rail: id });
    rig.input(Input::Connected { rail: id });
    assert_eq!(rig.rails.path(PeerId(1)), Path::Expected { want: None });
    rig.input(Input::ProbeDone {
        rail: id,
        probe: 1,
        status: WcStatus::Success,
    });
    assert_eq!(rig.state(id), RailState::HalfOpen);
    rig.input(Input::ProbeDone {
        rail: id,
        probe: 1,
        status: WcStatus::Success,
    });
    assert_eq!(rig.state(id), RailState::HalfOpen, "an answer counts once");
    rig.input(Input::ProbeDone {
        rail: id,
        probe: 2,
        status: WcStatus::Success,
    });
    assert_eq!(rig.state(id), RailState::Up);
    let actions: Vec<_> = rig.log.iter().map(|(_, action)| action.clone()).collect();
    assert_eq!(
        actions[..3],
        [
            Action::Connect { rail: id },
            Action::Probe {
                rail: id,
                probe: 1,
                kind: ProbeKind::ZeroLengthRead
            },
            Action::Probe {
                rail: id,
                probe: 2,
                kind: ProbeKind::FullMtuRead
            },
        ]
    );
}

#[test]
fn a_gate_that_closes_takes_its_rails_out_at_once_and_good_news_proves_them() {
    let mut rig = Rig::new(2, 2);
    rig.gate(0, LocalGate::Closed);
    assert_eq!(rig.state(rail(0, 0, 0)), RailState::Down);
    assert_eq!(
        rig.state(rail(1, 0, 0)),
        RailState::Up,
        "the other NIC's rails stay"
    );
    rig.advance(Duration::from_secs(120));
    assert_eq!(
        rig.connects(rail(0, 0, 0)),
        1,
        "no attempt through a closed gate"
    );
    rig.gate(0, OPEN);
    assert_eq!(rig.state(rail(0, 0, 0)), RailState::Up);
    assert_eq!(rig.connects(rail(0, 0, 0)), 2);
}

#[test]
fn e06_endpoints_that_lived_through_a_flap_are_probed_before_use() {
    let mut rig = Rig::new(1, 1);
    let id = rail(0, 0, 0);
    rig.gate(0, LocalGate::Closed);
    assert!(
        !rig.log
            .iter()
            .any(|(_, action)| matches!(action, Action::DropEndpoint { .. }))
    );
    rig.log.clear();
    rig.silent = true;
    rig.gate(
        0,
        LocalGate::Open {
            endpoints_kept: true,
        },
    );
    assert_eq!(rig.state(id), RailState::HalfOpen);
    assert_eq!(rig.connects(id), 0, "the endpoint is kept");
    assert!(rig.log.iter().any(|(_, action)| matches!(
        action,
        Action::Probe {
            kind: ProbeKind::ZeroLengthRead,
            ..
        }
    )));
    // It died meanwhile: the probe finds out, not user work.
    rig.advance(Duration::from_millis(1_001));
    assert!(
        rig.log
            .iter()
            .any(|(_, action)| *action == Action::DropEndpoint { rail: id })
    );
    rig.silent = false;
    rig.advance(Duration::from_secs(2));
    assert_eq!(rig.connects(id), 1, "a new one is made");
    assert_eq!(rig.state(id), RailState::Up);
}

#[test]
fn x06_a_pair_that_fails_at_once_is_tried_with_back_off_and_names_the_first_cause() {
    let mut rig = Rig::new(1, 1);
    let id = rail(0, 0, 0);
    rig.log.clear();
    let end = rig.now + Duration::from_secs(10);
    rig.fail(id, WcStatus::RetryExcErr);
    while rig.now < end {
        // Each new queue pair is proved, and dies of its first message.
        if rig.state(id) == RailState::Up {
            rig.fail(id, WcStatus::LocLenErr);
        }
        rig.advance(Duration::from_millis(1));
    }
    let connects = rig.connects(id);
    assert!((4..=25).contains(&connects), "{connects} in ten seconds");
    let last = rig.log.iter().rev().find_map(|(_, action)| match action {
        Action::State {
            to: RailState::Down,
            cause,
            first_cause,
            ..
        } => Some((cause.clone(), first_cause.clone())),
        _ => None,
    });
    let first = RailCause::Completion(WcStatus::RetryExcErr);
    assert_eq!(
        last,
        Some((RailCause::Completion(WcStatus::LocLenErr), Some(first)))
    );
    // After it has worked for a while its past is forgotten.
    rig.advance(Duration::from_secs(90));
    rig.log.clear();
    rig.fail(id, WcStatus::LocLenErr);
    assert_eq!(rig.state(id), RailState::Up, "replaced at once");
}

#[test]
fn x07_flushes_blame_nobody() {
    let mut rig = Rig::new(2, 2);
    let id = rail(0, 0, 0);
    rig.silent = true;
    rig.log.clear();
    for _ in 0..50 {
        rig.fail(id, WcStatus::WrFlushErr);
    }
    assert!(rig.log.is_empty());
    assert_eq!(rig.state(id), RailState::Up);
    rig.fail(id, WcStatus::RetryExcErr);
    for _ in 0..127 {
        rig.fail(id, WcStatus::WrFlushErr);
    }
    let downs = rig.log.iter().filter(|(_, action)| {
        matches!(
            action,
            Action::State {
                to: RailState::Down,
                ..
            }
        )
    });
    assert_eq!(downs.count(), 1, "one failure is one failure");
    for other in [rail(1, 0, 0), rail(0, 1, 0), rail(1, 1, 0)] {
        assert_eq!(rig.state(other), RailState::Up);
    }
}

#[test]
fn errors_over_many_peers_doubt_the_local_nics_other_rails() {
    let mut rig = Rig::new(2, 5);
    rig.silent = true;
    rig.log.clear();
    for peer in 0..3 {
        rig.fail(rail(0, peer, 0), WcStatus::RetryExcErr);
    }
    assert!(
        rig.log
            .iter()
            .any(|(_, action)| *action == Action::RecheckLocal { local: LocalNic(0) })
    );
    for peer in 3..5 {
        assert_eq!(
            rig.state(rail(0, peer, 0)),
            RailState::HalfOpen,
            "proved before it is used on"
        );
        assert_eq!(rig.state(rail(1, peer, 0)), RailState::Up);
    }
}

#[test]
fn errors_over_many_local_nics_point_to_the_peer() {
    let mut rig = Rig::new(3, 3);
    rig.silent = true;
    rig.log.clear();
    rig.fail(rail(0, 1, 0), WcStatus::RetryExcErr);
    rig.fail(rail(1, 1, 0), WcStatus::RetryExcErr);
    assert!(
        rig.log
            .iter()
            .any(|(_, action)| *action == Action::RefreshPeer { peer: PeerId(1) })
    );
    assert!(
        !rig.log
            .iter()
            .any(|(_, action)| matches!(action, Action::RecheckLocal { .. }))
    );
    assert_eq!(
        rig.state(rail(2, 1, 0)),
        RailState::Suspect,
        "the last one carries on"
    );
    assert_eq!(rig.state(rail(0, 0, 0)), RailState::Up);
}

#[test]
fn a_bad_key_costs_the_rail_a_reconnection_and_nobody_a_blame() {
    let mut rig = Rig::new(1, 4);
    rig.log.clear();
    for peer in 0..4 {
        rig.fail(rail(0, peer, 0), WcStatus::RemAccessErr);
        assert_eq!(
            rig.state(rail(0, peer, 0)),
            RailState::Up,
            "replaced at once"
        );
    }
    assert!(!rig.log.iter().any(|(_, action)| matches!(
        action,
        Action::RecheckLocal { .. } | Action::RefreshPeer { .. }
    )));
}

#[test]
fn damping_holds_a_flapping_rail_but_never_the_last_one() {
    // E14's pattern, quicker: with another rail there, the flapping one is held back.
    let mut rig = Rig::new(2, 1);
    let id = rail(0, 0, 0);
    for _ in 0..5 {
        rig.gate(0, LocalGate::Closed);
        rig.advance(Duration::from_millis(100));
        rig.gate(0, OPEN);
    }
    assert_eq!(rig.state(id), RailState::Down);
    rig.advance(Duration::from_secs(10));
    assert_eq!(rig.state(id), RailState::Down, "held back");
    // The other rail is lost: the held one is tried although it is held.
    rig.broken.insert(rail(1, 0, 0), (true, WcStatus::Success));
    rig.fail(rail(1, 0, 0), WcStatus::RetryExcErr);
    rig.advance(Duration::from_secs(1));
    assert_eq!(rig.state(id), RailState::Up);

    let mut rig = Rig::new(2, 1);
    for _ in 0..5 {
        rig.gate(0, LocalGate::Closed);
        rig.advance(Duration::from_millis(100));
        rig.gate(0, OPEN);
    }
    rig.advance(Duration::from_secs(60));
    assert_eq!(
        rig.state(id),
        RailState::Up,
        "damping expires within a minute"
    );
}

#[test]
fn a_slow_rail_keeps_a_quarter_of_its_share_for_a_minute() {
    let mut rig = Rig::new(2, 1);
    rig.input(Input::Slow {
        rail: rail(0, 0, 0),
    });
    let Path::Usable(candidates) = rig.rails.path(PeerId(0)) else {
        panic!("both rails are usable");
    };
    assert_eq!(candidates.len(), 2);
    assert_eq!(candidates[0].bytes_per_s * 4, candidates[1].bytes_per_s);
    rig.advance(Duration::from_secs(61));
    assert_eq!(rig.state(rail(0, 0, 0)), RailState::Up);
}

#[test]
fn a_suspect_rail_whose_nic_is_blamed_is_proved_before_it_carries_on() {
    let mut rig = Rig::new(2, 4);
    let slow = rail(0, 3, 0);
    rig.input(Input::Slow { rail: slow });
    assert_eq!(rig.state(slow), RailState::Suspect);
    rig.silent = true;
    for peer in 0..3 {
        rig.fail(rail(0, peer, 0), WcStatus::RetryExcErr);
    }
    assert_eq!(rig.state(slow), RailState::HalfOpen);
}

#[test]
fn the_last_path_is_tried_every_second_whatever_its_back_off() {
    let mut rig = Rig::new(1, 1);
    let id = rail(0, 0, 0);
    rig.broken.insert(id, (true, WcStatus::Success));
    rig.fail(id, WcStatus::RetryExcErr);
    rig.advance(Duration::from_secs(120));
    rig.broken.clear();
    rig.advance(Duration::from_millis(1_100));
    assert_eq!(rig.state(id), RailState::Up);

    // With 16 rails to one dead peer the attempts are the peer's, not each rail's.
    let mut rig = Rig::new(16, 1);
    for local in 0..16 {
        rig.broken
            .insert(rail(local, 0, 0), (true, WcStatus::Success));
        rig.fail(rail(local, 0, 0), WcStatus::RetryExcErr);
    }
    rig.advance(Duration::from_secs(60));
    rig.log.clear();
    rig.advance(Duration::from_secs(60));
    let connects: usize = (0..16).map(|local| rig.connects(rail(local, 0, 0))).sum();
    assert!((50..=130).contains(&connects), "{connects} in a minute");
}

#[test]
fn probes_are_bounded_per_nic() {
    let mut rig = Rig::new(0, 0);
    rig.silent = true;
    rig.gate(0, OPEN);
    for peer in 0..100 {
        let traits = RailTraits {
            same_subnet: true,
            speed_mbps: 0,
        };
        let rail = rail(0, peer, 0);
        rig.input(Input::Declare { rail, traits });
        rig.input(Input::Wanted { rail });
    }
    assert_eq!(rig.rails.proofs_running(LocalNic(0)), (64, 0));
    assert_eq!(rig.log.len(), 64);
    rig.input(Input::ConnectFailed {
        rail: rail(0, 3, 0),
        reason: "refused".into(),
        fault: ConnectFault::Refused,
    });
    assert_eq!(rig.connects(rail(0, 64, 0)), 1, "the next in line");
    for peer in 10..40 {
        rig.input(Input::Connected {
            rail: rail(0, peer, 0),
        });
    }
    assert_eq!(rig.rails.proofs_running(LocalNic(0)), (64, 8));
    rig.input(Input::ProbeDone {
        rail: rail(0, 10, 0),
        probe: 1,
        status: WcStatus::RetryExcErr,
    });
    assert_eq!(
        rig.rails.proofs_running(LocalNic(0)).1,
        8,
        "the next in line"
    );
    rig.gate(0, LocalGate::Closed);
    let running = rig.rails.proofs_running(LocalNic(0));
    assert_eq!(running, (0, 0), "nor does anybody wait for them any more");
}

#[test]
fn three_hundred_dead_peers_hold_up_no_living_one() {
    let mut rig = Rig::new(1, 301);
    let living = rail(0, 300, 0);
    for peer in 0..300 {
        rig.mute.insert(rail(0, peer, 0));
        rig.fail(rail(0, peer, 0), WcStatus::RetryExcErr);
    }
    rig.advance(Duration::from_secs(300));
    let (connects, _) = rig.rails.proofs_running(LocalNic(0));
    assert_eq!(connects, 48, "their share of the places is taken");
    rig.fail(living, WcStatus::RetryExcErr);
    rig.advance(Duration::from_secs(3));
    assert_eq!(rig.state(living), RailState::Up);
}

#[test]
fn no_path_says_why_and_only_when_none_is_expected() {
    let mut rig = Rig::new(2, 1);
    assert_eq!(rig.rails.path(PeerId(77)), Path::None(NoPath::NoRails));
    rig.gate(0, LocalGate::Closed);
    rig.gate(1, LocalGate::Closed);
    assert_eq!(rig.rails.path(PeerId(0)), Path::Expected { want: None });
    rig.gate(0, LocalGate::Dead);
    assert_eq!(rig.rails.path(PeerId(0)), Path::Expected { want: None });
    rig.gate(1, LocalGate::Dead);
    assert_eq!(rig.rails.path(PeerId(0)), Path::None(NoPath::LocalNicsDead));
    rig.gate(1, OPEN);
    assert_eq!(rig.usable(0), 1);
    rig.input(Input::PeerGone { peer: PeerId(0) });
    assert_eq!(rig.rails.path(PeerId(0)), Path::None(NoPath::PeerGone));
    rig.advance(Duration::from_secs(100));
    assert_eq!(
        rig.rails.next_timeout(),
        None,
        "nothing is tried towards a peer that is gone"
    );
}

#[test]
fn a_withdrawn_peer_nic_is_used_again_on_good_news() {
    let mut rig = Rig::new(1, 1);
    let id = rail(0, 0, 0);
    let nic = id.peer;
    rig.input(Input::PeerNicGate { nic, up: false });
    let dropped = |rig: &Rig| {
        rig.log
            .iter()
            .filter(|(_, action)| *action == Action::DropEndpoint { rail: id })
            .count()
    };
    assert_eq!(dropped(&rig), 1, "the peer has cut its end");
    rig.advance(Duration::from_secs(40));
    assert_eq!(rig.state(id), RailState::Down);
    assert_eq!(rig.connects(id), 1);
    rig.input(Input::PeerNicGate { nic, up: true });
    assert_eq!(rig.state(id), RailState::Up);
    rig.gate(0, LocalGate::Dead);
    assert_eq!(dropped(&rig), 2, "and so does a dead context");
}

#[test]
fn a_peer_that_refuses_is_asked_again_each_second_and_its_return_is_found_within_three() {
    let mut rig = Rig::new(2, 1);
    let id = rail(0, 0, 0);
    rig.fault = ConnectFault::Refused;
    rig.broken.insert(id, (true, WcStatus::Success));
    rig.fail(id, WcStatus::RetryExcErr);
    rig.advance(Duration::from_secs(120));
    let asked = rig.connects(id);
    assert!((100..=300).contains(&asked), "{asked} in two minutes");
    // Its address cannot be resolved at once when it comes back.
    rig.fault = ConnectFault::Other;
    rig.advance(Duration::from_millis(1_001));
    rig.broken.clear();
    rig.advance(Duration::from_millis(1_999));
    assert_eq!(rig.state(id), RailState::Up);
}

#[test]
fn a_rail_that_nobody_wants_any_more_is_left_alone_until_somebody_does() {
    let mut rig = Rig::new(1, 1);
    let id = rail(0, 0, 0);
    rig.broken.insert(id, (true, WcStatus::Success));
    rig.fail(id, WcStatus::RetryExcErr);
    rig.advance(Duration::from_secs(10));
    rig.input(Input::Unwanted { rail: id });
    let asked = rig.connects(id);
    rig.advance(Duration::from_secs(120));
    assert_eq!(rig.connects(id), asked);
    assert_eq!(rig.rails.next_timeout(), None, "nothing is left to do");
    rig.broken.clear();
    rig.input(Input::Wanted { rail: id });
    rig.advance(Duration::from_secs(1));
    assert_eq!(rig.state(id), RailState::Up);
    rig.input(Input::Unwanted { rail: id });
    assert_eq!(rig.state(id), RailState::Up, "what works stays");
}

#[test]
fn good_news_end_a_long_back_off() {
    let mut rig = Rig::new(2, 1);
    rig.fault = ConnectFault::Other;
    let id = rail(0, 0, 0);
    rig.broken.insert(id, (true, WcStatus::Success));
    rig.fail(id, WcStatus::RetryExcErr);
    rig.advance(Duration::from_secs(120));
    let before = rig.connects(id);
    rig.advance(Duration::from_secs(10));
    assert!(
        rig.connects(id) <= before + 1,
        "its back-off is long by now"
    );
    rig.broken.clear();
    rig.input(Input::PeerNicGate {
        nic: id.peer,
        up: true,
    });
    assert_eq!(rig.state(id), RailState::Up);
}

#[test]
fn a_queue_pair_event_and_no_progress_take_down_that_rail_only() {
    let mut rig = Rig::new(2, 2);
    rig.silent = true;
    rig.input(Input::EndpointLost {
        rail: rail(0, 0, 0),
        cause: RailCause::QueuePairEvent(AsyncEventKind::QpFatal),
    });
    rig.input(Input::EndpointLost {
        rail: rail(1, 1, 0),
        cause: RailCause::NoProgress,
    });
    assert_eq!(rig.state(rail(0, 0, 0)), RailState::Down);
    assert_eq!(rig.state(rail(1, 1, 0)), RailState::Down);
    assert_eq!(rig.usable(0), 1);
    assert_eq!(rig.usable(1), 1);
}

#[test]
fn slices_go_where_they_end_first() {
    let candidate = |local, bytes_per_s, same_subnet| Candidate {
        rail: rail(local, 0, 0),
        bytes_per_s,
        same_subnet,
    };
    let two = [candidate(0, 100, true), candidate(1, 100, true)];
    let near = |local: LocalNic| u32::from(local.0 == 0);
    let idle = |_: RailId| 0_u64;
    assert_eq!(choose(&[], 1, idle, near), None);
    assert_eq!(
        choose(&two, 1_000, idle, near),
        Some(rail(1, 0, 0)),
        "the near NIC"
    );
    let busy = |rail: RailId| if rail.local.0 == 1 { 10_000 } else { 0 };
    assert_eq!(
        choose(&two, 1_000, busy, near),
        Some(rail(0, 0, 0)),
        "the near NIC is full"
    );
    let fast = [candidate(0, 400, true), candidate(1, 100, true)];
    let far = |_: LocalNic| 0;
    let queued = |rail: RailId| if rail.local.0 == 0 { 3_000 } else { 1_000 };
    assert_eq!(
        choose(&fast, 1_000, queued, far),
        Some(rail(0, 0, 0)),
        "rate counts"
    );
    let subnets = [candidate(0, 200, false), candidate(1, 100, true)];
    assert_eq!(
        choose(&subnets, 1_000, idle, far),
        Some(rail(1, 0, 0)),
        "the same subnet"
    );
}

#[test]
fn a_forgotten_peer_leaves_nothing_behind() {
    let mut rig = Rig::new(4, 8);
    rig.broken.insert(rail(0, 3, 0), (true, WcStatus::Success));
    rig.fail(rail(0, 3, 0), WcStatus::RetryExcErr);
    for peer in 0..8 {
        rig.input(Input::ForgetPeer { peer: PeerId(peer) });
    }
    assert!(rig.rails.rails.is_empty() && rig.rails.peers.is_empty());
    assert!(rig.rails.timers.is_empty() && rig.rails.waiting.is_empty());
    assert!((0..4).all(|local| rig.rails.proofs_running(LocalNic(local)) == (0, 0)));
}

#[test]
fn a_thousand_flaps_leave_nothing_behind() {
    let mut rig = Rig::new(2, 3);
    let sizes = |rig: &Rig| {
        let rails = &rig.rails;
        let running: usize = rails.running.values().sum();
        let tables = [rails.rails.len(), rails.peers.len(), rails.locals.len()];
        let queues = [rails.waiting.len(), rails.withdrawn.len(), rails.out.len()];
        (tables, queues, running, rails.timers.len())
    };
    rig.advance(Duration::from_secs(60));
    let before = sizes(&rig);
    for _ in 0..1_000 {
        rig.gate(1, LocalGate::Closed);
        rig.advance(Duration::from_millis(500));
        assert_eq!(rig.usable(0), 1, "the other one stays");
        rig.gate(1, OPEN);
        rig.advance(Duration::from_millis(500));
        rig.log.clear();
    }
    // Until damping and back-offs are forgotten.
    rig.advance(Duration::from_secs(180));
    assert_eq!(sizes(&rig), before);
    assert!((0..3).all(|peer| rig.usable(peer) == 2), "all work");
}
