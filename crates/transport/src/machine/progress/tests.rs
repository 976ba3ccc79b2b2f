//! Who is judged, when, and who is not.

use super::*;
use crate::machine::drive;

const QP: ObjectId = ObjectId {
    index: 1,
    generation: 0,
};

struct Rig {
    progress: Progress,
    now: Time,
    /// What a poll of the completion queue finds.
    hidden: u32,
    stalled: Vec<(Time, ObjectId)>,
}

impl Rig {
    fn new() -> Self {
        let mut rig = Self {
            progress: Progress::new(ProgressConfig::default()),
            now: Time::from_millis(5_000),
            hidden: 0,
            stalled: Vec::new(),
        };
        rig.input(Input::Opened {
            queue_pair: QP,
            depth: 128,
        });
        rig
    }

    fn input(&mut self, input: Input) {
        self.progress.handle(self.now, input);
    }

    fn post(&mut self, bytes: u32) {
        self.input(Input::Posted {
            queue_pair: QP,
            bytes,
        });
    }

    fn complete(&mut self, count: u32) {
        self.input(Input::Completed {
            queue_pair: QP,
            count,
        });
    }

    fn step(&mut self) {
        let mut actions = Vec::new();
        drive(&mut self.progress, self.now, |action| actions.push(action));
        for action in actions {
            match action {
                Action::PollUntilEmpty => {
                    let found = std::mem::take(&mut self.hidden);
                    self.complete(found);
                    self.input(Input::PolledEmpty);
                    self.step();
                }
                Action::Stalled { queue_pair, .. } => self.stalled.push((self.now, queue_pair)),
            }
        }
    }

    /// Lets time pass with the thread running.
    fn run(&mut self, millis: u64) {
        for _ in 0..millis {
            self.now += Duration::from_millis(1);
            self.step();
        }
    }

    /// Lets time pass with the thread frozen.
    fn freeze(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
        self.step();
    }
}

#[test]
fn work_that_never_completes_is_found_within_600_ms_and_said_once() {
    let mut rig = Rig::new();
    let start = rig.now;
    rig.post(4_096);
    rig.post(4_096);
    rig.run(3_000);
    assert_eq!(rig.stalled.len(), 1);
    let after = rig.stalled[0].0.saturating_since(start);
    assert!(
        after >= Duration::from_millis(500) && after <= Duration::from_millis(600),
        "{after:?}"
    );
}

#[test]
fn every_completion_starts_the_time_anew() {
    let mut rig = Rig::new();
    for _ in 0..100 {
        rig.post(4_096);
    }
    for _ in 0..20 {
        rig.run(450);
        rig.complete(5);
    }
    assert_eq!(rig.stalled, []);
    rig.run(5_000);
    assert_eq!(rig.stalled, [], "nothing is out");
}

#[test]
fn large_requests_on_slow_rails_have_more_time() {
    let mut rig = Rig::new();
    rig.input(Input::Rate {
        queue_pair: QP,
        bytes_per_s: 1_000_000,
    });
    rig.post(500_000);
    // 500 ms + 500 000 bytes at 250 000 bytes a second.
    rig.run(2_450);
    assert_eq!(rig.stalled, []);
    rig.run(150);
    assert_eq!(rig.stalled.len(), 1);
}

#[test]
fn the_completion_queue_is_polled_empty_before_anyone_is_judged() {
    let mut rig = Rig::new();
    rig.post(4_096);
    rig.hidden = 1;
    rig.run(2_000);
    assert_eq!(rig.stalled, []);
    assert_eq!(rig.progress.outstanding(), 0);
}

#[test]
fn a_thread_that_was_not_scheduled_judges_nobody_for_it() {
    let mut rig = Rig::new();
    rig.post(4_096);
    rig.run(300);
    rig.freeze(60_000);
    assert_eq!(rig.progress.lost(), Duration::from_secs(60));
    rig.run(150);
    assert_eq!(rig.stalled, []);
    rig.run(100);
    assert_eq!(rig.stalled.len(), 1, "the 500 ms are counted on");
}

#[test]
fn idleness_is_no_gap() {
    let mut rig = Rig::new();
    rig.freeze(3_600_000);
    assert_eq!(rig.progress.next_timeout(), None);
    rig.post(1);
    assert_eq!(rig.progress.lost(), Duration::ZERO);
    rig.run(700);
    assert_eq!(rig.stalled.len(), 1);
}

#[test]
fn x20_more_than_the_depth_is_never_counted_and_a_closed_pair_is_forgotten() {
    let mut rig = Rig::new();
    for _ in 0..1_000 {
        rig.post(1);
    }
    assert_eq!(rig.progress.outstanding(), 128);
    rig.input(Input::Closed { queue_pair: QP });
    assert_eq!(rig.progress.outstanding(), 0);
    rig.complete(7);
    rig.run(2_000);
    assert_eq!(rig.stalled, []);
}
