//! Ports: state, link layer, MTU and speed.

use std::fmt;

/// Logical state of a port (`enum ibv_port_state`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum PortState {
    /// No change of state (`IBV_PORT_NOP`).
    Nop,
    /// The link is down.
    Down,
    /// The link is up, the subnet manager has not configured it.
    Init,
    /// Configured, not yet active.
    Armed,
    /// Traffic can flow.
    Active,
    /// Active, in a transient error state (`IBV_PORT_ACTIVE_DEFER`).
    ActiveDefer,
    /// A number that is not known.
    Other(u32),
}

impl PortState {
    /// From `ibv_port_attr.state`.
    pub fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::Nop,
            1 => Self::Down,
            2 => Self::Init,
            3 => Self::Armed,
            4 => Self::Active,
            5 => Self::ActiveDefer,
            other => Self::Other(other),
        }
    }

    /// True where queue pairs may be connected through the port.
    pub fn is_active(self) -> bool {
        self == Self::Active
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nop => f.write_str("NOP"),
            Self::Down => f.write_str("DOWN"),
            Self::Init => f.write_str("INIT"),
            Self::Armed => f.write_str("ARMED"),
            Self::Active => f.write_str("ACTIVE"),
            Self::ActiveDefer => f.write_str("ACTIVE_DEFER"),
            Self::Other(number) => write!(f, "unknown ({number})"),
        }
    }
}

/// Physical state of a port (`ibv_port_attr.phys_state`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum PhysState {
    /// Sleep.
    Sleep,
    /// Polling for a link partner.
    Polling,
    /// Disabled.
    Disabled,
    /// Training.
    Training,
    /// The link is up.
    LinkUp,
    /// Recovering from a link error.
    LinkErrorRecovery,
    /// A number that is not known.
    Other(u32),
}

impl PhysState {
    /// From `ibv_port_attr.phys_state`.
    pub fn from_raw(raw: u32) -> Self {
        match raw {
            1 => Self::Sleep,
            2 => Self::Polling,
            3 => Self::Disabled,
            4 => Self::Training,
            5 => Self::LinkUp,
            6 => Self::LinkErrorRecovery,
            other => Self::Other(other),
        }
    }
}

/// Link layer of a port (`ibv_port_attr.link_layer`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum LinkLayer {
    /// Not said by the driver.
    Unspecified,
    /// InfiniBand: addressed by LID.
    InfiniBand,
    /// Ethernet: RoCE, addressed by GID.
    Ethernet,
    /// A number that is not known.
    Other(u32),
}

impl LinkLayer {
    /// From `ibv_port_attr.link_layer`.
    pub fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::Unspecified,
            1 => Self::InfiniBand,
            2 => Self::Ethernet,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unspecified => f.write_str("Unspecified"),
            Self::InfiniBand => f.write_str("InfiniBand"),
            Self::Ethernet => f.write_str("Ethernet"),
            Self::Other(number) => write!(f, "unknown ({number})"),
        }
    }
}

/// A path MTU in bytes (`enum ibv_mtu`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(u16)]
pub enum Mtu {
    /// 256 bytes.
    Mtu256 = 256,
    /// 512 bytes.
    Mtu512 = 512,
    /// 1024 bytes.
    Mtu1024 = 1024,
    /// 2048 bytes.
    Mtu2048 = 2048,
    /// 4096 bytes.
    Mtu4096 = 4096,
}

impl Mtu {
    /// From the verbs code 1..=5; `None` for a number that is not known.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            1 => Self::Mtu256,
            2 => Self::Mtu512,
            3 => Self::Mtu1024,
            4 => Self::Mtu2048,
            5 => Self::Mtu4096,
            _ => return None,
        })
    }

    /// The verbs code 1..=5.
    pub fn to_raw(self) -> u32 {
        match self {
            Self::Mtu256 => 1,
            Self::Mtu512 => 2,
            Self::Mtu1024 => 3,
            Self::Mtu2048 => 4,
            Self::Mtu4096 => 5,
        }
    }

    /// Bytes of payload in one packet.
    pub fn bytes(self) -> u32 {
        u32::from(self as u16)
    }

    /// The largest MTU of at most `bytes`; `None` below 256.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        [
            Self::Mtu4096,
            Self::Mtu2048,
            Self::Mtu1024,
            Self::Mtu512,
            Self::Mtu256,
        ]
        .into_iter()
        .find(|mtu| mtu.bytes() <= bytes)
    }
}

/// What a port reports of itself (`struct ibv_port_attr`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortAttr {
    /// Logical state.
    pub state: PortState,
    /// Physical state.
    pub phys_state: PhysState,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Largest MTU of the port; `None` when the device reports a code that is not known.
    pub max_mtu: Option<Mtu>,
    /// MTU in force; `None` when the device reports a code that is not known.
    pub active_mtu: Option<Mtu>,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// LID of the subnet manager.
    pub sm_lid: u16,
    /// Entries in the GID table, empty ones included.
    pub gid_tbl_len: u32,
    /// Entries in the P_Key table.
    pub pkey_tbl_len: u16,
    /// Largest message in bytes.
    pub max_msg_bytes: u32,
    /// Verbs code of the link width.
    pub active_width: u8,
    /// Verbs code of the lane speed.
    pub active_speed: u32,
}

impl PortAttr {
    /// Link speed in Mbit/s, or 0 when width or speed code is not known.
    ///
    /// Codes from the InfiniBand specification's PortInfo, as in libibverbs' `ibv_devinfo`.
    pub fn speed_mbps(&self) -> u32 {
        let lanes = match self.active_width {
            1 => 1,
            2 => 4,
            4 => 8,
            8 => 12,
            16 => 2,
            _ => return 0,
        };
        let lane_mbps = match self.active_speed {
            1 => 2_500,
            2 => 5_000,
            4 | 8 => 10_000,
            16 => 14_000,
            32 => 25_000,
            64 => 50_000,
            128 => 100_000,
            256 => 200_000,
            _ => return 0,
        };
        lanes * lane_mbps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes_and_bytes_agree() {
        for raw in 1..=5 {
            let mtu = Mtu::from_raw(raw).expect("1..=5 are MTU codes");
            assert_eq!(mtu.to_raw(), raw);
            assert_eq!(mtu.bytes(), 128 << raw);
            assert_eq!(Mtu::from_bytes(mtu.bytes()), Some(mtu));
        }
        assert_eq!(Mtu::from_raw(0), None);
        assert_eq!(Mtu::from_raw(6), None);
        assert_eq!(Mtu::from_bytes(4_199), Some(Mtu::Mtu4096));
        assert_eq!(Mtu::from_bytes(255), None);
    }
}
