//! `rerail metadata serve`.

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use rerail_metadata::Secret;
use rerail_metadata::server::{MetadataServer, ServerOptions};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::ResultExt as _;

/// Longest time that requests in flight may take once the server stops.
const STOP_MAX: Duration = Duration::from_secs(5);

/// Serve metadata over HTTP until SIGINT or SIGTERM. C++ engines can use it, too.
#[derive(clap::Args)]
#[command(after_help = "\
Prints one line `ready URL` once it can be used; URL is what clients take as --metadata.
With RERAIL_METADATA_TOKEN set, clients must send it; C++ engines cannot.
Examples:
  rerail metadata serve
  rerail metadata serve --listen 0.0.0.0:8080 --data-dir /var/lib/rerail --token-file /run/token")]
pub(super) struct Args {
    /// IP address and port to listen on; port 0 takes a free one.
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8080", value_parser = address)]
    listen: SocketAddr,
    /// Directory that keeps the records over restarts; without it they are in memory only.
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// File with the bearer token that clients must send.
    #[arg(long, value_name = "FILE")]
    token_file: Option<String>,
    /// File to which every change of a record is appended, as a JSON object on a line.
    #[arg(long, value_name = "FILE")]
    writes_log: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "expected an IP address and a port, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::]:8080"
            .to_owned()
    })
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut options = ServerOptions::default();
    options.data_dir = args.data_dir;
    options.writes_log = args.writes_log;
    options.token = match args.token_file {
        Some(path) => Some(
            Secret::from_file("--token-file", &path)
                .or_fail("cannot read the token", "give a file that can be read")?,
        ),
        None => std::env::var("RERAIL_METADATA_TOKEN")
            .ok()
            .filter(|token| !token.is_empty())
            .map(Secret::new),
    };
    raise_file_limit();
    let server = MetadataServer::open(options).or_fail(
        "cannot open the data",
        "give --data-dir a directory that can be written and that no other server uses, and \
         --writes-log a file that can be written",
    )?;
    let listener = TcpListener::bind(args.listen).await.or_fail(
        format!("cannot listen on {}", args.listen),
        "choose another --listen address, or stop what uses it",
    )?;
    let address = listener
        .local_addr()
        .or_fail("cannot listen", "choose another --listen")?;
    let mut interrupt =
        signal(SignalKind::interrupt()).or_fail("cannot wait for SIGINT", "report this")?;
    let mut terminate =
        signal(SignalKind::terminate()).or_fail("cannot wait for SIGTERM", "report this")?;

    let url = format!("http://{address}/metadata");
    {
        let mut out = io::stdout().lock();
        if args.json {
            writeln!(out, "{}", serde_json::json!({"ready": url}))?;
        } else {
            writeln!(out, "ready {url}")?;
        }
        out.flush()?;
    }
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let mut serving = tokio::spawn(server.serve(listener, async {
        let _ = stopped.await;
    }));
    tokio::select! {
        // Nothing but a panic ends it before it is told to.
        ended = &mut serving => {
            ended.or_fail("the server ended", "see the log")?;
            return Ok(ExitCode::SUCCESS);
        }
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    let _ = stop.send(());
    match tokio::time::timeout(STOP_MAX, &mut serving).await {
        Ok(ended) => ended.or_fail("the server ended", "see the log")?,
        // What was acknowledged is on disk; a client that does not read must not hold us up.
        Err(_) => serving.abort(),
    }
    Ok(ExitCode::SUCCESS)
}

/// Every client holds two connections or more, and the usual limit of 1 024 open files would end at
/// a few hundred of them. The limit that only an administrator can raise stays.
fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit on open files");
    }
}
