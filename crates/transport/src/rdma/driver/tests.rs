//! One driver in virtual time: what it posts, and whom it takes for stalled.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rerail_verbs::sim::{
    Fabric, FabricOptions, FaultGuard, LinkOptions, NicId, NicOptions, PostVerdict, VerbTime,
    WorkVerdict,
};
use rerail_verbs::{AccessFlags, HostMemory};
use rustix::io::Errno;

use super::check::RATE_ASSUMED;
use super::*;
use crate::machine::ids::LocalNic;
use crate::rdma::endpoint::PeerEnds;
use crate::rdma::inbox::{Pairs, Probe, Wake, Work};
use crate::rdma::memory::{RegisteredMemory, Registrations};
use crate::rdma::nic::PortWish;
use crate::rdma::nics::Nics;
use crate::rdma::pairs::{self, Prepared};
use crate::rdma::paths::Advice;
use crate::rdma::rail::{Peer, PeerNic, PeerSpec, Rail, RailState};
use crate::rdma::rig::Finish;
use crate::rdma::slice::{Moment, Piece, Slicing, Span};
use crate::rdma::transfer::TransferSpec;

mod keys;

const MEMORY: usize = 1 << 20;
const SLICE: u32 = 4 << 10;

/// How far time goes between two steps of a thread that runs all the time.
const TICK: Duration = ms(1);

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A driver with a rail to each of two NICs of a peer, and an endpoint of one queue pair on each.
struct Rig {
    fabric: Fabric,
    own: NicId,
    now: Time,
    config: RdmaConfig,
    nic: Arc<Nic>,
    inbox: Arc<Inbox>,
    driver: Driver,
    reports: mpsc::Receiver<Report>,
    peer: Arc<Peer>,
    /// Of the endpoints, whose keys are 1 and 2.
    gates: Vec<Arc<AtomicBool>>,
    own_memory: RegisteredMemory,
    far_memory: RegisteredMemory,
    _far: Vec<(Arc<Nic>, Prepared)>,
}

fn config() -> RdmaConfig {
    RdmaConfig {
        qp_per_endpoint: 1,
        slicing: Slicing {
            slice_bytes: SLICE,
            fragment_bytes: 0,
        },
        ..RdmaConfig::default()
    }
}

fn open(fabric: &Fabric, host: u8, count: u8, config: &RdmaConfig) -> Vec<(NicId, Arc<Nic>)> {
    let node = fabric.add_node(&format!("host{host}"));
    let process = fabric.add_process(node);
    let open = |index: u8| {
        let (name, address) = (
            format!("sim{index}"),
            IpAddr::from([10, 0, host, index + 1]),
        );
        let id = fabric.add_nic(node, &NicOptions::ethernet(&name, address));
        let (device, local) = (fabric.device_of(process, id), LocalNic(index.into()));
        let (place, usable) = (local.into(), PortWish::Usable);
        let nic = Nic::open(place, &device, 1, &name, config, usable, &Arc::default());
        (id, Arc::new(nic.expect("it is usable")))
    };
    (0..count).map(open).collect()
}

fn registered(nics: &[(NicId, Arc<Nic>)]) -> RegisteredMemory {
    let list = Nics::default();
    for (_, nic) in nics {
        let inbox = Arc::new(Inbox::new(Arc::new(Wake::default())));
        list.push(Arc::clone(nic), inbox).expect("there is a place");
    }
    let memory = HostMemory::allocate(MEMORY).expect("memory");
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let registered = Registrations::default().register(&list, &memory, access, u64::MAX);
    registered.expect("registered")
}

fn prepared(nic: &Nic, config: &RdmaConfig) -> Prepared {
    let opening = nic.opening().expect("open");
    pairs::prepare(nic, &opening, config, &Advice::default(), 7).expect("made")
}

fn raise(nic: &Nic, own: &Prepared, far: &Prepared, config: &RdmaConfig) {
    let peer = PeerEnds {
        gid: far.local.gid.expect("it has one"),
        lid: 0,
        qp_nums: far.local.qp_nums.clone(),
        psn: Some(far.local.psn),
        path_mtu: far.local.path_mtu,
        rd_atomic: Some(far.local.rd_atomic),
        instance: None,
        ready_ack: true,
    };
    let opening = nic.opening().expect("open");
    let control = opening.context().control();
    let ends = (&own.local, own.rows.as_slice());
    let raised = pairs::raise(&own.pairs, nic, control, config, ends, &peer);
    raised.outcome.expect("connected");
}

