//! What arrives at a node.

use std::collections::BTreeMap;

use super::checks::Table;
use super::ledger::Life;
use super::link::{Message, Outgoing, lock};
use super::node::REGION;
use super::world::{Coming, World};
use crate::machine::Machine;
use crate::machine::ids::LocalNic;
use crate::machine::observer;
use crate::machine::peers::{self, Fetched};
use crate::machine::publisher::Edit;
use crate::rdma::SignalError;
use crate::rdma::watch;

impl World {
    pub(super) fn happen(&mut self, host: usize, coming: Coming) {
        let now = self.now;
        let Some(node) = self.node(host) else {
            return;
        };
        match coming {
            Coming::Observer(nic, input) => node.ports[nic as usize].observer.handle(now, input),
            Coming::Reading {
                nic,
                epoch,
                read,
                at,
                result,
            } => {
                let rows = result.as_ref().ok().and_then(watch::rows_of);
                let input = observer::Input::PortRead {
                    epoch,
                    read,
                    result,
                };
                node.ports[nic as usize].observer.handle(now, input);
                self.drive_observer(host, nic as usize);
                let Some(node) = self.node(host) else {
                    return;
                };
                if let Some(rows) = rows {
                    node.connector.table_read(LocalNic(nic), &rows);
                    node.ports[nic as usize].told_table = Some(Table { at, rows });
                }
            }
            Coming::Reopen { nic, epoch } => self.reopen(host, LocalNic(nic), epoch),
            Coming::StoreRequest(errand) => {
                let own = node.life;
                self.ask_store(own, errand);
            }
            Coming::Fetch(ticket, of, asked) => {
                let result = if node.has_no_store {
                    Fetched::Unavailable
                } else {
                    self.store.fetch(&of)
                };
                let fetched = Coming::Peers(peers::Input::Fetched { ticket, result });
                self.answered(host, asked, fetched);
            }
            Coming::Answered(asked, coming) => {
                self.note_late(asked, &coming);
                self.happen(host, *coming);
            }
            Coming::Publisher(input) => lock(&node.publisher).handle(now, input),
            Coming::Peers(input) => node.peers.handle(now, input),
            Coming::Leaves(to, message) => {
                let own = node.life;
                self.leaves(own, to, message);
            }
            Coming::Message(from, message) => self.heard(host, from, message),
            Coming::AskedLongEnough(transfer) => self.asked_long_enough(host, transfer),
        }
    }

    /// A device is opened again in the pool, which waits for it.
    fn reopen(&mut self, host: usize, local: LocalNic, epoch: u32) {
        let now = self.now;
        let Some(node) = self.node(host) else {
            return;
        };
        let opened = node.reopen(now, local);
        let input = if opened {
            let keys = BTreeMap::from([(REGION, node.keys(local))]);
            let port = &mut node.ports[local.0 as usize];
            port.opening = port.nic.opening();
            self.edit(host, Edit::Rekey { local, keys });
            observer::Input::Reopened { epoch }
        } else {
            observer::Input::ReopenFailed { epoch }
        };
        let after = self.takes(host, local);
        self.later(host, after, Coming::Observer(local.0, input));
    }

    fn heard(&mut self, host: usize, from: Life, message: Message) {
        let now = self.now;
        let (is_alive, is_old) = (self.living(from).is_some(), self.is_ghost(from));
        let Some(node) = self.node(host) else {
            return;
        };
        match message {
            // A request goes with the connection that it came over, and that with its process.
            Message::Ask(..) if !is_alive => {}
            Message::Ask(id, offer) => {
                let (connector, outbox) = (node.connector.clone(), node.outbox.clone());
                node.turns.spawn(async move {
                    let answer = connector.accept(*offer).await;
                    let answer = answer.map_err(SignalError::Refused);
                    outbox.put(Outgoing::Reply(from.0, id, answer));
                });
            }
            Message::Reply(id, answer) => {
                let own = node.life;
                let here = self.exchanges.get(&id).is_some_and(|of| of.from == own);
                if here && let Some(exchange) = self.exchanges.remove(&id) {
                    // Whoever asked may not wait any more.
                    let _ = exchange.answer.send(*answer);
                }
            }
            Message::ToPublisher(input) => lock(&node.publisher).handle(now, input),
            // It goes over a connection, which was closed if another has the name.
            Message::ToPeers(_) if is_old && node.subscribed.get(&from.0) != Some(&from) => {}
            Message::ToPeers(input) => node.peers.handle(now, input),
        }
    }
}
