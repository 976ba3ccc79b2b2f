//! Completion queues.

use std::sync::Arc;

use crate::backend;
use crate::context::Context;
use crate::objects::Registration;
use crate::owned::Owned;
use crate::{Completion, ObjectId, VerbsError, fork};

/// A completion queue (`struct ibv_cq`). Clones share it.
#[derive(Clone, Debug)]
pub struct CompletionQueue {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    raw: Owned<(backend::CompletionQueue, Registration)>,
    context: Context,
}

impl CompletionQueue {
    pub(crate) fn new(context: &Context, raw: backend::CompletionQueue) -> Self {
        let registration = context.objects().insert(raw.event_key());
        Self {
            inner: Arc::new(Inner {
                raw: Owned::new((raw, registration), context.control()),
                context: context.clone(),
            }),
        }
    }

    /// Identity in [`AsyncEvent`](crate::AsyncEvent)s.
    pub fn id(&self) -> ObjectId {
        self.inner.raw.1.id()
    }

    /// The context of the queue.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Takes completions (`ibv_poll_cq`) into the head of `completions` and returns how many. No
    /// more than fit are taken; fewer than fit means that the queue was empty.
    ///
    /// An error means that the queue is broken, for example overrun. Makes no system call and
    /// allocates nothing.
    pub fn poll(&self, completions: &mut [Completion]) -> Result<usize, VerbsError> {
        fork::check()?;
        let count = self.raw().poll(completions);
        self.inner.context.wrap("ibv_poll_cq", None, count)
    }

    pub(crate) fn raw(&self) -> &backend::CompletionQueue {
        &self.inner.raw.0
    }
}
