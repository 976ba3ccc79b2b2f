use std::net::{IpAddr, Ipv4Addr};

/// 192.168.77.`host`, as in the soft-RoCE rig.
pub(super) fn address(host: u8) -> IpAddr {
    Ipv4Addr::new(192, 168, 77, host).into()
}
