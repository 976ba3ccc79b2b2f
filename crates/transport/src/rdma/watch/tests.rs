//! What the thread does about the first that it learns of a NIC.

use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;

use rerail_verbs::sim::NicOptions;
use rerail_verbs::{AsyncEventKind, VerbsError};

use super::super::rig::{KIB, Rig, peer_of, registered, rig, stuck, wait_until};
use super::*;
use crate::event::Subscriber;

/// Counts how often it is to be published that a port is down.
#[derive(Default)]
struct Published(AtomicUsize);

impl NicListener for Published {
    fn port(&self, _local: LocalNic, facts: observer::PortFacts, _gids: Vec<Gid>) {
        if !facts.up {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn rekeyed(&self, _local: LocalNic) {}
}

#[test]
fn a_port_that_fails_before_it_is_first_read_is_shut() {
    let rig = rig(1, 1);
    let transport = rig.transport(0, "a1");
    let nic = Arc::clone(&transport.nics()[0]);
    assert!(nic.is_gate_open(), "it was usable when it was opened");
    rig.fabric.port_down(rig.port(0, 0));
    let listener = Arc::new(Published::default());
    let told = Arc::clone(&listener);
    transport
        .observe(listener, Events::default())
        .expect("a thread");
    wait_until("it is told", || told.0.load(Ordering::SeqCst) > 0);
    assert!(
        !nic.is_gate_open(),
        "nothing may be posted when peers are told"
    );
}

#[test]
fn a_device_that_dies_before_it_is_first_read_is_shut_and_let_go_of() {
    let rig = rig(2, 1);
    let transport = rig.transport(0, "a1");
    let nic = Arc::clone(&transport.nics()[0]);
    rig.fabric.kill_device(rig.hosts[0].1[0]);
    transport
        .observe(Arc::new(Published::default()), Events::default())
        .expect("a thread");
    wait_until("it is let go of", || nic.opening().is_none());
    assert!(!nic.is_gate_open());
}

/// Looks at a gate when it is told that it was closed.
struct AtTheGate {
    nic: Arc<Nic>,
    found_open: OnceLock<bool>,
}

impl Subscriber for AtTheGate {
    fn event(&self, _at: Time, event: &Event) {
        if let Event::GateClosed { .. } = event {
            // Of several times the first counts.
            let _ = self.found_open.set(self.nic.is_gate_open());
        }
    }
}

/// Waits for the first that is published.
#[derive(Default)]
struct Read(AtomicUsize);

impl NicListener for Read {
    fn port(&self, _local: LocalNic, _facts: observer::PortFacts, _gids: Vec<Gid>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn rekeyed(&self, _local: LocalNic) {}
}

#[test]
fn a_gate_is_shut_before_anybody_is_told_and_before_the_port_is_read() {
    let rig = rig(3, 1);
    let transport = rig.transport(0, "a1");
    let nic = Arc::clone(&transport.nics()[0]);
    let gate = Arc::new(AtTheGate {
        nic,
        found_open: OnceLock::new(),
    });
    let (listener, events) = (Arc::new(Read::default()), Events::new(gate.clone()));
    let read = Arc::clone(&listener);
    transport.observe(listener, events).expect("a thread");
    wait_until("it is read", || read.0.load(Ordering::SeqCst) > 0);
    // The port itself does not bear it out, so that reading it would close nothing.
    let device = rig.hosts[0].1[0];
    rig.fabric
        .raise_event(device, AsyncEventKind::PortErr, Some(1));
    wait_until("it is told", || gate.found_open.get().is_some());
    assert_eq!(gate.found_open.get(), Some(&false));
    wait_until("it is taken back", || gate.nic.is_gate_open());
}

/// Threads of this process that are called so.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let names = tasks.flatten().filter_map(|task| {
        // It may have ended meanwhile.
        std::fs::read_to_string(task.path().join("comm")).ok()
    });
    names.filter(|found| found.trim() == name).count()
}

