//! Readers that are told the own record over connections of their own.
//!
//! What is to be told is a value, not a queue: a reader that is slow gets the latest record, and
//! costs the others nothing. Deliberately not here: who is told what when, and who is given up,
//! which the publisher machine decides.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rerail_metadata::descriptor::{InstanceId, JsonForm, SegmentDescriptor};
use rerail_transport::machine::publisher::SubscriberId;
use rerail_transport::rpc::Standing;
use rerail_transport::rpc::subscription::{SubscriptionError, Teller};
use tokio::sync::watch;

/// What a reader is to be told.
#[derive(Clone, Debug, Default)]
struct Tell {
    /// The latest record and its generation.
    record: Option<(u64, Bytes)>,
    /// Counts heartbeats.
    beats: u64,
    /// The generation of the last heartbeat.
    generation: u64,
}

struct Reader {
    instance: InstanceId,
    tell: watch::Sender<Tell>,
}

#[derive(Default)]
struct Table {
    last: u64,
    readers: BTreeMap<SubscriberId, Reader>,
    /// The latest connection of each instance.
    by_instance: HashMap<InstanceId, SubscriberId>,
    /// The text of the record that was told last: the same for all.
    text: Option<(u64, Bytes)>,
}

/// All readers.
#[derive(Default)]
pub(super) struct Readers(Mutex<Table>);

impl Readers {
    /// A new connection of a reader. What it is to be told comes out of the second part, until it
    /// is removed.
    pub(super) fn add(self: &Arc<Self>, instance: InstanceId) -> (SubscriberId, Telling) {
        let (tell, told) = watch::channel(Tell::default());
        let mut table = self.lock();
        table.last += 1;
        let id = SubscriberId(table.last);
        table.readers.insert(id, Reader { instance, tell });
        table.by_instance.insert(instance, id);
        (id, Telling { told })
    }

    /// Ends a connection. False if it had ended before.
    pub(super) fn remove(&self, id: SubscriberId) -> bool {
        let mut table = self.lock();
        let Some(reader) = table.readers.remove(&id) else {
            return false;
        };
        if table.by_instance.get(&reader.instance) == Some(&id) {
            table.by_instance.remove(&reader.instance);
        }
        true
    }

    /// Ends all.
    pub(super) fn clear(&self) {
        let mut table = self.lock();
        table.readers.clear();
        table.by_instance.clear();
    }

    /// The connection of an instance, if it has one.
    pub(super) fn of(&self, instance: InstanceId) -> Option<SubscriberId> {
        self.lock().by_instance.get(&instance).copied()
    }

    /// Has a record told. Its text is made once for all readers.
    pub(super) fn push(&self, id: SubscriberId, generation: u64, descriptor: &SegmentDescriptor) {
        let mut table = self.lock();
        let text = match &table.text {
            Some((of, text)) if *of == generation => text.clone(),
            _ => {
                let text = Bytes::from(descriptor.to_json(JsonForm::Line));
                table.text = Some((generation, text.clone()));
                text
            }
        };
        if let Some(reader) = table.readers.get(&id) {
            let record = Some((generation, text));
            reader.tell.send_modify(|tell| tell.record = record);
        }
    }

    /// Has the current generation told.
    pub(super) fn heartbeat(&self, id: SubscriberId, generation: u64) {
        if let Some(reader) = self.lock().readers.get(&id) {
            reader.tell.send_modify(|tell| {
                tell.beats += 1;
                tell.generation = generation;
            });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Each change is a single step: a poisoned table is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one reader is to be told.
pub(super) struct Telling {
    told: watch::Receiver<Tell>,
}

impl Telling {
    /// Tells it as instance `own`, until it is removed or the connection ends.
    pub(super) async fn run(
        mut self,
        own: InstanceId,
        mut teller: Teller,
    ) -> Result<(), SubscriptionError> {
        let (mut generation_told, mut beats_told) = (0, 0);
        while self.told.changed().await.is_ok() {
            let tell = self.told.borrow_and_update().clone();
            // The heartbeat first: one that speaks of a record that comes only afterwards is
            // waited for by the reader, and the first of a connection says that it stands.
            if tell.beats > beats_told {
                beats_told = tell.beats;
                let current = Standing {
                    instance: own,
                    generation: tell.generation,
                };
                teller.heartbeat(current).await?;
            }
            if let Some((generation, text)) = tell.record
                && generation > generation_told
            {
                generation_told = generation;
                teller.record(&text).await?;
            }
        }
        Ok(())
    }
}
