//! What a peer is told that asks us to close.

use super::*;
use crate::rdma::endpoint::Limits;
use crate::rdma::{FenceChange, FenceStep, RdmaConfig, RdmaEvents, RdmaTransport};

/// Longer than an endpoint waits for a device that hangs before it ends, by much.
const HANGS: Duration = Duration::from_secs(10);

/// What is told of the fences of endpoints.
#[derive(Default)]
struct Fences(Mutex<Vec<FenceStep>>);

impl RdmaEvents for Fences {
    fn fence(&self, change: &FenceChange) {
        self.0.lock().expect("whole").push(change.step.clone());
    }
}

impl Fences {
    /// Tells of those of `transport`.
    fn of(transport: &RdmaTransport) -> Arc<Self> {
        let fences = Arc::<Self>::default();
        transport.set_events(fences.clone());
        fences
    }

    /// Whether each that has ended is complete.
    fn ended(&self) -> Vec<bool> {
        let steps = self.0.lock().expect("whole");
        let ended = steps.iter().filter_map(|step| match step {
            FenceStep::Ended { complete } => Some(*complete),
            _ => None,
        });
        ended.collect()
    }

    /// Why they have begun.
    fn causes(&self) -> Vec<CloseCause> {
        let steps = self.0.lock().expect("whole");
        let causes = steps.iter().filter_map(|step| match step {
            FenceStep::Started { cause } => Some(cause.clone()),
            _ => None,
        });
        causes.collect()
    }
}

/// Waits long for a peer that does not answer.
fn patient() -> RdmaConfig {
    RdmaConfig {
        limits: Limits {
            packet_lifetime: Duration::from_secs(3_600),
            ..Limits::default()
        },
        ..RdmaConfig::default()
    }
}

/// What a Rerail peer says first that nobody can reach.
fn numbered(to: &RdmaTransport, psn: u32) -> Offer {
    Offer {
        psn: Some(psn),
        instance: Some("h9".to_owned()),
        ..request("host9@sim0", &to.identity().path(&to.nics()[0]), 1000)
    }
}

/// The same of a C++ peer.
fn unnumbered(to: &RdmaTransport) -> Offer {
    Offer {
        psn: None,
        instance: None,
        ..numbered(to, 0)
    }
}

/// Has the peer that is called so connect.
fn accepted(rig: &Rig, by: &RdmaTransport, offer: Offer) {
    let answer = rig.runtime.block_on(by.connector().accept(offer));
    answer.expect("an endpoint");
}

/// Between the first NIC and that of the peer which nobody can reach.
fn place_of_host9() -> (u32, String) {
    (0, "host9@sim0".to_owned())
}

fn is_in_use(transport: &RdmaTransport) -> bool {
    let table = transport.connector().table();
    table.current.contains_key(&place_of_host9())
}

/// An end has ended without proof, of a peer that said this packet number first.
fn leave_unproved(transport: &RdmaTransport, psn: Option<u32>) {
    let opening = transport.nics()[0].opening().expect("open");
    let (nic, path) = place_of_host9();
    let mut table = transport.connector().table();
    let ends = &mut table.ends;
    ends.begin(1_000_000, (nic, &path), psn, Proof::new(&opening));
    ends.forget(1_000_000);
}

/// The answer to a request, in words.
fn told(rig: &Rig, to: &RdmaTransport, offer: Offer) -> String {
    let answer = rig.runtime.block_on(to.connector().accept(offer));
    answer.expect_err("a close is refused")
}

