//! What has happened, counted: kinds of faults, transitions and actions of machines, outcomes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

use super::fault::Fault;
use crate::machine::seen::Named as _;
use crate::rdma::inbox::EndpointKey;

/// Everything that a long storm must have seen.
const EXPECTED: &[(&str, &[&str])] = &[
    ("fault", Fault::NAMES),
    ("nic", &["taken in"]),
    (
        "observer",
        &[
            "ReadPort",
            "CloseGate",
            "CutEndpoints",
            "Publish",
            "HalfOpen",
            "ReleaseContext",
            "Reopen",
            "EndpointEvent",
            "ReplaceLazily",
            "Unchanged",
            "Moved",
            "Changed",
            "Failed",
        ],
    ),
    (
        "publisher",
        &[
            "Create",
            "Swap",
            "Read",
            "RpcMeta",
            "Delete",
            "Push",
            "Heartbeat",
            "Stored",
            "StoreTrouble",
            "Left",
        ],
    ),
    (
        "peers",
        &[
            "Fetch",
            "Subscribe",
            "Acknowledge",
            "Retired",
            "Updated",
            "Refreshed",
            "Up",
            "Down",
            "Moved",
        ],
    ),
    (
        "rail",
        &[
            "Down > HalfOpen",
            "HalfOpen > Up",
            "HalfOpen > Down",
            "Up > Down",
            "RecheckLocal",
            "RefreshPeer",
        ],
    ),
    (
        "endpoint",
        &[
            "Preparing",
            "Offered",
            "Raising",
            "Acknowledging",
            "AwaitingReadyAck",
            "Connected",
            "Failing",
            "Closed",
        ],
    ),
    (
        "order",
        &[
            "Prepare",
            "Raise",
            "Ask",
            "Acknowledge",
            "Answer",
            "Refuse",
            "PassOn",
            "Attach",
            "Detach",
            "ToError",
            "TellPeer",
            "AwaitDrain",
            "Destroy",
            "GiveUp",
            "Fenced",
            "Unfenced",
            "Closed",
        ],
    ),
    (
        "close",
        &[
            "Local",
            "Refused",
            "NoAnswer",
            "Timeout",
            "Failed",
            "Stalled",
            "CutOff",
            "Event",
            "BadRequest",
            "PeerRestarted",
            "PeerClosed",
            "PeerRebuilt",
            "Withdrawn",
        ],
    ),
    (
        "end",
        &[
            "success",
            "Deadline",
            "PeerRestarted",
            "NoPath",
            "RemoteAccess",
            "Unfenced",
            "Canceled",
            "reposted",
            "after another attempt",
        ],
    ),
];

/// Counts by group and name.
#[derive(Clone, Default, Debug)]
pub(super) struct Coverage {
    counts: BTreeMap<(&'static str, String), u64>,
}

impl Coverage {
    pub(super) fn count(&mut self, group: &'static str, name: impl Into<String>) {
        *self.counts.entry((group, name.into())).or_default() += 1;
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (key, count) in &other.counts {
            *self.counts.entry(key.clone()).or_default() += count;
        }
    }

    fn of(&self, group: &'static str, name: &str) -> u64 {
        self.counts
            .get(&(group, name.to_owned()))
            .copied()
            .unwrap_or(0)
    }

    /// What should have happened and did not.
    pub(super) fn missing(&self) -> Vec<String> {
        let all = EXPECTED
            .iter()
            .flat_map(|(group, names)| names.iter().map(move |name| (*group, *name)));
        let missing = all.filter(|(group, name)| self.of(group, name) == 0);
        missing
            .map(|(group, name)| format!("{group}: {name}"))
            .collect()
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ((group, name), count) in &self.counts {
            writeln!(f, "{group:<10} {name:<28} {count:>10}")?;
        }
        for missing in self.missing() {
            writeln!(f, "never      {missing}")?;
        }
        Ok(())
    }
}

/// What the engine's code noted on this thread.
pub(super) struct Note {
    pub(super) endpoint: EndpointKey,
    pub(super) group: &'static str,
    pub(super) name: String,
}

thread_local! {
    static NOTES: RefCell<Option<Vec<Note>>> = const { RefCell::new(None) };
}

/// From now on this thread's notes are kept.
pub(super) fn keep_notes() {
    NOTES.set(Some(Vec::new()));
}

pub(super) fn take_notes() -> Vec<Note> {
    NOTES.with_borrow_mut(|notes| notes.as_mut().map(std::mem::take).unwrap_or_default())
}

pub(super) fn note(endpoint: EndpointKey, group: &'static str, name: String) {
    let note = Note {
        endpoint,
        group,
        name,
    };
    NOTES.with_borrow_mut(|notes| notes.as_mut().map(|notes| notes.push(note)));
}
