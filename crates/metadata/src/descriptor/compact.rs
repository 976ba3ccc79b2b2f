//! The compact form of a descriptor, for subscriptions between Rerail peers.
//!
//! One byte of version, then bincode in its `legacy` configuration: little-endian, fixed width, the
//! bytes of bincode 1. Positional, so that any change of the structures below is a new version.
//! bincode is not maintained any more; it is named in this file only.

use std::borrow::Cow;
use std::collections::BTreeMap;

use rerail_verbs::types::Gid;
use serde::{Deserialize, Serialize};

use super::{
    Buffer, Device, DocumentError, InstanceId, LocationNics, Protocol, RerailDevice, RerailMember,
    SegmentDescriptor, UnknownMembers,
};

/// Version that this crate writes, and the only one that it reads.
pub const COMPACT_VERSION: u8 = 1;
/// Longest compact descriptor in bytes, written or read: 40 000 buffers with keys for 8 NICs are
/// about 5 MB.
pub const COMPACT_BYTES_MAX: usize = 64 << 20;

type Text<'a> = Cow<'a, str>;
type Texts<'a> = Cow<'a, [String]>;
/// Name and JSON text of each unknown member: bincode itself has no values of any type.
type Unknown<'a> = Vec<(Text<'a>, String)>;

#[derive(Serialize, Deserialize)]
struct Segment<'a> {
    name: Text<'a>,
    many_protocols: bool,
    protocols: Texts<'a>,
    devices: Vec<DeviceForm<'a>>,
    buffers: Vec<BufferForm<'a>>,
    matrix: Vec<(Text<'a>, Texts<'a>, Texts<'a>)>,
    tcp_data_port: u16,
    tcp_proto_version: u32,
    tcp_data_host: Option<Text<'a>>,
    timestamp: Text<'a>,
    rdma_server_name: Option<Text<'a>>,
    rerail: Option<Rerail<'a>>,
    unknown: Unknown<'a>,
}

#[derive(Serialize, Deserialize)]
struct DeviceForm<'a> {
    name: Text<'a>,
    lid: u16,
    gid: [u8; 16],
    unknown: Unknown<'a>,
}

#[derive(Serialize, Deserialize)]
struct BufferForm<'a> {
    name: Text<'a>,
    addr: u64,
    length: u64,
    rkey: Cow<'a, [u32]>,
    lkey: Cow<'a, [u32]>,
    unknown: Unknown<'a>,
}

#[derive(Serialize, Deserialize)]
struct Rerail<'a> {
    instance: [u8; 16],
    generation: u64,
    features: Texts<'a>,
    devices: Vec<RerailDeviceForm<'a>>,
    unknown: Unknown<'a>,
}

#[derive(Serialize, Deserialize)]
struct RerailDeviceForm<'a> {
    name: Text<'a>,
    state: Text<'a>,
    mtu: u32,
    speed_mbps: u64,
    gids: Vec<[u8; 16]>,
    unknown: Unknown<'a>,
}

fn config() -> impl bincode::config::Config {
    bincode::config::legacy().with_limit::<COMPACT_BYTES_MAX>()
}

impl SegmentDescriptor {
    /// Writes the compact form.
    ///
    /// # Errors
    ///
    /// [`DocumentError::TooLarge`] over [`COMPACT_BYTES_MAX`].
    pub fn to_compact(&self) -> Result<Vec<u8>, DocumentError> {
        let mut bytes = vec![COMPACT_VERSION];
        let body = bincode::serde::encode_to_vec(Segment::from(self), config())
            .map_err(|error| DocumentError::value("(compact form)", error.to_string()))?;
        if body.len() >= COMPACT_BYTES_MAX {
            return Err(DocumentError::TooLarge {
                size: body.len() + 1,
                limit: COMPACT_BYTES_MAX,
            });
        }
        bytes.extend_from_slice(&body);
        Ok(bytes)
    }

    /// Reads the compact form and checks it as [`SegmentDescriptor::from_json`] does.
    ///
    /// # Errors
    ///
    /// Another version, bytes that are missing or left over, a size over [`COMPACT_BYTES_MAX`], or
    /// a member at fault.
    pub fn from_compact(bytes: &[u8]) -> Result<Self, DocumentError> {
        let broken = |reason: String| DocumentError::value("(compact form)", reason);
        if bytes.len() > COMPACT_BYTES_MAX {
            return Err(DocumentError::TooLarge {
                size: bytes.len(),
                limit: COMPACT_BYTES_MAX,
            });
        }
        let Some((&version, body)) = bytes.split_first() else {
            return Err(broken("empty".into()));
        };
        if version != COMPACT_VERSION {
            return Err(broken(format!(
                "version {version}, expected {COMPACT_VERSION}"
            )));
        }
        let (form, read): (Segment<'_>, usize) = bincode::serde::decode_from_slice(body, config())
            .map_err(|error| broken(error.to_string()))?;
        if read != body.len() {
            return Err(broken(format!("{} bytes left over", body.len() - read)));
        }
        let descriptor = Self::try_from(form)?;
        descriptor.validate()?;
        Ok(descriptor)
    }
}

fn unknown(members: &UnknownMembers) -> Unknown<'_> {
    members
        .iter()
        .map(|(name, value)| (name.into(), value.to_string()))
        .collect()
}

