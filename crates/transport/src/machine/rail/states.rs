//! What may follow what in a rail.

use super::RailState;
use super::health::Proof;
use crate::machine::seen::{Follows, List, follows, names};

names!(RailState: Up, Suspect, Down, HalfOpen);
follows!("rail": RailState => RailState {
    Up > Suspect | Down | HalfOpen;
    Suspect > Up | Down | HalfOpen;
    Down > HalfOpen;
    HalfOpen > Up | Down;
});

names!(Proof: None, Waiting, Connecting, Probing);
follows!("proof": Proof => Proof {
    None > Waiting;
    Waiting > None | Connecting | Probing;
    Connecting > None;
    Probing > None;
});

pub(crate) const LISTS: [List; 2] = [
    <RailState as Follows<RailState>>::LIST,
    <Proof as Follows<Proof>>::LIST,
];
