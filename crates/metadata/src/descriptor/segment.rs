//! The segment descriptor.

use std::collections::BTreeMap;

use serde_json::Value;

use super::encode::{JsonForm, Member, NO_UNKNOWN, Object};
use super::fields::{self, Fields};
use super::nic_path::{self, NicPath};
use super::{Buffer, Device, DocumentError, RerailMember, UnknownMembers};

/// What an engine tells about itself: how to reach it and which memory it offers
/// (reference 2.5).
///
/// `devices`, `buffers` and `priority_matrix` are typed for the protocols that Rerail speaks
/// (`rdma`, `tcp`, and `barex`, which has the same form). In descriptors of other protocols they
/// stay in [`unknown`](Self::unknown) as they were read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentDescriptor {
    /// The segment's name. Not empty.
    pub name: String,
    /// How its memory is reached.
    pub protocol: Protocol,
    /// NIC ports. The order is kept for the life of the owner.
    pub devices: Vec<Device>,
    /// Registered memory.
    pub buffers: Vec<Buffer>,
    /// For each location (`cpu:0`, `cuda:3` …) the NICs near to it and the others. A NIC that is
    /// withdrawn is missing here and stays in `devices`.
    pub priority_matrix: BTreeMap<String, LocationNics>,
    /// Port of the TCP data listener; 0 without one.
    pub tcp_data_port: u16,
    /// Version of the TCP data protocol. Missing reads as 1.
    pub tcp_proto_version: u32,
    /// Host of the TCP data listener, where it is said.
    pub tcp_data_host: Option<String>,
    /// See [`super::timestamp`]. Informational.
    pub timestamp: String,
    /// The name used in NIC paths where it differs from `name`. An empty text on the wire reads
    /// as absent.
    pub rdma_server_name: Option<String>,
    /// Rerail's own member; `None` for C++ writers.
    pub rerail: Option<RerailMember>,
    /// Members that this crate does not know.
    pub unknown: UnknownMembers,
}

/// The member `protocol`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Protocol {
    /// One protocol, as a string.
    One(String),
    /// Several, as an array (C++ builds with `ENABLE_MULTI_PROTOCOL`).
    Many(Vec<String>),
}

impl Protocol {
    /// `"rdma"`.
    pub fn rdma() -> Self {
        Self::One("rdma".into())
    }

    /// `"tcp"`.
    pub fn tcp() -> Self {
        Self::One("tcp".into())
    }

    /// True if `protocol` is the one, or among the several.
    pub fn includes(&self, protocol: &str) -> bool {
        self.names().iter().any(|name| name == protocol)
    }

    /// All names.
    pub fn names(&self) -> &[String] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Many(names) => names,
        }
    }

    fn is_typed(&self) -> bool {
        self.names()
            .iter()
            .all(|name| matches!(name.as_str(), "rdma" | "barex" | "tcp"))
    }

    fn has_devices(&self) -> bool {
        self.includes("rdma") || self.includes("barex")
    }
}

/// A value of the priority matrix: `[[preferred], [available]]`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LocationNics {
    /// NICs near the location, best first.
    pub preferred: Vec<String>,
    /// NICs that also reach it.
    pub available: Vec<String>,
}

impl SegmentDescriptor {
    /// An empty descriptor.
    pub fn new(name: impl Into<String>, protocol: Protocol) -> Self {
        Self {
            name: name.into(),
            protocol,
            devices: Vec::new(),
            buffers: Vec::new(),
            priority_matrix: BTreeMap::new(),
            tcp_data_port: 0,
            tcp_proto_version: 1,
            tcp_data_host: None,
            timestamp: String::new(),
            rdma_server_name: None,
            rerail: None,
            unknown: UnknownMembers::new(),
        }
    }

    /// Reads a JSON text and checks it.
    ///
    /// # Errors
    ///
    /// Names the member that is missing or wrong. A descriptor is taken whole or not at all.
    pub fn from_json(text: &[u8]) -> Result<Self, DocumentError> {
        Self::from_value(parse_json(text)?)
    }

