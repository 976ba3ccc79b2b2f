//! One peer: which process has its name, and what is known of it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rerail_metadata::descriptor::{Device, DeviceState, InstanceId, SegmentDescriptor};

use super::io::{NicChange, PeerRecord};
use crate::machine::Time;
use crate::machine::backoff::Backoff;
use crate::machine::ids::PeerId;

/// Retired instances that are remembered for a name.
const RETIRED_MAX: usize = 16;

/// Which process has a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Identity {
    /// It says so itself.
    Instance(InstanceId),
    /// A process without the member `rerail` is known by its RPC location, where that is told.
    Plain(Option<(String, u16)>),
}

impl Identity {
    fn of(record: &PeerRecord) -> Self {
        match &record.descriptor.rerail {
            Some(member) => Self::Instance(member.instance),
            None => Self::Plain(record.rpc.clone()),
        }
    }

    /// Whether both are one process, as far as can be told.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Instance(left), Self::Instance(right)) => left == right,
            (Self::Plain(Some(left)), Self::Plain(Some(right))) => left == right,
            (Self::Plain(_), Self::Plain(_)) => true,
            _ => false,
        }
    }
}

/// What is taken in of a peer.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) peer: PeerId,
    pub(super) identity: Identity,
    pub(super) descriptor: Arc<SegmentDescriptor>,
}

impl Known {
    pub(super) fn generation(&self) -> u64 {
        self.descriptor
            .rerail
            .as_ref()
            .map_or(0, |member| member.generation)
    }

    pub(super) fn instance(&self) -> Option<InstanceId> {
        self.descriptor
            .rerail
            .as_ref()
            .map(|member| member.instance)
    }
}

/// Reading the record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fetch {
    Idle,
    At(Time),
    Out { ticket: u64, until: Time },
}

/// The connection over which the peer tells its record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Subscription {
    None,
    Asked { until: Time },
    Up { heard_at: Time },
    Retry { at: Time },
}

/// What a record is, compared with what is known.
pub(super) enum Judgement {
    /// Nothing new, or older than what is known.
    Old,
    /// Of a process that is over.
    Retired,
    /// The known process says something new.
    Newer,
    /// Another process.
    Other,
    /// Another process that began earlier than the known one.
    Earlier,
    /// Another process: one that an earlier one had replaced, that does not say when it began, or
    /// that comes when the last one is gone.
    Doubtful,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) known: Option<Known>,
    /// Who had the name before, while nobody is known to have it.
    last: Option<InstanceId>,
    retired: VecDeque<InstanceId>,
    /// Instances that were replaced by an earlier one: their clock was ahead, or they are alive and
    /// will write their record again.
    overtaken: VecDeque<InstanceId>,
    /// Readings up to this ticket were asked before the known process was taken in, or was gone.
    pub(super) asked_before: u64,
    pub(super) fetch: Fetch,
    /// A question that trouble asked is not answered yet.
    pub(super) asked: bool,
    /// Something happened after the reading under way was asked: read once more.
    pub(super) again: bool,
    pub(super) cooldown_until: Time,
    pub(super) fetch_backoff: Backoff,
    pub(super) poll_at: Option<Time>,
    /// "Not found" in a row, and when the first came.
    pub(super) missing: u32,
    pub(super) missing_since: Time,
    pub(super) alive_at: Option<Time>,
    /// When the known process itself last told something over the subscription.
    pub(super) spoke_at: Option<Time>,
    pub(super) subscription: Subscription,
    pub(super) subscribe_backoff: Backoff,
    /// Since when a heartbeat speaks of more than is known.
    pub(super) behind_since: Option<Time>,
}

impl Entry {
    pub(super) fn new(fetch_backoff: Backoff, subscribe_backoff: Backoff) -> Self {
        Self {
            known: None,
            last: None,
            retired: VecDeque::new(),
            overtaken: VecDeque::new(),
            asked_before: 0,
            fetch: Fetch::Idle,
            asked: false,
            again: false,
            cooldown_until: Time::ZERO,
            fetch_backoff,
            poll_at: None,
            missing: 0,
            missing_since: Time::ZERO,
            alive_at: None,
            spoke_at: None,
            subscription: Subscription::None,
            subscribe_backoff,
            behind_since: None,
        }
    }

    pub(super) fn set_fetch(&mut self, to: Fetch) {
        #[cfg(test)]
        crate::machine::seen::follows_on(&self.fetch, &to);
        self.fetch = to;
    }

    pub(super) fn set_subscription(&mut self, to: Subscription) {
        #[cfg(test)]
        crate::machine::seen::follows_on(&self.subscription, &to);
        self.subscription = to;
    }

