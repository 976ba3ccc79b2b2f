//! Asynchronous events: one queue a context, with faults, and the rule of acknowledgement.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::agenda::Due;
use super::backend::COMPLETION_QUEUE_KEYS;
use super::core::Core;
use super::node::NicId;
use super::rule::EventVerdict;
use super::slab::Handle;
use super::trace::trace;
use crate::AsyncEventKind;
use crate::error::Errno;
use crate::events::RawEvent;

/// What an event of the model is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Element {
    Device,
    Port(u32),
    QueuePair(Handle),
    CompletionQueue(Handle),
}

/// An event on its way to a reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct QueuedEvent {
    pub(super) kind: AsyncEventKind,
    pub(super) element: Element,
}

impl QueuedEvent {
    /// As libibverbs hands it out; an object's key is its index, which is used again.
    pub(super) fn to_raw(self) -> RawEvent {
        let element = match self.element {
            Element::Device => 0,
            Element::Port(port) => {
                let [a, b, c, d] = port.to_ne_bytes();
                u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0])
            }
            Element::QueuePair(handle) => u64::from(handle.index),
            Element::CompletionQueue(handle) => COMPLETION_QUEUE_KEYS | u64::from(handle.index),
        };
        RawEvent {
            kind: self.kind.to_raw(),
            element,
        }
    }
}

/// An event that was taken and not acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TakenEvent {
    pub(super) event: QueuedEvent,
    token: u64,
}

/// The events of one context.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    waiting: VecDeque<QueuedEvent>,
    unacknowledged: BTreeMap<u64, QueuedEvent>,
    next_token: u64,
    /// Events still to be lost by order of the test.
    pub(super) drop_next: u32,
    /// Latest delivery so far of each kind, which later events of the kind may not overtake.
    latest: BTreeMap<AsyncEventKind, Duration>,
    latest_of_all: Duration,
}

impl EventQueue {
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Forgets what is about an object that is to be destroyed, as the kernel does with events
    /// that nobody took.
    ///
    /// # Panics
    ///
    /// When an event about it was taken and not acknowledged: `ibv_destroy_qp` and `ibv_destroy_cq`
    /// wait for that acknowledgement for ever. A panic says so where a hang would not.
    fn forget(&mut self, element: Element) {
        if let Some(event) = self
            .unacknowledged
            .values()
            .find(|event| event.element == element)
        {
            panic!(
                "an object is destroyed while a {} event about it was taken and not acknowledged: \
                 with libibverbs the destruction would hang until the acknowledgement. \
                 Acknowledge each event before anyone acts on it",
                event.kind
            );
        }
        self.waiting.retain(|event| event.element != element);
    }
}

impl Core {
    /// Raises an event: about an object for its context, else for all contexts of the adapter.
    pub(super) fn raise(&mut self, nic: NicId, kind: AsyncEventKind, element: Element) {
        let owner = match element {
            Element::QueuePair(pair) => self.pairs.get(pair).map(|pair| pair.context),
            Element::CompletionQueue(queue) => self.queues.get(queue).map(|queue| queue.context),
            Element::Device | Element::Port(_) => None,
        };
        let contexts = match owner {
            Some(owner) => vec![owner],
            None => self.contexts.handles(|context| context.nic == nic),
        };
        for context in contexts {
            self.send_event(context, QueuedEvent { kind, element });
        }
    }

    /// Lets the fault model decide over an event for one context.
    fn send_event(&mut self, handle: Handle, event: QueuedEvent) {
        let QueuedEvent { kind, .. } = event;
        let nic = match self.contexts.get(handle) {
            Some(context) => context.nic,
            None => return,
        };
        let verdict = self.judge_event(nic, kind, event.element);
        let options = self.options.events.clone();
        let Some(context) = self.contexts.get_mut(handle) else {
            return;
        };
        let ordered_drop = context.events.drop_next > 0;
        if ordered_drop {
            context.events.drop_next -= 1;
        }
        if ordered_drop || verdict == EventVerdict::Drop || self.rng.chance(options.loss) {
            trace!(self, "event {kind} for ctx{} lost", handle.index);
            return;
        }
        let doubled = verdict == EventVerdict::Duplicate || self.rng.chance(options.duplicate);
        let mut at = self.now + self.rng.between(Duration::ZERO, options.delay_max);
        if let EventVerdict::Delay(delay) = verdict {
            at = at.saturating_add(delay);
        }
        let queue = &mut context.events;
        let floor = if options.reorder_kinds {
            queue.latest.get(&kind).copied().unwrap_or_default()
        } else {
            queue.latest_of_all
        };
        let at = at.max(floor);
        queue.latest.insert(kind, at);
        queue.latest_of_all = queue.latest_of_all.max(at);
        for _ in 0..=u32::from(doubled) {
            if at > self.now {
                self.agenda.push(at, Due::Event(handle, event));
            } else {
                self.deliver_event(handle, event);
            }
        }
    }

    pub(super) fn deliver_event(&mut self, handle: Handle, event: QueuedEvent) {
        let gone = match event.element {
            Element::QueuePair(pair) => self.pairs.get(pair).is_none(),
            Element::CompletionQueue(queue) => self.queues.get(queue).is_none(),
            Element::Device | Element::Port(_) => false,
        };
        let queue_max = self.options.events.queue_max;
        let Some(context) = self.contexts.get_mut(handle).filter(|_| !gone) else {
            return;
        };
        let full = context.events.waiting.len() >= queue_max;
        if !full {
            context.events.waiting.push_back(event);
            context.wake();
        }
        let fate = if full { "lost, queue full" } else { "waits" };
        trace!(self, "event {} for ctx{} {fate}", event.kind, handle.index);
    }

    /// Takes an event without acknowledging it, as `ibv_get_async_event` does. `EIO` once the
    /// device is dead and everything before that has been taken.
    pub(super) fn take_event(&mut self, handle: Handle) -> Result<Option<TakenEvent>, Errno> {
        let context = self.context_mut(handle)?;
        let Some(event) = context.events.waiting.pop_front() else {
            return if context.dead {
                Err(Errno(libc::EIO))
            } else {
                context.sleep();
                Ok(None)
            };
        };
        let token = context.events.next_token;
        context.events.next_token += 1;
        context.events.unacknowledged.insert(token, event);
        trace!(self, "event {} taken by ctx{}", event.kind, handle.index);
        Ok(Some(TakenEvent { event, token }))
    }

    /// Acknowledges an event (`ibv_ack_async_event`).
    pub(super) fn acknowledge(&mut self, handle: Handle, taken: TakenEvent) {
        if let Some(context) = self.contexts.get_mut(handle) {
            context.events.unacknowledged.remove(&taken.token);
        }
    }

    /// Called before an object is destroyed; see [`EventQueue::forget`].
    pub(super) fn forget_events(&mut self, context: Handle, element: Element) {
        if let Some(context) = self.contexts.get_mut(context) {
            context.events.forget(element);
        }
    }
}
