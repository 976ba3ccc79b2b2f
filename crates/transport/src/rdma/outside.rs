//! What the control side has of the outside: time, a place for its tasks, and chance.

use std::future::Future;

use tokio::runtime;

use super::clock::Clock;
#[cfg(test)]
use super::storm::Turns;

/// All of it. In an engine the real time, its runtime and a seed by chance; in the storm all of
/// it comes from one seed.
#[derive(Clone, Debug)]
pub(super) struct Outside {
    pub(super) clock: Clock,
    pub(super) tasks: Tasks,
    /// Whatever is chosen at random follows from it.
    pub(super) seed: u64,
}

/// Where tasks run.
#[derive(Clone, Debug)]
pub(super) enum Tasks {
    /// On the engine's control runtime.
    Runtime(runtime::Handle),
    /// One after the other, when their owner says so.
    #[cfg(test)]
    Turns(Turns),
}

impl Tasks {
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        match self {
            Self::Runtime(runtime) => drop(runtime.spawn(task)),
            #[cfg(test)]
            Self::Turns(turns) => turns.spawn(task),
        }
    }
}
