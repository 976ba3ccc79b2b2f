//! The list of devices.

use std::ffi::CStr;
use std::os::raw::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use super::context::Context;
use super::ffi;
use crate::error::{BackendResult, Errno};
use crate::{DeviceList, VerbsError, backend, fork};

/// The RDMA devices of this machine (`ibv_get_device_list`).
///
/// Where the kernel has no RDMA, or no device, the list is empty and says why.
pub fn devices() -> Result<DeviceList, VerbsError> {
    fork::check()?;
    let mut count: c_int = 0;
    ffi::clear_errno();
    // SAFETY: the argument is a place for the count.
    let head = unsafe { ffi::ibv_get_device_list(&raw mut count) };
    let Some(head) = NonNull::new(head) else {
        let errno = ffi::last_errno();
        return no_list(errno);
    };
    let list = Arc::new(RawList { head });
    let mut devices = Vec::new();
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries.
        let device = unsafe { *head.as_ptr().add(index) };
        let Some(raw) = NonNull::new(device) else {
            break;
        };
        // SAFETY: the device is alive while the list is; its name is a C string inside it.
        let (name, guid) = unsafe {
            (
                CStr::from_ptr(ffi::ibv_get_device_name(raw.as_ptr())),
                ffi::ibv_get_device_guid(raw.as_ptr()),
            )
        };
        let name: Arc<str> = Arc::from(name.to_string_lossy().as_ref());
        let device = Device {
            raw,
            _list: Arc::clone(&list),
        };
        let guid = u64::from_be(guid);
        devices.push(crate::Device::new(name, guid, backend::Device::Ibv(device)));
    }
    let reason = devices
        .is_empty()
        .then(|| "the kernel has RDMA support but no device".to_owned());
    Ok(DeviceList::new(devices, reason))
}

/// What a null list means.
fn no_list(errno: Errno) -> Result<DeviceList, VerbsError> {
    let reason = match errno.0 {
        libc::ENOSYS => "the kernel has no RDMA support (is ib_uverbs loaded?)",
        // What a sandbox without the verbs' sysfs and netlink gives.
        libc::ENOENT | libc::EPERM | libc::EACCES | libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT => {
            "the kernel's RDMA interfaces cannot be reached from here"
        }
        errno => {
            return Err(VerbsError::Verb {
                verb: "ibv_get_device_list",
                device: Arc::from("this machine"),
                port: None,
                errno,
            });
        }
    };
    let reason = format!("{reason}: errno {}", errno.0);
    Ok(DeviceList::new(Vec::new(), Some(reason)))
}

/// A device of a list that is kept.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    raw: NonNull<ffi::ibv_device>,
    _list: Arc<RawList>,
}

// SAFETY: a device is not written after the list was made but for its reference count, which
// libibverbs changes atomically; all functions on it may be called from any thread.
unsafe impl Send for Device {}
// SAFETY: as for `Send`.
unsafe impl Sync for Device {}

impl Device {
    pub(crate) fn open(&self) -> BackendResult<Context> {
        init_fork_support();
        ffi::clear_errno();
        // SAFETY: the device is alive while its list is, which `self` holds.
        let context = unsafe { ffi::ibv_open_device(self.raw.as_ptr()) };
        let context = NonNull::new(context).ok_or_else(ffi::last_errno)?;
        Context::new(context)
    }
}

/// Once a process, before its first context: keeps registered pages out of copy-on-write.
fn init_fork_support() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        // SAFETY: takes no argument; may be called at any time.
        let rc = unsafe { ffi::ibv_fork_init() };
        if rc != 0 {
            tracing::warn!(
                errno = rc,
                "ibv_fork_init failed: on kernels before 5.12, forking may corrupt registered memory"
            );
        }
    });
}

#[derive(Debug)]
struct RawList {
    head: NonNull<*mut ffi::ibv_device>,
}

// SAFETY: the list is only read until it is freed, once, by its last owner.
unsafe impl Send for RawList {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawList {}

impl Drop for RawList {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        // SAFETY: the list came from `ibv_get_device_list` and is freed once. Open contexts hold
        // references to their devices of their own. Frees memory and calls no driver.
        unsafe { ffi::ibv_free_device_list(self.head.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_rdma_in_the_kernel_the_list_is_empty_and_says_why() {
        let list = no_list(Errno(libc::ENOSYS)).expect("not an error");
        assert!(list.devices().is_empty());
        assert!(list.to_string().contains("no RDMA support"), "{list}");
        assert!(no_list(Errno(libc::ENOMEM)).is_err());
    }

    #[test]
    fn the_list_of_this_machine_can_be_had() {
        let list = devices().expect("not an error, whatever the machine has");
        assert_eq!(list.devices().is_empty(), list.reason().is_some());
        assert!(list.find("no such device").is_none());
    }
}
