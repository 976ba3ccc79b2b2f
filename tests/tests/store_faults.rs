//! Engines that move data while their store meets every kind of fault: real etcd, Redis and HTTP
//! servers. After each fault all records are there as they should be, the watch is alive, no change
//! was missed, and no transfer has noticed.
//!
//! `RERAIL_FULL=1` has all faults, frozen stores for 15 s and late ones by 20 s; without, one of
//! each kind of repair, and short.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rerail_engine::{Engine, EngineConfig, MemoryOptions, Request, Transport};
use rerail_metadata::descriptor::SegmentDescriptor;
use rerail_metadata::{Change, Follow, KeySpace, MetadataStore, StoreOptions, StoreUrl, connect};
use rerail_tests::store::Store;
use rerail_tests::store::admin::{ask_etcd, tell_redis};
use rerail_verbs::{DeviceList, HostMemory};
use serde_json::json;

/// Longest time until all is well again. Engines look after their records each 30 s at the latest,
/// and the machine may be busy.
const LIMIT: Duration = Duration::from_secs(150);
const BLOCK: usize = 64 << 10;
/// Transfers that a fault must let pass before it is repaired.
const MEANWHILE: u64 = 50;
const NAMES: [&str; 2] = ["target", "initiator"];

/// What happens to a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The engines start first.
    Late,
    /// Ended in order, and started again with its records.
    StopStart,
    /// `kill -9`, and started again with its records.
    Kill,
    /// SIGSTOP, and SIGCONT after a while.
    Freeze,
    /// `kill -9`, and started again without anything.
    Empty,
    /// etcd: killed, and compacted before anybody can be back.
    Compaction,
    /// etcd: every lease is revoked by somebody else.
    Revoke,
    /// etcd: the leader of a cluster is killed, and comes back later.
    Leader,
    /// Redis: every connection is cut.
    ClientKill,
    /// Redis: everything is removed, without an event.
    Flush,
}

use Fault::{ClientKill, Compaction, Empty, Flush, Freeze, Kill, Late, Leader, Revoke, StopStart};

/// A kind of store, and what is done to it.
struct Subject {
    /// For what is printed.
    name: &'static str,
    start: fn() -> Result<Store>,
    short: &'static [Fault],
    full: &'static [Fault],
}

fn full() -> bool {
    std::env::var_os("RERAIL_FULL").is_some_and(|value| value == "1")
}

#[test]
fn no_fault_of_etcd_costs_a_record_a_change_or_a_transfer() -> Result<()> {
    run(&Subject {
        name: "etcd",
        start: Store::etcd,
        short: &[Late, Kill, Revoke],
        full: &[Late, StopStart, Kill, Freeze, Compaction, Revoke, Empty],
    })
}

#[test]
fn no_lost_leader_of_three_members_costs_a_record_a_change_or_a_transfer() -> Result<()> {
    run(&Subject {
        name: "etcd, three members",
        start: || Store::etcd_members(3),
        short: &[Leader],
        full: &[Late, Leader, Freeze, Kill, Leader],
    })
}

#[test]
fn no_fault_of_redis_costs_a_record_a_change_or_a_transfer() -> Result<()> {
    run(&Subject {
        name: "Redis",
        start: Store::redis,
        short: &[Kill, ClientKill, Flush],
        full: &[Late, StopStart, Kill, Freeze, ClientKill, Flush, Empty],
    })
}

#[test]
fn no_fault_of_our_http_server_costs_a_record_a_change_or_a_transfer() -> Result<()> {
    run(&Subject {
        name: "HTTP, our server",
        start: Store::http,
        short: &[Kill, Empty],
        full: &[Late, StopStart, Kill, Freeze, Empty],
    })
}

#[test]
fn no_fault_of_the_cpp_http_server_costs_a_record_a_change_or_a_transfer() -> Result<()> {
    if std::env::var_os("RERAIL_CPP_PYTHON").is_none() {
        eprintln!("skipped: RERAIL_CPP_PYTHON does not name a Python with the C++ engine");
        return Ok(());
    }
    run(&Subject {
        name: "HTTP, the C++ server",
        start: || {
            let python = std::env::var_os("RERAIL_CPP_PYTHON").map(PathBuf::from);
            Store::cpp_http(&python.context("RERAIL_CPP_PYTHON")?)
        },
        // It forgets everything whenever it ends.
        short: &[Empty],
        full: &[Late, Empty, Freeze],
    })
}

