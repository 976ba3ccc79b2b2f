//! Hosts, processes, adapters and their open contexts.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::agenda::Due;
use super::core::Core;
use super::event::{Element, EventQueue};
use super::options::NicOptions;
use super::port::Port;
use super::slab::{Handle, Numbers};
use super::trace::trace;
use crate::error::Errno;
use crate::{AsyncEventKind, DeviceAttr};

/// A host of the fabric.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub(super) usize);

/// A process on a host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ProcessId(pub(super) usize);

/// An adapter of a host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NicId(pub(super) usize);

impl NicId {
    /// The adapter's port of that number, counted from 1.
    pub fn port(self, number: u32) -> PortId {
        PortId {
            nic: self,
            port: number,
        }
    }
}

/// A port of an adapter; see [`NicId::port`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PortId {
    /// The adapter.
    pub nic: NicId,
    /// The port's number, counted from 1.
    pub port: u32,
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) next_ifindex: u32,
}

#[derive(Debug)]
pub(super) struct Process {
    pub(super) node: NodeId,
    pub(super) frozen: bool,
    pub(super) dead: bool,
}

/// An adapter.
#[derive(Debug)]
pub(super) struct Nic {
    pub(super) node: NodeId,
    pub(super) name: String,
    pub(super) limits: DeviceAttr,
    pub(super) ports: Vec<Port>,
    /// In the list of devices.
    pub(super) plugged: bool,
    /// Dead until it is reset.
    pub(super) dead: bool,
    /// Control verbs wait until then.
    pub(super) hangs_until: Duration,
    /// Faults by which queue pairs cannot be moved to ERR, nor destroyed one by one.
    pub(super) refuses_to_stop: u32,
    /// Faults by which regions cannot be deregistered.
    pub(super) refuses_to_deregister: u32,
    pub(super) qp_numbers: Numbers,
    pub(super) pairs: BTreeMap<u32, Handle>,
    pub(super) regions: BTreeMap<u32, Handle>,
    pub(super) key_indexes: Numbers,
    /// How often each key index was given out.
    pub(super) key_uses: BTreeMap<u32, u8>,
    pub(super) pd_count: u32,
    pub(super) cq_count: u32,
}

/// An open adapter.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) nic: NicId,
    pub(super) process: ProcessId,
    /// The adapter died or was reset since: for good.
    pub(super) dead: bool,
    pub(super) events: EventQueue,
    /// Readable while events wait; real time only.
    pub(super) event_fd: Option<Arc<OwnedFd>>,
    /// Time that verbs should have taken.
    pub(super) verb_time: Duration,
}

impl Context {
    /// Makes the descriptor readable.
    pub(super) fn wake(&self) {
        if let Some(fd) = &self.event_fd {
            // A counter that is full is readable already.
            let _ = rustix::io::write(fd.as_ref(), &1_u64.to_ne_bytes());
        }
    }

    /// Makes the descriptor unreadable.
    pub(super) fn sleep(&self) {
        if let Some(fd) = &self.event_fd {
            // A counter that is zero is unreadable already.
            let _ = rustix::io::read(fd.as_ref(), &mut [0_u8; 8]);
        }
    }
}

impl Core {
    pub(super) fn add_node(&mut self, name: &str) -> NodeId {
        self.nodes.push(Node {
            name: name.to_owned(),
            next_ifindex: 2,
        });
        NodeId(self.nodes.len() - 1)
    }

    pub(super) fn add_process(&mut self, node: NodeId) -> ProcessId {
        self.processes.push(Process {
            node,
            frozen: false,
            dead: false,
        });
        ProcessId(self.processes.len() - 1)
    }

    pub(super) fn add_nic(&mut self, node: NodeId, options: &NicOptions) -> NicId {
        let id = NicId(self.nics.len());
        let mut limits = options.limits.clone();
        limits.phys_port_cnt = options.ports.len() as u32;
        if limits.node_guid == 0 {
            limits.node_guid = 0x0200_00ff_fe00_0000 | (id.0 as u64 + 1);
        }
        let guid = limits.node_guid;
        self.nics.push(Nic {
            node,
            name: options.name.clone(),
            limits,
            ports: Vec::new(),
            plugged: true,
            dead: false,
            hangs_until: Duration::ZERO,
            refuses_to_stop: 0,
            refuses_to_deregister: 0,
            // The first numbers are those of the special queue pairs.
            qp_numbers: Numbers::starting_at(17),
            pairs: BTreeMap::new(),
            regions: BTreeMap::new(),
            key_indexes: Numbers::starting_at(1),
            key_uses: BTreeMap::new(),
            pd_count: 0,
            cq_count: 0,
        });
        for (index, port) in options.ports.iter().enumerate() {
            let number = index as u32 + 1;
            self.add_port(
                PortId {
                    nic: id,
                    port: number,
                },
                port,
                guid + (index as u64) * 0x100,
            );
        }
        trace!(self, "nic {} on {}", options.name, self.nodes[node.0].name);
        id
    }

    /// `host/device`, for the trace.
    pub(super) fn nic_name(&self, nic: NicId) -> String {
        let device = &self.nics[nic.0];
        format!("{}/{}", self.nodes[device.node.0].name, device.name)
    }

    /// Opens an adapter for a process.
    pub(super) fn open(
        &mut self,
        process: ProcessId,
        nic: NicId,
        event_fd: Option<Arc<OwnedFd>>,
    ) -> Result<Handle, Errno> {
        self.assert_runs(process);
        let device = &self.nics[nic.0];
        if !device.plugged {
            return Err(Errno(libc::ENODEV));
        }
        if device.dead || self.processes[process.0].dead {
            return Err(Errno(libc::EIO));
        }
        let handle = self.contexts.insert(Context {
            nic,
            process,
            dead: false,
            events: EventQueue::default(),
            event_fd,
            verb_time: Duration::ZERO,
        });
        trace!(self, "open {} as ctx{}", self.nic_name(nic), handle.index);
        Ok(handle)
    }

