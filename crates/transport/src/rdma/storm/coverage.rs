//! What has happened, counted: kinds of faults, transitions and actions of machines, outcomes.
//!
//! A long storm must have seen all that can happen. Nobody keeps that list by hand: names are those
//! of enums' variants, each named by a `match`, and what may follow what is listed beside each
//! machine (`states.rs`), where tests hold the machines to it. What is too rare to be demanded is
//! in [`RARE`], each with the test that makes it happen.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use super::fault::Fault;
use super::rivals::Says;
use crate::TransferError;
use crate::machine::observer::{self, CloseCause as GateCause, DeathCause, Outcome};
use crate::machine::peers::{self, NicChange, Parting, Refreshed};
use crate::machine::publisher::{self, StoreRequest};
use crate::machine::rail::{self, RailCause};
use crate::machine::seen::{self, List, Named, names, words};
use crate::rdma::endpoint::{self, Action, CloseCause};
use crate::rdma::inbox::EndpointKey;

use observer::Action as ObserverAction;
use peers::Action as PeersAction;
use publisher::Action as PublisherAction;
use rail::Action as RailAction;

names!(ObserverAction: ReadPort, Report, CloseGate, CutEndpoints, Publish, ReplaceLazily, HalfOpen,
    EndpointEvent, ReleaseContext, Reopen);
names!(Outcome: Unchanged, Moved, Changed, Failed);
names!(GateCause: Event, Outcome, ContextDead);
names!(DeathCause: Event, Channel, VerbHung);
names!(PublisherAction: Store, Push, Heartbeat, DropSubscriber, Stored, StoreTrouble, EditRefused,
    Superseded, Left);
names!(StoreRequest: Create, Swap, Read, Delete, RpcMeta);
names!(PeersAction: Fetch, Subscribe, Unsubscribe, AskAlive, Acknowledge, Retired, Updated,
    Refreshed);
names!(NicChange: Up, Down, Moved);
names!(Parting: Replaced, Withdrawn, Closed);
names!(Refreshed: Newer, Same, Unavailable, NotFound);
names!(RailCause: Completion, NoProgress, QueuePairEvent, PeerClosed, Closed, Local, Connect, Probe,
    ProofTimeout, LocalPort, PeerNic, LocalBlamed, PeerBlamed, Slow, Proved, Retry);
names!(RailAction: Connect, Probe, DropEndpoint, State, RecheckLocal, RefreshPeer);
names!(Action: Prepare, Raise, Ask, Acknowledge, Answer, Refuse, PassOn, Attach, Detach, ToError,
    TellPeer, AwaitDrain, Destroy, GiveUp, Fenced, Unfenced, Closed);
names!(CloseCause: Local, Refused, NoAnswer, Mismatch, Timeout, Failed, Stalled, CutOff, Event,
    Broken, BadRequest, PeerRestarted, PeerClosed, PeerRebuilt, Withdrawn);
names!(TransferError: Deadline, RemoteAccess, Refused, NoPath, PeerRestarted, Unfenced, Canceled,
    Closed);

words! {
    /// What else becomes of transfers.
    pub(super) enum Luck {
        Success = "success",
        Reposted = "posted once more",
        Retried = "after another attempt",
        // Once all faults are over, and before all is well.
        Late = "failed after the storm",
    }
}

words! {
    /// What rails ask for.
    pub(super) enum Asks {
        RecheckLocal = "RecheckLocal",
        RefreshPeer = "RefreshPeer",
        TakenIn = "NIC taken in",
    }
}

/// Groups of names.
const NAMED: &[(&str, &[&str])] = &[
    ("fault", Fault::NAMES),
    ("observer", ObserverAction::NAMES),
    ("outcome", Outcome::NAMES),
    ("gate", GateCause::NAMES),
    ("death", DeathCause::NAMES),
    ("publisher", PublisherAction::NAMES),
    ("store", StoreRequest::NAMES),
    ("store says", Says::NAMES),
    ("peers", PeersAction::NAMES),
    ("judgement", peers::states::JUDGEMENTS),
    ("reading", Refreshed::NAMES),
    ("peer's NIC", NicChange::NAMES),
    ("parting", Parting::NAMES),
    ("rail cause", RailCause::NAMES),
    ("rail order", RailAction::NAMES),
    ("engine", Asks::NAMES),
    ("order", Action::NAMES),
    ("close", CloseCause::NAMES),
    ("end", TransferError::NAMES),
    ("transfer", Luck::NAMES),
];

