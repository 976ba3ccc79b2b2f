//! The scripts, each one atomic step in the server.
//!
//! `rerail:lease:ID` is a hash: `ttl` in milliseconds, and a field `k<key>` for each record.
//! `rerail:lease-of:KEY` names the lease of a record and ends with it. Both are needed because a
//! C++ engine may overwrite a record at any time: the record then has no end, and must not get one
//! from a lease that it has left.

use std::time::Duration;

use bytes::Bytes;
use redis::aio::MultiplexedConnection;
use redis::{RedisResult, Script};

use crate::store::LeaseId;

/// Where the keys of changed records are published.
pub(super) const CHANNEL: &str = "rerail:events";
/// A key that goes when the server loses its data, by which watches find that out.
pub(super) const LIFE: &str = "rerail:life";
const INTERNAL: &str = "rerail:";

const PUT: &str = r"
local current = redis.call('GET', KEYS[1])
if ARGV[2] == 'absent' and current then return {'conflict', current} end
if ARGV[2] == 'value' and current ~= ARGV[3] then
  if current then return {'conflict', current} end
  return {'conflict'}
end
if ARGV[4] == '' then
  redis.call('SET', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[2])
else
  local left = redis.call('PTTL', KEYS[3])
  if left <= 0 then return {'lease'} end
  redis.call('SET', KEYS[1], ARGV[1], 'PX', left)
  redis.call('SET', KEYS[2], ARGV[4], 'PX', left)
  redis.call('HSET', KEYS[3], 'k' .. KEYS[1], '')
end
redis.call('PUBLISH', ARGV[5], KEYS[1])
return {'done'}
";

const DELETE: &str = r"
local current = redis.call('GET', KEYS[1])
if not current then return {'conflict'} end
if ARGV[1] == 'value' and current ~= ARGV[2] then return {'conflict', current} end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('PUBLISH', ARGV[3], KEYS[1])
return {'done'}
";

const KEEP_ALIVE: &str = r"
local ttl = redis.call('HGET', KEYS[1], 'ttl')
if not ttl then return 0 end
redis.call('PEXPIRE', KEYS[1], ttl)
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if field ~= 'ttl' then
    local key = string.sub(field, 2)
    local of = ARGV[2] .. key
    if redis.call('GET', of) == ARGV[1] and redis.call('PTTL', key) > 0 then
      redis.call('PEXPIRE', key, ttl)
      redis.call('PEXPIRE', of, ttl)
    else
      redis.call('HDEL', KEYS[1], field)
    end
  end
end
return 1
";

const REVOKE: &str = r"
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if field ~= 'ttl' then
    local key = string.sub(field, 2)
    local of = ARGV[2] .. key
    if redis.call('GET', of) == ARGV[1] and redis.call('PTTL', key) > 0 then
      redis.call('DEL', key, of)
      redis.call('PUBLISH', ARGV[3], key)
    end
  end
end
redis.call('DEL', KEYS[1])
return 1
";

/// What a change asks of the record.
#[derive(Clone, Copy)]
pub(super) enum Condition<'a> {
    None,
    Absent,
    Value(&'a [u8]),
}

impl Condition<'_> {
    fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Absent => "absent",
            Self::Value(_) => "value",
        }
    }

    fn value(&self) -> &[u8] {
        match self {
            Self::Value(value) => value,
            Self::None | Self::Absent => b"",
        }
    }
}

/// What a change came to.
pub(super) enum Outcome {
    Done,
    /// With the value found, if there is a record.
    Conflict(Option<Bytes>),
    NoLease,
}

/// True for keys that are no records.
pub(super) fn is_internal(key: &str) -> bool {
    key.starts_with(INTERNAL)
}

fn lease_key(lease: &LeaseId) -> String {
    format!("{INTERNAL}lease:{lease}")
}

/// Prefix of the keys that name the lease of a record.
const LEASE_OF: &str = "rerail:lease-of:";

#[derive(Debug)]
pub(super) struct Scripts {
    put: Script,
    delete: Script,
    keep_alive: Script,
    revoke: Script,
}

impl Scripts {
    pub(super) fn new() -> Self {
        Self {
            put: Script::new(PUT),
            delete: Script::new(DELETE),
            keep_alive: Script::new(KEEP_ALIVE),
            revoke: Script::new(REVOKE),
        }
    }

    pub(super) async fn put(
        &self,
        connection: &mut MultiplexedConnection,
        key: &str,
        value: &Bytes,
        condition: Condition<'_>,
        lease: Option<&LeaseId>,
    ) -> RedisResult<Outcome> {
        let answer: Vec<Vec<u8>> = self
            .put
            .key(key)
            .key(format!("{LEASE_OF}{key}"))
            .key(lease.map_or_else(|| format!("{INTERNAL}none"), lease_key))
            .arg(value.as_ref())
            .arg(condition.word())
            .arg(condition.value())
            .arg(lease.map_or("", LeaseId::as_str))
            .arg(CHANNEL)
            .invoke_async(connection)
            .await?;
        Ok(outcome(answer))
    }

    pub(super) async fn delete(
        &self,
        connection: &mut MultiplexedConnection,
        key: &str,
        condition: Condition<'_>,
    ) -> RedisResult<Outcome> {
        let answer: Vec<Vec<u8>> = self
            .delete
            .key(key)
            .key(format!("{LEASE_OF}{key}"))
            .arg(condition.word())
            .arg(condition.value())
            .arg(CHANNEL)
            .invoke_async(connection)
            .await?;
        Ok(outcome(answer))
    }

    pub(super) async fn grant(
        &self,
        connection: &mut MultiplexedConnection,
        lease: &LeaseId,
        ttl: Duration,
    ) -> RedisResult<()> {
        let ttl_ms = ttl.as_millis().max(1) as u64;
        let key = lease_key(lease);
        redis::pipe()
            .atomic()
            .hset(&key, "ttl", ttl_ms)
            .ignore()
            .cmd("PEXPIRE")
            .arg(&key)
            .arg(ttl_ms)
            .ignore()
            .query_async(connection)
            .await
    }

    /// False if the lease is gone.
    pub(super) async fn keep_alive(
        &self,
        connection: &mut MultiplexedConnection,
        lease: &LeaseId,
    ) -> RedisResult<bool> {
        self.keep_alive
            .key(lease_key(lease))
            .arg(lease.as_str())
            .arg(LEASE_OF)
            .invoke_async(connection)
            .await
    }

    pub(super) async fn revoke(
        &self,
        connection: &mut MultiplexedConnection,
        lease: &LeaseId,
    ) -> RedisResult<()> {
        let _: i64 = self
            .revoke
            .key(lease_key(lease))
            .arg(lease.as_str())
            .arg(LEASE_OF)
            .arg(CHANNEL)
            .invoke_async(connection)
            .await?;
        Ok(())
    }
}

fn outcome(answer: Vec<Vec<u8>>) -> Outcome {
    let mut parts = answer.into_iter();
    match parts.next().as_deref() {
        Some(b"done") => Outcome::Done,
        Some(b"lease") => Outcome::NoLease,
        _ => Outcome::Conflict(parts.next().map(Bytes::from)),
    }
}
