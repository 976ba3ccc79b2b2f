//! The member `rerail`: what C++ readers ignore and Rerail readers go by.

use std::fmt;
use std::str::FromStr;

use rerail_verbs::types::Gid;
use serde_json::Value;

use super::encode::{Member, Object};
use super::fields::{self, Fields};
use super::{DocumentError, UnknownMembers};

/// One life of an engine. A restarted process has another one, under the same segment name.
///
/// UUID version 7, written as 32 lower-case hex digits; a later start compares greater, up to
/// the clocks' error.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId(pub [u8; 16]);

impl InstanceId {
    /// A new one, from the system's clock and randomness. For drivers, not for machines.
    pub fn now() -> Self {
        Self(uuid::Uuid::now_v7().into_bytes())
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InstanceId({self})")
    }
}

impl FromStr for InstanceId {
    type Err = DocumentError;

    fn from_str(text: &str) -> Result<Self, DocumentError> {
        let error = || DocumentError::value("instance", "expected 32 hex digits");
        if text.len() != 32 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(error());
        }
        u128::from_str_radix(text, 16)
            .map(|number| Self(number.to_be_bytes()))
            .map_err(|_| error())
    }
}

/// Whether a device can be used, as its owner sees it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum DeviceState {
    /// In use.
    Up,
    /// Withdrawn: not to be connected to.
    Down,
    /// Back, and not yet proved good.
    Recovering,
    /// A state that a newer writer knows. To be treated as [`DeviceState::Down`].
    Other(String),
}

impl DeviceState {
    /// The text on the wire.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::Recovering => "recovering",
            Self::Other(text) => text,
        }
    }
}

impl From<String> for DeviceState {
    fn from(text: String) -> Self {
        match text.as_str() {
            "up" => Self::Up,
            "down" => Self::Down,
            "recovering" => Self::Recovering,
            _ => Self::Other(text),
        }
    }
}

/// An element of `rerail.devices`. Found by name, never by index.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RerailDevice {
    /// The same name as in `devices`.
    pub name: String,
    /// Whether it can be used.
    pub state: DeviceState,
    /// Active path MTU in bytes.
    pub mtu: u32,
    /// Speed in Mbit/s; 0 where it is not known.
    pub speed_mbps: u64,
    /// Usable GIDs, best first, for the choice of pairs.
    pub gids: Vec<Gid>,
    /// Members that this crate does not know.
    pub unknown: UnknownMembers,
}

/// The member `rerail` of a segment descriptor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RerailMember {
    /// The writer's life.
    pub instance: InstanceId,
    /// Counts the writer's publications; greater is newer within one instance.
    pub generation: u64,
    /// Extensions that the writer takes part in, such as `push/1`.
    pub features: Vec<String>,
    /// What the plain `devices` has no room for.
    pub devices: Vec<RerailDevice>,
    /// Members that this crate does not know.
    pub unknown: UnknownMembers,
}

impl RerailMember {
    /// The first publication of `instance`, without features or devices.
    pub fn new(instance: InstanceId) -> Self {
        Self {
            instance,
            generation: 1,
            features: Vec::new(),
            devices: Vec::new(),
            unknown: UnknownMembers::new(),
        }
    }

    /// True if the writer takes part in `feature`.
    pub fn has_feature(&self, feature: &str) -> bool {
        self.features.iter().any(|listed| listed == feature)
    }

    pub(super) fn from_value(value: Value, path: &str) -> Result<Self, DocumentError> {
        let mut fields = Fields::new(value, path)?;
        let instance = fields.string("instance")?;
        let instance = instance.parse().map_err(|_| {
            DocumentError::value(fields.path_of("instance"), "expected 32 hex digits")
        })?;
        let generation = fields.unsigned("generation", u64::MAX)?;
        let features_path = fields.path_of("features");
        let features = fields::strings(fields.array("features")?, &features_path)?;
        let devices_path = fields.path_of("devices");
        let devices = fields
            .array("devices")?
            .into_iter()
            .enumerate()
            .map(|(index, device)| {
                RerailDevice::from_value(device, format!("{devices_path}[{index}]"))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            instance,
            generation,
            features,
            devices,
            unknown: fields.into_unknown(),
        })
    }

    pub(super) fn to_object(&self) -> Object<'_> {
        Object::new(
            vec![
                (
                    "devices",
                    Member::List(self.devices.iter().map(RerailDevice::to_object).collect()),
                ),
                ("features", Member::Texts(&self.features)),
                ("generation", Member::Unsigned(self.generation)),
                ("instance", Member::OwnedText(self.instance.to_string())),
            ],
            &self.unknown,
        )
    }
}

impl RerailDevice {
    fn from_value(value: Value, path: String) -> Result<Self, DocumentError> {
        let mut fields = Fields::new(value, path)?;
        let name = fields.non_empty_string("name")?;
        let state = fields.string("state")?.into();
        let mtu = fields
            .optional_unsigned("mtu", u32::MAX.into())?
            .unwrap_or(0) as u32;
        let speed_mbps = fields
            .optional_unsigned("speed_mbps", u64::MAX)?
            .unwrap_or(0);
        let gids_path = fields.path_of("gids");
        let gids = fields::strings(fields.array("gids")?, &gids_path)?
            .into_iter()
            .enumerate()
            .map(|(index, gid)| {
                gid.parse().map_err(|error| {
                    DocumentError::value(format!("{gids_path}[{index}]"), format!("{error}"))
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name,
            state,
            mtu,
            speed_mbps,
            gids,
            unknown: fields.into_unknown(),
        })
    }

    fn to_object(&self) -> Object<'_> {
        Object::new(
            vec![
                (
                    "gids",
                    Member::OwnedTexts(self.gids.iter().map(Gid::to_wire).collect()),
                ),
                ("mtu", Member::Unsigned(self.mtu.into())),
                ("name", Member::Text(&self.name)),
                ("speed_mbps", Member::Unsigned(self.speed_mbps)),
                ("state", Member::Text(self.state.as_str())),
            ],
            &self.unknown,
        )
    }
}
