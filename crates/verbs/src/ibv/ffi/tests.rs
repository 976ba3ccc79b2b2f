//! The shims against a hand-made context, and layouts and numbers against the C headers.

use std::fmt::Write as _;
use std::mem::offset_of;
use std::os::raw::c_int;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_sys::{ibv_td, ibv_td_init_attr, verbs_context};

use super::*;
use crate::{AccessFlags, AsyncEventKind, Mtu, QpState, WcOpcode, WcStatus};

/// A context as a provider lays it out, with no operation.
fn extended_context() -> Box<verbs_context> {
    // SAFETY: all zero is a value of every field.
    let mut context: Box<verbs_context> = unsafe { Box::new(std::mem::zeroed()) };
    context.sz = size_of::<verbs_context>();
    context.context.abi_compat = ABI_IS_EXTENDED as *mut _;
    context
}

/// The pointer that callers of libibverbs have. It may be used to reach the whole.
fn inner(context: &mut verbs_context) -> *mut ibv_context {
    let whole: *mut verbs_context = context;
    // SAFETY: a field of a live struct.
    unsafe { &raw mut (*whole).context }
}

static PORT_QUERIES: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn count_port_queries(
    _: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    length: usize,
) -> c_int {
    PORT_QUERIES.fetch_add(1, Ordering::Relaxed);
    if port == 9 {
        return libc::EINVAL;
    }
    assert_eq!(length, size_of::<ibv_port_attr>());
    // SAFETY: the caller gave a place of that length.
    unsafe {
        // What a provider leaves alone must read as zero.
        assert_eq!((*attr).flags, 0);
        (*attr).lid = 0x1234;
        (*attr).port_cap_flags2 = 0x5678;
    }
    0
}

#[test]
fn query_port_reaches_the_provider_exactly_once() {
    let mut context = extended_context();
    context.query_port = Some(count_port_queries);
    let context = inner(&mut context);
    // SAFETY: the context is laid out as a provider's.
    let attr = unsafe { query_port(context, 1) }.expect("the provider agreed");
    assert_eq!(PORT_QUERIES.load(Ordering::Relaxed), 1);
    // The second is an extended field: no old symbol fills it in.
    assert_eq!((attr.lid, attr.port_cap_flags2), (0x1234, 0x5678));
    // SAFETY: as before.
    let refused = unsafe { query_port(context, 9) };
    assert_eq!(refused.err(), Some(Errno(libc::EINVAL)));
}

fn has_query_port(context: &mut verbs_context) -> bool {
    // SAFETY: the context is laid out as a provider's, or says that it is not.
    unsafe { extended_query_port(inner(context)) }.is_some()
}

#[test]
fn only_a_context_that_says_so_is_extended() {
    let mut context = extended_context();
    context.query_port = Some(count_port_queries);
    assert!(has_query_port(&mut context));

    // Older than the field: `sz` counts from the end.
    context.sz = size_of::<verbs_context>() - 1;
    assert!(!has_query_port(&mut context));
    context.sz = size_of::<verbs_context>();

    // What rdma-sys takes for the mark is none.
    context.context.abi_compat = u32::MAX as usize as *mut _;
    assert!(!has_query_port(&mut context));
    context.context.abi_compat = std::ptr::null_mut();
    assert!(!has_query_port(&mut context));

    context.context.abi_compat = ABI_IS_EXTENDED as *mut _;
    context.query_port = None;
    assert!(!has_query_port(&mut context));
}

static TD_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn count_td_allocations(
    _: *mut ibv_context,
    _: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    TD_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    std::ptr::null_mut()
}

/// Why this module has shims of its own. When this fails, rdma-sys has been repaired.
#[test]
fn rdma_sys_itself_reaches_no_extended_operation() {
    let mut context = extended_context();
    context.alloc_td = Some(count_td_allocations);
    // SAFETY: the context is laid out as a provider's; the operation looks at no argument.
    let allocated = unsafe {
        let mut attr: ibv_td_init_attr = std::mem::zeroed();
        rdma_sys::ibv_alloc_td(inner(&mut context), &raw mut attr)
    };
    assert!(allocated.is_none());
    assert_eq!(TD_ALLOCATIONS.load(Ordering::Relaxed), 0);
    // SAFETY: as before.
    assert!(unsafe { extended(inner(&mut context)) }.is_some());
}

