//! Scenarios over whole nodes, each named for its fault.

use std::time::Duration;

use proptest::prelude::*;
use rerail_verbs::AsyncEventKind;

use super::world::{World, name};
use crate::machine::rail::RailState;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[test]
fn nodes_find_each_other_and_prove_their_rails() {
    let world = World::new(3, 2);
    assert!(world.is_healed());
}

#[test]
fn a_renumbered_port_is_told_to_peers_and_back_in_use_within_a_second() {
    let mut world = World::new(2, 2);
    world.set_gid(0, 0, "10.77.0.1");
    world.run(ms(5));
    let known = world.nodes[1]
        .peers
        .descriptor("n0")
        .map(|known| known.devices[0].gid);
    assert_eq!(known, "10.77.0.1".parse().ok(), "pushed, not waited for");
    let took = world.heal(ms(1_000));
    assert!(took < ms(1_000), "{took:?}");
}

#[test]
fn forty_gid_events_with_nothing_changed_publish_nothing_and_keep_every_rail() {
    let mut world = World::new(2, 2);
    let written = world.written.clone();
    for _ in 0..40 {
        world.event(0, 0, AsyncEventKind::GidChange);
        world.run(ms(75));
        assert!(
            world
                .rails(0, 1)
                .iter()
                .all(|state| *state == RailState::Up)
        );
    }
    assert_eq!(world.written, written);
}

#[test]
fn a_store_that_is_away_through_two_renumberings_stops_nothing() {
    let mut world = World::new(2, 1);
    let before = world.written[&name(0)].len();
    world.store_away = true;
    world.set_gid(0, 0, "10.77.0.1");
    world.run(ms(2_000));
    assert_eq!(
        world.rails(1, 0),
        [RailState::Up],
        "by the subscription alone"
    );
    assert_eq!(world.rails(0, 1), [RailState::Up]);
    world.set_gid(0, 0, "10.77.0.2");
    world.run(ms(20_000));
    assert_eq!(world.rails(1, 0), [RailState::Up]);
    world.store_away = false;
    world.heal(ms(6_000));
    assert_eq!(
        world.written[&name(0)].len(),
        before + 1,
        "the last state only"
    );
}

#[test]
fn both_ends_lose_a_rail_in_the_same_instant() {
    let mut world = World::new(2, 2);
    world.set_up(0, 0, false);
    world.set_up(1, 0, false);
    world.run(ms(500));
    let states = world.rails(0, 1);
    assert_eq!(states[3], RailState::Up, "the other pair carries on");
    assert!(
        states[..3].iter().all(|state| *state == RailState::Down),
        "{states:?}"
    );
    world.run(ms(30_000));
    world.set_up(0, 0, true);
    world.run(ms(3));
    world.set_up(1, 0, true);
    let took = world.heal(ms(5_000));
    assert!(took < ms(2_000), "{took:?}");
}

#[test]
fn a_peer_that_is_killed_and_restarted_is_another_within_a_second() {
    let mut world = World::new(2, 1);
    let peer = world.nodes[1].peers.peer("n0");
    let at = world.now;
    world.restart(0);
    world.heal(ms(3_000));
    assert_ne!(world.nodes[1].peers.peer("n0"), peer);
    let retired = world.nodes[1].retired.first().copied();
    assert_eq!(retired.map(|(_, peer)| peer), peer);
    assert!(retired.is_some_and(|(when, _)| when.saturating_since(at) < ms(1_000)));
}

/// A fault at a node's NIC, the store or a whole node.
#[derive(Clone, Debug)]
enum Fault {
    Up(usize, u32, bool),
    Gid(usize, u32, u8),
    Store(bool),
    Restart(usize),
    Stray(usize, u32, u32),
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => (0..3_usize, 0..2_u32, any::<bool>()).prop_map(|(n, nic, up)| Fault::Up(n, nic, up)),
        4 => (0..3_usize, 0..2_u32, 1..9_u8).prop_map(|(n, nic, gid)| Fault::Gid(n, nic, gid)),
        2 => any::<bool>().prop_map(Fault::Store),
        1 => (0..3_usize).prop_map(Fault::Restart),
        2 => (0..3_usize, 0..2_u32, 9..24_u32).prop_map(|(n, nic, k)| Fault::Stray(n, nic, k)),
    ]
}

proptest! {
    #[test]
    fn after_any_storm_every_node_knows_every_other_and_all_rails_are_up(
        storm in prop::collection::vec((fault(), 0..3_000_u64), 1..25)
    ) {
        let mut world = World::new(3, 2);
        for (fault, pause) in storm {
            match fault {
                Fault::Up(node, nic, up) => world.set_up(node, nic, up),
                Fault::Gid(node, nic, gid) => {
                    world.set_gid(node, nic, &format!("10.{}.{nic}.{gid}", 100 + node));
                }
                Fault::Store(away) => world.store_away = away,
                Fault::Restart(node) => world.restart(node),
                Fault::Stray(node, nic, kind) => {
                    world.event(node, nic, AsyncEventKind::from_raw(kind));
                }
            }
            world.run(ms(pause));
        }
        world.store_away = false;
        for node in 0..3 {
            for nic in 0..2 {
                world.set_up(node, nic, true);
            }
        }
        world.heal(ms(120_000));
    }
}