    /// Reads a parsed JSON document and checks it; for documents inside RPC frames.
    ///
    /// # Errors
    ///
    /// As [`SegmentDescriptor::from_json`].
    pub fn from_value(value: Value) -> Result<Self, DocumentError> {
        let mut fields = Fields::new(value, "")?;
        let name = fields.non_empty_string("name")?;
        let protocol = Protocol::from_value(fields.require("protocol")?)?;
        let tcp_data_port = fields.optional_unsigned("tcp_data_port", u16::MAX.into())?;
        let tcp_proto_version = fields.optional_unsigned("tcp_proto_version", u32::MAX.into())?;
        let not_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
        let mut descriptor = Self {
            tcp_data_port: tcp_data_port.unwrap_or(0) as u16,
            tcp_proto_version: tcp_proto_version.unwrap_or(1) as u32,
            tcp_data_host: not_empty(fields.optional_string("tcp_data_host")?),
            timestamp: fields.optional_string("timestamp")?.unwrap_or_default(),
            rdma_server_name: not_empty(fields.optional_string("rdma_server_name")?),
            rerail: fields
                .take("rerail")
                .map(|member| RerailMember::from_value(member, "rerail"))
                .transpose()?,
            ..Self::new(name, protocol)
        };
        if descriptor.protocol.is_typed() {
            descriptor.devices = elements(&mut fields, "devices", Device::from_value)?;
            descriptor.buffers = elements(&mut fields, "buffers", Buffer::from_value)?;
            if let Some(matrix) = fields.take("priority_matrix") {
                descriptor.priority_matrix = read_matrix(matrix)?;
            }
        }
        descriptor.unknown = fields.into_unknown();
        descriptor.validate()?;
        Ok(descriptor)
    }

    /// Checks what the types do not: the rules by which readers refuse a whole descriptor.
    ///
    /// # Errors
    ///
    /// Names the member at fault.
    pub fn validate(&self) -> Result<(), DocumentError> {
        let refuse = |field: String, reason: String| Err(DocumentError::Value { field, reason });
        if self.name.is_empty() {
            return refuse("name".into(), "must not be empty".into());
        }
        for (index, device) in self.devices.iter().enumerate() {
            if device.name.is_empty() {
                return refuse(format!("devices[{index}].name"), "must not be empty".into());
            }
            if self.devices[..index]
                .iter()
                .any(|other| other.name == device.name)
            {
                return refuse(
                    format!("devices[{index}].name"),
                    format!("{:?} is there twice", device.name),
                );
            }
        }
        for (index, buffer) in self.buffers.iter().enumerate() {
            let at = |member: &str| format!("buffers[{index}].{member}");
            if buffer.name.is_empty() {
                return refuse(at("name"), "must not be empty".into());
            }
            if buffer.addr == 0 || buffer.length == 0 {
                let member = if buffer.addr == 0 { "addr" } else { "length" };
                return refuse(at(member), "must not be 0".into());
            }
            let (rkeys, lkeys) = (buffer.rkey.len(), buffer.lkey.len());
            if rkeys != 0 && rkeys != lkeys {
                return refuse(at("rkey"), format!("{rkeys} keys, while lkey has {lkeys}"));
            }
            if rkeys != 0 && rkeys != self.devices.len() {
                return refuse(
                    at("rkey"),
                    format!("{rkeys} keys for {} devices", self.devices.len()),
                );
            }
        }
        Ok(())
    }

    /// Writes the JSON text: compact, members in ascending byte order.
    pub fn to_json(&self, form: JsonForm) -> Vec<u8> {
        let mut members = vec![
            ("name", Member::Text(&self.name)),
            (
                "protocol",
                match &self.protocol {
                    Protocol::One(name) => Member::Text(name),
                    Protocol::Many(names) => Member::Texts(names),
                },
            ),
            ("tcp_data_port", Member::Unsigned(self.tcp_data_port.into())),
            (
                "tcp_proto_version",
                Member::Unsigned(self.tcp_proto_version.into()),
            ),
            ("timestamp", Member::Text(&self.timestamp)),
        ];
        let with_devices = self.protocol.has_devices();
        if self.protocol.is_typed() {
            members.push((
                "buffers",
                Member::List(
                    self.buffers
                        .iter()
                        .map(|buffer| buffer.to_object(with_devices))
                        .collect(),
                ),
            ));
            if with_devices || !self.devices.is_empty() {
                members.push((
                    "devices",
                    Member::List(self.devices.iter().map(Device::to_object).collect()),
                ));
            }
            if with_devices || !self.priority_matrix.is_empty() {
                members.push(("priority_matrix", Member::Nested(self.matrix_object())));
            }
        }
        if let Some(host) = &self.tcp_data_host {
            members.push(("tcp_data_host", Member::Text(host)));
        }
        if let Some(name) = &self.rdma_server_name {
            members.push(("rdma_server_name", Member::Text(name)));
        }
        if let Some(rerail) = &self.rerail {
            members.push(("rerail", Member::Nested(rerail.to_object())));
        }
        Object::new(members, &self.unknown).to_json(form)
    }

