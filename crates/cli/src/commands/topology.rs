//! `rerail topology`: NICs, ports and GPUs, what is near what, and what is left out and why.
//!
//! Deliberately not here: how it is found and ranked ([`rerail_topology`]).

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use rerail_topology::gid::{GidPolicy, rank};
use rerail_topology::scan::{Gpu, GpuVendor, Nic, NicPort};
use rerail_topology::{
    CustomMatrix, DeviceFilter, Distance, Matrix, Scan, Topology, TopologyOptions,
};
use rerail_verbs::Gid;
use serde::Serialize;

use crate::failure::ResultExt as _;

/// Shows NICs, ports and GPUs, and which NICs are near which memory.
///
/// The priority matrix is what an engine on this machine publishes. Without options, devices are
/// chosen by RERAIL_DEVICES (MC_TE_FILTERS), and a matrix of one's own comes from
/// RERAIL_CUSTOM_TOPOLOGY (MC_CUSTOM_TOPO_JSON), a file or the text itself.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    rerail topology                            this machine, for people\n  \
    rerail topology --json                     for programs\n  \
    rerail topology --devices mlx5_0,mlx5_1:2  only these devices and ports\n  \
    rerail topology --custom matrix.json       check a matrix of one's own\n  \
    rerail topology --root /tmp/copy           a copy of another machine's sys, dev and proc\n\n\
    A matrix of one's own: {\"cpu:0\": [[\"mlx5_0\"], [\"mlx5_1\"]], …}, for each location the\n\
    preferred NICs and the others.\n\n\
    JSON: priority_matrix as on the wire; nics with name, pci, numa_node, uverbs, usable, reason,\n\
    physical_function and ports (port, rail, state, phys_state, link_layer, rate_mbps, lid,\n\
    mtu_bytes, gid_table_len, gids_in_use, gid); gpus with location, pci, vendor, numa_node,\n\
    model, uuid and distances (NIC → PIX, PXB, PHB, NODE or SYS); warnings as texts.")]
pub(crate) struct Args {
    /// A directory that stands for /, with sys, dev and proc below it.
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// A priority matrix as JSON instead of the discovered one: a file, or the text itself.
    #[arg(long, value_name = "FILE")]
    custom: Option<String>,
    /// Devices to use, joined by commas; NAME:PORT chooses one port.
    #[arg(long, value_name = "LIST")]
    devices: Option<String>,
    /// One JSON object on one line.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let topology = discover(args).or_fail(
        "cannot show the topology",
        "correct the option, file or variable that is named",
    )?;
    let policy = GidPolicy::from_env(|name| std::env::var(name).ok()).or_fail(
        "the environment's choice of GIDs is unusable",
        "correct or unset the variable",
    )?;
    let mut out = io::stdout().lock();
    let view = View::new(&topology, &policy, args);
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&view)?)?;
    } else {
        view.write_tables(&mut out)?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn discover(args: &Args) -> Result<Topology> {
    let mut options = TopologyOptions::from_env(|name| std::env::var(name).ok())?;
    if let Some(list) = &args.devices {
        options.devices = DeviceFilter::parse("--devices", list)?;
    }
    if let Some(text) = &args.custom {
        options.custom = Some(CustomMatrix::parse(text));
    }
    if args.root != Path::new("/") {
        // It is about the processes of this machine.
        options.cuda_visible = None;
    }
    Ok(Topology::read(&args.root, &options)?)
}

#[derive(Serialize)]
struct View<'t> {
    priority_matrix: &'t Matrix,
    nics: Vec<NicView<'t>>,
    gpus: Vec<GpuView<'t>>,
    warnings: &'t [String],
}

#[derive(Serialize)]
struct NicView<'t> {
    name: &'t str,
    pci: Option<&'t str>,
    numa_node: Option<u32>,
    uverbs: Option<&'t str>,
    usable: bool,
    reason: Option<&'t str>,
    physical_function: Option<&'t str>,
    ports: Vec<PortView<'t>>,
}

