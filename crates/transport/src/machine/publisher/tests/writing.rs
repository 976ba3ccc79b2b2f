//! What is written when, and who is told.

use super::*;

fn subscriber(number: u64) -> SubscriberId {
    SubscriberId(number)
}

fn pushes(log: &[Action]) -> Vec<(SubscriberId, u64)> {
    let push = |action: &Action| match action {
        Action::Push {
            subscriber,
            generation,
            ..
        } => Some((*subscriber, *generation)),
        _ => None,
    };
    log.iter().filter_map(push).collect()
}

#[test]
fn the_location_is_written_before_the_segment() {
    let rig = Rig::new(TestStore::default(), &["a"]);
    let requests = rig.log.iter().filter_map(|action| match action {
        Action::Store { request, .. } => Some(request),
        _ => None,
    });
    let requests: Vec<_> = requests.collect();
    let [StoreRequest::RpcMeta, StoreRequest::Create(_)] = requests[..] else {
        panic!("{requests:?}");
    };
    assert_eq!(rig.publisher.stored_generation(), 1);
}

#[test]
fn overtaken_states_are_never_written_and_one_request_is_out_at_a_time() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    rig.answers = false;
    for region in 0..10 {
        rig.input(register(region, 1));
    }
    let stores = rig
        .log
        .iter()
        .filter(|action| matches!(action, Action::Store { .. }));
    assert_eq!(
        stores.count(),
        3,
        "location, first generation, and the first edit's"
    );
    rig.answers = true;
    rig.answer();
    rig.settle();
    assert_eq!(rig.store.generations(), [1, 2, 11]);
    assert_eq!(rig.last().buffers.len(), 10, "no edit is lost");
}

#[test]
fn e24_two_changes_while_the_store_is_away_write_the_last_state_only() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    rig.input(port(0, true, "10.0.0.1"));
    rig.store.away = true;
    rig.input(port(0, true, "10.0.0.2"));
    rig.advance(Duration::from_secs(20));
    rig.input(port(0, true, "10.0.0.3"));
    rig.advance(Duration::from_secs(20));
    let troubles = rig.log.iter().filter_map(|action| match action {
        Action::StoreTrouble { attempt, .. } => Some(*attempt),
        _ => None,
    });
    let troubles: Vec<_> = troubles.collect();
    assert!(
        (8..40).contains(&troubles.len()),
        "with back-off: {troubles:?}"
    );
    rig.store.away = false;
    rig.advance(Duration::from_secs(6));
    assert_eq!(rig.store.generations(), [1, 2, 4]);
    assert_eq!(rig.last().devices[0].gid, gid("10.0.0.3"));
    assert_eq!(rig.publisher.stored_generation(), 4);
}

#[test]
fn e02_a_store_that_is_away_neither_cuts_nor_refuses_what_is_announced() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    rig.input(port(0, true, "10.0.0.1"));
    assert_eq!(rig.publisher.accepts(LocalNic(0), None), Acceptance::Yes);
    rig.store.away = true;
    rig.input(register(1, 1));
    rig.advance(Duration::from_secs(60));
    assert_eq!(rig.publisher.accepts(LocalNic(0), None), Acceptance::Yes);
}

#[test]
fn a_write_whose_answer_was_lost_is_found_by_reading_and_not_written_twice() {
    let store = TestStore {
        loses_answers: true,
        ..TestStore::default()
    };
    let mut rig = Rig::new(store, &["a"]);
    rig.store.loses_answers = false;
    rig.advance(Duration::from_secs(10));
    rig.store.loses_answers = true;
    rig.input(register(1, 1));
    rig.store.loses_answers = false;
    rig.advance(Duration::from_secs(10));
    assert_eq!(rig.store.generations(), [1, 2]);
    assert_eq!(rig.publisher.stored_generation(), 2);
    assert!(!rig.is_superseded());
}