impl Rig {
    fn new(seed: u64, config: RdmaConfig) -> Self {
        let fabric = Fabric::new(FabricOptions {
            verb_time: VerbTime::Turns,
            ..FabricOptions::card(seed)
        });
        let (own, far) = (open(&fabric, 0, 1, &config), open(&fabric, 1, 2, &config));
        let (own_memory, far_memory) = (registered(&own), registered(&far));
        let (id, nic) = own.into_iter().next().expect("one");
        let spec = PeerSpec {
            id: PeerId(1),
            segment: "host1".to_owned(),
            server: "host1".to_owned(),
            instance: None,
            nics: far
                .iter()
                .map(|(_, nic)| PeerNic {
                    index: nic.index().0,
                    path: format!("host1@{}", nic.name()),
                    gid: nic.facts().expect("usable").gid.gid,
                    lid: 0,
                })
                .collect(),
        };
        let peer = Peer::new(spec, &[nic.name().to_owned()]);
        let (reporter, reports) = mpsc::channel(1_024);
        let inbox = Arc::new(Inbox::new(Arc::new(Wake::default())));
        let (now, own_inbox) = (Time::ZERO, Arc::clone(&inbox));
        let driver = Driver::new(Arc::clone(&nic), own_inbox, reporter, &config, now);
        let mut rig = Self {
            fabric,
            own: id,
            now,
            driver,
            config,
            nic,
            inbox,
            reports,
            peer,
            gates: Vec::new(),
            own_memory,
            far_memory,
            _far: Vec::new(),
        };
        for (_, nic) in far {
            rig.attach(nic);
        }
        rig.step();
        rig
    }

    /// Connects to a NIC of the peer, and proves the rail.
    fn attach(&mut self, far_nic: Arc<Nic>) {
        self.connect(far_nic, self.gates.len());
    }

    /// The same for the rail at a place.
    fn connect(&mut self, far_nic: Arc<Nic>, rail: usize) {
        let (own, far) = (
            prepared(&self.nic, &self.config),
            prepared(&far_nic, &self.config),
        );
        raise(&self.nic, &own, &far, &self.config);
        raise(&far_nic, &far, &own, &self.config);
        let rail = self.rail(rail);
        rail.set_state(RailState::Up);
        let gate = Arc::new(AtomicBool::new(true));
        let attach = Order::Attach {
            endpoint: self.gates.len() as u64 + 1,
            rail,
            pairs: Arc::new(Pairs(own.pairs)),
            began: Moment::now(),
            gate: Arc::clone(&gate),
        };
        self.inbox.order(attach).expect("there is room");
        self.gates.push(gate);
        self._far.push((far_nic, far));
    }

    fn rail(&self, at: usize) -> Arc<Rail> {
        Arc::clone(&self.peer.rails()[at])
    }

    /// Queues a WRITE of so many slices for a rail.
    fn write(&self, rail: usize, slices: u64) -> Arc<Transfer> {
        let length = slices * u64::from(self.config.slicing.slice_bytes);
        let local = Span::new(
            self.own_memory.memory().addr(),
            length,
            self.own_memory.pieces(),
        );
        let remote = self.far_memory.keys().into_iter();
        let remote = remote.map(|chunk| Piece::new(chunk.addr, chunk.length, chunk.rkeys));
        let remote = Span::new(self.far_memory.memory().addr(), length, remote);
        let spec = TransferSpec {
            peer: Arc::clone(&self.peer),
            opcode: RdmaOpcode::Write,
            local: local.expect("registered"),
            remote: remote.expect("registered"),
            length,
            slicing: self.config.slicing,
            cut_off: self.now + Duration::from_secs(600),
            limit: Duration::from_secs(600),
        };
        let transfer = Transfer::new(spec, Arc::new(Finish::default()));
        let work = Work::queue(&transfer, &self.rail(rail), length).expect("not queued yet");
        self.inbox.submit(work).expect("there is room");
        transfer
    }

    /// Lets the driver do what it can do now.
    fn step(&mut self) {
        while self.driver.step(self.now) == Activity::Busy {}
    }

    /// Time passes without the driver.
    fn sleep(&mut self, span: Duration) {
        self.now += span;
        self.fabric.advance_to(self.now.as_duration());
    }

