//! Names of what tests count.

/// A type whose variants have names.
pub(crate) trait Named {
    /// All of them.
    const NAMES: &'static [&'static str];

    fn name(&self) -> &'static str;
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

pub(crate) use words;
