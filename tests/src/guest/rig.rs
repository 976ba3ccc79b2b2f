//! The two-host rig inside the guest, and faults on it.
//!
//! xtask's `rig.sh` sets it up: `a0` and `b0` belong to host 0, the target, `a1` and `b1` to host
//! 1, the initiator; `rxe_NIC` is the verbs device on each, `pNIC` the bridge's side of the wire.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::child::{output_within, stdout_within};

/// The NICs in the order of their addresses.
pub const NICS: [Nic; 4] = [A0, A1, B0, B1];
/// Rail a of the target.
pub const A0: Nic = Nic {
    name: "a0",
    host: 1,
};
/// Rail a of the initiator.
pub const A1: Nic = Nic {
    name: "a1",
    host: 2,
};
/// Rail b of the target.
pub const B0: Nic = Nic {
    name: "b0",
    host: 3,
};
/// Rail b of the initiator.
pub const B1: Nic = Nic {
    name: "b1",
    host: 4,
};

/// How long one `ip` or `tc` may take, and how long a device until it is usable again.
const TOOL_WITHIN: Duration = Duration::from_secs(20);
const USABLE_WITHIN: Duration = Duration::from_secs(20);
const MTU: u32 = 4200;

/// One of the rig's NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nic {
    /// The netdev's name.
    pub name: &'static str,
    /// Last number of its address, and of its route table.
    host: u8,
}

impl Nic {
    /// The verbs device on it.
    #[must_use]
    pub fn device(self) -> String {
        format!("rxe_{}", self.name)
    }

    /// Its address when the rig is in order.
    #[must_use]
    pub fn address(self) -> String {
        format!("192.168.77.{}", self.host)
    }

    /// Its address as a GID, in the form of the kernel's table.
    #[must_use]
    pub fn gid(self) -> String {
        format!("0000:0000:0000:0000:0000:ffff:c0a8:4d{:02x}", self.host)
    }

    /// Takes the link down: PORT_ERR on the device, and on nothing else of the rig.
    ///
    /// # Errors
    /// As [`run`].
    pub fn down(self) -> Result<()> {
        ip(&format!("link set {} down", self.name))
    }

    /// Brings it up again, with the route that the kernel dropped meanwhile.
    ///
    /// # Errors
    /// As [`run`].
    pub fn up(self) -> Result<()> {
        ip(&format!("link set {} up", self.name))?;
        self.restore_route()
    }

    /// Adds an address, reachable like the first one.
    ///
    /// # Errors
    /// As [`run`].
    pub fn add_address(self, address: &str) -> Result<()> {
        ip(&format!(
            "rule add pref 20 from {address} to 192.168.77.0/24 lookup {}",
            self.table()
        ))?;
        ip(&format!(
            "addr add {address}/24 dev {} noprefixroute",
            self.name
        ))
    }

    /// Removes an address; its GID row becomes a hole.
    ///
    /// # Errors
    /// As [`run`].
    pub fn remove_address(self, address: &str) -> Result<()> {
        ip(&format!("addr del {address}/24 dev {}", self.name))
    }

    /// Gives the NIC another address in place of `old`, a few milliseconds apart. Meanwhile only
    /// the link-local GID is there.
    ///
    /// # Errors
    /// As [`run`].
    pub fn renumber(self, old: &str, new: &str) -> Result<()> {
        let (name, table) = (self.name, self.table());
        ip_batch(&format!(
            "rule add pref 20 from {new} to 192.168.77.0/24 lookup {table}\n\
             addr del {old}/24 dev {name}\n\
             addr add {new}/24 dev {name} noprefixroute\n"
        ))
    }

    /// Gives the NIC an address in a subnet of its own instead of the rig's, with a route to that
    /// subnet only.
    ///
    /// # Errors
    /// As [`run`].
    pub fn move_to_subnet(self, prefix: &str) -> Result<()> {
        let (name, table, host) = (self.name, self.table(), self.host);
        ip(&format!("-4 addr flush dev {name}"))?;
        ip(&format!("route flush table {table}"))?;
        ip(&format!(
            "rule add pref 20 from {prefix}.{host} to {prefix}.0/24 lookup {table}"
        ))?;
        ip(&format!(
            "addr add {prefix}.{host}/24 dev {name} noprefixroute"
        ))?;
        ip(&format!(
            "route replace {prefix}.0/24 dev {name} table {table}"
        ))
    }

