//! Whatever happens in whatever order.

use proptest::prelude::*;
use rerail_verbs::ObjectId;

use super::*;
use crate::machine::record::Recorded;

/// One thing that a test lets happen.
#[derive(Clone, Debug)]
enum Happening {
    Event(u32, EventSubject),
    State(u32, bool),
    Rows(u32, Vec<(u32, usize)>),
    Unreadable(u32),
    AnswerOldest,
    AnswerNewest,
    Forget,
    Pass(u64),
    Channel,
    Reopened(bool),
}

const ADDRESSES: [&str; 5] = [GLOBAL, "10.50.7.7", LINK_LOCAL, "fd00::9", "fe80::2"];

fn happening() -> impl Strategy<Value = Happening> {
    let port = || 1..4_u32;
    let subject = prop_oneof![
        4 => port().prop_map(EventSubject::Port),
        1 => Just(EventSubject::Device),
        1 => Just(EventSubject::Other),
        1 => Just(EventSubject::QueuePair(Some(ObjectId { index: 1, generation: 1 }))),
        1 => Just(EventSubject::CompletionQueue(None)),
    ];
    let rows = prop::collection::vec((0..8_u32, 0..ADDRESSES.len()), 0..4);
    prop_oneof![
        6 => (prop_oneof![9..12_u32, Just(18), 0..24_u32], subject)
            .prop_map(|(kind, subject)| Happening::Event(kind, subject)),
        2 => (port(), any::<bool>()).prop_map(|(port, up)| Happening::State(port, up)),
        2 => (port(), rows).prop_map(|(port, rows)| Happening::Rows(port, rows)),
        1 => port().prop_map(Happening::Unreadable),
        8 => Just(Happening::AnswerOldest),
        2 => Just(Happening::AnswerNewest),
        1 => Just(Happening::Forget),
        6 => prop_oneof![0..30_u64, 0..3_000_u64].prop_map(Happening::Pass),
        1 => Just(Happening::Channel),
        4 => any::<bool>().prop_map(Happening::Reopened),
    ]
}

/// What a driver would have done, as far as it can be judged.
#[derive(Default)]
struct Judge {
    open: BTreeMap<u32, bool>,
    up: BTreeMap<u32, bool>,
    reads_out: BTreeMap<u32, u64>,
    opening: Option<u32>,
}

impl Judge {
    fn action(&mut self, action: &Action) {
        match action {
            Action::ReadPort(read) => {
                let last = self.reads_out.insert(read.port, read.number);
                assert!(last.is_none_or(|last| last < read.number), "numbers go up");
            }
            Action::CloseGate { port, .. } => {
                let was = self.open.insert(*port, false);
                assert_eq!(was, Some(true), "closed once");
            }
            Action::HalfOpen { port, .. } => {
                let was = self.open.insert(*port, true);
                assert_ne!(was, Some(true), "opened once");
                assert_eq!(
                    self.up.get(port),
                    Some(&true),
                    "only what is published as up opens"
                );
            }
            Action::CutEndpoints { port, .. } => {
                assert_ne!(
                    self.open.get(port),
                    Some(&true),
                    "the gate closes before the cut"
                );
            }
            Action::Publish { port, facts, .. } => {
                if !facts.up {
                    assert_ne!(self.open.get(port), Some(&true), "the gate closes first");
                }
                assert!(!facts.up || facts.gid.is_some(), "up with a GID only");
                self.up.insert(*port, facts.up);
            }
            Action::Reopen { epoch } => self.opening = Some(*epoch),
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn gates_close_first_numbers_go_up_and_in_the_end_the_truth_is_published(
        happenings in prop::collection::vec(happening(), 1..120)
    ) {
        let mut rig = Rig::new(&[1, 2]);
        let mut judge = Judge::default();
        for port in [1, 2] {
            judge.open.insert(port, true);
            judge.up.insert(port, true);
        }
        rig.answers = false;
        for happening in happenings {
            let epoch = rig.observer.epoch();
            match happening {
                Happening::Event(kind, subject) => {
                    rig.subject_event(AsyncEventKind::from_raw(kind), subject);
                }
                Happening::State(port, up) => {
                    let state = if up { PortState::Active } else { PortState::Down };
                    rig.set_state(port, state);
                }
                Happening::Rows(port, rows) => {
                    let rows: Vec<_> =
                        rows.iter().map(|(index, which)| row(*index, ADDRESSES[*which])).collect();
                    rig.ports.insert(port, Ok(reading(&rows)));
                }
                Happening::Unreadable(port) => {
                    let failure = ReadFailure { query: "ibv_query_port", errno: 19 };
                    rig.ports.insert(port, Err(failure));
                }
                Happening::AnswerOldest if !rig.unanswered.is_empty() => {
                    let read = rig.unanswered.remove(0);
                    rig.answer(read);
                }
                Happening::AnswerNewest => {
                    if let Some(read) = rig.unanswered.pop() {
                        rig.answer(read);
                    }
                }
                Happening::AnswerOldest => {}
                Happening::Forget => rig.unanswered.clear(),
                Happening::Pass(millis) => rig.advance(Duration::from_millis(millis)),
                Happening::Channel => {
                    rig.observer.handle(rig.now, Input::ChannelFailed { epoch, errno: 5 });
                }
                Happening::Reopened(true) => {
                    rig.observer.handle(rig.now, Input::Reopened { epoch });
                }
                Happening::Reopened(false) => {
                    rig.observer.handle(rig.now, Input::ReopenFailed { epoch });
                }
            }
            rig.settle();
            prop_assert!(rig.unanswered.len() <= 1_000);
            for action in rig.take() {
                judge.action(&action);
            }
            for port in [1, 2] {
                prop_assert_eq!(rig.observer.gate_open(port), judge.open[&port]);
            }
        }

        // Faults off: what is published is what is there.
        for port in [1, 2] {
            rig.ports.insert(port, Ok(reading(&[row(1, LINK_LOCAL), row(3, GLOBAL)])));
        }
        rig.answers = true;
        rig.unanswered.clear();
        for _ in 0..200 {
            rig.advance(Duration::from_millis(500));
            let epoch = rig.observer.epoch();
            rig.observer.handle(rig.now, Input::Reopened { epoch });
            rig.settle();
        }
        for action in rig.take() {
            judge.action(&action);
        }
        for port in [1, 2] {
            let facts = rig.observer.facts(port);
            prop_assert!(facts.is_some_and(|facts| facts.up), "{:?}", facts);
            prop_assert_eq!(rig.gid(port), Some((3, GLOBAL.parse().expect("literal"))));
            prop_assert!(rig.observer.gate_open(port));
        }
    }
}

#[test]
fn a_recorded_observer_replays_to_the_same_actions() {
    let rig = Rig::new(&[1]);
    let mut recorded = Recorded::new(rig.observer.clone(), 8);
    let mut actions = Vec::new();
    for step in 0..30_u64 {
        let now = Time::from_millis(400 * (step + 1));
        let event = AsyncEvent {
            kind: AsyncEventKind::PortErr,
            subject: EventSubject::Port(1),
        };
        let epoch = recorded.machine().epoch();
        match step % 4 {
            0 => recorded.handle(now, Input::Event { epoch, event }),
            1 => recorded.handle(now, Input::Reopened { epoch }),
            _ => recorded.handle_timeout(now),
        }
        while let Some(action) = recorded.poll() {
            actions.push((now, action));
        }
    }
    let (_, replayed) = recorded.recording().replay();
    assert!(!replayed.is_empty());
    assert!(actions.ends_with(&replayed));
}
