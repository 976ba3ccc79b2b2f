//! How a node carries out what its machines want.

use std::time::Duration;

use rand::Rng as _;
use rerail_transport::machine::fence::{self};
use rerail_transport::machine::flow::{learnt_to_rails, observed_to_rails, observed_to_record};
use rerail_transport::machine::ids::{LocalNic, PeerId};
use rerail_transport::machine::observer::{self, Outcome};
use rerail_transport::machine::peers::{self, NicChange, Parting, Refreshed, Trouble};
use rerail_transport::machine::progress;
use rerail_transport::machine::publisher::{self, Edit, StoreRequest};
use rerail_transport::machine::rail::{self, NoPath, RailCause, RailState, RailTraits};
use rerail_transport::machine::transfer::{self};
use rerail_transport::machine::{Machine, drive};

use super::link::{Message, State, Work};
use super::node::{Slice, life_of, name, nic_name, nic_number, number, subscriber};
use super::store::member;
use super::world::{Coming, WIRE, World};

/// Rounds of one node's machines at one instant; more means that two of them chase each other.
const ROUNDS_MAX: usize = 2_000;

/// The name of a variant, without what is in it.
pub(crate) fn variant(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    let end = text
        .find(|c: char| !c.is_alphanumeric())
        .unwrap_or(text.len());
    text[..end].to_owned()
}

impl World {
    /// Carries out everything that a node's machines want, and posts what can be posted.
    pub(crate) fn settle(&mut self, host: usize) {
        for _ in 0..ROUNDS_MAX {
            if !self.settle_once(host) && !self.pump(host) {
                return;
            }
        }
        panic!("n{host} does not come to rest");
    }

    pub(crate) fn settle_once(&mut self, host: usize) -> bool {
        let now = self.now;
        let mut moved = false;
        macro_rules! turn {
            ($machine:ident, $act:ident) => {{
                let mut actions = Vec::new();
                let Some(node) = self.hosts[host].node.as_mut().filter(|node| !node.frozen) else {
                    return false;
                };
                drive(&mut node.$machine, now, |action| actions.push(action));
                moved |= !actions.is_empty();
                for action in actions {
                    self.$act(host, action);
                }
            }};
        }
        let nics = self.hosts[host].nics.len();
        for nic in 0..nics {
            let mut actions = Vec::new();
            let Some(node) = self.hosts[host].node.as_mut().filter(|node| !node.frozen) else {
                return false;
            };
            drive(&mut node.observers[nic], now, |action| actions.push(action));
            moved |= !actions.is_empty();
            for action in actions {
                self.observed(host, LocalNic(nic as u32), action);
            }
        }
        turn!(publisher, published);
        turn!(peers, learnt);
        turn!(rails, railed);
        turn!(fences, fenced);
        turn!(transfers, ruled);
        turn!(progress, watched);
        moved | self.finish(host)
    }

    pub(crate) fn observed(&mut self, host: usize, local: LocalNic, action: observer::Action) {
        let now = self.now;
        self.coverage.count("observer", variant(&action));
        if let observer::Action::Report { outcome, .. } = &action {
            self.coverage.count("observer", variant(outcome));
            if *outcome != Outcome::Unchanged {
                self.say(
                    host,
                    format_args!("{} reads {outcome:?}", nic_name(local.0)),
                );
            }
        }
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        match &action {
            observer::Action::ReadPort(read) => {
                let epoch = node.observers[local.0 as usize].epoch();
                let Some(open) = &node.nics[local.0 as usize].open else {
                    return;
                };
                let (read, result, nic) = (*read, open.read(), local.0);
                let after = self.takes(host, local);
                self.later(
                    host,
                    after,
                    Coming::Reading {
                        nic,
                        epoch,
                        read,
                        result,
                    },
                );
            }
            observer::Action::CloseGate { .. } => {
                node.gates.remove(&local);
            }
            observer::Action::HalfOpen { .. } => {
                node.gates.insert(local);
            }
            observer::Action::CutEndpoints { .. } => self.cut(host, local),
            observer::Action::EndpointEvent { queue_pair, kind } => {
                let mut ends = node.endpoints.iter();
                let own = ends.find(|(_, of)| {
                    of.pair
                        .as_ref()
                        .is_some_and(|pair| pair.id() == *queue_pair)
                });
                if let Some((endpoint, of)) = own {
                    let (endpoint, rail) = (*endpoint, of.rail);
                    if of.state == State::Ready {
                        let cause = RailCause::QueuePairEvent(*kind);
                        node.retire(endpoint);
                        node.fences.handle(now, fence::Input::Close { endpoint });
                        node.rails
                            .handle(now, rail::Input::EndpointLost { rail, cause });
                    }
                } else {
                    let mut passives = node.passives.iter();
                    let found = passives.find(|(_, passive)| passive.pair.id() == *queue_pair);
                    if let Some((key, _)) = found {
                        let key = *key;
                        self.drop_passive(host, key);
                    }
                }
            }
            observer::Action::ReleaseContext { cause } => {
                let cause = format!("{cause:?}");
                self.release(host, local);
                self.say(host, format_args!("{} is dead: {cause}", nic_name(local.0)));
            }
            observer::Action::Reopen { epoch } => {
                let (nic, epoch) = (local.0, *epoch);
                self.later(host, Duration::ZERO, Coming::Reopen { nic, epoch });
            }
            _ => {}
        }
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        if let Some(input) = observed_to_rails(&action, |_| Some(local)) {
            node.rails.handle(now, input);
        }
        if let Some(edit) = observed_to_record(&action, |_| Some(local)) {
            node.publisher.handle(now, publisher::Input::Edit(edit));
        }
    }

