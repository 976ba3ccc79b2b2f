//! Making and connecting queue pairs: every attribute of their transitions (reference 6.4).
//!
//! These call verbs on the thread that they run on, which is the NIC's control thread.

use std::sync::Arc;
use std::time::Duration;

use rerail_verbs::{
    AccessFlags, ControlThread, InitAttr, PathAttr, QpCapacity, QpInit, QueuePair, RtrAttr, RtsAttr,
};

use super::config::RdmaConfig;
use super::endpoint::{LocalEnds, PeerEnds};
use super::nic::{Nic, PortFacts};
use super::opening::Opening;
use crate::TransportError;

/// Reads in flight on a queue pair. C++ peers ask for 16 without looking at the device.
const RD_ATOMIC: u32 = 16;

/// Verbs code of 0.64 ms: how long a peer waits when no receive is posted. None ever is.
const MIN_RNR_TIMER: u8 = 12;

/// How long RTR may rightly take: while the kernel resolves a neighbour that does not answer it
/// takes a second, and a busy host adds to that.
const RESOLVE_LIMIT: Duration = Duration::from_secs(2);

/// Makes the queue pairs of an endpoint and moves them to INIT.
pub(super) fn prepare(
    nic: &Nic,
    opening: &Opening,
    config: &RdmaConfig,
    psn: u32,
) -> Result<(Vec<QueuePair>, LocalEnds), TransportError> {
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
    let facts = facts(nic)?;
    let ends = LocalEnds {
        gid: Some(facts.gid.gid),
        lid: facts.lid,
        qp_nums: pairs.iter().map(QueuePair::qp_num).collect(),
        psn,
        path_mtu: Some(facts.mtu),
        rd_atomic: RD_ATOMIC.min(nic.attr().max_qp_rd_atom) as u8,
    };
    Ok((pairs, ends))
}

/// Moves the queue pairs to RTS, each towards the peer's at its position.
pub(super) fn raise(
    pairs: &[QueuePair],
    nic: &Nic,
    control: &ControlThread,
    config: &RdmaConfig,
    local: &LocalEnds,
    peer: &PeerEnds,
) -> Result<(), TransportError> {
    let facts = facts(nic)?;
    // A peer that does not say its MTU gets our own: both ends have to agree (report H09).
    let path_mtu = peer.path_mtu.map_or(facts.mtu, |mtu| mtu.min(facts.mtu));
    let count = u32::try_from(pairs.len()).unwrap_or(u32::MAX);
    control.allow(RESOLVE_LIMIT.saturating_mul(count));
    // Both ends begin at 0 towards a peer that does not say where it begins: it expects just that.
    let (rq_psn, sq_psn) = peer.psn.map_or((0, 0), |psn| (psn, local.psn));
    let served_by_peer = u32::from(peer.rd_atomic.unwrap_or(RD_ATOMIC as u8));
    for (pair, dest_qp_num) in pairs.iter().zip(&peer.qp_nums) {
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
                sgid_index: facts.gid.index,
                hop_limit: config.hop_limit,
                traffic_class: config.traffic_class,
                flow_label: 0,
                service_level: config.service_level,
            },
        })?;
        pair.to_rts(&RtsAttr {
            timeout: config.timeout,
            retry_cnt: config.retry_cnt,
            rnr_retry: 7,
            sq_psn,
            max_rd_atomic: served_by_peer.min(nic.attr().max_qp_init_rd_atom) as u8,
        })?;
    }
    Ok(())
}

fn facts(nic: &Nic) -> Result<Arc<PortFacts>, TransportError> {
    nic.facts().ok_or_else(|| TransportError::Port {
        device: nic.device().to_owned(),
        port: nic.port(),
        reason: "it has not been usable yet".into(),
    })
}
