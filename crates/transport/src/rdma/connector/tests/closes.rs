//! What a peer is told that asks us to close.

use super::*;
use crate::rdma::{FenceChange, FenceStep, RdmaEvents, RdmaTransport};

/// Longer than an endpoint waits for a device that hangs before it ends, by much.
const HANGS: Duration = Duration::from_secs(10);

/// How the fences of endpoints ended.
#[derive(Default)]
struct Fences(Mutex<Vec<bool>>);

impl RdmaEvents for Fences {
    fn fence(&self, change: &FenceChange) {
        if let FenceStep::Ended { complete } = change.step {
            self.0.lock().expect("whole").push(complete);
        }
    }
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
    let accepted = rig.runtime.block_on(b.connector().accept(other.clone()));
    accepted.expect("an endpoint");
    let fences = Arc::new(Fences::default());
    b.set_events(fences.clone());
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
        fences.0.lock().expect("whole").len() == 2
    });
    assert_eq!(*fences.0.lock().expect("whole"), [false, false]);
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
