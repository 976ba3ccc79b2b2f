//! What may follow what in an observer.

use super::ContextState;
use super::port::Phase;
use crate::machine::seen::{Follows, List, follows, names};

names!(ContextState: Alive, Waiting, Opening);
follows!("context": ContextState => ContextState {
    Alive > Waiting;
    Waiting > Opening;
    Opening > Alive | Waiting;
});

names!(Phase: Idle, Reading, Retry, Dead);
follows!("port": Phase => Phase {
    Idle > Reading | Dead;
    Reading > Idle | Retry | Dead;
    Retry > Reading | Dead;
    Dead > Reading;
});

pub(crate) const LISTS: [List; 2] = [
    <ContextState as Follows<ContextState>>::LIST,
    <Phase as Follows<Phase>>::LIST,
];