#[test]
fn an_event_is_read_as_integers() {
    for number in [20_u32, 77, u32::MAX] {
        let mut bytes = [0_u8; 16];
        bytes[..4].copy_from_slice(&3_u32.to_ne_bytes());
        bytes[8..12].copy_from_slice(&number.to_ne_bytes());
        let mut event = RawAsyncEvent::default();
        // SAFETY: the struct has 16 bytes, any of which may have any value.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), (&raw mut event).cast(), 16);
        }
        let event = RawEvent::from(event);
        assert_eq!((event.kind, event.element & 0xffff_ffff), (number, 3));
    }
}

#[test]
fn return_codes_of_all_fashions_are_error_numbers() {
    assert_eq!(check(0), Ok(()));
    assert_eq!(check(libc::ENOMEM), Err(Errno(libc::ENOMEM)));
    assert_eq!(check(-libc::ENOMEM), Err(Errno(libc::ENOMEM)));
    clear_errno();
    assert_eq!(check(-1), Err(Errno(libc::EIO)));
}

/// Pairs of a C expression and what it must be here.
macro_rules! layouts {
    ($($name:literal = $rust:ty { $($field:literal = $($path:ident).+),* $(,)? })*) => {
        vec![$(
            (concat!("sizeof(struct ", $name, ")"), size_of::<$rust>() as u64),
            $((
                concat!("offsetof(struct ", $name, ", ", $field, ")"),
                offset_of!($rust, $($path).+) as u64,
            ),)*
        )*]
    };
}

/// Evaluates C expressions with the installed headers.
fn evaluate(expressions: &[(&str, u64)]) -> Vec<u64> {
    let mut source = String::from(
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n",
    );
    for (expression, _) in expressions {
        let _ = writeln!(
            source,
            "printf(\"%llu\\n\", (unsigned long long)({expression}));"
        );
    }
    source.push_str("return 0; }\n");
    let stem = std::env::temp_dir().join(format!("rerail-layouts-{}", std::process::id()));
    let (file, program) = (stem.with_extension("c"), stem.with_extension("bin"));
    std::fs::write(&file, source).expect("a temporary file");
    let built = Command::new("cc")
        .arg(&file)
        .arg("-o")
        .arg(&program)
        .output()
        .expect("cc runs");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let printed = Command::new(&program)
        .output()
        .expect("the program runs")
        .stdout;
    let _ = (std::fs::remove_file(file), std::fs::remove_file(program));
    let printed = String::from_utf8(printed).expect("numbers");
    printed
        .lines()
        .map(|line| line.parse().expect("a number"))
        .collect()
}

fn assert_same_in_c(expected: Vec<(&str, u64)>) {
    let found = evaluate(&expected);
    assert_eq!(found.len(), expected.len());
    for ((expression, ours), theirs) in expected.into_iter().zip(found) {
        assert_eq!(ours, theirs, "{expression}");
    }
}

