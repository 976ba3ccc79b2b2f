use std::time::{Duration, Instant};

use bytes::Bytes;

use super::ServerLimits;
use super::table::{Condition, Refusal, Since, Table};

fn table(limits: ServerLimits) -> Table {
    Table::new(limits, 100)
}

#[test]
fn a_watch_that_was_away_too_long_is_told_to_resync() {
    let mut table = table(ServerLimits {
        events_max: 2,
        ..ServerLimits::default()
    });
    for key in ["a/1", "b/1", "a/2"] {
        table
            .put(key, Bytes::new(), Condition::None, None)
            .expect("put");
    }
    assert!(
        matches!(table.since("a/", 100), Since::Resync),
        "the first event is forgotten"
    );
    assert!(
        matches!(table.since("a/", 104), Since::Resync),
        "from another life"
    );
    match table.since("a/", 101) {
        Since::Events { events, .. } => assert_eq!(events.len(), 1, "a/2 only: {events:?}"),
        Since::Resync => panic!("events 102 and 103 are there"),
    }
}

#[test]
fn limits_are_refusals_and_change_nothing() {
    let limits = ServerLimits {
        value_bytes_max: 4,
        total_bytes_max: 7,
        records_max: 2,
        leases_max: 1,
        ..ServerLimits::default()
    };
    let mut table = table(limits);
    let now = Instant::now();
    let mut put = |key: &str, value: &'static str| {
        table.put(
            key,
            Bytes::from_static(value.as_bytes()),
            Condition::None,
            None,
        )
    };
    assert_eq!(put("a", "12345"), Err(Refusal::TooLarge { limit: 4 }));
    put("a", "1234").expect("fits");
    assert_eq!(put("b", "12"), Err(Refusal::Full("too many bytes")));
    put("a", "1").expect("an overwrite frees what it replaces");
    put("b", "1").expect("fits");
    assert_eq!(put("c", "1"), Err(Refusal::Full("too many records")));
    let second = Duration::from_secs(1);
    table.grant_lease("l".into(), second, now).expect("first");
    let full = table.grant_lease("m".into(), second, now);
    assert_eq!(full, Err(Refusal::Full("too many leases")));
    assert_eq!(table.sizes(), [2, 4, 1, 3]);
}

#[test]
fn a_lease_takes_its_records_along_and_no_others() {
    let mut table = table(ServerLimits::default());
    let now = Instant::now();
    let ttl = Duration::from_secs(2);
    table.grant_lease("l".into(), ttl, now).expect("lease");
    for key in ["kept", "left", "gone"] {
        table
            .put(key, Bytes::new(), Condition::None, Some("l"))
            .expect("put");
    }
    table
        .put("kept", Bytes::new(), Condition::None, None)
        .expect("put without the lease");
    table.delete("left", Condition::None).expect("deleted");
    table.keep_alive("l", now + ttl / 2).expect("in time");
    table.expire(now + ttl);
    assert!(table.get("gone").is_some(), "kept alive until 3 s");
    assert_eq!(
        table.keep_alive("l", now + 2 * ttl),
        Err(Refusal::LeaseGone)
    );
    assert!(table.get("gone").is_none());
    assert!(table.get("kept").is_some());
    let refused = table.put("x", Bytes::new(), Condition::None, Some("l"));
    assert_eq!(refused, Err(Refusal::LeaseGone));
}
