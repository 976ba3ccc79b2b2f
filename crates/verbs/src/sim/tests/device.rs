//! Adapters that hang, die and come back; processes that freeze and end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::support::{Connected, Host, MS, connect, init, options, rtr, rts};
use crate::sim::{Fabric, FabricOptions, VerbTime};
use crate::{AccessFlags, AsyncEventKind, HostMemory, VerbsError, WcStatus, WorkRequest};

const EIO: Option<i32> = Some(libc::EIO);

fn errno<T: std::fmt::Debug>(result: Result<T, VerbsError>) -> Option<i32> {
    result.expect_err("refused").errno()
}

#[test]
fn control_verbs_hang_and_posting_does_not() {
    let two = Connected::new(options());
    let begin = two.fabric.now();
    two.fabric.hang_control(two.a.nic, Duration::from_secs(60));
    two.post(&[two.write(1, 8)]);
    assert_eq!(two.a.statuses(1), [WcStatus::Success]);
    assert!(two.fabric.now() - begin < MS);
    two.b.context.port_attr(1).expect("another adapter answers");
    assert!(two.fabric.now() - begin < MS);
    two.a.context.port_attr(1).expect("it answers in the end");
    assert_eq!(two.fabric.now() - begin, Duration::from_secs(60));
}

#[test]
fn charged_verbs_happen_at_once_and_only_their_process_owes_the_time() {
    let fabric = Fabric::new(FabricOptions {
        verb_time: VerbTime::Charge,
        ..options()
    });
    let (a, b) = (Host::new(&fabric, 1), Host::new(&fabric, 2));
    let (pair, peer) = (a.pair(), b.pair());
    pair.to_init(&init()).expect("INIT");
    pair.to_rtr(&rtr(&a, &b, peer.qp_num())).expect("RTR");
    assert_eq!(fabric.now(), Duration::ZERO);
    assert_eq!(fabric.take_verb_time(a.process, a.nic), 1_000 * MS);
    assert_eq!(fabric.take_verb_time(a.process, a.nic), Duration::ZERO);
    assert_eq!(fabric.take_verb_time(b.process, b.nic), Duration::ZERO);
    fabric.hang_control(a.nic, 500 * MS);
    pair.to_rts(&rts(6)).expect("RTS");
    assert_eq!(fabric.take_verb_time(a.process, a.nic), 500 * MS);
}

#[test]
fn a_dead_device_says_so_once_and_then_fails_every_call() {
    let two = Connected::new(options());
    let _ = two.a.events();
    let _hold = two.fabric.partition(&[two.a.port()], &[two.b.port()]);
    two.post(&[two.write(1, 8)]);
    two.fabric.kill_device(two.a.nic);
    let event = two
        .a
        .context
        .next_event()
        .expect("works")
        .expect("an event");
    assert_eq!(event.kind, AsyncEventKind::DeviceFatal);
    assert_eq!(errno(two.a.context.next_event()), EIO);
    assert_eq!(errno(two.a.context.port_attr(1)), EIO);
    assert_eq!(errno(two.a.context.gid_table(1)), EIO);
    assert_eq!(errno(two.a.context.alloc_pd()), EIO);
    assert_eq!(errno(two.pair_a.to_error()), EIO);
    let refused = two.pair_a.post(&[two.write(2, 8)]).expect_err("dead");
    assert_eq!((refused.posted, refused.errno()), (0, EIO));
    two.fabric.advance(Duration::from_secs(60));
    assert_eq!(two.a.poll(), [], "no completion is promised");
    assert_eq!(errno(two.fabric.device(two.a.nic).open()), EIO);
}

#[test]
fn after_a_reset_old_contexts_stay_dead_and_new_ones_work() {
    let two = Connected::new(options());
    let before = two.fabric.stats();
    two.fabric.kill_device(two.a.nic);
    two.fabric.reset_device(two.a.nic);
    assert_eq!(errno(two.a.context.port_attr(1)), EIO);
    let Connected {
        fabric,
        a,
        b,
        pair_a,
        pair_b,
    } = two;
    let (process, nic) = (a.process, a.nic);
    drop((a, pair_a));
    let a = Host::on(&fabric, process, nic);
    let pair_a = a.pair();
    pair_b.to_reset().expect("RESET");
    connect(&a, &pair_a, &b, pair_b.qp_num(), 6).expect("connected");
    connect(&b, &pair_b, &a, pair_a.qp_num(), 6).expect("connected");
    let write = WorkRequest::write(1, a.local(0, 8), b.remote(0));
    pair_a.post(&[write]).expect("posted");
    assert_eq!(a.statuses(1), [WcStatus::Success]);
    let _ = (a.events(), b.events());
    let after = fabric.stats();
    assert_eq!(
        (after.contexts, after.regions, after.queue_pairs),
        (before.contexts, before.regions, before.queue_pairs)
    );
}