    pub(crate) fn published(&mut self, host: usize, action: publisher::Action) {
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let own = node.life;
        let kind = match &action {
            publisher::Action::Store { request, .. } => match request {
                StoreRequest::Create(_) => "Create",
                StoreRequest::Swap(..) => "Swap",
                StoreRequest::Read => "Read",
                StoreRequest::Delete(_) => "Delete",
                StoreRequest::RpcMeta => "RpcMeta",
            },
            publisher::Action::Push { .. } => "Push",
            publisher::Action::Heartbeat { .. } => "Heartbeat",
            publisher::Action::DropSubscriber { .. } => "DropSubscriber",
            publisher::Action::Stored { .. } => "Stored",
            publisher::Action::StoreTrouble { .. } => "StoreTrouble",
            publisher::Action::EditRefused(_) => "EditRefused",
            publisher::Action::Superseded { .. } => "Superseded",
            publisher::Action::Left => "Left",
        };
        self.coverage.count("publisher", kind);
        match action {
            publisher::Action::Store { ticket, request } => {
                let pause = self.rng.random_range(500..4_000);
                let after = Duration::from_micros(pause);
                self.later(host, after, Coming::StoreRequest(ticket, request));
            }
            publisher::Action::Push {
                subscriber,
                descriptor,
                generation,
            } => {
                self.say(host, format_args!("pushes generation {generation}"));
                let (name, record) = (name(host), super::store::peer_record(&descriptor));
                let input = peers::Input::Pushed { name, record };
                self.send(own, life_of(subscriber).0, WIRE, Message::ToPeers(input));
            }
            publisher::Action::Heartbeat {
                subscriber,
                generation,
            } => {
                let instance = self.living(own).map(|node| node.publisher.instance());
                if let Some(instance) = instance {
                    let name = name(host);
                    let input = peers::Input::Heartbeat {
                        name,
                        instance,
                        generation,
                    };
                    self.send(own, life_of(subscriber).0, WIRE, Message::ToPeers(input));
                }
            }
            publisher::Action::DropSubscriber { subscriber } => {
                let input = peers::Input::SubscriptionLost { name: name(host) };
                self.send(own, life_of(subscriber).0, WIRE, Message::ToPeers(input));
            }
            publisher::Action::Stored { generation } => {
                self.say(host, format_args!("has stored generation {generation}"));
            }
            publisher::Action::EditRefused(error) => panic!("n{host}: {error}"),
            publisher::Action::Superseded { by } => panic!("n{host}: superseded by {by:?}"),
            publisher::Action::Left => self.kill(host),
            publisher::Action::StoreTrouble { .. } => {}
        }
    }