    /// Time passes, and the driver runs all the while.
    fn run(&mut self, span: Duration) {
        let until = self.now + span;
        while self.now < until {
            self.sleep(TICK);
            self.step();
        }
    }

    /// Endpoints that were said to be broken since this was last asked.
    fn broken(&mut self) -> Vec<(EndpointKey, CloseCause)> {
        let mut broken = Vec::new();
        while let Ok(report) = self.reports.try_recv() {
            if let Report::Broken { endpoint, cause } = report {
                broken.push((endpoint, cause));
            }
        }
        broken
    }

    /// Runs until an endpoint stalls; how long that took from `since` on, and which it was.
    fn stalls_after(&mut self, since: Time) -> (Duration, EndpointKey) {
        for _ in 0..10_000 {
            self.run(TICK);
            if let Some((endpoint, cause)) = self.broken().pop() {
                assert!(matches!(cause, CloseCause::Stalled(_)), "{cause:?}");
                return (self.now.saturating_since(since), endpoint);
            }
        }
        panic!("nothing stalls");
    }

    /// Counts the work that begins on the driver's NIC from now on.
    fn count_work(&self) -> (Arc<AtomicUsize>, FaultGuard) {
        let (count, own) = (Arc::new(AtomicUsize::new(0)), self.own);
        let counted = Arc::clone(&count);
        let guard = self.fabric.on_work(move |work| {
            counted.fetch_add(usize::from(work.nic == own), Ordering::Relaxed);
            WorkVerdict::Pass
        });
        (count, guard)
    }

    /// No work that begins from now on completes.
    fn lose_completions(&self) -> FaultGuard {
        let own = self.own;
        self.fabric.on_work(move |work| {
            if work.nic == own {
                WorkVerdict::LoseCompletion
            } else {
                WorkVerdict::Pass
            }
        })
    }
}

/// Progress is looked at every 10 ms.
#[track_caller]
fn assert_about(found: Duration, expected: Duration) {
    let most = expected + ms(12);
    assert!(
        found > expected && found <= most,
        "{found:?}, expected {expected:?}"
    );
}

#[test]
fn what_a_driver_has_when_it_ends_is_closed() {
    let mut rig = Rig::new(1, config());
    let transfers = [rig.write(0, 4), rig.write(0, 4)];
    rig.driver.step(rig.now);
    assert!(rig.driver.in_flight() > 0);
    rig.driver.shut_down();
    for transfer in transfers {
        assert!(matches!(transfer.error(), Some(TransferError::Closed)));
        assert!(transfer.is_finished());
    }
}

#[test]
fn what_is_queued_when_the_gate_closes_is_not_posted_until_it_opens() {
    let mut rig = Rig::new(1, config());
    let transfer = rig.write(0, 4);
    // It has left the inbox and is about to be posted.
    assert!(rig.driver.take_work());
    rig.nic.set_gate(false);
    let probe = Probe {
        rail: rig.rail(1),
        probe: 1,
        remote: RemoteAddress { addr: 0, rkey: 0 },
        length: 0,
    };
    rig.inbox.order(Order::Probe(probe)).expect("there is room");
    rig.run(ms(100));
    assert_eq!(rig.driver.in_flight(), 0, "posted through a closed gate");
    assert_eq!(transfer.transferred_bytes(), 0);
    assert!(transfer.has_work(), "claimed behind a closed gate");
    rig.nic.set_gate(true);
    rig.run(ms(100));
    assert!(transfer.is_finished());
    assert!(transfer.error().is_none(), "{:?}", transfer.error());
}

#[test]
fn a_gate_that_closes_between_two_posts_lets_nothing_of_the_second_pass() {
    let mut rig = Rig::new(
        2,
        RdmaConfig {
            send_wr_max: 2,
            ..config()
        },
    );
    let transfer = rig.write(0, 12);
    rig.driver.step(rig.now);
    assert_eq!(rig.driver.in_flight(), 2, "as many as there is room for");
    rig.nic.set_gate(false);
    rig.run(ms(100));
    assert_eq!(transfer.transferred_bytes(), 2 * u64::from(SLICE));
    assert_eq!(
        rig.driver.in_flight(),
        0,
        "there was room, and the gate was closed"
    );
    rig.nic.set_gate(true);
    rig.run(ms(100));
    assert!(transfer.is_finished());
}

