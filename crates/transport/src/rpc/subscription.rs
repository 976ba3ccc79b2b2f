//! The lasting connection over which an engine tells a reader its record (design §4, feature
//! `push/1`).
//!
//! ```text
//! reader                                   owner of the record
//!   | Subscribe {instance}                      |
//!   |------------------------------------------>|
//!   |             Heartbeat {instance, generation}, at once and each second
//!   |<------------------------------------------|
//!   |             Push: the record              | after each change, the latest only
//!   |<------------------------------------------|
//!   | Acknowledge {instance, generation}        |
//!   |------------------------------------------>|
//! ```
//!
//! Either side ends it by closing. An owner without room answers `Subscribe` with the text `null`.
//! Deliberately not here: when something is told, and when the other side is given up
//! ([`publisher`](crate::machine::publisher) and [`peers`](crate::machine::peers) decide), and the
//! form of the record, which travels as text.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rerail_metadata::descriptor::InstanceId;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use super::frame::{Decoder, Frame, FrameError, FrameKind, MessageType};
use super::message::{MessageError, NO_REPLY, Object, line};

/// Longest text of an acknowledgement, a heartbeat or a request to subscribe.
const SMALL_BYTES_MAX: usize = 4096;
/// Bytes asked of the socket at once.
const CHUNK_BYTES: usize = 16 << 10;
/// How long a frame may wait for the other side to take it.
const SEND_LIMIT: Duration = Duration::from_secs(5);
/// How long sent bytes may stay unconfirmed before the kernel gives the connection up: the other
/// host is gone without a word then.
const CONFIRM_LIMIT: Duration = Duration::from_secs(10);

/// Which life of an engine, and which state of its record.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Standing {
    /// The instance.
    pub instance: InstanceId,
    /// The generation.
    pub generation: u64,
}

impl Standing {
    /// The text on the wire.
    pub fn encode(self) -> Vec<u8> {
        let Self {
            instance,
            generation,
        } = self;
        line(&json!({ "generation": generation, "instance": instance.to_string() }))
    }

    /// Reads the text of a heartbeat or an acknowledgement.
    ///
    /// # Errors
    ///
    /// It is no object, or a member is missing or wrong.
    pub fn decode(text: &[u8]) -> Result<Self, MessageError> {
        let object = Object::parse(text)?;
        let generation = object.number("generation", u64::MAX)?;
        Ok(Self {
            instance: instance(&object)?,
            generation: generation
                .ok_or_else(|| object.wrong("generation", "an unsigned number"))?,
        })
    }
}

fn instance(object: &Object) -> Result<InstanceId, MessageError> {
    let text = object
        .text("instance", SMALL_BYTES_MAX)?
        .unwrap_or_default();
    let parsed = text.parse();
    parsed.map_err(|_| object.wrong("instance", "32 hex digits"))
}

/// Text of a request to subscribe, by a reader of this instance.
pub(super) fn request(reader: InstanceId) -> Vec<u8> {
    line(&json!({ "instance": reader.to_string() }))
}

/// Reads the text of a request to subscribe.
pub(super) fn reader_of(text: &[u8]) -> Result<InstanceId, MessageError> {
    instance(&Object::parse(text)?)
}

/// Why a subscription is over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubscriptionError {
    /// The other side has closed it.
    #[error("the other side has closed it")]
    Closed,
    /// The owner has no room, or takes no subscriptions.
    #[error("it takes no further subscription")]
    Refused,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// The other side does not take what it is sent.
    #[error("it took nothing for {} s", SEND_LIMIT.as_secs())]
    Stuck,
    /// What came is no frame, or too long.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A frame that has no place here.
    #[error("a frame of kind {0:?} has no place here")]
    Unexpected(FrameKind),
    /// A text that cannot be read.
    #[error(transparent)]
    Message(#[from] MessageError),
}

/// Frames as they arrive, one after the other.
#[derive(Debug)]
struct Incoming {
    stream: OwnedReadHalf,
    decoder: Decoder,
    frame_bytes_max: usize,
}

impl Incoming {
    fn new(stream: OwnedReadHalf, frame_bytes_max: usize) -> Self {
        Self {
            stream,
            decoder: Decoder::new(frame_bytes_max),
            frame_bytes_max,
        }
    }

    /// The next frame. May be cancelled: what has come of it is kept.
    async fn next(&mut self) -> Result<(MessageType, Vec<u8>), SubscriptionError> {
        let mut chunk = [0; CHUNK_BYTES];
        loop {
            let missing = self.decoder.missing()?;
            if missing == 0 {
                let next = Decoder::new(self.frame_bytes_max);
                let frame = std::mem::replace(&mut self.decoder, next).finish()?;
                let Some(Frame { kind, text }) = frame else {
                    return Err(SubscriptionError::Closed);
                };
                return match kind {
                    FrameKind::Typed(message_type) => Ok((message_type, text)),
                    FrameKind::Old => Err(SubscriptionError::Unexpected(kind)),
                };
            }
            let wanted = missing.min(CHUNK_BYTES);
            match self.stream.read(&mut chunk[..wanted]).await? {
                0 => return Err(SubscriptionError::Closed),
                count => self.decoder.push(&chunk[..count]),
            }
        }
    }
}

#[derive(Debug)]
struct Outgoing(OwnedWriteHalf);

impl Outgoing {
    /// Sends one frame whole, within [`SEND_LIMIT`]. Must not be cancelled: half a frame cannot be
    /// followed by another.
    async fn send(
        &mut self,
        message_type: MessageType,
        text: &[u8],
    ) -> Result<(), SubscriptionError> {
        let head = Frame::head(message_type, text.len());
        let write = async {
            self.0.write_all(&head).await?;
            self.0.write_all(text).await
        };
        match timeout(SEND_LIMIT, write).await {
            Ok(written) => Ok(written?),
            Err(_) => Err(SubscriptionError::Stuck),
        }
    }
}