#[test]
fn layouts_are_those_of_the_header() {
    assert_same_in_c(layouts! {
        "ibv_async_event" = RawAsyncEvent { "element" = element, "event_type" = event_type }
        "ibv_wc" = ibv_wc {
            "wr_id" = wr_id, "status" = status, "opcode" = opcode, "vendor_err" = vendor_err,
            "byte_len" = byte_len, "qp_num" = qp_num, "src_qp" = src_qp, "wc_flags" = wc_flags,
        }
        "ibv_send_wr" = ibv_send_wr {
            "wr_id" = wr_id, "next" = next, "sg_list" = sg_list, "num_sge" = num_sge,
            "opcode" = opcode, "send_flags" = send_flags,
            "wr.rdma.remote_addr" = wr.rdma.remote_addr, "wr.rdma.rkey" = wr.rdma.rkey,
            "qp_type" = qp_type,
        }
        "ibv_sge" = ibv_sge { "addr" = addr, "length" = length, "lkey" = lkey }
        "ibv_ah_attr" = ibv_ah_attr {
            "grh.dgid" = grh.dgid, "grh.flow_label" = grh.flow_label,
            "grh.sgid_index" = grh.sgid_index, "grh.hop_limit" = grh.hop_limit,
            "grh.traffic_class" = grh.traffic_class, "dlid" = dlid, "sl" = sl,
            "src_path_bits" = src_path_bits, "static_rate" = static_rate,
            "is_global" = is_global, "port_num" = port_num,
        }
        "ibv_qp_attr" = ibv_qp_attr {
            "qp_state" = qp_state, "path_mtu" = path_mtu, "rq_psn" = rq_psn, "sq_psn" = sq_psn,
            "dest_qp_num" = dest_qp_num, "qp_access_flags" = qp_access_flags, "cap" = cap,
            "ah_attr" = ah_attr, "pkey_index" = pkey_index, "max_rd_atomic" = max_rd_atomic,
            "max_dest_rd_atomic" = max_dest_rd_atomic, "min_rnr_timer" = min_rnr_timer,
            "port_num" = port_num, "timeout" = timeout, "retry_cnt" = retry_cnt,
            "rnr_retry" = rnr_retry, "rate_limit" = rate_limit,
        }
        "ibv_qp_init_attr" = ibv_qp_init_attr {
            "send_cq" = send_cq, "recv_cq" = recv_cq, "srq" = srq, "cap" = cap,
            "qp_type" = qp_type, "sq_sig_all" = sq_sig_all,
        }
        "ibv_qp_cap" = ibv_qp_cap {
            "max_send_wr" = max_send_wr, "max_recv_wr" = max_recv_wr,
            "max_send_sge" = max_send_sge, "max_recv_sge" = max_recv_sge,
            "max_inline_data" = max_inline_data,
        }
        "ibv_gid_entry" = ibv_gid_entry {
            "gid" = gid, "gid_index" = gid_index, "port_num" = port_num, "gid_type" = gid_type,
            "ndev_ifindex" = ndev_ifindex,
        }
        "ibv_port_attr" = ibv_port_attr {
            "state" = state, "max_mtu" = max_mtu, "active_mtu" = active_mtu,
            "gid_tbl_len" = gid_tbl_len, "max_msg_sz" = max_msg_sz,
            "pkey_tbl_len" = pkey_tbl_len, "lid" = lid, "sm_lid" = sm_lid,
            "active_width" = active_width, "active_speed" = active_speed,
            "phys_state" = phys_state, "link_layer" = link_layer,
            "port_cap_flags2" = port_cap_flags2,
        }
        "ibv_device_attr" = ibv_device_attr {
            "fw_ver" = fw_ver, "node_guid" = node_guid, "max_mr_size" = max_mr_size,
            "vendor_id" = vendor_id, "max_qp" = max_qp, "max_qp_wr" = max_qp_wr,
            "max_sge" = max_sge, "max_cqe" = max_cqe, "max_qp_rd_atom" = max_qp_rd_atom,
            "max_res_rd_atom" = max_res_rd_atom, "max_qp_init_rd_atom" = max_qp_init_rd_atom,
            "phys_port_cnt" = phys_port_cnt,
        }
        "ibv_mr" = ibv_mr { "addr" = addr, "length" = length, "lkey" = lkey, "rkey" = rkey }
        "ibv_qp" = ibv_qp { "context" = context, "qp_num" = qp_num }
        "ibv_cq" = ibv_cq { "context" = context }
        "ibv_context" = ibv_context {
            "device" = device, "ops.poll_cq" = ops.poll_cq, "ops.post_send" = ops.post_send,
            "async_fd" = async_fd, "abi_compat" = abi_compat,
        }
        "verbs_context" = verbs_context {
            "query_port" = query_port, "sz" = sz, "context" = context,
        }
    });
}

