//! Connects two queue pairs over one port, writes, reads back and compares.
//!
//! `cargo run -p rerail-verbs --features ibv --example loopback -- DEVICE`

use std::error::Error;
use std::time::{Duration, Instant};

use rerail_verbs::{
    AccessFlags, Completion, CompletionQueue, Context, GidEntry, GidType, HostMemory, InitAttr,
    PathAttr, PortAttr, QpCapacity, QpInit, QueuePair, RemoteAddress, RtrAttr, RtsAttr, Sge,
    WcStatus, WorkRequest, ibv,
};

const PORT: u32 = 1;
const BYTES: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let list = ibv::devices()?;
    let device = match std::env::args().nth(1) {
        Some(name) => list.find(&name),
        None => list.devices().first(),
    };
    let Some(device) = device else {
        println!("no such device here: {list}");
        return Ok(());
    };
    move_bytes(&device.open()?)
}

fn move_bytes(context: &Context) -> Result<(), Box<dyn Error>> {
    let pd = context.alloc_pd()?;
    let queue = context.create_cq(16)?;
    // The first half is written from, the second half to.
    let memory = HostMemory::allocate(2 * BYTES)?;
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let region = pd.register(&memory, 0, 2 * BYTES, access)?;

    let port = context.port_attr(PORT)?;
    let rows = context.gid_table(PORT)?;
    let usable = rows.iter().find(|row| row.gid_type != GidType::RoceV1);
    let gid = usable.ok_or("the port has no usable GID")?;
    let make = || {
        pd.create_qp(QpInit {
            send_cq: &queue,
            recv_cq: &queue,
            capacity: QpCapacity {
                send_wr_max: 8,
                recv_wr_max: 1,
                send_sge_max: 1,
                recv_sge_max: 1,
                inline_bytes_max: 0,
            },
        })
    };
    let (one, other) = (make()?, make()?);
    connect(&one, &other, gid, &port)?;
    connect(&other, &one, gid, &port)?;

    let bytes: Vec<u8> = (0..BYTES).map(|index| (index % 251) as u8).collect();
    memory.copy_in(0, &bytes)?;
    let first = Sge {
        addr: region.addr(),
        length: BYTES as u32,
        lkey: region.lkey(),
    };
    let second = RemoteAddress {
        addr: region.addr() + BYTES as u64,
        rkey: region.rkey(),
    };
    one.post(&[WorkRequest::write(1, first, second)])?;
    wait(&queue)?;
    memory.copy_in(0, &vec![0; BYTES])?;
    one.post(&[WorkRequest::read(2, first, second)])?;
    wait(&queue)?;

    let mut back = vec![0; BYTES];
    memory.copy_out(0, &mut back)?;
    if back != bytes {
        return Err("the bytes that came back are others".into());
    }
    println!(
        "{BYTES} bytes written and read back over {}",
        context.name()
    );
    Ok(())
}

fn connect(
    pair: &QueuePair,
    peer: &QueuePair,
    gid: &GidEntry,
    port: &PortAttr,
) -> Result<(), Box<dyn Error>> {
    pair.to_init(&InitAttr {
        port: PORT,
        pkey_index: 0,
        access: AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ,
    })?;
    pair.to_rtr(&RtrAttr {
        path_mtu: port.active_mtu.ok_or("the port has no MTU")?,
        dest_qp_num: peer.qp_num(),
        rq_psn: 0,
        max_dest_rd_atomic: 1,
        min_rnr_timer: 12,
        path: PathAttr {
            port: PORT,
            dgid: gid.gid,
            dlid: port.lid,
            sgid_index: gid.index,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            service_level: 0,
        },
    })?;
    pair.to_rts(&RtsAttr {
        timeout: 14,
        retry_cnt: 6,
        rnr_retry: 7,
        sq_psn: 0,
        max_rd_atomic: 1,
    })?;
    Ok(())
}

fn wait(queue: &CompletionQueue) -> Result<(), Box<dyn Error>> {
    let begin = Instant::now();
    let mut completions = [Completion::EMPTY; 1];
    while queue.poll(&mut completions)? == 0 {
        if begin.elapsed() > Duration::from_secs(10) {
            return Err("no completion within 10 s".into());
        }
    }
    match completions[0].status {
        WcStatus::Success => Ok(()),
        status => Err(format!("the work failed: {status}").into()),
    }
}
