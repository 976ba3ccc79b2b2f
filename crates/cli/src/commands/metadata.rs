//! `rerail metadata`: a metadata server, and single operations on any store.
//!
//! Deliberately not here: the stores and the server, which are `rerail-metadata`'s.

use std::borrow::Cow;
use std::io::{self, Read as _, Write as _};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Subcommand;
use rerail_metadata::{Change, Follow, MetadataStore, Record, StoreOptions, StoreUrl, connect};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::{Failure, ResultExt as _};

#[cfg(feature = "server")]
mod serve;

/// Metadata stores: serve one, read and write records.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  rerail metadata serve --listen 0.0.0.0:8080 --data-dir /var/lib/rerail
  rerail metadata list --metadata etcd://10.0.0.1:2379 mooncake/ram/
  rerail metadata watch --metadata http://10.0.0.1:8080/metadata mooncake/

Credentials are read from the environment or from files, so that no process list shows them:
  RERAIL_METADATA_USER, RERAIL_METADATA_PASSWORD or RERAIL_METADATA_PASSWORD_FILE
  RERAIL_METADATA_TOKEN or RERAIL_METADATA_TOKEN_FILE (HTTP)
  RERAIL_METADATA_CA_FILE, RERAIL_METADATA_CERT_FILE, RERAIL_METADATA_KEY_FILE (TLS)")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[cfg(feature = "server")]
    Serve(serve::Args),
    /// Print the value of a record as it is stored.
    Get {
        #[command(flatten)]
        store: Store,
        /// Key as stored, prefix included, such as mooncake/ram/node-a.
        key: String,
    },
    /// Write a record.
    Put {
        #[command(flatten)]
        store: Store,
        /// Key as stored, prefix included.
        key: String,
        /// The value; `-` reads it from stdin.
        value: String,
    },
    /// Remove records. Exit status 1 if one was not there.
    Rm {
        #[command(flatten)]
        store: Store,
        /// Keys as stored, prefix included.
        #[arg(required = true)]
        keys: Vec<String>,
    },
    /// Print the keys under a prefix.
    List {
        #[command(flatten)]
        store: Store,
        /// What the keys start with; nothing for all keys.
        #[arg(default_value = "")]
        prefix: String,
    },
    /// Print the records under a prefix, then every change, until SIGINT or SIGTERM.
    Watch {
        #[command(flatten)]
        store: Store,
        /// What the keys start with. For HTTP servers other than Rerail's: one whole key.
        #[arg(default_value = "")]
        prefix: String,
    },
}

#[derive(clap::Args)]
struct Store {
    /// The store: etcd://H:P[,H:P…], redis://H:P, rediss://H:P, http://H:P/metadata, https://….
    #[arg(
        long,
        value_name = "URL",
        env = "RERAIL_METADATA",
        hide_env_values = true
    )]
    metadata: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl Store {
    async fn open(&self) -> anyhow::Result<Arc<dyn MetadataStore>> {
        let url = StoreUrl::parse(&self.metadata)
            .or_fail("cannot use --metadata", "give the URL of a metadata store")?;
        let options = StoreOptions::from_variables(&url, |name| std::env::var(name).ok()).or_fail(
            "cannot use the environment",
            "correct or unset the variable",
        )?;
        connect(&url, &options).await.or_fail(
            format!("cannot open the store {url}"),
            "choose a store that this program was built with",
        )
    }
}

/// What to do about a key that is not there.
const KEY_REMEDY: &str = "check key and prefix with `metadata list`";
/// What to do about an operation that failed.
const REMEDY: &str = "check that the store is up and reachable, and the credentials";

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .or_fail("cannot start", "raise the limits on threads and open files")?;
    runtime.block_on(async {
        match args.command {
            #[cfg(feature = "server")]
            Command::Serve(args) => serve::run(args).await,
            Command::Get { store, key } => get(&store, &key).await,
            Command::Put { store, key, value } => put(&store, &key, &value).await,
            Command::Rm { store, keys } => rm(&store, &keys).await,
            Command::List { store, prefix } => list(&store, &prefix).await,
            Command::Watch { store, prefix } => watch(&store, &prefix).await,
        }
    })
}

