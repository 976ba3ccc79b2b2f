//! What must hold of the view of peers, and the reports that it answers.

use proptest::prelude::*;
use rerail_metadata::descriptor::{
    Device, DeviceState, LocationNics, Protocol, RerailDevice, RerailMember,
};

use super::*;
use crate::machine::drive;

const NAME: &str = "node-b";

fn instance(number: u8) -> InstanceId {
    InstanceId([number; 16])
}

/// A Rerail peer's record with two NICs, of which the second may be down.
fn rerail(by: u8, generation: u64, second_up: bool) -> PeerRecord {
    let mut descriptor = plain("10.0.0.1").descriptor.as_ref().clone();
    let mut member = RerailMember::new(instance(by));
    member.generation = generation;
    member.features = vec![PUSH_FEATURE.into()];
    for (index, device) in descriptor.devices.iter().enumerate() {
        let up = index == 0 || second_up;
        member.devices.push(RerailDevice {
            name: device.name.clone(),
            state: if up {
                DeviceState::Up
            } else {
                DeviceState::Down
            },
            mtu: 4_096,
            speed_mbps: 100_000,
            gids: vec![device.gid],
            unknown: Default::default(),
        });
    }
    descriptor.rerail = Some(member);
    PeerRecord {
        descriptor: Arc::new(descriptor),
        rpc: Some(("10.9.9.9".into(), 12_345)),
    }
}

/// A C++ peer's record.
fn plain(gid: &str) -> PeerRecord {
    let mut descriptor = SegmentDescriptor::new(NAME, Protocol::rdma());
    for name in ["mlx5_0", "mlx5_1"] {
        let gid = gid.parse().expect("a GID literal");
        descriptor.devices.push(Device::new(name, 0, gid));
    }
    let nics = LocationNics {
        preferred: vec!["mlx5_0".into(), "mlx5_1".into()],
        available: Vec::new(),
    };
    descriptor.priority_matrix.insert("cpu:0".into(), nics);
    PeerRecord {
        descriptor: Arc::new(descriptor),
        rpc: Some(("10.9.9.9".into(), 12_345)),
    }
}

struct Rig {
    peers: Peers,
    now: Time,
    store: Fetched,
    answers: bool,
    log: Vec<Action>,
    fetches: usize,
}

impl Rig {
    fn new(store: Fetched) -> Self {
        Self::with(PeersConfig::default(), store)
    }

    fn with(config: PeersConfig, store: Fetched) -> Self {
        let mut rig = Self {
            peers: Peers::new(config, 9),
            now: Time::from_millis(1_000),
            store,
            answers: true,
            log: Vec::new(),
            fetches: 0,
        };
        rig.input(Input::Open { name: NAME.into() });
        rig
    }

    fn settle(&mut self) {
        loop {
            let mut actions = Vec::new();
            drive(&mut self.peers, self.now, |action| actions.push(action));
            if actions.is_empty() {
                return;
            }
            for action in actions {
                if let Action::Fetch { ticket, name } = action {
                    self.fetches += usize::from(name == NAME);
                    if self.answers {
                        let result = self.store.clone();
                        self.peers
                            .handle(self.now, Input::Fetched { ticket, result });
                    }
                } else {
                    self.log.push(action);
                }
            }
        }
    }

    fn input(&mut self, input: Input) {
        self.peers.handle(self.now, input);
        self.settle();
    }

