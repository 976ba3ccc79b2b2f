use rerail_verbs::{AccessFlags, ProtectionDomain};

fn register(pd: &ProtectionDomain, bytes: &[u8]) {
    let _ = pd.register(bytes, 0, bytes.len(), AccessFlags::REMOTE_WRITE);
}

fn main() {}
