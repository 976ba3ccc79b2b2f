//! The own record as a value: everything that is known of this engine, and how it is rendered.
//!
//! There is one, in the publisher, and every change is an [`Edit`] of it: a registration and a
//! NIC's change cannot overwrite each other.

use std::collections::BTreeMap;

use rerail_metadata::descriptor::{
    Buffer, DeviceState, InstanceId, LocationNics, RerailDevice, RerailMember, SegmentDescriptor,
};
use rerail_verbs::Gid;

use crate::machine::ids::{LocalNic, RegionId};
use crate::machine::observer::PortFacts;

/// In which order `devices[]`, `rkey[]` and `lkey[]` are published.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum PublishOrder {
    /// As the NICs were found, for the life of the process.
    #[default]
    Fixed,
    /// Withdrawn NICs at the tail (`publish_order = "healthy-first"`): C++ readers compute indexes
    /// from the matrix, in which withdrawn NICs are missing, and hit a wrong NIC otherwise
    /// (reference 4.4).
    HealthyFirst,
}

/// A region's keys on one NIC.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct KeyPair {
    /// Local key.
    pub lkey: u32,
    /// Remote key.
    pub rkey: u32,
}

/// One change of the own record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Edit {
    /// Memory was registered, on every NIC.
    Register {
        /// Names it until it is unregistered.
        region: RegionId,
        /// Location: `cpu:0`, `cuda:3` or `*`.
        name: String,
        /// First address.
        addr: u64,
        /// Bytes.
        length: u64,
        /// One pair a NIC, in the order in which the NICs were given. NICs behind the last of them
        /// have none yet, and pairs of a NIC that is still being taken in are left out: those keys
        /// come with [`Rekey`](Self::Rekey).
        keys: Vec<KeyPair>,
    },
    /// There is one more NIC, of which nothing is known yet: it counts as down.
    Nic {
        /// Its number, the next one.
        local: LocalNic,
        /// Its name.
        name: String,
    },
    /// Memory was unregistered.
    Unregister {
        /// Which.
        region: RegionId,
    },
    /// The observer's [`Publish`](crate::machine::observer::Action::Publish).
    Port {
        /// The NIC.
        local: LocalNic,
        /// What is true of it now.
        facts: PortFacts,
        /// Its usable GIDs, best first.
        gids: Vec<Gid>,
    },
    /// A NIC that came back is proved good.
    Proved {
        /// The NIC.
        local: LocalNic,
    },
    /// A NIC was opened again, and memory registered with it anew.
    Rekey {
        /// The NIC.
        local: LocalNic,
        /// Its new keys. Regions that are not named keep theirs.
        keys: BTreeMap<RegionId, KeyPair>,
    },
    /// The whole priority matrix, NICs that are down included.
    Matrix(BTreeMap<String, LocationNics>),
}

/// An edit that cannot be made. Nothing of it is.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EditError {
    /// No such NIC.
    #[error("there is no NIC number {0}")]
    UnknownNic(u32),
    /// A NIC that is added has not the next number.
    #[error("NIC number {local} is added after {nics} others")]
    Order {
        /// Its number.
        local: u32,
        /// NICs there are.
        nics: usize,
    },
    /// A region of that number is there already.
    #[error("region {0} is registered already")]
    Duplicate(u64),
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Nic {
    name: String,
    state: DeviceState,
    facts: Option<PortFacts>,
    gids: Vec<Gid>,
}

impl Nic {
    fn unknown(name: String) -> Self {
        Self {
            name,
            state: DeviceState::Down,
            facts: None,
            gids: Vec::new(),
        }
    }

    fn is_healthy(&self) -> bool {
        matches!(self.state, DeviceState::Up | DeviceState::Recovering)
    }
}

/// GIDs of a NIC that [`LocalRecord::render_largest`] leaves room for at least.
const GIDS_MIN: usize = 8;

/// The own record. See the module.
#[derive(Clone, Debug)]
pub struct LocalRecord {
    /// What does not change, and members of other transports.
    base: SegmentDescriptor,
    features: Vec<String>,
    order: PublishOrder,
    nics: Vec<Nic>,
    matrix: BTreeMap<String, LocationNics>,
    buffers: BTreeMap<RegionId, (Buffer, Vec<KeyPair>)>,
}