    fn advance(&mut self, millis: u64) {
        let until = self.now + Duration::from_millis(millis);
        while let Some(due) = self.peers.next_timeout().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            self.settle();
        }
        self.now = until;
        self.settle();
    }

    fn trouble(&mut self, trouble: Trouble) {
        let name = NAME.into();
        self.input(Input::Trouble { name, trouble });
    }

    fn subscribe(&mut self) {
        self.input(Input::Subscribed { name: NAME.into() });
    }

    fn push(&mut self, record: PeerRecord) {
        let name = NAME.into();
        self.input(Input::Pushed { name, record });
    }

    fn heartbeat(&mut self, by: u8, generation: u64) {
        self.input(Input::Heartbeat {
            name: NAME.into(),
            instance: instance(by),
            generation,
        });
    }

    fn updates(&self) -> Vec<Vec<(String, NicChange)>> {
        let nics = |action: &Action| match action {
            Action::Updated { nics, .. } => Some(nics.clone()),
            _ => None,
        };
        self.log.iter().filter_map(nics).collect()
    }

    fn refreshed(&self) -> Vec<Refreshed> {
        let outcome = |action: &Action| match action {
            Action::Refreshed { outcome, .. } => Some(*outcome),
            _ => None,
        };
        self.log.iter().filter_map(outcome).collect()
    }

    fn generation(&self) -> Option<u64> {
        let member = self.peers.descriptor(NAME)?.rerail.as_ref()?;
        Some(member.generation)
    }
}

fn changes(of: &[(&str, NicChange)]) -> Vec<(String, NicChange)> {
    of.iter()
        .map(|(name, change)| ((*name).to_owned(), *change))
        .collect()
}

#[test]
fn a_record_is_taken_in_once_and_only_forwards() {
    let mut rig = Rig::new(Fetched::Found(rerail(1, 5, true)));
    rig.subscribe();
    let both = changes(&[("mlx5_0", NicChange::Up), ("mlx5_1", NicChange::Up)]);
    assert_eq!(rig.updates(), [both]);
    rig.push(rerail(1, 6, false));
    assert_eq!(rig.updates()[1], changes(&[("mlx5_1", NicChange::Down)]));
    rig.push(rerail(1, 5, true));
    rig.input(Input::WatchPut {
        name: NAME.into(),
        record: rerail(1, 4, true),
    });
    assert_eq!(rig.updates().len(), 2);
    assert_eq!((rig.generation(), rig.peers.ignored()), (Some(6), 2));
    assert!(rig.log.iter().rev().any(|action| *action
        == Action::Acknowledge {
            name: NAME.into(),
            instance: instance(1),
            generation: 6
        }));
}

#[test]
fn a_peer_that_restarts_is_another_peer_and_the_old_one_never_comes_back() {
    let mut rig = Rig::new(Fetched::Found(rerail(1, 5, true)));
    let old = rig.peers.peer(NAME).expect("it is known");
    rig.input(Input::WatchPut {
        name: NAME.into(),
        record: rerail(2, 1, true),
    });
    let new = rig.peers.peer(NAME).expect("it is known");
    assert_ne!(old, new);
    let retired = Action::Retired {
        name: NAME.into(),
        peer: old,
        parting: Parting::Replaced,
    };
    let at = rig.log.iter().position(|action| *action == retired);
    let updated = rig
        .log
        .iter()
        .rposition(|action| matches!(action, Action::Updated { .. }));
    assert!(at < updated, "the old one ends before the new one begins");
    rig.input(Input::WatchPut {
        name: NAME.into(),
        record: rerail(1, 99, true),
    });
    assert_eq!(rig.peers.peer(NAME), Some(new));
    assert_eq!(rig.peers.ignored(), 1);
    assert!(
        rig.log
            .iter()
            .any(|action| matches!(action, Action::Unsubscribe { .. }))
    );
}

fn watch(rig: &mut Rig, by: u8, generation: u64) {
    rig.input(Input::WatchPut {
        name: NAME.into(),
        record: rerail(by, generation, true),
    });
}

fn known(rig: &Rig) -> Option<InstanceId> {
    let member = rig.peers.descriptor(NAME)?.rerail.as_ref()?;
    Some(member.instance)
}

