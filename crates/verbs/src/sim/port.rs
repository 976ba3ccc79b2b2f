//! Ports: state, addresses, LIDs, P_Keys, MTU.

use std::time::Duration;

use super::core::Core;
use super::event::Element;
use super::gid_table::GidTable;
use super::node::PortId;
use super::options::{LinkOptions, PortOptions};
use super::trace::trace;
use crate::error::Errno;
use crate::{AsyncEventKind, Gid, GidEntry, GidType, LinkLayer, Mtu, Netdev, PhysState};
use crate::{PortAttr, PortState};

/// Bytes of IPv6, UDP, transport and RDMA headers and checksum, by which soft-RoCE reduces the
/// interface's MTU before it looks for the largest path MTU that fits.
pub(super) const HEADER_BYTES: u32 = 104;

/// One port.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) link_layer: LinkLayer,
    pub(super) netdev: Netdev,
    pub(super) netdev_mtu_bytes: u32,
    pub(super) max_msg_bytes: u32,
    pub(super) up: bool,
    pub(super) gids: GidTable,
    pub(super) roce_v1_rows: bool,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) pkeys: Vec<u16>,
    pub(super) active_width: u8,
    pub(super) active_speed: u32,
    pub(super) segment: u32,
    pub(super) link: LinkOptions,
    /// When the packets that were handed to the link will have left.
    pub(super) busy_until: Duration,
    /// When the last of them will arrive: order is kept.
    pub(super) last_arrival: Duration,
}

impl Port {
    /// The largest path MTU that the interface carries.
    pub(super) fn active_mtu(&self) -> Option<Mtu> {
        if self.link_layer == LinkLayer::InfiniBand {
            return Some(Mtu::Mtu4096);
        }
        Mtu::from_bytes(self.netdev_mtu_bytes.saturating_sub(HEADER_BYTES))
    }

    fn attr(&self) -> PortAttr {
        let infiniband = self.link_layer == LinkLayer::InfiniBand;
        PortAttr {
            state: if self.up {
                PortState::Active
            } else {
                PortState::Down
            },
            phys_state: if self.up {
                PhysState::LinkUp
            } else {
                PhysState::Disabled
            },
            link_layer: self.link_layer,
            max_mtu: Some(Mtu::Mtu4096),
            active_mtu: self.active_mtu(),
            lid: if infiniband { self.lid } else { 0 },
            sm_lid: if infiniband { self.sm_lid } else { 0 },
            gid_tbl_len: self.gids.length(),
            pkey_tbl_len: self.pkeys.len() as u16,
            max_msg_bytes: self.max_msg_bytes,
            active_width: self.active_width,
            active_speed: self.active_speed,
        }
    }

    /// Enters an address: one row, or two where the port has RoCE v1 rows. False when the table
    /// is full.
    fn enter(&mut self, gid: Gid, netdev: &Netdev) -> bool {
        let types: &[GidType] = match self.link_layer {
            LinkLayer::InfiniBand => &[GidType::InfiniBand],
            _ if self.roce_v1_rows => &[GidType::RoceV1, GidType::RoceV2],
            _ => &[GidType::RoceV2],
        };
        let netdev = (self.link_layer != LinkLayer::InfiniBand).then(|| netdev.clone());
        types
            .iter()
            .all(|gid_type| self.gids.add(gid, *gid_type, netdev.clone()).is_some())
    }
}

