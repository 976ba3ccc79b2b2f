//! Which ports are opened, and under which names.

use std::sync::Arc;

use rerail_verbs::{Device, DeviceList};

use super::config::RdmaConfig;
use super::nic::{Nic, Place, PortWish};
use super::nics::{NICS_MAX, Nics};
use super::opening::Opening;
use super::tries::AllTries;
use crate::TransportError;
use crate::machine::ids::LocalNic;

/// Ports that are looked at on a device that does not say how many it has.
const PORTS_MAX: u32 = 254;

/// Opens the ports that `wanted` names, or all of all devices when it names none. What is not
/// there or cannot be used is left out with a word, as long as there is one that can: it is taken
/// in later.
pub(super) fn open_nics(
    list: &DeviceList,
    wanted: &[String],
    config: &RdmaConfig,
    tries: &AllTries,
) -> Result<Vec<Arc<Nic>>, TransportError> {
    let mut start = Start {
        config,
        tries,
        nics: Vec::new(),
        unusable: Vec::new(),
        last_error: None,
    };
    for wish in wanted {
        if let Some((device, port)) = find(list, wish)? {
            start.open(device, port);
        } else {
            let error = unknown(list, wish);
            tracing::error!(%error, "it is taken in once it is there");
            start.last_error = Some(error);
        }
    }
    for device in list.devices().iter().filter(|_| wanted.is_empty()) {
        // A device is asked for its further ports once one is open.
        let (mut ports, mut port) = (1, 1);
        while port <= ports {
            if let Some(count) = start.open(device, port) {
                ports = count;
            } else if start.is_unusable(device, port) {
                ports = ports.max(ports_of(device, config, tries));
            }
            port += 1;
        }
    }
    start.finish(list)
}

/// What is opened at the start.
struct Start<'a> {
    config: &'a RdmaConfig,
    tries: &'a AllTries,
    nics: Vec<Arc<Nic>>,
    /// Ports that are there and cannot be used yet.
    unusable: Vec<(&'a Device, u32)>,
    last_error: Option<TransportError>,
}

impl<'a> Start<'a> {
    /// Opens a port that can be used now; returns how many its device has.
    fn open(&mut self, device: &'a Device, port: u32) -> Option<u32> {
        let is_known = self.nics.iter().any(|nic| is_port(nic, device, port));
        if is_known || self.is_full(device, port) {
            return None;
        }
        match self.open_as(device, port, PortWish::Usable) {
            Ok(nic) => {
                let ports = nic.attr().phys_port_cnt.min(PORTS_MAX);
                self.nics.push(Arc::new(nic));
                Some(ports)
            }
            Err(error) => {
                if matches!(error, TransportError::Port { .. }) {
                    self.unusable.push((device, port));
                } else {
                    tracing::warn!(device = device.name(), port, %error, "port left out");
                }
                self.last_error = Some(error);
                None
            }
        }
    }

    fn open_as(&self, device: &Device, port: u32, wish: PortWish) -> Result<Nic, TransportError> {
        let name = name(self.nics.iter(), device.name(), port);
        let place = Place::from(LocalNic(self.nics.len() as u32));
        let tries = self.tries.of(device.name(), port);
        Nic::open(place, device, port, &name, self.config, wish, &tries)
    }

    fn is_unusable(&self, device: &Device, port: u32) -> bool {
        let mut unusable = self.unusable.iter();
        unusable.any(|(other, number)| other.name() == device.name() && *number == port)
    }

    fn is_full(&self, device: &Device, port: u32) -> bool {
        let is_full = self.nics.len() >= NICS_MAX;
        if is_full {
            let device = device.name();
            tracing::warn!(device, port, NICS_MAX, "port left out: there are too many");
        }
        is_full
    }

    fn finish(mut self, list: &DeviceList) -> Result<Vec<Arc<Nic>>, TransportError> {
        if self.nics.is_empty() {
            let none = || TransportError::UnknownDevice {
                device: "at all".into(),
                available: list.to_string(),
            };
            return Err(self.last_error.unwrap_or_else(none));
        }
        // Behind those that work, so that readers who count positions meet them last.
        for (device, port) in std::mem::take(&mut self.unusable) {
            if self.is_full(device, port) {
                continue;
            }
            match self.open_as(device, port, PortWish::Any) {
                Ok(nic) => self.nics.push(Arc::new(nic)),
                Err(error) => {
                    tracing::warn!(device = device.name(), port, %error, "port left out");
                }
            }
        }
        Ok(self.nics)
    }
}

