use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::{CacheEvent, CacheOptions, PeerCache};
use crate::descriptor::{InstanceId, JsonForm, Protocol, RerailMember, SegmentDescriptor};
use crate::keys::KeySpace;
use crate::memory::MemoryStore;
use crate::store::MetadataStore;

fn peer(port: u16, life: Option<(u8, u64)>) -> SegmentDescriptor {
    SegmentDescriptor {
        tcp_data_port: port,
        rerail: life.map(|(instance, generation)| RerailMember {
            generation,
            ..RerailMember::new(InstanceId([instance; 16]))
        }),
        ..SegmentDescriptor::new("peer", Protocol::tcp())
    }
}

struct Rig {
    store: MemoryStore,
    keys: KeySpace,
    cache: PeerCache,
}

impl Rig {
    fn new(options: CacheOptions) -> Self {
        let store = MemoryStore::new("cache");
        let keys = KeySpace::default();
        let reader = Arc::new(store.client("reader"));
        Self {
            store,
            cache: PeerCache::new(reader, keys.clone(), options),
            keys,
        }
    }

    async fn put(&self, descriptor: &SegmentDescriptor) {
        let value: Bytes = descriptor.to_json(JsonForm::Line).into();
        self.store
            .put(&self.keys.segment("peer"), value, None)
            .await
            .expect("put");
    }

    async fn delete(&self) {
        self.store
            .delete(&self.keys.segment("peer"))
            .await
            .expect("delete");
    }

    fn port(&self) -> Option<u16> {
        self.cache
            .get("peer")
            .map(|descriptor| descriptor.tcp_data_port)
    }
}

