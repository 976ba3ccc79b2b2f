//! How a node carries out what its machines and its RDMA side want.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::coverage::Asks;
use super::link::{Message, Outgoing, life_of_instance, lock};
use super::node::{Known, REGION, life_of, matrix, name, number, subscriber};
use super::plan::Exclusive;
use super::store::{Errand, member};
use super::visitors::is_visitor;
use super::work;
use super::world::{Coming, Exchange, Host, WIRE, World};
use crate::TransferError;
use crate::machine::ids::{LocalNic, PeerId};
use crate::machine::observer::{self, Outcome, ReadFailure};
use crate::machine::peers::{self, NicChange, Parting, Trouble};
use crate::machine::publisher::{self, Edit, StoreRequest};
use crate::machine::rail::{NoPath, RailState};
use crate::machine::{Machine, drive};
use crate::rdma::rail::{Peer, PeerNic, PeerSpec};
use crate::rdma::slice::Piece;
use crate::rdma::watch;
use rand::Rng as _;
use rerail_metadata::descriptor::{Device, SegmentDescriptor};

/// Rounds of one node at one instant; more means that two of its parts chase each other.
const ROUNDS_MAX: usize = 2_000;

/// Of readings that fail.
const EIO: i32 = 5;

/// The shortest time that a verb takes.
const VERB: Duration = Duration::from_micros(5);

/// Generations that a publisher wants to be written.
fn written(actions: &[publisher::Action]) -> impl Iterator<Item = u64> {
    actions.iter().filter_map(|action| match action {
        publisher::Action::Store {
            request: StoreRequest::Create(record) | StoreRequest::Swap(_, record),
            ..
        } => member(record).map(|member| member.generation),
        _ => None,
    })
}

impl World {
    /// Lets a node do all that it can do now.
    pub(super) fn settle(&mut self, host: usize) {
        for round in 0..ROUNDS_MAX {
            if !self.settle_once(host, round == 0) {
                return;
            }
        }
        panic!("n{host} does not come to rest");
    }

    fn settle_once(&mut self, host: usize, is_first: bool) -> bool {
        let now = self.now;
        let Some(node) = self.node(host).filter(|node| !node.frozen) else {
            return false;
        };
        let mut moved = node.turns.run();
        node.heed_tables();
        let outgoing = node.outbox.take();
        moved |= !outgoing.is_empty();
        self.take_notes(host);
        for one in outgoing {
            self.carry(host, one);
        }
        moved |= self.observe(host, is_first);
        let mut actions = Vec::new();
        if let Some(node) = self.node(host) {
            let mut publisher = lock(&node.publisher);
            drive(&mut *publisher, now, |action| actions.push(action));
            let before = std::mem::replace(&mut node.generation, publisher.generation());
            assert!(
                written(&actions).all(|generation| generation >= before),
                "a state that was overtaken is written"
            );
        }
        moved |= !actions.is_empty();
        for action in actions {
            self.published(host, action);
        }
        let mut actions = Vec::new();
        if let Some(node) = self.node(host) {
            drive(&mut node.peers, now, |action| actions.push(action));
        }
        moved |= !actions.is_empty();
        for action in actions {
            self.learnt(host, action);
        }
        moved |= self.step_drivers(host, is_first);
        moved | self.turn_controls(host)
    }

    /// What the control threads do: one verb each, if the one before is done.
    fn turn_controls(&mut self, host: usize) -> bool {
        let (now, fabric) = (self.now, self.fabric.clone());
        let Some(node) = self.node(host) else {
            return false;
        };
        let process = node.process;
        let mut moved = false;
        for port in &mut node.ports {
            for control in &mut port.controls {
                if control.due().is_none_or(|due| due > now) {
                    if control.due().is_none() {
                        control.hangs_since = None;
                    }
                    continue;
                }
                let hangs = fabric.hangs_for(port.id);
                if hangs > Duration::ZERO {
                    control.hangs_since.get_or_insert(now);
                    control.busy_until = now + hangs;
                    continue;
                }
                control.hangs_since = None;
                control.thread.turn();
                let took = fabric.take_verb_time(process, port.id);
                control.busy_until = now + took.max(VERB);
                moved = true;
            }
            port.controls.retain(|control| !control.thread.is_closed());
        }
        moved
    }

