//! Fault rules: closures that judge packets, work and events while they are in force.
//!
//! A rule sees plain values and answers with a verdict; the first rule that does not pass decides.
//! A rule must not call the fabric, whose lock is held while it runs.

use std::fmt;
use std::time::Duration;

use super::core::Core;
use super::event::Element;
use super::node::{NicId, PortId};
use crate::{AsyncEventKind, Gid, RdmaOpcode, WcStatus};

/// What a packet is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PacketKind {
    /// Bytes of a WRITE.
    Write,
    /// A request for bytes of a READ.
    ReadRequest,
    /// Bytes of a READ.
    ReadResponse,
    /// A positive acknowledgement.
    Ack,
    /// A negative acknowledgement.
    Nak,
}

/// A packet, or burst of packets, that leaves a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PacketView {
    /// Port that it leaves.
    pub from: PortId,
    /// Port that it goes to.
    pub to: PortId,
    /// Address that it comes from; `None` where LIDs are used.
    pub source: Option<Gid>,
    /// Address that it goes to.
    pub destination: Option<Gid>,
    /// What it is.
    pub kind: PacketKind,
    /// Number of the queue pair that it goes to.
    pub dest_qp_num: u32,
    /// Packet number.
    pub psn: u32,
    /// Bytes of payload.
    pub bytes: u32,
    /// When it leaves, since the fabric's beginning.
    pub now: Duration,
}

/// What becomes of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PacketVerdict {
    /// Nothing special.
    Pass,
    /// It is lost.
    Drop,
    /// It spends so much longer in the network, and others may overtake it.
    Delay(Duration),
    /// It arrives twice.
    Duplicate,
}

/// A work request at the moment when it is posted, or when a device begins with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct WorkView {
    /// Adapter of the queue pair.
    pub nic: NicId,
    /// Number of the queue pair.
    pub qp_num: u32,
    /// Identifier of the request.
    pub wr_id: u64,
    /// What it does.
    pub opcode: RdmaOpcode,
    /// Bytes that it moves.
    pub bytes: u64,
    /// When, since the fabric's beginning.
    pub now: Duration,
}

/// What becomes of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum WorkVerdict {
    /// Nothing special.
    Pass,
    /// It is not carried out and completes with this status and vendor number; the queue pair goes
    /// to the error state.
    Fail(WcStatus, u32),
    /// It is carried out, and its completion comes so much later. Those behind it wait.
    CompleteAfter(Duration),
    /// It is carried out, and its completion never comes.
    LoseCompletion,
}

/// What becomes of a work request that is posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PostVerdict {
    /// Nothing special.
    Pass,
    /// It is refused with this error number, and so are those behind it in the same call: the
    /// provider names it (`bad_wr`), and those before it are posted.
    Refuse(i32),
    /// It is taken, and so are those behind it in the same call as far as there is room and no rule
    /// refuses them; the call fails with this error number without naming one: nobody can know
    /// which of them were taken. soft-RoCE's provider does so when its doorbell fails.
    Doubt(i32),
}

/// An event before it is put into a context's queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct EventView {
    /// Adapter of the context.
    pub nic: NicId,
    /// Kind of the event.
    pub kind: AsyncEventKind,
    /// The port that it is about, if it is about one.
    pub port: Option<u32>,
    /// When, since the fabric's beginning.
    pub now: Duration,
}

/// What becomes of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum EventVerdict {
    /// Nothing special.
    Pass,
    /// It is lost.
    Drop,
    /// It comes so much later; the order within its kind is kept.
    Delay(Duration),
    /// It comes twice.
    Duplicate,
}

type Judge<View, Verdict> = Box<dyn FnMut(&View) -> Verdict + Send>;

/// One kind of rule.
pub(super) enum Rule {
    Packet(Judge<PacketView, PacketVerdict>),
    Post(Judge<WorkView, PostVerdict>),
    Work(Judge<WorkView, WorkVerdict>),
    Event(Judge<EventView, EventVerdict>),
}

/// The rules in force, in the order in which they were made.
#[derive(Default)]
pub(super) struct Rules {
    rules: Vec<(u64, Rule)>,
    next_id: u64,
}

impl Rules {
    pub(super) fn add(&mut self, rule: Rule) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.rules.push((id, rule));
        id
    }

    pub(super) fn remove(&mut self, id: u64) {
        self.rules.retain(|(rule, _)| *rule != id);
    }

    pub(super) fn len(&self) -> usize {
        self.rules.len()
    }
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules").field("rules", &self.len()).finish()
    }
}

impl Core {
    pub(super) fn judge_packet(&mut self, view: &PacketView) -> PacketVerdict {
        for (_, rule) in &mut self.rules.rules {
            if let Rule::Packet(judge) = rule {
                let verdict = judge(view);
                if verdict != PacketVerdict::Pass {
                    return verdict;
                }
            }
        }
        PacketVerdict::Pass
    }

    pub(super) fn judge_post(&mut self, view: &WorkView) -> PostVerdict {
        for (_, rule) in &mut self.rules.rules {
            if let Rule::Post(judge) = rule {
                let verdict = judge(view);
                if verdict != PostVerdict::Pass {
                    return verdict;
                }
            }
        }
        PostVerdict::Pass
    }

    pub(super) fn judge_work(&mut self, view: &WorkView) -> WorkVerdict {
        for (_, rule) in &mut self.rules.rules {
            if let Rule::Work(judge) = rule {
                let verdict = judge(view);
                if verdict != WorkVerdict::Pass {
                    return verdict;
                }
            }
        }
        WorkVerdict::Pass
    }

    pub(super) fn judge_event(
        &mut self,
        nic: NicId,
        kind: AsyncEventKind,
        element: Element,
    ) -> EventVerdict {
        let port = match element {
            Element::Port(port) => Some(port),
            _ => None,
        };
        let view = EventView {
            nic,
            kind,
            port,
            now: self.now,
        };
        for (_, rule) in &mut self.rules.rules {
            if let Rule::Event(judge) = rule {
                let verdict = judge(&view);
                if verdict != EventVerdict::Pass {
                    return verdict;
                }
            }
        }
        EventVerdict::Pass
    }
}
