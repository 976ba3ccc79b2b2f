//! One opening of a device, and all that is made once for it.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rerail_verbs::{
    AccessFlags, CompletionQueue, Context, ControlThread, Device, DeviceAttr, HostMemory,
    MemoryRegion, Pending, ProtectionDomain, VerbsError,
};

use super::config::RdmaConfig;
use super::inbox::Pairs;
use crate::TransportError;

/// How long registering memory may take whatever its size: pinning a terabyte takes minutes.
pub(super) const REGISTER_MAX: Duration = Duration::from_secs(600);

/// How long registering the smallest memory may take.
const REGISTER_MIN: Duration = Duration::from_secs(5);

/// Bytes that even a slow machine pins in a second, pages that are touched first included.
const PINNED_BYTES_PER_S_MIN: u64 = 64 << 20;

/// How long opening a device may take, and each verb after it.
const OPEN_LIMIT: Duration = Duration::from_secs(60);

/// Bytes that probes read to: the largest path MTU.
const SCRATCH_BYTES: usize = 4096;

/// Queue pairs are looked through for those that are gone when so many were made.
pub(super) const SWEEP_MIN: usize = 64;

/// An open device. A NIC has one at a time; one that died lives on until its last queue pair and
/// region are gone.
#[derive(Debug)]
pub struct Opening {
    number: u32,
    attr: DeviceAttr,
    made: Mutex<Made>,
    /// Where probes read to: nobody looks at it.
    scratch: MemoryRegion,
    // Dropped in this order, though verbs would keep it right in any.
    cq: CompletionQueue,
    pd: ProtectionDomain,
    context: Context,
}

/// Queue pairs that were made of an opening.
#[derive(Debug, Default)]
struct Made {
    /// Some of them may be gone.
    all: Vec<Weak<Pairs>>,
    /// So many are listed when those that are gone are left out next.
    swept_at: usize,
    /// They are all stopped, and what is made later is, too.
    stopped: bool,
}

impl Opening {
    /// Opens `device` as number `number` of its openings, and says first on which thread. Blocks;
    /// verbs run on the context's control thread.
    pub(super) fn new(
        device: &Device,
        number: u32,
        config: &RdmaConfig,
        begins: impl FnOnce(&ControlThread),
    ) -> Result<Self, TransportError> {
        let context = device.open_shown(begins)?;
        let for_job = context.clone();
        let cqe_max = config.cqe_max;
        let pending = context.control().submit(move || {
            let attr = for_job.device_attr()?;
            let pd = for_job.alloc_pd()?;
            let cq = for_job.create_cq(cqe_max.min(attr.max_cqe))?;
            let memory = HostMemory::allocate(SCRATCH_BYTES);
            let memory = memory.map_err(|error| TransportError::Device {
                device: for_job.name().to_owned(),
                reason: format!("no memory for probes: {error}"),
            })?;
            let scratch = pd.register(&memory, 0, SCRATCH_BYTES, AccessFlags::LOCAL_WRITE)?;
            Ok::<_, TransportError>((attr, pd, cq, scratch))
        })?;
        let (attr, pd, cq, scratch) = pending.wait_timeout(OPEN_LIMIT)??;
        Ok(Self {
            number,
            attr,
            made: Mutex::default(),
            scratch,
            cq,
            pd,
            context,
        })
    }

    /// Number among the openings of a NIC's device: later ones have higher ones.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Limits of the device.
    pub fn attr(&self) -> &DeviceAttr {
        &self.attr
    }

    /// The open device.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The protection domain of all regions and queue pairs.
    pub fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Where all completions arrive.
    pub fn cq(&self) -> &CompletionQueue {
        &self.cq
    }

    /// Memory of its own that probes read to, one path MTU long.
    pub fn scratch(&self) -> &MemoryRegion {
        &self.scratch
    }

    /// Queue pairs were made of it: they are stopped when it is.
    pub(super) fn has_made(&self, pairs: &Arc<Pairs>) {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.all.len() >= made.swept_at {
            made.all.retain(|pairs| pairs.strong_count() > 0);
            made.swept_at = 2 * made.all.len() + SWEEP_MIN;
        }
        made.all.push(Arc::downgrade(pairs));
        if made.stopped {
            drop(made);
            self.stop();
        }
    }

    /// Queue pairs that are listed, by endpoint.
    #[cfg(test)]
    pub(super) fn made(&self) -> usize {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.all.len()
    }

    /// Whether its queue pairs were moved to ERR, or are about to be.
    pub(super) fn is_stopped(&self) -> bool {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.stopped
    }

    /// Moves all its queue pairs to ERR, ahead of whatever of it is dropped from now on. Does not
    /// wait for it.
    ///
    /// The device may work on though it is given up, and both ends with it. Work that is under way
    /// when its region goes would fail as one whose keys are wrong, and so as its owner's mistake;
    /// that of a queue pair in ERR is flushed here, and not answered there, which is the path's.
    pub(super) fn stop(&self) {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.stopped = true;
        let all = std::mem::take(&mut made.all);
        drop(made);
        if all.iter().all(|pairs| pairs.strong_count() == 0) {
            return;
        }
        let stop = move || {
            for pairs in all.iter().filter_map(Weak::upgrade) {
                for pair in &pairs.0 {
                    if let Err(error) = pair.to_error() {
                        // Its endpoint tries it again, and says so.
                        tracing::debug!(%error, "a queue pair does not go to ERR");
                    }
                }
            }
        };
        if let Err(error) = self.context.control().submit_urgent(stop).map(drop) {
            tracing::error!(%error, "queue pairs of a device that is given up are not stopped first");
        }
    }

    /// Has `length` bytes of `memory` from `offset` registered on the control thread, which gives
    /// the region to `taken` there. Does not wait for it.
    pub(super) fn register<T, F>(
        &self,
        (memory, offset, length): (&HostMemory, usize, usize),
        access: AccessFlags,
        taken: F,
    ) -> Result<Pending<Result<T, VerbsError>>, VerbsError>
    where
        T: Send + 'static,
        F: FnOnce(MemoryRegion) -> T + Send + 'static,
    {
        let (pd, memory) = (self.pd.clone(), memory.clone());
        let control = self.context.control().clone();
        self.context.control().submit(move || {
            control.allow(register_limit(length));
            pd.register(&memory, offset, length, access).map(taken)
        })
    }
}

/// How long registering so many bytes may rightly take, before the device counts as hung.
fn register_limit(bytes: usize) -> Duration {
    let for_bytes = Duration::from_secs(bytes as u64 / PINNED_BYTES_PER_S_MIN);
    (REGISTER_MIN + for_bytes).min(REGISTER_MAX)
}
