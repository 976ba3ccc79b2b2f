//! What an endpoint finds out about its way: which GIDs lead there, and how long packets may be.

use rerail_verbs::AsyncEventKind;

use super::EndpointTask;
use crate::machine::rail::ProbeKind;
use crate::machine::verdict::{RequestFault, Verdict, verdict};
use crate::rdma::endpoint::CloseCause;
use crate::rdma::paths::{Doubt, MTU_SAFE};

impl EndpointTask {
    /// Keeps what the endpoint has found out about its way, for the next one.
    pub(super) fn learn(&self, cause: &CloseCause) {
        let (now, way) = (self.connector.shared.clock.now(), self.way());
        if !self.attached {
            // What our own device refused is noted already.
            if let (CloseCause::Refused(_), Some(gid)) = (cause, self.own_gid())
                && cause.is_unreachable()
            {
                self.paths().refused(now, &way, gid);
            }
            return;
        }
        for (rail, _) in &self.rails {
            if rail.has_moved_long() {
                self.paths().long_passed(&way);
            }
            let probe = rail.unproved();
            if probe == Some(ProbeKind::FullMtuRead) && ends_unsaid(cause) {
                // Its key may be wrong: where both ends read with a wrong key at once, both queue
                // pairs go to ERR before either is told so. The next probe needs no key.
                rail.doubt_memory(now);
            }
            if let (None, Some(gid)) = (probe, self.own_gid()) {
                self.paths().proved(&way, gid);
            }
            match (cause, probe) {
                (CloseCause::Failed { status, .. }, Some(probe))
                    if verdict(*status) == Verdict::Path =>
                {
                    self.unproved(probe);
                }
                // A READ over ends that disagree may neither end nor fail.
                (CloseCause::Stalled(_), Some(probe)) => self.unproved(probe),
                (CloseCause::Failed { status, .. }, None)
                    if verdict(*status) == Verdict::Path && !rail.has_moved_long() =>
                {
                    self.long_lost(Doubt::Likely);
                }
                (CloseCause::Stalled(_), None) if !rail.has_moved_long() => {
                    self.long_lost(Doubt::Likely);
                }
                (CloseCause::Failed { status, .. }, _)
                    if verdict(*status) == Verdict::Request(RequestFault::Length)
                        && !rail.has_moved_long() =>
                {
                    self.disagreed();
                }
                _ => {}
            }
        }
    }

    /// The peer, which does not say its MTU, has sent what our queue pairs could not take, and has
    /// closed them then. Other MTUs look like that, of which one end sees nothing else; so do keys
    /// that are wrong, and hence it is tried one way and the other.
    pub(super) fn were_in_error(&self) {
        let by_peer = [
            CloseCause::PeerClosed,
            CloseCause::PeerRebuilt,
            CloseCause::Event(AsyncEventKind::QpReqErr),
        ];
        let cause = self.machine.close_cause();
        if !cause.is_some_and(|cause| by_peer.contains(cause)) {
            return;
        }
        self.disagreed();
    }

    /// The ends' MTUs differ. A peer that does not say its own has the long one or the short one.
    pub(super) fn disagreed(&self) {
        let mtu = self.local.as_ref().and_then(|local| local.path_mtu);
        if mtu.is_some_and(|mtu| mtu > MTU_SAFE) {
            self.long_lost(Doubt::Sure);
        } else if !self.paths().long_again(&self.way()) {
            self.warn_of_mtus();
        }
    }

    /// Its connection did not pass a probe.
    pub(super) fn unproved(&self, probe: ProbeKind) {
        match probe {
            ProbeKind::FullMtuRead => self.long_lost(Doubt::Sure),
            ProbeKind::ZeroLengthRead => {
                if let Some(gid) = self.own_gid() {
                    let now = self.connector.shared.clock.now();
                    self.paths().silent(now, &self.way(), gid);
                }
            }
        }
    }

    /// Where our packets are short because our interface is, and the peer does not say how long its
    /// own are, only its operator can help.
    pub(super) fn warn_of_mtus(&self) {
        let mtu = self.local.as_ref().and_then(|local| local.path_mtu);
        if self.machine.is_mtu_unsaid() && mtu.is_some_and(|mtu| mtu <= MTU_SAFE) {
            tracing::warn!(
                nic = self.nic.name(), peer = %self.peer_path, mtu = mtu.map(|mtu| mtu.bytes()),
                "the peer seems to use a longer path MTU than our interface has, and does not \
                 negotiate it: give both interfaces the same MTU, or set MC_MTU at the peer"
            );
        }
    }

    /// Long packets do not get through, or seem not to.
    pub(super) fn long_lost(&self, doubt: Doubt) {
        let now = self.connector.shared.clock.now();
        let mtu = self.local.as_ref().and_then(|local| local.path_mtu);
        let is_long = mtu.is_some_and(|mtu| mtu > MTU_SAFE);
        if is_long && self.paths().long_lost(now, &self.way(), doubt) {
            tracing::warn!(
                nic = self.nic.name(), peer = %self.peer_path, mtu = MTU_SAFE.bytes(),
                "long packets do not get through: new connections use a shorter path MTU for a while"
            );
        }
    }
}

/// Whether an endpoint ended in a way that does not say what became of a probe that was under way.
fn ends_unsaid(cause: &CloseCause) -> bool {
    match cause {
        CloseCause::Event(_) | CloseCause::PeerClosed | CloseCause::PeerRebuilt => true,
        CloseCause::Failed { status, .. } => verdict(*status) == Verdict::Flushed,
        _ => false,
    }
}