    /// What the watch does about the NICs of a node.
    fn observe(&mut self, host: usize, is_first: bool) -> bool {
        let now = self.now;
        let mut moved = is_first && self.look(host);
        let ports = self.node(host).map_or(0, |node| node.ports.len());
        for at in 0..ports {
            let Some(node) = self.node(host) else {
                return moved;
            };
            let port = &mut node.ports[at];
            if is_first && let Some(opening) = port.opening.clone() {
                let epoch = port.observer.epoch();
                let of_it = |control: &&super::node::Control| {
                    control.thread.is_same(opening.context().control())
                };
                let hangs = port.controls.iter().find(of_it);
                let hangs = hangs.and_then(|control| control.hangs_since);
                if hangs.is_some_and(|since| now.saturating_since(since) > watch::VERB_LIMIT) {
                    let verb = "a verb of the control thread";
                    let hung = observer::Input::VerbHung { epoch, verb };
                    port.observer.handle(now, hung);
                }
                let input = match opening.context().next_event() {
                    Ok(None) => None,
                    Ok(Some(event)) => Some(observer::Input::Event { epoch, event }),
                    Err(error) => {
                        let errno = watch::failure(&error).errno;
                        Some(observer::Input::ChannelFailed { epoch, errno })
                    }
                };
                if let Some(input) = input {
                    moved = true;
                    port.observer.handle(now, input);
                }
            }
            moved |= self.drive_observer(host, at);
        }
        moved
    }

    /// Carries out what an observer wants; false if it wants nothing.
    pub(super) fn drive_observer(&mut self, host: usize, at: usize) -> bool {
        let now = self.now;
        let mut actions = Vec::new();
        if let Some(node) = self.node(host) {
            let observer = &mut node.ports[at].observer;
            drive(observer, now, |action| actions.push(action));
        }
        let moved = !actions.is_empty();
        for action in actions {
            self.observed(host, LocalNic(at as u32), action);
        }
        moved
    }

    /// Looks for NICs that have come, when it is time.
    fn look(&mut self, host: usize) -> bool {
        let (now, fabric) = (self.now, self.fabric.clone());
        let Host { node, nics, .. } = &mut self.hosts[host];
        let Some(node) = node.as_mut().filter(|node| now >= node.look_at) else {
            return false;
        };
        let names = node.look(now, &fabric, nics);
        for name in &names {
            self.coverage.count("engine", &Asks::TakenIn);
            self.say(host, format_args!("takes in {name}"));
        }
        !names.is_empty()
    }

    fn observed(&mut self, host: usize, local: LocalNic, action: observer::Action) {
        let now = self.now;
        self.coverage.count("observer", &action);
        match &action {
            observer::Action::CloseGate { cause, .. } => self.coverage.count("gate", cause),
            observer::Action::ReleaseContext { cause } => self.coverage.count("death", cause),
            _ => {}
        }
        if let observer::Action::Report { outcome, .. } = &action {
            self.coverage.count("outcome", outcome);
            if *outcome != Outcome::Unchanged {
                let node = self.node(host);
                let nic = node.map(|node| node.ports[local.0 as usize].nic.name().to_owned());
                let nic = nic.unwrap_or_default();
                self.say(host, format_args!("{nic} reads {outcome:?}"));
            }
        }
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let port = &mut node.ports[local.0 as usize];
        let nic = local.0;
        match action {
            observer::Action::ReadPort(read) => {
                let epoch = port.observer.epoch();
                let Some(opening) = &port.opening else {
                    return;
                };
                let result = watch::read_port(opening.context(), read.port, 0);
                let mut result = result.map_err(|error| watch::failure(&error));
                if self.exclusive.contains(&Exclusive::Reading(port.id)) {
                    let (query, errno) = ("ibv_query_gid_table", EIO);
                    result = Err(ReadFailure { query, errno });
                }
                let after = self.takes(host, local);
                let reading = Coming::Reading {
                    nic,
                    epoch,
                    read,
                    at: now,
                    result,
                };
                self.later(host, after, reading);
            }
            observer::Action::ReleaseContext { cause } => {
                port.opening = None;
                let (parts, nic) = (&node.parts, Arc::clone(&port.nic));
                watch::let_go(parts, &nic, &cause);
                self.say(host, format_args!("{} is dead: {cause}", nic.name()));
            }
            observer::Action::Reopen { epoch } => {
                self.later(host, Duration::ZERO, Coming::Reopen { nic, epoch });
            }
            action => {
                if let observer::Action::HalfOpen { .. } = action
                    && let Some(found) = port.observer.facts(1)
                {
                    watch::adopt(&node.parts, &port.nic, found);
                }
                let nic = Arc::clone(&port.nic);
                watch::act(&node.parts, &nic, now, action);
            }
        }
    }