fn known_again(members: Unknown<'_>) -> Result<UnknownMembers, DocumentError> {
    members
        .into_iter()
        .map(|(name, text)| {
            let value = serde_json::from_str(&text)
                .map_err(|error| DocumentError::value(name.clone(), error.to_string()))?;
            Ok((name.into_owned(), value))
        })
        .collect()
}

impl<'a> From<&'a SegmentDescriptor> for Segment<'a> {
    fn from(descriptor: &'a SegmentDescriptor) -> Self {
        Self {
            name: descriptor.name.as_str().into(),
            many_protocols: matches!(descriptor.protocol, Protocol::Many(_)),
            protocols: descriptor.protocol.names().into(),
            devices: descriptor
                .devices
                .iter()
                .map(|device| DeviceForm {
                    name: device.name.as_str().into(),
                    lid: device.lid,
                    gid: device.gid.0,
                    unknown: unknown(&device.unknown),
                })
                .collect(),
            buffers: descriptor
                .buffers
                .iter()
                .map(|buffer| BufferForm {
                    name: buffer.name.as_str().into(),
                    addr: buffer.addr,
                    length: buffer.length,
                    rkey: buffer.rkey.as_slice().into(),
                    lkey: buffer.lkey.as_slice().into(),
                    unknown: unknown(&buffer.unknown),
                })
                .collect(),
            matrix: descriptor
                .priority_matrix
                .iter()
                .map(|(location, nics)| {
                    let preferred = nics.preferred.as_slice().into();
                    (
                        location.as_str().into(),
                        preferred,
                        nics.available.as_slice().into(),
                    )
                })
                .collect(),
            tcp_data_port: descriptor.tcp_data_port,
            tcp_proto_version: descriptor.tcp_proto_version,
            tcp_data_host: descriptor.tcp_data_host.as_deref().map(Cow::from),
            timestamp: descriptor.timestamp.as_str().into(),
            rdma_server_name: descriptor.rdma_server_name.as_deref().map(Cow::from),
            rerail: descriptor.rerail.as_ref().map(Rerail::from),
            unknown: unknown(&descriptor.unknown),
        }
    }
}

impl<'a> From<&'a RerailMember> for Rerail<'a> {
    fn from(member: &'a RerailMember) -> Self {
        Self {
            instance: member.instance.0,
            generation: member.generation,
            features: member.features.as_slice().into(),
            devices: member
                .devices
                .iter()
                .map(|device| RerailDeviceForm {
                    name: device.name.as_str().into(),
                    state: device.state.as_str().into(),
                    mtu: device.mtu,
                    speed_mbps: device.speed_mbps,
                    gids: device.gids.iter().map(|gid| gid.0).collect(),
                    unknown: unknown(&device.unknown),
                })
                .collect(),
            unknown: unknown(&member.unknown),
        }
    }
}

impl TryFrom<Segment<'_>> for SegmentDescriptor {
    type Error = DocumentError;

    fn try_from(form: Segment<'_>) -> Result<Self, DocumentError> {
        let protocols = form.protocols.into_owned();
        let protocol = match (form.many_protocols, <[String; 1]>::try_from(protocols)) {
            (false, Ok([name])) => Protocol::One(name),
            (true, Ok(names)) => Protocol::Many(names.into()),
            (true, Err(names)) if !names.is_empty() => Protocol::Many(names),
            _ => return Err(DocumentError::value("protocol", "expected one")),
        };
        let devices = form.devices.into_iter().map(|device| {
            Ok(Device {
                name: device.name.into_owned(),
                lid: device.lid,
                gid: Gid(device.gid),
                unknown: known_again(device.unknown)?,
            })
        });
        let buffers = form.buffers.into_iter().map(|buffer| {
            Ok(Buffer {
                name: buffer.name.into_owned(),
                addr: buffer.addr,
                length: buffer.length,
                rkey: buffer.rkey.into_owned(),
                lkey: buffer.lkey.into_owned(),
                unknown: known_again(buffer.unknown)?,
            })
        });
        let matrix = form
            .matrix
            .into_iter()
            .map(|(location, preferred, available)| {
                let nics = LocationNics {
                    preferred: preferred.into_owned(),
                    available: available.into_owned(),
                };
                (location.into_owned(), nics)
            });
        Ok(Self {
            devices: devices.collect::<Result<_, DocumentError>>()?,
            buffers: buffers.collect::<Result<_, DocumentError>>()?,
            priority_matrix: matrix.collect::<BTreeMap<_, _>>(),
            tcp_data_port: form.tcp_data_port,
            tcp_proto_version: form.tcp_proto_version,
            tcp_data_host: form.tcp_data_host.map(Cow::into_owned),
            timestamp: form.timestamp.into_owned(),
            rdma_server_name: form.rdma_server_name.map(Cow::into_owned),
            rerail: form.rerail.map(RerailMember::try_from).transpose()?,
            unknown: known_again(form.unknown)?,
            ..Self::new(form.name, protocol)
        })
    }
}

