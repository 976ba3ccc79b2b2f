//! `rerail gids`: the GID tables of this machine, or one from a file, ranked, with the reason for
//! every row.
//!
//! Deliberately not here: the ranking itself ([`rerail_topology::gid`]).

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use rerail_topology::gid::{
    GidPolicy, PortTable, RankedRow, Ranking, TableFile, order_for_peer, rank,
};
use rerail_topology::{DeviceFilter, NetdevFacts, Scan, Subnet};
use rerail_verbs::{Gid, GidEntry};
use serde::Serialize;

use crate::failure::{self, Failure, ResultExt as _};

/// Shows GID tables, which row is used, and why the others are not.
///
/// Without --table, every usable port of this machine (or of a copied tree, --root). The operator's
/// choices come from RERAIL_GID_INDEX (MC_GID_INDEX, NCCL_IB_GID_INDEX), RERAIL_GID_SUBNETS and
/// RERAIL_GID_NETDEVS; with --table, from the file alone.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    rerail gids                                  every port of this machine\n  \
    rerail gids --device mlx5_0 --port 1 --json  one port, for a program\n  \
    rerail gids --device mlx5_0 --peer 10.62.1.7 which row suits that peer\n  \
    rerail gids --table report.json              a table from somewhere else\n\n\
    The form of a table in a file (also in crates/cli/README.md), where netdevs, config, each type,\n\
    ndev, addrs and up may be left out:\n  \
    {\"device\": \"mlx5_0\", \"port\": 1, \"link_layer\": \"Ethernet\", \"gid_tbl_len\": 256,\n   \
    \"entries\": [{\"index\": 3, \"gid\": \"::ffff:10.20.2.72\", \"type\": \"RoCE v2\", \"ndev\": \"eth0\"}],\n   \
    \"netdevs\": [{\"name\": \"eth0\", \"addrs\": [\"10.20.2.72/26\"], \"up\": true}],\n   \
    \"config\": {\"gid_subnets\": [\"10.20.0.0/16\"]}}")]
pub(crate) struct Args {
    /// Only this device.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Only this port.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=255))]
    port: Option<u32>,
    /// A GID table as JSON instead of this machine's.
    #[arg(long, value_name = "FILE", conflicts_with = "root")]
    table: Option<PathBuf>,
    /// A directory that stands for /, with sys, dev and proc below it.
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Rank for a peer with this GID (either text form, or an IP address).
    #[arg(long, value_name = "GID")]
    peer: Option<Gid>,
    /// One JSON object for each port, on one line each.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    match show(args) {
        Ok(code) => Ok(code),
        // What has no table still has the object, for programs that read it.
        Err(error) if args.json && error.is::<Failure>() => {
            let object = Object {
                device: None,
                port: None,
                selected: None,
                error: Some(format!("{error:#}")),
                candidates: Vec::new(),
            };
            write_json(&mut io::stdout().lock(), &object)?;
            Err(error)
        }
        Err(error) => Err(error),
    }
}

fn show(args: &Args) -> Result<ExitCode> {
    if let Some(path) = &args.table {
        let file = TableFile::read(path).or_fail(
            format!("no GID table in {}", path.display()),
            "correct the file; its form is at the end of `rerail gids --help`",
        )?;
        let table = file.table();
        if args
            .device
            .as_ref()
            .is_some_and(|device| *device != file.device)
            || args.port.is_some_and(|port| port != file.port)
        {
            let has = format!("{} has {} port {}", path.display(), file.device, file.port);
            return Err(Failure::new(has, "leave out --device and --port, or match them").into());
        }
        return show_tables(args, &[table], &file.policy);
    }
    let policy = GidPolicy::from_env(|name| std::env::var(name).ok()).or_fail(
        "the environment's choice of GIDs is unusable",
        "correct or unset the variable",
    )?;
    // Tables are read in sysfs: only the device that is asked for may be opened.
    let filter = match &args.device {
        Some(device) => DeviceFilter::parse("--device", device)
            .or_fail("no such device", "name one, as `rerail topology` shows it")?,
        None => DeviceFilter::default(),
    };
    let scan = Scan::read_for(&args.root, &filter)
        .or_fail("cannot look at the machine", "check --root")?;
    let mut ports = Vec::new();
    for nic in &scan.nics {
        if args
            .device
            .as_ref()
            .is_some_and(|device| *device != nic.name)
        {
            continue;
        }
        for port in &nic.ports {
            // Ports that are down are shown only when they are asked for.
            let asked = args.device.is_some() && (args.port.is_some() || nic.ports.len() == 1);
            if args
                .port
                .map_or(asked || port.is_usable(), |number| number == port.number)
            {
                ports.push(port.table(&nic.name, &scan.netdevs));
            }
        }
    }
    if ports.is_empty() {
        return Err(no_port(args, &scan).into());
    }
    let asked_kernel = args.root == Path::new("/");
    let fresh: Vec<_> = ports
        .iter()
        .map(|port| {
            if asked_kernel {
                kernel_entries(port)
            } else {
                None
            }
        })
        .collect();
    for (port, entries) in ports.iter_mut().zip(&fresh) {
        if let Some(entries) = entries {
            port.entries = entries;
            port.unreadable = &[];
        }
    }
    show_tables(args, &ports, &policy)
}

