//! The reader's end of subscriptions: one task for each peer that tells its record itself.

use std::sync::Arc;

use rerail_metadata::descriptor::SegmentDescriptor;
use rerail_transport::machine::peers::{Input, PeerRecord};
use rerail_transport::rpc::{Standing, Told};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::PeerView;

/// A subscription. It ends when this is dropped.
pub(super) struct Listening {
    /// What was taken in last: earlier ones need no acknowledgement of their own.
    taken: watch::Sender<Option<Standing>>,
    task: JoinHandle<()>,
}

impl Listening {
    pub(super) fn start(view: PeerView, name: String) -> Self {
        let (taken, takings) = watch::channel(None);
        let task = tokio::spawn(async move {
            if let Err(cause) = view.listen(&name, takings).await {
                tracing::debug!(name, cause, "a subscription ended");
            }
            view.feed(Input::SubscriptionLost { name });
        });
        Self { taken, task }
    }

    pub(super) fn acknowledge(&self, taken: Standing) {
        self.taken.send_replace(Some(taken));
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PeerView {
    async fn listen(
        &self,
        name: &str,
        mut takings: watch::Receiver<Option<Standing>>,
    ) -> Result<(), String> {
        let subscription = self.directory().subscribe(name, self.own_instance()).await;
        let mut subscription = subscription.map_err(|error| error.to_string())?;
        let mut told_before = false;
        loop {
            let told = tokio::select! {
                told = subscription.next() => told.map_err(|error| error.to_string())?,
                changed = takings.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    let taken = *takings.borrow_and_update();
                    if let Some(taken) = taken {
                        let sent = subscription.acknowledge(taken).await;
                        sent.map_err(|error| error.to_string())?;
                    }
                    continue;
                }
            };
            if !std::mem::replace(&mut told_before, true) {
                self.feed(Input::Subscribed {
                    name: name.to_owned(),
                });
            }
            let name = name.to_owned();
            self.feed(match told {
                Told::Current(Standing {
                    instance,
                    generation,
                }) => Input::Heartbeat {
                    name,
                    instance,
                    generation,
                },
                Told::Record(text) => {
                    let descriptor = SegmentDescriptor::from_json(&text);
                    let descriptor = descriptor.map_err(|error| error.to_string())?;
                    let record = PeerRecord {
                        descriptor: Arc::new(descriptor),
                        rpc: None,
                    };
                    Input::Pushed { name, record }
                }
            });
        }
    }
}
