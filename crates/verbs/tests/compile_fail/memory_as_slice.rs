use rerail_verbs::HostMemory;

fn bytes(memory: &HostMemory) -> &[u8] {
    &memory[..]
}

fn reference(memory: &HostMemory) -> &[u8] {
    memory.as_ref()
}

fn main() {}