#[test]
fn a_late_word_of_an_earlier_process_retires_nobody() {
    // Its record was replaced before the first reading, and the watch tells of it only now.
    let mut rig = Rig::new(Fetched::Found(rerail(2, 1, true)));
    rig.fetches = 0;
    rig.advance(2_000);
    watch(&mut rig, 1, 9);
    assert_eq!(known(&rig), Some(instance(2)));
    assert_eq!(rig.fetches, 1, "the store is asked itself");
    watch(&mut rig, 2, 2);
    assert_eq!(rig.generation(), Some(2));
}

#[test]
fn a_predecessor_whose_clock_was_ahead_is_replaced_once_the_store_says_so() {
    let mut rig = Rig::new(Fetched::Found(rerail(9, 5, true)));
    rig.advance(2_000);
    rig.store = Fetched::Found(rerail(1, 1, true));
    watch(&mut rig, 1, 1);
    assert_eq!(known(&rig), Some(instance(1)));
    // What is late of the dead one changes nothing.
    rig.advance(2_000);
    watch(&mut rig, 9, 6);
    rig.advance(2_000);
    assert_eq!(known(&rig), Some(instance(1)));
    watch(&mut rig, 1, 2);
    assert_eq!(rig.generation(), Some(2));
}

#[test]
fn a_reading_that_was_asked_for_before_does_not_count() {
    let mut rig = Rig::new(Fetched::NotFound);
    rig.advance(60_000);
    // A reading is under way while the watch tells of a newer process.
    rig.peers
        .handle(rig.now, Input::WatchDelete { name: NAME.into() });
    let mut out = Vec::new();
    drive(&mut rig.peers, rig.now, |action| out.push(action));
    let ticket = out.iter().find_map(|action| match action {
        Action::Fetch { ticket, .. } => Some(*ticket),
        _ => None,
    });
    let ticket = ticket.expect("it is read");
    rig.store = Fetched::Found(rerail(2, 1, true));
    watch(&mut rig, 2, 1);
    let result = Fetched::Found(rerail(1, 9, true));
    rig.input(Input::Fetched { ticket, result });
    assert_eq!(known(&rig), Some(instance(2)));
    rig.advance(5_000);
    watch(&mut rig, 2, 2);
    assert_eq!(rig.generation(), Some(2), "nor is it retired");
}

#[test]
fn one_that_was_written_over_by_an_earlier_one_is_a_peer_again_when_it_has_its_record_back() {
    let mut rig = Rig::new(Fetched::Found(rerail(2, 5, true)));
    let first = rig.peers.peer(NAME).expect("it is known");
    rig.advance(2_000);
    rig.store = Fetched::Found(rerail(1, 1, true));
    watch(&mut rig, 1, 1);
    assert_eq!(known(&rig), Some(instance(1)));
    rig.advance(2_000);
    rig.store = Fetched::Found(rerail(2, 5, true));
    watch(&mut rig, 2, 5);
    assert_eq!(known(&rig), Some(instance(2)));
    assert_ne!(rig.peers.peer(NAME), Some(first), "nothing is replayed");
    // The one that a later one has replaced is over.
    rig.advance(2_000);
    rig.store = Fetched::Found(rerail(1, 7, true));
    watch(&mut rig, 1, 7);
    rig.advance(60_000);
    assert_eq!(known(&rig), Some(instance(2)));
}

#[test]
fn one_that_speaks_to_us_is_not_replaced_by_an_earlier_one() {
    let mut rig = Rig::new(Fetched::Found(rerail(2, 5, true)));
    rig.subscribe();
    rig.store = Fetched::Found(rerail(1, 1, true));
    for _ in 0..30 {
        rig.heartbeat(2, 5);
        watch(&mut rig, 1, 1);
        rig.advance(1_000);
    }
    assert_eq!(
        known(&rig),
        Some(instance(2)),
        "it will write its record again"
    );
    // It does not any more.
    rig.advance(4_000);
    assert_eq!(known(&rig), Some(instance(1)));
}