async fn pause(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn m12_an_opened_peer_follows_its_record() {
    let rig = Rig::new(CacheOptions::default());
    assert!(
        rig.cache
            .open("peer")
            .await
            .expect_err("not there")
            .is_not_found()
    );
    rig.put(&peer(1, None)).await;
    rig.cache.open("peer").await.expect("there");
    let mut events = rig.cache.events();
    rig.put(&peer(2, None)).await;
    match events.recv().await {
        Ok(CacheEvent::Changed(descriptor)) => assert_eq!(descriptor.tcp_data_port, 2),
        other => panic!("{other:?}"),
    }
    assert_eq!(rig.port(), Some(2));
    assert_eq!(rig.cache.questions(), 2, "the change came by watch");
}

#[tokio::test(start_paused = true)]
async fn m02_only_not_found_drops_a_peer_and_an_outage_never_does() {
    let rig = Rig::new(CacheOptions::default());
    rig.put(&peer(1, None)).await;
    rig.cache.open("peer").await.expect("there");
    pause(2).await;
    rig.store.faults().outage(true);
    for _ in 0..20 {
        assert!(
            rig.cache
                .refresh("peer")
                .await
                .expect_err("away")
                .is_retryable()
        );
        pause(10).await;
    }
    assert_eq!(rig.port(), Some(1), "an outage is no absence");
    rig.store.faults().outage(false);
    pause(1).await;
    let mut events = rig.cache.events();
    rig.delete().await;
    pause(1).await;
    assert_eq!(rig.port(), Some(1), "once is not enough");
    pause(10).await;
    assert_eq!(rig.port(), None);
    assert!(matches!(events.recv().await, Ok(CacheEvent::Dropped { name }) if name == "peer"));
}

#[tokio::test(start_paused = true)]
async fn m02_a_peer_that_shows_life_is_not_dropped() {
    let rig = Rig::new(CacheOptions::default());
    rig.put(&peer(1, None)).await;
    rig.cache.open("peer").await.expect("there");
    pause(1).await;
    rig.delete().await;
    for _ in 0..30 {
        rig.cache.note_alive("peer");
        pause(1).await;
    }
    assert_eq!(rig.port(), Some(1));
    rig.put(&peer(2, None)).await;
    pause(1).await;
    assert_eq!(rig.port(), Some(2), "published again");
}

#[tokio::test(start_paused = true)]
async fn m30_a_refresh_during_an_outage_fails_and_keeps_the_record() {
    let options = CacheOptions {
        ttl: Some(Duration::from_secs(5)),
        ..CacheOptions::default()
    };
    let rig = Rig::new(options);
    rig.put(&peer(1, None)).await;
    rig.cache.open("peer").await.expect("there");
    rig.store.faults().outage(true);
    pause(6).await;
    assert!(
        rig.cache
            .refresh("peer")
            .await
            .expect_err("away")
            .is_retryable()
    );
    let kept = rig.cache.open("peer").await.expect("from the cache");
    assert_eq!(kept.tcp_data_port, 1);
}

#[tokio::test(start_paused = true)]
async fn m04_trouble_refreshes_that_peer_and_many_callers_ask_once() {
    let rig = Rig::new(CacheOptions::default());
    rig.put(&peer(1, None)).await;
    rig.cache.open("peer").await.expect("there");
    pause(2).await;
    // The watch is dead, so that the change is found by the refresh alone.
    rig.store.faults().lose_watches(true);
    rig.put(&peer(2, None)).await;
    rig.store.faults().delay(Duration::from_millis(500));
    let before = rig.cache.questions();
    let callers = (0..50).map(|_| rig.cache.refresh("peer"));
    for outcome in futures::future::join_all(callers).await {
        assert_eq!(outcome.expect("found").tcp_data_port, 2);
    }
    assert_eq!(rig.cache.questions() - before, 1);
    rig.cache
        .refresh("peer")
        .await
        .expect("within the cooldown");
    assert_eq!(rig.cache.questions() - before, 1);
    pause(2).await;
    rig.cache.refresh("peer").await.expect("after it");
    assert_eq!(rig.cache.questions() - before, 2);
}

#[tokio::test(start_paused = true)]
async fn m21_the_time_to_live_is_settable_and_revalidation_is_one_cheap_question() {
    let options = CacheOptions {
        ttl: Some(Duration::from_secs(10)),
        ..CacheOptions::default()
    };
    let rig = Rig::new(options);
    rig.put(&peer(1, None)).await;
    for _ in 0..100 {
        rig.cache.open("peer").await.expect("there");
    }
    assert_eq!(rig.cache.questions(), 1);
    pause(11).await;
    let first = rig.cache.get("peer").expect("cached");
    for _ in 0..100 {
        rig.cache.open("peer").await.expect("there");
    }
    assert_eq!(rig.cache.questions(), 2);
    let second = rig.cache.get("peer").expect("cached");
    assert!(
        Arc::ptr_eq(&first, &second),
        "the same record is not read again"
    );
    let off = Rig::new(CacheOptions::default());
    off.put(&peer(1, None)).await;
    for _ in 0..10 {
        off.cache.open("peer").await.expect("there");
        pause(3_600).await;
    }
    assert_eq!(
        off.cache.questions(),
        1,
        "without a time to live only the watch tells"
    );
}

#[tokio::test(start_paused = true)]
async fn records_only_go_forwards_and_a_retired_instance_never_comes_back() {
    let rig = Rig::new(CacheOptions::default());
    rig.put(&peer(1, Some((1, 5)))).await;
    rig.cache.open("peer").await.expect("there");
    assert!(
        !rig.cache.offer(peer(2, Some((1, 4)))),
        "an older generation"
    );
    assert!(rig.cache.offer(peer(3, Some((1, 6)))));
    assert!(rig.cache.offer(peer(4, Some((2, 1)))), "a new life");
    assert!(
        !rig.cache.offer(peer(5, Some((1, 7)))),
        "the old one is retired"
    );
    assert_eq!(rig.port(), Some(4));
    pause(1).await;
    rig.put(&peer(6, Some((1, 8)))).await;
    pause(1).await;
    assert_eq!(rig.port(), Some(4), "a zombie's record is not taken either");
}

#[tokio::test(start_paused = true)]
async fn a_broken_record_does_not_take_a_good_one_away() {
    let rig = Rig::new(CacheOptions::default());
    rig.put(&peer(1, None)).await;
    rig.cache.open("peer").await.expect("there");
    let key = rig.keys.segment("peer");
    rig.store
        .put(&key, Bytes::from_static(b"{"), None)
        .await
        .expect("put");
    pause(2).await;
    assert_eq!(rig.port(), Some(1));
    let error = rig
        .cache
        .refresh("peer")
        .await
        .expect_err("broken")
        .to_string();
    assert!(error.contains(&key), "{error}");
}
