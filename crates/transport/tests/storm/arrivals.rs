//! What arrives at a node, and how connections are made and let go.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::Rng as _;
use rerail_transport::machine::Machine;
use rerail_transport::machine::fence::{self};
use rerail_transport::machine::ids::{EndpointId, LocalNic, RailId};
use rerail_transport::machine::observer::{self};
use rerail_transport::machine::peers::{self};
use rerail_transport::machine::progress;
use rerail_transport::machine::publisher::{self, Acceptance, Edit};
use rerail_transport::machine::rail::{self, RailCause};

use super::ledger::Life;
use super::link::{self, DEPTH, End, Endpoint, Hello, Message, Passive, State};
use super::node::{REGION, name, subscriber};
use super::store::member;
use super::world::{Coming, WIRE, World};

impl World {
    pub(crate) fn happen(&mut self, host: usize, coming: Coming) {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        match coming {
            Coming::Observer(nic, input) => node.observers[nic as usize].handle(now, input),
            Coming::Reading {
                nic,
                epoch,
                read,
                result,
            } => {
                let input = observer::Input::PortRead {
                    epoch,
                    read,
                    result,
                };
                node.observers[nic as usize].handle(now, input);
            }
            Coming::Reopen { nic, epoch } => {
                let local = LocalNic(nic);
                let opened = node.reopen(local);
                let keys = node.nics[nic as usize]
                    .open
                    .as_ref()
                    .map(super::node::Open::keys);
                if let Some(keys) = keys {
                    let keys = BTreeMap::from([(REGION, keys)]);
                    let edit = Edit::Rekey { local, keys };
                    node.publisher.handle(now, publisher::Input::Edit(edit));
                }
                let done = node.done_at(now, &self.fabric, local);
                let input = if opened {
                    observer::Input::Reopened { epoch }
                } else {
                    observer::Input::ReopenFailed { epoch }
                };
                self.at(host, done, Coming::Observer(nic, input));
            }
            Coming::ContextClosed(local) => {
                node.fences
                    .handle(now, fence::Input::ContextClosed { local });
                let on_it = |(id, of): (&EndpointId, &Endpoint)| {
                    (of.rail.local == local && of.pair.is_none()).then_some(*id)
                };
                let gone: Vec<_> = node.endpoints.iter().filter_map(on_it).collect();
                for endpoint in gone {
                    node.endpoints.remove(&endpoint);
                }
            }
            Coming::Ready(endpoint) => {
                let Some(of) = node.endpoints.get_mut(&endpoint) else {
                    return;
                };
                if of.state == State::Connecting
                    && let Some(pair) = &of.pair
                {
                    of.state = State::Ready;
                    let opened = progress::Input::Opened {
                        queue_pair: pair.id(),
                        depth: DEPTH as u32,
                    };
                    node.progress.handle(now, opened);
                    node.rails
                        .handle(now, rail::Input::Connected { rail: of.rail });
                }
            }
            Coming::JoinFailed(endpoint, reason) => self.connect_failed(host, endpoint, reason),
            Coming::InError(endpoint) => {
                if let Some(of) = node.endpoints.get_mut(&endpoint) {
                    of.in_error = true;
                    node.fences.handle(now, fence::Input::InError { endpoint });
                    self.check_drained(host, endpoint);
                }
            }
            Coming::Destroyed(endpoint) => {
                for input in node.lose_all(endpoint) {
                    node.fences.handle(now, input);
                }
                node.endpoints.remove(&endpoint);
                node.fences
                    .handle(now, fence::Input::Destroyed { endpoint });
            }
            Coming::StoreRequest(ticket, request) => self.ask_store(host, ticket, request),
            Coming::Fetch(ticket, of) => {
                let result = self.store.fetch(&of);
                node.peers
                    .handle(now, peers::Input::Fetched { ticket, result });
            }
            Coming::Publisher(input) => node.publisher.handle(now, input),
            Coming::Peers(input) => node.peers.handle(now, input),
            Coming::Leaves(to, message) => {
                let own = node.life;
                self.leaves(own, to, message);
            }
            Coming::Message(from, message) => self.heard(host, from, message),
        }
    }

