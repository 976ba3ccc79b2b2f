//! The members of an etcd cluster, one of which is used until it fails.
//!
//! The client library would spread requests over all members, frozen ones included. Here a member
//! that does not answer within its share of the deadline counts as dead, and the next one is
//! asked.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Error, Identity, TlsOptions};
use tokio::time::Instant;

use crate::error::MetadataError;
use crate::secret::Secret;
use crate::tls::TlsMaterial;

/// Time to connect to one member.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1_500);
/// Pings that find a frozen member under an idle watch. etcd closes connections of clients that
/// ping more often than each 5 s.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// Least share of a deadline for one member.
const ATTEMPT_MIN: Duration = Duration::from_millis(400);

/// gRPC's status codes that matter here.
mod code {
    pub(super) const INVALID_ARGUMENT: i32 = 3;
    pub(super) const NOT_FOUND: i32 = 5;
    pub(super) const PERMISSION_DENIED: i32 = 7;
    pub(super) const RESOURCE_EXHAUSTED: i32 = 8;
    pub(super) const UNIMPLEMENTED: i32 = 12;
    pub(super) const UNAUTHENTICATED: i32 = 16;
}

pub(super) struct Members {
    name: String,
    endpoints: Vec<String>,
    options: ConnectOptions,
    clients: Vec<Mutex<Option<Client>>>,
    current: AtomicUsize,
    pub(super) deadline: Duration,
}

impl std::fmt::Debug for Members {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The options hold the password.
        f.debug_struct("Members")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// What one attempt came to.
pub(super) enum Failed {
    /// The member said no; another one would, too.
    For(MetadataError),
    /// The member cannot be reached, is frozen, or has no leader; it may have done the work.
    Member(String),
}

impl Members {
    pub(super) async fn new(
        name: String,
        endpoints: Vec<String>,
        user: Option<(String, Secret)>,
        tls: Option<TlsMaterial>,
        deadline: Duration,
    ) -> Result<Self, MetadataError> {
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_keep_alive(PING_INTERVAL, PING_TIMEOUT)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if let Some(material) = tls {
            let mut tls = TlsOptions::new();
            if let Some(ca) = material.ca {
                tls = tls.ca_certificate(Certificate::from_pem(ca.text));
            }
            if let Some(own) = material.identity {
                tls = tls.identity(Identity::from_pem(own.certificates.text, own.key.text));
            }
            options = options.with_tls(tls);
        }
        // Without a user this does not connect: it only finds what is wrong with the options.
        Client::connect(&endpoints, Some(options.clone()))
            .await
            .map_err(|error| MetadataError::Setting {
                name: name.clone(),
                reason: format!("cannot make a client: {}", causes(&error)),
            })?;
        if let Some((user, password)) = user {
            options = options.with_user(user, password.expose());
        }
        Ok(Self {
            name,
            clients: endpoints.iter().map(|_| Mutex::new(None)).collect(),
            endpoints,
            options,
            current: AtomicUsize::new(0),
            deadline,
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Index of the member in use.
    pub(super) fn current(&self) -> usize {
        self.current.load(Ordering::Acquire) % self.endpoints.len()
    }

    /// Gives up a member, unless somebody else has already.
    pub(super) fn give_up(&self, member: usize) {
        *self.slot(member) = None;
        let next = (member + 1) % self.endpoints.len();
        let _ = self
            .current
            .compare_exchange(member, next, Ordering::AcqRel, Ordering::Acquire);
    }

    fn slot(&self, member: usize) -> std::sync::MutexGuard<'_, Option<Client>> {
        self.clients[member]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// A client of one member. Connects when it is used; with a user, authenticates here.
    pub(super) async fn client(&self, member: usize) -> Result<Client, Error> {
        if let Some(client) = self.slot(member).as_ref() {
            return Ok(client.clone());
        }
        let endpoint = [self.endpoints[member].as_str()];
        let client = Client::connect(endpoint, Some(self.options.clone())).await?;
        *self.slot(member) = Some(client.clone());
        Ok(client)
    }

    /// Runs `attempt` with one member after the other until one answers or the deadline passes.
    /// `attempt` gets the client, and true if an earlier member may have done the work already.
    pub(super) async fn run<T, F>(
        &self,
        operation: &'static str,
        attempt: impl Fn(Client, bool) -> F,
    ) -> Result<T, MetadataError>
    where
        F: Future<Output = Result<T, Failed>>,
    {
        let until = Instant::now() + self.deadline;
        let share = (self.deadline / self.endpoints.len() as u32).max(ATTEMPT_MIN);
        let mut in_doubt = false;
        let mut last: Option<String> = None;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(match last {
                    Some(reason) => MetadataError::Unavailable {
                        store: self.name.clone(),
                        operation,
                        reason,
                    },
                    None => MetadataError::TimedOut {
                        store: self.name.clone(),
                        operation,
                        deadline: self.deadline,
                    },
                });
            }
            let member = self.current();
            let tried = async {
                let client = self
                    .client(member)
                    .await
                    .map_err(|error| self.judge(operation, error))?;
                attempt(client, in_doubt).await
            };
            match tokio::time::timeout(left.min(share), tried).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(Failed::For(error))) => return Err(error),
                Ok(Err(Failed::Member(reason))) => {
                    last = Some(format!("{}: {reason}", self.endpoints[member]));
                }
                Err(_) => last = None,
            }
            in_doubt = true;
            self.give_up(member);
            if last.is_some() {
                // A member that refuses at once must not be asked a thousand times a second.
                tokio::time::sleep(Duration::from_millis(50).min(left)).await;
            }
        }
    }

