//! What tests have seen machines do: which state followed which, and how often.
//!
//! What may follow what is listed for each machine ([`follows!`]), and every test of this crate
//! holds it to the list: a change that is not there panics. A list has all states on its left, or
//! it does not compile. The storm counts the changes, and demands those that are listed
//! (`rdma::storm::coverage`).

use std::cell::RefCell;
use std::collections::BTreeMap;

/// A type whose variants have names.
pub(crate) trait Named {
    /// All of them.
    const NAMES: &'static [&'static str];

    fn name(&self) -> &'static str;
}

/// Names an enum's variants as they are written: all of them, or it does not compile.
macro_rules! names {
    ($type:ident: $($name:ident),+ $(,)?) => {
        impl $crate::machine::seen::Named for $type {
            const NAMES: &'static [&'static str] = &[$(stringify!($name)),+];

            fn name(&self) -> &'static str {
                match self {
                    $($type::$name { .. } => stringify!($name)),+
                }
            }
        }
    };
}

/// An enum of words.
macro_rules! words {
    ($(#[$about:meta])* $visible:vis enum $type:ident { $($name:ident = $word:literal),+ $(,)? }) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        $visible enum $type { $($name),+ }

        impl $crate::machine::seen::Named for $type {
            const NAMES: &'static [&'static str] = &[$($word),+];

            fn name(&self) -> &'static str {
                match self {
                    $($type::$name => $word),+
                }
            }
        }
    };
}

/// Lists what may follow each variant of an enum, as `follows!("door": State => State { Open >
/// Shut; Shut > Open; })`. That nothing changes needs no listing.
macro_rules! follows {
    ($about:literal: $from:ident => $to:ident { $($name:ident > $($next:ident)|*;)+ }) => {
        const _: fn(&$from) = |from| match from {
            $($from::$name { .. } => {}),+
        };
        $($(const _: fn(&$to) -> bool = |to| matches!(to, $to::$next { .. });)*)+

        impl $crate::machine::seen::Follows<$to> for $from {
            const LIST: $crate::machine::seen::List = $crate::machine::seen::List {
                about: $about,
                rows: &[$((stringify!($name), &[$(stringify!($next)),*])),+],
            };
        }
    };
}

pub(crate) use {follows, names, words};

/// What may follow what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    /// Of which machine.
    pub(crate) about: &'static str,
    pub(crate) rows: &'static [(&'static str, &'static [&'static str])],
}

impl List {
    fn has(&self, from: &str, to: &str) -> bool {
        let row = self.rows.iter().find(|row| row.0 == from);
        row.is_some_and(|row| row.1.contains(&to))
    }
}

/// A state, or whatever else is followed by something that is listed.
pub(crate) trait Follows<To: Named>: Named {
    const LIST: List;
}

/// What was seen: of which machine, what, and what followed it if something did.
pub(crate) type Seen = (&'static str, &'static str, Option<&'static str>);

thread_local! {
    static COUNTS: RefCell<BTreeMap<Seen, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn count(seen: Seen) {
    COUNTS.with_borrow_mut(|counts| *counts.entry(seen).or_default() += 1);
}

/// Something happened to a machine.
pub(crate) fn happened(about: &'static str, what: &impl Named) {
    count((about, what.name(), None));
}

/// A machine goes from one state to another, or something is followed by something else.
pub(crate) fn follows_on<From: Follows<To>, To: Named>(from: &From, to: &To) {
    let (list, from, to) = (From::LIST, from.name(), to.name());
    if from == to {
        return;
    }
    let about = list.about;
    assert!(list.has(from, to), "{about}: {from} > {to} is not listed");
    count((about, from, Some(to)));
}

/// What was seen on this thread since it was asked last.
pub(crate) fn take() -> BTreeMap<Seen, u64> {
    COUNTS.take()
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Door {
        Open { _wide: bool },
        Shut,
        Bricked(()),
    }

    names!(Door: Open, Shut, Bricked);
    follows!("door": Door => Door {
        Open > Shut;
        Shut > Open | Bricked;
        Bricked > ;
    });

    #[test]
    fn changes_that_are_listed_are_counted() {
        drop(take());
        let open = Door::Open { _wide: true };
        for _ in 0..3 {
            follows_on(&open, &Door::Shut);
            follows_on(&Door::Shut, &open);
            follows_on(&open, &Door::Open { _wide: false });
        }
        happened("door", &open);
        let seen = take();
        assert_eq!(seen[&("door", "Open", Some("Shut"))], 3);
        assert_eq!(seen[&("door", "Open", None)], 1);
        assert_eq!(seen.len(), 3, "{seen:?}");
    }

    #[test]
    #[should_panic(expected = "door: Bricked > Shut is not listed")]
    fn a_change_that_is_not_listed_panics() {
        follows_on(&Door::Bricked(()), &Door::Shut);
    }
}
