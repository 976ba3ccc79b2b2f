//! Reading a port: everything that the observer compares, all of it fresh.

use std::path::Path;

use rerail_topology::Scan;
use rerail_verbs::{Context, VerbsError};

use crate::machine::observer::{PortReading, ReadFailure};

/// Queries state, GID table and P_Keys of a port, and what sysfs says of the interfaces in that
/// table, by which `rerail gids` ranks its rows, too. Calls verbs on the caller's thread.
pub(in crate::rdma) fn read_port(
    context: &Context,
    port: u32,
    pkey_index: u16,
) -> Result<PortReading, VerbsError> {
    read_port_below(Path::new("/"), context, port, pkey_index)
}

fn read_port_below(
    root: &Path,
    context: &Context,
    port: u32,
    pkey_index: u16,
) -> Result<PortReading, VerbsError> {
    let attr = context.port_attr(port)?;
    let gids = context.gid_table(port)?;
    // After the table: an address that went meanwhile must not pass for one that is there.
    let netdevs = Scan::netdevs_of(root, context.name(), &gids);
    let pkeys = u32::from(attr.pkey_tbl_len).min(u32::from(pkey_index) + 1);
    let pkeys = (0..pkeys)
        .map(|index| context.pkey(port, index as u16))
        .collect::<Result<_, _>>()?;
    Ok(PortReading {
        attr,
        gids,
        unreadable: Vec::new(),
        netdevs,
        pkeys,
    })
}

/// What the observer is told of a query that failed.
pub(in crate::rdma) fn failure(error: &VerbsError) -> ReadFailure {
    match error {
        VerbsError::Verb { verb, errno, .. } => ReadFailure {
            query: verb,
            errno: *errno,
        },
        _ => ReadFailure {
            query: "reading the port",
            errno: 0,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use rerail_topology::NetdevKind;
    use rerail_topology::gid::{GidClass, GidPolicy, PortTable, rank};
    use rerail_verbs::sim::{FabricOptions, NicOptions, PortOptions, RealTimeFabric};

    use super::*;

    #[test]
    fn rows_are_ranked_by_what_sysfs_says_of_their_interfaces() {
        let fabric = RealTimeFabric::start(FabricOptions::card(1)).expect("a thread");
        let node = fabric.add_node("host");
        let address = IpAddr::from([10, 0, 0, 1]);
        let options = NicOptions {
            ports: vec![PortOptions::ethernet("fabric0", &[address])],
            ..NicOptions::ethernet("sim0", address)
        };
        fabric.add_nic(node, &options);
        let devices = fabric.devices_of(fabric.add_process(node));
        let context = devices.find("sim0").expect("added").open().expect("opened");
        let root = tempfile::tempdir().expect("a directory");
        let file = |below: &str, text: &str| {
            let path = root.path().join(below);
            std::fs::create_dir_all(path.parent().expect("below it")).expect("a directory");
            std::fs::write(path, text).expect("a file");
        };
        file("sys/class/net/fabric0/uevent", "DEVTYPE=vxlan\n");
        file("sys/class/net/fabric0/operstate", "up\n");
        file("sys/class/net/eth0/operstate", "up\n");
        let class = || {
            let reading = read_port_below(root.path(), &context, 1, 0).expect("it works");
            let table = PortTable {
                device: "sim0",
                port: 1,
                link_layer: reading.attr.link_layer,
                table_len: Some(reading.attr.gid_tbl_len),
                entries: &reading.gids,
                unreadable: &reading.unreadable,
                netdevs: &reading.netdevs,
            };
            let ranking = rank(&table, &GidPolicy::default());
            let class = ranking.selected().expect("a usable row").class;
            (class, reading.netdevs)
        };
        // A device that this machine does not have has none of its interfaces.
        assert_eq!(class(), (Some(GidClass::NetdevGlobal), Vec::new()));
        file("sys/class/infiniband/sim0/node_type", "1: CA\n");
        let (found, netdevs) = class();
        assert_eq!(found, Some(GidClass::OverlayGlobal));
        let kinds: Vec<_> = netdevs
            .iter()
            .map(|facts| (&*facts.name, &facts.kind))
            .collect();
        assert_eq!(kinds, [("fabric0", &NetdevKind::Tunnel)]);
    }
}
