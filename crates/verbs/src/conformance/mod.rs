//! What every backend must do, as test bodies over a pair of ports that reach one another.
//!
//! The same bodies run on simulated devices and on real ones; a backend that differs says so where
//! it differs. Bodies panic with a message when something does not hold, as tests do. Deliberately
//! not here: how the ports come to be, and what makes their links fail. A [`Fabric`] provides that.

mod data;
mod events;
mod lifetime;

use std::time::Duration;

use crate::{
    AccessFlags, Completion, CompletionQueue, Context, ControlThread, Gid, GidEntry, GidType,
    HostMemory, InitAttr, MemoryRegion, PathAttr, ProtectionDomain, QpCapacity, QpInit, QueuePair,
    RemoteAddress, RtrAttr, RtsAttr, Sge, WorkRequest,
};

/// One of the two ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The port that posts.
    Initiator,
    /// The port whose memory is written and read.
    Target,
}

/// Two ports that reach one another, and what a test may do to them.
pub trait Fabric {
    /// Opens the device of `side` afresh.
    fn open(&self, side: Side) -> Context;

    /// The port of that device to use.
    fn port(&self, side: Side) -> u32 {
        let _ = side;
        1
    }

    /// Lets about a millisecond pass: a real fabric sleeps, a simulated one moves its clock.
    fn pass_time(&self);

    /// How many times to let time pass before something that must happen counts as missing.
    fn patience(&self) -> usize {
        20_000
    }

    /// Takes the link of `side` down or up. False when that cannot be done here: the body is left
    /// out then.
    fn set_link(&self, side: Side, up: bool) -> bool {
        let _ = (side, up);
        false
    }

    /// Gives the port of `side` a row with `gid`, or takes it away. False when that cannot be
    /// done here.
    fn set_gid(&self, side: Side, gid: Gid, present: bool) -> bool {
        let _ = (side, gid, present);
        false
    }
}

/// A test body.
pub type Body = fn(&dyn Fabric);

macro_rules! bodies {
    ($($module:ident::{$($name:ident),* $(,)?})*) => {
        &[$($((stringify!($name), $module::$name as Body),)*)*]
    };
}

/// All bodies with their names.
pub const BODIES: &[(&str, Body)] = bodies! {
    data::{
        writes_and_reads_move_every_byte,
        batches_of_any_length_complete_in_order,
        a_zero_length_read_needs_no_key,
        a_wrong_remote_key_is_an_access_error,
        a_wrong_local_key_is_a_protection_error,
        bytes_past_a_region_are_out_of_reach,
        another_domain_is_out_of_reach,
        a_peer_that_is_silent_ends_the_retries,
        error_state_flushes_what_is_outstanding,
        x20_a_full_send_queue_says_how_much_was_posted,
        posting_before_ready_to_send_loses_nothing,
        iova_names_the_memory,
    }
    events::{
        gid_rows_are_in_use_and_in_order,
        an_empty_gid_index_is_refused,
        a_link_flap_is_two_kinds_of_events,
        a_gid_comes_and_goes_with_events,
        an_overrun_queue_names_itself,
    }
    lifetime::{
        x13_queue_pairs_come_and_go,
        objects_may_be_dropped_in_any_order,
        memory_outlives_its_handle,
        objects_of_two_contexts_do_not_mix,
        bad_arguments_are_errors,
    }
};

/// Two connected pairs with memory, for tests that go beyond [`BODIES`].
#[derive(Debug)]
pub struct Link {
    initiator: Endpoint,
    target: Endpoint,
}

impl Link {
    /// Opens both devices and connects a pair of queue pairs over them.
    pub fn connect(fabric: &dyn Fabric) -> Self {
        let (initiator, target) = connected(fabric);
        Self { initiator, target }
    }

    /// The pair that posts. Its queue holds 64 requests.
    pub fn initiator(&self) -> &QueuePair {
        &self.initiator.pair
    }

    /// The pair at the other end.
    pub fn target(&self) -> &QueuePair {
        &self.target.pair
    }

    /// Where the initiator's completions arrive.
    pub fn queue(&self) -> &CompletionQueue {
        &self.initiator.queue
    }

    /// The memory of one side, 256 KiB.
    pub fn memory(&self, side: Side) -> &HostMemory {
        match side {
            Side::Initiator => &self.initiator.memory,
            Side::Target => &self.target.memory,
        }
    }

    /// A signalled WRITE of `length` bytes from `from` in the initiator's memory to `to` in the
    /// target's. Each has 256 KiB.
    pub fn write(&self, wr_id: u64, from: usize, to: usize, length: usize) -> WorkRequest {
        WorkRequest::write(
            wr_id,
            self.initiator.local(from, length),
            self.target.remote(to),
        )
    }
}

/// How long a control thread may take for one thing before the test gives up on it.
const CONTROL_LIMIT: Duration = Duration::from_secs(60);

/// Bytes of memory of an endpoint.
const MEMORY_BYTES: usize = 256 << 10;

/// All that one side needs, over a context of its own.
#[derive(Debug)]
struct Endpoint {
    pair: QueuePair,
    queue: CompletionQueue,
    region: MemoryRegion,
    memory: HostMemory,
    pd: ProtectionDomain,
    context: Context,
    gid: GidEntry,
    port: u32,
}

impl Endpoint {
    fn open(fabric: &dyn Fabric, side: Side) -> Self {
        Self::open_sized(fabric, side, 256)
    }

