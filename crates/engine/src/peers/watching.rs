//! The store's watch, for all peers of interest.
//!
//! One watch of all keys serves every peer: what concerns none of interest costs a comparison of
//! its name. Only where the store tells of changes; elsewhere the machine polls.

use std::sync::Arc;
use std::time::Duration;

use rerail_metadata::descriptor::SegmentDescriptor;
use rerail_metadata::{KeySpace, MetadataStore, Record, Watch, WatchEvent};
use rerail_transport::machine::peers::{Input, PeerRecord};

use super::PeerView;

/// Pause before a watch that could not be begun, or ended, is begun anew.
const AGAIN: Duration = Duration::from_secs(1);

impl PeerView {
    /// Follows the store for ever.
    pub(super) async fn watch(self, store: Arc<dyn MetadataStore>, keys: KeySpace) {
        loop {
            match store.watch(keys.prefix()).await {
                Ok(watch) => self.follow(store.as_ref(), watch, &keys).await,
                Err(error) => tracing::warn!(%error, "the store's changes are not told yet"),
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn follow(&self, store: &dyn MetadataStore, mut watch: Watch, keys: &KeySpace) {
        let locations = keys.rpc_meta("");
        while let Some(event) = watch.next().await {
            match event {
                WatchEvent::Resync => {
                    // Another kind of server may have taken the place of this one.
                    self.is_told(store);
                    self.feed(Input::WatchResync);
                }
                WatchEvent::Put(record) => {
                    if let Some(name) = keys.segment_name(&record.key)
                        && self.is_of_interest(name)
                    {
                        self.stored(name, &record).await;
                    } else if let Some(name) = record.key.strip_prefix(&locations)
                        && self.is_of_interest(name)
                    {
                        self.moved(name).await;
                    }
                }
                WatchEvent::Delete { key } => {
                    if let Some(name) = keys.segment_name(&key)
                        && self.is_of_interest(name)
                    {
                        self.feed(Input::WatchDelete {
                            name: name.to_owned(),
                        });
                    }
                }
            }
        }
    }

    /// A segment's record was written.
    async fn stored(&self, name: &str, record: &Record) {
        match SegmentDescriptor::from_json(&record.value) {
            // Which process wrote it shows only together with its location.
            Ok(descriptor) if descriptor.rerail.is_none() => self.reread(name).await,
            Ok(descriptor) => self.feed(Input::WatchPut {
                name: name.to_owned(),
                record: PeerRecord {
                    descriptor: Arc::new(descriptor),
                    rpc: None,
                },
            }),
            Err(error) => {
                tracing::warn!(%error, name, "a record that cannot be used; the old one stays");
            }
        }
    }

    /// A server's location was written.
    async fn moved(&self, name: &str) {
        self.directory().forget(name);
        let is_cpp = |life: &Arc<super::Life>| life.descriptor().rerail.is_none();
        // A Rerail peer's record says itself which process it is.
        if self.life(name).as_ref().is_none_or(is_cpp) {
            self.reread(name).await;
        }
    }

    async fn reread(&self, name: &str) {
        match self.read(name).await {
            Ok(record) => self.feed(Input::WatchPut {
                name: name.to_owned(),
                record,
            }),
            // The machine asks again when there is trouble.
            Err(error) => tracing::debug!(%error, name, "a changed record is not read yet"),
        }
    }
}