    /// How long the verbs just called on a NIC take.
    pub(super) fn takes(&mut self, host: usize, local: LocalNic) -> Duration {
        let fabric = self.fabric.clone();
        let Some(node) = self.node(host) else {
            return WIRE;
        };
        let id = node.ports[local.0 as usize].id;
        fabric.take_verb_time(node.process, id).max(VERB)
    }

    /// Carries on what a node's RDMA side told.
    fn carry(&mut self, host: usize, outgoing: Outgoing) {
        let now = self.now;
        let Some(node) = self.node(host) else {
            return;
        };
        let own = node.life;
        match outgoing {
            // The exchange is given up.
            Outgoing::Ask(server, ..) if is_visitor(&server) => {}
            Outgoing::Ask(server, offer, answer) => {
                let instance = offer.peer_instance.as_deref();
                let meant = instance.and_then(|instance| instance.parse().ok());
                let meant = meant.map_or(u32::MAX, |meant| life_of_instance(meant).1);
                let (from, to) = (own, (number(&server), meant));
                self.order += 1;
                let id = self.order;
                self.exchanges.insert(id, Exchange { from, to, answer });
                let ask = Message::Ask(id, Box::new(offer));
                self.send(own, to, WIRE, ask);
            }
            Outgoing::Reply(to, id, answer) => {
                if let Ok(offer) = &answer {
                    node.outbox.remember(offer);
                }
                let asker = self.exchanges.get(&id).map(|exchange| exchange.from);
                let to = asker.unwrap_or((to, u32::MAX));
                self.send(own, to, WIRE, Message::Reply(id, Box::new(answer)));
            }
            Outgoing::Port(local, facts, gids) => {
                let edit = Edit::Port { local, facts, gids };
                self.edit(host, edit);
            }
            Outgoing::Adding(local, name) => self.edit(host, Edit::Nic { local, name }),
            Outgoing::Added(names) => self.edit(host, matrix(names)),
            Outgoing::Rekeyed(local) => {
                let keys = BTreeMap::from([(REGION, node.keys(local))]);
                self.edit(host, Edit::Rekey { local, keys });
            }
            Outgoing::Recheck(local) => {
                self.coverage.count("engine", &Asks::RecheckLocal);
                let hint = observer::Input::Hint { port: None };
                if let Some(node) = self.node(host) {
                    node.ports[local.0 as usize].observer.handle(now, hint);
                }
            }
            Outgoing::Refresh(name) => {
                self.coverage.count("engine", &Asks::RefreshPeer);
                let trouble = Trouble::Connection;
                if let Some(node) = self.node(host) {
                    let input = peers::Input::Trouble { name, trouble };
                    node.peers.handle(now, input);
                }
            }
            Outgoing::Rail(change) => {
                let (from, to) = (change.from, change.to);
                self.coverage.count("rail cause", &change.cause);
                let (local, peer, cause) = (&change.local, &change.peer, &change.cause);
                let what = format_args!("{local} - {peer}: {from:?} > {to:?}, {cause}");
                self.say(host, what);
                let mut nics = self.node(host).into_iter().flat_map(|node| &node.ports);
                let nic = nics.find(|port| port.nic.name() == *local);
                let nic = nic.map(|port| port.nic.index());
                if to == RailState::Up
                    && let Some(local) = nic
                {
                    self.edit(host, Edit::Proved { local });
                }
            }
            Outgoing::Finished(transfer) => self.finished(host, transfer),
        }
    }

    pub(super) fn edit(&mut self, host: usize, edit: Edit) {
        let now = self.now;
        if let Some(node) = self.node(host) {
            lock(&node.publisher).handle(now, publisher::Input::Edit(edit));
        }
    }

