//! One registered memory region of a segment.

use serde_json::Value;

use super::encode::{Member, Object};
use super::fields::{self, Fields};
use super::{DocumentError, UnknownMembers};

/// An element of `buffers`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Buffer {
    /// The location: `cpu:0`, `cuda:3`, `*`, `segments:…`; in TCP segments the server's name.
    pub name: String,
    /// First address in the owner's address space. Not 0.
    pub addr: u64,
    /// Length in bytes. Not 0; `addr + length` is below 2^64.
    pub length: u64,
    /// Remote keys, one a device, in the order of `devices`; empty for memory that peers must
    /// not touch, and in TCP segments.
    pub rkey: Vec<u32>,
    /// Local keys, one a device. Published because the form has always had them.
    pub lkey: Vec<u32>,
    /// Members that this crate does not know.
    pub unknown: UnknownMembers,
}

impl Buffer {
    /// The form of TCP segments: no keys.
    pub fn tcp(server_name: impl Into<String>, addr: u64, length: u64) -> Self {
        Self {
            name: server_name.into(),
            addr,
            length,
            ..Self::default()
        }
    }

    /// True if `length` bytes from `addr` lie inside this buffer.
    pub fn contains(&self, addr: u64, length: u64) -> bool {
        addr >= self.addr && length <= self.length && addr - self.addr <= self.length - length
    }

    pub(super) fn from_value(value: Value, path: String) -> Result<Self, DocumentError> {
        let mut fields = Fields::new(value, path)?;
        let name = fields.non_empty_string("name")?;
        let addr = fields.unsigned("addr", u64::MAX)?;
        if addr == 0 {
            return Err(DocumentError::value(
                fields.path_of("addr"),
                "must not be 0",
            ));
        }
        let length = fields.unsigned("length", u64::MAX)?;
        if length == 0 {
            return Err(DocumentError::value(
                fields.path_of("length"),
                "must not be 0",
            ));
        }
        if addr.checked_add(length).is_none() {
            return Err(DocumentError::value(
                fields.path_of("length"),
                format!("{length} bytes from address {addr} pass the end of the address space"),
            ));
        }
        let rkey = keys(&mut fields, "rkey")?;
        let lkey = keys(&mut fields, "lkey")?;
        if !rkey.is_empty() && rkey.len() != lkey.len() {
            return Err(DocumentError::value(
                fields.path_of("rkey"),
                format!("{} keys, while lkey has {}", rkey.len(), lkey.len()),
            ));
        }
        Ok(Self {
            name,
            addr,
            length,
            rkey,
            lkey,
            unknown: fields.into_unknown(),
        })
    }

    pub(super) fn to_object(&self, with_keys: bool) -> Object<'_> {
        let mut members = vec![
            ("addr", Member::Unsigned(self.addr)),
            ("length", Member::Unsigned(self.length)),
            ("name", Member::Text(&self.name)),
        ];
        if with_keys || !self.lkey.is_empty() || !self.rkey.is_empty() {
            members.push(("lkey", Member::Numbers(&self.lkey)));
            members.push(("rkey", Member::Numbers(&self.rkey)));
        }
        Object::new(members, &self.unknown)
    }
}

fn keys(fields: &mut Fields, member: &str) -> Result<Vec<u32>, DocumentError> {
    let path = fields.path_of(member);
    fields
        .array(member)?
        .iter()
        .enumerate()
        .map(|(index, key)| {
            fields::unsigned(key, u32::MAX.into(), || format!("{path}[{index}]"))
                .map(|key| key as u32)
        })
        .collect()
}
