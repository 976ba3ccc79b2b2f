//! How Connection messages reach a peer. The engine implements it over its RPC client; tests wire
//! two transports together with it.

use std::future::Future;
use std::pin::Pin;

use super::endpoint::Offer;

/// A future that owns all it needs.
pub type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Why a message was not answered with an offer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SignalError {
    /// The peer answered with a reason not to connect.
    #[error("{0}")]
    Refused(String),
    /// No answer came: no such peer, no connection, no time, or nothing that can be read.
    #[error("no answer: {0}")]
    NoAnswer(String),
}

/// Carries a Connection message to the server of a NIC path, and its answer back.
pub trait Signaling: Send + Sync + 'static {
    /// Asks `server`, the text before the `@` of the peer's NIC path.
    fn exchange(&self, server: &str, offer: Offer) -> Boxed<Result<Offer, SignalError>>;
}
