//! One NIC port of a segment.

use rerail_verbs::types::Gid;
use serde_json::Value;

use super::encode::{Member, Object};
use super::fields::Fields;
use super::{DocumentError, UnknownMembers};

/// An element of `devices`. Index i belongs to `rkey[i]` and `lkey[i]` of every buffer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Device {
    /// Device name for its first used port, `<device>:<port>` for each further one. Not empty.
    pub name: String,
    /// The port's LID; 0 on Ethernet.
    pub lid: u16,
    /// The GID that peers connect to. Null for a device that has none at the moment.
    pub gid: Gid,
    /// Members that this crate does not know.
    pub unknown: UnknownMembers,
}

impl Device {
    /// A device without unknown members.
    pub fn new(name: impl Into<String>, lid: u16, gid: Gid) -> Self {
        Self {
            name: name.into(),
            lid,
            gid,
            unknown: UnknownMembers::new(),
        }
    }

    pub(super) fn from_value(value: Value, path: String) -> Result<Self, DocumentError> {
        let mut fields = Fields::new(value, path)?;
        let name = fields.non_empty_string("name")?;
        // A missing LID reads as 0, as in the C++ reader.
        let lid = fields
            .optional_unsigned("lid", u16::MAX.into())?
            .unwrap_or(0);
        let gid = fields.non_empty_string("gid")?;
        let gid = gid
            .parse()
            .map_err(|error| DocumentError::value(fields.path_of("gid"), format!("{error}")))?;
        Ok(Self {
            name,
            lid: lid as u16,
            gid,
            unknown: fields.into_unknown(),
        })
    }

    pub(super) fn to_object(&self) -> Object<'_> {
        Object::new(
            vec![
                ("gid", Member::OwnedText(self.gid.to_wire())),
                ("lid", Member::Unsigned(self.lid.into())),
                ("name", Member::Text(&self.name)),
            ],
            &self.unknown,
        )
    }
}