impl Core {
    pub(super) fn add_port(&mut self, at: PortId, options: &PortOptions, guid: u64) {
        let node = self.nics[at.nic.0].node;
        let ifindex = self.nodes[node.0].next_ifindex;
        self.nodes[node.0].next_ifindex += 1;
        let netdev = Netdev {
            index: ifindex,
            name: options.netdev.clone(),
        };
        let mut port = Port {
            link_layer: options.link_layer,
            netdev: netdev.clone(),
            netdev_mtu_bytes: options.netdev_mtu_bytes,
            max_msg_bytes: options.max_msg_bytes,
            up: true,
            gids: GidTable::new(options.gid_tbl_len),
            roce_v1_rows: options.roce_v1_rows,
            lid: options.lid,
            sm_lid: 1,
            pkeys: options.pkeys.clone(),
            active_width: options.active_width,
            active_speed: options.active_speed,
            segment: options.segment,
            link: options.link.clone(),
            busy_until: Duration::ZERO,
            last_arrival: Duration::ZERO,
        };
        let automatic = {
            let mut bytes = [0_u8; 16];
            bytes[0] = 0xfe;
            bytes[1] = 0x80;
            bytes[8..].copy_from_slice(&guid.to_be_bytes());
            Gid(bytes)
        };
        let first = options.link_local.unwrap_or(automatic);
        let addresses = options.addresses.iter().copied().map(Gid::from_ip);
        let gids: Vec<Gid> = [first].into_iter().chain(addresses).collect();
        for gid in &gids {
            port.enter(*gid, &netdev);
        }
        self.nics[at.nic.0].ports.push(port);
        for gid in gids {
            self.claim(gid, at);
        }
    }

    /// The port of that number, counted from 1.
    pub(super) fn port(&self, at: PortId) -> Option<&Port> {
        let index = (at.port as usize).checked_sub(1)?;
        self.nics.get(at.nic.0)?.ports.get(index)
    }

    pub(super) fn port_mut(&mut self, at: PortId) -> Option<&mut Port> {
        let index = (at.port as usize).checked_sub(1)?;
        self.nics.get_mut(at.nic.0)?.ports.get_mut(index)
    }

    /// The port, for a call of the test's.
    ///
    /// # Panics
    ///
    /// When the adapter has no such port, which is a mistake in the test.
    fn own_port(&mut self, at: PortId) -> &mut Port {
        let known = self.port(at).is_some();
        assert!(known, "the adapter has no port {}", at.port);
        let index = at.port as usize - 1;
        &mut self.nics[at.nic.0].ports[index]
    }

    pub(super) fn is_up(&self, at: PortId) -> bool {
        !self.nics[at.nic.0].dead && self.port(at).is_some_and(|port| port.up)
    }

    pub(super) fn query_port(&self, at: PortId) -> Result<PortAttr, Errno> {
        let port = self.port(at).ok_or(Errno(libc::EINVAL))?;
        Ok(port.attr())
    }

    pub(super) fn query_gids(&self, at: PortId) -> Result<Vec<GidEntry>, Errno> {
        let port = self.port(at).ok_or(Errno(libc::EINVAL))?;
        Ok(port.gids.entries())
    }

    pub(super) fn query_pkey(&self, at: PortId, index: u16) -> Result<u16, Errno> {
        let port = self.port(at).ok_or(Errno(libc::EINVAL))?;
        port.pkeys
            .get(usize::from(index))
            .copied()
            .ok_or(Errno(libc::EINVAL))
    }

    fn port_event(&mut self, at: PortId, kind: AsyncEventKind) {
        self.raise(at.nic, kind, Element::Port(at.port));
    }

    /// Takes a port down or brings it up, as `ip link set` does.
    ///
    /// Down: `PORT_ERR`; packets that have not left are purged, those on the wire are not. The
    /// IPv4 and link-local rows stay. Up: `PORT_ACTIVE`, on soft-RoCE twice. An InfiniBand port is
    /// ACTIVE at once too, since there is no subnet manager that would have to configure it.
    pub(super) fn set_port(&mut self, at: PortId, up: bool) {
        if self.own_port(at).up == up {
            return;
        }
        self.own_port(at).up = up;
        let fate = if up { "up" } else { "down" };
        trace!(self, "port {} {} {fate}", self.nic_name(at.nic), at.port);
        self.forget_neighbours(at);
        if up {
            for _ in 0..self.options.events.port_active_count {
                self.port_event(at, AsyncEventKind::PortActive);
            }
            return;
        }
        self.purge_egress(at);
        self.port_event(at, AsyncEventKind::PortErr);
        if self.options.ipv6_lost_on_down {
            let lost: Vec<Gid> = self
                .own_port(at)
                .gids
                .gids()
                .filter(|gid| gid.to_ipv4().is_none() && gid.0[0] != 0xfe)
                .collect();
            for gid in lost {
                self.delete_gid(at, gid);
            }
        }
    }