#[test]
fn a_peer_that_was_withdrawn_is_replaced_by_whoever_comes_next() {
    for (gone, next) in [(2, 1), (1, 2)] {
        let mut rig = Rig::new(Fetched::Found(rerail(gone, 5, true)));
        rig.store = Fetched::NotFound;
        rig.input(Input::WatchDelete { name: NAME.into() });
        rig.advance(60_000);
        assert_eq!(known(&rig), None);
        rig.store = Fetched::Found(rerail(next, 1, true));
        watch(&mut rig, next, 1);
        // A late word of the one that is gone.
        watch(&mut rig, gone, 6);
        rig.advance(5_000);
        watch(&mut rig, next, 2);
        assert_eq!(known(&rig), Some(instance(next)), "after {gone}");
        assert_eq!(rig.generation(), Some(2));
    }
}

#[test]
fn a_late_word_while_nobody_has_the_name_brings_nobody_back() {
    let mut rig = Rig::new(Fetched::Found(rerail(2, 5, true)));
    rig.store = Fetched::NotFound;
    rig.input(Input::WatchDelete { name: NAME.into() });
    rig.advance(60_000);
    assert_eq!(known(&rig), None);
    // Of a process that had the name before the last one.
    watch(&mut rig, 1, 9);
    assert_eq!(known(&rig), None, "the store is asked, and has nobody");
    rig.advance(5_000);
    assert_eq!(known(&rig), None);
}

#[test]
fn a_late_word_of_a_cpp_engine_retires_nobody() {
    let mut rig = Rig::new(Fetched::Found(plain("10.0.0.1")));
    rig.store = Fetched::Found(rerail(1, 1, true));
    watch(&mut rig, 1, 1);
    rig.advance(2_000);
    let late = |rig: &mut Rig| {
        let (name, record) = (NAME.into(), plain("10.0.0.2"));
        rig.input(Input::WatchPut { name, record });
    };
    late(&mut rig);
    assert_eq!(known(&rig), Some(instance(1)));
    // One that has the name is followed.
    rig.store = Fetched::Found(plain("10.0.0.2"));
    rig.advance(2_000);
    late(&mut rig);
    assert_eq!((known(&rig), rig.peers.peer(NAME).is_some()), (None, true));
}

#[test]
fn a_cpp_peer_with_another_rpc_port_is_another_peer() {
    let mut rig = Rig::new(Fetched::Found(plain("10.0.0.1")));
    let old = rig.peers.peer(NAME);
    // Its record changes: the same process. A watch does not see the location.
    let mut changed = plain("10.0.0.2");
    changed.rpc = None;
    let name = || NAME.to_owned();
    rig.input(Input::WatchPut {
        name: name(),
        record: changed,
    });
    assert_eq!(rig.peers.peer(NAME), old);
    let moved = changes(&[("mlx5_0", NicChange::Moved), ("mlx5_1", NicChange::Moved)]);
    assert_eq!(rig.updates()[1], moved);
    let mut restarted = plain("10.0.0.2");
    restarted.rpc = Some(("10.9.9.9".into(), 23_456));
    rig.store = Fetched::Found(restarted);
    rig.advance(1_000);
    rig.trouble(Trouble::Connection);
    assert_ne!(rig.peers.peer(NAME), old);
}

#[test]
fn nics_go_by_name_and_a_cpp_owner_withdraws_by_its_matrix() {
    let mut rig = Rig::new(Fetched::Found(plain("10.0.0.1")));
    let mut withdrawn = plain("10.0.0.1").descriptor.as_ref().clone();
    if let Some(nics) = withdrawn.priority_matrix.get_mut("cpu:0") {
        nics.preferred.remove(0);
    }
    rig.input(Input::WatchPut {
        name: NAME.into(),
        record: PeerRecord {
            descriptor: Arc::new(withdrawn),
            rpc: None,
        },
    });
    assert_eq!(rig.updates()[1], changes(&[("mlx5_0", NicChange::Down)]));
}