    pub(crate) fn learnt(&mut self, host: usize, action: peers::Action) {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let own = node.life;
        match action {
            peers::Action::Fetch { ticket, name } => {
                self.coverage.count("peers", "Fetch");
                self.later(host, Duration::from_millis(2), Coming::Fetch(ticket, name));
            }
            peers::Action::Subscribe {
                name: of,
                descriptor,
            } => {
                self.coverage.count("peers", "Subscribe");
                let far = number(&of);
                let there = self.node(far).map(|node| node.publisher.instance());
                let wanted = member(&descriptor).map(|member| member.instance);
                let reached = there.is_some() && there == wanted;
                if reached && !self.muted.contains(&(host, far)) {
                    let subscriber = subscriber(own);
                    let input = publisher::Input::Subscribed { subscriber };
                    self.send(own, far, WIRE, Message::ToPublisher(input));
                    let input = peers::Input::Subscribed { name: of };
                    self.later(host, 2 * WIRE, Coming::Peers(input));
                } else {
                    let input = peers::Input::SubscriptionLost { name: of };
                    self.later(host, 4 * WIRE, Coming::Peers(input));
                }
            }
            peers::Action::Unsubscribe { name: of } => {
                let input = publisher::Input::Unsubscribed {
                    subscriber: subscriber(own),
                };
                self.send(own, number(&of), WIRE, Message::ToPublisher(input));
            }
            peers::Action::AskAlive { name: of } => {
                // The probe's answer comes from whoever runs there.
                let far = number(&of);
                let known = node.peers.descriptor(&of).and_then(|known| member(known));
                let known = known.map(|member| member.instance);
                let there = self.node(far).filter(|node| !node.frozen);
                let there = there.map(|node| node.publisher.instance());
                if there.is_some() && there == known && !self.muted.contains(&(host, far)) {
                    self.later(
                        host,
                        2 * WIRE,
                        Coming::Peers(peers::Input::Alive { name: of }),
                    );
                }
            }
            peers::Action::Acknowledge {
                name: of,
                generation,
                ..
            } => {
                self.coverage.count("peers", "Acknowledge");
                let subscriber = subscriber(own);
                let input = publisher::Input::Acknowledged {
                    subscriber,
                    generation,
                };
                self.send(own, number(&of), WIRE, Message::ToPublisher(input));
            }
            peers::Action::Retired {
                peer,
                name: of,
                parting,
            } => {
                self.coverage.count("peers", "Retired");
                node.rails.handle(now, rail::Input::PeerGone { peer });
                node.rails.handle(now, rail::Input::ForgetPeer { peer });
                let input = match parting {
                    Parting::Withdrawn => transfer::Input::NoPath {
                        peer,
                        cause: NoPath::PeerGone,
                    },
                    _ => transfer::Input::PeerRetired { peer },
                };
                node.transfers.handle(now, input);
                let ends = node.endpoints.iter();
                let ends: Vec<_> = ends
                    .filter(|(_, of)| of.rail.peer.peer == peer)
                    .map(|(id, _)| *id)
                    .collect();
                for endpoint in ends {
                    node.retire(endpoint);
                    node.fences.handle(now, fence::Input::Close { endpoint });
                }
                let life = node.of_peer.remove(&peer);
                let passives = node.passives.keys().copied();
                let passives: Vec<_> = passives.filter(|(of, _)| Some(*of) == life).collect();
                for key in passives {
                    self.drop_passive(host, key);
                }
                self.say(host, format_args!("retires {of}"));
            }
            peers::Action::Updated {
                name: of,
                peer,
                descriptor,
                nics,
            } => {
                self.coverage.count("peers", "Updated");
                for (_, change) in &nics {
                    self.coverage.count("peers", variant(change));
                }
                self.updated(
                    host,
                    &of,
                    peer,
                    &nics,
                    member(&descriptor).map(|m| m.generation),
                );
            }
            peers::Action::Refreshed { name: of, outcome } => {
                self.coverage.count("peers", "Refreshed");
                if let Some(peer) = node.peers.peer(&of) {
                    let newer = outcome == Refreshed::Newer;
                    node.transfers
                        .handle(now, transfer::Input::Refreshed { peer, newer });
                    node.refreshing.remove(&peer);
                }
            }
        }
    }

