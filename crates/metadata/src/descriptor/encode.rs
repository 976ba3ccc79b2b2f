//! Writing documents: compact JSON, members in ascending byte order.

use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};
use serde_json::Value;

use super::UnknownMembers;

/// How a JSON text ends, which depends on where it goes (reference 2.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum JsonForm {
    /// With one `\n` at the end: etcd, Redis and every handshake message.
    Line,
    /// Without: bodies of HTTP requests.
    Bare,
}

/// A value of a known member.
pub(super) enum Member<'a> {
    Text(&'a str),
    OwnedText(String),
    Unsigned(u64),
    Texts(&'a [String]),
    OwnedTexts(Vec<String>),
    Numbers(&'a [u32]),
    List(Vec<Object<'a>>),
    Nested(Object<'a>),
    Pair(&'a [String], &'a [String]),
    Unknown(&'a Value),
}

/// An object about to be written; sorts its members, known and unknown, by name.
pub(super) struct Object<'a>(Vec<(&'a str, Member<'a>)>);

impl<'a> Object<'a> {
    /// A known member wins over an unknown one of the same name.
    pub(super) fn new(known: Vec<(&'a str, Member<'a>)>, unknown: &'a UnknownMembers) -> Self {
        let mut members = known;
        for (name, value) in unknown {
            if !members.iter().any(|(known, _)| known == name) {
                members.push((name, Member::Unknown(value)));
            }
        }
        // JsonCpp orders an object's members by their bytes, as `str` does.
        members.sort_by(|left, right| left.0.cmp(right.0));
        Self(members)
    }

    pub(super) fn to_json(&self, form: JsonForm) -> Vec<u8> {
        // Writing to memory fails only for maps with keys that are no strings; there are none.
        let mut text = serde_json::to_vec(self).unwrap_or_default();
        if form == JsonForm::Line {
            text.push(b'\n');
        }
        text
    }
}

impl Serialize for Object<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, member) in &self.0 {
            map.serialize_entry(name, member)?;
        }
        map.end()
    }
}

impl Serialize for Member<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::OwnedText(text) => serializer.serialize_str(text),
            Self::Unsigned(number) => serializer.serialize_u64(*number),
            Self::Texts(texts) => serializer.collect_seq(texts.iter()),
            Self::OwnedTexts(texts) => serializer.collect_seq(texts.iter()),
            Self::Numbers(numbers) => serializer.collect_seq(numbers.iter()),
            Self::List(objects) => serializer.collect_seq(objects.iter()),
            Self::Nested(object) => object.serialize(serializer),
            Self::Pair(first, second) => {
                let mut pair = serializer.serialize_seq(Some(2))?;
                pair.serialize_element(first)?;
                pair.serialize_element(second)?;
                pair.end()
            }
            Self::Unknown(value) => value.serialize(serializer),
        }
    }
}

/// No unknown members, for objects that cannot have any.
pub(super) static NO_UNKNOWN: UnknownMembers = UnknownMembers::new();