#[test]
fn trouble_refreshes_that_peer_only_and_within_its_cool_down() {
    let mut rig = Rig::new(Fetched::Found(rerail(1, 5, true)));
    rig.input(Input::Open {
        name: "another".into(),
    });
    rig.fetches = 0;
    for _ in 0..100 {
        rig.trouble(Trouble::Connection);
    }
    assert_eq!(rig.fetches, 0, "it was read just now");
    rig.advance(1_000);
    assert_eq!(rig.fetches, 1);
    rig.input(Input::Close {
        name: "another".into(),
    });
    rig.fetches = 0;
    for _ in 0..5_000 {
        rig.trouble(Trouble::Connection);
        rig.advance(1);
    }
    assert!(
        (4..=6).contains(&rig.fetches),
        "{} in five seconds",
        rig.fetches
    );
}

#[test]
fn m04_a_refused_access_is_answered_by_a_reading_that_began_after_it() {
    let mut rig = Rig::new(Fetched::Found(rerail(1, 5, true)));
    rig.advance(2_000);
    rig.answers = false;
    rig.trouble(Trouble::Connection);
    // A reading is under way when the access is refused.
    rig.trouble(Trouble::RemoteAccess);
    let ticket = rig.peers.next_ticket;
    rig.peers.handle(
        rig.now,
        Input::Fetched {
            ticket,
            result: Fetched::Found(rerail(1, 5, true)),
        },
    );
    rig.settle();
    assert_eq!(rig.refreshed(), [], "it may be older than the refusal");
    rig.answers = true;
    rig.store = Fetched::Found(rerail(1, 6, true));
    rig.advance(1_000);
    assert_eq!(rig.refreshed(), [Refreshed::Newer]);
    rig.advance(2_000);
    rig.trouble(Trouble::RemoteAccess);
    assert_eq!(rig.refreshed(), [Refreshed::Newer, Refreshed::Same]);
}

#[test]
fn m30_an_outage_drops_nobody_and_is_tried_again_with_back_off() {
    let mut rig = Rig::new(Fetched::Found(rerail(1, 5, true)));
    rig.store = Fetched::Unavailable;
    rig.advance(2_000);
    rig.fetches = 0;
    rig.trouble(Trouble::RemoteAccess);
    assert_eq!(
        rig.refreshed(),
        [Refreshed::Unavailable],
        "that transfer fails now"
    );
    rig.advance(600_000);
    assert!(rig.peers.peer(NAME).is_some());
    assert!(
        (20..60).contains(&rig.fetches),
        "{} in ten minutes",
        rig.fetches
    );
    rig.store = Fetched::Found(rerail(1, 9, true));
    rig.advance(30_000);
    assert_eq!(rig.generation(), Some(9));
}

#[test]
fn m02_not_found_several_times_drops_a_peer_without_a_sign_of_life() {
    let mut rig = Rig::new(Fetched::Found(plain("10.0.0.1")));
    let peer = rig.peers.peer(NAME).expect("it is known");
    rig.store = Fetched::NotFound;
    rig.advance(2_000);
    rig.input(Input::WatchDelete { name: NAME.into() });
    assert!(rig.log.contains(&Action::AskAlive { name: NAME.into() }));
    assert_eq!(rig.peers.peer(NAME), Some(peer), "once is not enough");
    rig.advance(10_000);
    assert_eq!(rig.peers.peer(NAME), None);
    assert!(rig.log.contains(&Action::Retired {
        name: NAME.into(),
        peer,
        parting: Parting::Withdrawn
    }));
}

