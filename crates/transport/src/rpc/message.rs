//! Connection, Notify and Probe messages (reference 3.4 and 3.6).
//!
//! Reading is strict in types and tolerant of members that are not known. Writing gives compact
//! JSON with ascending keys and one newline.

use rerail_verbs::{Gid, Mtu};
use serde_json::{Map, Value, json};

use crate::rdma::endpoint::Offer;

/// Most queue pairs that a message may name. C++ engines have up to 256 in one endpoint.
pub const QP_NUMS_MAX: usize = 256;
/// Longest text member that is accepted, in bytes; notifications apart.
const TEXT_BYTES_MAX: usize = 4096;
/// Queue pair numbers and packet numbers have 24 bits.
const NUMBER_24_MAX: u64 = (1 << 24) - 1;

/// Why a message cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// No JSON, or JSON that is no object. `null` is how a server says that it will not answer.
    #[error("the message is no JSON object: {0}")]
    NoObject(String),
    /// A member has a wrong type or value.
    #[error("member {member:?} of the message is {found}, expected {expected}")]
    Member {
        /// Name of the member.
        member: &'static str,
        /// What is there, cut to 64 characters.
        found: String,
        /// What should be.
        expected: &'static str,
    },
}

/// A Connection message: an [`Offer`], or a reason not to connect.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ConnectionMessage {
    /// What is offered. In a refusal only the paths count.
    pub offer: Offer,
    /// Empty, or why the request is refused.
    pub reply_msg: String,
}

impl ConnectionMessage {
    /// A message that offers.
    pub fn offer(offer: Offer) -> Self {
        Self {
            offer,
            reply_msg: String::new(),
        }
    }

    /// A refusal of a request between these paths, in the order of the *reply*.
    pub fn refusal(local_path: String, peer_path: String, reason: String) -> Self {
        let reply_msg = if reason.is_empty() {
            "refused".to_owned()
        } else {
            reason
        };
        Self {
            offer: Offer {
                local_path,
                peer_path,
                ..Offer::default()
            },
            reply_msg,
        }
    }

    /// The text on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let Offer {
            local_path,
            peer_path,
            gid,
            lid,
            qp_nums,
            ready_ack,
            psn,
            path_mtu,
            rd_atomic,
            instance,
            peer_instance,
        } = &self.offer;
        let mut object = Map::new();
        object.insert("local_nic_path".into(), json!(local_path));
        object.insert("peer_nic_path".into(), json!(peer_path));
        object.insert("local_lid".into(), json!(lid));
        object.insert(
            "local_gid".into(),
            json!(gid.map_or_else(String::new, |g| g.to_wire())),
        );
        object.insert("qp_num".into(), json!(qp_nums));
        object.insert("reply_msg".into(), json!(self.reply_msg));
        let mut optional = |member: &str, value: Option<Value>| {
            if let Some(value) = value {
                object.insert(member.into(), value);
            }
        };
        optional("ready_ack", ready_ack.map(Value::from));
        optional("psn", psn.map(Value::from));
        optional("path_mtu", path_mtu.map(|mtu| Value::from(mtu.bytes())));
        optional("rd_atomic", rd_atomic.map(Value::from));
        optional("instance", instance.clone().map(Value::from));
        optional("peer_instance", peer_instance.clone().map(Value::from));
        line(&Value::Object(object))
    }

    /// Reads the text of a request or reply.
    pub fn decode(text: &[u8]) -> Result<Self, MessageError> {
        let object = Object::parse(text)?;
        let gid = match object.text("local_gid", TEXT_BYTES_MAX)? {
            None => None,
            Some(text) if text.is_empty() => None,
            Some(text) => Some(text.parse::<Gid>().map_err(|_| {
                object.wrong("local_gid", "16 two-digit hex bytes joined by colons")
            })?),
        };
        let path_mtu = match object.number("path_mtu", u64::from(u32::MAX))? {
            None => None,
            Some(bytes) => Some(
                Mtu::from_bytes(bytes as u32)
                    .filter(|mtu| u64::from(mtu.bytes()) == bytes)
                    .ok_or_else(|| object.wrong("path_mtu", "256, 512, 1024, 2048 or 4096"))?,
            ),
        };
        let offer = Offer {
            local_path: object
                .text("local_nic_path", TEXT_BYTES_MAX)?
                .unwrap_or_default(),
            peer_path: object
                .text("peer_nic_path", TEXT_BYTES_MAX)?
                .unwrap_or_default(),
            gid,
            lid: object
                .number("local_lid", u64::from(u16::MAX))?
                .unwrap_or(0) as u16,
            qp_nums: object.qp_nums()?,
            ready_ack: object.flag("ready_ack")?,
            psn: object.number("psn", NUMBER_24_MAX)?.map(|psn| psn as u32),
            path_mtu,
            rd_atomic: object
                .number("rd_atomic", u64::from(u8::MAX))?
                .map(|depth| depth as u8),
            instance: object.text("instance", TEXT_BYTES_MAX)?,
            peer_instance: object.text("peer_instance", TEXT_BYTES_MAX)?,
        };
        let reply_msg = object.text("reply_msg", usize::MAX)?.unwrap_or_default();
        Ok(Self { offer, reply_msg })
    }
}