/// Lists of what may follow what.
fn lists() -> impl Iterator<Item = &'static List> {
    let machines = [
        &observer::states::LISTS[..],
        &publisher::states::LISTS,
        &peers::states::LISTS,
        &rail::states::LISTS,
        &endpoint::states::LISTS,
    ];
    machines.into_iter().flatten()
}

/// Something that a long storm need not have seen.
struct Rare {
    group: &'static str,
    name: &'static str,
    why: &'static str,
    /// File in the workspace, and the test there that makes it happen.
    test: (&'static str, &'static str),
}

const RARE: &[Rare] = &[
    Rare {
        group: "publisher",
        name: "EditRefused",
        why: "a fault of the engine's own, at which the storm fails",
        test: (
            "crates/transport/src/machine/publisher/tests/record.rs",
            "an_edit_that_cannot_be_made_is_refused_and_makes_no_generation",
        ),
    },
    Rare {
        group: "errand",
        name: "Delete > TimedOut",
        why: "needs a store that goes as a node leaves",
        test: UNANSWERED,
    },
    Rare {
        group: "errand",
        name: "Delete > NotFound",
        why: "needs a store that is emptied as a node leaves",
        test: LEAVING,
    },
    Rare {
        group: "errand",
        name: "Delete > Conflict",
        why: "needs another owner of a record as a node leaves",
        test: LEAVING,
    },
    Rare {
        group: "errand",
        name: "Delete > Failed",
        why: "needs a store that goes as a node leaves",
        test: UNANSWERED,
    },
    Rare {
        group: "rail",
        name: "Suspect > HalfOpen",
        why: "needs errors over many peers while one rail is suspect and has a neighbour",
        test: (
            "crates/transport/src/machine/rail/tests/scenarios.rs",
            "a_suspect_rail_whose_nic_is_blamed_is_proved_before_it_carries_on",
        ),
    },
    Rare {
        group: "rail",
        name: "Suspect > Up",
        why: "few rails are suspect for a minute before something else takes them down",
        test: (
            "crates/transport/src/machine/rail/tests/scenarios.rs",
            "a_slow_rail_keeps_a_quarter_of_its_share_for_a_minute",
        ),
    },
    Rare {
        group: "proof",
        name: "Waiting > None",
        why: "few rails wait for a place here",
        test: (
            "crates/transport/src/machine/rail/tests/scenarios.rs",
            "probes_are_bounded_per_nic",
        ),
    },
    Rare {
        group: "rail cause",
        name: "Slow",
        why: "a hook that nobody tells yet",
        test: (
            "crates/transport/src/machine/rail/tests/scenarios.rs",
            "a_slow_rail_keeps_a_quarter_of_its_share_for_a_minute",
        ),
    },
    Rare {
        group: "end",
        name: "Closed",
        why: "a node that ends is not asked for its transfers",
        test: (
            "crates/transport/src/rdma/driver/tests.rs",
            "what_a_driver_has_when_it_ends_is_closed",
        ),
    },
    Rare {
        group: "close",
        name: "Broken",
        why: "here the observer knows of a dead device before its data thread posts",
        test: (
            "crates/transport/src/rdma/endpoint/tests.rs",
            "a_cut_endpoint_is_drained_before_it_is_destroyed_and_fenced_by_the_peers_word",
        ),
    },
];

const UNANSWERED: (&str, &str) = (
    "crates/transport/src/machine/publisher/tests/writing.rs",
    "whatever_the_store_does_not_answer_is_given_up_and_asked_again",
);
const LEAVING: (&str, &str) = (
    "crates/transport/src/machine/publisher/tests/names.rs",
    "leaving_removes_the_own_record_and_nobody_elses",
);

/// Counts by group and name.
#[derive(Clone, Default, Debug)]
pub(super) struct Coverage {
    counts: BTreeMap<(&'static str, String), u64>,
}

impl Coverage {
    pub(super) fn count(&mut self, group: &'static str, what: &impl Named) {
        *self
            .counts
            .entry((group, what.name().to_owned()))
            .or_default() += 1;
    }