#[test]
fn m01_a_peer_that_lives_outlasts_a_store_that_was_restarted_empty() {
    let mut rig = Rig::new(Fetched::Found(rerail(1, 5, true)));
    let peer = rig.peers.peer(NAME);
    rig.store = Fetched::NotFound;
    rig.input(Input::WatchResync);
    for _ in 0..60 {
        rig.advance(500);
        rig.input(Input::Alive { name: NAME.into() });
    }
    assert_eq!(rig.peers.peer(NAME), peer);

    // One that was silent is dropped; its record comes again, and it is taken in again.
    rig.advance(600_000);
    assert_eq!(rig.peers.peer(NAME), None);
    rig.store = Fetched::Found(rerail(1, 5, true));
    rig.advance(30_000);
    assert!(rig.peers.peer(NAME).is_some());
    assert_ne!(rig.peers.peer(NAME), peer, "what was bound to it has ended");
}

#[test]
fn a_lost_push_is_found_by_the_heartbeat() {
    let mut rig = Rig::new(Fetched::Found(rerail(1, 5, true)));
    rig.subscribe();
    rig.advance(1_500);
    rig.fetches = 0;
    rig.heartbeat(1, 5);
    rig.advance(900);
    assert_eq!(rig.fetches, 0);
    rig.store = Fetched::Found(rerail(1, 6, true));
    rig.heartbeat(1, 6);
    rig.advance(499);
    assert_eq!(rig.fetches, 0, "it may be on its way");
    rig.advance(1);
    assert_eq!((rig.fetches, rig.generation()), (1, Some(6)));
    rig.store = Fetched::Found(rerail(2, 1, true));
    rig.advance(1_000);
    rig.heartbeat(2, 1);
    assert_eq!(
        rig.generation(),
        Some(1),
        "another instance answers there: read at once"
    );
}

#[test]
fn a_silent_subscription_is_asked_for_again_and_the_record_read() {
    let mut rig = Rig::new(Fetched::Found(rerail(1, 5, true)));
    rig.subscribe();
    rig.log.clear();
    rig.fetches = 0;
    rig.advance(3_000);
    assert!(rig.log.contains(&Action::Unsubscribe { name: NAME.into() }));
    assert_eq!(rig.fetches, 1);
    rig.advance(300);
    assert!(
        rig.log
            .iter()
            .any(|action| matches!(action, Action::Subscribe { .. }))
    );
    // What comes over a connection that was given up is not taken.
    rig.push(rerail(1, 99, true));
    assert_eq!(rig.generation(), Some(5));
}

#[test]
fn without_a_watch_records_are_polled_unless_their_owner_tells() {
    let config = PeersConfig {
        has_watch: false,
        ..PeersConfig::default()
    };
    let mut rig = Rig::with(config, Fetched::Found(plain("10.0.0.1")));
    rig.fetches = 0;
    rig.advance(50_000);
    assert!((9..=10).contains(&rig.fetches), "{}", rig.fetches);
    let mut rig = Rig::with(config, Fetched::Found(rerail(1, 5, true)));
    rig.subscribe();
    rig.fetches = 0;
    for _ in 0..20 {
        rig.advance(1_000);
        rig.heartbeat(1, 5);
    }
    assert_eq!(rig.fetches, 0);
}

#[test]
fn a_record_under_anothers_name_is_ignored_and_closing_forgets() {
    let mut rig = Rig::new(Fetched::NotFound);
    let mut wrong = rerail(1, 5, true).descriptor.as_ref().clone();
    wrong.name = "somebody".into();
    rig.input(Input::WatchPut {
        name: NAME.into(),
        record: PeerRecord {
            descriptor: Arc::new(wrong),
            rpc: None,
        },
    });
    assert_eq!((rig.peers.peer(NAME), rig.peers.ignored()), (None, 1));
    rig.answers = false;
    rig.advance(60_000);
    rig.input(Input::Close { name: NAME.into() });
    assert_eq!(rig.peers.next_timeout(), None);
    assert!(rig.peers.tickets.is_empty());
}

#[derive(Clone, Debug)]
enum Happening {
    Store(Option<(u8, u64)>),
    Away,
    Watch(u8, u64),
    Delete,
    Resync,
    Subscribed,
    Lost,
    Push(u8, u64),
    Heartbeat(u8, u64),
    Trouble(bool),
    Alive,
    Answers(bool),
    Pass(u64),
}