fn no_port(args: &Args, scan: &Scan) -> Failure {
    let names: Vec<_> = scan.nics.iter().map(|nic| nic.name.as_str()).collect();
    if names.is_empty() {
        return Failure::new(
            "this machine has no RDMA device",
            "load the driver of its card, or use --table or --root to look at another machine's",
        );
    }
    let wanted = args.device.as_deref().unwrap_or("any device");
    let port = args
        .port
        .map_or_else(String::new, |port| format!(" port {port}"));
    Failure::new(
        format!("{wanted}{port}: no such port, or none is active"),
        format!(
            "choose among {}; `rerail topology` shows their ports",
            names.join(", ")
        ),
    )
}

/// The table as the kernel's own query gives it: it knows types where sysfs hides them, as it does
/// inside containers. `None` where the device cannot be asked; sysfs has to do then.
#[cfg(feature = "ibv")]
fn kernel_entries(port: &PortTable<'_>) -> Option<Vec<GidEntry>> {
    // Only rows without a type need the device, which is opened for it.
    let unknown = |entry: &GidEntry| matches!(entry.gid_type, rerail_verbs::GidType::Other(_));
    if !port.entries.iter().any(unknown) {
        return None;
    }
    let answer = rerail_verbs::ibv::devices().and_then(|devices| {
        let device = devices.find(port.device);
        device
            .map(|device| device.open()?.gid_table(port.port))
            .transpose()
    });
    match answer {
        Ok(entries) => entries,
        Err(error) => {
            tracing::warn!(device = port.device, %error, "types are not known: cannot ask the device");
            None
        }
    }
}

#[cfg(not(feature = "ibv"))]
fn kernel_entries(_port: &PortTable<'_>) -> Option<Vec<GidEntry>> {
    None
}

fn show_tables(args: &Args, tables: &[PortTable<'_>], policy: &GidPolicy) -> Result<ExitCode> {
    let mut out = io::stdout().lock();
    let mut code = ExitCode::SUCCESS;
    for table in tables {
        let ranking = rank(table, policy);
        let view = View::new(table, &ranking, args.peer.as_ref());
        if let Some(warning) = ranking.warning() {
            tracing::warn!(device = table.device, port = table.port, "{warning}");
        }
        if args.json {
            write_json(&mut out, &view.object(tables.len() > 1))?;
        } else {
            view.write_table(&mut out)?;
        }
        if let Err(error) = ranking.selected() {
            out.flush()?;
            let remedy = "see the reason of each row, or leave out what excludes it";
            code = failure::report(&Failure::new(error.to_string(), remedy).into());
        }
    }
    if !args.json {
        write_legend(&mut out)?;
    }
    out.flush()?;
    Ok(code)
}

fn write_json(out: &mut impl Write, object: &Object<'_>) -> Result<()> {
    let text = serde_json::to_string(object)?;
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// One port as JSON. `device` and `port` are there only where several ports are shown.
#[derive(Serialize)]
struct Object<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u32>,
    selected: Option<Selected>,
    error: Option<String>,
    candidates: Vec<Candidate>,
}

#[derive(Serialize)]
struct Selected {
    index: u32,
    gid: Gid,
    class: ClassNumber,
}

#[derive(Serialize)]
struct Candidate {
    index: u32,
    gid: Gid,
    #[serde(rename = "type")]
    gid_type: String,
    ndev: Option<String>,
    class: Option<ClassNumber>,
    rank: Option<usize>,
    accepted: bool,
    reason: String,
}

/// Whole numbers without a fraction; 5.5 is the class of unknown types.
#[derive(Clone, Copy)]
struct ClassNumber(f64);

impl Serialize for ClassNumber {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.fract() == 0.0 {
            serializer.serialize_u8(self.0 as u8)
        } else {
            serializer.serialize_f64(self.0)
        }
    }
}

/// A ranked table in the order in which it is shown.
struct View<'v> {
    table: &'v PortTable<'v>,
    ranking: &'v Ranking,
    /// With words about the peer, if there is one.
    rows: Vec<(&'v RankedRow, Option<String>)>,
}