fn split(stream: TcpStream, frame_bytes_max: usize) -> (Incoming, Outgoing) {
    let _ = stream.set_nodelay(true);
    // Where the system has no such option, the time limits of the machines remain.
    let _ = socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(CONFIRM_LIMIT));
    let (incoming, outgoing) = stream.into_split();
    (Incoming::new(incoming, frame_bytes_max), Outgoing(outgoing))
}

/// The owner's end: a reader that wants to be told.
#[derive(Debug)]
pub struct Subscriber {
    reader: InstanceId,
    peer: SocketAddr,
    incoming: Incoming,
    outgoing: Outgoing,
}

impl Subscriber {
    pub(super) fn new(stream: TcpStream, peer: SocketAddr, reader: InstanceId) -> Self {
        let (incoming, outgoing) = split(stream, SMALL_BYTES_MAX);
        Self {
            reader,
            peer,
            incoming,
            outgoing,
        }
    }

    /// The reader's instance, as it says.
    pub fn reader(&self) -> InstanceId {
        self.reader
    }

    /// The other side's address, for logs.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Both directions, which do not wait for each other.
    pub fn split(self) -> (Acknowledgements, Teller) {
        (Acknowledgements(self.incoming), Teller(self.outgoing))
    }
}

/// What a reader acknowledges.
#[derive(Debug)]
pub struct Acknowledgements(Incoming);

impl Acknowledgements {
    /// The next one. May be cancelled.
    ///
    /// # Errors
    ///
    /// The subscription is over.
    pub async fn next(&mut self) -> Result<Standing, SubscriptionError> {
        match self.0.next().await? {
            (MessageType::Acknowledge, text) => Ok(Standing::decode(&text)?),
            (other, _) => Err(SubscriptionError::Unexpected(FrameKind::Typed(other))),
        }
    }
}

/// Tells a reader.
#[derive(Debug)]
pub struct Teller(Outgoing);

impl Teller {
    /// Sends the record's text. Must not be cancelled.
    ///
    /// # Errors
    ///
    /// The subscription is over.
    pub async fn record(&mut self, text: &[u8]) -> Result<(), SubscriptionError> {
        self.0.send(MessageType::Push, text).await
    }

    /// Says which record is the current one. Must not be cancelled.
    ///
    /// # Errors
    ///
    /// The subscription is over.
    pub async fn heartbeat(&mut self, current: Standing) -> Result<(), SubscriptionError> {
        self.0.send(MessageType::Heartbeat, &current.encode()).await
    }
}

/// The reader's end. Closed when dropped.
#[derive(Debug)]
pub struct Subscription {
    incoming: Incoming,
    outgoing: Outgoing,
}

/// What the owner of a record tells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Told {
    /// The text of its record.
    Record(Vec<u8>),
    /// Which record is its current one.
    Current(Standing),
}

impl Subscription {
    pub(super) fn new(stream: TcpStream, frame_bytes_max: usize) -> Self {
        let (incoming, outgoing) = split(stream, frame_bytes_max);
        Self { incoming, outgoing }
    }

    /// What is told next. May be cancelled.
    ///
    /// # Errors
    ///
    /// The subscription is over.
    pub async fn next(&mut self) -> Result<Told, SubscriptionError> {
        match self.incoming.next().await? {
            (MessageType::Push, text) => Ok(Told::Record(text)),
            (MessageType::Heartbeat, text) => Ok(Told::Current(Standing::decode(&text)?)),
            (MessageType::Subscribe, text) if text == NO_REPLY => Err(SubscriptionError::Refused),
            (other, _) => Err(SubscriptionError::Unexpected(FrameKind::Typed(other))),
        }
    }

    /// Says what was taken in. Must not be cancelled.
    ///
    /// # Errors
    ///
    /// The subscription is over.
    pub async fn acknowledge(&mut self, taken: Standing) -> Result<(), SubscriptionError> {
        let text = taken.encode();
        self.outgoing.send(MessageType::Acknowledge, &text).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing() -> Standing {
        Standing {
            instance: InstanceId([0xab; 16]),
            generation: 7,
        }
    }

    #[test]
    fn golden_texts() {
        let hex = "ab".repeat(16);
        let text = format!("{{\"generation\":7,\"instance\":\"{hex}\"}}\n");
        assert_eq!(standing().encode(), text.as_bytes());
        assert_eq!(Standing::decode(text.as_bytes()), Ok(standing()));
        let asked = request(standing().instance);
        assert_eq!(asked, format!("{{\"instance\":\"{hex}\"}}\n").as_bytes());
        assert_eq!(reader_of(&asked), Ok(standing().instance));
    }

    #[test]
    fn h20_wrong_texts_name_the_member() {
        let hex = "ab".repeat(16);
        for (text, member) in [
            (r#"{"generation":1}"#.to_owned(), "instance"),
            (r#"{"generation":1,"instance":"zz"}"#.to_owned(), "instance"),
            (r#"{"generation":1,"instance":7}"#.to_owned(), "instance"),
            (format!(r#"{{"instance":"{hex}"}}"#), "generation"),
            (
                format!(r#"{{"generation":-1,"instance":"{hex}"}}"#),
                "generation",
            ),
        ] {
            match Standing::decode(text.as_bytes()) {
                Err(MessageError::Member { member: named, .. }) => assert_eq!(named, member),
                other => panic!("{text} gave {other:?}"),
            }
        }
        assert!(Standing::decode(b"null").is_err());
    }
}
