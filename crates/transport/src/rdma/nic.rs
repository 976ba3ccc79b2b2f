//! A local NIC's port: its context, protection domain and completion queue, and what is known of
//! the port.
//!
//! Deliberately not here: reading the port again after an event (the observer decides that, and
//! tells [`Nic::set_facts`]), and the data thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use rerail_topology::gid::{Hysteresis, HysteresisTimes, PortTable, Selection, rank};
use rerail_verbs::{
    AccessFlags, CompletionQueue, Context, Device, DeviceAttr, Gid, HostMemory, LinkLayer,
    MemoryRegion, Mtu, ProtectionDomain, VerbsError,
};

use super::config::RdmaConfig;
use super::watch::read_port;
use crate::TransportError;
use crate::machine::ids::LocalNic;
use crate::machine::observer;

/// How long registering memory may take: pinning a terabyte takes minutes.
const REGISTER_LIMIT: Duration = Duration::from_secs(600);

/// How long any other verb may take at start.
const OPEN_LIMIT: Duration = Duration::from_secs(60);

/// Bytes that probes read to: the largest path MTU.
const SCRATCH_BYTES: usize = 4096;

/// MTU of a port whose own is not known: every device carries it.
const MTU_UNKNOWN: Mtu = Mtu::Mtu1024;

/// What a port is at the moment, as endpoints that are made now use it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortFacts {
    /// The row of the GID table that we connect with.
    pub gid: Selection,
    /// All usable GIDs, best first.
    pub gids: Vec<Gid>,
    /// The port's LID; 0 on Ethernet.
    pub lid: u16,
    /// Largest path MTU: the port's active one, cut to the setting.
    pub mtu: Mtu,
    /// Speed in Mbit/s; 0 when not known.
    pub speed_mbps: u32,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// The P_Key at the index in use; `None` where the port has no table.
    pub pkey: Option<u16>,
}

impl PortFacts {
    /// The same in the words of the observer, for the own record.
    pub fn observed(&self) -> observer::PortFacts {
        observer::PortFacts {
            up: true,
            link_layer: self.link_layer,
            lid: self.lid,
            gid: Some(self.gid.clone()),
            pkey: self.pkey,
            mtu: Some(self.mtu),
            speed_mbps: self.speed_mbps,
        }
    }

    /// What the observer found, for new endpoints; `None` for a port without a GID to use.
    pub(super) fn of(found: &observer::PortFacts, gids: &[Gid], mtu_max: Mtu) -> Option<Self> {
        Some(Self {
            gid: found.gid.clone()?,
            gids: gids.to_vec(),
            lid: found.lid,
            mtu: found.mtu.unwrap_or(MTU_UNKNOWN).min(mtu_max),
            speed_mbps: found.speed_mbps,
            link_layer: found.link_layer,
            pkey: found.pkey,
        })
    }
}

/// Which ports may be opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PortWish {
    /// Only one that can be used now.
    Usable,
    /// One that may become usable, too.
    Any,
}

/// A port of a device that is open. Shared by all threads.
#[derive(Debug)]
pub struct Nic {
    index: LocalNic,
    name: String,
    port: u32,
    attr: DeviceAttr,
    gate: AtomicBool,
    facts: ArcSwapOption<PortFacts>,
    /// Where probes read to: nobody looks at it.
    scratch: MemoryRegion,
    // Dropped in this order, though verbs would keep it right in any.
    cq: CompletionQueue,
    pd: ProtectionDomain,
    context: Context,
}

impl Nic {
    /// Opens `port` of `device` as number `index` of this engine's NICs, called `name` in records
    /// and paths. Blocks; verbs run on the context's control thread.
    ///
    /// With [`PortWish::Usable`] a port that is not active, or has no usable GID, is an error. With
    /// [`PortWish::Any`] it is opened with its gate closed, and taken in once it is usable.
    ///
    /// # Errors
    ///
    /// A verb failed, or the port is not as wished.
    pub(super) fn open(
        index: LocalNic,
        device: &Device,
        port: u32,
        name: &str,
        config: &RdmaConfig,
        wish: PortWish,
    ) -> Result<Self, TransportError> {
        let context = device.open()?;
        let opened = context.clone();
        let config = config.clone();
        let cqe_max = config.cqe_max;
        let pending = context.control().submit(move || {
            let attr = opened.device_attr()?;
            let facts = match (first_facts(&opened, port, &config), wish) {
                (Ok(facts), _) => Some(facts),
                (Err(error @ TransportError::Port { .. }), PortWish::Any) => {
                    tracing::warn!(%error, "the port is taken in once it is usable");
                    None
                }
                (Err(error), _) => return Err(error),
            };
            let pd = opened.alloc_pd()?;
            let cq = opened.create_cq(cqe_max.min(attr.max_cqe))?;
            let memory = HostMemory::allocate(SCRATCH_BYTES);
            let memory = memory.map_err(|error| TransportError::Port {
                device: opened.name().to_owned(),
                port,
                reason: format!("no memory for probes: {error}"),
            })?;
            let scratch = pd.register(&memory, 0, SCRATCH_BYTES, AccessFlags::LOCAL_WRITE)?;
            Ok::<_, TransportError>((attr, facts, pd, cq, scratch))
        })?;
        let (attr, facts, pd, cq, scratch) = pending.wait_timeout(OPEN_LIMIT)??;
        if let Some(facts) = &facts {
            tracing::info!(
                nic = name, port, gid = %facts.gid.gid, gid_index = facts.gid.index,
                mtu = facts.mtu.bytes(), speed_mbps = facts.speed_mbps, "NIC open"
            );
        }
        Ok(Self {
            index,
            name: name.to_owned(),
            port,
            attr,
            gate: AtomicBool::new(facts.is_some()),
            facts: ArcSwapOption::from_pointee(facts),
            scratch,
            cq,
            pd,
            context,
        })
    }

