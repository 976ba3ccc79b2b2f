//! The suite against every store of this build.

use std::sync::Arc;

use rerail_metadata::{MemoryStore, MetadataStore, conformance};

async fn conforms(store: impl MetadataStore + 'static) -> conformance::Report {
    let store: Arc<dyn MetadataStore> = Arc::new(store);
    match conformance::run(store, "mooncake/conformance/").await {
        Ok(report) => report,
        Err(failure) => panic!("{failure}"),
    }
}

#[tokio::test]
async fn the_store_in_memory_conforms() {
    let report = conforms(MemoryStore::new("conformance")).await;
    assert_eq!(report.skipped, ["a_watch_of_one_key_sees_it_change"]);
}
