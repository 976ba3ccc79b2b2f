//! Reliable connected queue pairs: transitions and posting.

use std::mem::MaybeUninit;
use std::os::raw::c_int;
use std::ptr::{self, NonNull};

use super::ffi::{self, ibv_qp_attr_mask as mask, ibv_qp_state as state};
use crate::error::{BackendResult, Errno, PostRefusal};
use crate::types::SGE_MAX;
use crate::{
    Gid, InitAttr, Mtu, PathAttr, QpAttr, QpCapacity, QpState, RdmaOpcode, RtrAttr, RtsAttr, Sge,
    WorkRequest,
};

/// Work requests chained for one call of the provider.
const CHUNK: usize = 16;

/// `struct ibv_qp`, with the provider's operation at hand.
#[derive(Debug)]
pub(crate) struct QueuePair {
    raw: NonNull<ffi::ibv_qp>,
    post: ffi::PostSend,
    capacity: QpCapacity,
}

// SAFETY: libibverbs allows every function on a queue pair from any thread; providers lock the
// send queue. (Not so with `MLX5_SINGLE_THREADED=1` in the environment, by which whoever starts
// the process promises that it uses one thread.)
unsafe impl Send for QueuePair {}
// SAFETY: as for `Send`.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    pub(super) fn create(
        pd: NonNull<ffi::ibv_pd>,
        send_cq: NonNull<ffi::ibv_cq>,
        recv_cq: NonNull<ffi::ibv_cq>,
        capacity: QpCapacity,
    ) -> BackendResult<Self> {
        // Every field that is not used must be zero (rust-ibverbs pull request 24).
        //
        // SAFETY: all zero is a value of every field.
        let mut init: ffi::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        init.send_cq = send_cq.as_ptr();
        init.recv_cq = recv_cq.as_ptr();
        init.cap = ffi::ibv_qp_cap {
            max_send_wr: capacity.send_wr_max,
            max_recv_wr: capacity.recv_wr_max,
            max_send_sge: capacity.send_sge_max,
            max_recv_sge: capacity.recv_sge_max,
            max_inline_data: capacity.inline_bytes_max,
        };
        init.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
        ffi::clear_errno();
        // SAFETY: domain and queues are alive and of one context, which the safe layer checked;
        // it keeps them until the pair is destroyed.
        let raw = unsafe { ffi::ibv_create_qp(pd.as_ptr(), &raw mut init) };
        let raw = NonNull::new(raw).ok_or_else(ffi::last_errno)?;
        // SAFETY: a live pair points to its context, whose operations are set once and for all.
        let Some(post) = (unsafe { (*(*raw.as_ptr()).context).ops.post_send }) else {
            // SAFETY: the pair is alive and nobody has seen it.
            let _ = unsafe { ffi::ibv_destroy_qp(raw.as_ptr()) };
            return Err(Errno(libc::EOPNOTSUPP));
        };
        // The provider writes back what it granted.
        let capacity = from_raw_capacity(&init.cap);
        Ok(Self {
            raw,
            post,
            capacity,
        })
    }

    pub(crate) fn event_key(&self) -> u64 {
        self.raw.as_ptr() as u64
    }

    pub(crate) fn qp_num(&self) -> u32 {
        // SAFETY: the pair is alive, and its number never written after it was made.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    pub(crate) fn capacity(&self) -> QpCapacity {
        self.capacity
    }

    pub(crate) fn to_init(&self, init: &InitAttr) -> BackendResult<()> {
        let mut attr = zeroed_attr(state::IBV_QPS_INIT);
        attr.port_num = narrow(init.port)?;
        attr.pkey_index = init.pkey_index;
        attr.qp_access_flags = init.access.bits();
        self.modify(
            attr,
            mask::IBV_QP_STATE
                | mask::IBV_QP_PKEY_INDEX
                | mask::IBV_QP_PORT
                | mask::IBV_QP_ACCESS_FLAGS,
        )
    }

    pub(crate) fn to_rtr(&self, rtr: &RtrAttr) -> BackendResult<()> {
        let mut attr = zeroed_attr(state::IBV_QPS_RTR);
        attr.path_mtu = rtr.path_mtu.to_raw();
        attr.dest_qp_num = rtr.dest_qp_num;
        attr.rq_psn = rtr.rq_psn;
        attr.max_dest_rd_atomic = rtr.max_dest_rd_atomic;
        attr.min_rnr_timer = rtr.min_rnr_timer;
        attr.ah_attr = address(&rtr.path)?;
        self.modify(
            attr,
            mask::IBV_QP_STATE
                | mask::IBV_QP_AV
                | mask::IBV_QP_PATH_MTU
                | mask::IBV_QP_DEST_QPN
                | mask::IBV_QP_RQ_PSN
                | mask::IBV_QP_MAX_DEST_RD_ATOMIC
                | mask::IBV_QP_MIN_RNR_TIMER,
        )
    }

    pub(crate) fn to_rts(&self, rts: &RtsAttr) -> BackendResult<()> {
        let mut attr = zeroed_attr(state::IBV_QPS_RTS);
        attr.timeout = rts.timeout;
        attr.retry_cnt = rts.retry_cnt;
        attr.rnr_retry = rts.rnr_retry;
        attr.sq_psn = rts.sq_psn;
        attr.max_rd_atomic = rts.max_rd_atomic;
        self.modify(
            attr,
            mask::IBV_QP_STATE
                | mask::IBV_QP_TIMEOUT
                | mask::IBV_QP_RETRY_CNT
                | mask::IBV_QP_RNR_RETRY
                | mask::IBV_QP_SQ_PSN
                | mask::IBV_QP_MAX_QP_RD_ATOMIC,
        )
    }

    pub(crate) fn to_error(&self) -> BackendResult<()> {
        self.modify(zeroed_attr(state::IBV_QPS_ERR), mask::IBV_QP_STATE)
    }

    pub(crate) fn to_reset(&self) -> BackendResult<()> {
        self.modify(zeroed_attr(state::IBV_QPS_RESET), mask::IBV_QP_STATE)
    }

    fn modify(&self, mut attr: ffi::ibv_qp_attr, fields: mask) -> BackendResult<()> {
        // SAFETY: the pair is alive; `attr` is wholly initialised and only read.
        ffi::check(unsafe {
            ffi::ibv_modify_qp(self.raw.as_ptr(), &raw mut attr, fields.0 as c_int)
        })
    }

    pub(crate) fn query(&self) -> BackendResult<QpAttr> {
        let fields = mask::IBV_QP_STATE
            | mask::IBV_QP_PORT
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_MAX_QP_RD_ATOMIC
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_CAP;
        // SAFETY: all zero is a value of every field of both.
        let (mut attr, mut init): (ffi::ibv_qp_attr, ffi::ibv_qp_init_attr) =
            unsafe { std::mem::zeroed() };
        // SAFETY: the pair is alive, and both are places for the answer.
        ffi::check(unsafe {
            ffi::ibv_query_qp(
                self.raw.as_ptr(),
                &raw mut attr,
                fields.0 as c_int,
                &raw mut init,
            )
        })?;
        Ok(QpAttr {
            state: QpState::from_raw(attr.qp_state),
            port: u32::from(attr.port_num),
            path_mtu: Mtu::from_raw(attr.path_mtu),
            dest_qp_num: attr.dest_qp_num,
            rq_psn: attr.rq_psn,
            sq_psn: attr.sq_psn,
            // SAFETY: every bit pattern is a value of the raw member.
            dgid: Gid(unsafe { attr.ah_attr.grh.dgid.raw }),
            sgid_index: u32::from(attr.ah_attr.grh.sgid_index),
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            max_rd_atomic: attr.max_rd_atomic,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
            capacity: from_raw_capacity(&attr.cap),
        })
    }

    pub(crate) fn post(&self, requests: &[WorkRequest]) -> Result<(), PostRefusal> {
        let mut posted = 0;
        for chunk in requests.chunks(CHUNK) {
            self.post_chunk(chunk).map_err(|refusal| PostRefusal {
                posted: posted + refusal.posted,
                ..refusal
            })?;
            posted += chunk.len();
        }
        Ok(())
    }

    /// Chains at most [`CHUNK`] requests on the stack and posts them.
    fn post_chunk(&self, requests: &[WorkRequest]) -> Result<(), PostRefusal> {
        let mut pieces = [const { MaybeUninit::<ffi::ibv_sge>::uninit() }; CHUNK * SGE_MAX];
        let mut chain = [const { MaybeUninit::<ffi::ibv_send_wr>::uninit() }; CHUNK];
        let head: *mut ffi::ibv_send_wr = chain.as_mut_ptr().cast();
        let first_piece: *mut ffi::ibv_sge = pieces.as_mut_ptr().cast();
        for (index, request) in requests.iter().enumerate() {
            let sge_list = first_piece.wrapping_add(index * SGE_MAX);
            for (place, sge) in request.sges().iter().enumerate() {
                // SAFETY: a request has at most `SGE_MAX` pieces, and there are at most `CHUNK`
                // requests, so the place lies inside `pieces`, to which nothing else refers.
                unsafe { sge_list.add(place).write(scatter_gather(sge)) };
            }
            let next = if index + 1 < requests.len() {
                head.wrapping_add(index + 1)
            } else {
                ptr::null_mut()
            };
            // SAFETY: `index` is less than `CHUNK`; nothing else refers to `chain`.
            unsafe { head.add(index).write(work_request(request, sge_list, next)) };
        }
        let mut bad: *mut ffi::ibv_send_wr = ptr::null_mut();
        // SAFETY: the pair is alive. The chain is initialised up to its last link, whose `next` is
        // null, and points to pieces that outlive the call; the provider copies both. What the
        // work does to memory is the device's to check: see `work_request.rs`.
        let rc = unsafe { (self.post)(self.raw.as_ptr(), head, &raw mut bad) };
        ffi::check(rc).map_err(|errno| refusal(head, requests.len(), bad, errno))
    }

    pub(crate) fn destroy(self) -> BackendResult<()> {
        // SAFETY: the pair is alive and destroyed once. Events about it are acknowledged, or will
        // be at once, by `next_event`.
        ffi::check(unsafe { ffi::ibv_destroy_qp(self.raw.as_ptr()) })
    }
}

