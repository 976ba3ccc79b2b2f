//! libibverbs as this crate calls it. The only module that names `rdma_sys`.
//!
//! `rdma-sys` gives struct layouts and exported symbols. What it lacks or has wrong on a 64-bit
//! machine is written here instead, and proved in the tests below with a hand-made context:
//!
//! - its test for an extended context compares with `u32::MAX` where C compares with
//!   `UINTPTR_MAX`, so that it never reaches an extended operation: [`query_port`];
//! - it has no `ibv_query_gid_ex` and no `ibv_query_gid_table`;
//! - its `ibv_event_type` is a Rust enum, in which a number of a newer kernel is undefined
//!   behaviour: [`RawAsyncEvent`] reads integers.
//!
//! Deliberately not here: `create_cq_ex`, `create_qp_ex` and the other extended verbs, which
//! nothing above needs.

use std::mem::offset_of;
use std::os::raw::c_int;

use crate::error::Errno;
use crate::events::RawEvent;

pub(super) use rdma_sys::{
    ibv_ack_async_event, ibv_ah_attr, ibv_alloc_pd, ibv_close_device, ibv_context, ibv_cq,
    ibv_create_cq, ibv_create_qp, ibv_dealloc_pd, ibv_dereg_mr, ibv_destroy_cq, ibv_destroy_qp,
    ibv_device, ibv_device_attr, ibv_fork_init, ibv_free_device_list, ibv_get_async_event,
    ibv_get_device_guid, ibv_get_device_list, ibv_get_device_name, ibv_gid, ibv_gid_entry,
    ibv_global_route, ibv_modify_qp, ibv_mr, ibv_open_device, ibv_pd, ibv_port_attr, ibv_qp,
    ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type,
    ibv_query_device, ibv_query_pkey, ibv_query_qp, ibv_reg_dmabuf_mr, ibv_reg_mr_iova2,
    ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wr_opcode, rdma_t, wr_t,
};

/// A provider's `post_send`.
pub(super) type PostSend =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;

/// A provider's `poll_cq`.
pub(super) type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;

/// `struct ibv_async_event` with the kind as an integer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RawAsyncEvent {
    /// The union of pointers and a port number.
    pub(super) element: u64,
    pub(super) event_type: u32,
}

impl From<RawAsyncEvent> for RawEvent {
    fn from(event: RawAsyncEvent) -> Self {
        Self {
            kind: event.event_type,
            element: event.element,
        }
    }
}

#[link(name = "ibverbs")]
unsafe extern "C" {
    /// Since IBVERBS_1.11. Returns 0 or an error number.
    fn _ibv_query_gid_ex(
        context: *mut ibv_context,
        port_num: u32,
        gid_index: u32,
        entry: *mut ibv_gid_entry,
        flags: u32,
        entry_size: usize,
    ) -> c_int;

    /// Since IBVERBS_1.11. Returns the number of entries or a negative error number.
    fn _ibv_query_gid_table(
        context: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        max_entries: usize,
        flags: u32,
        entry_size: usize,
    ) -> isize;
}

/// What is in `abi_compat` of a context that is the tail of a `verbs_context`
/// (`__VERBS_ABI_IS_EXTENDED`).
const ABI_IS_EXTENDED: usize = usize::MAX;

/// `verbs_get_ctx`: the extended context that `context` is part of, if it is.
///
/// # Safety
///
/// `context` points to a context that libibverbs made, or that is laid out in the same way.
unsafe fn extended(context: *mut ibv_context) -> Option<*mut rdma_sys::verbs_context> {
    // SAFETY: the caller vouches for the pointer.
    if unsafe { (*context).abi_compat } as usize != ABI_IS_EXTENDED {
        return None;
    }
    let offset = offset_of!(rdma_sys::verbs_context, context);
    // SAFETY: the mark says that the context is the last field of a `verbs_context`.
    Some(unsafe { context.byte_sub(offset) }.cast())
}