    /// `nicPathServerName`: what stands before the `@` in this segment's NIC paths.
    pub fn nic_path_server_name(&self) -> &str {
        nic_path::nic_path_server_name(&self.name, self.rdma_server_name.as_deref())
    }

    /// The NIC path of `device` in this segment.
    pub fn nic_path(&self, device: &str) -> NicPath {
        nic_path::nic_path(&self.name, self.rdma_server_name.as_deref(), device)
    }

    /// Position of `device` in `devices`, and so in every `rkey`. Readers go by name: indexes
    /// derived from the matrix are wrong once a NIC has been withdrawn (reference 4.4).
    pub fn device_index(&self, device: &str) -> Option<usize> {
        self.devices.iter().position(|listed| listed.name == device)
    }

    /// The buffer that holds `length` bytes from `addr`, if one does.
    pub fn buffer_at(&self, addr: u64, length: u64) -> Option<&Buffer> {
        self.buffers
            .iter()
            .find(|buffer| buffer.contains(addr, length))
    }

    /// True if both say the same, whatever their timestamps.
    pub fn same_content(&self, other: &Self) -> bool {
        self.name == other.name
            && self.protocol == other.protocol
            && self.devices == other.devices
            && self.buffers == other.buffers
            && self.priority_matrix == other.priority_matrix
            && self.tcp_data_port == other.tcp_data_port
            && self.tcp_proto_version == other.tcp_proto_version
            && self.tcp_data_host == other.tcp_data_host
            && self.rdma_server_name == other.rdma_server_name
            && self.rerail == other.rerail
            && self.unknown == other.unknown
    }

    fn matrix_object(&self) -> Object<'_> {
        Object::new(
            self.priority_matrix
                .iter()
                .map(|(location, nics)| {
                    (
                        location.as_str(),
                        Member::Pair(&nics.preferred, &nics.available),
                    )
                })
                .collect(),
            &NO_UNKNOWN,
        )
    }
}

impl Protocol {
    fn from_value(value: Value) -> Result<Self, DocumentError> {
        let names = match value {
            Value::String(name) if !name.is_empty() => return Ok(Self::One(name)),
            Value::String(_) => return Err(DocumentError::value("protocol", "must not be empty")),
            Value::Array(names) => fields::strings(names, "protocol")?,
            other => {
                return Err(fields::wrong_type(
                    "protocol".into(),
                    "a string or an array",
                    &other,
                ));
            }
        };
        if names.is_empty() || names.iter().any(String::is_empty) {
            return Err(DocumentError::value("protocol", "must not be empty"));
        }
        Ok(Self::Many(names))
    }
}

pub(super) fn parse_json(text: &[u8]) -> Result<Value, DocumentError> {
    serde_json::from_slice(text).map_err(|error| DocumentError::Syntax {
        line: error.line(),
        column: error.column(),
        reason: error.to_string(),
    })
}

fn elements<T>(
    fields: &mut Fields,
    member: &str,
    read: impl Fn(Value, String) -> Result<T, DocumentError>,
) -> Result<Vec<T>, DocumentError> {
    fields
        .array(member)?
        .into_iter()
        .enumerate()
        .map(|(index, item)| read(item, format!("{member}[{index}]")))
        .collect()
}

fn read_matrix(value: Value) -> Result<BTreeMap<String, LocationNics>, DocumentError> {
    let Value::Object(locations) = value else {
        return Err(fields::wrong_type(
            "priority_matrix".into(),
            "an object",
            &value,
        ));
    };
    locations
        .into_iter()
        .map(|(location, value)| {
            let path = format!("priority_matrix.{location}");
            let lists = fields::array(value, path.clone())?;
            let Ok([preferred, available]) = <[Value; 2]>::try_from(lists) else {
                return Err(DocumentError::value(
                    path,
                    "expected two arrays, [[preferred], [available]]",
                ));
            };
            let read = |index: usize, list: Value| {
                let path = format!("{path}[{index}]");
                fields::strings(fields::array(list, path.clone())?, &path)
            };
            let nics = LocationNics {
                preferred: read(0, preferred)?,
                available: read(1, available)?,
            };
            Ok((location, nics))
        })
        .collect()
}
