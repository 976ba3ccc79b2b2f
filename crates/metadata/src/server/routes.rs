//! The HTTP side of the server.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody as _};
use axum::extract::{RawQuery, Request, State};
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::StreamExt as _;
use percent_encoding::percent_decode_str;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::listen::Client;
use super::table::{Condition, Refusal, Stored};
use super::view::Since;
use super::{CHANGE_BYTES, MetadataServer, disk, wire};
use crate::store::AbortOnDrop;

/// Marks every answer, so that clients know that versions, lists, leases and watches work.
const MARK: &str = "rerail-metadata";
/// Version of the additions to the plain endpoints.
const MARK_VERSION: HeaderValue = HeaderValue::from_static("1");
const WATCH_PATH: &str = "/metadata/watch";
const LEASE: &str = "rerail-lease";
/// What comes before a token, in any case.
const BEARER: &[u8] = b"Bearer ";
/// Longest time that a watch is held without an event.
const WAIT_MAX: Duration = Duration::from_secs(60);
const WAIT_DEFAULT: Duration = Duration::from_secs(20);
/// Shortest time to live of a lease: one that a heartbeat can keep.
const TTL_MIN: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(super) struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    deletes: AtomicU64,
    conflicts: AtomicU64,
    watch_answers: AtomicU64,
    unauthorized: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

pub(super) fn router(server: MetadataServer) -> Router {
    let guarded = Router::new()
        .route("/metadata", get(read).put(put).delete(delete))
        .route(WATCH_PATH, get(watch))
        .route(
            "/metadata/lease",
            axum::routing::post(grant).put(keep_alive).delete(end_lease),
        )
        .route("/metrics", get(metrics))
        .layer(middleware::from_fn_with_state(server.clone(), authorize));
    Router::new()
        .route("/health", get(health))
        .merge(guarded)
        .layer(middleware::map_response(mark))
        .with_state(server)
}

async fn mark(mut response: Response) -> Response {
    response.headers_mut().insert(MARK, MARK_VERSION);
    response
}

async fn authorize(State(server): State<MetadataServer>, request: Request, next: Next) -> Response {
    if let Some(token) = &server.shared.options.token {
        let sent = request
            .headers()
            .get(header::AUTHORIZATION)
            .and_then(|value| value.as_bytes().split_at_checked(BEARER.len()))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(BEARER))
            .map(|(_, token)| token);
        if !sent.is_some_and(|sent| equal_in_constant_time(sent, token.expose().as_bytes())) {
            count(&server.shared.counters.unauthorized);
            let hint = [(header::WWW_AUTHENTICATE, "Bearer")];
            return (
                StatusCode::UNAUTHORIZED,
                hint,
                "bearer token missing or wrong",
            )
                .into_response();
        }
    }
    if request.uri().path() == WATCH_PATH {
        // Watches wait, and have a bound of their own.
        return next.run(request).await;
    }
    let Ok(_permit) = server.shared.requests.try_acquire() else {
        return Rejection::Busy("too many requests").into_response();
    };
    let limit = server.shared.options.limits.request_time_max;
    // A client that sends its body byte by byte must not hold a place for ever.
    match tokio::time::timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let text = format!("not complete within {} ms", limit.as_millis());
            (StatusCode::REQUEST_TIMEOUT, text).into_response()
        }
    }
}

/// Takes the same time wherever the first difference is.
fn equal_in_constant_time(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len()
        && left
            .iter()
            .zip(right)
            .fold(0, |differs, (left, right)| differs | (left ^ right))
            == 0
}

/// The parameters of a query. `+` stands for itself: a key with a bare `+` is that key, and
/// clients that mean a space write `%20`.
struct Query(Vec<(String, String)>);

impl Query {
    fn parse(query: Option<&str>) -> Result<Self, Rejection> {
        let decode = |text: &str| {
            percent_decode_str(text)
                .decode_utf8()
                .map(String::from)
                .map_err(|_| bad_request("the query is not UTF-8"))
        };
        query
            .unwrap_or_default()
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| {
                let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
                Ok((decode(name)?, decode(value)?))
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(given, _)| given == name)
            .map(|(_, value)| value.as_str())
    }

