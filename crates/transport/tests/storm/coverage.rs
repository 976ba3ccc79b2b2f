//! What has happened, counted: kinds of faults, transitions and actions of machines, outcomes.

use std::collections::BTreeMap;
use std::fmt;

/// Everything that a long storm must have seen.
const EXPECTED: &[(&str, &[&str])] = &[
    (
        "fault",
        &[
            "port flap",
            "renumber",
            "gid moves",
            "loss",
            "slow wire",
            "partition",
            "lost events",
            "disturbed events",
            "hung verbs",
            "dead device",
            "lost completion",
            "failed work",
            "late packets",
            "store outage",
            "store emptied",
            "store forgets to tell",
            "store loses an answer",
            "killed",
            "frozen",
            "left",
            "silent messages",
            "slow messages",
            "late work",
            "mtu",
            "pkeys",
            "broken queue pair",
            "event without a cause",
            "cancelled",
            "registered anew",
        ],
    ),
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
            "Connect",
            "Probe",
            "DropEndpoint",
            "RecheckLocal",
            "RefreshPeer",
        ],
    ),
    (
        "fence",
        &[
            "ToError",
            "ClosePeer",
            "MayRepost",
            "CloseContext",
            "Fenced",
        ],
    ),
    ("transfer", &["Retry", "Fail", "CutOff"]),
    (
        "end",
        &["success", "Deadline", "PeerRestarted", "Cancelled"],
    ),
];

/// Counts by group and name.
#[derive(Clone, Default, Debug)]
pub(crate) struct Coverage {
    counts: BTreeMap<(&'static str, String), u64>,
}

impl Coverage {
    pub(crate) fn count(&mut self, group: &'static str, name: impl Into<String>) {
        *self.counts.entry((group, name.into())).or_default() += 1;
    }

    pub(crate) fn add(&mut self, other: &Self) {
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
    pub(crate) fn missing(&self) -> Vec<String> {
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
