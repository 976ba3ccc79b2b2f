//! Frames: `u64` length in little-endian, one type byte that the length counts, JSON text.
//!
//! Frames of old engines have no type byte; their text starts with `{`, which is no type. Such a
//! frame is a Connection request, and is answered with a frame of the same form.
//!
//! Types from 16 on are our own. They are sent only to peers whose record lists `push/1`: a C++
//! engine would take them for a Connection request of an old one.

use crate::TransportError;
use crate::settings::Settings;

/// Longest frame that is accepted unless the setting `HANDSHAKE_MAX_LENGTH` says otherwise.
pub const LENGTH_MAX_DEFAULT: usize = 1 << 20;
/// Largest value of that setting.
pub const LENGTH_MAX_LIMIT: usize = 128 << 20;
/// The longest frame to accept: `HANDSHAKE_MAX_LENGTH`, or the default.
pub(super) fn length_max(settings: &Settings<'_>) -> Result<usize, TransportError> {
    let range = LENGTH_MAX_DEFAULT..=LENGTH_MAX_LIMIT;
    let set = settings.number("HANDSHAKE_MAX_LENGTH", range)?;
    Ok(set.unwrap_or(LENGTH_MAX_DEFAULT))
}

/// Bytes of the length field.
const HEADER_BYTES: usize = 8;

/// What a frame is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum MessageType {
    /// Queue pairs to be connected.
    Connection = 0,
    /// Segment descriptors exchanged.
    Metadata = 1,
    /// A notification.
    Notify = 2,
    /// Is the process alive?
    Probe = 3,
    /// The first frame of a lasting connection, over which the server tells its record.
    Subscribe = 16,
    /// The server's record, over such a connection.
    Push = 17,
    /// What the reader has taken in, over such a connection.
    Acknowledge = 18,
    /// Which record is the server's current one, over such a connection.
    Heartbeat = 19,
}

impl MessageType {
    fn from_raw(raw: u8) -> Option<Self> {
        Some(match raw {
            0 => Self::Connection,
            1 => Self::Metadata,
            2 => Self::Notify,
            3 => Self::Probe,
            16 => Self::Subscribe,
            17 => Self::Push,
            18 => Self::Acknowledge,
            19 => Self::Heartbeat,
            _ => return None,
        })
    }
}

/// The form of a frame: a reply takes the form of its request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FrameKind {
    /// With a type byte.
    Typed(MessageType),
    /// Without: a Connection message of an old engine.
    Old,
}

impl FrameKind {
    /// What the frame is about.
    pub fn message_type(self) -> MessageType {
        match self {
            Self::Typed(message_type) => message_type,
            Self::Old => MessageType::Connection,
        }
    }
}

/// One frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    /// Its form and type.
    pub kind: FrameKind,
    /// The JSON text; replies of an unwilling server are `null`.
    pub text: Vec<u8>,
}

/// A frame that cannot be accepted. The connection is of no further use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The length is zero or more than the limit. The first bytes of HTTP or TLS look so, too.
    #[error(
        "a frame of {length} bytes is not within 1..={length_max}; is the other side an engine? \
         Records of many buffers need a larger HANDSHAKE_MAX_LENGTH on the receiving side"
    )]
    Length {
        /// The length said.
        length: u64,
        /// The most that is accepted.
        length_max: usize,
    },
    /// The type is not known.
    #[error("frame type {0:#04x} is not known")]
    Type(u8),
}

impl Frame {
    /// A frame with a type byte.
    pub fn typed(message_type: MessageType, text: impl Into<Vec<u8>>) -> Self {
        Self {
            kind: FrameKind::Typed(message_type),
            text: text.into(),
        }
    }

    /// The bytes on the wire in front of a text of `text_bytes` bytes.
    pub(super) fn head(message_type: MessageType, text_bytes: usize) -> [u8; HEADER_BYTES + 1] {
        let mut head = [0; HEADER_BYTES + 1];
        let (length, kind) = head.split_at_mut(HEADER_BYTES);
        length.copy_from_slice(&(text_bytes as u64 + 1).to_le_bytes());
        kind[0] = message_type as u8;
        head
    }

    /// The bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let type_byte = match self.kind {
            FrameKind::Typed(message_type) => Some(message_type as u8),
            FrameKind::Old => None,
        };
        let length = self.text.len() + usize::from(type_byte.is_some());
        let mut bytes = Vec::with_capacity(HEADER_BYTES + length);
        bytes.extend_from_slice(&(length as u64).to_le_bytes());
        bytes.extend(type_byte);
        bytes.extend_from_slice(&self.text);
        bytes
    }
}

/// Takes a frame's bytes as they arrive.
///
/// The memory that it holds grows with the bytes that have really come, not with the length that
/// the header claims.
#[derive(Debug)]
pub struct Decoder {
    length_max: usize,
    bytes: Vec<u8>,
}

impl Decoder {
    /// A decoder of one frame of at most `length_max` bytes, type byte included.
    pub fn new(length_max: usize) -> Self {
        Self {
            length_max,
            bytes: Vec::new(),
        }
    }