fn run(subject: &Subject) -> Result<()> {
    let faults = if full() { subject.full } else { subject.short };
    let mut store = (subject.start)()?;
    let late = faults.contains(&Late);
    if late {
        store.kill();
        store.wipe()?;
    }
    let mut pair = Pair::start(store.url())?;
    if late {
        std::thread::sleep(Duration::from_secs(if full() { 20 } else { 2 }));
        store.start_again()?;
    }
    let mut view = View::start(store.url())?;
    pair.open()?;
    for fault in faults {
        let begun = Instant::now();
        if *fault != Late {
            pair.suffer(*fault, &mut store)
                .with_context(|| format!("{fault:?}"))?;
        }
        view.until_right(&mut pair)
            .with_context(|| format!("after {fault:?}"))?;
        let seconds = begun.elapsed().as_secs_f64();
        println!(
            "{:22} {fault:12?} all well after {seconds:5.1} s",
            subject.name
        );
    }
    let ended = pair.mover.take().context("it moves")?.end()?;
    println!("{:22} {ended} transfers, none failed", subject.name);
    Ok(())
}

/// Two engines, of which one writes to the other all the time.
struct Pair {
    target: Engine,
    initiator: Engine,
    /// All that the target has registered.
    memory: Vec<HostMemory>,
    mover: Option<Mover>,
}

impl Pair {
    fn start(url: &str) -> Result<Self> {
        let settings =
            |variable: &str| (variable == "MC_TCP_BIND_ADDRESS").then(|| "127.0.0.1".to_owned());
        let engine = |name: &str| -> Result<Engine> {
            let mut config = EngineConfig::with_settings(url, name, &settings)?;
            config.transport = Transport::Tcp;
            Ok(Engine::start(config, &DeviceList::default())?)
        };
        let [target, initiator] = [engine(NAMES[0])?, engine(NAMES[1])?];
        let mut pair = Self {
            target,
            initiator,
            memory: Vec::new(),
            mover: None,
        };
        pair.register()?;
        Ok(pair)
    }

    /// A change of the target's record.
    fn register(&mut self) -> Result<()> {
        let memory = HostMemory::allocate(BLOCK)?;
        self.target.register(&memory, MemoryOptions::default())?;
        self.memory.push(memory);
        Ok(())
    }

