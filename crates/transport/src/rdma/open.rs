//! Which ports are opened, and under which names.

use std::sync::Arc;

use rerail_verbs::{Device, DeviceList};

use super::config::RdmaConfig;
use super::nic::{Nic, PortWish};
use super::opening::Opening;
use crate::TransportError;
use crate::machine::ids::LocalNic;

/// Ports that are looked at on a device that does not say how many it has.
const PORTS_MAX: u32 = 254;

/// Opens the ports that `wanted` names, or all that can be used when it names none.
pub(super) fn open_nics(
    list: &DeviceList,
    wanted: &[String],
    config: &RdmaConfig,
) -> Result<Vec<Arc<Nic>>, TransportError> {
    let mut nics: Vec<Arc<Nic>> = Vec::new();
    for wish in wanted {
        let (device, port) = find(list, wish)?;
        let name = name(&nics, device.name(), port);
        let index = LocalNic(nics.len() as u32);
        let nic = Nic::open(index, device, port, &name, config, PortWish::Usable)?;
        nics.push(Arc::new(nic));
    }
    if !wanted.is_empty() {
        return Ok(nics);
    }
    let mut last_error = None;
    let mut unusable = Vec::new();
    for device in list.devices() {
        // The first port has the device's name. A device is asked for its further ports once one
        // is open.
        let mut ports = 1;
        let mut port = 1;
        while port <= ports {
            let (index, name) = next(&nics, device.name(), port);
            match Nic::open(index, device, port, &name, config, PortWish::Usable) {
                Ok(nic) => {
                    ports = nic.attr().phys_port_cnt.min(PORTS_MAX);
                    nics.push(Arc::new(nic));
                }
                Err(error) => {
                    if matches!(error, TransportError::Port { .. }) {
                        unusable.push((device, port));
                        ports = ports.max(ports_of(device, config));
                    } else {
                        tracing::warn!(device = device.name(), port, %error, "port left out");
                    }
                    last_error = Some(error);
                }
            }
            port += 1;
        }
    }
    if nics.is_empty() {
        return Err(last_error.unwrap_or_else(|| TransportError::UnknownDevice {
            device: "at all".into(),
            available: list.to_string(),
        }));
    }
    // Behind those that work, so that readers who count positions meet them last.
    for (device, port) in unusable {
        let (index, name) = next(&nics, device.name(), port);
        match Nic::open(index, device, port, &name, config, PortWish::Any) {
            Ok(nic) => nics.push(Arc::new(nic)),
            Err(error) => {
                tracing::warn!(device = device.name(), port, %error, "port left out");
            }
        }
    }
    Ok(nics)
}

/// How many ports a device has of which the first cannot be used.
fn ports_of(device: &Device, config: &RdmaConfig) -> u32 {
    match Opening::new(device, 0, config) {
        Ok(opening) => opening.attr().phys_port_cnt.min(PORTS_MAX),
        Err(error) => {
            tracing::warn!(device = device.name(), %error, "its further ports are not looked at");
            1
        }
    }
}

/// Number and name of the next NIC.
fn next(nics: &[Arc<Nic>], device: &str, port: u32) -> (LocalNic, String) {
    (LocalNic(nics.len() as u32), name(nics, device, port))
}

/// The device of a wish `name` or `name:port`, and the port.
fn find<'a>(list: &'a DeviceList, wish: &str) -> Result<(&'a Device, u32), TransportError> {
    if let Some(device) = list.find(wish) {
        return Ok((device, 1));
    }
    let with_port = wish.rsplit_once(':').and_then(|(name, port)| {
        let device = list.find(name)?;
        let port = port.parse().ok().filter(|port| *port > 0)?;
        Some((device, port))
    });
    with_port.ok_or_else(|| TransportError::UnknownDevice {
        device: wish.to_owned(),
        available: list.to_string(),
    })
}

/// The device's name for its first used port, `<device>:<port>` for each further one.
fn name(nics: &[Arc<Nic>], device: &str, port: u32) -> String {
    if nics.iter().any(|nic| nic.device() == device) {
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
        let nics = open_nics(&devices, &[], &RdmaConfig::default()).expect("one works");
        let opened: Vec<_> = nics
            .iter()
            .map(|nic| (nic.name(), nic.port(), nic.is_gate_open()))
            .collect();
        // The one that works has the device's name; the other is taken in once it works.
        assert_eq!(opened, [("sim0", 2, true), ("sim0:1", 1, false)]);
    }
}
