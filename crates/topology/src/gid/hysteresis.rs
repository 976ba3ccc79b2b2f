//! A choice that stays put: the GID in use of one port from reading to reading.
//!
//! A machine without clock: `now` is the time since an origin of the caller's, and
//! [`Hysteresis::next_timeout`] says when the port should be read again for its sake. Deliberately
//! not here: publishing, and what happens to connections.

use std::time::Duration;

use rerail_verbs::{Gid, GidType};

use super::rank::{PortTable, RankedRow, Ranking};
use super::reason::GidClass;

/// Times of the hysteresis.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct HysteresisTimes {
    /// How long a better class must have been there before it replaces a working GID.
    pub settle: Duration,
    /// How long a worse class waits for the return of what was published.
    pub downgrade_hold: Duration,
}

impl Default for HysteresisTimes {
    /// 2 s each.
    fn default() -> Self {
        Self {
            settle: Duration::from_millis(2_000),
            downgrade_hold: Duration::from_millis(2_000),
        }
    }
}

/// The row in use.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Selection {
    /// Index in the port's table.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// Type of the row.
    pub gid_type: GidType,
    /// Name of the row's interface; empty where there is none.
    pub netdev: String,
    /// How good it is.
    pub class: GidClass,
}

impl Selection {
    fn of(table: &PortTable<'_>, row: &RankedRow) -> Option<Self> {
        let entry = table.entries.get(row.entry?)?;
        let netdev = entry.netdev.as_ref().map(|netdev| table.name_of(netdev));
        Some(Self {
            index: row.index,
            gid: row.gid,
            gid_type: entry.gid_type,
            netdev: netdev.unwrap_or_default().to_owned(),
            class: row.class?,
        })
    }

    /// Whether two selections are one row, wherever it stands in the table.
    fn is_same_row(&self, other: &Self) -> bool {
        self.gid == other.gid && self.gid_type == other.gid_type && self.netdev == other.netdev
    }
}

/// What a reading means for the GID in use.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Steady {
    /// The row in use is there, at its index. Nothing to do.
    Unchanged,
    /// The row in use stands at another index: same address, so that nothing need be published.
    Moved(Selection),
    /// Another row is in use now: to be published.
    Changed(Selection),
    /// Only worse rows are there. The rail is withdrawn, the last GID stays in the record.
    Held {
        /// When the worse class will be taken.
        until: Duration,
    },
    /// No row can be used. The rail is withdrawn, the last GID stays in the record.
    Unusable,
}

/// The GID in use of one port.
#[derive(Clone, Debug)]
pub struct Hysteresis {
    times: HysteresisTimes,
    in_use: Option<Selection>,
    better_since: Option<Duration>,
    worse_since: Option<Duration>,
}

impl Hysteresis {
    /// Nothing is in use yet; the first usable reading is taken at once.
    pub fn new(times: HysteresisTimes) -> Self {
        Self {
            times,
            in_use: None,
            better_since: None,
            worse_since: None,
        }
    }

    /// The row in use, or the last one while the rail is withdrawn.
    pub fn in_use(&self) -> Option<&Selection> {
        self.in_use.as_ref()
    }

    /// When the port should be read again for the sake of a wait that ends.
    pub fn next_timeout(&self) -> Option<Duration> {
        let settled = self.better_since.map(|since| since + self.times.settle);
        let held = self
            .worse_since
            .map(|since| since + self.times.downgrade_hold);
        settled.or(held)
    }

    /// The port is not active: GIDs come and go meanwhile, and no wait runs.
    pub fn port_down(&mut self) {
        self.better_since = None;
        self.worse_since = None;
    }

    /// Takes a reading of an active port.
    pub fn handle(&mut self, now: Duration, table: &PortTable<'_>, ranking: &Ranking) -> Steady {
        let best = ranking.accepted().first();
        let Some(best) = best.and_then(|row| Selection::of(table, row)) else {
            // A hold counts from the first sight of a worse row, not of an empty table.
            self.port_down();
            return Steady::Unusable;
        };
        let Some(used) = &self.in_use else {
            return self.take(best);
        };
        match find(table, ranking, used) {
            Some(current) if best.class < current.class => {
                self.worse_since = None;
                let since = *self.better_since.get_or_insert(now);
                if now >= since + self.times.settle {
                    self.take(best)
                } else {
                    self.keep(current)
                }
            }
            Some(current) => {
                self.port_down();
                self.keep(current)
            }
            None if best.class <= used.class => self.take(best),
            None => {
                self.better_since = None;
                let since = *self.worse_since.get_or_insert(now);
                let until = since + self.times.downgrade_hold;
                if now >= until {
                    self.take(best)
                } else {
                    Steady::Held { until }
                }
            }
        }
    }

    fn take(&mut self, selection: Selection) -> Steady {
        self.port_down();
        self.in_use = Some(selection.clone());
        Steady::Changed(selection)
    }

    fn keep(&mut self, current: Selection) -> Steady {
        let moved = self.in_use.as_ref().map(|used| used.index) != Some(current.index);
        self.in_use = Some(current.clone());
        if moved {
            Steady::Moved(current)
        } else {
            Steady::Unchanged
        }
    }
}

/// The row in use in a new reading. Of two equal rows, as there may be for a moment while one
/// moves, the one at the known index is it. A RoCE v1 row that only a v2 row made unusable still
/// works for those who use it.
fn find(table: &PortTable<'_>, ranking: &Ranking, used: &Selection) -> Option<Selection> {
    use super::reason::Verdict::{Accepted, V1BesideV2};
    let usable = |row: &&RankedRow| matches!(row.reason.verdict, Accepted | V1BesideV2);
    let rows = ranking.rows().iter().filter(usable);
    rows.filter_map(|row| Selection::of(table, row))
        .filter(|row| row.is_same_row(used))
        .min_by_key(|row| row.index != used.index)
}