/// What a provider's error says about the `count` requests chained from `head`.
///
/// The request at `bad` was refused and those before it were taken. A `bad` that is none of them
/// says nothing: then all are in doubt.
fn refusal(
    head: *const ffi::ibv_send_wr,
    count: usize,
    bad: *const ffi::ibv_send_wr,
    errno: Errno,
) -> PostRefusal {
    let refused = (0..count).find(|index| ptr::eq(head.wrapping_add(*index), bad));
    match refused {
        Some(posted) => PostRefusal {
            posted,
            in_doubt: 0,
            errno,
        },
        None => PostRefusal {
            posted: 0,
            in_doubt: count,
            errno,
        },
    }
}

fn scatter_gather(sge: &Sge) -> ffi::ibv_sge {
    ffi::ibv_sge {
        addr: sge.addr,
        length: sge.length,
        lkey: sge.lkey,
    }
}

fn work_request(
    request: &WorkRequest,
    sges: *mut ffi::ibv_sge,
    next: *mut ffi::ibv_send_wr,
) -> ffi::ibv_send_wr {
    // SAFETY: all zero is a value of every field.
    let mut raw: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
    raw.wr_id = request.wr_id;
    raw.next = next;
    raw.sg_list = sges;
    raw.num_sge = request.sges().len() as c_int;
    raw.opcode = match request.opcode {
        RdmaOpcode::Write => ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        RdmaOpcode::Read => ffi::ibv_wr_opcode::IBV_WR_RDMA_READ,
    };
    if request.signaled {
        raw.send_flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    if request.fence {
        raw.send_flags |= ffi::ibv_send_flags::IBV_SEND_FENCE.0;
    }
    raw.wr = ffi::wr_t {
        rdma: ffi::rdma_t {
            remote_addr: request.remote.addr,
            rkey: request.remote.rkey,
        },
    };
    raw
}

/// Attributes for a transition to `state`, every other field zero.
fn zeroed_attr(state: state::Type) -> ffi::ibv_qp_attr {
    // SAFETY: all zero is a value of every field.
    let mut attr: ffi::ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = state;
    attr
}

fn address(path: &PathAttr) -> BackendResult<ffi::ibv_ah_attr> {
    Ok(ffi::ibv_ah_attr {
        grh: ffi::ibv_global_route {
            dgid: ffi::ibv_gid { raw: path.dgid.0 },
            flow_label: path.flow_label,
            sgid_index: narrow(path.sgid_index)?,
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
        },
        dlid: path.dlid,
        sl: path.service_level,
        src_path_bits: 0,
        static_rate: 0,
        // RoCE always has a global route; within an InfiniBand subnet it is optional but allowed.
        is_global: 1,
        port_num: narrow(path.port)?,
    })
}

/// A value that the C struct keeps in 8 bits.
fn narrow(value: u32) -> BackendResult<u8> {
    u8::try_from(value).map_err(|_| Errno(libc::EINVAL))
}

fn from_raw_capacity(cap: &ffi::ibv_qp_cap) -> QpCapacity {
    QpCapacity {
        send_wr_max: cap.max_send_wr,
        recv_wr_max: cap.max_recv_wr,
        send_sge_max: cap.max_send_sge,
        recv_sge_max: cap.max_recv_sge,
        inline_bytes_max: cap.max_inline_data,
    }
}

#[cfg(test)]
mod tests;