    fn open_sized(fabric: &dyn Fabric, side: Side, queue_entries: u32) -> Self {
        let context = fabric.open(side);
        let port = fabric.port(side);
        let gid = usable_gid(&context, port);
        let pd = context.alloc_pd().expect("a protection domain");
        let queue = context
            .create_cq(queue_entries)
            .expect("a completion queue");
        let memory = HostMemory::allocate(MEMORY_BYTES).expect("memory");
        let access =
            AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
        let region = pd
            .register(&memory, 0, MEMORY_BYTES, access)
            .expect("a region");
        let pair = create_pair(&pd, &queue);
        Self {
            pair,
            queue,
            region,
            memory,
            pd,
            context,
            gid,
            port,
        }
    }

    /// A piece of this side's memory for work requests that it posts.
    fn local(&self, offset: usize, length: usize) -> Sge {
        Sge {
            addr: self.region.addr() + offset as u64,
            length: length as u32,
            lkey: self.region.lkey(),
        }
    }

    /// A place in this side's memory for work requests of the peer.
    fn remote(&self, offset: usize) -> RemoteAddress {
        RemoteAddress {
            addr: self.region.addr() + offset as u64,
            rkey: self.region.rkey(),
        }
    }

    fn to_init(&self) {
        self.pair.to_init(&init(self.port)).expect("RESET to INIT");
    }

    /// INIT → RTS towards `peer`.
    fn connect_to(&self, peer: &Self) {
        self.pair.to_rtr(&rtr(self, peer)).expect("INIT to RTR");
        self.pair.to_rts(&rts()).expect("RTR to RTS");
    }

    fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory.copy_out(offset, &mut bytes).expect("inside");
        bytes
    }

    /// Lets everything go, and waits until the device is closed without a refusal.
    fn close(self) {
        let control = self.context.control().clone();
        drop(self);
        assert_closed(&control);
    }
}

/// Two endpoints, connected and ready to send.
fn connected(fabric: &dyn Fabric) -> (Endpoint, Endpoint) {
    let initiator = Endpoint::open(fabric, Side::Initiator);
    let target = Endpoint::open(fabric, Side::Target);
    connect(&initiator, &target);
    (initiator, target)
}

fn connect(initiator: &Endpoint, target: &Endpoint) {
    initiator.to_init();
    target.to_init();
    initiator.connect_to(target);
    target.connect_to(initiator);
}

fn create_pair(pd: &ProtectionDomain, queue: &CompletionQueue) -> QueuePair {
    pd.create_qp(QpInit {
        send_cq: queue,
        recv_cq: queue,
        capacity: QpCapacity {
            send_wr_max: 64,
            recv_wr_max: 1,
            send_sge_max: 2,
            recv_sge_max: 1,
            inline_bytes_max: 0,
        },
    })
    .expect("a queue pair")
}

fn init(port: u32) -> InitAttr {
    InitAttr {
        port,
        pkey_index: 0,
        access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ,
    }
}

fn rtr(own: &Endpoint, peer: &Endpoint) -> RtrAttr {
    let mtu = |endpoint: &Endpoint| {
        let attr = endpoint.context.port_attr(endpoint.port).expect("the port");
        attr.active_mtu.expect("a known MTU")
    };
    let lid = peer.context.port_attr(peer.port).expect("the port").lid;
    RtrAttr {
        path_mtu: mtu(own).min(mtu(peer)),
        dest_qp_num: peer.pair.qp_num(),
        rq_psn: PSN,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 12,
        path: PathAttr {
            port: own.port,
            dgid: peer.gid.gid,
            dlid: lid,
            sgid_index: own.gid.index,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            service_level: 0,
        },
    }
}

/// First packet number in both directions: high, so that it wraps soon.
const PSN: u32 = 0xff_fff0;

fn rts() -> RtsAttr {
    RtsAttr {
        timeout: 14,
        // 7 means "for ever" on soft-RoCE.
        retry_cnt: 6,
        rnr_retry: 7,
        sq_psn: PSN,
        max_rd_atomic: 4,
    }
}

/// A row that both ends can use: IPv4 if there is one, never RoCE v1 if there is another.
fn usable_gid(context: &Context, port: u32) -> GidEntry {
    let mut rows = context.gid_table(port).expect("the GID table");
    rows.retain(|row| row.gid_type != GidType::RoceV1);
    let ipv4 = rows.iter().find(|row| row.gid.to_ipv4().is_some());
    ipv4.or(rows.first()).expect("a usable GID").clone()
}

/// Polls until `count` completions are there, and takes no more.
fn completions(fabric: &dyn Fabric, queue: &CompletionQueue, count: usize) -> Vec<Completion> {
    let mut found = vec![Completion::EMPTY; count];
    let mut taken = 0;
    for _ in 0..fabric.patience() {
        if taken == count {
            return found;
        }
        let more = queue
            .poll(&mut found[taken..])
            .expect("the queue can be polled");
        taken += more;
        if more == 0 {
            fabric.pass_time();
        }
    }
    panic!(
        "of {count} completions there are {taken}: {:?}",
        &found[..taken]
    );
}

/// Lets time pass until `done`.
fn eventually(fabric: &dyn Fabric, what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..fabric.patience() {
        if done() {
            return;
        }
        fabric.pass_time();
    }
    panic!("this did not happen: {what}");
}

/// Waits until everything that was dropped is destroyed, and nothing was refused.
fn assert_destroyed(context: &Context) {
    let barrier = context
        .control()
        .submit(|| ())
        .expect("the context is open");
    barrier
        .wait_timeout(CONTROL_LIMIT)
        .expect("destruction ends, so no event is left unacknowledged");
    assert_eq!(context.control().failed_destructions(), 0);
}

fn assert_closed(control: &ControlThread) {
    assert!(
        control.wait_closed(CONTROL_LIMIT),
        "the device is not closed: {control:?}"
    );
    assert_eq!(control.failed_destructions(), 0);
    assert_eq!(control.quarantined_bytes(), 0);
}
