//! Events in bursts, sticky kinds, dead contexts.

use super::*;

#[test]
fn port_err_closes_the_gate_before_anything_is_asked() {
    let mut rig = Rig::new(&[1, 2]);
    rig.answers = false;
    rig.event(AsyncEventKind::PortErr, 1);
    assert_eq!(rig.words(), ["close", "read"]);
    assert!(!rig.observer.gate_open(1));
    assert!(rig.observer.gate_open(2));
}

#[test]
fn e01_port_err_withdraws_and_port_active_brings_it_back_half_open() {
    let mut rig = Rig::new(&[1]);
    rig.set_state(1, PortState::Down);
    rig.event(AsyncEventKind::PortErr, 1);
    let actions = rig.take();
    let words: Vec<_> = actions.iter().map(word).collect();
    assert_eq!(words, ["close", "read", "changed", "cut", "publish"]);
    assert!(
        actions.iter().any(|action| matches!(
            action,
            Action::Publish { facts, .. } if !facts.up && facts.gid.is_some()
        )),
        "withdrawn with its last GID text"
    );
    rig.advance(Duration::from_secs(5));
    rig.take();
    rig.set_state(1, PortState::Active);
    rig.event(AsyncEventKind::PortActive, 1);
    assert_eq!(rig.words(), ["read", "changed", "publish", "half-open"]);
}

#[test]
fn a_sticky_event_goes_through_half_open_even_if_the_port_reads_active() {
    let mut rig = Rig::new(&[1]);
    rig.event(AsyncEventKind::PortErr, 1);
    let actions = rig.take();
    let words: Vec<_> = actions.iter().map(word).collect();
    assert_eq!(words, ["close", "read", "unchanged", "half-open"]);
    assert_eq!(
        actions.last(),
        Some(&Action::HalfOpen {
            port: 1,
            endpoints_kept: true
        })
    );
}

#[test]
fn a_reading_asked_before_the_bad_news_does_not_reopen_the_gate() {
    let mut rig = Rig::new(&[1]);
    rig.answers = false;
    rig.event(AsyncEventKind::GidChange, 1);
    rig.event(AsyncEventKind::PortErr, 1);
    let asked = rig.unanswered.remove(0);
    rig.answer(asked);
    rig.settle();
    assert_eq!(
        rig.words(),
        ["read", "close"],
        "the old reading proves nothing"
    );
    rig.answers = true;
    rig.advance(Duration::from_millis(20));
    assert_eq!(rig.words(), ["read", "unchanged", "half-open"]);
}

#[test]
fn an_event_for_port_2_never_touches_port_1() {
    let mut rig = Rig::new(&[1, 2]);
    rig.set_state(2, PortState::Down);
    rig.event(AsyncEventKind::PortErr, 2);
    for action in rig.take() {
        let port = match action {
            Action::ReadPort(read) => read.port,
            Action::Report { port, .. }
            | Action::CloseGate { port, .. }
            | Action::CutEndpoints { port, .. }
            | Action::Publish { port, .. } => port,
            other => panic!("unexpected {other:?}"),
        };
        assert_eq!(port, 2);
    }
    rig.event(AsyncEventKind::PortErr, 9);
    assert_eq!(rig.take(), []);
    assert_eq!(rig.observer.counters().foreign, 1);
}

#[test]
fn e03_port_active_behind_other_events_of_a_burst_is_acted_on() {
    let mut rig = Rig::new(&[1]);
    rig.set_state(1, PortState::Down);
    rig.event(AsyncEventKind::PortErr, 1);
    rig.advance(Duration::from_millis(500));
    rig.take();
    rig.set_state(1, PortState::Active);
    rig.subject_event(AsyncEventKind::CommEst, EventSubject::QueuePair(None));
    rig.subject_event(AsyncEventKind::SqDrained, EventSubject::QueuePair(None));
    rig.event(AsyncEventKind::PortActive, 1);
    assert_eq!(rig.words(), ["read", "changed", "publish", "half-open"]);
}

#[test]
fn events_within_20_ms_cause_one_more_reading() {
    let mut rig = Rig::new(&[1]);
    for _ in 0..15 {
        rig.event(AsyncEventKind::GidChange, 1);
        rig.advance(Duration::from_millis(1));
    }
    rig.advance(Duration::from_millis(100));
    assert_eq!(rig.words(), ["read", "unchanged", "read", "unchanged"]);
    assert_eq!(rig.observer.counters().coalesced, 14);
}

