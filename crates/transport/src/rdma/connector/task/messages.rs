//! What an endpoint says to its peer's.

use std::sync::Arc;

use tokio::sync::watch;

use super::{EndpointTask, Mail};
use crate::rdma::connector::server_of;
use crate::rdma::endpoint::{Input, Offer};
use crate::rdma::signaling::SignalError;

/// What a message is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To connect. It is given up once the endpoint is closing, which takes no answer to it.
    Handshake,
    /// To have the peer close its end, which matters to the peer. It waits for no handshake, unless
    /// the peer is a C++ engine: that takes all messages one after the other, and tells the end
    /// that is to be closed from the next one by the order alone.
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
        let waits_in_turn = purpose == Purpose::Handshake || !self.machine.peer_confirms();
        let signaling = Arc::clone(&shared.signaling);
        let limit = shared.config.limits.connect;
        let clock = shared.clock;
        shared.tasks.spawn(async move {
            let closing = async {
                match (purpose, open) {
                    // Nothing is ever sent: it ends with the sender.
                    (Purpose::Handshake, Some(mut open)) => while open.changed().await.is_ok() {},
                    (Purpose::Handshake, None) => {}
                    (Purpose::Close, _) => std::future::pending().await,
                }
            };
            let exchange = async {
                let permits = if waits_in_turn {
                    &permits.handshakes
                } else {
                    &permits.closes
                };
                // Never closed.
                let _permit = permits.acquire().await;
                signaling.exchange(&server, offer).await
            };
            let reply = tokio::select! {
                biased;
                () = closing => return,
                reply = clock.within(limit, exchange) => reply,
            };
            let reply = reply.unwrap_or_else(|| {
                let waited = format!("{server} is silent for {} s", limit.as_secs());
                Err(SignalError::NoAnswer(waited))
            });
            if let Some(input) = input(reply) {
                let _ = mailbox.send(Mail::Input(input));
            }
        });
    }
}
