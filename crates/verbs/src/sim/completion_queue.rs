//! Completion queues.

use std::collections::VecDeque;

use super::core::Core;
use super::event::Element;
use super::slab::Handle;
use super::trace::trace;
use crate::error::Errno;
use crate::{AsyncEventKind, Completion};

/// A completion, and what it frees.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) completion: Completion,
    pub(super) pair: Handle,
    /// Places in the send queue that are free once it is polled.
    pub(super) slots: u32,
}

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) context: Handle,
    pub(super) entries: VecDeque<Entry>,
    entries_max: usize,
    overrun: bool,
}

impl Core {
    pub(super) fn create_cq(&mut self, context: Handle, entries: u32) -> Result<Handle, Errno> {
        let nic = self.live_context(context)?.nic;
        let device = &mut self.nics[nic.0];
        if entries == 0 || entries > device.limits.max_cqe {
            return Err(Errno(libc::EINVAL));
        }
        if device.cq_count >= device.limits.max_cq {
            return Err(Errno(libc::ENOMEM));
        }
        device.cq_count += 1;
        Ok(self.queues.insert(Queue {
            context,
            entries: VecDeque::new(),
            entries_max: entries as usize,
            overrun: false,
        }))
    }

    /// `EBUSY` while queue pairs use it.
    ///
    /// # Panics
    ///
    /// When an event about it was taken and not acknowledged.
    pub(super) fn destroy_cq(&mut self, handle: Handle) -> Result<(), Errno> {
        let used = self
            .pairs
            .iter()
            .any(|(_, pair)| pair.send_cq == handle || pair.recv_cq == handle);
        if used {
            return Err(Errno(libc::EBUSY));
        }
        let Some(queue) = self.queues.get(handle) else {
            return Ok(());
        };
        let context = queue.context;
        self.forget_events(context, Element::CompletionQueue(handle));
        self.queues.remove(handle);
        if let Some(context) = self.contexts.get(context) {
            self.nics[context.nic.0].cq_count -= 1;
        }
        Ok(())
    }

    /// Puts a completion into its queue. A full queue is overrun: the completion is lost, the
    /// owner gets `CQ_ERR`, and the queue takes nothing more.
    pub(super) fn push_completion(&mut self, handle: Handle, entry: Entry) {
        let Some(queue) = self.queues.get_mut(handle) else {
            return;
        };
        let completion = &entry.completion;
        let (wr_id, status) = (completion.wr_id, completion.status);
        if queue.overrun || queue.entries.len() == queue.entries_max {
            let first = !queue.overrun;
            queue.overrun = true;
            let context = queue.context;
            trace!(
                self,
                "completion {wr_id} {status} overruns cq{}", handle.index
            );
            if let Some(nic) = self.contexts.get(context).map(|context| context.nic)
                && first
            {
                self.raise(nic, AsyncEventKind::CqErr, Element::CompletionQueue(handle));
            }
            return;
        }
        queue.entries.push_back(entry);
        trace!(self, "completion {wr_id} {status} in cq{}", handle.index);
    }

    /// Takes completions. `EIO` once an overrun queue is empty.
    pub(super) fn poll(
        &mut self,
        handle: Handle,
        completions: &mut [Completion],
    ) -> Result<usize, Errno> {
        let context = self.queues.get(handle).ok_or(Errno(libc::EIO))?.context;
        self.context(context)?;
        let mut taken = 0;
        while taken < completions.len() {
            let Some(queue) = self.queues.get_mut(handle) else {
                break;
            };
            let Some(entry) = queue.entries.pop_front() else {
                if queue.overrun && taken == 0 {
                    return Err(Errno(libc::EIO));
                }
                break;
            };
            completions[taken] = entry.completion;
            taken += 1;
            if let Some(pair) = self.pairs.get_mut(entry.pair) {
                pair.send.occupied = pair.send.occupied.saturating_sub(entry.slots);
            }
        }
        Ok(taken)
    }
}