#[derive(Serialize)]
struct PortView<'t> {
    port: u32,
    /// The name under which it is used; null if it is not.
    rail: Option<&'t str>,
    state: String,
    phys_state: String,
    link_layer: String,
    rate_mbps: u32,
    lid: u16,
    mtu_bytes: Option<u32>,
    gid_table_len: u32,
    gids_in_use: usize,
    /// The row that the ranking takes.
    gid: Option<GidView<'t>>,
}

#[derive(Serialize)]
struct GidView<'t> {
    index: u32,
    gid: Gid,
    ndev: Option<&'t str>,
}

#[derive(Serialize)]
struct GpuView<'t> {
    /// Null for a GPU that CUDA_VISIBLE_DEVICES hides.
    location: Option<String>,
    pci: &'t str,
    vendor: GpuVendor,
    numa_node: Option<u32>,
    model: Option<&'t str>,
    uuid: Option<&'t str>,
    distances: BTreeMap<&'t str, &'static str>,
}

impl<'t> View<'t> {
    fn new(topology: &'t Topology, policy: &GidPolicy, args: &Args) -> Self {
        let cuda_visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let cuda_visible = cuda_visible.filter(|_| args.root == Path::new("/"));
        let locations: BTreeMap<_, _> = topology
            .scan
            .gpu_locations(cuda_visible.as_deref())
            .into_iter()
            .map(|(location, gpu)| (gpu.pci.bdf(), location))
            .collect();
        let scan = &topology.scan;
        Self {
            priority_matrix: &topology.matrix,
            nics: scan
                .nics
                .iter()
                .map(|nic| nic_view(topology, nic, policy))
                .collect(),
            gpus: scan
                .gpus
                .iter()
                .map(|gpu| gpu_view(scan, gpu, locations.get(gpu.pci.bdf()).cloned()))
                .collect(),
            warnings: &topology.warnings,
        }
    }
}

fn nic_view<'t>(topology: &'t Topology, nic: &'t Nic, policy: &GidPolicy) -> NicView<'t> {
    let ports = nic.ports.iter();
    NicView {
        name: &nic.name,
        pci: nic.pci.as_ref().map(|pci| pci.bdf()),
        numa_node: nic.numa_node,
        uverbs: nic.uverbs.as_deref(),
        usable: nic.is_usable(),
        reason: match &nic.closed_because {
            Some(reason) => Some(reason),
            None if nic.is_usable() => None,
            None => Some("no active port with a GID"),
        },
        physical_function: nic.physical_function.as_deref(),
        ports: ports
            .map(|port| port_view(topology, nic, port, policy))
            .collect(),
    }
}

fn port_view<'t>(
    topology: &'t Topology,
    nic: &'t Nic,
    port: &'t NicPort,
    policy: &GidPolicy,
) -> PortView<'t> {
    let mut rails = topology.rails.iter();
    let rail = rails.find(|rail| rail.device == nic.name && rail.port == port.number);
    let table = port.table(&nic.name, &topology.scan.netdevs);
    let ranking = rank(&table, policy);
    PortView {
        port: port.number,
        rail: rail.map(|rail| rail.name.as_str()),
        state: port.state.to_string(),
        phys_state: format!("{:?}", port.phys_state),
        link_layer: port.link_layer.to_string(),
        rate_mbps: port.rate_mbps,
        lid: port.lid,
        mtu_bytes: port.mtu_bytes,
        gid_table_len: port.gid_table_len,
        gids_in_use: port.gids.len(),
        gid: ranking.selected().ok().map(|row| {
            let entry = row.entry.and_then(|position| port.gids.get(position));
            let netdev = entry.and_then(|entry| entry.netdev.as_ref());
            GidView {
                index: row.index,
                gid: row.gid,
                ndev: netdev.map(|netdev| netdev.name.as_str()),
            }
        }),
    }
}

