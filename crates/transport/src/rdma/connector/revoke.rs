//! Stopping all that one peer may still do here.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::endpoint::{CloseCause, Input};
use super::super::inbox::EndpointKey;
use super::task::Mail;
use super::{Connector, Table, server_of};
use crate::TransportError;

/// How often it is looked whether queue pairs have stopped.
const LOOK_EVERY: Duration = Duration::from_millis(1);

impl Connector {
    /// Closes every connection of the peer that calls itself `server` in its NIC paths, whoever
    /// opened it, and waits until all their queue pairs are in ERR or destroyed and what was posted
    /// on them has come back. From then on nothing that the peer has posted on one of them can
    /// reach memory here, though it may be on the wire still. Returns how many connections there
    /// were; none is no error.
    ///
    /// # Errors
    ///
    /// [`TransportError::NotRevoked`] if some have not stopped within `limit`. They go on stopping,
    /// and calling again goes on waiting.
    pub async fn revoke(&self, server: &str, limit: Duration) -> Result<usize, TransportError> {
        let clock = self.shared.clock;
        let until = clock.now() + limit;
        let mut left = self.close_all_of(server);
        let count = left.len();
        loop {
            let nics = self.moving(&mut left);
            if left.is_empty() {
                return Ok(count);
            }
            if clock.now() >= until {
                return Err(self.not_revoked(server, &nics, limit));
            }
            clock.sleep(LOOK_EVERY).await;
        }
    }

    /// Begins to close what is open to a peer. Returns all that may not have stopped.
    fn close_all_of(&self, server: &str) -> BTreeSet<EndpointKey> {
        let is_meant = |path: &str| server_of(path) == server;
        let table = self.table();
        let current = table.current.iter();
        let current = current.filter(|((_, path), _)| is_meant(path));
        let current = current.flat_map(|(_, here)| here);
        let closing = table.closing.iter();
        let closing = closing.filter(|((_, path), _)| is_meant(path));
        let closing = closing.flat_map(|(_, here)| here.iter().map(|(key, _)| *key));
        let mut found: BTreeSet<_> = closing.chain(table.ends.over_of(is_meant)).collect();
        for current in current {
            let cause = CloseCause::Withdrawn("the peer's connections are revoked".into());
            // One that is gone needs no closing.
            let _ = current.mailbox.send(Mail::Input(Input::Close(cause)));
            found.insert(current.key);
        }
        found
    }

    /// Leaves those that have not stopped yet, and names their NICs.
    fn moving(&self, left: &mut BTreeSet<EndpointKey>) -> BTreeSet<u32> {
        let table = self.table();
        let mut nics = BTreeSet::new();
        left.retain(|key| match may_move(&table, *key) {
            Some(nic) => {
                nics.extend(nic);
                true
            }
            None => false,
        });
        nics
    }

    fn not_revoked(&self, server: &str, nics: &BTreeSet<u32>, limit: Duration) -> TransportError {
        let seats = self.shared.nics.seats();
        let named = seats.filter(|seat| nics.contains(&seat.nic.index().0));
        let named: Vec<_> = named.map(|seat| seat.nic.name()).collect();
        TransportError::NotRevoked {
            peer: server.to_owned(),
            nics: named.join(", "),
            limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// Whether something may move over an end, and on which NIC if its queue pairs were connected.
fn may_move(table: &Table, key: EndpointKey) -> Option<Option<u32>> {
    match table.ends.moves(key) {
        Some(nic) => Some(Some(nic)),
        // Its queue pairs may be about to be connected, before it finds that it is closed.
        None if table.by_key.contains_key(&key) && !table.ends.is_known(key) => Some(None),
        None => None,
    }
}
