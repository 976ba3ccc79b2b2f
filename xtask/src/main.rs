//! The task runner: `cargo xtask COMMAND`.
//!
//! Everything that a developer or a CI machine does with this workspace beyond plain cargo goes
//! through here, so that both do the same thing. `cargo xtask --help` lists the commands. What is
//! deliberately not here: anything the library crates or the program need at run time.

mod artifacts;
mod bench;
mod ci;
mod consumers;
mod cpp_engine;
mod criterion;
mod demo;
mod guest;
mod interop;
mod mutants;
mod process;
mod setup;
mod sim;
mod stores;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of the Rerail workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what building and testing needs (Debian: apt, as root or with sudo).
    Setup,
    /// Run a command in the soft-RoCE guest: four RDMA devices on two emulated hosts.
    Vm(guest::VmArgs),
    /// Move and verify data between processes on this machine. Needs Rust and a C linker.
    Demo(demo::DemoArgs),
    /// Run the scenarios that need real verbs devices, in one boot of the guest.
    Guest(guest::ScenarioArgs),
    /// Run everything that must pass before a change lands.
    Ci {
        /// Also what takes longer than half an hour.
        #[arg(long)]
        full: bool,
    },
    /// Move data between the program and the C++ engine, each in each role.
    Interop,
    /// Test each metadata store alone, and move data with a program that has only that one.
    Stores(stores::StoresArgs),
    /// Measure something.
    Bench {
        /// What is measured.
        what: bench::What,
    },
    /// Use each library crate as its users do: outside this workspace, by its README.
    Consumers,
    /// Storms over whole nodes in a simulated fabric: faults, then everything must heal.
    Sim(sim::SimArgs),
    /// Make deliberate faults, one by one: each must turn a test red.
    Mutants(mutants::MutantsArgs),
    /// Check the house rules that a program can check.
    Tidy,
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Setup => setup::run().map(|()| ExitCode::SUCCESS),
        Task::Vm(args) => guest::vm(&args),
        Task::Demo(args) => demo::run(&args),
        Task::Guest(args) => guest::scenarios(&args).map(|()| ExitCode::SUCCESS),
        Task::Ci { full } => ci::run(full).map(|()| ExitCode::SUCCESS),
        Task::Interop => interop::run().map(|()| ExitCode::SUCCESS),
        Task::Stores(args) => stores::run(&args).map(|()| ExitCode::SUCCESS),
        Task::Bench { what } => bench::run(what).map(|()| ExitCode::SUCCESS),
        Task::Consumers => consumers::run(true).map(|()| ExitCode::SUCCESS),
        Task::Sim(args) => sim::run(&args).map(|()| ExitCode::SUCCESS),
        Task::Mutants(args) => mutants::run(&args).map(|()| ExitCode::SUCCESS),
        Task::Tidy => tidy::run().map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}
