//! A local NIC's port: its open device, and what is known of the port.
//!
//! Deliberately not here: reading the port again after an event (the observer decides that, and
//! tells the NIC what it found), and the data thread.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use rerail_topology::gid::{Hysteresis, HysteresisTimes, PortTable, Selection, rank};
use rerail_verbs::{Context, Device, DeviceAttr, DeviceList, Gid, LinkLayer, Mtu};

use super::config::RdmaConfig;
use super::opening::Opening;
use super::tries::Tries;
use super::watch::read_port;
use crate::TransportError;
use crate::machine::ids::LocalNic;
use crate::machine::observer;

/// How long any other verb may take at start.
const OPEN_LIMIT: Duration = Duration::from_secs(60);

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

/// Which NIC it is: equal for itself only. Its number is set once it is among the own NICs.
#[derive(Clone, Debug, Default)]
pub(super) struct Place(Arc<OnceLock<LocalNic>>);

impl From<LocalNic> for Place {
    fn from(number: LocalNic) -> Self {
        Self(Arc::new(OnceLock::from(number)))
    }
}

impl PartialEq for Place {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Place {
    /// Its number; `None` as long as it is not taken in.
    pub(super) fn number(&self) -> Option<LocalNic> {
        self.0.get().copied()
    }

    /// Gives it a number, unless it has one; returns the one that it has.
    pub(super) fn set_number(&self, number: LocalNic) -> LocalNic {
        *self.0.get_or_init(|| number)
    }
}

/// Number of a NIC that is not taken in: no NIC has it.
const NO_NUMBER: LocalNic = LocalNic(u32::MAX);

/// A port of a device. Shared by all threads.
///
/// The device is open but for the time from its death until it is opened again.
#[derive(Debug)]
pub struct Nic {
    place: Place,
    name: String,
    port: u32,
    device: Device,
    attr: DeviceAttr,
    /// Longest message of the port as it was read last.
    max_msg_bytes: Arc<AtomicU32>,
    gate: AtomicBool,
    facts: ArcSwapOption<PortFacts>,
    opening: ArcSwapOption<Opening>,
    /// Number of the opening, one more while there is none: what a data thread looks at.
    openings: AtomicU32,
    /// The last number that an opening was given: none has that of another, though it failed.
    numbered: AtomicU32,
    /// Openings below this number came to nothing, or are over.
    given_up: AtomicU32,
    /// Its openings that are not closed yet.
    tries: Arc<Tries>,
}

impl Nic {
    /// Opens `port` of `device`, called `name` in records and paths. Blocks; verbs run on the
    /// context's control thread, which `tries` is told of.
    ///
    /// With [`PortWish::Usable`] a port that is not active, or has no usable GID, is an error. With
    /// [`PortWish::Any`] it is opened with its gate closed, and taken in once it is usable.
    ///
    /// # Errors
    ///
    /// A verb failed, or the port is not as wished.
    pub(super) fn open(
        place: Place,
        device: &Device,
        port: u32,
        name: &str,
        config: &RdmaConfig,
        wish: PortWish,
        tries: &Arc<Tries>,
    ) -> Result<Self, TransportError> {
        let opening = Opening::new(device, 0, config, |control| tries.begin(control))?;
        let (context, for_job) = (opening.context().clone(), config.clone());
        let max_msg_bytes = Arc::new(AtomicU32::new(u32::MAX));
        let longest = Arc::clone(&max_msg_bytes);
        let pending = opening
            .context()
            .control()
            .submit(move || first_facts(&context, port, &for_job, &longest))?;
        let facts = match (pending.wait_timeout(OPEN_LIMIT)?, wish) {
            (Ok(facts), _) => Some(facts),
            (Err(error @ TransportError::Port { .. }), PortWish::Any) => {
                tracing::warn!(%error, "the port is taken in once it is usable");
                None
            }
            (Err(error), _) => return Err(error),
        };
        if let Some(facts) = &facts {
            tracing::info!(
                nic = name, port, gid = %facts.gid.gid, gid_index = facts.gid.index,
                mtu = facts.mtu.bytes(), speed_mbps = facts.speed_mbps, "NIC open"
            );
        }
        Ok(Self {
            place,
            name: name.to_owned(),
            port,
            device: device.clone(),
            attr: opening.attr().clone(),
            max_msg_bytes,
            gate: AtomicBool::new(facts.is_some()),
            facts: ArcSwapOption::from_pointee(facts),
            tries: Arc::clone(tries),
            opening: ArcSwapOption::from_pointee(opening),
            openings: AtomicU32::new(0),
            numbered: AtomicU32::new(0),
            given_up: AtomicU32::new(0),
        })
    }