    pub(crate) fn updated(
        &mut self,
        host: usize,
        of: &str,
        peer: PeerId,
        nics: &[(String, NicChange)],
        generation: Option<u64>,
    ) {
        let now = self.now;
        self.say(
            host,
            format_args!("takes in generation {generation:?} of {of}: {nics:?}"),
        );
        let far = number(of);
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        // Instances are numbered by life.
        let known = node.peers.descriptor(of).and_then(|known| member(known));
        let life = known.map_or(0, |member| u32::from(member.instance.0[0]) - 1);
        let first = node.of_peer.insert(peer, (far, life)).is_none();
        let last = node.generations.insert(peer, generation.unwrap_or(0));
        assert!(
            last <= generation,
            "{of}'s generation went back from {last:?} to {generation:?}"
        );
        if first {
            // Earlier lives may have connected without ever having been known here.
            let passives = node.passives.keys().copied();
            let stale: Vec<_> = passives
                .filter(|((of, earlier), _)| *of == far && *earlier < life)
                .collect();
            for key in stale {
                self.drop_passive(host, key);
            }
        }
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        if first {
            let rails: Vec<_> = node.all_rails(peer).collect();
            for rail in &rails {
                let traits = RailTraits {
                    same_subnet: true,
                    speed_mbps: 10_000,
                };
                node.rails.handle(
                    now,
                    rail::Input::Declare {
                        rail: *rail,
                        traits,
                    },
                );
            }
            for rail in rails {
                // Down until the record says otherwise, just below.
                let gate = rail::Input::PeerNicGate {
                    nic: rail.peer,
                    up: false,
                };
                node.rails.handle(now, gate);
                node.rails.handle(now, rail::Input::Wanted { rail });
            }
        }
        for input in learnt_to_rails(peer, nics, nic_number) {
            node.rails.handle(now, input);
        }
    }

    pub(crate) fn railed(&mut self, host: usize, action: rail::Action) {
        let now = self.now;
        match &action {
            rail::Action::State {
                rail,
                from,
                to,
                cause,
                ..
            } => {
                self.coverage.count("rail", format!("{from:?} > {to:?}"));
                self.say(host, format_args!("{rail}: {from:?} > {to:?}, {cause}"));
            }
            other => self.coverage.count("rail", variant(other)),
        }
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        match action {
            rail::Action::Connect { rail } => self.connect(host, rail),
            rail::Action::Probe { rail, probe, kind } => self.probe(host, rail, probe, kind),
            rail::Action::DropEndpoint { rail } => {
                if let Some(endpoint) = node.by_rail.get(&rail).copied() {
                    node.retire(endpoint);
                    node.fences.handle(now, fence::Input::Close { endpoint });
                }
            }
            rail::Action::State {
                rail,
                to: RailState::Up,
                ..
            } => {
                let proved = Edit::Proved { local: rail.local };
                node.publisher.handle(now, publisher::Input::Edit(proved));
            }
            rail::Action::State { .. } => {}
            rail::Action::RecheckLocal { local } => {
                let hint = observer::Input::Hint { port: None };
                node.observers[local.0 as usize].handle(now, hint);
            }
            rail::Action::RefreshPeer { peer } => self.ask_anew(host, peer, Trouble::Connection),
        }
    }

    pub(crate) fn ask_anew(&mut self, host: usize, peer: PeerId, trouble: Trouble) {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        if let Some((far, _)) = node.of_peer.get(&peer) {
            let input = peers::Input::Trouble {
                name: name(*far),
                trouble,
            };
            node.peers.handle(now, input);
        }
    }

