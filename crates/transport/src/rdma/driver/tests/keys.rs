//! Whose mistake a key is that was refused, and that none is because its region went too early.

use rerail_verbs::QpState;

use super::*;
use crate::rdma::opening::SWEEP_MIN;
use crate::rdma::slice::Keys;

/// The work that begins next on the driver's NIC fails like this.
fn fail_next(rig: &Rig, status: WcStatus) -> FaultGuard {
    let (own, mut left) = (rig.own, 1);
    rig.fabric.on_work(move |work| {
        if left > 0 && work.nic == own {
            left -= 1;
            WorkVerdict::Fail(status, 0)
        } else {
            WorkVerdict::Pass
        }
    })
}

/// The rail's endpoint was reported as broken by a status, and not by the request.
#[track_caller]
fn assert_failed_by(rig: &mut Rig, expected: WcStatus) {
    let broken = rig.broken();
    let is_expected = |cause: &CloseCause| matches!(cause, CloseCause::Failed { status, .. } if *status == expected);
    assert!(
        broken.iter().any(|(_, cause)| is_expected(cause)),
        "{broken:?}"
    );
}

/// A place of a record.
fn piece(keys: &Arc<Keys>) -> Piece {
    Piece {
        addr: 0,
        length: 1,
        keys: Arc::clone(keys),
    }
}

fn is_refused(transfer: &Transfer) -> bool {
    matches!(transfer.error(), Some(TransferError::RemoteAccess { .. }))
}

#[test]
fn a_key_that_was_replaced_while_it_was_in_use_is_nobodys_mistake() {
    for status in [WcStatus::RemAccessErr, WcStatus::LocProtErr] {
        let mut rig = Rig::new(1, config());
        let failing = fail_next(&rig, status);
        let transfer = rig.write(0, 1);
        rig.driver.step(rig.now);
        assert_eq!(rig.driver.in_flight(), 1, "it is under way");
        let spec = transfer.spec();
        let (.., remote) = spec.remote.at(0).expect("inside");
        let (.., local) = spec.local.at(0).expect("inside");
        let old = if status == WcStatus::RemAccessErr {
            (remote, remote.get(0))
        } else {
            (local, local.get(0))
        };
        // The device is open again before the news of its end arrives.
        old.0.set(0, old.1.map(|key| key ^ 1));
        rig.run(ms(50));
        failing.undo();
        assert_failed_by(&mut rig, status);
        assert!(transfer.error().is_none(), "{:?}", transfer.error());
        assert!(transfer.has_work(), "it is to be posted elsewhere");
        old.0.set(0, old.1);
        let work = Work::queue(&transfer, &rig.rail(1), 1).expect("not queued");
        rig.inbox.submit(work).expect("there is room");
        rig.run(ms(50));
        assert!(!transfer.has_work());
        assert_eq!(transfer.transferred_bytes(), u64::from(SLICE));
    }
}

#[test]
fn a_request_is_refused_when_two_nics_of_the_peer_say_so_or_there_is_no_other() {
    let status = WcStatus::RemAccessErr;
    let mut rig = Rig::new(1, config());
    let failing = fail_next(&rig, status);
    let transfer = rig.write(0, 1);
    rig.run(ms(50));
    failing.undo();
    assert_failed_by(&mut rig, status);
    assert!(transfer.error().is_none(), "another NIC may take it");
    assert!(transfer.avoids(0) && !transfer.avoids(1));
    // A record has come with another key for the first NIC, and with the same again.
    let (.., keys) = transfer.spec().remote.at(0).expect("inside");
    let key = keys.get(0);
    keys.set(0, key.map(|key| key ^ 1));
    assert!(!transfer.avoids(0));
    keys.set(0, key);
    let failing = fail_next(&rig, status);
    let work = Work::queue(&transfer, &rig.rail(1), 1).expect("not queued");
    rig.inbox.submit(work).expect("there is room");
    rig.run(ms(50));
    failing.undo();
    assert!(is_refused(&transfer), "{:?}", transfer.error());
    let refused = transfer.refused_keys();
    assert_eq!(
        refused.iter().map(|key| key.nic).collect::<Vec<_>>(),
        [0, 1]
    );

    let mut rig = Rig::new(1, config());
    rig.rail(1).set_state(RailState::Down);
    let _failing = fail_next(&rig, status);
    let transfer = rig.write(0, 1);
    rig.run(ms(50));
    assert!(is_refused(&transfer), "nobody else leads to its bytes");
}

