//! Open devices: queries and events.

use std::os::fd::BorrowedFd;
use std::os::raw::c_int;
use std::ptr::{self, NonNull};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::completion_queue::CompletionQueue;
use super::ffi;
use super::memory::ProtectionDomain;
use crate::error::{BackendResult, Errno};
use crate::objects::ObjectTable;
use crate::{
    AsyncEvent, DeviceAttr, Gid, GidEntry, GidType, LinkLayer, Mtu, Netdev, PhysState, PortAttr,
    PortState,
};

/// Longest GID table that is believed, rows of all ports together.
const GID_ROWS_MAX: usize = 1 << 16;

/// Signals that may interrupt the reading of one event before the caller is told.
const INTERRUPTIONS_MAX: u32 = 100;

/// `struct ibv_context`.
#[derive(Debug)]
pub(crate) struct Context {
    raw: NonNull<ffi::ibv_context>,
}

// SAFETY: libibverbs allows every function on a context from any thread at any time.
unsafe impl Send for Context {}
// SAFETY: as for `Send`.
unsafe impl Sync for Context {}

impl Context {
    /// Takes a context that was just opened, and makes its event descriptor non-blocking. Closes
    /// it again if that fails.
    pub(super) fn new(raw: NonNull<ffi::ibv_context>) -> BackendResult<Self> {
        let context = Self { raw };
        if let Some(fd) = context.async_fd() {
            let unblocked =
                fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
            if let Err(error) = unblocked {
                // The first error is the one to report.
                let _ = context.destroy();
                return Err(Errno(error.raw_os_error()));
            }
        }
        Ok(context)
    }

    pub(crate) fn device_attr(&self) -> BackendResult<DeviceAttr> {
        // SAFETY: all zero is a value of every field.
        let mut attr: ffi::ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open and `attr` a place for the answer.
        ffi::check(unsafe { ffi::ibv_query_device(self.raw.as_ptr(), &raw mut attr) })?;
        let firmware = attr.fw_ver.iter().take_while(|byte| **byte != 0);
        let firmware: Vec<u8> = firmware.map(|byte| *byte as u8).collect();
        Ok(DeviceAttr {
            fw_ver: String::from_utf8_lossy(&firmware).into_owned(),
            node_guid: u64::from_be(attr.node_guid),
            vendor_id: attr.vendor_id,
            vendor_part_id: attr.vendor_part_id,
            max_mr_bytes: attr.max_mr_size,
            max_qp: limit(attr.max_qp),
            max_qp_wr: limit(attr.max_qp_wr),
            max_sge: limit(attr.max_sge),
            max_cq: limit(attr.max_cq),
            max_cqe: limit(attr.max_cqe),
            max_mr: limit(attr.max_mr),
            max_pd: limit(attr.max_pd),
            max_qp_rd_atom: limit(attr.max_qp_rd_atom),
            max_qp_init_rd_atom: limit(attr.max_qp_init_rd_atom),
            max_res_rd_atom: limit(attr.max_res_rd_atom),
            phys_port_cnt: u32::from(attr.phys_port_cnt),
        })
    }

    pub(crate) fn port_attr(&self, port: u32) -> BackendResult<PortAttr> {
        let attr = self.raw_port_attr(port)?;
        Ok(PortAttr {
            state: PortState::from_raw(attr.state),
            phys_state: PhysState::from_raw(u32::from(attr.phys_state)),
            link_layer: LinkLayer::from_raw(u32::from(attr.link_layer)),
            max_mtu: Mtu::from_raw(attr.max_mtu),
            active_mtu: Mtu::from_raw(attr.active_mtu),
            lid: attr.lid,
            sm_lid: attr.sm_lid,
            gid_tbl_len: limit(attr.gid_tbl_len),
            pkey_tbl_len: attr.pkey_tbl_len,
            max_msg_bytes: attr.max_msg_sz,
            active_width: attr.active_width,
            active_speed: u32::from(attr.active_speed),
        })
    }

    fn raw_port_attr(&self, port: u32) -> BackendResult<ffi::ibv_port_attr> {
        // SAFETY: the context is open.
        unsafe { ffi::query_port(self.raw.as_ptr(), port_number(port)?) }
    }

    pub(crate) fn gid_table(&self, port: u32) -> BackendResult<Vec<GidEntry>> {
        let port_rows = limit(self.raw_port_attr(port)?.gid_tbl_len);
        let rows = match self.whole_gid_table() {
            Ok(rows) => rows
                .into_iter()
                .filter(|row| row.port_num == port)
                .collect(),
            // The library or the kernel is too old for the whole table.
            Err(_) => self.gid_rows_one_by_one(port, port_rows)?,
        };
        let mut table: Vec<GidEntry> = rows.iter().filter_map(gid_entry).collect();
        table.sort_by_key(|entry| entry.index);
        Ok(table)
    }

