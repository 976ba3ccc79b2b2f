//! Threads, the clock and descriptors. No test relies on how fast the machine is.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::support::{Connected, Host, MEMORY_BYTES, connect, options};
use crate::sim::{EventVerdict, EventView, FabricOptions, RealTimeFabric};
use crate::{AsyncEventKind, Completion, WcStatus, WorkRequest};

const LIMIT: Duration = Duration::from_secs(30);

fn start() -> RealTimeFabric {
    RealTimeFabric::start(FabricOptions {
        neighbour_resolution: Duration::from_millis(5),
        ..options()
    })
    .expect("a thread")
}

fn connected(fabric: &RealTimeFabric) -> Connected {
    Connected::between(Host::new(fabric, 1), Host::new(fabric, 2), 6)
}

/// Polls until a completion is there.
fn wait(host: &Host) -> Completion {
    let begin = Instant::now();
    let mut found = [Completion::EMPTY; 1];
    while begin.elapsed() < LIMIT {
        if host.queue.poll(&mut found).expect("the queue works") == 1 {
            return found[0];
        }
        std::thread::yield_now();
    }
    panic!("no completion");
}

/// Whether the host's event descriptor becomes readable within the limit.
fn readable(host: &Host, limit_ms: i64) -> bool {
    let fd = host.context.async_fd().expect("real time has one");
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let limit = Timespec {
        tv_sec: limit_ms / 1_000,
        tv_nsec: limit_ms % 1_000 * 1_000_000,
    };
    poll(&mut fds, Some(&limit)).expect("poll works") == 1
}

#[test]
fn threads_at_both_ends_move_verified_bytes_at_once() {
    let fabric = start();
    let two = connected(&fabric);
    std::thread::scope(|scope| {
        let ends = [(&two.a, &two.b, &two.pair_a), (&two.b, &two.a, &two.pair_b)];
        for (side, (own, peer, pair)) in ends.into_iter().enumerate() {
            scope.spawn(move || {
                // Each side writes into its own half of the peer's memory, and reads it back.
                let half = side * MEMORY_BYTES / 2;
                for round in 0..50_usize {
                    let length = 1 + round * 977;
                    let bytes: Vec<u8> = (0..length).map(|at| (at * 7 + round) as u8).collect();
                    own.memory.copy_in(half, &bytes).expect("inside");
                    let write = WorkRequest::write(1, own.local(half, length), peer.remote(half));
                    pair.post(&[write]).expect("posted");
                    assert_eq!(wait(own).status, WcStatus::Success);
                    let back = half + MEMORY_BYTES / 4;
                    let read = WorkRequest::read(2, own.local(back, length), peer.remote(half));
                    pair.post(&[read]).expect("posted");
                    assert_eq!(wait(own).status, WcStatus::Success);
                    assert_eq!(own.bytes(back, length), bytes, "side {side}, round {round}");
                }
            });
        }
    });
}

#[test]
fn many_threads_may_post_and_poll_one_pair() {
    let fabric = start();
    let two = connected(&fabric);
    let total = 4 * 200;
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let two = &two;
            scope.spawn(move || {
                for number in 0..200 {
                    let write = two.write(thread << 32 | number, 64);
                    while let Err(refused) = two.pair_a.post(&[write]) {
                        assert!(refused.is_queue_full(), "{refused}");
                        std::thread::yield_now();
                    }
                }
            });
        }
        let two = &two;
        let poller = scope.spawn(move || {
            let mut seen: Vec<u64> = (0..total).map(|_| wait(&two.a).wr_id).collect();
            seen.sort_unstable();
            seen.dedup();
            seen.len()
        });
        assert_eq!(poller.join().expect("no panic"), total, "each exactly once");
    });
}

#[test]
fn the_event_descriptor_wakes_a_sleeper_and_rests_when_drained() {
    let fabric = start();
    let host = Host::new(&fabric, 1);
    assert!(!readable(&host, 0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            fabric.port_down(host.port());
        });
        assert!(readable(&host, 20_000), "the event wakes the sleeper");
    });
    assert_eq!(host.events(), [AsyncEventKind::PortErr]);
    assert!(!readable(&host, 0), "drained");
    fabric.kill_device(host.nic);
    assert!(readable(&host, 20_000));
    let _ = host.context.next_event();
    assert!(host.context.next_event().is_err());
}

