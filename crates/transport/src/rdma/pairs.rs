//! Making and connecting queue pairs: every attribute of their transitions (reference 6.4).
//!
//! These call verbs on the thread that they run on, which is the NIC's control thread.

use std::sync::Arc;
use std::time::Duration;

use rerail_topology::gid::{PortTable, rank};
use rerail_verbs::{
    AccessFlags, ControlThread, Gid, InitAttr, Mtu, PathAttr, QpCapacity, QpInit, QueuePair,
    RtrAttr, RtsAttr, VerbsError,
};
use rustix::io::Errno;

use super::config::RdmaConfig;
use super::endpoint::{LocalEnds, PeerEnds, UNREACHABLE};
use super::nic::{Nic, PortFacts};
use super::opening::Opening;
use super::paths::{self, Advice, Row};
use super::watch::read_port;
use crate::TransportError;

/// Reads in flight on a queue pair. C++ peers ask for 16 without looking at the device.
const RD_ATOMIC: u32 = 16;

/// Verbs code of 0.64 ms: how long a peer waits when no receive is posted. None ever is.
const MIN_RNR_TIMER: u8 = 12;

/// How long RTR may rightly take: while the kernel resolves a neighbour that does not answer it
/// takes a second, and a busy host adds to that.
const RESOLVE_LIMIT: Duration = Duration::from_secs(2);

/// With these RTR is refused for an address that has gone, or that the peer's cannot be reached
/// from.
const UNREACHABLE_ERRNOS: [Errno; 6] = [
    Errno::INVAL,
    Errno::NODATA,
    Errno::NODEV,
    Errno::NETUNREACH,
    Errno::HOSTUNREACH,
    Errno::TIMEDOUT,
];

/// Queue pairs in INIT, and what they may be connected with.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) pairs: Vec<QueuePair>,
    /// With the best of `rows`.
    pub(super) local: LocalEnds,
    /// Own rows to try, best first.
    pub(super) rows: Vec<Row>,
}

/// What became of [`raise`].
#[derive(Debug)]
pub(super) struct Raised {
    /// Own GIDs that do not reach the peer's.
    pub(super) refused: Vec<Gid>,
    /// The own GID that is connected, or why none is.
    pub(super) outcome: Result<Gid, String>,
}

/// Makes the queue pairs of an endpoint and moves them to INIT.
pub(super) fn prepare(
    nic: &Nic,
    opening: &Opening,
    config: &RdmaConfig,
    advice: &Advice,
    psn: u32,
) -> Result<Prepared, TransportError> {
    let capacity = QpCapacity {
        send_wr_max: config.send_wr_max.min(nic.attr().max_qp_wr),
        // Nothing is ever received, but some drivers refuse a queue of no entries.
        recv_wr_max: 1,
        send_sge_max: 1,
        recv_sge_max: 1,
        inline_bytes_max: 0,
    };
    let init = InitAttr {
        port: nic.port(),
        pkey_index: config.pkey_index,
        access: AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_ATOMIC,
    };
    let facts = facts(nic)?;
    let (rows, active_mtu) = own_rows(nic, opening, config, &facts, advice)?;
    let bounds = [active_mtu, Some(config.mtu_max), advice.mtu_max];
    let path_mtu = bounds.into_iter().flatten().fold(facts.mtu, Ord::min);
    let mut pairs = Vec::new();
    for _ in 0..config.qp_per_endpoint {
        let pair = opening.pd().create_qp(QpInit {
            send_cq: opening.cq(),
            recv_cq: opening.cq(),
            capacity,
        })?;
        pair.to_init(&init)?;
        pairs.push(pair);
    }
    let local = LocalEnds {
        gid: rows.first().map(|row| row.gid),
        lid: facts.lid,
        qp_nums: pairs.iter().map(QueuePair::qp_num).collect(),
        psn,
        path_mtu: Some(path_mtu),
        rd_atomic: RD_ATOMIC.min(nic.attr().max_qp_rd_atom) as u8,
    };
    Ok(Prepared { pairs, local, rows })
}

