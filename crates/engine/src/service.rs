//! What other engines may ask of this one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rerail_metadata::descriptor::JsonForm;
use rerail_transport::rdma::RdmaTransport;
use rerail_transport::rpc::server::Reply;
use rerail_transport::rpc::{ConnectionMessage, Handler, Notify, Subscriber};

use crate::event::Event;
use crate::publication::Publication;

/// Notifications that wait to be taken. More are refused, so that a sender learns of it.
const NOTIFICATIONS_MAX: usize = 65_536;

/// A message of one engine to another, about data that has arrived.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Notification {
    /// What it is about; mostly the sender's name.
    pub name: String,
    /// The message.
    pub message: String,
}

/// Notifications that were received.
#[derive(Default)]
pub(crate) struct Notifications {
    queue: Mutex<VecDeque<Notification>>,
    pub(crate) arrived: Event,
}

impl Notifications {
    pub(crate) fn take(&self) -> Vec<Notification> {
        self.queue().drain(..).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue().is_empty()
    }

    fn push(&self, notification: Notification) -> bool {
        let mut queue = self.queue();
        if queue.len() >= NOTIFICATIONS_MAX {
            return false;
        }
        queue.push_back(notification);
        drop(queue);
        self.arrived.signal();
        true
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, VecDeque<Notification>> {
        // A queue of messages is whole whatever panicked.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The service. The transport comes later than the listener, whose port is in its NIC paths.
#[derive(Default)]
pub(crate) struct EngineService {
    pub(crate) publication: OnceLock<Publication>,
    pub(crate) rdma: OnceLock<Arc<RdmaTransport>>,
    pub(crate) notifications: Notifications,
}

/// The service as the listener holds it.
pub(crate) struct Shared(pub(crate) Arc<EngineService>);

impl Handler for Shared {
    fn connection(&self, message: ConnectionMessage) -> Reply<ConnectionMessage> {
        let service = Arc::clone(&self.0);
        Box::pin(async move {
            let (own, peer) = (
                message.offer.peer_path.clone(),
                message.offer.local_path.clone(),
            );
            let answer = match service.rdma.get() {
                _ if !message.reply_msg.is_empty() => Err("a refusal is no request".into()),
                Some(rdma) => rdma.accept(message.offer).await,
                None => Err("this engine has no RDMA".into()),
            };
            match answer {
                Ok(offer) => ConnectionMessage::offer(offer),
                Err(reason) => ConnectionMessage::refusal(own, peer, reason),
            }
        })
    }

    fn metadata(&self, _descriptor: Vec<u8>) -> Reply<Option<Vec<u8>>> {
        let publication = self.0.publication.get();
        let text = publication.map(|own| own.descriptor().to_json(JsonForm::Line));
        Box::pin(std::future::ready(text))
    }

    fn notify(&self, notify: Notify) -> Reply<bool> {
        let taken = self.0.notifications.push(Notification {
            name: notify.name,
            message: notify.notify_msg,
        });
        Box::pin(std::future::ready(taken))
    }
    fn subscribe(&self, subscriber: Subscriber) -> Reply<()> {
        // Before there is a record nobody knows where to ask for it.
        let publication = self.0.publication.get().cloned();
        Box::pin(async move {
            if let Some(publication) = publication {
                publication.tell(subscriber).await;
            }
        })
    }
}
