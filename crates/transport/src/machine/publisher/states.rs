//! What may follow what in a publisher.

use super::{Errand, Phase, Publisher, StoreAnswer, StoreFailure, Stored};
use crate::machine::seen::{Follows, List, follows, follows_on, names};

names!(Phase: Working, Leaving, Over);
follows!("publisher phase": Phase => Phase {
    Working > Leaving | Over;
    Leaving > Over;
    Over > ;
});

names!(Stored: Unknown, Absent, At);
follows!("stored": Stored => Stored {
    Unknown > Absent | At;
    Absent > Unknown | At;
    At > Unknown | Absent;
});

/// How a request to the store ends.
pub(crate) enum Ending {
    Written,
    Found,
    NotFound,
    Conflict,
    Failed,
    TimedOut,
}

impl From<&StoreAnswer> for Ending {
    fn from(answer: &StoreAnswer) -> Self {
        match answer {
            StoreAnswer::Written(_) => Self::Written,
            StoreAnswer::Found(_) => Self::Found,
            StoreAnswer::Failed(StoreFailure::NotFound) => Self::NotFound,
            StoreAnswer::Failed(StoreFailure::Conflict) => Self::Conflict,
            StoreAnswer::Failed(StoreFailure::Failed(_)) => Self::Failed,
        }
    }
}

/// The request that is out is given up.
pub(super) fn timed_out(publisher: &Publisher) {
    if let Some((_, errand, _)) = &publisher.errand {
        follows_on(errand, &Ending::TimedOut);
    }
}

names!(Errand: Read, Write, Delete, RpcMeta);
names!(Ending: Written, Found, NotFound, Conflict, Failed, TimedOut);
follows!("errand": Errand => Ending {
    Read > Found | NotFound | Failed | TimedOut;
    Write > Written | Conflict | Failed | TimedOut;
    Delete > Written | NotFound | Conflict | Failed | TimedOut;
    RpcMeta > Written | Failed | TimedOut;
});

pub(crate) const LISTS: [List; 3] = [
    <Phase as Follows<Phase>>::LIST,
    <Stored as Follows<Stored>>::LIST,
    <Errand as Follows<Ending>>::LIST,
];
