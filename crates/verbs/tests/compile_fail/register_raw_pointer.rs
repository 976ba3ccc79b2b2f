use rerail_verbs::{AccessFlags, ProtectionDomain};

fn register(pd: &ProtectionDomain, addr: *mut u8) {
    let _ = pd.register(addr, 0, 4096, AccessFlags::REMOTE_WRITE);
}

fn main() {}
