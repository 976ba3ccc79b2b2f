//! Why a transfer may be refused: keys that were made wrong, memory that its owner registered anew
//! at some time, and nothing else. Whatever becomes of a device is no reason.

use std::collections::{BTreeMap, BTreeSet};

use rerail_verbs::WcStatus;

use crate::TransferError;
use crate::machine::verdict::{RequestFault, Verdict, verdict};

/// What was done to the keys of each host.
#[derive(Default)]
pub(super) struct Blame {
    /// Pieces of work that were made to fail for their own keys, and may have been a transfer's.
    local: BTreeMap<usize, u32>,
    /// The same for their peer's keys.
    remote: BTreeMap<usize, u32>,
    /// Those that registered their memory anew: their record may be late.
    anew: BTreeSet<usize>,
}

impl Blame {
    /// A piece of a host's work is made to fail.
    pub(super) fn failed(&mut self, host: usize, status: WcStatus) {
        let count = match verdict(status) {
            Verdict::Request(RequestFault::LocalKey) => &mut self.local,
            Verdict::Request(RequestFault::RemoteKey) => &mut self.remote,
            _ => return,
        };
        *count.entry(host).or_default() += 1;
    }

    pub(super) fn registered_anew(&mut self, host: usize) {
        self.anew.insert(host);
    }

    /// A transfer of `host` to `peer` has ended with an error.
    pub(super) fn check(&mut self, host: usize, peer: usize, error: &TransferError) {
        let count = match error {
            TransferError::Refused { .. } => self.local.entry(host),
            TransferError::RemoteAccess { .. } if self.anew.contains(&peer) => return,
            TransferError::RemoteAccess { .. } => self.remote.entry(host),
            _ => return,
        };
        let count = count.or_default();
        assert!(*count > 0, "n{host}: without a cause: {error}");
        *count -= 1;
    }
}
