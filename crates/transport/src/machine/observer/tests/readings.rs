//! One reading each: what it is taken for, and what is done, in which order.

use super::*;

#[test]
fn a_first_reading_publishes_and_opens_half() {
    let observer = Observer::new(
        Time::ZERO,
        ObserverConfig::default(),
        "mlx5_0",
        &GidPolicy::default(),
        [1],
        1,
    );
    let mut rig = Rig::new(&[1]);
    rig.observer = observer;
    rig.settle();
    assert_eq!(rig.words(), ["read", "changed", "publish", "half-open"]);
    assert_eq!(rig.gid(1), Some((3, GLOBAL.parse().expect("literal"))));
}

#[test]
fn e02_only_unchanged_keeps_endpoints() {
    let mut rig = Rig::new(&[1]);
    rig.event(AsyncEventKind::GidChange, 1);
    assert_eq!(rig.words(), ["read", "unchanged"]);

    rig.advance(Duration::from_millis(100));
    rig.set_rows(1, &[row(1, LINK_LOCAL), row(3, "10.50.9.9")]);
    rig.event(AsyncEventKind::GidChange, 1);
    assert_eq!(
        rig.words(),
        ["read", "changed", "close", "cut", "publish", "half-open"]
    );

    rig.advance(Duration::from_millis(100));
    rig.ports.insert(
        1,
        Err(ReadFailure {
            query: "ibv_query_gid_table",
            errno: 5,
        }),
    );
    rig.event(AsyncEventKind::GidChange, 1);
    rig.advance(Duration::from_millis(16));
    assert_eq!(
        rig.words(),
        [
            "read", "read", "read", "read", "failed", "close", "cut", "publish"
        ],
        "read four times, then fail closed"
    );
    assert!(
        rig.observer
            .facts(1)
            .is_some_and(|facts| !facts.up && facts.gid.is_some())
    );
    rig.advance(Duration::from_millis(1_020));
    let again = rig.take();
    assert!(
        again.iter().any(|action| matches!(
            action,
            Action::Report {
                outcome: Outcome::Failed { repeated: true, .. },
                ..
            }
        )),
        "asked again after a second, without a second error line: {again:?}"
    );
    assert!(
        !again
            .iter()
            .any(|action| matches!(action, Action::Publish { .. }))
    );
}

#[test]
fn the_same_bytes_in_another_row_rebuild_and_publish_nothing() {
    let mut rig = Rig::new(&[1]);
    rig.set_rows(1, &[row(1, LINK_LOCAL), row(7, GLOBAL)]);
    rig.event(AsyncEventKind::GidChange, 1);
    assert_eq!(rig.words(), ["read", "moved", "close", "cut", "half-open"]);
    assert_eq!(rig.gid(1), Some((7, GLOBAL.parse().expect("literal"))));
}

#[test]
fn an_unrelated_row_at_a_lower_index_moves_nothing() {
    let mut rig = Rig::new(&[1]);
    rig.set_rows(1, &[row(0, "10.1.1.1"), row(1, LINK_LOCAL), row(3, GLOBAL)]);
    rig.event(AsyncEventKind::GidChange, 1);
    rig.advance(Duration::from_secs(30));
    assert!(
        rig.words()
            .iter()
            .all(|word| ["read", "unchanged"].contains(word))
    );
    assert_eq!(rig.gid(1), Some((3, GLOBAL.parse().expect("literal"))));
}

#[test]
fn a_better_class_moves_a_working_choice_only_after_it_settled() {
    let mut rig = Rig::new(&[1]);
    // Take the port down and bring it back with link-local only, longer than the hold.
    rig.set_rows(1, &[row(1, LINK_LOCAL)]);
    rig.event(AsyncEventKind::GidChange, 1);
    assert_eq!(rig.words(), ["read", "failed", "close", "cut", "publish"]);
    rig.advance(Duration::from_millis(2_100));
    assert_eq!(
        rig.gid(1).map(|(index, _)| index),
        Some(1),
        "taken after the hold"
    );
    rig.take();

    rig.set_rows(1, &[row(1, LINK_LOCAL), row(4, GLOBAL)]);
    rig.event(AsyncEventKind::GidChange, 1);
    assert_eq!(rig.words(), ["read", "unchanged"]);
    rig.advance(Duration::from_millis(1_900));
    assert!(
        !rig.words().contains(&"publish"),
        "not before it has settled"
    );
    rig.advance(Duration::from_millis(200));
    assert!(rig.words().contains(&"publish"));
    assert_eq!(rig.gid(1), Some((4, GLOBAL.parse().expect("literal"))));
}

#[test]
fn a_hold_that_a_flap_interrupted_begins_anew() {
    let mut rig = Rig::new(&[1]);
    rig.set_rows(1, &[row(1, LINK_LOCAL)]);
    rig.event(AsyncEventKind::GidChange, 1);
    rig.advance(Duration::from_millis(1_000));
    rig.set_state(1, PortState::Down);
    rig.event(AsyncEventKind::PortErr, 1);
    rig.advance(Duration::from_secs(5));
    rig.set_state(1, PortState::Active);
    rig.event(AsyncEventKind::PortActive, 1);
    rig.advance(Duration::from_millis(1_500));
    assert!(!rig.observer.gate_open(1), "link-local is not taken yet");
    rig.set_rows(1, &[row(1, LINK_LOCAL), row(6, GLOBAL)]);
    rig.event(AsyncEventKind::GidChange, 1);
    assert_eq!(rig.gid(1).map(|(index, _)| index), Some(6));
    assert!(rig.observer.gate_open(1));
}