    /// Position among this engine's NICs, and in the record's `devices[]`; none that a NIC has
    /// before it is taken in.
    pub fn index(&self) -> LocalNic {
        self.place.number().unwrap_or(NO_NUMBER)
    }

    /// Which NIC it is.
    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// Its present opening has all memory, and is used from now on: an end of it is not that of a
    /// try.
    pub(super) fn set_used(&self) {
        if let Some(opening) = self.opening() {
            self.tries.set_used(opening.context().control());
        }
    }

    /// Name in records and NIC paths.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of the device.
    pub fn device(&self) -> &str {
        self.device.name()
    }

    /// Port, from 1.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Limits of the device.
    pub fn attr(&self) -> &DeviceAttr {
        &self.attr
    }

    /// Longest message that one work request may move.
    pub fn max_msg_bytes(&self) -> u32 {
        self.max_msg_bytes.load(Ordering::Relaxed)
    }

    /// The port was read: its device may be another one, or have other firmware.
    pub(super) fn set_max_msg_bytes(&self, bytes: u32) {
        self.max_msg_bytes.store(bytes, Ordering::Relaxed);
    }

    /// The open device; `None` while it is dead.
    pub fn opening(&self) -> Option<Arc<Opening>> {
        self.opening.load_full()
    }

    /// The open device.
    ///
    /// # Errors
    ///
    /// [`TransportError::Device`] while it is dead.
    pub fn open_device(&self) -> Result<Arc<Opening>, TransportError> {
        self.opening().ok_or_else(|| TransportError::Device {
            device: self.device().to_owned(),
            reason: "it died, and is not open again yet".into(),
        })
    }

    /// Changes whenever [`opening`](Self::opening) does.
    pub(super) fn openings(&self) -> u32 {
        self.openings.load(Ordering::Acquire)
    }

    /// Lets go of the device without waiting for it: it closes once the last of what was made of
    /// it is gone. Its queue pairs are stopped before any region that is dropped after this goes.
    pub(super) fn release(&self) {
        if let Some(opening) = self.opening.swap(None) {
            self.openings.fetch_add(1, Ordering::AcqRel);
            opening.stop();
        }
    }

    /// Whether an opening of that number is none any more: it was let go of, or came to nothing
    /// before it was the present one.
    pub(super) fn is_over(&self, opening: u32) -> bool {
        self.openings() > opening || self.given_up.load(Ordering::Acquire) > opening
    }

    /// Lets go of an opening that came to nothing, whether it is the present one or never was.
    pub(super) fn give_up(&self, opening: &Opening) {
        // Later ones have higher numbers.
        self.given_up
            .fetch_max(opening.number() + 1, Ordering::AcqRel);
        let present = self.opening();
        if present.is_some_and(|present| present.number() == opening.number()) {
            self.release();
        }
    }

    /// The devices of the machine as they are now.
    pub(super) fn relist(&self) -> Result<DeviceList, TransportError> {
        Ok(self.device.relist()?)
    }

    /// Opens the device again. Blocks. Nothing uses it before it is [installed](Self::install).
    pub(super) fn reopen(&self, config: &RdmaConfig) -> Result<Arc<Opening>, TransportError> {
        // A device that was pulled out and put back is another one, of the same name.
        let devices = self.relist()?;
        let device = devices.find(self.device.name());
        if device.is_none() {
            self.tries.device_went();
        }
        let device = device.ok_or_else(|| TransportError::UnknownDevice {
            device: self.device().to_owned(),
            available: devices.to_string(),
        })?;
        self.tries.check(self.device())?;
        // Each leaves room for the number of its end.
        let number = self.numbered.fetch_add(2, Ordering::AcqRel) + 2;
        let opening = Opening::new(device, number, config, |control| self.tries.begin(control))?;
        Ok(Arc::new(opening))
    }

    /// Threads of its openings, and of those that came to nothing.
    #[cfg(test)]
    pub(super) fn controls(&self) -> Vec<rerail_verbs::ControlThread> {
        self.tries.controls()
    }

    /// Takes a device in that was opened again.
    pub(super) fn install(&self, opening: Arc<Opening>) {
        let number = opening.number();
        self.opening.store(Some(opening));
        self.openings.store(number, Ordering::Release);
        self.set_used();
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
}

/// The first reading of a port, before it has an observer.
fn first_facts(
    context: &Context,
    port: u32,
    config: &RdmaConfig,
    max_msg_bytes: &AtomicU32,
) -> Result<PortFacts, TransportError> {
    let unusable = |reason: String| TransportError::Port {
        device: context.name().to_owned(),
        port,
        reason,
    };
    let reading = read_port(context, port, config.pkey_index)?;
    let attr = &reading.attr;
    max_msg_bytes.store(attr.max_msg_bytes, Ordering::Relaxed);
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