#[test]
fn what_is_due_happens_though_nobody_calls() {
    let fabric = start();
    let host = Host::new(&fabric, 1);
    let late = |_: &EventView| EventVerdict::Delay(Duration::from_millis(30));
    let _rule = fabric.on_event(late);
    fabric.port_down(host.port());
    // Sleeping on the descriptor is no call: only the driving thread can deliver the event.
    assert!(readable(&host, 5_000));
    assert_eq!(host.events(), [AsyncEventKind::PortErr]);
}

#[test]
fn retries_take_the_time_of_the_clock() {
    let fabric = start();
    let two = connected(&fabric);
    two.pair_b.to_error().expect("ERR");
    let begin = Instant::now();
    two.post(&[two.write(1, 8)]);
    let done = wait(&two.a);
    assert_eq!(done.status, WcStatus::RetryExcErr);
    // 0.47 s of the fabric's time, which is the clock's.
    assert!(
        begin.elapsed() >= Duration::from_millis(460),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn a_hanging_verb_holds_up_its_own_control_thread_only() {
    let fabric = start();
    let two = connected(&fabric);
    fabric.hang_control(two.a.nic, Duration::from_millis(500));
    let context = two.a.context.clone();
    let begin = Instant::now();
    let control = two.a.context.control();
    let pending = control.submit(move || context.port_attr(1)).expect("room");
    two.post(&[two.write(1, 8)]);
    assert_eq!(wait(&two.a).status, WcStatus::Success);
    two.b
        .context
        .port_attr(1)
        .expect("the other adapter answers");
    let quick = begin.elapsed();
    pending
        .wait_timeout(LIMIT)
        .expect("in the end")
        .expect("the port");
    let slow = begin.elapsed();
    assert!(slow >= Duration::from_millis(450), "{slow:?}");
    assert!(quick < slow, "{quick:?}");
}

#[test]
fn a_hanging_verb_ends_when_the_device_dies() {
    let fabric = start();
    let host = Host::new(&fabric, 1);
    fabric.hang_control(host.nic, Duration::from_secs(3_600));
    let context = host.context.clone();
    let control = host.context.control().clone();
    let pending = control.submit(move || context.port_attr(1)).expect("room");
    std::thread::sleep(Duration::from_millis(20));
    fabric.kill_device(host.nic);
    let answer = pending.wait_timeout(LIMIT).expect("an answer");
    assert_eq!(answer.expect_err("dead").errno(), Some(libc::EIO));
}

#[test]
fn a_frozen_process_waits_and_its_adapter_answers() {
    let fabric = start();
    let two = connected(&fabric);
    fabric.freeze(two.b.process);
    two.a.fill(6);
    two.post(&[two.write(1, 100)]);
    assert_eq!(wait(&two.a).status, WcStatus::Success);
    assert_eq!(two.b.bytes(0, 100), [6; 100]);
    std::thread::scope(|scope| {
        let verb = scope.spawn(|| two.b.context.port_attr(1).is_ok());
        let poll = scope.spawn(|| two.b.poll().is_empty());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!verb.is_finished() && !poll.is_finished(), "they wait");
        fabric.thaw(two.b.process);
        assert!(verb.join().expect("no panic"));
        assert!(poll.join().expect("no panic"));
    });
}

#[test]
fn a_process_frozen_in_a_verb_ends_it_when_thawed() {
    let fabric = start();
    let host = Host::new(&fabric, 1);
    fabric.hang_control(host.nic, Duration::from_millis(100));
    std::thread::scope(|scope| {
        let call = scope.spawn(|| host.context.port_attr(1).is_ok());
        std::thread::sleep(Duration::from_millis(30));
        fabric.freeze(host.process);
        std::thread::sleep(Duration::from_millis(150));
        assert!(!call.is_finished(), "frozen");
        let open = scope.spawn(|| fabric.device_of(host.process, host.nic).open().is_ok());
        std::thread::sleep(Duration::from_millis(30));
        assert!(!open.is_finished(), "frozen");
        fabric.thaw(host.process);
        assert!(call.join().expect("no panic"));
        assert!(open.join().expect("no panic"));
    });
}

#[test]
fn without_its_driver_a_fabric_moves_on_when_it_is_called() {
    let fabric = start();
    let two = connected(&fabric);
    drop(fabric);
    two.post(&[two.write(1, 8)]);
    assert_eq!(wait(&two.a).status, WcStatus::Success);
    let pair = two.a.pair();
    connect(&two.a, &pair, &two.b, two.pair_b.qp_num(), 6).expect("connected");
}
