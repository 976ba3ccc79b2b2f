//! What must hold on every store of this build, beyond the conformance suite.

mod common;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rerail_metadata::descriptor::{
    Buffer, Device, InstanceId, JsonForm, Protocol, RerailMember, SegmentDescriptor,
};
use rerail_metadata::{
    KeySpace, MetadataError, MetadataStore, OwnedEvent, OwnedOptions, OwnedRecords, StoreOptions,
    StoreUrl, Verdict, WatchEvent, connect,
};

/// A store of one kind, and what keeps it running.
struct Rig {
    url: String,
    _running: Option<common::Store>,
}

impl Rig {
    async fn store(&self) -> Arc<dyn MetadataStore> {
        let url = StoreUrl::parse(&self.url).expect("a URL");
        connect(&url, &StoreOptions::default())
            .await
            .expect("a store of this build")
    }
}

/// One of each kind that this build has and that is installed. `test` names the one in memory.
async fn rigs(test: &str) -> Vec<Rig> {
    #[allow(unused_mut, reason = "without features there is only memory")]
    let mut rigs = vec![Rig {
        url: format!("memory://{test}"),
        _running: None,
    }];
    #[cfg(feature = "etcd")]
    rigs.extend(common::start_etcd().map(|store| Rig {
        url: store.url.clone(),
        _running: Some(store),
    }));
    #[cfg(feature = "redis")]
    rigs.extend(common::start_redis().map(|store| Rig {
        url: store.url.clone(),
        _running: Some(store),
    }));
    #[cfg(all(feature = "http", feature = "server"))]
    {
        use rerail_metadata::server::{MetadataServer, ServerOptions};
        let server = MetadataServer::open(ServerOptions::default()).expect("opened");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("listens");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(server.serve(listener, std::future::pending()));
        rigs.push(Rig {
            url: format!("http://{address}/metadata"),
            _running: None,
        });
    }
    rigs
}

/// The younger instance has the name; a record without an instance is overwritten.
fn options(own: InstanceId) -> OwnedOptions {
    let mut options = OwnedOptions::default();
    options.ttl = Some(Duration::from_secs(2));
    options.read_back = Duration::from_secs(1);
    options.judge = Arc::new(move |found, _| {
        let found = SegmentDescriptor::from_json(&found.value).ok();
        match found.and_then(|segment| segment.rerail) {
            Some(rerail) if rerail.instance > own => Verdict::Yield,
            _ => Verdict::Overwrite,
        }
    });
    options
}

fn record(instance: InstanceId) -> Bytes {
    let segment = SegmentDescriptor {
        rerail: Some(RerailMember::new(instance)),
        ..SegmentDescriptor::new("node-a", Protocol::tcp())
    };
    segment.to_json(JsonForm::Bare).into()
}

#[tokio::test]
async fn m26_two_clusters_with_the_same_names_do_not_meet_on_any_store() {
    for rig in rigs("m26").await {
        let store = rig.store().await;
        let clusters = [
            KeySpace::default(),
            KeySpace::with_cluster_id("dev").expect("valid"),
            KeySpace::with_cluster_id("prod/").expect("valid"),
        ];
        for keys in &clusters {
            let value = Bytes::copy_from_slice(keys.prefix().as_bytes());
            store
                .put(&keys.segment("node-a"), value, None)
                .await
                .expect(&rig.url);
        }
        for keys in &clusters {
            let records = store.list(&keys.segments()).await.expect(&rig.url);
            assert_eq!(records.len(), 1, "{}", rig.url);
            assert_eq!(records[0].value, keys.prefix(), "{}", rig.url);
        }
    }
}

#[tokio::test]
async fn of_two_live_owners_of_one_name_the_younger_has_it() {
    let (old, young) = (InstanceId([1; 16]), InstanceId([2; 16]));
    for rig in rigs("twice").await {
        let key = KeySpace::default().segment("node-a");
        let (first, mut events) = OwnedRecords::start(rig.store().await, options(old));
        first.set(key.clone(), record(old));
        first.stored().await;
        let (second, _events) = OwnedRecords::start(rig.store().await, options(young));
        second.set(key.clone(), record(young));
        second.stored().await;
        let superseded = async {
            while let Some(event) = events.recv().await {
                if matches!(event, OwnedEvent::Superseded { .. }) {
                    return;
                }
            }
        };
        let told = tokio::time::timeout(Duration::from_secs(10), superseded).await;
        assert!(told.is_ok(), "{}", rig.url);
        first.close().await.expect(&rig.url);
        let store = rig.store().await;
        assert_eq!(store.get(&key).await.expect(&rig.url).value, record(young));
        second.close().await.expect(&rig.url);
        assert!(store.get(&key).await.expect_err(&rig.url).is_not_found());
    }
}