#[test]
fn a_store_that_was_restarted_empty_gets_both_records_again() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    let locations = rig.store.rpc_meta;
    rig.store.record = None;
    rig.advance(Duration::from_secs(37));
    assert_eq!(rig.store.generations(), [1, 1]);
    assert_eq!(rig.store.rpc_meta, locations + 1);
    // And at once when the driver knows of the reconnection.
    rig.store.record = None;
    rig.input(Input::StoreReconnected);
    assert_eq!(rig.store.generations(), [1, 1, 1]);
}

#[test]
fn whatever_the_store_does_not_answer_is_given_up_and_asked_again() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    rig.answers = false;
    rig.input(register(1, 1));
    rig.is_not_answered(|request| matches!(request, StoreRequest::Swap(..)));
    rig.input(Input::StoreReconnected);
    rig.is_not_answered(|request| matches!(request, StoreRequest::Read));
    rig.store.record = None;
    rig.input(Input::StoreReconnected);
    rig.answer();
    rig.settle();
    rig.is_not_answered(|request| matches!(request, StoreRequest::RpcMeta));
    assert_eq!(rig.publisher.stored_generation(), 2);
    rig.input(Input::Leave);
    rig.is_not_answered(|request| matches!(request, StoreRequest::Delete(_)));
    assert_eq!(rig.log.last(), Some(&Action::Left));
    assert_eq!(rig.store.record, None);
}

#[test]
fn a_store_that_does_not_answer_is_given_up_and_its_late_answer_does_no_harm() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    rig.answers = false;
    rig.input(register(1, 1));
    let late = rig.out.take().expect("a write is out");
    rig.advance(Duration::from_millis(10_500));
    rig.answers = true;
    rig.answer();
    rig.settle();
    rig.advance(Duration::from_secs(10));
    assert_eq!(rig.publisher.stored_generation(), 2);
    rig.input(Input::Store {
        ticket: late.0,
        answer: StoreAnswer::Failed(StoreFailure::Conflict),
    });
    assert!(!rig.is_superseded());
    assert_eq!(rig.store.generations(), [1, 2]);
}

#[test]
fn good_news_go_by_audience_and_bad_news_at_once() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    rig.input(port(0, true, "10.0.0.1"));
    let peer = subscriber(1);
    rig.input(Input::Subscribed { subscriber: peer });
    rig.input(Input::Acknowledged {
        subscriber: peer,
        generation: 2,
    });
    rig.store.away = true;
    rig.input(port(0, false, "10.0.0.1"));
    assert_eq!(
        rig.publisher.accepts(LocalNic(0), Some(peer)),
        Acceptance::Withdrawn
    );
    assert_eq!(
        rig.publisher.accepts(LocalNic(0), None),
        Acceptance::Withdrawn
    );
    assert_eq!(
        pushes(&rig.log).last(),
        Some(&(peer, 3)),
        "told while the store is away"
    );

    rig.input(port(0, true, "10.0.0.2"));
    let not_yet = Acceptance::NotYet { generation: 4 };
    assert_eq!(rig.publisher.accepts(LocalNic(0), Some(peer)), not_yet);
    rig.input(Input::Acknowledged {
        subscriber: peer,
        generation: 4,
    });
    assert_eq!(
        rig.publisher.accepts(LocalNic(0), Some(peer)),
        Acceptance::Yes
    );
    assert_eq!(
        rig.publisher.accepts(LocalNic(0), None),
        not_yet,
        "everyone else waits"
    );
    rig.store.away = false;
    rig.advance(Duration::from_secs(6));
    assert_eq!(rig.publisher.accepts(LocalNic(0), None), Acceptance::Yes);
}

