//! Which ports are used, and under which name each is published.

use std::collections::BTreeMap;

use crate::scan::{Nic, NicPort, Scan};
use crate::{SettingError, TopologyError};

/// A port that is this many times slower than the fastest stays out of the default set: it would
/// be a management port, and work shared evenly would wait for it.
const FAR_SLOWER: u32 = 3;
/// The allow-list of devices of the C++ engine; names that do not exist have no effect there.
const FILTER_VARIABLE: &str = "MC_TE_FILTERS";
const DEVICES_VARIABLE: &str = "RERAIL_DEVICES";

/// A port that is used.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Rail {
    /// Name in the matrix and in `devices[]`: the device's for its first used port,
    /// `<device>:<port>` for each further one.
    pub name: String,
    /// Name of the device.
    pub device: String,
    /// Port, from 1.
    pub port: u32,
    /// Rate in Mbit/s; 0 where it is not known.
    pub rate_mbps: u32,
}

/// The operator's choice of devices and ports.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceFilter {
    /// Names, each `<device>` or `<device>:<port>`; empty for the default set.
    names: Vec<String>,
    /// Who gave them.
    source: String,
    /// Whether a name that does not exist is an error.
    strict: bool,
}

impl DeviceFilter {
    /// The list of a `--devices` or `--device` option: names joined by commas, blanks trimmed.
    ///
    /// # Errors
    ///
    /// A list that is empty, or has an empty part.
    pub fn parse(option: &str, text: &str) -> Result<Self, SettingError> {
        let names = text.split(',').map(|name| name.trim().to_owned());
        let names: Vec<_> = names.collect();
        if names.iter().any(String::is_empty) {
            let expected = "devices joined by commas, such as mlx5_0,mlx5_1:2";
            return Err(SettingError::new(option, text, expected));
        }
        Ok(Self {
            names,
            source: option.to_owned(),
            strict: true,
        })
    }

    /// `RERAIL_DEVICES`, else `MC_TE_FILTERS`, which keeps its meaning: empty parts and names of
    /// other machines' devices do nothing, unless nothing else is left.
    ///
    /// # Errors
    ///
    /// `RERAIL_DEVICES` is set and does not parse.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, SettingError> {
        if let Some(text) = lookup(DEVICES_VARIABLE) {
            return Self::parse(DEVICES_VARIABLE, &text);
        }
        let text = lookup(FILTER_VARIABLE).unwrap_or_default();
        let names = text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty());
        Ok(Self {
            names: names.map(str::to_owned).collect(),
            source: FILTER_VARIABLE.to_owned(),
            strict: false,
        })
    }

    /// Whether nothing is chosen, so that the default set is used.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Whether the filter leaves open that a port of this device is used.
    pub(crate) fn may_name(&self, device: &str) -> bool {
        let of_device = |name: &String| {
            let rest = name.strip_prefix(device);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
        };
        self.is_empty() || self.names.iter().any(of_device)
    }

    fn names_port(&self, nic: &Nic, port: &NicPort) -> bool {
        let with_port = format!("{}:{}", nic.name, port.number);
        let mut names = self.names.iter();
        names.any(|name| *name == nic.name || *name == with_port)
    }
}