/// 40 000 buffers on 8 NICs: 10 MB of JSON.
fn large_record() -> Bytes {
    let mut segment = SegmentDescriptor::new("node-a", Protocol::rdma());
    for index in 0..8 {
        let gid = rerail_verbs::Gid::from_ipv4([10, 0, 0, index + 1].into());
        let device = Device::new(format!("mlx5_{index}"), 0, gid);
        segment.devices.push(device);
    }
    for index in 0..40_000 {
        segment.buffers.push(Buffer {
            name: "cpu:0".into(),
            addr: 0x7f00_0000_0000 + (index << 20),
            length: 1 << 20,
            rkey: vec![u32::MAX; 8],
            lkey: vec![u32::MAX; 8],
            ..Buffer::default()
        });
    }
    segment.to_json(JsonForm::Bare).into()
}

#[tokio::test]
async fn a_record_of_40000_buffers_on_8_nics_is_stored_or_the_limit_is_named() {
    let value = large_record();
    assert!(value.len() > 10_000_000, "{} bytes", value.len());
    let key = KeySpace::default().segment("node-a");
    for rig in rigs("large").await {
        let mut options = StoreOptions::default();
        // The size is in question, not the time that a busy machine takes for it.
        options.deadline = Duration::from_secs(60);
        let url = StoreUrl::parse(&rig.url).expect("a URL");
        let store = connect(&url, &options).await.expect("a store");
        let stored = store.put(&key, value.clone(), None).await;
        if rig.url.starts_with("etcd") {
            let error = stored.expect_err("over etcd's limit");
            let MetadataError::TooLarge { size, limit, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!(*size, value.len());
            assert!((1 << 20..2 << 20).contains(limit), "{error}");
            assert!(error.to_string().contains("--max-request-bytes"), "{error}");
            let asked = store.check_size(&key, value.len()).expect_err("the same");
            assert_eq!(asked.to_string(), error.to_string());
            assert!(store.get(&key).await.expect_err("not there").is_not_found());
            continue;
        }
        store.check_size(&key, value.len()).expect(&rig.url);
        let version = stored.expect(&rig.url);
        let mut watch = store.watch(&key).await.expect(&rig.url);
        assert_eq!(watch.next().await, Some(WatchEvent::Resync), "{}", rig.url);
        let swapped = store.compare_and_swap(&key, &version, value.clone(), None);
        swapped.await.expect(&rig.url);
        let Some(WatchEvent::Put(told)) = watch.next().await else {
            panic!("{}: no news of the record", rig.url);
        };
        assert!(told.value == value, "{}: other bytes", rig.url);
        let read = store.get(&key).await.expect(&rig.url);
        assert!(read.value == value, "{}: other bytes", rig.url);
        let listed = store.list(&key).await.expect(&rig.url);
        assert!(listed.len() == 1 && listed[0].value == value, "{}", rig.url);
        let segment = SegmentDescriptor::from_json(&read.value).expect("valid");
        assert_eq!(segment.buffers.len(), 40_000);
    }
}

#[tokio::test]
async fn a_zombie_thawed_after_its_lease_does_not_take_the_name_back() {
    futures::future::join_all(rigs("zombie").await.into_iter().map(zombie_thaws)).await;
}

async fn zombie_thaws(rig: Rig) {
    let (old, young) = (InstanceId([1; 16]), InstanceId([2; 16]));
    let key = KeySpace::default().segment("node-a");
    // The zombie's runtime stands still while it is not driven, as a frozen process does.
    let mut frozen = tokio::runtime::Builder::new_current_thread();
    let url = rig.url.clone();
    let zombie_key = key.clone();
    let (stored, is_stored) = tokio::sync::oneshot::channel();
    let (thaw, thawed) = std::sync::mpsc::channel();
    let zombie = std::thread::spawn(move || {
        let runtime = frozen.enable_all().build().expect("a runtime");
        let (owned, mut events) = runtime.block_on(async {
            let url = StoreUrl::parse(&url).expect("a URL");
            let store = connect(&url, &StoreOptions::default())
                .await
                .expect("a store");
            let (owned, events) = OwnedRecords::start(store, options(old));
            owned.set(zombie_key, record(old));
            owned.stored().await;
            (owned, events)
        });
        // Frozen until its lease has ended and another has the name.
        stored.send(()).expect("waited for");
        thawed.recv().expect("thawed");
        runtime.block_on(async {
            let superseded = async {
                while let Some(event) = events.recv().await {
                    if matches!(event, OwnedEvent::Superseded { .. }) {
                        return true;
                    }
                }
                false
            };
            let told = tokio::time::timeout(Duration::from_secs(10), superseded).await;
            drop(owned);
            told.unwrap_or(false)
        })
    });
    let store = rig.store().await;
    is_stored.await.expect("stored");
    // Etcd rounds leases up and looks for ended ones each half second.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(
        store.get(&key).await.expect_err(&rig.url).is_not_found(),
        "lease ended"
    );
    let (owner, _events) = OwnedRecords::start(rig.store().await, options(young));
    owner.set(key.clone(), record(young));
    owner.stored().await;
    thaw.send(()).expect("frozen until now");
    let joined = tokio::task::spawn_blocking(move || zombie.join())
        .await
        .expect("joined");
    assert!(joined.expect("no panic"), "{}: the zombie is told", rig.url);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(
        store.get(&key).await.expect(&rig.url).value,
        record(young),
        "{}",
        rig.url
    );
    owner.close().await.expect(&rig.url);
}