#[test]
fn an_end_that_could_not_be_stopped_is_closed_for_its_peer_once_it_has_stopped() {
    let rig = rig(13, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, KIB), registered(&b, KIB));
    Move::all(&a, &peer, &source, &target).run().expect("moved");
    let asked = first_asked(&rig);
    // And a peer whose end was never acknowledged.
    let other = Offer {
        psn: Some(77),
        ..request("host9@sim0", &asked.peer_path, 1000)
    };
    accepted(&rig, &b, other.clone());
    let fences = Fences::of(&b);
    // Whatever `b` says is lost, so that nobody else begins to close.
    rig.wire.loses_closes.store(true, Ordering::SeqCst);
    rig.fabric.hang_control(rig.hosts[1].1[0], HANGS);
    let begin = Instant::now();
    assert_eq!(b.connector().close_all(Some(0), "its port failed"), 2);
    wait_until("both endpoints have ended", || {
        b.connector().endpoints() == 0
    });
    assert_eq!(b.connector().unfenced(), 1);
    // Neither has stopped, though nothing was posted on the other one.
    wait_until("the ends of both fences are told", || {
        fences.ended().len() == 2
    });
    assert_eq!(fences.ended(), [false, false]);
    let ends = [close_of(&asked), close_of(&other)];
    for close in &ends {
        let answer = told(&rig, &b, close.clone());
        assert!(begin.elapsed() < HANGS, "too slow to see anything");
        assert!(
            answer.contains("sim0") && answer.contains(NOT_STOPPED),
            "{answer}"
        );
        // One that there never was is closed.
        let never = Offer {
            psn: Some(78),
            ..close.clone()
        };
        assert_eq!(told(&rig, &b, never), CLOSED);
    }
    // The next endpoint between the two knows no more than that the request is not its own.
    let (connector, next) = (
        b.connector().clone(),
        Offer {
            psn: Some(9),
            ..asked.clone()
        },
    );
    let accepting = rig
        .runtime
        .spawn(async move { connector.accept(next).await });
    let place = (0, asked.local_path.clone());
    wait_until("there is another", || {
        b.connector().table().current.contains_key(&place)
    });
    let answer = told(&rig, &b, ends[0].clone());
    assert!(begin.elapsed() < HANGS, "too slow to see anything");
    assert!(answer.contains(NOT_STOPPED), "{answer}");
    for close in ends {
        wait_until("it has stopped", || told(&rig, &b, close.clone()) == CLOSED);
    }
    assert!(begin.elapsed() >= HANGS, "the device hung still");
    accepting.abort();
}

#[test]
fn an_end_that_its_device_refuses_to_stop_is_not_said_to_be_closed() {
    let rig = rig(47, 1);
    let limit = Duration::from_millis(50);
    let limits = Limits {
        drain: limit,
        fence: limit,
        packet_lifetime: limit,
        ..Limits::default()
    };
    let config = RdmaConfig {
        limits,
        ..RdmaConfig::default()
    };
    let (a, b) = (rig.transport(0, "a1"), rig.transport_with(1, "b1", config));
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, KIB), registered(&b, KIB));
    let write = Move::all(&a, &peer, &source, &target);
    write.run().expect("moved");
    let asked = first_asked(&rig);
    let fences = Fences::of(&b);
    // Whatever `b` says is lost, so that `a` goes on.
    rig.wire.loses_closes.store(true, Ordering::SeqCst);
    let refused = rig.fabric.refuse_to_stop(rig.hosts[1].1[0]);
    assert_eq!(b.connector().close_all(Some(0), "its port failed"), 1);
    wait_until("the endpoint has ended", || b.connector().endpoints() == 0);
    let answer = told(&rig, &b, close_of(&asked));
    assert!(answer.contains(NOT_STOPPED), "{answer}");
    let servers = std::collections::BTreeSet::from(["host0".to_owned()]);
    let revoked = b.connector().revoke(&servers, Duration::ZERO);
    rig.runtime.block_on(revoked).expect_err("it may go on");
    wait_until("the end of its fence is told", || {
        !fences.ended().is_empty()
    });
    assert_eq!(fences.ended(), [false]);
    // And so it does.
    write.run().expect("its queue pairs take in what comes");
    assert_eq!(rig.asks(), 1, "over the same connection");
    drop(refused);
}