#[test]
fn what_is_queued_when_an_endpoints_gate_closes_is_not_posted_on_it() {
    let mut rig = Rig::new(3, config());
    let (first, second) = (rig.write(0, 4), rig.write(1, 4));
    assert!(rig.driver.take_work());
    rig.gates[0].store(false, Ordering::Release);
    rig.run(ms(100));
    assert!(first.has_work() && first.transferred_bytes() == 0);
    assert!(second.is_finished(), "the other endpoint is open");
}

#[test]
fn an_endpoint_stalls_after_the_setting_and_four_times_the_time_of_the_bytes_in_flight() {
    let mut rig = Rig::new(4, config());
    let _lost = rig.lose_completions();
    rig.write(0, 16);
    rig.step();
    // No rate is measured: 4 MB a second are assumed.
    let grant = Duration::from_secs_f64(4.0 * 16.0 * f64::from(SLICE) / RATE_ASSUMED);
    let (took, endpoint) = rig.stalls_after(Time::ZERO);
    assert_about(took, ms(500) + grant);
    assert_eq!(endpoint, 1);
}

#[test]
fn the_time_of_the_bytes_goes_by_the_measured_rate() {
    let mut rig = Rig::new(5, config());
    let port = rig.own.port(1);
    let slow = LinkOptions {
        bits_per_s: 16_000_000,
        ..LinkOptions::default()
    };
    let _slow = rig.fabric.degrade(port, slow);
    let transfer = rig.write(0, 256);
    rig.run(ms(400));
    assert!(!transfer.is_finished(), "there was always work in flight");
    assert_eq!(rig.broken(), []);
    let rate = rig.driver.pace.rate.expect("measured");
    assert!(
        (1.6e6..=2e6).contains(&rate),
        "2 MB a second on the wire: {rate}"
    );
    rig.run(ms(400));
    assert!(transfer.is_finished());
    let rate = rig.driver.pace.rate.expect("measured");
    let _lost = rig.lose_completions();
    let posted = rig.now;
    rig.write(0, 16);
    rig.step();
    let grant = Duration::from_secs_f64(4.0 * 16.0 * f64::from(SLICE) / rate);
    assert_about(rig.stalls_after(posted).0, ms(500) + grant);
}

#[test]
fn every_completion_restarts_the_wait() {
    let mut rig = Rig::new(6, config());
    let own = rig.own;
    let mut begun = 0;
    // They begin together, and come back one by one; the last never does.
    let _slow = rig.fabric.on_work(move |work| {
        if work.nic != own {
            return WorkVerdict::Pass;
        }
        begun += 1;
        if begun > 5 {
            WorkVerdict::LoseCompletion
        } else {
            WorkVerdict::CompleteAfter(begun * ms(400))
        }
    });
    let transfer = rig.write(0, 6);
    let mut last = (0, rig.now);
    while last.0 < 5 * u64::from(SLICE) {
        rig.run(TICK);
        assert_eq!(rig.broken(), [], "after {:?}", rig.now);
        if transfer.transferred_bytes() > last.0 {
            last = (transfer.transferred_bytes(), rig.now);
        }
    }
    let took = last.1.saturating_since(Time::ZERO);
    assert!(took > ms(1_000), "much longer than any wait: {took:?}");
    let grant = Duration::from_secs_f64(
        4.0 * f64::from(SLICE) / rig.driver.pace.rate.unwrap_or(RATE_ASSUMED),
    );
    assert_about(rig.stalls_after(last.1).0, ms(500) + grant);
}

#[test]
fn nobody_is_judged_while_completions_wait_to_be_taken() {
    const MANY: u64 = (POLL_MAX * POLLS_PER_STEP_MAX + 100) as u64;
    let mut rig = Rig::new(
        7,
        RdmaConfig {
            send_wr_max: 1_024,
            slicing: Slicing {
                slice_bytes: 64,
                fragment_bytes: 0,
            },
            ..config()
        },
    );
    let own = rig.own;
    let mut first = None;
    // All of the first endpoint comes back at once, and what is on the second just behind it.
    let _late = rig.fabric.on_work(move |work| {
        if work.nic != own {
            return WorkVerdict::Pass;
        }
        let is_first = *first.get_or_insert(work.qp_num) == work.qp_num;
        let late = if is_first { 560 } else { 570 };
        WorkVerdict::CompleteAfter(ms(late).saturating_sub(work.now))
    });
    let many = rig.write(0, MANY);
    rig.step();
    let one = rig.write(1, 1);
    rig.step();
    assert_eq!(rig.driver.in_flight() as u64, MANY + 1);
    rig.run(ms(490));
    assert_eq!(many.transferred_bytes(), 0);
    // The thread is late, though not so late that its time would not count.
    rig.sleep(ms(190));
    rig.driver.step(rig.now);
    assert!(
        !many.is_finished() && !one.is_finished(),
        "too much for one step"
    );
    let allowance =
        ms(500) + Duration::from_secs_f64(4.0 * 64.0 * (MANY + 1) as f64 / RATE_ASSUMED);
    assert!(rig.now > Time::ZERO + allowance, "silent for too long");
    rig.step();
    assert!(many.is_finished() && one.is_finished());
    assert_eq!(rig.broken(), [], "its completion had come");
}