    pub(crate) fn heard(&mut self, host: usize, from: Life, message: Message) {
        let now = self.now;
        let alive = self.living(from).is_some();
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let own = node.life;
        match message {
            // A request goes with the connection that it came over, and that with its process.
            Message::Connect(_) if !alive => {}
            Message::Connect(hello) => {
                let endpoint = hello.endpoint;
                let answer = match self.accept(host, from, hello) {
                    Ok(end) => Message::Accept { endpoint, end },
                    Err(reason) => Message::Refuse { endpoint, reason },
                };
                let local = match &answer {
                    Message::Accept { .. } => self.living(own).and_then(|node| {
                        node.passives
                            .get(&(from, endpoint))
                            .map(|passive| passive.local)
                    }),
                    _ => None,
                };
                let after = local.map_or(WIRE, |local| self.takes(host, local));
                self.send(own, from.0, after, answer);
            }
            Message::Accept { endpoint, end } => self.accepted(host, endpoint, end),
            Message::Refuse { endpoint, reason } => self.connect_failed(host, endpoint, reason),
            Message::Close { endpoint } => {
                node.closed.insert((from, endpoint));
                let mut after = WIRE;
                if let Some(passive) = node.passives.remove(&(from, endpoint)) {
                    let in_error = passive.pair.to_error().is_ok();
                    drop(passive.pair);
                    after = self.takes(host, passive.local);
                    // A device that is dead says nothing about its queue pairs.
                    if !in_error {
                        return;
                    }
                }
                self.send(own, from.0, after, Message::Closed { endpoint });
            }
            Message::Closed { endpoint } => {
                node.fences
                    .handle(now, fence::Input::PeerConfirmed { endpoint });
            }
            Message::Gone { endpoint } => {
                if let Some(of) = node.endpoints.get(&endpoint)
                    && of.state == State::Ready
                {
                    let (rail, cause) = (of.rail, RailCause::PeerClosed);
                    node.retire(endpoint);
                    node.fences.handle(now, fence::Input::Close { endpoint });
                    node.rails
                        .handle(now, rail::Input::EndpointLost { rail, cause });
                }
            }
            Message::ToPublisher(input) => node.publisher.handle(now, input),
            Message::ToPeers(input) => node.peers.handle(now, input),
        }
    }