/// The extended `query_port` of `context`, if the provider has one. A `verbs_context` grows at its
/// head: `sz` counts bytes from the end of the struct, and tells whether the field exists.
///
/// # Safety
///
/// As for [`extended`].
unsafe fn extended_query_port(
    context: *mut ibv_context,
) -> Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int> {
    // SAFETY: the caller vouches for the pointer.
    let extended = unsafe { extended(context) }?;
    let needed =
        size_of::<rdma_sys::verbs_context>() - offset_of!(rdma_sys::verbs_context, query_port);
    // SAFETY: `sz` stands right before the context in every version of the struct.
    if unsafe { (*extended).sz } < needed {
        return None;
    }
    // SAFETY: `sz` says that the field is there. Null is `None`.
    unsafe { (*extended).query_port }
}

/// `ibv_query_port` of the header: the extended operation, else the old symbol, over attributes
/// that were zeroed. Returns 0 or an error number.
///
/// # Safety
///
/// `context` points to an open context.
pub(super) unsafe fn query_port(
    context: *mut ibv_context,
    port: u8,
) -> Result<ibv_port_attr, Errno> {
    // SAFETY: all zero is a value of every field.
    let mut attr: ibv_port_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the caller vouches for the context; `attr` is as large as it is said to be, and the
    // old symbol writes a struct that is a prefix of it.
    let rc = unsafe {
        match extended_query_port(context) {
            Some(query) => query(context, port, &raw mut attr, size_of::<ibv_port_attr>()),
            None => rdma_sys::ibv_query_port(context, port, (&raw mut attr).cast()),
        }
    };
    check(rc).map(|()| attr)
}

/// `ibv_query_gid_ex`. `ENODATA` for an empty slot.
///
/// # Safety
///
/// `context` points to an open context.
pub(super) unsafe fn query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
) -> Result<ibv_gid_entry, Errno> {
    // SAFETY: all zero is a value of every field.
    let mut entry: ibv_gid_entry = unsafe { std::mem::zeroed() };
    // SAFETY: the caller vouches for the context; `entry` is as large as it is said to be.
    let rc = unsafe {
        _ibv_query_gid_ex(
            context,
            port,
            index,
            &raw mut entry,
            0,
            size_of::<ibv_gid_entry>(),
        )
    };
    check(rc).map(|()| entry)
}

/// `ibv_query_gid_table`: the rows in use of all ports, at most `entries_max`. With room for fewer
/// rows than the ports together may have, the kernel refuses with `EINVAL`.
///
/// # Safety
///
/// `context` points to an open context.
pub(super) unsafe fn query_gid_table(
    context: *mut ibv_context,
    entries_max: usize,
) -> Result<Vec<ibv_gid_entry>, Errno> {
    let mut entries: Vec<ibv_gid_entry> = Vec::with_capacity(entries_max);
    // SAFETY: the caller vouches for the context; the vector has room for what it is said to.
    let count = unsafe {
        // Zeroed, because a library older than the header fills in less of each.
        entries.as_mut_ptr().write_bytes(0, entries_max);
        _ibv_query_gid_table(
            context,
            entries.as_mut_ptr(),
            entries_max,
            0,
            size_of::<ibv_gid_entry>(),
        )
    };
    if count < 0 {
        return Err(Errno(c_int::try_from(-count).unwrap_or(libc::EIO)));
    }
    // SAFETY: all of the vector's room was written above, and the length stays within it.
    unsafe { entries.set_len(entries_max.min(count as usize)) };
    Ok(entries)
}

/// Outcome of a verb that returns 0, an error number, or (older ones) −1 with `errno`.
pub(super) fn check(rc: c_int) -> Result<(), Errno> {
    match rc {
        0 => Ok(()),
        -1 => Err(last_errno()),
        // Some providers return negative error numbers.
        other => Err(Errno(other.saturating_abs())),
    }
}

/// The error of a verb that returned null or −1. Never zero.
pub(super) fn last_errno() -> Errno {
    match std::io::Error::last_os_error().raw_os_error() {
        Some(0) | None => Errno(libc::EIO),
        Some(errno) => Errno(errno),
    }
}

/// Sets `errno` to zero, before a verb that may fail without setting it.
pub(super) fn clear_errno() {
    // SAFETY: the pointer is to this thread's own `errno`.
    unsafe { *libc::__errno_location() = 0 };
}

#[cfg(test)]
mod tests;