    /// Position among this engine's NICs, and in the record's `devices[]`.
    pub fn index(&self) -> LocalNic {
        self.index
    }

    /// Name in records and NIC paths.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Port, from 1.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Limits of the device.
    pub fn attr(&self) -> &DeviceAttr {
        &self.attr
    }

    /// The open device.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The protection domain of all regions and queue pairs.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Where all completions arrive.
    pub fn cq(&self) -> &CompletionQueue {
        &self.cq
    }

    /// Memory of its own that probes read to, one path MTU long.
    pub fn scratch(&self) -> &MemoryRegion {
        &self.scratch
    }

    /// What the port is, or was when it was last usable; `None` before it was usable once.
    pub fn facts(&self) -> Option<Arc<PortFacts>> {
        self.facts.load_full()
    }

    /// Takes in a new reading of the port: endpoints made from now on use it.
    pub(super) fn set_facts(&self, facts: PortFacts) {
        self.facts.store(Some(Arc::new(facts)));
    }

    /// Whether work may be posted. Looked at before each post.
    pub fn is_gate_open(&self) -> bool {
        self.gate.load(Ordering::Acquire)
    }

    /// Opens or closes the gate. Takes effect before the next post, whatever thread that is on.
    pub(super) fn set_gate(&self, open: bool) {
        self.gate.store(open, Ordering::Release);
    }

    /// Registers `length` bytes of `memory` from `offset` on the control thread. Blocks.
    pub fn register(
        &self,
        memory: &HostMemory,
        offset: usize,
        length: usize,
        access: AccessFlags,
    ) -> Result<MemoryRegion, VerbsError> {
        let (pd, memory) = (self.pd.clone(), memory.clone());
        let control = self.context.control().clone();
        let pending = self.context.control().submit(move || {
            control.allow(REGISTER_LIMIT);
            pd.register(&memory, offset, length, access)
        })?;
        pending.wait_timeout(REGISTER_LIMIT)?
    }
}

/// The first reading of a port, before it has an observer.
fn first_facts(
    context: &Context,
    port: u32,
    config: &RdmaConfig,
) -> Result<PortFacts, TransportError> {
    let unusable = |reason: String| TransportError::Port {
        device: context.name().to_owned(),
        port,
        reason,
    };
    let reading = read_port(context, port, config.pkey_index)?;
    let attr = &reading.attr;
    if !attr.state.is_active() {
        return Err(unusable(format!("it is {}, not ACTIVE", attr.state)));
    }
    let table = PortTable {
        device: context.name(),
        port,
        link_layer: attr.link_layer,
        table_len: Some(attr.gid_tbl_len),
        entries: &reading.gids,
        unreadable: &reading.unreadable,
        netdevs: &reading.netdevs,
    };
    let ranking = rank(&table, &config.gids);
    let mut choice = Hysteresis::new(HysteresisTimes::default());
    choice.handle(Duration::ZERO, &table, &ranking);
    let Some(gid) = choice.in_use().cloned() else {
        let error = ranking.selected().err().map(ToString::to_string);
        return Err(unusable(error.unwrap_or_default()));
    };
    if let Some(warning) = ranking.warning() {
        tracing::warn!(device = context.name(), port, "{warning}");
    }
    Ok(PortFacts {
        gid,
        gids: ranking.accepted().iter().map(|row| row.gid).collect(),
        lid: attr.lid,
        mtu: attr.active_mtu.unwrap_or(MTU_UNKNOWN).min(config.mtu_max),
        speed_mbps: attr.speed_mbps(),
        link_layer: attr.link_layer,
        pkey: reading.pkeys.get(usize::from(config.pkey_index)).copied(),
    })
}
