//! The stages, in the order in which they run.

use std::fs;
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};

use super::{Context, Stage};
use crate::guest::{self, ScenarioArgs};
use crate::{
    consumers, cpp_engine, demo, interop, mutants, process, setup, sim, stores, tidy, workspace,
};

pub(super) const STAGES: &[Stage] = &[
    Stage {
        name: "setup",
        budget_s: 110,
        full_only: false,
        run: |_| setup::run(),
    },
    Stage {
        name: "fmt",
        budget_s: 5,
        full_only: false,
        run: fmt,
    },
    Stage {
        name: "tidy",
        budget_s: 5,
        full_only: false,
        run: |_| tidy::run(),
    },
    Stage {
        name: "clippy",
        budget_s: 130,
        full_only: false,
        run: clippy,
    },
    Stage {
        name: "features",
        budget_s: 90,
        full_only: false,
        run: features,
    },
    Stage {
        name: "layering",
        budget_s: 60,
        full_only: false,
        run: layering,
    },
    Stage {
        name: "doc",
        budget_s: 45,
        full_only: false,
        run: doc,
    },
    Stage {
        name: "tests",
        budget_s: 450,
        full_only: false,
        run: tests,
    },
    Stage {
        name: "sim",
        budget_s: 70,
        full_only: false,
        run: storms,
    },
    Stage {
        name: "consumers",
        budget_s: 75,
        full_only: false,
        run: consume,
    },
    Stage {
        name: "stores",
        budget_s: 900,
        full_only: true,
        run: |_| stores::run(&stores::StoresArgs::default()),
    },
    Stage {
        name: "mutants",
        budget_s: 1_800,
        full_only: true,
        run: |_| mutants::run(&mutants::MutantsArgs::default()),
    },
    Stage {
        name: "demo",
        budget_s: 120,
        full_only: false,
        run: show,
    },
    Stage {
        name: "interop",
        budget_s: 60,
        full_only: false,
        run: |_| interop::over_tcp(),
    },
    Stage {
        name: "guest",
        budget_s: 580,
        full_only: false,
        run: scenarios,
    },
];

/// Feature sets beyond "everything", which is what the whole workspace builds. Cargo builds what
/// depends on features anew for each set, so this is a check without code generation, and each set
/// is here for a reason of its own.
const FEATURE_SETS: &[(&str, &[&str])] = &[
    (
        "what the demo builds on a machine with nothing but Rust",
        &[
            "-p",
            "rerail",
            "--no-default-features",
            "--features",
            "sim,server",
        ],
    ),
    (
        "the verbs' two backends, alone",
        &["-p", "rerail-verbs", "--features", "ibv"],
    ),
    ("", &["-p", "rerail-verbs", "--features", "sim"]),
    (
        "NVIDIA's library, alone",
        &["-p", "rerail-topology", "--features", "nvml"],
    ),
    (
        "each store, alone",
        &["-p", "rerail-metadata", "--features", "etcd"],
    ),
    ("", &["-p", "rerail-metadata", "--features", "redis"]),
    ("", &["-p", "rerail-metadata", "--features", "http"]),
    ("", &["-p", "rerail-metadata", "--features", "server"]),
    (
        "the compact form of descriptors, alone",
        &["-p", "rerail-metadata", "--features", "bincode"],
    ),
];
/// Crates that must build where neither libibverbs nor libclang can be found.
const PORTABLE: &[&str] = &[
    "rerail-topology",
    "rerail-metadata",
    "rerail-transport",
    "rerail-engine",
];

fn fmt(ci: &Context) -> Result<()> {
    ci.cargo(&["fmt", "--all", "--check"])
}

/// Everything with every feature: the program's default features are all there are.
fn clippy(ci: &Context) -> Result<()> {
    ci.cargo(&[
        "clippy",
        "--locked",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ])
}

fn features(ci: &Context) -> Result<()> {
    for (why, set) in FEATURE_SETS {
        if !why.is_empty() {
            println!("# {why}");
        }
        let tail = ["--", "-D", "warnings"];
        ci.cargo(&[&["clippy", "--locked", "--all-targets"], *set, &tail].concat())?;
    }
    Ok(())
}