    /// The rows of all ports: the call knows no port, and refuses a buffer that could not hold
    /// them all (rdma-core issue 852).
    fn whole_gid_table(&self) -> BackendResult<Vec<ffi::ibv_gid_entry>> {
        let ports = self.device_attr()?.phys_port_cnt;
        let mut entries_max = 0;
        for port in 1..=ports {
            entries_max += limit(self.raw_port_attr(port)?.gid_tbl_len) as usize;
        }
        // SAFETY: the context is open.
        unsafe { ffi::query_gid_table(self.raw.as_ptr(), entries_max.min(GID_ROWS_MAX)) }
    }

    fn gid_rows_one_by_one(&self, port: u32, rows: u32) -> BackendResult<Vec<ffi::ibv_gid_entry>> {
        let mut found = Vec::new();
        let mut oddity = None;
        for index in 0..rows.min(GID_ROWS_MAX as u32) {
            // SAFETY: the context is open.
            match unsafe { ffi::query_gid_ex(self.raw.as_ptr(), port, index) } {
                Ok(row) => found.push(row),
                Err(Errno(libc::ENODATA)) => {}
                // What sysfs says of an empty slot, but also of things that are wrong.
                Err(errno @ Errno(libc::EINVAL | libc::ENOENT)) => oddity = Some(errno),
                Err(errno) => return Err(errno),
            }
        }
        match oddity {
            Some(errno) if found.is_empty() => Err(errno),
            _ => Ok(found),
        }
    }

    pub(crate) fn pkey(&self, port: u32, index: u16) -> BackendResult<u16> {
        let mut pkey = 0;
        ffi::clear_errno();
        // SAFETY: the context is open and `pkey` a place for the answer.
        let rc = unsafe {
            ffi::ibv_query_pkey(
                self.raw.as_ptr(),
                port_number(port)?,
                c_int::from(index),
                &raw mut pkey,
            )
        };
        ffi::check(rc).map(|()| u16::from_be(pkey))
    }

    pub(crate) fn alloc_pd(&self) -> BackendResult<ProtectionDomain> {
        ffi::clear_errno();
        // SAFETY: the context is open.
        let pd = unsafe { ffi::ibv_alloc_pd(self.raw.as_ptr()) };
        NonNull::new(pd)
            .map(ProtectionDomain::new)
            .ok_or_else(ffi::last_errno)
    }

    pub(crate) fn create_cq(&self, entries: u32) -> BackendResult<CompletionQueue> {
        let entries = c_int::try_from(entries).map_err(|_| Errno(libc::EINVAL))?;
        ffi::clear_errno();
        // SAFETY: the context is open; no channel, and completion vector 0, which always exists.
        let queue = unsafe {
            ffi::ibv_create_cq(
                self.raw.as_ptr(),
                entries,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            )
        };
        let queue = NonNull::new(queue).ok_or_else(ffi::last_errno)?;
        // SAFETY: the queue was just made.
        unsafe { CompletionQueue::new(queue) }
    }

    pub(crate) fn async_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the context is open, and its descriptor with it, for as long as the borrow of
        // `self` lasts.
        unsafe {
            let fd = (*self.raw.as_ptr()).async_fd;
            (fd >= 0).then(|| BorrowedFd::borrow_raw(fd))
        }
    }

    pub(crate) fn next_event(&self, objects: &ObjectTable) -> BackendResult<Option<AsyncEvent>> {
        let mut event = ffi::RawAsyncEvent::default();
        let mut interruptions = 0;
        loop {
            ffi::clear_errno();
            // SAFETY: the context is open, and `event` has the layout of what is written. The
            // descriptor does not block.
            let rc =
                unsafe { ffi::ibv_get_async_event(self.raw.as_ptr(), (&raw mut event).cast()) };
            if rc == 0 {
                break;
            }
            match ffi::last_errno() {
                Errno(libc::EINTR) if interruptions < INTERRUPTIONS_MAX => interruptions += 1,
                Errno(libc::EAGAIN) => return Ok(None),
                errno => return Err(errno),
            }
        }
        let resolved = crate::events::RawEvent::from(event).resolve(objects);
        // SAFETY: the event was just taken, unchanged, and is acknowledged once. Until then the
        // object that it names cannot be destroyed.
        unsafe { ffi::ibv_ack_async_event((&raw mut event).cast()) };
        Ok(Some(resolved))
    }

    pub(crate) fn destroy(self) -> BackendResult<()> {
        // SAFETY: the context is open, and the safe layer has destroyed all that was made from it.
        // What the device refused to destroy is leaked and never used again; closing the
        // descriptor makes the kernel destroy its part.
        ffi::check(unsafe { ffi::ibv_close_device(self.raw.as_ptr()) })
    }
}

