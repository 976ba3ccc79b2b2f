//! The fault model: everything that can be chosen about a fabric, in plain structs.

use std::net::IpAddr;
use std::time::Duration;

use crate::{DeviceAttr, Gid, LinkLayer};

/// What a fabric does by itself. The defaults are soft-RoCE's, as measured on Linux 6.1; see
/// [`card`](Self::card) for what hardware does otherwise.
#[derive(Clone, PartialEq, Debug)]
pub struct FabricOptions {
    /// Where all chance comes from. The same seed and the same calls give the same run.
    pub seed: u64,
    /// `retry_cnt` 7 never gives up, so that work towards a dead peer never completes (soft-RoCE).
    /// Cards retry seven times.
    pub retry_seven_is_infinite: bool,
    /// What becomes of work that is posted while the own port is down or the own address is gone.
    pub own_port_failure: OwnPortFailure,
    /// How long the first RTR towards a neighbour takes, whether it answers or not. Zero on cards
    /// whose driver leaves that to the caller.
    pub neighbour_resolution: Duration,
    /// Shortest time of an RTR towards a neighbour that is known.
    pub rtr_min: Duration,
    /// Longest time of an RTR towards a neighbour that is known.
    pub rtr_max: Duration,
    /// Time from the error state to the flush completions.
    pub flush_delay: Duration,
    /// How long destroying a queue pair takes that is retransmitting and not in the error state.
    pub destroy_while_retransmitting: Duration,
    /// Longest time that a packet spends on the way; one that would take longer is lost.
    pub packet_lifetime: Duration,
    /// Packets of a message that travel, get lost and are acknowledged as one. 1 is most exact and
    /// slowest. At least 1.
    pub packets_per_burst: u32,
    /// Bursts that a queue pair has on the way at most: bounds the memory of a transfer. At
    /// least 1.
    pub window_bursts: u32,
    /// Numbers of destroyed queue pairs are given out again, the lowest first.
    pub recycle_qp_nums: bool,
    /// A new region at the place of an old one gets the same keys. Otherwise the low byte differs.
    pub recycle_keys: bool,
    /// Completions of a queue pair that are still in the queue when it is destroyed stay there
    /// (soft-RoCE); cards' providers remove them.
    pub completions_survive_destroy: bool,
    /// A place in the send queue becomes free when its completion is *polled*, unsignalled work
    /// with the next signalled one (cards); otherwise when the work is done (soft-RoCE).
    pub slots_freed_by_poll: bool,
    /// Responders raise `QP_ACCESS_ERR` and `QP_REQ_ERR` (cards).
    pub responder_events: bool,
    /// The first packet on a queue pair in RTR raises `COMM_EST`.
    pub comm_est_events: bool,
    /// Global IPv6 addresses vanish when their port goes down (Linux without `keep_addr_on_down`).
    pub ipv6_lost_on_down: bool,
    /// Faults of the event queues.
    pub events: EventOptions,
    /// How verbs that take time do so in virtual time. Without meaning in real time.
    pub verb_time: VerbTime,
    /// Lines of the trace that are kept; 0 switches it off.
    pub trace_lines_max: usize,
}

impl FabricOptions {
    /// soft-RoCE's behaviour.
    pub fn soft_roce(seed: u64) -> Self {
        Self {
            seed,
            retry_seven_is_infinite: true,
            own_port_failure: OwnPortFailure::LocQpOpErr,
            neighbour_resolution: Duration::from_secs(1),
            rtr_min: Duration::from_millis(1),
            rtr_max: Duration::from_millis(8),
            flush_delay: Duration::from_micros(100),
            destroy_while_retransmitting: Duration::from_millis(2_200),
            packet_lifetime: Duration::from_secs(2),
            packets_per_burst: 16,
            window_bursts: 16,
            recycle_qp_nums: true,
            recycle_keys: false,
            completions_survive_destroy: true,
            slots_freed_by_poll: false,
            responder_events: false,
            comm_est_events: true,
            ipv6_lost_on_down: true,
            events: EventOptions {
                port_active_count: 2,
                ..EventOptions::faultless()
            },
            verb_time: VerbTime::Advance,
            trace_lines_max: 10_000,
        }
    }