#[test]
fn a_close_is_about_the_end_whose_packet_number_it_says() {
    const HANGS: Duration = Duration::from_millis(700);
    let rig = rig(43, 1);
    let b = rig.transport_with(1, "b1", patient());
    let (first, second) = (numbered(&b, 1), numbered(&b, 2));
    // One that is in ERR, and waits for its peer.
    accepted(&rig, &b, first.clone());
    assert_eq!(b.connector().close_all(Some(0), "its port failed"), 1);
    assert_eq!(told(&rig, &b, close_of(&first)), CLOSED);
    // One that is not yet.
    accepted(&rig, &b, second.clone());
    let begin = Instant::now();
    rig.fabric.hang_control(rig.hosts[1].1[0], HANGS);
    assert_eq!(b.connector().close_all(Some(0), "its port failed"), 1);
    wait_until("it begins to close", || !is_in_use(&b));
    assert_eq!(b.connector().endpoints(), 2, "both are closing");
    assert_eq!(told(&rig, &b, close_of(&second)), CLOSED);
    assert!(begin.elapsed() >= HANGS, "the device hung still");
}

#[test]
fn a_close_without_a_packet_number_is_about_the_end_in_use() {
    let rig = rig(44, 1);
    let b = rig.transport_with(1, "b1", patient());
    accepted(&rig, &b, unnumbered(&b));
    assert_eq!(b.connector().close_all(Some(0), "its port failed"), 1);
    wait_until("it begins to close", || !is_in_use(&b));
    accepted(&rig, &b, unnumbered(&b));
    assert_eq!(b.connector().endpoints(), 2, "the first one waits");
    assert_eq!(told(&rig, &b, close_of(&unnumbered(&b))), CLOSED);
    assert!(!is_in_use(&b), "the other one is said to be closed");
}

#[test]
fn a_close_reaches_the_end_in_use_unless_it_names_one_that_may_not_have_stopped() {
    let rig = rig(45, 1);
    let b = rig.transport(1, "b1");
    leave_unproved(&b, Some(7));
    accepted(&rig, &b, numbered(&b, 9));
    let answer = told(&rig, &b, close_of(&numbered(&b, 7)));
    assert!(answer.contains(NOT_STOPPED), "{answer}");
    assert!(is_in_use(&b), "it is not meant");
    assert_eq!(told(&rig, &b, close_of(&numbered(&b, 9))), CLOSED);
    assert!(!is_in_use(&b));
}

#[test]
fn a_close_that_names_none_reaches_the_end_in_use_whatever_may_not_have_stopped() {
    let rig = rig(46, 1);
    let b = rig.transport(1, "b1");
    leave_unproved(&b, None);
    accepted(&rig, &b, unnumbered(&b));
    assert_eq!(told(&rig, &b, close_of(&unnumbered(&b))), CLOSED);
    assert!(!is_in_use(&b), "it is said to be closed");
}

#[test]
fn no_fence_is_told_of_an_end_that_was_never_to_be_connected() {
    let rig = rig(48, 1);
    let (a, b) = (rig.transport(0, "a1"), rig.transport(1, "b1"));
    let fences = Fences::of(&a);
    let peer = peer_of(&a, 1, &b);
    let (source, target) = (registered(&a, KIB), registered(&b, KIB));
    *rig.wire.refusal.lock().expect("whole") = Some(("host0", "not today"));
    let (_, finish) = Move::all(&a, &peer, &source, &target).write();
    wait_until("it is refused", || peer.rails()[0].stats().errors > 0);
    *rig.wire.refusal.lock().expect("whole") = None;
    finish.wait().expect("moved");
    // They are told in the order in which they happen.
    assert_eq!(a.connector().close_all(Some(0), "a test"), 1);
    wait_until("its fence has ended", || !fences.ended().is_empty());
    let closed = CloseCause::Withdrawn("a test".into());
    assert_eq!(fences.causes(), [closed]);
    assert_eq!(fences.ended(), [true]);
}