/// The crates above the verbs do not need the verbs' libraries: they are in none of their graphs of
/// packages, and they build with the libraries hidden.
fn layering(ci: &Context) -> Result<()> {
    for package in PORTABLE {
        let tree = process::cargo()
            .args(["tree", "--locked", "-p", package, "-i", "rdma-sys"])
            .stdin(Stdio::null())
            .output()?;
        let stdout = String::from_utf8_lossy(&tree.stdout);
        let stderr = String::from_utf8_lossy(&tree.stderr);
        ensure!(
            stdout.trim().is_empty(),
            "{package} depends on rdma-sys:\n{stdout}"
        );
        // Cargo's way of saying that the package is not in the graph.
        ensure!(
            stderr.contains("did not match any packages") || stderr.contains("nothing to print"),
            "cargo tree for {package} says something unexpected: {stderr}"
        );
    }
    let nowhere = workspace::target().join("hidden-libraries");
    fs::create_dir_all(&nowhere)?;
    let nowhere = nowhere.to_string_lossy();
    let hidden = [
        ("LIBCLANG_PATH", &*nowhere),
        ("PKG_CONFIG_LIBDIR", &*nowhere),
        ("PKG_CONFIG_PATH", &*nowhere),
    ];
    let mut build = vec!["build", "--locked"];
    for package in PORTABLE {
        build.extend(["-p", package]);
    }
    ci.cargo_with(&build, &hidden)
}

fn doc(ci: &Context) -> Result<()> {
    ci.cargo_with(
        &["doc", "--locked", "--workspace", "--no-deps"],
        &[("RUSTDOCFLAGS", "-D warnings")],
    )
}

/// All tests of the workspace that need no device. nextest is used where it is installed, as it
/// ends and names a test that hangs; plain cargo runs the same ones, and a test that hangs ends
/// with the stage. Nobody is made to install it: that takes longer than the tests.
fn tests(ci: &Context) -> Result<()> {
    let python = cpp_engine::python()?;
    let python = python.to_string_lossy();
    let cores = std::thread::available_parallelism()?;
    let threads = (2 * cores.get()).to_string();
    // A store that is not there is an error here: `setup` has installed it.
    let env = [
        ("RERAIL_REQUIRE_STORES", "1"),
        ("RERAIL_CPP_PYTHON", &*python),
        ("RERAIL_FULL", if ci.full { "1" } else { "0" }),
        // Most tests wait most of the time.
        ("RUST_TEST_THREADS", &*threads),
        ("NEXTEST_TEST_THREADS", &*threads),
    ];
    if has_nextest() {
        let nextest = [
            "nextest",
            "run",
            "--locked",
            "--workspace",
            "--no-fail-fast",
        ];
        ci.cargo_with(&nextest, &env)?;
        ci.cargo_with(&["test", "--locked", "--workspace", "--doc"], &env)
    } else {
        println!(
            "# without cargo-nextest a test that hangs is not named, and ends after {} s with all others",
            ci.limit.as_secs()
        );
        ci.cargo_with(&["test", "--locked", "--workspace", "--no-fail-fast"], &env)
    }
}

fn has_nextest() -> bool {
    let asked = process::cargo()
        .args(["nextest", "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    asked.is_ok_and(|status| status.success())
}

/// Packages are built from what would be published only with `--full`: it takes as long as all of
/// the workspace. Without, they are only made, which finds what is missing in a manifest.
fn consume(ci: &Context) -> Result<()> {
    consumers::run(ci.full)
}

/// Seeds that each change is tried with; one more comes from the clock, so that every run of `ci`
/// looks somewhere new. `--full` takes ten times as many.
const SEEDS: u64 = 300;

fn storms(ci: &Context) -> Result<()> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH);
    // Above the fixed ones, and short enough to be typed.
    let fresh = 1_000_000 + clock.map_or(0, |since| since.as_secs() % 1_000_000_000);
    println!("# one seed from the clock: {fresh}");
    // As the tests were built just before.
    sim::storm(fresh, 1, &["--workspace"])?;
    sim::storm(
        1,
        if ci.full { 10 * SEEDS } else { SEEDS },
        &["--workspace"],
    )
}

/// What the README promises first.
fn show(_: &Context) -> Result<()> {
    demo::run(&demo::DemoArgs::default()).map(drop)
}

fn scenarios(ci: &Context) -> Result<()> {
    guest::self_check()?;
    guest::scenarios(&ScenarioArgs {
        full: ci.full,
        ..ScenarioArgs::default()
    })
}
