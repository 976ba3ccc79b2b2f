//! The conformance bodies, and what is particular to Linux, on real devices.
//!
//! `RERAIL_VERBS_TEST_DEVICES=rxe_a0,rxe_a1` names two devices that reach one another; without it
//! each test says that it is left out, and passes. Links and addresses are only touched when
//! `RERAIL_VERBS_TEST_FAULTS=1` allows it, which needs root. The devices are shared, so that the
//! tests take turns; a runner with a process for each test has to run one at a time.
#![cfg(feature = "ibv")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rerail_verbs::conformance::{BODIES, Fabric, Link, Side};
use rerail_verbs::{Completion, Context, Gid, VerbsError, WcStatus, WorkRequest, ibv};

const DEVICES: &str = "RERAIL_VERBS_TEST_DEVICES";
const FAULTS: &str = "RERAIL_VERBS_TEST_FAULTS";

thread_local! {
    /// Allocations of this thread.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting.
struct Counting;

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter any more.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Held by the test whose turn it is.
static TURN: Mutex<()> = Mutex::new(());

/// Two devices of this machine.
struct RealFabric {
    initiator: String,
    target: String,
    may_break: bool,
    _turn: MutexGuard<'static, ()>,
}

impl RealFabric {
    /// The devices that the environment names, or nothing, said aloud.
    fn from_env() -> Option<Self> {
        let Ok(names) = std::env::var(DEVICES) else {
            println!("left out: {DEVICES} names no devices");
            return None;
        };
        let (initiator, target) = names.split_once(',').expect("two names with a comma");
        Some(Self {
            initiator: initiator.to_owned(),
            target: target.to_owned(),
            may_break: std::env::var(FAULTS).is_ok_and(|value| value == "1"),
            // A test that failed has not harmed the devices.
            _turn: TURN.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }

    fn name(&self, side: Side) -> &str {
        match side {
            Side::Initiator => &self.initiator,
            Side::Target => &self.target,
        }
    }

    fn port_dir(&self, side: Side) -> PathBuf {
        PathBuf::from(format!("/sys/class/infiniband/{}/ports/1", self.name(side)))
    }

    /// The network interface of the device's first row.
    fn netdev(&self, side: Side) -> String {
        read(self.port_dir(side).join("gid_attrs/ndevs/0")).expect("a row with an interface")
    }
}

fn read(path: PathBuf) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned())
}

fn ip(arguments: &str) -> String {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .output()
        .expect("ip can be run");
    assert!(output.status.success(), "ip {arguments}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

impl Fabric for RealFabric {
    fn open(&self, side: Side) -> Context {
        let list = ibv::devices().expect("the list of devices");
        let device = list.find(self.name(side));
        device
            .unwrap_or_else(|| panic!("no such device; {list}"))
            .open()
            .expect("it opens")
    }

    fn pass_time(&self) {
        std::thread::sleep(Duration::from_millis(1));
    }

    fn set_link(&self, side: Side, up: bool) -> bool {
        if !self.may_break {
            println!("left out: {FAULTS} is not 1");
            return false;
        }
        let netdev = self.netdev(side);
        // Routes go with the link: they are noted before and put back after.
        let note = std::env::temp_dir().join(format!("rerail-routes-{netdev}"));
        if up {
            ip(&format!("link set {netdev} up"));
            for route in std::fs::read_to_string(&note).expect("noted").lines() {
                ip(&format!("route replace {route} dev {netdev}"));
            }
        } else {
            let routes = ip(&format!("-4 route show table all dev {netdev}"));
            let kept: Vec<&str> = routes
                .lines()
                .filter(|route| !route.starts_with("local") && !route.starts_with("broadcast"))
                .collect();
            std::fs::write(&note, kept.join("\n")).expect("a note");
            ip(&format!("link set {netdev} down"));
        }
        true
    }

    fn set_gid(&self, side: Side, gid: Gid, present: bool) -> bool {
        if !self.may_break {
            println!("left out: {FAULTS} is not 1");
            return false;
        }
        let verb = if present { "add" } else { "del" };
        ip(&format!(
            "addr {verb} {}/32 dev {}",
            gid.to_ip(),
            self.netdev(side)
        ));
        true
    }
}

#[test]
fn conformance() {
    let Some(fabric) = RealFabric::from_env() else {
        return;
    };
    let only = std::env::var("RERAIL_VERBS_TEST_ONLY").unwrap_or_default();
    for (name, body) in BODIES.iter().filter(|(name, _)| name.contains(&only)) {
        println!("{name}");
        body(&fabric);
    }
}

/// What makes a fence at the far end necessary: draining a queue pair in ERR is not enough.
#[test]
fn a_write_of_a_queue_pair_in_error_lands_in_memory_that_was_reused() {
    let Some(fabric) = RealFabric::from_env().filter(|fabric| fabric.may_break) else {
        return;
    };
    // The bridge's side of the target's wire.
    let wire = format!("p{}", fabric.netdev(Side::Target));
    let tc = |arguments: &str| {
        let status = Command::new("tc")
            .args(arguments.split_whitespace())
            .status();
        assert!(status.expect("tc can be run").success(), "tc {arguments}");
    };
    let link = Link::connect(&fabric);
    let byte = || {
        let mut byte = [0];
        let target = link.memory(Side::Target);
        target.copy_out(0, &mut byte).expect("inside");
        byte[0]
    };
    link.memory(Side::Initiator)
        .copy_in(0, &[1])
        .expect("inside");
    tc(&format!("qdisc replace dev {wire} root netem delay 1500ms"));
    link.initiator()
        .post(&[link.write(1, 0, 0, 1)])
        .expect("posted");
    std::thread::sleep(Duration::from_millis(100));
    link.initiator().to_error().expect("ERR");
    let mut completions = [Completion::EMPTY; 4];
    let begin = Instant::now();
    while link.queue().poll(&mut completions).expect("polled") == 0 {
        assert!(begin.elapsed() < Duration::from_secs(60), "never drained");
        fabric.pass_time();
    }
    assert_ne!(completions[0].status, WcStatus::Success);
    // Drained: its owner thinks that nothing can come any more.
    link.memory(Side::Target).copy_in(0, &[2]).expect("inside");
    while byte() == 2 && begin.elapsed() < Duration::from_secs(20) {
        fabric.pass_time();
    }
    tc(&format!("qdisc del dev {wire} root"));
    assert_eq!(
        byte(),
        1,
        "it did not land: what is tested elsewhere shows nothing here"
    );
}

#[test]
fn gid_table_equals_sysfs() {
    let Some(fabric) = RealFabric::from_env() else {
        return;
    };
    for side in [Side::Initiator, Side::Target] {
        let context = fabric.open(side);
        let length = context.port_attr(1).expect("the port").gid_tbl_len;
        let rows = context.gid_table(1).expect("the table");
        let dir = fabric.port_dir(side);
        let mut expected = Vec::new();
        for index in 0..length {
            let gid = read(dir.join(format!("gids/{index}"))).expect("a row of sysfs");
            let kind = read(dir.join(format!("gid_attrs/types/{index}")));
            let netdev = read(dir.join(format!("gid_attrs/ndevs/{index}")));
            if let Some(kind) = kind {
                expected.push((index, gid, kind, netdev.unwrap_or_default()));
            }
        }
        let found: Vec<_> = rows
            .iter()
            .map(|row| {
                let netdev = row.netdev.as_ref().map(|netdev| netdev.name.clone());
                (
                    row.index,
                    row.gid.to_string(),
                    row.gid_type.to_string(),
                    netdev.unwrap_or_default(),
                )
            })
            .collect();
        assert_eq!(found, expected);
        assert!(found.iter().all(|row| row.2 == "RoCE v2"), "{found:?}");
    }
}

#[test]
fn device_and_port_say_what_they_are() {
    let Some(fabric) = RealFabric::from_env() else {
        return;
    };
    let context = fabric.open(Side::Initiator);
    let attr = context.device_attr().expect("the device");
    assert!(
        attr.max_qp > 0 && attr.max_mr_bytes > 0 && attr.phys_port_cnt == 1,
        "{attr:?}"
    );
    let list = ibv::devices().expect("the list");
    let device = list.find(&fabric.initiator).expect("the device");
    assert_eq!(device.node_guid(), attr.node_guid);
    let port = context.port_attr(1).expect("the port");
    assert!(
        port.state.is_active() && port.active_mtu.is_some(),
        "{port:?}"
    );
    assert_eq!(context.pkey(1, 0).expect("a P_Key"), 0xffff);
    assert!(context.async_fd().is_some());
    assert!(context.next_event().is_ok());
}

#[test]
fn a_forked_child_is_refused_everything() {
    let Some(fabric) = RealFabric::from_env() else {
        return;
    };
    let context = fabric.open(Side::Initiator);
    let queue = context.create_cq(8).expect("a queue");
    // The child says what it found through a pipe: its exit status is valgrind's under valgrind.
    let (mut found, to_parent) = std::io::pipe().expect("a pipe");
    // SAFETY: the child calls what allocates nothing and takes no lock, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(context.port_attr(1), Err(VerbsError::ForkedProcess))
            && matches!(queue.poll(&mut []), Err(VerbsError::ForkedProcess))
            && matches!(context.next_event(), Err(VerbsError::ForkedProcess))
            && matches!(
                context.control().execute(|| ()),
                Err(VerbsError::ForkedProcess)
            );
        drop(queue);
        drop(context);
        let _ = (&to_parent).write_all(if refused { b"refused" } else { b"allowed" });
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(0) };
    }
    assert!(child > 0);
    drop(to_parent);
    let mut answer = String::new();
    found
        .read_to_string(&mut answer)
        .expect("the child's answer");
    assert_eq!(answer, "refused");
    // SAFETY: waits for a child of our own.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    // The parent's objects are whole.
    let control = context.control().clone();
    drop((queue, context));
    assert!(control.wait_closed(Duration::from_secs(30)));
    assert_eq!(control.failed_destructions(), 0);
}

#[test]
fn posting_and_polling_allocate_nothing() {
    let Some(fabric) = RealFabric::from_env() else {
        return;
    };
    let link = Link::connect(&fabric);
    let batch: Vec<_> = (0..40).map(|id| link.write(id, 0, 0, 64)).collect();
    let mut completions = [Completion::EMPTY; 40];
    let mut drained = 0;
    let before = ALLOCATIONS.get();
    link.initiator().post(&batch).expect("posted");
    let begin = Instant::now();
    while drained < batch.len() && begin.elapsed() < Duration::from_secs(60) {
        drained += link.queue().poll(&mut completions).expect("polled");
    }
    let refused = link.initiator().post(&[batch[0]; 4]).is_err();
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert_eq!((drained, refused), (batch.len(), false));
}

#[test]
fn dropping_never_waits_for_a_hanging_verb() {
    let Some(fabric) = RealFabric::from_env() else {
        return;
    };
    let link = Link::connect(&fabric);
    let control = link.initiator().pd().context().control().clone();
    let (release, hang) = mpsc::channel::<()>();
    let (begun, begins) = mpsc::channel::<()>();
    let job = move || begun.send(()).is_ok() && hang.recv().is_ok();
    let hanging = control.submit(job).expect("there is room");
    // Otherwise the destructions would be first.
    begins
        .recv_timeout(Duration::from_secs(60))
        .expect("the job begins");
    let begin = Instant::now();
    drop(link);
    assert!(
        begin.elapsed() < Duration::from_secs(1),
        "{:?}",
        begin.elapsed()
    );
    std::thread::sleep(Duration::from_millis(50));
    assert!(!control.is_closed());
    // Pair, region, queue, domain, context.
    assert_eq!(control.waiting(), 5);
    assert!(control.stuck_for().is_some());
    release.send(()).expect("the job waits");
    assert!(
        hanging
            .wait_timeout(Duration::from_secs(10))
            .expect("an answer")
    );
    assert!(control.wait_closed(Duration::from_secs(30)));
    assert_eq!(control.failed_destructions(), 0);
}

#[test]
fn threads_may_share_a_pair_and_a_queue() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 50;
    let Some(fabric) = RealFabric::from_env() else {
        return;
    };
    let link = Link::connect(&fabric);
    let count_max = THREADS * ROUNDS;
    let seen = Mutex::new(std::collections::BTreeSet::new());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (link, seen) = (&link, &seen);
            scope.spawn(move || {
                let begin = Instant::now();
                let mut completions = [Completion::EMPTY; 3];
                for round in 0..ROUNDS {
                    let id = thread * ROUNDS + round;
                    let request: WorkRequest = link.write(id, 64 * id as usize, 0, 64);
                    while link.initiator().post(&[request]).is_err() {
                        assert!(begin.elapsed() < Duration::from_secs(60));
                        std::thread::yield_now();
                    }
                    let count = link.queue().poll(&mut completions).expect("polled");
                    let mut seen = seen.lock().expect("not poisoned");
                    for completion in &completions[..count] {
                        assert_eq!(completion.status, WcStatus::Success);
                        assert!(seen.insert(completion.wr_id), "twice: {completion:?}");
                    }
                }
            });
        }
    });
    let mut seen = seen.into_inner().expect("not poisoned");
    let begin = Instant::now();
    while (seen.len() as u64) < count_max && begin.elapsed() < Duration::from_secs(60) {
        let mut completions = [Completion::EMPTY; 16];
        let count = link.queue().poll(&mut completions).expect("polled");
        seen.extend(
            completions[..count]
                .iter()
                .map(|completion| completion.wr_id),
        );
    }
    assert_eq!(seen.len() as u64, count_max);
}
