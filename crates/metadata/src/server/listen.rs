//! Connections: how many there are, and how long one may do nothing.
//!
//! Slow and silent clients are bounded here, since nobody else sees them: a head that does not end
//! and a connection that sends no further request are closed after
//! [`idle_max`](super::ServerLimits::idle_max), and one whose client does not take its answer, too.
//! Who takes it too slowly is cut off after
//! [`request_time_max`](super::ServerLimits::request_time_max) and that.
//! A body that does not end is bounded in `routes`, by the request's time.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use futures::FutureExt as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

use super::ServerLimits;

/// Who is at the other end of a request's connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Client(pub(super) SocketAddr);

/// Pause after a connection could not be accepted: most often there are no file descriptors left,
/// and trying at once would only burn the processor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Longest head of a request: a key of the default length with every byte encoded, and room for
/// headers.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Serves until `shutdown` completes, and then until the last connection has ended. Dropping it
/// cuts all of them.
pub(super) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: &ServerLimits,
    shutdown: impl Future<Output = ()>,
) {
    let places = Arc::new(Semaphore::new(limits.connections_max));
    let (stop, stopping) = watch::channel(false);
    // Ended with this future, whatever ends it.
    let mut connections = tokio::task::JoinSet::new();
    // Says it once, and not ten times a second for as long as it lasts.
    let mut failing = false;
    let mut shutdown = pin!(shutdown);
    loop {
        // Without a place nobody is accepted: who is new waits in the kernel's queue for the idle
        // ones to be closed.
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            next = next => next,
            // Keeps the set from growing with what has ended.
            Some(_) = connections.join_next() => continue,
            () = &mut shutdown => break,
        };
        match accepted {
            Ok((stream, client)) => {
                failing = false;
                let router = router.clone().layer(Extension(Client(client)));
                let (idle_max, answer_max) = (limits.idle_max, limits.request_time_max);
                let stopping = stopping.clone();
                connections.spawn(async move {
                    let _place = place;
                    converse(stream, router, idle_max, answer_max, stopping).await;
                });
            }
            // The client has gone before it was accepted.
            Err(error) if is_of_connection(&error) => {}
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "cannot accept connections, trying again");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    stop.send_replace(true);
    while connections.join_next().await.is_some() {}
}

async fn converse(
    stream: TcpStream,
    router: Router,
    idle_max: Duration,
    answer_max: Duration,
    mut stopping: watch::Receiver<bool>,
) {
    // Answers are short and awaited.
    let _ = stream.set_nodelay(true);
    // What the client does not acknowledge, or has no room for, for this long ends the connection.
    let _ = SockRef::from(&stream).set_tcp_user_timeout(Some(idle_max));
    // When an answer has to be taken and the next request be there. Asked by nobody who waits for
    // the client.
    let (due, mut until) = watch::channel(None);
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request: Request<Incoming>| {
        due.send_replace(None);
        let answer = router.call(request);
        let due = &due;
        async move {
            let answer = answer.await;
            due.send_replace(Some(Instant::now() + answer_max + idle_max));
            answer
        }
    });
    let overdue = async {
        loop {
            let due = *until.borrow_and_update();
            let changed = until.changed();
            match due {
                // It ends with the connection only.
                None => drop(changed.await),
                Some(due) => tokio::select! {
                    _ = changed => {}
                    () = tokio::time::sleep_until(due) => return,
                },
            }
        }
    };
    let mut overdue = pin!(overdue);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle_max)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let stopped = async {
        // An error means that the server is gone, which cuts this task as well.
        let _ = stopping.wait_for(|stopping| *stopping).await;
    };
    let mut stopped = pin!(stopped.fuse());
    let ended = loop {
        tokio::select! {
            ended = connection.as_mut() => break ended,
            () = &mut stopped => connection.as_mut().graceful_shutdown(),
            () = &mut overdue => {
                tracing::debug!("a client that takes its answer too slowly is cut off");
                return;
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection has ended early");
    }
}

fn is_of_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}