/// The ports of `list` that are wanted and are not among `nics`: the first of a device that is new,
/// and the further ones once that is open.
pub(super) fn missing(list: &DeviceList, wanted: &[String], nics: &Nics) -> Vec<(Device, u32)> {
    let is_missing = |device: &Device, port| !nics.iter().any(|nic| is_port(nic, device, port));
    let mut missing = Vec::new();
    for (device, port) in wanted.iter().filter_map(|wish| find(list, wish).ok()?) {
        if is_missing(device, port) {
            missing.push((device.clone(), port));
        }
    }
    for device in list.devices().iter().filter(|_| wanted.is_empty()) {
        let known = nics.iter().find(|nic| nic.device() == device.name());
        let ports = known.map_or(1, |nic| nic.attr().phys_port_cnt.min(PORTS_MAX));
        let ports = (1..=ports).filter(|port| is_missing(device, *port));
        missing.extend(ports.map(|port| (device.clone(), port)));
    }
    missing
}

fn is_port(nic: &Nic, device: &Device, port: u32) -> bool {
    nic.device() == device.name() && nic.port() == port
}

/// How many ports a device has of which the first cannot be used.
fn ports_of(device: &Device, config: &RdmaConfig, tries: &AllTries) -> u32 {
    let begins = |control: &_| tries.of(device.name(), 1).begin(control);
    match Opening::new(device, 0, config, begins) {
        Ok(opening) => opening.attr().phys_port_cnt.min(PORTS_MAX),
        Err(error) => {
            tracing::warn!(device = device.name(), %error, "its further ports are not looked at");
            1
        }
    }
}

/// The device of a wish `name` or `name:port`, and the port; `None` if it is not there.
///
/// # Errors
///
/// No device can be meant.
fn find<'a>(list: &'a DeviceList, wish: &str) -> Result<Option<(&'a Device, u32)>, TransportError> {
    if let Some(device) = list.find(wish) {
        return Ok(Some((device, 1)));
    }
    let (name, port) = match wish.rsplit_once(':') {
        Some((name, port)) => (name, port.parse().ok().filter(|port| *port > 0)),
        None => (wish, Some(1)),
    };
    match port.filter(|_| !name.is_empty()) {
        Some(port) => Ok(list.find(name).map(|device| (device, port))),
        None => Err(unknown(list, wish)),
    }
}

fn unknown(list: &DeviceList, wish: &str) -> TransportError {
    TransportError::UnknownDevice {
        device: wish.to_owned(),
        available: list.to_string(),
    }
}

/// The device's name for its first used port, `<device>:<port>` for each further one.
pub(super) fn name<'n>(
    mut nics: impl Iterator<Item = &'n Arc<Nic>>,
    device: &str,
    port: u32,
) -> String {
    if nics.any(|nic| nic.device() == device) {
        format!("{device}:{port}")
    } else {
        device.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use rerail_verbs::sim::{FabricOptions, NicOptions, PortId, PortOptions, RealTimeFabric};

    use super::*;

    #[test]
    fn a_second_port_is_found_though_the_first_is_down() {
        let fabric = RealTimeFabric::start(FabricOptions::card(1)).expect("a thread");
        let node = fabric.add_node("host");
        let port = |number: u8| {
            let address = IpAddr::from([10, 0, 0, number]);
            PortOptions::ethernet(&format!("eth{number}"), &[address])
        };
        let options = NicOptions {
            ports: vec![port(1), port(2)],
            ..NicOptions::ethernet("sim0", IpAddr::from([10, 0, 0, 1]))
        };
        let nic = fabric.add_nic(node, &options);
        fabric.port_down(PortId { nic, port: 1 });
        let devices = fabric.devices_of(fabric.add_process(node));
        let nics = open_nics(&devices, &[], &RdmaConfig::default(), &AllTries::default());
        let nics = nics.expect("one works");
        let opened: Vec<_> = nics
            .iter()
            .map(|nic| (nic.name(), nic.port(), nic.is_gate_open()))
            .collect();
        // The one that works has the device's name; the other is taken in once it works.
        assert_eq!(opened, [("sim0", 2, true), ("sim0:1", 1, false)]);
    }
}
