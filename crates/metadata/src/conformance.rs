//! What every store must do, to run against any of them.
//!
//! For the authors of stores: call [`run`] from a test with a store that is up. The checks write
//! below the prefix that they are given and clean up after themselves. What a store says that it
//! cannot do ([`Capabilities`](crate::Capabilities)) is skipped and reported as such. Not here:
//! outages and restarts, which need a hand on the server.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::error::MetadataError;
use crate::store::{MetadataStore, Version, Watch, WatchEvent, WatchKind};

/// Longest time that a check waits for an event that must come.
const EVENT_TIMEOUT: Duration = Duration::from_secs(15);
/// Time to live of the leases that are left to end.
const LEASE_TTL: Duration = Duration::from_secs(2);
/// Stores may end a lease late (etcd's own minimum, Redis' lazy expiry), never early.
const LEASE_LATE_MAX: Duration = Duration::from_secs(8);
/// Writers of the race for one record.
const RACERS: usize = 16;

/// What ran and what was skipped.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Names of the checks that passed.
    pub passed: Vec<&'static str>,
    /// Names of the checks that the store cannot be asked for.
    pub skipped: Vec<&'static str>,
}

/// A check that did not hold.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Name of the check.
    pub check: &'static str,
    /// What was expected and what came.
    pub reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check, self.reason)
    }
}

impl std::error::Error for Failure {}

type Outcome = Result<(), String>;

/// Runs all checks on `store` below `prefix`.
///
/// # Errors
///
/// The first check that does not hold.
pub async fn run(store: Arc<dyn MetadataStore>, prefix: &str) -> Result<Report, Failure> {
    let mut report = Report::default();
    // The first answer tells an HTTP client which kind of server it talks to.
    let first = records_round_trip(&*store, &format!("{prefix}round-trip/")).await;
    note(&mut report, "records_round_trip", first)?;
    let can = store.capabilities();
    let all = can.list;
    macro_rules! check {
        ($check:ident, $wanted:expr) => {
            if $wanted {
                let scope = format!("{prefix}{}/", stringify!($check));
                note(
                    &mut report,
                    stringify!($check),
                    $check(&store, &scope).await,
                )?;
            } else {
                report.skipped.push(stringify!($check));
            }
        };
    }
    check!(keys_are_taken_literally, true);
    check!(conditions_hold, true);
    check!(one_of_many_creators_wins, can.atomic_conditions);
    check!(one_of_many_swappers_wins, can.atomic_conditions);
    check!(lists_are_exact_and_sorted, all);
    check!(a_lease_takes_its_records_along, can.leases);
    check!(a_lease_kept_alive_stays, can.leases);
    check!(a_record_leaves_its_lease, can.leases);
    check!(a_watch_tells_every_change, can.watch == WatchKind::Events);
    check!(
        a_watch_tells_the_end_of_a_lease,
        can.leases && can.watch == WatchKind::Events
    );
    check!(
        a_watch_of_one_key_sees_it_change,
        can.watch != WatchKind::Events
    );
    Ok(report)
}

fn note(report: &mut Report, check: &'static str, outcome: Outcome) -> Result<(), Failure> {
    outcome.map_err(|reason| Failure { check, reason })?;
    report.passed.push(check);
    Ok(())
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(otherwise()) }
}

fn worked<T>(what: &str, result: Result<T, MetadataError>) -> Result<T, String> {
    result.map_err(|error| format!("{what}: {error}"))
}

fn is_not_found<T: fmt::Debug>(what: &str, result: Result<T, MetadataError>) -> Outcome {
    match result {
        Err(error) if error.is_not_found() => Ok(()),
        other => Err(format!("{what}: expected NotFound, got {other:?}")),
    }
}

fn is_conflict<T: fmt::Debug>(what: &str, result: Result<T, MetadataError>) -> Outcome {
    match result {
        Err(error) if error.is_conflict() => Ok(()),
        other => Err(format!("{what}: expected Conflict, got {other:?}")),
    }
}