impl LocalRecord {
    /// A record of `nics`, named as peers name them, of which nothing is known yet: they count as
    /// down. `base` gives name, protocol and whatever else does not change; its devices, buffers
    /// and matrix are not used.
    pub fn new(
        base: SegmentDescriptor,
        features: Vec<String>,
        nics: impl IntoIterator<Item = String>,
        order: PublishOrder,
    ) -> Self {
        Self {
            base,
            features,
            order,
            nics: nics.into_iter().map(Nic::unknown).collect(),
            matrix: BTreeMap::new(),
            buffers: BTreeMap::new(),
        }
    }

    /// The segment's name.
    pub fn name(&self) -> &str {
        &self.base.name
    }

    /// Whether a NIC is published as usable.
    pub fn is_healthy(&self, local: LocalNic) -> bool {
        self.nics.get(local.0 as usize).is_some_and(Nic::is_healthy)
    }

    fn nic_mut(&mut self, local: LocalNic) -> Result<&mut Nic, EditError> {
        self.nics
            .get_mut(local.0 as usize)
            .ok_or(EditError::UnknownNic(local.0))
    }

    /// Makes a change; returns whether anything differs.
    ///
    /// # Errors
    ///
    /// See [`EditError`].
    pub fn apply(&mut self, edit: Edit) -> Result<bool, EditError> {
        match edit {
            Edit::Register {
                region,
                name,
                addr,
                length,
                mut keys,
            } => {
                if self.buffers.contains_key(&region) {
                    return Err(EditError::Duplicate(region.0));
                }
                let buffer = Buffer {
                    name,
                    addr,
                    length,
                    ..Buffer::default()
                };
                keys.resize(self.nics.len(), KeyPair::default());
                self.buffers.insert(region, (buffer, keys));
                Ok(true)
            }
            Edit::Nic { local, name } => {
                let nics = self.nics.len();
                if local.0 as usize != nics {
                    let local = local.0;
                    return Err(EditError::Order { local, nics });
                }
                self.nics.push(Nic::unknown(name));
                for (_, pairs) in self.buffers.values_mut() {
                    pairs.push(KeyPair::default());
                }
                Ok(true)
            }
            Edit::Unregister { region } => Ok(self.buffers.remove(&region).is_some()),
            Edit::Port { local, facts, gids } => {
                let nic = self.nic_mut(local)?;
                let state = match (facts.up, &nic.state) {
                    (false, _) => DeviceState::Down,
                    // A NIC that stays up keeps what is known of it: only coming back is doubtful.
                    (true, DeviceState::Up) => DeviceState::Up,
                    // The first reading of a NIC is no recovery.
                    (true, _) if nic.facts.is_none() => DeviceState::Up,
                    (true, _) => DeviceState::Recovering,
                };
                let next = Nic {
                    name: nic.name.clone(),
                    state,
                    facts: Some(facts),
                    gids,
                };
                let differs = *nic != next;
                *nic = next;
                Ok(differs)
            }
            Edit::Proved { local } => {
                let nic = self.nic_mut(local)?;
                let recovering = nic.state == DeviceState::Recovering;
                if recovering {
                    nic.state = DeviceState::Up;
                }
                Ok(recovering)
            }
            Edit::Rekey { local, keys } => {
                self.nic_mut(local)?;
                let mut differs = false;
                for (region, pair) in keys {
                    if let Some((_, pairs)) = self.buffers.get_mut(&region)
                        && let Some(slot) = pairs.get_mut(local.0 as usize)
                    {
                        differs |= *slot != pair;
                        *slot = pair;
                    }
                }
                Ok(differs)
            }
            Edit::Matrix(matrix) => {
                let differs = self.matrix != matrix;
                self.matrix = matrix;
                Ok(differs)
            }
        }
    }