#[test]
fn a_device_whose_reading_hangs_is_not_opened_again_before_that_has_ended() {
    const HANG: Duration = Duration::from_secs(4);
    let rig = rig(3, 1);
    // A name that no other test of the process gives its threads.
    let address = "10.0.0.9".parse().expect("an address");
    let options = rerail_verbs::sim::NicOptions::ethernet("hangs0", address);
    let device = rig.fabric.add_nic(rig.hosts[0].0, &options);
    let transport = rig.transport(0, "a1");
    let nics = transport.nics();
    let nic = nics.iter().find(|nic| nic.device() == "hangs0");
    let nic = Arc::clone(nic.expect("taken in"));
    let begin = std::time::Instant::now();
    rig.fabric.hang_control(device, HANG);
    let listener = Arc::new(Published::default());
    let started = transport.observe(listener, Events::default());
    started.expect("a thread");
    while begin.elapsed() < HANG {
        let hanging = threads("ctl-hangs0");
        if begin.elapsed() < HANG {
            // Each try to open it would be one more that hangs.
            assert!(hanging <= 1, "{hanging} threads");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    wait_until("it is open again", || {
        nic.opening().is_some_and(|opening| opening.number() > 0)
    });
}

#[test]
fn the_longest_message_of_a_port_is_taken_from_its_latest_reading() {
    let rig = rig(8, 1);
    let transport = rig.transport(0, "a1");
    let nic = Arc::clone(&transport.nics()[0]);
    let observed = transport.observe(Arc::new(Published::default()), Events::default());
    observed.expect("a thread");
    for bytes in [10_000, 1 << 20] {
        rig.fabric.set_max_msg_bytes(rig.port(0, 0), bytes);
        transport.recheck(None);
        wait_until("it is read", || nic.max_msg_bytes() == bytes);
    }
    // Other firmware, after which the device is opened again.
    rig.fabric.set_max_msg_bytes(rig.port(0, 0), 20_000);
    rig.fabric.reset_device(rig.hosts[0].1[0]);
    wait_until("it is open again", || {
        nic.opening().is_some_and(|opening| opening.number() > 0)
    });
    wait_until("it is read", || nic.max_msg_bytes() == 20_000);
}

/// Counts the NICs that are left out.
#[derive(Default)]
struct LeftOut(AtomicUsize);

impl Subscriber for LeftOut {
    fn event(&self, _at: Time, event: &Event) {
        if let Event::NicLeftOut { cause, .. } = event {
            assert!(cause.contains("memory"), "{cause}");
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// A device for the first host with `last` in its address and room for so many regions.
fn device(rig: &Rig, name: &str, last: u8, max_mr: u32) -> rerail_verbs::sim::NicId {
    let address = std::net::IpAddr::from([10, 0, 0, last]);
    let mut options = NicOptions::ethernet(name, address);
    options.limits.max_mr = max_mr;
    rig.fabric.add_nic(rig.hosts[0].0, &options)
}

#[test]
fn a_new_device_that_hangs_keeps_one_thread_and_holds_up_no_other() {
    const HANG: Duration = Duration::from_secs(3_600);
    let rig = rig(9, 1);
    let transport = rig.transport(0, "a1");
    let hangs = device(&rig, "hangs1", 9, 1_000);
    rig.fabric.hang_control(hangs, HANG);
    device(&rig, "works1", 10, 1_000);
    let observed = transport.observe(Arc::new(Published::default()), Events::default());
    observed.expect("a thread");
    let nics = transport.nics();
    let has = |name: &str| nics.iter().any(|nic| nic.device() == name);
    wait_until("the other is taken in", || has("works1"));
    device(&rig, "later1", 11, 1_000);
    wait_until("one that comes later, too", || has("later1"));
    assert!(!has("hangs1"));
    assert_eq!(threads("ctl-hangs1"), 1);
    let numbers: Vec<_> = nics.iter().map(|nic| nic.index().0).collect();
    assert_eq!(numbers, [0, 1, 2]);
    drop(transport);
    // Without the thread that waits for the device.
    rig.runtime.shutdown_background();
}

#[test]
fn a_new_device_without_room_for_all_memory_is_taken_in_once_there_is_less() {
    let rig = rig(10, 1);
    let transport = rig.transport(0, "a1");
    let mut memory: Vec<_> = (0..5).map(|_| registered(&transport, KIB)).collect();
    // One of its regions is the engine's own.
    device(&rig, "small1", 9, 4);
    let left_out = Arc::new(LeftOut::default());
    let events = Events::new(Arc::clone(&left_out) as Arc<dyn Subscriber>);
    let observed = transport.observe(Arc::new(Published::default()), events);
    observed.expect("a thread");
    wait_until("it is left out", || left_out.0.load(Ordering::SeqCst) > 0);
    memory.pop();
    let nics = transport.nics();
    assert_eq!(nics.len(), 1, "it has room for three");
    memory.pop();
    wait_until("it is taken in", || nics.len() == 2);
    for memory in &memory {
        let keys = &memory.keys()[0];
        assert_eq!((keys.rkeys.len(), keys.lkeys.len()), (2, 2));
        assert!(keys.rkeys.iter().all(|key| *key != 0), "{keys:?}");
        let piece = memory.pieces().next().expect("one");
        // Right after the NIC has its number.
        wait_until("its keys are used", || piece.keys.get(1).is_some());
        assert_eq!(piece.keys.get(1), Some(keys.lkeys[1]));
    }
    assert_eq!(left_out.0.load(Ordering::SeqCst), 1, "told once");
}

#[test]
fn a_device_that_comes_back_without_room_for_all_memory_is_opened_once_there_is_less() {
    let rig = rig(11, 1);
    // Room for one memory beside the engine's own.
    let small = device(&rig, "small1", 9, 2);
    let transport = rig.transport(0, "a1");
    let nics = transport.nics();
    let nic = nics.iter().find(|nic| nic.device() == "small1");
    let nic = Arc::clone(nic.expect("taken in"));
    let _first = registered(&transport, KIB);
    let left_out = Arc::new(LeftOut::default());
    let events = Events::new(Arc::clone(&left_out) as Arc<dyn Subscriber>);
    let observed = transport.observe(Arc::new(Published::default()), events);
    observed.expect("a thread");
    rig.fabric.kill_device(small);
    wait_until("it is given up", || nic.opening().is_none());
    // With the other device only.
    let second = registered(&transport, KIB);
    rig.fabric.reset_device(small);
    wait_until("it is left out", || left_out.0.load(Ordering::SeqCst) > 0);
    assert!(nic.opening().is_none());
    drop(second);
    wait_until("it is open again", || nic.opening().is_some());
}

/// Has no room in the record from a call on.
struct Room {
    calls: AtomicUsize,
    first_refused: usize,
}

impl NicListener for Room {
    fn port(&self, _local: LocalNic, _facts: observer::PortFacts, _gids: Vec<Gid>) {}

    fn rekeyed(&self, _local: LocalNic) {}

    fn adding(&self, _local: LocalNic, name: &str) -> Result<(), String> {
        self.check_room(name)
    }

    fn check_room(&self, _name: &str) -> Result<(), String> {
        if self.calls.fetch_add(1, Ordering::SeqCst) + 1 < self.first_refused {
            return Ok(());
        }
        Err("no memory for it".to_owned())
    }
}

#[test]
fn a_device_is_tried_once_at_a_time_and_only_so_many_are() {
    let rig = rig(20, 1);
    let transport = rig.transport(0, "a1");
    for nth in 0..10 {
        device(&rig, &format!("new{nth}"), 20 + nth, 1_000);
    }
    let parts = |wanted: &[&str]| {
        let mut parts = transport.parts(Arc::new(Published::default()), Events::default());
        parts.wanted = wanted.iter().map(|name| (*name).to_owned()).collect();
        parts
    };
    let finder = Arc::new(Finder::new(&parts(&[])));
    let mut attempts = finder.look().attempts;
    assert_eq!((attempts.len(), finder.look().attempts.len()), (8, 0));
    drop(attempts.pop());
    attempts.extend(finder.look().attempts);
    assert_eq!((attempts.len(), finder.look().attempts.len()), (8, 0));
    // Two ports of a device one after the other.
    let finder = Arc::new(Finder::new(&parts(&["new0:1", "new0:2", "new1"])));
    let ports = finder.look().attempts;
    assert_eq!((ports.len(), finder.look().attempts.len()), (2, 0));
    let nics = transport.nics();
    for attempt in attempts {
        attempt.run(|nic| assert!(!nic.is_gate_open(), "its port was not read yet"));
    }
    assert_eq!(nics.len(), 9);
}

#[test]
fn a_device_that_was_left_out_waits_is_told_of_once_and_is_forgotten_when_it_goes() {
    let rig = rig(21, 1);
    let transport = rig.transport(0, "a1");
    let _memory: Vec<_> = (0..5).map(|_| registered(&transport, KIB)).collect();
    let small = device(&rig, "small1", 9, 2);
    let left_out = Arc::new(LeftOut::default());
    let events = Events::new(Arc::clone(&left_out) as Arc<dyn Subscriber>);
    let parts = transport.parts(Arc::new(Published::default()), events);
    let finder = Arc::new(Finder::new(&parts));
    let taken = |_| panic!("it has no room");
    let begin = std::time::Instant::now();
    for attempt in finder.look().attempts {
        attempt.run(taken);
    }
    let again = finder.look().attempts;
    assert!(again.is_empty() || begin.elapsed() >= Duration::from_secs(1));
    drop(again);
    let tried = std::cell::Cell::new(0);
    wait_until("it is tried again", || {
        for attempt in finder.look().attempts {
            attempt.run(taken);
            tried.set(tried.get() + 1);
        }
        tried.get() > 0
    });
    assert_eq!(left_out.0.load(Ordering::SeqCst), 1, "told once");
    // What comes in its place is another one, and needs not wait.
    rig.fabric.unplug(small);
    assert!(finder.look().attempts.is_empty());
    device(&rig, "small1", 9, 1_000);
    for attempt in finder.look().attempts {
        attempt.run(drop);
    }
    assert_eq!(transport.nics().len(), 2);
}

#[test]
fn room_in_the_record_is_asked_for_before_a_device_is_opened_and_before_it_is_entered() {
    for (first_refused, nics) in [(1, 1), (2, 1), (3, 2)] {
        let rig = rig(22, 1);
        let transport = rig.transport(0, "a1");
        device(&rig, "new1", 9, 1_000);
        let room = Arc::new(Room {
            calls: AtomicUsize::new(0),
            first_refused,
        });
        let listener = Arc::clone(&room) as Arc<dyn NicListener>;
        let finder = Arc::new(Finder::new(&transport.parts(listener, Events::default())));
        for attempt in finder.look().attempts {
            attempt.run(drop);
        }
        assert_eq!(transport.nics().len(), nics, "refused at {first_refused}");
        let calls = room.calls.load(Ordering::SeqCst);
        assert_eq!(calls, first_refused.min(2), "asked");
    }
}

/// Takes as long as it is told to when a NIC is added, as reading sysfs may of one that hangs.
#[derive(Default)]
struct Slow {
    is_asked: AtomicBool,
    may_go_on: AtomicBool,
}

impl NicListener for Slow {
    fn port(&self, _: LocalNic, _: observer::PortFacts, _: Vec<Gid>) {}

    fn rekeyed(&self, _: LocalNic) {}

    fn added(&self, _: &Nics) {
        self.is_asked.store(true, Ordering::SeqCst);
        while !self.may_go_on.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// However the test ends.
struct GoOn(Arc<Slow>);

impl Drop for GoOn {
    fn drop(&mut self) {
        self.0.may_go_on.store(true, Ordering::SeqCst);
    }
}

#[test]
fn who_is_told_slowly_of_a_new_nic_holds_up_no_registration_while_another_comes() {
    let rig = rig(12, 1);
    let transport = Arc::new(rig.transport(0, "a1"));
    let slow = Arc::new(Slow::default());
    let _go_on = GoOn(Arc::clone(&slow));
    device(&rig, "first1", 9, 1_000);
    device(&rig, "second1", 10, 1_000);
    let listener = Arc::clone(&slow) as Arc<dyn NicListener>;
    let observed = transport.observe(listener, Events::default());
    observed.expect("a thread");
    wait_until("a NIC is told of", || slow.is_asked.load(Ordering::SeqCst));
    let (own, done) = (Arc::clone(&transport), Arc::new(AtomicBool::new(false)));
    let is_done = Arc::clone(&done);
    std::thread::spawn(move || {
        // The other device comes to its turn meanwhile.
        for _ in 0..300 {
            drop(registered(&own, KIB));
            std::thread::sleep(Duration::from_millis(10));
        }
        is_done.store(true, Ordering::SeqCst);
    });
    wait_until("memory is registered", || done.load(Ordering::SeqCst));
}

/// A watcher whose rounds the test makes.
fn watcher(transport: &super::super::RdmaTransport) -> Watcher {
    let parts = transport.parts(Arc::new(Published::default()), Events::default());
    let shared = Shared::new().expect("a descriptor");
    Watcher::new(parts, Arc::new(shared))
}

/// Has a watcher take the news that its look is over.
fn end_look(watcher: &mut Watcher, now: Time) {
    wait_until("it has looked", || !watcher.shared.mail.is_empty());
    let mail = watcher.shared.mail.pop().expect("news");
    assert!(matches!(mail, Mail::Looked { .. }));
    watcher.read_mail(now, mail);
}

#[test]
fn it_is_looked_again_soon_after_news_that_came_while_nobody_looked() {
    let rig = rig(13, 1);
    let transport = rig.transport(0, "a1");
    let mut watcher = watcher(&transport);
    let mut now = watcher.parts.clock.now();
    watcher.look(now, true);
    end_look(&mut watcher, now);
    assert_eq!(watcher.look_at, now + LOOK_AGAIN);
    now = watcher.look_at;
    watcher.look(now, false);
    end_look(&mut watcher, now);
    assert_eq!(watcher.look_at, now + LOOK_EVERY, "once");
}

#[test]
fn a_look_that_panics_is_over() {
    let shared = Arc::new(Shared::new().expect("a descriptor"));
    let own = Arc::clone(&shared);
    let look = std::thread::spawn(move || {
        let _look = LookUnderWay::new(&own);
        panic!("on purpose");
    });
    assert!(look.join().is_err());
    assert!(matches!(shared.mail.pop(), Some(Mail::Looked { .. })));
}

#[test]
fn a_nic_that_waits_for_room_does_not_wait_once_its_device_may_be_another() {
    let rig = rig(14, 1);
    let transport = rig.transport(0, "a1");
    let nic = &transport.nics()[0];
    let no_room = || TransportError::NoRoomForMemory {
        nic: nic.name().to_owned(),
        bytes: 1,
        regions: 1,
        error: VerbsError::Verb {
            verb: "ibv_reg_mr_iova2",
            device: "sim0".into(),
            port: None,
            errno: 12,
        },
    };
    for is_seen in [false, true] {
        let mut watcher = watcher(&transport);
        let now = watcher.parts.clock.now();
        watcher.reopened(now, 0, 0, Registered::default(), Err(no_room()));
        watcher.reopen_waiting(now, 0);
        assert!(watcher.entries[0].waiting.is_some(), "it is too soon");
        if is_seen {
            rig.fabric.unplug(rig.hosts[0].1[0]);
        }
        watcher.look(now, !is_seen);
        if is_seen {
            watcher.look_at = now;
            watcher.look(now, false);
            end_look(&mut watcher, now);
        }
        watcher.reopen_waiting(now, 0);
        assert!(watcher.entries[0].waiting.is_none(), "it is tried again");
    }
}

#[test]
fn a_new_device_is_not_opened_while_its_last_try_hangs_or_too_many_others_do() {
    let rig = rig(15, 1);
    let transport = rig.transport(0, "a1");
    device(&rig, "new2", 9, 1_000);
    let (control, free) = stuck(&transport.nics()[0]);
    let parts = transport.parts(Arc::new(Published::default()), Events::default());
    let tries = Arc::clone(&parts.tries);
    let take_in = || {
        // Another one each time, so that nothing waits since it failed.
        let attempts = Arc::new(Finder::new(&parts)).look().attempts;
        assert_eq!(attempts.len(), 1);
        attempts.into_iter().for_each(|attempt| attempt.run(drop));
        transport.nics().len()
    };
    let opened = rig.fabric.stats().contexts;
    tries.of("new2", 1).begin(&control);
    wait_until("it hangs", || tries.of("new2", 1).check("new2").is_err());
    assert_eq!(take_in(), 1);
    // That was another device, and many others hang.
    tries.of("new2", 1).device_went();
    for nth in 0..100 {
        tries.of(&format!("other{nth}"), 1).begin(&control);
    }
    assert!(tries.check_strangers("new2").is_err());
    assert_eq!(take_in(), 1);
    assert_eq!(rig.fabric.stats().contexts, opened);
    drop(free);
    wait_until("they answer", || tries.check_strangers("new2").is_ok());
    assert_eq!(take_in(), 2);
}

#[test]
fn a_reading_of_an_earlier_opening_does_not_say_how_long_messages_may_be() {
    let rig = rig(16, 1);
    let transport = rig.transport(0, "a1");
    let nic = Arc::clone(&transport.nics()[0]);
    let mut watcher = watcher(&transport);
    let (now, mut epoch) = (watcher.parts.clock.now(), 0);
    let opening = nic.opening().expect("open");
    let reading = read_port(opening.context(), 1, 0).expect("read");
    let read_as = |watcher: &mut Watcher, epoch, bytes| {
        let mut reading = reading.clone();
        reading.attr.max_msg_bytes = bytes;
        let (port, number) = (1, 0);
        let mail = Mail::Read {
            nic: 0,
            epoch,
            read: ReadId { port, number },
            result: Ok(reading),
        };
        watcher.read_mail(now, mail);
        nic.max_msg_bytes()
    };
    let observer = |watcher: &Watcher| watcher.entries[0].observer.epoch();
    assert_eq!(observer(&watcher), epoch);
    assert_eq!(read_as(&mut watcher, epoch, 10_000), 10_000);
    let verb = "a verb";
    let hung = Input::VerbHung { epoch, verb };
    watcher.entries[0].observer.handle(now, hung);
    epoch = observer(&watcher);
    assert_ne!(epoch, 0);
    assert_eq!(read_as(&mut watcher, 0, 20_000), 10_000);
    assert_eq!(read_as(&mut watcher, epoch, 30_000), 30_000);
}

#[test]
fn a_rail_is_told_when_its_port_has_another_speed() {
    let rig = rig(17, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let listener = Arc::new(Read::default());
    let observed = a.observe(listener.clone(), Events::default());
    observed.expect("a thread");
    wait_until("it is read", || listener.0.load(Ordering::SeqCst) > 0);
    let rail = Arc::clone(&peer.rails()[0]);
    let before = rail.nominal_bytes_per_s();
    // One lane of 2.5 Gbit/s.
    rig.fabric.set_speed(rig.port(0, 0), 1, 1);
    wait_until("the rail is slower", || rail.nominal_bytes_per_s() < before);
}