#[test]
fn what_has_been_refused_is_not_posted_to_that_nic_again() {
    let mut rig = Rig::new(1, config());
    let failing = fail_next(&rig, WcStatus::RemAccessErr);
    let transfer = rig.write(0, 1);
    rig.run(ms(50));
    failing.undo();
    assert!(transfer.avoids(0));
    // Another connection leads there.
    let far_nic = Arc::clone(&rig._far[0].0);
    rig.connect(far_nic, 0);
    while rig.reports.try_recv().is_ok() {}
    let (count, _counting) = rig.count_work();
    let work = Work::queue(&transfer, &rig.rail(0), 1).expect("not queued");
    rig.inbox.submit(work).expect("there is room");
    rig.run(ms(50));
    assert_eq!(count.load(Ordering::Relaxed), 0);
    let stranded = std::iter::from_fn(|| rig.reports.try_recv().ok())
        .filter(|report| matches!(report, Report::Stranded(_)));
    assert_eq!(stranded.count(), 1, "somebody else may take it");
    // If nobody else can, it has failed.
    assert!(!transfer.fail_if_refused());
    rig.rail(1).set_state(RailState::Down);
    assert!(transfer.fail_if_refused());
    assert!(is_refused(&transfer));
}

#[test]
fn a_transfer_whose_far_end_may_be_registered_anew_is_not_posted_any_more() {
    let mut rig = Rig::new(1, config());
    let transfer = rig.write(0, 4);
    rig.run(ms(50));
    assert!(transfer.is_finished(), "as long as it is not");
    let (count, _counting) = rig.count_work();
    let transfer = rig.write(0, 4);
    let old = transfer.spec().remote.at(0).expect("inside").2;
    let other = [old.get(0), old.get(1)].map(|key| key.map(|key| key ^ 1));
    let mut now = [piece(&Keys::new(other))];
    Piece::carry_over(&[piece(old)], &mut now);
    rig.run(ms(50));
    assert_eq!(count.load(Ordering::Relaxed), 0);
    assert!(transfer.is_finished() && transfer.is_outdated());
    let error = transfer.error();
    assert!(
        matches!(error, Some(TransferError::RemoteAccess { .. })),
        "{error:?}"
    );
}

#[test]
fn queue_pairs_of_a_device_that_is_given_up_stop_before_its_regions_go() {
    let rig = Rig::new(1, config());
    let opening = rig.nic.opening().expect("open");
    let control = opening.context().control();
    let made = || {
        let prepared = pairs::prepare(&rig.nic, &opening, &rig.config, &Advice::default(), 7);
        let pairs = Arc::new(Pairs(prepared.expect("made").pairs));
        opening.has_made(&pairs);
        pairs
    };
    let state = |pairs: &Pairs| pairs.0[0].query().expect("known").state;
    let regions = || rig.fabric.stats().regions;
    // Those that are gone are not kept in mind.
    for _ in 0..3 * SWEEP_MIN {
        drop(made());
    }
    assert!(opening.made() <= 2 * SWEEP_MIN, "{}", opening.made());
    while control.turn() {}
    let (pairs, before) = (made(), regions());
    assert_eq!(state(&pairs), QpState::Init);
    // Something that the device has to do before.
    control.execute(|| ()).expect("there is room");
    rig.nic.release();
    drop(rig.own_memory);
    let mut turns = 0;
    while regions() == before {
        assert!(control.turn(), "the region goes at last");
        turns += 1;
        let gone = regions() < before;
        assert!(!gone || state(&pairs) == QpState::Error, "after {turns}");
    }
    // An endpoint that had the device before.
    let late = made();
    while control.turn() {}
    assert_eq!(state(&late), QpState::Error);
}

#[test]
fn a_key_that_was_told_after_the_connection_began_is_not_blamed_by_it() {
    let status = WcStatus::RemAccessErr;
    let mut rig = Rig::new(1, config());
    rig.rail(1).set_state(RailState::Down);
    let failing = fail_next(&rig, status);
    let transfer = rig.write(0, 1);
    // The peer's device was opened again, and the other end of the connection hangs about in what
    // was open before.
    let old = transfer.spec().remote.at(0).expect("inside").2;
    let (first, second) = (old.get(0), old.get(1));
    let opened_again = [first.map(|key| key ^ 1), second];
    let mut now = [piece(&Keys::new(opened_again))];
    Piece::carry_over(&[piece(old)], &mut now);
    rig.run(ms(50));
    failing.undo();
    assert_failed_by(&mut rig, status);
    assert!(transfer.error().is_none(), "{:?}", transfer.error());
    assert!(transfer.has_work() && !transfer.avoids(0));
    // One that began later knows.
    let far_nic = Arc::clone(&rig._far[0].0);
    rig.connect(far_nic, 0);
    let _failing = fail_next(&rig, status);
    let work = Work::queue(&transfer, &rig.rail(0), 1).expect("not queued");
    rig.inbox.submit(work).expect("there is room");
    rig.run(ms(50));
    assert!(is_refused(&transfer), "{:?}", transfer.error());
}