async fn get(store: &Store, key: &str) -> anyhow::Result<ExitCode> {
    let record = store.open().await?.get(key).await.map_err(|error| {
        let remedy = if error.is_not_found() {
            KEY_REMEDY
        } else {
            REMEDY
        };
        let failure = Failure::new(format!("cannot get {key}"), remedy);
        anyhow::Error::from(error).context(failure)
    })?;
    let mut out = io::stdout().lock();
    if store.json {
        writeln!(out, "{}", as_json(&record))?;
    } else {
        out.write_all(&record.value)?;
        out.flush()?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn put(store: &Store, key: &str, value: &str) -> anyhow::Result<ExitCode> {
    let value = if value == "-" {
        let mut read = Vec::new();
        io::stdin().read_to_end(&mut read).or_fail(
            "cannot read the value from stdin",
            "give the value as an argument",
        )?;
        read
    } else {
        value.as_bytes().to_vec()
    };
    let opened = store.open().await?;
    opened
        .put(key, value.into(), None)
        .await
        .or_fail(format!("cannot put {key}"), REMEDY)?;
    if store.json {
        writeln!(
            io::stdout().lock(),
            "{}",
            json!({"key": key, "stored": true})
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn rm(store: &Store, keys: &[String]) -> anyhow::Result<ExitCode> {
    let opened = store.open().await?;
    let mut all = true;
    for key in keys {
        let existed = opened
            .delete(key)
            .await
            .or_fail(format!("cannot remove {key}"), REMEDY)?;
        all &= existed;
        if store.json {
            writeln!(
                io::stdout().lock(),
                "{}",
                json!({"key": key, "existed": existed})
            )?;
        } else if !existed {
            let key = shown(key);
            writeln!(io::stderr().lock(), "rerail: no record under {key}")?;
            writeln!(io::stderr().lock(), "  what to do: {KEY_REMEDY}")?;
        }
    }
    Ok(if all {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn list(store: &Store, prefix: &str) -> anyhow::Result<ExitCode> {
    let records = store
        .open()
        .await?
        .list(prefix)
        .await
        .or_fail(format!("cannot list {prefix:?}"), REMEDY)?;
    let mut out = io::stdout().lock();
    if store.json {
        let records: Vec<serde_json::Value> = records.iter().map(as_json).collect();
        writeln!(out, "{}", json!(records))?;
    } else {
        for record in records {
            writeln!(out, "{}", shown(&record.key))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn watch(store: &Store, prefix: &str) -> anyhow::Result<ExitCode> {
    let opened = store.open().await?;
    let mut follow = Follow::new(opened, prefix)
        .await
        .or_fail(format!("cannot watch {prefix:?}"), REMEDY)?;
    let mut interrupt =
        signal(SignalKind::interrupt()).or_fail("cannot wait for SIGINT", "report this")?;
    let mut terminate =
        signal(SignalKind::terminate()).or_fail("cannot wait for SIGTERM", "report this")?;
    loop {
        let change = tokio::select! {
            change = follow.next() => change,
            _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
            _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
        };
        let mut out = io::stdout().lock();
        match change {
            None => return Ok(ExitCode::SUCCESS),
            Some(Change::Put(record)) if store.json => {
                let mut line = as_json(&record);
                line["event"] = "put".into();
                writeln!(out, "{line}")?;
            }
            Some(Change::Put(record)) => {
                let value = String::from_utf8_lossy(&record.value);
                let value = shown(value.trim_end_matches('\n'));
                writeln!(out, "put {} {value}", shown(&record.key))?;
            }
            Some(Change::Delete { key }) if store.json => {
                writeln!(out, "{}", json!({"event": "delete", "key": key}))?;
            }
            Some(Change::Delete { key }) => writeln!(out, "delete {}", shown(&key))?,
            Some(Change::Synced) if store.json => writeln!(out, "{}", json!({"event": "synced"}))?,
            Some(Change::Synced) => writeln!(out, "synced")?,
        }
        out.flush()?;
    }
}

/// A text from a store, for a line of output: whoever wrote it must not end the line, nor command
/// the terminal. `--json` has it unchanged.
fn shown(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return text.into();
    }
    let escaped = |character: char| -> String {
        if character.is_control() {
            character.escape_default().collect()
        } else {
            character.into()
        }
    };
    text.chars().map(escaped).collect::<String>().into()
}

/// A value that is JSON is shown as such, another one as text.
fn as_json(record: &Record) -> serde_json::Value {
    let value: serde_json::Value = serde_json::from_slice(&record.value)
        .unwrap_or_else(|_| String::from_utf8_lossy(&record.value).into());
    json!({"key": record.key, "value": value})
}