fn gpu_view<'t>(scan: &'t Scan, gpu: &'t Gpu, location: Option<String>) -> GpuView<'t> {
    let distances = scan.nics.iter().map(|nic| {
        let distance = Distance::between(gpu.place(), nic.place());
        (nic.name.as_str(), distance.word())
    });
    GpuView {
        location,
        pci: gpu.pci.bdf(),
        vendor: gpu.vendor,
        numa_node: gpu.numa_node,
        model: gpu.model.as_deref(),
        uuid: gpu.uuid.as_deref(),
        distances: distances.collect(),
    }
}

impl View<'_> {
    fn write_tables(&self, out: &mut impl Write) -> io::Result<()> {
        self.write_nics(out)?;
        if !self.gpus.is_empty() {
            self.write_distances(out)?;
        }
        writeln!(out, "\nNICs by location (nearest first | others):")?;
        for (location, entry) in self.priority_matrix.entries() {
            let preferred = entry.preferred.join(" ");
            let available = entry.available.join(" ");
            writeln!(out, "  {location:<8} {preferred} | {available}")?;
        }
        for warning in self.warnings {
            writeln!(out, "note: {warning}")?;
        }
        Ok(())
    }

    fn write_nics(&self, out: &mut impl Write) -> io::Result<()> {
        if self.nics.is_empty() {
            return writeln!(out, "this machine has no RDMA device");
        }
        writeln!(
            out,
            "  {:<14} {:>4} {:<12} {:<10} {:>7} {:>5} {:>6} {:>4} {:<13} {:<15} RAIL",
            "DEV", "PORT", "STATE", "LINK", "GBIT/S", "LID", "MTU", "NODE", "PCI", "NDEV"
        )?;
        for nic in &self.nics {
            for port in &nic.ports {
                let mtu = port
                    .mtu_bytes
                    .map_or_else(|| "-".to_owned(), |mtu| mtu.to_string());
                let gid = port.gid.as_ref();
                writeln!(
                    out,
                    "{} {:<14} {:>4} {:<12} {:<10} {:>7} {:>5} {:>6} {:>4} {:<13} {:<15} {}",
                    if port.rail.is_some() { '*' } else { ' ' },
                    nic.name,
                    port.port,
                    port.state,
                    port.link_layer,
                    f64::from(port.rate_mbps) / 1_000.0,
                    port.lid,
                    mtu,
                    node(nic.numa_node),
                    nic.pci.unwrap_or("-"),
                    gid.and_then(|gid| gid.ndev).unwrap_or("-"),
                    port.rail.or(nic.reason).unwrap_or("-"),
                )?;
            }
        }
        writeln!(out, "* used. NODE: NUMA node, ? if unknown.")
    }

    /// Rows and columns as `nvidia-smi topo -m` has them.
    fn write_distances(&self, out: &mut impl Write) -> io::Result<()> {
        write!(out, "\n  {:<9}", "")?;
        for nic in &self.nics {
            write!(out, " {:<11}", nic.name)?;
        }
        writeln!(out, " NODE PCI           MODEL")?;
        for gpu in &self.gpus {
            write!(
                out,
                "  {:<9}",
                gpu.location.as_deref().unwrap_or("(hidden)")
            )?;
            for nic in &self.nics {
                write!(
                    out,
                    " {:<11}",
                    gpu.distances.get(nic.name).copied().unwrap_or("-")
                )?;
            }
            let model = gpu.model.unwrap_or("-");
            writeln!(out, " {:<4} {:<13} {model}", node(gpu.numa_node), gpu.pci)?;
        }
        writeln!(
            out,
            "PIX below one switch, PXB below one root port, PHB below one host bridge,\n\
             NODE in one NUMA node, SYS across sockets or not known."
        )
    }
}

fn node(node: Option<u32>) -> String {
    node.map_or_else(|| "?".to_owned(), |node| node.to_string())
}