/// The ports to use, in order of name and number, and what the operator should know of the others.
///
/// Without a filter: every usable port, but virtual functions beside their own physical one and
/// ports far slower than the fastest. With one: every usable port that it names.
///
/// # Errors
///
/// The filter names what this machine does not have: any name of a strict one, all names of the
/// `MC_TE_FILTERS` kind.
pub fn rails(
    scan: &Scan,
    filter: &DeviceFilter,
) -> Result<(Vec<Rail>, Vec<String>), TopologyError> {
    let mut warnings = unknown_names(scan, filter)?;
    let explicit = !filter.names.is_empty();
    let mut chosen = Vec::new();
    for nic in &scan.nics {
        let named = nic.ports.iter().any(|port| filter.names_port(nic, port));
        if explicit && !named {
            continue;
        }
        if let Some(reason) = &nic.closed_because {
            warnings.push(format!("{} is not used: {reason}", nic.name));
            continue;
        }
        let ports: Vec<_> = nic
            .usable_ports()
            .filter(|port| !explicit || filter.names_port(nic, port))
            .collect();
        if ports.is_empty() {
            warnings.push(format!(
                "{} is not used: no active port with a GID",
                nic.name
            ));
        }
        chosen.extend(ports.into_iter().map(|port| (nic, port)));
    }
    if !explicit {
        leave_out(scan, &mut chosen, &mut warnings);
    }
    let mut used: BTreeMap<&str, u32> = BTreeMap::new();
    let rails = chosen.into_iter().map(|(nic, port)| {
        let count = used.entry(&nic.name).or_insert(0);
        *count += 1;
        Rail {
            name: if *count == 1 {
                nic.name.clone()
            } else {
                format!("{}:{}", nic.name, port.number)
            },
            device: nic.name.clone(),
            port: port.number,
            rate_mbps: port.rate_mbps,
        }
    });
    Ok((rails.collect(), warnings))
}

fn unknown_names(scan: &Scan, filter: &DeviceFilter) -> Result<Vec<String>, TopologyError> {
    let exists = |name: &&String| {
        let mut nics = scan.nics.iter();
        nics.any(|nic| {
            let port = name
                .strip_prefix(&nic.name)
                .and_then(|rest| rest.strip_prefix(':'));
            let port = port.and_then(|port| port.parse().ok());
            **name == nic.name || port.is_some_and(|number| nic.port(number).is_some())
        })
    };
    let unknown: Vec<_> = filter
        .names
        .iter()
        .filter(|name| !exists(name))
        .cloned()
        .collect();
    if unknown.is_empty() {
        return Ok(Vec::new());
    }
    if filter.strict || unknown.len() == filter.names.len() {
        let usable = scan.nics.iter().filter(|nic| nic.is_usable());
        return Err(TopologyError::UnknownDevices {
            source_of_names: filter.source.clone(),
            unknown,
            usable: usable.map(|nic| nic.name.clone()).collect(),
        });
    }
    let source = &filter.source;
    Ok(unknown
        .iter()
        .map(|name| format!("{source} names {name}, which this machine does not have"))
        .collect())
}

fn leave_out(scan: &Scan, chosen: &mut Vec<(&Nic, &NicPort)>, warnings: &mut Vec<String>) {
    let physical: Vec<String> = chosen
        .iter()
        .filter_map(|(nic, _)| Some(nic.pci.as_ref()?.bdf().to_owned()))
        .collect();
    let fastest = chosen
        .iter()
        .map(|(_, port)| port.rate_mbps)
        .max()
        .unwrap_or(0);
    let mut virtual_functions = Vec::new();
    chosen.retain(|(nic, port)| {
        let own = nic.physical_function.as_ref();
        if own.is_some_and(|own| physical.contains(own)) {
            virtual_functions.push(nic.name.as_str());
            return false;
        }
        // A rate that is not known speaks against nobody.
        let slow = port.rate_mbps != 0 && port.rate_mbps.saturating_mul(FAR_SLOWER) < fastest;
        if slow {
            warnings.push(format!(
                "{} port {} is not in the default set: {} Mbit/s where the fastest has {fastest}; \
                 name it to use it",
                nic.name, port.number, port.rate_mbps
            ));
        }
        !slow
    });
    virtual_functions.dedup();
    if !virtual_functions.is_empty() {
        warnings.push(format!(
            "virtual functions beside their physical one are not in the default set: {}; name \
             them to use them",
            virtual_functions.join(", ")
        ));
    }
    tracing::debug!(
        nics = scan.nics.len(),
        rails = chosen.len(),
        "chose the default set"
    );
}