    fn key(&self, server: &MetadataServer) -> Result<&str, Rejection> {
        let limit = server.shared.options.limits.key_bytes_max;
        match self.get("key") {
            None | Some("") => Err(bad_request("missing key")),
            Some(key) if key.len() > limit => {
                Err(bad_request(&format!("the key is over {limit} bytes")))
            }
            Some(key) => Ok(key),
        }
    }

    /// What keys start with, if it is given; longer than a key can be, it is a mistake.
    fn prefix(&self, server: &MetadataServer) -> Result<Option<&str>, Rejection> {
        let limit = server.shared.options.limits.key_bytes_max;
        match self.get("prefix") {
            Some(prefix) if prefix.len() > limit => {
                Err(bad_request(&format!("the prefix is over {limit} bytes")))
            }
            prefix => Ok(prefix),
        }
    }

    fn number(&self, name: &str) -> Result<Option<u64>, Rejection> {
        self.get(name)
            .map(|value| {
                value
                    .parse()
                    .map_err(|_| bad_request(&format!("{name} is not a number")))
            })
            .transpose()
    }
}

fn bad_request(reason: &str) -> Rejection {
    Rejection::BadRequest(reason.to_owned())
}

/// Who asks, where the connection is one of our own listener's.
fn client(extensions: &Extensions) -> Option<SocketAddr> {
    extensions.get::<Client>().map(|client| client.0)
}

fn etag(version: u64) -> [(header::HeaderName, String); 1] {
    [(header::ETAG, format!("\"{version}\""))]
}

fn json(body: Body) -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (kind, body).into_response()
}

/// An answer that is made while it is sent. `held` is let go of with it. A client that has not
/// taken it within `limit` does not get the rest: the time goes by also while the client takes
/// nothing, when nobody asks for the next piece.
fn streamed(
    pieces: impl Iterator<Item = Bytes> + Send + 'static,
    limit: Duration,
    held: impl Send + 'static,
) -> Body {
    let source = Arc::new(Mutex::new(Some((pieces, held))));
    let rest = Arc::downgrade(&source);
    let timer = AbortOnDrop(tokio::spawn(async move {
        tokio::time::sleep(limit).await;
        if let Some(source) = rest.upgrade() {
            lock(&source).take();
        }
    }));
    let in_time = std::iter::from_fn(move || {
        let _timer = &timer;
        match lock(&source).as_mut() {
            Some((pieces, _)) => pieces.next().map(Ok),
            None => Some(Err(io::Error::from(io::ErrorKind::TimedOut))),
        }
    });
    Body::from_stream(futures::stream::iter(in_time))
}

/// One whose user panicked has no more pieces worth sending, but no less either.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn condition(headers: &HeaderMap) -> Result<Condition, Rejection> {
    let text = |name| {
        headers
            .get(name)
            .map(|value: &HeaderValue| value.to_str().unwrap_or_default().trim().to_owned())
    };
    match (text(header::IF_MATCH), text(header::IF_NONE_MATCH)) {
        (None, None) => Ok(Condition::None),
        (None, Some(none)) if none == "*" => Ok(Condition::Absent),
        (Some(version), None) => Ok(version
            .strip_prefix('"')
            .and_then(|version| version.strip_suffix('"'))
            .and_then(|version| version.parse().ok())
            .map_or(Condition::Never, Condition::Version)),
        _ => Err(bad_request(
            "expected If-Match: \"version\" or If-None-Match: *",
        )),
    }
}