    /// What cards do otherwise, from their drivers' sources and users' reports; not measured.
    pub fn card(seed: u64) -> Self {
        Self {
            retry_seven_is_infinite: false,
            own_port_failure: OwnPortFailure::RetryExceeded,
            neighbour_resolution: Duration::ZERO,
            rtr_min: Duration::from_micros(200),
            rtr_max: Duration::from_millis(1),
            destroy_while_retransmitting: Duration::from_millis(1),
            completions_survive_destroy: false,
            slots_freed_by_poll: true,
            responder_events: true,
            events: EventOptions::faultless(),
            ..Self::soft_roce(seed)
        }
    }
}

impl Default for FabricOptions {
    fn default() -> Self {
        Self::soft_roce(0)
    }
}

/// See [`FabricOptions::own_port_failure`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OwnPortFailure {
    /// The oldest work completes with `LOC_QP_OP_ERR` at once, the rest is flushed (soft-RoCE).
    LocQpOpErr,
    /// Nothing leaves, and the retries run out as for a dead peer (cards).
    RetryExceeded,
}

/// See [`FabricOptions::verb_time`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VerbTime {
    /// A verb that takes time moves the fabric's clock on, and everything that is due happens
    /// meanwhile: right for a test that is one sequence of calls.
    Advance,
    /// A verb happens at once, and the time that it should have taken is added to its context's
    /// account ([`Fabric::take_verb_time`](super::Fabric::take_verb_time)): right for a driver
    /// that steps many simulated threads and lets only the caller of the verb wait.
    Charge,
    /// Like `Charge`, and what is handed to a [`ControlThread`](crate::ControlThread) waits until
    /// its [`turn`](crate::ControlThread::turn) comes: right for a driver that has control threads
    /// busy or hanging, with work behind them that has not happened yet.
    Turns,
}

/// Faults of every context's event queue.
#[derive(Clone, PartialEq, Debug)]
pub struct EventOptions {
    /// Probability that an event is lost.
    pub loss: f64,
    /// Probability that an event comes twice.
    pub duplicate: f64,
    /// Longest delay of an event; each is drawn between zero and this.
    pub delay_max: Duration,
    /// Whether delays may reorder events of different kinds. Events of one kind keep their order.
    pub reorder_kinds: bool,
    /// How many `PORT_ACTIVE` a port raises when it comes up; soft-RoCE: 2.
    pub port_active_count: u32,
    /// Events that may wait in one queue; more are lost. The kernel has no such bound.
    pub queue_max: usize,
}

impl EventOptions {
    /// Each event once, at once and in order.
    pub fn faultless() -> Self {
        Self {
            loss: 0.0,
            duplicate: 0.0,
            delay_max: Duration::ZERO,
            reorder_kinds: false,
            port_active_count: 1,
            queue_max: 4_096,
        }
    }
}

/// An adapter.
#[derive(Clone, PartialEq, Debug)]
pub struct NicOptions {
    /// Name of the device, such as `rxe_a0`.
    pub name: String,
    /// Its ports, numbered from 1.
    pub ports: Vec<PortOptions>,
    /// Its limits. `phys_port_cnt` follows from `ports`; a `node_guid` of 0 is replaced by one
    /// that no other adapter of the fabric has.
    pub limits: DeviceAttr,
}

impl NicOptions {
    /// An adapter with one Ethernet port and the given address.
    pub fn ethernet(name: &str, address: IpAddr) -> Self {
        Self {
            name: name.to_owned(),
            ports: vec![PortOptions::ethernet(&format!("{name}_eth"), &[address])],
            limits: default_limits(),
        }
    }

    /// An adapter with one InfiniBand port.
    pub fn infiniband(name: &str, lid: u16) -> Self {
        Self {
            name: name.to_owned(),
            ports: vec![PortOptions::infiniband(lid)],
            limits: default_limits(),
        }
    }
}