#[test]
fn a_thread_that_did_not_run_shifts_all_waits_by_the_gap() {
    const GAP: Duration = ms(1_000);
    let mut rig = Rig::new(8, config());
    let _lost = rig.lose_completions();
    rig.write(0, 1);
    rig.write(1, 1);
    rig.step();
    rig.run(ms(400));
    rig.sleep(GAP);
    rig.step();
    assert_eq!(rig.broken(), [], "it is not the peer's fault");
    let grant = Duration::from_secs_f64(4.0 * 2.0 * f64::from(SLICE) / RATE_ASSUMED);
    let (took, _) = rig.stalls_after(Time::ZERO);
    assert_about(took, GAP + ms(500) + grant);
    assert_eq!(
        rig.driver
            .links
            .iter()
            .filter(|(_, link)| link.pairs.is_some())
            .count(),
        0
    );
}

#[test]
fn a_thread_that_is_a_little_late_shifts_nothing() {
    let mut rig = Rig::new(9, config());
    let _lost = rig.lose_completions();
    rig.write(0, 1);
    rig.step();
    let mut steps = 0;
    while rig.broken().is_empty() {
        rig.sleep(ms(190));
        rig.step();
        steps += 1;
        assert!(steps < 10, "late steps are no excuse");
    }
    assert_eq!(steps, 3, "the first one beyond 504 ms");
}

#[test]
fn what_has_failed_does_not_count_as_given_to_other_rails() {
    let mut rig = Rig::new(10, config());
    let _lost = rig.lose_completions();
    let (failed, goes_on) = (rig.write(0, 3), rig.write(0, 2));
    rig.step();
    assert_eq!(rig.driver.in_flight(), 5);
    assert!(failed.fail(TransferError::Closed));
    for order in [Order::AwaitDrain(1), Order::GiveUp(1)] {
        rig.inbox.order(order).expect("there is room");
    }
    rig.step();
    let mut drained = None;
    while let Ok(report) = rig.reports.try_recv() {
        if let Report::Drained { leftover, .. } = report {
            drained = Some(leftover);
        }
    }
    let leftover = drained.expect("all was given up");
    assert_eq!(leftover.rerouted_bytes, 2 * u64::from(SLICE));
    assert_eq!(leftover.held.len(), 5, "what was posted may arrive still");
    assert!(goes_on.has_work());
}

#[test]
fn x20_a_post_that_is_taken_in_part_is_not_posted_again_in_that_part() {
    let mut rig = Rig::new(10, config());
    let (begun, _counting) = rig.count_work();
    let refusal = rig
        .fabric
        .refuse_posts(rig.own, 3, Errno::INVAL.raw_os_error());
    let transfer = rig.write(0, 8);
    rig.driver.step(rig.now);
    assert_eq!(rig.driver.in_flight(), 3, "what the provider has taken");
    refusal.undo();
    rig.run(ms(10));
    let taken = 3 * u64::from(SLICE);
    assert_eq!(transfer.transferred_bytes(), taken);
    assert_eq!(transfer.unclaimed_bytes(), 5 * u64::from(SLICE));
    assert_eq!(rig.driver.in_flight(), 0);
    let reports: Vec<_> = std::iter::from_fn(|| rig.reports.try_recv().ok()).collect();
    assert!(
        matches!(
            reports[..],
            [
                Report::Stranded(_),
                Report::Broken { endpoint: 1, .. },
                Report::Drained { endpoint: 1, .. }
            ]
        ),
        "{reports:?}"
    );
    // Another rail takes the rest.
    let work = Work::queue(&transfer, &rig.rail(1), 1).expect("not queued");
    rig.inbox.submit(work).expect("there is room");
    rig.run(ms(10));
    assert!(transfer.is_finished() && transfer.error().is_none());
    assert_eq!(transfer.first_amiss(), None, "each byte ended once");
    assert_eq!(
        begun.load(Ordering::Relaxed),
        8,
        "each slice was posted once"
    );
    assert_eq!(transfer.retried_slices(), 0, "none was abandoned");
}