    /// Takes in what machines have noted.
    pub(super) fn take_in(&mut self) {
        for ((group, name, next), count) in seen::take() {
            let name = next.map_or(name.to_owned(), |next| format!("{name} > {next}"));
            *self.counts.entry((group, name)).or_default() += count;
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (key, count) in &other.counts {
            *self.counts.entry(key.clone()).or_default() += count;
        }
    }

    fn of(&self, group: &'static str, name: &str) -> u64 {
        let count = self.counts.get(&(group, name.to_owned()));
        count.copied().unwrap_or(0)
    }

    /// What should have happened and did not.
    pub(super) fn missing(&self) -> Vec<String> {
        let is_missing = |(group, name): &(&'static str, String)| {
            rare(group, name).is_none() && self.of(group, name) == 0
        };
        let missing = everything().into_iter().filter(is_missing);
        missing
            .map(|(group, name)| format!("{group}: {name}"))
            .collect()
    }

    /// What has happened and is in no list.
    pub(super) fn unlisted(&self) -> Vec<String> {
        let all = everything();
        let unlisted = self.counts.keys().filter(|key| !all.contains(key));
        unlisted
            .map(|(group, name)| format!("{group}: {name}"))
            .collect()
    }
}

/// All that can happen, by group and name.
fn everything() -> Vec<(&'static str, String)> {
    let named = NAMED.iter();
    let named =
        named.flat_map(|(group, names)| names.iter().map(|name| (*group, (*name).to_owned())));
    let pairs = lists().flat_map(|list| {
        let pairs = list.rows.iter();
        let pairs = pairs.flat_map(|(from, next)| next.iter().map(move |to| (from, to)));
        pairs.map(|(from, to)| (list.about, format!("{from} > {to}")))
    });
    named.chain(pairs).collect()
}

fn rare(group: &str, name: &str) -> Option<&'static Rare> {
    RARE.iter()
        .find(|rare| rare.group == group && rare.name == name)
}

/// Names of a group that stand in one line of the table.
const COLUMNS: usize = 3;

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = everything();
        for rows in all.chunk_by(|one, next| one.0 == next.0) {
            for (at, line) in rows.chunks(COLUMNS).enumerate() {
                let group = if at == 0 { line[0].0 } else { "" };
                let mut text = format!("{group:<16}");
                for (group, name) in line {
                    let mark = if rare(group, name).is_some() {
                        '*'
                    } else {
                        ' '
                    };
                    let _ = write!(text, " {:>9}{mark} {name:<28}", self.of(group, name));
                }
                writeln!(f, "{}", text.trim_end())?;
            }
        }
        for Rare {
            group,
            name,
            why,
            test: (file, test),
        } in RARE
        {
            writeln!(f, "* {group}: {name}: {why}; {file}::{test}")?;
        }
        for missing in self.missing() {
            writeln!(f, "never: {missing}")?;
        }
        Ok(())
    }
}

/// What an endpoint did, on this thread.
pub(super) struct Note {
    pub(super) endpoint: EndpointKey,
    /// Its NIC, and its peer's path.
    pub(super) way: String,
    pub(super) order: &'static str,
}

thread_local! {
    static NOTES: RefCell<Option<Vec<Note>>> = const { RefCell::new(None) };
}

/// From now on this thread's notes are kept.
pub(super) fn keep_notes() {
    NOTES.set(Some(Vec::new()));
    drop(seen::take());
}

/// Whether this thread runs a storm.
pub(super) fn keeps_notes() -> bool {
    NOTES.with_borrow(Option::is_some)
}

pub(super) fn take_notes() -> Vec<Note> {
    NOTES.with_borrow_mut(|notes| notes.as_mut().map(std::mem::take).unwrap_or_default())
}

pub(super) fn note(endpoint: EndpointKey, (nic, peer): (&str, &str), action: &Action) {
    seen::happened("order", action);
    if let Action::Closed(cause) = action {
        seen::happened("close", cause);
    }
    let order = action.name();
    NOTES.with_borrow_mut(|notes| {
        let notes = notes.as_mut();
        notes.map(|notes| {
            notes.push(Note {
                endpoint,
                way: format!("{nic} - {peer}"),
                order,
            });
        })
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_rare_can_happen_and_a_test_makes_it_happen() {
        let all = everything();
        for Rare {
            group,
            name,
            test: (file, test),
            ..
        } in RARE
        {
            let known = all.iter().any(|one| one.0 == *group && one.1 == *name);
            assert!(known, "{group}: {name} is not listed");
            let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
            let path = root.join(file);
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(
                text.contains(&format!("fn {test}(")),
                "{file} has no {test}"
            );
        }
    }

    #[test]
    fn nothing_is_listed_twice() {
        let all = everything();
        let once: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(once.len(), all.len());
    }
}
