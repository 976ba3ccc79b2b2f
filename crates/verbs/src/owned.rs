//! The one rule of destruction: a dropped handle goes to the control thread.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;

use crate::backend::{self, Doomed};
use crate::control::ControlThread;
use crate::objects::Registration;
use crate::{HostMemory, fork};

/// A backend's handle that is destroyed by its context's control thread once it is dropped.
///
/// Objects hold what they were made from *after* their own `Owned` field, so that destructions
/// reach the control thread, which takes them in order, in the only order that works.
pub(crate) struct Owned<T: Into<Doomed>> {
    handle: ManuallyDrop<T>,
    control: ControlThread,
}

impl<T: Into<Doomed>> Owned<T> {
    pub(crate) fn new(handle: T, control: &ControlThread) -> Self {
        Self {
            handle: ManuallyDrop::new(handle),
            control: control.clone(),
        }
    }
}

impl<T: Into<Doomed>> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.handle
    }
}

impl<T: Into<Doomed>> Drop for Owned<T> {
    fn drop(&mut self) {
        if fork::is_child() {
            // The object is the parent's, and there is no control thread here. It is leaked.
            return;
        }
        // SAFETY: the handle is taken here only, and nobody can look at `self` afterwards.
        let handle = unsafe { ManuallyDrop::take(&mut self.handle) };
        self.control.destroy(handle.into());
    }
}

impl<T: Into<Doomed> + fmt::Debug> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.handle, f)
    }
}

impl From<backend::Context> for Doomed {
    fn from(context: backend::Context) -> Self {
        Self::Context(context)
    }
}

impl From<backend::ProtectionDomain> for Doomed {
    fn from(pd: backend::ProtectionDomain) -> Self {
        Self::ProtectionDomain(pd)
    }
}

impl From<(backend::MemoryRegion, Option<HostMemory>)> for Doomed {
    fn from((region, memory): (backend::MemoryRegion, Option<HostMemory>)) -> Self {
        Self::MemoryRegion(region, memory)
    }
}

impl From<(backend::CompletionQueue, Registration)> for Doomed {
    fn from((queue, registration): (backend::CompletionQueue, Registration)) -> Self {
        Self::CompletionQueue(queue, registration)
    }
}

impl From<(backend::QueuePair, Registration)> for Doomed {
    fn from((pair, registration): (backend::QueuePair, Registration)) -> Self {
        Self::QueuePair(pair, registration)
    }
}