fn happening() -> impl Strategy<Value = Happening> {
    let pair = || (1..4_u8, 1..9_u64);
    prop_oneof![
        2 => prop::option::of(pair()).prop_map(Happening::Store),
        1 => Just(Happening::Away),
        2 => pair().prop_map(|(by, generation)| Happening::Watch(by, generation)),
        1 => Just(Happening::Delete),
        1 => Just(Happening::Resync),
        2 => Just(Happening::Subscribed),
        1 => Just(Happening::Lost),
        2 => pair().prop_map(|(by, generation)| Happening::Push(by, generation)),
        1 => pair().prop_map(|(by, generation)| Happening::Heartbeat(by, generation)),
        2 => any::<bool>().prop_map(Happening::Trouble),
        1 => Just(Happening::Alive),
        1 => any::<bool>().prop_map(Happening::Answers),
        5 => prop_oneof![0..600_u64, 0..40_000_u64].prop_map(Happening::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn generations_never_go_back_and_a_replaced_instance_never_returns(
        happenings in prop::collection::vec(happening(), 1..100)
    ) {
        let mut rig = Rig::new(Fetched::NotFound);
        let mut last: Option<(PeerId, InstanceId, u64)> = None;
        let mut replaced = Vec::new();
        for happening in happenings {
            let name = NAME.to_owned();
            match happening {
                Happening::Store(Some((by, generation))) => {
                    rig.store = Fetched::Found(rerail(by, generation, true));
                }
                Happening::Store(None) => rig.store = Fetched::NotFound,
                Happening::Away => rig.store = Fetched::Unavailable,
                Happening::Watch(by, generation) => {
                    let record = rerail(by, generation, generation % 2 == 0);
                    rig.input(Input::WatchPut { name, record });
                }
                Happening::Delete => rig.input(Input::WatchDelete { name }),
                Happening::Resync => rig.input(Input::WatchResync),
                Happening::Subscribed => rig.subscribe(),
                Happening::Lost => rig.input(Input::SubscriptionLost { name }),
                Happening::Push(by, generation) => rig.push(rerail(by, generation, true)),
                Happening::Heartbeat(by, generation) => rig.heartbeat(by, generation),
                Happening::Trouble(true) => rig.trouble(Trouble::RemoteAccess),
                Happening::Trouble(false) => rig.trouble(Trouble::Connection),
                Happening::Alive => rig.input(Input::Alive { name }),
                Happening::Answers(answers) => rig.answers = answers,
                Happening::Pass(millis) => rig.advance(millis),
            }
            let known = |action: &Action| match action {
                Action::Updated { peer, descriptor, .. } => {
                    let member = descriptor.rerail.as_ref()?;
                    Some((*peer, member.instance, member.generation))
                }
                _ => None,
            };
            for (peer, instance, generation) in rig.log.drain(..).filter_map(|a| known(&a)) {
                prop_assert!(!replaced.contains(&instance), "{} came back", instance);
                if let Some((last_peer, last_instance, last_generation)) = last {
                    if last_peer == peer {
                        prop_assert_eq!(last_instance, instance);
                        prop_assert!(generation > last_generation);
                    } else if last_instance != instance && rig.peers.peer(NAME).is_some() {
                        // Replaced while it was known; one that was dropped before may return.
                        if rig.peers.entries[NAME].is_retired(last_instance) {
                            replaced.push(last_instance);
                        }
                    }
                }
                last = Some((peer, instance, generation));
            }
            prop_assert!(rig.peers.tickets.len() <= 1, "one reading at a time");
        }
        // A newer instance is in the store and it answers: within a minute it is known.
        rig.store = Fetched::Found(rerail(9, 1, true));
        rig.answers = true;
        rig.input(Input::WatchResync);
        rig.advance(60_000);
        prop_assert_eq!(rig.generation(), Some(1));
    }
}