/// Port number as the old verbs have it.
fn port_number(port: u32) -> BackendResult<u8> {
    match u8::try_from(port) {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(Errno(libc::EINVAL)),
    }
}

/// A C `int` that counts something; negative from a broken driver only.
fn limit(value: c_int) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

/// A row of the table, or nothing for an empty slot.
fn gid_entry(row: &ffi::ibv_gid_entry) -> Option<GidEntry> {
    // SAFETY: every bit pattern is a value of the raw member.
    let gid = Gid(unsafe { row.gid.raw });
    if gid.0 == [0; 16] {
        return None;
    }
    Some(GidEntry {
        index: row.gid_index,
        gid,
        gid_type: GidType::from_raw(row.gid_type),
        netdev: (row.ndev_ifindex != 0).then(|| Netdev {
            index: row.ndev_ifindex,
            name: interface_name(row.ndev_ifindex),
        }),
    })
}

/// Name of a network interface; empty when it is gone or in another namespace.
fn interface_name(index: u32) -> String {
    let mut name = [0_u8; libc::IF_NAMESIZE];
    // SAFETY: the buffer is as long as names may be, their terminating zero included.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr().cast()) };
    if found.is_null() {
        return String::new();
    }
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(name).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_slots_have_no_row_and_unknown_types_stay_unknown() {
        // SAFETY: all zero is a value of every field.
        let mut raw: ffi::ibv_gid_entry = unsafe { std::mem::zeroed() };
        assert_eq!(gid_entry(&raw), None);
        raw.gid = ffi::ibv_gid { raw: [1; 16] };
        raw.gid_index = 3;
        raw.gid_type = 9;
        let entry = gid_entry(&raw).expect("a row");
        assert_eq!((entry.index, entry.gid), (3, Gid([1; 16])));
        assert_eq!(entry.gid_type, GidType::Other(9));
        assert_eq!(entry.netdev, None);
        raw.ndev_ifindex = 1;
        let netdev = gid_entry(&raw)
            .and_then(|entry| entry.netdev)
            .expect("an interface");
        assert_eq!(netdev.name, "lo");
        raw.ndev_ifindex = u32::MAX;
        let netdev = gid_entry(&raw)
            .and_then(|entry| entry.netdev)
            .expect("an interface");
        assert_eq!((netdev.index, netdev.name.as_str()), (u32::MAX, ""));
    }

    #[test]
    fn ports_that_the_verbs_cannot_name_are_refused() {
        assert_eq!(port_number(1), Ok(1));
        assert_eq!(port_number(255), Ok(255));
        for port in [0, 256, 257, u32::MAX] {
            assert_eq!(port_number(port), Err(Errno(libc::EINVAL)));
        }
    }

    /// On the devices of `RERAIL_VERBS_TEST_DEVICES`, as in `tests/soft_roce.rs`.
    #[test]
    fn rows_read_one_by_one_are_the_table() {
        let Ok(names) = std::env::var("RERAIL_VERBS_TEST_DEVICES") else {
            println!("left out: no devices are named");
            return;
        };
        let devices = crate::ibv::devices().expect("the list");
        let name = names.split(',').next().unwrap_or_default();
        let device = devices.find(name).and_then(crate::Device::real);
        let device = device.expect("a real device");
        let context = device.open().expect("it opens");
        let whole = context.whole_gid_table().expect("the table");
        let length = limit(context.raw_port_attr(1).expect("the port").gid_tbl_len);
        let single = context.gid_rows_one_by_one(1, length).expect("the rows");
        let rows = |rows: &[ffi::ibv_gid_entry]| -> Vec<GidEntry> {
            rows.iter().filter_map(gid_entry).collect()
        };
        assert!(!whole.is_empty());
        assert_eq!(rows(&whole), rows(&single));
        // A buffer that cannot hold the rows of all ports is refused or cut, never overrun.
        // SAFETY: the context is open.
        let small = unsafe { ffi::query_gid_table(context.raw.as_ptr(), 1) };
        assert!(small.is_err() || small.is_ok_and(|rows| rows.len() <= 1));
        context.destroy().expect("it closes");
    }
}