/// Why a request ends without success.
#[derive(Debug)]
pub(super) enum Rejection {
    BadRequest(String),
    Refused(Refusal),
    Busy(&'static str),
    TooSlow,
    DiskFailed,
}

impl From<disk::DiskFailed> for Rejection {
    fn from(_: disk::DiskFailed) -> Self {
        Self::DiskFailed
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        let (status, text) = match self {
            Self::BadRequest(reason) => (StatusCode::BAD_REQUEST, reason),
            Self::Busy(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason.to_owned()),
            Self::TooSlow => (
                StatusCode::REQUEST_TIMEOUT,
                "the value comes too slowly to be there in time".to_owned(),
            ),
            Self::DiskFailed => (
                StatusCode::SERVICE_UNAVAILABLE,
                "the disk has failed; see the server's log".to_owned(),
            ),
            Self::Refused(Refusal::Conflict(current)) => {
                let text = "the record is not the expected one";
                let status = StatusCode::PRECONDITION_FAILED;
                return match current {
                    Some(version) => (status, etag(version), text).into_response(),
                    None => (status, text).into_response(),
                };
            }
            Self::Refused(Refusal::LeaseGone) => (StatusCode::GONE, "the lease is gone".into()),
            Self::Refused(Refusal::NotFound) => {
                (StatusCode::NOT_FOUND, "metadata not found".into())
            }
            Self::Refused(Refusal::TooLarge { limit }) => (
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the value is over {limit} bytes"),
            ),
            Self::Refused(Refusal::Full(what)) => {
                (StatusCode::INSUFFICIENT_STORAGE, what.to_owned())
            }
        };
        (status, text).into_response()
    }
}

fn refuse(server: &MetadataServer, refusal: Refusal) -> Rejection {
    if matches!(refusal, Refusal::Conflict(_)) {
        count(&server.shared.counters.conflicts);
    }
    Rejection::Refused(refusal)
}

pub(super) type Answer = Result<Response, Rejection>;

async fn read(State(server): State<MetadataServer>, RawQuery(query): RawQuery) -> Answer {
    count(&server.shared.counters.reads);
    let query = Query::parse(query.as_deref())?;
    if let Some(prefix) = query.prefix(&server)? {
        return list(&server, prefix).await;
    }
    let key = query.key(&server)?;
    let stored = server.shared.visible.lock().get(key).cloned();
    let stored = stored.ok_or_else(|| refuse(&server, Refusal::NotFound))?;
    Ok((etag(stored.version), stored.value).into_response())
}

async fn list(server: &MetadataServer, prefix: &str) -> Answer {
    let shared = &server.shared;
    let place = Arc::clone(&shared.lists).acquire_owned().await;
    let place = place.map_err(|_| Rejection::Busy("stopping"))?;
    let (revision, records) = {
        let view = shared.visible.lock();
        let listed = |(key, stored): (&Arc<str>, &Stored)| wire::Listed {
            key: Arc::clone(key),
            version: stored.version,
            value: stored.value.clone(),
        };
        let records = view.list(prefix).map(listed).collect();
        (view.revision(), records)
    };
    let limit = shared.options.limits.request_time_max;
    let pieces = wire::records(revision, records);
    Ok(json(streamed(pieces, limit, place)))
}

/// Bytes of a value that are received without asking for room: what ordinary records have.
const SHORT_BYTES: usize = 64 << 10;

/// A value, while it counts among those that are being received.
struct Received {
    value: Bytes,
    _room: Option<OwnedSemaphorePermit>,
}

/// The pace that a long value has to keep, so that nobody holds room for nothing.
struct Pace {
    since: Instant,
    left: Duration,
    bytes: usize,
    late_max: Duration,
}

impl Pace {
    /// To have `bytes` by the end of a request that began at `begun`.
    fn new(begun: Instant, time: Duration, bytes: usize) -> Self {
        let since = Instant::now();
        Self {
            since,
            left: (begun + time).saturating_duration_since(since),
            bytes,
            late_max: time / 16,
        }
    }