impl<'v> View<'v> {
    fn new(table: &'v PortTable<'v>, ranking: &'v Ranking, peer: Option<&Gid>) -> Self {
        let mut rows: Vec<_> = match peer {
            None => ranking.accepted().iter().map(|row| (row, None)).collect(),
            Some(peer) => order_for_peer(table, ranking, peer)
                .into_iter()
                .map(|(affinity, row)| (row, Some(affinity.to_string())))
                .collect(),
        };
        let rejected = &ranking.rows()[ranking.accepted().len()..];
        rows.extend(rejected.iter().map(|row| (row, None)));
        Self {
            table,
            ranking,
            rows,
        }
    }

    fn candidates(&self) -> impl Iterator<Item = (&'v RankedRow, Candidate)> {
        self.rows.iter().enumerate().map(|(rank, (row, peer))| {
            let entry = row
                .entry
                .and_then(|position| self.table.entries.get(position));
            let netdev = entry.and_then(|entry| entry.netdev.as_ref());
            let candidate = Candidate {
                index: row.index,
                gid: row.gid,
                gid_type: entry
                    .map_or_else(|| "unknown".to_owned(), |row| row.gid_type.to_string()),
                ndev: netdev.map(|netdev| self.table.name_of(netdev).to_owned()),
                class: row.class.map(|class| ClassNumber(class.number())),
                rank: row.is_accepted().then_some(rank),
                accepted: row.is_accepted(),
                reason: match peer {
                    Some(peer) => format!("{peer}; {}", row.reason),
                    None => row.reason.to_string(),
                },
            };
            (*row, candidate)
        })
    }

    fn object(&self, named: bool) -> Object<'v> {
        let error = self.ranking.selected().err().map(ToString::to_string);
        let first = self.rows.first().filter(|_| error.is_none());
        Object {
            device: named.then_some(self.table.device),
            port: named.then_some(self.table.port),
            selected: first.and_then(|(row, _)| {
                Some(Selected {
                    index: row.index,
                    gid: row.gid,
                    class: ClassNumber(row.class?.number()),
                })
            }),
            error,
            candidates: self.candidates().map(|(_, candidate)| candidate).collect(),
        }
    }

    /// Columns as `show_gids` has them, then what this ranking adds.
    fn write_table(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(
            out,
            "  {:<12} {:>4} {:>5}  {:<39} {:<15} {:<8} {:<12} {:>5}  REASON",
            "DEV", "PORT", "INDEX", "GID", "IPv4", "VER", "NDEV", "CLASS"
        )?;
        let selected = self.ranking.selected().is_ok();
        for (at, (row, candidate)) in self.candidates().enumerate() {
            let ipv4 = row.gid.to_ipv4().map(|address| address.to_string());
            let class = row
                .class
                .map_or_else(|| "-".to_owned(), |class| class.to_string());
            writeln!(
                out,
                "{} {:<12} {:>4} {:>5}  {:<39} {:<15} {:<8} {:<12} {:>5}  {}",
                if at == 0 && selected { '*' } else { ' ' },
                self.table.device,
                self.table.port,
                row.index,
                row.gid,
                ipv4.unwrap_or_default(),
                candidate.gid_type,
                candidate.ndev.unwrap_or_default(),
                class,
                candidate.reason,
            )?;
        }
        if self.rows.is_empty() {
            writeln!(
                out,
                "  {} port {}: no GID row is in use",
                self.table.device, self.table.port
            )?;
        }
        self.write_addresses(out)
    }

    /// Prefixes, which decide for a peer, where they are known.
    fn write_addresses(&self, out: &mut impl Write) -> io::Result<()> {
        let used = |facts: &&NetdevFacts| {
            let mut netdevs = self
                .table
                .entries
                .iter()
                .filter_map(|entry| entry.netdev.as_ref());
            netdevs.any(|netdev| facts.is_of(netdev))
        };
        for facts in self.table.netdevs.iter().filter(used) {
            let Some(addresses) = &facts.addresses else {
                continue;
            };
            let addresses: Vec<_> = addresses.iter().map(Subnet::to_string).collect();
            let up = match facts.up {
                Some(true) => ", up",
                Some(false) => ", down",
                None => "",
            };
            writeln!(
                out,
                "  {} ({}{up}): {}",
                facts.name,
                facts.kind,
                addresses.join(" ")
            )?;
        }
        Ok(())
    }
}

fn write_legend(out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "\n* in use. Classes, best first: 0 interface and global address, 1 no interface in sight,\n  \
         2 link-local, 3 link-local without interface, 4 overlay or bridge, 5 the same link-local,\n  \
         5.5 type unknown, 6 RoCE v1 (only without v2). Within a class: live before dead, IPv4\n  \
         before IPv6, lowest index. InfiniBand: the first row in use."
    )
}