fn text(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

async fn records_round_trip(store: &dyn MetadataStore, scope: &str) -> Outcome {
    let key = format!("{scope}k");
    worked("delete", store.delete(&key).await)?;
    is_not_found("get of an absent key", store.get(&key).await)?;
    let gone = worked("delete of an absent key", store.delete(&key).await)?;
    ensure(!gone, || {
        "delete of an absent key said that there was one".into()
    })?;
    // As on the wire, and bigger than one network packet.
    let long = format!("{{\"pad\":\"{}\"}}\n", "x".repeat(300_000));
    for value in ["{\"a\":1}", "{\"a\":1}\n", "\"\u{e9}\u{1f600}\"", &long] {
        worked("put", store.put(&key, text(value), None).await)?;
        let record = worked("get", store.get(&key).await)?;
        ensure(record.key == key, || {
            format!("get of {key} returned {}", record.key)
        })?;
        ensure(record.value == value, || {
            format!("{} bytes came back of {}", record.value.len(), value.len())
        })?;
    }
    let existed = worked("delete", store.delete(&key).await)?;
    ensure(existed, || "delete said that there was no record".into())?;
    is_not_found("get after delete", store.get(&key).await)
}

async fn keys_are_taken_literally(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    let keys: Vec<String> = [
        "mooncake/ram/127.0.0.1:14291",
        "mooncake%2Fram%2F127.0.0.1%3A14291",
        "mooncake/rpc_meta/[fd00::5]:14291",
        "a b+c&d=e?f#g",
        "*[a-z]?\\",
        "\u{e9}\u{1f600}",
    ]
    .iter()
    .map(|key| format!("{scope}{key}"))
    .collect();
    for key in &keys {
        worked("put", store.put(key, text(key), None).await)?;
    }
    for key in &keys {
        let record = worked("get", store.get(key).await)?;
        ensure(record.value == key.as_bytes(), || {
            format!("{key} has the value of {:?}", record.value)
        })?;
    }
    for key in &keys {
        worked("delete", store.delete(key).await)?;
        is_not_found("get after delete", store.get(key).await)?;
    }
    Ok(())
}

async fn conditions_hold(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    let key = format!("{scope}k");
    worked("delete", store.delete(&key).await)?;
    let first = worked(
        "create",
        store.create_if_absent(&key, text("1"), None).await,
    )?;
    is_conflict(
        "create over a record",
        store.create_if_absent(&key, text("2"), None).await,
    )?;
    let read = worked("get", store.get(&key).await)?;
    ensure(read.value == "1", || "a refused create has written".into())?;
    ensure(read.version == first, || {
        "create and get tell different versions".into()
    })?;

    let second = worked(
        "swap",
        store.compare_and_swap(&key, &first, text("2"), None).await,
    )?;
    is_conflict(
        "swap of an old version",
        store.compare_and_swap(&key, &first, text("3"), None).await,
    )?;
    is_conflict(
        "delete of an old version",
        store.delete_if(&key, &first).await,
    )?;
    let read = worked("get", store.get(&key).await)?;
    ensure(read.value == "2", || {
        "a refused change has been made".into()
    })?;
    ensure(read.version == second, || {
        "swap and get tell different versions".into()
    })?;

    let third = worked("put", store.put(&key, text("4"), None).await)?;
    is_conflict(
        "swap after a put",
        store.compare_and_swap(&key, &second, text("5"), None).await,
    )?;
    let existed = worked("delete", store.delete_if(&key, &third).await)?;
    ensure(existed, || {
        "conditional delete said that there was no record".into()
    })?;
    let existed = worked("delete again", store.delete_if(&key, &third).await)?;
    ensure(!existed, || {
        "conditional delete said that there was a record".into()
    })?;
    is_conflict(
        "swap of an absent record",
        store.compare_and_swap(&key, &third, text("6"), None).await,
    )?;
    is_not_found("get after delete", store.get(&key).await)
}

async fn one_of_many_creators_wins(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    let key = format!("{scope}k");
    worked("delete", store.delete(&key).await)?;
    let tries = (0..RACERS).map(|index| {
        let (store, key) = (Arc::clone(store), key.clone());
        async move {
            store
                .create_if_absent(&key, text(&index.to_string()), None)
                .await
        }
    });
    let winner = one_winner(futures::future::join_all(tries).await)?;
    let record = worked("get", store.get(&key).await)?;
    ensure(record.value == winner.to_string(), || {
        format!(
            "creator {winner} won, and the record is of {:?}",
            record.value
        )
    })?;
    worked("delete", store.delete(&key).await).map(drop)
}

async fn one_of_many_swappers_wins(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    let key = format!("{scope}k");
    let version = worked("put", store.put(&key, text("start"), None).await)?;
    let tries = (0..RACERS).map(|index| {
        let (store, key, version) = (Arc::clone(store), key.clone(), version.clone());
        async move {
            store
                .compare_and_swap(&key, &version, text(&index.to_string()), None)
                .await
        }
    });
    let winner = one_winner(futures::future::join_all(tries).await)?;
    let record = worked("get", store.get(&key).await)?;
    ensure(record.value == winner.to_string(), || {
        format!(
            "swapper {winner} won, and the record is of {:?}",
            record.value
        )
    })?;
    worked("delete", store.delete(&key).await).map(drop)
}

fn one_winner(results: Vec<Result<Version, MetadataError>>) -> Result<usize, String> {
    let mut winners = Vec::new();
    for (index, result) in results.into_iter().enumerate() {
        match result {
            Ok(_) => winners.push(index),
            Err(error) if error.is_conflict() => {}
            Err(error) => return Err(format!("racer {index}: {error}")),
        }
    }
    match winners[..] {
        [winner] => Ok(winner),
        _ => Err(format!("winners are {winners:?}")),
    }
}

async fn lists_are_exact_and_sorted(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    // The last two are beside the prefix, the first has a character special to some stores.
    let inside = ["in/*", "in/a", "in/a/b", "in/b"];
    for key in inside.iter().chain(&["in", "inn/a"]) {
        worked(
            "put",
            store.put(&format!("{scope}{key}"), text(key), None).await,
        )?;
    }
    let records = worked("list", store.list(&format!("{scope}in/")).await)?;
    let keys: Vec<&str> = records
        .iter()
        .filter_map(|record| record.key.strip_prefix(scope))
        .collect();
    ensure(keys == inside, || {
        format!("listed {keys:?} instead of {inside:?}")
    })?;
    for record in &records {
        let read = worked("get", store.get(&record.key).await)?;
        ensure(&read == record, || {
            format!("{} differs between list and get", record.key)
        })?;
    }
    let none = worked("list", store.list(&format!("{scope}nothing/")).await)?;
    ensure(none.is_empty(), || {
        format!("an unused prefix lists {none:?}")
    })?;
    for key in inside.iter().chain(&["in", "inn/a"]) {
        worked("delete", store.delete(&format!("{scope}{key}")).await)?;
    }
    Ok(())
}

async fn a_lease_takes_its_records_along(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    let key = |name: &str| format!("{scope}{name}");
    let lease = worked("lease", store.grant_lease(LEASE_TTL).await)?;
    worked("put", store.put(&key("put"), text("1"), Some(&lease)).await)?;
    worked("delete", store.delete(&key("made")).await)?;
    let made = store
        .create_if_absent(&key("made"), text("1"), Some(&lease))
        .await;
    let made = worked("create", made)?;
    let swapped = store
        .compare_and_swap(&key("made"), &made, text("2"), Some(&lease))
        .await;
    worked("swap", swapped)?;
    worked("put", store.put(&key("other"), text("1"), None).await)?;
    let started = tokio::time::Instant::now();
    while store.get(&key("put")).await.is_ok() || store.get(&key("made")).await.is_ok() {
        ensure(started.elapsed() < LEASE_TTL + LEASE_LATE_MAX, || {
            format!(
                "records are still there {:?} after the last sign of life",
                started.elapsed()
            )
        })?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    ensure(started.elapsed() >= LEASE_TTL / 2, || {
        "the lease ended early".into()
    })?;
    match store.keep_alive(&lease).await {
        Err(MetadataError::LeaseLost { .. }) => {}
        other => return Err(format!("keeping a lease that is over: {other:?}")),
    }
    let late = store.put(&key("late"), text("1"), Some(&lease)).await;
    ensure(matches!(late, Err(MetadataError::LeaseLost { .. })), || {
        format!("a put under a lease that is over: {late:?}")
    })?;
    worked(
        "get of a record without the lease",
        store.get(&key("other")).await,
    )?;
    worked("delete", store.delete(&key("other")).await)?;

    let lease = worked("lease", store.grant_lease(LEASE_TTL).await)?;
    worked("put", store.put(&key("put"), text("1"), Some(&lease)).await)?;
    worked("revoke", store.revoke_lease(&lease).await)?;
    is_not_found(
        "get after the lease was revoked",
        store.get(&key("put")).await,
    )?;
    worked("revoke again", store.revoke_lease(&lease).await)
}

async fn a_lease_kept_alive_stays(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    let key = format!("{scope}k");
    let lease = worked("lease", store.grant_lease(LEASE_TTL).await)?;
    worked("put", store.put(&key, text("1"), Some(&lease)).await)?;
    for _ in 0..5 {
        tokio::time::sleep(LEASE_TTL / 2).await;
        worked("keep alive", store.keep_alive(&lease).await)?;
        worked("get", store.get(&key).await)?;
    }
    worked("revoke", store.revoke_lease(&lease).await)
}

async fn a_record_leaves_its_lease(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    let key = format!("{scope}k");
    let lease = worked("lease", store.grant_lease(LEASE_TTL).await)?;
    worked("put", store.put(&key, text("1"), Some(&lease)).await)?;
    worked(
        "put without the lease",
        store.put(&key, text("2"), None).await,
    )?;
    worked("revoke", store.revoke_lease(&lease).await)?;
    let record = worked("get of what left the lease", store.get(&key).await)?;
    ensure(record.value == "2", || {
        format!("it has the value {:?}", record.value)
    })?;
    worked("delete", store.delete(&key).await).map(drop)
}

async fn next_event(watch: &mut Watch, what: &str) -> Result<WatchEvent, String> {
    match tokio::time::timeout(EVENT_TIMEOUT, watch.next()).await {
        Ok(Some(event)) => Ok(event),
        Ok(None) => Err(format!("the watch ended before {what}")),
        Err(_) => Err(format!("no event within {EVENT_TIMEOUT:?}: {what}")),
    }
}

async fn started_watch(store: &Arc<dyn MetadataStore>, prefix: &str) -> Result<Watch, String> {
    let mut watch = worked("watch", store.watch(prefix).await)?;
    match next_event(&mut watch, "the first Resync").await? {
        WatchEvent::Resync => Ok(watch),
        other => Err(format!("the first event is {other:?}")),
    }
}

async fn a_watch_tells_every_change(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    let key = format!("{scope}in/k");
    worked("delete", store.delete(&key).await)?;
    let mut watch = started_watch(store, &format!("{scope}in/")).await?;
    worked(
        "put beside",
        store.put(&format!("{scope}inn"), text("0"), None).await,
    )?;
    let first = store.create_if_absent(&key, text("1"), None).await;
    let first = worked("create", first)?;
    let second = store.compare_and_swap(&key, &first, text("2"), None).await;
    let second = worked("swap", second)?;
    // Report M12: a put over an existing key is news.
    worked("put", store.put(&key, text("3"), None).await)?;
    worked("delete", store.delete(&key).await)?;
    worked("put", store.put(&key, text("4"), None).await)?;
    let fourth = worked("get", store.get(&key).await)?.version;
    worked("delete", store.delete_if(&key, &fourth).await)?;
    worked("put", store.put(&key, text("5"), None).await)?;
    // Several changes may arrive as the last one, so the values must not go back, and the end
    // counts.
    let mut last = 0;
    while last != 5 {
        match next_event(&mut watch, "values up to 5").await? {
            WatchEvent::Put(record) if record.key == key => {
                let value = String::from_utf8_lossy(&record.value).parse().unwrap_or(0);
                ensure(value >= last, || format!("value {value} came after {last}"))?;
                ensure(value != 2 || record.version == second, || {
                    "the event tells another version than the swap".into()
                })?;
                last = value;
            }
            WatchEvent::Delete { key: deleted } if deleted == key => {}
            WatchEvent::Resync => {}
            other => return Err(format!("an event from beside the prefix: {other:?}")),
        }
    }
    worked("delete", store.delete(&key).await)?;
    loop {
        match next_event(&mut watch, "the last deletion").await? {
            WatchEvent::Delete { key: deleted } if deleted == key => break,
            // The same change told twice, or a list asked for.
            WatchEvent::Put(record) if record.value == "5" => {}
            WatchEvent::Resync => {}
            other => return Err(format!("after the last deletion: {other:?}")),
        }
    }
    worked("delete", store.delete(&format!("{scope}inn")).await).map(drop)
}

async fn a_watch_tells_the_end_of_a_lease(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    let key = format!("{scope}k");
    let mut watch = started_watch(store, scope).await?;
    let lease = worked("lease", store.grant_lease(LEASE_TTL).await)?;
    worked("put", store.put(&key, text("1"), Some(&lease)).await)?;
    loop {
        match next_event(&mut watch, "the deletion at the lease's end").await? {
            WatchEvent::Delete { key: deleted } => {
                return ensure(deleted == key, || format!("{deleted} was deleted"));
            }
            // A store that cannot tell it asks for a list, which does.
            WatchEvent::Resync if store.get(&key).await.is_err() => return Ok(()),
            WatchEvent::Resync | WatchEvent::Put(_) => {}
        }
    }
}

async fn a_watch_of_one_key_sees_it_change(store: &Arc<dyn MetadataStore>, scope: &str) -> Outcome {
    let key = format!("{scope}k");
    worked("delete", store.delete(&key).await)?;
    let mut watch = started_watch(store, &key).await?;
    for value in ["1", "2"] {
        worked("put", store.put(&key, text(value), None).await)?;
        match next_event(&mut watch, "the put").await? {
            WatchEvent::Put(record) if record.value == value => {}
            other => return Err(format!("after a put of {value} came {other:?}")),
        }
    }
    worked("delete", store.delete(&key).await)?;
    match next_event(&mut watch, "the deletion").await? {
        WatchEvent::Delete { key: deleted } if deleted == key => Ok(()),
        other => Err(format!("after a deletion came {other:?}")),
    }
}