    /// Sorts an error into one of the request and one of the member.
    pub(super) fn judge(&self, operation: &'static str, error: Error) -> Failed {
        let store = self.name.clone();
        let reason = causes(&error);
        let Error::GRpcStatus(status) = &error else {
            return match error {
                Error::InvalidArgs(_) | Error::InvalidUri(_) => {
                    Failed::For(MetadataError::Refused {
                        store,
                        operation,
                        reason,
                    })
                }
                _ => Failed::Member(reason),
            };
        };
        let message = status.message();
        if message.contains("lease not found") {
            return Failed::For(MetadataError::LeaseLost {
                store,
                lease: String::new(),
            });
        }
        let too_large = message.contains("request is too large")
            || message.contains("larger than max")
            || message.contains("message length too large");
        if too_large {
            return Failed::For(MetadataError::TooLarge {
                store,
                key: String::new(),
                size: 0,
                limit: 0,
                hint: super::TOO_LARGE_HINT,
            });
        }
        match i32::from(status.code()) {
            // A token that is over has been renewed by the library already; one that a restarted
            // member does not know makes the next attempt authenticate anew.
            code::UNAUTHENTICATED if message.contains("invalid auth token") => {
                Failed::Member(reason)
            }
            code::INVALID_ARGUMENT
            | code::NOT_FOUND
            | code::PERMISSION_DENIED
            | code::UNIMPLEMENTED
            | code::UNAUTHENTICATED => Failed::For(MetadataError::Refused {
                store,
                operation,
                reason,
            }),
            code::RESOURCE_EXHAUSTED => Failed::For(MetadataError::Unavailable {
                store,
                operation,
                reason,
            }),
            _ => Failed::Member(reason),
        }
    }
}

/// The error in words with what caused it. gRPC's metadata stays out: it may hold a token.
pub(super) fn causes(error: &Error) -> String {
    let (mut text, mut source): (String, Option<&(dyn std::error::Error + 'static)>) = match error {
        Error::GRpcStatus(status) => (
            format!("{:?}: {}", status.code(), status.message()),
            std::error::Error::source(status),
        ),
        Error::TransportError(error) => (error.to_string(), std::error::Error::source(error)),
        other => (other.to_string(), None),
    };
    while let Some(cause) = source {
        let said = cause.to_string();
        if !text.contains(&said) {
            text += &format!(": {said}");
        }
        source = cause.source();
    }
    text
}
