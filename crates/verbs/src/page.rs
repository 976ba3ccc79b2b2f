//! The NUMA node of a page. It is here since the kernel's call for it needs `unsafe`.

use std::ffi::{c_int, c_ulong, c_void};
use std::io;

/// The NUMA node that the page at `address` of this process lies on; `None` where no page is there
/// yet, or nothing is mapped.
///
/// # Errors
///
/// The kernel does not answer: it has no NUMA (`ENOSYS`), or forbids the question, as the default
/// profile of containers does (`EPERM`).
pub fn node_of_page(address: u64) -> io::Result<Option<u32>> {
    let page = address as *const c_void;
    let mut status: c_int = -1;
    let (this_process, pages, only_ask, flags): (c_int, c_ulong, *const c_int, c_int) =
        (0, 1, std::ptr::null(), 0);
    // SAFETY: `move_pages` with no list of nodes moves nothing. It reads one pointer from `page`
    // and writes one int to `status`, both of which live longer than the call. The address itself
    // is only looked up: whatever it is, nothing is read or written there.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            this_process,
            pages,
            &raw const page,
            only_ask,
            &raw mut status,
            flags,
        )
    };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    // Negative numbers say why there is no page.
    Ok(u32::try_from(status).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touched_page_is_somewhere_and_a_bad_address_is_no_crash() {
        let touched = vec![1_u8; 1 << 16];
        match node_of_page(touched.as_ptr() as u64) {
            Ok(node) => {
                assert!(node.is_some(), "the page was written to");
                for nowhere in [0, 1, 4096, u64::MAX, 1 << 63] {
                    assert_eq!(
                        node_of_page(nowhere).expect("as before"),
                        None,
                        "{nowhere:#x}"
                    );
                }
            }
            Err(error) => {
                let number = error.raw_os_error().expect("the kernel's");
                assert!([libc::ENOSYS, libc::EPERM].contains(&number), "{error}");
            }
        }
    }
}