    /// When more has to come than what is `received`.
    fn more_by(&self, received: usize) -> Instant {
        let part = received as f64 / self.bytes.max(1) as f64;
        self.since + self.left.mul_f64(part) + self.late_max
    }
}

/// Reads a request's body. Long ones wait for room, all of it at once, so that however many come
/// together they neither fill the memory nor wait for each other's halves; then they have to come
/// at a pace at which they are whole in time. Short ones do not wait.
async fn receive(server: &MetadataServer, body: Body) -> Result<Received, Rejection> {
    let begun = Instant::now();
    let limits = &server.shared.options.limits;
    let limit = limits.value_bytes_max;
    let too_large = || Rejection::Refused(Refusal::TooLarge { limit });
    let hint = body.size_hint();
    if hint.lower() > limit as u64 {
        return Err(too_large());
    }
    // Who does not say how much it is may send the most, and needs room once it is no longer short.
    let announced = hint.upper().map(|most| most.min(limit as u64) as usize);
    let most = announced.unwrap_or(limit);
    let mut expected = announced.unwrap_or(0);
    let mut value = Vec::new();
    let mut held: Option<(OwnedSemaphorePermit, Pace)> = None;
    let mut stream = body.into_data_stream();
    loop {
        if held.is_none() && expected > SHORT_BYTES {
            let units = u32::try_from(most).unwrap_or(u32::MAX);
            let room = Arc::clone(&server.shared.incoming).acquire_many_owned(units);
            let room = room.await.map_err(|_| Rejection::Busy("stopping"))?;
            held = Some((room, Pace::new(begun, limits.request_time_max, most)));
        }
        let part = match &held {
            None => stream.next().await,
            Some((_, pace)) => tokio::time::timeout_at(pace.more_by(value.len()), stream.next())
                .await
                .map_err(|_| Rejection::TooSlow)?,
        };
        let Some(part) = part else { break };
        let part = part.map_err(|_| bad_request("the body has ended early"))?;
        if value.len() + part.len() > most {
            return Err(too_large());
        }
        value.extend_from_slice(&part);
        expected = expected.max(value.len());
    }
    let room = held.map(|(room, _)| room);
    // Exactly as long as it is: what came from the connection would keep its whole buffer.
    let value = Bytes::from(value.into_boxed_slice());
    Ok(Received { value, _room: room })
}

async fn put(
    State(server): State<MetadataServer>,
    RawQuery(query): RawQuery,
    extensions: Extensions,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    count(&server.shared.counters.writes);
    let query = Query::parse(query.as_deref())?;
    let key = query.key(&server)?;
    let condition = condition(&headers)?;
    let lease = headers
        .get(LEASE)
        .map(|lease| {
            lease
                .to_str()
                .map_err(|_| bad_request("the lease is not text"))
        })
        .transpose()?;
    let received = receive(&server, body).await?;
    let value = received.value.clone();
    let outcome = server
        .shared
        .change(
            client(&extensions),
            CHANGE_BYTES + value.len(),
            |table, _| table.put(key, value, condition, lease),
        )
        .await?;
    let version = outcome.map_err(|refusal| refuse(&server, refusal))?;
    Ok((etag(version), "metadata updated").into_response())
}

async fn delete(
    State(server): State<MetadataServer>,
    RawQuery(query): RawQuery,
    extensions: Extensions,
    headers: HeaderMap,
) -> Answer {
    count(&server.shared.counters.deletes);
    let query = Query::parse(query.as_deref())?;
    let key = query.key(&server)?;
    let condition = condition(&headers)?;
    let outcome = server
        .shared
        .change(client(&extensions), CHANGE_BYTES, |table, _| {
            table.delete(key, condition)
        })
        .await?;
    outcome.map_err(|refusal| refuse(&server, refusal))?;
    Ok("metadata deleted".into_response())
}

async fn watch(State(server): State<MetadataServer>, RawQuery(query): RawQuery) -> Answer {
    let query = Query::parse(query.as_deref())?;
    let prefix = query.prefix(&server)?.unwrap_or_default();
    let after = query.number("after")?;
    let wait = query
        .number("wait_ms")?
        .map_or(WAIT_DEFAULT, Duration::from_millis)
        .min(WAIT_MAX);
    let shared = &server.shared;
    let Ok(_permit) = shared.watches.try_acquire() else {
        return Err(Rejection::Busy("too many watches, or stopping"));
    };
    let deadline = tokio::time::Instant::now() + wait;
    // Subscribed before the first look, so that no change falls in between.
    let mut changed = shared.visible.subscribe();
    loop {
        changed.borrow_and_update();
        let (revision, resync, events) = {
            let view = shared.visible.lock();
            match after.map_or(Since::Resync, |after| view.since(prefix, after)) {
                Since::Resync => (view.revision(), true, Vec::new()),
                Since::Events { events, revision } => (revision, false, events),
            }
        };
        let wake = async { changed.changed().await.is_ok() && !shared.watches.is_closed() };
        let over = resync || !events.is_empty() || shared.watches.is_closed();
        if over
            || !tokio::time::timeout_at(deadline, wake)
                .await
                .unwrap_or(false)
        {
            count(&shared.counters.watch_answers);
            let limit = shared.options.limits.request_time_max;
            let pieces = wire::events(revision, resync, events);
            return Ok(json(streamed(pieces, limit, ())));
        }
    }
}

async fn grant(State(server): State<MetadataServer>, RawQuery(query): RawQuery) -> Answer {
    let query = Query::parse(query.as_deref())?;
    let max = server.shared.options.limits.lease_ttl_max;
    let ttl = query
        .number("ttl_ms")?
        .map(Duration::from_millis)
        .filter(|ttl| (TTL_MIN..=max).contains(ttl))
        .ok_or_else(|| {
            let range = format!("{}..={}", TTL_MIN.as_millis(), max.as_millis());
            bad_request(&format!("expected ttl_ms in {range}"))
        })?;
    let id = uuid::Uuid::now_v7().simple().to_string();
    let outcome = server
        .shared
        .change(None, CHANGE_BYTES, |table, now| {
            table.grant_lease(id.clone(), ttl, now)
        })
        .await?;
    outcome.map_err(|refusal| refuse(&server, refusal))?;
    // Its time begins when its owner hears of it.
    if server.shared.keep_alive(&id)?.is_err() {
        return Err(Rejection::Busy("the disk took longer than the lease lives"));
    }
    Ok(json(wire::lease(&id, ttl.as_millis() as u64).into()))
}

pub(super) async fn keep_alive(
    State(server): State<MetadataServer>,
    RawQuery(query): RawQuery,
) -> Answer {
    let query = Query::parse(query.as_deref())?;
    let id = query.get("id").ok_or_else(|| bad_request("missing id"))?;
    let outcome = server.shared.keep_alive(id)?;
    let ttl = outcome.map_err(|refusal| refuse(&server, refusal))?;
    Ok(json(wire::lease(id, ttl.as_millis() as u64).into()))
}

async fn end_lease(
    State(server): State<MetadataServer>,
    RawQuery(query): RawQuery,
    extensions: Extensions,
) -> Answer {
    let query = Query::parse(query.as_deref())?;
    let id = query.get("id").ok_or_else(|| bad_request("missing id"))?;
    let outcome = server
        .shared
        .change(client(&extensions), CHANGE_BYTES, |table, _| {
            table.end_lease(id)
        })
        .await?;
    outcome.map_err(|refusal| refuse(&server, refusal))?;
    Ok("lease ended".into_response())
}

async fn health(State(server): State<MetadataServer>) -> Answer {
    if server.shared.disk_has_failed() {
        return Err(Rejection::DiskFailed);
    }
    Ok("OK".into_response())
}

async fn metrics(State(server): State<MetadataServer>) -> String {
    let shared = &server.shared;
    let [bytes, leases] = shared.lock().table.sizes();
    let [records, events] = shared.visible.lock().sizes();
    let limits = &shared.options.limits;
    let watches = limits
        .watches_max
        .saturating_sub(shared.watches.available_permits());
    let receiving = limits
        .incoming_bytes_max
        .max(limits.value_bytes_max)
        .saturating_sub(shared.incoming.available_permits());
    let gauges = [
        ("records", records),
        ("bytes", bytes),
        ("leases", leases),
        ("events_kept", events),
        ("watches_waiting", watches),
        ("receiving_bytes", receiving),
    ];
    let counters = &shared.counters;
    let totals = [
        ("reads", &counters.reads),
        ("writes", &counters.writes),
        ("deletes", &counters.deletes),
        ("conflicts", &counters.conflicts),
        ("watch_answers", &counters.watch_answers),
        ("unauthorized", &counters.unauthorized),
    ];
    let mut text = String::new();
    for (name, value) in gauges {
        text += &format!("# TYPE rerail_metadata_{name} gauge\nrerail_metadata_{name} {value}\n");
    }
    for (name, counter) in totals {
        let value = counter.load(Ordering::Relaxed);
        text += &format!(
            "# TYPE rerail_metadata_{name}_total counter\nrerail_metadata_{name}_total {value}\n"
        );
    }
    text
}