/// A notification.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Notify {
    /// Name, by convention the sender's segment.
    pub name: String,
    /// The text.
    pub notify_msg: String,
}

impl Notify {
    /// The text on the wire.
    pub fn encode(&self) -> Vec<u8> {
        line(&json!({ "name": self.name, "notify_msg": self.notify_msg }))
    }

    /// Reads the text of a request or reply. The frame's length is the only bound of its texts.
    pub fn decode(text: &[u8]) -> Result<Self, MessageError> {
        let object = Object::parse(text)?;
        Ok(Self {
            name: object.text("name", usize::MAX)?.unwrap_or_default(),
            notify_msg: object.text("notify_msg", usize::MAX)?.unwrap_or_default(),
        })
    }
}

/// Text of a Probe request.
pub const PROBE_REQUEST: &[u8] = b"{}\n";
/// Text of the answer to a Probe.
pub const PROBE_REPLY: &[u8] = b"{\"status\":\"success\"}\n";
/// Text by which a server says that it will not answer.
pub const NO_REPLY: &[u8] = b"null\n";

pub(super) fn line(value: &Value) -> Vec<u8> {
    let mut text = value.to_string().into_bytes();
    text.push(b'\n');
    text
}

/// A JSON object whose members are read strictly.
pub(super) struct Object(Map<String, Value>);

impl Object {
    pub(super) fn parse(text: &[u8]) -> Result<Self, MessageError> {
        match serde_json::from_slice(text) {
            Ok(Value::Object(object)) => Ok(Self(object)),
            Ok(other) => Err(MessageError::NoObject(shown(&other))),
            Err(error) => Err(MessageError::NoObject(error.to_string())),
        }
    }

    pub(super) fn text(
        &self,
        member: &'static str,
        bytes_max: usize,
    ) -> Result<Option<String>, MessageError> {
        match self.0.get(member) {
            None => Ok(None),
            Some(Value::String(text)) if text.len() <= bytes_max => Ok(Some(text.clone())),
            Some(Value::String(_)) => Err(self.wrong(member, "a shorter text")),
            Some(_) => Err(self.wrong(member, "a text")),
        }
    }

    fn flag(&self, member: &'static str) -> Result<Option<bool>, MessageError> {
        match self.0.get(member) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(member, "true or false")),
        }
    }

    pub(super) fn number(
        &self,
        member: &'static str,
        max: u64,
    ) -> Result<Option<u64>, MessageError> {
        match self.0.get(member) {
            None => Ok(None),
            Some(value) => match value.as_u64().filter(|number| *number <= max) {
                Some(number) => Ok(Some(number)),
                None => Err(self.wrong(member, "an unsigned number within the member's range")),
            },
        }
    }

    fn qp_nums(&self) -> Result<Vec<u32>, MessageError> {
        let expected = "at most 256 numbers of 24 bits";
        match self.0.get("qp_num") {
            None => Ok(Vec::new()),
            Some(Value::Array(values)) if values.len() <= QP_NUMS_MAX => values
                .iter()
                .map(|value| value.as_u64().filter(|number| *number <= NUMBER_24_MAX))
                .map(|number| number.map(|number| number as u32))
                .collect::<Option<_>>()
                .ok_or_else(|| self.wrong("qp_num", expected)),
            Some(_) => Err(self.wrong("qp_num", expected)),
        }
    }

    pub(super) fn wrong(&self, member: &'static str, expected: &'static str) -> MessageError {
        let found = self
            .0
            .get(member)
            .map_or_else(|| "absent".to_owned(), shown);
        MessageError::Member {
            member,
            found,
            expected,
        }
    }
}

