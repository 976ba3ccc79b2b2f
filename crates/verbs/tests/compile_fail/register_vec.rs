use rerail_verbs::{AccessFlags, ProtectionDomain};

fn register(pd: &ProtectionDomain, bytes: Vec<u8>) {
    let _ = pd.register(&bytes, 0, 4096, AccessFlags::REMOTE_WRITE);
}

fn main() {}