#[test]
fn a_dead_device_closes_every_gate_before_it_cuts_anything() {
    for kind in [
        AsyncEventKind::DeviceFatal,
        AsyncEventKind::CqErr,
        AsyncEventKind::WqFatal,
    ] {
        let mut rig = Rig::new(&[1, 2]);
        rig.subject_event(kind, EventSubject::Device);
        assert_eq!(
            rig.words(),
            [
                "close", "close", "cut", "publish", "cut", "publish", "release"
            ]
        );
        assert!(!rig.observer.is_alive());
        // An event that the dead context had queued means nothing any more.
        let event = AsyncEvent {
            kind: AsyncEventKind::PortActive,
            subject: EventSubject::Port(1),
        };
        rig.observer
            .handle(rig.now, Input::Event { epoch: 0, event });
        rig.settle();
        assert_eq!(rig.take(), []);
        assert_eq!(rig.observer.counters().stale, 1);
    }
}

#[test]
fn a_dead_context_is_opened_again_with_back_off_and_read_as_new() {
    let mut rig = Rig::new(&[1]);
    rig.observer
        .handle(rig.now, Input::ChannelFailed { epoch: 0, errno: 5 });
    rig.settle();
    rig.take();
    let mut waits = Vec::new();
    for _ in 0..12 {
        let before = rig.now;
        let due = rig
            .observer
            .next_timeout()
            .expect("it will be opened again");
        rig.advance(due.saturating_since(before));
        waits.push(due.saturating_since(before));
        let epoch = rig.observer.epoch();
        assert_eq!(rig.take(), [Action::Reopen { epoch }]);
        rig.observer.handle(rig.now, Input::ReopenFailed { epoch });
    }
    assert!(waits[0] <= Duration::from_millis(250));
    assert!(waits[11] > Duration::from_secs(10) && waits[11] <= Duration::from_secs(30));
    rig.advance(Duration::from_secs(31));
    let epoch = rig.observer.epoch();
    assert_eq!(rig.take(), [Action::Reopen { epoch }]);
    rig.observer
        .handle(rig.now, Input::Reopened { epoch: epoch - 1 });
    assert!(!rig.observer.is_alive(), "an answer to an older attempt");
    rig.observer.handle(rig.now, Input::Reopened { epoch });
    rig.settle();
    assert_eq!(rig.words(), ["read", "changed", "publish", "half-open"]);
}

#[test]
fn a_control_verb_that_hangs_kills_the_context_after_a_second() {
    let mut rig = Rig::new(&[1, 2]);
    rig.answers = false;
    rig.event(AsyncEventKind::GidChange, 2);
    rig.advance(Duration::from_millis(999));
    assert!(rig.observer.is_alive());
    rig.advance(Duration::from_millis(1));
    assert!(!rig.observer.is_alive());
    let late = rig.unanswered.remove(0);
    let result = rig.ports[&2].clone();
    rig.observer.handle(
        rig.now,
        Input::PortRead {
            epoch: 0,
            read: late,
            result,
        },
    );
    assert_eq!(rig.observer.counters().stale, 1);
    assert!(!rig.observer.gate_open(2));
}

#[test]
fn a_thousand_flaps_are_published_each_and_leave_nothing_behind() {
    let mut rig = Rig::new(&[1, 2]);
    for _ in 0..1_000 {
        rig.set_state(1, PortState::Down);
        rig.event(AsyncEventKind::PortErr, 1);
        rig.advance(Duration::from_millis(200));
        rig.set_state(1, PortState::Active);
        rig.event(AsyncEventKind::PortActive, 1);
        rig.advance(Duration::from_millis(200));
        let words = rig.words();
        let count = |wanted| words.iter().filter(|word| **word == wanted).count();
        assert_eq!(
            (count("publish"), count("cut"), count("half-open")),
            (2, 1, 1)
        );
    }
    assert!(rig.observer.out.is_empty() && rig.unanswered.is_empty());
    assert_eq!(rig.observer.ports.len(), 2);
    assert!(rig.observer.gate_open(1) && rig.observer.gate_open(2));
}
