//! Whose name it is.

use super::*;

fn record() -> LocalRecord {
    local_record(&["a"], PublishOrder::Fixed)
}

#[test]
fn a_restarted_engine_takes_over_what_its_predecessor_left() {
    for left in [Some((instance(1), 40)), None, Some((instance(200), 40))] {
        let mut store = TestStore::default();
        store.write(left);
        let rig = Rig::with(store, instance(5), record());
        assert!(!rig.is_superseded(), "whatever the dead one's clock said");
        assert_eq!(rig.store.generations(), [1]);
        assert_eq!(rig.publisher.stored_generation(), 1);
    }
}

#[test]
fn of_two_live_instances_under_one_name_the_older_stops() {
    let mut older = Rig::with(TestStore::default(), instance(5), record());
    let younger = Rig::with(std::mem::take(&mut older.store), instance(6), record());
    older.store = younger.store;
    older.input(register(1, 1));
    assert_eq!(
        older.log.last(),
        Some(&Action::Superseded {
            by: Some(instance(6))
        })
    );
    let said = older.log.len();
    older.input(register(2, 1));
    older.input(Input::StoreReconnected);
    older.input(Input::Leave);
    older.advance(Duration::from_secs(300));
    assert_eq!(older.log.len(), said, "nothing after it");
    assert_eq!(older.publisher.next_timeout(), None);
    assert_eq!(
        older.publisher.accepts(LocalNic(0), None),
        Acceptance::Closed
    );
}

#[test]
fn an_idle_instance_finds_out_by_reading_back() {
    let mut older = Rig::with(TestStore::default(), instance(5), record());
    older.store.write(Some((instance(6), 1)));
    older.advance(Duration::from_secs(37));
    assert!(older.is_superseded());
    // A foreign engine that says nothing of itself came later as well.
    let mut older = Rig::with(TestStore::default(), instance(5), record());
    older.store.write(None);
    older.advance(Duration::from_secs(37));
    assert!(older.is_superseded());
}

#[test]
fn an_older_instance_that_wrote_over_ours_is_written_over() {
    let mut rig = Rig::with(TestStore::default(), instance(5), record());
    rig.store.write(Some((instance(4), 77)));
    rig.input(register(1, 1));
    assert!(!rig.is_superseded());
    let identity = rig.store.record.as_ref().and_then(|record| record.identity);
    assert_eq!(identity, Some((instance(5), 2)));
}

#[test]
fn a_record_of_ours_that_the_store_rolled_back_is_written_again() {
    let mut rig = Rig::with(TestStore::default(), instance(5), record());
    rig.input(register(1, 1));
    rig.store.write(Some((instance(5), 1)));
    rig.advance(Duration::from_secs(37));
    assert_eq!(rig.store.generations(), [1, 2, 2]);
}

#[test]
fn leaving_removes_the_own_record_and_nobody_elses() {
    let mut rig = Rig::with(TestStore::default(), instance(5), record());
    rig.input(Input::Leave);
    assert_eq!(rig.log.last(), Some(&Action::Left));
    assert_eq!(rig.store.record, None);

    let mut rig = Rig::with(TestStore::default(), instance(5), record());
    rig.store.record = None;
    rig.input(Input::Leave);
    assert_eq!(rig.log.last(), Some(&Action::Left), "it is gone already");

    let mut rig = Rig::with(TestStore::default(), instance(5), record());
    rig.store.write(Some((instance(6), 1)));
    rig.input(Input::Leave);
    rig.advance(Duration::from_secs(10));
    assert!(rig.store.record.is_some());
    assert!(matches!(
        rig.log.last(),
        Some(Action::Superseded { .. } | Action::Left)
    ));
    assert_eq!(rig.publisher.next_timeout(), None);
}