    /// Adds an address to the port's interface, or to another interface over it. One `GID_CHANGE`
    /// a row. The address is taken over from whoever had it before. False when the table is full.
    pub(super) fn add_gid(&mut self, at: PortId, gid: Gid, netdev: Option<&str>) -> bool {
        let node = self.nics[at.nic.0].node;
        let netdev = match netdev {
            None => self.own_port(at).netdev.clone(),
            Some(name) => {
                let index = self.nodes[node.0].next_ifindex;
                self.nodes[node.0].next_ifindex += 1;
                Netdev {
                    index,
                    name: name.to_owned(),
                }
            }
        };
        let rows = 1 + usize::from(self.own_port(at).roce_v1_rows);
        let entered = self.own_port(at).enter(gid, &netdev);
        trace!(
            self,
            "address {gid} on {} {} {}: {entered}",
            self.nic_name(at.nic),
            at.port,
            netdev.name
        );
        if entered {
            self.claim(gid, at);
            for _ in 0..rows {
                self.port_event(at, AsyncEventKind::GidChange);
            }
        }
        entered
    }

    /// Deletes an address from the port: one `GID_CHANGE` a row. False when it was not there.
    pub(super) fn delete_gid(&mut self, at: PortId, gid: Gid) -> bool {
        let deleted = self.own_port(at).gids.delete(|row, _| *row == gid);
        if deleted.is_empty() {
            return false;
        }
        trace!(
            self,
            "no address {gid} on {} {}, rows {deleted:?}",
            self.nic_name(at.nic),
            at.port
        );
        self.disclaim(gid, at);
        for _ in deleted {
            self.port_event(at, AsyncEventKind::GidChange);
        }
        true
    }

    /// The subnet manager gives the port another LID: `LID_CHANGE`.
    pub(super) fn set_lid(&mut self, at: PortId, lid: u16) {
        self.own_port(at).lid = lid;
        trace!(self, "lid {lid} on {} {}", self.nic_name(at.nic), at.port);
        self.port_event(at, AsyncEventKind::LidChange);
    }

    /// Another P_Key table: `PKEY_CHANGE`.
    pub(super) fn set_pkeys(&mut self, at: PortId, pkeys: Vec<u16>) {
        trace!(
            self,
            "pkeys {pkeys:?} on {} {}",
            self.nic_name(at.nic),
            at.port
        );
        self.own_port(at).pkeys = pkeys;
        self.port_event(at, AsyncEventKind::PkeyChange);
    }

    /// Another MTU of the interface. There is *no* event (measured on soft-RoCE).
    pub(super) fn set_netdev_mtu(&mut self, at: PortId, bytes: u32) {
        self.own_port(at).netdev_mtu_bytes = bytes;
        trace!(self, "mtu {bytes} on {} {}", self.nic_name(at.nic), at.port);
    }

    /// Another speed, as the port reports it: `DEVICE_SPEED_CHANGE`. The link's bandwidth is a
    /// setting of its own.
    pub(super) fn set_speed(&mut self, at: PortId, active_width: u8, active_speed: u32) {
        let port = self.own_port(at);
        port.active_width = active_width;
        port.active_speed = active_speed;
        trace!(
            self,
            "speed {active_width}x{active_speed} on {}",
            self.nic_name(at.nic)
        );
        self.port_event(at, AsyncEventKind::DeviceSpeedChange);
    }

    pub(super) fn set_max_msg_bytes(&mut self, at: PortId, bytes: u32) {
        self.own_port(at).max_msg_bytes = bytes;
        let nic = self.nic_name(at.nic);
        trace!(self, "messages of at most {bytes} bytes on {nic}");
    }

    pub(super) fn set_link(&mut self, at: PortId, link: LinkOptions) -> LinkOptions {
        trace!(self, "link {} {}: {link:?}", self.nic_name(at.nic), at.port);
        std::mem::replace(&mut self.own_port(at).link, link)
    }
}
