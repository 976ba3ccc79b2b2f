//! `one-store none|http|etcd|redis`: two processes of the program under test meet in a store of
//! that kind, and move and verify data over TCP. `cargo xtask stores` starts it.

use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rerail_tests::bench::{Load, Side, Target};
use rerail_tests::child::Server;
use rerail_tests::store::Store;

const MIB: u64 = 1024 * 1024;
const BYTES: u64 = 8 * MIB;
const READY_WITHIN: Duration = Duration::from_secs(30);
const MOVED_WITHIN: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("one-store: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let meeting = std::env::args().nth(1);
    // Each lives until the data has moved.
    let (store, server);
    let url = match meeting.as_deref() {
        Some("none") => "P2PHANDSHAKE",
        Some("etcd") => {
            store = Store::etcd()?;
            store.url()
        }
        Some("redis") => {
            store = Store::redis()?;
            store.url()
        }
        Some("http") => {
            // The program under test need not have one.
            let program = std::env::var_os("RERAIL_SERVER_BIN").context("RERAIL_SERVER_BIN")?;
            let mut command = Command::new(program);
            command.args(["metadata", "serve", "--listen", "127.0.0.1:0"]);
            server = Server::start(command, "ready ", READY_WITHIN)?;
            &server.ready_line()["ready ".len()..]
        }
        _ => bail!("expected none, http, etcd or redis"),
    };
    let target = Target::start(&Side::tcp("target").with_metadata(url), BYTES)?;
    for operation in ["write", "read"] {
        let load = Load::verified(operation, 64 * 1024, BYTES);
        let side = Side::tcp("initiator").with_metadata(url);
        let report = load.run(&side, target.segment(), MOVED_WITHIN)?;
        report.expect_clean(BYTES)?;
    }
    target.stop()?;
    println!("one-store: {url}: {BYTES} bytes written and read, verified");
    Ok(())
}
