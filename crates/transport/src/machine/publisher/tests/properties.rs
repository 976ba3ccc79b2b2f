//! Whatever happens in whatever order.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Happening {
    Register(u64),
    Unregister(u64),
    Port(u32, bool, u8),
    Away(bool),
    LosesAnswers(bool),
    Answers(bool),
    Empty,
    Foreign(Option<u8>),
    Reconnected,
    Subscribed(u64),
    Acknowledged(u64, u64),
    Unsubscribed(u64),
    Pass(u64),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (0..30_u64).prop_map(Happening::Register),
        1 => (0..30_u64).prop_map(Happening::Unregister),
        4 => (0..2_u32, any::<bool>(), 0..3_u8)
            .prop_map(|(nic, up, gid)| Happening::Port(nic, up, gid)),
        2 => any::<bool>().prop_map(Happening::Away),
        2 => any::<bool>().prop_map(Happening::LosesAnswers),
        2 => any::<bool>().prop_map(Happening::Answers),
        1 => Just(Happening::Empty),
        1 => prop::option::of(0..5_u8).prop_map(Happening::Foreign),
        1 => Just(Happening::Reconnected),
        1 => (0..4_u64).prop_map(Happening::Subscribed),
        2 => (0..4_u64, 0..40_u64).prop_map(|(who, what)| Happening::Acknowledged(who, what)),
        1 => (0..4_u64).prop_map(Happening::Unsubscribed),
        5 => prop_oneof![0..200_u64, 0..15_000_u64].prop_map(Happening::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn generations_never_go_back_and_in_the_end_the_record_is_the_latest_state(
        happenings in prop::collection::vec(happening(), 1..100)
    ) {
        let mut rig = Rig::new(TestStore::default(), &["a", "b"]);
        let mut generation = 1;
        for happening in happenings {
            match happening {
                Happening::Register(region) => rig.input(register(region, 2)),
                Happening::Unregister(region) => {
                    rig.input(Input::Edit(Edit::Unregister { region: RegionId(region) }));
                }
                Happening::Port(nic, up, last) => rig.input(port(nic, up, &format!("10.0.0.{last}"))),
                Happening::Away(away) => rig.store.away = away,
                Happening::LosesAnswers(loses) => rig.store.loses_answers = loses,
                Happening::Answers(answers) => rig.answers = answers,
                Happening::Empty => rig.store.record = None,
                // Earlier instances only: a later one ends the run.
                Happening::Foreign(Some(number)) => {
                    rig.store.write(Some((instance(number), 9)));
                }
                Happening::Foreign(None) => {}
                Happening::Reconnected => rig.input(Input::StoreReconnected),
                Happening::Subscribed(who) => {
                    rig.input(Input::Subscribed { subscriber: SubscriberId(who) });
                }
                Happening::Acknowledged(who, generation) => rig.input(Input::Acknowledged {
                    subscriber: SubscriberId(who),
                    generation,
                }),
                Happening::Unsubscribed(who) => {
                    rig.input(Input::Unsubscribed { subscriber: SubscriberId(who) });
                }
                Happening::Pass(millis) => rig.advance(Duration::from_millis(millis)),
            }
            if rig.answers {
                rig.answer();
                rig.settle();
            }
            prop_assert!(rig.publisher.generation() >= generation);
            generation = rig.publisher.generation();
            prop_assert!(rig.publisher.stored_generation() <= generation);
            prop_assert!(!rig.is_superseded());
        }
        let mut last = 0;
        for written in rig.store.generations() {
            prop_assert!(written >= last, "a state that was overtaken was written");
            last = written;
        }
        rig.store.away = false;
        rig.store.loses_answers = false;
        rig.answers = true;
        rig.answer();
        rig.settle();
        rig.advance(Duration::from_secs(60));
        prop_assert_eq!(rig.publisher.stored_generation(), rig.publisher.generation());
        let identity = rig.store.record.as_ref().and_then(|record| record.identity);
        prop_assert_eq!(identity, Some((instance(5), rig.publisher.generation())));
        let last = rig.last();
        prop_assert_eq!(last, rig.publisher.descriptor().as_ref());
        prop_assert!(last.validate().is_ok());
    }
}
