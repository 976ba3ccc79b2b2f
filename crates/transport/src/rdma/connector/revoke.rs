//! Stopping all that one peer may still do here.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::endpoint::{CloseCause, Input};
use super::super::inbox::EndpointKey;
use super::task::Mail;
use super::{Connector, Proof, server_of};
use crate::TransportError;

/// How often it is looked whether queue pairs have stopped.
const LOOK_EVERY: Duration = Duration::from_millis(1);

impl Connector {
    /// Closes every connection of the peer that calls itself by one of the names `servers` in its
    /// NIC paths, whoever opened it, and waits until all their queue pairs are in ERR or destroyed
    /// and what was posted on them has come back. From then on nothing that the peer has posted on
    /// one of them can reach memory here, though it may be on the wire still. Returns how many
    /// connections there were; none is no error.
    ///
    /// # Errors
    ///
    /// [`TransportError::NotRevoked`] if some have not stopped within `limit`. They go on stopping,
    /// and calling again goes on waiting.
    pub async fn revoke(
        &self,
        servers: &BTreeSet<String>,
        limit: Duration,
    ) -> Result<usize, TransportError> {
        let clock = self.shared.clock;
        let until = clock.now() + limit;
        let mut left = self.close_all_of(servers);
        let count = left.len();
        loop {
            self.leave_moving(&mut left);
            if left.is_empty() {
                return Ok(count);
            }
            if clock.now() >= until {
                return Err(self.not_revoked(servers, &left, limit));
            }
            clock.sleep(LOOK_EVERY).await;
        }
    }

    /// Begins to close what is open to a peer. Returns all that may not have stopped.
    fn close_all_of(&self, servers: &BTreeSet<String>) -> Vec<Left> {
        let is_meant = |path: &str| servers.contains(server_of(path));
        let table = self.table();
        let over = table.ends.over_of(is_meant);
        let mut left: Vec<_> = over
            .map(|(nic, proof)| Left::Proved(nic, proof.clone()))
            .collect();
        let closing = table.closing.iter().filter(|((_, path), _)| is_meant(path));
        for (place, here) in closing {
            let keys = here.iter().map(|(key, _)| *key);
            left.extend(keys.map(|key| Left::Endpoint(place.clone(), key)));
        }
        let current = table.current.iter().filter(|((_, path), _)| is_meant(path));
        for (place, here) in current {
            for current in here {
                let cause = CloseCause::Withdrawn("the peer's connections are revoked".into());
                // One that is gone needs no closing.
                let _ = current.mailbox.send(Mail::Input(Input::Close(cause)));
                left.push(Left::Endpoint(place.clone(), current.key));
            }
        }
        left
    }

    /// Leaves those that have not stopped yet.
    fn leave_moving(&self, left: &mut Vec<Left>) {
        let table = self.table();
        left.retain_mut(|left| {
            if let Left::Endpoint(place, key) = left {
                match table.ends.proof(place, *key) {
                    Some(proof) => *left = Left::Proved(place.0, proof.clone()),
                    // Its queue pairs may be about to be connected, before it finds that it is
                    // closed.
                    None => return table.by_key.contains_key(key),
                }
            }
            !matches!(left, Left::Proved(_, proof) if proof.is_quiet())
        });
    }

    fn not_revoked(
        &self,
        servers: &BTreeSet<String>,
        left: &[Left],
        limit: Duration,
    ) -> TransportError {
        let over: BTreeSet<_> = left.iter().map(Left::nic).collect();
        let seats = self.shared.nics.seats();
        let named = seats.filter(|seat| over.contains(&seat.nic.index().0));
        let named: Vec<_> = named.map(|seat| seat.nic.name()).collect();
        let servers: Vec<_> = servers.iter().map(String::as_str).collect();
        TransportError::NotRevoked {
            peer: servers.join(", "),
            nics: named.join(", "),
            limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// A connection over which something may move still.
enum Left {
    /// Of queue pairs that were to be connected, on this NIC.
    Proved(u32, Proof),
    /// An endpoint of a NIC and a path, which may not be so far yet.
    Endpoint((u32, String), EndpointKey),
}

impl Left {
    fn nic(&self) -> u32 {
        match self {
            Self::Proved(nic, _) => *nic,
            Self::Endpoint((nic, _), _) => *nic,
        }
    }
}
