//! Request headers (24 bytes) and status frames (8 bytes), all little-endian.

/// Bytes of a request header.
pub const HEADER_BYTES: usize = 24;
/// Bytes of a status frame.
pub const STATUS_BYTES: usize = 8;
/// High half of every status frame: "MCTV".
const STATUS_MAGIC: u64 = 0x4D43_5456 << 32;
/// Bit of the opcode byte that says version 2.
const VERSION_2: u8 = 0x80;

/// What is asked of the server.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Opcode {
    /// Its memory to the client.
    Read,
    /// The client's bytes into its memory.
    Write,
}

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Bytes of payload.
    pub size: u64,
    /// First address in the server's memory.
    pub addr: u64,
    /// What is asked.
    pub opcode: Opcode,
    /// Whether statuses are exchanged (version 2).
    pub with_status: bool,
}

impl Header {
    /// The bytes on the wire; padding is zero.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.size.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_le_bytes());
        let version = if self.with_status { VERSION_2 } else { 0 };
        bytes[16] = version | u8::from(self.opcode == Opcode::Write);
        bytes
    }

    /// Reads a header. Every 24 bytes are one: an opcode that is not known acts as READ, as in
    /// C++ engines, and padding is ignored.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        let number = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let opcode = if bytes[16] & !VERSION_2 == 1 {
            Opcode::Write
        } else {
            Opcode::Read
        };
        Self {
            size: number(0),
            addr: number(8),
            opcode,
            with_status: bytes[16] & VERSION_2 != 0,
        }
    }
}

/// What the server says of a request, version 2 only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Status {
    /// Accepted (READ), or stored (WRITE).
    Ok,
    /// The addresses are not inside one registered buffer.
    Rejected,
    /// A code that is not known.
    Other(u32),
}

impl Status {
    /// The bytes on the wire.
    pub fn encode(self) -> [u8; STATUS_BYTES] {
        let code = match self {
            Self::Ok => 0,
            Self::Rejected => 1,
            Self::Other(code) => code,
        };
        (STATUS_MAGIC | u64::from(code)).to_le_bytes()
    }

    /// Reads a status frame; `None` if the bytes are none.
    pub fn decode(bytes: [u8; STATUS_BYTES]) -> Option<Self> {
        let word = u64::from_le_bytes(bytes);
        (word & !u64::from(u32::MAX) == STATUS_MAGIC).then_some(match word as u32 {
            0 => Self::Ok,
            1 => Self::Rejected,
            code => Self::Other(code),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_bytes() {
        let header = Header {
            size: 0x0102,
            addr: 0xa0b0,
            opcode: Opcode::Write,
            with_status: true,
        };
        let mut bytes = [0; HEADER_BYTES];
        (bytes[0], bytes[1], bytes[8], bytes[9], bytes[16]) = (2, 1, 0xb0, 0xa0, 0x81);
        assert_eq!(header.encode(), bytes);
        assert_eq!(
            Status::Rejected.encode(),
            [1, 0, 0, 0, 0x56, 0x54, 0x43, 0x4D]
        );
    }

    #[test]
    fn padding_and_unknown_opcodes_are_tolerated() {
        let mut bytes = [0xff; HEADER_BYTES];
        bytes[16] = 0x07;
        let header = Header::decode(&bytes);
        assert_eq!((header.opcode, header.with_status), (Opcode::Read, false));
    }

    #[test]
    fn bytes_that_are_no_status_are_told_apart() {
        for status in [Status::Ok, Status::Rejected, Status::Other(9)] {
            assert_eq!(Status::decode(status.encode()), Some(status));
        }
        assert_eq!(Status::decode([0; 8]), None);
    }

    proptest! {
        #[test]
        fn every_header_comes_back(size: u64, addr: u64, write: bool, with_status: bool) {
            let opcode = if write { Opcode::Write } else { Opcode::Read };
            let header = Header { size, addr, opcode, with_status };
            prop_assert_eq!(Header::decode(&header.encode()), header);
        }
    }
}
