//! Hosts that are connected, for the tests of the fabric.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::sim::{Fabric, FabricOptions, NicId, NicOptions, PortId, ProcessId};
use crate::{
    AccessFlags, AsyncEventKind, Completion, CompletionQueue, Context, HostMemory, InitAttr,
    LinkLayer, MemoryRegion, Mtu, PathAttr, ProtectionDomain, QpCapacity, QpInit, QueuePair,
    RemoteAddress, RtrAttr, RtsAttr, Sge, VerbsError, WcStatus, WorkRequest,
};

pub(super) const MEMORY_BYTES: usize = 1 << 20;

pub(super) const MS: Duration = Duration::from_millis(1);

/// 192.168.77.`host`, as in the soft-RoCE rig.
pub(super) fn address(host: u8) -> IpAddr {
    Ipv4Addr::new(192, 168, 77, host).into()
}

pub(super) fn options() -> FabricOptions {
    FabricOptions::soft_roce(7)
}

/// A process with one adapter, and all that a connection needs.
pub(super) struct Host {
    pub(super) fabric: Fabric,
    pub(super) nic: NicId,
    pub(super) process: ProcessId,
    pub(super) context: Context,
    pub(super) pd: ProtectionDomain,
    pub(super) queue: CompletionQueue,
    pub(super) memory: HostMemory,
    pub(super) region: MemoryRegion,
}

impl Host {
    /// Host number `host` with one Ethernet adapter.
    pub(super) fn new(fabric: &Fabric, host: u8) -> Self {
        Self::with_nic(
            fabric,
            &NicOptions::ethernet(&format!("nic{host}"), address(host)),
        )
    }

    pub(super) fn with_nic(fabric: &Fabric, nic: &NicOptions) -> Self {
        let node = fabric.add_node(&format!("of_{}", nic.name));
        let nic = fabric.add_nic(node, nic);
        Self::on(fabric, fabric.add_process(node), nic)
    }

    /// A process on an adapter that is there.
    pub(super) fn on(fabric: &Fabric, process: ProcessId, nic: NicId) -> Self {
        let context = fabric.device_of(process, nic).open().expect("it opens");
        let pd = context.alloc_pd().expect("a domain");
        let queue = context.create_cq(1_024).expect("a queue");
        let memory = HostMemory::allocate(MEMORY_BYTES).expect("memory");
        let access =
            AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
        let region = pd
            .register(&memory, 0, MEMORY_BYTES, access)
            .expect("a region");
        Self {
            fabric: fabric.clone(),
            nic,
            process,
            context,
            pd,
            queue,
            memory,
            region,
        }
    }

    pub(super) fn port(&self) -> PortId {
        self.nic.port(1)
    }

    pub(super) fn pair(&self) -> QueuePair {
        self.pair_sized(64)
    }

    pub(super) fn pair_sized(&self, send_wr_max: u32) -> QueuePair {
        self.pd
            .create_qp(QpInit {
                send_cq: &self.queue,
                recv_cq: &self.queue,
                capacity: QpCapacity {
                    send_wr_max,
                    recv_wr_max: 1,
                    send_sge_max: 4,
                    recv_sge_max: 1,
                    inline_bytes_max: 0,
                },
            })
            .expect("a queue pair")
    }

    pub(super) fn local(&self, offset: usize, length: usize) -> Sge {
        Sge {
            addr: self.region.addr() + offset as u64,
            length: length as u32,
            lkey: self.region.lkey(),
        }
    }

    pub(super) fn remote(&self, offset: usize) -> RemoteAddress {
        RemoteAddress {
            addr: self.region.addr() + offset as u64,
            rkey: self.region.rkey(),
        }
    }