#[test]
fn numbers_are_those_of_the_header() {
    let number = u64::from;
    let mut expected = vec![
        (
            "(unsigned long)__VERBS_ABI_IS_EXTENDED",
            ABI_IS_EXTENDED as u64,
        ),
        (
            "IBV_ACCESS_LOCAL_WRITE",
            number(AccessFlags::LOCAL_WRITE.bits()),
        ),
        (
            "IBV_ACCESS_REMOTE_WRITE",
            number(AccessFlags::REMOTE_WRITE.bits()),
        ),
        (
            "IBV_ACCESS_REMOTE_READ",
            number(AccessFlags::REMOTE_READ.bits()),
        ),
        (
            "IBV_ACCESS_REMOTE_ATOMIC",
            number(AccessFlags::REMOTE_ATOMIC.bits()),
        ),
        (
            "IBV_ACCESS_RELAXED_ORDERING",
            number(AccessFlags::RELAXED_ORDERING.bits()),
        ),
        ("IBV_QPT_RC", number(ibv_qp_type::IBV_QPT_RC)),
        (
            "IBV_WR_RDMA_WRITE",
            number(ibv_wr_opcode::IBV_WR_RDMA_WRITE),
        ),
        ("IBV_WR_RDMA_READ", number(ibv_wr_opcode::IBV_WR_RDMA_READ)),
        (
            "IBV_SEND_SIGNALED",
            number(ibv_send_flags::IBV_SEND_SIGNALED.0),
        ),
        ("IBV_SEND_FENCE", number(ibv_send_flags::IBV_SEND_FENCE.0)),
        ("IBV_MTU_256", number(Mtu::Mtu256.to_raw())),
        ("IBV_MTU_4096", number(Mtu::Mtu4096.to_raw())),
        ("IBV_WC_SUCCESS", number(WcStatus::Success.to_raw())),
        (
            "IBV_WC_LOC_QP_OP_ERR",
            number(WcStatus::LocQpOpErr.to_raw()),
        ),
        ("IBV_WC_WR_FLUSH_ERR", number(WcStatus::WrFlushErr.to_raw())),
        (
            "IBV_WC_REM_ACCESS_ERR",
            number(WcStatus::RemAccessErr.to_raw()),
        ),
        (
            "IBV_WC_RETRY_EXC_ERR",
            number(WcStatus::RetryExcErr.to_raw()),
        ),
        ("IBV_WC_GENERAL_ERR", number(WcStatus::GeneralErr.to_raw())),
        ("IBV_WC_RDMA_WRITE", number(WcOpcode::RdmaWrite.to_raw())),
        ("IBV_WC_RDMA_READ", number(WcOpcode::RdmaRead.to_raw())),
        ("IBV_WC_RECV", number(WcOpcode::Recv.to_raw())),
    ];
    let kinds = [
        ("IBV_EVENT_CQ_ERR", AsyncEventKind::CqErr),
        ("IBV_EVENT_QP_FATAL", AsyncEventKind::QpFatal),
        ("IBV_EVENT_QP_ACCESS_ERR", AsyncEventKind::QpAccessErr),
        ("IBV_EVENT_DEVICE_FATAL", AsyncEventKind::DeviceFatal),
        ("IBV_EVENT_PORT_ACTIVE", AsyncEventKind::PortActive),
        ("IBV_EVENT_PORT_ERR", AsyncEventKind::PortErr),
        ("IBV_EVENT_LID_CHANGE", AsyncEventKind::LidChange),
        ("IBV_EVENT_PKEY_CHANGE", AsyncEventKind::PkeyChange),
        ("IBV_EVENT_SM_CHANGE", AsyncEventKind::SmChange),
        (
            "IBV_EVENT_QP_LAST_WQE_REACHED",
            AsyncEventKind::QpLastWqeReached,
        ),
        (
            "IBV_EVENT_CLIENT_REREGISTER",
            AsyncEventKind::ClientReregister,
        ),
        ("IBV_EVENT_GID_CHANGE", AsyncEventKind::GidChange),
        ("IBV_EVENT_WQ_FATAL", AsyncEventKind::WqFatal),
    ];
    expected.extend(kinds.map(|(name, kind)| (name, number(kind.to_raw()))));
    let states = [
        ("IBV_QPS_RESET", ibv_qp_state::IBV_QPS_RESET, QpState::Reset),
        ("IBV_QPS_INIT", ibv_qp_state::IBV_QPS_INIT, QpState::Init),
        (
            "IBV_QPS_RTR",
            ibv_qp_state::IBV_QPS_RTR,
            QpState::ReadyToReceive,
        ),
        (
            "IBV_QPS_RTS",
            ibv_qp_state::IBV_QPS_RTS,
            QpState::ReadyToSend,
        ),
        ("IBV_QPS_ERR", ibv_qp_state::IBV_QPS_ERR, QpState::Error),
    ];
    for (name, raw, state) in states {
        assert_eq!(QpState::from_raw(raw), state);
        expected.push((name, number(raw)));
    }
    let masks = [
        ("IBV_QP_STATE", ibv_qp_attr_mask::IBV_QP_STATE),
        ("IBV_QP_ACCESS_FLAGS", ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS),
        ("IBV_QP_PKEY_INDEX", ibv_qp_attr_mask::IBV_QP_PKEY_INDEX),
        ("IBV_QP_PORT", ibv_qp_attr_mask::IBV_QP_PORT),
        ("IBV_QP_AV", ibv_qp_attr_mask::IBV_QP_AV),
        ("IBV_QP_PATH_MTU", ibv_qp_attr_mask::IBV_QP_PATH_MTU),
        ("IBV_QP_DEST_QPN", ibv_qp_attr_mask::IBV_QP_DEST_QPN),
        (
            "IBV_QP_MAX_DEST_RD_ATOMIC",
            ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC,
        ),
    ];
    expected.extend(masks.map(|(name, mask)| (name, number(mask.0))));
    assert_same_in_c(expected);
}
