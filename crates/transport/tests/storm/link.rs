//! Messages between nodes, and the queue pairs at both ends of a connection.

use std::collections::BTreeMap;

use rerail_metadata::descriptor::InstanceId;
use rerail_transport::machine::ids::{EndpointId, LocalNic, RailId, TransferId};
use rerail_transport::machine::peers;
use rerail_transport::machine::publisher::{self, SubscriberId};
use rerail_verbs::{
    AccessFlags, Gid, InitAttr, Mtu, PathAttr, QpCapacity, QpInit, QueuePair, RdmaOpcode, RtrAttr,
    RtsAttr, VerbsError,
};

use super::ledger::Life;
use super::node::Open;

/// Depth of every send queue.
pub(crate) const DEPTH: usize = 16;

/// What goes over the wire that is not RDMA. Messages to a process that is gone are answered by
/// its host, which knows only that nobody is there.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    Connect(Hello),
    Accept {
        endpoint: EndpointId,
        end: End,
    },
    Refuse {
        endpoint: EndpointId,
        reason: String,
    },
    /// The active end is in ERR: bring yours there.
    Close {
        endpoint: EndpointId,
    },
    /// The passive end is in ERR.
    Closed {
        endpoint: EndpointId,
    },
    /// The passive end went to ERR by itself.
    Gone {
        endpoint: EndpointId,
    },
    ToPublisher(publisher::Input),
    ToPeers(peers::Input),
}

/// A request for a connection.
#[derive(Clone, Debug)]
pub(crate) struct Hello {
    pub(crate) endpoint: EndpointId,
    /// The NIC that is asked.
    pub(crate) nic: u32,
    /// The NIC that asks.
    pub(crate) own: LocalNic,
    pub(crate) believed: InstanceId,
    pub(crate) subscriber: SubscriberId,
    pub(crate) end: End,
}

/// What one end tells the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) qp_num: u32,
    pub(crate) gid: Gid,
    pub(crate) psn: u32,
    pub(crate) mtu: Mtu,
}

/// Work that was posted and has not completed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    Probe {
        rail: RailId,
        probe: u64,
    },
    Slice {
        transfer: TransferId,
        slice: usize,
        bytes: u32,
        opcode: RdmaOpcode,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Connecting,
    Ready,
    /// Nothing is posted any more.
    Closing,
}

/// The end of the node that asked for the connection: only this end posts.
pub(crate) struct Endpoint {
    pub(crate) rail: RailId,
    pub(crate) to: Life,
    pub(crate) pair: Option<QueuePair>,
    pub(crate) state: State,
    pub(crate) gid: Gid,
    pub(crate) psn: u32,
    pub(crate) mtu: Mtu,
    pub(crate) outstanding: BTreeMap<u64, Work>,
    pub(crate) in_error: bool,
    pub(crate) destroying: bool,
}

impl Endpoint {
    pub(crate) fn queued_bytes(&self) -> u64 {
        let bytes = self.outstanding.values().map(|work| match work {
            Work::Probe { .. } => 0,
            Work::Slice { bytes, .. } => u64::from(*bytes),
        });
        bytes.sum()
    }
}

/// The end that answered.
pub(crate) struct Passive {
    pub(crate) local: LocalNic,
    /// The NIC at the other end.
    pub(crate) far: LocalNic,
    pub(crate) pair: QueuePair,
}

pub(crate) fn create(open: &Open) -> Result<QueuePair, VerbsError> {
    let pair = open.pd.create_qp(QpInit {
        send_cq: &open.queue,
        recv_cq: &open.queue,
        capacity: QpCapacity {
            send_wr_max: DEPTH as u32,
            recv_wr_max: 1,
            send_sge_max: 1,
            recv_sge_max: 1,
            inline_bytes_max: 0,
        },
    })?;
    pair.to_init(&InitAttr {
        port: 1,
        pkey_index: 0,
        access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ,
    })?;
    Ok(pair)
}

/// Brings a pair to RTS towards `far`, from the row `sgid_index`.
pub(crate) fn join(
    pair: &QueuePair,
    sgid_index: u32,
    psn: u32,
    mtu: Mtu,
    far: End,
) -> Result<(), VerbsError> {
    pair.to_rtr(&RtrAttr {
        path_mtu: mtu.min(far.mtu),
        dest_qp_num: far.qp_num,
        rq_psn: far.psn,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 12,
        path: PathAttr {
            port: 1,
            dgid: far.gid,
            dlid: 0,
            sgid_index,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            service_level: 0,
        },
    })?;
    // 67 ms, so that six retries end within half a second.
    pair.to_rts(&RtsAttr {
        timeout: 14,
        retry_cnt: 6,
        rnr_retry: 7,
        sq_psn: psn,
        max_rd_atomic: 4,
    })
}
