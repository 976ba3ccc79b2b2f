//! Attributes of devices, queue pairs and their transitions.

use super::{Gid, Mtu};

bitflags::bitflags! {
    /// What may be done to a memory region or through a queue pair (`enum ibv_access_flags`).
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct AccessFlags: u32 {
        /// The device may write locally (`IBV_ACCESS_LOCAL_WRITE`).
        const LOCAL_WRITE = 1;
        /// A peer may write (`IBV_ACCESS_REMOTE_WRITE`).
        const REMOTE_WRITE = 1 << 1;
        /// A peer may read (`IBV_ACCESS_REMOTE_READ`).
        const REMOTE_READ = 1 << 2;
        /// A peer may do atomics (`IBV_ACCESS_REMOTE_ATOMIC`).
        const REMOTE_ATOMIC = 1 << 3;
        /// PCIe writes may be reordered (`IBV_ACCESS_RELAXED_ORDERING`).
        const RELAXED_ORDERING = 1 << 20;
    }
}

/// Limits of a device (`struct ibv_device_attr`), as far as they are used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceAttr {
    /// Firmware version.
    pub fw_ver: String,
    /// Node GUID in host byte order.
    pub node_guid: u64,
    /// PCI vendor of the device.
    pub vendor_id: u32,
    /// The vendor's part number.
    pub vendor_part_id: u32,
    /// Longest memory region in bytes.
    pub max_mr_bytes: u64,
    /// Most queue pairs.
    pub max_qp: u32,
    /// Most work requests in one queue.
    pub max_qp_wr: u32,
    /// Most scatter/gather elements in a work request.
    pub max_sge: u32,
    /// Most completion queues.
    pub max_cq: u32,
    /// Most entries of a completion queue.
    pub max_cqe: u32,
    /// Most memory regions.
    pub max_mr: u32,
    /// Most protection domains.
    pub max_pd: u32,
    /// Most incoming reads and atomics in flight for one queue pair.
    pub max_qp_rd_atom: u32,
    /// Most outgoing reads and atomics in flight for one queue pair.
    pub max_qp_init_rd_atom: u32,
    /// Incoming reads and atomics that the whole device can hold.
    pub max_res_rd_atom: u32,
    /// Number of physical ports, numbered from 1.
    pub phys_port_cnt: u32,
}

/// Sizes of a queue pair's queues (`struct ibv_qp_cap`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpCapacity {
    /// Work requests that the send queue holds.
    pub send_wr_max: u32,
    /// Work requests that the receive queue holds.
    pub recv_wr_max: u32,
    /// Scatter/gather elements of a send work request.
    pub send_sge_max: u32,
    /// Scatter/gather elements of a receive work request.
    pub recv_sge_max: u32,
    /// Bytes that can be sent inline.
    pub inline_bytes_max: u32,
}

/// State of a queue pair (`enum ibv_qp_state`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum QpState {
    /// Created; nothing can be posted.
    Reset,
    /// Receives can be posted.
    Init,
    /// Ready to receive: the peer is known.
    ReadyToReceive,
    /// Ready to send.
    ReadyToSend,
    /// The send queue is draining.
    SendQueueDrain,
    /// The send queue failed; unreliable transports only.
    SendQueueError,
    /// All work is flushed.
    Error,
    /// A number that is not known.
    Other(u32),
}

impl QpState {
    /// From `ibv_qp_attr.qp_state`.
    pub fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::Reset,
            1 => Self::Init,
            2 => Self::ReadyToReceive,
            3 => Self::ReadyToSend,
            4 => Self::SendQueueDrain,
            5 => Self::SendQueueError,
            6 => Self::Error,
            other => Self::Other(other),
        }
    }
}

/// RESET → INIT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InitAttr {
    /// Local port, from 1.
    pub port: u32,
    /// Index in the port's P_Key table.
    pub pkey_index: u16,
    /// What the peer may do.
    pub access: AccessFlags,
}

/// The way to the peer (`struct ibv_ah_attr`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathAttr {
    /// Local port, from 1.
    pub port: u32,
    /// The peer's GID.
    pub dgid: Gid,
    /// The peer's LID; 0 on Ethernet.
    pub dlid: u16,
    /// Index of the own GID.
    pub sgid_index: u32,
    /// Hops that a packet may take.
    pub hop_limit: u8,
    /// IP traffic class (DSCP and ECN bits).
    pub traffic_class: u8,
    /// IPv6 flow label; 0 lets the device choose.
    pub flow_label: u32,
    /// InfiniBand service level.
    pub service_level: u8,
}

/// INIT → RTR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RtrAttr {
    /// Payload of a packet. Both ends must agree.
    pub path_mtu: Mtu,
    /// The peer's queue pair number, 24 bits.
    pub dest_qp_num: u32,
    /// First packet number expected from the peer, 24 bits; the peer's `sq_psn`.
    pub rq_psn: u32,
    /// Reads and atomics of the peer that can be served at once.
    pub max_dest_rd_atomic: u8,
    /// Verbs code of the wait that a peer is told when no receive is posted.
    pub min_rnr_timer: u8,
    /// The way to the peer.
    pub path: PathAttr,
}

/// RTR → RTS.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RtsAttr {
    /// Acknowledgement timeout: 4.096 µs × 2^`timeout`, 0 for none; 0..=31.
    pub timeout: u8,
    /// Retransmissions before `RETRY_EXC_ERR`, 0..=7. soft-RoCE takes 7 as "for ever".
    pub retry_cnt: u8,
    /// Retries on receiver-not-ready, 0..=7; 7 means for ever by specification.
    pub rnr_retry: u8,
    /// First packet number sent, 24 bits.
    pub sq_psn: u32,
    /// Own reads and atomics in flight at most.
    pub max_rd_atomic: u8,
}

/// What a device knows of a queue pair (`struct ibv_qp_attr`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpAttr {
    /// State.
    pub state: QpState,
    /// Local port; 0 before INIT.
    pub port: u32,
    /// Path MTU; `None` before RTR, or for a code that is not known.
    pub path_mtu: Option<Mtu>,
    /// Number of the peer's queue pair; meaningless before RTR.
    pub dest_qp_num: u32,
    /// Packet number expected from the peer.
    pub rq_psn: u32,
    /// Packet number to be sent next.
    pub sq_psn: u32,
    /// The peer's GID; meaningless before RTR.
    pub dgid: Gid,
    /// Index of the own GID; meaningless before RTR.
    pub sgid_index: u32,
    /// Code of the acknowledgement timeout.
    pub timeout: u8,
    /// Retransmissions before an error.
    pub retry_cnt: u8,
    /// Retries on receiver-not-ready.
    pub rnr_retry: u8,
    /// Own reads and atomics in flight at most.
    pub max_rd_atomic: u8,
    /// Reads and atomics of the peer served at once.
    pub max_dest_rd_atomic: u8,
    /// Sizes of the queues.
    pub capacity: QpCapacity,
}