    /// How long the verbs just called on a NIC take.
    pub(crate) fn takes(&mut self, host: usize, local: LocalNic) -> Duration {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return WIRE;
        };
        node.done_at(now, &self.fabric, local).saturating_since(now)
    }

    /// The passive side of a handshake.
    pub(crate) fn accept(&mut self, host: usize, from: Life, hello: Hello) -> Result<End, String> {
        let node = self.hosts[host].node.as_mut().ok_or("nobody is there")?;
        if hello.believed != node.publisher.instance() {
            return Err("another instance has the name".to_owned());
        }
        if node.closed.contains(&(from, hello.endpoint)) {
            return Err("closed already".to_owned());
        }
        let local = LocalNic(hello.nic);
        match node.publisher.accepts(local, Some(hello.subscriber)) {
            Acceptance::Yes => {}
            other => return Err(format!("refused: {other:?}")),
        }
        let observer = &node.observers[hello.nic as usize];
        let facts = observer
            .facts(1)
            .filter(|_| observer.gate_open(1))
            .ok_or("gate closed")?;
        let (gid, mtu) = facts.gid.as_ref().zip(facts.mtu).ok_or("no address")?;
        let open = node.nics[hello.nic as usize]
            .open
            .as_ref()
            .ok_or("no context")?;
        let pair = link::create(open).map_err(|error| error.to_string())?;
        let psn = self.rng.random_range(0..1 << 24);
        let end = End {
            qp_num: pair.qp_num(),
            gid: gid.gid,
            psn,
            mtu,
        };
        link::join(&pair, gid.index, psn, mtu, hello.end).map_err(|error| error.to_string())?;
        // The close of what the peer had before may have been lost.
        let far = hello.own;
        let before = node.passives.iter();
        let before: Vec<_> = before
            .filter(|((of, _), end)| *of == from && end.local == local && end.far == far)
            .map(|(key, _)| *key)
            .collect();
        let passive = Passive { local, far, pair };
        let twice = node.passives.insert((from, hello.endpoint), passive);
        assert!(twice.is_none(), "an endpoint connects once");
        for key in before {
            self.drop_passive(host, key);
        }
        let endpoint = hello.endpoint;
        self.say(host, format_args!("accepts {endpoint} of {from:?}"));
        Ok(end)
    }

    pub(crate) fn accepted(&mut self, host: usize, endpoint: EndpointId, far: End) {
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let Some(of) = node.endpoints.get(&endpoint) else {
            return;
        };
        let (State::Connecting, Some(pair)) = (of.state, &of.pair) else {
            return;
        };
        let local = of.rail.local;
        let facts = node.observers[local.0 as usize].facts(1);
        let row = facts
            .and_then(|facts| facts.gid.as_ref())
            .filter(|row| row.gid == of.gid);
        let joined = match row {
            Some(row) => {
                link::join(pair, row.index, of.psn, of.mtu, far).map_err(|error| error.to_string())
            }
            None => Err("the own address has changed".to_owned()),
        };
        let after = self.takes(host, local);
        let coming = match joined {
            Ok(()) => Coming::Ready(endpoint),
            Err(reason) => Coming::JoinFailed(endpoint, reason),
        };
        self.later(host, after, coming);
    }

    pub(crate) fn connect(&mut self, host: usize, rail: RailId) {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let failed = |reason: &str| rail::Input::ConnectFailed {
            rail,
            reason: reason.to_owned(),
            fault: rail::ConnectFault::Other,
        };
        let Some(to) = node.of_peer.get(&rail.peer.peer).copied() else {
            node.rails.handle(now, failed("the peer is not known"));
            return;
        };
        let believed = node
            .peers
            .descriptor(&name(to.0))
            .and_then(|known| member(known));
        let believed = believed.map(|member| member.instance);
        let observer = &node.observers[rail.local.0 as usize];
        let facts = observer.facts(1).filter(|_| observer.gate_open(1));
        let ends = facts.and_then(|facts| facts.gid.as_ref().map(|row| row.gid).zip(facts.mtu));
        let open = node.nics[rail.local.0 as usize].open.as_ref();
        let (Some(believed), Some((gid, mtu)), Some(open)) = (believed, ends, open) else {
            node.rails.handle(now, failed("no usable port"));
            return;
        };
        let pair = match link::create(open) {
            Ok(pair) => pair,
            Err(error) => {
                node.rails.handle(now, failed(&error.to_string()));
                return;
            }
        };
        let psn = self.rng.random_range(0..1 << 24);
        let endpoint = EndpointId {
            index: node.number() as u32,
            generation: 0,
        };
        let hello = Hello {
            endpoint,
            nic: rail.peer.nic,
            own: rail.local,
            believed,
            subscriber: subscriber(node.life),
            end: End {
                qp_num: pair.qp_num(),
                gid,
                psn,
                mtu,
            },
        };
        let made = fence::Input::Made {
            endpoint,
            local: rail.local,
            peer: rail.peer.peer,
        };
        node.fences.handle(now, made);
        node.endpoints.insert(
            endpoint,
            Endpoint {
                rail,
                to,
                pair: Some(pair),
                state: State::Connecting,
                gid,
                psn,
                mtu,
                outstanding: BTreeMap::new(),
                in_error: false,
                destroying: false,
            },
        );
        let before = node.by_rail.insert(rail, endpoint);
        assert!(before.is_none(), "one endpoint a rail");
        let own = node.life;
        let after = self.takes(host, rail.local);
        self.send(own, to.0, after, Message::Connect(hello));
    }

    pub(crate) fn connect_failed(&mut self, host: usize, endpoint: EndpointId, reason: String) {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let Some(of) = node.endpoints.get(&endpoint) else {
            return;
        };
        if of.state != State::Connecting {
            return;
        }
        let rail = of.rail;
        node.rails.handle(
            now,
            rail::Input::ConnectFailed {
                rail,
                reason,
                fault: rail::ConnectFault::Other,
            },
        );
        node.retire(endpoint);
        node.fences.handle(now, fence::Input::Close { endpoint });
    }

    /// Both kinds of ends on a NIC go.
    pub(crate) fn cut(&mut self, host: usize, local: LocalNic) {
        let now = self.now;
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let on_it = |(id, of): (&EndpointId, &Endpoint)| (of.rail.local == local).then_some(*id);
        let ends: Vec<_> = node.endpoints.iter().filter_map(on_it).collect();
        for endpoint in ends {
            node.retire(endpoint);
            node.fences.handle(now, fence::Input::Close { endpoint });
        }
        let passives = node.passives.iter();
        let keys: Vec<_> = passives
            .filter(|(_, passive)| passive.local == local)
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            self.drop_passive(host, key);
        }
    }

    pub(crate) fn drop_passive(&mut self, host: usize, key: (Life, EndpointId)) {
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let own = node.life;
        if let Some(passive) = node.passives.remove(&key) {
            // On a device that is dead there is nothing to bring to ERR.
            let _ = passive.pair.to_error();
            drop(passive.pair);
            node.closed.insert(key);
            let after = self.takes(host, passive.local);
            let endpoint = key.1;
            self.send(own, key.0.0, after, Message::Gone { endpoint });
        }
    }

    /// Lets go of a context and of all that was made of it.
    pub(crate) fn release(&mut self, host: usize, local: LocalNic) {
        let now = self.now;
        self.cut(host, local);
        let Some(node) = self.hosts[host].node.as_mut() else {
            return;
        };
        let on_it = |(id, of): (&EndpointId, &Endpoint)| (of.rail.local == local).then_some(*id);
        let ends: Vec<_> = node.endpoints.iter().filter_map(on_it).collect();
        for endpoint in ends {
            for input in node.lose_all(endpoint) {
                node.fences.handle(now, input);
            }
            if let Some(of) = node.endpoints.get_mut(&endpoint) {
                of.state = State::Closing;
                of.destroying = true;
                node.by_rail.retain(|_, id| *id != endpoint);
                if let Some(pair) = of.pair.take() {
                    let closed = progress::Input::Closed {
                        queue_pair: pair.id(),
                    };
                    node.progress.handle(now, closed);
                }
            }
        }
        node.nics[local.0 as usize].open = None;
        let after = self.takes(host, local);
        self.later(host, after, Coming::ContextClosed(local));
    }
}
