//! `cargo xtask bench WHAT`: measurements that are no tests, since only ratios of them mean
//! anything on another machine.

use anyhow::Result;

use crate::criterion::{self, RANK, SCAN};
use crate::{process, setup};

/// What can be measured.
#[derive(clap::ValueEnum, Clone, Copy)]
pub(crate) enum What {
    /// Every metadata store: the way of a change to 100 watchers of 1 000 segments.
    Stores,
    /// Encoding and decoding descriptors, JSON and bincode.
    Codec,
    /// Ranking a GID table of 256 rows; the target is 10 µs.
    Rank,
    /// News of an own port: from the event to the gate, the endpoints, the store and a peer.
    Events,
    /// Scanning a server of 16 NICs and 8 GPUs; the target is 40 ms.
    Scan,
}

/// Measures it in the release profile.
pub(crate) fn run(what: What) -> Result<()> {
    let mut command = process::cargo();
    let package = match what {
        What::Events => "rerail-engine",
        _ => "rerail-metadata",
    };
    command.args(["bench", "--locked", "-p", package, "--bench"]);
    match what {
        What::Events => {
            command.args(["events", "--features", "sim"]);
        }
        What::Stores => {
            setup::install_missing()?;
            command.args(["stores", "--features", "etcd,redis,http,server"]);
        }
        What::Codec => {
            command.args(["codec", "--features", "bincode"]);
        }
        What::Rank => return criterion::run(&RANK),
        What::Scan => return criterion::run(&SCAN),
    }
    process::run(&mut command)
}
