//! A GID table in a file: to rank a table taken elsewhere, in a report or a test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rerail_verbs::{Gid, GidEntry, GidType, LinkLayer, Netdev};
use serde::Deserialize;

use super::policy::{GidIndexes, GidPolicy};
use super::rank::{PortTable, UnreadableRow};
use crate::{NetdevFacts, NetdevKind, Subnet, TopologyError};

/// One port's table and the operator's policy, as a JSON file gives them.
///
/// Members: `device`, `port`, `link_layer` (`Ethernet` or `InfiniBand`), `gid_tbl_len`, `entries`
/// (each `index`, `gid`, `type` or null, `ndev` or null); optional `netdevs` (each `name`, `kind`,
/// `up`, `addrs`), `ioctl_types` (index → type, which overrides an entry's) and `config`
/// (`gid_index`, `gid_subnets`, `gid_netdevs`; nothing else). Other members mean nothing. Slots
/// that are not listed are empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableFile {
    /// Name of the device.
    pub device: String,
    /// Port, from 1.
    pub port: u32,
    /// Link layer of the port.
    pub link_layer: LinkLayer,
    /// Slots in the table.
    pub table_len: u32,
    /// The rows listed, null ones included.
    pub entries: Vec<GidEntry>,
    /// Rows that the file says could not be read: those with an `error`.
    pub unreadable: Vec<UnreadableRow>,
    /// Facts of interfaces.
    pub netdevs: Vec<NetdevFacts>,
    /// The operator's policy; the environment has no part in it.
    pub policy: GidPolicy,
}

impl TableFile {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or see [`parse`](Self::parse).
    pub fn read(path: &Path) -> Result<Self, TopologyError> {
        let text = crate::document::read(path)?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Reads a text; `document` names it in errors.
    ///
    /// # Errors
    ///
    /// Anything that is not of the form above, with line and column.
    pub fn parse(text: &str, document: &str) -> Result<Self, TopologyError> {
        let raw: RawTable = serde_json::from_str(text)
            .map_err(|error| crate::document::malformed(document, &error))?;
        raw.check().map_err(|reason| TopologyError::Malformed {
            document: document.to_owned(),
            line: 0,
            column: 0,
            reason,
        })
    }

    /// The table, to be ranked.
    pub fn table(&self) -> PortTable<'_> {
        PortTable {
            device: &self.device,
            port: self.port,
            link_layer: self.link_layer,
            table_len: Some(self.table_len),
            entries: &self.entries,
            unreadable: &self.unreadable,
            netdevs: &self.netdevs,
        }
    }
}

#[derive(Deserialize)]
struct RawTable {
    device: String,
    port: u32,
    link_layer: String,
    gid_tbl_len: u32,
    entries: Vec<RawEntry>,
    #[serde(default)]
    netdevs: Vec<RawNetdev>,
    #[serde(default)]
    ioctl_types: BTreeMap<u32, String>,
    #[serde(default)]
    config: RawConfig,
}

#[derive(Deserialize)]
struct RawEntry {
    index: u32,
    gid: Option<Gid>,
    #[serde(rename = "type")]
    gid_type: Option<String>,
    ndev: Option<String>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct RawNetdev {
    name: String,
    #[serde(default)]
    index: u32,
    kind: Option<String>,
    up: Option<bool>,
    addrs: Option<Vec<String>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawConfig {
    gid_index: Option<GidIndexes>,
    gid_subnets: Vec<String>,
    gid_netdevs: Vec<String>,
}

impl RawTable {
    fn check(self) -> Result<TableFile, String> {
        let link_layer = match &*self.link_layer {
            "Ethernet" => LinkLayer::Ethernet,
            "InfiniBand" => LinkLayer::InfiniBand,
            other => {
                return Err(format!(
                    "link_layer {other:?}: expected Ethernet or InfiniBand"
                ));
            }
        };
        if self.device.is_empty() || self.port == 0 {
            return Err("device must not be empty, and ports count from 1".to_owned());
        }
        let mut seen = BTreeSet::new();
        let mut entries = Vec::with_capacity(self.entries.len());
        let mut unreadable = Vec::new();
        for entry in self.entries {
            let index = entry.index;
            if index >= self.gid_tbl_len {
                let table_len = self.gid_tbl_len;
                return Err(format!("entry {index}: outside of gid_tbl_len {table_len}"));
            }
            if !seen.insert(index) {
                return Err(format!("entry {index}: listed twice"));
            }
            let (Some(gid), None) = (entry.gid, &entry.error) else {
                let reason = entry.error.unwrap_or_else(|| "no gid".to_owned());
                unreadable.push(UnreadableRow { index, reason });
                continue;
            };
            let kernel = self.ioctl_types.get(&index).or(entry.gid_type.as_ref());
            let name = entry.ndev.filter(|name| !name.is_empty());
            entries.push(GidEntry {
                index,
                gid,
                gid_type: kernel.map_or(GidType::UNKNOWN, |text| parse_gid_type(text, link_layer)),
                netdev: name.map(|name| Netdev { index: 0, name }),
            });
        }
        let subnets = parse_subnets("config.gid_subnets", &self.config.gid_subnets)?;
        let netdevs = self.netdevs.into_iter().map(RawNetdev::check);
        Ok(TableFile {
            device: self.device,
            port: self.port,
            link_layer,
            table_len: self.gid_tbl_len,
            entries,
            unreadable,
            netdevs: netdevs.collect::<Result<_, _>>()?,
            policy: GidPolicy {
                index: self.config.gid_index.unwrap_or_default(),
                subnets,
                netdevs: self.config.gid_netdevs,
            },
        })
    }
}

impl RawNetdev {
    fn check(self) -> Result<NetdevFacts, String> {
        let addresses = self.addrs.as_deref();
        let what = format!("netdevs.{}.addrs", self.name);
        Ok(NetdevFacts {
            index: self.index,
            addresses: addresses
                .map(|addresses| parse_subnets(&what, addresses))
                .transpose()?,
            name: self.name,
            kind: self
                .kind
                .as_deref()
                .map_or(NetdevKind::Unknown, NetdevKind::from_kernel),
            up: self.up,
        })
    }
}

fn parse_subnets(what: &str, texts: &[String]) -> Result<Vec<Subnet>, String> {
    let parse = |text: &String| text.parse().map_err(|error| format!("{what}: {error}"));
    texts.iter().map(parse).collect()
}

/// A type in sysfs' words, and those of rdma-core's tools. Other words stay unknown.
pub(crate) fn parse_gid_type(text: &str, link_layer: LinkLayer) -> GidType {
    match text.trim() {
        "RoCE v2" => GidType::RoceV2,
        "RoCE v1" => GidType::RoceV1,
        // The kernel has one word for both; the link layer tells which.
        "IB/RoCE v1" if link_layer == LinkLayer::Ethernet => GidType::RoceV1,
        "IB/RoCE v1" | "IB" => GidType::InfiniBand,
        _ => GidType::UNKNOWN,
    }
}
