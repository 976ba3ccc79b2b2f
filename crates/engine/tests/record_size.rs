//! A registration whose record the store would not take.
#![cfg(feature = "etcd")]

use rerail_engine::{Engine, EngineConfig, EngineError, MemoryOptions, Transport};
use rerail_metadata::MetadataError;
use rerail_verbs::{DeviceList, HostMemory};

const LIMIT: usize = 8_192;

#[test]
fn a_record_over_etcds_limit_is_refused_with_the_limit_and_the_registration_undone() {
    // Nobody listens there: an error about size shows that nothing was sent.
    let settings = |variable: &str| match variable {
        "RERAIL_ETCD_MAX_REQUEST_BYTES" => Some(LIMIT.to_string()),
        "MC_TCP_BIND_ADDRESS" => Some("127.0.0.1".to_owned()),
        _ => None,
    };
    let mut config = EngineConfig::with_settings("etcd://127.0.0.1:1", "a", &settings)
        .expect("settings are valid");
    config.transport = Transport::Tcp;
    let engine = Engine::start(config, &DeviceList::default()).expect("stores may be away");
    let memory = |_| HostMemory::allocate(64).expect("memory");
    let many: Vec<HostMemory> = (0..200).map(memory).collect();
    let error = engine.register_batch(&many, MemoryOptions::default());
    let error = error.expect_err("too many buffers for a record");
    let EngineError::Metadata(MetadataError::TooLarge { size, limit, .. }) = &error else {
        panic!("{error}");
    };
    assert!(size > limit && *limit <= LIMIT, "{error}");
    assert!(error.to_string().contains(&limit.to_string()), "{error}");
    // Nothing of it is left: not in the record, and not in the books.
    assert!(engine.descriptor().buffers.is_empty());
    let error = engine.unregister(many[0].addr()).expect_err("undone");
    assert!(
        matches!(error, EngineError::NotRegistered { .. }),
        "{error}"
    );
    // Fewer of them fit, and are published once the store is there.
    let few = &many[..10];
    engine
        .register_batch(few, MemoryOptions::default())
        .expect("they fit");
    assert_eq!(engine.descriptor().buffers.len(), few.len());
}
