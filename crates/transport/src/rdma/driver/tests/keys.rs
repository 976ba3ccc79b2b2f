//! Whose mistake a key is that was refused.

use super::*;

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
    let is_refused =
        |transfer: &Transfer| matches!(transfer.error(), Some(TransferError::RemoteAccess { .. }));
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
