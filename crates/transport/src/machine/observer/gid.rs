//! Which GID of a port is used, kept steady: design §5's hysteresis over a ranking that is given.
//!
//! Deliberately not here: how rows are ranked ([`GidRanking`] is the seam), and which GID suits a
//! certain peer (connecting re-ranks for its pair).

use std::time::Duration;

use rerail_verbs::GidEntry;

use super::PortReading;
use crate::machine::Time;

/// A row of a GID table that can be used, with its class: lower is better.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GidChoice {
    /// The row.
    pub entry: GidEntry,
    /// Its class in the ranking; 0 is the best.
    pub class: u8,
}

/// Ranks a port's GID table.
pub trait GidRanking {
    /// The usable rows of the reading, best first.
    ///
    /// # Errors
    ///
    /// A sentence that says why no row is usable.
    fn rank(&self, reading: &PortReading) -> Result<Vec<GidChoice>, String>;
}

/// Why a port that is up has no GID.
#[derive(Clone, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoGid {
    /// No row can be used.
    #[error("no GID is usable: {reason}")]
    NoneUsable {
        /// The ranking's words.
        reason: String,
    },
    /// The only rows are worse than the one that was published; a better one is waited for.
    #[error(
        "only GIDs of class {class} are there, waiting until {until} for one of class {wanted}"
    )]
    Held {
        /// When the worse class will be taken.
        until: Time,
        /// Best class that is there.
        class: u8,
        /// Class that was published last.
        wanted: u8,
    },
}

/// Times of the hysteresis.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct HysteresisTimes {
    /// How long a better class must have been there before it replaces a working GID.
    pub settle: Duration,
    /// How long a worse class waits for the return of what was published.
    pub downgrade_hold: Duration,
}

impl Default for HysteresisTimes {
    fn default() -> Self {
        Self {
            settle: Duration::from_millis(2_000),
            downgrade_hold: Duration::from_millis(2_000),
        }
    }
}

/// What the hysteresis says to a reading, and when the port must be read again for its sake.
pub(super) type Verdict = (Result<GidChoice, NoGid>, Option<Time>);

/// The GID in use of one port.
#[derive(Clone, Debug)]
pub(super) struct Hysteresis<R> {
    ranking: R,
    times: HysteresisTimes,
    in_use: Option<GidChoice>,
    better_since: Option<Time>,
    worse_since: Option<Time>,
}

impl<R: GidRanking> Hysteresis<R> {
    pub(super) fn new(ranking: R, times: HysteresisTimes) -> Self {
        Self {
            ranking,
            times,
            in_use: None,
            better_since: None,
            worse_since: None,
        }
    }

    /// The port is not active: GIDs come and go meanwhile, and no wait runs.
    pub(super) fn port_down(&mut self) {
        self.better_since = None;
        self.worse_since = None;
    }

    /// Chooses from the reading of an active port.
    pub(super) fn select(&mut self, now: Time, reading: &PortReading) -> Verdict {
        let ranked = match self.ranking.rank(reading) {
            Ok(ranked) => ranked,
            Err(reason) => return (Err(self.none_usable(reason)), None),
        };
        let Some(best) = ranked.first() else {
            return (Err(self.none_usable("no row is left".into())), None);
        };
        let Some(used) = &self.in_use else {
            return (Ok(self.take(best.clone())), None);
        };
        let still_there = ranked
            .iter()
            .filter(|row| same_row(&row.entry, &used.entry));
        // The same row may be shown twice for a moment while it moves: the known index wins.
        let current = still_there.min_by_key(|row| row.entry.index != used.entry.index);
        match current {
            Some(current) if best.class < current.class => {
                let since = *self.better_since.get_or_insert(now);
                let due = since + self.times.settle;
                if now >= due {
                    (Ok(self.take(best.clone())), None)
                } else {
                    let current = current.clone();
                    self.worse_since = None;
                    self.in_use = Some(current.clone());
                    (Ok(current), Some(due))
                }
            }
            Some(current) => (Ok(self.take(current.clone())), None),
            None if best.class <= used.class => (Ok(self.take(best.clone())), None),
            None => {
                let wanted = used.class;
                let since = *self.worse_since.get_or_insert(now);
                let until = since + self.times.downgrade_hold;
                self.better_since = None;
                if now >= until {
                    (Ok(self.take(best.clone())), None)
                } else {
                    let held = NoGid::Held {
                        until,
                        class: best.class,
                        wanted,
                    };
                    (Err(held), Some(until))
                }
            }
        }
    }

    fn take(&mut self, choice: GidChoice) -> GidChoice {
        self.port_down();
        self.in_use = Some(choice.clone());
        choice
    }

    fn none_usable(&mut self, reason: String) -> NoGid {
        // The hold counts from the first sight of a worse row, not of an empty table.
        self.port_down();
        NoGid::NoneUsable { reason }
    }
}

/// Whether two rows are the same, wherever they stand.
pub(super) fn same_row(left: &GidEntry, right: &GidEntry) -> bool {
    left.gid == right.gid && left.gid_type == right.gid_type && left.netdev == right.netdev
}