#[test]
fn a_subscriber_hears_the_latest_a_heartbeat_each_second_and_is_dropped_when_it_is_deaf() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    let (peer, deaf) = (subscriber(1), subscriber(2));
    rig.input(Input::Subscribed { subscriber: peer });
    rig.input(Input::Acknowledged {
        subscriber: peer,
        generation: 1,
    });
    rig.log.clear();
    rig.advance(Duration::from_millis(3_500));
    let beats = rig
        .log
        .iter()
        .filter(|action| matches!(action, Action::Heartbeat { .. }));
    assert_eq!(beats.count(), 3);
    rig.input(Input::Subscribed { subscriber: deaf });
    rig.log.clear();
    for region in 0..20 {
        rig.input(register(region, 1));
    }
    let to = |who: SubscriberId, log: &[Action]| {
        pushes(log)
            .into_iter()
            .filter(|(to, _)| *to == who)
            .map(|(_, generation)| generation)
            .collect::<Vec<_>>()
    };
    assert_eq!(to(peer, &rig.log), [2, 3, 4, 5], "bounded");
    rig.input(Input::Acknowledged {
        subscriber: peer,
        generation: 5,
    });
    assert_eq!(to(peer, &rig.log), [2, 3, 4, 5, 21], "then the latest");
    rig.input(Input::Acknowledged {
        subscriber: peer,
        generation: 21,
    });
    rig.advance(Duration::from_secs(5));
    assert!(
        rig.log
            .contains(&Action::DropSubscriber { subscriber: deaf })
    );
    assert_eq!(rig.publisher.subscribers(), 1);
}

#[test]
fn an_acknowledgement_of_what_was_never_sent_opens_nothing() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    let peer = subscriber(1);
    rig.input(Input::Subscribed { subscriber: peer });
    rig.input(Input::Acknowledged {
        subscriber: peer,
        generation: u64::MAX,
    });
    rig.store.away = true;
    rig.input(port(0, true, "10.0.0.1"));
    assert_eq!(
        rig.publisher.accepts(LocalNic(0), Some(peer)),
        Acceptance::NotYet { generation: 2 }
    );
}

#[test]
fn subscribers_are_bounded() {
    let mut rig = Rig::new(TestStore::default(), &["a"]);
    for number in 0..=SUBSCRIBERS_MAX as u64 {
        rig.input(Input::Subscribed {
            subscriber: subscriber(number),
        });
    }
    assert_eq!(rig.publisher.subscribers(), SUBSCRIBERS_MAX);
    let last = subscriber(SUBSCRIBERS_MAX as u64);
    assert!(
        rig.log
            .contains(&Action::DropSubscriber { subscriber: last })
    );
}

#[test]
fn without_a_store_what_is_told_is_announced() {
    let config = PublisherConfig {
        has_store: false,
        ..PublisherConfig::default()
    };
    let record = local_record(&["a"], PublishOrder::Fixed);
    let mut publisher = Publisher::new(Time::ZERO, config, instance(1), record, 1);
    publisher.handle(Time::ZERO, port(0, true, "10.0.0.1"));
    assert_eq!(publisher.accepts(LocalNic(0), None), Acceptance::Yes);
    assert_eq!(publisher.next_timeout(), None);
    publisher.handle(Time::ZERO, Input::Leave);
    let mut last = None;
    while let Some(action) = publisher.poll() {
        last = Some(action);
    }
    assert_eq!(last, Some(Action::Left));
}

#[test]
fn a_thousand_flaps_leave_nothing_behind_and_the_last_state_stored() {
    let mut rig = Rig::new(TestStore::default(), &["a", "b"]);
    rig.input(port(0, true, "10.0.0.1"));
    let (listens, deaf) = (subscriber(1), subscriber(2));
    for subscriber in [listens, deaf] {
        rig.input(Input::Subscribed { subscriber });
    }
    for flap in 0..1_000 {
        // The store is away at times.
        rig.store.away = flap % 10 < 3;
        for up in [false, true] {
            rig.input(port(0, up, "10.0.0.1"));
            let generation = rig.publisher.generation();
            rig.input(Input::Acknowledged {
                subscriber: listens,
                generation,
            });
            rig.advance(Duration::from_millis(100));
        }
        rig.log.clear();
    }
    rig.store.away = false;
    rig.advance(Duration::from_secs(20));
    let publisher = &rig.publisher;
    assert_eq!(publisher.stored_generation(), publisher.generation());
    assert_eq!(publisher.subscribers(), 1, "the deaf one was given up");
    assert!(publisher.out.is_empty() && publisher.errand.is_none());
    assert_eq!(publisher.back_since.len(), 1, "an entry a NIC at most");
}
