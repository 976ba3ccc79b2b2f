//! Which GID of a port to use: a ranking of its table with a reason for every row, a choice that
//! stays put while it works, and pairs to try with a peer. Pure functions over plain data.
//!
//! Order of the ranking on Ethernet: class ([`GidClass`]), rows that are alive before rows whose
//! address or interface has gone, IPv4 before IPv6, lowest index. Makers of engines disagree on
//! IPv4 against IPv6; IPv4 first is what UCX and perftest do, private ranges are ordinary
//! addresses, and [`candidate_pairs`] brings both ends to one family. On InfiniBand the first row
//! that is not null is taken: fe80::/64 is normal there.
//!
//! Deliberately not here: reading tables (see the scan of sysfs, or `rerail_verbs::Context`),
//! and connecting.

mod hysteresis;
mod pairs;
mod policy;
mod rank;
mod reason;
mod table;
#[cfg(test)]
mod tests;

pub use hysteresis::{Hysteresis, HysteresisTimes, Selection, Steady};
pub use pairs::{Affinity, CandidatePair, PAIRS_MAX, candidate_pairs, order_for_peer};
pub use policy::{GidIndexes, GidPolicy};
pub use rank::{GidError, PortTable, RankedRow, Ranking, UnreadableRow, Warning, rank};
pub use reason::{Family, GidClass, Liveness, NetdevRole, Reason, RowFacts, Verdict};
pub use table::TableFile;
pub(crate) use table::parse_gid_type;
