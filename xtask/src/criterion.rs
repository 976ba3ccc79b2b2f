//! Benchmarks that have a target: run several times, and compared with it.
//!
//! A benchmark is no test: a busy machine makes it slow. So each is run several times, the median
//! of each run and the fastest sample of all are printed together with the machine's load, and the
//! exit status says nothing of speed.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::{process, workspace};

/// How often each is run.
const RUNS: u32 = 3;

/// A benchmark with a target.
pub(crate) struct Benchmark {
    bench: &'static str,
    package: &'static str,
    /// The name that criterion knows it by.
    name: &'static str,
    target_us: f64,
}

/// Ranking one port's table.
pub(crate) const RANK: Benchmark = Benchmark {
    bench: "rank",
    package: "rerail-topology",
    name: "rank 256 rows",
    target_us: 10.0,
};
/// Scanning a large server.
pub(crate) const SCAN: Benchmark = Benchmark {
    bench: "scan",
    package: "rerail-topology",
    name: "scan 16 NICs, 8 GPUs",
    target_us: 40_000.0,
};

/// Runs it and prints how it stands.
pub(crate) fn run(benchmark: &Benchmark) -> Result<()> {
    let mut medians = Vec::new();
    let mut fastest = f64::INFINITY;
    for _ in 0..RUNS {
        let mut command = process::cargo();
        command.args(["bench", "--locked", "--quiet", "-p", benchmark.package]);
        command.args(["--bench", benchmark.bench, "--", "--noplot"]);
        process::output(&mut command)?;
        let results = workspace::target()
            .join("criterion")
            .join(benchmark.name)
            .join("new");
        medians.push(median_us(&results)?);
        fastest = fastest.min(fastest_us(&results)?);
    }
    let shown: Vec<_> = medians.iter().map(|us| format!("{us:.1}")).collect();
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!(
        "{}: target {} µs; medians {} µs, fastest {fastest:.1} µs, load {}",
        benchmark.name,
        benchmark.target_us,
        shown.join(" "),
        load.split_whitespace().next().unwrap_or("?"),
    );
    Ok(())
}

fn read(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

fn median_us(results: &Path) -> Result<f64> {
    let estimates = read(&results.join("estimates.json"))?;
    let ns = estimates["median"]["point_estimate"].as_f64();
    Ok(ns.context("criterion wrote no median")? / 1_000.0)
}

/// The fastest sample: what the work itself costs, with the least of other people's.
fn fastest_us(results: &Path) -> Result<f64> {
    let sample = read(&results.join("sample.json"))?;
    let numbers = |name: &str| -> Vec<f64> {
        let list = sample[name].as_array().map_or(&[][..], Vec::as_slice);
        list.iter().filter_map(Value::as_f64).collect()
    };
    let times = numbers("times");
    let each = times
        .iter()
        .zip(numbers("iters"))
        .map(|(ns, iters)| ns / iters);
    each.min_by(f64::total_cmp)
        .map(|ns| ns / 1_000.0)
        .context("criterion wrote no samples")
}