    pub(super) fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory.copy_out(offset, &mut bytes).expect("inside");
        bytes
    }

    pub(super) fn fill(&self, byte: u8) {
        let bytes = vec![byte; MEMORY_BYTES];
        self.memory.copy_in(0, &bytes).expect("inside");
    }

    /// Completions that are there now.
    pub(super) fn poll(&self) -> Vec<Completion> {
        let mut found = [Completion::EMPTY; 256];
        let count = self.queue.poll(&mut found).expect("the queue works");
        found[..count].to_vec()
    }

    /// Lets time pass until `count` completions are there, and returns them with their time.
    pub(super) fn completions(&self, count: usize) -> Vec<(Duration, Completion)> {
        let mut found = Vec::new();
        for _ in 0..1_000_000 {
            let now = self.fabric.now();
            found.extend(self.poll().into_iter().map(|done| (now, done)));
            if found.len() >= count {
                return found;
            }
            assert!(self.fabric.step(), "nothing will happen; so far {found:?}");
        }
        panic!("no end; so far {found:?}");
    }

    pub(super) fn statuses(&self, count: usize) -> Vec<WcStatus> {
        let found = self.completions(count);
        found.iter().map(|(_, done)| done.status).collect()
    }

    /// Kinds of the events that wait.
    pub(super) fn events(&self) -> Vec<AsyncEventKind> {
        let mut kinds = Vec::new();
        while let Some(event) = self.context.next_event().expect("the channel works") {
            kinds.push(event.kind);
        }
        kinds
    }

    /// Index of the row with the host's IPv4 address, or of an InfiniBand port's only row.
    pub(super) fn gid_index(&self) -> u32 {
        let rows = self.context.gid_table(1).expect("the table");
        let row = rows.iter().find(|row| row.gid.to_ipv4().is_some());
        row.or(rows.first()).expect("a row").index
    }
}

pub(super) fn init() -> InitAttr {
    InitAttr {
        port: 1,
        pkey_index: 0,
        access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ,
    }
}

/// The way from `own` to the queue pair `dest_qp_num` of `peer`, as both are now.
pub(super) fn rtr(own: &Host, peer: &Host, dest_qp_num: u32) -> RtrAttr {
    let rows = peer.context.gid_table(1).expect("the table");
    let index = peer.gid_index();
    let row = rows.iter().find(|row| row.index == index).expect("the row");
    let port = peer.context.port_attr(1).expect("the port");
    RtrAttr {
        path_mtu: Mtu::Mtu4096,
        dest_qp_num,
        rq_psn: 100,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 12,
        path: PathAttr {
            port: 1,
            dgid: row.gid,
            dlid: if port.link_layer == LinkLayer::InfiniBand {
                port.lid
            } else {
                0
            },
            sgid_index: own.gid_index(),
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            service_level: 0,
        },
    }
}

/// Time-out of 67 ms, so that six retries end after 0.47 s.
pub(super) fn rts(retry_cnt: u8) -> RtsAttr {
    RtsAttr {
        timeout: 14,
        retry_cnt,
        rnr_retry: 7,
        sq_psn: 100,
        max_rd_atomic: 4,
    }
}

/// Connects a pair of `own` to the pair of that number of `peer`.
pub(super) fn connect(
    own: &Host,
    pair: &QueuePair,
    peer: &Host,
    dest_qp_num: u32,
    retry_cnt: u8,
) -> Result<(), VerbsError> {
    pair.to_init(&init())?;
    pair.to_rtr(&rtr(own, peer, dest_qp_num))?;
    pair.to_rts(&rts(retry_cnt))
}

/// A fabric, two hosts, and a pair on each that is connected to the other.
pub(super) struct Connected {
    pub(super) fabric: Fabric,
    pub(super) a: Host,
    pub(super) b: Host,
    pub(super) pair_a: QueuePair,
    pub(super) pair_b: QueuePair,
}

impl Connected {
    pub(super) fn new(options: FabricOptions) -> Self {
        Self::with_retries(options, 6)
    }

    pub(super) fn with_retries(options: FabricOptions, retry_cnt: u8) -> Self {
        let fabric = Fabric::new(options);
        let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
        Self::between(a, b, retry_cnt)
    }

    pub(super) fn between(a: Host, b: Host, retry_cnt: u8) -> Self {
        let (pair_a, pair_b) = (a.pair(), b.pair());
        connect(&a, &pair_a, &b, pair_b.qp_num(), retry_cnt).expect("connected");
        connect(&b, &pair_b, &a, pair_a.qp_num(), retry_cnt).expect("connected");
        Self {
            fabric: a.fabric.clone(),
            a,
            b,
            pair_a,
            pair_b,
        }
    }

    /// A WRITE of `length` bytes from the beginning of A's memory to that of B's.
    pub(super) fn write(&self, wr_id: u64, length: usize) -> WorkRequest {
        WorkRequest::write(wr_id, self.a.local(0, length), self.b.remote(0))
    }

    pub(super) fn read(&self, wr_id: u64, length: usize) -> WorkRequest {
        WorkRequest::read(wr_id, self.a.local(0, length), self.b.remote(0))
    }

    pub(super) fn post(&self, requests: &[WorkRequest]) {
        self.pair_a.post(requests).expect("posted");
    }
}
