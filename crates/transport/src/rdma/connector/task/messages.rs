//! What an endpoint says to its peer's.

use std::sync::Arc;

use tokio::sync::watch;

use super::super::super::endpoint::{Input, Offer};
use super::super::super::signaling::SignalError;
use super::super::server_of;
use super::{EndpointTask, Mail};

/// What a message is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To connect. It is not said any more once the endpoint is closing, and nobody takes the
    /// answer once that is over.
    Handshake,
    /// To have the peer close its end, which waits for no handshake and matters to the peer.
    Close,
}

impl EndpointTask {
    /// Sends a message and makes an input of its outcome.
    pub(super) fn exchange<F>(&self, offer: Offer, purpose: Purpose, input: F)
    where
        F: FnOnce(Result<Offer, SignalError>) -> Option<Input> + Send + 'static,
    {
        let shared = &self.connector.shared;
        let server = server_of(&self.peer_path).to_owned();
        let (permits, mailbox) = (self.connector.permits(&server), self.mailbox.clone());
        let open = self.open.as_ref().map(watch::Sender::subscribe);
        let signaling = Arc::clone(&shared.signaling);
        let limit = shared.config.limits.connect;
        let clock = shared.clock;
        shared.tasks.spawn(async move {
            let closing = async {
                match (purpose, open) {
                    // Nothing is ever sent.
                    (Purpose::Handshake, Some(mut open)) => while open.changed().await.is_ok() {},
                    (Purpose::Handshake, None) => {}
                    (Purpose::Close, _) => std::future::pending().await,
                }
            };
            let exchange = async {
                let permits = match purpose {
                    Purpose::Handshake => &permits.handshakes,
                    Purpose::Close => &permits.closes,
                };
                let _permit = tokio::select! {
                    biased;
                    () = closing => return None,
                    // Never closed.
                    permit = permits.acquire() => permit,
                };
                Some(signaling.exchange(&server, offer).await)
            };
            let over = async {
                match purpose {
                    Purpose::Handshake => mailbox.closed().await,
                    Purpose::Close => std::future::pending().await,
                }
            };
            let reply = tokio::select! {
                biased;
                reply = clock.within(limit, exchange) => reply,
                () = over => return,
            };
            let reply = match reply {
                Some(Some(reply)) => reply,
                Some(None) => return,
                None => {
                    let waited = format!("{server} is silent for {} s", limit.as_secs());
                    Err(SignalError::NoAnswer(waited))
                }
            };
            if let Some(input) = input(reply) {
                let _ = mailbox.send(Mail::Input(input));
            }
        });
    }
}