    pub(super) fn published(&mut self, host: usize, action: publisher::Action) {
        let Some(own) = self.node(host).map(|node| node.life) else {
            return;
        };
        self.coverage.count("publisher", &action);
        if let publisher::Action::Store { request, .. } = &action {
            self.coverage.count("store", request);
        }
        match action {
            publisher::Action::Store { ticket, request } => {
                let pause = self.rng.random_range(500..4_000);
                let slowness = self.store_pause();
                let errand = Errand {
                    ticket,
                    request,
                    asked: self.now,
                    is_slow: !slowness.is_zero(),
                };
                let after = Duration::from_micros(pause) + slowness;
                self.later(host, after, Coming::StoreRequest(errand));
            }
            publisher::Action::Push {
                subscriber,
                descriptor,
                generation,
            } => {
                self.say(host, format_args!("pushes generation {generation}"));
                let (name, record) = (name(host), super::store::peer_record(&descriptor));
                let input = peers::Input::Pushed { name, record };
                self.send(own, life_of(subscriber), WIRE, Message::ToPeers(input));
            }
            publisher::Action::Heartbeat {
                subscriber,
                generation,
            } => {
                let instance = self.living(own);
                let instance = instance.map(|node| lock(&node.publisher).instance());
                if let Some(instance) = instance {
                    let name = name(host);
                    let input = peers::Input::Heartbeat {
                        name,
                        instance,
                        generation,
                    };
                    self.send(own, life_of(subscriber), WIRE, Message::ToPeers(input));
                }
            }
            publisher::Action::DropSubscriber { subscriber } => {
                let input = peers::Input::SubscriptionLost { name: name(host) };
                self.send(own, life_of(subscriber), WIRE, Message::ToPeers(input));
            }
            publisher::Action::Stored { generation } => {
                self.stored.insert(own);
                self.say(host, format_args!("has stored generation {generation}"));
            }
            publisher::Action::EditRefused(error) => panic!("n{host}: {error}"),
            publisher::Action::Superseded { by } => self.superseded(own, by),
            publisher::Action::Left => self.kill(host),
            publisher::Action::StoreTrouble { .. } => {}
        }
    }

    pub(super) fn learnt(&mut self, host: usize, action: peers::Action) {
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let own = node.life;
        self.coverage.count("peers", &action);
        match action {
            peers::Action::Fetch { ticket, name } => {
                let after = Duration::from_millis(2) + self.store_pause();
                self.later(host, after, Coming::Fetch(ticket, name, self.now));
            }
            peers::Action::Subscribe {
                name: of,
                descriptor,
            } => {
                let far = number(&of);
                let wanted = member(&descriptor).map(|member| life_of_instance(member.instance));
                let there = wanted.filter(|wanted| self.living(*wanted).is_some());
                let reached = there.filter(|_| !self.muted.contains(&(host, far)));
                if let Some(there) = reached {
                    if let Some(node) = self.node(host) {
                        node.subscribed.insert(far, there);
                    }
                    let subscriber = subscriber(own);
                    let input = publisher::Input::Subscribed { subscriber };
                    self.send(own, there, WIRE, Message::ToPublisher(input));
                    let input = peers::Input::Subscribed { name: of };
                    self.later(host, 2 * WIRE, Coming::Peers(input));
                } else {
                    let input = peers::Input::SubscriptionLost { name: of };
                    self.later(host, 4 * WIRE, Coming::Peers(input));
                }
            }
            peers::Action::Unsubscribe { name: of } => {
                let far = number(&of);
                let to = node.subscribed.remove(&far).unwrap_or((far, u32::MAX));
                let input = publisher::Input::Unsubscribed {
                    subscriber: subscriber(own),
                };
                self.send(own, to, WIRE, Message::ToPublisher(input));
            }
            peers::Action::AskAlive { name: of } => {
                // The probe's answer comes from whoever runs there.
                let far = number(&of);
                let known = node.peers.descriptor(&of).and_then(|known| member(known));
                let known = known.map(|member| life_of_instance(member.instance));
                let there = known.and_then(|known| self.living(known));
                let is_there = there.is_some_and(|node| !node.frozen);
                if is_there && !self.muted.contains(&(host, far)) {
                    self.later(
                        host,
                        2 * WIRE,
                        Coming::Peers(peers::Input::Alive { name: of }),
                    );
                }
            }
            peers::Action::Acknowledge {
                name: of,
                instance,
                generation,
            } => {
                let subscriber = subscriber(own);
                let to = life_of_instance(instance);
                let input = publisher::Input::Acknowledged {
                    subscriber,
                    generation,
                };
                self.send(own, (number(&of), to.1), WIRE, Message::ToPublisher(input));
            }
            peers::Action::Retired {
                peer,
                name: of,
                parting,
            } => {
                self.coverage.count("parting", &parting);
                self.say(host, format_args!("retires {of}"));
                self.part(host, peer, of, parting);
            }
            peers::Action::Updated {
                name: of,
                peer,
                descriptor,
                nics,
            } => {
                for (_, change) in &nics {
                    self.coverage.count("peer's NIC", change);
                }
                let by = member(&descriptor).map(|member| member.instance);
                let generation = member(&descriptor).map(|member| member.generation);
                self.say(host, format_args!("hears of {of} from {by:?}"));
                self.updated(host, &of, peer, &nics, generation);
            }
            peers::Action::Refreshed { name: of, .. } => {
                if let Some(peer) = node.peers.peer(&of) {
                    self.refreshed(host, peer);
                }
            }
        }
    }