    pub(crate) fn fenced(&mut self, host: usize, action: fence::Action) {
        let now = self.now;
        self.coverage.count("fence", variant(&action));
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let own = node.life;
        match action {
            fence::Action::ToError { endpoint } => {
                let Some(of) = node.endpoints.get(&endpoint) else {
                    return;
                };
                let rail = of.rail;
                if node.by_rail.get(&rail) == Some(&endpoint) {
                    // Closed for a transfer's sake: the rail does not know yet, and has no fault.
                    let cause = RailCause::PeerClosed;
                    node.rails
                        .handle(now, rail::Input::EndpointLost { rail, cause });
                }
                node.retire(endpoint);
                let Some(pair) = node.endpoints.get(&endpoint).and_then(|of| of.pair.clone())
                else {
                    return;
                };
                let in_error = pair.to_error().is_ok();
                drop(pair);
                let after = self.takes(host, rail.local);
                // A dead device does not obey; the context's end will come.
                if in_error {
                    self.later(host, after, Coming::InError(endpoint));
                }
            }
            fence::Action::ClosePeer { endpoint } => {
                if let Some(of) = node.endpoints.get(&endpoint) {
                    let (far, life) = of.to;
                    // Whoever has the name now knows nothing of a dead process' queue pairs.
                    if self.living((far, life)).is_some() {
                        self.send(own, far, WIRE, Message::Close { endpoint });
                    }
                }
            }
            fence::Action::MayRepost { transfer, endpoint } => {
                if let Some(job) = node.jobs.get_mut(&transfer) {
                    for slice in &mut job.slices {
                        if *slice == Slice::Abandoned(endpoint) {
                            *slice = Slice::Pending;
                        }
                    }
                    if job.failed.is_some() {
                        job.give_up();
                    }
                }
            }
            fence::Action::MayReport { transfer, verdict } => {
                self.coverage.count("fence", variant(&verdict));
                self.report(host, transfer, verdict == fence::Verdict::Fenced);
            }
            fence::Action::CloseContext { local } => {
                let observer = &mut node.observers[local.0 as usize];
                let (epoch, verb) = (observer.epoch(), "ibv_modify_qp");
                let alive = observer.is_alive();
                observer.handle(now, observer::Input::VerbHung { epoch, verb });
                if !alive {
                    self.release(host, local);
                }
            }
            fence::Action::Revoked { .. } => {}
        }
    }

    pub(crate) fn ruled(&mut self, host: usize, action: transfer::Action) {
        let now = self.now;
        self.coverage.count("transfer", variant(&action));
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        match action {
            transfer::Action::Retry { transfer } => {
                if let Some(job) = node.jobs.get_mut(&transfer) {
                    job.hold = false;
                }
            }
            transfer::Action::Hold { transfer } => {
                if let Some(job) = node.jobs.get_mut(&transfer) {
                    job.hold = true;
                }
            }
            transfer::Action::Refresh { peer } => {
                node.refreshing.insert(peer);
                self.ask_anew(host, peer, Trouble::RemoteAccess);
            }
            transfer::Action::Fail { transfer, cause } => {
                if let Some(job) = node.jobs.get_mut(&transfer) {
                    assert!(job.failed.is_none(), "{transfer:?} fails twice");
                    job.failed = Some(cause);
                    job.give_up();
                }
                self.say(host, format_args!("{transfer:?} fails: {cause}"));
            }
            transfer::Action::CutOff { transfer } => {
                let Some(job) = node.jobs.get_mut(&transfer) else {
                    return;
                };
                let posted: Vec<_> = job
                    .slices
                    .iter()
                    .enumerate()
                    .filter_map(|(at, slice)| match slice {
                        Slice::Posted(endpoint) => Some((at, *endpoint)),
                        _ => None,
                    })
                    .collect();
                let opcode = job.opcode;
                for (slice, endpoint) in posted {
                    let Some(job) = node.jobs.get(&transfer) else {
                        return;
                    };
                    let bytes = job.piece(slice).1 as u32;
                    let work = Work::Slice {
                        transfer,
                        slice,
                        bytes,
                        opcode,
                    };
                    if let Some(input) = node.lose_slice(endpoint, work) {
                        node.fences.handle(now, input);
                    }
                }
                if let Some(job) = node.jobs.get_mut(&transfer) {
                    job.give_up();
                }
            }
        }
    }

    pub(crate) fn watched(&mut self, host: usize, action: progress::Action) {
        let now = self.now;
        self.coverage.count("progress", variant(&action));
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        match action {
            // Queues are polled until they are empty at each step.
            progress::Action::PollUntilEmpty => {
                node.progress.handle(now, progress::Input::PolledEmpty);
            }
            progress::Action::Stalled {
                queue_pair,
                silent_for,
            } => {
                let mut ends = node.endpoints.iter();
                let found = ends
                    .find(|(_, of)| of.pair.as_ref().is_some_and(|pair| pair.id() == queue_pair));
                if let Some((endpoint, of)) = found
                    && of.state == State::Ready
                {
                    let (endpoint, rail, cause) = (*endpoint, of.rail, RailCause::NoProgress);
                    node.rails
                        .handle(now, rail::Input::EndpointLost { rail, cause });
                    node.retire(endpoint);
                    node.fences.handle(now, fence::Input::Close { endpoint });
                    self.say(host, format_args!("{rail}: silent for {silent_for:?}"));
                }
            }
        }
    }
}
