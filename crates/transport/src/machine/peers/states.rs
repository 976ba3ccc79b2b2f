//! What may follow what in the view of a peer.

use super::entry::{Fetch, Judgement, Subscription};
use crate::machine::seen::{Follows, List, Named, follows, names};

names!(Fetch: Idle, At, Out);
follows!("fetch": Fetch => Fetch {
    Idle > At | Out;
    At > Out;
    Out > Idle;
});

names!(Subscription: None, Asked, Up, Retry);
follows!("subscription": Subscription => Subscription {
    None > Asked;
    Asked > None | Up | Retry;
    Up > None | Retry;
    Retry > None;
});

names!(Judgement: Old, Retired, Newer, Other, Earlier, Doubtful);

/// What a record may be found to be.
pub(crate) const JUDGEMENTS: &[&str] = Judgement::NAMES;

pub(crate) const LISTS: [List; 2] = [
    <Fetch as Follows<Fetch>>::LIST,
    <Subscription as Follows<Subscription>>::LIST,
];