impl TryFrom<Rerail<'_>> for RerailMember {
    type Error = DocumentError;

    fn try_from(form: Rerail<'_>) -> Result<Self, DocumentError> {
        let devices = form.devices.into_iter().map(|device| {
            Ok(RerailDevice {
                name: device.name.into_owned(),
                state: device.state.into_owned().into(),
                mtu: device.mtu,
                speed_mbps: device.speed_mbps,
                gids: device.gids.into_iter().map(Gid).collect(),
                unknown: known_again(device.unknown)?,
            })
        });
        Ok(Self {
            instance: InstanceId(form.instance),
            generation: form.generation,
            features: form.features.into_owned(),
            devices: devices.collect::<Result<_, DocumentError>>()?,
            unknown: known_again(form.unknown)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::JsonForm;

    #[test]
    fn a_small_descriptor_has_the_golden_bytes() {
        let segment = SegmentDescriptor {
            buffers: vec![Buffer::tcp("n", 4096, 2)],
            tcp_data_port: 0x1234,
            ..SegmentDescriptor::new("n", Protocol::tcp())
        };
        let mut golden = vec![COMPACT_VERSION];
        let text = |golden: &mut Vec<u8>, text: &str| {
            golden.extend((text.len() as u64).to_le_bytes());
            golden.extend(text.as_bytes());
        };
        let count = |golden: &mut Vec<u8>, count: u64| golden.extend(count.to_le_bytes());
        text(&mut golden, "n");
        golden.push(0); // one protocol
        count(&mut golden, 1);
        text(&mut golden, "tcp");
        count(&mut golden, 0); // devices
        count(&mut golden, 1); // buffers
        text(&mut golden, "n");
        count(&mut golden, 4096);
        count(&mut golden, 2);
        for _ in 0..3 {
            count(&mut golden, 0); // rkey, lkey, unknown
        }
        count(&mut golden, 0); // matrix
        golden.extend(0x1234_u16.to_le_bytes());
        golden.extend(1_u32.to_le_bytes());
        golden.push(0); // no host
        count(&mut golden, 0); // timestamp
        golden.extend([0, 0]); // no RDMA name, no rerail member
        count(&mut golden, 0); // unknown
        assert_eq!(segment.to_compact().expect("small"), golden);
        assert_eq!(SegmentDescriptor::from_compact(&golden), Ok(segment));
    }

    #[test]
    fn everything_that_json_keeps_is_kept() {
        let text = br#"{"buffers":[{"addr":1,"length":2,"lkey":[6],"name":"cpu:0","rkey":[5],
            "x":[1.5,null]}],"devices":[{"gid":"fe:80:00:00:00:00:00:00:02:00:11:03:00:22:33:04",
            "lid":9,"name":"d","y":{}}],"name":"n","priority_matrix":{"cpu:0":[["d"],[]]},
            "protocol":["rdma","tcp"],"rdma_server_name":"r","rerail":{"devices":[{"gids":
            ["10.0.0.1"],"mtu":1,"name":"d","speed_mbps":2,"state":"odd","z":0}],"features":["f"],
            "generation":3,"instance":"0192f3a1b2c37d4e8f90123456789abc","w":1},"tcp_data_host":"h",
            "tcp_data_port":4,"tcp_proto_version":5,"timestamp":"t","v":"u"}"#;
        let segment = SegmentDescriptor::from_json(text).expect("valid");
        let bytes = segment.to_compact().expect("small");
        assert!(bytes.len() < segment.to_json(JsonForm::Bare).len());
        assert_eq!(SegmentDescriptor::from_compact(&bytes), Ok(segment));
    }

    #[test]
    fn anything_else_is_refused() {
        let good = SegmentDescriptor::new("n", Protocol::tcp())
            .to_compact()
            .expect("small");
        for length in 0..good.len() {
            assert!(
                SegmentDescriptor::from_compact(&good[..length]).is_err(),
                "cut at {length}"
            );
        }
        let mut long = good.clone();
        long.push(0);
        assert!(
            SegmentDescriptor::from_compact(&long).is_err(),
            "a byte left over"
        );
        let mut later = good.clone();
        later[0] = 2;
        assert!(
            SegmentDescriptor::from_compact(&later).is_err(),
            "another version"
        );
        let mut huge = good;
        huge[1..9].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(
            SegmentDescriptor::from_compact(&huge).is_err(),
            "a length of 2^64 - 1"
        );
    }
}
