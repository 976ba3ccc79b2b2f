//! A bounded ring of a machine's inputs, from which its run can be repeated.
//!
//! Two segments of inputs are kept, each with a copy of the machine as it was before the first of
//! them. So the ring is bounded whatever the machine's age, and a replay from its start gives
//! exactly the actions that the machine gave. Deliberately not here: where a recording is written.

use super::{Machine, Time};

/// What was done to a machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step<I> {
    /// An input was handled.
    Input(I),
    /// The time-out was handled.
    Timeout,
}

/// One segment: the machine before its first step, and the steps.
struct Segment<M: Machine> {
    before: M,
    steps: Vec<(Time, Step<M::Input>)>,
}

/// A machine that remembers its last inputs. It is used as the machine itself.
///
/// Costs a copy of each input, and a copy of the machine every `segment_steps` steps: for machines
/// of the control path only.
pub struct Recorded<M: Machine> {
    machine: M,
    segment_steps: usize,
    older: Option<Segment<M>>,
    newer: Segment<M>,
}

impl<M> Recorded<M>
where
    M: Machine + Clone,
    M::Input: Clone,
{
    /// Records `machine` from now on: between `segment_steps` and twice as many steps are kept.
    pub fn new(machine: M, segment_steps: usize) -> Self {
        Self {
            newer: Segment {
                before: machine.clone(),
                steps: Vec::new(),
            },
            older: None,
            machine,
            segment_steps: segment_steps.max(1),
        }
    }

    /// The machine, to ask it things.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// The machine as it was before the oldest step that is kept, and the steps since, oldest
    /// first.
    pub fn recording(&self) -> Recording<M> {
        let first = self.older.as_ref().unwrap_or(&self.newer);
        let mut steps = first.steps.clone();
        if self.older.is_some() {
            steps.extend(self.newer.steps.iter().cloned());
        }
        Recording {
            before: first.before.clone(),
            steps,
        }
    }

    fn remember(&mut self, now: Time, step: Step<M::Input>) {
        if self.newer.steps.len() >= self.segment_steps {
            let next = Segment {
                before: self.machine.clone(),
                steps: Vec::with_capacity(self.segment_steps),
            };
            self.older = Some(std::mem::replace(&mut self.newer, next));
        }
        self.newer.steps.push((now, step));
    }
}

impl<M> Machine for Recorded<M>
where
    M: Machine + Clone,
    M::Input: Clone,
{
    type Input = M::Input;
    type Action = M::Action;

    fn handle(&mut self, now: Time, input: Self::Input) {
        self.remember(now, Step::Input(input.clone()));
        self.machine.handle(now, input);
    }

    fn handle_timeout(&mut self, now: Time) {
        self.remember(now, Step::Timeout);
        self.machine.handle_timeout(now);
    }

    fn poll(&mut self) -> Option<Self::Action> {
        self.machine.poll()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.machine.next_timeout()
    }
}

/// A machine and what was done to it.
pub struct Recording<M: Machine> {
    /// The machine before the first step.
    pub before: M,
    /// The steps, oldest first.
    pub steps: Vec<(Time, Step<M::Input>)>,
}

impl<M: Machine> Recording<M> {
    /// Repeats the steps and returns the machine and all its actions, with the time of the step
    /// that gave them. Actions that were already waiting at the start come with the first step.
    pub fn replay(self) -> (M, Vec<(Time, M::Action)>) {
        let mut machine = self.before;
        let mut actions = Vec::new();
        for (now, step) in self.steps {
            match step {
                Step::Input(input) => machine.handle(now, input),
                Step::Timeout => machine.handle_timeout(now),
            }
            while let Some(action) = machine.poll() {
                actions.push((now, action));
            }
        }
        (machine, actions)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Says the sum of all inputs after each; a time-out doubles it.
    #[derive(Clone, Default, Debug)]
    struct Adder {
        sum: u64,
        said: VecDeque<u64>,
    }

    impl Machine for Adder {
        type Input = u64;
        type Action = u64;

        fn handle(&mut self, _now: Time, input: u64) {
            self.sum = self.sum.wrapping_add(input);
            self.said.push_back(self.sum);
        }

        fn handle_timeout(&mut self, _now: Time) {
            self.sum = self.sum.wrapping_mul(2);
            self.said.push_back(self.sum);
        }

        fn poll(&mut self) -> Option<u64> {
            self.said.pop_front()
        }

        fn next_timeout(&self) -> Option<Time> {
            None
        }
    }

    #[test]
    fn a_replay_of_the_ring_repeats_the_last_actions_and_the_ring_is_bounded() {
        for steps in [0_usize, 1, 7, 8, 9, 15, 16, 17, 100] {
            let mut recorded = Recorded::new(Adder::default(), 8);
            let mut actions = Vec::new();
            for step in 0..steps {
                let now = Time::from_millis(step as u64);
                if step % 5 == 4 {
                    recorded.handle_timeout(now);
                } else {
                    recorded.handle(now, step as u64);
                }
                while let Some(action) = recorded.poll() {
                    actions.push((now, action));
                }
            }
            let recording = recorded.recording();
            let kept = recording.steps.len();
            assert!(kept <= 16, "{kept} steps kept");
            assert!(kept >= steps.min(8), "{kept} of {steps} kept");
            let (machine, replayed) = recording.replay();
            assert_eq!(replayed[..], actions[actions.len() - kept..]);
            assert_eq!(machine.sum, recorded.machine().sum);
        }
    }
}