#[test]
fn x20_a_queue_that_is_full_sooner_than_was_counted_gets_the_rest_later() {
    let mut rig = Rig::new(11, config());
    let (begun, _counting) = rig.count_work();
    let refusal = rig
        .fabric
        .refuse_posts(rig.own, 3, Errno::NOMEM.raw_os_error());
    let transfer = rig.write(0, 8);
    rig.driver.step(rig.now);
    assert_eq!(rig.driver.in_flight(), 3);
    refusal.undo();
    rig.run(ms(10));
    // Whoever hears of it offers the rest again; the endpoint is whole.
    let report = rig.reports.try_recv();
    assert!(matches!(report, Ok(Report::Stranded(_))), "{report:?}");
    let work = Work::queue(&transfer, &rig.rail(0), 1).expect("not queued");
    rig.inbox.submit(work).expect("there is room");
    rig.run(ms(10));
    assert_eq!(rig.broken(), []);
    assert!(transfer.is_finished() && transfer.error().is_none());
    assert_eq!(transfer.first_amiss(), None);
    assert_eq!(begun.load(Ordering::Relaxed), 8);
}

#[test]
fn x20_a_queue_that_says_that_it_is_full_is_left_alone_until_something_comes_back() {
    let mut rig = Rig::new(13, config());
    let own = rig.own;
    let late = rig.fabric.on_work(move |work| {
        if work.nic == own {
            WorkVerdict::CompleteAfter(ms(50))
        } else {
            WorkVerdict::Pass
        }
    });
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    let refusal = rig.fabric.on_post(move |work| {
        let before = counted.fetch_add(usize::from(work.nic == own), Ordering::Relaxed);
        if work.nic == own && before >= 3 {
            PostVerdict::Refuse(Errno::NOMEM.raw_os_error())
        } else {
            PostVerdict::Pass
        }
    });
    let first = rig.write(0, 8);
    let second = rig.write(0, 8);
    rig.run(ms(30));
    assert_eq!(rig.driver.in_flight(), 3);
    assert_eq!(tries.load(Ordering::Relaxed), 4, "it is not asked again");
    refusal.undo();
    rig.run(ms(200));
    let work = Work::queue(&first, &rig.rail(0), 1).expect("it was told of");
    rig.inbox.submit(work).expect("there is room");
    rig.run(ms(200));
    assert!(first.is_finished() && second.is_finished());
    assert_eq!(rig.broken(), []);
    drop(late);
}

#[test]
fn x20_a_queue_that_has_no_room_with_nothing_in_it_is_broken() {
    let mut rig = Rig::new(14, config());
    let refusal = rig
        .fabric
        .refuse_posts(rig.own, 0, Errno::NOMEM.raw_os_error());
    let transfer = rig.write(0, 2);
    rig.run(ms(10));
    assert!(matches!(rig.broken()[..], [(1, CloseCause::Broken(_))]));
    assert!(transfer.has_work(), "another rail may take it");
    refusal.undo();
}

#[test]
fn x20_work_of_which_nobody_says_whether_it_was_taken_is_in_flight() {
    let mut rig = Rig::new(12, config());
    let (begun, _counting) = rig.count_work();
    let own = rig.own;
    let mut seen = 0;
    let doubt = rig.fabric.on_post(move |work| {
        seen += u32::from(work.nic == own);
        if seen == 3 {
            PostVerdict::Doubt(Errno::IO.raw_os_error())
        } else {
            PostVerdict::Pass
        }
    });
    let transfer = rig.write(0, 8);
    rig.driver.step(rig.now);
    assert_eq!(rig.driver.in_flight(), 8, "all may have been taken");
    doubt.undo();
    rig.run(ms(10));
    let broken = rig.broken();
    assert!(
        matches!(broken[..], [(1, CloseCause::Broken(_))]),
        "{broken:?}"
    );
    assert!(transfer.is_finished(), "all were taken, and came back");
    assert_eq!(transfer.first_amiss(), None);
    assert_eq!(begun.load(Ordering::Relaxed), 8);
}