    /// A peer's life is over: what is bound to it ends, as `engine::peers` does it.
    fn part(&mut self, host: usize, peer: PeerId, name: String, parting: Parting) {
        if parting == Parting::Replaced {
            self.expect_restarted(host, peer);
        }
        let now = self.now;
        let Some(node) = self.node(host) else {
            return;
        };
        // One that is only let go of here lives on.
        if parting != Parting::Closed {
            node.retired.entry(peer).or_insert(now);
        }
        let failure = match parting {
            Parting::Replaced => Some(TransferError::PeerRestarted { peer: name }),
            Parting::Withdrawn => Some(TransferError::NoPath {
                peer: name,
                cause: NoPath::PeerGone.to_string(),
            }),
            Parting::Closed => None,
        };
        let jobs = node.jobs.iter().filter(|(_, job)| job.peer == peer);
        let jobs: Vec<_> = jobs.map(|(id, _)| *id).collect();
        for id in jobs {
            let Some(failure) = failure.clone() else {
                break;
            };
            let job = self.node(host).and_then(|node| node.jobs.get(&id));
            match job.map(|job| (job.asks, Arc::clone(&job.transfer))) {
                Some((false, transfer)) => drop(transfer.fail(failure)),
                Some((true, _)) => self.report(host, id, Some(failure)),
                None => {}
            }
        }
        let Some(node) = self.node(host) else {
            return;
        };
        if let Some(known) = node.known.remove(&peer) {
            match parting {
                Parting::Replaced => node.router.peer_restarted(&known.peer),
                Parting::Withdrawn => node.router.peer_gone(&known.peer),
                Parting::Closed => node.router.forget_peer(&known.peer),
            }
        }
    }

    fn updated(
        &mut self,
        host: usize,
        of: &str,
        peer: PeerId,
        nics: &[(String, NicChange)],
        generation: Option<u64>,
    ) {
        let what = format_args!("takes in generation {generation:?} of {of}: {nics:?}");
        self.say(host, what);
        let far = number(of);
        let Some(node) = self.node(host) else {
            return;
        };
        // Another engine may not say it.
        let generation = generation.unwrap_or(0);
        let last = node.generations.insert(peer, generation);
        assert!(
            last <= Some(generation),
            "{of}'s generation went back from {last:?} to {generation:?}"
        );
        let Some(record) = node.peers.descriptor(of).cloned() else {
            return;
        };
        let nics_of_it = nics_of(of, &record);
        let count = nics_of_it.len();
        let mut offered = work::offered(&record);
        if let Some(known) = node.known.get_mut(&peer) {
            // As `engine::peers`.
            Piece::carry_over(&known.offered, &mut offered);
            known.offered = offered;
            // Those that are new are down until the record says otherwise, just below.
            let down: Vec<_> = (known.nics as u32..count as u32).collect();
            known.nics = count;
            node.router.peer_grown(&known.peer, &nics_of_it, &down);
        } else {
            let instance = member(&record).map(|member| member.instance);
            let life = instance.map_or((far, 0), life_of_instance);
            let spec = PeerSpec {
                id: peer,
                segment: of.to_owned(),
                server: of.to_owned(),
                instance: instance.map(|instance| instance.to_string()),
                nics: nics_of_it,
            };
            let made = Peer::new(spec, &node.parts.nics.names());
            node.router.declare(&made);
            for nic in 0..count as u32 {
                // Likewise.
                node.router.peer_nic(&made, nic, false);
            }
            let known = Known {
                life,
                peer: made,
                nics: count,
                offered,
            };
            node.known.insert(peer, known);
        }
        let Some(known) = node.known.get(&peer) else {
            return;
        };
        for (name, change) in nics {
            let mut devices = record.devices.iter();
            let Some(index) = devices.position(|device| device.name == *name) else {
                continue;
            };
            let told: &[bool] = match change {
                NicChange::Up => &[true],
                NicChange::Down => &[false],
                NicChange::Moved => &[false, true],
            };
            for up in told {
                node.router.peer_nic(&known.peer, index as u32, *up);
            }
        }
    }
}

/// The NICs of a record.
fn nics_of(of: &str, record: &SegmentDescriptor) -> Vec<PeerNic> {
    let nic = |(index, device): (u32, &Device)| PeerNic {
        index,
        path: format!("{of}@{}", device.name),
        gid: device.gid,
        lid: device.lid,
    };
    (0..).zip(&record.devices).map(nic).collect()
}
