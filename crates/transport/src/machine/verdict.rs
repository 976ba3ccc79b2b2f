//! Whose fault a completion is. One table, used by rails (who is blamed) and transfers (what
//! becomes of the slice).

use rerail_verbs::WcStatus;

/// A fault of the request itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum RequestFault {
    /// The peer's key does not allow the access: stale, or wrong. Refresh the peer's record once.
    RemoteKey,
    /// A local key does not cover the local bytes.
    LocalKey,
    /// A length does not fit: a message beyond the device's limit, or ends that disagree on the
    /// path MTU.
    Length,
}

/// What a completion says.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Verdict {
    /// The work is done.
    Done,
    /// The queue pair was already broken: nobody is blamed, the work may be posted elsewhere.
    Flushed,
    /// This request is at fault. Its neighbours are flushed, and are posted again.
    Request(RequestFault),
    /// The local NIC is at fault, for example because its port is down.
    LocalNic,
    /// The peer is at fault.
    Peer,
    /// Something between the two NICs, or one of them: only many such errors tell which.
    Path,
}

/// The verdict on a completion's status. Statuses of unreliable transports, and numbers that are
/// not known, are taken for the path's: they cost a reconnection and blame nobody alone.
pub fn verdict(status: WcStatus) -> Verdict {
    match status {
        WcStatus::Success => Verdict::Done,
        WcStatus::WrFlushErr => Verdict::Flushed,
        WcStatus::RemAccessErr => Verdict::Request(RequestFault::RemoteKey),
        WcStatus::LocProtErr | WcStatus::LocAccessErr | WcStatus::MwBindErr => {
            Verdict::Request(RequestFault::LocalKey)
        }
        WcStatus::LocLenErr | WcStatus::RemInvReqErr => Verdict::Request(RequestFault::Length),
        WcStatus::LocQpOpErr | WcStatus::FatalErr => Verdict::LocalNic,
        WcStatus::RemOpErr | WcStatus::RemAbortErr | WcStatus::BadRespErr => Verdict::Peer,
        _ => Verdict::Path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x07_a_flush_blames_nobody_and_only_success_is_done() {
        for raw in 0..64 {
            let status = WcStatus::from_raw(raw);
            assert_eq!(verdict(status) == Verdict::Done, raw == 0, "{status}");
            assert_eq!(verdict(status) == Verdict::Flushed, raw == 5, "{status}");
        }
    }

    #[test]
    fn a_bad_key_is_its_own_requests_fault() {
        let remote = verdict(WcStatus::RemAccessErr);
        assert_eq!(remote, Verdict::Request(RequestFault::RemoteKey));
        let local = verdict(WcStatus::LocProtErr);
        assert_eq!(local, Verdict::Request(RequestFault::LocalKey));
    }
}