/// Own rows to connect with, and the MTU in force: both read anew, since a row moves, and an MTU
/// changes, without waiting for the observer.
fn own_rows(
    nic: &Nic,
    opening: &Opening,
    config: &RdmaConfig,
    facts: &PortFacts,
    advice: &Advice,
) -> Result<(Vec<Row>, Option<Mtu>), TransportError> {
    let reading = read_port(opening.context(), nic.port(), config.pkey_index)?;
    let table = PortTable {
        device: nic.device(),
        port: nic.port(),
        link_layer: reading.attr.link_layer,
        table_len: Some(reading.attr.gid_tbl_len),
        entries: &reading.gids,
        unreadable: &reading.unreadable,
        netdevs: &reading.netdevs,
    };
    let ranking = rank(&table, &config.gids);
    let rows = paths::rows(&table, &ranking, facts.gid.gid, advice);
    if rows.is_empty() {
        return Err(TransportError::Port {
            device: nic.device().to_owned(),
            port: nic.port(),
            reason: format!("its GID {} is not in its table any more", facts.gid.gid),
        });
    }
    Ok((rows, reading.attr.active_mtu))
}

/// Moves the queue pairs to RTS, each towards the peer's at its position, with the first of `rows`
/// with which that is possible. Rows are tried while the device says at once that they do not do.
pub(super) fn raise(
    pairs: &[QueuePair],
    nic: &Nic,
    control: &ControlThread,
    config: &RdmaConfig,
    (local, rows): (&LocalEnds, &[Row]),
    peer: &PeerEnds,
) -> Raised {
    let mut refused = Vec::new();
    let mut last = None;
    for row in rows {
        match raise_with(pairs, nic, control, config, (local, *row), peer) {
            Ok(()) => {
                let outcome = Ok(row.gid);
                return Raised { refused, outcome };
            }
            Err((error, is_untouched)) => {
                if !is_unreachable(&error) {
                    let outcome = Err(error.to_string());
                    return Raised { refused, outcome };
                }
                tracing::debug!(
                    nic = nic.name(), own = %row.gid, peer = %peer.gid, %error, "no way"
                );
                refused.push(row.gid);
                let took_long = errno(&error) == Some(Errno::TIMEDOUT);
                last = Some((row.gid, error));
                // A neighbour that does not answer has held the control thread for a second, in
                // which nobody else's queue pairs go to ERR. The next handshake tries the next row.
                if !is_untouched || took_long {
                    break;
                }
            }
        }
    }
    let reason = match last {
        Some((own, error)) => format!(
            "{UNREACHABLE}: {own} of {} and {}: {error}",
            nic.name(),
            peer.gid
        ),
        None => format!("{UNREACHABLE}: {} has none", nic.name()),
    };
    let outcome = Err(reason);
    Raised { refused, outcome }
}