    /// Positions of the NICs in the order of publication. The three arrays share it.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<_> = (0..self.nics.len()).collect();
        if self.order == PublishOrder::HealthyFirst {
            order.sort_by_key(|index| !self.nics[*index].is_healthy());
        }
        order
    }

    /// The descriptor to publish.
    pub fn render(&self, instance: InstanceId, generation: u64) -> SegmentDescriptor {
        let order = self.order();
        let mut descriptor = self.base.clone();
        let nics = || order.iter().map(|index| &self.nics[*index]);
        descriptor.devices = nics()
            .map(|nic| {
                let lid = nic.facts.as_ref().map_or(0, |facts| facts.lid);
                rerail_metadata::descriptor::Device::new(nic.name.clone(), lid, nic_gid(nic))
            })
            .collect();
        descriptor.buffers = self
            .buffers
            .values()
            .map(|(buffer, keys)| Buffer {
                rkey: order.iter().map(|index| keys[*index].rkey).collect(),
                lkey: order.iter().map(|index| keys[*index].lkey).collect(),
                ..buffer.clone()
            })
            .collect();
        descriptor.priority_matrix = self.healthy_matrix();
        let mut member = RerailMember::new(instance);
        member.generation = generation;
        member.features.clone_from(&self.features);
        member.devices = nics().map(rerail_device).collect();
        descriptor.rerail = Some(member);
        descriptor
    }

    /// The descriptor at the largest that it becomes with the memory that is registered now,
    /// whatever becomes of its NICs: keys, addresses and NICs that are up are told without anybody
    /// being asked whether there is room. With `more`, also a NIC of that name behind the others.
    pub fn render_largest(&self, instance: InstanceId, more: Option<&str>) -> SegmentDescriptor {
        let mut largest = self.clone();
        if let Some(name) = more {
            largest.nics.push(Nic::unknown(name.to_owned()));
            for (_, pairs) in largest.buffers.values_mut() {
                pairs.push(KeyPair::default());
            }
            // In one of the two lists of each location.
            for nics in largest.matrix.values_mut() {
                nics.available.push(name.to_owned());
            }
        }
        let mut descriptor = largest.render(instance, u64::MAX);
        descriptor.priority_matrix = largest.matrix;
        let longest = Gid([0xff; 16]);
        for device in &mut descriptor.devices {
            (device.gid, device.lid) = (longest, u16::MAX);
        }
        for buffer in &mut descriptor.buffers {
            buffer.rkey.fill(u32::MAX);
            buffer.lkey.fill(u32::MAX);
        }
        let member = descriptor.rerail.iter_mut();
        for device in member.flat_map(|member| &mut member.devices) {
            device.state = DeviceState::Recovering;
            (device.mtu, device.speed_mbps) = (u32::MAX, u32::MAX.into());
            let gids = device.gids.len().max(GIDS_MIN);
            device.gids = vec![longest; gids];
        }
        descriptor
    }

    /// The matrix without NICs that are down.
    fn healthy_matrix(&self) -> BTreeMap<String, LocationNics> {
        let healthy = |names: &[String]| {
            let is_healthy = |name: &&String| {
                self.nics
                    .iter()
                    .any(|nic| nic.name == **name && nic.is_healthy())
            };
            names.iter().filter(is_healthy).cloned().collect()
        };
        let entries = self.matrix.iter().map(|(location, nics)| {
            let nics = LocationNics {
                preferred: healthy(&nics.preferred),
                available: healthy(&nics.available),
            };
            (location.clone(), nics)
        });
        entries.collect()
    }
}

/// A NIC that is down keeps the last GID's text: C++ readers refuse a whole record without it.
fn nic_gid(nic: &Nic) -> Gid {
    let selection = nic.facts.as_ref().and_then(|facts| facts.gid.as_ref());
    selection.map_or(Gid::NULL, |selection| selection.gid)
}

fn rerail_device(nic: &Nic) -> RerailDevice {
    let facts = nic.facts.as_ref();
    RerailDevice {
        name: nic.name.clone(),
        state: nic.state.clone(),
        mtu: facts
            .and_then(|facts| facts.mtu)
            .map_or(0, |mtu| mtu.bytes()),
        speed_mbps: facts.map_or(0, |facts| facts.speed_mbps.into()),
        gids: nic.gids.clone(),
        unknown: BTreeMap::new(),
    }
}
