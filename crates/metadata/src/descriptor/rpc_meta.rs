//! Where a server's RPC listener is.

use serde_json::Value;

use super::encode::{JsonForm, Member, Object};
use super::fields::Fields;
use super::segment::parse_json;
use super::{DocumentError, UnknownMembers};

/// The value under an `rpc_meta/` key (reference 2.4).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RpcMeta {
    /// Address or DNS name, without brackets. Not empty.
    pub ip_or_host_name: String,
    /// TCP port, 1 to 65535.
    pub rpc_port: u16,
    /// Members that this crate does not know.
    pub unknown: UnknownMembers,
}

impl RpcMeta {
    /// A location. `rpc_port` 0 is caught when the document is read, not here.
    pub fn new(ip_or_host_name: impl Into<String>, rpc_port: u16) -> Self {
        Self {
            ip_or_host_name: ip_or_host_name.into(),
            rpc_port,
            unknown: UnknownMembers::new(),
        }
    }

    /// Reads a JSON text.
    ///
    /// # Errors
    ///
    /// Names the member that is missing or wrong.
    pub fn from_json(text: &[u8]) -> Result<Self, DocumentError> {
        Self::from_value(parse_json(text)?)
    }

    fn from_value(value: Value) -> Result<Self, DocumentError> {
        let mut fields = Fields::new(value, "")?;
        let ip_or_host_name = fields.non_empty_string("ip_or_host_name")?;
        let rpc_port = fields.unsigned("rpc_port", u16::MAX.into())? as u16;
        if rpc_port == 0 {
            return Err(DocumentError::value(
                "rpc_port",
                "0 is out of range 1..=65535",
            ));
        }
        Ok(Self {
            ip_or_host_name,
            rpc_port,
            unknown: fields.into_unknown(),
        })
    }

    /// Writes the JSON text.
    pub fn to_json(&self, form: JsonForm) -> Vec<u8> {
        Object::new(
            vec![
                ("ip_or_host_name", Member::Text(&self.ip_or_host_name)),
                ("rpc_port", Member::Unsigned(self.rpc_port.into())),
            ],
            &self.unknown,
        )
        .to_json(form)
    }
}