#[test]
fn a_row_of_the_same_class_is_taken_at_once_when_the_one_in_use_is_gone() {
    let mut rig = Rig::new(&[1]);
    rig.set_rows(1, &[row(1, LINK_LOCAL), row(5, "10.50.1.77")]);
    rig.event(AsyncEventKind::GidChange, 1);
    assert_eq!(
        rig.words(),
        ["read", "changed", "close", "cut", "publish", "half-open"]
    );
}

#[test]
fn a_smaller_mtu_cuts_and_a_larger_one_or_a_speed_does_not() {
    let mut rig = Rig::new(&[1]);
    rig.set(1, |reading| reading.attr.active_mtu = Some(Mtu::Mtu4096));
    rig.event(AsyncEventKind::PortActive, 1);
    assert_eq!(
        rig.words(),
        ["read", "changed", "publish", "replace-lazily"]
    );
    rig.advance(Duration::from_millis(50));
    rig.set(1, |reading| reading.attr.active_speed = 64);
    rig.event(AsyncEventKind::DeviceSpeedChange, 1);
    assert_eq!(
        rig.words(),
        ["read", "changed", "publish", "replace-lazily"]
    );
    rig.advance(Duration::from_millis(50));
    rig.set(1, |reading| reading.attr.active_mtu = Some(Mtu::Mtu1024));
    rig.event(AsyncEventKind::PortActive, 1);
    assert_eq!(
        rig.words(),
        ["read", "changed", "close", "cut", "publish", "half-open"]
    );
}

#[test]
fn a_pkey_change_is_a_change_and_an_invalid_key_fails_on_infiniband() {
    let mut rig = Rig::new(&[1]);
    rig.set(1, |reading| reading.pkeys = vec![0x8001]);
    rig.event(AsyncEventKind::PkeyChange, 1);
    assert_eq!(
        rig.words(),
        ["read", "changed", "close", "cut", "publish", "half-open"]
    );
    rig.advance(Duration::from_millis(50));
    rig.set(1, |reading| {
        reading.attr.link_layer = LinkLayer::InfiniBand;
        reading.pkeys = vec![0x8000];
    });
    rig.event(AsyncEventKind::PkeyChange, 1);
    assert_eq!(rig.words(), ["read", "failed", "close", "cut", "publish"]);
}

#[test]
fn e21_a_lid_change_takes_the_path_of_a_gid_change() {
    let mut rig = Rig::new(&[1]);
    rig.set(1, |reading| {
        reading.attr.link_layer = LinkLayer::InfiniBand;
        reading.attr.lid = 382;
    });
    rig.advance(Duration::from_secs(11));
    rig.take();
    rig.set(1, |reading| reading.attr.lid = 391);
    rig.event(AsyncEventKind::LidChange, 1);
    let actions = rig.take();
    let words: Vec<_> = actions.iter().map(word).collect();
    assert_eq!(
        words,
        ["read", "changed", "close", "cut", "publish", "half-open"]
    );
    assert!(actions.iter().any(|action| matches!(
        action,
        Action::Publish { facts, .. } if facts.lid == 391 && facts.up
    )));
}

#[test]
fn e20_sm_change_and_client_reregister_with_nothing_changed_do_nothing() {
    let mut rig = Rig::new(&[1]);
    rig.event(AsyncEventKind::SmChange, 1);
    rig.event(AsyncEventKind::ClientReregister, 1);
    rig.advance(Duration::from_millis(100));
    assert_eq!(rig.words(), ["read", "unchanged", "read", "unchanged"]);
}

#[test]
fn e17_a_queue_pairs_event_concerns_that_endpoint_only() {
    let mut rig = Rig::new(&[1, 2]);
    let id = rerail_verbs::ObjectId {
        index: 4,
        generation: 2,
    };
    for kind in [
        AsyncEventKind::QpFatal,
        AsyncEventKind::QpAccessErr,
        AsyncEventKind::QpReqErr,
        AsyncEventKind::PathMigErr,
    ] {
        rig.subject_event(kind, EventSubject::QueuePair(Some(id)));
        assert_eq!(
            rig.take(),
            [Action::EndpointEvent {
                queue_pair: id,
                kind
            }]
        );
        rig.subject_event(kind, EventSubject::QueuePair(None));
        assert_eq!(rig.take(), []);
    }
    assert_eq!(rig.observer.counters().foreign, 4);
    assert!(rig.observer.gate_open(1) && rig.observer.gate_open(2));
}

#[test]
fn an_unknown_number_is_counted_and_everything_is_read() {
    let mut rig = Rig::new(&[1, 2]);
    rig.subject_event(AsyncEventKind::Other(77), EventSubject::Other);
    assert_eq!(rig.words(), ["read", "read", "unchanged", "unchanged"]);
    rig.advance(Duration::from_millis(50));
    rig.event(AsyncEventKind::Other(78), 2);
    assert_eq!(rig.words(), ["read", "unchanged"]);
    assert_eq!(rig.observer.counters().unknown_kinds, 2);
}

#[test]
fn a_lost_event_is_found_by_the_timer() {
    let mut rig = Rig::new(&[1]);
    rig.set_rows(1, &[row(1, LINK_LOCAL), row(3, "10.50.9.9")]);
    rig.advance(Duration::from_secs(10));
    assert!(rig.words().contains(&"publish"));
}