/// A value in an error, cut short: it comes from a peer.
fn shown(value: &Value) -> String {
    value.to_string().chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> ConnectionMessage {
        ConnectionMessage::offer(Offer {
            local_path: "10.0.0.1:15001@mlx5_0".into(),
            peer_path: "10.0.0.2:15002@mlx5_1".into(),
            gid: "::ffff:10.0.0.1".parse().ok(),
            lid: 3,
            qp_nums: vec![17, 18],
            ready_ack: Some(false),
            ..Offer::default()
        })
    }

    #[test]
    fn golden_text_of_a_connection_message() {
        let text = "{\"local_gid\":\"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:00:00:01\",\
                    \"local_lid\":3,\"local_nic_path\":\"10.0.0.1:15001@mlx5_0\",\
                    \"peer_nic_path\":\"10.0.0.2:15002@mlx5_1\",\"qp_num\":[17,18],\
                    \"ready_ack\":false,\"reply_msg\":\"\"}\n";
        assert_eq!(String::from_utf8_lossy(&sample().encode()), text);
        assert_eq!(ConnectionMessage::decode(text.as_bytes()), Ok(sample()));
    }

    #[test]
    fn members_of_our_own_come_back() {
        let mut message = sample();
        message.offer.psn = Some(NUMBER_24_MAX as u32);
        message.offer.path_mtu = Some(Mtu::Mtu4096);
        message.offer.rd_atomic = Some(16);
        message.offer.instance = Some("0".repeat(32));
        message.offer.peer_instance = Some("1".repeat(32));
        assert_eq!(ConnectionMessage::decode(&message.encode()), Ok(message));
    }

    #[test]
    fn an_old_peer_may_leave_out_gid_and_acknowledgement() {
        let text = br#"{"local_nic_path":"a@b","peer_nic_path":"c@d","qp_num":[1],"new":[1]}"#;
        let message = ConnectionMessage::decode(text).expect("readable");
        assert_eq!(message.offer.gid, None);
        assert_eq!(message.offer.ready_ack, None);
        assert_eq!(message.offer.qp_nums, [1]);
    }

    #[test]
    fn h20_wrong_types_and_values_name_the_member() {
        let many = format!(r#"{{"qp_num":{:?}}}"#, [1; 300]);
        for (text, member) in [
            (r#"{"qp_num":"x"}"#, "qp_num"),
            (r#"{"qp_num":[-1]}"#, "qp_num"),
            (r#"{"qp_num":[16777216]}"#, "qp_num"),
            (many.as_str(), "qp_num"),
            (r#"{"local_lid":65536}"#, "local_lid"),
            (r#"{"local_gid":7}"#, "local_gid"),
            (r#"{"local_gid":"zz"}"#, "local_gid"),
            (r#"{"ready_ack":"yes"}"#, "ready_ack"),
            (r#"{"path_mtu":4095}"#, "path_mtu"),
            (r#"{"local_nic_path":{}}"#, "local_nic_path"),
            (r#"{"reply_msg":null}"#, "reply_msg"),
        ] {
            match ConnectionMessage::decode(text.as_bytes()) {
                Err(MessageError::Member { member: named, .. }) => assert_eq!(named, member),
                other => panic!("{text} gave {other:?}"),
            }
        }
        for text in ["", "null", "[]", "{", "\u{1}"] {
            let outcome = ConnectionMessage::decode(text.as_bytes());
            assert!(matches!(outcome, Err(MessageError::NoObject(_))), "{text}");
        }
    }

    #[test]
    fn a_refusal_always_has_a_reason() {
        let refusal = ConnectionMessage::refusal("a@b".into(), "c@d".into(), String::new());
        let read = ConnectionMessage::decode(&refusal.encode()).expect("readable");
        assert_eq!(read.reply_msg, "refused");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes: Vec<u8>) {
            let _ = ConnectionMessage::decode(&bytes);
            let _ = Notify::decode(&bytes);
        }
    }
}