    /// Puts `tc` discipline `what` on the wire towards this NIC, for instance `netem delay 20ms`.
    /// On the bridge's side, so that the packets survive the NIC's going down.
    ///
    /// # Errors
    /// As [`run`].
    pub fn impair_inbound(self, what: &str) -> Result<()> {
        run(
            "tc",
            &format!("qdisc replace dev p{} root {what}", self.name),
        )
        .map(drop)
    }

    /// The index at which a GID is in the device's table.
    ///
    /// # Errors
    /// If the device is not there.
    pub fn row_of(self, gid: &str) -> Result<Option<u32>> {
        let mut rows = self.gid_table()?.into_iter();
        Ok(rows.find(|row| row.1 == gid).map(|row| row.0))
    }

    /// Rows of the device's GID table that are not empty: index, GID, type as sysfs says it.
    ///
    /// # Errors
    /// If the device is not there.
    pub fn gid_table(self) -> Result<Vec<(u32, String, String)>> {
        let port = format!("/sys/class/infiniband/{}/ports/1", self.device());
        let mut rows = Vec::new();
        for entry in std::fs::read_dir(format!("{port}/gids")).context(port.clone())? {
            let name = entry?.file_name();
            let index: u32 = name.to_string_lossy().parse()?;
            let gid = read(&format!("{port}/gids/{index}"))?;
            if gid != "0000:0000:0000:0000:0000:0000:0000:0000" {
                // Reading the type of an empty row is an error, and a row may become empty.
                let kind = read(&format!("{port}/gid_attrs/types/{index}")).unwrap_or_default();
                rows.push((index, gid, kind));
            }
        }
        rows.sort();
        Ok(rows)
    }

    /// State of the device's port as sysfs says it, for instance `4: ACTIVE`.
    ///
    /// # Errors
    /// If the device is not there.
    pub fn port_state(self) -> Result<String> {
        read(&format!(
            "/sys/class/infiniband/{}/ports/1/state",
            self.device()
        ))
    }

    /// A counter of the device: `rcvd_pkts`, `completer_retry_err` and others of `rdma statistic`.
    ///
    /// # Errors
    /// If the device does not count that.
    pub fn counter(self, name: &str) -> Result<u64> {
        let file = format!(
            "/sys/class/infiniband/{}/ports/1/hw_counters/{name}",
            self.device()
        );
        read(&file)?.parse().context(file)
    }

    fn table(self) -> u32 {
        100 + u32::from(self.host)
    }

    fn restore_route(self) -> Result<()> {
        ip(&format!(
            "route replace 192.168.77.0/24 dev {} table {}",
            self.name,
            self.table()
        ))
    }

    /// Whether the port is active and has exactly the GID of its address among the IPv4 ones.
    fn is_in_order(self) -> Result<bool> {
        let rows = self.gid_table()?;
        let mut ipv4 = rows
            .iter()
            .filter(|(_, gid, _)| gid.contains(":ffff:c0a8:"));
        let only_own = ipv4.next().is_some_and(|(_, gid, _)| *gid == self.gid());
        Ok(only_own && ipv4.next().is_none() && self.port_state()?.contains("ACTIVE"))
    }
}

/// Loses everything that goes to a TCP port on loopback: control traffic of one process.
///
/// # Errors
/// As [`run`].
pub fn block_port(port: u16) -> Result<()> {
    run("tc", "qdisc replace dev lo root handle 1: prio")?;
    run(
        "tc",
        "qdisc add dev lo parent 1:3 handle 30: netem loss 100%",
    )?;
    run(
        "tc",
        &format!(
            "filter add dev lo parent 1: protocol ip u32 match ip dport {port} 0xffff flowid 1:3"
        ),
    )
    .map(drop)
}