    pub(super) fn judge(&self, record: &PeerRecord) -> Judgement {
        let identity = Identity::of(record);
        if let Identity::Instance(instance) = identity
            && self.is_retired(instance)
        {
            return Judgement::Retired;
        }
        let Some(known) = &self.known else {
            return match (self.last, &identity) {
                (Some(last), Identity::Instance(other)) if last == *other => Judgement::Other,
                (Some(_), _) => Judgement::Doubtful,
                (None, _) => Judgement::Other,
            };
        };
        if !known.identity.is_same(&identity) {
            return match (&known.identity, &identity) {
                (Identity::Instance(known), Identity::Instance(other)) if other < known => {
                    Judgement::Earlier
                }
                (_, Identity::Instance(other)) if self.overtaken.contains(other) => {
                    Judgement::Doubtful
                }
                (Identity::Instance(_), Identity::Plain(_)) => Judgement::Doubtful,
                _ => Judgement::Other,
            };
        }
        match &record.descriptor.rerail {
            Some(member) if member.generation > known.generation() => Judgement::Newer,
            Some(_) => Judgement::Old,
            None if record.descriptor.same_content(&known.descriptor) => Judgement::Old,
            None => Judgement::Newer,
        }
    }

    pub(super) fn is_retired(&self, instance: InstanceId) -> bool {
        self.retired.contains(&instance)
    }

    /// Forgets the process that had the name.
    pub(super) fn part(&mut self) -> Option<PeerId> {
        let known = self.known.take()?;
        if let Identity::Instance(instance) = known.identity {
            self.last = Some(instance);
        }
        (self.behind_since, self.spoke_at) = (None, None);
        Some(known.peer)
    }

    /// Another process has the name now. The last one is over: for good if this one, of instance
    /// `by`, began later.
    fn replace_last(&mut self, by: Option<InstanceId>) {
        self.overtaken.retain(|other| Some(*other) != by);
        let Some(last) = self.last.take_if(|last| Some(*last) != by) else {
            return;
        };
        let is_overtaken = by.is_none_or(|by| by < last);
        let list = if is_overtaken {
            &mut self.overtaken
        } else {
            &mut self.retired
        };
        if list.len() == RETIRED_MAX {
            list.pop_front();
        }
        list.push_back(last);
    }

    /// Takes a record in; returns how the NICs differ from before.
    pub(super) fn take(&mut self, peer: PeerId, record: PeerRecord) -> Vec<(String, NicChange)> {
        let before = self
            .known
            .as_ref()
            .map(|known| Arc::clone(&known.descriptor));
        let mut identity = Identity::of(&record);
        if let (Identity::Plain(rpc @ None), Some(known)) = (&mut identity, &self.known)
            && let Identity::Plain(known) = &known.identity
        {
            rpc.clone_from(known);
        }
        if before.is_none() {
            let by = record.descriptor.rerail.as_ref();
            self.replace_last(by.map(|member| member.instance));
        }
        let changes = nic_changes(before.as_deref(), &record.descriptor);
        self.known = Some(Known {
            peer,
            identity,
            descriptor: record.descriptor,
        });
        self.behind_since = None;
        changes
    }

    /// The next time at which something is due.
    pub(super) fn next_timeout(
        &self,
        heartbeat_lost: std::time::Duration,
        behind: std::time::Duration,
    ) -> Option<Time> {
        let fetch = match self.fetch {
            Fetch::Idle => None,
            Fetch::At(at) | Fetch::Out { until: at, .. } => Some(at),
        };
        let poll = self.poll_at.filter(|_| self.fetch == Fetch::Idle);
        let subscription = match self.subscription {
            Subscription::None => None,
            Subscription::Asked { until } => Some(until),
            Subscription::Up { heard_at } => Some(heard_at + heartbeat_lost),
            Subscription::Retry { at } => Some(at),
        };
        let behind = self.behind_since.map(|since| since + behind);
        [fetch, poll, subscription, behind]
            .into_iter()
            .flatten()
            .min()
    }
}

/// Usable NICs by name. A NIC counts as withdrawn if its owner says so: in the member `rerail`, or,
/// where there is none, by leaving it out of a matrix that is not empty.
fn usable(descriptor: &SegmentDescriptor) -> BTreeMap<&str, &Device> {
    let matrix = &descriptor.priority_matrix;
    let is_usable = |device: &&Device| match &descriptor.rerail {
        Some(member) => member
            .devices
            .iter()
            .find(|listed| listed.name == device.name)
            .is_some_and(|listed| {
                matches!(listed.state, DeviceState::Up | DeviceState::Recovering)
            }),
        None => {
            matrix.is_empty()
                || matrix.values().any(|nics| {
                    nics.preferred.contains(&device.name) || nics.available.contains(&device.name)
                })
        }
    };
    let usable = descriptor.devices.iter().filter(is_usable);
    usable
        .map(|device| (device.name.as_str(), device))
        .collect()
}

fn nic_changes(
    before: Option<&SegmentDescriptor>,
    after: &SegmentDescriptor,
) -> Vec<(String, NicChange)> {
    let old = before.map(usable).unwrap_or_default();
    let new = usable(after);
    let mut changes = Vec::new();
    for name in old.keys() {
        if !new.contains_key(name) {
            changes.push(((*name).to_owned(), NicChange::Down));
        }
    }
    for (name, device) in &new {
        match old.get(name) {
            None => changes.push(((*name).to_owned(), NicChange::Up)),
            Some(old) if (old.gid, old.lid) != (device.gid, device.lid) => {
                changes.push(((*name).to_owned(), NicChange::Moved));
            }
            Some(_) => {}
        }
    }
    changes
}