    /// How many more bytes the frame needs, at most; 0 when it is complete.
    ///
    /// # Errors
    ///
    /// As soon as the bytes so far cannot begin an acceptable frame.
    pub fn missing(&self) -> Result<usize, FrameError> {
        let Some((header, rest)) = self.bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(HEADER_BYTES - self.bytes.len());
        };
        let said = u64::from_le_bytes(*header);
        let error = FrameError::Length {
            length: said,
            length_max: self.length_max,
        };
        let length = usize::try_from(said).map_err(|_| error)?;
        if length == 0 || length > self.length_max {
            return Err(error);
        }
        if let Some(first) = rest.first() {
            kind_of(*first)?;
        }
        Ok(length.saturating_sub(rest.len()))
    }

    /// Takes the next bytes of the frame, no more than are [`missing`](Self::missing).
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// True before the first byte.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The frame, once nothing is missing.
    ///
    /// # Errors
    ///
    /// As [`missing`](Self::missing). `None` while bytes are missing.
    pub fn finish(self) -> Result<Option<Frame>, FrameError> {
        if self.missing()? > 0 {
            return Ok(None);
        }
        let Some(first) = self.bytes.get(HEADER_BYTES) else {
            return Ok(None);
        };
        let kind = kind_of(*first)?;
        let text_at = match kind {
            FrameKind::Typed(_) => HEADER_BYTES + 1,
            FrameKind::Old => HEADER_BYTES,
        };
        Ok(Some(Frame {
            kind,
            text: self.bytes[text_at..].to_vec(),
        }))
    }
}

/// The form of a frame by its first byte. JSON texts of old engines begin with `{`; what is
/// neither that nor a type is refused, as by C++ engines.
fn kind_of(first: u8) -> Result<FrameKind, FrameError> {
    match MessageType::from_raw(first) {
        Some(message_type) => Ok(FrameKind::Typed(message_type)),
        None if first.is_ascii() && first > 3 => Ok(FrameKind::Old),
        None => Err(FrameError::Type(first)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(bytes: &[u8], length_max: usize) -> Result<Option<Frame>, FrameError> {
        let mut decoder = Decoder::new(length_max);
        for byte in bytes {
            if decoder.missing()? == 0 {
                break;
            }
            decoder.push(std::slice::from_ref(byte));
        }
        decoder.finish()
    }

    #[test]
    fn golden_bytes_of_a_probe() {
        let frame = Frame::typed(MessageType::Probe, *b"{}\n");
        let bytes = [4, 0, 0, 0, 0, 0, 0, 0, 3, b'{', b'}', b'\n'];
        assert_eq!(frame.encode(), bytes);
        assert_eq!(decode(&bytes, 100), Ok(Some(frame)));
    }

    #[test]
    fn an_old_frame_has_no_type_and_is_a_connection() {
        let bytes = [2, 0, 0, 0, 0, 0, 0, 0, b'{', b'}'];
        let frame = decode(&bytes, 100).expect("acceptable").expect("complete");
        assert_eq!(
            frame,
            Frame {
                kind: FrameKind::Old,
                text: b"{}".to_vec()
            }
        );
        assert_eq!(frame.kind.message_type(), MessageType::Connection);
        assert_eq!(frame.encode(), bytes);
    }

    #[test]
    fn lengths_that_no_engine_sends_are_refused_at_once() {
        for bytes in [
            *b"GET / HT",
            [0x16, 3, 1, 2, 0, 1, 0, 1],
            [0; 8],
            (1_u64 << 63).to_le_bytes(),
            u64::MAX.to_le_bytes(),
            (LENGTH_MAX_DEFAULT as u64 + 1).to_le_bytes(),
        ] {
            assert!(
                matches!(
                    decode(&bytes, LENGTH_MAX_DEFAULT),
                    Err(FrameError::Length { .. })
                ),
                "{bytes:?}"
            );
        }
        // 790 bytes: the length field reads like the start of a TLS record.
        let frame = Frame::typed(MessageType::Connection, vec![b' '; 789]);
        assert_eq!(decode(&frame.encode(), LENGTH_MAX_DEFAULT), Ok(Some(frame)));
    }

    #[test]
    fn an_unknown_type_is_refused_at_its_first_byte() {
        for first in [0x80, 0xfe, 0xff] {
            let bytes = [200, 0, 0, 0, 0, 0, 0, 0, first];
            assert_eq!(decode(&bytes, 1000), Err(FrameError::Type(first)));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_an_error_or_incomplete(bytes: Vec<u8>) {
            let _ = decode(&bytes, 64);
        }

        #[test]
        fn every_frame_comes_back(raw in 0_u8..20, text: Vec<u8>) {
            let kind = MessageType::from_raw(raw).map_or(FrameKind::Old, FrameKind::Typed);
            let text = if kind == FrameKind::Old { [b"{".to_vec(), text].concat() } else { text };
            if let FrameKind::Typed(message_type) = kind {
                let head = Frame::head(message_type, text.len());
                let frame = Frame::typed(message_type, text.clone());
                prop_assert_eq!([&head, &text[..]].concat(), frame.encode());
            }
            let frame = Frame { kind, text };
            prop_assert_eq!(decode(&frame.encode(), 1 << 20), Ok(Some(frame)));
        }
    }
}