/// Undoes [`block_port`].
///
/// # Errors
/// As [`run`].
pub fn unblock_ports() -> Result<()> {
    run("tc", "qdisc del dev lo root").map(drop)
}

/// Puts the rig back in order after a scenario: links, addresses, routes, rules, queues, devices.
///
/// # Errors
/// If it does not get into order; scenarios after that would mean nothing.
pub fn restore() -> Result<()> {
    // Fails if there is nothing to undo, which is as it should be.
    let _ = unblock_ports();
    for nic in NICS {
        let name = nic.name;
        for end in [name.to_owned(), format!("p{name}")] {
            // Fails if there is none, which is as it should be.
            let _ = run("tc", &format!("qdisc del dev {end} root"));
            ip(&format!("link set {end} mtu {MTU} up"))?;
        }
        if addresses(name)? != [nic.address()] {
            ip(&format!("-4 addr flush dev {name}"))?;
            ip(&format!(
                "addr add {}/24 dev {name} noprefixroute",
                nic.address()
            ))?;
        }
        ip(&format!("-6 addr flush dev {name} scope global"))?;
        nic.restore_route()?;
        if nic.port_state().is_err() {
            run(
                "rdma",
                &format!("link add {} type rxe netdev {name}", nic.device()),
            )?;
        }
    }
    while ip("rule del pref 20").is_ok() {}
    for nic in NICS {
        let (address, table) = (nic.address(), nic.table());
        ip(&format!(
            "rule add pref 20 from {address} to 192.168.77.0/24 lookup {table}"
        ))?;
    }
    let deadline = Instant::now() + USABLE_WITHIN;
    for nic in NICS {
        while !nic.is_in_order()? {
            if Instant::now() >= deadline {
                bail!(
                    "{} is not in order: {}, {:?}",
                    nic.device(),
                    nic.port_state()?,
                    nic.gid_table()?
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}

/// Waits until `holds`; the kernel follows a change of addresses a little later.
///
/// # Errors
/// With `what`, if it does not hold within 20 s.
pub fn eventually(what: &str, holds: impl Fn() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + USABLE_WITHIN;
    while !holds()? {
        if Instant::now() >= deadline {
            bail!("not within {} s: {what}", USABLE_WITHIN.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// IPv4 addresses of a netdev.
fn addresses(netdev: &str) -> Result<Vec<String>> {
    let json = run("ip", &format!("-json -4 addr show dev {netdev}"))?;
    let json: Value = serde_json::from_str(&json).context("ip -json")?;
    let infos = json[0]["addr_info"].as_array().cloned().unwrap_or_default();
    Ok(infos
        .iter()
        .filter_map(|info| info["local"].as_str().map(str::to_owned))
        .collect())
}

/// `ip ARGUMENTS`, separated by blanks.
///
/// # Errors
/// As [`run`].
pub fn ip(arguments: &str) -> Result<()> {
    run("ip", arguments).map(drop)
}

/// Several `ip` commands at once, one a line: a few milliseconds apart instead of tens.
///
/// # Errors
/// As [`run`].
pub fn ip_batch(commands: &str) -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), commands)?;
    run("ip", &format!("-batch {}", file.path().display())).map(drop)
}

/// `tool ARGUMENTS`, separated by blanks; its stdout.
///
/// # Errors
/// With the tool's stderr, if it fails.
pub fn run(tool: &str, arguments: &str) -> Result<String> {
    let mut command = Command::new(tool);
    command.args(arguments.split_whitespace());
    stdout_within(command, TOOL_WITHIN)
}

/// Whether `tool ARGUMENTS` succeeds, and what it printed on both streams.
///
/// # Errors
/// If it cannot be started or hangs.
pub fn try_run(tool: &str, arguments: &str) -> Result<(bool, String)> {
    let mut command = Command::new(tool);
    command.args(arguments.split_whitespace());
    let output = output_within(command, TOOL_WITHIN)?;
    let text = [output.stdout, output.stderr].concat();
    Ok((
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    ))
}

fn read(path: &str) -> Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| path.to_owned())?;
    Ok(text.trim_end().to_owned())
}
