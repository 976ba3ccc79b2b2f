//! Send work requests: one-sided RDMA only. Two-sided verbs and inline data are left out, since
//! no layer above uses them.

/// Most scatter/gather elements in one [`WorkRequest`].
pub const SGE_MAX: usize = 4;

/// A piece of local memory (`struct ibv_sge`).
///
/// An address and key that name no live region make the work fail (`LOC_PROT_ERR`); they cannot
/// reach memory that was never registered. Memory is registered only through
/// [`HostMemory`](crate::HostMemory), which is never seen as a Rust slice, so that a wrong or
/// stale value here is a wrong transfer, not undefined behaviour.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sge {
    /// First byte, as a virtual address (or as iova for regions that have one).
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Local key of a region that covers the bytes.
    pub lkey: u32,
}

/// A place in a peer's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoteAddress {
    /// First byte in the peer's address space.
    pub addr: u64,
    /// The peer's remote key.
    pub rkey: u32,
}

/// What a work request does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RdmaOpcode {
    /// Local memory to the peer (`IBV_WR_RDMA_WRITE`).
    Write,
    /// The peer's memory to local memory (`IBV_WR_RDMA_READ`).
    Read,
}

/// One send work request (`struct ibv_send_wr`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkRequest {
    /// Returned in the completion.
    pub wr_id: u64,
    /// What to do.
    pub opcode: RdmaOpcode,
    /// The peer's memory.
    pub remote: RemoteAddress,
    /// Whether success makes a completion. Errors always do.
    pub signaled: bool,
    /// Wait for earlier reads before this starts (`IBV_SEND_FENCE`).
    pub fence: bool,
    sges: [Sge; SGE_MAX],
    sge_count: u8,
}

impl WorkRequest {
    /// A signalled WRITE of one local piece.
    pub fn write(wr_id: u64, local: Sge, remote: RemoteAddress) -> Self {
        Self::new(RdmaOpcode::Write, wr_id, &[local], remote)
    }

    /// A signalled READ into one local piece.
    pub fn read(wr_id: u64, local: Sge, remote: RemoteAddress) -> Self {
        Self::new(RdmaOpcode::Read, wr_id, &[local], remote)
    }

    /// A signalled READ of no bytes: it completes whatever the key, and so proves a connection
    /// without any memory.
    pub fn zero_length_read(wr_id: u64) -> Self {
        Self::new(RdmaOpcode::Read, wr_id, &[], RemoteAddress::default())
    }

    /// A signalled work request. Pieces past [`SGE_MAX`] are a caller's mistake and panic.
    pub fn new(opcode: RdmaOpcode, wr_id: u64, local: &[Sge], remote: RemoteAddress) -> Self {
        assert!(
            local.len() <= SGE_MAX,
            "a work request has at most {SGE_MAX} pieces"
        );
        let mut sges = [Sge::default(); SGE_MAX];
        sges[..local.len()].copy_from_slice(local);
        Self {
            wr_id,
            opcode,
            remote,
            signaled: true,
            fence: false,
            sges,
            sge_count: local.len() as u8,
        }
    }

    /// The local pieces, in order.
    pub fn sges(&self) -> &[Sge] {
        &self.sges[..usize::from(self.sge_count)]
    }

    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        self.sges().iter().map(|sge| u64::from(sge.length)).sum()
    }
}