#[test]
fn an_adapter_can_be_pulled_out_and_put_back() {
    let fabric = Fabric::new(options());
    let host = Host::new(&fabric, 1);
    assert_eq!(fabric.devices_of(host.process).devices().len(), 1);
    fabric.unplug(host.nic);
    let list = fabric.devices_of(host.process);
    assert!(list.devices().is_empty());
    assert!(list.to_string().contains("no adapter"), "{list}");
    let enodev = Some(libc::ENODEV);
    assert_eq!(
        errno(fabric.device_of(host.process, host.nic).open()),
        enodev
    );
    fabric.plug(host.nic);
    let list = fabric.devices_of(host.process);
    assert_eq!(list.devices()[0].name(), "nic1");
    list.devices()[0].open().expect("it opens again");
}

#[test]
fn a_frozen_processs_adapter_still_answers() {
    let two = Connected::new(options());
    two.fabric.freeze(two.b.process);
    two.a.fill(4);
    two.post(&[two.write(1, 5_000), two.read(2, 5_000)]);
    assert_eq!(two.a.statuses(2), [WcStatus::Success; 2]);
    assert_eq!(two.b.bytes(0, 5_000), vec![4; 5_000]);
    let called = catch_unwind(AssertUnwindSafe(|| two.b.context.port_attr(1)));
    assert!(called.is_err(), "a frozen process cannot have called");
    two.fabric.thaw(two.b.process);
    two.b.context.port_attr(1).expect("thawed");
}

#[test]
fn a_killed_process_leaves_nothing_and_its_handles_fail() {
    let two = Connected::new(options());
    let one = Host::on(&two.fabric, two.a.process, two.a.nic);
    two.fabric.break_queue_pair(two.a.nic, two.pair_a.qp_num());
    two.fabric.kill_process(two.a.process);
    let left = two.fabric.stats();
    assert_eq!((left.contexts, left.queue_pairs, left.regions), (1, 1, 1));
    assert_eq!(errno(two.a.context.port_attr(1)), EIO);
    assert_eq!(errno(two.pair_a.query()), EIO);
    assert!(two.pair_a.post(&[two.write(1, 8)]).is_err());
    assert_eq!(errno(two.a.context.next_event()), EIO);
    assert_eq!(
        errno(two.fabric.device_of(two.a.process, two.a.nic).open()),
        EIO
    );
    let control = one.context.control().clone();
    drop(one);
    assert_eq!(
        control.failed_destructions(),
        0,
        "what is gone can be let go"
    );
    // Its successor gets the same numbers, and nothing of what was on the way.
    let again = Host::on(
        &two.fabric,
        two.fabric.add_process(crate::sim::NodeId(0)),
        two.a.nic,
    );
    assert_eq!(again.pair().qp_num(), 17);
}

#[test]
fn queue_pairs_that_a_device_refuses_to_stop_work_until_their_context_is_closed() {
    let two = Connected::new(options());
    let before = two.fabric.stats();
    let refused = two.fabric.refuse_to_stop(two.b.nic);
    drop(two.fabric.refuse_to_stop(two.b.nic));
    assert_eq!(errno(two.pair_b.to_error()), EIO);
    two.b.context.port_attr(1).expect("all else works");
    let control = two.b.context.control().clone();
    let Connected {
        fabric,
        a,
        b,
        pair_a,
        pair_b,
    } = two;
    drop(pair_b);
    assert_eq!(control.failed_destructions(), 1);
    a.fill(5);
    let write = WorkRequest::write(1, a.local(0, 8), b.remote(0));
    pair_a.post(&[write]).expect("posted");
    assert_eq!(a.statuses(1), [WcStatus::Success]);
    assert_eq!(b.bytes(0, 8), [5; 8]);
    drop(b);
    assert!(control.is_closed());
    assert_eq!(fabric.stats().queue_pairs, before.queue_pairs - 1);
    drop(refused);
    pair_a.to_error().expect("another adapter stops them");
}

#[test]
fn memory_that_a_device_refuses_to_deregister_is_held_until_its_context_is_closed() {
    let two = Connected::new(options());
    let before = two.fabric.stats().regions;
    let control = two.b.context.control().clone();
    let memory = HostMemory::allocate(4096).expect("memory");
    let register = || {
        let access = AccessFlags::LOCAL_WRITE;
        let region = two.b.pd.register(&memory, 0, 4096, access);
        region.expect("registered")
    };
    let refused = two.fabric.refuse_to_deregister(two.b.nic);
    // Of two such faults the other goes on.
    drop(two.fabric.refuse_to_deregister(two.b.nic));
    drop(register());
    assert_eq!(control.failed_destructions(), 1);
    assert_eq!(control.quarantined_bytes(), 4096);
    assert_eq!(two.fabric.stats().regions, before + 1);
    drop(refused);
    drop(register());
    assert_eq!(two.fabric.stats().regions, before + 1, "it lets go again");
    let Connected {
        fabric, b, pair_b, ..
    } = two;
    drop((pair_b, b));
    assert!(control.is_closed());
    assert!(fabric.stats().regions < before, "all of it is gone");
}
