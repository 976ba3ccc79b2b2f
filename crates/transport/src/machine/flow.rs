//! What the actions of one machine mean as inputs of the next: the arrows of the
//! [module's](super#the-way-of-one-event) picture, as functions.
//!
//! A driver that knows several machines calls these and adds what only it can do: verbs, messages
//! and the store. Deliberately not here: anything with state.

use super::ids::{LocalNic, PeerId, PeerNic};
use super::observer::{self, CloseCause};
use super::peers::NicChange;
use super::publisher::Edit;
use super::rail::{self, LocalGate};

/// What an observer's action means for the rails. `local` numbers the context's ports.
pub fn observed_to_rails(
    action: &observer::Action,
    local: impl Fn(u32) -> Option<LocalNic>,
) -> Option<rail::Input> {
    let (port, gate) = match action {
        observer::Action::CloseGate { port, cause } => {
            let dead = matches!(cause, CloseCause::ContextDead(_));
            (
                *port,
                if dead {
                    LocalGate::Dead
                } else {
                    LocalGate::Closed
                },
            )
        }
        observer::Action::HalfOpen {
            port,
            endpoints_kept,
        } => {
            let endpoints_kept = *endpoints_kept;
            (*port, LocalGate::Open { endpoints_kept })
        }
        _ => return None,
    };
    let local = local(port)?;
    Some(rail::Input::LocalGate { local, gate })
}

/// What an observer's action means for the own record.
pub fn observed_to_record(
    action: &observer::Action,
    local: impl Fn(u32) -> Option<LocalNic>,
) -> Option<Edit> {
    match action {
        observer::Action::Publish { port, facts, gids } => Some(Edit::Port {
            local: local(*port)?,
            facts: facts.clone(),
            gids: gids.clone(),
        }),
        _ => None,
    }
}

/// What changed NICs of a peer mean for the rails to it. `number` numbers their names. Rails to
/// NICs that are new must be declared before.
pub fn learnt_to_rails(
    peer: PeerId,
    nics: &[(String, NicChange)],
    number: impl Fn(&str) -> Option<u32>,
) -> Vec<rail::Input> {
    let mut inputs = Vec::new();
    for (name, change) in nics {
        let Some(nic) = number(name) else {
            continue;
        };
        let nic = PeerNic { peer, nic };
        match change {
            NicChange::Up => inputs.push(rail::Input::PeerNicGate { nic, up: true }),
            NicChange::Down => inputs.push(rail::Input::PeerNicGate { nic, up: false }),
            // Endpoints with the old address are cut, then the rail is proved with the new one.
            NicChange::Moved => inputs.extend([
                rail::Input::PeerNicGate { nic, up: false },
                rail::Input::PeerNicGate { nic, up: true },
            ]),
        }
    }
    inputs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::observer::DeathCause;

    #[test]
    fn a_dead_context_is_not_merely_closed_and_other_ports_are_others() {
        let death = DeathCause::Channel { errno: 5 };
        let close = |cause| observer::Action::CloseGate { port: 2, cause };
        let local = |port| (port == 2).then_some(LocalNic(7));
        let gate = |action: &observer::Action| match observed_to_rails(action, local) {
            Some(rail::Input::LocalGate { local, gate }) => Some((local.0, gate)),
            _ => None,
        };
        let dead = close(CloseCause::ContextDead(death));
        assert_eq!(gate(&dead), Some((7, LocalGate::Dead)));
        let closed = close(CloseCause::Outcome);
        assert_eq!(gate(&closed), Some((7, LocalGate::Closed)));
        assert_eq!(observed_to_rails(&closed, |_| None), None);
        let read = observer::Action::ReadPort(observer::ReadId { port: 2, number: 1 });
        assert_eq!(observed_to_rails(&read, local), None);
        assert_eq!(observed_to_record(&closed, local), None);
    }

    #[test]
    fn a_nic_with_another_address_is_cut_before_it_is_used_again() {
        let nics = [
            ("gone".to_owned(), NicChange::Down),
            ("moved".to_owned(), NicChange::Moved),
            ("unheard of".to_owned(), NicChange::Up),
        ];
        let number = |name: &str| match name {
            "gone" => Some(0),
            "moved" => Some(1),
            _ => None,
        };
        let peer = PeerId(3);
        let gate = |nic, up| {
            let nic = PeerNic { peer, nic };
            rail::Input::PeerNicGate { nic, up }
        };
        let inputs = learnt_to_rails(peer, &nics, number);
        assert_eq!(inputs, [gate(0, false), gate(1, false), gate(1, true)]);
    }
}
