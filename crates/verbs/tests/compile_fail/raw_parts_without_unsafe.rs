use rerail_verbs::HostMemory;

fn memory(addr: *mut u8) -> Option<HostMemory> {
    HostMemory::from_raw_parts(addr, 4096)
}

fn main() {}
