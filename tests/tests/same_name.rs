//! Two processes under one name, on every store: the younger has the name, whether the older is
//! alive or comes back from a freeze after its lease has ended, and peers reach the younger.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rerail_metadata::descriptor::{InstanceId, RpcMeta, SegmentDescriptor};
use rerail_metadata::{KeySpace, MetadataStore, StoreOptions, StoreUrl, connect};
use rerail_tests::bench::{Load, Side, Target};
use rerail_tests::child;
use rerail_tests::store::Store;

const MIB: u64 = 1 << 20;
const NAME: &str = "twice";
/// Longest time until something is so. Leases last 30 s.
const LIMIT: Duration = Duration::from_secs(100);
/// How long it has to stay so: several attempts of whoever wants to write.
const STAYS: Duration = Duration::from_secs(3);

type Start = fn() -> Result<Store>;

fn stores() -> Vec<(&'static str, Start)> {
    let mut stores: Vec<(&'static str, Start)> = vec![
        ("etcd", Store::etcd),
        ("Redis", Store::redis),
        ("HTTP, our server", Store::http),
    ];
    if std::env::var_os("RERAIL_CPP_PYTHON").is_some() {
        stores.push(("HTTP, the C++ server", || {
            let python = std::env::var_os("RERAIL_CPP_PYTHON").map(PathBuf::from);
            Store::cpp_http(&python.context("RERAIL_CPP_PYTHON")?)
        }));
    }
    stores
}

/// Runs `test` on all stores at once, since it mostly waits.
fn on_every_store(test: fn(&Place) -> Result<()>) {
    let runs: Vec<_> = stores()
        .into_iter()
        .map(|(name, start)| {
            let run = std::thread::spawn(move || test(&Place::new(start()?)?));
            (name, run)
        })
        .collect();
    let mut failed = Vec::new();
    for (name, run) in runs {
        if let Err(error) = run.join().expect("no panic") {
            failed.push(format!("{name}: {error:#}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// A store, and somebody who looks into it.
struct Place {
    runtime: tokio::runtime::Runtime,
    store: Arc<dyn MetadataStore>,
    running: Store,
}

impl Place {
    fn new(running: Store) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let url = StoreUrl::parse(running.url())?;
        let store = runtime.block_on(connect(&url, &StoreOptions::default()))?;
        Ok(Self {
            runtime,
            store,
            running,
        })
    }

    fn target(&self) -> Result<Target> {
        let side = Side::tcp(NAME).with_metadata(self.running.url());
        Target::start(&side, MIB)
    }

    /// Who has the name: the instance in the record, and where its RPC server is.
    fn owner(&self) -> Result<(InstanceId, String)> {
        let keys = KeySpace::default();
        let get = |key: String| self.runtime.block_on(self.store.get(&key));
        let record = SegmentDescriptor::from_json(&get(keys.segment(NAME))?.value)?;
        let rpc = RpcMeta::from_json(&get(keys.rpc_meta(NAME))?.value)?;
        let instance = record.rerail.context("the record is no Rerail's")?.instance;
        Ok((
            instance,
            format!("{}:{}", rpc.ip_or_host_name, rpc.rpc_port),
        ))
    }

    /// Waits until the records are there, both of them, or gone.
    fn until_gone(&self) -> Result<()> {
        let begun = Instant::now();
        while self.owner().is_ok() {
            ensure!(begun.elapsed() < LIMIT, "the frozen one keeps its records");
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Waits until the process at `rpc` has the name, sees that it stays so, and that peers reach
    /// it.
    fn belongs_to(&self, owner: &Target, not: InstanceId) -> Result<InstanceId> {
        let begun = Instant::now();
        let mut since: Option<Instant> = None;
        let instance = loop {
            let found = self.owner();
            match &found {
                Ok((instance, rpc)) if rpc == owner.rpc() && *instance != not => {
                    if since.get_or_insert_with(Instant::now).elapsed() > STAYS {
                        break *instance;
                    }
                }
                // A reading in the middle of a change, or the other one tries: it has to give up.
                _ => since = None,
            }
            ensure!(
                begun.elapsed() < LIMIT,
                "{} has not the name: {found:?}",
                owner.rpc()
            );
            std::thread::sleep(Duration::from_millis(100));
        };
        let side = Side::tcp("reader").with_metadata(self.running.url());
        let load = Load::verified("write", 64 << 10, MIB / 2);
        load.run(&side, NAME, LIMIT)?.expect_clean(MIB / 2)?;
        Ok(instance)
    }
}

#[test]
fn of_two_live_processes_of_one_name_the_younger_has_it() {
    on_every_store(|place| {
        let old = place.target()?;
        let first = place.belongs_to(&old, InstanceId([0; 16]))?;
        let young = place.target()?;
        let second = place.belongs_to(&young, first)?;
        // That the older one ends takes nothing from the younger.
        drop(old);
        ensure!(place.belongs_to(&young, first)? == second, "a third one?");
        young.stop()
    });
}

#[test]
fn a_process_thawed_after_its_lease_does_not_take_the_name_back() {
    if std::env::var_os("RERAIL_FULL").is_none_or(|value| value != "1") {
        eprintln!("skipped: takes long; set RERAIL_FULL=1");
        return;
    }
    on_every_store(|place| {
        let mut zombie = place.target()?;
        let first = place.belongs_to(&zombie, InstanceId([0; 16]))?;
        let pid = zombie.process().pid();
        child::signal(pid, "STOP")?;
        if place.store.capabilities().leases {
            place.until_gone()?;
        }
        let young = place.target()?;
        let second = place.belongs_to(&young, first)?;
        child::signal(pid, "CONT")?;
        // Longer than the zombie needs to look after its records.
        std::thread::sleep(Duration::from_secs(35));
        ensure!(place.belongs_to(&young, first)? == second, "a third one?");
        drop(zombie);
        young.stop()
    });
}