/// A port of an adapter.
#[derive(Clone, PartialEq, Debug)]
pub struct PortOptions {
    /// Ethernet (RoCE) or InfiniBand.
    pub link_layer: LinkLayer,
    /// The network interface of an Ethernet port.
    pub netdev: String,
    /// MTU of the network interface in bytes. The path MTU is the largest that fits with headers:
    /// 4200 gives 4096, 1500 gives 1024.
    pub netdev_mtu_bytes: u32,
    /// Link-local address of the interface, at index 0 of an Ethernet port's table; `None` for
    /// none. InfiniBand ports have a GID of prefix and GUID instead.
    pub link_local: Option<Gid>,
    /// Further addresses of the interface.
    pub addresses: Vec<IpAddr>,
    /// Each address has a RoCE v1 row before its RoCE v2 row (cards).
    pub roce_v1_rows: bool,
    /// LID of an InfiniBand port; 0 on Ethernet.
    pub lid: u16,
    /// Longest message in bytes. Longer work requests end with `LOC_LEN_ERR`.
    pub max_msg_bytes: u32,
    /// The P_Key table.
    pub pkeys: Vec<u16>,
    /// Length of the GID table.
    pub gid_tbl_len: u32,
    /// Verbs code of the link width.
    pub active_width: u8,
    /// Verbs code of the lane speed.
    pub active_speed: u32,
    /// The network that the port is plugged into. Ports of different segments cannot reach each
    /// other.
    pub segment: u32,
    /// The way from the port into the network.
    pub link: LinkOptions,
}

impl PortOptions {
    /// An Ethernet port with 10 Gbit/s, path MTU 4096 and a link-local address of its own.
    pub fn ethernet(netdev: &str, addresses: &[IpAddr]) -> Self {
        Self {
            link_layer: LinkLayer::Ethernet,
            netdev: netdev.to_owned(),
            netdev_mtu_bytes: 4_200,
            link_local: None,
            addresses: addresses.to_vec(),
            roce_v1_rows: false,
            lid: 0,
            max_msg_bytes: 1 << 30,
            pkeys: vec![0xffff],
            gid_tbl_len: 1_024,
            active_width: 1,
            active_speed: 8,
            segment: 0,
            link: LinkOptions::default(),
        }
    }

    /// An InfiniBand port with path MTU 4096.
    pub fn infiniband(lid: u16) -> Self {
        Self {
            link_layer: LinkLayer::InfiniBand,
            netdev: String::new(),
            lid,
            gid_tbl_len: 8,
            ..Self::ethernet("", &[])
        }
    }
}

/// The way from a port into the network. The way into a port has no limits of its own, so that many
/// senders to one receiver do not slow each other down.
#[derive(Clone, PartialEq, Debug)]
pub struct LinkOptions {
    /// Bandwidth in bits a second; at least 1.
    pub bits_per_s: u64,
    /// Time from leaving the port to arriving at the peer's.
    pub latency: Duration,
    /// Added to the latency of each packet: between zero and this. Order is kept.
    pub jitter_max: Duration,
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Time that packets wait *inside* the port, where taking it down purges them; a queueing
    /// discipline on the interface.
    pub egress_delay: Duration,
    /// Longest packet with headers that the network carries from the port, where that is less than
    /// interfaces believe: longer ones are lost without a word. `None` for no limit.
    pub frame_bytes_max: Option<u32>,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self {
            bits_per_s: 10_000_000_000,
            latency: Duration::from_micros(10),
            jitter_max: Duration::ZERO,
            loss: 0.0,
            egress_delay: Duration::ZERO,
            frame_bytes_max: None,
        }
    }
}

fn default_limits() -> DeviceAttr {
    DeviceAttr {
        fw_ver: "sim".to_owned(),
        node_guid: 0,
        vendor_id: 0,
        vendor_part_id: 0,
        max_mr_bytes: 1 << 40,
        max_qp: 65_536,
        max_qp_wr: 16_384,
        max_sge: 32,
        max_cq: 65_536,
        max_cqe: 32_767,
        max_mr: 65_536,
        max_pd: 65_536,
        max_qp_rd_atom: 128,
        max_qp_init_rd_atom: 128,
        max_res_rd_atom: 258_048,
        phys_port_cnt: 1,
    }
}