/// Moves the queue pairs to RTS with one row. With an error, whether all of them are in INIT still.
fn raise_with(
    pairs: &[QueuePair],
    nic: &Nic,
    control: &ControlThread,
    config: &RdmaConfig,
    (local, row): (&LocalEnds, Row),
    peer: &PeerEnds,
) -> Result<(), (VerbsError, bool)> {
    // A peer that does not say its MTU gets our own: both ends have to agree (report H09).
    let own_mtu = local.path_mtu.unwrap_or(paths::MTU_SAFE);
    let path_mtu = peer.path_mtu.map_or(own_mtu, |mtu| mtu.min(own_mtu));
    let count = u32::try_from(pairs.len()).unwrap_or(u32::MAX);
    // Both ends begin at 0 towards a peer that does not say where it begins: it expects just that.
    let (rq_psn, sq_psn) = peer.psn.map_or((0, 0), |psn| (psn, local.psn));
    let served_by_peer = u32::from(peer.rd_atomic.unwrap_or(RD_ATOMIC as u8));
    control.allow(control.stuck_for().unwrap_or_default() + RESOLVE_LIMIT.saturating_mul(count));
    for (position, (pair, dest_qp_num)) in pairs.iter().zip(&peer.qp_nums).enumerate() {
        pair.to_rtr(&RtrAttr {
            path_mtu,
            dest_qp_num: *dest_qp_num,
            rq_psn,
            max_dest_rd_atomic: local.rd_atomic,
            min_rnr_timer: MIN_RNR_TIMER,
            path: PathAttr {
                port: nic.port(),
                dgid: peer.gid,
                dlid: peer.lid,
                sgid_index: row.index,
                hop_limit: config.hop_limit,
                traffic_class: config.traffic_class,
                flow_label: 0,
                service_level: config.service_level,
            },
        })
        .map_err(|error| (error, position == 0))?;
        pair.to_rts(&RtsAttr {
            timeout: config.timeout,
            retry_cnt: config.retry_cnt,
            rnr_retry: 7,
            sq_psn,
            max_rd_atomic: served_by_peer.min(nic.attr().max_qp_init_rd_atom) as u8,
        })
        .map_err(|error| (error, false))?;
    }
    Ok(())
}

/// Whether RTR failed for the addresses: others may do.
fn is_unreachable(error: &VerbsError) -> bool {
    let is_rtr = matches!(error, VerbsError::Verb { verb, .. } if verb.contains("RTR"));
    is_rtr && errno(error).is_some_and(|errno| UNREACHABLE_ERRNOS.contains(&errno))
}

fn errno(error: &VerbsError) -> Option<Errno> {
    match error {
        VerbsError::Verb { errno, .. } => Some(Errno::from_raw_os_error(*errno)),
        _ => None,
    }
}

fn facts(nic: &Nic) -> Result<Arc<PortFacts>, TransportError> {
    nic.facts().ok_or_else(|| TransportError::Port {
        device: nic.device().to_owned(),
        port: nic.port(),
        reason: "it has not been usable yet".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::rig::rig;
    use super::*;

    /// What becomes of connecting `host0` to `host1`, or to another GID, with these rows, and then
    /// with its own.
    fn raised(seed: u64, rows: &[Row], other: Option<Gid>) -> Raised {
        let rig = rig(seed, 1);
        let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
        let nic = &a.nics()[0];
        let opening = nic.opening().expect("open");
        let prepared = prepare(nic, &opening, a.config(), &Advice::default(), 7).expect("made");
        let peer = PeerEnds {
            gid: other.unwrap_or(b.nics()[0].facts().expect("usable").gid.gid),
            lid: 0,
            qp_nums: vec![1, 2],
            psn: Some(9),
            path_mtu: None,
            rd_atomic: None,
            instance: None,
            ready_ack: true,
        };
        let tried: Vec<_> = rows.iter().chain(&prepared.rows).copied().collect();
        let control = opening.context().control();
        let own = (&prepared.local, tried.as_slice());
        raise(&prepared.pairs, nic, control, a.config(), own, &peer)
    }

    #[test]
    fn a_row_that_cannot_be_connected_is_passed_over() {
        let gone = Row {
            index: 99,
            gid: Gid::from_ip([10, 0, 9, 9].into()),
        };
        let Raised { refused, outcome } = raised(30, &[gone], None);
        assert_eq!(refused, [gone.gid]);
        assert_eq!(outcome, Ok(Gid::from_ip([10, 0, 0, 1].into())));
        assert_eq!(raised(31, &[], None).refused, []);
    }

    #[test]
    fn a_peer_that_does_not_answer_costs_the_control_thread_one_row_and_not_each() {
        let own = Row {
            index: 1,
            gid: Gid::from_ip([10, 0, 0, 1].into()),
        };
        let nobody = Gid::from_ip([10, 0, 0, 77].into());
        let Raised { refused, outcome } = raised(33, &[own], Some(nobody));
        assert!(outcome.is_err());
        assert_eq!(refused, [own.gid]);
    }
}
