use std::time::Duration;

use bytes::Bytes;

use super::MemoryStore;
use crate::store::{MetadataStore, WatchEvent};

#[tokio::test(start_paused = true)]
async fn two_handles_of_one_name_are_one_store() {
    let left = MemoryStore::shared("memory-tests", Duration::from_secs(1));
    let right = MemoryStore::shared("memory-tests", Duration::from_secs(1));
    left.put("k", Bytes::from_static(b"v"), None)
        .await
        .expect("put");
    assert_eq!(right.get("k").await.expect("get").value, "v");
    let other = MemoryStore::shared("memory-tests-other", Duration::from_secs(1));
    assert!(
        other
            .get("k")
            .await
            .expect_err("another store")
            .is_not_found()
    );
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_retryable_and_ends_with_a_resync() {
    let store = MemoryStore::new("s");
    let mut watch = store.watch("").await.expect("watch");
    assert_eq!(watch.next().await, Some(WatchEvent::Resync));
    store.faults().outage(true);
    let error = store.get("k").await.expect_err("away");
    assert!(error.is_retryable() && !error.is_not_found(), "{error}");
    store.faults().outage(false);
    assert_eq!(watch.next().await, Some(WatchEvent::Resync));
}

#[tokio::test(start_paused = true)]
async fn a_partition_cuts_off_one_client_only() {
    let store = MemoryStore::new("s");
    let (left, right) = (store.client("left"), store.client("right"));
    store.faults().partition("left", true);
    assert!(left.get("k").await.expect_err("cut off").is_retryable());
    assert!(right.get("k").await.expect_err("reached").is_not_found());
}

#[tokio::test(start_paused = true)]
async fn a_delay_over_the_deadline_times_out_and_does_nothing() {
    let store = MemoryStore::new("s");
    store.faults().delay(Duration::from_secs(60));
    let error = store
        .put("k", Bytes::new(), None)
        .await
        .expect_err("too slow");
    assert!(error.is_retryable(), "{error}");
    store.faults().delay(Duration::ZERO);
    assert!(
        store
            .get("k")
            .await
            .expect_err("not written")
            .is_not_found()
    );
}

#[tokio::test(start_paused = true)]
async fn lost_leases_and_an_empty_restart_take_the_records_with_them() {
    let store = MemoryStore::new("s");
    let lease = store
        .grant_lease(Duration::from_secs(10))
        .await
        .expect("lease");
    store
        .put("k", Bytes::new(), Some(&lease))
        .await
        .expect("put");
    store.faults().lose_lease(&lease);
    assert!(store.get("k").await.expect_err("gone").is_not_found());
    assert!(store.keep_alive(&lease).await.is_err());
    store.put("k", Bytes::new(), None).await.expect("put");
    store.faults().restart_empty();
    assert!(store.get("k").await.expect_err("gone").is_not_found());
}

#[tokio::test(start_paused = true)]
async fn a_conflict_on_order_hits_the_next_conditional_write() {
    let store = MemoryStore::new("s");
    store.faults().conflict_next(1);
    let create = || store.create_if_absent("k", Bytes::new(), None);
    assert!(create().await.expect_err("on order").is_conflict());
    create().await.expect("the second one");
}
