//! Whatever happens in whatever order.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Happening {
    Gate(u32, u8),
    PeerGate(u64, bool),
    Completion(RailId, u32),
    Lost(RailId, bool),
    Slow(RailId),
    Break(RailId, bool, u32),
    Mend(RailId),
    Silent(bool),
    Passive(RailId),
    Pass(u64),
}

fn happening() -> impl Strategy<Value = Happening> {
    let id = || (0..3_u32, 0..3_u64).prop_map(|(local, peer)| rail(local, peer, 0));
    let status = || prop_oneof![Just(12_u32), Just(5), Just(10), Just(2), Just(1), 1..25_u32];
    prop_oneof![
        2 => (0..3_u32, 0..4_u8).prop_map(|(local, gate)| Happening::Gate(local, gate)),
        1 => (0..3_u64, any::<bool>()).prop_map(|(peer, up)| Happening::PeerGate(peer, up)),
        4 => (id(), status()).prop_map(|(id, status)| Happening::Completion(id, status)),
        1 => (id(), any::<bool>()).prop_map(|(id, closed)| Happening::Lost(id, closed)),
        1 => id().prop_map(Happening::Slow),
        2 => (id(), any::<bool>(), status())
            .prop_map(|(id, refused, status)| Happening::Break(id, refused, status)),
        2 => id().prop_map(Happening::Mend),
        1 => any::<bool>().prop_map(Happening::Silent),
        1 => id().prop_map(Happening::Passive),
        6 => prop_oneof![0..400_u64, 0..20_000_u64].prop_map(Happening::Pass),
    ]
}

fn happen(rig: &mut Rig, happening: Happening) {
    match happening {
        Happening::Gate(local, gate) => {
            let endpoints_kept = gate == 1;
            let gate = match gate {
                0 => LocalGate::Closed,
                3 => LocalGate::Dead,
                _ => LocalGate::Open { endpoints_kept },
            };
            rig.gate(local, gate);
        }
        Happening::PeerGate(peer, up) => {
            let nic = rail(0, peer, 0).peer;
            rig.input(Input::PeerNicGate { nic, up });
        }
        Happening::Completion(id, status) => rig.fail(id, WcStatus::from_raw(status)),
        Happening::Lost(rail, closed) => {
            let cause = if closed {
                RailCause::PeerClosed
            } else {
                RailCause::NoProgress
            };
            rig.input(Input::EndpointLost { rail, cause });
        }
        Happening::Slow(rail) => rig.input(Input::Slow { rail }),
        Happening::Break(id, refused, status) => {
            rig.broken.insert(id, (refused, WcStatus::from_raw(status)));
        }
        Happening::Mend(id) => {
            rig.broken.remove(&id);
        }
        Happening::Silent(silent) => rig.silent = silent,
        Happening::Passive(rail) => rig.input(Input::Connected { rail }),
        Happening::Pass(millis) => rig.advance(Duration::from_millis(millis)),
    }
}

/// A rail that nothing would ever try again, whatever time passes.
fn forgotten(rails: &Rails) -> Option<RailId> {
    let is_forgotten = |(id, rail): (&RailId, &Rail)| {
        let has_timer = rail
            .timer
            .is_some_and(|timer| rails.timers.contains(&(timer, *id)));
        let mut running = rails.running.iter();
        let is_expected = match (rail.state, rail.proof) {
            (RailState::Down, _) => has_timer || !rails.gates_open(*id),
            (RailState::HalfOpen, Proof::None) => !rail.wanted,
            // Its turn comes with the end of another's.
            (RailState::HalfOpen, Proof::Waiting) => {
                running.any(|((local, _), count)| *local == id.local && *count > 0)
            }
            (RailState::HalfOpen, _) => has_timer,
            (RailState::Up | RailState::Suspect, _) => true,
        };
        (!is_expected).then_some(*id)
    };
    rails.rails.iter().find_map(is_forgotten)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn gates_bounds_and_last_paths_hold_and_rails_heal_within_a_minute(
        happenings in prop::collection::vec(happening(), 1..80)
    ) {
        let mut rig = Rig::new(3, 3);
        for happening in happenings {
            let soft = matches!(happening, Happening::Slow(_));
            let culprit = match &happening {
                Happening::Completion(id, _) | Happening::Lost(id, _) => Some(*id),
                _ => None,
            };
            let before: Vec<_> = (0..3).map(|peer| rig.usable(peer)).collect();
            happen(&mut rig, happening);
            for peer in 0..3 {
                for candidate in match rig.rails.path(PeerId(peer)) {
                    Path::Usable(candidates) => candidates,
                    _ => Vec::new(),
                } {
                    prop_assert!(rig.rails.gates_open(candidate.rail), "a closed gate");
                }
                if soft || culprit.is_some_and(|id| id.peer.peer != PeerId(peer)) {
                    let had = before[peer as usize] > 0;
                    prop_assert!(!had || rig.usable(peer) > 0, "blame took the last path");
                }
            }
            for local in 0..3 {
                let (connects, probes) = rig.rails.proofs_running(LocalNic(local));
                prop_assert!(connects <= 64 && probes <= 8);
            }
            prop_assert!(rig.rails.timers.len() <= rig.rails.rails.len());
            prop_assert!(rig.rails.waiting.len() <= rig.rails.rails.len());
            prop_assert_eq!(forgotten(&rig.rails), None, "a rail has neither a timer nor a turn");
        }
        rig.broken.clear();
        rig.silent = false;
        rig.advance(Duration::from_secs(11));
        for local in 0..3 {
            rig.gate(local, OPEN);
        }
        for peer in 0..3 {
            let nic = rail(0, peer, 0).peer;
            rig.input(Input::PeerNicGate { nic, up: true });
        }
        rig.advance(Duration::from_secs(61));
        for local in 0..3 {
            prop_assert_eq!(rig.rails.proofs_running(LocalNic(local)), (0, 0));
            for peer in 0..3 {
                let state = rig.state(rail(local, peer, 0));
                prop_assert!(matches!(state, RailState::Up | RailState::Suspect), "{:?}", state);
            }
        }
        rig.advance(Duration::from_secs(60));
        let up = (0..3).all(|peer| rig.state(rail(0, peer, 0)) == RailState::Up);
        prop_assert!(up, "suspicion expires");
    }

    #[test]
    fn no_pair_is_tried_more_often_than_its_back_off_allows(
        statuses in prop::collection::vec(1..25_u32, 400)
    ) {
        let mut rig = Rig::new(1, 1);
        let id = rail(0, 0, 0);
        rig.log.clear();
        for status in statuses {
            rig.fail(id, WcStatus::from_raw(status));
            rig.advance(Duration::from_millis(25));
        }
        let connects = rig.connects(id);
        prop_assert!(connects <= 40, "{} connections in ten seconds", connects);
    }
}