    /// Finds the target and begins to move.
    fn open(&mut self) -> Result<()> {
        let begun = Instant::now();
        let segment = loop {
            match self.initiator.open_segment(NAMES[0]) {
                Ok(segment) if !segment.buffers().is_empty() => break segment,
                Err(error) if begun.elapsed() > LIMIT => return Err(error.into()),
                _ => std::thread::sleep(Duration::from_millis(100)),
            }
            ensure!(begun.elapsed() < LIMIT, "the target offers no memory");
        };
        let source = HostMemory::allocate(BLOCK)?;
        self.initiator.register(&source, MemoryOptions::default())?;
        let to = segment.buffers()[0].addr;
        let done = Arc::new(AtomicU64::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let (engine, counter, stopped) =
            (self.initiator.clone(), Arc::clone(&done), Arc::clone(&stop));
        let thread = std::thread::spawn(move || -> Result<()> {
            while !stopped.load(Ordering::Relaxed) {
                let batch = engine.allocate_batch(1);
                let write = Request::write(&segment, source.addr(), to, BLOCK as u64);
                batch.submit(&[write])?;
                batch.wait(LIMIT)?;
                counter.fetch_add(1, Ordering::Relaxed);
                // What is asked is whether it goes on, not how fast.
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(())
        });
        self.mover = Some(Mover { thread, done, stop });
        Ok(())
    }

    /// Lets it happen, with a change and transfers before the store is back.
    fn suffer(&mut self, fault: Fault, store: &mut Store) -> Result<()> {
        match fault {
            Late => {}
            StopStart => {
                store.terminate()?;
                self.meanwhile()?;
                store.start_again()?;
            }
            Kill => {
                store.kill();
                self.meanwhile()?;
                store.start_again()?;
            }
            Freeze => {
                store.signal("STOP")?;
                self.meanwhile()?;
                std::thread::sleep(Duration::from_secs(if full() { 15 } else { 3 }));
                store.signal("CONT")?;
            }
            Empty => {
                store.kill();
                store.wipe()?;
                self.meanwhile()?;
                store.start_again()?;
            }
            Compaction => {
                store.kill();
                self.meanwhile()?;
                store.start_again()?;
                let address = &store.addresses()[0];
                for _ in 0..50 {
                    ask_etcd(
                        address,
                        "/v3/kv/put",
                        &json!({"key": "YQ==", "value": "YQ=="}),
                    )?;
                }
                let answer = ask_etcd(address, "/v3/kv/range", &json!({"key": "YQ=="}))?;
                let revision = answer["header"]["revision"].clone();
                ask_etcd(address, "/v3/kv/compaction", &json!({"revision": revision}))?;
            }
            Revoke => {
                let address = &store.addresses()[0];
                let answer = ask_etcd(address, "/v3/lease/leases", &json!({}))?;
                let leases = answer["leases"].as_array().context("there are leases")?;
                ensure!(!leases.is_empty(), "the engines have none");
                for lease in leases {
                    ask_etcd(address, "/v3/lease/revoke", &json!({"ID": lease["ID"]}))?;
                }
                self.meanwhile()?;
            }
            Leader => {
                store.kill_member(leader(store)?);
                self.meanwhile()?;
                // Two of three are enough; the third comes back later.
                std::thread::sleep(Duration::from_secs(2));
                store.start_again()?;
            }
            ClientKill => {
                let address = &store.addresses()[0];
                for kind in ["normal", "pubsub"] {
                    tell_redis(address, &format!("CLIENT KILL TYPE {kind} SKIPME yes"))?;
                }
                self.meanwhile()?;
            }
            Flush => {
                tell_redis(&store.addresses()[0], "FLUSHALL")?;
                self.meanwhile()?;
            }
        }
        Ok(())
    }

    /// A change of the target, and transfers that go on.
    fn meanwhile(&mut self) -> Result<()> {
        let mover = self.mover.as_ref().context("it moves")?;
        let done = Arc::clone(&mover.done);
        let before = done.load(Ordering::Relaxed);
        self.register()?;
        let begun = Instant::now();
        while done.load(Ordering::Relaxed) < before + MEANWHILE {
            ensure!(begun.elapsed() < LIMIT, "transfers stand still");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// A thread that writes until it is ended; an error ends it earlier.
struct Mover {
    thread: JoinHandle<Result<()>>,
    done: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Mover {
    fn end(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(moved) => moved.context("a transfer failed")?,
            Err(_) => bail!("the mover panicked"),
        }
        Ok(self.done.load(Ordering::Relaxed))
    }
}

/// What somebody sees in the store who watches it all the time, and who looks for himself.
struct View {
    runtime: tokio::runtime::Runtime,
    store: Arc<dyn MetadataStore>,
    /// The target's record as last told by the watch.
    told: Arc<Mutex<Option<Vec<u8>>>>,
}

impl View {
    fn start(url: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let mut options = StoreOptions::default();
        options.poll_interval = Duration::from_secs(1);
        let key = KeySpace::default().segment(NAMES[0]);
        let told = Arc::<Mutex<Option<Vec<u8>>>>::default();
        let noted = Arc::clone(&told);
        let store = runtime.block_on(async {
            let store = connect(&StoreUrl::parse(url)?, &options).await?;
            let mut follow = Follow::new(Arc::clone(&store), &key).await?;
            tokio::spawn(async move {
                while let Some(change) = follow.next().await {
                    let now = match change {
                        Change::Put(record) if record.key == key => Some(record.value.to_vec()),
                        Change::Delete { key: gone } if gone == key => None,
                        _ => continue,
                    };
                    *noted.lock().expect("lock") = now;
                }
            });
            anyhow::Ok(store)
        })?;
        Ok(Self {
            runtime,
            store,
            told,
        })
    }

    /// Waits until all four records are there, the target's as it is, and the watch has told it;
    /// then makes one more change and waits until that has come, too.
    fn until_right(&mut self, pair: &mut Pair) -> Result<()> {
        self.until_told(pair)?;
        pair.register()?;
        self.until_told(pair)
    }

    fn until_told(&self, pair: &Pair) -> Result<()> {
        let begun = Instant::now();
        loop {
            let wrong = match self.wrong(pair) {
                Ok(()) => return Ok(()),
                Err(wrong) => wrong,
            };
            if begun.elapsed() > LIMIT {
                return Err(wrong);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn wrong(&self, pair: &Pair) -> Result<()> {
        let keys = KeySpace::default();
        let get = |key: String| self.runtime.block_on(self.store.get(&key));
        for name in NAMES {
            get(keys.rpc_meta(name))?;
            get(keys.segment(name))?;
        }
        let stored = get(keys.segment(NAMES[0]))?.value;
        let has_all = |record: &[u8], which: &str| -> Result<()> {
            let record = SegmentDescriptor::from_json(record)?;
            let mut addresses: Vec<u64> = record.buffers.iter().map(|buffer| buffer.addr).collect();
            let mut registered: Vec<u64> = pair.memory.iter().map(HostMemory::addr).collect();
            addresses.sort_unstable();
            registered.sort_unstable();
            ensure!(
                addresses == registered,
                "{which} has {} buffers of {}",
                addresses.len(),
                registered.len()
            );
            Ok(())
        };
        has_all(&stored, "the store")?;
        let told = self.told.lock().expect("lock").clone();
        has_all(
            &told.context("the watch has told of no record")?,
            "the watch",
        )
    }
}

/// Which member of an etcd cluster leads.
fn leader(store: &Store) -> Result<usize> {
    let begun = Instant::now();
    loop {
        for (index, address) in store.addresses().iter().enumerate() {
            let Ok(status) = ask_etcd(address, "/v3/maintenance/status", &json!({})) else {
                continue;
            };
            let own = &status["header"]["member_id"];
            if own.is_string() && status["leader"] == *own {
                return Ok(index);
            }
        }
        ensure!(begun.elapsed() < LIMIT, "no member leads");
        std::thread::sleep(Duration::from_millis(100));
    }
}
