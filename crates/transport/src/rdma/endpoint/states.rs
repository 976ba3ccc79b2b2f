//! What may follow what in an endpoint.

use super::State;
use crate::machine::seen::{Follows, List, follows, names};

names!(State: New, Preparing, Offered, Raising, Acknowledging, AwaitingReadyAck, Connected,
    Failing, Closed);
follows!("endpoint": State => State {
    New > Preparing | Closed;
    Preparing > Offered | Raising | Closed;
    Offered > Raising | Failing;
    Raising > Acknowledging | AwaitingReadyAck | Connected | Failing;
    Acknowledging > Connected | Failing;
    AwaitingReadyAck > Acknowledging | Connected | Failing;
    Connected > Failing;
    Failing > Closed;
    Closed > ;
});

pub(in crate::rdma) const LISTS: [List; 1] = [<State as Follows<State>>::LIST];