    /// Closes a context with all that was made from it, as the kernel does when a process ends.
    pub(super) fn close(&mut self, handle: Handle) {
        for pair in self.pairs.handles(|pair| pair.context == handle) {
            self.destroy_pair(pair);
        }
        for queue in self.queues.handles(|queue| queue.context == handle) {
            // Its pairs are gone, so that nothing is in the way.
            let _ = self.destroy_cq(queue);
        }
        for region in self.regions.handles(|region| region.context == handle) {
            self.remove_region(region);
        }
        for pd in self.pds.handles(|pd| pd.context == handle) {
            let _ = self.dealloc_pd(pd);
        }
        if let Some(context) = self.contexts.remove(handle) {
            // A reader that waits learns that there is nothing to wait for.
            context.wake();
            self.agenda.retain(|due| match due {
                Due::Event(context, _) => *context != handle,
                _ => true,
            });
            trace!(self, "close ctx{}", handle.index);
        }
    }

    pub(super) fn context(&self, handle: Handle) -> Result<&Context, Errno> {
        let context = self.contexts.get(handle).ok_or(Errno(libc::EIO))?;
        self.assert_runs(context.process);
        Ok(context)
    }

    pub(super) fn context_mut(&mut self, handle: Handle) -> Result<&mut Context, Errno> {
        self.context(handle)?;
        self.contexts.get_mut(handle).ok_or(Errno(libc::EIO))
    }

    /// The context, if its adapter is alive; verbs on a dead one are `EIO`.
    pub(super) fn live_context(&self, handle: Handle) -> Result<&Context, Errno> {
        let context = self.context(handle)?;
        if context.dead {
            return Err(Errno(libc::EIO));
        }
        Ok(context)
    }

    /// # Panics
    ///
    /// When the process is frozen: a frozen process calls nothing, so that whoever drives the
    /// model has not taken it out of its loop. (In real time its calls wait instead.)
    fn assert_runs(&self, process: ProcessId) {
        assert!(
            !self.processes[process.0].frozen,
            "a frozen process called the fabric: its driver must not step it until it is thawed"
        );
    }

    /// The device dies: `DEVICE_FATAL` to every context, then `EIO` from every verb, for good.
    ///
    /// Work in flight never completes: some drivers flush in software, and none promises it.
    pub(super) fn kill_nic(&mut self, nic: NicId) {
        if self.nics[nic.0].dead {
            return;
        }
        self.nics[nic.0].dead = true;
        trace!(self, "fatal {}", self.nic_name(nic));
        for pair in self.pairs.handles(|pair| pair.nic == nic) {
            self.silence(pair);
        }
        self.raise(nic, AsyncEventKind::DeviceFatal, Element::Device);
        for handle in self.contexts.handles(|context| context.nic == nic) {
            if let Some(context) = self.contexts.get_mut(handle) {
                context.dead = true;
                // The reader learns of it though the event may be lost: the channel fails.
                context.wake();
            }
        }
    }

    /// The device comes back. Contexts opened before stay dead.
    pub(super) fn reset_nic(&mut self, nic: NicId) {
        self.kill_nic(nic);
        let device = &mut self.nics[nic.0];
        device.dead = false;
        device.hangs_until = Duration::ZERO;
        trace!(self, "reset {}", self.nic_name(nic));
    }

    pub(super) fn set_refuses_to_stop(&mut self, nic: NicId, refuses: bool) {
        let faults = &mut self.nics[nic.0].refuses_to_stop;
        *faults = if refuses { *faults + 1 } else { *faults - 1 };
        let does = if refuses { "does not stop" } else { "stops" };
        trace!(self, "{} {does} queue pairs", self.nic_name(nic));
    }

    pub(super) fn set_refuses_to_deregister(&mut self, nic: NicId, refuses: bool) {
        let faults = &mut self.nics[nic.0].refuses_to_deregister;
        *faults = if refuses { *faults + 1 } else { *faults - 1 };
        let does = if refuses { "keeps" } else { "lets go of" };
        trace!(self, "{} {does} regions", self.nic_name(nic));
    }

    pub(super) fn set_plugged(&mut self, nic: NicId, plugged: bool) {
        if plugged {
            self.reset_nic(nic);
        } else {
            // soft-RoCE's `rdma link del` waits until every context is closed; a card that is
            // pulled out does not.
            self.kill_nic(nic);
        }
        self.nics[nic.0].plugged = plugged;
        let fate = if plugged { "plug" } else { "unplug" };
        trace!(self, "{fate} {}", self.nic_name(nic));
    }

    pub(super) fn set_frozen(&mut self, process: ProcessId, frozen: bool) {
        self.processes[process.0].frozen = frozen;
        let fate = if frozen { "freeze" } else { "thaw" };
        trace!(self, "{fate} process{}", process.0);
    }

    /// The process ends at once: the kernel closes its contexts, and what its adapters have sent
    /// stays on its way.
    pub(super) fn kill_process(&mut self, process: ProcessId) {
        trace!(self, "kill process{}", process.0);
        self.processes[process.0].dead = true;
        self.processes[process.0].frozen = false;
        for context in self.contexts.handles(|context| context.process == process) {
            if let Some(context) = self.contexts.get_mut(context) {
                // The process cannot hold up its own end with an event.
                context.events = EventQueue::default();
            }
            self.close(context);
        }
    }
}
